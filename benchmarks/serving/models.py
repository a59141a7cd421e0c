"""TorchRec models whose checkpoints are published: a DLRM of any size, and one that stamps its answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.models.dlrm import DLRM

from ckpt import CheckpointConfig, Checkpointer
from ckpt.config import trust_file
from ckpt.storage import open_storage
from ckpt.trust import TrustList
from trainer.description import ServedModel, export_description

TABLES, DIM, DENSE = 8, 64, 13
FEATURES = [f"f{n}" for n in range(TABLES)]
IDS_PER_BAG = 5
STAMPED_ROWS = 1000


class Ranker(nn.Module):
    """A DLRM of eight tables, as the serving figures of others have it."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.rows = rows
        tables = [
            EmbeddingBagConfig(
                name=f"t_{f}", embedding_dim=DIM, num_embeddings=rows, feature_names=[f]
            )
            for f in FEATURES
        ]
        self.dlrm = DLRM(EmbeddingBagCollection(tables), DENSE, [512, 256, DIM], [512, 256, 1])

    def forward(self, dense: Tensor, features: Any) -> Tensor:
        score: Tensor = torch.sigmoid(self.dlrm(dense, features)).squeeze(-1)
        return score

    def request(self, batch: int, seed: int = 0) -> tuple[Any, ...]:
        return _request(FEATURES, self.rows, batch, seed)


class Stamped(nn.Module):
    """Every weight holds one number, the stamp, and the answers give it back: from the table, from the
    dense part, and from both. So an answer that mixes two versions shows it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.rows = STAMPED_ROWS
        table = EmbeddingBagConfig(
            name="t_f0", embedding_dim=DIM, num_embeddings=STAMPED_ROWS, feature_names=["f0"]
        )
        self.bags = EmbeddingBagCollection([table])
        self.dense = nn.Linear(DENSE, 1)

    def forward(self, dense: Tensor, features: Any) -> dict[str, Tensor]:
        of_table = self.bags(features).values()[:, 0]
        of_dense = self.dense.bias + 0 * self.dense(dense)[:, 0]
        return {"table": of_table + 0, "dense": of_dense, "both": of_table + of_dense}

    def stamp(self, number: float) -> None:
        with torch.no_grad():
            for p in self.parameters():
                p.fill_(number)

    def request(self, batch: int, seed: int = 0) -> tuple[Any, ...]:
        """One id for each row, so that its pooled vector is the stamp itself."""
        return _request(["f0"], self.rows, batch, seed, one=True)


class Root:
    """A run whose commits are of one model.

    Args:
        root: where the run is kept.
        model: a Ranker or a Stamped.
    """

    def __init__(self, root: Path, model: Any) -> None:
        self.model = model
        self._state = {"model": model}
        served = ServedModel(
            name="benchmark",
            module=model,
            args=model.request(8),
            prefix="model.",
            checkpoint_keys={f"model.{name}" for name in model.state_dict()},
        )
        description = export_description(served, open_storage(str(root)), TrustList(trust_file()))
        self._checkpointer = Checkpointer(
            str(root),
            CheckpointConfig(persist_target_s=0.1),
            annotations={"serving_description": description},
        )
        self._checkpointer.restore(self._state)

    def commit(self, step: int) -> None:
        """Save, and wait for the commit."""
        self._checkpointer.save(step, self._state).committed.result()

    def close(self) -> None:
        self._checkpointer.close()


def request_tensors(args: tuple[Any, ...]) -> dict[str, Tensor]:
    """The model's arguments as a request of a published version."""
    dense, features = args
    out = {"dense": dense}
    for name, jagged in features.to_dict().items():
        out[f"{name}.values"] = jagged.values().long()
        out[f"{name}.lengths"] = jagged.lengths().long()
    return out


def _request(
    features: list[str], rows: int, batch: int, seed: int, *, one: bool = False
) -> tuple[Any, ...]:
    g = torch.Generator().manual_seed(seed)
    most = 1 if one else 2 * IDS_PER_BAG
    lengths = torch.randint(int(one), most + 1, (len(features) * batch,), generator=g)
    values = torch.randint(0, rows, (int(lengths.sum()),), generator=g)
    kjt = KeyedJaggedTensor.from_lengths_sync(features, values, lengths)
    return torch.randn(batch, DENSE, generator=g), kjt
