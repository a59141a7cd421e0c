import re

import pytest

from trainer.quiet import LIBRARY_WARNINGS


def pytest_configure(config: pytest.Config) -> None:
    # Said by torch and torchrec about each other; trainer.quiet tells which and why.
    for message in LIBRARY_WARNINGS:
        config.addinivalue_line("filterwarnings", f"ignore:{re.escape(message)}:FutureWarning")
    # fbgemm at import: its CPU build lacks the optimizers of SSD tables, and torchrec still
    # imports a module under its old name.
    for message in ("Failed to import. fbgemm_gpu", "The Python module fbgemm_gpu"):
        config.addinivalue_line("filterwarnings", rf"ignore:\W+93m\s+{message}:DeprecationWarning")
