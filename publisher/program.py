"""The dense part: a `torch.export` program whose parameters are given at each call.

Loading an archive can run code, so its sha256 must be in this host's trust list first. The
program's graph takes its parameters and buffers as arguments, so that one loaded program
serves any number of versions and threads, each with its own constants.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.export.graph_signature import InputKind, OutputKind

from ckpt.errors import BadInputError, CorruptError
from ckpt.schema import Dim, InputSpec, OutputSpec, ServingDescription
from ckpt.trust import TrustList
from ckpt.types import Buffer
from publisher.request import dtype_name

_LIFTED = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)


class DenseProgram:
    """A loaded program, without weights of its own except those that the export fixed."""

    def __init__(self, program: torch.export.ExportedProgram) -> None:
        signature = program.graph_signature
        self._graph = program.graph_module
        self._slots: list[str | None] = []
        exported = {**program.constants, **program.state_dict}
        self.exported: dict[str, torch.Tensor] = {}
        self.weights: list[str] = []
        for spec in signature.input_specs:
            if spec.kind is InputKind.USER_INPUT:
                self._slots.append(None)
            elif spec.kind in _LIFTED and isinstance(exported.get(str(spec.target)), torch.Tensor):
                name = str(spec.target)
                self._slots.append(name)
                self.exported[name] = exported[name].detach()
                if spec.kind is not InputKind.CONSTANT_TENSOR:
                    self.weights.append(name)
            else:
                raise BadInputError(
                    f"the program has an input of kind {spec.kind.name} ({spec.target}), which "
                    f"can't be served; export it again without"
                )
        changed = [s for s in signature.output_specs if s.kind is not OutputKind.USER_OUTPUT]
        if changed:
            raise BadInputError(
                f"the program changes {changed[0].target} when it runs; export the model in "
                f"eval mode"
            )
        # Names that the archive knows, tied parameters' other names among them.
        self.known = frozenset(exported)
        placeholders = [n for n in program.graph.nodes if n.op == "placeholder"]
        self.inputs = [
            _layout(n) for n, slot in zip(placeholders, self._slots, strict=True) if slot is None
        ]
        (output,) = (n for n in program.graph.nodes if n.op == "output")
        self.outputs = [_layout(n) for n in output.args[0]]

    @staticmethod
    def load(data: Buffer, trust: TrustList, what: str) -> DenseProgram:
        """Load an archive; BadInputError if it isn't trusted, CorruptError if it isn't whole."""
        trust.check(data, what)
        try:
            program = torch.export.load(io.BytesIO(data))
        except Exception as e:  # a broken archive fails in many ways
            raise CorruptError(f"{what}: can't be loaded: {type(e).__name__}: {e}") from e
        return DenseProgram(program)

    def problems(self, description: ServingDescription) -> list[str]:
        """Where a description and the program disagree, one line each."""
        found = []
        described = {c.name: c for c in description.constants}
        found += [f"{n}: described, but not in the program" for n in described.keys() - self.known]
        found += [
            f"{n}: in the program, but not described" for n in self.weights if n not in described
        ]
        for name, tensor in self.exported.items():
            c = described.get(name)
            if c and (c.dtype, c.shape) != (dtype_name(tensor), tuple(tensor.shape)):
                found.append(
                    f"{name}: described as {c.dtype} {c.shape}, the program has "
                    f"{dtype_name(tensor)} {tuple(tensor.shape)}"
                )
        if len(self.inputs) != len(description.inputs):
            found.append(
                f"the program takes {len(self.inputs)} inputs, {len(description.inputs)} are "
                f"described"
            )
        elif len(self.outputs) != len(description.outputs):
            found.append(
                f"the program gives {len(self.outputs)} outputs, {len(description.outputs)} are "
                f"described"
            )
        else:
            found += self._wrong_shapes(description)
        return found

    def _wrong_shapes(self, description: ServingDescription) -> list[str]:
        """Native code made of the program checks no sizes: what is described must be what it takes."""
        found: list[str] = []
        names: dict[str, Dim] = {}
        specs: list[InputSpec | OutputSpec] = [*description.inputs, *description.outputs]
        for spec, (dtype, shape) in zip(specs, [*self.inputs, *self.outputs], strict=True):
            fits = spec.dtype == dtype and len(spec.shape) == len(shape)
            for described, size in zip(spec.shape, shape, strict=False):
                if isinstance(size, int):
                    fits &= described == size
                else:  # a symbol of the program stands for one described size throughout
                    fits &= isinstance(described, str)
                    fits &= names.setdefault(size, described) == described
            if not fits:
                found.append(
                    f"{spec.name}: described as {spec.dtype} {spec.shape}, the program has {dtype} "
                    f"({', '.join(map(str, shape))})"
                )
        return found

    def bind(self, constants: Mapping[str, torch.Tensor]) -> BoundProgram:
        """The program with a version's constants; those that aren't given stay as exported."""
        bound = {n: constants.get(n, t) for n, t in self.exported.items()}
        return BoundProgram(self._graph, self._slots, bound)


def _layout(node: Any) -> tuple[str, list[int | str]]:
    """(dtype, sizes) of a value of the graph; a size that depends on the request by its symbol."""
    value = node.meta["val"]
    return dtype_name(value), [s if isinstance(s, int) else str(s) for s in value.shape]


class BoundProgram:
    """A program with its constants. Any number of threads may call it."""

    def __init__(
        self,
        graph: torch.fx.GraphModule,
        slots: Sequence[str | None],
        constants: dict[str, torch.Tensor],
    ) -> None:
        self.constants = constants
        self._forward = graph.forward  # a GraphModule's __call__ only adds to it
        self._arguments = [None if n is None else constants[n] for n in slots]
        self._inputs = [i for i, n in enumerate(slots) if n is None]

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The outputs, in the program's order."""
        arguments: list[Any] = list(self._arguments)
        for i, tensor in zip(self._inputs, inputs, strict=True):
            arguments[i] = tensor
        return list(self._forward(*arguments))


def rehearse() -> None:
    """Load a program of no use, so that the next load finds imported what torch imports at its first."""

    class Nothing(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1

    archive = io.BytesIO()
    sizes = ({0: torch.export.Dim("batch", min=1, max=64)},)
    exported = torch.export.export(Nothing(), (torch.zeros(3),), dynamic_shapes=sizes)
    torch.export.save(exported, archive)
    torch.export.load(io.BytesIO(archive.getvalue()))
