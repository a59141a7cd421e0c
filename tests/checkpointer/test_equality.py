"""Two checkpoints compared bit for bit."""

import math
import struct
from typing import Any

import torch

from ckpt import Checkpointer, PerRank
from ckpt.catalog import Catalog
from ckpt.equality import Comparison, compare
from ckpt.restore import CheckpointReader
from ckpt.storage.memory import MemoryStorage


def compared(*states: dict[str, Any]) -> Comparison:
    storage = MemoryStorage()
    with Checkpointer(storage) as c:
        for step, state in enumerate(states, 1):
            c.save(step, state).committed.result()
    catalog = Catalog(storage)
    a, b = (CheckpointReader(storage, catalog.read(catalog.find(n).ref)) for n in (1, 2))
    return compare(a, b)


def state() -> dict[str, Any]:
    weights = torch.arange(6.0).view(2, 3)
    weights[0, 0] = math.nan
    return {
        "w": weights,
        "scalar": torch.tensor(2.0),
        "none": torch.empty(0, 4),
        "flags": torch.tensor([True, False]),
        "half": torch.ones(3, dtype=torch.bfloat16),
        "lists": [[1, 2], [torch.ones(1), math.nan]],
        "plain": {"lr": 0.1, "on": True},
        "own": PerRank({"seed": 3, "t": torch.ones(2)}),
    }


def test_equal_states_have_no_difference() -> None:
    found = compared(state(), state())
    assert found.differences == ()
    assert found.entries == 12  # a list of numbers is one


def test_each_difference_is_told_by_its_key() -> None:
    other = state()
    other["w"][1, 2] = 5.5
    other["w"][0, 0] = torch.tensor(struct.unpack("f", struct.pack("I", 0x7FC00001))[0])
    other["scalar"] = -other["scalar"]
    other["flags"][1] = True
    other["half"] = other["half"].half()
    other["lists"][0][1] = 3
    other["plain"] = {"lr": 0.1, "on": 1, "new": None}
    other["own"].value["seed"] = 4
    other["own"].value["t"][0] = 2
    del other["none"]
    found = compared(state(), other)
    assert [(d.key, d.said) for d in found.differences] == [
        ("w", "2 of 6 elements, 1 of them infinite or no number"),
        ("scalar", "1 of 1 elements, by 2.0e+00 of the largest at most"),
        ("none", "is only in the first"),
        ("flags", "1 of 2 elements"),
        ("half", "bfloat16 [3] and float16 [3]"),
        ("lists.0", "[1, 2] and [1, 3]"),
        ("plain.on", "True and 1"),
        ("own.seed@0", "3 and 4"),
        ("own.t@0", "1 of 2 elements, by 1.0e+00 of the largest at most"),
        ("plain.new", "is only in the second"),
    ]
    assert found.differences[0].relative is None
    assert [d.only_in for d in found.differences if d.only_in is not None] == [0, 1]


def test_large_tensors_are_compared_to_the_last_row() -> None:
    one, other = torch.zeros(3 << 20, 4), torch.zeros(3 << 20, 4)
    other[-1, -1] = 1e-30
    (difference,) = compared({"w": one}, {"w": other}).differences
    assert difference.said == f"1 of {12 << 20} elements"
    assert difference.relative is None
