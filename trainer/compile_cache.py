"""The compiler's products, kept with the run: a restart loads them in place of compiling again.

    <root>/compile-cache/<key>/<sha256>.tar.zst

The key covers the code of the compiled modules, the versions of torch, Triton, Python and the C++
compiler, the device and the flags. An archive holds the compiler's cache folder: graphs, generated
source and, other than `torch.compiler.save_cache_artifacts()` on CPUs, the machine code made of it.

Archives are code. One is loaded only if its sha256 is in this host's trust list; whoever saves one adds
its sum there. What isn't trusted, is damaged or doesn't fit is left alone, with one message, and the
compiler runs as without a cache. It then saves an archive of its own beside the others.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import logging
import os
import platform
import subprocess
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from ckpt.errors import BadInputError, ConflictError, CorruptError, SidestageError
from ckpt.layout import compile_cache_key, compile_cache_prefix, parse_compile_cache_key
from ckpt.storage import Storage
from ckpt.trust import TrustList
from trainer.archive import MAX_ARCHIVE_BYTES, pack, unpack
from trainer.autotuned import losers
from trainer.compile_folder import locked
from trainer.compiling import cpp_compiler

_log = logging.getLogger("sidestage")

FORMAT = 1
"""Part of every key: raised when an archive means something else than before."""
MAX_ARCHIVES = 16
"""Of one key. Each host that trusts none of the others' adds one; then no more are saved."""

_FLAGS = ("TORCHINDUCTOR_", "TORCHDYNAMO_", "TORCH_COMPILE_", "TRITON_", "OMP_NUM_THREADS", "CXX")
_NOT_FLAGS = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")

Found = Literal["loaded", "none", "ignored"]


@dataclass(frozen=True)
class CacheLoad:
    """What a look for a cache found. reason: why there is none, or why it was ignored."""

    found: Found
    reason: str = ""
    size_bytes: int = 0


def cache_key(
    parts: Mapping[str, nn.Module], device: torch.device, flags: Mapping[str, Any]
) -> str:
    """The key of the caches that fit these modules as they are compiled here: 32 hex digits.

    Args:
        parts: what is compiled, by name. The source files of their classes, their structure and their
            weights' shapes count, not the weights' values.
        device: where it runs.
        flags: settings of the compilation that are in no environment variable.
    """
    facts = {
        "format": FORMAT,
        "code": _code_of(parts.values()),
        "modules": {n: repr(m) for n, m in parts.items()},
        "tensors": {n: _shapes(m) for n, m in parts.items()},
        "versions": _versions(),
        "device": _device_kind(device),
        "threads": torch.get_num_threads(),
        "flags": dict(flags),
        "environment": {
            k: v for k, v in os.environ.items() if k.startswith(_FLAGS) and k not in _NOT_FLAGS
        },
    }
    text = json.dumps(facts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


class CompileCache:
    """The caches of one key in a run's storage, and the compiler's folder on this host.

    Args:
        storage: the run's.
        trust: the archives that may be loaded here; gets the sums of those saved here.
        key: of `cache_key`.
        folder: the compiler's cache folder; see `compiler_folder`.
    """

    def __init__(self, storage: Storage, trust: TrustList, key: str, folder: Path) -> None:
        self._storage = storage
        self._trust = trust
        self._prefix = compile_cache_prefix(key)
        self._key = key
        self._folder = folder
        self._damaged: set[str] = set()
        self.loaded: CacheLoad | None = None

    def load(self) -> CacheLoad:
        """Unpack a trusted archive into the folder; once on this host, where ranks share a folder.

        Never raises for what is in the storage: the compiler can always run instead.
        """
        with locked(self._folder):
            marker = self._folder / ".loaded"
            if marker.exists():
                self.loaded = CacheLoad("loaded", "by another rank of this host")
                return self.loaded
            self.loaded = self._load()
            if self.loaded.found == "loaded":
                marker.touch()
        if self.loaded.found == "ignored":
            _log.warning("compiling without a cache: %s", self.loaded.reason)
        return self.loaded

    def save(self) -> str | None:
        """Pack the folder, store it and trust it; returns its sha256, or None with a message.

        Call it after the warm-up, on one rank of each host, if nothing was loaded. Runs on any thread.
        """
        try:
            data = pack(self._folder, losers(self._folder))
            sha256 = hashlib.sha256(data).hexdigest()
            there = self._archives()
            if sha256 not in there and len(there) >= MAX_ARCHIVES:
                raise BadInputError(
                    f"{self._prefix} holds {len(there)} archives already; delete those that no host "
                    f"uses"
                )
            key = compile_cache_key(self._key, sha256)
            try:
                self._storage.create(key, data)
            except ConflictError:  # the same content, unless it was found to be something else
                if sha256 in self._damaged:
                    self._storage.put(key, data)
            self._trust.add(data)
        except SidestageError as e:
            _log.warning("the compile cache isn't saved: %s", e)
            return None
        return sha256

    def _load(self) -> CacheLoad:
        reason = ""
        try:
            archives = self._archives()
            trusted = self._trust.sums()
            for sha256, size_bytes in archives.items():
                if sha256 in trusted:
                    try:
                        self._unpack(sha256, size_bytes)
                        return CacheLoad("loaded", sha256, size_bytes)
                    except CorruptError as e:
                        self._damaged.add(sha256)
                        reason = str(e)
        except SidestageError as e:
            return CacheLoad("ignored", str(e))
        except OSError as e:
            return CacheLoad("ignored", f"{self._folder}: {e.strerror}")
        if reason:
            return CacheLoad("ignored", reason)
        if archives:
            return CacheLoad(
                "ignored",
                f"{self._prefix} holds {len(archives)} that this host doesn't trust; if you know where "
                f"they come from, add a sum, such as {next(iter(archives))}, as a line to "
                f"{self._trust.place}",
            )
        return CacheLoad("none", "none is stored for this code, device and these versions")

    def _archives(self) -> dict[str, int]:
        """sha256 -> size in bytes, of this key's archives."""
        found = {}
        for info in self._storage.list(self._prefix):
            sha256 = parse_compile_cache_key(info.key)
            if sha256 is not None:
                found[sha256] = info.size_bytes
        return found

    def _unpack(self, sha256: str, size_bytes: int) -> None:
        key = compile_cache_key(self._key, sha256)
        if size_bytes > MAX_ARCHIVE_BYTES:
            raise CorruptError(f"{key} has {size_bytes} bytes, more than {MAX_ARCHIVE_BYTES}")
        data = self._storage.read(key)
        if hashlib.sha256(data).hexdigest() != sha256:
            raise CorruptError(f"{key}: its content has another sha256, so it is damaged")
        unpack(data, self._folder, key)


def _code_of(modules: Iterable[nn.Module]) -> dict[str, str]:
    """Class -> sha256 of its source file, of all submodules and of this cache itself."""
    out = {}
    for kind in {type(m) for module in modules for m in module.modules()} | {CompileCache}:
        if kind.__module__.startswith("torch."):
            continue  # torch's version stands for it
        name = f"{kind.__module__}.{kind.__qualname__}"
        try:
            source = Path(inspect.getfile(kind)).read_bytes()
        except (OSError, TypeError):  # made in a shell or at run time
            source = name.encode()
        out[name] = hashlib.sha256(source).hexdigest()
    return out


def _shapes(module: nn.Module) -> list[Any]:
    tensors = [*module.named_parameters(), *module.named_buffers()]
    return [(n, str(t.dtype), tuple(t.shape), t.requires_grad) for n, t in tensors]


def _versions() -> dict[str, str]:
    out = {"torch": str(torch.__version__), "python": sys.version}
    for package in ("torchrec", "triton"):
        try:
            out[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            out[package] = ""
    compiler = cpp_compiler()
    if compiler:
        said = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False)
        out["compiler"] = (said.stdout.splitlines() or [""])[0]
    return out


def _device_kind(device: torch.device) -> list[str]:
    """The CPU's instruction set, and the GPU with its capability."""
    out = [device.type, platform.machine(), torch.backends.cpu.get_cpu_capability(), _cpu_flags()]
    if device.type == "cuda":
        out += [str(torch.version.cuda), torch.cuda.get_device_name(device)]
        out.append(str(torch.cuda.get_device_capability(device)))
    return out


def _cpu_flags() -> str:
    """Compiled code uses all that this CPU can do, and may crash on another."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition(":")
            if name.strip() in ("flags", "Features"):
                return " ".join(sorted(value.split()))
    return ""
