import re

import pytest

from trainer.quiet import LIBRARY_WARNINGS


def pytest_configure(config: pytest.Config) -> None:
    # Said by torch and torchrec about each other; trainer.quiet tells which and why.
    for message in LIBRARY_WARNINGS:
        config.addinivalue_line("filterwarnings", f"ignore:{re.escape(message)}:FutureWarning")
