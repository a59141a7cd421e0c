"""Case D09: the saver opens no port, so that trainers on one host can't take one from each other."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests import warm

pytestmark = pytest.mark.crash


def test_d09_two_trainers_that_start_together_twenty_times_use_no_port(tmp_path: Path) -> None:
    trainers = [
        warm.Popen(
            [sys.executable, "-m", "tests.crash.trainer", str(tmp_path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        for _ in range(2)
    ]
    try:
        pipes = [(t.stdin, t.stdout) for t in trainers]
        for _, out in pipes:
            assert out is not None
            assert out.readline() == "ready\n"
        for n in range(20):
            for which, (to, _) in enumerate(pipes):
                assert to is not None
                to.write(f"run-{which}-{n}\n")
                to.flush()
            for _, out in pipes:
                assert out is not None
                assert out.readline() == "[1, 1] [] []\n", "the first save, no port, nothing bound"
        for t in trainers:
            t.communicate(timeout=60)
            assert t.returncode == 0
    finally:
        for t in trainers:
            t.kill()
            t.wait()
