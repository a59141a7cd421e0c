"""A model with all kinds of collections, which can be sharded too."""

from typing import Any

import torch
from torch import Tensor, nn
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.modules.feature_processor_ import (
    PositionWeightedModule,
    PositionWeightedModuleCollection,
)
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.modules.mc_embedding_modules import (
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
)
from torchrec.modules.mc_modules import ManagedCollisionCollection, MCHManagedCollisionModule

from tests.trainer.served_models import ROWS, bags, ids, sorted_collision

MOST_IDS = 5
"""More ids than any row of a request has."""


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
    modules = {c.name: sorted_collision(c.num_embeddings) for c in configs}
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
