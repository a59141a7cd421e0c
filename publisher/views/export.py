"""One view of one version: read, trace, write, check, and only then in place."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch.export import Dim

from ckpt.errors import BadInputError, ConflictError, CorruptError, NotFoundError, StorageError
from ckpt.schema import ServingDescription, decode_description
from ckpt.trust import TrustList
from publisher import keys
from publisher.difference import max_abs_err
from publisher.gates import GateError
from publisher.program import DenseProgram
from publisher.records import VersionManifest
from publisher.registry import Registry
from publisher.request import torch_dtype
from publisher.views import onnx, triton
from publisher.views.check import answer_in_fresh_process
from publisher.views.interface import ViewInterface, interface_of
from publisher.views.mapping import view_inputs
from publisher.views.module import DensePart, TableRows, ViewModule
from publisher.views.place import new_folder, sizes_of
from publisher.views.source import (
    read_constants,
    read_file,
    read_id_maps,
    read_tables,
    read_tensors,
    take,
)

Format = Literal["triton", "onnx"]
_MAX_BATCH = 1 << 16
_MAX_IDS = 1 << 31


@dataclass(frozen=True)
class ExportedView:
    """What was written.

    path: the folder that it is in. files: bytes of each file of it, by path below `path`.
    max_abs_err: the largest error on the golden request, against the fp32 checkpoint's answer; None:
        it wasn't run. allowed: errors must be below this.
    """

    format: Format
    version: int
    path: str
    files: dict[str, int]
    max_abs_err: float | None
    allowed: float


class ViewSource:
    """A version, read and traced once.

    Args:
        registry, manifest: the version.
        trust: its program must be in this list. BadInputError otherwise.
    """

    def __init__(self, registry: Registry, manifest: VersionManifest, trust: TrustList) -> None:
        self._registry, self.manifest = registry, manifest
        self.allowed = _allowed_err(manifest)
        key = registry.key(manifest.version, keys.DESCRIPTION)
        data = read_file(registry, manifest, keys.DESCRIPTION)
        self.description: ServingDescription = decode_description(data, key)
        self.interface: ViewInterface = interface_of(self.description)
        self._trust = trust

    def trace(self) -> torch.export.ExportedProgram:
        """The version as one program, with any batch from 1 on and any number of ids from 0 on.

        Holds all tables, and while the module is made, one of them twice; compilers copy them again.
        """
        registry, manifest, description = self._registry, self.manifest, self.description
        key = registry.key(manifest.version, keys.PROGRAM)
        program = DenseProgram.load(read_file(registry, manifest, keys.PROGRAM), self._trust, key)
        if problems := program.problems(description):
            raise CorruptError(f"version {manifest.version}: {'; '.join(problems)}")
        dense = DensePart(program, read_constants(registry, manifest, description))
        id_maps = read_id_maps(registry, manifest)
        features = [f for lk in description.lookups for f in lk.features]
        positions = {
            f.position_fqn: id_maps[f"position:{f.position_fqn}"]
            for f in features
            if f.position_fqn
        }
        stored = read_tables(registry, manifest)
        tables = {t.fqn: TableRows(t, stored.pop(t.fqn)) for t in manifest.tables}
        if missing := sorted({f.table_fqn for f in features} - tables.keys()):
            raise CorruptError(f"version {manifest.version}: has no table {', '.join(missing)}")
        module = ViewModule(description, self.interface, tables, dense, positions)
        return trace(module.eval(), self.interface)

    def golden_err(self, kind: Format, file: Path) -> float:
        """The written view's largest error on the golden request. CorruptError for other shapes."""
        registry, manifest = self._registry, self.manifest
        golden = read_tensors(registry, manifest, keys.GOLDEN)
        reference = read_tensors(registry, manifest, keys.REFERENCE)
        id_maps = read_id_maps(registry, manifest)
        inputs = view_inputs(self.description, self.interface, id_maps, golden)
        got = answer_in_fresh_process(kind, file, inputs)
        names = [o.name for o in self.interface.outputs]
        if len(got) != len(names):
            raise CorruptError(f"the view gives {len(got)} outputs, the model {len(names)}")
        wanted = {n: take(reference, n, keys.REFERENCE) for n in names}
        return max_abs_err(dict(zip(names, got, strict=True)), wanted)

    def check(self, kind: Format, file: Path) -> float:
        """The same; GateError unless it is as small as the version's own must be."""
        err = self.golden_err(kind, file)
        if math.isnan(err) or err >= self.allowed:
            raise GateError(
                "golden_parity",
                f"the {kind} view of version {self.manifest.version} is {err:g} off, allowed is "
                f"below {self.allowed:g}",
            )
        return err


def export_triton(source: ViewSource, repository: Path, *, force: bool) -> ExportedView:
    """Add a version to a Triton model repository, which is made if its parent is there.

    Raises ConflictError if the version is there without `force`, or the model has another interface.
    """
    description, number = source.description, source.manifest.version
    config = triton.config_text(description.model, source.interface)
    with _repository(repository):
        model = repository / description.model
        if model.exists():
            _check_config(model / triton.CONFIG, config)
            # Triton takes no folder for a version whose name isn't a number.
            target, inside, names = model / str(number), "", {triton.PACKAGE}
        else:
            target, inside, names = model, str(number), {triton.CONFIG, str(number)}
        with new_folder(target, frozenset(names), force=force) as new:
            package = new / inside / triton.PACKAGE
            package.parent.mkdir(exist_ok=True)
            triton.write_package(source.trace(), package)
            err = source.check("triton", package)
            if inside:
                (new / triton.CONFIG).write_text(config)
            files = sizes_of(new)
    return ExportedView("triton", number, str(target), files, err, source.allowed)


def export_onnx(source: ViewSource, folder: Path, *, force: bool) -> ExportedView:
    """Write an ONNX view as a new folder; `force` replaces an older view."""
    onnx.check_installed()
    manifest, err = source.manifest, None
    about = {
        "sidestage.version": str(manifest.version),
        "sidestage.model": manifest.model,
        "sidestage.step": str(manifest.source.step),
    }
    with new_folder(folder, frozenset({onnx.MODEL, onnx.DATA}), force=force) as new:
        file = new / onnx.MODEL
        onnx.write_model(source.trace(), source.interface, file, about)
        if importlib.util.find_spec("onnxruntime") is not None:
            err = source.check("onnx", file)
        files = sizes_of(new)
    return ExportedView("onnx", manifest.version, str(folder), files, err, source.allowed)


def trace(module: ViewModule, interface: ViewInterface) -> torch.export.ExportedProgram:
    """Trace a view. BadInputError if its dense part can't be."""
    from torch.fx.experimental import _config

    sizes: dict[str, tuple[int, object]] = {"batch": (3, Dim("batch", min=1, max=_MAX_BATCH))}
    for t in interface.inputs:
        for d in t.shape:
            if isinstance(d, str) and d not in sizes:
                i = len(sizes)
                # Different numbers: equal ones could be taken for one size.
                sizes[d] = (4 + i, Dim(f"ids_{i}", min=0, max=_MAX_IDS))
    examples, dynamic = [], []
    for t in interface.inputs:
        shape = [sizes[d][0] if isinstance(d, str) else d for d in t.shape]
        examples.append(torch.zeros(shape, dtype=torch_dtype(t.dtype)))
        dynamic.append({i: sizes[d][1] for i, d in enumerate(t.shape) if isinstance(d, str)})
    try:
        # Without backed_size_oblivious the sizes 0 and 1 would be special, and refused.
        with _config.patch(backed_size_oblivious=True), torch.no_grad():  # type: ignore[attr-defined]
            return torch.export.export(
                module, tuple(examples), dynamic_shapes=(tuple(dynamic),), strict=False
            )
    except Exception as e:  # torch.export's own errors have no common class
        first = next((line for line in str(e).splitlines() if line.strip()), "no message")
        raise BadInputError(
            f"the version can't be traced as one graph ({type(e).__name__}: {first.strip()})"
        ) from e


def _allowed_err(manifest: VersionManifest) -> float:
    for gate in manifest.gates:
        if gate.name == "golden_parity" and gate.threshold is not None:
            return gate.threshold
    raise BadInputError(
        f"version {manifest.version}: its manifest says nothing of golden parity; publish it again"
    )


def _check_config(path: Path, config: str) -> None:
    try:
        found = path.read_text()
    except FileNotFoundError:
        found = None
    if found != config:
        raise ConflictError(
            f"{path}: isn't what this version needs, so its model has another interface, or was "
            f"written by hand; export to another repository"
        )


@contextmanager
def _repository(path: Path) -> Iterator[None]:
    """The folder, made if its parent is there, and taken away again if the block fails."""
    if not path.parent.is_dir():
        raise NotFoundError(f"{path.parent}: no such folder; make it first")
    made = not path.exists()
    try:
        path.mkdir(exist_ok=True)
    except OSError as e:
        raise StorageError(f"{path}: can't be a repository: {e.strerror}") from e
    try:
        yield
    except BaseException:
        if made:
            path.rmdir()
        raise
