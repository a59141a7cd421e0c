"""The golden-parity gate in its own process, and a crash in there."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from ckpt.errors import StorageError
from ckpt.trust import TrustList
from publisher import keys, spare
from publisher.gates import GateError
from publisher.parity import FreshParity, parity_in_fresh_process
from publisher.records import VersionManifest
from publisher.registry import Registry
from publisher.spare import SpareProcesses
from tests.publisher.conftest import Bench
from tests.publisher.tiny import flip_byte, random_tensors

StandIn = Callable[[str], None]


@pytest.fixture
def published(local_bench: Bench) -> VersionManifest:
    local_bench.run.commit(1, random_tensors())
    local_bench.publish(1)
    return local_bench.registry.version(1)


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """Runs a script in the place of the fresh interpreter."""

    def install(script: str) -> None:
        path = tmp_path / "python"
        path.write_text(script)
        path.chmod(0o755)
        monkeypatch.setattr(spare.sys, "executable", str(path))  # type: ignore[attr-defined]

    return install


def test_a_fresh_process_gives_the_same_figure(
    local_bench: Bench, published: VersionManifest
) -> None:
    check = parity_in_fresh_process(local_bench.run.trust)
    assert check(local_bench.registry, published) == published.gates[-1].value


def test_it_digests_the_published_bytes_again(
    local_bench: Bench, published: VersionManifest
) -> None:
    local_bench.run.commit(2, random_tensors(2))
    check = parity_in_fresh_process(local_bench.run.trust)

    def disk_lost_a_bit(registry: Registry, draft: VersionManifest) -> float:
        flip_byte(registry.storage, registry.key(draft.version, keys.TABLES), 7)
        return check(registry, draft)

    with pytest.raises(GateError, match=r"tables-00000\.bin: digest is") as e:
        local_bench.publisher(disk_lost_a_bit).publish(local_bench.run.info(2), "test")
    assert (e.value.gate, e.value.exit_code) == ("golden_parity", 5)
    assert local_bench.registry.numbers() == [1]


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("import os; os.kill(os.getpid(), 11)", "died of SIGSEGV: it said nothing"),
        ("import os; os.abort()", "died of SIGABRT"),
        ("raise MemoryError('too large')", "MemoryError: too large"),
        ("print('hello')", "no answer in what it wrote"),
        ("import sys; sys.exit('error: not trusted')", "not trusted"),
    ],
)
def test_a_crash_in_there_fails_the_gate(
    local_bench: Bench,
    published: VersionManifest,
    stand_in: StandIn,
    code: str,
    why: str,
) -> None:
    stand_in(f"#!{sys.executable}\n{code}\n")
    with pytest.raises(GateError, match=why) as e:
        parity_in_fresh_process(local_bench.run.trust)(local_bench.registry, published)
    assert e.value.gate == "golden_parity"


def test_a_hang_in_there_fails_the_gate(
    local_bench: Bench,
    published: VersionManifest,
    stand_in: StandIn,
) -> None:
    stand_in("#!/bin/sh\nexec sleep 600\n")
    with pytest.raises(GateError, match=r"no answer within 0\.1 s") as e:
        parity_in_fresh_process(local_bench.run.trust, 0.1)(local_bench.registry, published)
    assert e.value.exit_code == StorageError.exit_code


@pytest.fixture
def processes(local_bench: Bench) -> Iterator[SpareProcesses]:
    made = SpareProcesses(local_bench.run.trust)
    yield made
    made.close()


def spares_of(parent: int) -> list[int]:
    """The processes that a publisher has waiting or working."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it may end meanwhile
            after_name = (folder / "stat").read_text().rpartition(")")[2].split()
            is_spare = b"publisher.spare" in (folder / "cmdline").read_bytes()
            if int(after_name[1]) == parent and is_spare:
                found.append(int(folder.name))
    return found


@contextmanager
def ending(pid: int) -> Iterator[None]:
    """What is done inside must end this process."""
    fd = os.pidfd_open(pid)
    try:
        yield
        assert select.select([fd], [], [], 60)[0], "it goes on"
    finally:
        os.close(fd)


def test_each_version_has_a_process_that_was_waiting(
    local_bench: Bench, published: VersionManifest, processes: SpareProcesses
) -> None:
    processes.start()
    processes.start()
    [waiting] = spares_of(os.getpid())
    check = FreshParity(processes)
    assert check(local_bench.registry, published) == published.gates[-1].value
    [other] = spares_of(os.getpid())  # the first one is gone, and the next one waits
    assert other != waiting
    with ending(other):
        os.kill(other, signal.SIGKILL)  # while it waits: that is no version's fault
    assert check(local_bench.registry, published) == published.gates[-1].value
    check.close()
    check.close()
    assert spares_of(os.getpid()) == []


@pytest.mark.crash
def test_a_waiting_process_ends_with_its_parent(trust: TrustList) -> None:
    code = (
        "import sys, time; from pathlib import Path; from ckpt.trust import TrustList;"
        "from publisher.spare import SpareProcesses;"
        f"made = SpareProcesses(TrustList(Path({str(trust.path)!r}))); made.start();"
        "print('started', flush=True); time.sleep(600)"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=env) as parent:
        assert parent.stdout is not None
        try:
            parent.stdout.readline()
            [spare_pid] = spares_of(parent.pid)
            with ending(spare_pid):
                parent.kill()
        finally:
            parent.kill()


def test_it_needs_no_trainer_and_no_torchrec() -> None:
    """What loads a version must not pull in the trainer's libraries."""
    code = (
        "import sys, publisher.publish, publisher.server, publisher.parity;"
        "print([m for m in ('torchrec', 'trainer', 'ckpt.engine') if m in sys.modules])"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        env=env,
        check=True,
    )
    assert done.stdout.strip() == "[]"


def test_what_a_job_prints_is_no_part_of_its_answer(
    local_bench: Bench, published: VersionManifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch and compilers print as they like, also past Python's own stdout."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "if any(a == 'publisher.spare' for a in sys.orig_argv):\n"
        "    import os\n"
        "    import publisher.parity as parity\n"
        "    check = parity.parity_in_process\n"
        "    def noisy(*a):\n"
        "        os.system('echo from a compiler')\n"
        "        print('from torch', flush=True)\n"
        "        return check(*a)\n"
        "    parity.parity_in_process = noisy\n"
    )
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    check = parity_in_fresh_process(local_bench.run.trust)
    try:
        assert check(local_bench.registry, published) == published.gates[-1].value
    finally:
        check.close()


def grandchild_of(folder: Path) -> str:
    """A script whose own child says its pid and holds on to the pipes."""
    fifo = folder / "pids"
    os.mkfifo(fifo)
    return f"#!/bin/sh\nsleep 600 &\necho $! > {fifo}\nwait\n"


def test_a_job_that_takes_too_long_ends_with_its_own_children(
    local_bench: Bench,
    published: VersionManifest,
    stand_in: StandIn,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stand_in(grandchild_of(tmp_path))
    processes = SpareProcesses(local_bench.run.trust, 0.1)
    processes.start()
    with ending(int((tmp_path / "pids").read_text())):
        monkeypatch.setattr(processes, "_spares", 0)  # no other one after it
        with pytest.raises(GateError, match=r"no answer within 0\.1 s"):
            processes.run("publisher.x:y", local_bench.registry, published, "build")


def test_closing_ends_the_job_at_work_and_refuses_the_next(
    local_bench: Bench, published: VersionManifest, stand_in: StandIn, tmp_path: Path
) -> None:
    """Which is no verdict on the version."""
    stand_in(grandchild_of(tmp_path))
    processes = SpareProcesses(local_bench.run.trust, spares=0)
    opened: list[int] = []

    def close_when_at_work() -> None:
        opened.append(os.pidfd_open(int((tmp_path / "pids").read_text())))
        processes.close()

    closer = threading.Thread(target=close_when_at_work)
    closer.start()
    for _ in range(2):
        with pytest.raises(StorageError, match="the publisher is ending"):
            processes.run("publisher.x:y", local_bench.registry, published, "build")
    closer.join()
    assert select.select(opened, [], [], 60)[0], "the grandchild goes on"
    os.close(opened[0])


def test_a_good_answer_outlives_a_spare_that_cannot_be_started(
    local_bench: Bench, published: VersionManifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    processes = SpareProcesses(local_bench.run.trust)
    processes.start()
    monkeypatch.setattr(spare.sys, "executable", "/nowhere/python")  # type: ignore[attr-defined]
    check = FreshParity(processes)
    assert check(local_bench.registry, published) == published.gates[-1].value
    with pytest.raises(StorageError, match="can't be started"):
        check(local_bench.registry, published)
    check.close()
