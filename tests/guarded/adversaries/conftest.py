from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.guarded.adversaries.judge import ForkServer


@pytest.fixture(scope="session")
def fork_server() -> Iterator[ForkServer]:
    server = ForkServer()
    yield server
    server.close()
