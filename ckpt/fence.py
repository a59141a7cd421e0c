"""Dense state that only an optimizer's step changes: copied while the next forward and backward run.

Between one step and the next, parameters and optimizer state stand still. So a snapshot of them
needn't be complete when save() returns, only when the next step begins: a hook before every
optimizer's step, the fence, copies what is left by then.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from ckpt.errors import UntrackedWriteError
from ckpt.native import move
from ckpt.rows.device import CudaDevice, Device, Mark
from ckpt.tree import identity
from ckpt.types import Clock

_LIFT_AGAIN_S = 0.02  # their watchdog may have lowered the persist threads meanwhile
_SAMPLED = 64  # values of each tensor
_PIECE_BYTES = 4 << 20  # long enough to be worth a call, short enough to wait for


@dataclass(frozen=True, slots=True)
class Copy:
    """A tensor of the state, by its key, and the host memory of its shape that it's copied to.

    whole: what `live` is a part of, where that counts changes apart: a DTensor.
    """

    fqn: str
    live: torch.Tensor
    home: torch.Tensor
    whole: torch.Tensor | None = None

    def version(self) -> tuple[int, int]:
        """Rises with every in-place operation; writes through `.data` don't count."""
        return self.live._version, self.whole._version if self.whole is not None else 0


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
        waiting = [c for c in self._open if not c.done]
        self._open = []
        if waiting:
            started = self._clock.monotonic()
            for c in waiting:
                c.finish()
            self._waited(self._clock.monotonic() - started)

    def close(self) -> None:
        self._hook.remove()

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        # Whichever optimizer it is: any of them may hold any parameter.
        if self._open:
            self.finish()


class _DeviceCopies:
    """The copies from one device: all enqueued at once, beside training's stream."""

    def __init__(self, device: Device, copies: Sequence[Copy]) -> None:
        self._checked = False
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
        self._versions = [c.version() for c in copies]
        self._known = [_sample(c.live) for c in copies]
        self._left: list[int] = []
        self._pieces: list[tuple[int, torch.Tensor, torch.Tensor]] = []
        for n, c in enumerate(copies):
            pieces = [(n, live, home) for live, home in _pieces(c)]
            self._left.append(len(pieces))
            self._pieces += pieces
        self._next = 0
        self._running = 0
        self.overwritten: list[str] = []

    @property
    def done(self) -> bool:
        """May a step go on without `finish`?"""
        return self._next >= len(self._pieces) and not self._running and self._ordered

    def help(self) -> None:
        """Copy until nothing is left to begin. Runs on a persist thread."""
        while self._copy_one(move):
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
        if self.overwritten:
            shown = ", ".join(self.overwritten[:4])
            raise UntrackedWriteError(
                f"{shown}{' ...' if len(self.overwritten) > 4 else ''}: changed outside of an "
                f"optimizer's step before the snapshot had it; call touched() on it before, or save "
                f'with snapshot = "copied"'
            )

    def abandon(self) -> None:
        """Copy no more. When this returns nothing is written to the copies' homes any longer."""
        with self._changed:
            self._next = len(self._pieces)
            self._changed.wait_for(lambda: not self._running)
        self._settle_devices()
        self._ordered = True

    def _copy_one(self, by: Callable[[torch.Tensor, torch.Tensor], object]) -> bool:
        with self._changed:
            if self._next >= len(self._pieces):
                return False
            n, live, home = self._pieces[self._next]
            # In this order: `done` is read without the lock, and must not miss a copy.
            self._running += 1
            self._next += 1
        try:
            by(home, live)
        finally:
            with self._changed:
                self._running -= 1
                self._left[n] -= 1
                # The last piece was copied before this look.
                if not self._left[n] and self._was_changed(n):
                    self.overwritten.append(self._copies[n].fqn)
                    self._unsteady.add(self._copies[n].fqn)
                if not self._running:
                    self._changed.notify_all()
        return True

    def _was_changed(self, n: int) -> bool:
        """In-place operations count up; of what doesn't count, such as `.data`, a sample tells."""
        copy, known = self._copies[n], self._known[n]
        if copy.version() != self._versions[n]:
            return True
        copied = _sample(copy.home)
        return known is not None and copied is not None and not torch.equal(known, copied)

    def _settle_devices(self) -> None:
        for copies in self._beside:
            self._note(copies.settle())

    def _note(self, changed: Sequence[str]) -> None:
        with self._changed:
            self.overwritten += changed
            self._unsteady.update(changed)


def owned_by_steps(
    optimizers: Iterable[Optimizer], elsewhere: Iterable[torch.Tensor]
) -> set[tuple[Any, ...]]:
    """Identities of the tensors that only the steps of `optimizers` change; see `identity`.

    elsewhere: tensors that something else changes, too, such as fused tables; what shares memory
    with them isn't owned.
    """
    foreign = {t.untyped_storage().data_ptr() for t in elsewhere}
    owned = set()
    for tensor in _held(optimizers):
        if tensor.layout is not torch.strided or not tensor.numel():
            continue
        if tensor.untyped_storage().data_ptr() not in foreign:
            owned.add(identity(tensor))
    return owned


def _held(optimizers: Iterable[Optimizer]) -> Iterator[torch.Tensor]:
    """This rank's memory of all parameters and state tensors."""
    for optimizer in optimizers:
        if any(c.__name__ == "FusedOptimizer" for c in type(optimizer).__mro__):
            continue  # TorchRec's: a lookup's backward is its step
        held = [p for group in optimizer.param_groups for p in group["params"]]
        for state in optimizer.state.values():
            held += state.values() if isinstance(state, dict) else (state,)
        for tensor in held:
            if isinstance(tensor, DTensor):
                yield tensor._local_tensor
            elif isinstance(tensor, torch.Tensor) and not isinstance(tensor, ShardedTensor):
                yield tensor


def _sample(tensor: torch.Tensor) -> torch.Tensor | None:
    """The bytes of some values, evenly spread; None if the memory isn't contiguous."""
    if not tensor.is_contiguous() or not tensor.numel():
        return None
    flat = tensor.detach().reshape(-1)
    return flat[:: -(-flat.numel() // _SAMPLED)].contiguous().clone().view(torch.uint8)


def _copy(home: torch.Tensor, live: torch.Tensor) -> None:
    """With all of torch's threads: training waits."""
    home.copy_(live)


def _pieces(copy: Copy) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """A tensor in pieces of some megabytes; one whose memory isn't contiguous, whole."""
    if not copy.live.is_contiguous():
        yield copy.live, copy.home
        return
    live, home = copy.live.reshape(-1), copy.home.reshape(-1)
    step = max(1, _PIECE_BYTES // copy.live.element_size())
    for a in range(0, live.numel(), step):
        yield live[a : a + step], home[a : a + step]
