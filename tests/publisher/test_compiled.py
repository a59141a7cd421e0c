"""Compiled packages: made once, loaded only where trusted and right, with each version's own constants."""

from __future__ import annotations

import json
import re
import shutil
import sys
import tempfile
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ckpt.command import run_command
from ckpt.errors import BadInputError, CorruptError
from ckpt.events import ListSink
from ckpt.storage import LocalStorage
from ckpt.trust import TrustList
from publisher import cli, keys, spare
from publisher.compiled import (
    PackageRecord,
    decode_record,
    encode_record,
    package_name,
    use_package,
)
from publisher.compiling import BackgroundCompiler, compile_version
from publisher.loading import LoadedVersion, ProgramCache, load_version
from publisher.predictor import Predictor
from tests.publisher.conftest import Bench, make_bench
from tests.publisher.tiny import (
    GOLDEN,
    description,
    flip_byte,
    random_tensors,
    request,
    stamped_tensors,
)


class Compiled:
    """Three versions of one program on disk, and its package."""

    def __init__(self, folder: Path) -> None:
        self.bench = make_bench(LocalStorage(folder / "root"), TrustList(folder / "trusted-code"))
        self.registry = self.bench.registry
        for step in (1, 2):
            self.bench.run.commit(step, stamped_tensors(float(step)))
            self.bench.publish(step)
        self.bench.run.commit(3, random_tensors())
        self.bench.publish(3)
        self.record, self.made = compile_version(
            self.registry, self.registry.version(1), self.bench.run.trust
        )
        self.key = keys.package_key(self.record.sha256)
        self.data = self.bench.run.root.read(self.registry.prefix + self.key)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    if shutil.which("g++") is None:
        pytest.skip("no g++ here: nothing can be compiled")
    with pytest.MonkeyPatch.context() as patch:
        # Else inductor compiles programs, for ten seconds, to find out what this CPU can do.
        patch.setenv("TORCHINDUCTOR_VEC_ISA_OK", "1")
        return Compiled(tmp_path_factory.mktemp("compiled"))


def test_a_new_version_brings_only_weights(compiled: Compiled) -> None:
    """One package answers for three versions, at once, as the eager program does; batch 1 too."""
    assert compiled.made
    assert not compile_version(
        compiled.registry, compiled.registry.version(2), compiled.bench.run.trust
    )[1]
    predictors = [
        Predictor(compiled.registry, n, trust=compiled.bench.run.trust) for n in (1, 2, 3)
    ]
    for p in predictors:
        assert p.current.engine.kind == "compiled", p.current.engine
    asked = request([[3, 7], [], [-1]], [[0, 1], [6], []])
    for rows in (GOLDEN, asked, request([[1]], [[2]])):
        for n, p in enumerate(predictors, 1):
            programs = ProgramCache(compiled.bench.run.trust)
            eager = load_version(compiled.registry, compiled.registry.version(n), programs)
            got, want = p.predict(rows).outputs, eager.predict(rows).outputs
            for name, tensor in want.items():
                torch.testing.assert_close(got[name], tensor)
    for n in (1, 2):
        stamps = predictors[n - 1].predict(GOLDEN).outputs["dense_stamp"]
        assert stamps.tolist() == [float(n)] * 4


def test_the_command_names_the_package(
    compiled: Compiled, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the live version by default; it's there already, so nothing is compiled again."""
    monkeypatch.setenv("SIDESTAGE_TRUST_FILE", str(compiled.bench.run.trust.path))
    root = compiled.bench.run.root.url
    assert run_command(cli.cli, ["compile", root, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["sha256"], told["made"]) == (compiled.record.sha256, False)
    assert run_command(cli.cli, ["compile", root, "--version", "9"]) == 3
    assert "no version 9 here" in capsys.readouterr().err


def test_many_threads_may_call(compiled: Compiled) -> None:
    predictor = Predictor(compiled.registry, 3, trust=compiled.bench.run.trust)
    asked = {n: request([[i] for i in range(n)], [[i % 7] for i in range(n)]) for n in range(1, 9)}
    want = {n: predictor.predict(r).outputs["score"] for n, r in asked.items()}
    wrong: list[object] = []

    def ask(first: int) -> None:
        for i in range(200):
            n = (first + i) % 8 + 1
            got = predictor.predict(asked[n]).outputs["score"]
            if got.shape != want[n].shape or not torch.allclose(got, want[n]):
                wrong.append((n, got))

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert wrong == []


def test_an_untrusted_package_is_not_loaded(compiled: Compiled, tmp_path: Path) -> None:
    other = TrustList(tmp_path / "trusted-code")
    other.path.write_text(f"{description().program_sha256}\n")
    predictor = Predictor(compiled.registry, 1, trust=other)
    engine = predictor.current.engine
    assert (engine.kind, f"sha256 {compiled.record.sha256} is not trusted" in engine.reason) == (
        "eager",
        True,
    )
    assert predictor.predict(GOLDEN).outputs["dense_stamp"].tolist() == [1.0] * 4
    with pytest.raises(BadInputError, match="was compiled on another host; if you trust"):
        compile_version(compiled.registry, compiled.registry.version(1), other)


def test_a_damaged_package_is_not_loaded(compiled: Compiled) -> None:
    root, key = compiled.bench.run.root, compiled.registry.prefix + compiled.key
    flip_byte(root, key, 1000)
    try:
        predictor = Predictor(compiled.registry, 1, trust=compiled.bench.run.trust)
        assert predictor.current.engine.kind == "eager"
        assert "is not trusted on this host" in predictor.current.engine.reason
    finally:
        root.put(key, compiled.data)


def load(compiled: Compiled, n: int = 1) -> LoadedVersion:
    programs = ProgramCache(compiled.bench.run.trust)
    return load_version(compiled.registry, compiled.registry.version(n), programs)


def test_constants_that_the_loader_would_take_silently_are_refused(compiled: Compiled) -> None:
    loaded = load(compiled)
    good = dict(loaded.constants)
    for name, wrong in (
        ("over.weight", torch.ones(9, 1)),
        ("over.bias", torch.ones(1).double()),
    ):
        loaded.constants = {**good, name: wrong}
        with pytest.raises(CorruptError, match=f"constant {name} is "):
            use_package(loaded, compiled.data, "test")
    loaded.constants = {n: t for n, t in good.items() if n != "over.bias"}
    with pytest.raises(BadInputError, match=r"wants constants that the program hasn't: over\.bias"):
        use_package(loaded, compiled.data, "test")
    with pytest.raises(BadInputError, match="can't be loaded"):
        use_package(loaded, b"no package", "test")
    assert loaded.engine.kind == "eager"


def test_a_package_that_answers_otherwise_is_not_used(compiled: Compiled) -> None:
    loaded = load(compiled)
    loaded.constants = {**loaded.constants, "over.bias": torch.full((1,), 1.5)}
    with pytest.raises(CorruptError, match=r"golden request is 0\.5 away"):
        use_package(loaded, compiled.data, "test")
    assert loaded.engine.kind == "eager"
    assert loaded.predict(GOLDEN).outputs["dense_stamp"].tolist() == [1.0] * 4


RECORD = PackageRecord("a", "cpu", "2.13", "b" * 64, 3, 1, 0.0, 20.0, 1000.0)


def test_a_record_is_sealed(bench: Bench) -> None:
    data = encode_record(RECORD)
    assert decode_record(data, "k") == RECORD
    with pytest.raises(CorruptError, match="k"):
        decode_record(data.replace(b"2.13", b"2.14"), "k")


@pytest.mark.parametrize("sha256", ["../../outside", "/outside", "B" * 64, ""])
def test_a_records_sum_becomes_no_other_key(sha256: str) -> None:
    with pytest.raises(CorruptError, match="k: sha256 is"):
        decode_record(encode_record(replace(RECORD, sha256=sha256)), "k")


class _Loader:
    """In place of the native one; fails as that does, where a test says."""

    fails = ""

    def __init__(self, *_: object) -> None:
        self.at("load")

    def at(self, where: str) -> None:
        if self.fails == where:
            raise RuntimeError("run_func_( container_handle_, ...) API call failed\nat line 133")

    def get_constant_fqns(self) -> list[str]:
        return []

    def load_constants(self, *_: object) -> None:
        self.at("constants")

    def run(self, _: object) -> list[torch.Tensor]:
        self.at("run")
        raise TypeError("no such call in this torch")


@pytest.mark.parametrize("fails", ["load", "constants", "run", "", "disk"])
def test_whatever_fails_in_a_package_the_version_is_loaded(
    local_bench: Bench, fails: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    local_bench.run.commit(1, stamped_tensors(1.0))
    local_bench.publish(1)
    registry, trust = local_bench.registry, local_bench.run.trust
    sha256 = trust.add(b"package")
    registry.storage.create(registry.prefix + keys.package_key(sha256), b"package")
    described = load_version(registry, registry.version(1), ProgramCache(trust)).description
    key = registry.prefix + keys.package_record_key(package_name(described))
    mine = {"program_sha256": described.program_sha256, "sha256": sha256, "size_bytes": 7}
    registry.storage.create(key, encode_record(replace(RECORD, **mine)))
    monkeypatch.setattr(_Loader, "fails", fails)
    monkeypatch.setattr("torch._C._aoti.AOTIModelPackageLoader", _Loader)
    if fails == "disk":
        monkeypatch.setattr(tempfile, "tempdir", "/nowhere")
    predictor = Predictor(registry, trust=trust)
    why = {
        "disk": "can't be unpacked: .*No such file or directory: '/nowhere/",
        "run": "doesn't run: .*API call failed$",
        "": "TypeError: no such call",
    }.get(fails, "API call failed")
    assert predictor.current.engine.kind == "eager"
    assert re.search(why, predictor.current.engine.reason)
    assert predictor.predict(GOLDEN).outputs["dense_stamp"].tolist() == [1.0] * 4


def test_closing_stops_between_the_two_jobs(
    local_bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one that compiles has just ended: the one that tries it isn't begun."""
    local_bench.run.commit(1, stamped_tensors(1.0))
    local_bench.publish(1)
    monkeypatch.setenv("CXX", "true")
    sink = ListSink()
    background = BackgroundCompiler(local_bench.registry, local_bench.run.trust, sink)
    run, jobs = background._processes.run, []

    def first_job_ends(function: str, *args: object, **more: object) -> dict[str, float]:
        jobs.append(function)
        if len(jobs) > 1:
            return run(function, *args, **more)  # type: ignore[arg-type]
        background._processes.close()
        return {"seconds": 1.0}

    monkeypatch.setattr(background._processes, "run", first_job_ends)
    monkeypatch.setattr(spare.subprocess, "Popen", None)  # type: ignore[attr-defined]
    background.consider(1)
    background.close()
    [(name, fields)] = sink.events
    assert (name, len(jobs)) == ("not_compiled", 2)
    assert "the publisher is ending" in fields["reason"]


def test_without_a_package_the_program_runs_eagerly(bench: Bench) -> None:
    bench.run.commit(1, stamped_tensors(1.0))
    bench.publish(1)
    predictor = Predictor(bench.registry, trust=bench.run.trust)
    assert (
        predictor.current.engine.kind,
        "no compiled package" in predictor.current.engine.reason,
    ) == (
        "eager",
        True,
    )
    key = bench.registry.prefix + keys.package_record_key(
        package_name(predictor.current.description)
    )
    bench.run.root.put(key, b"{}")
    again = Predictor(bench.registry, trust=bench.run.trust)
    assert again.current.engine.kind == "eager"
    bench.run.root.put(key, encode_record(RECORD))
    again = Predictor(bench.registry, trust=bench.run.trust)
    assert "is of another program" in again.current.engine.reason
    mine = replace(RECORD, program_sha256=again.current.description.program_sha256)
    bench.run.root.put(key, encode_record(mine))
    again = Predictor(bench.registry, trust=bench.run.trust)
    assert "no such object" in again.current.engine.reason


@pytest.mark.parametrize("trouble", ["no compiler", "crash"])
def test_the_daemon_goes_on_where_nothing_can_be_compiled(
    local_bench: Bench, trouble: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And says so once."""
    local_bench.run.commit(1, stamped_tensors(1.0))
    local_bench.publish(1)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    if trouble == "crash":
        script = tmp_path / "g++"
        script.write_text(f"#!{sys.executable}\nimport os; os.kill(os.getpid(), 11)\n")
        script.chmod(0o755)
        monkeypatch.setattr(spare.sys, "executable", str(script))  # type: ignore[attr-defined]
    sink = ListSink()
    background = BackgroundCompiler(local_bench.registry, local_bench.run.trust, sink)
    for _ in range(2):
        background.consider(1)
        background.wait()
    background.close()
    [(name, fields)] = sink.events
    assert name == "not_compiled"
    why = {"no compiler": "no C++ compiler here", "crash": "died of SIGSEGV"}[trouble]
    assert why in fields["reason"]
    assert list(local_bench.run.root.list(f"{local_bench.registry.prefix}packages/")) == []
