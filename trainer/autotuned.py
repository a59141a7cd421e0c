"""Which of the kernels that autotuning has tried won, so that an archive needn't hold the others.

Of the compiler's folder on CUDA: `*.best_config` (JSON) names the winner of each tuned kernel by its
Triton hash, and `triton/<device>/<hash>/<kernel>.json` lies beside each binary. On CPUs there is neither.
A file that is left out by mistake is compiled again, nothing worse. Tried on files of that form only:
no GPU was at hand.
"""

from __future__ import annotations

import json
from pathlib import Path


def losers(folder: Path) -> set[Path]:
    """Folders of binaries of tuned kernels that didn't win. Kernels that weren't tuned stay whole."""
    winners = set()
    for path in folder.rglob("*.best_config"):
        try:
            said = json.loads(path.read_bytes())
        except (OSError, ValueError):
            continue
        if isinstance(said, dict) and isinstance(said.get("triton_cache_hash"), str):
            winners.add(said["triton_cache_hash"])
    if not winners:
        return set()
    binaries = {p: _kernels(p) for p in folder.glob("triton/*/*") if p.is_dir()}
    tuned = {k for p, kernels in binaries.items() if p.name in winners for k in kernels}
    return {
        p
        for p, kernels in binaries.items()
        if p.name not in winners and kernels and kernels <= tuned
    }


def _kernels(folder: Path) -> set[str]:
    return {p.stem for p in folder.glob("*.json") if not p.name.startswith("__grp__")}
