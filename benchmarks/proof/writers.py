"""Writers of one row a step, past every hook and every counter of torch."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

Kind = Literal["hidden", "announced", "harmless"]


@dataclass(frozen=True)
class Place:
    """What a writer may change: all tables with their optimizer state.

    looked_up: of each table the rows of the last step's batch, which training announces as well.
    """

    weights: list[torch.Tensor]
    momenta: list[torch.Tensor]
    looked_up: list[torch.Tensor]
    chance: random.Random

    def row(self) -> tuple[int, int]:
        """Any table and any row, all alike."""
        table = self.chance.randrange(len(self.weights))
        return table, self.chance.randrange(self.weights[table].shape[0])


@dataclass(frozen=True)
class Writer:
    """kind: hidden: any row; announced: only rows that training changes all the time.

    prepare: what is made once, before the first save, and handed to each `write`.
    """

    kind: Kind
    write: Callable[[Place, Any], None]
    prepare: Callable[[Place], Any] = lambda _: None


_POPULAR = 4  # times in a batch: such a row is in most batches


def _nudge(row: torch.Tensor) -> None:
    """Another value in each place: no write that changes nothing."""
    row.view(-1)[0] += 0.5


def _by_data(place: Place, _: Any) -> None:
    table, row = place.row()
    _nudge(place.weights[table].data[row])


def _momentum(place: Place, _: Any) -> None:
    table, row = place.row()
    _nudge(place.momenta[table].data[row : row + 1])


def _by_address(place: Place, _: Any) -> None:
    table, row = place.row()
    weight = place.weights[table]
    at = weight.data_ptr() + row * weight.stride(0) * weight.element_size()
    ctypes.c_uint32.from_address(at).value ^= 0x00400000


def _shared_views(place: Place) -> list[torch.Tensor]:
    """Over DLPack: tensors with counters of their own, over the same memory."""
    return [torch.from_dlpack(w.detach()) for w in place.weights]


def _by_dlpack(place: Place, views: list[torch.Tensor]) -> None:
    table, row = place.row()
    _nudge(views[table][row])


def _announced(place: Place, _: Any) -> None:
    table = place.chance.randrange(len(place.weights))
    rows, counts = place.looked_up[table].unique(return_counts=True)
    popular = rows[counts >= _POPULAR]
    _nudge(place.weights[table].data[int(popular[place.chance.randrange(len(popular))])])


def _nothing(place: Place, _: Any) -> None:
    del place


HARMLESS = "nobody"
WRITERS = {
    "a row by .data": Writer("hidden", _by_data),
    "a row at its address": Writer("hidden", _by_address),
    "a row over DLPack": Writer("hidden", _by_dlpack, _shared_views),
    "a row's optimizer state": Writer("hidden", _momentum),
    "a row that training changes too": Writer("announced", _announced),
    HARMLESS: Writer("harmless", _nothing),
}
