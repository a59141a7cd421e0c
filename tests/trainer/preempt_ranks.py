"""Ranks that are told to end, forked from one process that has imported everything.

    python -m tests.trainer.preempt_ranks FOLDER SCENARIO REPEATS

prints one JSON object per repeat: the exit codes by rank and the commits that are left.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Subset

from ckpt import CheckpointConfig, Checkpointer
from ckpt.catalog import Catalog
from ckpt.errors import BadInputError, SidestageError
from ckpt.storage import LocalStorage
from trainer import Session

RANKS = 2
TOLD = ("training", "saving", "evaluating", "deaf", "dead", "loader")


def supersede(folder: Path) -> None:
    """Another job begins to train on the same root."""
    with Checkpointer(str(folder), rank=0, world_size=1) as other:
        other.restore({}, partial=True, elastic=True)


class Endless:
    """Batches without end."""

    batch_size = 2

    def __init__(self, scenario: str) -> None:
        self.position = 0
        self._scenario = scenario

    def seek(self, position: int) -> None:
        if self._scenario == "one stays out" and dist.get_rank() == 0:
            raise BadInputError("a rank's own error, before the first step")
        self.position = position

    def __iter__(self) -> Iterator[int]:
        while True:
            self.position += 1
            yield self.position


class Numbers:
    """A data set, for workers that are ended by the signal, too."""

    def __len__(self) -> int:
        return 10**6

    def __getitem__(self, n: int) -> int:
        return n


class Loading(Endless):
    """Batches of two worker processes, from any position on."""

    def __iter__(self) -> Iterator[Any]:
        loader = DataLoader(
            Subset(Numbers(), range(2 * self.position, 10**6)),
            batch_size=2,
            num_workers=2,
            multiprocessing_context="fork",
        )
        for batch in loader:
            assert batch.tolist() == [2 * self.position, 2 * self.position + 1]
            self.position += 1
            yield batch


def train(folder: Path, scenario: str, tell: int) -> None:
    """One rank: a step is an all_reduce. `tell` is written to, a byte for each step or poll."""
    model = torch.nn.Linear(4, 4)
    slow = CheckpointConfig(persist_target_s=1000.0)
    if scenario in ("killed", "whole"):
        slow = CheckpointConfig(keep_last=2)
    session = Session(
        str(folder),
        {"model": model},
        Loading(scenario) if scenario == "loader" else Endless(scenario),
        save_every={
            "saving": 4,
            "deaf": 4,
            "orphan": 4,
            "raising": 4,
            "one raises": 4,
            "superseded": 4,
            "known to one": 1,
            "killed": 2,
            "whole": 2,
        }.get(scenario, 1000),
        checkpoint=slow,
        grace_s=2.0 if scenario == "deaf" else 60.0,
    )
    with session:
        for _ in session.batches():
            dist.all_reduce(torch.ones(4))
            os.write(tell, b".")
            if scenario == "evaluating" and session.steps == 3:
                with session.evaluating():
                    while True:
                        dist.all_reduce(torch.ones(4))
                        os.write(tell, b"e")
                        session.poll()
            if scenario == "deaf" and session.steps == 5:
                os.write(tell, b"d")
                os.read(os.pipe()[0], 1)  # a phase that doesn't poll, and never ends
            if scenario == "dead" and session.steps == 5:
                os.write(tell, b"d")
                if dist.get_rank() == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
            if scenario == "known to one" and session.steps == 4:
                session._checkpointer.wait()
                dist.barrier()
                if dist.get_rank() == 0:  # as it finds out while nothing is saved
                    supersede(folder)
                    session._checkpointer._look()
                dist.barrier()
            session.step()
            if scenario == "orphan" and session.steps == 8:
                os.write(tell, b"d")
                if dist.get_rank() == 0:  # its part of the save is on its way still
                    os.kill(os.getpid(), signal.SIGKILL)
            if scenario in ("raising", "one raises") and session.steps == 8:
                os.write(tell, b"d")
                if scenario == "raising" or dist.get_rank() == 0:
                    raise BadInputError("a rank's own error")
            if scenario == "whole" and session.steps >= 8:
                break


def rank_main(folder: Path, scenario: str, rank: int, store: Any, tell: int) -> int:
    if scenario == "loader":
        os.setsid()  # as torchrun's workers: the whole group is told
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    try:
        train(folder, scenario, tell)
    except SidestageError as e:
        print(f"rank {rank}: {e}", file=sys.stderr, flush=True)
        return e.exit_code
    return 0


def one_life(folder: Path, scenario: str, life: int, server: Any) -> dict[str, Any]:
    asked: int | None = life % RANKS
    store = dist.PrefixStore(f"life-{life}", server)
    ends = [os.pipe() for _ in range(RANKS)]
    pids = []
    for rank in range(RANKS):
        if (pid := os.fork()) == 0:
            code = 1
            try:
                mine = dist.PrefixStore(
                    f"life-{life}", dist.TCPStore("127.0.0.1", server.port, is_master=False)
                )
                code = rank_main(folder, scenario, rank, mine, ends[rank][1])
            finally:
                os._exit(code)
        pids.append(pid)
    del store
    for _, write_end in ends:
        os.close(write_end)
    if scenario == "dead":
        asked = 1
    if scenario in ("whole", "orphan", "raising", "one raises", "one stays out", "known to one"):
        asked = None
    if scenario == "superseded":
        os.read(ends[0][0], 1)  # it trains
        supersede(folder)
        asked = None
    wanted, count = {"evaluating": b"e", "deaf": b"d", "dead": b"d"}.get(scenario, b"."), 0
    anywhere = scenario in ("training", "saving", "loader")
    after = random.Random(life).randrange(5, 60) if anywhere else 1
    if scenario == "killed":
        after = 3 + life % 4  # steps 2 and 4 are saved: in one save, between two, in the other
    while asked is not None and count < after and (byte := os.read(ends[asked][0], 1)):
        count += byte == wanted
    if scenario == "killed":
        time.sleep(random.Random(life).random() / 100)  # anywhere in the save, which takes so long
    for rank in range(RANKS) if scenario == "killed" else [asked] if scenario in TOLD else []:
        if scenario == "loader":
            for pid in pids:
                os.killpg(pid, signal.SIGTERM)
        else:
            os.kill(pids[rank], signal.SIGKILL if scenario == "killed" else signal.SIGTERM)
    codes = []
    for pid, (read_end, _) in zip(pids, ends, strict=True):
        while os.read(read_end, 4096):
            pass
        codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        os.close(read_end)
    commits = Catalog(LocalStorage(folder)).commits()
    epochs = max((c.ref.epoch for c in commits), default=0)
    return {"codes": codes, "steps": [c.ref.step for c in commits if c.ref.epoch == epochs]}


def main() -> None:
    folder, scenario, repeats = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    torch.set_num_threads(1)
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for life in range(repeats):
        if scenario == "killed":  # all in one folder, and at the end one life that nobody ends
            last = life == repeats - 1
            done = one_life(folder, "whole" if last else scenario, life, server)
        else:
            done = one_life(folder / str(life), scenario, life, server)
        print(json.dumps(done), flush=True)


if __name__ == "__main__":
    main()
