"""One walk through a trainer's state at a save: its tensors under their keys, and its values as text.

What `flatten`, a search for tables and `encode_value` would find in three. Containers of nothing but plain
values are looked at and written by C code; names are kept from one save to the next, values and tensors
never. What the quick way doesn't know is left to `flatten` and `encode_value`, which store it or say why not.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from json.encoder import encode_basestring
from typing import Any, NamedTuple

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor

from ckpt.canonical import Canonical
from ckpt.canonical.kernels import KERNELS, Kernels
from ckpt.errors import BadInputError
from ckpt.manifest import canonical
from ckpt.tree import PerRank, check_names, flatten, has_state_dict
from ckpt.types import Clock, EventSink
from ckpt.values import (
    MAPPINGS,
    MAX_DEPTH,
    PLAIN,
    SCALARS,
    Instance,
    NotPlainError,
    encode_value,
    instance_of,
    list_text,
    mapping_type,
    pairs_text,
)

Show = Callable[[Any, str], None]
"""show(object, path): told of each object of the state that saves itself, before it does."""

LARGE_CHARS = 1 << 20
"""Values whose text is that long are told of: at each save they are written anew."""

_TENSORS = frozenset((torch.Tensor, torch.nn.Parameter))
_KEYS = frozenset((str, int))
_END = "]}"  # of the text of a dict
_MAY_BE_LARGE = frozenset((str, bytes))


@dataclass(slots=True)
class Parts:
    """A state taken apart, in the order of the walk.

    names, tensors: the key and the object of each tensor; owned: is it a rank's own?
    values, per_rank: the canonical JSON of the values, in which TensorRefs stand for tensors.
    objects: those that have saved themselves.
    """

    names: list[str] = field(default_factory=list)
    tensors: list[Any] = field(default_factory=list)
    owned: list[bool] = field(default_factory=list)
    values: bytes = b""
    per_rank: dict[str, bytes] = field(default_factory=dict)
    objects: list[Any] = field(default_factory=list)


class _Named(NamedTuple):
    """A container of nothing but tensors: what is alike as long as its keys are."""

    keys: list[Any]
    owner: int | None
    names: list[str]
    text: str


class StateWalk:
    """Walks through the state of one checkpointer, save after save.

    Args:
        rank: of this process: the owner of PerRank parts.
        clock, sink: for the event `large_value`, once for each key.
        kernels: the fused kernels of this process, whose state beside their tables goes with it.
    """

    def __init__(
        self, rank: int, clock: Clock, sink: EventSink, kernels: Kernels | None = None
    ) -> None:
        self._rank = rank
        self._clock = clock
        self._sink = sink
        self._canonical = Canonical(rank, kernels)
        self._kept: dict[str, _Named] = {}
        self._told: set[str] = set()

    def take(self, state: Mapping[str, Any], show: Show | None = None) -> Parts:
        """Take `state` apart without copying a tensor. Each `state_dict()` is called once.

        Raises what `flatten` and `encode_value` do.
        """
        if not isinstance(state, Mapping):
            raise BadInputError(
                f"state is a {type(state).__name__}; give a dict of names to objects"
            )
        check_names(state)
        try:
            return self._taken(state, self._canonical.look(state), show)
        finally:
            self._canonical.release()

    def _taken(self, state: Mapping[str, Any], taker: Canonical, show: Show | None) -> Parts:
        if KERNELS in state:
            raise BadInputError(f"{KERNELS}: is what checkpoints call the fused kernels; rename it")
        walk = _Walk(self._rank, self._clock, show, self._kept, taker)
        try:
            text = walk.mapping(state, "", None, 0)
            beside = taker.kernels.taken(walk.parts.names, walk.parts.tensors)
            if beside:
                pair = f'["{KERNELS}",{walk.text({self._rank: beside}, KERNELS, None, 1)}]'
                text = f"{text[: -len(_END)]}{',' if state else ''}{pair}{_END}"
            _give_parts(walk.parts, taker)
            walk.parts.values = text.encode()
            walk.parts.per_rank = {k: text.encode() for k, text in walk.per_rank.items()}
        except RecursionError:
            raise BadInputError("state: is nested too deep, or holds itself") from None
        except (NotPlainError, UnicodeEncodeError):
            return _taken_slowly(state, self._rank, taker)
        self._kept = walk.kept
        for path, values, chars, seconds in walk.large:
            if path not in self._told:
                self._told.add(path)
                self._sink.emit(
                    "large_value", key=path, values=values, bytes=chars, encode_s=seconds
                )
        return walk.parts


class _Walk:
    """One walk. `per_rank` are the texts of the PerRank parts; `kept` what the next walk may use."""

    def __init__(
        self,
        rank: int,
        clock: Clock,
        show: Show | None,
        before: Mapping[str, _Named],
        taker: Canonical,
    ) -> None:
        self._rank = rank
        self._taker = taker
        self._now = clock.monotonic
        self._show = show
        self._before = before
        self.kept: dict[str, _Named] = {}
        self.parts = Parts()
        self.per_rank: dict[str, str] = {}
        self._of_tensors = 0  # characters
        self.large: list[tuple[str, int, int, float]] = []

    def text(self, value: Any, path: str, owner: int | None, depth: int) -> str:
        """The JSON of a part of the state; its tensors go to `parts`. `owner` is the rank of a PerRank."""
        kind = type(value)
        if kind in _TENSORS:
            return self._tensor(value, path, owner)
        if kind in SCALARS:
            began_s = self._now()
            return self._told(SCALARS[kind](value), path, 1, began_s)
        if kind is dict:
            return self.mapping(value, path, owner, depth)
        if kind is list or kind is tuple:
            return self._list(value, path, owner, depth)
        if kind in MAPPINGS:
            return self._typed(value, path, owner, depth)
        if isinstance(value, PerRank):
            return self._own(value, path, owner, depth)
        if isinstance(value, torch.Tensor | ShardedTensor):
            return self._tensor(value, path, owner)
        if has_state_dict(value):
            if self._show is not None:
                self._show(value, path)
            self.parts.objects.append(value)
            taken = self._taker.taken(value, path)
            if isinstance(taken, Mapping):  # whose own type has no meaning
                return self.mapping(taken, path, owner, depth)
            return self.text(taken, path, owner, depth)
        instance = instance_of(value, path)
        if instance is not None and instance.walks:
            return self._instance(instance, path, owner, depth)
        if instance is None and isinstance(value, Mapping):
            return self.mapping(value, path, owner, depth)
        return self._encoded(value, path, depth)

    def _encoded(self, value: Any, path: str, depth: int) -> str:
        began_s = self._now()
        return self._told(canonical(encode_value(value, path, depth)).decode(), path, 1, began_s)

    def _tensor(self, value: Any, path: str, owner: int | None) -> str:
        name = path if owner is None else f"{path}@{owner}"
        self.parts.names.append(name)
        self.parts.tensors.append(value)
        self.parts.owned.append(owner is not None)
        text = f'{{"$":"tensor","v":{encode_basestring(name)}}}'
        self._of_tensors += len(text) + len(path)  # with its key, about
        return text

    def _told(self, text: str, path: str, values: int, began_s: float) -> str:
        """`text` of nothing but values; noted if it's large."""
        if len(text) >= LARGE_CHARS:
            self.large.append((path or "state", values, len(text), self._now() - began_s))
        return text

    def _many(
        self, text: str, items: Iterable[tuple[Any, Any]], path: str, values: int, began_s: float
    ) -> str:
        """The same of a container of plain values, of which one may be large alone."""
        if len(text) < LARGE_CHARS:
            return text
        prefix, noted = f"{path}." if path else "", len(self.large)
        for k, v in items:
            if type(v) is str:
                self._told(v, f"{prefix}{k}", 1, began_s)
        return text if len(self.large) > noted else self._told(text, path, values, began_s)

    def _own(self, value: PerRank, path: str, owner: int | None, depth: int) -> str:
        if owner is not None:
            raise BadInputError(f"{path}: PerRank inside PerRank")
        if path in self.per_rank:
            raise BadInputError(f"{path}: two PerRank parts of the state have this key; rename one")
        self.per_rank[path] = ""  # taken, and in this order
        # Of a tree of its own: its depth is counted from there.
        self.per_rank[path] = self.text(value.value, path, self._rank, 0)
        return f'{{"$":"per_rank","v":{encode_basestring(path)}}}'

    def mapping(self, value: Mapping[Any, Any], path: str, owner: int | None, depth: int) -> str:
        """The JSON of a mapping as a dict, whatever its type."""
        if type(value) is not dict and type(value) is not OrderedDict:
            value = dict(value.items())
        if not _KEYS.issuperset(map(type, value)):
            return self._encoded(dict(value), path, depth)
        return f'{{"$":"dict","v":[{self._pairs(value, path, owner, depth)}]}}'

    def _typed(self, value: dict[Any, Any], path: str, owner: int | None, depth: int) -> str:
        """The JSON of an OrderedDict and the like."""
        if not _KEYS.issuperset(map(type, value)):
            return self._encoded(value, path, depth)
        pairs = self._pairs(value, path, owner, depth)
        return _instance_text(MAPPINGS[type(value)], mapping_type(value, path), pairs)

    def _instance(self, value: Instance, path: str, owner: int | None, depth: int) -> str:
        pairs = self._pairs(dict(value.fields), path, owner, depth)
        return _instance_text(value.kind, value.type, pairs)

    def _pairs(self, value: dict[Any, Any], path: str, owner: int | None, depth: int) -> str:
        """`[key,value],...` of a dict whose keys are strings and ints."""
        _check_depth(depth + bool(value))  # what is in it counts, too
        kinds = set(map(type, value.values()))
        if kinds and kinds <= _TENSORS:
            return self._named(value, path, owner)
        began_s = self._now()
        if kinds <= PLAIN:
            return self._many(pairs_text(value), value.items(), path, len(value), began_s)
        of_tensors, noted = self._of_tensors, len(self.large)
        prefix = f"{path}." if path else ""
        pairs = []
        for k, v in value.items():
            scalar = SCALARS.get(type(v))
            if scalar is None or type(v) in _MAY_BE_LARGE:
                text = self.text(v, f"{prefix}{k}", owner, depth + 1)
            else:
                text = scalar(v)
            pairs.append(f"[{SCALARS[type(k)](k)},{text}]")
        text = ",".join(pairs)
        chars = len(text) - (self._of_tensors - of_tensors)
        self._sum_up(path, len(value), chars, noted, began_s)
        return text

    def _list(
        self, value: list[Any] | tuple[Any, ...], path: str, owner: int | None, depth: int
    ) -> str:
        _check_depth(depth + bool(value))  # what is in it counts, too
        began_s, of_tensors, noted = self._now(), self._of_tensors, len(self.large)
        if PLAIN.issuperset(map(type, value)):
            text = self._many(list_text(value), enumerate(value), path, len(value), began_s)
        else:
            items = [self.text(v, f"{path}.{i}", owner, depth + 1) for i, v in enumerate(value)]
            text = f"[{','.join(items)}]"
            chars = len(text) - (self._of_tensors - of_tensors)
            self._sum_up(path, len(value), chars, noted, began_s)
        return text if type(value) is list else f'{{"$":"tuple","v":{text}}}'

    def _sum_up(self, path: str, values: int, chars: int, noted: int, began_s: float) -> None:
        """A container is large by all that is in it, unless something in it was noted already."""
        if chars >= LARGE_CHARS and len(self.large) == noted:
            self.large.append((path or "state", values, chars, self._now() - began_s))

    def _named(self, value: dict[Any, Any], path: str, owner: int | None) -> str:
        """A dict of nothing but tensors. Its keys are strings and ints, so that equal ones are the same."""
        keys = list(value)
        known = self._before.get(path)
        if known is None or known.keys != keys or known.owner != owner:
            prefix, suffix = f"{path}." if path else "", "" if owner is None else f"@{owner}"
            names = [f"{prefix}{k}{suffix}" for k in keys]
            known = _Named(keys, owner, names, ",".join(map(_pair, keys, names)))
        self.kept[path] = known
        self.parts.names += known.names
        self.parts.tensors += value.values()
        self.parts.owned += [owner is not None] * len(keys)
        self._of_tensors += len(known.text)
        return known.text


def _pair(key: Any, name: str) -> str:
    return f'[{SCALARS[type(key)](key)},{{"$":"tensor","v":{encode_basestring(name)}}}]'


def _instance_text(kind: str, type_name: str, pairs: str) -> str:
    comma = "," if pairs else ""
    return f'{{"$":"{kind}","v":[{encode_basestring(type_name)}{comma}{pairs}]}}'


def _check_depth(depth: int) -> None:
    if depth > MAX_DEPTH:
        raise NotPlainError


def _taken_slowly(state: Mapping[str, Any], rank: int, taker: Canonical) -> Parts:
    flat = taker.flat(state)
    beside = taker.kernels.taken(list(flat.leaves), [x.source for x in flat.leaves.values()])
    if beside:
        more = flatten({KERNELS: {rank: beside}}, rank)
        flat.leaves |= more.leaves
        flat.values |= more.values
    leaves: Iterable[Any] = flat.leaves.values()
    parts = Parts(
        list(flat.leaves),
        [leaf.source for leaf in leaves],
        [leaf.kind == "per_rank" for leaf in leaves],
        canonical(encode_value(flat.values)),
        {k: canonical(encode_value(v, k)) for k, v in flat.per_rank.items()},
    )
    _give_parts(parts, taker)
    return parts


def _give_parts(parts: Parts, taker: Canonical) -> None:
    """Say of tensors that are a rank's part of a whole which part they are."""
    cut = taker.cuts.parts(parts.names, parts.tensors)
    if cut:
        parts.tensors = [cut.get(n, t) for n, t in zip(parts.names, parts.tensors, strict=True)]
