"""Nothing that is read from a root runs code (case D23)."""

from __future__ import annotations

import dataclasses
import enum
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ckpt import Checkpointer
from ckpt.branch import create_branch
from ckpt.catalog import Catalog
from ckpt.cli import cli
from ckpt.command import run_command
from ckpt.errors import BadInputError, SidestageError
from ckpt.pins import add_pin
from ckpt.storage import open_storage


class Bomb:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.marker),)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A branch with a pin, and a commit of its own. Don't change it."""
    folder = tmp_path_factory.mktemp("good")
    with Checkpointer(str(folder / "source")) as c:
        c.save(1, {"t": torch.ones(3000), "n": {"x": 1}}).committed.result()
    source, run = open_storage(folder / "source"), folder / "run"
    create_branch(source, Catalog(source).find(1).ref, open_storage(run), copy=True)
    with Checkpointer(str(run)) as c:
        c.restore({"t": torch.zeros(3000), "n": {"x": 0}})
        ref = c.save(2, {"t": torch.ones(3000), "n": {"x": 2}}).committed.result()
    add_pin(open_storage(run), ref, "golden", pin_id="golden")
    return run


PLACES = [
    "RUN.json",
    "ORIGIN.json",
    "attempts/000002.json",
    "commits/000002/000000000002.json",
    "pins/golden.json",
    "data/000002-000000000002-000001/r00000.receipt.json",
    "data/000002-000000000002-000001/r00000.idx",
    "data/000002-000000000002-000001/r00000.objects.json",
    "data/000002-000000000002-000001/r00000.bin",
]


@pytest.mark.parametrize("place", PLACES)
def test_d23_a_pickle_in_the_place_of_anything_is_never_run(
    good: Path, tmp_path: Path, place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    root, marker = tmp_path / "run", tmp_path / "ran"
    shutil.copytree(good, root)
    assert (root / place).is_file()
    (root / place).write_bytes(pickle.dumps(Bomb(marker)))
    for n, command in enumerate(
        [
            ("ls", root),
            ("show", root, "--step", "2/2"),
            ("verify", root, "--all"),
            ("restore", root, tmp_path / "out", "--step", "2/2"),
            ("prune", root, "--keep-last", "1"),
            ("pins", root),
            ("branch", f"{root}@2/2", tmp_path / "new"),
        ]
    ):
        code = run_command(cli, [str(a) for a in command])
        said = capsys.readouterr().err
        assert code in (0, 2, 3, 4, 5), (n, command, said)
        assert "Traceback" not in said
    try:
        with Checkpointer(str(root)) as c:
            result = c.restore({"t": torch.zeros(3000), "n": {"x": 0}})
        assert result is not None
        # A restore needs no receipt, and falls back over what is damaged of the rest.
        damaged = place.startswith(("data/", "commits/")) and not place.endswith("receipt.json")
        assert result.step == (1 if damaged else 2)
    except SidestageError as e:
        assert place in str(e)
    assert not marker.exists()


class Color(enum.Enum):
    RED = 1


class Level(enum.IntEnum):
    LOW = 1


@dataclasses.dataclass
class Options:
    rate: float

    def __post_init__(self) -> None:
        RAN.append("__post_init__")


RAN: list[str] = []


@pytest.mark.parametrize(
    "value",
    [Bomb(Path("ran")), {Bomb(Path("ran"))}, Bomb, pickle.dumps, np.array([Bomb(Path("ran"))])],
)
def test_d23_values_that_only_code_could_bring_back_are_refused_at_save(value: Any) -> None:
    from ckpt.storage import MemoryStorage

    with Checkpointer(MemoryStorage()) as c, pytest.raises(BadInputError, match=r"^a\.b: "):
        c.save(1, {"a": {"b": value}})


@pytest.mark.parametrize(
    "value",
    [
        *(b"\x00\xff", np.float32(1.5), np.int64(7), np.bool_(True), {1, 2}, frozenset({1}), 1j),
        *(Color.RED, Level.LOW, Options(0.1)),
    ],
)
def test_d23_values_come_back_as_they_were_without_code(value: Any) -> None:
    from ckpt.storage import MemoryStorage

    storage = MemoryStorage()
    with Checkpointer(storage) as c:
        c.save(1, {"a": {"b": value}}).committed.result()
    state: dict[str, Any] = {"a": {"b": None}}
    RAN.clear()
    with Checkpointer(storage) as c:
        c.restore(state)
    assert not RAN
    assert state["a"]["b"] == value
    assert type(state["a"]["b"]) is type(value)
