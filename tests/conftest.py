"""What all tests share: which warnings of libraries aren't errors, and one S3 server for the run."""

from __future__ import annotations

import gc
import os
import re
import signal
from collections import Counter
from collections.abc import Generator, Iterator

import pytest
from hypothesis import settings

from tests.s3.server import ACCESS_KEY, SECRET_KEY, SeaweedFS
from trainer.quiet import LIBRARY_WARNINGS

# The same examples each time: what passed passes again. `make fuzz` looks for new ones.
settings.register_profile("fixed", derandomize=not os.environ.get("SIDESTAGE_FUZZ"), deadline=None)
settings.load_profile("fixed")


@pytest.fixture(autouse=True)
def signals_given_back() -> Iterator[None]:
    """Commands that run in this process leave handlers behind, which the next test isn't to meet."""
    before = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        if handler is not None and signal.getsignal(number) != handler:
            signal.signal(number, handler)


def pytest_configure(config: pytest.Config) -> None:
    """Here and not in a folder's conftest: those are read after collection has set up its filters."""
    # Said by torch and torchrec about each other; trainer.quiet tells which and why.
    for message in LIBRARY_WARNINGS:
        config.addinivalue_line("filterwarnings", f"ignore:{re.escape(message)}:FutureWarning")
    # fbgemm at import: its CPU build lacks the optimizers of SSD tables, and torchrec still
    # imports a module under its old name.
    for message in ("Failed to import. fbgemm_gpu", "The Python module fbgemm_gpu"):
        config.addinivalue_line("filterwarnings", rf"ignore:\W+93m\s+{message}:DeprecationWarning")
    # torch at import of its own torch.distributed.optim.
    config.addinivalue_line(
        "filterwarnings", r"ignore:`torch\.jit\.\w+` is deprecated:DeprecationWarning"
    )


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported stays: looking through it for garbage is a quarter of the time of tests."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What became of the adversaries of tests/guarded/adversaries, if any were run."""
    verdicts: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if getattr(report, "when", None) == "call":
                told = dict(report.user_properties).get("adversary")
                verdicts.update(str(told).split(", ") if told else ())
    if verdicts:
        shown = {"exact": 0, "refused": 0, "silent": 0, **dict(sorted(verdicts.items()))}
        terminalreporter.section("adversaries")
        terminalreporter.line(", ".join(f"{name} {count}" for name, count in shown.items()))


@pytest.fixture(scope="session")
def seaweedfs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SeaweedFS]:
    """A running server with an empty bucket, and credentials for it in the environment."""
    server = SeaweedFS(tmp_path_factory.mktemp("seaweedfs"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
        patch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        for name in ("AWS_SESSION_TOKEN", "AWS_PROFILE", "AWS_ENDPOINT_URL"):
            patch.delenv(name, raising=False)
        server.start()
        try:
            yield server
        finally:
            server.kill()
