"""Scores of samples under the live, sharded model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.launch import Place
from trainer.movielens import Samples

_PART = 1024


def score(
    pipeline: Any,
    samples: Samples,
    collate: Any,
    place: Place,
    poll: Callable[[], None] = lambda: None,
) -> Tensor:
    """The logit of each sample, float32 (n,), equal on every rank.

    Collective: call on every rank, between epochs, when the pipeline is empty. Each rank scores
    every world_size-th sample. The model is left in training mode.

    Args:
        pipeline: a TorchRec train pipeline whose model returns (loss, (loss, logits, labels)).
        samples: what to score, the same on every rank.
        collate: makes the model's batch of some samples.
        place: this rank.
        poll: called after each batch, equally often on every rank.
    """
    count = len(samples)
    # All ranks run equally many, equally long batches: the last sample fills up.
    each = -(-count // place.world_size)
    mine = (torch.arange(each) * place.world_size + place.rank).clamp(max=count - 1)
    batches = iter([collate(samples.take(part)) for part in torch.split(mine, _PART)])
    model = pipeline._model
    model.eval()  # the pipeline then runs no backward pass and no optimizer
    logits: list[Tensor] = []
    with torch.no_grad():
        while (out := progress(pipeline, batches)) is not None:
            logits.append(out[1])
            poll()
    model.train()
    local = torch.cat(logits)
    parts = [torch.empty_like(local) for _ in range(place.world_size)]
    dist.all_gather(parts, local)
    return torch.stack(parts, dim=1).reshape(-1)[:count].cpu()


def progress(pipeline: Any, batches: Any) -> Any | None:
    """One step of the pipeline; None when `batches` and everything in flight are used up."""
    try:
        return pipeline.progress(batches)
    except StopIteration:
        return None
