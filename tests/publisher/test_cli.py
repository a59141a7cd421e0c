"""The `publisher` command: what it prints, its exit codes, and its two long-running forms."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from ckpt.command import run_command
from ckpt.config import trust_file
from ckpt.storage import LocalStorage
from ckpt.trust import TrustList
from publisher import cli, keys, parity
from publisher.lease import Lease
from publisher.records import VersionManifest
from publisher.registry import Registry
from publisher.spare import SpareProcesses
from tests import warm
from tests.publisher.conftest import Bench, make_bench
from tests.publisher.test_server import as_input
from tests.publisher.tiny import GOLDEN, TinyRun, flip_byte, stamped_tensors

REPO = Path(__file__).parents[2]
DEADLINE_S = 240
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def local(tmp_path: Path, trust: TrustList, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """A root on disk with step 1 published; this host trusts its program."""
    monkeypatch.setenv("SIDESTAGE_TRUST_FILE", str(trust.path))
    bench = make_bench(LocalStorage(tmp_path / "root"), trust)
    publish(bench, 1)
    return bench


def publish(bench: Bench, *steps: int) -> None:
    for step in steps:
        bench.run.commit(step, stamped_tensors(step))
        bench.publish(step)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a command in this process, its parity gate too: (exit code, stdout, stderr)."""

    class InProcess(parity.FreshParity):
        def __call__(self, registry: Registry, manifest: VersionManifest, /) -> float:
            from publisher.loading import ProgramCache

            programs = ProgramCache(TrustList(trust_file()))
            return parity.parity_in_process(programs, registry, manifest)

    def in_process(trust: TrustList, timeout_s: float = 1.0) -> parity.FreshParity:
        return InProcess(SpareProcesses(trust, timeout_s, spares=0))

    monkeypatch.setattr(parity, "parity_in_fresh_process", in_process)

    def go(*args: str) -> tuple[int, str, str]:
        code = run_command(cli.cli, list(args))
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return go


def failed(result: tuple[int, str, str], code: int, why: str) -> None:
    """One clear line on stderr, nothing else, and that exit code."""
    got, out, err = result
    assert (got, out) == (code, ""), result
    assert err.count("\n") == 1, err
    assert why in err


def test_once(local: Bench, run: Run) -> None:
    root = local.run.root.url
    code, out, err = run("once", root)
    assert (code, err) == (0, "")
    assert out == "step 1 was published before as version 1, which is live\n"
    local.run.commit(2, stamped_tensors(2))
    code, out, _ = run("once", root, "--json", "--who", "me@here", "--why", "hotfix")
    told = json.loads(out)
    assert told.pop("settings")["registry"] == local.registry.url
    assert told == {
        "version": 2,
        "epoch": 1,
        "step": 2,
        "built": True,
        "live": True,
        "canary": False,
    }
    assert (local.registry.history()[-1].who, local.registry.history()[-1].why) == (
        "me@here",
        "hotfix",
    )
    code, out, _ = run("once", root, "--step", "1")
    assert (
        out == "step 1 was published before as version 1, which is not live: another version is\n"
    )


def test_once_for_a_user_without_a_home(
    local: Bench, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """E64: nothing is trusted then, which is said; what needs no code works."""
    local.run.commit(2, stamped_tensors(2))
    for name in ("HOME", "XDG_CONFIG_HOME", "SIDESTAGE_TRUST_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 1000660000)
    refused = run("once", local.run.root.url)
    failed(refused, 2, "not trusted on this host")
    assert "to a file that SIDESTAGE_TRUST_FILE names" in refused[2]
    assert run("history", local.run.root.url)[0] == 0
    assert run("pin", local.run.root.url, "1")[0] == 0


def test_once_into_another_registry(local: Bench, run: Run, tmp_path: Path) -> None:
    target = tmp_path / "registry"
    assert run("once", local.run.root.url, "--registry", str(target))[0] == 0
    assert (target / "live.json").exists()
    assert run("history", local.run.root.url, "--registry", f"file://{target}")[1].count("\n") == 1


def test_once_refused_by_a_gate(local: Bench, run: Run) -> None:
    tensors = stamped_tensors(2)
    tensors["model.over.bias"][0] = float("nan")
    local.run.commit(2, tensors)
    failed(run("once", local.run.root.url), 2, "error: gate finite: model.over.bias row 0: 1 of")
    local.run.commit(3, stamped_tensors(3))
    info = local.run.info(3)
    flip_byte(local.run.root, local.run.data_key(3), 4)
    assert info.status == "latest"
    failed(run("once", local.run.root.url), 5, "error: gate digests: ")


def test_once_says_which_commit_it_passes_over(local: Bench, run: Run) -> None:
    local.run.commit(2, stamped_tensors(2))
    local.run.root.delete(local.run.data_key(2))
    code, out, err = run("once", local.run.root.url)
    assert code == 0
    assert "step 1 was published before" in out
    assert err.startswith("step 2 is passed over: data/")


def test_an_untrusted_program(local: Bench, run: Run) -> None:
    local.run.commit(2, stamped_tensors(2))
    local.run.trust.path.write_text("")
    failed(run("once", local.run.root.url), 2, f"add that sum as a line to {local.run.trust.path}")


def test_status_and_history(local: Bench, run: Run) -> None:
    root = local.run.root.url
    publish(local, 2)
    tensors = stamped_tensors(3)
    tensors["model.over.bias"][0] = float("inf")
    local.run.commit(3, tensors)
    run("once", root)
    code, out, _ = run("status", root, "--json")
    found = json.loads(out)
    assert code == 0
    assert (found["live"]["version"], found["live"]["step"]) == (2, 2)
    assert found["newest_commit"] == {
        "epoch": 1,
        "step": 3,
        "committed_at_s": 31.0,
        "version": None,
    }
    assert found["versions"] == [1, 2]
    (refused,) = found["refused"]
    assert (refused["step"], refused["attempts"], refused["gate"]) == (3, 1, "finite")
    text = run("status", root)[1]
    assert "live      version 2 (step 2) since " in text
    assert "newest    step 3, not published" in text
    assert "refused   step 3, 1 times, gate finite: model.over.bias row 0" in text
    text = run("history", root)[1]
    assert len(text.splitlines()) == 2
    assert "1 -> 2  step 2  tester@here: test" in text
    moves = json.loads(run("history", root, "--json", "--limit", "1")[1])["moves"]
    assert [(m["from_version"], m["to_version"]) for m in moves] == [(1, 2)]


def test_status_of_an_empty_registry(tmp_path: Path, trust: TrustList, run: Run) -> None:
    bench = make_bench(LocalStorage(tmp_path / "root"), trust)
    text = run("status", bench.run.root.url)[1]
    assert "live      nothing yet" in text
    assert "newest    no commit yet" in text
    assert run("history", bench.run.root.url)[1] == "no version was live yet\n"
    failed(run("rollback", bench.run.root.url), 3, "no version is live yet")


def test_rollback(local: Bench, run: Run) -> None:
    root = local.run.root.url
    publish(local, 2, 3)
    code, out, _ = run("rollback", root, "--why", "bad clicks")
    assert (code, out) == (0, "version 2 (step 2) is live; was 3\n")
    assert run("once", root)[1].startswith("step 3 was published before as version 3, which is not")
    told = json.loads(run("rollback", root, "--to", "1", "--json")[1])
    assert (told["from_version"], told["to_version"], told["kind"]) == (2, 1, "rollback")
    failed(run("rollback", root), 3, "no version was live before version 1")
    failed(run("rollback", root, "--to", "1"), 4, "version 1 is live already")
    failed(run("rollback", root, "--to", "9"), 3, "no version 9 here; the newest are: 1, 2, 3")


POLICY = """
[gates]
norm_drift_max_ratio = 100
[release]
canary = true
"""


def test_a_canary_by_policy_and_its_promotion(local: Bench, run: Run, tmp_path: Path) -> None:
    root = local.run.root.url
    (tmp_path / "policy.toml").write_text(POLICY)
    local.run.commit(2, stamped_tensors(2))
    code, out, _ = run("once", root, "--policy", str(tmp_path / "policy.toml"))
    assert code == 0
    assert out == (
        "step 2 published as version 2, which is the canary: `publisher promote` makes it live\n"
    )
    failed(run("promote", root, "--version", "1"), 4, "the canary is version 2, not 1")
    code, out, _ = run("promote", root, "--why", "clicks are up", "--who", "me@here")
    assert (code, out) == (0, "version 2 (step 2) is live; was 1\n")
    failed(run("promote", root), 3, "there is no canary to promote")
    lines = run("history", root)[1].splitlines()
    assert "canary    canary 2  step 2" in lines[1]
    assert "promote   1 -> 2  step 2  me@here: clicks are up" in lines[2]
    assert json.loads(run("rollback", root, "--json")[1])["to_version"] == 1


def test_pins_and_retention(local: Bench, run: Run) -> None:
    root = local.run.root.url
    publish(local, 2, 3, 4, 5)
    code, out, _ = run("pin", root, "2", "--who", "me@here", "--why", "audit")
    assert (code, out) == (0, "version 2 is pinned\n")
    failed(run("pin", root, "2"), 4, "version 2 is pinned already; unpin it first")
    failed(run("pin", root, "9"), 3, "no version 9 here; the newest are: 1, 2, 3, 4, 5")
    assert run("pins", root)[1].endswith("me@here: audit\n")
    assert json.loads(run("history", root, "--json")[1])["pins"][0]["version"] == 2
    dry = json.loads(run("prune", root, "--keep", "1", "--dry-run", "--json")[1])
    assert dry == {"versions": [1, 3], "keep": 1, "dry_run": True}
    assert local.registry.numbers() == [1, 2, 3, 4, 5]
    assert run("prune", root, "--keep", "1")[1] == "versions 1, 3 deleted; 3 here\n"
    failed(run("rollback", root, "--to", "1"), 3, "no version 1 here; the newest are: 2, 4, 5")
    assert run("unpin", root, "2")[1] == "version 2 isn't pinned any more\n"
    failed(run("unpin", root, "2"), 3, "version 2 isn't pinned")
    assert run("pins", root)[1] == "nothing is pinned\n"
    assert run("prune", root)[1] == "no version deleted; 3 here\n"  # ten are kept by default


def test_the_policy_is_printed_with_its_defaults(run: Run, tmp_path: Path) -> None:
    (tmp_path / "policy.toml").write_text(POLICY)
    code, out, _ = run("policy", str(tmp_path / "policy.toml"))
    assert code == 0
    assert "norm_drift_max_ratio = 100.0\nmax" not in out
    assert "parity_max_abs_err = 0.01" in out
    (tmp_path / "printed.toml").write_text(out)
    both = [
        json.loads(run("policy", str(tmp_path / n), "--json")[1])
        for n in ("policy.toml", "printed.toml")
    ]
    assert both[0] == both[1]
    assert both[0]["gates"]["norm_drift_max_ratio"] == 100.0
    assert json.loads(run("policy", "--json")[1])["retention"] == {"keep": 10}
    (tmp_path / "wrong.toml").write_text("[gate]\nx = 1\n")
    failed(run("policy", str(tmp_path / "wrong.toml")), 2, "unknown gate")
    failed(run("policy", str(tmp_path / "none.toml")), 3, "no such policy file")


def test_a_wrong_policy_publishes_nothing(local: Bench, run: Run, tmp_path: Path) -> None:
    local.run.commit(2, stamped_tensors(2))
    (tmp_path / "wrong.toml").write_text("[gates]\nparity = 1\n")
    for command in ("once", "run"):
        args = (command, local.run.root.url, "--policy", str(tmp_path / "wrong.toml"))
        failed(run(*args), 2, "gates: missing nothing; unknown parity")
    failed(run("once", local.run.root.url, "--policy", str(tmp_path)), 2, "not a policy file")
    assert local.registry.numbers() == [1]
    (tmp_path / "strict.toml").write_text("[gates]\nparity_max_abs_err = 0\n")
    strict = ("once", local.run.root.url, "--policy", str(tmp_path / "strict.toml"))
    failed(run(*strict), 2, "gate golden_parity: max abs error 0, allowed below 0")
    assert run(*strict, "--max-error", "0.1")[0] == 0  # the command line goes first


def test_once_beside_a_publisher_that_lives(local: Bench, run: Run) -> None:
    owner = Lease(local.registry, ttl_s=2.0)
    with owner.kept():
        assert owner.acquire()
        code, out, err = run("once", local.run.root.url)
    waiting, error = err.splitlines()
    assert (code, out) == (4, "")
    assert waiting.startswith("waiting up to 2 s for a sign of life of pid ")
    assert f"pid {os.getpid()} on {socket.gethostname()} (lease 1) publishes into it" in error
    assert run("once", local.run.root.url)[0] == 0  # it has left


@pytest.mark.parametrize("command", ["once", "run"])
def test_a_store_on_which_publishers_cannot_exclude_each_other(
    local: Bench, run: Run, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LocalStorage, "probe", lambda _: False)
    failed(run(command, local.run.root.url), 2, "doesn't honour conditional writes")


COMMANDS = ("once", "status", "rollback", "promote", "history", "pins", "prune", "serve")


@pytest.mark.parametrize("command", COMMANDS)
def test_a_root_that_is_none(command: str, run: Run, tmp_path: Path) -> None:
    failed(run(command, str(tmp_path / "nowhere")), 3, "no such folder; check the path")
    (tmp_path / "file").write_text("")
    failed(run(command, str(tmp_path / "file")), 2, "is a file")
    (tmp_path / "empty").mkdir()
    failed(run(command, str(tmp_path / "empty")), 3, "no RUN.json here: not the root of a run")
    failed(run(command, "ftp://x/y"), 2, "scheme 'ftp' isn't supported")


def test_run_with_a_file_as_root(run: Run, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    failed(run("run", str(tmp_path / "file")), 2, "is a file")


def test_an_unwritable_registry(local: Bench, run: Run, tmp_path: Path) -> None:
    local.run.commit(2, stamped_tensors(2))
    (tmp_path / "file").write_text("")
    target = str(tmp_path / "file" / "below")
    failed(run("once", local.run.root.url, "--registry", target), 2, "is a file")
    failed(run("once", local.run.root.url, "--registry", "/sys/sidestage"), 6, "/sys/sidestage")


def test_a_port_in_use(local: Bench, run: Run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        failed(run("serve", local.run.root.url, "--port", port), 6, "is in use by another process")


@pytest.mark.parametrize(
    "args",
    [
        ("once",),
        ("pin", "r"),
        ("pin", "r", "x"),
        ("prune", "r", "--keep", "-1"),
        ("policy", "f", "--gates"),
        ("once", "r", "--max-error", "0"),
        ("serve", "r", "--port", "70000"),
        ("nothing",),
    ],
)
def test_wrong_usage(args: tuple[str, ...], run: Run) -> None:
    code, out, err = run(*args)
    assert (code, out) == (2, "")
    assert "Error: " in err


def test_help_and_status_need_no_torch(local: Bench) -> None:
    code = (
        "import sys\nfrom ckpt.command import run_command\nfrom publisher.cli import cli\n"
        "for args in (['--help'], ['status', ROOT], ['history', ROOT], ['pin', ROOT, '1'],\n"
        "             ['prune', ROOT], ['policy'], ['run', '--help']):\n"
        "    assert run_command(cli, args) == 0\n"
        "assert 'torch' not in sys.modules, 'torch was imported'\n"
    ).replace("ROOT", repr(local.run.root.url))
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=env(local), check=False
    )
    assert done.returncode == 0, done.stderr


# -- the two that keep running, as processes ------------------------------------------------


def env(bench: Bench) -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": str(REPO),
        "OMP_NUM_THREADS": "1",
        "SIDESTAGE_TRUST_FILE": str(bench.run.trust.path),
    }


class Process:
    """A `publisher` process that prints JSON lines."""

    def __init__(self, popen: Any, bench: Bench, *args: str) -> None:
        self.process = popen(
            [sys.executable, "-m", "publisher.cli", *args, "--json"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=env(bench),
        )
        self.deadline = threading.Timer(DEADLINE_S, self.process.kill)
        self.deadline.start()

    def wait_for(self, event: str) -> dict[str, Any]:
        """The next event of that name."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            told: dict[str, Any] = json.loads(line)
            if told["event"] == event:
                return told
        raise AssertionError(f"ended without {event}: {self.process.communicate()[1]}")

    def stop(self, sig: int = signal.SIGTERM) -> int:
        self.process.send_signal(sig)
        out, err = self.process.communicate()
        self.deadline.cancel()
        assert err == ""
        assert json.loads(out.splitlines()[-1])["event"] == "stopped"
        return self.process.returncode

    def close(self) -> None:
        self.deadline.cancel()
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def start() -> Iterator[Callable[..., Process]]:
    started: list[Process] = []

    def go(bench: Bench, *args: str, popen: Any = warm.Popen) -> Process:
        started.append(Process(popen, bench, *args))
        return started[-1]

    yield go
    for process in started:
        process.close()


def test_run_and_serve_end_to_end(
    tmp_path: Path, trust: TrustList, start: Callable[..., Process]
) -> None:
    """A daemon started before there is a root; a server that follows it, there and back."""
    storage = LocalStorage(tmp_path / "root")
    bench = Bench(TinyRun(storage, trust), Registry(storage))
    fresh = partial(subprocess.Popen, text=True)
    daemon = start(bench, "run", storage.url, "--interval=0.1", "--no-compile", popen=fresh)
    daemon.wait_for("waiting_for_root")
    bench.run.begin()
    bench.run.commit(1, stamped_tensors(1))
    assert daemon.wait_for("version_live")["version"] == 1
    server = start(bench, "serve", storage.url, "--port=0", "--interval=0.05", popen=fresh)
    url = server.wait_for("listening")["url"]
    assert server.wait_for("version_loaded")["version"] == 1
    body = {"inputs": [as_input(n, t) for n, t in GOLDEN.items()]}
    with httpx.Client(base_url=url, trust_env=False, timeout=DEADLINE_S) as client:

        def stamp() -> tuple[str, float]:
            got = client.post("/v2/models/tiny/infer", json=body).json()
            values = {o["name"]: o["data"] for o in got["outputs"]}
            assert values["dense_stamp"][0] == values["user_stamp"][0]
            return got["model_version"], values["dense_stamp"][0]

        assert stamp() == ("1", 1.0)
        bench.run.commit(2, stamped_tensors(2))
        daemon.wait_for("version_live")
        server.wait_for("version_loaded")
        assert stamp() == ("2", 2.0)
        assert run_command(cli.cli, ["rollback", storage.url]) == 0
        server.wait_for("version_loaded")
        assert stamp() == ("1", 1.0)
    assert server.stop() == 0
    bench.run.commit(3, stamped_tensors(3))
    wait_for_file(tmp_path / "root" / bench.registry.key(3, keys.CLAIM))
    assert daemon.stop(signal.SIGINT) == 0  # what was begun is finished
    assert [(m.kind, m.to_version) for m in bench.registry.history()] == [
        ("publish", 1),
        ("publish", 2),
        ("rollback", 1),
        ("publish", 3),
    ]
    assert bench.registry.version(3).gates[-1].name == "golden_parity"


def test_a_standby_follows_a_publisher_that_was_killed(
    local: Bench, start: Callable[..., Process]
) -> None:
    root = local.run.root.url
    options = ("--interval", "0.1", "--lease-ttl", "3")
    first = start(local, "run", root, *options)
    assert first.wait_for("lease_taken")["epoch"] == 1
    second = start(local, "run", root, *options)
    assert f"pid {first.process.pid} on " in second.wait_for("standby")["reason"]
    first.process.kill()
    local.run.commit(2, stamped_tensors(2))
    assert second.wait_for("lease_taken")["epoch"] == 2
    told = second.wait_for("version_live")
    assert (told["version"], told["event_to_live_s"]) == (2, None)
    assert second.stop() == 0
    assert [m.lease_epoch for m in local.registry.history()] == [0, 2]
    lease = local.registry.lease()
    assert lease is not None
    assert lease.released


def wait_for_file(path: Path) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not path.exists():
        assert time.monotonic() < deadline
        threading.Event().wait(0.01)
