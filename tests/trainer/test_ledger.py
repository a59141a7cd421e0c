import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from ckpt.errors import CorruptError, StorageError
from tests.trainer.fake_clock import FakeClock
from trainer.ledger import Ledger, SaveEvents, process_age_s, read_ledger


def test_times_count_from_the_process_creation(tmp_path: Path) -> None:
    clock = FakeClock(now_s=500.0)
    ledger = Ledger(clock, age_s=3.0)
    ledger.record("process", created_at_s=ledger.created_at_s, rank=0)
    clock.advance(2.0)
    ledger.open(tmp_path / "events" / "a.jsonl")
    clock.advance(0.25)
    ledger.record("saved", step=1, blocked_s=0.5)
    ledger.close()
    events = read_ledger(tmp_path / "events" / "a.jsonl")
    assert events == [
        {"event": "process", "t": 3.0, "created_at_s": 1_000_497.0, "rank": 0},
        {"event": "saved", "t": 5.25, "step": 1, "blocked_s": 0.5},
    ]


def test_a_kill_loses_no_event_and_no_step(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    code = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from trainer.ledger import Ledger\n"
        "ledger = Ledger()\n"
        "ledger.record('process', created_at_s=ledger.created_at_s)\n"
        "ledger.open(Path(sys.argv[1]))\n"
        "for n in range(1, 101): ledger.stepped(n, 3 * n)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code, str(path)], check=False)
    assert ended.returncode == -signal.SIGKILL
    first, rest = read_ledger(path)[1:]
    assert [(e["step"], e["position"]) for e in (first, rest)] == [(1, 3), (100, 300)]
    assert rest["begin"] == first["t"]


def test_steps_share_a_line_until_something_else_happens_or_ten_seconds_have_passed(
    tmp_path: Path,
) -> None:
    clock, path = FakeClock(), tmp_path / "a.jsonl"
    ledger = Ledger(clock, 0.0)
    ledger.record("process", created_at_s=0.0)
    ledger.open(path)

    def step(number: int) -> None:
        clock.advance(1.0)
        ledger.stepped(number, number)

    clock.advance(1.0)
    ledger.record("restored", step=0, position=0, epoch=None)
    with ledger.span("get_first_batch_data"):
        clock.advance(2.0)
    with ledger.span("pt2_compilation"):
        clock.advance(1.0)
    step(1)
    ledger.waited("data", 0.25)
    ledger.waited("slot", 0.125)
    step(2)
    ledger.waited("data", 0.25)
    ledger.waited("fence", 0.0625)
    clock.advance(0.25)
    ledger.record("save_committed", step=1)  # told by another thread, inside of step 3
    step(3)
    for n in range(4, 15):
        ledger.waited("overlay", 0.5)
        step(n)
    names = ("begin", "t", "step", "position", "data_s", "overlay_s", "fence_s", "slot_s")
    assert [tuple(e[n] for n in names) for e in read_ledger(path) if e["event"] == "steps"] == [
        # The first step has a line of its own, and begins after what came before: not the compilation.
        (3.0, 5.0, 1, 1, 0.0, 0.0, 0.0, 0.0),
        (5.0, 6.0, 2, 2, 0.25, 0.0, 0.0, 0.125),
        # And so has one in which something was told.
        (6.0, 7.25, 3, 3, 0.25, 0.0, 0.0625, 0.0),
        (7.25, 17.25, 13, 13, 0.0, 5.0, 0.0, 0.0),
        (17.25, 18.25, 14, 14, 0.0, 0.5, 0.0, 0.0),
    ]


def test_threads_record_while_training_steps(tmp_path: Path) -> None:
    ledger = Ledger()
    ledger.record("process", created_at_s=ledger.created_at_s)
    ledger.open(tmp_path / "a.jsonl")

    def spans() -> None:
        for _ in range(200):
            with ledger.span("publishing"):
                pass

    threads = [threading.Thread(target=spans) for _ in range(3)]
    for thread in threads:
        thread.start()
    for n in range(1, 2001):
        ledger.stepped(n, n)
    for thread in threads:
        thread.join()
    events = read_ledger(tmp_path / "a.jsonl")
    begun = [e for e in events if e["event"] == "span_begin"]
    assert len({e["id"] for e in begun}) == 600
    assert not any(e["main"] for e in begun)
    assert sum(e["event"] == "span_end" for e in events) == 600
    steps = [e for e in events if e["event"] == "steps"]
    assert steps[-1]["step"] == 2000
    assert [e["begin"] for e in steps[1:]] == [e["t"] for e in steps[:-1]]  # no gap, no overlap


def test_what_came_before_the_session_follows_its_event(tmp_path: Path) -> None:
    ledger = Ledger(FakeClock(), 0.0)
    with ledger.span("device_init"):
        pass
    ledger.record("process", created_at_s=0.0)
    ledger.open(tmp_path / "a.jsonl")
    names = [e["event"] for e in read_ledger(tmp_path / "a.jsonl")]
    assert names == ["process", "span_begin", "span_end"]


def test_the_interpreters_end_is_recorded_after_the_ledger_was_closed(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from trainer.ledger import Ledger\n"
        "ledger = Ledger()\n"
        "ledger.record('process', created_at_s=ledger.created_at_s)\n"
        "ledger.open(Path(sys.argv[1]))\n"
        "ledger.close()\n"
    )
    subprocess.run([sys.executable, "-c", code, str(path)], check=True)
    assert [e["event"] for e in read_ledger(path)] == ["process", "exited"]


def test_a_torn_last_line_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(
        '{"event":"process","t":1,"created_at_s":0}\n{"event":"nap","t":2}\n{"event":"closed","t":2}\n{"event":"st'
    )
    assert [e["event"] for e in read_ledger(path)] == [
        "process",
        "closed",
    ]  # a nap is from a later version
    path.write_text("")
    assert read_ledger(path) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"event":"process","t":1,"created_at_s":0}\n{"eve\n', r"a\.jsonl:2: not a ledger event"),
        ('{"event":"process","t":1,"created_at_s":0}\n{"nap":2}\n', r"a\.jsonl:2"),
        ('{"event":"process","t":"x"}\n', r"a\.jsonl:1"),
        ("[1]\n", r"a\.jsonl:1"),
        ('{"event":"closed","t":1}\n', r"begins with .closed."),
    ],
)
def test_anything_else_is_corrupt(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(text)
    with pytest.raises(CorruptError, match=message):
        read_ledger(path)


def test_never_writes_into_another_attempts_file(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("mine")
    with pytest.raises(StorageError, match="can't be written: File exists"):
        Ledger(FakeClock(), 0.0).open(path)
    assert path.read_text() == "mine"


def test_a_full_disk_silences_it_once_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ledger = Ledger(FakeClock(), 0.0)
    ledger.record("process", created_at_s=0.0)
    ledger.open(tmp_path / "a.jsonl")
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: real(fd, data[: len(data) // 2]))
    with caplog.at_level(logging.WARNING, "sidestage"):
        ledger.stepped(1, 1)
        monkeypatch.setattr(os, "write", real)
        ledger.stepped(2, 2)
    ledger.close()
    assert [r.message for r in caplog.records] == [
        "the ledger is incomplete from here on: no space left"
    ]
    assert [e["event"] for e in read_ledger(tmp_path / "a.jsonl")] == ["process"]


def test_copies_the_ends_of_saves_and_waits(tmp_path: Path) -> None:
    ledger = Ledger(FakeClock(), 0.0)
    sink = SaveEvents(ledger)
    ledger.record("process", created_at_s=0.0)
    ledger.open(tmp_path / "a.jsonl")
    sink.emit("save_staged", step=5, blocked_s=0.1)
    sink.emit("save_committed", step=5, epoch=2)
    sink.emit("save_failed", step=6, error="no space")
    sink.emit("save_skipped", step=7, error="busy", blocked_s=0.25)
    sink.emit("trainer_waited", why="fence", wait_s=0.5)
    ledger.stepped(7, 7)
    ledger.close()
    *ends, steps = read_ledger(tmp_path / "a.jsonl")[1:]
    assert steps["fence_s"] == 0.5
    assert ends == [
        {"event": "saved", "t": 0.0, "step": 5, "blocked_s": 0.1},
        {"event": "save_committed", "t": 0.0, "step": 5},
        {"event": "save_failed", "t": 0.0, "step": 6, "error": "no space"},
        {"event": "save_skipped", "t": 0.0, "step": 7, "error": "busy", "blocked_s": 0.25},
    ]


def test_process_age_is_that_of_this_process() -> None:
    code = (
        "import time; time.sleep(0.2)\n"
        "from trainer.ledger import process_age_s; print(process_age_s())"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 0.15 < float(out.stdout) < 60
    assert process_age_s() > float(out.stdout)


def test_silence_is_told_in_one_line_until_something_else_happens(tmp_path: Path) -> None:
    clock, path = FakeClock(), tmp_path / "a.jsonl"
    ledger = Ledger(clock, 0.0, beat_s=5.0)
    ledger.record("process", created_at_s=0.0)
    ledger.beat()  # there is no file yet
    ledger.open(path)

    def told() -> list[tuple[str, float]]:
        return [(e["event"], e["t"]) for e in read_ledger(path)[1:]]

    def pause(seconds: float) -> None:
        clock.advance(seconds)
        ledger.beat()

    pause(4.0)
    assert told() == []
    pause(1.0)
    assert told() == [("alive", 5.0)]
    size_bytes = path.stat().st_size
    pause(4.0)
    pause(4.0)
    pause(5.0)
    assert told() == [("alive", 18.0)]
    assert path.stat().st_size == size_bytes
    ledger.record("restored", step=0, position=0, epoch=None)
    pause(6.0)
    clock.advance(1.0)
    ledger.stepped(1, 1)
    ledger.stepped(2, 2)
    pause(6.0)
    clock.advance(1.0)
    ledger.stepped(3, 3)  # a slow step: its line goes on all the same
    pause(7.0)
    assert told() == [
        *(("alive", 18.0), ("restored", 18.0), ("alive", 24.0)),
        *(("steps", 25.0), ("steps", 32.0), ("alive", 39.0)),
    ]
    assert [e["begin"] for e in read_ledger(path) if e["event"] == "steps"] == [18.0, 25.0]
    ledger.close()
    pause(60.0)
    assert told()[-1] == ("alive", 39.0)


def test_signs_of_life_survive_a_kill(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    code = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from trainer.ledger import Ledger, read_ledger\n"
        "path = Path(sys.argv[1])\n"
        "ledger = Ledger(beat_s=0.001)\n"
        "ledger.record('process', created_at_s=ledger.created_at_s)\n"
        "ledger.open(path, beating=True)\n"
        "def last(): return read_ledger(path)[-1]\n"
        "while last()['event'] != 'alive': pass\n"
        "first = last()\n"
        "while last() == first: pass\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code, str(path)], check=False, timeout=60)
    assert ended.returncode == -signal.SIGKILL
    assert [e["event"] for e in read_ledger(path)] == ["process", "alive"]


def test_signs_of_life_end_with_the_ledger(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    ledger = Ledger()
    ledger.open(tmp_path / "a.jsonl", beating=True)
    assert [t.name for t in set(threading.enumerate()) - before] == ["sidestage-ledger"]
    ledger.close()
    assert set(threading.enumerate()) == before


def test_a_step_is_told_without_spans_and_waits_in_it() -> None:
    clock = FakeClock()
    ledger = Ledger(clock, 0.0)
    ledger.record("restored", step=0, position=0, epoch=None)
    with ledger.span("get_first_batch_data"):
        clock.advance(5.0)
    clock.advance(2.0)
    ledger.stepped(1, 1)
    assert ledger.step_s == pytest.approx(2.0)
    with ledger.span("evaluation"):
        clock.advance(10.0)
        with ledger.span("pt2_compilation"):
            clock.advance(3.0)
    with ledger.span("blocked_in_save"):
        clock.advance(2.0)
        ledger.waited("slot", 2.0)
    ledger.waited("data", 0.25)
    clock.advance(1.0)
    ledger.stepped(2, 2)
    assert ledger.step_s == pytest.approx(0.75)
    with ledger.span("evaluation"):
        clock.advance(1.0)
        ledger.stepped(3, 3)
        assert ledger.step_s == pytest.approx(0.0)
        clock.advance(1.0)
    clock.advance(0.5)
    ledger.stepped(4, 4)
    assert ledger.step_s == pytest.approx(0.5)


def test_a_step_knows_spans_that_end_on_another_thread() -> None:
    clock = FakeClock()
    ledger = Ledger(clock, 0.0)
    ledger.stepped(1, 1)
    number = ledger.begin_span("pt2_compilation")
    clock.advance(3.0)
    on_another_thread(lambda: ledger.end_span("pt2_compilation", number))
    clock.advance(0.5)
    on_another_thread(lambda: ledger.end_span("x", ledger.begin_span("x")))
    ledger.stepped(2, 2)
    assert ledger.step_s == pytest.approx(0.5)
    with ledger.span("evaluation"):
        clock.advance(1.0)
    clock.advance(0.25)
    ledger.stepped(3, 3)
    assert ledger.step_s == pytest.approx(0.25)


def on_another_thread(what: Callable[[], None]) -> None:
    thread = threading.Thread(target=what)
    thread.start()
    thread.join()
