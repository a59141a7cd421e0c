"""Making compiled packages: once for each program, instruction set and torch, not for each version.

A fresh process compiles, another one loads the result with the version's constants and answers the golden
request. Only then does the package go to the registry and its sha256 to this host's trust list.
A crash, a hang or a missing compiler costs nothing: hosts go on eagerly.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from ckpt.errors import BadInputError, ConflictError, CorruptError, SidestageError
from ckpt.schema import ServingDescription, decode_description
from ckpt.trust import TrustList
from ckpt.types import EventSink
from publisher import keys
from publisher.records import VersionManifest
from publisher.registry import Registry
from publisher.spare import SpareProcesses

_TIMEOUT_S = 1800.0


def compile_version(
    registry: Registry,
    manifest: VersionManifest,
    trust: TrustList,
    *,
    processes: SpareProcesses | None = None,
) -> tuple[Any, bool]:
    """(the package's record, was it made now). Raises BadInputError where there is no compiler.

    A package that is there already and trusted here is left as it is. GateError where compiling or
    trying it failed.
    """
    from publisher import compiled

    description = _description(registry, manifest)
    key = registry.prefix + keys.package_record_key(compiled.package_name(description))
    replaces = None
    try:
        record = compiled.read_record(registry, description)
    except CorruptError:
        record, replaces = None, registry.storage.stat(key)
    if record is not None:
        if record.sha256 not in trust.sums():
            raise BadInputError(
                f"package {record.sha256} was compiled on another host; if you trust that host, add "
                f"this sum as a line to {trust.place}"
            )
        return record, False
    if not _has_compiler():
        raise BadInputError("no C++ compiler here (g++ or $CXX); hosts run the program eagerly")
    mine = processes or SpareProcesses(trust, _TIMEOUT_S, spares=0)
    try:
        with tempfile.TemporaryDirectory(prefix="sidestage-compile-") as folder:
            path = Path(folder) / "package.pt2"
            compiled_in = mine.run(
                "publisher.compiling:compile_program", registry, manifest, "build", folder=folder
            )
            answer = mine.run(
                "publisher.compiled:answer_compiled",
                registry,
                manifest,
                "golden_parity",
                package=str(path),
            )
            data = path.read_bytes()
    finally:
        if processes is None:
            mine.close()
    err, limit = float(answer["max_abs_err"]), _parity_limit(manifest)
    if not err < limit:
        raise BadInputError(
            f"the compiled package is {err:g} away from fp32, allowed below {limit:g}"
        )
    sha256 = trust.add(data)
    with suppress(ConflictError):
        registry.storage.create(registry.prefix + keys.package_key(sha256), data)
    record = compiled.PackageRecord(
        program_sha256=description.program_sha256,
        instruction_set=compiled.instruction_set(),
        torch_version=compiled.torch_version(),
        sha256=sha256,
        size_bytes=len(data),
        version=manifest.version,
        max_abs_err=err,
        compile_s=float(compiled_in["seconds"]),
        at_s=registry.clock.time(),
    )
    encoded = compiled.encode_record(record)
    if replaces is not None:
        registry.storage.put(key, encoded)
        return record, True
    try:
        registry.storage.create(key, encoded)
    except ConflictError:  # another publisher was faster
        found = compiled.read_record(registry, description)
        assert found is not None
        return found, False
    return record, True


class BackgroundCompiler:
    """Compiles for the daemon, one version at a time, in the background.

    Args:
        registry: where versions and packages are.
        trust: gets the sums of what was made here.
        sink: told of each package, and once of each trouble.
    """

    def __init__(self, registry: Registry, trust: TrustList, sink: EventSink) -> None:
        self._registry = registry
        self._trust = trust
        self._sink = sink
        self._processes = SpareProcesses(trust, _TIMEOUT_S, spares=0)
        self._thread: threading.Thread | None = None
        self._tried: set[str] = set()

    def consider(self, version: int) -> None:
        """Compile a version's program, unless that was tried before or another one is in work."""
        if self._thread is not None and self._thread.is_alive():
            return
        manifest = self._registry.version(version)
        if manifest.description_id in self._tried:
            return
        self._tried.add(manifest.description_id)
        self._thread = threading.Thread(
            target=self._compile, args=(manifest,), name="compiler", daemon=True
        )
        self._thread.start()

    def wait(self, timeout_s: float | None = None) -> None:
        """Until what was begun is done."""
        if self._thread is not None:
            self._thread.join(timeout_s)

    def close(self) -> None:
        """Stop at once: what is being compiled is lost."""
        self._processes.close()
        self.wait()

    def _compile(self, manifest: VersionManifest) -> None:
        try:
            record, made = compile_version(
                self._registry, manifest, self._trust, processes=self._processes
            )
        except Exception as e:  # the eager path goes on
            reason = str(e) if isinstance(e, SidestageError) else f"{type(e).__name__}: {e}"
            self._sink.emit("not_compiled", version=manifest.version, reason=reason)
        else:
            if made:
                self._sink.emit(
                    "compiled",
                    version=manifest.version,
                    sha256=record.sha256,
                    seconds=round(record.compile_s, 1),
                )


def compile_program(
    registry: Registry, manifest: VersionManifest, programs: Any, *, folder: str
) -> dict[str, Any]:
    """For a fresh process: compile a version's program to `folder`/package.pt2."""
    import io
    import time

    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path(folder) / "cache")
    import torch
    import torch._inductor

    from publisher.loading import load_version

    os.nice(10)  # whatever else this host does comes first
    started = time.monotonic()
    loaded = load_version(registry, manifest, programs)  # everything verified, the program trusted
    data = registry.storage.read(registry.key(manifest.version, keys.PROGRAM))
    programs.trust.check(data, keys.PROGRAM)
    program = torch.export.load(io.BytesIO(data))
    for name, tensor in loaded.constants.items():
        # A program is exported with blanks in their place, which might be folded into the code.
        if name in program.state_dict:
            old = program.state_dict[name]
            if not old.is_contiguous():
                raise BadInputError(f"constant {name} isn't contiguous, so it can't be exchanged")
            new = tensor.detach().contiguous()
            is_parameter = isinstance(old, torch.nn.Parameter)
            program.state_dict[name] = torch.nn.Parameter(new, False) if is_parameter else new
    torch._inductor.aoti_compile_and_package(
        program,
        package_path=str(Path(folder) / "package.pt2"),
        inductor_configs={
            "aot_inductor.package_constants_in_so": False,
            "always_keep_tensor_constants": True,
        },
    )
    return {"seconds": time.monotonic() - started}


def _description(registry: Registry, manifest: VersionManifest) -> ServingDescription:
    key = registry.key(manifest.version, keys.DESCRIPTION)
    return decode_description(registry.storage.read(key), key)


def _parity_limit(manifest: VersionManifest) -> float:
    limits = [g.threshold for g in manifest.gates if g.name == "golden_parity"]
    return next((x for x in limits if x is not None), 0.01)


def _has_compiler() -> bool:
    return any(shutil.which(c) for c in (os.environ.get("CXX"), "g++", "clang++") if c)
