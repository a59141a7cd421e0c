"""What a run leaves behind so that others can check its checkpoints: state and predictions."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from ckpt.tree import flatten
from trainer.movielens import SINGLE_FEATURES, Samples


def write_state(state: Mapping[str, Any], rank: int, folder: Path) -> Path:
    """Write this rank's tensors to `state-r<rank>.safetensors`, one entry for each shard.

    Metadata holds, under each entry's name, JSON of `key` (its checkpoint key), `kind`, `shape` (of
    the whole tensor) and `offsets` (of this shard in it).
    """
    tensors: dict[str, Tensor] = {}
    metadata: dict[str, str] = {}
    for fqn, leaf in flatten(state, rank).leaves.items():
        for n, shard in enumerate(leaf.shards):
            name = f"{fqn}#{n}"
            # A copy: shards of one table share memory, which safetensors refuses.
            tensors[name] = shard.tensor.detach().cpu().clone().contiguous()
            metadata[name] = json.dumps(
                {
                    "key": fqn,
                    "kind": leaf.kind,
                    "shape": list(leaf.shape),
                    "offsets": list(shard.offsets),
                }
            )
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"state-r{rank:05d}.safetensors"
    safetensors.torch.save_file(tensors, path, metadata)
    return path


def write_predictions(samples: Samples, logits: Tensor, folder: Path) -> Path:
    """Write `predictions.safetensors`: a request in the layout of `ckpt.schema`, and `probability`."""
    ones = torch.ones(len(samples), dtype=torch.int64)
    tensors = {"dense": samples.dense, "probability": torch.sigmoid(logits)}
    for column, feature in enumerate(SINGLE_FEATURES):
        tensors[f"{feature}.values"] = samples.ids[:, column].contiguous()
        tensors[f"{feature}.lengths"] = ones.clone()
    tensors["genres.values"], tensors["genres.lengths"] = samples.genres, samples.genre_lengths
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "predictions.safetensors"
    safetensors.torch.save_file(tensors, path)
    return path
