"""The start-up stage "pt2_compilation": the dense part compiled, from the run's cache where there is one.

    compiled = prepare(model, (batch,), storage=storage, trust=trust, ledger=ledger, settings=settings)
    ...                         # shard, restore, train
    compiled.close()            # at the end of the attempt, or leave it

Before sharding, and not collective, so that joining the process group, reading data and fetching a
checkpoint may go on meanwhile on other threads. Nothing else may draw random numbers meanwhile: the
compiler sets generators back to where they were when it began.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ckpt.errors import SidestageError
from ckpt.storage import Storage
from ckpt.trust import TrustList
from trainer.compile_cache import CacheLoad, CompileCache, cache_key
from trainer.compile_folder import CompilerFolder, given_folder
from trainer.compiling import CompiledDense, compile_dense, missing_compiler
from trainer.config import CompileConfig, launched_place
from trainer.ledger import Ledger
from trainer.vector_isa import spare_probes
from trainer.warmup import warm_up

_log = logging.getLogger("sidestage")


class Prepared:
    """A compiled dense part.

    dense: counts its graphs; None if nothing could be compiled. cache: what the look for a cache found;
    None if the cache is off.
    """

    def __init__(
        self,
        dense: CompiledDense | None,
        cache: CacheLoad | None = None,
        folder: CompilerFolder | None = None,
        saving: threading.Thread | None = None,
    ) -> None:
        self.dense = dense
        self.cache = cache
        self._folder = folder
        self._saving = saving

    def wait(self, timeout_s: float | None = None) -> None:
        """Until the cache is saved, where it is."""
        if self._saving is not None:
            self._saving.join(timeout_s)

    def close(self, timeout_s: float | None = 60.0) -> None:
        """Wait for the cache's save and let go of the compiler's folder. May be left out."""
        self.wait(timeout_s)
        if self._folder is not None:
            self._folder.close()


def prepare(  # noqa: PLR0913 - what it needs of a run; all but two are keyword-only
    model: nn.Module,
    example: Sequence[Any],
    *,
    storage: Storage,
    trust: TrustList,
    ledger: Ledger,
    settings: CompileConfig,
    device: torch.device | None = None,
    parts: Sequence[str] | None = None,
) -> Prepared:
    """Compile the dense parts of `model` now. Call it on every rank, before the model is sharded.

    What was compiled is saved, on a thread, by the first rank of each host that found no cache.
    Never raises for what compiling meets: the model then runs eagerly, as one message says.

    Args:
        model: its dense weights lie on `device`; its tables may be on meta.
        example: the arguments of its forward: a batch of the real kinds, about as large as a rank trains
            on. Any size above one compiles for all, but where a kernel is chosen by size (inductor on
            CPU: sums of 4,096 elements) a batch on the other side of it compiles again.
        storage: the run's.
        trust: which archives may be loaded from it on this host.
        ledger: gets the span "pt2_compilation".
        settings: the `[compile]` table.
        device: where the model trains; the CPU by default.
        parts: see `compile_dense`.
    """
    device = device or torch.device("cpu")
    with ledger.span("pt2_compilation"):
        if missing := missing_compiler(device):
            _log.warning("the dense part runs eagerly: %s", missing)
            return Prepared(None)
        spared = spare_probes()
        dense = compile_dense(model, parts=parts, dynamic=settings.dynamic, mode=settings.mode)
        folder = cache = None
        if settings.cache:
            # What decides which kernels are made is a part of the key.
            flags = {"dynamic": settings.dynamic, "mode": settings.mode, "isa_unprobed": spared}
            folder, cache = _cache(dense, storage, trust, flags, device)
        try:
            warm_up(model, example)
        except Exception as e:  # compiling is an option, training isn't
            dense.disable(f"the warm-up failed: {type(e).__name__}: {e}")
            _log.warning("the dense part runs eagerly: %s", dense.parts[0].failure)
        saving = None
        loaded = cache.loaded if cache is not None else None
        if cache is not None and not dense.failures() and _saves(loaded):
            # Not awaited: a process that ends before leaves no archive, and the next one makes it.
            saving = threading.Thread(target=cache.save, name="compile-cache", daemon=True)
            saving.start()
        return Prepared(dense, loaded, folder, saving)


def _cache(
    dense: CompiledDense,
    storage: Storage,
    trust: TrustList,
    flags: Mapping[str, Any],
    device: torch.device,
) -> tuple[CompilerFolder | None, CompileCache | None]:
    if given := given_folder():
        _log.warning("TORCHINDUCTOR_CACHE_DIR is %s: the run keeps no compile cache", given)
        return None, None
    try:
        key = cache_key({p.name: p.module for p in dense.parts}, device, flags)
        folder = CompilerFolder(key)
        cache = CompileCache(storage, trust, key, folder.path)
        cache.load()
    except SidestageError as e:
        _log.warning("the run keeps no compile cache: %s", e)
        return None, None
    return folder, cache


def _saves(loaded: CacheLoad | None) -> bool:
    place = launched_place()
    first = place is None or place[2] == 0
    return first and loaded is not None and loaded.found != "loaded"
