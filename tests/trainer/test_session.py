"""The session around a plain PyTorch loop, in one process."""

import os
import random
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ckpt import CheckpointConfig, Checkpointer, RngState
from ckpt.catalog import Catalog
from ckpt.config import KeepBest
from ckpt.errors import BadInputError, SaveError, StorageError
from ckpt.layout import ledger_key
from ckpt.prefetch import Prefetch
from ckpt.schema import EVENT_TIME
from ckpt.storage import LocalStorage, MemoryStorage
from ckpt.terms import RestoreTerms
from ckpt.types import Buffer, ObjectInfo
from tests.faults import FaultyStorage
from tests.trainer.fake_clock import FakeClock
from trainer import BatchReader, Session
from trainer.ett import read_report
from trainer.ledger import parse_ledger, read_ledger
from trainer.preemption import PreemptedError

X = torch.randn(120, 4, generator=torch.Generator().manual_seed(1))


def seed_all() -> None:
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)


class Loop:
    """A model with dropout, so that generators matter, and Adam, whose state appears at its first step."""

    def __init__(self, batch_size: int = 10) -> None:
        seed_all()
        self.model = torch.nn.Sequential(
            torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1)
        )
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 3, 0.5)
        self.reader = BatchReader(len(X), batch_size, lambda index: X[index])
        self.state = {
            "model": self.model,
            "optimizer": self.optimizer,
            "schedule": self.schedule,
            "noise": {"seen": 0.0},
        }
        self.seen: list[Tensor] = []

    def session(self, root: Path, save_every: int = 5) -> Session[Tensor]:
        return Session(str(root), self.state, self.reader, save_every=save_every)

    def train(self, batch: Tensor) -> None:
        self.seen.append(batch)
        noise = random.random() + float(np.random.rand())
        self.state["noise"]["seen"] = noise  # type: ignore[index]
        self.optimizer.zero_grad()
        (self.model(batch).square().mean() * noise).backward()
        self.optimizer.step()
        self.schedule.step()

    def run(self, session: Session[Tensor], until: int) -> None:
        while session.steps < until:
            for batch in session.batches():
                self.train(batch)
                session.step()
                if session.steps >= until:
                    break

    def run_in(
        self, session: Session[Tensor], until: int, then: BaseException | None = None
    ) -> None:
        with session:
            self.run(session, until)
            if then:
                raise then

    def run_pipelined(self, session: Session[Tensor], until: int, *, tell: bool) -> None:
        """Read two batches ahead, as TrainPipelineSparseDist does, and be interrupted."""
        with session:
            batches = session.batches()
            queue = [next(batches), next(batches)]
            while queue and session.steps < until:
                queue += [b for b in [next(batches, None)] if b is not None]
                self.train(queue.pop(0))
                session.step(in_flight=len(queue) if tell else 0)
            raise KeyboardInterrupt

    def tensors(self) -> list[Tensor]:
        moments = [t for s in self.optimizer.state.values() for t in s.values()]
        return [*self.model.state_dict().values(), *moments]


def equal(a: Loop, b: Loop) -> bool:
    return len(a.tensors()) == len(b.tensors()) and all(
        torch.equal(x, y) for x, y in zip(a.tensors(), b.tensors(), strict=True)
    )


def test_resumes_bit_for_bit_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    straight = Loop()
    with straight.session(tmp_path / "straight") as session:
        straight.run(session, until=20)
    first = Loop()
    with pytest.raises(KeyboardInterrupt):
        first.run_in(first.session(tmp_path / "cut"), 17, KeyboardInterrupt())
    second = Loop()
    random.seed(99)  # what the new process would have is another state
    with second.session(tmp_path / "cut") as session:
        assert (session.steps, session.position, second.reader.position) == (15, 15, 15)
        second.run(session, until=20)
    assert equal(straight, second)
    assert second.state["noise"] == straight.state["noise"]
    assert second.schedule.state_dict() == straight.schedule.state_dict()
    joined = first.seen[:15] + second.seen
    assert all(torch.equal(a, b) for a, b in zip(joined, straight.seen, strict=True))


def test_leaving_the_block_saves_the_last_step(tmp_path: Path) -> None:
    loop = Loop()
    with loop.session(tmp_path, save_every=100) as session:
        loop.run(session, until=7)
    assert session.stats.commits == 1
    again = Loop()
    with again.session(tmp_path) as session:
        assert session.restored is not None
        assert session.restored.step == 7
        assert equal(loop, again)
    assert session.stats.commits == 0  # nothing was trained since


def test_an_error_in_the_loop_saves_nothing_and_comes_through(tmp_path: Path) -> None:
    loop = Loop()
    session = loop.session(tmp_path)
    with pytest.raises(ZeroDivisionError):
        loop.run_in(session, 7, ZeroDivisionError())
    assert session.stats.commits == 1
    again = Loop()
    with again.session(tmp_path) as session:
        assert session.steps == 5


def test_batches_in_flight_are_not_trained_on(tmp_path: Path) -> None:
    loop = Loop()
    session = loop.session(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        loop.run_pipelined(session, 5, tell=True)
    assert (session.position, loop.reader.position) == (5, 7)
    again = Loop()
    with again.session(tmp_path) as session:
        again.run(session, until=7)
    assert torch.equal(again.seen[0], X[50:60])


def test_a_forgotten_in_flight_is_found_at_the_end_of_the_epoch(tmp_path: Path) -> None:
    loop = Loop()
    with pytest.raises(BadInputError, match=r"step 11 trained on no batch.*in_flight"):
        loop.run_pipelined(loop.session(tmp_path), 100, tell=False)


def test_keeps_a_ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIDESTAGE_SUBMITTED_AT", "1700000000.5")
    monkeypatch.setenv("SIDESTAGE_ALLOCATED_AT", "soon")
    loop = Loop()
    with loop.session(tmp_path, save_every=2) as session:
        loop.run(session, until=4)
        with session.evaluating():
            pass
    events = read_ledger(tmp_path / ledger_key(1, 0))
    told = [e.get("name", e["event"]) for e in events if e["event"] != "span_end"]
    assert [name for name in told if name != "save_committed"] == [
        *("process", "restore", "pre_train", "restored", "get_first_batch_data"),
        *("steps", "steps", "blocked_in_save", "saved"),
        *(
            "steps",
            "steps",
            "blocked_in_save",
            "saved",
        ),  # the first step after a save is told alone
        *("evaluation", "closing", "shutdown", "closed"),
    ]
    assert [e["step"] for e in events if e["event"] == "save_committed"] == [2, 4]
    assert [e["position"] for e in events if e["event"] == "steps"] == [1, 2, 3, 4]
    assert (events[0]["batch_size"], events[0]["world_size"]) == (10, 1)
    moments = ("submitted_at_s", "allocated_at_s", "launcher_created_at_s")
    assert [events[0][name] for name in moments] == [1700000000.5, None, None]
    again = Loop()
    with again.session(tmp_path) as session:
        again.run(session, until=6)
    found = read_report(tmp_path)
    assert [a.batches_new for a in found.attempts] == [4, 2]
    assert found.lost_batches == found.batches_repeated == 0


def test_the_ledger_tells_of_waits_for_data_and_of_compilation(tmp_path: Path) -> None:
    loop, clock = Loop(), FakeClock()

    class Slow(BatchReader[Tensor]):
        def __iter__(self) -> Iterator[Tensor]:
            for batch in super().__iter__():
                clock.advance(0.5)
                yield batch

    def compiler(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., object]:
        clock.advance(8.0)
        return graph.forward

    loop.reader = Slow(len(X), 10, lambda index: X[index])
    compiled = torch.compile(lambda batch: batch * 2 + 1, backend=compiler)
    with Session(str(tmp_path), loop.state, loop.reader, save_every=9, clock=clock) as session:
        for batch in session.batches():
            compiled(batch)
            loop.train(batch)
            clock.advance(1.0)
            session.step()
            if session.steps == 4:
                break
    (attempt,) = read_report(tmp_path).attempts
    spent = {a: s for a, s in attempt.areas.items() if a not in ("imports", "start_up_other") and s}
    assert spent == pytest.approx(
        {"get_first_batch_data": 0.5, "data_wait": 1.5, "pt2_compilation": 8.0, "training_new": 4.0}
    )
    handler = sys.modules["torch._dynamo.callback"].callback_handler
    assert not handler.start_callbacks
    assert not handler.end_callbacks


def test_counts_blocked_time_on_the_given_clock(tmp_path: Path) -> None:
    loop, clock = Loop(), FakeClock()
    with Session(str(tmp_path), loop.state, loop.reader, save_every=2, clock=clock) as session:
        for batch in session.batches():
            clock.advance(1.0)
            loop.train(batch)
            session.step()
            if session.steps == 4:
                break
    (attempt,) = read_report(tmp_path).attempts
    assert attempt.areas["training_new"] == pytest.approx(4.0)
    assert attempt.areas["blocked_in_save"] == 0.0


def test_refuses_a_checkpoint_of_another_batch_size(tmp_path: Path) -> None:
    loop = Loop()
    with loop.session(tmp_path) as session:
        loop.run(session, until=5)
    with (
        pytest.raises(BadInputError, match="batches of 10 samples and the reader's have 20"),
        Loop(batch_size=20).session(tmp_path),
    ):
        pass


@pytest.mark.parametrize("key", ["rng", "session"])
def test_refuses_its_own_keys(tmp_path: Path, key: str) -> None:
    with pytest.raises(BadInputError, match=f"'{key}' is the session's own"):
        Session(str(tmp_path), {key: 1}, Loop().reader)


def test_refuses_a_wrong_interval(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match="save_every = 0"):
        Session(str(tmp_path), {}, Loop().reader, save_every=0)


def test_case_e42_a_launched_rank_joins_the_others_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = Loop()
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(BadInputError, match="WORLD_SIZE is 2 and this process is in no process gr"):
        loop.session(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_works_only_inside_its_block(tmp_path: Path) -> None:
    session = Loop().session(tmp_path)
    calls: list[Callable[[], object]] = [
        session.step,
        session.save,
        lambda: next(session.batches()),
    ]
    for call in calls:
        with pytest.raises(BadInputError, match="inside `with Session"):
            call()
    with session:
        pass


def test_a_ledger_can_lie_in_a_folder_of_the_users(tmp_path: Path) -> None:
    loop, storage = Loop(), MemoryStorage()
    with Session(storage, loop.state, loop.reader, ledger=tmp_path) as session:
        loop.run(session, until=3)
    assert read_report(tmp_path).attempts[0].batches_new == 3
    assert not list(storage.list("events/"))


def test_the_ledger_of_a_root_that_cannot_be_appended_to_is_copied_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SIDESTAGE_SPOOL_DIR", str(tmp_path))
    storage = MemoryStorage()
    loop = Loop()
    session = Session(storage, loop.state, loop.reader, save_every=2)
    with session:
        loop.run(session, until=2)
        session.finish()
        # Committed, and already copied: what follows would be lost with this host only.
        told = [e["event"] for e in parse_ledger(storage.read(ledger_key(1, 0)), "copy")]
        assert told[-1] == "save_committed"
        loop.run(session, until=3)
    (spooled,) = tmp_path.glob("*/*/events/000001/r00000.jsonl")
    whole = spooled.read_bytes()
    assert storage.read(ledger_key(1, 0)) == whole

    # A killed attempt leaves a longer file in the spool than it had copied, or one whose last line it
    # had rewritten since: the next one copies it.
    for epoch, end in enumerate(
        (b'{"event":"closed","t":98.0}\n', b'{"event":"closed","t":99.0}\n'), 2
    ):
        left = whole + end
        spooled.write_bytes(left)
        again = Loop()
        with Session(storage, again.state, again.reader, save_every=2):
            assert storage.read(ledger_key(1, 0)) == left
        assert storage.stat(ledger_key(epoch, 0)).size_bytes > 0


class FullStorage(LocalStorage):
    """A disk that has room for nothing but small files."""

    def create(self, key: str, data: Buffer) -> ObjectInfo:
        if key.startswith("commits/"):
            raise StorageError(f"{key}: no space left")
        return super().create(key, data)


def test_an_uncommitted_last_step_is_an_error(tmp_path: Path) -> None:
    loop = Loop()
    session = Session(
        FullStorage(tmp_path),
        loop.state,
        loop.reader,
        checkpoint=CheckpointConfig(commit_timeout_s=5.0),
    )
    with pytest.raises(SaveError, match=r"last step, 3, was not committed: .*since step 0 is lost"):
        loop.run_in(session, 3)
    assert session.stats.failed == 1
    with pytest.raises(BadInputError, match="closed"):
        session._checkpointer.save(9, {})  # whatever finish() met, the thread has ended
    events = read_ledger(tmp_path / ledger_key(1, 0))
    assert [e["event"] for e in events][-4:] == ["save_failed", "span_end", "closing", "closed"]
    assert read_report(tmp_path).attempts[0].ended == "failed", "steps were lost"


@pytest.mark.parametrize(("policy", "pending"), [("skip", 1), ("skip", 2), ("coalesce", 2)])
@pytest.mark.parametrize("told", [False, True])
def test_case_e38_the_end_of_a_run_and_a_preemption_are_saved_whatever_the_policy(
    tmp_path: Path, policy: Any, pending: int, told: bool
) -> None:
    """The save that was due after the last step was skipped, for an older one was being written."""
    loop = Loop()
    storage = FaultyStorage(LocalStorage(tmp_path))
    gate = storage.on("write", "*000001/r00000.bin").block()
    config = CheckpointConfig(when_busy=policy, max_pending=pending)
    session = Session(
        storage, loop.state, loop.reader, save_every=4, checkpoint=config, ledger=tmp_path
    )
    with ExitStack() as stack:
        if told:
            stack.enter_context(pytest.raises(PreemptedError, match="step 12, which is committed"))
        stack.enter_context(session)
        loop.run(session, until=12)
        gate.wait_reached()
        gate.open()
        if told:
            os.kill(os.getpid(), signal.SIGTERM)
            while True:
                session.poll()
    again = Loop()
    with again.session(tmp_path) as restored:
        assert restored.steps == 12
        assert equal(loop, again)
    (attempt, _) = read_report(tmp_path).attempts
    *before, last = attempt.saves
    assert (last.step, last.outcome) == (12, "committed")
    assert ("skipped" in {s.outcome for s in before}) == (session.stats.skipped > 0)
    if pending == 1:
        assert [(s.step, s.outcome) for s in before] == [
            *((4, "committed"), (8, "skipped"), (12, "skipped"))
        ]


class Ten:
    """The smallest reader: anything with these four."""

    batch_size = 1
    position = 0

    def seek(self, position: int) -> None:
        self.position = position

    def __iter__(self) -> Iterator[int]:
        while self.position < 10:
            self.position += 1
            yield self.position


def test_takes_any_reader(tmp_path: Path) -> None:
    got = []
    with Session(str(tmp_path), {"a": torch.zeros(2)}, Ten(), save_every=4) as session:
        for n in session.batches():
            got.append(n)
            session.step()
    assert got == list(range(1, 11))
    with Session(str(tmp_path), {"a": torch.ones(2)}, Ten()) as session:
        assert list(session.batches()) == []


@pytest.mark.parametrize("time_s", [-0.5, float("nan"), float("inf"), 1.7e12])
def test_refuses_event_times_that_no_publisher_can_read(tmp_path: Path, time_s: float) -> None:
    loop = Loop()
    times = torch.full((len(X),), time_s).double()
    loop.reader = BatchReader(len(X), 10, lambda index: X[index], event_times_s=times)
    session = loop.session(tmp_path, save_every=1)
    with pytest.raises(
        BadInputError, match=r"step 1: the reader's event_time_s\(1\) is (-0.5|nan|inf|17)"
    ):
        loop.run_in(session, 2)
    assert Catalog(LocalStorage(tmp_path)).latest() is None


def test_commits_carry_the_event_time_of_what_was_trained(tmp_path: Path) -> None:
    loop = Loop()
    times = 1.7e9 + torch.arange(len(X)).double() / 4
    loop.reader = BatchReader(len(X), 10, lambda index: X[index], event_times_s=times)
    session = loop.session(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        loop.run_pipelined(session, 5, tell=True)  # two batches more are handed out than trained on
    latest = Catalog(LocalStorage(tmp_path)).latest()
    assert latest is not None
    assert latest.record is not None
    assert latest.record.annotations == {EVENT_TIME: "1700000012.250000"}  # sample 49's


def test_restores_from_what_was_read_ahead(tmp_path: Path) -> None:
    first, second = Loop(), Loop()
    first.run_in(first.session(tmp_path), 7)
    ahead = Prefetch(LocalStorage(tmp_path), (0, 1, 1))
    assert ahead.wait(60)
    with Session(str(tmp_path), second.state, second.reader, prefetched=ahead) as session:
        assert session.steps == 7
    assert equal(first, second)
    assert ahead.used == 6, "the run, the attempt, both commits, index and values"


def test_case_e08_data_that_has_grown_is_refused_or_goes_on_by_a_rule(tmp_path: Path) -> None:
    """640 samples at the first start, 704 at the next; 25 batches of 32 end in the second epoch."""

    def start(samples: int, **how: Any) -> tuple[dict[str, Tensor], Session[list[int]], list[int]]:
        reader = BatchReader(samples, 32, lambda index: index.tolist(), **how)
        state = {"w": torch.zeros(3)}
        return state, Session(tmp_path, state, reader, save_every=100), []

    def train(session: Session[list[int]], until: int) -> list[int]:
        first = []
        with session:
            while session.steps < until:
                for batch in session.batches():
                    first.append(batch[0])
                    session.state["w"] += 1
                    session.step()
                    if session.steps == until:
                        break
        return first

    _, session, _ = start(640)
    assert train(session, 25)[-1] == 4 * 32
    state, session, _ = start(704)
    with pytest.raises(BadInputError) as e, session:
        pass
    assert str(e.value) == (
        "the checkpoint's position counts 640 samples and the reader has 704: after 25 batches it would "
        'point to other data; give it the 640, or pass grown="append" to BatchReader if the new samples '
        "come after the old ones; or begin the data anew with "
        "restore=RestoreTerms(exclude=('session.position',))"
    )
    assert state["w"].tolist() == [0, 0, 0], "nothing was changed"
    _, session, _ = start(704, grown="append")
    got = train(session, 65)
    assert got == [32 * b for b in [*range(5, 20), *range(22), *range(3)]]
    _, session, _ = start(
        704, grown="append"
    )  # what the second epoch was counted on is still known
    assert train(session, 67) == [3 * 32, 4 * 32]


def test_a_checkpoint_that_does_not_know_its_data_is_taken_and_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own = {"step": 4, "position": 4, "batch_size": 10}
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(4, {"w": torch.ones(2), "session": own, "rng": RngState()})
    caplog.set_level("INFO", "sidestage")
    reader = BatchReader(120, 10, lambda index: index)
    with Session(tmp_path, {"w": torch.zeros(2)}, reader) as session:
        assert (session.steps, session.position, reader.position) == (4, 4, 4)
    assert "doesn't say what data it was trained on" in caplog.text


class Cursor(Ten):
    """A reader whose position isn't all: it goes its own way, and says what it reads."""

    data: dict[str, list[str]] = {"files": ["a", "b"]}  # noqa: RUF012

    def __init__(self) -> None:
        self.offset = 100

    def __iter__(self) -> Iterator[int]:
        while self.position < 10:
            self.position += 1
            self.offset += self.position
            yield self.offset

    def state_at(self, position: int) -> dict[str, Any]:
        assert position == self.position
        return {"offset": torch.tensor(self.offset)}

    def load_state(self, state: dict[str, Any], position: int) -> None:
        self.position, self.offset = position, int(state["offset"])


def test_a_reader_may_have_data_and_a_state_of_its_own(tmp_path: Path) -> None:
    def start(reader: Any, root: str = "a") -> Session[int]:
        return Session(tmp_path / root, {"w": torch.zeros(2)}, reader)

    with start(Cursor()) as session:
        taken = []
        for batch in session.batches():
            taken.append(batch)
            session.step()
            if session.steps == 4:
                break
    assert taken[-1] == 110
    with start(Cursor()) as session:
        assert next(session.batches()) == 115
    other = Cursor()
    other.data = {"files": ["a", "b", "c"]}
    with pytest.raises(
        BadInputError, match=r"other data than the reader has, files .'a', 'b'. there and"
    ):
        start(other).__enter__()
    with pytest.raises(
        BadInputError, match="by a reader with a state of its own, which this one doesn't"
    ):
        start(Ten()).__enter__()
    with start(Ten(), "b") as session:
        next(session.batches())
        session.step()
    with pytest.raises(BadInputError, match="no state of the reader, which this reader needs"):
        start(Cursor(), "b").__enter__()


def test_case_e07_the_best_checkpoint_by_a_metric_that_the_session_is_told(tmp_path: Path) -> None:
    loop = Loop()
    config = CheckpointConfig(keep_last=1, keep_best=KeepBest("val_loss"))
    with Session(tmp_path, loop.state, loop.reader, save_every=2, checkpoint=config) as session:
        for batch in session.batches():
            loop.train(batch)
            if session.steps == 7:
                assert session.step(save=False) is None  # due, and evaluated first
                handle = session.save({"val_loss": "0.4"})
            else:
                handle = session.step(annotations={"val_loss": f"{abs(session.steps - 3) + 0.1}"})
            if handle is not None:
                handle.committed.result(60)
            if session.steps == 10:
                break
    kept = [(c.ref.step, c.record.annotations) for c in Catalog(LocalStorage(tmp_path)).commits()]
    assert [step for step, _ in kept] == [4, 10]
    assert kept[0][1] == {"val_loss": "0.1"}


def test_case_e13_messages_advise_what_the_users_of_a_session_can_do(tmp_path: Path) -> None:
    def start(state: dict[str, Any], **how: Any) -> Session[int]:
        return Session(tmp_path, state, Ten(), save_every=2, **how)

    with start({"w": torch.ones(2)}) as session:
        for _ in session.batches():
            session.step()
    state = {"w": torch.zeros(2), "ema": torch.zeros(2)}
    with pytest.raises(BadInputError, match=r"ema: is in the state but not in the checkp.*") as e:
        start(state).__enter__()
    assert "or pass restore=RestoreTerms(partial=True) to leave" in str(e.value)
    with start(state, restore=RestoreTerms(partial=True)) as session:
        assert session.restored.not_restored == ("ema",)
        assert state["w"].tolist() == [1, 1]
    with pytest.raises(BadInputError, match="exclude only session.position to begin the data anew"):
        start(state, restore=RestoreTerms(exclude=("session",)))
