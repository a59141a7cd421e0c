"""Figures that a fresh process finds out, from published bytes alone: what crashes there fails a gate.

The process is `python -m MODULE ARGS < DATA`; it prints one JSON object, or an error as the last
line of stderr with the exit code of its class.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from ckpt.errors import DeadlineError, SidestageError, StorageError
from ckpt.trust import TrustList
from publisher.gates import GateError
from publisher.records import GateName


def figure_in_fresh_process(
    gate: GateName, command: Sequence[str], data: bytes, trust: TrustList, timeout_s: float
) -> float:
    """The `figure` that the process `command`, a module and its arguments, prints; NaN is one.

    Raises GateError of that gate whatever it dies of or refuses, StorageError: try again.
    """
    # Where this process finds its modules, in the same order, and never the current folder.
    path = os.pathsep.join([*filter(None, sys.path), str(Path(__file__).resolve().parents[1])])
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", *command],
            input=data,
            capture_output=True,
            env={**os.environ, "PYTHONPATH": path, "SIDESTAGE_TRUST_FILE": str(trust.path)},
            timeout=timeout_s,
            check=False,
            # A Ctrl-C for the daemon must not fail the gate of the work that it finishes.
            start_new_session=True,
        )
    except subprocess.TimeoutExpired:
        raise GateError(
            gate, f"no answer within {timeout_s:g} s", DeadlineError.exit_code
        ) from None
    said = done.stderr.decode(errors="replace").strip().splitlines()
    last = said[-1] if said else "it said nothing"
    if done.returncode == StorageError.exit_code:
        raise StorageError(f"{gate}: {last}")
    if done.returncode < 0:
        number = -done.returncode
        name = next((s.name for s in signal.Signals if s == number), f"signal {number}")
        raise GateError(gate, f"the process that loaded the version died of {name}: {last}")
    if done.returncode != 0:
        code = done.returncode if done.returncode in (2, 5) else 1
        raise GateError(gate, last.removeprefix("error: "), code)
    try:
        figure = json.loads(done.stdout)["figure"]
        return math.nan if figure is None else float(figure)
    except (ValueError, KeyError, TypeError):
        raise GateError(gate, f"no figure in the answer {done.stdout[:80]!r}") from None


def answer(find_out: Callable[[], float]) -> int:
    """The fresh process's own side: print the figure or the error; the exit code."""
    for name in (signal.SIGINT, signal.SIGTERM):  # they tell its parent to finish
        signal.signal(name, signal.SIG_IGN)
    try:
        figure = find_out()
    except SidestageError as e:
        print(f"error: {e}", file=sys.stderr)
        return e.exit_code
    print(json.dumps({"figure": figure if math.isfinite(figure) else None}))
    return 0
