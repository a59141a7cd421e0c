"""From the raw ids of a request to rows of tables, by the maps that the trainer described.

    raw id -> RequestFeature.ids -> the id that the trained model gets
           -> the table's managed collision, if it has one -> row

An id without a row adds nothing, takes a row that the description names, or makes the request
refused; it's counted by feature in any case.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from ckpt.errors import BadInputError, CorruptError
from ckpt.idmaps import Ids, KnownIds, collided, hashed
from ckpt.schema import (
    HashedIds,
    LookupSpec,
    RequestFeature,
    ServingDescription,
    VocabularyIds,
)
from publisher.request import RequestIds, RequestSpec

Mask = npt.NDArray[np.bool_]
Unknown = dict[str, Mask]
"""By feature of the request, which of its ids had no row; an id counts once, in however many lookups."""


@dataclass(frozen=True)
class PickedRows:
    """The rows of one lookup's ids, its features one after another.

    rows: int64; 0 where `missing`. counts: ids of each feature. lengths: (features, batch).
    missing: ids that add nothing; None if all have a row.
    """

    rows: Ids
    counts: list[int]
    lengths: Ids
    missing: Mask | None


class IdMaps:
    """The id maps of a description. Any number of threads may use them.

    Args:
        description: the model's.
        tensors: the content of a version's `keys.ID_MAPS`; CorruptError names what lacks there.
    """

    def __init__(
        self, description: ServingDescription, tensors: Mapping[str, torch.Tensor]
    ) -> None:
        self._tensors = tensors
        self.features = RequestSpec.of(description).features
        self.index = {f.name: i for i, f in enumerate(self.features)}
        self._mapped = [
            (i, f, self._map_of(f)) for i, f in enumerate(self.features) if f.ids.kind != "identity"
        ]
        self.collisions = {
            c.name: (self._known(f"collision:{c.name}"), c) for c in description.collisions
        }

    def __call__(self, request: RequestIds, unknown: Unknown) -> list[Ids]:
        """Each feature's ids as the trained model gets them; -1 where an id has no row.

        BadInputError names the feature and id that it refuses.
        """
        if not self._mapped:
            return request.values
        out = list(request.values)
        for i, f, ids_of in self._mapped:
            out[i] = ids_of(request.values[i])
            if isinstance(f.ids, VocabularyIds):
                missing = out[i] < 0
                if missing.any():
                    note(unknown, f.name, missing)
                    settle(f, request.values[i], out[i], missing)
        return out

    def positions(self, fqn: str) -> torch.Tensor:
        """The weights by position of one checkpoint key, float32, (most ids of a row,)."""
        return self._tensor(f"position:{fqn}", torch.float32)

    def _map_of(self, f: RequestFeature) -> Callable[[Ids], Ids]:
        ids = f.ids
        if isinstance(ids, HashedIds):
            return lambda raw: hashed(raw, ids)
        return self._known(f.name).rows

    def _known(self, name: str) -> KnownIds:
        raw, row = (self._tensor(f"{name}.{part}", torch.int64).numpy() for part in ("raw", "row"))
        if len(raw) != len(row) or (raw[1:] <= raw[:-1]).any() or (row < 0).any():
            raise CorruptError(f"id map {name}: not ascending ids, each with a row")
        return KnownIds(raw, row)

    def _tensor(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        t = self._tensors.get(name)
        if t is None or t.dtype != dtype or t.dim() != 1:
            found = "missing" if t is None else f"{t.dtype} of shape {tuple(t.shape)}"
            raise CorruptError(f"id maps: {name} is {found}, expected one dimension of {dtype}")
        return t


class LookupRows:
    """Which rows one lookup's features read. Any number of threads may call.

    Args:
        spec: the lookup.
        maps: the description's id maps.
    """

    def __init__(self, spec: LookupSpec, maps: IdMaps) -> None:
        self._spec = spec
        self._maps = maps
        self._at = [maps.index[f.feature] for f in spec.features]
        self._in_order = self._at == list(range(len(maps.features)))
        self._colliding = [
            (i, *maps.collisions[f.collision])
            for i, f in enumerate(spec.features)
            if f.collision is not None
        ]
        self._limits = np.array([f.rows for f in spec.features], np.uint64)
        self._limit = self._limits[0] if len(set(self._limits.tolist())) == 1 else None

    def __call__(self, request: RequestIds, ids: list[Ids], unknown: Unknown) -> PickedRows:
        """Rows for the ids that the maps gave; BadInputError names a feature and id it refuses."""
        parts = [ids[i] for i in self._at]
        for i, known, spec in self._colliding:
            given = parts[i]
            parts[i] = collided(given, known, spec.block, spec.unknown_rows)
            if isinstance(self._maps.features[self._at[i]].ids, VocabularyIds):
                parts[i] = np.where(given < 0, -1, parts[i])
        rows = np.concatenate(parts)
        counts = [len(p) for p in parts]
        lengths = request.lengths if self._in_order else request.lengths[self._at]
        limit = np.repeat(self._limits, counts) if self._limit is None else self._limit
        outside = rows.view(np.uint64) >= limit  # those below 0, too: unsigned, they are large
        missing = None
        if outside.any():
            missing = self._settle(request, rows, outside, counts, unknown)
        return PickedRows(rows, counts, lengths, missing)

    def _settle(
        self,
        request: RequestIds,
        rows: Ids,
        outside: Mask,
        counts: list[int],
        unknown: Unknown,
    ) -> Mask | None:
        """Treat ids outside of their tables as their features say, in place."""
        start = 0
        for at, n in zip(self._at, counts, strict=True):
            feature = self._maps.features[at]
            mine, of = outside[start : start + n], rows[start : start + n]
            start += n
            if not mine.any():
                continue
            note(unknown, feature.name, mine)
            settle(feature, request.values[at], of, mine)
            if feature.unknown == "zero":
                of[mine] = 0
            else:
                mine[:] = False
        return outside if outside.any() else None


def settle(feature: RequestFeature, raw: Ids, ids: Ids, missing: Mask) -> None:
    """Apply a feature's policy to its ids without a row, in place: -1 stays where it adds nothing."""
    if feature.unknown == "refuse":
        found = raw[missing]
        raise BadInputError(
            f"{feature.name}: id {found[0]} has no row ({len(found)} such ids), and this model "
            f"refuses them; send only ids that it knows"
        )
    if feature.unknown == "row":
        assert feature.unknown_row is not None  # `check_description` saw to it
        ids[missing] = feature.unknown_row


def note(unknown: Unknown, feature: str, missing: Mask) -> None:
    """These ids of a feature have no row here."""
    before = unknown.get(feature)
    unknown[feature] = missing.copy() if before is None else before | missing


def counts(unknown: Unknown) -> dict[str, int]:
    """How many ids of each feature have no row in at least one of the tables that it reads."""
    return {feature: int(missing.sum()) for feature, missing in unknown.items()}
