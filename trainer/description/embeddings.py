"""The embedding collections of a model, sharded or not: recognised, or refused by name."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from torch import nn
from torchrec.modules.embedding_modules import (
    EmbeddingBagCollectionInterface,
    EmbeddingCollectionInterface,
)
from torchrec.modules.object_pool import ObjectPool

from ckpt.errors import BadInputError

_ADVICE = (
    "a serving description holds EmbeddingBagCollections and EmbeddingCollections, with position "
    "weights and managed collision"
)


@dataclass(frozen=True)
class Embeddings:
    """One collection.

    path: in the model. module: what the model calls.
    pooled: an EmbeddingBagCollection, else an EmbeddingCollection.
    tables: what stands before `<table>.weight` in the model's state.
    weighted, need_indices: as TorchRec says it.
    processors: per-id weights by feature (FeatureProcessed...).
    collisions: table -> its managed collision module (ManagedCollision...), below `collisions_path`.
    """

    path: str
    module: nn.Module
    pooled: bool
    configs: tuple[Any, ...]
    tables: str
    weighted: bool
    need_indices: bool
    processors: Any = None
    collisions: Any = None

    @property
    def processors_path(self) -> str:
        return join(self.path, "_feature_processors")

    @property
    def collisions_path(self) -> str:
        return join(self.path, "_managed_collision_collection._managed_collision_modules")

    def outputs(self) -> dict[str, tuple[str, Any]]:
        """Name of each output -> (feature, table configuration)."""
        uses = Counter(f for c in self.configs for f in c.feature_names)
        return {
            (f if uses[f] == 1 else f"{f}@{c.name}"): (f, c)
            for c in self.configs
            for f in c.feature_names
        }


def join(*parts: str) -> str:
    return ".".join(filter(None, parts))


def embeddings_of(path: str, module: nn.Module) -> Embeddings | None:
    """The collection that `module` is, or None. BadInputError for one that can't be described."""
    kind = type(module).__name__
    refusal = _refusal(module, kind)
    if refusal:
        raise BadInputError(f"{path or 'the model'} ({kind}): {refusal}; {_ADVICE}")
    processors = collisions = None
    inner: Any = module
    inner_path = path
    if hasattr(module, "_managed_collision_collection"):
        collection: Any = module._managed_collision_collection
        collisions = collection._managed_collision_modules
        inner, inner_path = module._embedding_module, join(path, "_embedding_module")
        if module._return_remapped_features:
            raise BadInputError(
                f"{path or 'the model'} ({kind}): it returns the remapped ids, which can't be an input "
                f"of a program; build it with return_remapped_features=False"
            )
    elif hasattr(module, "_feature_processors") and hasattr(module, "_embedding_bag_collection"):
        processors = module._feature_processors
        inner = module._embedding_bag_collection
        inner_path = join(path, "_embedding_bag_collection")
    pooled = hasattr(inner, "_embedding_bag_configs")
    if not pooled and not (
        hasattr(inner, "_embedding_configs") and hasattr(inner, "_need_indices")
    ):
        return None
    return Embeddings(
        path=path,
        module=module,
        pooled=pooled,
        configs=tuple(inner._embedding_bag_configs if pooled else inner._embedding_configs),
        tables=join(inner_path, "embedding_bags" if pooled else "embeddings"),
        weighted=bool(getattr(inner, "_is_weighted", False)),
        need_indices=bool(getattr(inner, "_need_indices", False)),
        processors=processors,
        collisions=collisions,
    )


def _refusal(module: nn.Module, kind: str) -> str | None:
    """What is in the way, if this looks ids up in a way that can't be described."""
    origin = type(module).__module__
    if "ITEP" in kind:
        return "in-training embedding pruning"
    if origin.startswith("torchrec.quant") or kind.startswith("ShardedQuant"):
        return "quantised tables; describe the trained model, a publisher quantises"
    if kind.startswith("ShardedEmbeddingTower"):
        return "a sharded tower, which looks up inside itself"
    if isinstance(module, ObjectPool) or kind.startswith("PEC"):
        return "tables of another kind"
    interfaces = (EmbeddingBagCollectionInterface, EmbeddingCollectionInterface)
    if isinstance(module, interfaces) and not (
        hasattr(module, "_embedding_bag_configs") or hasattr(module, "_embedding_configs")
    ):
        return "a collection of an unknown kind"
    return None
