"""The ways to save that are compared. Each stores the same state, as its own documentation says."""

from __future__ import annotations

import contextlib
import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from benchmarks.training.workload import State
from ckpt import CheckpointConfig, Checkpointer
from ckpt.events import ListSink
from ckpt.storage import Storage


@dataclass(frozen=True)
class Job:
    """What a saver saves, and where: every save of the job goes below `folder`.

    guarded: the modules and optimizers that train the state.
    """

    rank: int
    state: State
    folder: Path
    guarded: tuple[object, ...] = ()

    def place(self, step: int) -> Path:
        return self.folder / f"{step:06d}"


class Saver(ABC):
    """One way to save. Every method is collective: call it on every rank."""

    def __init__(self, job: Job) -> None:
        self.job = job

    @abstractmethod
    def save(self, step: int) -> None:
        """Save; return when the trainer may change the state. One save at a time."""

    def done(self) -> bool:
        """Is the save over? Raises if it failed."""
        return True

    def waited_s(self) -> dict[str, float]:
        """Seconds so far that it made training wait outside of save(), where it counts them."""
        return {}

    def updating(self) -> AbstractContextManager[object]:
        """Is held while the trainer changes the state."""
        return contextlib.nullcontext()

    def copied_tables(self) -> int | None:
        """How many tables were copied that could have been left in place, where it tells."""
        return None

    @abstractmethod
    def restore(self, step: int, into: State) -> None:
        """Read the save of `step` back into memory of the right shapes."""

    def close(self) -> None:  # noqa: B027 - most have nothing to do
        """Give back threads, processes and memory."""


class Sidestage(Saver):
    """ckpt.Checkpointer, by default with its default settings."""

    def __init__(
        self, job: Job, config: CheckpointConfig | None = None, storage: Storage | None = None
    ) -> None:
        super().__init__(job)
        self.events = ListSink()
        self.checkpointer = Checkpointer(storage or str(job.folder), config, sink=self.events)
        guard_all(self.checkpointer, job.guarded)
        self._committed: Future[Any] | None = None

    def save(self, step: int) -> None:
        state = {"tensors": self.job.state.trained, "progress": {"step": step}}
        self._committed = self.checkpointer.save(step, state).committed

    def done(self) -> bool:
        return _is_over(self._committed)

    def waited_s(self) -> dict[str, float]:
        """Seconds so far that training waited outside of save(), as the checkpointer counts them."""
        stats = self.checkpointer.stats
        return {
            name: seconds_of(getattr(stats, name, 0.0))
            for name in ("fence_wait_s", "overlay_wait_s")
        }

    def copied_tables(self) -> int:
        """How many tables weren't guarded, but copied."""
        return len(self.events.named("table_copied"))

    def restore(self, step: int, into: State) -> None:
        with Checkpointer(self.checkpointer.storage) as reader:
            state = {"tensors": into.sharded, "progress": {"step": 0}}
            reader.restore(state, step=step)
            if state["progress"]["step"] != step:
                raise RuntimeError(f"asked for step {step}, got {state['progress']['step']}")

    def close(self) -> None:
        self.checkpointer.close()


def guard_all(checkpointer: Checkpointer, objects: tuple[object, ...]) -> bool:
    """Show a checkpointer what trains its state; False if this version only copies."""
    guard = getattr(checkpointer, "guard", None)
    if guard is not None:
        guard(*objects)
    return guard is not None


def seconds_of(value: Any) -> float:
    """A counter of seconds, or a list of single waits."""
    return float(sum(value)) if isinstance(value, list) else float(value)


class TorchSave(Saver):
    """torch.save of each rank's tensors into a file of its own, with fsync."""

    def save(self, step: int) -> None:
        place = self.job.place(step)
        place.mkdir(parents=True, exist_ok=True)
        with (place / f"{self.job.rank}.pt").open("wb") as f:
            torch.save(self.job.state.local, f)
            f.flush()
            os.fsync(f.fileno())
        dist.barrier()

    def restore(self, step: int, into: State) -> None:
        path = self.job.place(step) / f"{self.job.rank}.pt"
        loaded = torch.load(path, weights_only=True, mmap=True)
        for name, tensor in into.local.items():
            tensor.copy_(loaded[name])


class DcpSave(Saver):
    """torch.distributed.checkpoint.save of DTensors, as its tutorial has it."""

    def save(self, step: int) -> None:
        dcp.save(self.job.state.sharded, checkpoint_id=self.job.place(step))

    def restore(self, step: int, into: State) -> None:
        dcp.load(into.sharded, checkpoint_id=self.job.place(step))


class DcpAsyncSave(DcpSave):
    """dcp.async_save on a thread. By default it allocates the staging memory at every save."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        # A collective of the training on the group of a save would make both fail.
        self._group = dist.new_group(backend="gloo")
        self._future: Future[Any] | None = None
        self._options: dict[str, Any] = {}

    def save(self, step: int) -> None:
        saving: Any = dcp.async_save(
            self.job.state.sharded,
            checkpoint_id=self.job.place(step),
            process_group=self._group,
            **self._options,
        )
        self._future = saving

    def done(self) -> bool:
        return _is_over(self._future)


class DcpAsyncSaveReusedStager(DcpAsyncSave):
    """dcp.async_save on a thread with one stager for all saves, whose memory stays."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        # Without CUDA it has neither pinned memory nor its own stream; staging in the background
        # would store what the trainer writes meanwhile.
        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=False,
                use_shared_memory=False,
                use_async_staging=False,
                use_non_blocking_copy=False,
            )
        )
        self._options = {"async_stager": self._stager}

    def close(self) -> None:
        self._stager.close()


class TorchCheckpointing(Saver):
    """torch_checkpointing's manager: staged on a thread under its lock, written by a process."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        from torch_checkpointing import (
            AsyncCheckpointSaverConfig,
            CheckpointManager,
            CheckpointStagerConfig,
        )
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        staging = CheckpointStagerConfig(use_pinned_memory=False, use_non_blocking_copy=False)
        save = AsyncCheckpointSaverConfig(staging_config=staging)
        # Its O_DIRECT streams write unaligned pieces, which ext4 and XFS refuse.
        storage = LocalFileSystemStorageConfig(use_direct_io=False)
        self._manager = CheckpointManager.Config(save=save, storage_config=storage).build()
        self._future: Future[Any] | None = None

    def save(self, step: int) -> None:
        payload = {"state": self.job.state.local, "step": step}
        self._future = self._manager.save(str(self.job.place(step)), payload)

    def done(self) -> bool:
        return _is_over(self._future)

    def updating(self) -> AbstractContextManager[object]:
        return self._manager.lock()

    def restore(self, step: int, into: State) -> None:
        self._manager.load(str(self.job.place(step)), into={"state": into.local, "step": 0})

    def close(self) -> None:
        self._manager.close()


class TorchSnapshot(Saver):
    """torchsnapshot's async_take.

    0.1.0 means to copy CPU tensors before it returns, but compares an enum with its value, so
    those of 128 MiB and more, which it doesn't batch, are read while the trainer changes them.
    """

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        import torchsnapshot

        self._package = torchsnapshot
        self._pending: Any = None

    def save(self, step: int) -> None:
        app_state = {"state": self._package.StateDict(**self.job.state.local, step=step)}
        self._pending = self._package.Snapshot.async_take(str(self.job.place(step)), app_state)

    def done(self) -> bool:
        if self._pending is not None and self._pending.done():
            self._pending.wait()  # raises what went wrong
            self._pending = None
        return self._pending is None

    def restore(self, step: int, into: State) -> None:
        state = self._package.StateDict(**into.local, step=0)
        self._package.Snapshot(str(self.job.place(step))).restore({"state": state})
        for name, tensor in into.local.items():
            if state[name] is not tensor:
                tensor.copy_(state[name])


@dataclass(frozen=True)
class Mode:
    """A row of the benchmark: how to make its saver, and which package of which version it needs.

    durable: does it sync its files before it calls a save done?
    """

    saver: Callable[[Job], Saver]
    durable: bool
    package: str | None = None
    version: str | None = None

    def unavailable(self) -> str | None:
        """Why this mode can't run here, or None if it can."""
        if self.package is None:
            return None
        try:
            found = version(self.package)
        except PackageNotFoundError:
            return f"{self.package} is not installed: pip install 'sidestage[bench]'"
        if found != self.version:
            return f"{self.package} is {found}, compared is {self.version}"
        return None


OURS, UNPACED = "sidestage", "sidestage unpaced"
DCP_ASYNC, DCP_STAGER = "dcp.async_save", "dcp.async_save + stager"
MODES: dict[str, Mode] = {
    OURS: Mode(Sidestage, durable=True),
    UNPACED: Mode(lambda job: Sidestage(job, CheckpointConfig(persist_target_s=0.0)), durable=True),
    "torch.save + fsync": Mode(TorchSave, durable=True),
    "dcp.save": Mode(DcpSave, durable=True),
    DCP_ASYNC: Mode(DcpAsyncSave, durable=True),
    DCP_STAGER: Mode(DcpAsyncSaveReusedStager, durable=True),
    "torch_checkpointing": Mode(TorchCheckpointing, False, "torch_checkpointing", "0.1.1"),
    "torchsnapshot": Mode(TorchSnapshot, False, "torchsnapshot", "0.1.0"),
}


def _is_over(future: Future[Any] | None) -> bool:
    if future is None or not future.done():
        return future is None
    future.result()
    return True
