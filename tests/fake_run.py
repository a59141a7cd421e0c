"""Runs made by hand from the codecs, without torch: small, and as odd as a test wants them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ckpt import layout
from ckpt.digest import digest_of, new_hasher
from ckpt.index import ChunkEntry, ShardEntry, TensorEntry, encode_index
from ckpt.manifest import (
    AttemptRecord,
    CommitRecord,
    Receipt,
    RunRecord,
    commit_ref,
    decode,
    encode,
    seal,
)
from ckpt.storage import Storage
from ckpt.types import CommitRef, DigestName, FileEntry

RUN_ID = "run-1"
ALIGN_BYTES = 4096


class FakeRun:
    """Writes attempts and commits into a store, all of one run."""

    def __init__(self, storage: Storage, *, digest: DigestName = "xxh3-128") -> None:
        self.storage = storage
        self.digest: DigestName = digest
        self._continues: dict[int, CommitRef | None] = {}
        storage.create(layout.RUN, encode(RunRecord(RUN_ID, 0.0, "test")))

    def attempt(self, epoch: int, parent: CommitRef | None = None, /, **changes: Any) -> None:
        record = AttemptRecord(epoch, RUN_ID, f"token-{epoch}", 2, 0.0, parent)
        self._continues[epoch] = parent
        self.storage.put(layout.attempt_key(epoch), encode(replace(record, **changes)))

    def commit(
        self,
        epoch: int,
        step: int,
        parent: CommitRef | None = None,
        *,
        rows: int = 3,
        key: str | None = None,
        **changes: Any,
    ) -> CommitRef:
        """A commit of 2 ranks, each with `rows` chunks of one row. `key` stores it elsewhere."""
        receipts, files = [], []
        for rank in range(2):
            mine = self._rank_files(epoch, step, rank, rows)
            receipt = self.receipt(epoch, step, rank, tuple(mine), parent)
            prefix = layout.data_prefix(epoch, step, "000001")
            receipts.append(self._store(layout.rank_receipt_key(prefix, rank), encode(receipt)))
            files += mine
        record = CommitRecord(
            run_id=RUN_ID,
            epoch=epoch,
            attempt_token=f"token-{epoch}",
            step=step,
            save_id="000001",
            world_size=2,
            parent=parent,
            continues=self._continues.get(epoch),
            saved_at_s=1.0,
            committed_at_s=2.0,
            tensor_bytes=0,
            stored_bytes=sum(f.size_bytes for f in files),
            annotations={},
            receipts=tuple(receipts),
            files=tuple(files),
        )
        record = replace(record, **changes)
        data = encode(record)
        self.storage.put(key or layout.commit_key(epoch, step), data)
        return commit_ref(record, data)

    def receipt(
        self,
        epoch: int,
        step: int,
        rank: int,
        files: tuple[FileEntry, ...],
        parent: CommitRef | None,
    ) -> Receipt:
        return Receipt(
            epoch=epoch,
            attempt_token=f"token-{epoch}",
            step=step,
            save_id="000001",
            rank=rank,
            world_size=2,
            plan_id="plan",
            parent=parent,
            saved_at_s=1.0,
            annotations={},
            values_digest="values",
            tensor_bytes=0,
            guarded_bytes=0,
            copied_bytes=0,
            copied_tables={},
            files=files,
        )

    def record(self, epoch: int, step: int) -> CommitRecord:
        key = layout.commit_key(epoch, step)
        return decode(CommitRecord, self.storage.read(key), key)

    def _rank_files(self, epoch: int, step: int, rank: int, rows: int) -> list[FileEntry]:
        prefix = layout.data_prefix(epoch, step, "000001")
        data, chunks = bytearray(), []
        for row in range(rows):
            content = bytes([epoch % 256, step % 256, rank, row % 256]) * 64
            data += bytes(-len(data) % ALIGN_BYTES)
            chunks.append(ChunkEntry(row, 1, len(data), 256, "raw", self._chunk_digest(content)))
            data += content
        shard = ShardEntry((rank * rows, 0), (rows, 64), tuple(chunks))
        tensor = TensorEntry("table.weight", "sharded", "float32", (2 * rows, 64), (shard,))
        objects = seal("objects", {"values": step, "per_rank": {}})
        return [
            self._store(layout.rank_data_key(prefix, rank), bytes(data)),
            self._store(layout.rank_index_key(prefix, rank), encode_index([tensor], self.digest)),
            self._store(layout.rank_objects_key(prefix, rank), objects),
        ]

    def _chunk_digest(self, content: bytes) -> bytes:
        hasher = new_hasher(self.digest)
        hasher.update(content)
        return hasher.digest().ljust(32, b"\0")

    def _store(self, key: str, data: bytes) -> FileEntry:
        self.storage.put(key, data)
        return FileEntry(key, len(data), digest_of(data, self.digest))
