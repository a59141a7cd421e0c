"""First answers: how fresh a version was, and their records in the registry."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.screenshots import Clock, Play
from ckpt.errors import StorageError
from ckpt.events import ListSink
from ckpt.storage import LocalStorage
from publisher.answers import AnswerLog, FirstAnswer, answer_key, host_id, measure, record_answer
from publisher.hosting import FirstAnswers
from publisher.registry import Registry


def answer(version: int, host: str = "h1", at_s: float = 9.0, **more: Any) -> FirstAnswer:
    return FirstAnswer(version, host, at_s, 1.0, None, more.get("at_start", False))


def test_freshness_is_never_negative_and_says_by_how_much_clocks_disagree() -> None:
    play = Play(Clock(1000.0))
    manifest = play.publish(play.commit(5))  # committed at 1000, newest batch of 968.5
    made, skew_s = measure(manifest, "h1", 1010.0, at_start=False)
    assert (made.commit_to_answer_s, made.event_to_answer_s, skew_s) == (10.0, 41.5, 0.0)
    early, skew_s = measure(manifest, "h1", 990.0, at_start=True)
    assert (early.commit_to_answer_s, early.event_to_answer_s, skew_s) == (0.0, 21.5, 10.0)
    assert early.first_answered_at_s == 990.0
    assert measure(manifest, "h1", 960.0, at_start=True)[1] == 40.0


@pytest.mark.parametrize(
    ("name", "want"),
    [
        ("serve-1.example.org-8080", "serve-1.example.org-8080"),
        ("../../live", "live"),
        ("a/b c\nd", "a-b-c-d"),
        ("é", "host"),
        ("x" * 300, "x" * 100),
    ],
)
def test_host_names_in_keys(name: str, want: str) -> None:
    assert host_id(name) == want


def test_a_record_is_made_once_and_damaged_ones_are_left_out(tmp_path: Path) -> None:
    registry = Registry(LocalStorage(tmp_path), "serving/")
    for made in (answer(2, "h2"), answer(2, "h1", 7.0), answer(1), answer(2, "h1", 99.0)):
        record_answer(registry, made)
    storage, prefix = registry.storage, registry.prefix
    storage.create(prefix + answer_key(1, "torn"), b"{")
    storage.create(prefix + answer_key(1, "other"), storage.read(prefix + answer_key(2, "h2")))
    storage.create(f"{prefix}answers/readme.txt", b"")
    log = AnswerLog(registry)
    assert log.of([1, 2, 3]) == {2: [answer(2, "h1", 7.0), answer(2, "h2")], 1: [answer(1)]}
    assert log.of([1]) == {1: [answer(1)]}
    assert log.of([1, 2], most=2) == {2: [answer(2, "h1", 7.0), answer(2, "h2")]}
    storage.delete(prefix + answer_key(2, "h1"))
    assert [a.host for a in log.of([2])[2]] == ["h2"]
    # What gets no more first answers is listed once.
    record_answer(registry, answer(1, "late"))
    assert [a.host for a in log.of([1], settled={1})[1]] == ["h1"]
    assert [a.host for a in log.of([1])[1]] == ["h1", "late"]


def test_a_registry_that_cannot_be_written_is_told_once_and_serving_goes_on() -> None:
    play, sink = Play(Clock(1000.0)), ListSink()
    kept: list[int] = []
    broken = {1, 2, 4}

    def record(made: FirstAnswer) -> None:
        if made.version in broken:
            raise StorageError("read-only")
        kept.append(made.version)

    firsts = FirstAnswers("h1", record, clock=play.clock, sink=sink)
    for step in range(1, 5):
        loaded: Any = SimpleNamespace(version=step, manifest=play.publish(play.commit(step)))
        threads = [
            threading.Thread(target=firsts.answered, args=(loaded,), kwargs={"at_start": False})
            for _ in range(4)
        ]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    firsts.close()
    assert [e["version"] for e in sink.named("first_answer")] == [1, 2, 3, 4]
    assert kept == [3]
    assert [e["version"] for e in sink.named("answer_not_recorded")] == [1, 4]
