"""Small programs that look at themselves see under `trainer launch` what they see under torchrun.

E41 and E56 to E61.
"""

from __future__ import annotations

import json
import os
import random
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.processes import alive
from tests.trainer.launch import ROOT
from tests.trainer.launched.ends import ENDS

PROGRAMS = Path(__file__).parent / "launched"
LOOKS = sorted(path.stem for path in (PROGRAMS / "looks").glob("*.py"))
# -P: as the installed commands, whose path doesn't begin with the current folder.
TORCHRUN = (sys.executable, "-P", "-m", "torch.distributed.run")
LAUNCH = (sys.executable, "-P", "-m", "trainer.cli", "launch")
# What differs between two runs of torchrun, too.
BY_RUN = {"MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE"}
SETTINGS = {
    "PYTHONHASHSEED": "7",
    "PYTHONIOENCODING": "latin-1:replace",
    "PYTHONWARNINGS": "ignore::UnicodeWarning",
    "LC_ALL": "C.UTF-8",
    "TZ": "Asia/Tokyo",
}


@dataclass
class Ran:
    """One run: its folder, its exit code and what it said."""

    folder: Path
    code: int
    out: str
    err: str

    def found(self, name: str) -> Any:
        """What the program has written, with the names of folders of this run left out."""
        return json.loads((self.folder / name).read_text().replace(str(self.folder), "FOLDER"))


@dataclass
class Both:
    """The same program under both."""

    torchrun: Ran
    launch: Ran


class Running:
    """A program under one launcher; its first argument is a folder of its own."""

    def __init__(
        self,
        launcher: Sequence[str],
        own: Path,
        program: Sequence[str],
        options: Sequence[str],
        arguments: Sequence[str] = (),
        *,
        folder: Path = PROGRAMS,
        environment: Mapping[str, str] | None = None,
        limits: Callable[[], object] | None = None,
        stdin: Path = Path(os.devnull),
    ) -> None:
        own.mkdir()
        self._own = own
        command = [*launcher, "--standalone", "--local-addr=127.0.0.1", "--monitor-interval=0.05"]
        command += [option.format(own=own) for option in options]
        path = os.pathsep.join([str(ROOT), str(PROGRAMS / "library")])
        with (own / "out").open("w") as out, (own / "err").open("w") as err, stdin.open() as given:
            self._process = subprocess.Popen(
                [*command, *program, str(own), *arguments],
                cwd=folder,
                env={**os.environ, "PYTHONPATH": path, **(environment or {})},
                stdin=given,
                stdout=out,
                stderr=err,
                preexec_fn=limits,  # noqa: PLW1509 - no other threads run here
            )

    def ran(self) -> Ran:
        """Wait for its end."""
        try:
            code = self._process.wait(120)
        finally:
            self.end()
        return Ran(self._own, code, *((self._own / n).read_text() for n in ("out", "err")))

    def end(self) -> None:
        if self._process.poll() is None:
            self._process.terminate()
            self._process.wait(60)


def launched(preload: Sequence[str]) -> tuple[str, ...]:
    return (*LAUNCH, *(f"--preload={module}" for module in preload))


def run_both(
    tmp: Path,
    program: Sequence[str],
    options: Sequence[str],
    preload: Sequence[str] = (),
    *rest: Any,
    **more: Any,
) -> Both:
    """The same at the same time."""
    usual = Running(TORCHRUN, tmp / "torchrun", program, options, *rest, **more)
    try:
        warm = Running(launched(preload), tmp / "launch", program, options, *rest, **more)
        try:
            return Both(usual.ran(), warm.ran())
        finally:
            warm.end()
    finally:
        usual.end()


def limits() -> None:
    """What whoever starts a job may have set."""
    os.umask(0o027)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 3000), hard))
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    os.nice(1)


@pytest.fixture(scope="module")
def looked(tmp_path_factory: pytest.TempPathFactory) -> Both:
    """All of `looks/` at once, each on a rank of its own."""
    tmp = tmp_path_factory.mktemp("looked")
    (tmp / "stdin").write_text("a line from stdin\nanother\n")
    return run_both(
        tmp,
        ["every.py"],
        [f"--nproc-per-node={len(LOOKS)}"],
        ["numpy", "torch", "uses_random_helpers", "sets_up"],
        LOOKS,
        environment=SETTINGS,
        limits=limits,
        stdin=tmp / "stdin",
    )


@pytest.mark.parametrize("name", LOOKS)
def test_what_a_program_sees(name: str, looked: Both) -> None:
    assert looked.torchrun.code == 0, looked.torchrun.err
    assert looked.launch.code == 0, looked.launch.err
    assert "fresh processes" not in looked.launch.err
    expected, found = (ran.found(f"{name}.json") for ran in (looked.torchrun, looked.launch))
    if name == "environment":
        for variables in (*expected.values(), *found.values()):
            variables.update(dict.fromkeys(BY_RUN & set(variables), "by run"))
    assert found == expected


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Both:
    """All of `ENDS`, one in each life of one rank."""
    options = ["--nproc-per-node=1", f"--max-restarts={len(ENDS) - 1}"]
    return run_both(tmp_path_factory.mktemp("ended"), ["ends.py"], options, ["json"])


@pytest.mark.crash
@pytest.mark.parametrize("life", range(len(ENDS)), ids=[end.__name__ for end in ENDS])
def test_how_a_program_ends(life: int, ended: Both) -> None:
    assert (ended.torchrun.code, ended.launch.code) == (0, 0), ended.launch.err
    told = [
        (of_life(ran.out, life), of_life(ran.err, life)) for ran in (ended.torchrun, ended.launch)
    ]
    assert told[0] == told[1]
    logs = [(ran.folder / f"life{life}").read_text() for ran in (ended.torchrun, ended.launch)]
    assert logs[0] == logs[1]


def of_life(text: str, life: int) -> str:
    """What was said from the mark of one life on, without what differs between two agents.

    The agent says by which exit code or signal the life ended.
    """
    said = re.split(rf"\n<{life}>\n|\n<{life + 1}>\n", text)
    assert len(said) > 1, f"nothing is told of life {life}: {text}"
    return re.sub(r"^[A-Z]\d{4} [\d:.]+ \d+ |pid: \d+|0x[0-9a-f]+", "", said[1], flags=re.M)


def test_the_module_that_a_program_is(tmp_path: Path) -> None:
    """From a folder for temporary files as batch systems have them, with options that are the program's."""
    deep = tmp_path / ("d" * 80) / ("e" * 60)
    deep.mkdir(parents=True)
    both = run_both(
        tmp_path,
        ["main.py"],
        ["--nproc-per-node=2", "--redirects=1:3", "--log-dir={own}/logs"],
        ["json"],
        ["--debug", "--preload", "x", "-m", "--", "a b"],
        environment={"TMPDIR": str(deep)},
    )
    assert (both.torchrun.code, both.launch.code) == (0, 0), both.launch.err
    assert "fresh processes" not in both.launch.err
    for rank in range(2):
        assert both.launch.found(f"rank{rank}.json") == both.torchrun.found(f"rank{rank}.json")
    assert both.launch.found("rank0.json")["argv"][2:] == [
        "--debug",
        "--preload",
        "x",
        "-m",
        "--",
        "a b",
    ]
    assert both.launch.out == both.torchrun.out
    logs = [
        [path.read_text() for path in sorted(ran.folder.glob("logs/*/attempt_0/*/*.log"))]
        for ran in (both.torchrun, both.launch)
    ]
    assert logs[0] == logs[1]
    assert len(logs[0]) == 2


def test_a_module_of_the_current_folder_in_a_package_with_a_name_of_ours(tmp_path: Path) -> None:
    both = run_both(
        tmp_path, ["-m", "trainer.job"], ["--nproc-per-node=1"], folder=PROGRAMS / "packaged"
    )
    assert (both.torchrun.code, both.launch.code) == (0, 0), both.launch.err
    assert "fresh processes" not in both.launch.err
    assert both.launch.found("job.json") == both.torchrun.found("job.json")
    assert both.launch.found("job.json")["model"][1] == str(PROGRAMS / "packaged/trainer/model.py")


def test_a_command_that_is_no_python_program_is_run_as_it_is(tmp_path: Path) -> None:
    wrapped = ["--no-python", "./bind.sh", sys.executable, "main.py"]
    both = run_both(tmp_path, wrapped, ["--nproc-per-node=1"])
    assert (both.torchrun.code, both.launch.code) == (0, 0), both.launch.err
    assert both.launch.found("rank0.json") == both.torchrun.found("rank0.json")
    assert both.launch.out == both.torchrun.out
    assert both.launch.err.count("workers are fresh processes and no forks") == 1


def test_a_program_that_sets_what_torch_reads_when_it_is_imported(tmp_path: Path) -> None:
    """As many threads as it says: under one rank torch would have as many as there are cores."""
    ran = Running(LAUNCH, tmp_path / "launch", ["late.py"], ["--nproc-per-node=1"]).ran()
    assert ran.code == 0, ran.err
    assert (ran.folder / "threads").read_text() == "1"
    assert ran.err.count("OMP_NUM_THREADS=... trainer launch") == 1


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """Two lives of two ranks; how many isn't understood before torch is there to read it."""
    own = tmp_path_factory.mktemp("drawn") / "launch"
    options = ["--nproc-per=2", "--max-restarts=1"]
    return Running(launched(["torch", "drawing"]), own, ["draws.py"], options).ran()


@pytest.mark.crash
def test_ranks_and_restarts_draw_different_numbers(drawn: Ran) -> None:
    assert drawn.code == 0, drawn.err
    assert "fresh processes" not in drawn.err
    lives = [drawn.found(f"life{life}-rank{rank}.json") for life in (0, 1) for rank in (0, 1)]
    for name in lives[0]["fresh"]:
        assert len({json.dumps(one["fresh"][name]) for one in lives}) == 4, name
    seeded = np.random.default_rng(5)
    expected = {
        "library.random": random.Random(5).random(),
        "library.generator": seeded.random(),
        "library.spawned": seeded.spawn(1)[0].random(),
        "library.state": np.random.RandomState(5).rand(),
        "library.late": random.Random(5).random(),
        "torch.Generator": torch.Generator().initial_seed(),
        "torch.threads": 1,
        "after_seeding": [
            torch.rand(1, generator=torch.Generator().manual_seed(3)).item(),
            np.random.RandomState(3).rand(),
            random.Random(3).random(),
        ],
    }
    assert all(one["same"] == expected for one in lives)


@pytest.mark.crash
def test_what_was_printed_before_a_kill_arrives(drawn: Ran) -> None:
    said = ["rank 0 draws", "rank 1 draws"]
    first, _, second = drawn.out.partition("not a whole line")
    assert (sorted(first.splitlines()), sorted(second.splitlines())) == (said, said)


@pytest.mark.crash
def test_a_restart_ends_what_workers_have_started(drawn: Ran) -> None:
    assert not alive(int((drawn.folder / "child").read_text()))


@pytest.mark.crash
def test_settings_that_come_too_late_are_told_once(drawn: Ran) -> None:
    """A module of the program's makes them before torch is imported: told in each life."""
    assert drawn.err.count("note: KMP_BLOCKTIME changed by the program has no effect") == 2


@pytest.mark.distributed
@pytest.mark.crash
def test_a_trainer_that_joins_by_itself_rejoins_after_each_restart(tmp_path: Path) -> None:
    lives = 6
    options = ["--nproc-per-node=2", f"--max-restarts={lives}"]
    own = tmp_path / "launch"
    ran = Running(launched(["torch"]), own, ["rejoining.py"], options, [str(lives)]).ran()
    assert ran.code == 0, ran.err
    told = {path.name: path.read_text() for path in own.glob("life*")}
    assert told == {f"life{life}-rank{rank}": "3.0" for life in range(lives) for rank in (0, 1)}
