"""Which tensors of a checkpoint are exported, and the tree that they stand in."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from typing import Any

from ckpt.errors import NotFoundError
from ckpt.nesting import numbered_optimizers, pruned, state_tree
from ckpt.restore import CheckpointReader


def select(reader: CheckpointReader, patterns: Sequence[str]) -> list[str]:
    """Keys that match any of the shell-style patterns, in order; all of them if there are none."""
    keys = sorted(reader.tensors)
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(k, pattern) for k in keys):
            raise NotFoundError(
                f"{pattern}: no key of step {reader.record.step} matches; see `ckpt show`"
            )
    if not patterns:
        return keys
    return [k for k in keys if any(fnmatch.fnmatchcase(k, p) for p in patterns)]


def selected_tree(reader: CheckpointReader, keys: Sequence[str]) -> dict[Any, Any]:
    """All values, and TensorRefs for the tensors `keys`; per-rank parts as dicts by rank.

    Plain optimizers are as torch's own state dicts are, so that `load_state_dict` takes them anywhere.
    """
    per_rank = [reader.per_rank_values(rank) for rank in range(reader.record.world_size)]
    tree = state_tree(reader.values(), per_rank, reader.tensors)
    return dict(numbered_optimizers(pruned(tree, set(keys))))
