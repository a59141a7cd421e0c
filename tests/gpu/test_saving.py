"""Saves of tables and dense state on a GPU. Plain tables: nothing here needs torchrec."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from benchmarks.training.modes import Job, Sidestage
from benchmarks.training.tables import Kind
from benchmarks.training.workload import Trainer, Workload
from ckpt import CheckpointConfig

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]
MIB = 1 << 20
ROOT = Path(__file__).parent.parent.parent
DEADLINE_S = 300.0


@pytest.fixture(params=["plain", "plain-sgd"])
def trainer(request: pytest.FixtureRequest) -> Iterator[Trainer]:
    kind: Kind = request.param
    store = dist.HashStore()
    dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=0, world_size=1)
    try:
        yield Trainer(Workload(64 * MIB, kind, "cuda"))
    finally:
        dist.destroy_process_group()


def train(trainer: Trainer, steps: int) -> None:
    for _ in range(steps):
        trainer.step(contextlib.nullcontext, ready=False)


def saver(trainer: Trainer, folder: Path, target_s: float) -> Sidestage:
    job = Job(0, trainer.state, folder, trainer.guarded)
    return Sidestage(job, CheckpointConfig(persist_target_s=target_s))


def wait(ours: Sidestage) -> None:
    ours.checkpointer.wait()
    assert ours.done()


def test_save_never_waits_for_the_gpu(trainer: Trainer, tmp_path: Path) -> None:
    ours = saver(trainer, tmp_path, 0.0)
    train(trainer, 5)
    ours.save(1)  # the first one allocates
    wait(ours)
    train(trainer, 5)
    torch.cuda.set_sync_debug_mode("error")
    try:
        ours.save(2)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    train(trainer, 5)
    wait(ours)
    ours.close()


def test_what_is_stored_is_the_state_at_save(trainer: Trainer, tmp_path: Path) -> None:
    ours = saver(trainer, tmp_path, 0.3)
    kept = trainer.state.like()
    train(trainer, 5)
    for step in range(1, 5):
        kept.copy_from(trainer.state)
        ours.save(step)
        while not ours.done():
            train(trainer, 3)
    assert kept.differing(trainer.state), "nothing changed after save(), so nothing was shown"
    loaded = trainer.state.like()
    ours.restore(4, loaded)
    ours.close()
    assert kept.differing(loaded) == {}
    assert ours.copied_tables() == 0


def test_the_benchmark_runs_on_a_gpu(tmp_path: Path) -> None:
    file, root = tmp_path / "figures.json", tmp_path / "root"
    command = [sys.executable, "-m", "benchmarks", "stall", "--device", "cuda", "--quick"]
    options = ["--parts", "modes,dense,link", "--modes", "sidestage,sidestage unpaced"]
    done = subprocess.run(
        [*command, *options, "--json", str(file), "--root", str(root)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    figures = json.loads(file.read_text())
    assert [r["status"] for r in figures["rows"]] == ["ok"] * len(figures["rows"])
    for key in ("step_inflation", "step_inflation_unpaced", "dense_block_vs_memcpy", "d2h_vs_link"):
        assert figures["ratios"][key] > 0, key
