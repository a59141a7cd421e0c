"""Embedding tables with their optimizer, of the kinds whose rows a save can leave in place."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Literal, Protocol

import torch

Kind = Literal["torchrec", "plain", "plain-sgd"]
KINDS: tuple[Kind, ...] = ("torchrec", "plain", "plain-sgd")
LEARNING_RATE = 0.05


class Tables(Protocol):
    """Some tables that one call looks up in and one step trains.

    weights, momenta: live memory, one tensor a table; momenta may be empty.
    updates_in_backward: are the tables changed by backward() itself?
    guarded: what a checkpointer has to know to see which rows change.
    """

    weights: list[torch.Tensor]
    momenta: list[torch.Tensor]
    updates_in_backward: bool
    guarded: tuple[object, ...]

    def lookup(self, ids: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """Sums of rows, shape (samples, tables * dim). ids: (tables, lookups), offsets: (samples,)."""
        ...

    def update(self) -> None:
        """Change the looked-up rows, where backward() hasn't."""
        ...


class FusedTables:
    """TorchRec's table-batched embeddings with rowwise Adagrad inside of backward()."""

    updates_in_backward = True

    def __init__(self, count: int, rows: int, dim: int, device: torch.device) -> None:
        from fbgemm_gpu.split_embedding_configs import EmbOptimType
        from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
        from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
            ComputeDevice,
            SplitTableBatchedEmbeddingBagsCodegen,
        )

        on_gpu = device.type == "cuda"
        where = EmbeddingLocation.DEVICE if on_gpu else EmbeddingLocation.HOST
        runs_on = ComputeDevice.CUDA if on_gpu else ComputeDevice.CPU
        self._module = SplitTableBatchedEmbeddingBagsCodegen(
            [(rows, dim, where, runs_on)] * count,
            optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
            learning_rate=LEARNING_RATE,
            eps=1e-6,
            device=device,
        )
        self.weights = [w.detach() for w in self._module.split_embedding_weights()]
        self.momenta = [s[0].detach() for s in self._module.split_optimizer_states()]
        self.guarded: tuple[object, ...] = (self._module,)

    def lookup(self, ids: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        starts = torch.arange(len(ids), device=ids.device).unsqueeze(1) * ids.shape[1]
        ends = torch.full((1,), ids.numel(), device=ids.device)
        all_offsets = torch.cat([(starts + offsets).view(-1), ends])
        return self._module(ids.reshape(-1), all_offsets)

    def update(self) -> None:
        return


class PlainTables:
    """torch.nn.EmbeddingBag with sparse gradients, and torch.optim.Adagrad or SGD."""

    updates_in_backward = False

    def __init__(
        self, count: int, rows: int, dim: int, device: torch.device, *, adagrad: bool
    ) -> None:
        # Adagrad builds sparse tensors of its own and torch warns unless told whether to check them.
        torch.sparse.check_sparse_tensor_invariants.disable()
        self._bags = torch.nn.ModuleList(
            torch.nn.EmbeddingBag(
                *(rows, dim),
                mode="sum",
                sparse=True,
                _weight=torch.zeros(rows, dim, device=device),
            )
            for _ in range(count)
        )
        parameters = list(self._bags.parameters())
        self._optimizer: torch.optim.Optimizer = (
            torch.optim.Adagrad(parameters, lr=LEARNING_RATE)
            if adagrad
            else torch.optim.SGD(parameters, lr=LEARNING_RATE)
        )
        self.weights = [p.detach() for p in parameters]
        self.momenta = [self._optimizer.state[p]["sum"] for p in parameters] if adagrad else []
        self.guarded: tuple[object, ...] = (self._bags, self._optimizer)

    def lookup(self, ids: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        return torch.cat([b(i, offsets) for b, i in zip(self._bags, ids, strict=True)], 1)

    def update(self) -> None:
        self._optimizer.step()
        self._optimizer.zero_grad()


def own_storage(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as a tensor that starts its storage, where that can be had.

    Fused tables are views at offsets of one storage. dcp.async_save can't stage a DTensor of such
    a view (torch 2.13: "copy_() on an invalid python storage"), and would copy them all for each.
    """
    tensor = tensor.detach()
    if tensor.is_cuda:
        return tensor
    a = tensor.storage_offset() * tensor.itemsize
    memory = tensor.untyped_storage()[a : a + tensor.nbytes]
    own = torch.empty(0, dtype=tensor.dtype, device="cpu")
    return own.set_(memory, 0, tensor.shape, tensor.stride())  # type: ignore[call-overload, no-any-return]


def best_kind(device: str) -> Kind:
    """What TorchRec users train where it is installed; on CUDA the variant that needs nothing."""
    return "torchrec" if device == "cpu" and has_torchrec() else "plain"


def has_torchrec() -> bool:
    return importlib.util.find_spec("torchrec") is not None


def row_bytes(kind: Kind, dim: int) -> int:
    """Bytes of a row with its optimizer state."""
    return 4 * {"torchrec": dim + 1, "plain": 2 * dim, "plain-sgd": dim}[kind]


def make_tables(kind: Kind, count: int, rows: int, dim: int, device: torch.device) -> Tables:
    if kind == "torchrec":
        return FusedTables(count, rows, dim, device)
    return PlainTables(count, rows, dim, device, adagrad=kind == "plain")


def fill(tensors: Sequence[torch.Tensor], random: torch.Generator) -> None:
    """Start values as tables have them: small, around zero."""
    for tensor in tensors:
        tensor.uniform_(-0.05, 0.05, generator=random)
