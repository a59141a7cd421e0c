"""A raw request as the tensors that a view takes: what a caller does before calling one."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from ckpt.errors import BadInputError
from ckpt.idmaps import Ids, KnownIds, collided, hashed
from ckpt.schema import HashedIds, ServingDescription, VocabularyIds
from publisher.views.interface import ViewFeature, ViewInterface
from publisher.views.source import take

Tensors = Mapping[str, torch.Tensor]


def view_inputs(
    description: ServingDescription, interface: ViewInterface, id_maps: Tensors, request: Tensors
) -> list[torch.Tensor]:
    """The view's inputs, in order, for a request as `ckpt.schema` describes it.

    id_maps: the content of the version's `keys.ID_MAPS`. BadInputError if the request lacks a tensor.
    """
    rows = {v.ids: v for v in interface.features if v.mapped}
    out = []
    for spec in interface.inputs:
        feature = rows.get(spec.name)
        source = f"{feature.feature.name}.values" if feature else spec.name
        if source not in request:
            raise BadInputError(f"the request has no {source}")
        given = request[source]
        if feature is not None:
            given = torch.from_numpy(_map(description, feature, id_maps, given.numpy()))
        out.append(given.contiguous())
    return out


def _map(description: ServingDescription, view: ViewFeature, id_maps: Tensors, raw: Ids) -> Ids:
    """The rows of raw ids, -1 for those without: `RequestFeature.ids`, then a managed collision."""
    f, ids = view.feature, raw
    without = np.zeros(raw.shape, np.bool_)
    if isinstance(f.ids, HashedIds):
        ids = hashed(raw, f.ids)
    elif isinstance(f.ids, VocabularyIds):
        ids = _known(id_maps, f.name).rows(raw)
        if f.unknown_row is not None:
            ids = np.where(ids < 0, f.unknown_row, ids)
        without = ids < 0
    if view.collision is None:
        return ids
    spec = next(c for c in description.collisions if c.name == view.collision)
    known = _known(id_maps, f"collision:{spec.name}")
    return np.where(without, -1, collided(ids, known, spec.block, spec.unknown_rows))


def _known(id_maps: Tensors, name: str) -> KnownIds:
    raw, row = (take(id_maps, f"{name}.{part}", "id maps").numpy() for part in ("raw", "row"))
    return KnownIds(raw, row)
