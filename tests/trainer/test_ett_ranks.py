"""E44: the account of a run is that of all its ranks: what one loses while others wait for it, all lose."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.trainer.scripted_run import Script, check_sums, spent
from trainer.ett import RunReport, read_report, report
from trainer.ett.table import show
from trainer.ett.written import as_dict
from trainer.ledger import Ledger


class Pair(Script):
    """Two ranks that wait for each other in each step."""

    def __init__(self, root: Path, ranks: int = 2, skew_s: float = 0.0) -> None:
        super().__init__(root)
        self.ledgers: list[Ledger] = []
        for rank in range(ranks):
            self.clock.wall_offset_s += skew_s
            self.ledgers.append(self.begin(1, rank=rank, world_size=ranks))
        self.step = 0

    def together(self, seconds: float = 1.0, **lost: dict[int, float]) -> None:
        """A step of so many seconds in which ranks lose some of it: area -> rank -> seconds, at its begin."""
        self.step += 1
        begun = {}
        ends: list[tuple[float, int, str]] = []
        for area, ranks in lost.items():
            for rank, lost_s in ranks.items():
                if area in ("data", "overlay"):
                    self.ledgers[rank].waited(area, lost_s)  # type: ignore[arg-type]
                else:
                    begun[rank] = self.ledgers[rank].begin_span(area)
                    ends.append((lost_s, rank, area))
        at_s = 0.0
        for end_s, rank, area in sorted(ends):
            self.clock.advance(end_s - at_s)
            at_s = end_s
            self.ledgers[rank].end_span(area, begun[rank])
        self.clock.advance(seconds - at_s)
        for ledger in self.ledgers:
            ledger.stepped(self.step, self.step)

    def end(self) -> RunReport:
        for ledger in self.ledgers:
            self.close(ledger)
        found = read_report(self.root)
        check_sums(found)
        return found


def test_case_e44_what_only_rank_1_loses_counts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pair = Pair(tmp_path)
    for _ in range(20):
        pair.together(1.0, blocked_in_save={1: 0.5})
    found = pair.end()
    assert spent(found.areas) == {"training_new": 10, "blocked_in_save": 10}
    assert found.ett_percent == pytest.approx(50)
    (attempt,) = found.attempts
    assert (attempt.told_by, attempt.batches_new) == (0, 20)
    assert {r: spent(a) for r, a in attempt.lost_elsewhere.items()} == {1: {"blocked_in_save": 10}}
    said = "rank 1 lost 10.0 s more than rank 0, most of it in blocked in save, while the others wa"
    assert said in found.notes[0]
    show([found], None)
    assert said in " ".join(capsys.readouterr().out.split())
    assert json.loads(json.dumps(as_dict([found], None)))["attempts"][0]["told_by"] == 0


def test_case_e44_ranks_that_take_turns_in_losing(tmp_path: Path) -> None:
    """No step is whole for both, though each rank alone trains three quarters of the time."""
    pair = Pair(tmp_path)
    for n in range(20):
        pair.together(1.0, blocked_in_save={n % 2: 0.5})
    found = pair.end()
    assert spent(found.areas) == {"training_new": 10, "blocked_in_save": 10}


@pytest.mark.parametrize("skew_s", [0.0, 0.4, -0.9, 50.0])
def test_case_e44_what_all_ranks_lose_at_once_counts_once(tmp_path: Path, skew_s: float) -> None:
    """Whatever their hosts' clocks say; and of different losses the largest."""
    pair = Pair(tmp_path, ranks=3, skew_s=skew_s)
    for n in range(30):
        if n % 10 == 5:
            pair.together(1.5, blocked_in_save={0: 0.25, 1: 0.5, 2: 0.375})
        else:
            pair.together(1.0)
    areas = spent(pair.end().areas)
    assert (areas["training_new"], areas["blocked_in_save"]) == (30, 1.5)


def test_case_e44_waits_within_a_line_of_steps(tmp_path: Path) -> None:
    """Of them the ledger has sums: of two ranks in the same steps, the larger one counts."""
    pair = Pair(tmp_path)
    for n in range(41):
        pair.together(1.0, data={0: 0.1 * (n > 0), 1: 0.3 * (n > 0)}, overlay={1: 0.05 * (n > 0)})
    found = pair.end()
    assert spent(found.areas) == {"training_new": 27, "data_wait": 12, "overlay_pressure": 2}
    assert {r: spent(a) for r, a in found.attempts[0].lost_elsewhere.items()} == {
        1: {"data_wait": 8, "overlay_pressure": 2}
    }


def test_case_e44_a_span_of_one_rank_and_waits_of_another(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    pair.together(1.0)
    for n in range(1, 31):
        spans = {"evaluation": {0: 0.75}} if n % 10 == 0 else {}
        pair.together(1.0, data={1: 0.25}, **spans)
    found = pair.end()
    assert spent(found.areas) == {
        "training_new": 31 - 3 * 0.75 - 27 * 0.25,
        "data_wait": 27 * 0.25,
        "evaluation": 3 * 0.75,
    }


def test_case_e44_a_start_that_takes_one_rank_longer(tmp_path: Path) -> None:
    """The other one waits for it in its first step."""
    pair = Pair(tmp_path)
    number = pair.ledgers[1].begin_span("pt2_compilation")
    pair.clock.advance(6.0)
    pair.ledgers[1].end_span("pt2_compilation", number)
    pair.together(1.0)
    for _ in range(5):
        pair.together(1.0)
    found = pair.end()
    assert spent(found.areas) == {"training_new": 6, "pt2_compilation": 6}


@pytest.mark.parametrize("slow", [0, 1])
def test_case_e44_of_ranks_that_do_not_wait_for_each_other_the_slowest_tells(
    tmp_path: Path, slow: int
) -> None:
    """The run took as long as it did. What the other one lost meanwhile cost nothing."""
    for rank in (0, 1):
        run = Script(tmp_path)  # with a clock of its own: both begin at one time
        ledger = run.begin(1, rank=rank, world_size=2)
        for n in range(1, 11):
            if rank == slow:
                run.spend(ledger, "blocked_in_save", 0.5)
                run.steps(ledger, n, n)
            else:
                ledger.waited("data", 0.4)
                run.steps(ledger, n, n, 0.5)
        run.close(ledger)
    found = read_report(tmp_path)
    check_sums(found)
    assert spent(found.areas) == {"training_new": 10, "blocked_in_save": 5}
    (attempt,) = found.attempts
    assert (attempt.told_by, attempt.lost_elsewhere) == (slow, {})
    assert found.notes == ()


def test_case_e44_repeated_batches_keep_their_part(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    for _ in range(10):
        pair.together(1.0)
    pair.end()
    again = [pair.begin(2, at=6, of=1, rank=r, world_size=2) for r in (0, 1)]
    pair.ledgers, pair.step = again, 6
    for _ in range(8):
        pair.together(1.0, blocked_in_save={1: 0.25})
    for ledger in again:
        pair.close(ledger)
    found = read_report(tmp_path)
    check_sums(found)
    second = found.attempts[1]
    assert (second.batches_new, second.batches_repeated) == (4, 4)
    areas = spent(second.areas)
    assert areas["blocked_in_save"] == pytest.approx(2.0)
    assert areas["training_new"] + areas["training_repeated"] == pytest.approx(6.0)
    assert areas["training_repeated"] == pytest.approx(3.0, abs=0.1)


def test_case_e44_a_ledger_that_falls_silent_counts_until_then(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    for _ in range(5):
        pair.together(1.0, blocked_in_save={1: 0.5})
    silent = pair.ledgers.pop()
    silent.close()
    for _ in range(5):
        pair.together(1.0)
    found = pair.end()
    assert spent(found.areas) == {"training_new": 7.5, "blocked_in_save": 2.5}


_lost = st.dictionaries(st.integers(0, 2), st.floats(0.0, 0.9), max_size=3)
_areas = st.dictionaries(
    st.sampled_from(["blocked_in_save", "evaluation", "data", "overlay", "pt2_compilation"]), _lost
)


@given(st.lists(_areas, min_size=1, max_size=12))
def test_no_less_than_the_worst_rank_and_no_more_than_all(
    tmp_path_factory: pytest.TempPathFactory, steps: list[Any]
) -> None:
    """Each rank's own loss is a lower bound, that of all ranks together an upper one; the sums are right."""
    pair = Pair(tmp_path_factory.mktemp("run"), ranks=3)
    pair.together(1.0)
    own = [0.0, 0.0, 0.0]
    for lost in steps:
        # Of one rank in one step one thing: spans would nest, and waits fill the rest.
        seen: set[int] = set()
        told: dict[str, dict[int, float]] = {}
        for area, ranks in lost.items():
            kept = {r: s for r, s in ranks.items() if r not in seen}
            seen |= set(kept)
            told[area] = kept
            for r, s in kept.items():
                own[r] += s
        pair.together(1.0, **told)
    found = pair.end()
    lost_s = found.wall_s - found.areas["training_new"]
    assert max(own) - 0.01 <= lost_s <= sum(own) + 0.01


def test_one_rank_is_as_before() -> None:
    process = {"event": "process", "t": 0.0, "created_at_s": 0.0}
    steps = {"event": "steps", "begin": 0.0, "t": 5.0, "step": 5, "position": 5}
    waits = dict.fromkeys(("data_s", "overlay_s", "fence_s", "slot_s"), 0.0)
    found = report({1: {7: [process, {**steps, **waits}]}})
    assert (found.attempts[0].told_by, found.attempts[0].lost_elsewhere) == (7, {})
