"""How saves ended: handles, counts, and the policy by which failures are reported."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Literal

from ckpt.errors import SaveError, SaveSkippedError
from ckpt.types import CommitRef, EventSink

Wait = Literal["overlay", "fence", "slot"]

_MOST_ROWS = 10  # that an event names


@dataclass(frozen=True)
class SaveHandle:
    """One save. `staged` is done when the snapshot is fixed; `committed` when it is durable.

    `committed.result()` is the commit's name, or raises why there is none. Nobody has to
    look: failures are counted and reported anyway.
    """

    step: int
    blocked_s: float
    staged: Future[None]
    committed: Future[CommitRef]


def uncommitted() -> Future[CommitRef]:
    """The future of a save that has begun. Nobody can cancel it: the save would go on all the same."""
    committed: Future[CommitRef] = Future()
    committed.set_running_or_notify_cancel()
    return committed


def was_skipped(committed: Future[CommitRef]) -> bool:
    """Has the save ended because it was given up by policy, here or on another rank?"""
    return committed.done() and isinstance(committed.exception(), SaveSkippedError)


@dataclass
class SaveStats:
    """Counts of a checkpointer's saves. `blocked_s` are what each save() kept the trainer waiting.

    The other waits are sums over all saves, outside save(): `fence_wait_s` at the optimizer's step,
    for state that was still being copied, and `overlay_wait_s` at a lookup's update, for room
    in the overlay. `untracked_writes` counts the tables found changed behind the guards,
    `store_retries` the calls that the store's client has repeated.
    On rank 0, `pruned` are commits that retention deleted, `prune_failed` the prunes that
    couldn't do all they should have.
    """

    commits: int = 0
    failed: int = 0
    skipped: int = 0
    pruned: int = 0
    prune_failed: int = 0
    blocked_s: list[float] = field(default_factory=list)
    fence_wait_s: float = 0.0
    overlay_wait_s: float = 0.0
    untracked_writes: int = 0
    store_retries: int = 0
    last_commit: CommitRef | None = None
    last_error: str | None = None

    @property
    def max_blocked_s(self) -> float:
        return max(self.blocked_s, default=0.0)


class Outcomes:
    """Counts each save's end once, on whatever thread it ends.

    Args:
        raise_after: so many failures in a row are an error for the trainer; None: never.
        sink: told of every end. Must not raise.
    """

    def __init__(self, raise_after: int | None, sink: EventSink) -> None:
        self.stats = SaveStats()
        self._raise_after = raise_after
        self._sink = sink
        self._lock = threading.Lock()
        self._in_a_row = 0

    def staged(  # noqa: PLR0913 - keyword-only, and with defaults
        self,
        step: int,
        blocked_s: float,
        committed: Future[CommitRef],
        *,
        staged: Future[None] | None = None,
        staged_bytes: int = 0,
        guarded_bytes: int = 0,
        proof_s: float = 0.0,
    ) -> SaveHandle:
        """save() has done its part: it copied so many bytes, and left so many in place under guard.

        proof_s: what it has read of these for its proof.
        `staged` is done when the snapshot is fixed; None: it is already.
        """
        if staged is None:
            staged = Future()
            staged.set_result(None)
        with self._lock:
            self.stats.blocked_s.append(blocked_s)
        self._sink.emit(
            "save_staged",
            step=step,
            blocked_s=blocked_s,
            staged_bytes=staged_bytes,
            guarded_bytes=guarded_bytes,
            proof_s=proof_s,
        )
        return SaveHandle(step, blocked_s, staged, committed)

    def waited(self, why: Wait, wait_s: float) -> None:
        """An open snapshot kept the trainer waiting outside of save(), or save() for a free slot."""
        with self._lock:
            if why == "fence":
                self.stats.fence_wait_s += wait_s
            elif why == "overlay":
                self.stats.overlay_wait_s += wait_s
        self._sink.emit("trainer_waited", why=why, wait_s=wait_s)

    def retried(self, key: str, kind: str, error: str, pause_s: float) -> None:
        """The store's client repeats a call, see ckpt.storage.limits. On any thread."""
        with self._lock:
            self.stats.store_retries += 1
        self._sink.emit("store_retried", key=key, kind=kind, pause_s=pause_s, error=error)

    def untracked(self, step: int, table: str, rows: Sequence[int]) -> None:
        """These rows of a table, the first of them at least, changed and no guard saw it."""
        with self._lock:
            self.stats.untracked_writes += 1
        self._sink.emit("untracked_write", step=step, table=table, rows=list(rows[:_MOST_ROWS]))

    def committed(self, step: int, committed: Future[CommitRef], ref: CommitRef) -> None:
        with self._lock:
            self.stats.commits += 1
            self.stats.last_commit = ref
            self._in_a_row = 0
        self._sink.emit("save_committed", step=step, epoch=ref.epoch)
        committed.set_result(ref)

    def skipped(self, step: int, blocked_s: float, error: SaveSkippedError) -> SaveHandle:
        """save() has taken no snapshot here, by policy: nothing was staged, and nothing will be written."""
        with self._lock:
            self.stats.blocked_s.append(blocked_s)
        committed = uncommitted()
        self.failed(step, committed, error, blocked_s=blocked_s)
        nothing: Future[None] = Future()
        nothing.set_result(None)
        return SaveHandle(step, blocked_s, nothing, committed)

    def failed(
        self, step: int, committed: Future[CommitRef], error: BaseException, **fields: float
    ) -> None:
        """The save has no commit: by policy (SaveSkippedError), or because something failed."""
        skipped = isinstance(error, SaveSkippedError)
        with self._lock:
            if skipped:
                self.stats.skipped += 1
            else:
                self.stats.failed += 1
                self.stats.last_error = f"step {step}: {error}"
                self._in_a_row += 1
        name = "save_skipped" if skipped else "save_failed"
        self._sink.emit(name, step=step, error=str(error), **fields)
        _let_go(error)
        committed.set_exception(error)

    def pruned(self, steps: list[int], problems: list[str]) -> None:
        """Retention has run; what it couldn't do is tried again after the next save."""
        with self._lock:
            self.stats.pruned += len(steps)
            self.stats.prune_failed += bool(problems)
        if steps:
            self._sink.emit("pruned", steps=steps)
        if problems:
            self._sink.emit("prune_failed", error=problems[0], problems=len(problems))

    def raise_by_policy(self) -> None:
        """SaveError if too many saves in a row have failed; each series is reported once."""
        with self._lock:
            in_a_row, last = self._in_a_row, self.stats.last_error
            if self._raise_after is None or in_a_row < self._raise_after:
                return
            self._in_a_row = 0
        raise SaveError(f"{in_a_row} saves in a row failed, the last one at {last}")


def _let_go(error: BaseException) -> None:
    """Of the frames that it came through: they hold the save, and its future, which gets the error."""
    left: list[BaseException | None] = [error]
    seen: set[int] = set()
    while left:
        if (one := left.pop()) is not None and id(one) not in seen:
            seen.add(id(one))
            one.__traceback__ = None
            left += one.__cause__, one.__context__
