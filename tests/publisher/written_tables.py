"""Tables written by the real writer into memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from ckpt.manifest import CommitRecord
from ckpt.storage import MemoryStorage
from publisher.records import PublishedTable, TableFormat
from publisher.tasks import BuildJob, FileResult, FileTask, Table, join_tables, plan_files
from publisher.writing import TableWriter


class Rows:
    """A checkpoint's tables in memory, in chunks of `chunk` rows."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], chunk: int = 10**9) -> None:
        self.tensors = tensors
        self.chunk = chunk

    def iter_rows(
        self, fqn: str, first: int = 0, rows: int | None = None, *, most_rows: int | None = None
    ) -> Iterator[tuple[int, torch.Tensor]]:
        t = self.tensors[fqn]
        last = len(t) if rows is None else first + rows
        assert last <= len(t)
        step = min(self.chunk, most_rows or self.chunk)
        for at in range(first, last, step):
            yield at, t[at : min(at + step, last)]


def job(memory_bytes: int = 64 << 20, record: CommitRecord | None = None, **urls: Any) -> BuildJob:
    settings = {"root_url": "", "registry_url": "", "prefix": "v/", "digest": "xxh3-128"} | urls
    return BuildJob(record=record, memory_bytes=memory_bytes, least_bytes=0, **settings)  # type: ignore[arg-type]


def tables_of(
    tensors: Mapping[str, torch.Tensor], table_format: TableFormat = "int8_rowwise"
) -> list[Table]:
    return [Table(fqn, len(t), t.shape[1], table_format) for fqn, t in tensors.items()]


def write_all(
    tables: Sequence[Table], source: Any, tasks: Sequence[FileTask] | None = None
) -> tuple[bytes, tuple[PublishedTable, ...], list[FileResult]]:
    """The image, the manifest's tables, and the results of the tasks."""
    storage = MemoryStorage()
    writer = TableWriter(job(), source, storage)
    results = [writer.write(task) for task in (plan_files(tables) if tasks is None else tasks)]
    image = b"".join(storage.read(f"v/{r.file.key}") for r in results)
    return image, join_tables(tables, results), results


def offsets_in_image(
    tables: Sequence[PublishedTable], results: Sequence[FileResult]
) -> dict[str, int]:
    """Where in the image each table begins."""
    begins, at = {}, 0
    for r in results:
        begins[r.file.key] = at
        at += r.file.size_bytes
    return {t.fqn: begins[t.parts[0].file] + t.parts[0].offset for t in tables}
