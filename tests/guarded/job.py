"""A small training job with every kind of state that a guarded snapshot treats in its own way."""

from __future__ import annotations

from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import Tensor, nn

BATCH = 8
FUSED = ((2500, 8), (700, 16))
WIDE = 1400  # the dense part with its state is more than 4 MiB, so that it is fenced


class Model(nn.Module):
    """Tables with sparse gradients, one of them tied, and a dense part with buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.users = nn.EmbeddingBag(3000, 16, sparse=True)
        self.items = nn.EmbeddingBag(2000, 8, sparse=True)
        self.again = nn.EmbeddingBag(2000, 8, sparse=True)
        self.again.weight = self.items.weight
        self.words = nn.Embedding(1500, 4, sparse=True)
        self.norm = nn.BatchNorm1d(16 + 16 + 8 + 8 + 4 + 8 + 16)
        self.top = nn.Sequential(
            nn.Linear(self.norm.num_features, 256), nn.ReLU(), nn.Linear(256, WIDE)
        )
        self.fixed = nn.Linear(4, 4)  # in no optimizer

    def forward(self, ids: Tensor, fused: Tensor) -> Tensor:
        parts = [
            self.users(ids % 3000),
            self.users((ids * 7 + 1) % 3000),
            self.items(ids % 2000),
            self.again((ids * 3) % 2000),
            self.words(ids[:, 0] % 1500),
            fused,
        ]
        out: Tensor = self.top(self.norm(torch.cat(parts, 1)))
        return out


class Job:
    """`state` is what is saved; `objects` what has to be guarded beside it."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = Model()
        self.fused: Any = SplitTableBatchedEmbeddingBagsCodegen(
            [(rows, dim, EmbeddingLocation.HOST, ComputeDevice.CPU) for rows, dim in FUSED],
            optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
            learning_rate=0.1,
        )
        self.fused.init_embedding_weights_uniform(-1, 1)
        m = self.model
        self.adam = torch.optim.Adam([*m.top.parameters(), *m.norm.parameters()])
        self.users = torch.optim.SparseAdam([m.users.weight])
        self.items = torch.optim.Adagrad([m.items.weight], lr=0.1)
        self.words = torch.optim.SGD([m.words.weight], lr=0.1)
        self.average = {n: p.detach().clone() for n, p in m.top.named_parameters()}
        self.progress = {"step": 0}
        self.objects = (self.fused,)

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        return [self.adam, self.users, self.items, self.words]

    @property
    def tables(self) -> list[Tensor]:
        """The weights of all tables."""
        m = self.model
        weights = [m.users.weight, m.items.weight, m.words.weight]
        return [*weights, *self.fused.split_embedding_weights()]

    @property
    def state(self) -> dict[str, Any]:
        weights = self.fused.split_embedding_weights()
        states = self.fused.split_optimizer_states()
        return {
            "model": self.model,
            "fused": {
                f"t{n}": {"weight": w.detach(), "momentum": s[0]}
                for n, (w, s) in enumerate(zip(weights, states, strict=True))
            },
            "adam": self.adam,
            "users": self.users,
            "items": self.items,
            "words": self.words,
            "average": self.average,
            "progress": self.progress,
        }

    def forward(self, seed: int) -> Tensor:
        g = torch.Generator().manual_seed(seed)
        ids = torch.randint(0, 1 << 20, (BATCH, 3), generator=g)
        offsets = torch.arange(0, 2 * BATCH * 3 + 1, 3)
        both = torch.cat([ids.flatten() % FUSED[0][0], (ids.flatten() * 5) % FUSED[1][0]])
        return self.model(ids, self.fused(both, offsets))

    def backward(self, out: Tensor) -> None:
        out.square().mean().mul(100).backward()

    def apply(self) -> None:
        """The optimizers' steps, and what a trainer does by hand after them."""
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            for name, parameter in self.model.top.named_parameters():
                self.average[name].lerp_(parameter, 0.1)
        self.progress["step"] += 1

    def step(self, seed: int) -> None:
        self.backward(self.forward(seed))
        self.apply()
