import logging
import os
import signal
import subprocess
import sys
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
    ledger.record("step", step=1, position=1)
    ledger.close()
    events = read_ledger(tmp_path / "events" / "a.jsonl")
    assert events == [
        {"event": "process", "t": 3.0, "created_at_s": 1_000_497.0, "rank": 0},
        {"event": "step", "t": 5.25, "step": 1, "position": 1},
    ]


def test_every_event_is_on_disk_before_record_returns(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    code = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from trainer.ledger import Ledger\n"
        "ledger = Ledger()\n"
        "ledger.record('process', created_at_s=ledger.created_at_s)\n"
        "ledger.open(Path(sys.argv[1]))\n"
        "for n in range(100): ledger.record('step', step=n, position=n)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code, str(path)], check=False)
    assert ended.returncode == -signal.SIGKILL
    assert [e["step"] for e in read_ledger(path)[1:]] == list(range(100))


def test_a_torn_last_line_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(
        '{"event":"process","t":1,"created_at_s":0}\n{"event":"step","t":2,"step":1,"position":1}\n{"event":"st'
    )
    assert [e["event"] for e in read_ledger(path)] == ["process", "step"]
    path.write_text("")
    assert read_ledger(path) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"event":"process","t":1,"created_at_s":0}\n{"eve\n', r"a\.jsonl:2: not a ledger event"),
        ('{"event":"process","t":1,"created_at_s":0}\n{"event":"nap","t":2}\n', r"a\.jsonl:2"),
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
        ledger.record("step", step=1, position=1)
        monkeypatch.setattr(os, "write", real)
        ledger.record("step", step=2, position=2)
    ledger.close()
    assert [r.message for r in caplog.records] == [
        "the ledger is incomplete from here on: no space left"
    ]
    assert [e["event"] for e in read_ledger(tmp_path / "a.jsonl")] == ["process"]


def test_copies_the_ends_of_saves(tmp_path: Path) -> None:
    ledger = Ledger(FakeClock(), 0.0)
    sink = SaveEvents(ledger)
    ledger.record("process", created_at_s=0.0)
    ledger.open(tmp_path / "a.jsonl")
    sink.emit("save_staged", step=5, blocked_s=0.1)
    sink.emit("save_committed", step=5, epoch=2)
    sink.emit("save_failed", step=6, error="no space")
    ledger.close()
    assert read_ledger(tmp_path / "a.jsonl")[1:] == [
        {"event": "save_committed", "t": 0.0, "step": 5},
        {"event": "save_failed", "t": 0.0, "step": 6, "error": "no space"},
    ]


def test_process_age_is_that_of_this_process() -> None:
    code = (
        "import time; time.sleep(0.2)\n"
        "from trainer.ledger import process_age_s; print(process_age_s())"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 0.15 < float(out.stdout) < 60
    assert process_age_s() > float(out.stdout)
