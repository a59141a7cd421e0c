"""Kill a publisher with SIGKILL before each of its writes, and let another one go on.

Run by test_crash.py as a process of its own: it loads torch once and forks a publisher for
every place to die. Prints one JSON line a place.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ckpt.restore import CheckpointReader
from ckpt.storage import LocalStorage, ObjectWriter
from ckpt.trust import TrustList
from ckpt.types import Buffer, ObjectInfo
from publisher.build import VersionBuilder
from publisher.loading import ProgramCache
from publisher.parity import parity_in_process
from publisher.pointer import Reason
from publisher.predictor import Predictor
from publisher.publish import Publisher
from publisher.registry import Registry
from tests.publisher.tiny import GOLDEN, TinyRun, stamped_tensors


class Doomed:
    """A store before whose nth write this process ends: the n - 1 before it took effect."""

    def __init__(self, inner: LocalStorage, die_at: int) -> None:
        self._inner = inner
        self._left = die_at
        self.url = inner.url
        self.read, self.read_into = inner.read, inner.read_into
        self.list, self.stat = inner.list, inner.stat

    def _tick(self) -> None:
        self._left -= 1
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def put(self, key: str, data: Buffer) -> ObjectInfo:
        self._tick()
        return self._inner.put(key, data)

    def create(self, key: str, data: Buffer) -> ObjectInfo:
        self._tick()
        return self._inner.create(key, data)

    def replace_if(self, key: str, data: Buffer, etag: str) -> ObjectInfo:
        self._tick()
        return self._inner.replace_if(key, data, etag)

    def delete(self, key: str) -> None:
        self._tick()
        self._inner.delete(key)

    @contextmanager
    def writer(self, key: str) -> Iterator[ObjectWriter]:
        with self._inner.writer(key) as writer:
            yield _DoomedWriter(writer, self._tick)
            self._tick()


class _DoomedWriter:
    def __init__(self, inner: ObjectWriter, tick: Callable[[], None]) -> None:
        self._inner = inner
        self._tick = tick

    def write(self, data: Buffer) -> None:
        self._tick()
        self._inner.write(data)


class Stage:
    """A root with step 1 live and step 2 committed; copies of it are what publishers die in."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.trust = TrustList(folder / "trusted-code")
        self.programs = ProgramCache(self.trust)
        run = TinyRun(LocalStorage(folder / "base"), self.trust).begin()
        run.commit(1, stamped_tensors(1))
        self.publish(run.root)
        run.commit(2, stamped_tensors(2))

    def publisher(self, storage: Any) -> Publisher:
        builder = VersionBuilder(storage, Registry(storage), self.programs, CheckpointReader)
        return Publisher(builder, partial(parity_in_process, self.programs), "x")

    def publish(self, storage: Any) -> None:
        self.publisher(storage).publish_latest("test")

    def copy(self, name: str) -> LocalStorage:
        shutil.copytree(self.folder / "base", self.folder / name)
        return LocalStorage(self.folder / name)

    def die_in(self, root: LocalStorage, work: Callable[[Any], None], at: int) -> bool:
        """Do `work` in a child that dies at its nth write; False if it ended before."""
        child = os.fork()
        if child == 0:
            try:
                work(Doomed(root, at))
            finally:
                os._exit(0)
        _, status = os.waitpid(child, 0)
        return os.WIFSIGNALED(status)

    def served(self, root: LocalStorage) -> int:
        """The version that a serving host loads now, after checking that all of it is one version."""
        predictor = Predictor(Registry(root), trust=self.trust)
        got = predictor.predict(GOLDEN)
        step = float(Registry(root).version(got.version).source.step)
        assert got.outputs["dense_stamp"].tolist() == [step] * 4
        assert got.outputs["user_stamp"].tolist() == [step, 2 * step, 0.0, step]
        return int(step)


def check_publish(stage: Stage, at: int) -> dict[str, Any] | None:
    """Die in publishing step 2; what is live then, and after the next publisher."""
    root = stage.copy(f"publish-{at}")
    if not stage.die_in(root, stage.publish, at):
        return None
    live_after_kill = stage.served(root)
    for _ in range(2):  # the second finds nothing to do
        stage.publish(root)
    registry = Registry(root)
    return {
        "live_after_kill": live_after_kill,
        "live": stage.served(root),
        "versions": [registry.version(n).source.step for n in registry.numbers()],
        "history": [m.source.step for m in registry.history()],
        "sequences": [m.sequence for m in registry.history()],
        "refusals": len(registry.refusals()),
    }


def check_rollback(stage: Stage, at: int) -> dict[str, Any] | None:
    """Die in a rollback from step 2; the next publisher leaves what came of it."""
    root = stage.copy(f"rollback-{at}")
    stage.publish(root)

    def roll_back(storage: Any) -> None:
        Registry(storage).rollback(None, Reason("x", "test"))

    if not stage.die_in(root, roll_back, at):
        return None
    live_after_kill = stage.served(root)
    stage.publish(root)
    return {
        "live_after_kill": live_after_kill,
        "live": stage.served(root),
        "history": [m.source.step for m in Registry(root).history()],
        "sequences": [m.sequence for m in Registry(root).history()],
    }


def main() -> None:
    torch.set_num_threads(1)
    stage = Stage(Path(sys.argv[2]))
    check = {"publish": check_publish, "rollback": check_rollback}[sys.argv[1]]
    at = 1
    while (found := check(stage, at)) is not None:
        print(json.dumps(found), flush=True)
        at += 1


if __name__ == "__main__":
    main()
