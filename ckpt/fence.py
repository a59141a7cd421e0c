"""Dense state that only an optimizer's step changes: copied while the next forward and backward run.

Between one step and the next, parameters and optimizer state stand still. So a snapshot of them
needn't be complete when save() returns, only when the next step begins: a hook before every
optimizer's step, the fence, copies what is left by then.
"""

from __future__ import annotations

import random
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import (
    Optimizer,
    _global_optimizer_pre_hooks,
    register_optimizer_step_pre_hook,
)

from ckpt.errors import UntrackedWriteError
from ckpt.native import read_live
from ckpt.rows.device import CudaDevice, Device, Mark
from ckpt.stretches import Stretch, bytes_of
from ckpt.tree import foreign_memory, identity
from ckpt.types import Clock

_LIFT_AGAIN_S = 0.02  # their watchdog may have lowered the persist threads meanwhile
_PIECE_BYTES = 4 << 20  # long enough to be worth a call, short enough to wait for
_LOOKS = 128  # places of a tensor that are looked at again, at most
_LOOK_BYTES = 64
_APART_BYTES = 512 << 10  # an operation on less is over before anybody could look


@dataclass(frozen=True, slots=True)
class Copy:
    """A tensor of the state, by its key, and the host memory of its shape that it's copied to.

    whole: what `live` is a part of, where that counts changes apart: a DTensor.
    stretches: parts of it that were read in save(), to be compared with the copy.
    """

    fqn: str
    live: torch.Tensor
    home: torch.Tensor
    whole: torch.Tensor | None = None
    stretches: Sequence[Stretch] = ()

    def version(self) -> tuple[int, int, int]:
        """Changes with every in-place operation, and where the memory was moved; `.data` doesn't count."""
        whole = self.whole._version if self.whole is not None else 0
        return self.live._version, whole, self.live.data_ptr()

    def still(self, chance: random.Random) -> bool:
        """Does the tensor still hold what was copied, at some places of it? Host memory only.

        An in-place operation counts when it ends, and one that is under way has changed a part.
        """
        live, home = bytes_of(self.live), bytes_of(self.home)
        now = torch.empty(_LOOK_BYTES, dtype=torch.uint8, device="cpu")
        for _ in range(min(_LOOKS, live.numel() // _APART_BYTES)):
            a = chance.randrange(live.numel() - _LOOK_BYTES)
            part = slice(a, a + _LOOK_BYTES)
            if not read_live(now, live[part]) or not torch.equal(now, home[part]):
                return False
        return True

    def differs(self) -> bool:
        """Isn't the copy what was read in save()? Runs on a persist thread, once it's made."""
        return not all(stretch.same(self.home) for stretch in self.stretches)


def _cuda_device(device: torch.device) -> Device | None:
    return CudaDevice(device) if device.type == "cuda" else None


class StepFence:
    """Keeps optimizers from stepping over state that is still being copied.

    Args:
        clock: measures waits.
        waited: told how long a step waited, in seconds.
        lift: raises the persist threads' priority for a moment, when a step waits for one.
        device_of: the streams for copies of tensors on a device; None for host memory.
    """

    def __init__(
        self,
        clock: Clock,
        waited: Callable[[float], None],
        lift: Callable[[], None],
        device_of: Callable[[torch.device], Device | None] = _cuda_device,
    ) -> None:
        self._clock = clock
        self._waited = waited
        self._lift = lift
        self._device_of = device_of
        self._devices: dict[torch.device, Device | None] = {}
        self._open: list[DenseCopy] = []
        self.unsteady: set[str] = set()
        """Keys that were seen to change outside of steps: not to be fenced again."""
        self._hook = register_optimizer_step_pre_hook(self._before_step)

    def open(self, copies: Sequence[Copy]) -> DenseCopy:
        """Begin to copy tensors that `owned_by_steps` named. On the training thread."""
        # First of all hooks: another one may change what is still to be copied.
        hooks = cast("OrderedDict[int, Any]", _global_optimizer_pre_hooks)
        if self._hook.id not in hooks:  # another library has cleared them
            self._hook = register_optimizer_step_pre_hook(self._before_step)
        hooks.move_to_end(self._hook.id, last=False)
        there: dict[torch.device, list[Copy]] = {}
        for c in copies:
            there.setdefault(c.live.device, []).append(c)
        here: list[Copy] = []
        beside: list[_DeviceCopies] = []
        for place, mine in there.items():
            if place not in self._devices:
                self._devices[place] = self._device_of(place)
            device = self._devices[place]
            if device is None:
                here += mine
            else:
                beside.append(_DeviceCopies(device, mine))
        begun = DenseCopy(here, beside, self._lift, self.unsteady)
        self._open = [c for c in self._open if not c.done] + [begun]
        return begun

    def finish(self) -> None:
        """Copy what is left of all open snapshots, now. On the training thread."""
        for c in self._open:
            c.may_change = True
        waiting = [c for c in self._open if not c.done]
        self._open = []
        if waiting:
            started = self._clock.monotonic()
            for c in waiting:
                c.finish()
            self._waited(self._clock.monotonic() - started)

    def close(self) -> None:
        """Take the hook off, and nothing else: also in a forked child, where no lock is to be had."""
        self._hook.remove()

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        # Whichever optimizer it is: any of them may hold any parameter.
        if self._open:
            self.finish()


class _DeviceCopies:
    """The copies from one device: all enqueued at once, beside training's stream."""

    def __init__(self, device: Device, copies: Sequence[Copy]) -> None:
        self._checked = False
        self.copies = copies
        self._versions = [(c, c.version()) for c in copies]
        opened = device.mark()
        with device.beside():
            opened.wait()
            for c in copies:
                c.home.copy_(c.live, non_blocking=True)
                device.keep(c.live)
            self._made: Mark = device.mark()

    def order(self) -> list[str]:
        """What training enqueues from now on comes after the copies; keys changed before that."""
        changed = [] if self._checked else self._changed()
        self._checked = True
        self._made.wait()
        return changed

    def settle(self) -> list[str]:
        """Wait for the copies; the keys of tensors that were changed before, by anything but a step."""
        self._made.synchronize()
        changed = self._changed()
        # Looked at after the versions: unless a step came before them, no step has changed any.
        if self._checked:
            return []
        self._checked = True
        return changed

    def _changed(self) -> list[str]:
        return [c.fqn for c, version in self._versions if c.version() != version]


class DenseCopy:
    """One snapshot's copies, made by a persist thread and by training, whoever comes first.

    copies: of host memory. beside: those of devices, which are under way already.
    """

    def __init__(
        self,
        copies: Sequence[Copy],
        beside: Sequence[_DeviceCopies],
        lift: Callable[[], None],
        unsteady: set[str],
    ) -> None:
        self._lift = lift
        self._unsteady = unsteady
        self._changed = threading.Condition()
        self._beside = tuple(beside)
        self._ordered = not beside
        self._copies = copies
        self._all = [*copies, *(c for there in beside for c in there.copies)]
        self._versions = [c.version() for c in copies]
        self._left: list[int] = []
        self._pieces: list[tuple[int, torch.Tensor, torch.Tensor]] = []
        for n, c in enumerate(copies):
            pieces = [(n, live, home) for live, home in _pieces(c)]
            self._left.append(len(pieces))
            self._pieces += pieces
        self._next = 0
        self._running = 0
        self.overwritten: list[str] = []
        self.may_change = False
        """A step has begun, or an edit was announced: training changes what was copied before."""

    @property
    def done(self) -> bool:
        """May a step go on without `finish`?"""
        return self._next >= len(self._pieces) and not self._running and self._ordered

    def help(self) -> None:
        """Copy until nothing is left to begin. Runs on a persist thread."""
        while self._copy_one(_read):
            pass
        self._settle_devices()

    def finish(self) -> None:
        """Copy the rest and wait for what others have begun: afterwards the state may change."""
        for copies in self._beside:
            self._note(copies.order())  # the host doesn't wait
        self._ordered = True
        if not self.done:
            # Before any lock that a persist thread of low priority may hold.
            self._lift()
        while self._copy_one(_copy):
            pass
        while True:
            with self._changed:
                if self._changed.wait_for(lambda: not self._running, _LIFT_AGAIN_S):
                    return
            self._lift()

    def settle(self) -> None:
        """Wait until all copies are made. Runs on a persist thread, before they are read.

        Raises UntrackedWriteError naming what was changed before it was copied.
        """
        self.help()
        with self._changed:
            self._changed.wait_for(lambda: not self._running)
        self._note([c.fqn for c in self._all if c.differs() or foreign_memory(c.live)])
        chance = random.Random()  # of its own: the trainer's numbers stay what they are
        changing = [] if self.may_change else [c.fqn for c in self._copies if not c.still(chance)]
        if not self.may_change:  # nor has it begun meanwhile
            self._note(changing)
        if self.overwritten:
            found = list(dict.fromkeys(self.overwritten))
            raise UntrackedWriteError(
                f"{', '.join(found[:4])}{' ...' if len(found) > 4 else ''}: changed outside of an "
                f"optimizer's step before the snapshot had it; it's copied in save() from now on. Call "
                f'touched() on it before, or save with snapshot = "copied"'
            )

    def abandon(self) -> None:
        """Copy no more. When this returns nothing is written to the copies' homes any longer."""
        with self._changed:
            self._next = len(self._pieces)
            self._changed.wait_for(lambda: not self._running)
        self._settle_devices()
        self._ordered = True

    def _copy_one(self, by: Callable[[torch.Tensor, torch.Tensor], bool]) -> bool:
        with self._changed:
            if self._next >= len(self._pieces):
                return False
            n, live, home = self._pieces[self._next]
            # In this order: `done` is read without the lock, and must not miss a copy.
            self._running += 1
            self._next += 1
        copied = False
        try:
            # Memory that was moved isn't read: it may be anybody's by now.
            copied = self._copies[n].version()[-1] == self._versions[n][-1] and by(home, live)
        finally:
            with self._changed:
                self._running -= 1
                self._left[n] -= 1
                # The last piece was copied before this look.
                last = not self._left[n]
                if not copied or (last and self._copies[n].version() != self._versions[n]):
                    self.overwritten.append(self._copies[n].fqn)
                    self._unsteady.add(self._copies[n].fqn)
                if not self._running:
                    self._changed.notify_all()
        return True

    def _settle_devices(self) -> None:
        for copies in self._beside:
            self._note(copies.settle())

    def _note(self, changed: Sequence[str]) -> None:
        with self._changed:
            self.overwritten += changed
            self._unsteady.update(changed)


def owned_by_steps(
    optimizers: Iterable[Optimizer], elsewhere: Iterable[torch.Tensor], above_bytes: int = 0
) -> set[tuple[Any, ...]]:
    """Identities of the tensors that only the steps of `optimizers` change; see `identity`.

    A parameter counts once its optimizer changes it: it has a gradient, or state made of one. An optimizer
    may list others, too, which something else changes, such as fused tables that belong to a
    lookup's backward. Memory that isn't torch's own, or another process's too, is nobody's.

    above_bytes: of those that are larger than that.
    elsewhere: tensors that something else changes, too; what shares memory with them isn't owned.
    """
    foreign = {t.untyped_storage().data_ptr() for t in elsewhere}
    owned = set()
    for tensor in _held(optimizers):
        if tensor.layout is not torch.strided or tensor.nbytes <= above_bytes:
            continue
        if not tensor.is_contiguous():
            continue
        storage = tensor.untyped_storage()
        if storage.data_ptr() in foreign:
            continue
        if foreign_memory(tensor):
            continue
        owned.add(identity(tensor))
    return owned


def _held(optimizers: Iterable[Optimizer]) -> Iterator[torch.Tensor]:
    """This rank's memory of the parameters that optimizers change, and of their state."""
    for optimizer in optimizers:
        if any(c.__name__ == "FusedOptimizer" for c in type(optimizer).__mro__):
            continue  # TorchRec's: a lookup's backward is its step
        held: list[Any] = []
        for group in optimizer.param_groups:
            held += [p for p in group["params"] if p.grad is not None or optimizer.state.get(p)]
        for state in optimizer.state.values():
            held += state.values() if isinstance(state, dict) else (state,)
        for tensor in held:
            if isinstance(tensor, DTensor):
                yield tensor._local_tensor
            elif isinstance(tensor, torch.Tensor) and not isinstance(tensor, ShardedTensor):
                yield tensor


def _copy(home: torch.Tensor, live: torch.Tensor) -> bool:
    """With all of torch's threads: training waits."""
    home.copy_(live)
    return True


def _read(home: torch.Tensor, live: torch.Tensor) -> bool:
    """On this thread alone, of memory that may go meanwhile."""
    return read_live(home, live)


def _pieces(copy: Copy) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """A tensor in pieces of some megabytes."""
    live, home = copy.live.reshape(-1), copy.home.reshape(-1)
    step = max(1, _PIECE_BYTES // copy.live.element_size())
    for a in range(0, live.numel(), step):
        yield live[a : a + step], home[a : a + step]
