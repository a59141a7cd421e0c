"""Id maps in the description: stored, and proven on the golden request's raw ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import safetensors.numpy
from torch import Tensor

from ckpt.digest import digest_of
from ckpt.errors import BadInputError
from ckpt.idmaps import EMPTY_SLOT, IdMap, Ids, KnownIds, Vocabulary
from ckpt.schema import (
    FeatureSpec,
    HashedIds,
    IdentityIds,
    LookupSpec,
    RequestFeature,
    VocabularyIds,
)
from trainer.description.request import Feature

_IDENTITY = IdMap(IdentityIds())


@dataclass(frozen=True)
class VocabularyFile:
    """A vocabulary as stored: safetensors with `raw`, ascending, and `row`."""

    data: bytes
    digest: str
    size: int

    @property
    def name(self) -> str:
        """Its file, named by content."""
        return f"vocabulary-{self.digest.rpartition(':')[2]}.safetensors"


@dataclass(frozen=True)
class RawIds:
    """The id maps of a served model, and the golden request's raw ids.

    Args:
        maps: request feature -> its map; identity for those that it lacks.
        raw: for each feature whose map isn't the identity, int64 raw ids, as many as the feature has.
    """

    maps: Mapping[str, IdMap]
    raw: Mapping[str, Tensor]

    def check(self, features: Sequence[Feature], lookups: Sequence[LookupSpec]) -> None:
        """Prove that the maps make, of the raw ids, those that the pipeline has made of them.

        BadInputError naming the feature, and the first id that differs with both its rows.
        """
        known = {f.name: f for f in features}
        for name in {**self.maps, **self.raw}:
            if name not in known:
                raise BadInputError(
                    f"id_maps or raw: no feature {name!r} in the golden request; it has "
                    f"{', '.join(sorted(known))}"
                )
        for name in sorted(self.raw.keys() - set(self._mapped())):
            raise BadInputError(f"raw: feature {name!r} has no id map; give one in id_maps")
        for name in self._mapped():
            got = np.asarray(known[name].ids.values().cpu().long())
            self._check_map(name, got)
        for spec in (f for lookup in lookups for f in lookup.features if f.collision is None):
            _check_range(spec, self.maps.get(spec.feature, _IDENTITY))

    def golden(self, feature: Feature) -> dict[str, Tensor]:
        """The ids of the golden request: raw, and beside them what the model got."""
        got = feature.ids.values().cpu().long().contiguous().clone()
        if feature.name not in self._mapped():
            return {f"{feature.name}.values": got}
        raw = self.raw[feature.name].cpu().contiguous().clone()
        return {f"{feature.name}.values": raw, f"{feature.name}.rows": got}

    def files(self, names: Sequence[str]) -> dict[str, VocabularyFile]:
        """The vocabularies of some features."""
        out = {}
        for name in names:
            ids = self.maps.get(name, _IDENTITY).ids
            if isinstance(ids, Vocabulary):
                known = _known(name, ids)
                data = safetensors.numpy.save({"raw": known.raw, "row": known.row})
                out[name] = VocabularyFile(data, digest_of(data), len(known.raw))
        return out

    def spec(
        self, name: str, file: VocabularyFile | None, prefix: str, *, weighted: bool
    ) -> RequestFeature:
        """`prefix`: where the file is stored; empty while the description has no id yet."""
        given = self.maps.get(name, _IDENTITY)
        ids: IdentityIds | HashedIds | VocabularyIds
        if isinstance(given.ids, Vocabulary):
            assert file is not None, "files() made one"
            key = f"{prefix}{file.name}" if prefix else ""
            ids = VocabularyIds(key, file.digest, file.size)
        else:
            ids = given.ids
        return RequestFeature(name, ids, given.unknown, given.unknown_row, weighted)

    def _mapped(self) -> list[str]:
        return sorted(n for n, m in self.maps.items() if not isinstance(m.ids, IdentityIds))

    def _check_map(self, name: str, got: Ids) -> None:
        if name not in self.raw:
            raise BadInputError(
                f"raw: lacks feature {name!r}, which has an id map; give the golden request's raw ids"
            )
        given = self.raw[name]
        if str(given.dtype) != "torch.int64" or tuple(given.shape) != got.shape:
            raise BadInputError(
                f"raw: feature {name!r}: {given.dtype} {tuple(given.shape)}; the golden request has "
                f"{len(got)} ids, so give int64 ({len(got)},)"
            )
        raw = np.asarray(given.cpu())
        if isinstance(ids := self.maps[name].ids, Vocabulary):
            _known(name, ids)
        made = self.maps[name].apply(raw)
        differs = np.flatnonzero(made != got)
        if len(differs):
            at = differs[0]
            row = "no row" if made[at] < 0 else f"row {made[at]}"
            raise BadInputError(
                f"feature {name!r}: raw id {raw[at]} has {row} by its id map, and the training pipeline "
                f"gave the model {got[at]}; {len(differs)} of {len(got)} ids differ: describe the map "
                f"that the pipeline uses"
            )


def _known(name: str, ids: Vocabulary) -> KnownIds:
    what = f"the vocabulary of feature {name!r}"
    known = KnownIds.of(np.asarray(ids.raw, np.int64), np.asarray(ids.row, np.int64), what)
    if len(known.raw) != len(ids.raw):
        raise BadInputError(f"{what}: raw id {EMPTY_SLOT} can't be used; it stands for no id")
    return known


def _check_range(spec: FeatureSpec, given: IdMap) -> None:
    """An id map must not lead out of the table."""
    ends = []
    if isinstance(given.ids, HashedIds):
        ends = [("its id map", given.ids.modulus - 1)]
    elif isinstance(given.ids, Vocabulary) and len(given.ids.row):
        rows = np.asarray(given.ids.row)
        ends = [("its id map", int(rows.min())), ("its id map", int(rows.max()))]
    if given.unknown_row is not None:
        ends.append(("unknown_row", given.unknown_row))
    for what, row in ends:
        if not 0 <= row < spec.rows:
            raise BadInputError(
                f"feature {spec.feature!r}: {what} gives row {row}, and {spec.table_fqn} has {spec.rows} "
                f"rows"
            )
