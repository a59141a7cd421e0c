"""Models of the kinds that people serve, each a small one; `request(batch, seed)` gives its arguments."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    KeyedTensor,
)
from torchrec.models.deepfm import SimpleDeepFMNN
from torchrec.models.dlrm import DLRM, DLRM_DCN, DLRM_Projection
from torchrec.modules.feature_processor_ import (
    PositionWeightedModule,
    PositionWeightedModuleCollection,
)
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.modules.mc_embedding_modules import (
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
)
from torchrec.modules.mc_modules import (
    DistanceLFU_EvictionPolicy,
    ManagedCollisionCollection,
    MCHManagedCollisionModule,
)
from torchrec.modules.regroup import KTRegroupAsDict

from tests.trainer.served_models import FEATURES, ROWS, bags, generator, ids

CPU = torch.device("cpu")
MOST_IDS = 5
"""More ids than any row of a request has."""


class Rankers(nn.Module):
    """TorchRec's own ranking models, all on one request."""

    def __init__(self) -> None:
        super().__init__()
        self.dlrm = DLRM(self._bags(), 5, [8], [1])
        self.dcn = DLRM_DCN(self._bags(), 5, [8], [1], dcn_num_layers=2, dcn_low_rank_dim=4)
        self.projection = DLRM_Projection(
            self._bags(),
            5,
            [8],
            [1],
            interaction_branch1_layer_sizes=[16],
            interaction_branch2_layer_sizes=[16],
        )
        self.deepfm = SimpleDeepFMNN(5, self._bags(), 16, 8)

    def _bags(self) -> EmbeddingBagCollection:
        return bags(FEATURES[:2], [8, 8])

    def forward(self, dense: Tensor, features: Any) -> dict[str, Tensor]:
        return {name: model(dense, features) for name, model in self.named_children()}

    @staticmethod
    def request(batch: int, seed: int = 0) -> tuple[Any, ...]:
        return torch.randn(batch, 5, generator=generator(seed)), ids(FEATURES[:2], batch, seed + 1)


class Towers(nn.Module):
    """One collection called for two arguments, whose features have the same names; MEAN."""

    def __init__(self) -> None:
        super().__init__()
        self.query = bags(["u", "ctx"], [8, 16], "q_", mean=True)
        self.item = bags(["item", "cat"], [8, 8], "i_")
        self.left, self.right = nn.Linear(24, 8), nn.Linear(16, 8)

    def forward(self, query: Any, item: Any, negative: Any) -> tuple[Tensor, Tensor]:
        q = self.left(self.query(query).values())
        return (
            (q * self.right(self.item(item).values())).sum(1),
            (q * self.right(self.item(negative).values())).sum(1),
        )

    @staticmethod
    def request(batch: int, seed: int = 0) -> tuple[Any, ...]:
        pair = ["item", "cat"]
        return (
            ids(["u", "ctx"], batch, seed),
            ids(pair, batch, seed + 1),
            ids(pair, batch, seed + 2),
        )


class Tasks(nn.Module):
    """Weighted ids, regrouping of two collections in both ways, tied weights, several heads."""

    def __init__(self) -> None:
        super().__init__()
        self.user = bags(["u1", "u2"], [8, 8], "u_", is_weighted=True)
        self.item = bags(["i1", "i2"], [8, 4], "i_")
        self.groups = [["u1", "i2"], ["i1", "u2"]]
        self.regroup = KTRegroupAsDict(self.groups, ["one", "two"])
        self.norm = nn.BatchNorm1d(3)
        self.one, self.two = nn.Linear(28 + 3, 8), nn.Linear(28 + 3, 8)
        self.two.weight = self.one.weight
        self.heads = nn.ModuleList(nn.Linear(8, 1) for _ in range(2))
        self.register_buffer("prior", torch.tensor([0.1, -0.2]), persistent=False)

    def forward(self, dense: Tensor, user: Any, item: Any) -> dict[str, Tensor]:
        pooled = [self.user(user), self.item(item)]
        plain = torch.cat([self.norm(dense), *KeyedTensor.regroup(pooled, self.groups)], 1)
        keyed = torch.cat([self.norm(dense), *self.regroup(pooled).values()], 1)
        return {
            "ctr": torch.sigmoid(self.heads[0](self.one(plain).relu()) + self.prior[0]),
            "cvr": self.heads[1](self.two(keyed).relu()) * torch.tensor(0.5),
        }

    @staticmethod
    def request(batch: int, seed: int = 0) -> tuple[Any, ...]:
        return (
            torch.randn(batch, 3, generator=generator(seed)),
            ids(["u1", "u2"], batch, seed + 1, weighted=True),
            ids(["i1", "i2"], batch, seed + 2),
        )


class Reader(nn.Module):
    """Reads ids, lengths and weights itself; splits and permutes them for two collections.

    Feature `a` is looked up in both, `b` in two tables of one. 32-bit ids.
    """

    def __init__(self) -> None:
        super().__init__()
        both = bags(["a", "b"], [8, 8], "x_").embedding_bag_configs()
        shared = EmbeddingBagConfig(
            name="s", embedding_dim=4, num_embeddings=ROWS, feature_names=["b", "c"]
        )
        self.first = EmbeddingBagCollection([*both, shared])
        self.second = bags(["c", "a"], [8, 8], "y_")
        self.over = nn.Linear(24 + 16 + 3 + 3, 1)

    def forward(self, features: Any) -> Tensor:
        front, back = features.split([2, 1])
        pooled = torch.cat(
            [
                self.first(features).values(),
                self.second(features.permute([2, 0])).values(),
            ],
            1,
        )
        counts = features.lengths().view(len(features.keys()), features.stride()).t().float()
        ids = front.to_dict()["b"].to_padded_dense(2).float().sum(1, keepdim=True) / ROWS
        weights = back["c"]
        first = torch.nn.functional.pad(weights.weights(), (0, 1))[weights.offsets()[:-1].long()]
        has = (features["a"].lengths() > 0).float()
        return self.over(torch.cat([pooled, counts.log1p(), ids, first[:, None], has[:, None]], 1))

    @staticmethod
    def request(batch: int, seed: int = 0) -> tuple[Any, ...]:
        given = ids(["a", "b", "c"], batch, seed, weighted=True)
        return (
            KeyedJaggedTensor(
                given.keys(), given.values().int(), given.weights(), given.lengths().int()
            ),
        )


@dataclass
class Visit:
    """What a page knows of a visit: an argument that pytree can open."""

    history: Any
    flags: dict[str, Tensor]
    extra: Tensor | None = None


torch.export.register_dataclass(Visit, serialized_type_name="tests.trainer.Visit")


class History(nn.Module):
    """Attention over a sequence whose target has exactly one id; nested, optional, bool and int arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.items = EmbeddingCollection(
            [
                EmbeddingConfig(
                    name="i", embedding_dim=8, num_embeddings=ROWS, feature_names=["seen", "target"]
                )
            ],
            need_indices=True,
        )
        self.over = nn.Linear(8 + 8 + 3, 1)

    def forward(self, visit: Visit, scale: float = 1.0) -> dict[str, Any]:
        found = self.items(visit.history)
        seen, target = found["seen"], found["target"]
        rows = seen.to_padded_dense(MOST_IDS)
        mask = torch.arange(MOST_IDS)[None] < seen.lengths()[:, None]
        score = (rows * target.values()[:, None]).sum(-1).masked_fill(~mask, -1e9).softmax(-1)
        pooled = (score[..., None] * rows * mask[..., None]).sum(1)
        odd = (target.weights() % 2).float()[:, None]
        flags = torch.stack([visit.flags["clicked"].float(), visit.flags["age"] / 10], 1)
        score = self.over(torch.cat([pooled, target.values(), odd, flags], 1)) * scale
        return {"score": score, "each": (seen.values().norm(dim=1),)}

    @staticmethod
    def request(batch: int, seed: int = 0) -> tuple[Any, ...]:
        g = generator(seed)
        lengths = torch.cat([torch.randint(0, 5, (batch,), generator=g), torch.ones(batch).long()])
        values = torch.randint(0, ROWS, (int(lengths.sum()),), generator=g)
        features = KeyedJaggedTensor(["seen", "target"], values, lengths=lengths)
        flags = {
            "clicked": torch.rand(batch, generator=g) > 0.5,
            "age": torch.randint(0, 99, (batch,), generator=g),
        }
        return Visit(features, flags), 0.5


class Everything(nn.Module):
    """All kinds of collections; it can be sharded too.

    Args:
        device: of the tables.
    """

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        on = torch.device(device)
        self.weighted = bags(["wa", "wb"], [8, 4], "w_", is_weighted=True, device=on)
        self.positions = FeatureProcessedEmbeddingBagCollection(
            bags(["pa", "pb"], [8, 8], "p_", is_weighted=True, device=on),
            PositionWeightedModuleCollection({"pa": MOST_IDS}, device=on),
        )
        self.each_position = FeatureProcessedEmbeddingBagCollection(
            bags(["ea"], [8], "e_", is_weighted=True, device=on),
            {"ea": PositionWeightedModule(MOST_IDS, device=on)},
        )
        self.sequence = EmbeddingCollection(
            [
                EmbeddingConfig(
                    name=f"s_{f}", embedding_dim=8, num_embeddings=ROWS, feature_names=[f]
                )
                for f in ("sa", "sb")
            ],
            device=on,
        )
        inner = bags(["ca", "cb"], [8, 8], "c_", device=on)
        self.collided = ManagedCollisionEmbeddingBagCollection(
            inner, collisions(inner.embedding_bag_configs())
        )
        rows = EmbeddingCollection(
            [EmbeddingConfig(name="m", embedding_dim=8, num_embeddings=ROWS, feature_names=["ma"])],
            device=on,
        )
        self.collided_rows = ManagedCollisionEmbeddingCollection(
            rows, collisions(rows.embedding_configs())
        )
        self.over = nn.Linear(12 + 16 + 8 + 16 + 16 + 8, 1)

    def forward(self, weighted: Any, plain: Any) -> Tensor:
        positions, each, sequence, collided, rows = plain.split([2, 1, 2, 2, 1])
        found = self.sequence(sequence)
        pooled = self.collided(collided)[0].to_dict()
        return self.over(
            torch.cat(
                [
                    *self.weighted(weighted).to_dict().values(),
                    *(self.positions(positions).to_dict()[f] for f in ("pa", "pb")),
                    self.each_position(each).values(),
                    *(found[f].to_padded_dense(3).sum(1) for f in ("sa", "sb")),
                    *(pooled[f] for f in ("ca", "cb")),
                    self.collided_rows(rows)[0]["ma"].to_padded_dense(3).sum(1),
                ],
                1,
            )
        ).squeeze(1)

    @staticmethod
    def request(batch: int, seed: int = 0) -> tuple[Any, ...]:
        plain = ids(["pa", "pb", "ea", "sa", "sb", "ca", "cb", "ma"], batch, seed + 1)
        values = plain.values().clone()
        begin = plain.offset_per_key()[5]
        # Raw ids far outside of the tables, on both sides of a shard's end, some of them negative.
        values[begin:] = (values[begin:] - 3) * (2**62 // 20) + 7
        return (
            ids(["wa", "wb"], batch, seed, weighted=True),
            KeyedJaggedTensor(plain.keys(), values, lengths=plain.lengths()),
        )


def collisions(configs: Any) -> ManagedCollisionCollection:
    modules = {
        c.name: MCHManagedCollisionModule(
            zch_size=c.num_embeddings,
            device=CPU,
            eviction_interval=1,
            eviction_policy=DistanceLFU_EvictionPolicy(),
        )
        for c in configs
    }
    return ManagedCollisionCollection(modules, configs)


def train(model: nn.Module, steps: int = 3) -> None:
    """Fill the collision maps as training does, and make every vector of weights its own."""
    model.train()
    with torch.no_grad():
        for step in range(steps):
            model(*Everything.request(8, seed=30 + step))
    _spread(model)


def fill(model: nn.Module) -> None:
    """As `train`, for a sharded model: TorchRec's eviction runs on GPUs only.

    Every second id of some requests gets a row, each in the shard that it belongs to.
    """
    for path, module in model.named_modules():
        if isinstance(module, MCHManagedCollisionModule):
            feature = {"c_ca": "ca", "c_cb": "cb", "m": "ma"}[path.rpartition(".")[2]]
            known = [Everything.request(8, seed)[1][feature].values() for seed in (0, 3, 30)]
            bounds = [b for b in module._output_segments_tensor.tolist() if b >= 0]
            size = -(-module.input_size() // (len(bounds) - 1))
            mine = [
                raw
                for raw in torch.cat(known).unique().tolist()[::2]
                if raw >= 0 and raw // size == bounds.index(module._output_global_offset)
            ][: module.output_size() - 1]
            module._mch_sorted_raw_ids[: len(mine)] = torch.tensor(mine)
            rows = module._mch_remapped_ids_mapping[: len(mine)]
            rows.copy_(rows.flip(0))
    _spread(model)


def _spread(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.copy_(torch.linspace(0.5, 1.5, len(parameter)))


ZOO = (Rankers, Towers, Tasks, Reader, History, Everything)
