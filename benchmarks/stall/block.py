"""Runs one block: fresh ranks for one mode, watched from here."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.ranks import Seen, run_ranks
from benchmarks.stall.rank import Block


@dataclass(frozen=True)
class BlockResult:
    """All ranks of one block. Of what each rank saw, the worst counts.

    saves: figures of each save, by the names of SaveFigures.
    extra_bytes: memory at its peak, beyond what training took before the mode was set up.
    differing: elements of the restored state that weren't what they had been at save(); None if
        nobody compared.
    """

    state_bytes: int
    first_blocked_s: float
    saves: list[dict[str, float | None]]
    extra_bytes: int
    differing: int | None
    others_cores: float
    copied_tables: int | None = None


def run_block(block: Block, world: int, root: Path, deadline_s: float) -> BlockResult:
    """Start the ranks, wait for them, put together what they saw. Raises RanksFailed."""
    return _joined(run_ranks("benchmarks.stall.rank", asdict(block), world, root, deadline_s))


def _joined(seen: Seen) -> BlockResult:
    answers = seen.answers
    saves = []
    for of_ranks in zip(*(a["saves"] for a in answers), strict=True):
        names = of_ranks[0].keys()
        saves.append({n: _worst([figures[n] for figures in of_ranks]) for n in names})
    compared = all(a["differing"] is not None for a in answers)
    extra = seen.peak_bytes("open", "saved") - seen.peak_bytes("baseline", "open")
    return BlockResult(
        state_bytes=sum(a["state_bytes"] for a in answers),
        first_blocked_s=max(a["first_blocked_s"] for a in answers),
        saves=saves,
        extra_bytes=max(0, extra),
        differing=sum(n for a in answers for n in a["differing"].values()) if compared else None,
        others_cores=seen.others_cores("open", "saved"),
        copied_tables=answers[0]["copied_tables"],
    )


def _worst(values: list[float | None]) -> float | None:
    return max((v for v in values if v is not None), default=None)
