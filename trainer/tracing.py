"""What each step of a life had to do with, as digests: for a proof that a resume is exact."""

from __future__ import annotations

import gc
import json
import random
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import CellType, FrameType
from typing import Any

import numpy as np
import torch
import xxhash
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

_DEPTH = 6
_REACH = 16  # optimizers in wrappers in wrappers


class StepTrace:
    """Writes a line for each batch and each step of this rank to `trace-r<rank>.jsonl`.

    Lines are {"position", "batch"} and {"step", "loss", "rates", "unsaved", "generators"}: digests, a loss as
    the text of its bits, learning rates by optimizer, optimizers that stepped and aren't in the state.
    """

    def __init__(self, folder: Path, rank: int, state: Mapping[str, Any]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / trace_name(rank)).open("w", encoding="utf-8")
        self._state = state
        self._stepped: dict[int, Optimizer] = {}
        self._known = 0
        self._unsaved: list[str] = []
        self._generators: dict[str, torch.Generator] | None = None
        self._hook = register_optimizer_step_pre_hook(self._steps)

    def batch(self, position: int, batch: Any) -> None:
        """A batch was handed out, and the reader is at `position` now."""
        self._write(position=position, batch=digest_of_value(batch))

    def step(self, step: int, loss: Any) -> None:
        """A step has ended."""
        if self._generators is None:
            self._generators = _generators_of_process()
        if len(self._stepped) != self._known:
            reached, self._known = _reached(self._state), len(self._stepped)
            names = {type(o).__name__ for o in self._stepped.values() if id(o) not in reached}
            self._unsaved = sorted(names)
        self._write(
            step=step,
            loss=None if loss is None else float(torch.as_tensor(loss).detach()).hex(),
            rates=[
                f"{type(o).__name__}: {[float(g.get('lr', 0.0)) for g in o.param_groups]}"
                for o in self._stepped.values()
            ],
            unsaved=self._unsaved,
            generators={
                "torch": _hex(torch.get_rng_state().numpy().tobytes()),
                "python": _hex(repr(random.getstate()).encode()),
                "numpy": digest_of_value(list(np.random.get_state(legacy=True))),
                **{
                    f"own {name}": _hex(g.get_state().numpy().tobytes())
                    for name, g in self._generators.items()
                },
            },
        )

    def close(self) -> None:
        self._hook.remove()
        self._file.close()

    def _steps(self, optimizer: Optimizer, *_: Any) -> None:
        self._stepped[id(optimizer)] = optimizer

    def _write(self, **line: Any) -> None:
        print(json.dumps(line), file=self._file, flush=True)


def trace_name(rank: int) -> str:
    return f"trace-r{rank:05d}.jsonl"


def digest_of_value(value: Any) -> str:
    """Of a batch or the like: tensors by bytes, jagged tensors by their parts, objects by attributes."""
    hasher = xxhash.xxh3_64()
    for part in _parts(value, _DEPTH):
        hasher.update(part)
    return hasher.hexdigest()


def _parts(value: Any, depth: int) -> Iterator[bytes]:
    yield type(value).__name__.encode()
    if isinstance(value, torch.Tensor):
        yield f"{value.dtype}{tuple(value.shape)}".encode()
        flat = value.detach().to("cpu", copy=True).contiguous().reshape(-1)
        yield flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    elif isinstance(value, np.ndarray):
        yield f"{value.dtype}{value.shape}".encode()
        yield value.tobytes()
    elif depth and isinstance(value, Mapping):
        for k, v in value.items():
            yield repr(k).encode()
            yield from _parts(v, depth - 1)
    elif depth and isinstance(value, list | tuple):
        for v in value:
            yield from _parts(v, depth - 1)
    elif depth and all(callable(getattr(value, n, None)) for n in ("keys", "values", "lengths")):
        yield from _parts([list(value.keys()), value.values(), value.lengths()], depth - 1)
        if callable(weights := getattr(value, "weights_or_none", None)):
            yield from _parts(weights(), depth - 1)
    elif isinstance(value, set | frozenset):  # in another order in each process
        yield repr(sorted(map(repr, value))).encode()
    elif depth and (held := _held_by(value)) is not None:
        yield from _parts(held, depth - 1)
    elif "__repr__" in _named_in(type(value)):  # object's says where the object is
        yield repr(value).encode()


def _named_in(kind: type) -> set[str]:
    """What a class and those that it is derived from define, object aside."""
    return {name for base in kind.__mro__[:-1] for name in vars(base)}


def _held_by(value: Any) -> dict[str, Any] | None:
    """The attributes of an object of a class of its own, those in slots too."""
    slots = [n for kind in type(value).__mro__ for n in getattr(kind, "__slots__", ())]
    if not slots and not hasattr(value, "__dict__"):
        return None
    there = {
        n: getattr(value, n)
        for n in slots
        if n not in ("__dict__", "__weakref__") and hasattr(value, n)
    }
    return {**getattr(value, "__dict__", {}), **there}


def _reached(state: Mapping[str, Any]) -> set[int]:
    """What the state has or holds: an optimizer may be inside of a wrapper."""
    seen: set[int] = set()
    todo: list[tuple[Any, int]] = [(state, 0)]
    while todo:
        value, depth = todo.pop()
        if id(value) in seen or depth > _REACH or isinstance(value, torch.Tensor | torch.nn.Module):
            continue
        seen.add(id(value))
        if isinstance(value, Mapping):
            todo += [(v, depth + 1) for v in value.values()]
        elif isinstance(value, list | tuple):
            todo += [(v, depth + 1) for v in value]
        elif hasattr(value, "__dict__") and not isinstance(value, type):
            todo += [(v, depth + 1) for v in vars(value).values()]
    return seen


def _generators_of_process() -> dict[str, torch.Generator]:
    """torch.Generators that attributes, variables and closures of this process hold, by these names."""
    gc.collect()  # of what an earlier life has left
    found: dict[str, torch.Generator] = {}
    places = [_attributes(o) for o in gc.get_objects()]
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        places.append(frame.f_locals)
        frame = frame.f_back
    for place in places:
        for name, value in list(place.items()) if place else ():
            if isinstance(value, torch.Generator) and not any(
                value is g for g in (torch.default_generator, *found.values())
            ):
                found[_free(str(name), found)] = value
    return found


def _attributes(thing: Any) -> Mapping[Any, Any]:
    """No property and no proxy is asked."""
    if type(thing) is dict:
        return thing
    try:
        if type(thing) is CellType:
            return {"of a closure": thing.cell_contents}
        own = object.__getattribute__(thing, "__dict__")
    except (AttributeError, TypeError, ValueError):  # it has none, or the cell is empty
        return {}
    return own if isinstance(own, Mapping) else {}


def _free(name: str, taken: Mapping[str, Any]) -> str:
    return name if name not in taken else _free(f"{name}'", taken)


def _hex(data: bytes) -> str:
    return xxhash.xxh3_64(data).hexdigest()
