"""What is to be described: the served module, its golden request and its place in the checkpoint."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from ckpt.idmaps import IdMap


@dataclass(frozen=True)
class ServedModel:
    """What to describe.

    name: what the served model is called.
    module: its forward takes tensors over the batch and KeyedJaggedTensors, also inside dicts, lists,
        tuples and dataclasses that torch's pytree can open, and returns tensors over the batch. It
        may share its parts with the trained model.
    args: the golden request: two rows or more, and no two features with equal ids.
    prefix: what stands before the module's own names in checkpoint keys.
    checkpoint_keys: the tensors that a checkpoint holds.
    kwargs: the rest of the golden request, by name.
    id_maps: request feature -> how the training pipeline makes the ids in `args` of raw ids. Features
        that it lacks have raw ids that are rows.
    raw: for the features whose map isn't the identity, the raw ids of the golden request: int64, as
        many as the feature has.
    """

    name: str
    module: nn.Module
    args: tuple[Any, ...]
    prefix: str
    checkpoint_keys: Collection[str]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    id_maps: Mapping[str, IdMap] = field(default_factory=dict)
    raw: Mapping[str, Tensor] = field(default_factory=dict)
