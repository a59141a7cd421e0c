"""The dense part as a torch.export program: lookups are inputs, all operators are aten."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram, export
from torch.export.graph_signature import InputKind
from torch.utils import _pytree as pytree

from ckpt.errors import BadInputError

MAX_BATCH = 1 << 16


@dataclass(frozen=True)
class ProgramInput:
    """A positional input. kind "dense": an argument; "lookup": a call's output. Dim 0 is the batch."""

    name: str
    kind: str
    example: Tensor


class DensePart(nn.Module):
    """Runs the shadow on flat inputs.

    Args:
        model: the shadow.
        arguments: rebuilds the model's arguments from the inputs, and feeds the stand-ins.
    """

    def __init__(
        self, model: nn.Module, arguments: Callable[[tuple[Tensor, ...]], tuple[Any, ...]]
    ) -> None:
        super().__init__()
        self.model = model
        self.__dict__["_arguments"] = arguments

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        out = self.model(*self.__dict__["_arguments"](inputs))
        return tuple(t for t in pytree.tree_leaves(out) if isinstance(t, Tensor))


def export_dense(
    model: nn.Module,
    arguments: Callable[[Sequence[ProgramInput], tuple[Tensor, ...]], tuple[Any, ...]],
    inputs: Sequence[ProgramInput],
) -> tuple[ExportedProgram, list[ProgramInput]]:
    """Trace the shadow; returns the program and those inputs that an output depends on.

    BadInputError where the model can't be traced or needs operators beyond aten.
    """
    live = list(inputs)
    while True:
        program = _trace(DensePart(model, _bind(arguments, live)).eval(), live)
        used = _live_inputs(program)
        kept = [
            i
            for i, name in zip(live, program.graph_signature.user_inputs, strict=True)
            if name in used
        ]
        if len(kept) == len(live):
            return program, live
        live = kept  # an input that nothing reads is no part of the description
        if not live:
            raise BadInputError("no output of the model depends on its arguments")


def promote_constants(program: ExportedProgram) -> set[str]:
    """Make every lifted constant and non-persistent buffer an ordinary buffer; returns their names.

    Compilers rename lifted constants, and no state dict holds them: they would be left unbound.
    """
    promoted = set()
    for spec in program.graph_signature.input_specs:
        if spec.kind is InputKind.CONSTANT_TENSOR or (
            spec.kind is InputKind.BUFFER and not spec.persistent
        ):
            assert spec.target is not None, "constants have a name"
            promoted.add(spec.target)
            spec.kind, spec.persistent = InputKind.BUFFER, True
            program.state_dict[spec.target] = program.constants.pop(spec.target)
    return promoted


def strip(program: ExportedProgram, names: Sequence[str]) -> None:
    """Blank the named constants and all traces of this machine, so that equal models give equal bytes."""
    for name in names:
        old = program.state_dict[name]
        blank = torch.zeros_like(old)
        program.state_dict[name] = nn.Parameter(blank) if isinstance(old, nn.Parameter) else blank
    for graph in [m for m in program.graph_module.modules() if isinstance(m, torch.fx.GraphModule)]:
        for node in graph.graph.nodes:
            for key in ("stack_trace", "nn_module_stack", "source_fn_stack", "from_node"):
                node.meta.pop(key, None)


def output_shapes(program: ExportedProgram) -> list[tuple[str, tuple[int | str, ...]]]:
    """(dtype, shape) of each output, with "batch" for the dynamic dimension."""
    nodes = {n.name: n for n in program.graph.nodes}
    batch = str(nodes[program.graph_signature.user_inputs[0]].meta["val"].shape[0])
    out = []
    for name in program.graph_signature.user_outputs:
        value = nodes[str(name)].meta["val"]
        shape: list[int | str] = []
        for size in value.shape:
            if not isinstance(size, int) and str(size) != batch:
                raise BadInputError(f"output {name}: dimension {size} depends on the batch")
            shape.append(size if isinstance(size, int) else "batch")
        out.append((str(value.dtype).removeprefix("torch."), tuple(shape)))
    return out


def _bind(
    arguments: Callable[[Sequence[ProgramInput], tuple[Tensor, ...]], tuple[Any, ...]],
    live: Sequence[ProgramInput],
) -> Callable[[tuple[Tensor, ...]], tuple[Any, ...]]:
    return lambda tensors: arguments(live, tensors)


def _trace(part: DensePart, inputs: Sequence[ProgramInput]) -> ExportedProgram:
    batch = Dim("batch", min=1, max=MAX_BATCH)
    # Zeros: the program's file holds its examples, and must not depend on weights or users.
    examples = tuple(torch.zeros_like(i.example) for i in inputs)
    # Without backed_size_oblivious the sizes 0 and 1 would be special, and batch 1 refused.
    config = _fx_config().patch(backed_size_oblivious=True)
    try:
        with config, torch.no_grad(), _aten_regroup(part):
            program: ExportedProgram = export(
                part, examples, dynamic_shapes=(tuple({0: batch} for _ in inputs),), strict=False
            ).run_decompositions()
    except BadInputError:
        raise
    except Exception as e:  # torch.export's own errors have no common class
        first = next((line for line in str(e).splitlines() if line.strip()), "no message")
        raise BadInputError(
            f"the model can't be exported ({type(e).__name__}: {first.strip()}); its dense part must "
            f"have no control flow that depends on data, and take any batch size"
        ) from e
    foreign = sorted(
        {
            str(n.target)
            for n in program.graph.nodes
            if n.op == "call_function" and getattr(n.target, "namespace", "aten") != "aten"
        }
    )
    if foreign:
        raise BadInputError(
            f"the dense part uses {', '.join(foreign)}, which a publisher without the trainer's "
            f"libraries can't run; use torch's own operators"
        )
    return program


def _fx_config() -> Any:
    from torch.fx.experimental import _config

    return _config


@contextmanager
def _aten_regroup(part: nn.Module) -> Iterator[None]:
    """Take torchrec's aten path through KeyedTensor.regroup while tracing, not fbgemm's operator."""
    from torchrec.modules.regroup import KTRegroupAsDict
    from torchrec.sparse import jagged_tensor

    def init(self: Any, tensors: Any) -> None:
        self._use_fbgemm_regroup = False
        self._init_regroup(tensors)

    for module in part.modules():
        if isinstance(module, KTRegroupAsDict):
            module._is_inited = False
    with (
        mock.patch.object(
            jagged_tensor, "_fbgemm_permute_pooled_embs", jagged_tensor._regroup_keyed_tensors
        ),
        mock.patch.object(KTRegroupAsDict, "_init_fbgemm_regroup", init),
    ):
        yield


def _live_inputs(program: ExportedProgram) -> set[str]:
    """Inputs whose data reach an output; the batch size alone can be read from any of them."""
    seen: set[Any] = set()
    todo = [n for n in program.graph.nodes if n.op == "output"]
    while todo:
        for node in todo.pop().all_input_nodes:
            if node not in seen:
                seen.add(node)
                if node.target is not torch.ops.aten.sym_size.int:
                    todo.append(node)
    return {n.name for n in seen if n.op == "placeholder"}
