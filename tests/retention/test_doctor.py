"""What `ckpt doctor` finds out about a store and a machine, and what it makes of it."""

from __future__ import annotations

import errno
import json
import math
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt import Checkpointer
from ckpt.cli import cli
from ckpt.command import run_command
from ckpt.config import CheckpointConfig
from ckpt.doctor import Probe, Speeds, examine_store, free_space
from ckpt.errors import StorageError
from ckpt.findings import Finding, seconds, size
from ckpt.machine import (
    JobSize,
    copy_speed,
    host_memory,
    memory_lock,
    save_cost,
    scheduling,
    staging_bytes,
)
from ckpt.storage import LocalStorage, MemoryStorage, Storage
from ckpt.types import Buffer, ObjectInfo, SystemClock
from tests.faults import FaultyStorage
from tests.retention.clock import FakeClock

SMALL = Probe(most_bytes=2 << 20, most_s=5.0)


def examine(storage: Any, clock: Any = None) -> tuple[dict[str, Finding], Speeds]:
    findings, speeds = examine_store(storage, clock or SystemClock(), SMALL)
    return {f.name: f for f in findings}, speeds


def levels(findings: dict[str, Finding]) -> dict[str, str]:
    return {name: f.level for name, f in findings.items()}


def test_a_good_store_passes_and_is_left_as_it_was(tmp_path: Path) -> None:
    for storage in (LocalStorage(tmp_path / "run"), MemoryStorage()):
        found, speeds = examine(storage)
        expected = {"writable", "create-only", "compare-and-set", "listing", "clock"}
        assert expected | {"write", "read"} <= set(found)
        assert set(levels(found).values()) <= {"ok", "warn"}
        assert speeds.write
        assert speeds.read
        assert speeds.write > 0 < speeds.read
        assert list(storage.list()) == []
    assert [p.name for p in (tmp_path / "run").iterdir()] == [".sidestage-lock"]


class Overwrites(MemoryStorage):
    def create(self, key: str, data: Buffer) -> ObjectInfo:
        return self.put(key, data)


class ForgetsEtags(MemoryStorage):
    def replace_if(self, key: str, data: Buffer, etag: str) -> ObjectInfo:
        return self.put(key, data)


class StaleListing(MemoryStorage):
    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        return iter(list(super().list(prefix))[:-1])


class KeepsDeleted(MemoryStorage):
    def delete(self, key: str) -> None:
        if not key.endswith("listing/0"):
            super().delete(key)


@pytest.mark.parametrize(
    ("kind", "name", "words"),
    [
        (Overwrites, "create-only", "two jobs on this root would destroy"),
        (ForgetsEtags, "compare-and-set", "would undo each other's moves"),
        (StaleListing, "listing", "isn't listed after its write"),
        (KeepsDeleted, "listing", "still there after its deletion"),
    ],
)
def test_each_broken_promise_is_found(kind: type[Storage], name: str, words: str) -> None:
    found, _ = examine(kind())
    assert found[name].level == "fail"
    assert words in found[name].text
    assert [n for n, f in found.items() if f.level == "fail"] == [name]


def test_a_store_without_conditional_writes_is_for_one_writer() -> None:
    class Plain(MemoryStorage):
        def probe(self) -> bool:
            return False

    found, _ = examine(Plain())
    assert found["create-only"].level == "warn"
    assert "only one process may write" in found["create-only"].text


def test_a_store_that_cannot_be_written_says_why_and_nothing_else() -> None:
    faulty = FaultyStorage(MemoryStorage())
    faulty.on("create").always().fail(StorageError("k: can't create: Read-only file system"))
    found, speeds = examine(faulty)
    assert levels(found) == {"writable": "fail"}
    assert "Read-only" in found["writable"].text
    assert speeds == Speeds(None, None)


@pytest.mark.parametrize("op", ["put", "list", "writer", "write", "read_into"])
def test_a_store_that_fails_halfway_is_reported_not_raised(op: str) -> None:
    faulty = FaultyStorage(MemoryStorage())
    faulty.on(op).fail(StorageError("down"))
    found, _ = examine(faulty)
    assert [f.text for f in found.values() if f.level == "fail"] == ["down"]
    assert list(faulty.inner.list()) == []


def test_the_probe_is_bounded_in_time_too() -> None:
    faulty, clock = FaultyStorage(MemoryStorage()), FakeClock()
    write = faulty._call

    def slow(op: str, key: str, effect: Any) -> Any:
        clock.advance(1.0 if op in ("write", "read_into") else 0.0)
        return write(op, key, effect)

    faulty._call = slow  # type: ignore[method-assign]
    _, speeds = examine(faulty, clock)
    assert (speeds.write, speeds.read) == (1 << 20, 1 << 20)
    examine_store(faulty, clock, Probe(most_bytes=1 << 40, most_s=3.0))
    assert len([op for op, _ in faulty.calls if op == "write"]) == 2 + 3


def test_clock_skew_against_the_store(tmp_path: Path) -> None:
    class Behind(FakeClock):
        def time(self) -> float:
            return SystemClock().time() - 90.0

    found, _ = examine(LocalStorage(tmp_path / "run"), Behind())
    assert found["clock"].level == "warn"
    assert found["clock"].values["skew_s"] == pytest.approx(90.0, abs=1.0)

    class Tells(MemoryStorage):
        def time_s(self) -> float:
            return 1005.0

    found, _ = examine(Tells(), FakeClock())
    assert found["clock"].values == {"skew_s": 5.0}
    assert examine(MemoryStorage())[0]["clock"].text == "this store doesn't tell its time"


def test_o_direct_refused_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def refuse(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", refuse)
    found, _ = examine(LocalStorage(tmp_path / "run"))
    assert found["O_DIRECT"].level == "warn"
    assert "refused (Invalid argument)" in found["O_DIRECT"].text


def test_free_space_is_counted_in_checkpoints(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path / "not" / "yet")
    free = free_space(storage, None).values["free_bytes"]
    assert free
    for state, level in ((free // 4, "ok"), (free * 2 // 3, "warn"), (free * 2, "fail")):
        assert free_space(storage, int(state)).level == level
    assert free_space(MemoryStorage(), 1).level == "ok"


def test_the_schedulers_classes_are_tried_in_a_thread_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = (os.sched_getscheduler(0), os.getpriority(os.PRIO_PROCESS, 0))
    assert {f.name for f in scheduling()} == {"SCHED_IDLE", "nice"}
    assert (os.sched_getscheduler(0), os.getpriority(os.PRIO_PROCESS, 0)) == before

    def refuse(*_: Any) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    monkeypatch.setattr(os, "setpriority", refuse)
    assert [f.level for f in scheduling()] == ["warn", "warn"]


def test_memory_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    limit = [1 << 30]
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit[0], limit[0]))
    assert memory_lock(JobSize(1 << 30)).level == "ok"
    assert memory_lock(JobSize(4 << 30, 4, 4)).level == "ok"
    short = memory_lock(JobSize(2 << 30))
    assert short.level == "warn"
    assert "1.0 GiB, 2.0 GiB are staged" in short.text
    limit[0] = resource.RLIM_INFINITY
    assert memory_lock(JobSize(1 << 50)).text == "unlimited"


def test_host_memory_is_the_formula_of_the_docs() -> None:
    config = CheckpointConfig(max_pending=2, chunk_bytes=16 << 20)
    job = JobSize(state_bytes=80 << 30, ranks=16, hosts=2)
    assert staging_bytes(job, config) == 2 * (40 << 30) + 8 * 2 * (16 << 20)
    assert host_memory(JobSize(1000), config).level == "ok"
    assert host_memory(JobSize(1 << 60), config).level == "warn"


def test_the_interval_is_youngs_and_no_shorter_than_a_save() -> None:
    job = JobSize(state_bytes=8_000_000_000, ranks=4, hosts=1)
    cost, interval = save_cost(job, 1e9, 4e8, failures_per_day=2.0)
    assert cost.values == {"block_s": 2.0, "persist_s": 20.0}
    best = math.sqrt(2 * 2.0 * 43200.0)
    assert interval.values["interval_s"] == pytest.approx(best, abs=1e-3)
    _, interval = save_cost(job, 1e9, 1e6, failures_per_day=2.0)
    assert interval.values["interval_s"] == 8000.0
    assert "takes 2.2 h to persist" in interval.text
    cost, _ = save_cost(job, 1e9, None, failures_per_day=2.0)
    assert cost.values == {"block_s": 2.0}
    assert copy_speed(SystemClock()) > 1e6


def test_numbers_for_people() -> None:
    assert [size(n) for n in (0, 1023, 1536, 5 << 30, 3 << 40)] == [
        *("0 B", "1023 B", "1.5 KiB", "5.0 GiB", "3.0 TiB")
    ]
    assert [seconds(s) for s in (0.0005, 1.5, 600, 9000)] == [
        *("0.5 ms", "1.5 s", "10.0 min", "2.5 h")
    ]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = str(tmp_path / "run")
    assert run_command(cli, ["doctor", root]) == 0
    assert "--state-bytes N adds what a save will cost" in capsys.readouterr().out
    with Checkpointer(root) as c:
        c.save(1, {"t": torch.zeros(1_000_000)}).committed.result()
    assert run_command(cli, ["doctor", root, "--failures-per-day", "4", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    found = {f["name"]: f for f in said["findings"]}
    assert said["usable"] is True
    assert found["save"]["text"].startswith("3.8 MiB: blocks ")
    assert found["interval"]["values"]["failures_per_day"] == 4.0
    assert {"free space", "memory lock", "SCHED_IDLE", "nice", "host memory"} <= set(found)
    code = run_command(cli, ["doctor", root, "--state-bytes", str(1 << 60), "--json"])
    assert code == 6
    said = json.loads(capsys.readouterr().out)
    assert said["usable"] is False
    assert [f["name"] for f in said["findings"] if f["level"] == "fail"] == ["free space"]
    assert run_command(cli, ["doctor", root, "--hosts", "2", "--ranks", "1"]) == 2
    assert run_command(cli, ["doctor", root, "--failures-per-day", "0"]) == 2
    assert run_command(cli, ["doctor", str(tmp_path / "run" / "RUN.json")]) == 2
