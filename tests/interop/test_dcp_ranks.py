"""Stock DCP jobs over real gloo ranks, on Sidestage's storage, at one rank and at two.

Starting ranks is what costs time here, so that each start does several things.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from ckpt.catalog import Catalog
from ckpt.storage import LocalStorage
from ckpt.verify import verify_commit
from tests.distributed.launch import run_ranks
from tests.interop.states import FORMATS, contents, exported, imported, reader

RANKS = "tests.interop.ranks"

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]


@pytest.fixture(scope="module")
def of_two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two ranks saved: `run` through our writer, `stock` of the same state through DCP's."""
    folder = tmp_path_factory.mktemp("two")
    run_ranks(
        RANKS, 2, folder / "meet", "save", str(folder / "run"), "stock", str(folder / "stock")
    )
    return folder


@pytest.fixture(scope="module")
def of_one(of_two: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one rank saved, after it loaded what two had saved."""
    folder = tmp_path_factory.mktemp("one")
    run_ranks(RANKS, 1, folder / "meet", "load", str(of_two / "run"), "save", str(folder / "run"))
    return folder


@pytest.mark.parametrize("ranks", [2, 1])
def test_what_stock_dcp_saves_is_a_commit(ranks: int, of_two: Path, of_one: Path) -> None:
    storage = LocalStorage((of_two if ranks == 2 else of_one) / "run")
    commits = Catalog(storage).commits()
    assert [c.ref.step for c in commits] == [1, 2]
    for commit in commits:
        assert commit.record is not None
        assert commit.record.world_size == ranks
        assert verify_commit(storage, commit.record, level="full").problems == []


def test_two_ranks_load_what_one_saved_and_d13_fail_together(of_one: Path, tmp_path: Path) -> None:
    run_ranks(
        RANKS, 2, tmp_path / "meet", "load", str(of_one / "run"), "fail", str(tmp_path / "run")
    )


def test_a_stock_folder_of_several_ranks_imports_as_what_they_saved_here(
    of_two: Path, tmp_path: Path
) -> None:
    assert len(list((of_two / "stock").glob("*.distcp"))) == 2
    imported(of_two / "stock", tmp_path / "run")
    assert contents(tmp_path / "run") == contents(of_two / "run", 1)
    boxes = reader(tmp_path / "run").info("dtensor.columns").boxes
    assert sorted(boxes) == [((0, 0), (23, 5)), ((0, 5), (23, 5))]


@pytest.mark.parametrize("form", FORMATS)
def test_sharded_checkpoints_go_there_and_back(form: str, of_two: Path, tmp_path: Path) -> None:
    target = exported(of_two / "run", form, tmp_path / "out", step=1)
    imported(target, tmp_path / "back")
    assert contents(tmp_path / "back") == contents(of_two / "run", 1)
