"""`walk_ranks.py ROOT SEED LIVES`: random lives of a job, beside a model of what must come back.

Each life has another number of ranks, another sharding, another order of layers, and may lose records of its
root or bytes of its newest checkpoint before it begins, and saves while it lives. The model is a dict.
"""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor, init_from_local_shards
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.distributed.tensor import Shard as ShardOf

from ckpt import Checkpointer, PerRank
from ckpt.errors import StorageError
from ckpt.events import ListSink
from ckpt.storage.local import LocalStorage
from tests.distributed.launch import join, leave
from tests.faults import FaultyStorage

WORLD = 3
SHAPES = {"t0": (7, 4), "t1": (2, 6), "t2": (11, 3)}
LAYERS = ("a", "b", "c")
LAYOUTS = ("row", "column", "table", "dtensor", "replicated")
NOBODY: dict[str, Any] = {"rank": -1, "step": 0, "set": []}
NO_ROOM = StorageError("no room")


@dataclass
class Truth:
    """All that a checkpoint holds, whole, the same on every rank."""

    step: int = 0
    tables: dict[str, torch.Tensor] = field(default_factory=dict)
    dense: dict[str, torch.Tensor] = field(default_factory=dict)
    moments: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    own: dict[int, Any] = field(default_factory=dict)
    world: int = 0


class Life:
    """The live objects of one life of the job on this rank."""

    def __init__(self, rank: int, world: int, group: Any, dice: random.Random) -> None:
        self.rank, self.world, self._group = rank, world, group
        self.layouts = {t: dice.choice(LAYOUTS) for t in SHAPES}
        order = dice.sample(LAYERS, len(LAYERS))
        self.groups = [order] if dice.random() < 0.5 else [order[:1], order[1:]]
        self.model = nn.ModuleDict({n: nn.Linear(3, 3) for n in dice.sample(LAYERS, len(LAYERS))})
        self.optimizer = torch.optim.Adam(
            [{"params": list(self.model[n].parameters())} for n in order], lr=0.1
        )
        self.tables = {t: self._empty(t) for t in SHAPES}
        self.progress = {"step": 0, "note": ""}
        self.own: PerRank = PerRank(dict(NOBODY))
        self.state: dict[str, Any] = {
            "optimizer": self.optimizer,
            "model": self.model,
            "tables": self.tables,
            "progress": self.progress,
            "own": self.own,
        }

    def _boxes(self, t: str) -> list[tuple[list[int], list[int]]]:
        rows, cols = SHAPES[t]
        cut = lambda n, i: n * i // self.world  # noqa: E731
        if self.layouts[t] == "row":
            a, b = cut(rows, self.rank), cut(rows, self.rank + 1)
            return [([a, 0], [b - a, cols])]
        if self.layouts[t] == "column":
            a, b = cut(cols, self.rank), cut(cols, self.rank + 1)
            return [([0, a], [rows, b - a])]
        return [([0, 0], [rows, cols])] if self.rank == self.world - 1 else []

    def _empty(self, t: str) -> Any:
        nan = torch.full(SHAPES[t], float("nan"))
        if self.layouts[t] == "replicated":
            return nan
        if self.layouts[t] == "dtensor":
            mesh = DeviceMesh.from_group(self._group, "cpu")
            return distribute_tensor(nan, mesh, [ShardOf(0) if self.world > 1 else Replicate()])
        shards = [
            Shard.from_tensor_and_offsets(torch.full(n, float("nan")), o, self.rank)
            for o, n in self._boxes(t)
        ]
        return init_from_local_shards(shards, *SHAPES[t], process_group=self._group)

    def parts(self, t: str) -> list[tuple[torch.Tensor, tuple[slice, ...]]]:
        """(live memory, where it is in the whole) of a table's parts on this rank."""
        value = self.tables[t]
        if isinstance(value, ShardedTensor):
            return [
                (s.tensor, tuple(slice(o, o + n) for o, n in zip(*_place(s), strict=True)))
                for s in value.local_shards()
            ]
        if self.layouts[t] == "dtensor" and self.world > 1:
            rows = SHAPES[t][0]
            most = -(-rows // self.world)
            return [
                (value.to_local(), (slice(min(rows, most * self.rank), most * (self.rank + 1)),))
            ]
        local = value.to_local() if self.layouts[t] == "dtensor" else value
        return [(local, (slice(None),))]

    def train(self, truth: Truth, dice: random.Random) -> Truth:
        """Make this life's objects hold the next state; the model has the same, whole."""
        g = torch.Generator().manual_seed(dice.randrange(1 << 30))
        now = Truth(truth.step + dice.randrange(1, 4), world=self.world)
        for t, shape in SHAPES.items():
            now.tables[t] = torch.randn(shape, generator=g)
            for live, at in self.parts(t):
                live.copy_(now.tables[t][at])
        for _, p in sorted(self.model.named_parameters()):
            p.grad = torch.randn(p.shape, generator=g)
        self.optimizer.step()
        now.dense = {n: p.detach().clone() for n, p in self.model.named_parameters()}
        now.moments = self.moments()
        now.own = {r: {"rank": r, "step": now.step, "set": [r] * r} for r in range(self.world)}
        self.own.value = now.own[self.rank]
        self.progress |= {"step": now.step, "note": f"after {now.step}"}
        return now

    def moments(self) -> dict[str, dict[str, torch.Tensor]]:
        return {
            n: {k: v.detach().clone() for k, v in self.optimizer.state[p].items()}
            for n, p in self.model.named_parameters()
            if p in self.optimizer.state
        }

    def check(self, truth: Truth) -> None:
        assert self.progress == {"step": truth.step, "note": f"after {truth.step}"}, self.progress
        for t in SHAPES:
            for live, at in self.parts(t):
                assert torch.equal(live, truth.tables[t][at]), (t, self.layouts[t])
        for n, p in self.model.named_parameters():
            assert torch.equal(p, truth.dense[n]), n
        moments = self.moments()
        assert moments.keys() == truth.moments.keys()
        for n, state in moments.items():
            assert all(torch.equal(v, truth.moments[n][k]) for k, v in state.items()), n
        mine = truth.own[self.rank] if self.world == truth.world else NOBODY
        assert self.own.value == mine, (self.own.value, mine)


def _place(shard: Any) -> tuple[list[int], list[int]]:
    return shard.metadata.shard_offsets, shard.metadata.shard_sizes


class Walk:
    """The lives one after the other, and the checkpoints that the model says there are."""

    def __init__(self, root: str, rank: int, seed: int) -> None:
        self._root, self._rank = Path(root), rank
        self._dice = random.Random(seed)
        self._groups = {w: dist.new_group(list(range(w))) for w in range(1, WORLD + 1)}
        self._commits: list[Truth] = []
        self.told: list[str] = []

    def live(self, number: int) -> None:
        dice = self._dice
        world = dice.randrange(1, WORLD + 1)
        lost = dice.choice(("", "", "attempts", "newest attempt", "run", "bytes"))
        if self._rank == 0:
            self._lose(lost)
        if lost == "bytes" and len(self._commits) > 1:
            self._commits.pop()
        dist.barrier()
        own = random.Random(dice.randrange(1 << 30))  # ranks outside of this life draw as many
        saves = [(own.random() < 0.3, own.randrange(world)) for _ in range(own.randrange(1, 4))]
        if self._rank < world:
            self._lived(number, world, own, saves, lost)
        else:
            self._followed(saves)
        dist.barrier()
        self._share()
        self.told.append(f"{number}: {world} ranks, lost {lost or 'nothing'}, {saves}")

    def _lived(
        self,
        number: int,
        world: int,
        dice: random.Random,
        saves: list[tuple[bool, int]],
        lost: str,
    ) -> None:
        life = Life(self._rank, world, self._groups[world], dice)
        faulty = FaultyStorage(LocalStorage(self._root))
        store = dist.PrefixStore(f"life{number}", dist.distributed_c10d._get_default_store())
        place: dict[str, Any] = {"rank": self._rank, "world_size": world, "store": store}
        with Checkpointer(faulty, sink=ListSink(), **place) as c:
            result = c.restore(life.state, elastic=True)
            if self._commits:
                assert result is not None
                steps = [t.step for t in self._commits]
                assert result.step == steps[-1], (result, steps, lost)
                life.check(self._commits[-1])
            else:
                assert result is None
            now = self._commits[-1] if self._commits else Truth()
            for fails, who in saves:
                now = life.train(now, dice)
                if fails and who == self._rank:
                    faulty.on("finish", "data/*").fail(NO_ROOM)
                ended = c.save(now.step, life.state).committed
                assert (ended.exception() is None) is not fails, ended.exception()
                if not fails:
                    self._commits.append(now)

    def _followed(self, saves: list[tuple[bool, int]]) -> None:
        """A rank outside of this life: the others will tell what was committed."""

    def _share(self) -> None:
        told: list[Any] = [self._commits]
        dist.broadcast_object_list(told, src=0)
        self._commits = told[0]

    def _lose(self, what: str) -> None:
        attempts = sorted((self._root / "attempts").glob("*.json"))
        if what == "attempts":
            for path in attempts:
                path.unlink()
        elif what == "newest attempt" and attempts:
            attempts[-1].unlink()
        elif what == "run" and self._commits:
            (self._root / "RUN.json").unlink()
        elif what == "bytes" and len(self._commits) > 1:
            step = self._commits[-1].step
            newest = max((self._root / "data").glob(f"*-{step:012d}-*"))
            path = max(newest.glob("r*.bin"), key=lambda p: p.stat().st_size)
            data = bytearray(path.read_bytes())
            data[0] ^= 1  # no padding
            path.write_bytes(bytes(data))


def main() -> None:
    root, seed, lives = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    rank, _ = join()
    walk = Walk(root, rank, seed)
    for number in range(lives):
        try:
            walk.live(number)
        except BaseException:
            print("\n".join(walk.told), file=sys.stderr)
            raise
    print(len(walk._commits))
    leave()


if __name__ == "__main__":
    main()
