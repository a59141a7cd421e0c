"""Compiled packages of dense programs (AOTInductor): native code that a version's constants are given to.

A package belongs to a program (its sha256), an instruction set and a torch version, so a new version of
the same program brings only weights. It's native code: a host loads it only if its sha256 is in the
host's trust list, and uses it only if it answers the golden request as fp32 does. Otherwise the
program runs eagerly.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ckpt.errors import BadInputError, CorruptError, NotFoundError, SidestageError, StorageError
from ckpt.manifest import seal, unseal
from ckpt.schema import ServingDescription
from ckpt.trust import TrustList
from ckpt.typed import decode_stored
from ckpt.types import Buffer
from publisher import keys
from publisher.loading import Engine, LoadedVersion
from publisher.registry import Registry

KIND = "package"
_SHA256 = re.compile(r"[0-9a-f]{64}")
_RUNNERS = min(16, os.cpu_count() or 1)


@dataclass(frozen=True)
class PackageRecord:
    """What the registry says of a compiled package.

    instruction_set: of the CPUs that run it. sha256, size_bytes: of the package.
    max_abs_err: on the golden request of `version`, with which it was tried in a fresh process.
    """

    program_sha256: str
    instruction_set: str
    torch_version: str
    sha256: str
    size_bytes: int
    version: int
    max_abs_err: float
    compile_s: float
    at_s: float


def encode_record(record: PackageRecord) -> bytes:
    return seal(KIND, asdict(record))


def decode_record(data: Buffer, key: str) -> PackageRecord:
    """Read a record back; CorruptError names `key` and the field that is wrong."""
    record = decode_stored(PackageRecord, unseal(KIND, data, key), key)
    if not _SHA256.fullmatch(record.sha256):  # it names the package's key
        raise CorruptError(f"{key}: sha256 is {record.sha256!r}")
    return record


def instruction_set() -> str:
    """This CPU's: packages are compiled for all that it can do, and may crash on another."""
    flags = ""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() in ("flags", "Features"):
                flags = " ".join(sorted(value.split()))
                break
    except OSError:
        pass
    digest = hashlib.sha256(flags.encode()).hexdigest()[:12]
    return f"{platform.machine()}-{torch.backends.cpu.get_cpu_capability()}-{digest}"


def torch_version() -> str:
    return str(torch.__version__)


def package_name(description: ServingDescription) -> str:
    """The name of the record that fits a description's program on this host."""
    sha256 = description.program_sha256[:32]
    return f"{sha256}-{instruction_set()}-torch{torch_version()}"


def read_record(registry: Registry, description: ServingDescription) -> PackageRecord | None:
    """The record of the package that fits here, or None. CorruptError if it can't be read."""
    key = registry.prefix + keys.package_record_key(package_name(description))
    try:
        return decode_record(registry.storage.read(key), key)
    except NotFoundError:
        return None


class CompiledProgram:
    """A package with one version's constants. Any number of threads may call it.

    The loader keeps `_RUNNERS` instances of the model and hands a free one to each caller.

    Args:
        path: the package; it may be deleted afterwards.
        description: its constants are checked against the description's.
        constants: all of the program's, by name. They aren't copied.

    Raises CorruptError if a constant isn't as described, BadInputError if the package wants others.
    """

    def __init__(
        self,
        path: Path,
        description: ServingDescription,
        constants: Mapping[str, torch.Tensor],
    ) -> None:
        # Without copies, the constants must outlive the loader; without gaps, as compiled.
        self._constants = {n: t.detach().contiguous() for n, t in constants.items()}
        self._check(description)
        try:
            # (package, model, "there is only one thread", runners, device)
            self._loader = torch._C._aoti.AOTIModelPackageLoader(
                str(path), "model", False, _RUNNERS, -1
            )
            wanted = self._loader.get_constant_fqns()
        except RuntimeError as e:
            raise BadInputError(f"the compiled package can't be loaded: {_first_line(e)}") from e
        if strange := sorted(set(wanted) - self._constants.keys()):
            raise BadInputError(
                f"the compiled package wants constants that the program hasn't: {', '.join(strange)}"
            )
        given = {n: self._constants[n] for n in wanted}
        try:
            # To the active buffer, complete, and not copied. Before it, a call would crash.
            self._loader.load_constants(given, False, True, True)
        except RuntimeError as e:
            raise BadInputError(f"the compiled package refuses its constants: {e}") from e

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The outputs, in the program's order."""
        outputs: list[torch.Tensor] = self._loader.run(
            [t if t.is_contiguous() else t.contiguous() for t in inputs]
        )
        return outputs

    def _check(self, description: ServingDescription) -> None:
        for c in description.constants:
            t = self._constants.get(c.name)
            found = None if t is None else (str(t.dtype).removeprefix("torch."), tuple(t.shape))
            if found is not None and found != (c.dtype, c.shape):
                raise CorruptError(
                    f"constant {c.name} is {found}, described as {c.dtype} {c.shape}"
                )


class Packages:
    """Finds compiled packages in a registry for the versions that a host loads.

    Args:
        registry: has them beside its versions.
        trust: the packages that may be loaded here.
    """

    def __init__(self, registry: Registry, trust: TrustList) -> None:
        self._registry = registry
        self._trust = trust
        self._last: tuple[str, bytes] | None = None

    def use(self, loaded: LoadedVersion) -> None:
        """Let a version run by its package where there is a good one; `loaded.engine` says why not."""
        try:
            record = read_record(self._registry, loaded.description)
            if record is None:
                reason = "no compiled package for this program, CPU and torch; `publisher compile`"
                loaded.engine = Engine("eager", reason)
                return
            if record.program_sha256 != loaded.description.program_sha256:
                raise CorruptError(f"package {record.sha256} is of another program")
            use_package(loaded, self._read(record), f"sha256 {record.sha256}")
        except Exception as e:  # native code, made elsewhere: serving goes on without it
            reason = (
                str(e) if isinstance(e, SidestageError) else f"{type(e).__name__}: {_first_line(e)}"
            )
            loaded.engine = Engine("eager", reason)

    def _read(self, record: PackageRecord) -> bytes:
        """A package's bytes, which this host trusts: those of the last one needn't be read again."""
        key = self._registry.prefix + keys.package_key(record.sha256)
        if self._last is None or self._last[0] != record.sha256:
            data = self._registry.storage.read(key, 0, record.size_bytes)
            self._last = (record.sha256, data)
        self._trust.check(self._last[1], key)
        return self._last[1]


def use_package(loaded: LoadedVersion, data: bytes, what: str) -> None:
    """Run a version's dense part by a package, whose bytes the caller trusts.

    Raises BadInputError or CorruptError if it doesn't fit or run, StorageError if there is no room to
    unpack it, and leaves the version as it was.
    """
    try:
        with tempfile.TemporaryDirectory(prefix="sidestage-") as folder:
            path = Path(folder) / "package.pt2"
            path.write_bytes(data)  # what was trusted is what is loaded
            program = CompiledProgram(path, loaded.description, loaded.constants)
    except OSError as e:
        raise StorageError(f"the compiled package can't be unpacked: {e}; check TMPDIR") from e
    try:
        loaded.swap_program(program, Engine("compiled", what))
    except RuntimeError as e:  # of the loader's first run
        raise BadInputError(f"the compiled package doesn't run: {_first_line(e)}") from e


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0]


def answer_compiled(
    registry: Registry, manifest: Any, programs: Any, *, package: str
) -> dict[str, Any]:
    """For a fresh process: how a version answers its golden request by a package."""
    from publisher.loading import load_version

    loaded = load_version(registry, manifest, programs)
    use_package(loaded, Path(package).read_bytes(), package)
    return {"max_abs_err": loaded.golden_error()}
