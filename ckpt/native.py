"""The native part, if it was built: `_rows.so` beside this file, through ctypes.

It's plain C without Python's headers; `hatch_build.py` compiles it at installation where there
is a C compiler. Without it everything works through torch, more slowly.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ckpt.config import native_allowed

SLOTS = 16
"""Snapshots that may be open at a time."""
PARTS = 8
"""Components that a table may have."""
HEAD_BYTES = 16

LIBRARY = Path(__file__).with_name("_rows.so")

_HUGE = 2 << 20


class TableStruct(ctypes.Structure):
    """`table_t` of _rows.c."""

    _fields_ = (
        ("tag", ctypes.c_void_p),
        ("first", ctypes.c_void_p),
        ("rows", ctypes.c_int64),
        ("chunk_rows", ctypes.c_int64),
        ("magic", ctypes.c_uint64),
        ("record_bytes", ctypes.c_int64),
        ("parts", ctypes.c_int64),
        ("part", ctypes.c_void_p * PARTS),
        ("width", ctypes.c_int64 * PARTS),
        ("upto", ctypes.c_int64 * SLOTS),
    )


class PoolStruct(ctypes.Structure):
    """`pool_t` of _rows.c."""

    _fields_ = (
        ("slabs", ctypes.c_void_p),
        ("next", ctypes.c_void_p),
        ("count", ctypes.c_void_p),
        ("free_slabs", ctypes.c_void_p),
        ("n_free", ctypes.c_int64),
        ("slab_bytes", ctypes.c_int64),
        ("epoch", ctypes.c_int64),
        ("open", ctypes.c_int64 * SLOTS),
        ("stop_segment", ctypes.c_int64),
        ("stop_at", ctypes.c_int64),
    )


@functools.cache
def array_of(kind: Any, count: int) -> Any:
    """The type of an array; made anew at each use it would leave a reference cycle behind each time."""
    return kind * count


@dataclass(frozen=True)
class Native:
    """The functions of _rows.c.

    `copy` and `print` run without Python's lock. The others hold it: they are the appending side,
    which that makes one thread at a time.
    """

    touch: Callable[..., int]
    copy: Callable[..., int]
    release: Callable[..., int]
    age: Callable[..., None]
    print: Callable[..., int]


@functools.cache
def load() -> Native | None:
    """The native part, or None where it wasn't built or SIDESTAGE_NATIVE=0 says to do without."""
    if not native_allowed() or not LIBRARY.exists():
        return None
    try:
        locked, free = ctypes.PyDLL(str(LIBRARY)), ctypes.CDLL(str(LIBRARY))
    except OSError:  # built for another machine
        return None
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    touch, copy, release, age, prints = (
        locked.rows_touch,
        free.rows_copy,
        locked.rows_release,
        locked.rows_age,
        free.rows_print,
    )
    touch.argtypes = (
        *(pointer, pointer, pointer, number, pointer),
        *(ctypes.c_int, number, number),
    )
    touch.restype = ctypes.c_int
    copy.argtypes = (pointer, pointer, number, number, number, pointer)
    copy.restype = number
    release.argtypes = (pointer, pointer, number)
    release.restype = number
    age.argtypes = (pointer, number, ctypes.c_int)
    age.restype = None
    prints.argtypes = (
        *(pointer, pointer, ctypes.c_int, number, number, pointer, pointer),
        *(pointer, number),
    )
    prints.restype = number
    return Native(touch, copy, release, age, prints)


def touched_memory(nbytes: int) -> torch.Tensor:
    """Zeroed memory whose pages are there already, huge ones where the system gives them.

    uint8 of shape (nbytes,), aligned to a page. It's given back with the last tensor that uses it.
    """
    rounded = -(-nbytes // _HUGE) * _HUGE
    # Only whole, aligned huge pages are given: worth it where little of the last one is wasted.
    huge = nbytes > 0 and rounded - nbytes <= nbytes // 2
    area = mmap.mmap(
        -1,
        rounded + _HUGE if huge else max(nbytes, 1),
        flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS,
    )
    with contextlib.suppress(OSError):  # a kernel without huge pages
        area.madvise(mmap.MADV_HUGEPAGE)
    memory = torch.frombuffer(area, dtype=torch.uint8)
    start = -memory.data_ptr() % _HUGE if huge else 0
    memory = memory[start : start + nbytes]
    memory.zero_()
    return memory


def cuda_used() -> bool:
    """Does this process work with CUDA? If not, whatever asks the driver makes a context, in vain."""
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def pin(memory: torch.Tensor) -> bool:
    """Page-lock host memory for CUDA's current device; False where that's refused, or unused.

    Refused, it costs only speed: copies to it then hold up the thread that begins them. It must be
    undone by `unpin` before the memory goes. torch's own pinned tensors would take up to twice
    the memory, and never give it back.
    """
    if not memory.numel() or not cuda_used():
        return False
    if int(_cuda().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)) == 0:
        return True
    with contextlib.suppress(RuntimeError):
        # The refusal stays this thread's last error, and the next launch would raise it.
        torch.zeros(1, device="cuda")
    return False


def unpin(memory: torch.Tensor) -> None:
    """Undo `pin`. No copy may be under way."""
    _cuda().cudaHostUnregister(memory.data_ptr())


def _cuda() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def move(to: torch.Tensor, source: torch.Tensor) -> None:
    """Copy a host tensor of our own on this thread alone, without Python's lock.

    `Tensor.copy_` would start threads of torch's own, which know nothing of this one's priority.
    """
    if to.is_contiguous() and source.is_contiguous():
        ctypes.memmove(to.data_ptr(), source.data_ptr(), source.nbytes)
    else:
        to.copy_(source)


def memory_at(address: int, nbytes: int) -> memoryview:
    """Host memory as bytes to read. It holds on to nothing: whoever has the memory must outlive it."""
    view: memoryview = _view(address, nbytes, _PYBUF_READ)
    return view


def memory_to_fill(address: int, nbytes: int) -> memoryview:
    """Host memory as bytes to write, as `memory_at`."""
    view: memoryview = _view(address, nbytes, _PYBUF_WRITE)
    return view


_PYBUF_READ = 0x100
_PYBUF_WRITE = 0x200
_view = ctypes.pythonapi.PyMemoryView_FromMemory
_view.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
_view.restype = ctypes.py_object


class _Span(ctypes.Structure):
    """`struct iovec`."""

    _fields_ = (("at", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


def read_live(to: torch.Tensor, source: torch.Tensor) -> bool:
    """`move` from memory that isn't ours: False if some of it isn't there any more.

    Sharing a storage with another process or resizing it moves its memory in place, under any
    tensor that one holds, and a plain copy would end the process. So the kernel reads it for us. What
    was copied counts only if the tensor's memory is where it was before, afterwards, too.
    Both are contiguous host tensors of the same bytes.
    """
    at, there, left = to.data_ptr(), source.data_ptr(), source.nbytes
    while left > 0:
        here, from_ = _Span(at, left), _Span(there, left)
        got = _process_vm_readv()(os.getpid(), ctypes.byref(here), 1, ctypes.byref(from_), 1, 0)
        if got <= 0:
            if got < 0 and ctypes.get_errno() != errno.EFAULT:  # a sandbox without this call
                ctypes.memmove(at, there, left)
                return True
            return False
        at, there, left = at + got, there + got, left - got
    return True


@functools.cache
def _process_vm_readv() -> Callable[..., int]:
    call = ctypes.CDLL(None, use_errno=True).process_vm_readv
    span = ctypes.POINTER(_Span)
    call.argtypes = (ctypes.c_int, span, ctypes.c_ulong, span, ctypes.c_ulong, ctypes.c_ulong)
    call.restype = ctypes.c_ssize_t
    return call
