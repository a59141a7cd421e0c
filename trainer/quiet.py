"""Silences what the libraries below say about each other on every run, line by line known."""

from __future__ import annotations

import logging
import os
import re
import warnings

LIBRARY_WARNINGS = (
    # torchrec 1.8 calls what torch 2.13 has renamed; both still work.
    "`broadcast_buffers` is deprecated",
    "`torch.distributed.reduce_scatter_tensor` is deprecated",
    "`torch.distributed.all_gather_into_tensor` is deprecated",
    # torch.export copies its own tree specs in a way that it deprecates.
    "`isinstance(treespec, LeafSpec)` is deprecated",
)
"""How these FutureWarnings begin."""


def quiet_libraries() -> None:
    """Call it before torch is imported. Errors still show."""
    # DDP warns that it found no unused parameters; trainer.model says why it looks for them.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    for message in LIBRARY_WARNINGS:
        warnings.filterwarnings("ignore", re.escape(message), FutureWarning)
    # torchrec asks torch.fx whether it is being traced, and is told to ask another way.
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)
