"""Rows and ratios of `stall`."""

from __future__ import annotations

from typing import Any

from benchmarks.report import MIB, Row, median
from benchmarks.stall.block import BlockResult
from benchmarks.training.modes import DCP_ASYNC, DCP_STAGER, MODES, OURS, UNPACED

COLUMNS = (
    "part",
    "mode",
    "ranks",
    "size_mib",
    "blocked_ms",
    "lost_ms",
    "persist_s",
    "unsynced_s",
    "step_inflation",
    "first_blocked_ms",
    "count",
    "first_us",
    "us_each",
    "state_dict_us",
    "second_vs_first",
    "extra_rss_vs_state",
    "exact",
    "others_cores",
)


def row(mode: str, blocks: list[BlockResult]) -> Row:
    """The figures of one mode at one size and count of ranks."""
    saves = [s for b in blocks for s in b.saves]

    def mid(name: str, unit: float) -> float | None:
        value = median(s[name] for s in saves)
        return None if value is None else value * unit

    # Each save against the quiet windows beside it, before the median over all.
    inflation = median(
        None
        if s["persist_step_s"] is None or s["quiet_step_s"] is None
        else s["persist_step_s"] / s["quiet_step_s"]
        for s in saves
    )
    extra = max(b.extra_bytes for b in blocks)
    differing = [b.differing for b in blocks if b.differing is not None]
    return {
        "saves": len(saves),
        "blocked_ms": mid("blocked_s", 1e3),
        "blocked_max_ms": max(s["blocked_s"] or 0.0 for s in saves) * 1e3,
        "first_blocked_ms": (median(b.first_blocked_s for b in blocks) or 0.0) * 1e3,
        "lost_ms": mid("lost_s", 1e3),
        "fence_wait_ms": mid("fence_wait_s", 1e3),
        "overlay_wait_ms": mid("overlay_wait_s", 1e3),
        "copied_tables": blocks[0].copied_tables,
        "persist_s": mid("persist_s", 1),
        "durable": MODES[mode].durable,
        "unsynced_s": mid("unsynced_s", 1),
        "quiet_step_ms": mid("quiet_step_s", 1e3),
        "persist_step_ms": mid("persist_step_s", 1e3),
        "persist_step_p99_ms": mid("persist_step_p99_s", 1e3),
        "step_inflation": inflation,
        "state_mib": blocks[0].state_bytes / MIB,
        "extra_rss_mib": extra / MIB,
        "extra_rss_vs_state": extra / blocks[0].state_bytes,
        "exact": not any(differing) if differing else None,
        "differing": sum(differing),
        "others_cores": median(b.others_cores for b in blocks),
        "samples": saves,
    }


def ratios(rows: list[Row]) -> dict[str, Any]:
    """The named ratios, each the worst over counts of ranks, and each for its own count."""
    good = [r for r in rows if r["status"] == "ok"]
    worlds = sorted({r["ranks"] for r in rows if r["part"] != "dense"})
    of_world = {w: _of_ranks([r for r in good if r["ranks"] == w]) for w in worlds}
    found: dict[str, Any] = {}
    for name in dict.fromkeys(n for values in of_world.values() for n in values):
        values = [v[name] for v in of_world.values() if v.get(name) is not None]
        found[name] = max(values, default=None)
    # The goals for time lost are about ranks that leave no core free.
    if worlds:
        for name in ("lost_vs_dcp_async", "lost_vs_dcp_async_unpaced"):
            if name in found:
                found[name] = of_world[max(worlds)].get(name)
    for one in good:
        if one["part"] == "dense":
            found["dense_block_vs_memcpy"] = one["block_vs_memcpy"]
        if one["part"] == "link":
            found["d2h_vs_link"] = one["d2h_vs_link"]
    found |= _small([r for r in rows if r["part"] == "small"])
    if shown := [r for r in rows if r["part"] == "pipelines" or _ours_exact(r)]:
        # A pipeline that didn't run has shown nothing; one that can't run here isn't asked.
        found["exact"] = all(r.get("exact") is True for r in shown if r["status"] != "skipped")
    for world, values in of_world.items():
        found |= {f"{name}_{world}_ranks": value for name, value in values.items()}
    return found


def _small(rows: list[Row]) -> dict[str, Any]:
    """What a save takes for each small thing: the worst of the cases, None if one of them failed."""
    tensors = [r for r in rows if r["mode"] != "values"]
    values = [r for r in rows if r["mode"] == "values"]
    figures = (
        ("us_per_tensor", tensors, "us_each"),
        ("second_vs_first", tensors, "second_vs_first"),
        ("us_per_value", values, "us_each"),
    )
    return {
        name: max(r[key] for r in mine) if all(r["status"] == "ok" for r in mine) else None
        for name, mine, key in figures
        if mine
    }


def _ours_exact(row: Row) -> bool:
    return row["part"] == "modes" and row["mode"] in (OURS, UNPACED)


def _of_ranks(rows: list[Row]) -> dict[str, Any]:
    """Ours against stock DCP and against itself, at one count of ranks. Below 1 is better."""
    by_mode = {r["mode"]: r for r in rows if r["part"] == "modes"}
    by_size = {r["size_mib"]: r for r in rows if r["part"] == "sizes"}

    def against(ours: str, peer: str, name: str) -> float | None:
        a, b = by_mode.get(ours), by_mode.get(peer)
        return a[name] / b[name] if a and b and b[name] and b[name] > 0 else None

    found: dict[str, Any] = {}
    if OURS in by_mode:
        found |= {
            "block_vs_dcp_async": against(OURS, DCP_ASYNC, "blocked_ms"),
            "block_vs_dcp_async_stager": against(OURS, DCP_STAGER, "blocked_ms"),
            "lost_vs_dcp_async": against(OURS, DCP_ASYNC, "lost_ms"),
            "lost_vs_dcp_async_stager": against(OURS, DCP_STAGER, "lost_ms"),
            "extra_rss_vs_state": by_mode[OURS]["extra_rss_vs_state"],
            "step_inflation": by_mode[OURS]["step_inflation"],
        }
    if UNPACED in by_mode:
        found["lost_vs_dcp_async_unpaced"] = against(UNPACED, DCP_ASYNC, "lost_ms")
        found["step_inflation_unpaced"] = by_mode[UNPACED]["step_inflation"]
    if len(by_size) == 2:
        small, large = sorted(by_size)
        found["block_4g_vs_quarter_g"] = by_size[large]["blocked_ms"] / by_size[small]["blocked_ms"]
    return found
