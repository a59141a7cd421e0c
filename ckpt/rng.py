"""Random number generators as state: each rank's own, bit for bit."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from ckpt.errors import BadInputError
from ckpt.tree import PerRank


class RngState:
    """The generators of this process: torch on CPU, the current CUDA device, Python and NumPy.

    Put one into the state under any name; it has no settings.
    """

    def state_dict(self) -> dict[str, Any]:
        kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
        state: dict[str, Any] = {
            "torch": torch.get_rng_state(),
            "python": random.getstate(),
            "numpy": {
                "kind": str(kind),
                "keys": torch.from_numpy(np.asarray(keys).astype(np.int64)),
                "position": int(position),
                "has_gauss": int(has_gauss),
                "gauss": float(gauss),
            },
        }
        if torch.cuda.is_available():
            state["cuda"] = torch.cuda.get_rng_state()
        return {"generators": PerRank(state)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        mine = state["generators"].value
        if mine is None:
            return  # another world size: this rank keeps the generators it has
        torch.set_rng_state(mine["torch"])
        random.setstate(mine["python"])
        n = mine["numpy"]
        keys = n["keys"].numpy().astype(np.uint32)
        np.random.set_state((n["kind"], keys, n["position"], n["has_gauss"], n["gauss"]))
        if torch.cuda.is_available():
            if "cuda" not in mine:
                raise BadInputError(
                    "rng: saved without CUDA; leave `rng` out of the state to restore here"
                )
            torch.cuda.set_rng_state(mine["cuda"])
