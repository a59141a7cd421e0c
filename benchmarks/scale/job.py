"""A simulated job: payloads, indexes and receipts as its ranks would make them, in memory."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch.distributed as dist

from ckpt import layout, plan, receipts
from ckpt.catalog import Catalog
from ckpt.commit import claim_epoch, open_run
from ckpt.coordinator import Coordinator
from ckpt.digest import digest_of
from ckpt.finish import check_agreement
from ckpt.index import ChunkEntry, ShardEntry, TensorEntry, encode_index
from ckpt.manifest import canonical
from ckpt.restore import CheckpointReader
from ckpt.storage import MemoryStorage
from ckpt.types import FileEntry, ObjectInfo, SystemClock
from ckpt.written import read_receipts

DIM = 128
CHUNK_BYTES = 16 << 20
_ROW_BYTES = 4 * DIM
_TIMEOUT_S = 600.0
_TAG = "plan/1"


@dataclass(frozen=True)
class Job:
    """Tables of float32 rows of 128, each cut by rows over all ranks. latency_s: of each store call."""

    world: int
    tables: int
    bytes_per_rank: int
    latency_s: float = 0.0

    @property
    def rows(self) -> int:
        """Rows of one table on one rank."""
        return max(1, self.bytes_per_rank // (self.tables * _ROW_BYTES))

    @property
    def chunks(self) -> int:
        """Of all ranks together."""
        return self.world * self.tables * -(-self.rows // (CHUNK_BYTES // _ROW_BYTES))


class Simulated:
    """One save of the job, in the order of its parts; the ranks' own work is done in between."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._clock = SystemClock()
        self._storage = _FarStorage(job.latency_s)
        self._store = dist.HashStore()
        run = open_run(self._storage, self._clock)
        self._attempt = claim_epoch(self._storage, run, job.world, None, self._clock)
        self._terms = [
            receipts.SaveTerms(
                epoch=self._attempt.epoch,
                attempt_token=self._attempt.token,
                step=1,
                save_id="000001",
                rank=rank,
                world_size=job.world,
                plan_id="plan",
                parent=None,
                saved_at_s=self._clock.time(),
                annotations={},
            )
            for rank in range(job.world)
        ]
        self._objects = receipts.seal_objects({"step": 1}, {})
        self._written = [self._write(terms) for terms in self._terms]
        for rank in range(1, job.world):
            self._coordinator(rank).post(_TAG, self._payload(rank))
        self._entries: list[FileEntry] = []
        self._record: Any = None

    @property
    def index_bytes(self) -> int:
        return sum(w.files[1].size_bytes for w in self._written)

    @property
    def commit_bytes(self) -> int:
        return self._storage.stat(layout.commit_key(self._attempt.epoch, 1)).size_bytes

    def plan(self) -> None:
        """Rank 0: read what all ranks have, decide who writes what, tell them."""
        rule = plan._global_plan
        self._coordinator(0).decide(_TAG, self._payload(0), rule, _TIMEOUT_S)

    def hear(self) -> None:
        """Another rank: read the decision."""
        answer = self._coordinator(1).hear(_TAG, _TIMEOUT_S)
        assert len(answer["result"]["keep"][1]) == self._job.tables

    def write_receipts(self) -> None:
        """All ranks, one after the other here: values and receipt."""
        for terms, written in zip(self._terms, self._written, strict=True):
            part = receipts.store_part(
                self._storage, terms, written, self._objects, digest="xxh3-128"
            )
            self._entries.append(part.entry)
            self._coordinator(terms.rank).post("save/1", asdict(part.entry))

    def commit(self) -> None:
        """Rank 0: hear of all receipts, read and check them, commit."""
        mine = asdict(self._entries[0])
        reports = self._coordinator(0).collect("save/1", mine, _TIMEOUT_S)
        entries = [FileEntry(**r) for r in reports]
        read = read_receipts(self._storage, entries)
        check_agreement(self._storage, read)
        parts = [receipts.Part(e, r) for e, r in zip(entries, read, strict=True)]
        receipts.commit_parts(self._storage, self._attempt, parts, self._clock)

    def latest(self) -> None:
        """A reader: find the newest commit."""
        found = Catalog(self._storage).latest()
        assert found is not None
        self._record = found.record

    def open(self) -> None:
        """A reader: what tensors are there, and where are their chunks?"""
        reader = CheckpointReader(self._storage, self._record)
        assert len(reader.tensors) == self._job.tables

    def _coordinator(self, rank: int) -> Coordinator:
        return Coordinator(rank, self._job.world, self._store, "scale/")

    def _payload(self, rank: int) -> dict[str, Any]:
        """What `make_plan` says for a rank."""
        rows = self._job.rows
        names = [_name(n) for n in range(self._job.tables)]
        leaves = {n: ["sharded", "float32", rows * self._job.world, DIM] for n in names}
        items = [[n, rank * rows, 0, rows, DIM] for n in names]
        digest = digest_of(canonical([leaves, items]))
        return {"leaves": leaves, "replicas": {}, "items": items, "digest": digest}

    def _write(self, terms: receipts.SaveTerms) -> receipts.Written:
        """The index of a rank; of its data file only size and digest exist."""
        rows, per_chunk = self._job.rows, CHUNK_BYTES // _ROW_BYTES
        tensors, at = [], 0
        for n in range(self._job.tables):
            chunks = []
            for row in range(0, rows, per_chunk):
                count = min(per_chunk, rows - row)
                size = count * _ROW_BYTES
                digest = (at + terms.rank).to_bytes(16, "little").ljust(32, b"\0")
                chunks.append(ChunkEntry(row, count, at, size, "raw", digest))
                at += -(-size // 4096) * 4096
            shard = ShardEntry((terms.rank * rows, 0), (rows, DIM), tuple(chunks))
            shape = (rows * self._job.world, DIM)
            tensors.append(TensorEntry(_name(n), "sharded", "float32", shape, (shard,)))
        index = encode_index(tensors, "xxh3-128")
        key = layout.rank_index_key(terms.prefix, terms.rank)
        self._storage.create(key, index)
        data = FileEntry(layout.rank_data_key(terms.prefix, terms.rank), at, digest_of(b""))
        self._storage.promise(data.key, at)
        entry = FileEntry(key, len(index), digest_of(index))
        return receipts.Written((data, entry), self._job.tables * rows * _ROW_BYTES)


class _FarStorage(MemoryStorage):
    """Memory that answers reads after a while, as a store on the network does.

    Large objects are only listed: nobody reads data files here.
    """

    def __init__(self, latency_s: float) -> None:
        super().__init__("scale")
        self._latency_s = latency_s

    def promise(self, key: str, size: int) -> None:
        self._objects[key] = (b"", ObjectInfo(key, size, "promised"))

    def read(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        if self._latency_s:
            time.sleep(self._latency_s)
        return super().read(key, start, length)

    def list(self, prefix: str = "") -> Iterator[Any]:
        if self._latency_s:
            time.sleep(self._latency_s)
        return super().list(prefix)


def _name(table: int) -> str:
    return f"model.tables.embedding_bags.table_{table:03d}.weight"
