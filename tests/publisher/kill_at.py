"""Kill a publisher with SIGKILL before each of its writes, or pause it, and let another one go on.

Run by test_crash.py as a process of its own: it loads torch once and forks a publisher for
every place to die. Prints one JSON line a place: [kind, what was found].
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ckpt.events import ListSink
from ckpt.restore import CheckpointReader
from ckpt.storage import LocalStorage, ObjectWriter
from ckpt.trust import TrustList
from ckpt.types import Buffer, ObjectInfo
from publisher import keys
from publisher.build import VersionBuilder
from publisher.daemon import Daemon
from publisher.lease import Lease
from publisher.loading import ProgramCache
from publisher.parity import parity_in_process
from publisher.pointer import Reason
from publisher.predictor import Predictor
from publisher.publish import Publisher
from publisher.records import encode
from publisher.registry import Registry
from tests.publisher.conftest import FakeClock
from tests.publisher.tiny import GOLDEN, TinyRun, stamped_tensors


class Watched:
    """A store that calls `before(key)` ahead of each write; what came earlier took effect."""

    def __init__(self, inner: LocalStorage, before: Callable[[str], None]) -> None:
        self._inner = inner
        self._before = before
        self.url = inner.url
        self.upload_bytes, self.probe = inner.upload_bytes, inner.probe
        self.read, self.read_into = inner.read, inner.read_into
        self.list, self.stat = inner.list, inner.stat

    def put(self, key: str, data: Buffer) -> ObjectInfo:
        self._before(key)
        return self._inner.put(key, data)

    def create(self, key: str, data: Buffer) -> ObjectInfo:
        self._before(key)
        return self._inner.create(key, data)

    def replace_if(self, key: str, data: Buffer, etag: str) -> ObjectInfo:
        self._before(key)
        return self._inner.replace_if(key, data, etag)

    def delete(self, key: str) -> None:
        self._before(key)
        self._inner.delete(key)

    @contextmanager
    def writer(self, key: str) -> Iterator[ObjectWriter]:
        with self._inner.writer(key) as writer:
            yield _WatchedWriter(writer, partial(self._before, key))
            self._before(key)


class _WatchedWriter:
    def __init__(self, inner: ObjectWriter, before: Callable[[], None]) -> None:
        self._inner = inner
        self._before = before

    def write(self, data: Buffer) -> None:
        self._before()
        self._inner.write(data)


def signal_at(sig: signal.Signals, nth: int, ending: str = "") -> Callable[[str], None]:
    """Send this process `sig` at its nth write of a key that ends so."""
    left = nth

    def before(key: str) -> None:
        nonlocal left
        left -= key.endswith(ending)
        if left == 0:
            left = -1
            os.kill(os.getpid(), sig)

    return before


class Stage:
    """A root with step 1 live and step 2 committed; copies of it are what publishers die in.

    `unpublished` is the same with step 1 committed and nothing published.

    Who comes after a dead publisher finds its lease, and watches it on a clock that it turns itself.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.trust = TrustList(folder / "trusted-code")
        self.programs = ProgramCache(self.trust)
        run = TinyRun(LocalStorage(folder / "base"), self.trust).begin()
        run.commit(1, stamped_tensors(1))
        shutil.copytree(folder / "base", folder / "unpublished")
        self.publish(run.root)
        run.commit(2, stamped_tensors(2))

    def publisher(self, storage: Any, clock: FakeClock, sink: ListSink | None = None) -> Publisher:
        registry = Registry(storage)
        builder = VersionBuilder(storage, registry, self.programs, CheckpointReader)
        parity = partial(parity_in_process, self.programs)
        lease = Lease(registry, clock=clock)
        return Publisher(builder, parity, "x", lease=lease, sink=sink)

    def publish(self, storage: Any) -> None:
        clock = FakeClock()
        publisher = self.publisher(storage, clock)
        assert publisher.lease is not None
        publisher.lease.acquire_or_fail(clock.wait)
        publisher.publish_latest("test")
        publisher.lease.release()

    def copy(self, name: str, of: str = "base") -> LocalStorage:
        shutil.copytree(self.folder / of, self.folder / name)
        return LocalStorage(self.folder / name)

    def die_in(self, root: LocalStorage, work: Callable[[Any], None], at: int) -> bool:
        """Do `work` in a child that dies at its nth write; False if it ended before."""
        _, status = os.waitpid(self.fork(root, work, signal_at(signal.SIGKILL, at)), 0)
        return os.WIFSIGNALED(status)

    def fork(
        self, root: LocalStorage, work: Callable[[Any], None], before: Callable[[str], None]
    ) -> int:
        """Do `work` in a child on a watched store; its process id."""
        child = os.fork()
        if child == 0:
            code = 1
            try:
                work(Watched(root, before))
                code = 0
            finally:
                os._exit(code)
        return child

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


def check_retention(stage: Stage, at: int) -> dict[str, Any] | None:
    """Die in deleting versions 1 and 2 of 4; what is left is whole, and the next one goes on."""
    root = stage.copy(f"retention-{at}")
    registry = Registry(root)
    epoch = registry.lease_epoch()
    for number in (2, 3, 4):
        older = registry.version(number - 1)
        source = replace(older.source, step=number)
        steps = {"dense_step": number, "table_step": number, "id_map_step": number}
        newer = replace(older, version=number, source=source, **steps)
        folder = f"{root.url}/serving/versions/"
        shutil.copytree(f"{folder}{number - 1:06d}", f"{folder}{number:06d}")
        root.put(registry.key(number, keys.MANIFEST), encode(newer))
        registry.release(newer, Reason("x", "test"), lease_epoch=epoch)

    def prune(storage: Any) -> None:
        Registry(storage).prune(1)

    if not stage.die_in(root, prune, at):
        return None
    left = Registry(root)
    for number in left.numbers():
        left.check_files(left.version(number))
    found = {"after_kill": left.numbers()}
    prune(root)
    return found | {"numbers": Registry(root).numbers(), "stored": sorted(left.contents())}


PAUSES = (
    ("lease.json", 1),
    ("claim.json", 1),
    (keys.TABLES, 1),
    ("manifest.json", 1),
    ("live.json", 1),  # telling it the epoch
    ("live.json", 2),  # moving it
    ("history/000000002.json", 1),
)


def check_pause(stage: Stage, at: int) -> dict[str, Any] | None:
    """Pause a daemon in publishing step 2; another one takes over and publishes step 3; continue it."""
    if at > len(PAUSES):
        return None
    return pause(stage, stage.copy(f"pause-{at}"), PAUSES[at - 1])


FIRST_PAUSES = (
    ("live.json", 1),  # making it, to tell it the epoch
    ("live.json", 2),  # the first move
)


def check_first_pause(stage: Stage, at: int) -> dict[str, Any] | None:
    """The same in publishing step 1, as long as nothing is live."""
    if at > len(FIRST_PAUSES):
        return None
    return pause(stage, stage.copy(f"first-{at}", "unpublished"), FIRST_PAUSES[at - 1])


def pause(stage: Stage, root: LocalStorage, place: tuple[str, int]) -> dict[str, Any]:
    told = Path(root.url) / "told.json"

    def daemon(storage: Any) -> None:
        clock, sink = FakeClock(), ListSink()
        publisher = stage.publisher(storage, clock, sink)
        ticks = iter(range(3))
        Daemon(lambda: publisher, lambda _: next(ticks, None) is None, clock=clock, sink=sink).run()
        told.write_text(json.dumps([name for name, _ in sink.events]))

    ending, nth = place
    child = stage.fork(root, daemon, signal_at(signal.SIGSTOP, nth, ending))
    _, status = os.waitpid(child, os.WUNTRACED)
    assert os.WIFSTOPPED(status), place
    TinyRun(root, stage.trust).commit(3, stamped_tensors(3))
    stage.publish(root)
    live_while_paused = stage.served(root)
    os.kill(child, signal.SIGCONT)
    _, status = os.waitpid(child, 0)
    registry = Registry(root)
    lease = registry.lease()
    return {
        "at": place,
        "code": os.waitstatus_to_exitcode(status),
        "live_while_paused": live_while_paused,
        "live": stage.served(root),
        "versions": [registry.version(n).source.step for n in registry.numbers()],
        "history": [m.source.step for m in registry.history()],
        "epochs": [m.lease_epoch for m in registry.history()],
        "lease": lease and lease.epoch,
        "refusals": len(registry.refusals()),
        "told": json.loads(told.read_text()),
    }


CHECKS = {
    "publish": check_publish,
    "rollback": check_rollback,
    "retention": check_retention,
    "pause": check_pause,
    "first_pause": check_first_pause,
}


def main() -> None:
    torch.set_num_threads(1)
    stage = Stage(Path(sys.argv[1]))
    for kind, check in CHECKS.items():
        at = 1
        while (found := check(stage, at)) is not None:
            print(json.dumps([kind, found]), flush=True)
            at += 1


if __name__ == "__main__":
    main()
