"""Warm workers: real agents and forks, of a program that imports nothing slow."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.processes import alive
from tests.trainer.launch import ROOT

PROGRAM = """
import atexit, gc, json, os, signal, sys
import made_up_model
folder, how = sys.argv[1:]
rank, life = os.environ["RANK"], int(os.environ["TORCHELASTIC_RESTART_COUNT"])
seen = {"parent": os.getppid(), "imported_by": made_up_model.IMPORTED_BY, "me": os.getpid(), "name": __name__}
seen["session"] = os.getsid(0)
seen["collects"] = [made_up_model.COLLECTED, gc.isenabled(), gc.get_freeze_count() > 1000]
with open(f"{folder}/new-{life}-{rank}", "w") as file:  # under its name only when whole
    file.write(json.dumps(seen))
os.replace(file.name, f"{folder}/life{life}-r{rank}")
atexit.register(lambda: open(f"{folder}/left{life}-r{rank}", "w").close())
if how == "killed" and life == 0 and rank == "1":
    os.kill(os.getpid(), signal.SIGKILL)
if how == "waiting":
    while True:
        signal.pause()
if how == "failing" and rank == "0":
    sys.exit(7)
sys.exit(0)
"""
MODEL = "import gc, os\nIMPORTED_BY, COLLECTED = os.getpid(), gc.isenabled()\n"


def command(folder: Path, how: str, restarts: int) -> list[str]:
    (folder / "program.py").write_text(PROGRAM)
    (folder / "made_up_model.py").write_text(MODEL)
    return [
        *(sys.executable, "-m", "trainer.cli", "launch", "--preload", "made_up_model"),
        *("--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=2"),
        *(f"--max-restarts={restarts}", str(folder / "program.py"), str(folder), how),
    ]


def environment(folder: Path) -> dict[str, str]:
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path}


def launch(folder: Path, how: str, restarts: int) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(folder, how, restarts),
        cwd=ROOT,
        env={**environment(folder), "PYTHONPROFILEIMPORTTIME": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.crash
@pytest.mark.parametrize("group", [False, True])
def test_workers_end_with_the_launcher_also_where_sigint_is_ignored(
    tmp_path: Path, group: bool
) -> None:
    """As in what a shell starts in the background. They have sessions, and so groups, of their own."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        launcher = subprocess.Popen(
            command(tmp_path, "waiting", 0),
            cwd=ROOT,
            env=environment(tmp_path),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    finally:
        signal.signal(signal.SIGINT, before)
    deadline = time.monotonic() + 90
    told = [tmp_path / "life0-r0", tmp_path / "life0-r1"]
    while not all(p.exists() for p in told):
        assert launcher.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    workers = [json.loads(p.read_text())["me"] for p in told]
    server = json.loads(told[0].read_text())["imported_by"]
    if group:
        os.killpg(launcher.pid, signal.SIGKILL)
    else:
        launcher.kill()
    launcher.wait()
    while any(alive(pid) for pid in (*workers, server)):
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.crash
def test_workers_of_every_life_are_forks_of_one_process_that_has_imported(tmp_path: Path) -> None:
    done = launch(tmp_path, "killed", 1)
    assert done.returncode == 0, done.stderr
    seen = {
        p.name: json.loads(p.read_text()) for p in tmp_path.iterdir() if p.name.startswith("life")
    }
    assert {"life0-r1", "life1-r0", "life1-r1"} <= set(seen)
    (server,) = {s["imported_by"] for s in seen.values()}
    assert server not in {s["me"] for s in seen.values()}
    assert len({s["parent"] for s in seen.values()}) == 1  # the launcher
    assert len({s["me"] for s in seen.values()}) == len(seen)
    assert {s["name"] for s in seen.values()} == {"__main__"}
    assert all(s["session"] == s["me"] for s in seen.values())  # as those of torchrun
    # No garbage is looked for while importing, nor in what was imported; but in all that comes later.
    assert all(s["collects"] == [False, True, True] for s in seen.values())
    assert (tmp_path / "left1-r0").exists()  # atexit functions have run, in forks too
    assert (tmp_path / "left1-r1").exists()
    assert "failed (exitcode: -9) local_rank: 1" in done.stderr
    # What torch's own log formatter would import to tell of an exception: two seconds before the restart.
    assert "| torch" in done.stderr
    assert " torch._dynamo\n" not in done.stderr


def test_the_exit_code_is_that_of_the_worker_that_failed(tmp_path: Path) -> None:
    done = launch(tmp_path, "failing", 0)
    assert done.returncode == 7, done.stderr
    assert "exitcode  : 7" in done.stderr


def test_a_program_of_this_package_finds_all_of_it_imported() -> None:
    """Also in the folder of its source, where the path leads to it before it leads to what is installed."""
    command = [sys.executable, "-m", "trainer.cli", "launch", "--standalone", "-m", "trainer.cli"]
    done = subprocess.run(
        [*command, "--version"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPROFILEIMPORTTIME": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "trainer.cli, version" in done.stdout
    assert done.stderr.count(" trainer.movielens\n") == 1
    assert "fresh processes" not in done.stderr
