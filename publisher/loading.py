"""A version, loaded: every byte checked against its manifest, tables mapped, program bound."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from ckpt.digest import check_digest
from ckpt.errors import CorruptError
from ckpt.schema import ServingDescription, decode_description
from ckpt.trust import TrustList
from publisher import keys
from publisher.answer import Answerer, Program, check_description
from publisher.difference import max_abs_err
from publisher.golden import load_tensors
from publisher.ids import IdMaps
from publisher.images import TableCache, place_tables, table_files
from publisher.lookup import TableLookup
from publisher.program import DenseProgram
from publisher.records import VersionManifest
from publisher.registry import Registry
from publisher.request import Request, RequestSpec, dtype_name

EngineKind = Literal["eager", "compiled"]
Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Prediction:
    """One answer, wholly of one version.

    outputs: by the description's output names, each (batch, ...).
    version: the version that answered.
    unknown_ids: by feature, how many ids had no row; without those that had none.
    """

    outputs: Mapping[str, torch.Tensor]
    version: int
    unknown_ids: Mapping[str, int]


class ProgramCache:
    """The loaded programs, by sha256: most versions differ in weights only."""

    def __init__(self, trust: TrustList) -> None:
        self.trust = trust
        self._programs: dict[str, DenseProgram] = {}

    def load(self, data: bytes, description: ServingDescription, what: str) -> DenseProgram:
        """Trust is checked at every load: the operator may have taken it back."""
        self.trust.check(data, what)
        sha256 = description.program_sha256
        check_digest(data, f"sha256:{sha256}", what)
        if sha256 not in self._programs:
            self._programs = {sha256: DenseProgram.load(data, self.trust, what)}
        return self._programs[sha256]


@dataclass(frozen=True)
class Engine:
    """What runs the dense part: the program itself, or its compiled package.

    reason: why it's this one, for people.
    """

    kind: EngineKind
    reason: str

    def __str__(self) -> str:
        return self.kind


class LoadedVersion:
    """A version that answers requests. Any number of threads may call `predict`."""

    def __init__(
        self,
        manifest: VersionManifest,
        description: ServingDescription,
        answerer: Answerer,
        constants: Tensors,
        golden: tuple[Tensors, Tensors],
    ) -> None:
        self.manifest = manifest
        self.description = description
        self.constants = constants
        self.engine = Engine("eager", "no compiled package was looked for")
        self._answerer = answerer
        self._golden, self._reference = golden

    @property
    def version(self) -> int:
        return self.manifest.version

    @property
    def request(self) -> RequestSpec:
        """What a request must hold."""
        return self._answerer.spec

    def predict(self, request: Request) -> Prediction:
        """Answer one request; BadInputError names what is wrong with it, and the numbers."""
        outputs, unknown = self._answerer(request)
        return Prediction(outputs, self.version, unknown)

    def golden_error(self) -> float:
        """Largest absolute error on the golden request; NaN where an answer isn't a number.

        Raises CorruptError if an output has another name or shape than the fp32 answer.
        """
        outputs = self.predict(self.request.select(self._golden)).outputs
        return max_abs_err(outputs, self._reference)

    def warm_up(self) -> None:
        """Answer the golden request; CorruptError unless it's as near to fp32 as when it was published."""
        err, limit = self.golden_error(), self.parity_limit
        if math.isnan(err) or err >= limit:
            raise CorruptError(
                f"version {self.version}: its golden request is {err:g} away from fp32 on this host, "
                f"allowed below {limit:g}"
            )

    @property
    def parity_limit(self) -> float:
        """The threshold of the golden-parity gate that this version passed."""
        for gate in self.manifest.gates:
            if gate.name == "golden_parity" and gate.threshold is not None:
                return gate.threshold
        return math.inf

    def swap_program(self, program: Program, engine: Engine) -> None:
        """Run the dense part by `program` from now on, if that's as good. Before it's shared only.

        Raises CorruptError, and stays as it was, where the golden request is answered otherwise.
        """
        before, was = self._answerer.program, self.engine
        self._answerer.program, self.engine = program, engine
        try:
            self.warm_up()
        except BaseException:
            self._answerer.program, self.engine = before, was
            raise


def load_version(
    registry: Registry,
    manifest: VersionManifest,
    programs: ProgramCache,
    tables: TableCache | None = None,
) -> LoadedVersion:
    """Load a version whose manifest is known; its dense part runs eagerly.

    Raises CorruptError if any file is missing or differs from the manifest, BadInputError if
    its program isn't trusted on this host.
    """
    what = f"version {manifest.version}"
    files = _VersionFiles(registry, manifest)
    description = decode_description(files.read(keys.DESCRIPTION), files.key(keys.DESCRIPTION))
    check_description(description)
    placed = place_tables(manifest, description)
    program = programs.load(files.read(keys.PROGRAM), description, files.key(keys.PROGRAM))
    if problems := program.problems(description):
        raise CorruptError(f"{what}: {'; '.join(problems)}")
    constants = check_constants(files.tensors(keys.DENSE), description, files.key(keys.DENSE))
    golden = files.tensors(keys.GOLDEN), files.tensors(keys.REFERENCE)
    has_maps = any(f.key == keys.ID_MAPS for f in manifest.files)
    maps = IdMaps(description, files.tensors(keys.ID_MAPS) if has_maps else {})
    image = (tables or TableCache()).map(
        registry.storage, [(files.key(f.key), f) for f in table_files(manifest)]
    )
    lookups = [TableLookup(lk, maps, image, placed) for lk in description.lookups]
    bound = program.bind(constants)
    answerer = Answerer(description, maps, lookups, bound)
    return LoadedVersion(manifest, description, answerer, bound.constants, golden)


class _VersionFiles:
    """The small files of a version, checked as they are read."""

    def __init__(self, registry: Registry, manifest: VersionManifest) -> None:
        self._registry = registry
        self._manifest = manifest
        # What is missing or short is found before a gigabyte is digested.
        registry.check_files(manifest)

    def key(self, name: str) -> str:
        return self._registry.key(self._manifest.version, name)

    def read(self, name: str) -> bytes:
        entry = self._manifest.file(name)
        data = self._registry.storage.read(self.key(name), 0, entry.size_bytes)
        check_digest(data, entry.digest, self.key(name))
        return data

    def tensors(self, name: str) -> dict[str, torch.Tensor]:
        return load_tensors(self.read(name), self.key(name))


def check_constants(
    tensors: dict[str, torch.Tensor], description: ServingDescription, what: str
) -> dict[str, torch.Tensor]:
    """The dense constants, each as described: a program would take wrong ones silently."""
    for c in description.constants:
        if c.fqn is None:
            continue
        t = tensors.get(c.name)
        if t is None or (dtype_name(t), tuple(t.shape)) != (c.dtype, c.shape):
            found = "missing" if t is None else f"{dtype_name(t)} {tuple(t.shape)}"
            raise CorruptError(f"{what}: {c.name} is {found}, expected {c.dtype} {c.shape}")
    return tensors
