"""`trainer prove-resume`: each life is a command, in processes of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from ckpt.config import TRACE_VARIABLE
from ckpt.errors import BadInputError, SidestageError
from trainer.config import launched_place, load_config

_PLACES = ("{root}", "{until}", "{save_every}")


def command_of(config: Path, overrides: Sequence[str], ranks: int) -> list[str]:
    """`trainer train` of a configuration, on so many ranks; whatever it writes goes beside the root."""
    settings = load_config(config, overrides)
    given = [
        *overrides,
        *("run.root={root}", "run.max_steps={until}", "run.save_every={save_every}"),
        *("run.result={root}-result.json", "checkpoint.keep_last=1000000", "serving.export=false"),
        "fault.only_on_attempt=-1",
    ]
    if settings.run.ledger:
        given.append("run.ledger={root}-ledger")
    if settings.proof.dir:
        given.append("proof.dir={root}-proof")
    train = ["-m", "trainer.cli", "train", "--config", str(config)]
    train += [part for setting in given for part in ("--set", setting)]
    if ranks == 1:
        return [sys.executable, *train]
    launch = [sys.executable, "-m", "trainer.cli", "launch", "--standalone"]
    return [*launch, f"--nproc-per-node={ranks}", "--max-restarts=0", *train]


class CommandLife:
    """Runs a command, with `{root}`, `{until}` and `{save_every}` filled in. Its output goes to a file."""

    def __init__(self, command: Sequence[str], save_every: int) -> None:
        missing = [p for p in _PLACES if not any(p in part for part in command)]
        if missing:
            raise BadInputError(
                f"the command has no {missing[0]}: write where it takes its root, the step at which it ends, "
                f"and the steps from one save to the next, such as train.py --root {{root}} "
                f"--steps {{until}} --save-every {{save_every}}"
            )
        if launched_place() is not None:
            raise BadInputError(
                "prove-resume runs the launcher, not the other way round: put it into the command"
            )
        self._command = command
        self._save_every = save_every

    def __call__(self, root: Path, until: int, trace: Path) -> None:
        values = dict(zip(_PLACES, (str(root), str(until), str(self._save_every)), strict=True))
        command = [_filled(part, values) for part in self._command]
        log = root.with_name(f"{root.name}.log")
        with log.open("wb") as out:
            try:
                code = subprocess.run(
                    command,
                    env={**os.environ, TRACE_VARIABLE: str(trace)},
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    check=False,
                ).returncode
            except OSError as e:
                raise BadInputError(f"{command[0]}: can't be started: {e.strerror}") from e
        if code:
            raise SidestageError(f"the command ended with {code}: {_said(log)}; see {log}")


def _filled(part: str, values: dict[str, str]) -> str:
    for place, value in values.items():
        part = part.replace(place, value)
    return part


def _said(log: Path) -> str:
    """The line of its output that tells most: its first error, else the last."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if "rror: " in line]
    return (errors or lines[-1:] or ["no output"])[0][:300]
