"""Where a pool's tensors are, and how work on them is put in order: streams and events, or nothing.

Everything that row guards and fences need of CUDA is here, so that what is built on it runs, and
is tested, on tensors in host memory too. Nothing here makes the host wait but `Mark.synchronize`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch

from ckpt.errors import BadInputError


class Mark(Protocol):
    """A moment in a stream's work."""

    def done(self) -> bool:
        """Has all work before it ended?"""
        ...

    def wait(self) -> None:
        """What is enqueued on the current stream from now on comes after it."""
        ...

    def synchronize(self) -> None:
        """The host waits for it, without Python's lock and without spinning."""
        ...


class Device(Protocol):
    """A place of tensors, with one side stream for a persist thread."""

    @property
    def device(self) -> torch.device: ...

    def bind(self) -> None:
        """Make it the current device of this thread, a persist thread, for good."""
        ...

    def stream(self) -> Any:
        """The current stream, to be compared with others."""
        ...

    def mark(self) -> Mark:
        """This moment of the current stream."""
        ...

    def beside(self) -> contextlib.AbstractContextManager[None]:
        """Within it the side stream is the current one, of this thread."""
        ...

    def keep(self, tensor: torch.Tensor) -> None:
        """Don't give the tensor's memory to others before the current stream is done with it."""
        ...

    def host(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Host memory that copies from here reach without the host's help."""
        ...


def upload(device: Device, numbers: Sequence[int]) -> torch.Tensor:
    """Numbers as int64 of shape (len(numbers),) on the device, in the order of the current stream."""
    there = device.host((len(numbers),), torch.int64)
    there.copy_(torch.tensor(numbers, dtype=torch.int64, device="cpu"))
    return there.to(device.device, non_blocking=True)


def fetch(device: Device, tensor: torch.Tensor) -> torch.Tensor:
    """A host copy of a tensor as it is in the order of the current stream. The host waits for it."""
    there = device.host(tensor.shape, tensor.dtype)
    there.copy_(tensor, non_blocking=True)
    device.mark().synchronize()
    return there


class HostDevice:
    """Host memory: all work is done when it's called."""

    device = torch.device("cpu")

    def bind(self) -> None:
        pass

    def stream(self) -> Any:
        return None

    def mark(self) -> Mark:
        return _Now()

    def beside(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def keep(self, tensor: torch.Tensor) -> None:
        pass

    def host(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=dtype, device="cpu")


class _Now:
    def done(self) -> bool:
        return True

    def wait(self) -> None:
        pass

    def synchronize(self) -> None:
        pass


class CudaDevice:
    """One CUDA device. Its side stream has the lowest priority, that of streams by default."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def bind(self) -> None:
        # Else a new thread is at device 0, and each rank would take memory there for a context.
        torch.cuda.set_device(self.device)

    def stream(self) -> Any:
        return torch.cuda.current_stream(self.device)

    def mark(self) -> Mark:
        with torch.cuda.device(self.device):
            if torch.cuda.is_current_stream_capturing():
                raise BadInputError(
                    "guarded state is changed inside of a CUDA graph, whose replays no guard sees; leave "
                    'lookups and optimizer steps out of it, or save with snapshot = "copied"'
                )
        return _Event(self.device)

    @contextlib.contextmanager
    def beside(self) -> Iterator[None]:
        with torch.cuda.stream(self._side):
            yield

    def keep(self, tensor: torch.Tensor) -> None:
        tensor.record_stream(torch.cuda.current_stream(self.device))

    def host(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=dtype, device="cpu", pin_memory=True)


class _Event:
    """`Event.wait` without a stream would take the current device's, which may be another one."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # Blocking: a waiting persist thread must not take a core from training.
        self._event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        self._event.record(torch.cuda.current_stream(device))

    def done(self) -> bool:
        return bool(self._event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._event)

    def synchronize(self) -> None:
        self._event.synchronize()
