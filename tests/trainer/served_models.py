"""Small models for the exporter's tests, and some that can't be described."""

import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    JaggedTensor,
    KeyedJaggedTensor,
    KeyedTensor,
    PoolingType,
)

FEATURES = ["a", "b", "c", "d"]
ROWS = 40


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def bags(
    features: list[str], dims: list[int], prefix: str = "t_", *, mean: bool = False, **options: Any
) -> EmbeddingBagCollection:
    return EmbeddingBagCollection(
        [
            EmbeddingBagConfig(
                name=f"{prefix}{feature}",
                embedding_dim=dim,
                num_embeddings=ROWS + 8 * n,
                feature_names=[feature],
                pooling=PoolingType.MEAN if mean else PoolingType.SUM,
            )
            for n, (feature, dim) in enumerate(zip(features, dims, strict=True))
        ],
        **options,
    )


def ids(features: list[str], batch: int, seed: int, *, weighted: bool = False) -> Any:
    g = generator(seed)
    lengths = torch.randint(0, 5, (len(features) * batch,), generator=g)
    values = torch.randint(0, ROWS, (int(lengths.sum()),), generator=g)
    weights = torch.rand(len(values), generator=g) if weighted else None
    return KeyedJaggedTensor(keys=features, values=values, lengths=lengths, weights=weights)


class Ranker(nn.Module):
    """One collection, one dense input."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        self.bags = bags(FEATURES, [8, 8, 8, 8], device=torch.device(device))
        self.over = nn.Sequential(nn.Linear(4 * 8 + 3, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, dense: Tensor, features: Any) -> Tensor:
        pooled = self.bags(features).to_dict()
        return self.over(torch.cat([dense, *(pooled[f] for f in FEATURES)], 1)).squeeze(-1)

    @staticmethod
    def request(batch: int, seed: int = 0) -> tuple[Any, ...]:
        return torch.randn(batch, 3, generator=generator(seed)), ids(FEATURES, batch, seed + 1)


class TwoTower(nn.Module):
    """Two collections, one of them called twice; MEAN pooling; dims that differ; a dict of outputs."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        self.query = bags(["u", "ctx"], [8, 16], "q_", mean=True, device=torch.device(device))
        self.item = bags(["item", "cat"], [8, 8], "i_", device=torch.device(device))
        self.left, self.right = nn.Linear(24, 8), nn.Linear(16, 8)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, query: Any, items: Any) -> dict[str, Tensor]:
        q = self.left(self.query(query).values())
        first, second = items.split([2, 2])
        p = self.right(self.item(first).values())
        swapped = KeyedTensor.regroup([self.item(first)], [["cat", "item"]])[0]
        del second
        return {"match": (q * p).sum(1) * self.scale, "norm": swapped.norm(dim=1)}

    @staticmethod
    def request(batch: int, seed: int = 0) -> tuple[Any, ...]:
        return (
            ids(["u", "ctx"], batch, seed),
            ids(["item", "cat", "spare1", "spare2"], batch, seed + 1),
        )


class MultiTask(nn.Module):
    """BatchNorm, tied weights, a buffer that isn't saved, tensors made in forward, an unused input."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        self.bags = bags(FEATURES, [8, 8, 4, 4], device=torch.device(device))
        self.norm = nn.BatchNorm1d(3)
        self.one, self.two = nn.Linear(27, 27), nn.Linear(27, 27)
        self.two.weight = self.one.weight
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(27, 2)
        self.register_buffer("prior", torch.tensor([0.1, -0.2]), persistent=False)
        self.shift = torch.full((2,), 0.25)

    def forward(self, dense: Tensor, unused: Tensor, features: Any) -> tuple[Tensor, Tensor]:
        x = torch.cat([self.norm(dense), self.bags(features).values()], 1)
        x = self.drop(self.two(self.one(x).relu()))
        y = self.head(x) * torch.tensor([1.0, 0.5]) + self.prior + self.shift
        return y[:, 0], torch.sigmoid(y)

    @staticmethod
    def request(batch: int, seed: int = 0) -> tuple[Any, ...]:
        dense = torch.randn(batch, 3, generator=generator(seed))
        return dense, dense * 2, ids(FEATURES, batch, seed + 1)


class Refused(nn.Module):
    """Base of models over features a and b that can't be described."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        self.bags = bags(["a", "b"], [8, 8], device=torch.device(device))
        self.head = nn.Linear(16, 1)

    def forward(self, features: Any) -> Tensor:
        return self.head(self.bags(features).values())

    @staticmethod
    def request(batch: int, seed: int = 0) -> tuple[Any, ...]:
        return (ids(["a", "b"], batch, seed),)


class Rewrites(Refused):
    def forward(self, features: Any) -> Tensor:
        values = features.values() * 31 % ROWS
        hashed = KeyedJaggedTensor(features.keys(), values, lengths=features.lengths())
        return super().forward(hashed)


class RewritesLargeIds(Refused):
    """Its golden request has small ids, on which nothing of what it does can be seen."""

    def rewritten(self, features: Any) -> Any:
        values = features.values() % 10
        return KeyedJaggedTensor(features.keys(), values, lengths=features.lengths())

    def forward(self, features: Any) -> Tensor:
        return super().forward(self.rewritten(features))

    @staticmethod
    def request(batch: int, seed: int = 0) -> tuple[Any, ...]:
        given = ids(["a", "b"], batch, seed)
        return (KeyedJaggedTensor(given.keys(), given.values() % 10, lengths=given.lengths()),)


class ClampsIds(RewritesLargeIds):
    def rewritten(self, features: Any) -> Any:
        a, b = features["a"], features["b"]
        values = torch.cat([a.values(), b.values().clamp(max=9)])
        return KeyedJaggedTensor(features.keys(), values, lengths=features.lengths())


class CutsRows(RewritesLargeIds):
    """Looks up the first five ids of each row; the golden request has no longer rows."""

    def rewritten(self, features: Any) -> Any:
        lengths = features.lengths().clamp(max=5)
        dense = [features[key].to_padded_dense(5).long() for key in ("a", "b")]
        kept = torch.arange(5)[None] < lengths[:, None]
        return KeyedJaggedTensor(features.keys(), torch.cat(dense)[kept], lengths=lengths)


class CutsPositions(RewritesLargeIds):
    """ClampsIds, before a collection with position weights."""

    def __init__(self) -> None:
        from torchrec.modules.feature_processor_ import PositionWeightedModuleCollection
        from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection

        super().__init__()
        self.bags = FeatureProcessedEmbeddingBagCollection(
            bags(["a", "b"], [8, 8], is_weighted=True),
            PositionWeightedModuleCollection({"a": 5, "b": 5}),
        )


class SquaresWeights(RewritesLargeIds):
    """All weights of its golden request are 1."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = bags(["a", "b"], [8, 8], is_weighted=True)

    def rewritten(self, features: Any) -> Any:
        weights = features.weights() * features.weights()
        return KeyedJaggedTensor(features.keys(), features.values(), weights, features.lengths())

    @staticmethod
    def request(batch: int, seed: int = 0) -> tuple[Any, ...]:
        given = ids(["a", "b"], batch, seed)
        ones = torch.ones(len(given.values()))
        return (KeyedJaggedTensor(given.keys(), given.values(), ones, given.lengths()),)


class PassesOn(SquaresWeights):
    """Changes nothing: renames and permutes features, and indexes tensors of its own by their ids."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Embedding(ROWS, 16)

    def forward(self, features: Any) -> Tensor:
        swapped = features.permute([1, 0])
        renamed = KeyedJaggedTensor(
            ["a", "b"], swapped.values() * 1, swapped.weights() * 1, swapped.lengths()
        )
        one = features["a"].to_padded_dense(2)[:, :1].long()
        seen = self.own(one).sum(1) + nn.functional.one_hot(one[:, 0], ROWS).sum(1, keepdim=True)
        return self.head(self.bags(renamed).values() + seen)


class Branches(Refused):
    def forward(self, features: Any) -> Tensor:
        pooled = self.bags(features).values()
        return self.head(pooled) if pooled.sum() > 0 else -self.head(pooled)


class Random(Refused):
    def forward(self, features: Any) -> Tensor:
        return nn.functional.dropout(super().forward(features), 0.5, training=True)


class FixedBatch(Refused):
    def forward(self, features: Any) -> Tensor:
        return super().forward(features) + torch.ones(16, 1)


class NoCollection(Refused):
    def __init__(self) -> None:
        super().__init__()
        del self.bags

    def forward(self, features: Any) -> Tensor:
        return self.head(torch.zeros(features.stride(), 16))


class ThreeIds(Refused):
    """Takes every row to have exactly three ids."""

    def forward(self, features: Any) -> Tensor:
        three = features["a"].values().view(features.stride(), 3)
        return super().forward(features) + three.sum(1, keepdim=True)

    @staticmethod
    def request(batch: int, seed: int = 0) -> tuple[Any, ...]:
        values = torch.randint(0, ROWS, (6 * batch,), generator=generator(seed))
        return (KeyedJaggedTensor(["a", "b"], values, lengths=torch.full((2 * batch,), 3)),)


class ComputesWeights(Refused):
    def __init__(self) -> None:
        super().__init__()
        self.bags = bags(["a", "b"], [8, 8], is_weighted=True)

    def forward(self, features: Any) -> Tensor:
        weights = torch.arange(len(features.values())).float()
        return super().forward(
            KeyedJaggedTensor(features.keys(), features.values(), weights, features.lengths())
        )


class NotCalled(Refused):
    def __init__(self) -> None:
        super().__init__()
        self.spare = bags(["a"], [8], "s_")


class LongestRow(Refused):
    def forward(self, features: Any) -> Tensor:
        longest = int(features["a"].lengths().max())
        return super().forward(features) + features["a"].to_padded_dense(longest).sum()


class Fails(Refused):
    def forward(self, features: Any) -> Tensor:
        raise RuntimeError("no such thing")


class VariableStride(Refused):
    @staticmethod
    def request(batch: int, seed: int = 0) -> tuple[Any, ...]:
        features = KeyedJaggedTensor(
            ["a", "b"],
            torch.arange(5),
            lengths=torch.ones(5).long(),
            stride_per_key_per_rank=[[2], [3]],
        )
        return (features,)


class OtherBatch(Refused):
    def forward(self, features: Any, table: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(features) + table.sum()

    @staticmethod
    def request(batch: int, seed: int = 0) -> tuple[Any, ...]:
        return ids(["a", "b"], batch, seed), torch.ones(3)


class Opaque(OtherBatch):
    @staticmethod
    def request(batch: int, seed: int = 0) -> tuple[Any, ...]:
        return ids(["a", "b"], batch, seed), object()


class EqualIds(Refused):
    def forward(self, features: Any) -> Tensor:
        renamed = KeyedJaggedTensor(["b", "a"], features.values(), lengths=features.lengths())
        return super().forward(renamed)

    @staticmethod
    def request(batch: int, seed: int = 0) -> tuple[Any, ...]:
        lengths, values = torch.ones(2 * batch).long(), torch.arange(batch).repeat(2)
        return (KeyedJaggedTensor(["x", "y"], values, lengths=lengths),)


class OtherProcessor(Refused):
    def __init__(self) -> None:
        from torchrec.modules.feature_processor_ import FeatureProcessor
        from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection

        class Doubles(FeatureProcessor):
            def forward(self, features: Any) -> Any:
                two = torch.full((len(features.values()),), 2.0)
                return JaggedTensor(features.values(), two, features.lengths())

        super().__init__()
        self.bags = FeatureProcessedEmbeddingBagCollection(
            bags(["a", "b"], [8, 8], is_weighted=True), {f: Doubles() for f in ("a", "b")}
        )


class Collides(Refused):
    """Managed collision, with `module` in place of the one that can be described."""

    def __init__(self, make: Any, **options: Any) -> None:
        from torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingBagCollection
        from torchrec.modules.mc_modules import ManagedCollisionCollection

        super().__init__()
        inner = bags(["a", "b"], [8, 8])
        configs = inner.embedding_bag_configs()
        self.bags = ManagedCollisionEmbeddingBagCollection(
            inner,
            ManagedCollisionCollection({c.name: make(c.num_embeddings) for c in configs}, configs),
            **options,
        )

    def forward(self, features: Any) -> Tensor:
        return self.head(self.bags(features)[0].values())


def sorted_collision(rows: int, **options: Any) -> Any:
    from torchrec.modules.mc_modules import DistanceLFU_EvictionPolicy, MCHManagedCollisionModule

    return MCHManagedCollisionModule(
        zch_size=rows,
        device=torch.device("cpu"),
        eviction_interval=1,
        eviction_policy=DistanceLFU_EvictionPolicy(),
        **options,
    )


def shifted_collision(rows: int) -> Any:
    """Gives unknown ids another row than its state says."""
    module = sorted_collision(rows)
    module._output_global_offset = -1
    return module


def probing_collision(rows: int) -> Any:
    with warnings.catch_warnings(
        action="ignore"
    ):  # of torch.jit and tensor copies, inside TorchRec
        from torchrec.modules.hash_mc_modules import HashZchManagedCollisionModule

        return HashZchManagedCollisionModule(
            zch_size=rows, device=torch.device("cpu"), total_num_buckets=1
        )
