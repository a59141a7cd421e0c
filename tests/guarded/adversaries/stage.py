"""What an adversary acts on: a trainer, a checkpointer whose persist threads stand still, and the truth.

At each save a whole copy of the state is taken; when it has ended, what was committed is compared
with it, byte for byte.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from ckpt import CheckpointConfig, Checkpointer, SaveHandle
from ckpt.errors import SidestageError
from ckpt.events import ListSink
from ckpt.storage import Storage, open_storage
from ckpt.storage.memory import MemoryStorage
from ckpt.tree import flatten
from tests.guarded.adversaries.gate import Chance, Gate
from tests.guarded.adversaries.jobs import FUSED_NAMES, FusedJob, Job, PlainJob, RankedJob
from tests.guarded.adversaries.registry import Adversary, Kind, Odd
from tests.guarded.oracle import Oracle
from tests.guarded.turnstile import SteppedCheckpointer

SETTLED_SAVES = 2
"""Ordinary saves before an adversary begins: what has to earn its guard has it by then."""
PART_BLOCKS = 2
"""What is copied before an adversary acts, in the second pass: dense state, and half a table."""
FINISH_S = 15.0

# A next step that whoever reads it can take.
_ADVICE = re.compile(
    r"\b(call|save with|pass|give|use|add|make|keep|leave|materialise|bring|move|wait|copy|close|"
    r"name|remove|train|run|put)\b|touched\(|guard\("
)


class WrongError(Exception):
    """What is neither exact nor refused as it should be; the text says what."""


@dataclass(frozen=True)
class Seen:
    """How one save ended.

    verdict: exact; refused; silent: committed other bytes; unnamed: refused without a name or
    advice; failed: ended by an error that is none of ours.
    """

    step: int
    verdict: str
    message: str
    guarded_bytes: int
    when: str
    """Settling, acting, or going on once the adversary has stopped."""

    def told(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "verdict": self.verdict,
            "message": self.message,
            "guarded_bytes": self.guarded_bytes,
            "when": self.when,
        }


class Keeper:
    """One checkpointer, its persist threads under control, and the copies of what it saves."""

    def __init__(self, stage: Stage, storage: Storage, **options: Any) -> None:
        self.stage = stage
        self.storage = storage
        self.sink = ListSink()
        config = CheckpointConfig(
            **{
                "chunk_bytes": 131072,
                "staging_bytes": 16 << 20,
                "compression": "off",
                "persist_target_s": 0.0,
                "persist_priority": "normal",
                "commit_timeout_s": FINISH_S,
                "close_timeout_s": FINISH_S,
                "stall_limit_s": FINISH_S,
                **options,
            }
        )
        self.gate: Gate | Chance = Gate() if stage.seed is None else Chance(stage.seed)
        self.checkpointer: Checkpointer = SteppedCheckpointer(storage, config, sink=self.sink)
        self.checkpointer.turnstile = self.gate  # type: ignore[attr-defined]
        self.open: list[tuple[int, Oracle, SaveHandle]] = []
        self.seen: list[Seen] = []
        self.labels: dict[int, str] = {}
        self.step = 0

    def guard(self, *objects: Any) -> bool:
        """False if it was refused."""
        return self._refusable(lambda: self.checkpointer.guard(*objects))

    def touched(self, tensor: Any, rows: torch.Tensor | None = None) -> bool:
        return self._refusable(lambda: self.checkpointer.touched(tensor, rows))

    def save(
        self,
        state: Any = None,
        *,
        beside: bool = False,
        label: str = "",
    ) -> SaveHandle | None:
        """Save, and hold its persist thread: before the first block, or after some in the second pass.

        beside: earlier saves stay open (give `max_pending`). label: said with its verdict. None if
        it was refused at once.
        """
        if not beside:
            self.finish()
        state = self.stage.state() if state is None else state
        self.step += 1
        self.labels[self.step] = label
        try:
            truth = Oracle(state, self.stage.rank)
        except SidestageError:
            truth = None  # can't be stored: it must be refused
        try:
            handle = self.checkpointer.save(self.step, state)
        except SidestageError as e:
            self._note(self.step, self._refusal(str(e)), str(e), 0)
            return None
        if truth is None:
            raise WrongError(f"save({self.step}) took a state that can't be stored")
        self.open.append((self.step, truth, handle))
        if isinstance(self.gate, Chance):
            self.gate.pause()
        else:
            self.gate.stand(handle.committed)
            if self.stage.part:
                self.gate.go(PART_BLOCKS)
        return handle

    def finish(self) -> None:
        """Let all open saves end, and judge them."""
        if not self.open:
            return
        self.gate.open()
        for step, truth, handle in self.open:
            error = _ended(handle.committed)
            guarded = self._guarded_bytes(step)
            if error is None:
                if self.stage.when == "settling":  # `training` compares these, for all
                    self._note(step, "exact", "", guarded)
                    continue
                try:
                    with _usual_device():  # reading isn't what is tried here
                        truth.check(self.storage, step, alone=self.stage.world == 1)
                except AssertionError as e:
                    self._note(step, "silent", str(e) or "other keys or values", guarded)
                else:
                    self._note(step, "exact", "", guarded)
            elif isinstance(error, SidestageError):
                self._note(step, self._refusal(str(error)), str(error), guarded)
            else:
                self._note(step, "failed", repr(error), guarded)
        self.open = []
        self.checkpointer.wait()
        self.gate.close()

    def close(self) -> None:
        self.finish()
        self.gate.open()
        self.checkpointer.close()

    def _refusable(self, call: Callable[[], None]) -> bool:
        try:
            call()
        except SidestageError as e:
            self._note(self.step, self._refusal(str(e)), str(e), 0)
            return False
        return True

    def _note(self, step: int, verdict: str, message: str, guarded_bytes: int) -> None:
        label = self.labels.get(step)
        message = f"({label}) {message}" if label and verdict != "exact" else message
        seen = Seen(step, verdict, message[:600], guarded_bytes, self.stage.when)
        self.seen.append(seen)
        self.stage.note(seen)

    def _refusal(self, message: str) -> str:
        names = self.stage.adversary.names or self.stage.keys()
        named = any(_word(name).search(message) for name in names)
        return "refused" if named and _ADVICE.search(message) else "unnamed"

    def _guarded_bytes(self, step: int) -> int:
        staged = [e for name, e in self.sink.events if name == "save_staged" and e["step"] == step]
        return int(staged[0]["guarded_bytes"]) if staged else 0


class Stage:
    """One pass of one adversary, in a process of its own.

    part: is some of each snapshot copied before the adversary's act? seed: for random timing
    instead. note: told of each save that has ended.
    """

    def __init__(
        self,
        adversary: Adversary,
        kind: Kind,
        odd: Odd,
        *,
        rank: int,
        world: int,
        folder: str,
        part: bool,
        seed: int | None,
        note: Callable[[Seen], None],
    ) -> None:
        self.adversary, self.kind, self.odd = adversary, kind, odd
        self.rank, self.world, self.folder = rank, world, folder
        self.part, self.seed, self.note = part, seed, note
        self.keepers: list[Keeper] = []
        self.state: Callable[[], Any] = self._no_state
        self.when = "acting"
        self.train: Callable[[], None] | None = None
        """How the trainer goes on after the adversary; None: it doesn't."""
        self._undo: list[Callable[[], Any]] = []

    # What an adversary calls.

    def job(self, *, settled: bool = True, **options: Any) -> Any:
        """The usual trainer of this kind, after a few ordinary saves unless `settled` is False."""
        made: Job
        if self.kind == "plain":
            if self.odd:  # torch's own sparse Adagrad can't do with another default device
                options.setdefault("sparse", "sparse_adam")
            made = PlainJob(**options)
        elif self.kind == "fused":
            made = FusedJob(**options)
        else:
            made = RankedJob(**options)
        return self.use(made, settled=settled)

    def use(self, job: Any, *, settled: bool = True) -> Any:
        """Another trainer."""
        self.state = lambda: job.state
        self.train = job.train
        if settled:
            job.train()
            self.settle(*job.guarded)
        return job

    def settle(self, *objects: Any) -> None:
        """Odd defaults, and some saves with training between them, as before an adversary appears.

        Call it when optimizers have their state: torch makes some of it by its defaults.
        """
        self.set_odd()
        self.when = "settling"
        if objects:
            self.keeper.guard(*objects)
        for _ in range(SETTLED_SAVES):
            self.save()
            assert self.train is not None
            self.train()
            self.finish()
        self.when = "acting"

    def set_odd(self) -> None:
        """From now on torch's defaults are others, if they are in this configuration."""
        if self.odd == "meta":
            torch.set_default_device("meta")
            self.undo(lambda: torch.set_default_device(None))
        elif self.odd:
            torch.set_default_dtype(getattr(torch, self.odd))
            self.undo(lambda: torch.set_default_dtype(torch.float32))

    @property
    def keeper(self) -> Keeper:
        """The checkpointer; made when it is first needed."""
        return self.keepers[0] if self.keepers else self.another()

    def another(self, storage: Storage | None = None, **options: Any) -> Keeper:
        """One checkpointer more, with a root of its own or this one; the first one is `keeper`."""
        if storage is None and self.world == 1:
            storage = MemoryStorage()
        elif storage is None:
            storage = open_storage(f"{self.folder}/run-{int(self.part)}-{len(self.keepers)}")
        self.keepers.append(Keeper(self, storage, **options))
        return self.keepers[-1]

    def guard(self, *objects: Any) -> bool:
        return self.keeper.guard(*objects)

    def touched(self, tensor: Any, rows: torch.Tensor | None = None) -> bool:
        return self.keeper.touched(tensor, rows)

    def save(self, state: Any = None, **options: Any) -> SaveHandle | None:
        return self.keeper.save(state, **options)

    def finish(self) -> None:
        for keeper in self.keepers:
            keeper.finish()

    def around(self, act: Callable[[], Any]) -> None:
        """`act` right after a save, after a step of training, and between two steps."""
        assert self.train is not None
        for before, after in ((0, 1), (1, 0), (1, 1)):
            self.save()
            for _ in range(before):
                self.train()
            act()
            for _ in range(after):
                self.train()

    def rounds(self, act: Callable[[], Any], saves: int = 2, steps: int = 2) -> None:
        """Saves, each followed by steps of training with `act` after each of them."""
        assert self.train is not None
        for _ in range(saves):
            self.save()
            for _ in range(steps):
                self.train()
                act()

    def exact(self) -> None:
        """The save that is open must be exact, whatever others may be."""
        self.finish()
        last = self.keeper.seen[-1]
        if last.verdict != "exact":
            raise WrongError(
                f"save {last.step} must be exact and is {last.verdict}: {last.message}"
            )

    def undo(self, action: Callable[[], Any]) -> None:
        """What ends the adversary: it's done before the last saves, which must be exact again."""
        self._undo.append(action)

    # What plays it.

    def play(self) -> None:
        hooks = len(_global_optimizer_pre_hooks), len(_global_optimizer_post_hooks)
        self.adversary.act(self)
        self.finish()
        while self._undo:
            self._undo.pop()()
        self.when = "going on"
        if self.train is not None:
            self._go_on(self.train)
        for keeper in self.keepers:
            keeper.close()
        left = len(_global_optimizer_pre_hooks), len(_global_optimizer_post_hooks)
        if left != hooks:
            raise WrongError(f"global optimizer hooks: {hooks} before, {left} after close()")

    def _go_on(self, train: Callable[[], None]) -> None:
        """Whatever was refused, later saves aren't: but the first may tell of what came before it."""
        train()
        for _ in range(2):
            self.save()
            train()
            self.finish()
            last = self.keeper.seen[-1]
            if last.verdict != "refused":
                break
        if self.adversary.after == "exact" and last.verdict == "refused":
            raise WrongError(f"still refused once the adversary has stopped: {last.message}")
        if self.adversary.guarded and not last.guarded_bytes:
            raise WrongError("exact, but no table was left in place any more")

    def keys(self) -> list[str]:
        """What a refusal may name: tensors of the state, or the modules and tables that they're of."""
        try:
            names = set(flatten(self.state(), self.rank).leaves)
        except SidestageError:
            names = set(_paths(self.state(), ""))
        parents = {p for n in names if "." in (p := n.rpartition(".")[0])}
        return [*names, *parents, *(FUSED_NAMES if self.kind == "fused" else ())]

    def _no_state(self) -> Any:
        raise AssertionError("the adversary has set no state")


def _usual_device() -> contextlib.AbstractContextManager[Any]:
    changed = torch.get_default_device().type != "cpu"
    return torch.device("cpu") if changed else contextlib.nullcontext()


def _ended(committed: Future[Any]) -> BaseException | None:
    try:
        return committed.exception(FINISH_S)
    except TimeoutError:
        raise WrongError(f"a save hasn't ended after {FINISH_S:g} s") from None


def _word(name: str) -> re.Pattern[str]:
    """A name by itself: `top` isn't in "stopped"."""
    return re.compile(rf"(?<!\w){re.escape(name)}" + (r"(?!\w)" if name[-1].isalnum() else ""))


def _paths(state: Any, path: str) -> Any:
    if isinstance(state, Mapping):
        for name, value in state.items():
            yield from _paths(value, f"{path}.{name}" if path else str(name))
    else:
        yield path
