"""The fork server's other end, and what its answers come to."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.guarded.adversaries.registry import Case, fuzzing, request

ROOT = Path(__file__).parent.parent.parent.parent
FUZZ_PASSES = 20


@dataclass(frozen=True)
class Verdict:
    """exact, refused, silent, crash, hang or wrong; `detail` says what was seen.

    starved: no save was committed as long as the adversary went on.
    """

    name: str
    detail: str
    starved: bool = False

    @property
    def good(self) -> bool:
        return self.name in {"exact", "refused"}


class ForkServer:
    def __init__(self) -> None:
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        env.pop("SIDESTAGE_NATIVE", None)
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "tests.guarded.adversaries.forkserver"],
            env=env,
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._answer() == {"ready": True}

    def run(self, case: Case, folder: Path, **changes: Any) -> dict[str, Any]:
        passes, deadline_s = list(case.passes), case.adversary.deadline_s
        if fuzzing():
            # The seeds are in what a failure shows; threads are no less random with them.
            passes = [str(random.randrange(1 << 30)) for _ in range(FUZZ_PASSES)]
            deadline_s *= FUZZ_PASSES / 2
        asked = {**request(case, str(folder), passes, deadline_s), **changes}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        self._process.communicate(timeout=30)

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the fork server has died"
        answer: dict[str, Any] = json.loads(line)
        return answer


def judge(case: Case, answer: dict[str, Any]) -> Verdict:
    """The worst of all saves, and whether that is what the adversary deserves."""
    seen = answer["seen"]
    of_saves = "; ".join(
        f"rank {s['rank']} {s['pass']} save {s['step']}: {s['verdict']} {s['message']}"
        for s in seen
        if s["verdict"] != "exact"
    )
    detail = "\n".join(filter(None, [answer["detail"], of_saves]))
    verdicts = {s["verdict"] for s in seen}
    if answer["ended"] in {"crash", "hang"}:
        return Verdict(answer["ended"], detail)
    if "silent" in verdicts:
        return Verdict("silent", detail)
    if answer["ended"] != "well" or verdicts & {"unnamed", "failed"} or not seen:
        return Verdict("wrong", detail or "nothing was saved")
    got = "refused" if "refused" in verdicts else "exact"
    right = case.adversary.right
    if right == "refused" and fuzzing():
        right = "either"  # by chance what would be lost was copied in time
    if right not in {"either", got}:
        return Verdict("wrong", f"{got}, and must be {right}\n{detail}")
    return Verdict(got, detail, _starved(seen))


def _starved(seen: Sequence[dict[str, Any]]) -> bool:
    acting = [s["verdict"] for s in seen if s["when"] == "acting"]
    return len(acting) > 1 and set(acting) == {"refused"}


def play(
    case: Case, server: ForkServer, folder: Path, record: Callable[[str, object], None]
) -> None:
    """What each test does. record: pytest's `record_property`, for the summary."""
    verdict = judge(case, server.run(case, folder))
    record("adversary", f"{verdict.name}, starved" if verdict.starved else verdict.name)
    assert verdict.good, f"{verdict.name}\n{verdict.detail}"
