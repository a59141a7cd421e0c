"""The training that saves disturb: embedding tables and a small dense part.

Each rank holds its rows of every table. A step looks up rows, reduces the dense gradient over
the ranks, and updates. Its state is plain tensors and DTensors, so that every peer can save it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from benchmarks.training.tables import Kind, Tables, fill, make_tables, own_storage, row_bytes

TABLES = 4
DIM = 32
SAMPLES = 512
LOOKUPS = 4  # of each table, by each sample
ZIPF_EXPONENT = 1.05
_PRIME = 2_654_435_761  # above any row count here: multiplying by it permutes the rows
_HIDDEN = 256

Ids = Literal["zipf", "uniform"]


@dataclass(frozen=True)
class Workload:
    """What is trained. total_bytes: tables of all ranks with their optimizer state."""

    total_bytes: int
    tables: Kind
    device: str = "cpu"
    ids: Ids = "zipf"


@dataclass
class State:
    """What a save has to store: `local` is this rank's memory, `sharded` the same as DTensors.

    `trained` are DTensors of the tensors that the trainer itself has: tables may be parts of one
    storage there, and each has its own in `local` and `sharded`. The dense part is in all of them
    under the same names, as plain tensors that all ranks hold alike.
    """

    local: dict[str, torch.Tensor]
    sharded: dict[str, torch.Tensor]
    trained: dict[str, torch.Tensor]

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
        return State(local, sharded, sharded)

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
    """Owns the state and changes it step by step. Collective: make one on every rank.

    ids: rows of the last step, shape (tables, lookups).
    """

    def __init__(self, workload: Workload) -> None:
        mesh = init_device_mesh(workload.device, (dist.get_world_size(),))
        rank, world = mesh.get_rank(), mesh.size()
        device = torch.device(workload.device, rank if workload.device == "cuda" else None)
        per_row = row_bytes(workload.tables, DIM)
        rows = max(SAMPLES, workload.total_bytes // (TABLES * per_row * world))
        random = torch.Generator().manual_seed(1000 + rank)
        self._world = world
        self._tables = make_tables(workload.tables, TABLES, rows, DIM, device)
        fill(self._tables.weights, torch.Generator(device).manual_seed(1000 + rank))
        torch.manual_seed(7)  # the dense part is the same on every rank
        self._dense = torch.nn.Sequential(
            torch.nn.Linear(TABLES * DIM, _HIDDEN),
            torch.nn.ReLU(),
            torch.nn.Linear(_HIDDEN, _HIDDEN),
            torch.nn.ReLU(),
            torch.nn.Linear(_HIDDEN, 1),
        ).to(device)
        self._optimizer = torch.optim.SGD(self._dense.parameters(), lr=0.01)
        shape = (TABLES, SAMPLES * LOOKUPS)
        draw = {"zipf": zipf_ids, "uniform": uniform_ids}[workload.ids]
        # New ones at each step: a pool that comes round again would touch the same few rows.
        self._draw = lambda: draw(rows, shape, random).to(device)
        self._offsets = torch.arange(0, SAMPLES * LOOKUPS, LOOKUPS, device=device)
        self._labels = torch.randint(0, 2, (SAMPLES,), generator=random).float().to(device)
        self.ids = self._draw()
        self.state = _state(self._tables, self._dense, mesh)
        self.guarded = (*self._tables.guarded, self._dense, self._optimizer)

    def step(self, updating: Callable[[], AbstractContextManager[object]], *, ready: bool) -> bool:
        """One training step; True if every rank said that it is `ready`. Collective.

        updating: entered around all writes to the state, for checkpointers that ask for it.
        """
        self.ids = self._draw()
        pooled = self._tables.lookup(self.ids, self._offsets)
        logits = self._dense(pooled).squeeze(1)
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, self._labels)
        with updating() if self._tables.updates_in_backward else nullcontext():
            loss.backward()
            everybody = self._reduce(ready=ready)
            with nullcontext() if self._tables.updates_in_backward else updating():
                self._optimizer.step()
                self._tables.update()
        self._optimizer.zero_grad()
        return everybody

    def _reduce(self, *, ready: bool) -> bool:
        """Sum the dense gradient over the ranks. True if every rank is `ready`.

        The flag travels with the gradient: ranks must agree on when to stop, at no extra cost.
        """
        grads = [p.grad for p in self._dense.parameters() if p.grad is not None]
        flag = torch.tensor([float(ready)], device=grads[0].device)
        reduced = torch.cat([*(g.view(-1) for g in grads), flag])
        dist.all_reduce(reduced)
        at = 0
        for grad in grads:
            grad.copy_(reduced[at : at + grad.numel()].view_as(grad)).div_(self._world)
            at += grad.numel()
        return bool(reduced[-1] == self._world)


def _state(tables: Tables, dense: torch.nn.Module, mesh: DeviceMesh) -> State:
    def as_dtensors(local: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {
            n: DTensor.from_local(t, mesh, [Shard(0)], run_check=False) for n, t in local.items()
        }

    live = {f"tables.{n}.weight": t for n, t in enumerate(tables.weights)}
    live |= {f"tables.{n}.momentum": t for n, t in enumerate(tables.momenta)}
    local = {n: own_storage(t) for n, t in live.items()}
    plain = {f"dense.{n}": p.detach() for n, p in dense.named_parameters()}
    return State(local | plain, as_dtensors(local) | plain, as_dtensors(live) | plain)


def zipf_ids(rows: int, shape: tuple[int, ...], random: torch.Generator) -> torch.Tensor:
    """Row ids in [0, rows) of `shape`, Zipf-distributed, the popular ones spread over the table.

    Inverts the distribution function of the continuous law that the Zipf law discretises.
    """
    u = torch.rand(shape, generator=random, dtype=torch.float64)
    power = 1 - ZIPF_EXPONENT
    popularity = ((float(rows) ** power - 1) * u + 1).pow(1 / power).long().clamp_(1, rows) - 1
    return popularity * _PRIME % rows


def uniform_ids(rows: int, shape: tuple[int, ...], random: torch.Generator) -> torch.Tensor:
    """Row ids in [0, rows) of `shape`, all alike: as few repeats as there can be."""
    return torch.randint(0, rows, shape, generator=random)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int32) if tensor.dtype is torch.float32 else tensor
