"""Compiling on a synthetic batch before training, without leaving a trace in it.

The model runs forward and backward once on a batch of the real shape, with blank tensors in place of
what its embedding collections look up: no table is read, no kernel's counter moves, no collective runs.
So a model can be warmed up before it is sharded and before the first real batch is read.

Call it while nothing else draws random numbers: compiling sets the generators back to where they were.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from ckpt.errors import BadInputError
from trainer.description.embeddings import Embeddings, embeddings_of


def warm_up(module: nn.Module, example: Sequence[Any]) -> None:
    """One forward and backward pass over `example`, the module's arguments. Not collective.

    Gradients go nowhere, so optimizers and hooks on gradients see nothing. Buffers, training flags and
    generators are as before when it returns or raises. State that modules keep in plain attributes
    isn't restored.

    Args:
        module: the model, not sharded yet (its tables may be on meta). It returns tensors, of which
            at least one needs gradients.
        example: a batch of the real kinds: same dtypes, two rows or more.

    Raises BadInputError if nothing in the output needs gradients.
    """
    with _untouched(module), _blank_lookups(module) as looked_up:
        for each in module.modules():
            each.training = True
        with torch.enable_grad():
            out = module(*example)
            loss = _scalar(out)
            weights = [p for p in module.parameters() if p.requires_grad and not p.is_meta]
            torch.autograd.grad(loss, [*weights, *looked_up], allow_unused=True)


def _scalar(out: Any) -> Tensor:
    sums = [
        t.float().sum()
        for t in pytree.tree_leaves(out)
        if isinstance(t, Tensor) and t.requires_grad
    ]
    if not sums:
        raise BadInputError("the model's output needs no gradients, so there is nothing to warm up")
    return torch.stack(sums).sum()


@contextmanager
def _untouched(module: nn.Module) -> Iterator[None]:
    """What a training step may change, as it was."""
    training = {m: m.training for m in module.modules()}
    buffers = [(b, b.detach().clone()) for b in module.buffers() if not b.is_meta]
    generators = torch.get_rng_state(), random.getstate(), np.random.get_state()
    devices: Any = torch.cuda
    cuda = devices.get_rng_state_all() if devices.is_initialized() else []
    try:
        yield
    finally:
        for each, was in training.items():
            each.training = was
        with torch.no_grad():
            for buffer, was_value in buffers:
                if not torch.equal(buffer, was_value):
                    buffer.copy_(was_value)
        torch.set_rng_state(generators[0])
        random.setstate(generators[1])
        np.random.set_state(generators[2])
        if cuda:
            devices.set_rng_state_all(cuda)


@contextmanager
def _blank_lookups(module: nn.Module) -> Iterator[list[Tensor]]:
    """Collections answer with blank tensors, which are listed as they are made."""
    made: list[Tensor] = []
    replaced: list[nn.Module] = []
    try:
        for path, sub in list(module.named_modules()):
            if any(sub in set(r.modules()) for r in replaced):
                continue
            embeddings = embeddings_of(path, sub)
            if embeddings is not None:
                replaced.append(sub)
                sub.__dict__["forward"] = _Blank(embeddings, _device_of(module), made)
        yield made
    finally:
        for sub in replaced:
            del sub.__dict__["forward"]


class _Blank:
    """Answers as a collection does, with constants in place of rows."""

    def __init__(self, embeddings: Embeddings, device: torch.device, made: list[Tensor]) -> None:
        self._embeddings = embeddings
        self._device = device
        self._made = made

    def __call__(self, features: KeyedJaggedTensor, *args: Any, **kwargs: Any) -> Any:
        outputs = self._embeddings.outputs()
        if self._embeddings.pooled:
            widths = [config.embedding_dim for _, config in outputs.values()]
            values = self._blank(features.stride(), sum(widths))
            out: Any = KeyedTensor(keys=list(outputs), length_per_key=widths, values=values)
        else:
            out = {}
            for name, (feature, config) in outputs.items():
                ids = features[feature]
                rows = self._blank(len(ids.values()), config.embedding_dim)
                out[name] = JaggedTensor(values=rows, lengths=ids.lengths())
        return (out, None) if self._embeddings.collisions is not None else out

    def _blank(self, rows: int, width: int) -> Tensor:
        blank = torch.full((rows, width), 0.01, device=self._device)
        self._made.append(blank.requires_grad_())
        # As a real lookup's answer: the result of an operation, not a leaf.
        return blank.clone()


def _device_of(module: nn.Module) -> torch.device:
    tensors = (t for t in module.parameters() if not t.is_meta)
    return next((t.device for t in tensors), torch.device("cpu"))
