"""How often to save: the formula, and the same steps on all ranks."""

from __future__ import annotations

import itertools
import logging
import math
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from ckpt.catalog import Catalog
from ckpt.coordinator import Coordinator
from ckpt.errors import BadInputError, SaveError
from ckpt.outcomes import SaveHandle, SaveStats, uncommitted
from ckpt.storage import LocalStorage
from ckpt.types import CommitRef
from tests.trainer.fake_clock import FakeClock
from trainer import BatchReader, Session
from trainer.failures import Record
from trainer.interval import (
    DAY_S,
    AutoInterval,
    SaveCosts,
    best_interval_s,
    between_failures_s,
    cost_share,
)
from trainer.schedule import SaveSchedule


@pytest.mark.parametrize(
    ("block_s", "minutes", "percent"), [(15.0, 15.5, 3.23), (1.0, 4.0, 0.83), (0.2, 1.8, 0.37)]
)
def test_the_studys_table_for_three_failures_a_day(
    block_s: float, minutes: float, percent: float
) -> None:
    costs = SaveCosts(block_s, 0.0, DAY_S / 3)
    interval_s = best_interval_s(costs)
    assert interval_s / 60 == pytest.approx(minutes, abs=0.06)
    assert 100 * cost_share(interval_s, costs) == pytest.approx(percent, abs=0.006)


@given(st.floats(1e-4, 100), st.floats(0, 1000), st.floats(600, 1e7), st.floats(0.01, 100).map(abs))
def test_no_other_interval_loses_less(
    block_s: float, lag_s: float, between_s: float, factor: float
) -> None:
    costs = SaveCosts(block_s, lag_s, between_s)
    best_s = best_interval_s(costs)
    assert best_s >= lag_s
    other_s = max(best_s * factor, lag_s)
    assert cost_share(best_s, costs) <= cost_share(other_s, costs) + 1e-9


def test_a_runs_own_record_outweighs_the_assumption() -> None:
    assert between_failures_s(0, 0.0) == DAY_S
    assert between_failures_s(3, 0.0) == DAY_S / 4
    assert between_failures_s(0, 9 * DAY_S) == 10 * DAY_S
    assert between_failures_s(300, 100 * DAY_S) == pytest.approx(DAY_S / 3, rel=0.02)


def test_ranks_save_at_the_same_steps_and_a_change_of_costs_is_followed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store, clock = dist.HashStore(), FakeClock()
    ranks = [
        AutoInterval(Coordinator(r, 2, store, "t/"), clock, failures=2, since_s=clock.time())
        for r in (0, 1)
    ]
    for rank in ranks:
        rank.begin(100)
    saved: list[int] = []
    block_s = 0.01
    with caplog.at_level(logging.INFO, "sidestage"):
        for step in range(101, 4000):
            clock.advance(0.5)
            if step == 2000:
                block_s = 0.16  # four times the interval
            known = len(saved) > 0
            costs = (block_s if known else None, 5.0 if known else None)
            due = [ranks[0].due(step, *costs), ranks[1].due(step, None, None)]
            assert due[0] == due[1]
            if due[0]:
                saved.append(step)
    gaps = [b - a for a, b in itertools.pairwise(saved)]
    # sqrt(2 * 0.01 s * 8 h) = 24 s = 48 steps; the failures' own day fades in slowly
    assert saved[0] == 100 + 32, "soon: it shows what a save costs"
    assert gaps[:2] == pytest.approx([480, 480], abs=2), (
        "decided on a block of 1 s, not knowing more"
    )
    assert gaps[2] == pytest.approx(48, abs=2)
    assert gaps[-1] == pytest.approx(192, abs=6)
    assert "saving every 49 steps, 24 s: what loses least" in caplog.text


def test_not_more_often_than_a_save_takes(caplog: pytest.LogCaptureFixture) -> None:
    clock = FakeClock()
    auto = AutoInterval(
        Coordinator(0, 1, None, ""), clock, failures=0, since_s=clock.time() - 10 * DAY_S
    )
    auto.begin(0)
    saved = []
    with caplog.at_level(logging.INFO, "sidestage"):
        for step in range(1, 2000):
            clock.advance(1.0)
            if auto.due(step, 1e-5, 90.0):
                saved.append(step)
    assert {b - a for a, b in itertools.pairwise(saved)} == {90}
    assert "90 s: no less than a save takes to commit" in caplog.text


def test_a_session_that_chooses_for_itself(tmp_path: Path) -> None:
    for life in (1, 2):
        data = torch.randn(40, 2)
        reader = BatchReader(len(data), 2, lambda index, data=data: data[index])
        state = {"model": torch.nn.Linear(2, 2)}
        with Session(str(tmp_path), state, reader, save_every="auto") as session:
            while session.steps < 40 * life:
                for _ in session.batches():
                    session.step()
        # Steps take microseconds here, so no save is due before the last one.
        assert [c.ref.step for c in Catalog(LocalStorage(tmp_path)).commits()][-1] == 40 * life
    with pytest.raises(BadInputError, match='save_every = 0: give at least 1, or "auto"'):
        Session(str(tmp_path), state, reader, save_every=0)


def test_what_steps_lose_while_a_save_is_written_counts_as_a_cost_of_it() -> None:
    """Blocks of 10 ms, and 19 steps of each save take 0.1 s more: 1.91 s a save."""
    gaps = {}
    for slower_s in (0.0, 0.1):
        clock, stats = FakeClock(), SaveStats()
        schedule = SaveSchedule("auto", clock)
        failed = Record(99, clock.time() - 99 * DAY_S)  # once a day
        schedule.begin(0, Coordinator(0, 1, None, ""), lambda failed=failed: failed)
        saved: list[int] = []
        handle: SaveHandle | None = None
        for step in range(1, 6000):
            if handle is not None and step == saved[-1] + 20:
                handle.committed.set_result(CommitRef(1, handle.step, "0" * 64))
            writing = handle is not None and not handle.committed.done()
            step_s = 1.0 + slower_s * writing
            clock.advance(step_s)
            if schedule.due(step, 60.0 if step == 1 else step_s, stats):
                saved.append(step)
                staged: Future[None] = Future()
                handle = SaveHandle(step, 0.01, staged, uncommitted())
                stats.blocked_s.append(0.01)
                schedule.saved(handle)
        gaps[slower_s] = saved[-1] - saved[-2]
    assert gaps[0.0] == pytest.approx(math.sqrt(2 * 0.01 * DAY_S), rel=0.03)
    assert gaps[0.1] == pytest.approx(math.sqrt(2 * 1.91 * DAY_S), rel=0.01)


def test_a_save_that_was_skipped_or_failed_tells_nothing_of_a_lag() -> None:
    """The only commit took 100 s, and no interval is shorter: blocks of 10 ms alone ask for 42 s."""
    clock, stats = FakeClock(), SaveStats()
    schedule = SaveSchedule("auto", clock)
    record = Record(99, clock.time() - 99 * DAY_S)  # once a day
    schedule.begin(0, Coordinator(0, 1, None, ""), lambda: record)
    saved: list[int] = []
    first: SaveHandle | None = None
    for step in range(1, 3000):
        clock.advance(1.0)
        if first is not None and step == saved[0] + 100:
            first.committed.set_result(CommitRef(1, saved[0], "0" * 64))
        if schedule.due(step, 1.0, stats):
            saved.append(step)
            handle = SaveHandle(step, 0.01, Future(), uncommitted())
            stats.blocked_s.append(0.01)
            if first is None:
                first = handle
            else:
                handle.committed.set_exception(SaveError("skipped, or failed"))
            schedule.saved(handle)
    assert len(saved) > 10
    assert saved[-1] - saved[-2] == 100
