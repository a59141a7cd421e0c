"""Reads ahead what a restore will ask for first, while the rest of a start goes on. No torch.

    with Prefetch(storage) as ahead:  # as early as possible: it needs no process group and no model
        ...
        checkpointer.restore(state, prefetched=ahead)

The restore decides as without it. Rank 0 lists the root itself, so that it sees what has come and gone
since; what it then reads whole is immutable, and is answered from memory only if it was sound when it was
read ahead and isn't listed with another etag. Everything else is read from the store.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from types import TracebackType

from ckpt import layout
from ckpt.catalog import Catalog
from ckpt.config import launched_ranks
from ckpt.digest import check_digest
from ckpt.errors import NotFoundError, SidestageError
from ckpt.machine import available_bytes
from ckpt.manifest import AttemptRecord, CommitRecord, RunRecord, unseal
from ckpt.storage import LocalStorage, NearObject, Root, Storage, near, owned, storage_of
from ckpt.types import FileEntry, ObjectInfo

MOST_HELD_BYTES = 64 << 20
_SMALL = (
    layout.INDEX_SUFFIX,
    layout.OBJECTS_SUFFIX,
)  # what opening a checkpoint reads whole, of all ranks
_WORKERS = 8  # small reads in flight: an object store takes tens of milliseconds for each
_PIECE_BYTES = 4 << 20
_WARM_SHARE = 4  # one part in so many of the available memory may be filled in the page cache


class Prefetch:
    """One start's reading ahead, on a thread of its own from the moment it is made.

    Held in memory are the records and indexes of the newest checkpoint, on rank 0 the records of the
    whole lineage too, `MOST_HELD_BYTES` (64 MiB) at most. On a local root the chunks that this rank
    wrote itself are then read once, so that they lie in the page cache: up to a quarter of the memory
    available on the host, shared by its ranks, and only where the world size is that of the checkpoint.

    It ends at `close()`, at the end of its block, or when the restore first asks it for something. It
    writes nothing, never raises, and nobody waits for it.

    Args:
        root: the run's root: a path (text or a pathlib.Path), a URL, or a Storage.
        ranks: this rank, how many there are, and how many on this host; by default what the
            launcher says.
    """

    def __init__(self, root: Root, ranks: tuple[int, int, int] | None = None) -> None:
        self.storage = storage_of(root)
        self._rank, self._world_size, self._ranks_here = ranks or launched_ranks()
        self._kept = _Kept()
        self._used: set[str] = set()
        self._changed: set[str] = set()
        self.warmed_bytes = 0
        """Of this rank's chunks, read into the page cache so far."""
        self.error: str | None = None
        """Why it ended early, if something failed. The restore meets the same, or it was passing."""
        self._thread = threading.Thread(target=self._run, name="sidestage-prefetch", daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return self.storage.url

    @property
    def used(self) -> int:
        """Objects that a restore was given from memory."""
        return len(self._used)

    def read(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        """As the store's own. Ends the reading ahead."""
        self.stop()
        data = self._kept.objects.get(key) if start == 0 and length is None else None
        if data is None or key in self._changed:
            return self.storage.read(key, start, length)
        self._used.add(key)
        return data

    def read_into(self, key: str, start: int, buffer: memoryview) -> None:
        """As the store's own."""
        self.storage.read_into(key, start, buffer)

    def near(self, key: str) -> NearObject | None:
        """As the store's own."""
        return near(self.storage, key)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """As the store's own, now. What isn't the object any more that was read ahead isn't used."""
        self.stop()
        for info in self.storage.list(prefix):
            if self._kept.etags.get(info.key, info.etag) != info.etag:
                self._changed.add(info.key)
            yield info

    def wait(self, timeout_s: float) -> bool:
        """Has it read all that it wants, within so many seconds? A restore needn't wait."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def stop(self) -> None:
        """Read no further; what is on its way is still taken."""
        self._kept.ended = True

    def close(self) -> None:
        """Stop, and free what is held. Idempotent."""
        self.stop()
        self._kept.drop()

    def __enter__(self) -> Prefetch:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # -- on its threads -------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._read_ahead()
        except _EndedError:
            pass
        except Exception as e:  # whatever it is: the start goes on without
            self._failed(e)

    def _read_ahead(self) -> None:
        tree = Catalog(_Keeping(self.storage, self._kept)).tree()
        newest = tree.newest()
        info = tree.commit(newest, "ancestor") if newest else None
        if info is None or info.record is None:
            return  # nothing there, or damaged: which one it is then, the restore decides
        self._read_small(info.record)
        for place in tree.lineage(strict=False)[1:] if self._rank == 0 else ():
            if self._kept.full:
                break
            tree.commit(place, "ancestor")
        if self._world_size == info.record.world_size:
            self._warm(info.record)

    def _read_small(self, record: CommitRecord) -> None:
        left = deque(f for f in record.files if f.key.endswith(_SMALL))

        def work() -> None:
            with suppress(_EndedError):
                while not self._kept.full:
                    try:
                        file = left.popleft()
                    except IndexError:
                        return
                    self._read_file(file)

        # Not a pool, whose threads the interpreter waits for at its end.
        workers = [
            threading.Thread(target=work, daemon=True) for _ in range(min(_WORKERS, len(left)))
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()

    def _read_file(self, file: FileEntry) -> None:
        self._kept.check()
        try:
            data = self.storage.read(file.key)
            check_digest(data, file.digest, file.key)
        except Exception as e:  # whatever it is: the restore meets it, or it was passing
            self._failed(e)
        else:
            self._kept.keep(file.key, data)

    def _warm(self, record: CommitRecord) -> None:
        own = owned(self.storage)
        if not isinstance(own, LocalStorage):
            return
        left = (available_bytes() or 0) // _WARM_SHARE // self._ranks_here
        scratch = memoryview(bytearray(_PIECE_BYTES))
        for f in record.files:
            if f.key != layout.rank_data_key(f.key[: f.key.rfind("/") + 1], self._rank):
                continue
            size = min(f.size_bytes, left)
            left -= size
            with suppress(NotFoundError):  # of a branch: it lies in the root that it came from
                for start in range(0, size, _PIECE_BYTES):
                    self._kept.check()
                    piece = scratch[: min(_PIECE_BYTES, size - start)]
                    own.read_into(f.key, start, piece)
                    self.warmed_bytes += len(piece)

    def _failed(self, error: Exception) -> None:
        self.error = str(error) if isinstance(error, SidestageError) else repr(error)


class _EndedError(Exception):
    """Nothing more is to be read."""


class _Kept:
    """Objects by key, as many as there is room for."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.etags: dict[str, str] = {}
        self.ended = False
        self.full = False
        self._room_bytes = MOST_HELD_BYTES
        self._lock = threading.Lock()

    def check(self) -> None:
        if self.ended:
            raise _EndedError

    def keep(self, key: str, data: bytes) -> None:
        with self._lock:
            if len(data) > self._room_bytes:
                self.full = True
            else:
                self._room_bytes -= len(data)
                self.objects[key] = data

    def drop(self) -> None:
        with self._lock:
            self._room_bytes = -1  # for what is still on its way
            self.objects.clear()


class _Keeping:
    """The store as the thread reads it: records that are sound are kept on the way."""

    _KINDS = (
        (layout.RUN, RunRecord.KIND),
        (layout.ATTEMPTS, AttemptRecord.KIND),
        (layout.COMMITS, CommitRecord.KIND),
    )

    def __init__(self, storage: Storage, kept: _Kept) -> None:
        self._storage = storage
        self._kept = kept
        self.url = storage.url

    def read(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        self._kept.check()
        data = self._storage.read(key, start, length)
        kind = next((kind for begin, kind in self._KINDS if key.startswith(begin)), None)
        if kind is not None and start == 0 and length is None:
            with suppress(SidestageError):
                unseal(kind, data, key)
                self._kept.keep(key, data)
        return data

    def read_into(self, key: str, start: int, buffer: memoryview) -> None:
        self._storage.read_into(key, start, buffer)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        self._kept.check()
        for info in self._storage.list(prefix):
            self._kept.etags[info.key] = info.etag
            yield info
