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
from torchrec.modules.regroup import KTRegroupAsDict

from tests.trainer.served_everything import MOST_IDS, Everything
from tests.trainer.served_models import FEATURES, ROWS, bags, generator, ids


class Rankers(nn.Module):
    """TorchRec's own ranking models, all on one request."""

    def __init__(self) -> None:
        super().__init__()
        self.dlrm = DLRM(self._bags(), 5, [8], [4, 1])
        self.dcn = DLRM_DCN(self._bags(), 5, [8], [4, 1], dcn_num_layers=2, dcn_low_rank_dim=4)
        self.projection = DLRM_Projection(
            self._bags(),
            5,
            [8],
            [4, 1],
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


ZOO = (Rankers, Towers, Tasks, Reader, History, Everything)
