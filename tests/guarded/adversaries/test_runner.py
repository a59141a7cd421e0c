"""The runner finds what it's for: each misfit gets its verdict, by its name, and the next one runs."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from tests.guarded.adversaries import misfits  # noqa: F401 - registers them
from tests.guarded.adversaries.judge import ForkServer, judge
from tests.guarded.adversaries.registry import Case, cases

WRONG = {
    "dies": ("crash", "rank 0 ended with -11"),
    "stalls": ("hang", "no end after 1 s"),
    "stalls in a child that it leaves behind": ("hang", "no end after 1 s"),
    "raises": ("wrong", "a trainer's own error"),
    "is committed with other bytes": ("silent", r"model.users.weight at \(0, 0\): rows \[7\]"),
    "is refused without a name": ("wrong", "unnamed something was changed"),
    "is refused without advice": ("wrong", "unnamed model.users: changed"),
    "is refused, and must be exact": ("wrong", "refused, and must be exact"),
    "is exact, and must be refused": ("wrong", "exact, and must be refused"),
    "is refused for ever": ("wrong", "still refused once the adversary has stopped"),
    "copies everything": ("wrong", "no table was left in place"),
    "saves nothing": ("wrong", "nothing was saved"),
    "leaves a hook behind": ("wrong", "global optimizer hooks"),
    "is well": ("exact", ""),
    "is well on two ranks": ("exact", ""),
    "dies on one rank": ("crash", "rank 1 ended with -9"),
}


@pytest.mark.parametrize("case", [c for c in cases("misfits") if c.guards == "native"], ids=str)
def test_each_misfit_is_told(case: Case, fork_server: ForkServer, tmp_path: Path) -> None:
    started = time.monotonic()
    verdict = judge(case, fork_server.run(case, tmp_path, passes=["before"]))
    name, detail = WRONG[case.adversary.name]
    assert verdict.name == name, verdict.detail
    assert re.search(detail, verdict.detail)
    if name == "hang":
        assert time.monotonic() - started < 30


def test_every_misfit_has_its_verdict() -> None:
    assert set(WRONG) == {c.adversary.name for c in cases("misfits")}
