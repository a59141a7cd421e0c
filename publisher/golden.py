"""What the checkpoint itself says to the golden request: id maps, and the answer in fp32.

The id maps leave the checkpoint here, for a version's `keys.ID_MAPS`: `<feature>.raw` and `.row` of a
vocabulary, `collision:<name>.raw` and `.row`, `position:<checkpoint key>`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np
import safetensors
import safetensors.torch
import torch

from ckpt.digest import check_digest
from ckpt.errors import BadInputError, CorruptError
from ckpt.idmaps import KnownIds
from ckpt.schema import ServingDescription, VocabularyIds
from ckpt.storage import Storage
from publisher.answer import Answerer, Program
from publisher.ids import IdMaps
from publisher.lookup import ReferenceLookup
from publisher.request import RequestSpec, dtype_name, torch_dtype, values_of

Tensors = Mapping[str, torch.Tensor]


class StoredTensor(Protocol):
    """What a checkpoint says of one tensor."""

    @property
    def kind(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...


class TensorSource(Protocol):
    """What is read of a checkpoint here."""

    @property
    def tensors(self) -> Mapping[str, StoredTensor]: ...
    def read(self, fqn: str) -> torch.Tensor: ...
    def read_rows(self, fqn: str, rows: list[int], /) -> torch.Tensor: ...


def id_map_tensors(
    description: ServingDescription, root: Storage, reader: TensorSource
) -> dict[str, torch.Tensor]:
    """The vocabularies, managed collisions and weights by position that a description needs.

    Sorted by raw id, without empty slots. BadInputError names the vocabulary or checkpoint key
    that isn't as described, CorruptError a file that doesn't match its digest.
    """
    out: dict[str, torch.Tensor] = {}
    for f in RequestSpec.of(description).features:
        if isinstance(f.ids, VocabularyIds):
            data = root.read(f.ids.key)
            check_digest(data, f.ids.digest, f.ids.key)
            listed = load_tensors(data, f.ids.key)
            raw, row = (
                _as_described(f"{f.ids.key}: {part}", listed.get(part), "int64", (f.ids.size,))
                for part in ("raw", "row")
            )
            _add(out, f.name, raw, row, f"vocabulary of {f.name} ({f.ids.key})")
    tables = {f.collision: f.rows for lk in description.lookups for f in lk.features}
    for c in description.collisions:
        if c.name not in tables:
            continue
        raw, row = (_read(reader, fqn, "int64", (c.size,)) for fqn in (c.raw_ids_fqn, c.rows_fqn))
        what = f"collision {c.name} ({c.raw_ids_fqn})"
        _add(out, f"collision:{c.name}", raw, row, what, tables[c.name])
    for lk in description.lookups:
        for spec in lk.features:
            if spec.position_fqn is not None:
                out[f"position:{spec.position_fqn}"] = _positions(reader, spec.position_fqn)
    return out


def check_golden_ids(description: ServingDescription, tensors: Tensors, golden: Tensors) -> None:
    """Do the id maps make the ids of the golden request that the trainer's own pipeline made?

    BadInputError names the feature, the first id that differs, and both rows.
    """
    spec = RequestSpec.of(description)
    maps = IdMaps(description, tensors)
    request = spec.read(spec.select(golden))
    ids = maps(request, {})
    for f, raw, got in zip(spec.features, request.values, ids, strict=True):
        if f.ids.kind == "identity":
            continue
        name = f"{f.name}.rows"
        stored = golden.get(name)
        if stored is None or stored.dtype != torch.int64 or len(stored) != len(raw):
            found = "missing" if stored is None else f"{stored.dtype} {tuple(stored.shape)}"
            raise BadInputError(
                f"golden request: {name} is {found}, expected the trainer's own ids for the "
                f"{len(raw)} of {values_of(f.name)}"
            )
        differ = np.flatnonzero(stored.numpy() != got)
        if len(differ):
            at = differ[0]
            raise BadInputError(
                f"{f.name}: id {raw[at]} is {stored[at]} in the trainer and {got[at]} by its "
                f"{f.ids.kind} id map, and {len(differ) - 1} more differ; export the description "
                f"with the map that the trainer's input pipeline uses"
            )


def golden_reference(
    description: ServingDescription,
    program: Program,
    reader: TensorSource,
    golden: Tensors,
    id_tensors: Tensors,
) -> dict[str, torch.Tensor]:
    """The fp32 answer to the golden request: its rows out of the checkpoint, nothing quantised.

    Raises BadInputError if the request doesn't fit the description, or an output isn't finite.
    """
    maps = IdMaps(description, id_tensors)
    lookups = [ReferenceLookup(lk, maps, reader.read_rows) for lk in description.lookups]
    answerer = Answerer(description, maps, lookups, program)
    request = answerer.spec.select(golden)
    checked = answerer.spec.read(request)
    sizes: dict[str, int] = {"batch": checked.batch}
    for f, values in zip(answerer.spec.features, checked.values, strict=True):
        sizes[f"ids:{f.name}"] = len(values)
    outputs, _ = answerer(request)
    for spec in description.outputs:
        got = outputs[spec.name]
        want = tuple(sizes[d] if isinstance(d, str) else d for d in spec.shape)
        if tuple(got.shape) != want or got.dtype != torch_dtype(spec.dtype):
            raise BadInputError(
                f"output {spec.name}: is {got.dtype} {tuple(got.shape)}, "
                f"described as {spec.dtype} {want}"
            )
        if not torch.isfinite(got).all():
            raise BadInputError(
                f"output {spec.name}: not finite on the golden request, in fp32 already"
            )
    return {n: t.contiguous() for n, t in outputs.items()}


def load_tensors(data: bytes, what: str) -> dict[str, torch.Tensor]:
    """A safetensors file; CorruptError names it if it isn't one."""
    try:
        return safetensors.torch.load(data)
    except safetensors.SafetensorError as e:
        raise CorruptError(f"{what}: not a safetensors file: {e}") from None


def _add(  # noqa: PLR0913, PLR0917  (two tensors and what they are)
    out: dict[str, torch.Tensor],
    name: str,
    raw: torch.Tensor,
    row: torch.Tensor,
    what: str,
    rows: int | None = None,
) -> None:
    known = KnownIds.of(raw.numpy(), row.numpy(), what)
    outside = (known.row < 0) | (False if rows is None else known.row >= rows)
    if outside.any():
        at = int(np.flatnonzero(outside)[0])
        table = "" if rows is None else f", its table has {rows}"
        raise BadInputError(f"{what}: id {known.raw[at]} has row {known.row[at]}{table}")
    out[f"{name}.raw"] = torch.from_numpy(known.raw)
    out[f"{name}.row"] = torch.from_numpy(known.row)


def _read(
    reader: TensorSource, fqn: str, dtype: str | None, shape: tuple[int, ...] | None
) -> torch.Tensor:
    stored = reader.tensors.get(fqn)
    if stored is None or stored.kind == "per_rank":
        found = "missing" if stored is None else "different on each rank"
        raise BadInputError(f"checkpoint: {fqn} is {found}, and the description needs it")
    return _as_described(f"checkpoint: {fqn}", reader.read(fqn), dtype, shape)


def _as_described(
    what: str, tensor: torch.Tensor | None, dtype: str | None, shape: tuple[int, ...] | None
) -> torch.Tensor:
    found = "missing" if tensor is None else f"{dtype_name(tensor)} {tuple(tensor.shape)}"
    wanted = tensor is not None and (
        dtype in (None, dtype_name(tensor)) and shape in (None, tuple(tensor.shape))
    )
    if tensor is None or not wanted:
        raise BadInputError(f"{what}: is {found}, described as {dtype} {shape}")
    return tensor


def _positions(reader: TensorSource, fqn: str) -> torch.Tensor:
    weights = _read(reader, fqn, None, None)
    if weights.dim() != 1 or not weights.is_floating_point():
        raise BadInputError(
            f"checkpoint: {fqn} is {dtype_name(weights)} {tuple(weights.shape)}, expected weights "
            f"of one dimension"
        )
    if not torch.isfinite(weights).all():
        raise BadInputError(f"checkpoint: {fqn} holds NaN or infinity")
    return weights.float().contiguous()
