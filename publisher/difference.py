"""How far outputs are from those that they should be."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from ckpt.errors import CorruptError

Tensors = Mapping[str, torch.Tensor]


def max_abs_err(outputs: Tensors, reference: Tensors) -> float:
    """Largest absolute error of outputs against a reference, by name; NaN if any of them is NaN.

    Raises CorruptError if an output has another name, dtype or shape than the reference.
    """
    if outputs.keys() != reference.keys():
        raise CorruptError(f"outputs are {sorted(outputs)}, the reference has {sorted(reference)}")
    worst = 0.0
    for name, got in outputs.items():
        want = reference[name]
        if got.shape != want.shape or got.dtype != want.dtype:
            raise CorruptError(
                f"output {name} is {got.dtype} {tuple(got.shape)}, the reference {want.dtype} "
                f"{tuple(want.shape)}"
            )
        if got.numel():
            # torch's max is NaN if any number is; Python's depends on their order.
            err = float((got.double() - want.double()).abs().max())
            if math.isnan(err):
                return err
            worst = max(worst, err)
    return worst
