"""A raw request as the tensors that a view takes: what a caller does before calling one."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from ckpt.idmaps import Ids, collided
from ckpt.schema import ServingDescription, VocabularyIds
from publisher.ids import IdMaps
from publisher.request import RequestSpec
from publisher.views.interface import ViewFeature, ViewInterface

Tensors = Mapping[str, torch.Tensor]


def view_inputs(
    description: ServingDescription, interface: ViewInterface, id_maps: Tensors, request: Tensors
) -> list[torch.Tensor]:
    """The view's inputs, in order, for a request as `ckpt.schema` describes it.

    id_maps: the content of the version's `keys.ID_MAPS`. BadInputError for a request that isn't as
    described.
    """
    spec = RequestSpec.of(description)
    maps = IdMaps(description, id_maps)
    ids = maps(spec.read(spec.select(request)), {})
    mapped = {v.ids: v for v in interface.features if v.mapped}
    out = []
    for i in interface.inputs:
        view = mapped.get(i.name)
        given = request[i.name] if view is None else torch.from_numpy(_rows(maps, view, ids))
        out.append(given.contiguous())
    return out


def _rows(maps: IdMaps, view: ViewFeature, all_ids: list[Ids]) -> Ids:
    """A feature's rows, -1 for ids without: those of its map, or of a managed collision after it."""
    ids = all_ids[maps.index[view.feature.name]]
    if view.collision is None:
        return ids
    known, spec = maps.collisions[view.collision]
    rows = collided(ids, known, spec.block, spec.unknown_rows)
    if isinstance(view.feature.ids, VocabularyIds):
        rows = np.where(ids < 0, -1, rows)
    return rows
