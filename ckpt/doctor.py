"""Tries out whether a store and this machine are fit for checkpoints, and what a save will cost. No torch.

Everything is written below one scratch prefix, at most some 64 MiB for a few seconds, and
removed again.
"""

from __future__ import annotations

import mmap
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Protocol, runtime_checkable

from ckpt import layout
from ckpt.catalog import Catalog
from ckpt.errors import ConflictError, NotFoundError, SidestageError
from ckpt.findings import Finding, Level, gib_s, size
from ckpt.storage import LocalStorage, Storage, owned
from ckpt.survey import KeepsParts
from ckpt.types import Clock
from ckpt.written import uncommitted

_PIECE_BYTES = 1 << 20
_BLOCK_BYTES = 4096


@runtime_checkable
class TellsTime(Protocol):
    """A store that has a clock of its own, such as an object store with a Date header."""

    def time_s(self) -> float:
        """Seconds since 1970 by the store's clock, now."""
        ...


@dataclass(frozen=True)
class Probe:
    """How much to write at most, and for how long, each way."""

    most_bytes: int = 64 << 20
    most_s: float = 3.0


@dataclass(frozen=True)
class Speeds:
    """Measured bytes per second; None where it couldn't be measured."""

    write: float | None
    read: float | None


def examine_store(
    storage: Storage, clock: Clock, probe: Probe | None = None
) -> tuple[list[Finding], Speeds]:
    """What was found about a root's store, and its speed both ways."""
    probe = probe or Probe()
    own = owned(storage)
    with _scratch(own) as prefix:
        try:
            own.create(f"{prefix}writable", b"x")
        except SidestageError as e:
            return [Finding("writable", "fail", str(e))], Speeds(None, None)
        findings = [Finding("writable", "ok", own.url)]
        for name, check in (
            ("create-only", _create_only),
            ("compare-and-set", _compare_and_set),
            ("listing", _listing),
        ):
            findings.append(_guarded(name, partial(check, own, prefix)))
        findings.append(_guarded("clock", lambda: _clock_skew(own, clock)))
        if isinstance(own, KeepsParts):
            findings.append(_guarded("uploads", partial(_uploads, own)))
        if isinstance(own, LocalStorage):
            findings.append(_guarded("O_DIRECT", lambda: _direct(own.url)))
        speeds = Speeds(None, None)
        try:
            speeds = _bandwidth(own, f"{prefix}bandwidth", clock, probe)
            findings += [_speed("write", speeds.write), _speed("read", speeds.read)]
        except SidestageError as e:
            findings.append(Finding("bandwidth", "fail", str(e)))
    return findings, speeds


def free_space(storage: Storage, state_bytes: int | None) -> Finding:
    """Room for checkpoints of `state_bytes`, where the store tells."""
    own = owned(storage)
    if not isinstance(own, LocalStorage):
        return Finding("free space", "ok", "an object store: see its quota")
    folder = own.url
    while not os.path.isdir(folder):
        folder = os.path.dirname(folder)
    found = os.statvfs(folder)
    free = found.f_bavail * found.f_frsize
    values = {"free_bytes": free}
    if not state_bytes:
        return Finding("free space", "ok", f"{size(free)} free", values)
    fits = free / state_bytes
    text = f"{size(free)} free: {fits:.1f} checkpoints of {size(state_bytes)}"
    if fits < 1:
        return Finding("free space", "fail", f"{text}; make room", values)
    # One is written before an older one can go.
    level: Level = "warn" if fits < 2 else "ok"
    return Finding("free space", level, text, values)


def unfinished_save(storage: Storage) -> Finding:
    """Is there a save that all ranks wrote and nobody committed?"""

    def look() -> Finding:
        _, saves = uncommitted(storage, Catalog(storage).tree())
        if not saves:
            return Finding("unfinished", "ok", "no save lacks only its commit")
        save = saves[0]
        text = (
            f"all {save.world_size} ranks have written step {save.step} of epoch {save.epoch}, and it has "
            f"no commit (yet): the next restore() commits it and goes on from there"
        )
        return Finding("unfinished", "warn", text, {"step": save.step, "epoch": save.epoch})

    return _guarded("unfinished", look)


@contextmanager
def _scratch(storage: Storage) -> Iterator[str]:
    prefix = layout.scratch_prefix(secrets.token_hex(6))
    try:
        yield prefix
    finally:
        with suppress(SidestageError):
            for o in list(storage.list(prefix)):
                storage.delete(o.key)
        if isinstance(storage, LocalStorage):
            storage.drop_folder(prefix)


def _guarded(name: str, check: Callable[[], Finding]) -> Finding:
    """A check's finding; a store that fails in it isn't usable."""
    try:
        return check()
    except (SidestageError, OSError) as e:
        return Finding(name, "fail", str(e))


def _create_only(storage: Storage, prefix: str) -> Finding:
    if not storage.probe():
        return Finding(
            "create-only",
            "warn",
            "the store has no conditional writes: only one process may write to this root, and a "
            "publisher needs a registry elsewhere",
        )
    key = f"{prefix}create-only"
    storage.create(key, b"first")
    try:
        storage.create(key, b"second")
    except ConflictError:
        if storage.read(key) == b"first":
            return Finding("create-only", "ok", "a second create of a key is refused")
    return Finding(
        "create-only",
        "fail",
        "a second create of a key replaces the first: two jobs on this root would destroy each "
        "other's commits; use a store with conditional writes",
    )


def _compare_and_set(storage: Storage, prefix: str) -> Finding:
    key = f"{prefix}compare-and-set"
    old = storage.put(key, b"1").etag
    storage.replace_if(key, b"2", old)
    try:
        storage.replace_if(key, b"3", old)
    except ConflictError:
        return Finding("compare-and-set", "ok", "a replacement of an older version is refused")
    return Finding(
        "compare-and-set",
        "fail",
        "a replacement of an older version is accepted: publishers would undo each other's moves, "
        "and pins can't tell that they were lost; use a store with conditional writes",
    )


def _listing(storage: Storage, prefix: str) -> Finding:
    """What was written must be listed at once, and no more once it is deleted."""
    folder = f"{prefix}listing/"
    stale = "latest is found by listing; use a store (or mount) with consistent listings"
    for n in range(3):
        key = f"{folder}{n}"
        storage.create(key, bytes(n))
        if (key, n) not in [(o.key, o.size_bytes) for o in storage.list(folder)]:
            return Finding("listing", "fail", f"an object isn't listed after its write: {stale}")
    storage.delete(f"{folder}0")
    listed = [o.key for o in storage.list(folder)]
    with suppress(NotFoundError):
        storage.stat(f"{folder}0")
        listed.append(f"{folder}0")
    for n in (1, 2):
        storage.delete(f"{folder}{n}")
    if isinstance(storage, LocalStorage):
        storage.drop_folder(folder)
    if f"{folder}0" in listed:
        return Finding("listing", "fail", f"an object is still there after its deletion: {stale}")
    return Finding("listing", "ok", "shows writes and deletions at once")


def _clock_skew(storage: Storage, clock: Clock) -> Finding:
    before = clock.time()
    if isinstance(storage, TellsTime):
        theirs = storage.time_s()
    elif isinstance(storage, LocalStorage):
        theirs = _fresh_mtime(storage.url)
    else:
        return Finding("clock", "ok", "this store doesn't tell its time")
    skew_s = round(theirs - (before + clock.time()) / 2, 3)
    text = f"the store is {skew_s:+z.2f} s from this machine"
    level: Level = "ok" if abs(skew_s) <= 2 else "warn"
    note = "" if level == "ok" else "; nothing depends on it but the times that you see: set up NTP"
    return Finding("clock", level, text + note, {"skew_s": skew_s})


def _uploads(storage: KeepsParts) -> Finding:
    found = list(storage.unfinished())
    if not found:
        return Finding("uploads", "ok", "none is unfinished", {"unfinished": 0})
    text = (
        f"{len(found)} are unfinished, those of a running save among them; `ckpt prune --apply` "
        f"drops the parts of killed ones, a lifecycle rule for incomplete uploads does it for good"
    )
    return Finding("uploads", "warn", text, {"unfinished": len(found)})


def _fresh_mtime(folder: str) -> float:
    with _own_file(folder, 0) as fd:
        os.write(fd, b"x")
        os.fsync(fd)
        return os.fstat(fd).st_mtime


def _direct(folder: str) -> Finding:
    try:
        with _own_file(folder, os.O_DIRECT) as fd, mmap.mmap(-1, _BLOCK_BYTES) as block:
            os.write(fd, block)
    except OSError as e:
        text = f"refused ({e.strerror}): writes go through the page cache and cost more CPU time"
        return Finding("O_DIRECT", "warn", text)
    return Finding("O_DIRECT", "ok", f"works with blocks of {_BLOCK_BYTES} bytes")


@contextmanager
def _own_file(folder: str, flags: int) -> Iterator[int]:
    """A new file that no listing of the store shows, removed at the end."""
    path = os.path.join(folder, f".sidestage-doctor-{secrets.token_hex(6)}")
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | flags, 0o600)
    try:
        yield fd
    finally:
        os.close(fd)
        os.unlink(path)


def _bandwidth(storage: Storage, key: str, clock: Clock, probe: Probe) -> Speeds:
    """Speed of one writer until its object is durable, and of one reader without the page cache."""
    piece = memoryview(bytearray(os.urandom(_PIECE_BYTES)))
    written = 0
    started = clock.monotonic()
    with storage.writer(key) as out:
        while written < probe.most_bytes and clock.monotonic() - started < probe.most_s:
            out.write(piece)
            written += len(piece)
    write_s = clock.monotonic() - started
    if isinstance(storage, LocalStorage):
        fd = os.open(os.path.join(storage.url, key), os.O_RDONLY)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
    done = 0
    started = clock.monotonic()
    while done < written and clock.monotonic() - started < probe.most_s:
        storage.read_into(key, done, piece)
        done += len(piece)
    read_s = clock.monotonic() - started
    return Speeds(written / max(write_s, 1e-9), done / max(read_s, 1e-9))


def _speed(name: str, found: float | None) -> Finding:
    return Finding(
        name, "ok", f"{gib_s(found)} with one stream", {"bytes_per_s": round(found or 0)}
    )
