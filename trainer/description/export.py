"""Describe a live, sharded model for a publisher, and store the description.

Layout: the program under `code/<sha256>.pt2`, named by content; `description.json` and the
golden request under `serving/descriptions/<id>/`. The id is made of the content, so a
restarted trainer that exports the same model finds its description there already.
"""

from __future__ import annotations

import hashlib
import inspect
import io
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import safetensors.torch
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from ckpt.digest import digest_of
from ckpt.errors import BadInputError, ConflictError, SidestageError
from ckpt.layout import code_key, description_prefix
from ckpt.schema import (
    ConstantSpec,
    InputSpec,
    LookupSpec,
    OutputSpec,
    RequestFeature,
    ServingDescription,
    encode_description,
)
from ckpt.storage import Storage
from ckpt.trust import TrustList
from trainer.description.lookups import TOLERANCE, check_pooling, lookup_of, request_features
from trainer.description.program import (
    ProgramInput,
    export_dense,
    output_shapes,
    promote_constants,
    strip,
)
from trainer.description.shadow import Feed, RequestIds, in_eval, shadow_of, unwrap


@dataclass(frozen=True)
class ServedModel:
    """What to describe.

    name: what the served model is called.
    module: its forward takes float tensors and KeyedJaggedTensors by position, and returns
        tensors over the batch. It may share its parts with the trained model.
    args: the golden request: two rows or more.
    prefix: what stands before the module's own names in checkpoint keys.
    checkpoint_keys: the tensors that a checkpoint holds.
    """

    name: str
    module: nn.Module
    args: tuple[Any, ...]
    prefix: str
    checkpoint_keys: Collection[str]


def export_description(served: ServedModel, storage: Storage, trust: TrustList) -> str:
    """Export, check against the live model, store; returns the description's id.

    Collective: call on every rank, with equal golden requests, while no pipeline is attached to
    the model. Rank 0 writes. The program is added to this host's trust list.

    Raises BadInputError on every rank, naming the feature, collection or operator, where the
    model can't be described; StorageError where rank 0 can't write.
    """
    model = unwrap(served.module)
    names = _argument_names(model, served.args)
    request = request_features(names, served.args)
    feed = Feed()
    shadow = shadow_of(model, feed)
    with in_eval(model):
        live = model(*served.args)
        feed.begin(None)
        outputs = shadow(*served.args)
        lookups = []
        for call in feed.calls:
            lookups.append(lookup_of(call, request, served.prefix, served.checkpoint_keys))
            check_pooling(call, lookups[-1])
    described: str | SidestageError
    if _rank() == 0:
        try:
            probe = _Probe(served, shadow.cpu(), feed, names, live, outputs)
            described = _describe(probe, request, lookups, storage, trust)
        except SidestageError as e:
            described = e
        except Exception as e:  # the other ranks are waiting for an answer, whatever it is
            described = SidestageError(f"the model wasn't described: {type(e).__name__}: {e}")
            described.__cause__ = e
    return _agree(described if _rank() == 0 else None)


@dataclass(frozen=True)
class _Probe:
    """One run of the model on the golden request: of the live one and of its shadow."""

    served: ServedModel
    shadow: nn.Module
    feed: Feed
    names: list[str]
    live: Any
    outputs: Any


def _describe(
    probe: _Probe,
    request: Mapping[str, Any],
    lookups: Sequence[LookupSpec],
    storage: Storage,
    trust: TrustList,
) -> str:
    program, inputs = export_dense(probe.shadow, _argument_builder(probe), _inputs(probe))
    error = _parity(program, inputs, probe)
    constants = _constants(program, promote_constants(program), probe.served)
    strip(program, [c.name for c in constants if c.fqn is not None])
    archive = io.BytesIO()
    torch.export.save(program, archive)
    code = archive.getvalue()
    sha256 = hashlib.sha256(code).hexdigest()
    golden = safetensors.torch.save(_golden(probe, request))
    used = {i.name for i in inputs}
    described = ServingDescription(
        model=probe.served.name,
        program_key=code_key(sha256, ".pt2"),
        program_sha256=sha256,
        golden_key="",
        golden_digest=digest_of(golden),
        export_max_abs_err=0.0,
        inputs=tuple(_input_spec(i) for i in inputs),
        lookups=tuple(lk for lk in lookups if lk.input in used),
        constants=constants,
        outputs=tuple(
            OutputSpec(name, dtype, shape)
            for name, (dtype, shape) in zip(
                _output_names(probe.outputs), output_shapes(program), strict=True
            )
        ),
        features=tuple(RequestFeature(feature) for feature in request),
    )
    # The id leaves out what differs from one export to the next: the measured error.
    description_id = hashlib.sha256(encode_description(described)).hexdigest()[:20]
    prefix = description_prefix(description_id)
    described = replace(
        described, golden_key=f"{prefix}golden.safetensors", export_max_abs_err=error
    )
    _create(storage, described.program_key, code)
    _create(storage, described.golden_key, golden)
    _create(storage, f"{prefix}description.json", encode_description(described))
    trust.add(code)
    return description_id


def _argument_names(model: nn.Module, args: tuple[Any, ...]) -> list[str]:
    names = list(inspect.signature(model.forward).parameters)[: len(args)]
    for name, arg in zip(names, args, strict=True):
        if isinstance(arg, KeyedJaggedTensor):
            continue
        if not (isinstance(arg, Tensor) and arg.is_floating_point() and arg.dim()):
            what = f"{arg.dtype} tensor" if isinstance(arg, Tensor) else type(arg).__name__
            raise BadInputError(
                f"argument {name} is a {what}; a served model takes KeyedJaggedTensors and float "
                f"tensors over the batch: describe an inner module that does"
            )
    return names


def _inputs(probe: _Probe) -> list[ProgramInput]:
    """All inputs that the program could have."""
    dense = [
        ProgramInput(name, "dense", arg.detach().cpu())
        for name, arg in zip(probe.names, probe.served.args, strict=True)
        if isinstance(arg, Tensor)
    ]
    return dense + [ProgramInput(c.name, "lookup", c.output.cpu()) for c in probe.feed.calls]


def _argument_builder(probe: _Probe) -> Any:
    """Turns the program's inputs into the model's arguments, and feeds the stand-ins."""
    args = [a.detach().cpu() if isinstance(a, Tensor) else a for a in probe.served.args]

    def build(inputs: Sequence[ProgramInput], tensors: tuple[Tensor, ...]) -> tuple[Any, ...]:
        given = {i.name: t for i, t in zip(inputs, tensors, strict=True)}
        batch = tensors[0].size(0)
        # What isn't an input doesn't reach an output: any value of the right shape will do.
        probe.feed.begin(
            {
                c.name: given[c.name] if c.name in given else torch.zeros(batch, sum(c.dims))
                for c in probe.feed.calls
            }
        )
        return tuple(
            RequestIds(list(arg.keys()), batch)
            if not isinstance(arg, Tensor)
            else given[name]
            if name in given
            else torch.zeros(batch, *arg.shape[1:], dtype=arg.dtype)
            for name, arg in zip(probe.names, args, strict=True)
        )

    return build


def _parity(program: ExportedProgram, inputs: Sequence[ProgramInput], probe: _Probe) -> float:
    """Largest difference between the program, fed with the real lookups, and the live model."""
    with torch.no_grad():
        got = program.module()(*(i.example for i in inputs))
    want = [t.detach().cpu() for t in pytree.tree_leaves(probe.live) if isinstance(t, Tensor)]
    worst = 0.0
    for name, a, b in zip(_output_names(probe.live), got, want, strict=True):
        error = float((a - b).abs().max())
        limit = TOLERANCE * max(1.0, float(b.abs().max()))
        if not error <= limit:  # NaN fails too
            raise BadInputError(
                f"output {name}: the exported program is {error:.3g} away from the model, more than "
                f"{limit:.3g}; the forward pass depends on something other than its arguments"
            )
        worst = max(worst, error)
    return worst


def _constants(
    program: ExportedProgram, promoted: set[str], served: ServedModel
) -> tuple[ConstantSpec, ...]:
    signature = program.graph_signature
    specs = []
    for name in [*signature.inputs_to_parameters.values(), *signature.inputs_to_buffers.values()]:
        fqn = None if name in promoted else served.prefix + name.removeprefix("model.")
        if fqn is not None and fqn not in served.checkpoint_keys:
            raise BadInputError(f"{name}: a checkpoint of this state has no {fqn}; pass the prefix")
        tensor = program.state_dict[name]
        specs.append(ConstantSpec(name, fqn, _dtype(tensor), tuple(tensor.shape)))
    return tuple(specs)


def _golden(probe: _Probe, request: Mapping[str, Any]) -> dict[str, Tensor]:
    """The request as the schema lays it out."""
    out = {
        name: arg.detach().cpu().contiguous()
        for name, arg in zip(probe.names, probe.served.args, strict=True)
        if isinstance(arg, Tensor)
    }
    for feature, jagged in request.items():
        out[f"{feature}.values"] = jagged.values().cpu().long().clone()
        out[f"{feature}.lengths"] = jagged.lengths().cpu().long().clone()
    return out


def _input_spec(i: ProgramInput) -> InputSpec:
    shape = ("batch", *i.example.shape[1:])
    return InputSpec(i.name, i.kind, _dtype(i.example), shape)  # type: ignore[arg-type]


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _output_names(outputs: Any) -> list[str]:
    """Dict keys and positions, joined by dots; a lone tensor is called "output"."""
    return [
        ".".join(str(getattr(p, "key", getattr(p, "idx", p))) for p in path) or "output"
        for path, leaf in pytree.tree_flatten_with_path(outputs)[0]
        if isinstance(leaf, Tensor)
    ]


def _create(storage: Storage, key: str, data: bytes) -> None:
    """Names come from content, so whoever was there first wrote the same."""
    try:
        storage.create(key, data)
    except ConflictError:
        return


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _agree(described: str | SidestageError | None) -> str:
    """Rank 0's result on every rank, or its error."""
    message: list[Any] = [described]
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.broadcast_object_list(message, src=0)
    result = message[0]
    if isinstance(result, SidestageError):
        raise result
    return str(result)
