"""Warm workers: real agents and forks, of a program that imports nothing slow."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

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
if how == "failing" and rank == "0":
    sys.exit(7)
sys.exit(0)
"""
MODEL = "import gc, os\nIMPORTED_BY, COLLECTED = os.getpid(), gc.isenabled()\n"


def launch(folder: Path, how: str, restarts: int) -> subprocess.CompletedProcess[str]:
    (folder / "program.py").write_text(PROGRAM)
    (folder / "made_up_model.py").write_text(MODEL)
    command = [
        *(sys.executable, "-m", "trainer.cli", "launch", "--preload", "made_up_model"),
        *("--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=2"),
        *(f"--max-restarts={restarts}", str(folder / "program.py"), str(folder), how),
    ]
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path, "PYTHONPROFILEIMPORTTIME": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.crash
def test_workers_of_every_life_are_forks_of_one_process_that_has_imported(tmp_path: Path) -> None:
    done = launch(tmp_path, "killed", 1)
    assert done.returncode == 0, done.stderr
    seen = {
        p.name: json.loads(p.read_text()) for p in tmp_path.iterdir() if p.name.startswith("life")
    }
    assert {"life0-r1", "life1-r0", "life1-r1"} <= set(seen)
    (server,) = {s["parent"] for s in seen.values()}
    assert {s["imported_by"] for s in seen.values()} == {server}
    assert len({s["me"] for s in seen.values()}) == len(seen)
    assert {s["name"] for s in seen.values()} == {"__main__"}
    assert all(s["session"] == s["me"] for s in seen.values())  # as those of torchrun
    # No garbage is looked for while importing, nor in what was imported; but in all that comes later.
    assert all(s["collects"] == [False, True, True] for s in seen.values())
    assert (tmp_path / "left1-r0").exists()  # atexit functions have run, in forks too
    assert (tmp_path / "left1-r1").exists()
    assert "terminated with signal SIGKILL" in done.stderr
    # torch's own log formatter imports it to tell of the SIGKILL: two seconds before the restart.
    assert "| torch" in done.stderr
    assert " torch._dynamo\n" not in done.stderr


def test_the_exit_code_is_that_of_the_worker_that_failed(tmp_path: Path) -> None:
    done = launch(tmp_path, "failing", 0)
    assert done.returncode == 7, done.stderr
    assert "exitcode  : 7" in done.stderr
