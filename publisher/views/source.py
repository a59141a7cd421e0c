"""A version's files, for a view: every byte digested as it is read."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ckpt.digest import check_digest, new_hasher
from ckpt.errors import CorruptError
from ckpt.schema import ServingDescription
from publisher import keys
from publisher.golden import load_tensors
from publisher.loading import check_constants
from publisher.records import PublishedTable, VersionManifest
from publisher.registry import Registry

_STEP_BYTES = 16 << 20


def read_file(registry: Registry, manifest: VersionManifest, name: str) -> bytes:
    """A small file, whole. CorruptError if it differs from the manifest."""
    entry, key = manifest.file(name), registry.key(manifest.version, name)
    data = registry.storage.read(key, 0, entry.size_bytes)
    check_digest(data, entry.digest, key)
    return data


def read_tensors(
    registry: Registry, manifest: VersionManifest, name: str
) -> dict[str, torch.Tensor]:
    """A safetensors file. CorruptError if it differs from the manifest, or isn't one."""
    return load_tensors(read_file(registry, manifest, name), registry.key(manifest.version, name))


def take(tensors: Mapping[str, torch.Tensor], name: str, what: str) -> torch.Tensor:
    """One of them; CorruptError if `what` lacks it."""
    if name not in tensors:
        raise CorruptError(f"{what}: no {name}")
    return tensors[name]


def read_id_maps(registry: Registry, manifest: VersionManifest) -> dict[str, torch.Tensor]:
    """Id maps and position weights; empty for a model that has none."""
    if any(f.key == keys.ID_MAPS for f in manifest.files):
        return read_tensors(registry, manifest, keys.ID_MAPS)
    return {}


def read_constants(
    registry: Registry, manifest: VersionManifest, description: ServingDescription
) -> dict[str, torch.Tensor]:
    """The dense constants by their names in the program, each as described; else CorruptError."""
    tensors = read_tensors(registry, manifest, keys.DENSE)
    return check_constants(tensors, description, registry.key(manifest.version, keys.DENSE))


def read_tables(registry: Registry, manifest: VersionManifest) -> dict[str, torch.Tensor]:
    """Each table's rows as stored, by checkpoint key: uint8 (rows, row_bytes).

    A table without rows has one of zeros. All tables are held at once; beside them, one step of
    16 MiB. Each file is read once, whole, so that what is taken from it is what was digested.
    """
    tables = {t.fqn: torch.zeros(max(t.rows, 1), t.row_bytes, dtype=torch.uint8)
              for t in manifest.tables}  # fmt: skip
    wanted: dict[str, list[tuple[int, memoryview]]] = {}
    for table in manifest.tables:
        _check_parts(manifest, table)
        flat = memoryview(tables[table.fqn].view(-1).numpy().data)
        for part in table.parts:
            start = part.first_row * table.row_bytes
            into = flat[start : start + part.rows * table.row_bytes]
            wanted.setdefault(part.file, []).append((part.offset, into))
    for file, places in wanted.items():
        _scatter(registry, manifest, file, places)
    return tables


def _scatter(
    registry: Registry,
    manifest: VersionManifest,
    file: str,
    places: list[tuple[int, memoryview]],
) -> None:
    """Read a file in steps and copy what lies at each (offset, bytes to fill)."""
    entry, key = manifest.file(file), registry.key(manifest.version, file)
    name = entry.digest.partition(":")[0]
    hasher = new_hasher(name)
    for at in range(0, entry.size_bytes, _STEP_BYTES):
        step = registry.storage.read(key, at, min(_STEP_BYTES, entry.size_bytes - at))
        hasher.update(step)
        for offset, into in places:
            first, last = max(offset, at), min(offset + len(into), at + len(step))
            if first < last:
                into[first - offset : last - offset] = memoryview(step)[first - at : last - at]
    if (got := f"{name}:{hasher.hexdigest()}") != entry.digest:
        raise CorruptError(f"{key}: digest is {got}, expected {entry.digest}; take another version")


def _check_parts(manifest: VersionManifest, table: PublishedTable) -> None:
    what, at = f"version {manifest.version}: {table.fqn}", 0
    for part in table.parts:
        end = part.offset + part.rows * table.row_bytes
        size = manifest.file(part.file).size_bytes
        if part.first_row != at or part.offset < 0 or end > size:
            raise CorruptError(
                f"{what}: rows {part.first_row}+ lie up to byte {end} of {part.file}, which has "
                f"{size}; row {at} is expected"
            )
        at += part.rows
    if at != table.rows:
        raise CorruptError(f"{what}: its parts hold {at} of its {table.rows} rows")
