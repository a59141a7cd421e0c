"""The dense part as a torch.export program: lookups are inputs, all operators are aten."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram, export
from torch.export.graph_signature import InputKind

from ckpt.errors import BadInputError
from trainer.description.inputs import BATCH, Arguments, ProgramInput, unified
from trainer.description.request import offsets_of, tensors_of
from trainer.description.source import user_line

MAX_BATCH = 1 << 16
MAX_IDS = 1 << 31


class DensePart(nn.Module):
    """Runs the shadow on flat inputs."""

    def __init__(
        self, model: nn.Module, arguments: Arguments, inputs: Sequence[ProgramInput]
    ) -> None:
        super().__init__()
        self.model = model
        self.__dict__["_call"] = (arguments, inputs)

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        arguments, live = self.__dict__["_call"]
        return tuple(tensors_of(arguments.call(self.model, live, inputs)))


def export_dense(
    model: nn.Module, arguments: Arguments
) -> tuple[ExportedProgram, list[ProgramInput]]:
    """Trace the shadow; returns the program and those inputs that an output depends on.

    BadInputError where the model can't be traced or needs operators beyond aten.
    """
    arguments.watch(model)
    try:
        exported = _export(model, arguments)
        if not arguments.surprised():
            return exported
    except BadInputError:
        if not arguments.surprised():
            raise
    return _export(model, arguments)


def _export(model: nn.Module, arguments: Arguments) -> tuple[ExportedProgram, list[ProgramInput]]:
    live = arguments.candidates()
    while True:
        part = DensePart(model, arguments, live).eval()
        try:
            traced = _trace(part, live)
        except _SameSizesError as e:
            arguments.unify(e.same)
            live = unified(live, e.same)
            continue
        kept = _kept(traced, live)
        if len(kept) == len(live):
            program = _in_aten(traced, part)
            kept = _kept(program, live)
            if len(kept) == len(live):
                return program, live
        live = kept  # an input that nothing reads is no part of the description


def _kept(program: ExportedProgram, inputs: Sequence[ProgramInput]) -> list[ProgramInput]:
    """The inputs that an output depends on, and one at least that tells the batch size."""
    used = _live_inputs(program)
    names = program.graph_signature.user_inputs
    kept = [i for i, name in zip(inputs, names, strict=True) if name in used]
    if not kept:
        raise BadInputError("no output of the model depends on its arguments")
    if not any(i.size == BATCH for i in kept):
        kept.append(next(i for i in inputs if i.size == BATCH))
    return kept


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


def output_shapes(
    program: ExportedProgram, inputs: Sequence[ProgramInput]
) -> list[tuple[str, tuple[int | str, ...]]]:
    """(dtype, shape) of each output, dynamic dimensions by the names of the inputs' sizes."""
    nodes = {n.name: n for n in program.graph.nodes}
    signature = program.graph_signature
    sizes = {
        str(nodes[name].meta["val"].shape[0]): i.size
        for i, name in zip(inputs, signature.user_inputs, strict=True)
    }
    out = []
    for name in signature.user_outputs:
        value = nodes[str(name)].meta["val"]
        shape: list[int | str] = []
        for size in value.shape:
            if not isinstance(size, int) and str(size) not in sizes:
                raise BadInputError(
                    f"output {name}: dimension {size} is neither the batch nor a feature's number of ids"
                )
            shape.append(size if isinstance(size, int) else sizes[str(size)])
        out.append((str(value.dtype).removeprefix("torch."), tuple(shape)))
    return out


class _SameSizesError(Exception):
    """Sizes that the model takes to be equal, such as a feature with exactly one id a row."""

    def __init__(self, same: Mapping[str, str]) -> None:
        super().__init__()
        self.same = same


def _trace(part: DensePart, inputs: Sequence[ProgramInput]) -> ExportedProgram:
    sizes = list(dict.fromkeys(i.size for i in inputs if i.size != BATCH))
    names = {f"ids_{n}": size for n, size in enumerate(sizes)} | {BATCH: BATCH}
    dims = {size: Dim(name, min=0, max=MAX_IDS) for name, size in names.items() if size != BATCH}
    dims[BATCH] = Dim(BATCH, min=1, max=MAX_BATCH)
    # Zeros: the program's file holds its examples, and must not depend on weights or users.
    examples = tuple(torch.zeros_like(i.example) for i in inputs)
    # Without backed_size_oblivious the sizes 0 and 1 would be special, and batch 1 refused.
    config = _fx_config().patch(backed_size_oblivious=True)
    try:
        with config, torch.no_grad(), _aten_regroup(part):
            program: ExportedProgram = export(
                part,
                examples,
                dynamic_shapes=(tuple({0: dims[i.size]} for i in inputs),),
                strict=False,
            )
    except BadInputError:
        raise
    except Exception as e:  # torch.export's own errors have no common class
        same = _same_sizes(str(e), names)
        if same:
            raise _SameSizesError(same) from e
        raise BadInputError(_refusal(e, names)) from e
    return program


def _in_aten(traced: ExportedProgram, part: nn.Module) -> ExportedProgram:
    """The program in aten operators only."""
    config = _fx_config().patch(backed_size_oblivious=True)
    with config, torch.no_grad(), _aten_regroup(part):
        program: ExportedProgram = traced.run_decompositions(_decompositions())
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


def _same_sizes(message: str, names: Mapping[str, str]) -> dict[str, str]:
    """Sizes that torch.export found to be always equal: `ids:<feature>` -> the other one."""
    pairs = re.findall(r"^\s*(\w+) = (\w+)\s*$", message, re.MULTILINE)
    pairs += re.findall(r"values of (\w+) = .* and (\w+) = .* must always be equal", message)
    same: dict[str, str] = {}
    for a, b in pairs:
        if a in names and b in names and a != b:
            first, second = (names[b], names[a]) if a == BATCH else (names[a], names[b])
            same[first] = second
    return {a: same.get(b, b) for a, b in same.items()}


def _refusal(error: Exception, names: Mapping[str, str]) -> str:
    message = str(error)
    for name, size in names.items():
        message = re.sub(rf"\b{name}\b", size, message)
    fixed = re.search(r"You marked (\S+) as dynamic but .* be a constant \((\d+)\)", message)
    equal = re.search(r"^\s*(ids:\S+|batch) = (.+?)\s*$", message, re.MULTILINE)
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    why = f"{type(error).__name__}: {lines[0] if lines else 'no message'}"
    if fixed or equal:
        size, value = (fixed or equal).groups()  # type: ignore[union-attr]
        why = f"it takes {size} to be {value}, always"
    line = user_line(error)
    return (
        f"the model can't be exported{f', at {line}' if line else ''} ({why}); its dense part must have no "
        f"control flow that depends on data, and take any batch size and any number of ids"
    )


def _decompositions() -> Any:
    """Aten's own, and aten forms of what JaggedTensor does by fbgemm."""
    table = torch.export.default_decompositions()
    table[torch.ops.fbgemm.asynchronous_complete_cumsum.default] = offsets_of
    table[torch.ops.fbgemm.jagged_to_padded_dense.default] = _padded
    return table


def _padded(
    values: Tensor, offsets: Sequence[Tensor], max_lengths: Sequence[Any], padding: float = 0.0
) -> Tensor:
    """Jagged (number of ids, ...) to dense (batch, length, ...); a longer row loses its end."""
    (length,), (begins,) = max_lengths, offsets
    place = torch.arange(length, device=values.device)[None, :]
    counts = begins[1:] - begins[:-1]
    # One row more stands for padding, so that an empty `values` needs no branch.
    source = torch.cat([values, values.new_full((1, *values.shape[1:]), padding)])
    index = torch.where(place < counts[:, None], begins[:-1, None] + place, values.size(0))
    return source[index]


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
