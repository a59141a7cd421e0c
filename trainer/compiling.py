"""The dense part of a recommendation model, compiled in place: once, for any number of rows.

    dense = compile_dense(model)          # before DistributedModelParallel; lookups stay as they are
    warm_up(model, (batch,))              # trainer.warmup: compiles now, and leaves no trace

Parts are the largest submodules without an embedding table in them. Each is compiled as one whole graph
with its backward pass, and its tensors' first dimension is marked dynamic, so that batch sizes and
numbers of ids don't compile again, with one exception: on CPUs torch 2.13 sums more than 4,096 values in
another way, so a part that sums over the batch may be compiled a second time where a size crosses that.
State-dict names, hooks around the parts, copies and exports are as
before: `nn.Module` takes the compiled call from a field that copies leave out.

A part runs eagerly

- outside of training: in eval mode or without gradients. Compiling that too would double the cost for
  the few batches of an evaluation, and scores then don't depend on whether a run compiles;
- on tensors of no row or one row, for which the compiler makes graphs of their own;
- for good, with a warning, once it can't be compiled or was compiled again too often.

Compiled and eager steps differ in their last bits. A resume is exact if both attempts compile.
"""

from __future__ import annotations

import inspect
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ckpt.errors import BadInputError

_log = logging.getLogger("sidestage")

Mode = Literal["default", "max-autotune-no-cudagraphs"]

MAX_GRAPHS = 4
"""Graphs of one part. One that wants more of them changes with the data: it runs eagerly from then on."""

_TABLES = (nn.Embedding, nn.EmbeddingBag)
_TABLE_FIELDS = ("_embedding_bag_configs", "_embedding_configs", "_emb_modules", "_lookups")
_CONTAINERS = (nn.ModuleList, nn.ModuleDict)


@dataclass
class DensePart:
    """One compiled submodule. `graphs`: how often its forward, with its backward, was compiled.

    reasons: why it was compiled again, one for each graph after the first.
    failure: why it runs eagerly for good, or None.
    """

    name: str
    module: nn.Module
    graphs: int = 0
    reasons: list[str] = field(default_factory=list)
    failure: str | None = None


class CompiledDense:
    """What `compile_dense` has compiled, and how often.

    Args:
        parts: in the model's order.
    """

    def __init__(self, parts: Sequence[DensePart]) -> None:
        self.parts = tuple(parts)

    @property
    def graphs(self) -> int:
        return sum(p.graphs for p in self.parts)

    @property
    def recompiles(self) -> int:
        """Graphs beyond the first of each part. 0 is what dynamic shapes are for."""
        return sum(len(p.reasons) for p in self.parts)

    def failures(self) -> dict[str, str]:
        """Part -> why it runs eagerly."""
        return {p.name: p.failure for p in self.parts if p.failure is not None}

    def disable(self, reason: str) -> None:
        """Run everything eagerly from now on."""
        for part in self.parts:
            part.failure = part.failure or reason


def compile_dense(
    module: nn.Module,
    *,
    parts: Sequence[str] | None = None,
    dynamic: bool = True,
    mode: Mode = "default",
    backend: Callable[..., Any] | None = None,
) -> CompiledDense:
    """Let the dense parts of `module` run compiled, from their next training call on.

    Args:
        module: the model, before or after it is sharded.
        parts: names of submodules; default are the largest without a table in them.
        dynamic: mark first dimensions as dynamic. Without, each new batch size compiles again.
        mode: "max-autotune-no-cudagraphs" measures kernels on CUDA, which takes minutes.
        backend: for tests; takes (graph module, example inputs) as torch.compile's backends do.

    Raises BadInputError if a named part doesn't exist or looks up embeddings, or there is none.
    """
    if parts is None:
        found = dict(_dense_parts("", module))
    else:
        known = dict(module.named_modules())
        if strange := [p for p in parts if p not in known]:
            raise BadInputError(f"no submodule {strange[0]!r} to compile")
        found = {p: known[p] for p in parts}
        if tables := [p for p, m in found.items() if _has_table(m)]:
            raise BadInputError(
                f"{tables[0]} looks up embeddings, whose hooks must run: name the dense parts in it"
            )
    if not found:
        raise BadInputError(f"{type(module).__name__} has no dense part to compile")
    compiled = []
    for name, sub in found.items():
        part = DensePart(name, sub)
        # A field of its class, None by default. nn.Module.compile sets it too, without our conditions.
        sub._compiled_call_impl = _Call(part, dynamic=dynamic, mode=mode, backend=backend)
        compiled.append(part)
    return CompiledDense(compiled)


def missing_compiler(device: torch.device) -> str | None:
    """Why nothing can be compiled for `device` here, or None."""
    if device.type == "cpu" and not cpp_compiler():
        return "there is no C++ compiler here (g++ or $CXX)"
    if device.type == "cuda":
        from torch.utils._triton import has_triton

        if not has_triton():
            return "Triton isn't installed or doesn't know this device"
    return None


def cpp_compiler() -> str | None:
    """The path of the C++ compiler that would be used, or None."""
    names = (os.environ.get("CXX"), "g++", "clang++")
    return next((path for name in names if name and (path := shutil.which(name))), None)


class _Call:
    """Takes the place of a module's call: compiled where that pays, else as it was."""

    def __init__(
        self,
        part: DensePart,
        *,
        dynamic: bool,
        mode: Mode,
        backend: Callable[..., Any] | None,
    ) -> None:
        self._part = part
        self._dynamic = dynamic
        self._backend = backend or _inductor(mode)
        isolated = "isolate_recompiles" in inspect.signature(torch.compile).parameters
        self._eager: Callable[..., Any] = part.module._call_impl
        compiler: Any = torch.compile
        self._compiled: Callable[..., Any] = compiler(
            self._eager,
            fullgraph=True,
            dynamic=None if dynamic else False,
            backend=self._count,
            # Else all modules of one class share a limit of 8 graphs.
            **({"isolate_recompiles": True} if isolated else {}),
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        part = self._part
        if part.failure is None and part.module.training and torch.is_grad_enabled():
            tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
            if all(t.ndim == 0 or t.shape[0] > 1 for t in tensors) and not _traced():
                return self._run(tensors, args, kwargs)
        return self._eager(*args, **kwargs)

    def _run(self, tensors: list[Tensor], args: Any, kwargs: Any) -> Any:
        if self._dynamic and not self._part.graphs:
            for tensor in tensors:
                if tensor.ndim:
                    torch._dynamo.mark_dynamic(tensor, 0)
        try:
            return self._compiled(*args, **kwargs)
        except torch._dynamo.exc.TorchDynamoException as e:  # while compiling: nothing has run yet
            self._part.failure = self._part.failure or f"it can't be compiled: {_first_line(e)}"
            _log.warning("%s runs eagerly: %s", self._part.name, self._part.failure)
        return self._eager(*args, **kwargs)

    def _count(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        part = self._part
        if part.graphs:
            reason = _recompile_reason()
            if part.graphs >= MAX_GRAPHS:
                part.failure = (
                    f"it was compiled {part.graphs} times already, lastly because {reason}"
                )
                raise BadInputError(part.failure)  # taken up in _run
            part.reasons.append(reason)
            _log.warning(
                "%s is compiled again, which costs seconds to minutes: %s", part.name, reason
            )
        part.graphs += 1
        return self._backend(graph, inputs)


def _inductor(mode: Mode) -> Callable[..., Any]:
    def compiled(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        from torch._inductor import list_mode_options
        from torch._inductor.compile_fx import compile_fx

        return compile_fx(graph, inputs, config_patches=list_mode_options(mode))

    return compiled


def _traced() -> bool:
    """Is an exporter or another compiler looking? It then needs the module's own operations."""
    return torch.compiler.is_compiling() or torch.compiler.is_exporting()


def _recompile_reason() -> str:
    """Which guard failed, as the compiler says it in its metrics of the compilation in progress."""
    from torch._dynamo.utils import get_metrics_context

    said = getattr(get_metrics_context(), "_metrics", {}).get("recompile_reason")
    return str(said).strip().splitlines()[0] if said else "unknown; see TORCH_LOGS=recompiles"


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"


def _dense_parts(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    if _is_table(module):
        return
    if not _has_table(module) and not isinstance(module, _CONTAINERS) and name:
        # What has neither weights nor parts, such as a loss, gains nothing.
        if next(module.parameters(), None) is not None or next(module.buffers(), None) is not None:
            yield name, module
        return
    for child_name, child in module.named_children():
        yield from _dense_parts(f"{name}.{child_name}" if name else child_name, child)


def _has_table(module: nn.Module) -> bool:
    return any(_is_table(m) for m in module.modules())


def _is_table(module: nn.Module) -> bool:
    return isinstance(module, _TABLES) or any(hasattr(module, f) for f in _TABLE_FIELDS)
