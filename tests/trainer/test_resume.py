"""20 steps straight equal 10 + SIGKILL + 10, bit for bit, on a sharded TorchRec model."""

import hashlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from ckpt.catalog import Catalog
from ckpt.storage import open_storage
from tests.trainer.launch import launch, read_state, run_ranks
from tests.trainer.worker_settings import BATCH_SIZE
from trainer.ett import read_report
from trainer.movielens import load_movielens
from trainer.reader import BatchReader

WORKER = "tests.trainer.worker"
pytestmark = [pytest.mark.distributed, pytest.mark.crash]


@dataclass(frozen=True)
class Runs:
    """A straight run and one that lost its last rank after step 13, three steps after a commit.

    Two ranks that lose one are those of `trainer launch`.
    """

    world_size: int
    straight: Path
    cut: Path
    cut_root: Path


@pytest.fixture(scope="module", params=[1, 2], ids=["world1", "world2"])
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    ranks, tmp = request.param, tmp_path_factory.mktemp("runs")
    found = Runs(ranks, tmp / "straight", tmp / "cut", tmp / "cut-root")
    cut = WORKER, found.cut_root, found.cut, "--die-at=13"
    with ThreadPoolExecutor() as pool:
        straight = pool.submit(
            run_ranks, WORKER, tmp / "straight-root", found.straight, ranks=ranks, restarts=0
        )
        if ranks == 1:
            ends = run_ranks(*cut, ranks=ranks, restarts=1)
        else:
            ends = [launch(*cut, ranks=ranks, restarts=1)]
    for end in [*ends, *straight.result()]:
        assert end.returncode == 0, end.stderr
    return found


def trained(folder: Path, attempt: int, rank: int) -> dict[int, str]:
    """Step -> digest of the labels that it trained on."""
    text = (folder / f"trained-{attempt}-r{rank}.txt").read_text()
    pairs = [line.split() for line in text.splitlines()]
    return {int(p[0]): p[1] for p in pairs if p[0].isdigit()}


def test_ends_in_the_same_state(runs: Runs) -> None:
    straight, cut = read_state(runs.straight), read_state(runs.cut)
    assert set(straight) == set(cut)
    assert {k.partition(".")[0] for k in cut} == {"model", "optimizer", "rng"}
    different = [k for k in straight if not torch.equal(straight[k], cut[k])]
    assert different == []


def test_table_kernels_have_run_equally_often(runs: Runs) -> None:
    for rank in range(runs.world_size):
        ends = [
            (folder / f"trained-{attempt}-r{rank}.txt").read_text().splitlines()
            for folder, attempt in ((runs.straight, 0), (runs.cut, 1))
        ]
        counts = {line for lines in ends for line in lines if line.startswith("kernels ")}
        assert counts == {"kernels 20"}


def test_trains_on_exactly_the_batches_after_the_commit(runs: Runs) -> None:
    data = load_movielens()
    for rank in range(runs.world_size):
        reader = BatchReader(
            len(data.train),
            BATCH_SIZE,
            lambda index: data.train.labels[index],
            rank=rank,
            world_size=runs.world_size,
        )
        batches = iter(reader)
        expected = {
            step: hashlib.sha256(next(batches).numpy().tobytes()).hexdigest()
            for step in range(1, 21)
        }
        assert len(set(expected.values())) == 20  # else a digest wouldn't tell a batch
        assert trained(runs.straight, 0, rank) == expected
        before = trained(runs.cut, 0, rank)
        assert before == {s: expected[s] for s in range(1, 14)}
        after = trained(runs.cut, 1, rank)
        assert after == {s: expected[s] for s in range(11, 21)}


def test_the_account_shows_three_repeated_batches(runs: Runs) -> None:
    found = read_report(runs.cut_root)
    assert [a.resumed_step for a in found.attempts] == [None, 10]
    assert [a.batches_new for a in found.attempts] == [13, 7]
    assert (found.batches_repeated, found.lost_batches) == (3, 0)
    assert 0 < found.ett_percent < 100
    for attempt in found.attempts:
        assert sum(attempt.areas.values()) == pytest.approx(attempt.wall_s, abs=1e-3)


def test_commits_form_one_lineage(runs: Runs) -> None:
    commits = Catalog(open_storage(runs.cut_root)).commits()
    assert [(c.ref.epoch, c.ref.step, c.status) for c in commits] == [
        (1, 10, "ancestor"),
        (2, 20, "latest"),
    ]


@pytest.mark.parametrize("runs", [2], indirect=True, ids=["world2"])
def test_weights_and_optimizer_restore_at_another_world_size(runs: Runs, tmp_path: Path) -> None:
    (other,) = run_ranks(WORKER, runs.cut_root, tmp_path, "--elastic", ranks=1, restarts=0)
    assert other.returncode == 0, other.stderr
    before, after = read_state(runs.cut), read_state(tmp_path)
    shared = {k for k in before if not k.startswith("rng.")}
    assert shared == {k for k in after if not k.startswith("rng.")}
    assert [k for k in sorted(shared) if not torch.equal(before[k], after[k])] == []
    journal = (tmp_path / "trained-0-r0.txt").read_text()
    assert "not_restored: rng.generators" in journal
