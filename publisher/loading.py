"""A version, loaded: every byte checked against its manifest, tables mapped, program bound."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import safetensors
import safetensors.torch
import torch

from ckpt.digest import check_digest, new_hasher
from ckpt.errors import CorruptError, StorageError, UnsupportedFormatError
from ckpt.schema import ServingDescription, decode_description
from ckpt.storage import LocalStorage
from ckpt.trust import TrustList
from ckpt.types import FileEntry
from publisher import keys
from publisher.formats import ALIGN_BYTES, row_bytes
from publisher.lookup import Int8Lookup
from publisher.program import BoundProgram, DenseProgram
from publisher.records import PublishedTable, VersionManifest
from publisher.registry import Registry
from publisher.request import Request, RequestSpec, dtype_name, torch_dtype

_STEP_BYTES = 16 << 20
_LOOKUP_DTYPES = ("float32", "float16", "bfloat16", "float64")


@dataclass(frozen=True)
class Prediction:
    """One answer, wholly of one version.

    outputs: by the description's output names, each (batch, ...).
    version: the version that answered.
    unknown_ids: by feature, how many ids lay outside its table; without those that had none.
    """

    outputs: Mapping[str, torch.Tensor]
    version: int
    unknown_ids: Mapping[str, int]


class ProgramCache:
    """The loaded programs, by sha256: most versions differ in weights only."""

    def __init__(self, trust: TrustList) -> None:
        self._trust = trust
        self._programs: dict[str, DenseProgram] = {}

    def load(self, data: bytes, description: ServingDescription, what: str) -> DenseProgram:
        """Trust is checked at every load: the operator may have taken it back."""
        self._trust.check(data, what)
        sha256 = description.program_sha256
        check_digest(data, f"sha256:{sha256}", what)
        if sha256 not in self._programs:
            self._programs = {sha256: DenseProgram.load(data, self._trust, what)}
        return self._programs[sha256]


class LoadedVersion:
    """A version that answers requests. Any number of threads may call `predict`."""

    def __init__(
        self,
        manifest: VersionManifest,
        description: ServingDescription,
        lookups: list[Int8Lookup],
        program: BoundProgram,
    ) -> None:
        self.manifest = manifest
        self.description = description
        self._spec = RequestSpec.of(description)
        self._lookups = lookups
        self._program = program

    @property
    def version(self) -> int:
        return self.manifest.version

    @property
    def request(self) -> RequestSpec:
        """What a request must hold."""
        return self._spec

    def predict(self, request: Request) -> Prediction:
        """Answer one request; BadInputError names what is wrong with it, and the numbers."""
        self._spec.check(request)
        unknown: dict[str, int] = {}
        with torch.inference_mode():
            pooled = {lk.spec.input: lk(request, unknown) for lk in self._lookups}
            outputs = run_program(self._program, self.description, request, pooled)
        return Prediction(outputs, self.version, unknown)


def run_program(
    program: BoundProgram,
    description: ServingDescription,
    request: Request,
    pooled: Mapping[str, torch.Tensor],
) -> dict[str, torch.Tensor]:
    """The program's outputs by name, for a checked request and its lookups."""
    inputs = [
        request[i.name] if i.kind == "dense" else pooled[i.name].to(torch_dtype(i.dtype))
        for i in description.inputs
    ]
    names = (o.name for o in description.outputs)
    return dict(zip(names, program(inputs), strict=True))


def load_version(
    registry: Registry, manifest: VersionManifest, programs: ProgramCache
) -> LoadedVersion:
    """Load a version whose manifest is known.

    Raises CorruptError if any file is missing or differs from the manifest, BadInputError if
    its program isn't trusted on this host.
    """
    files = _VersionFiles(registry, manifest)
    description = decode_description(files.read(keys.DESCRIPTION), files.key(keys.DESCRIPTION))
    _check_layout(manifest, description)
    program = programs.load(files.read(keys.PROGRAM), description, files.key(keys.PROGRAM))
    constants = _constants(files, description)
    for entry in manifest.files:
        if entry.key in (keys.GOLDEN, keys.REFERENCE):
            files.read(entry.key)
    if problems := program.problems(description):
        raise CorruptError(f"version {manifest.version}: {'; '.join(problems)}")
    tables = files.map(keys.TABLES)
    offsets = {t.fqn: t.parts[0].offset for t in manifest.tables}
    lookups = [Int8Lookup(lk, tables, offsets) for lk in description.lookups]
    return LoadedVersion(manifest, description, lookups, program.bind(constants))


def load_tensors(data: bytes, what: str) -> dict[str, torch.Tensor]:
    """A safetensors file; CorruptError names it if it isn't one."""
    try:
        return safetensors.torch.load(data)
    except safetensors.SafetensorError as e:
        raise CorruptError(f"{what}: not a safetensors file: {e}") from None


class _VersionFiles:
    """The files of a version, checked as they are read."""

    def __init__(self, registry: Registry, manifest: VersionManifest) -> None:
        self._registry = registry
        self._storage = registry.storage
        self._manifest = manifest
        # What is missing or short is found before a gigabyte is digested.
        registry.check_files(manifest)

    def key(self, name: str) -> str:
        return self._registry.key(self._manifest.version, name)

    def read(self, name: str) -> bytes:
        entry = self._manifest.file(name)
        data = self._storage.read(self.key(name), 0, entry.size_bytes)
        check_digest(data, entry.digest, self.key(name))
        return data

    def map(self, name: str) -> torch.Tensor:
        """A file as a uint8 tensor in a private memory map; what is mapped is what is digested."""
        entry = self._manifest.file(name)
        if isinstance(self._storage, LocalStorage):
            return self._map_path(Path(self._storage.url) / self.key(name), entry)
        with tempfile.NamedTemporaryFile(prefix="sidestage-") as f:
            for at in range(0, entry.size_bytes, _STEP_BYTES):
                length = min(_STEP_BYTES, entry.size_bytes - at)
                f.write(self._storage.read(self.key(name), at, length))
            f.flush()
            return self._map_path(Path(f.name), entry)  # the map outlives the file's name

    def _map_path(self, path: Path, entry: FileEntry) -> torch.Tensor:
        try:
            if os.path.getsize(path) != entry.size_bytes:
                raise CorruptError(f"{path}: is not of {entry.size_bytes} bytes")
            if entry.size_bytes == 0:  # a model without tables; nothing can be mapped
                mapped = torch.empty(0, dtype=torch.uint8)
            else:
                mapped = torch.from_file(
                    str(path), shared=False, size=entry.size_bytes, dtype=torch.uint8
                )
        except (OSError, RuntimeError) as e:
            raise StorageError(
                f"{path}: can't be mapped: {e}; check its mode and free memory"
            ) from e
        name = entry.digest.partition(":")[0]
        hasher = new_hasher(name)
        view = memoryview(mapped.numpy().data)
        for at in range(0, entry.size_bytes, _STEP_BYTES):
            hasher.update(view[at : at + _STEP_BYTES])
        got = f"{name}:{hasher.hexdigest()}"
        if got != entry.digest:
            raise CorruptError(
                f"{self.key(entry.key)}: digest is {got}, expected {entry.digest}; "
                f"take another version"
            )
        return mapped


def _constants(files: _VersionFiles, description: ServingDescription) -> dict[str, torch.Tensor]:
    """The dense constants, each as described: the program would take wrong ones silently."""
    tensors = load_tensors(files.read(keys.DENSE), files.key(keys.DENSE))
    for c in description.constants:
        if c.fqn is None:
            continue
        t = tensors.get(c.name)
        if t is None or (dtype_name(t), tuple(t.shape)) != (c.dtype, c.shape):
            found = "missing" if t is None else f"{dtype_name(t)} {tuple(t.shape)}"
            raise CorruptError(
                f"{files.key(keys.DENSE)}: {c.name} is {found}, expected {c.dtype} {c.shape}"
            )
    return tensors


def _check_layout(manifest: VersionManifest, description: ServingDescription) -> None:
    """The tables lie inside their file and fit the description: lookups don't check bounds."""
    what = f"version {manifest.version}"
    tables = {(t.fqn, t.rows, t.dim) for t in manifest.tables}
    features = [f for lk in description.lookups for f in lk.features]
    if tables != {(f.table_fqn, f.rows, f.dim) for f in features}:
        raise CorruptError(f"{what}: the tables of its manifest aren't those of its description")
    for table in manifest.tables:
        _check_table(manifest, table)
    check_inputs(description)


def _check_table(manifest: VersionManifest, table: PublishedTable) -> None:
    what = f"version {manifest.version}: {table.fqn}"
    whole = len(table.parts) == 1 and (table.parts[0].first_row, table.parts[0].rows) == (
        0,
        table.rows,
    )
    if not whole or table.parts[0].file != keys.TABLES:
        raise UnsupportedFormatError(
            f"{what}: is in {len(table.parts)} parts; this version of sidestage serves whole tables"
        )
    end = table.parts[0].offset + max(table.rows, 1) * table.row_bytes
    size = manifest.file(keys.TABLES).size_bytes
    if (
        table.row_bytes != row_bytes("int8_rowwise", table.dim)
        or table.parts[0].offset % ALIGN_BYTES
        or end > size
    ):
        raise CorruptError(f"{what}: rows of {table.row_bytes} bytes up to byte {end} of {size}")


def check_inputs(description: ServingDescription) -> None:
    """The description's inputs, lookups and request names fit each other; else CorruptError."""
    what = f"description of {description.model}"
    lookups = {lk.input: sum(f.dim for f in lk.features) for lk in description.lookups}
    inputs = {i.name: i for i in description.inputs if i.kind == "lookup"}
    if lookups.keys() != inputs.keys() or len(lookups) != len(description.lookups):
        raise CorruptError(
            f"{what}: its lookups {sorted(lookups)} aren't the program's {sorted(inputs)}"
        )
    for name, spec in inputs.items():
        dim = lookups[name]
        if spec.shape != ("batch", dim) or dim == 0 or spec.dtype not in _LOOKUP_DTYPES:
            raise CorruptError(
                f"{what}: lookup {name} gives {dim} columns, its input is {spec.dtype} {spec.shape}"
            )
    names = RequestSpec.of(description).names()
    if len(set(names)) != len(names):
        raise CorruptError(f"{what}: two of its inputs have one name: {', '.join(names)}")
