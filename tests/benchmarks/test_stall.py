"""The parts of `stall` that figures rest on: the workload, the comparison, the watcher, the ratios."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.stall import _ratios, modes
from benchmarks.stall.block import BlockFailed, run_block
from benchmarks.stall.rank import Block
from benchmarks.training.modes import MODES, Mode
from benchmarks.training.workload import DIM, Trainer, zipf_ids
from benchmarks.watch import Watch

MIB = 1 << 20
WAIT_S = 60.0


@pytest.fixture
def trainer() -> Iterator[Trainer]:
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield Trainer(2 * MIB, init_device_mesh("cpu", (1,)))
    finally:
        dist.destroy_process_group()


def test_ids_are_in_range_and_a_few_rows_get_most_lookups() -> None:
    rows = 100_000
    ids = zipf_ids(rows, (4, 50_000), torch.Generator().manual_seed(3))
    assert ids.shape == (4, 50_000)
    assert int(ids.min()) >= 0
    assert int(ids.max()) < rows
    _, counts = ids.unique(return_counts=True)
    hottest = counts.sort(descending=True).values[: rows // 100].sum()
    assert hottest > 0.5 * ids.numel()
    assert len(counts) > rows // 5
    # The popular rows aren't neighbours: chunks of a table are touched alike.
    assert ids.unique().diff().max() < rows // 100


def test_a_step_changes_looked_up_rows_with_their_optimizer_state_and_no_others(
    trainer: Trainer,
) -> None:
    before = trainer.state.like()
    before.copy_from(trainer.state)
    trainer.step(contextlib.nullcontext, ready=False)
    for n in range(4):
        moved = (
            trainer.state.local[f"tables.{n}.weight"] != before.local[f"tables.{n}.weight"]
        ).any(1)
        adapted = trainer.state.local[f"tables.{n}.momentum"] != 0
        assert torch.equal(moved, adapted)
        assert 0 < int(moved.sum()) < len(moved)
    assert trainer.step(contextlib.nullcontext, ready=True)


def test_the_state_is_one_memory_under_two_names(trainer: Trainer) -> None:
    local, sharded = trainer.state.local, trainer.state.sharded
    assert local.keys() == sharded.keys()
    for name in local:
        if name.startswith("tables."):
            assert sharded[name].to_local().data_ptr() == local[name].data_ptr()  # type: ignore[attr-defined]


def test_a_single_flipped_bit_is_found_also_in_nans(trainer: Trainer) -> None:
    copy = trainer.state.like()
    copy.copy_from(trainer.state)
    trainer.state.local["tables.1.weight"][3, DIM - 1] = float("nan")
    copy.local["tables.1.weight"][3, DIM - 1] = float("nan")
    assert copy.differing(trainer.state) == {}
    copy.local["tables.2.momentum"].view(torch.int32)[5] ^= 1
    assert copy.differing(trainer.state) == {"tables.2.momentum": 1}


def test_the_watcher_sees_memory_and_cpu_of_children_too() -> None:
    inner = "x = bytearray(b'x') * (64 << 20); print('.', flush=True); input()"
    outer = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {inner!r}])"
    process = subprocess.Popen(
        [sys.executable, "-c", outer], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdout.readline()
        began = time.monotonic()
        with Watch([process.pid]) as watch:
            while watch.peak_bytes(began, time.monotonic()) < 64 * MIB:
                assert time.monotonic() < began + WAIT_S, "the child's memory was never seen"
        assert watch.peak_bytes(began, time.monotonic()) < 200 * MIB
        assert watch.samples[-1].own_cpu_s <= watch.samples[-1].all_cpu_s
    finally:
        process.stdin.close()
        process.stdout.close()
        process.wait()


def test_a_mode_that_fails_gives_its_reason(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    block = Block("no such mode", 0, MIB, 1, 1, 1)
    with pytest.raises(BlockFailed, match="KeyError: 'no such mode'"):
        run_block(block, 1, tmp_path, WAIT_S)
    assert os.listdir(tmp_path) == ["file"]


def test_a_package_that_is_missing_or_of_another_version_is_skipped_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    peer = Mode(MODES["torchsnapshot"].saver, False, "no-such-package", "1.0")
    assert peer.unavailable() == (
        "no-such-package is not installed: pip install 'sidestage[bench]'"
    )
    monkeypatch.setattr(modes, "version", lambda _: "2.0")
    assert peer.unavailable() == "no-such-package is 2.0, compared is 1.0"
    assert MODES["sidestage"].unavailable() is None


def test_ratios_take_the_better_peer_and_the_worst_rank_count() -> None:
    def row(
        mode: str, ranks: int, blocked: float, lost: float, **more: object
    ) -> dict[str, object]:
        return {
            "mode": mode,
            "ranks": ranks,
            "status": "ok",
            "blocked_ms": blocked,
            "lost_ms": lost,
            "extra_rss_vs_state": 1.0,
            "step_inflation": 1.0 + ranks,
            "exact": True,
            **more,
        }

    rows = [
        row("sidestage", 1, 50, 100),
        row("dcp.async_save", 1, 200, 400),
        row("dcp.async_save + stager", 1, 100, 500),
        row("sidestage", 2, 30, 300),
        row("dcp.async_save", 2, 100, 400),
        {"mode": "dcp.async_save + stager", "ranks": 2, "status": "failed", "reason": "x"},
    ]
    ratios = _ratios(rows, [1, 2])
    assert ratios["block_vs_dcp_async_1_ranks"] == 0.5
    assert ratios["lost_vs_dcp_async_1_ranks"] == 0.25
    assert ratios["block_vs_dcp_async_2_ranks"] == 0.3
    assert ratios["block_vs_dcp_async"] == 0.5
    assert ratios["lost_vs_dcp_async"] == 0.75
    assert ratios["step_inflation"] == 3.0
    assert ratios["exact"] is True
    rows[3]["exact"] = False
    assert _ratios(rows, [1, 2])["exact"] is False
    # Ours didn't run at all: nothing was shown.
    assert _ratios(rows[1:3], [1])["exact"] is False
