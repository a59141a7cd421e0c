"""Failures that others had, by case: D52 and D57 (versions of one step, whole), D60 and D61 (commands).

D51 is in tests/trainer/test_published.py and test_publish.py.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import pytest
import safetensors.torch
import torch

import publisher.build
from ckpt.errors import CorruptError
from ckpt.restore import CheckpointReader
from ckpt.storage import LocalStorage, MemoryStorage, Storage
from ckpt.trust import TrustList
from publisher import cli, keys
from publisher.build import VersionBuilder
from publisher.cli import publishing
from publisher.cli.shared import LineSink
from publisher.engine import Engine, engine_of
from publisher.parity import parity_in_process
from publisher.policy import BuildPolicy, Policy
from publisher.predictor import Predictor
from publisher.publish import Publisher
from publisher.records import encode
from publisher.registry import Registry, open_registry
from tests.publisher import rich, test_cli
from tests.publisher.conftest import Bench, make_bench
from tests.publisher.test_cli import Run, failed
from tests.publisher.test_predictor import wait_for_answers
from tests.publisher.tiny import TinyRun, flip_byte, stamped_tensors

run = test_cli.run
FP32 = Policy(tables={"*": "fp32"})
ASKED = rich.request(
    [[70, -1], [], [5]], [[100], [5, -7], []], [[31, 900], [12], []], [[0, 5], [], [99]]
)


def rich_tensors(step: int) -> dict[str, torch.Tensor]:
    """Weights and a collision map of one step: at every other one, tags 900 and -5 change places."""
    tensors = rich.tensors(step)
    if step == 200:
        tensors[rich.TAG_ROWS][:2] = tensors[rich.TAG_ROWS][:2].flip(0).clone()
    return tensors


def assert_answers(got: Any, tensors: dict[str, torch.Tensor]) -> None:
    for name, want in rich.plain(tensors, ASKED).items():
        assert isinstance(want, torch.Tensor)
        torch.testing.assert_close(got[name], want, rtol=1e-5, atol=1e-5)


# -- D52: one step for every part -----------------------------------------------------------


@pytest.fixture
def two_steps(tmp_path: Path, trust: TrustList, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """A root with commits 100 and 200 of a model with id maps, and no version yet."""
    monkeypatch.setenv("SIDESTAGE_TRUST_FILE", str(trust.path))
    storage = LocalStorage(tmp_path / "root")
    bench = Bench(rich.begin(TinyRun(storage, trust)), Registry(storage), policy=FP32)
    for step in (100, 200):
        bench.run.commit(step, rich_tensors(step))
    return bench


def test_d52_an_older_step_by_choice_is_that_step_in_every_part(
    two_steps: Bench, run: Run, tmp_path: Path
) -> None:
    (tmp_path / "policy.toml").write_text('[tables]\n"*" = "fp32"\n')
    root, registry = two_steps.run.root, two_steps.registry
    args = ("once", root.url, "--step", "100", "--policy", str(tmp_path / "policy.toml"), "--json")
    code, out, err = run(*args)
    assert (code, err, json.loads(out)["step"]) == (0, "", 100)
    manifest, tensors = registry.version(1), rich_tensors(100)
    assert manifest.source.ref == two_steps.run.info(100).ref
    assert (manifest.dense_step, manifest.table_step, manifest.id_map_step) == (100, 100, 100)

    def stored(name: str) -> dict[str, torch.Tensor]:
        return safetensors.torch.load(root.read(registry.key(1, name)))

    for name, t in stored(keys.DENSE).items():
        assert torch.equal(t, tensors[f"model.{name}"])
    maps = stored(keys.ID_MAPS)
    rows = dict(
        zip(maps["collision:tags.raw"].tolist(), maps["collision:tags.row"].tolist(), strict=True)
    )
    assert rows == rich.KNOWN_TAGS
    assert torch.equal(maps[f"position:{rich.POSITION}"], tensors[rich.POSITION])
    predictor = Predictor(registry, trust=two_steps.run.trust)
    assert_answers(predictor.predict(ASKED).outputs, tensors)


@pytest.mark.parametrize("part", [keys.ID_MAPS, keys.DENSE])
def test_d52_a_part_of_another_version_is_refused(two_steps: Bench, part: str) -> None:
    registry, root = two_steps.registry, two_steps.run.root
    two_steps.publish(100)
    predictor = Predictor(registry, trust=two_steps.run.trust)
    two_steps.publish(200)
    own, other = (root.read(registry.key(n, part)) for n in (2, 1))
    assert (len(own), own == other) == (len(other), False)
    root.put(registry.key(2, part), other)
    with pytest.raises(CorruptError, match=rf"{part}: .*digest"):
        predictor.refresh()
    assert predictor.version == 1
    assert_answers(predictor.predict(ASKED).outputs, rich_tensors(100))
    root.put(registry.key(2, part), own)
    assert predictor.refresh()


def test_d52_nobody_makes_a_version_of_two_steps_live(two_steps: Bench, run: Run) -> None:
    registry, root = two_steps.registry, two_steps.run.root
    for step in (100, 200):
        two_steps.publish(step)
    mixed = replace(registry.version(1), id_map_step=200)
    root.put(registry.key(1, keys.MANIFEST), encode(mixed))
    for command in ("rollback", "pin", "compile", "export"):
        args = {"rollback": (), "pin": ("1",), "compile": ("--version", "1")}.get(
            command, (f"{root.url}-view", "--format", "onnx", "--version", "1")
        )
        failed(run(command, root.url, *args), 5, "the id maps of step 200; take another version")
    live = Registry(root).live()
    assert live is not None
    assert live.to_version == 2


# -- D57: all parts, or none ----------------------------------------------------------------


def test_d57_a_failed_part_leaves_the_old_version_under_load(trust: TrustList) -> None:
    """A version of several table files, one of them damaged: the old one answers, label and values."""
    storage = MemoryStorage()
    bench = Bench(rich.begin(TinyRun(storage, trust)), Registry(storage), policy=FP32)

    def publish(step: int) -> None:
        bench.run.commit(step, rich_tensors(step))
        builder = VersionBuilder(
            storage, bench.registry, bench.programs, CheckpointReader, policy=FP32, file_bytes=150
        )
        parity = partial(parity_in_process, bench.programs)
        Publisher(builder, parity, "x", policy=FP32).publish(bench.run.info(step), "test")

    publish(1)
    predictor = Predictor(bench.registry, trust=trust)
    publish(2)
    parts = sorted(f.key for f in bench.registry.version(2).files if f.key.endswith(".bin"))
    assert len(parts) == 4
    stop, errors, answered, seen = threading.Event(), [], [0], []

    def ask() -> None:
        try:
            while not stop.is_set():
                got = predictor.predict(ASKED)
                assert_answers(got.outputs, rich_tensors(got.version))
                seen.append(got.version)
                answered[0] += 1
        except Exception as e:
            errors.append(e)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        wait_for_answers(answered, errors)
        key = bench.registry.key(2, parts[1])
        flip_byte(storage, key, 5)
        with pytest.raises(CorruptError, match=rf"{parts[1]}: .*digest"):
            predictor.refresh()
        wait_for_answers(answered, errors)
        assert (set(seen), predictor.version) == ({1}, 1)
        flip_byte(storage, key, 5)
        assert predictor.refresh()
        wait_for_answers(answered, errors)
        wait_for_answers(answered, errors)
    finally:
        stop.set()
        thread.join()
    assert errors == []
    assert (sorted(seen), seen[-1]) == (seen, 2)


# -- D60: a command does what it says, or fails and says so -----------------------------------


@dataclass
class World:
    """A root with version 1 live and 2 the canary, step 3 not published yet; and its commands."""

    bench: Bench
    run: Run
    folder: Path
    told: dict[str, Any] = field(default_factory=dict)

    @property
    def root(self) -> str:
        return self.bench.run.root.url

    @property
    def registry(self) -> Registry:
        return Registry(self.bench.run.root)  # as another process sees it

    @property
    def live(self) -> int:
        live = self.registry.live()
        assert live is not None
        return live.to_version

    def loads(self, version: int) -> bool:
        predictor = Predictor(self.registry, version, trust=self.bench.run.trust)
        stamp = float(self.registry.version(version).source.step)
        answer = predictor.predict(test_cli.GOLDEN).outputs["dense_stamp"]
        return answer.tolist() == [stamp] * 4

    def files(self) -> dict[str, bytes]:
        """All that is stored, but the lease, which says who was here last."""
        found = (p for p in self.folder.rglob("*") if p.is_file() and not p.is_symlink())
        skipped = (keys.LEASE, ".lock")
        return {str(p): p.read_bytes() for p in found if not p.name.endswith(skipped)}


@pytest.fixture
def world(tmp_path: Path, trust: TrustList, monkeypatch: pytest.MonkeyPatch, run: Run) -> World:
    monkeypatch.setenv("SIDESTAGE_TRUST_FILE", str(trust.path))
    (tmp_path / "policy.toml").write_text('[tables]\n"*" = "fp16"\n[retention]\nkeep = 1\n')
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    bench = make_bench(LocalStorage(tmp_path / "root"), trust)
    for step in (1, 2, 3):
        bench.run.commit(step, stamped_tensors(step))
        if step < 3:
            bench.policy = replace(Policy(), release=replace(bench.policy.release, canary=step > 1))
            bench.publish(step)
    return World(bench, run, tmp_path)


def _once(world: World) -> bool:
    return world.told["version"] == world.live == 3 and world.loads(3)


def _policy(world: World) -> bool:
    code, printed, _ = world.run("policy", str(world.folder / "policy.toml"))
    (world.folder / "printed.toml").write_text(printed)
    again = json.loads(world.run("policy", str(world.folder / "printed.toml"), "--json")[1])
    return code == 0 and again == world.told and again["tables"] == {"*": "fp16"}


def _history(world: World) -> bool:
    return world.told["moves"] == json.loads(
        json.dumps(list(map(asdict, world.registry.history())))
    )


VIEW = ("{folder}/view", "--format", "onnx")
GOOD: dict[str, tuple[list[tuple[str, ...]], Callable[[World], bool]]] = {
    "once": ([("once", "{root}")], _once),
    "policy": ([("policy", "{folder}/policy.toml")], _policy),
    "status": (
        [("status", "{root}")],
        lambda w: (w.told["live"]["version"], w.told["versions"]) == (1, [1, 2]),
    ),
    "history": ([("history", "{root}")], _history),
    "promote": ([("promote", "{root}")], lambda w: w.live == 2 and w.loads(2)),
    "rollback": (
        [("promote", "{root}"), ("rollback", "{root}")],
        lambda w: w.live == 1 and w.loads(1),
    ),
    "pin": ([("pin", "{root}", "1")], lambda w: list(w.registry.pins()) == [1]),
    "unpin": ([("pin", "{root}", "1"), ("unpin", "{root}", "1")], lambda w: not w.registry.pins()),
    "pins": (
        [("pin", "{root}", "2"), ("pins", "{root}")],
        lambda w: [p["version"] for p in w.told["pins"]] == [2],
    ),
    "prune": (
        [("promote", "{root}"), ("once", "{root}"), ("prune", "{root}", "--keep", "1")],
        lambda w: w.told["versions"] == [1] and w.registry.numbers() == [2, 3],
    ),
}
ELSEWHERE = {  # where torch traces and compiles, and commands that run until they are stopped
    "export": "test_views.py",
    "compile": "test_compiled.py",
    "run": "test_cli.py",
    "serve": "test_cli.py",
    "page": "test_page.py",
}


def filled(world: World, args: tuple[str, ...]) -> list[str]:
    return [a.format(root=world.root, folder=world.folder) for a in args]


def test_d60_no_command_is_forgotten() -> None:
    assert GOOD.keys() | ELSEWHERE.keys() == cli.cli.commands.keys()
    for command, file in ELSEWHERE.items():
        assert f'"{command}", ' in (Path(__file__).parent / file).read_text()
    assert BAD.keys() == cli.cli.commands.keys()


@pytest.mark.parametrize("command", GOOD)
def test_d60_what_a_command_made_is_there(world: World, command: str) -> None:
    calls, made = GOOD[command]
    for args in calls:
        code, out, err = world.run(*filled(world, args), "--json")
        assert (code, err) == (0, ""), (args, err)
        world.told = json.loads(out)
    assert made(world)


NOWHERE = "no such folder; check the path"
NO_RUN = "no RUN.json here: not the root of a run"
NO_POLICY = ("--policy", "{folder}/none.toml")
NO_REGISTRY = ("--registry", "{folder}/nowhere")
Bad = tuple[tuple[str, ...], int, str]


def bad_roots(*rest: str) -> list[Bad]:
    """Missing, incomplete and mistyped input of a command that reads a root and its registry."""
    return [
        (("{folder}/nowhere", *rest), 3, NOWHERE),
        (("{folder}/empty", *rest), 3, NO_RUN),
        (("{folder}/file", *rest), 2, "is a file"),
        (("ftp://x/y", *rest), 2, "scheme 'ftp' isn't supported"),
        (("{root}", *rest, *NO_REGISTRY), 3, NOWHERE),
    ]


BAD: dict[str, list[Bad]] = {
    "once": [
        *bad_roots()[:-1],
        (("{root}", "--step", "9"), 3, "step 9"),
        (("{root}", "--step", "9", *NO_REGISTRY), 3, "step 9"),  # which stays missing
        (("{root}", *NO_POLICY), 3, "no such policy file"),
        (("{root}", "--policy", "{folder}"), 2, "not a policy file"),
        (("{root}", "--registry", "{folder}/file"), 2, "is a file"),
        (("{root}", "--registry", "/sys/sidestage"), 6, "/sys/sidestage"),
    ],
    "run": [
        (("{folder}/file",), 2, "is a file"),
        (("{root}", *NO_POLICY), 3, "no such policy file"),
        (("{root}", "--registry", "{folder}/file"), 2, "is a file"),
        (("{root}", "--page-port", "0", "--page-token-file", "{folder}/none"), 3, "no such token"),
    ],
    "policy": [
        (("{folder}/none.toml",), 3, "no such policy file"),
        (("{folder}",), 2, "not a policy file"),
    ],
    "status": bad_roots(),
    "history": bad_roots(),
    "rollback": [*bad_roots(), (("{root}", "--to", "9"), 3, "no version 9 here")],
    "promote": [*bad_roots(), (("{root}", "--version", "1"), 4, "the canary is version 2, not 1")],
    "pin": [*bad_roots("1"), (("{root}", "9"), 3, "no version 9 here")],
    "unpin": [*bad_roots("1"), (("{root}", "1"), 3, "version 1 isn't pinned")],
    "pins": bad_roots(),
    "prune": [*bad_roots(), (("{root}", *NO_POLICY), 3, "no such policy file")],
    "compile": [*bad_roots(), (("{root}", "--version", "9"), 3, "no version 9 here")],
    "serve": [
        *bad_roots("--port", "0"),
        (("{root}", "--port", "0", "--token-file", "{folder}/none"), 3, "no such token file"),
        (("{root}", "--port", "0", "--host", "192.0.2.7"), 6, "choose another port"),
    ],
    "page": [
        *bad_roots("--port", "0"),
        (("{root}", "--port", "0", "--token-file", "{folder}/none"), 3, "no such token file"),
    ],
    "export": [
        (("{folder}/empty", *VIEW), 3, "no version is live yet"),
        *(bad for bad in bad_roots(*VIEW) if bad[2] != NO_RUN),
        (("{root}", *VIEW, "--version", "9"), 3, "no version 9 here"),
        (("{root}", "{folder}/empty", "--format", "onnx"), 4, "--force"),
        (("{root}", "{folder}", "--format", "onnx", "--force"), 4, "is no view"),
        (("{root}", "{folder}/none/view", "--format", "onnx"), 3, "no such folder; make it first"),
        (("{root}", "/sys/view", "--format", "onnx"), 6, "can't be written"),
    ],
}


@pytest.mark.parametrize("command", BAD)
def test_d60_bad_calls_fail_in_one_line_and_leave_nothing(world: World, command: str) -> None:
    handlers = {s: signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)}
    before = world.files()
    for args, code, why in BAD[command]:
        failed(world.run(command, *filled(world, args)), code, why)
        assert world.files() == before, args
    code, out, err = world.run(command, "--mode", "bad")
    assert (code, out, "Traceback" in err) == (2, "", False)
    assert err.splitlines()[-1].startswith("Error: No such option"), err
    for name, handler in handlers.items():
        signal.signal(name, handler)


WRITES = {
    "once": (),
    "rollback": ("--to", "2"),
    "promote": (),
    "pin": ("1",),
    "unpin": ("2",),
    "prune": ("--keep", "1"),
}


@pytest.mark.parametrize("command", WRITES)
def test_d60_a_disk_that_cannot_be_written(
    world: World, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a remount for reading only: nothing changes, and the command says that."""
    assert world.run("pin", world.root, "2")[0] == 0
    if command == "prune":
        assert world.run("promote", world.root)[0] == world.run("once", world.root)[0] == 0
    before, opened = world.files(), os.open

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    def open_to_read(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        writes = flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        return refuse() if writes else opened(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", open_to_read)
    for name in ("mkdir", "unlink", "rename", "replace", "link"):
        monkeypatch.setattr(os, name, refuse)
    result = world.run(command, world.root, *WRITES[command])
    monkeypatch.undo()
    failed(result, 6, os.strerror(errno.EROFS))
    assert world.files() == before


# -- D61: every flag reaches every path -------------------------------------------------------

ALIKE = (
    *("--workers", "3", "--engine", "ray", "--max-error", "0.0625", "--who", "me@here"),
    *("--lease-ttl", "7.5", "--policy", "{folder}/policy.toml", "--registry", "{folder}/registry"),
)


@pytest.fixture
def stopped_when_live(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`publisher run` gets SIGTERM when its first version is live."""
    before = {s: signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)}

    class Stopping(LineSink):
        def emit(self, name: str, /, **fields: Any) -> None:
            super().emit(name, **fields)
            if name == "version_live":
                signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(publishing, "LineSink", Stopping)
    yield
    for name, handler in before.items():
        signal.signal(name, handler)


@pytest.mark.usefixtures("stopped_when_live")
@pytest.mark.parametrize("command", ["once", "run"])
def test_d61_flags_go_before_the_policy_in_both_publishers(
    world: World, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table engine, the gate, the lease and the history of both get what the line says."""
    policy = world.folder / "policy.toml"
    policy.write_text(
        policy.read_text() + "[gates]\nparity_max_abs_err = 0.5\n[build]\nworkers = 2\n"
        "memory_mib = 48\n"
    )
    engines: list[BuildPolicy] = []

    def here(build: BuildPolicy, *stores: Storage) -> Engine:
        engines.append(build)
        return engine_of(BuildPolicy())

    monkeypatch.setattr(publisher.build, "engine_of", here)
    more = ("--why", "hotfix") if command == "once" else ("--no-compile", "--interval", "0.05")
    args = filled(world, (command, "{root}", *ALIKE, *more))
    code, out, err = world.run(*args, "--json")
    assert (code, err) == (0, "")
    told = [json.loads(line) for line in out.splitlines()]
    settings = told[0]["settings"] if command == "once" else told[0]
    if command == "run":
        assert settings["event"] == "settings"
        assert settings["interval_s"] == 0.05
    assert settings["policy"]["build"] == {"engine": "ray", "workers": 3, "memory_mib": 48}
    assert settings["policy"]["gates"]["parity_max_abs_err"] == 0.0625
    assert settings["policy"]["tables"] == {"*": "fp16"}
    assert (settings["who"], settings["lease_ttl_s"]) == ("me@here", 7.5)
    registry = open_registry(world.root, str(world.folder / "registry"))
    assert settings["registry"] == registry.url

    assert engines == [BuildPolicy("ray", 3, 48)]
    manifest, (move,) = registry.version(1), registry.history()
    assert (manifest.source.step, {t.format for t in manifest.tables}) == (3, {"fp16"})
    assert next(g.threshold for g in manifest.gates if g.name == "golden_parity") == 0.0625
    assert (manifest.published_by, move.who) == ("me@here", "me@here")
    assert move.why == ("hotfix" if command == "once" else "newest commit")
    lease = registry.lease()
    assert lease is not None
    assert (lease.ttl_s, lease.released) == (7.5, True)
    assert world.registry.numbers() == [1, 2]  # the other registry is as it was


def test_d61_flags_unknown_to_a_mode_are_refused(run: Run) -> None:
    flags = {
        name: {o for p in command.params for o in (*p.opts, *p.secondary_opts) if o[:2] == "--"}
        for name, command in cli.cli.commands.items()
    }
    every = set().union(*flags.values())
    assert {"--why", "--step", "--retry"} <= flags["once"] - flags["run"]
    for name, own in flags.items():
        for flag in sorted(every - own):
            code, out, err = run(name, "root", flag)
            assert (code, out) == (2, ""), (name, flag)
            assert f"No such option: {flag}" in err or f"No such option '{flag}'" in err
