"""Managed collision in the schema: which buffers of the model map raw ids to rows, and how."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from torchrec.modules.mc_modules import MCHManagedCollisionModule

from ckpt.errors import BadInputError
from ckpt.schema import CollisionSpec
from trainer.description.embeddings import Embeddings
from trainer.description.lookups import collision_name

_RAW = "_mch_sorted_raw_ids"
_ROWS = "_mch_remapped_ids_mapping"


def collisions_of(
    found: Sequence[Embeddings], prefix: str, checkpoint_keys: Collection[str]
) -> list[CollisionSpec]:
    """One for each table behind a managed collision. BadInputError names a table that can't be described."""
    specs = []
    for embeddings in found:
        for table, module in (embeddings.collisions or {}).items():
            path = f"{prefix}{embeddings.collisions_path}.{table}"
            specs.append(_spec(collision_name(embeddings, table), path, module))
            for fqn in (specs[-1].raw_ids_fqn, specs[-1].rows_fqn):
                if fqn not in checkpoint_keys:
                    raise BadInputError(
                        f"a checkpoint of this state has no {fqn}; save the collection's buffers"
                    )
    return specs


def _spec(name: str, path: str, module: Any) -> CollisionSpec:
    if type(module) is not MCHManagedCollisionModule:
        raise BadInputError(
            f"{name}: managed collision by {type(module).__name__}; only MCHManagedCollisionModule can "
            f"be described"
        )
    if module._input_hash_func is not None:
        raise BadInputError(
            f"{name}: its ids are hashed by an input_hash_func, which a publisher can't run; hash them in "
            f"the input pipeline (ckpt.idmaps.hashed) and describe that in id_maps"
        )
    # Where each block's rows begin, and the end; -1 fills the buffer. Sharded, a block is a shard.
    bounds = [b for b in module._output_segments_tensor.tolist() if b >= 0]
    blocks = len(bounds) - 1
    if blocks > 1 and (module.buckets() != blocks or module.input_size() < blocks):
        raise BadInputError(
            f"{name}: {module.buckets()} buckets and raw ids below {module.input_size()} over {blocks} "
            f"shards; give as many buckets as shards, and an input_hash_size above 0"
        )
    return CollisionSpec(
        name=name,
        raw_ids_fqn=f"{path}.{_RAW}",
        rows_fqn=f"{path}.{_ROWS}",
        size=bounds[-1] - bounds[0],
        block=-(-module.input_size() // blocks) if blocks > 1 else 0,
        unknown_rows=tuple(end - 1 for end in bounds[1:]),
    )
