"""The description of a probed model: its program, checked against the model, and all that fills it."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from ckpt.digest import digest_of
from ckpt.errors import BadInputError
from ckpt.layout import code_key, description_prefix
from ckpt.schema import (
    CollisionSpec,
    ConstantSpec,
    InputSpec,
    LookupSpec,
    OutputSpec,
    RequestFeature,
    ServingDescription,
    encode_description,
)
from trainer.description.inputs import Arguments, ProgramInput
from trainer.description.passing import check_passing
from trainer.description.program import export_dense, output_shapes, promote_constants, strip
from trainer.description.proof import TOLERANCE
from trainer.description.rawids import RawIds
from trainer.description.request import Request, output_names, tensors_of
from trainer.description.shadow import Feed


@dataclass(frozen=True)
class Probe:
    """What one run of the model on the golden request has shown.

    live: the model's output. shadow: on the CPU. feed: the collections' calls, of which `lookups` is
    the schema.
    """

    model: str
    prefix: str
    checkpoint_keys: Collection[str]
    live: Any
    shadow: nn.Module
    feed: Feed
    request: Request
    raw: RawIds
    lookups: Sequence[LookupSpec]
    collisions: Sequence[CollisionSpec]


@dataclass(frozen=True)
class Described:
    """A description, and the files that it names: storage key -> content."""

    id: str
    description: ServingDescription
    code: bytes
    files: Mapping[str, bytes]


def describe(probe: Probe) -> Described:
    """Export the dense part, compare it with the model, and write down what it needs.

    BadInputError names the argument, output or constant in the way.
    """
    arguments = Arguments(probe.request, probe.feed, probe.lookups)
    program, inputs = export_dense(probe.shadow, arguments)
    # After the export, which finds out which features always have one id a row.
    one_a_row = arguments.one_a_row()
    check_passing(probe.shadow, probe.feed, probe.request, probe.lookups, one_a_row)
    names = output_names(probe.live)
    error = _parity(program, inputs, names, probe.live)
    outputs = tuple(
        OutputSpec(name, dtype, shape)
        for name, (dtype, shape) in zip(names, output_shapes(program, inputs), strict=True)
    )
    constants = _constants(program, promote_constants(program), probe)
    strip(program, [c.name for c in constants if c.fqn is not None])
    archive = io.BytesIO()
    torch.export.save(program, archive)
    code = archive.getvalue()
    sha256 = hashlib.sha256(code).hexdigest()
    needs = _needs_of(inputs, probe.lookups)
    golden = safetensors.torch.save(_golden(probe, inputs, needs))
    used_collisions = {f.collision for lk in needs.lookups for f in lk.features}
    nameless = ServingDescription(
        model=probe.model,
        program_key=code_key(sha256, ".pt2"),
        program_sha256=sha256,
        golden_key="",
        golden_digest=digest_of(golden),
        export_max_abs_err=0.0,
        inputs=tuple(_input_spec(i) for i in inputs),
        lookups=needs.lookups,
        constants=constants,
        outputs=outputs,
        features=_features(probe, needs, ""),
        collisions=tuple(c for c in probe.collisions if c.name in used_collisions),
    )
    # The id leaves out the keys, which are made of it, and what differs from one export to the next.
    description_id = hashlib.sha256(encode_description(nameless)).hexdigest()[:20]
    prefix = description_prefix(description_id)
    described = replace(
        nameless,
        golden_key=f"{prefix}golden.safetensors",
        export_max_abs_err=error,
        features=_features(probe, needs, prefix),
    )
    files = {described.golden_key: golden}
    files |= {f"{prefix}{v.name}": v.data for v in probe.raw.files(needs.features).values()}
    return Described(description_id, described, code, files)


@dataclass(frozen=True)
class _Needs:
    """The lookups and features that a program's inputs need; `weighted` are those with weights."""

    lookups: tuple[LookupSpec, ...]
    features: tuple[str, ...]
    weighted: frozenset[str]


def _needs_of(inputs: Sequence[ProgramInput], lookups: Sequence[LookupSpec]) -> _Needs:
    pooled = {i.name for i in inputs if i.kind == "lookup"}
    sequences = {i.of for i in inputs if i.kind in ("rows", "row_ids")}
    kept = []
    for lookup in lookups:
        used = lookup.features
        if lookup.input not in pooled:
            used = tuple(f for f in used if (lookup.input, f.output) in sequences)
        if used:
            kept.append(replace(lookup, features=used))
    specs = [f for lookup in kept for f in lookup.features]
    own = [i for i in inputs if i.kind in ("values", "lengths", "weights")]
    sizes = [i.size.removeprefix("ids:") for i in inputs if i.size.startswith("ids:")]
    features = dict.fromkeys([*(f.feature for f in specs), *(i.of[0] for i in own), *sizes])
    weighted = {f.feature for f in specs if f.weights == "request"}
    weighted |= {i.of[0] for i in own if i.kind == "weights"}
    return _Needs(tuple(kept), tuple(features), frozenset(weighted))


def _features(probe: Probe, needs: _Needs, prefix: str) -> tuple[RequestFeature, ...]:
    files = probe.raw.files(needs.features)
    return tuple(
        probe.raw.spec(name, files.get(name), prefix, weighted=name in needs.weighted)
        for name in needs.features
    )


def _golden(probe: Probe, inputs: Sequence[ProgramInput], needs: _Needs) -> dict[str, Tensor]:
    """The request as the schema lays it out."""
    out = {i.name: i.example.clone() for i in inputs if i.kind == "dense"}
    features = {f.name: f for f in probe.request.features}
    for name in needs.features:
        jagged = features[name].ids
        out |= probe.raw.golden(features[name])
        out[f"{name}.lengths"] = jagged.lengths().cpu().long().clone()
        if name in needs.weighted:
            out[f"{name}.weights"] = jagged.weights().cpu().float().clone()
    return out


def _parity(
    program: ExportedProgram, inputs: Sequence[ProgramInput], names: Sequence[str], live: Any
) -> float:
    """Largest difference between the program, fed with the real lookups, and the live model."""
    with torch.no_grad():
        got = program.module()(*(i.example for i in inputs))
    want = [t.detach().cpu() for t in tensors_of(live)]
    worst = 0.0
    for name, a, b in zip(names, got, want, strict=True):
        if a.shape != b.shape or a.dtype != b.dtype:
            raise BadInputError(
                f"output {name}: the exported program gives {a.dtype} {tuple(a.shape)}, the model "
                f"{b.dtype} {tuple(b.shape)}"
            )
        error = float((a.double() - b.double()).abs().max()) if a.numel() else 0.0
        limit = TOLERANCE * max(1.0, float(b.double().abs().max()) if a.numel() else 0.0)
        if not error <= limit:  # NaN fails too
            raise BadInputError(
                f"output {name}: the exported program is {error:.3g} away from the model, more than "
                f"{limit:.3g}; the forward pass depends on something other than its arguments"
            )
        worst = max(worst, error)
    return worst


def _constants(
    program: ExportedProgram, promoted: set[str], probe: Probe
) -> tuple[ConstantSpec, ...]:
    signature = program.graph_signature
    specs = []
    for name in [*signature.inputs_to_parameters.values(), *signature.inputs_to_buffers.values()]:
        fqn = None if name in promoted else probe.prefix + name.removeprefix("model.")
        if fqn is not None and fqn not in probe.checkpoint_keys:
            raise BadInputError(f"{name}: a checkpoint of this state has no {fqn}; pass the prefix")
        tensor = program.state_dict[name]
        specs.append(ConstantSpec(name, fqn, _dtype(tensor), tuple(tensor.shape)))
    return tuple(specs)


def _input_spec(i: ProgramInput) -> InputSpec:
    return InputSpec(i.name, i.kind, _dtype(i.example), (i.size, *i.example.shape[1:]), i.of)


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
