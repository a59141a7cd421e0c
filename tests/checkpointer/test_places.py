"""Where a run may lie: beside, above and below other runs, and how its root is named."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath

import pytest
import torch
import torch.distributed.checkpoint as dcp

from ckpt import Checkpointer, DcpReader, DcpWriter
from ckpt.branch import create_branch
from ckpt.catalog import Catalog
from ckpt.errors import BadInputError
from ckpt.foreign import Foreign
from ckpt.importing import Target, import_checkpoint
from ckpt.prefetch import Prefetch
from ckpt.storage import LocalStorage, Storage
from ckpt.storage.s3 import S3Storage
from ckpt.storage.s3client import S3Client
from tests.s3.conftest import credentials  # noqa: F401 - a fixture
from tests.s3.fake import BUCKET, FakeS3

At = Callable[[str], Storage]


@pytest.fixture(params=["local", "s3"])
def at(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[At]:
    """Stores at places of one folder, or one bucket."""
    if request.param == "local":
        yield lambda place: LocalStorage(tmp_path / place)
        return
    request.getfixturevalue("credentials")
    with FakeS3() as server:
        client = S3Client(BUCKET, server.settings)  # takes a quarter of a second for its first call
        yield lambda place: S3Storage(client, place)


def save(root: Storage | Path, step: int = 1) -> None:
    with Checkpointer(root) as checkpointer:
        checkpointer.save(step, {"w": torch.arange(3)}).committed.result(60)


def restored(root: Storage | Path) -> int:
    state = {"w": torch.zeros(3, dtype=torch.int64)}
    with Checkpointer(root) as checkpointer:
        found = checkpointer.restore(state)
    assert state["w"].tolist() == [0, 1, 2]
    assert found is not None
    return found.step


def restore_first(root: Storage) -> None:
    with Checkpointer(root) as checkpointer:
        checkpointer.restore({"w": torch.zeros(3)})


def save_by_dcp(root: Storage) -> None:
    try:
        dcp.save({"w": torch.zeros(3)}, storage_writer=DcpWriter(root, 1))
    except dcp.CheckpointException as e:
        raise next(iter(e.failures.values()))[0] from e


def import_one(root: Storage) -> None:
    import_checkpoint(Foreign("none", {}, {}), Target(root, 1))


@pytest.mark.parametrize(
    "place",
    [
        "runs/a/commits",
        "runs/a/data/x",
        "runs/a/serving/eval",
        "runs/a/events/000001",
        "runs/a/plans",
    ],
)
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_root_that_is_a_part_of_a_run_is_refused_before_anything_is_written(
    at: At, place: str
) -> None:
    save(at("runs/a"))
    before = [info.key for info in at("").list()]
    for begin in (save, restore_first, save_by_dcp, import_one):
        with pytest.raises(BadInputError, match=f"root: .*{place} is a part of the run .*runs/a; "):
            begin(at(place))
    run = at("runs/a")
    with pytest.raises(BadInputError, match="is a part of the run"):
        create_branch(run, Catalog(run).find(1).ref, at(place))
    assert [info.key for info in at("").list()] == before


@pytest.mark.parametrize("place", ["runs", "runs/a/eval", "runs/a/eval/commits", "runs/ab"])
def test_a_root_above_a_run_or_at_a_name_that_runs_do_not_use_works(at: At, place: str) -> None:
    save(at("runs/a"))
    save(at(place), 7)
    assert (restored(at("runs/a")), restored(at(place))) == (1, 7)


@pytest.mark.parametrize("name", ["data", "commits", "code"])
def test_a_root_above_a_run_that_has_the_name_of_its_own_folder_is_refused(
    at: At, name: str
) -> None:
    """The folder that holds the runs, given by mistake: it would write into the one named `data`."""
    save(at(f"runs/{name}"))
    before = [info.key for info in at("").list()]
    with pytest.raises(BadInputError, match=f"root: .*runs: {name}/ in it is the root of another"):
        save(at("runs"))
    assert [info.key for info in at("").list()] == before


def test_who_may_not_look_above_a_root_may_begin_a_run(credentials: None) -> None:  # noqa: F811
    with FakeS3() as server:
        for place in ("/RUN.json", "/data/RUN.json"):
            for method in ("HEAD", "GET"):
                server.on(method, f"/fake{place}").always().answer(403, "AccessDenied")
        save(server.storage("data/run"))
        assert restored(server.storage("data/run")) == 1


def test_a_run_that_was_begun_in_such_a_place_goes_on(tmp_path: Path) -> None:
    save(tmp_path / "a")
    save(tmp_path / "b")
    (tmp_path / "b").rename(tmp_path / "a" / "data" / "b")
    assert restored(tmp_path / "a" / "data" / "b") == 1


def test_a_link_does_not_hide_where_a_root_lies(tmp_path: Path) -> None:
    save(tmp_path / "a")
    (tmp_path / "link").symlink_to(tmp_path / "a" / "commits")
    with pytest.raises(BadInputError, match="is a part of the run"):
        save(tmp_path / "link" / "x")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_root_may_be_a_path(tmp_path: Path) -> None:
    """E10: `pathlib.Path`, and whatever else says what path it is."""
    root = tmp_path / "run"
    save(root)
    assert restored(root) == 1
    state = {"w": torch.zeros(3, dtype=torch.int64)}
    with Prefetch(root) as ahead, Checkpointer(root) as checkpointer:
        assert checkpointer.restore(state, prefetched=ahead) is not None
    dcp.save({"w": torch.arange(3)}, storage_writer=DcpWriter(root, 2))
    dcp.load(state, storage_reader=DcpReader(root, 2))
    assert state["w"].tolist() == [0, 1, 2]
    assert restored(PurePosixPath(root)) == 2  # type: ignore[arg-type]


@pytest.mark.parametrize("root", [None, 7, b"/x", ["x"]])
def test_what_is_no_root_is_named(root: object) -> None:
    with pytest.raises(BadInputError, match=r"^root: .* give a path, a URL or a Storage"):
        Checkpointer(root)  # type: ignore[arg-type]
