"""The training that saves disturb: embedding tables with rowwise Adagrad, and a small dense part.

Plain torch, so that every peer can save it. Each rank holds its rows of every table; a step
looks up Zipf-distributed rows, reduces the dense gradient over the ranks, and updates.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

TABLES = 4
DIM = 64
SAMPLES = 512
LOOKUPS = 4  # of each table, by each sample
POOL = 64  # batches of ids, drawn before anything is timed, as a reader would
ZIPF_EXPONENT = 1.05
_PRIME = 2_654_435_761  # above any row count here: multiplying by it permutes the rows
_HIDDEN = 256


@dataclass
class State:
    """What a save has to store: `local` is this rank's memory, `sharded` the same as DTensors.

    The dense part is in both under the same names, as plain tensors that all ranks hold alike.
    """

    local: dict[str, torch.Tensor]
    sharded: dict[str, torch.Tensor]

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.local.values())

    def like(self) -> State:
        """A state of the same shapes in memory of its own, to restore into."""
        local = {n: torch.zeros_like(t) for n, t in self.local.items()}
        sharded = {}
        for name, tensor in self.sharded.items():
            if isinstance(tensor, DTensor):
                mesh, placements = tensor.device_mesh, tensor.placements
                sharded[name] = DTensor.from_local(local[name], mesh, placements, run_check=False)
            else:
                sharded[name] = local[name]
        return State(local, sharded)

    def copy_from(self, other: State) -> None:
        for name, tensor in self.local.items():
            tensor.copy_(other.local[name])

    def differing(self, other: State) -> dict[str, int]:
        """How many elements of which tensors differ, bit for bit; empty if none do."""
        found = {}
        for name, mine in self.local.items():
            bad = int((_bits(mine) != _bits(other.local[name])).sum())
            if bad:
                found[name] = bad
        return found


class Trainer:
    """Owns the state and changes it step by step. Collective: make one on every rank."""

    def __init__(self, total_bytes: int, mesh: DeviceMesh) -> None:
        rank, world = mesh.get_rank(), mesh.size()
        rows = max(SAMPLES, total_bytes // (TABLES * (DIM + 1) * 4 * world))
        random = torch.Generator().manual_seed(1000 + rank)
        self._world = world
        self._tables = [
            torch.empty(rows, DIM).uniform_(-0.05, 0.05, generator=random) for _ in range(TABLES)
        ]
        self._momenta = [torch.zeros(rows) for _ in range(TABLES)]
        torch.manual_seed(7)  # the dense part is the same on every rank
        self._dense = torch.nn.Sequential(
            torch.nn.Linear(TABLES * DIM, _HIDDEN),
            torch.nn.ReLU(),
            torch.nn.Linear(_HIDDEN, 1),
        )
        shape = (TABLES, SAMPLES * LOOKUPS)
        self._batches = [zipf_ids(rows, shape, random) for _ in range(POOL)]
        self._labels = torch.randint(0, 2, (SAMPLES,), generator=random).float()
        self._done = 0
        self.state = self._state(mesh)

    def _state(self, mesh: DeviceMesh) -> State:
        local = {f"tables.{n}.weight": t for n, t in enumerate(self._tables)}
        local |= {f"tables.{n}.momentum": t for n, t in enumerate(self._momenta)}
        sharded: dict[str, torch.Tensor] = {
            n: DTensor.from_local(t, mesh, [Shard(0)], run_check=False) for n, t in local.items()
        }
        dense = {f"dense.{n}": p.detach() for n, p in self._dense.named_parameters()}
        return State(local | dense, sharded | dense)

    def step(self, updating: Callable[[], AbstractContextManager[object]], *, ready: bool) -> bool:
        """One training step; True if every rank said that it is `ready`. Collective.

        updating: entered around all writes to the state, for checkpointers that ask for it.
        """
        ids = self._batches[self._done % POOL]
        self._done += 1
        looked_up = [t.index_select(0, i) for t, i in zip(self._tables, ids, strict=True)]
        pooled = torch.stack([e.view(SAMPLES, LOOKUPS, DIM).sum(1) for e in looked_up], 1)
        pooled.requires_grad_()
        logits = self._dense(pooled.view(SAMPLES, -1)).squeeze(1)
        torch.nn.functional.binary_cross_entropy_with_logits(logits, self._labels).backward()
        parameters = list(self._dense.parameters())
        # The flag travels with the gradient: ranks must agree on when to stop, at no extra cost.
        reduced = torch.cat([*(p.grad.view(-1) for p in parameters), torch.tensor([float(ready)])])
        dist.all_reduce(reduced)
        with updating(), torch.no_grad():
            at = 0
            for p in parameters:
                p.sub_(reduced[at : at + p.numel()].view_as(p), alpha=0.01 / self._world)
                at += p.numel()
                p.grad = None
            for n, rows in enumerate(ids):
                self._adagrad(n, rows, pooled.grad[:, n])
        return bool(reduced[-1] == self._world)

    def _adagrad(self, table: int, ids: torch.Tensor, grad: torch.Tensor) -> None:
        """Rowwise Adagrad on the looked-up rows, in place."""
        grad = grad.unsqueeze(1).expand(SAMPLES, LOOKUPS, DIM).reshape(-1, DIM)
        momentum = self._momenta[table].index_add_(0, ids, grad.pow(2).mean(1))
        scale = -0.05 / (momentum.index_select(0, ids).sqrt() + 1e-6)
        self._tables[table].index_add_(0, ids, grad * scale.unsqueeze(1))


def zipf_ids(rows: int, shape: tuple[int, ...], random: torch.Generator) -> torch.Tensor:
    """Row ids in [0, rows) of `shape`, Zipf-distributed, the popular ones spread over the table.

    Inverts the distribution function of the continuous law that the Zipf law discretises.
    """
    u = torch.rand(shape, generator=random, dtype=torch.float64)
    power = 1 - ZIPF_EXPONENT
    popularity = ((float(rows) ** power - 1) * u + 1).pow(1 / power).long().clamp_(1, rows) - 1
    return popularity * _PRIME % rows


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int32) if tensor.dtype is torch.float32 else tensor
