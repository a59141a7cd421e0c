"""Commit to version files: read, check, encode, write. Memory is a budget, not a table."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import safetensors.torch
import torch

from ckpt import layout
from ckpt.digest import check_digest, digest_of
from ckpt.errors import BadInputError
from ckpt.manifest import CommitRecord
from ckpt.schema import ConstantSpec, ServingDescription, decode_description
from ckpt.storage import Storage
from ckpt.types import Buffer, DigestName, FileEntry
from publisher import keys
from publisher.answer import check_description
from publisher.engine import Engine, engine_of
from publisher.gates import GateReport
from publisher.golden import (
    StoredTensor,
    TensorSource,
    check_golden_ids,
    golden_reference,
    id_map_tensors,
    load_tensors,
)
from publisher.loading import ProgramCache
from publisher.policy import Policy
from publisher.program import DenseProgram
from publisher.quantise import check_finite
from publisher.records import PublishedTable
from publisher.registry import Registry
from publisher.tasks import FILE_BYTES, BuildJob, Table, join_tables, plan_files
from publisher.writing import RowSource, TableWriter

ANNOTATION = "serving_description"
_DIGEST: DigestName = "xxh3-128"
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_TABLE_DTYPES = ("float32", "float16", "bfloat16", "float64")


class Reader(TensorSource, RowSource, Protocol):
    """What is read of a checkpoint; `ckpt.restore.CheckpointReader` is one."""

    def held_bytes(self, fqn: str) -> int: ...


OpenReader = Callable[[Storage, CommitRecord], Reader]


@dataclass(frozen=True)
class BuiltFiles:
    """What a build wrote below a version's number."""

    description_id: str
    model: str
    files: tuple[FileEntry, ...]
    tables: tuple[PublishedTable, ...]


class VersionBuilder:
    """Writes the files of versions.

    Args:
        root: the run's storage, where the checkpoint, its description and its program are.
        registry: where versions go.
        programs: loads trusted programs.
        open_reader: opens a commit for reading.
        policy: the formats of tables, and the memory that they may take.
        engine: runs the tasks that write them; the policy's, unless one is given.
        file_bytes: how large a file of tables is.
    """

    def __init__(  # noqa: PLR0913  (the parts of a builder, wired once)
        self,
        root: Storage,
        registry: Registry,
        programs: ProgramCache,
        open_reader: OpenReader,
        *,
        policy: Policy | None = None,
        engine: Engine | None = None,
        file_bytes: int = FILE_BYTES,
    ) -> None:
        self.root = root
        self.registry = registry
        self._programs = programs
        self._open_reader = open_reader
        self._policy = policy or Policy()
        self._engine = engine or engine_of(self._policy.build, root, registry.storage)
        self._file_bytes = file_bytes

    def build(self, number: int, record: CommitRecord, report: GateReport) -> BuiltFiles:
        """Write all files of a version but its manifest.

        Raises GateError if the commit is refused, StorageError: try again.
        """
        build = _Build(self.registry, number, report)
        description_id, description = self._read_description(record, build)
        program = self._load_program(description, build)
        with report.guard("digests"):
            golden = self.root.read(description.golden_key)
            check_digest(golden, description.golden_digest, description.golden_key)
            reader = self._open_reader(self.root, record)
        with report.guard("names_and_shapes"):
            check_names(description, program, reader)
            wanted = [
                Table(fqn, rows, dim, self._policy.format_of(fqn))
                for fqn, (rows, dim) in description.tables().items()
            ]
            tasks = plan_files(wanted, self._file_bytes)
        report.passed(
            "names_and_shapes",
            f"{len(description.tables())} tables and {len(description.constants)} constants",
        )
        with report.guard("digests"):  # whatever the reader finds in its chunks
            constants = build.write_dense(description, reader)
            writer = TableWriter(
                self._job(number, record, wanted, reader), reader, self.registry.storage
            )
            results = list(self._engine.map(writer, tasks))
            tables = join_tables(wanted, results)
            build.files += sorted((r.file for r in results), key=lambda f: f.key)
            rows, workers = sum(t.rows for t in tables), len({r.worker for r in results})
            report.passed(
                "coverage", f"{rows} rows of {len(tables)} tables, each once, by {workers} workers"
            )
            report.passed("finite", f"{rows} rows and all dense constants")
        with report.guard("id_maps"):
            request = load_tensors(golden, description.golden_key)
            id_tensors = id_map_tensors(description, self.root, reader)
            if id_tensors:
                build.add(keys.ID_MAPS, safetensors.torch.save(id_tensors))
            check_golden_ids(description, id_tensors, request)
        report.passed("id_maps", f"{len(description.features)} features as the trainer maps them")
        with report.guard("golden_parity"):
            build.add(keys.GOLDEN, golden)
            bound = program.bind(constants)
            reference = golden_reference(description, bound, reader, request, id_tensors)
            build.add(keys.REFERENCE, safetensors.torch.save(reference))
        return BuiltFiles(description_id, description.model, tuple(build.files), tables)

    def _job(
        self, number: int, record: CommitRecord, tables: Sequence[Table], reader: Reader
    ) -> BuildJob:
        return BuildJob(
            root_url=self.root.url,
            record=record,
            registry_url=self.registry.storage.url,
            prefix=self.registry.key(number, ""),
            digest=_DIGEST,
            memory_bytes=self._policy.build.memory_mib << 20,
            least_bytes=max((reader.held_bytes(t.fqn) for t in tables), default=0),
        )

    def _read_description(
        self, record: CommitRecord, build: _Build
    ) -> tuple[str, ServingDescription]:
        with build.report.guard("digests"):
            description_id = record.annotations.get(ANNOTATION)
            if description_id is None or not _ID.fullmatch(description_id):
                raise BadInputError(
                    f"step {record.step}: names no serving description (annotation {ANNOTATION!r} "
                    f"is {description_id!r}); let the trainer export one and name it in its saves"
                )
            key = layout.description_prefix(description_id) + keys.DESCRIPTION
            data = self.root.read(key)
            description = decode_description(data, key)
            check_description(description)
            build.add(keys.DESCRIPTION, data)
        return description_id, description

    def _load_program(self, description: ServingDescription, build: _Build) -> DenseProgram:
        with build.report.guard("trusted_code"):
            data = self.root.read(description.program_key)
            program = self._programs.load(data, description, description.program_key)
        build.add(keys.PROGRAM, data)
        build.report.passed("trusted_code", f"sha256 {description.program_sha256}")
        return program


def check_names(
    description: ServingDescription, program: DenseProgram, reader: TensorSource
) -> None:
    """BadInputError with all constants and tables that the checkpoint lacks, or has otherwise."""
    problems = program.problems(description)
    for c in description.constants:
        if c.fqn is not None:
            problems += _constant_problem(c, reader.tensors.get(c.fqn))
    features = {(f.table_fqn, f.rows, f.dim) for lk in description.lookups for f in lk.features}
    for fqn, rows, dim in sorted(features):
        t = reader.tensors.get(fqn)
        if t is None:
            problems.append(f"table {fqn}: not in the checkpoint")
        elif t.kind == "per_rank" or t.dtype not in _TABLE_DTYPES or t.shape != (rows, dim):
            problems.append(
                f"table {fqn}: the checkpoint has {t.kind} {t.dtype} {t.shape}, "
                f"described as ({rows}, {dim})"
            )
    if problems:
        raise BadInputError("; ".join(sorted(problems)))


def _constant_problem(c: ConstantSpec, t: StoredTensor | None) -> list[str]:
    if t is None:
        return [f"constant {c.name}: no {c.fqn} in the checkpoint"]
    if t.kind == "per_rank" or (t.dtype, t.shape) != (c.dtype, c.shape):
        return [
            f"constant {c.name}: {c.fqn} is {t.kind} {t.dtype} {t.shape} in the checkpoint, "
            f"described as {c.dtype} {c.shape}"
        ]
    return []


class _Build:
    """The files of one version in the making."""

    def __init__(self, registry: Registry, number: int, report: GateReport) -> None:
        self._registry = registry
        self._number = number
        self.report = report
        self.files: list[FileEntry] = []

    def add(self, name: str, data: Buffer) -> None:
        """Write a small file."""
        self._registry.storage.create(self._registry.key(self._number, name), data)
        self.files.append(FileEntry(name, len(data), digest_of(data, _DIGEST)))

    def write_dense(
        self, description: ServingDescription, reader: TensorSource
    ) -> dict[str, torch.Tensor]:
        """Read, check and write the checkpoint's constants, by their names in the program."""
        tensors = {c.name: reader.read(c.fqn) for c in description.constants if c.fqn is not None}
        for c in description.constants:
            t = tensors.get(c.name)
            if t is not None and t.dtype.is_floating_point and t.numel():
                rows = t if t.dim() else t[None]
                check_finite(rows, f"{c.fqn} row")
        self.add(keys.DENSE, safetensors.torch.save(tensors))
        return tensors
