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

from benchmarks.ranks import RanksFailed
from benchmarks.stall import figures
from benchmarks.stall.block import run_block
from benchmarks.stall.rank import Block
from benchmarks.training import modes
from benchmarks.training.modes import DCP_ASYNC, DCP_STAGER, MODES, OURS, UNPACED, Mode
from benchmarks.training.tables import KINDS, has_torchrec
from benchmarks.training.workload import DIM, Trainer, Workload, uniform_ids, zipf_ids
from benchmarks.watch import Watch

MIB = 1 << 20
WAIT_S = 60.0


@pytest.fixture(params=KINDS)
def trainer(request: pytest.FixtureRequest) -> Iterator[Trainer]:
    if request.param == "torchrec" and not has_torchrec():
        pytest.skip("torchrec is not installed")
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield Trainer(Workload(2 * MIB, request.param))
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


def test_uniform_ids_are_in_range_and_hit_as_many_rows_as_they_can() -> None:
    ids = uniform_ids(1000, (2, 500), torch.Generator().manual_seed(3))
    assert 0 <= int(ids.min()) < int(ids.max()) < 1000
    assert len(ids.unique()) > 600


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
        assert 0 < int(moved.sum()) < len(moved)
        momentum = f"tables.{n}.momentum"
        if momentum in trainer.state.local:
            adapted = trainer.state.local[momentum].reshape(len(moved), -1) != 0
            assert torch.equal(moved, adapted.any(1))
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
    copy.local["tables.2.weight"].view(torch.int32)[5, 0] ^= 1
    assert copy.differing(trainer.state) == {"tables.2.weight": 1}


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
    block = Block("no such mode", MIB, 1, 1, 1, "plain")
    with pytest.raises(RanksFailed, match="KeyError: 'no such mode'"):
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


def test_ratios_take_the_worst_count_of_ranks_and_time_lost_without_a_free_core() -> None:
    def row(
        mode: str, ranks: int, blocked: float, lost: float, **more: object
    ) -> dict[str, object]:
        return {
            "part": "modes",
            "mode": mode,
            "ranks": ranks,
            "size_mib": 64,
            "status": "ok",
            "blocked_ms": blocked,
            "lost_ms": lost,
            "extra_rss_vs_state": 1.0,
            "step_inflation": 1.0 + ranks,
            "exact": True,
            **more,
        }

    rows = [
        row(OURS, 1, 50, 300),
        row(DCP_ASYNC, 1, 100, 400),
        row(DCP_STAGER, 1, 50, 500),
        row(OURS, 2, 30, 100),
        row(UNPACED, 2, 30, 40),
        row(DCP_ASYNC, 2, 100, 400),
        {**row(DCP_STAGER, 2, 0, 0), "status": "failed", "reason": "x"},
        row(OURS, 2, 8, 0, part="sizes", size_mib=256),
        row(OURS, 2, 4, 0, part="sizes", size_mib=16),
        {"part": "dense", "mode": OURS, "ranks": 1, "status": "ok", "block_vs_memcpy": 0.9},
    ]
    ratios = figures.ratios(rows)
    assert ratios["block_vs_dcp_async_1_ranks"] == 0.5
    assert ratios["block_vs_dcp_async_2_ranks"] == 0.3
    assert ratios["block_vs_dcp_async"] == 0.5
    assert ratios["block_vs_dcp_async_stager"] == 1.0
    assert ratios["lost_vs_dcp_async_1_ranks"] == 0.75
    assert ratios["lost_vs_dcp_async"] == 0.25
    assert ratios["lost_vs_dcp_async_unpaced"] == 0.1
    assert ratios["step_inflation"] == 3.0
    assert ratios["block_4g_vs_quarter_g"] == 2.0
    assert ratios["dense_block_vs_memcpy"] == 0.9
    assert ratios["exact"] is True
    rows[3]["exact"] = False
    assert figures.ratios(rows)["exact"] is False


def test_of_small_things_the_worst_case_counts_and_one_that_failed_leaves_no_figure() -> None:
    def row(mode: str, us: float, ratio: float) -> dict[str, object]:
        named = {"part": "small", "mode": mode, "ranks": 1, "size_mib": 0, "status": "ok"}
        return {**named, "us_each": us, "second_vs_first": ratio}

    rows = [row("tensors", 3.0, 0.1), row("module", 5.0, 0.05), row("values", 1.0, 1.0)]
    found = figures.ratios(rows)
    assert found == {"us_per_tensor": 5.0, "second_vs_first": 0.1, "us_per_value": 1.0}
    rows[1] = {**rows[1], "status": "failed", "reason": "x"}
    found = figures.ratios(rows)
    assert found == {"us_per_tensor": None, "second_vs_first": None, "us_per_value": 1.0}


def test_a_pipeline_that_failed_has_shown_nothing_and_one_that_cant_run_isnt_asked() -> None:
    rows = [
        {"part": "pipelines", "mode": "loop", "ranks": 1, "status": "ok", "exact": True},
        {"part": "pipelines", "mode": "x", "ranks": 1, "status": "skipped", "reason": "r"},
    ]
    assert figures.ratios(rows)["exact"] is True
    rows[1]["status"] = "failed"
    assert figures.ratios(rows)["exact"] is False
