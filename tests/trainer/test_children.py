"""E01: a child that is forked inside a session is no part of it: its signals, files and locks are its own."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt.catalog import Catalog
from ckpt.errors import BadInputError
from ckpt.layout import DATA, ledger_key
from ckpt.storage import LocalStorage, MemoryStorage
from tests.faults import FaultyStorage
from trainer import Session
from trainer.ledger import Ledger
from trainer.preemption import PreemptedError

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
FORK = multiprocessing.get_context("fork")
DEADLINE_S = 60.0


class Reader:
    batch_size = 1

    def __init__(self) -> None:
        self.position = 0

    def seek(self, position: int) -> None:
        self.position = position

    def __iter__(self) -> Iterator[int]:
        while True:
            self.position += 1
            yield self.position


class Watched(Session[int]):
    """A session of which a test knows that its watcher thread has looked."""

    def __init__(self, root: Any, **options: Any) -> None:
        self._looks = threading.Semaphore(0)
        state = {"model": torch.nn.Linear(2, 2)}
        super().__init__(root, state, Reader(), preempt_when=self._looked, **options)

    def _looked(self) -> bool:
        self._looks.release()
        return False

    def train(self, steps: int) -> None:
        batches = self.batches()
        for _ in range(steps):
            next(batches)
            self.step()

    def check_not_asked(self) -> None:
        """Whatever came before this call was seen by a look that began after it."""
        while self._looks.acquire(blocking=False):
            pass
        for _ in range(2):
            assert self._looks.acquire(timeout=DEADLINE_S)
        self.train(1)


def idle() -> None:
    threading.Event().wait(DEADLINE_S)


def ended(pid: int) -> int:
    """A child's exit code; it is killed if it lives on."""
    until_s = time.monotonic() + DEADLINE_S / 3
    while (found := os.waitpid(pid, os.WNOHANG)) == (0, 0):
        if time.monotonic() > until_s:
            os.kill(pid, signal.SIGKILL)
        threading.Event().wait(0.005)
    return os.waitstatus_to_exitcode(found[1])


def forked(act: Callable[[], object]) -> int:
    """Run `act` in a raw fork; its process id. Exit code 0, or 1 if it raises."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            act()
            code = 0
        finally:
            os._exit(code)
    return pid


def by_process() -> list[int]:
    """Told once it runs, as helpers are."""
    reading, writing = FORK.Pipe(duplex=False)

    def run() -> None:
        writing.send(1)
        idle()

    child = FORK.Process(target=run)
    child.start()
    assert reading.recv() == 1
    child.terminate()
    child.join(DEADLINE_S)
    assert child.exitcode is not None
    return [child.exitcode]


def at_once() -> list[int]:
    """The signal is there before the child has run an instruction."""
    codes = []
    for _ in range(20):
        child = FORK.Process(target=idle)
        child.start()
        child.terminate()
        child.join(DEADLINE_S)
        assert child.exitcode is not None
        codes.append(child.exitcode)
    return codes


def by_pool() -> list[int]:
    """Busy workers, ended as a pool ends them."""
    pool = FORK.Pool(2)
    workers = list(vars(pool)["_pool"])
    pool.map(abs, [1, 2])
    pool.map_async(time.sleep, [DEADLINE_S, DEADLINE_S])
    pool.terminate()
    pool.join()
    return [w.exitcode for w in workers if w.exitcode != 0]


def by_executor() -> list[int]:
    pool = ProcessPoolExecutor(2, mp_context=FORK)
    assert list(pool.map(abs, [-1, -2])) == [1, 2]
    workers = list(vars(pool)["_processes"].values())
    for w in workers:
        w.terminate()
    for w in workers:
        w.join(DEADLINE_S)
    pool.shutdown()
    return [w.exitcode for w in workers]


def by_raw_fork() -> list[int]:
    pid = forked(idle)
    os.kill(pid, signal.SIGTERM)
    return [ended(pid)]


def by_grandchild() -> list[int]:
    """The child's own child is told, and its end is what the child ends with."""

    def run() -> None:
        pid = forked(idle)
        os.kill(pid, signal.SIGTERM)
        os._exit(-ended(pid))

    return [-ended(forked(run))]


def from_a_thread() -> list[int]:
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.extend(by_raw_fork()))
    thread.start()
    thread.join()
    return codes


@pytest.mark.parametrize(
    "end",
    [by_process, at_once, by_pool, by_executor, by_raw_fork, by_grandchild, from_a_thread],
)
def test_case_e01_a_child_dies_of_its_own_signal_and_the_trainer_is_not_asked(
    tmp_path: Path, end: Callable[[], list[int]]
) -> None:
    with Watched(str(tmp_path)) as session:
        session.train(3)
        codes = end()
        session.check_not_asked()
        session.train(3)
    assert set(codes) <= {-signal.SIGTERM}
    assert codes or end is by_pool, "a pool's workers may be gone before they are told"
    latest = Catalog(LocalStorage(tmp_path)).latest()
    assert latest is not None
    assert latest.ref.step == 7


def test_case_e01_a_child_has_the_handlers_from_before(tmp_path: Path) -> None:
    """Those of two sessions, one inside the other, are both taken off, and a wake-up descriptor, too."""

    def mine(number: int, frame: Any) -> None:
        os._exit(42)

    def told() -> None:
        assert signal.getsignal(signal.SIGTERM) is mine
        assert signal.set_wakeup_fd(-1) == -1
        idle()

    before = signal.signal(signal.SIGTERM, mine)
    try:
        with Watched(str(tmp_path / "a")) as outer, Watched(str(tmp_path / "b")) as inner:
            pid = forked(told)
            os.kill(pid, signal.SIGTERM)
            assert ended(pid) == 42
            inner.check_not_asked()
            outer.check_not_asked()
        assert signal.getsignal(signal.SIGTERM) is mine
    finally:
        signal.signal(signal.SIGTERM, before)


def test_case_e01_signals_that_come_while_it_forks_still_reach_the_trainer(tmp_path: Path) -> None:
    with pytest.raises(PreemptedError), Watched(str(tmp_path)) as session:  # noqa: PT012
        for _ in range(5):
            assert ended(forked(lambda: None)) == 0
        assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, set())
        os.kill(os.getpid(), signal.SIGTERM)
        session.train(10**6)


class _ChildError(Exception):
    pass


@pytest.mark.parametrize("how", [_ChildError, SystemExit, KeyboardInterrupt, None])
def test_case_e01_a_child_that_leaves_the_block_leaves_the_run_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: type[BaseException] | None
) -> None:
    """While a save is being written, to a root whose ledger is mirrored: it neither waits nor writes."""
    monkeypatch.setenv("SIDESTAGE_SPOOL_DIR", str(tmp_path))
    storage = FaultyStorage(MemoryStorage())
    gate = storage.on("writer", f"{DATA}*").block()

    def run(session: Watched) -> int | None:
        with session:
            session.train(2)
            session.save()
            gate.wait_reached()
            pid = os.fork()
            if pid == 0:
                for act in (session.step, session.poll, session.save):
                    with pytest.raises(BadInputError, match="of the process which forked this one"):
                        act()
                if how is not None:
                    raise how()
                return None  # the end of the block: it must not save what isn't its own
            (ledger,) = tmp_path.rglob("events/*/*.jsonl")
            known = ledger.read_bytes()
            assert ended(pid) == 0
            assert ledger.read_bytes() == known
            gate.open()
            session.train(1)
        return pid

    mine = os.getpid()
    try:
        pid = run(Watched(storage))
    except BaseException as e:
        if os.getpid() == mine:
            raise
        os._exit(0 if type(e) is how else 1)
    if os.getpid() != mine:
        os._exit(0 if how is None and pid is None else 1)
    assert [c.ref.step for c in Catalog(storage).commits()] == [2, 3]


def test_case_e01_a_child_needs_no_lock_that_a_thread_held(tmp_path: Path) -> None:
    """Of the ledger and the saves: both are held by threads that the child doesn't have."""
    session = Watched(str(tmp_path))
    ledger: Any = session._ledger
    outcomes: Any = session._checkpointer._outcomes
    with ExitStack() as stack:
        stack.enter_context(session)
        session.train(1)
        preemption: Any = session._preemption
        held, go = threading.Event(), threading.Event()

        def hold() -> None:
            with ledger._lock, outcomes._lock, preemption._places._lock:
                held.set()
                go.wait(DEADLINE_S)

        thread = threading.Thread(target=hold)
        thread.start()
        assert held.wait(DEADLINE_S)

        def use() -> None:
            with session.evaluating():
                ledger.waited("data", 1.0)
                ledger.stepped(2, 2)
                ledger.beat()
            assert not preemption.tick()
            preemption.close()
            ledger.close()
            session._checkpointer.close()

        known = (tmp_path / ledger_key(1, 0)).read_bytes()
        try:
            assert ended(forked(use)) == 0
        finally:
            go.set()
            thread.join()
        assert (tmp_path / ledger_key(1, 0)).read_bytes() == known


def test_a_ledger_without_a_file_yet_can_be_a_childs(tmp_path: Path) -> None:
    """A program may begin it before it forks its ranks."""
    ledger = Ledger()
    ledger.record("process", created_at_s=0.0)

    def use() -> None:
        ledger.record("restored", step=0, position=0, epoch=None)
        ledger.open(tmp_path / "b.jsonl")
        ledger.close()

    assert ended(forked(use)) == 0
    ledger.open(tmp_path / "a.jsonl")
    ledger.close()
    lines = [len((tmp_path / f"{name}.jsonl").read_text().splitlines()) for name in "ab"]
    assert lines == [1, 2]


def test_handlers_that_others_install_meanwhile_are_theirs(tmp_path: Path) -> None:
    """One over ours stays when the session closes, and may call ours then, which passes the signal on."""
    seen: list[int] = []
    before = signal.getsignal(signal.SIGTERM)
    try:
        signal.signal(signal.SIGTERM, lambda number, frame: seen.append(1))
        with Watched(str(tmp_path)):
            ours: Any = signal.getsignal(signal.SIGTERM)

            def over(number: int, frame: Any) -> None:
                seen.append(2)
                ours(number, frame)

            signal.signal(signal.SIGTERM, over)
        assert signal.getsignal(signal.SIGTERM) is over
        os.kill(os.getpid(), signal.SIGTERM)
        assert seen == [2, 1]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_sessions_that_close_in_another_order_leave_no_handler(tmp_path: Path) -> None:
    before, before_fd = signal.getsignal(signal.SIGTERM), signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(before_fd)
    first, second = Watched(str(tmp_path / "a")), Watched(str(tmp_path / "b"))
    with ExitStack() as outer, ExitStack() as inner:
        inner.enter_context(first)
        outer.enter_context(second)
    assert signal.getsignal(signal.SIGTERM) is before
    fd = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(fd)
    assert fd == before_fd


PROGRAM = """
import os, signal, sys
from tests.trainer.test_children import Watched

with Watched(sys.argv[1]) as session:
    session.train(2)
    child = os.fork()
    if child == 0:
        sys.exit(3)  # the whole end of an interpreter, with everything that runs at exit
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    session.check_not_asked()
with open(sys.argv[1] + "/events/000001/r00000.jsonl") as ledger:
    print(ledger.read().count('"exited"'))
"""


def test_case_e01_nothing_of_ours_runs_at_the_exit_of_a_child(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout) == (0, "0\n"), done.stderr
    assert (tmp_path / ledger_key(1, 0)).read_text().count('"exited"') == 1, "the parent's own"
