"""Memory and processes: see `memory`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.guarded.adversaries import memory  # noqa: F401 - its adversaries register themselves
from tests.guarded.adversaries.judge import ForkServer, play
from tests.guarded.adversaries.registry import Case, cases


@pytest.mark.parametrize("case", cases("memory"), ids=str)
def test_each_save_is_exact_or_refused(
    case: Case,
    fork_server: ForkServer,
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    play(case, fork_server, tmp_path, record_property)
