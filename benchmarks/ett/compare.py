"""The three ways beside each other: replays at other amounts of training, and the figures to look at."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.ett.job import Replayed, Way, replay, training_for
from benchmarks.ett.lives import Lives
from benchmarks.report import Row

LEVELS = (60, 80, 90)


@dataclass
class Compared:
    """Lives of one model: short ones, and those lived at a level."""

    short: Lives
    lived: dict[int, Lives] = field(default_factory=dict)

    @property
    def all(self) -> list[Lives]:
        return [self.short, *self.lived.values()]

    @property
    def longest(self) -> Lives:
        """Whose figures tell most about long runs: the highest level lived in all ways, or the short."""
        whole = [n for n in sorted(self.lived) if self.lived[n].has(*self.short.ways)]
        return self.lived[whole[-1]] if whole else self.short

    @property
    def whole(self) -> bool:
        return self.short.has("sync", "ours")

    def source(self, level: int) -> str:
        of = self.lived.get(level)
        return "lived" if of is not None and of.has("sync", "ours") else "replayed"

    def ett_same(self, way: Way, level: int) -> float:
        """Percent: as lived if it was, else replayed."""
        if self.source(level) == "lived":
            return self.lived[level].ett_same((way, None))
        return self.replayed(way, level).ett_same

    def gain_by_sync(self, level: int) -> float | None:
        """Points of `ours` over `sync` where a step counts no more than one of `sync`; None: not lived."""
        if self.source(level) != "lived":
            return None
        lives = self.lived[level]
        return lives.ett_by_sync("ours") - lives.ett_by_sync("sync")

    def replayed(self, way: Way, level: int) -> Replayed:
        of = self.longest
        return replay(of.figures(way), training_for(of.figures("sync"), level))

    def rows(self) -> list[Row]:
        """Replays: of each set of lives, and of what the way of today needs to be at a level."""
        rows: list[Row] = []
        for lives in self.all:
            for way in lives.ways:
                again = lives.replayed(way)
                error = again.ett_same - lives.ett_same((way, None))
                rows.append(self._row(way, f"replay of {lives.source}", again, error=error))
        for level, lives in sorted(self.lived.items()):
            for way in lives.ways:
                if not self.short.has(way):
                    continue
                before = replay(self.short.figures(way), lives.trained_s(way))
                error = before.ett_same - lives.ett_same((way, None))
                source = f"foretold for {level}%"
                rows.append(self._row(way, source, before, replay_error=error))
        if self.longest.has("sync"):
            for level in LEVELS:
                for way in self.longest.ways:
                    source = f"replayed, sync at {level}%"
                    rows.append(self._row(way, source, self.replayed(way, level)))
        return rows

    def _row(self, way: Way, source: str, again: Replayed, **more: float) -> Row:
        return {
            "model": self.short.model,
            "name": way,
            "source": source,
            "status": "ok",
            "ett_same": again.ett_same,
            "wall_s": again.wall_s,
            "training_s": again.training_s,
            "interval_s": again.interval_s,
            **more,
        }


def beside_row(model: str, found: Mapping[str, Any]) -> Row:
    """Medians over rounds of what `benchmarks.ett.beside` has found; ratios are of the same round."""
    plain_s, session_s, saving_s = (found[kind] for kind in ("plain", "session", "saving"))
    pairs = list(zip(plain_s, session_s, saving_s, strict=True))
    whole = statistics.median(found["lag_s"]) < statistics.median(session_s)
    costs_s = statistics.median(saving - calm for _, calm, saving in pairs)
    return {
        "model": model,
        "name": "ours",
        "source": "beside plain steps",
        "status": "ok",
        "step_ms": 1000 * statistics.median(session_s) / found["steps"],
        "plain_ms": 1000 * statistics.median(plain_s) / found["steps"],
        "step_ratio": statistics.median(calm / plain for plain, calm, _ in pairs),
        "blocked_ms": 1000 * statistics.median(found["block_s"]),
        "lag_s": statistics.median(found["lag_s"]),
        "save_costs_ms": 1000 * costs_s if whole else None,
        "rounds": len(pairs),
    }


def ratios(of: Mapping[str, Compared], rows: Sequence[Row]) -> dict[str, Any]:
    """What to look at, of models that were lived in `sync` and `ours`. `*_source`: lived or replayed."""
    both = {name: c for name, c in of.items() if c.whole}
    found: dict[str, Any] = {"models": len(both)}
    if both:
        for level in LEVELS:
            pairs = [(c.ett_same("ours", level), c.ett_same("sync", level)) for c in both.values()]
            sources = {name: c.source(level) for name, c in both.items()}
            found[f"gain_min_{level}"] = min(ours - sync for ours, sync in pairs)
            found[f"gain_mean_{level}"] = statistics.mean(ours - sync for ours, sync in pairs)
            found[f"loss_removed_{level}"] = min(
                1 - (100 - ours) / (100 - sync) for ours, sync in pairs
            )
            found[f"source_{level}"] = _said(sources)
            if "lived" in sources.values():  # how near to the level the lives came
                found[f"sync_min_{level}"] = min(sync for _, sync in pairs)
                found[f"sync_max_{level}"] = max(sync for _, sync in pairs)
            # By a stricter measure, too.
            if gains := [g for c in both.values() if (g := c.gain_by_sync(level)) is not None]:
                found[f"gain_min_{level}_by_sync"] = min(gains)
                found[f"gain_mean_{level}_by_sync"] = statistics.mean(gains)
        found["recover_ratio"] = statistics.median(_recover_ratio(c) for c in both.values())
        found["start_warm_vs_cold"] = statistics.median(_warm_vs_cold(c) for c in both.values())
        found["repeated_ratio"] = statistics.median(_repeated_ratio(c) for c in both.values())
        found["calm_ratio"] = statistics.median(c.longest.calm_ratio for c in both.values())
    steps = [r["step_ratio"] for r in rows if r.get("step_ratio") is not None]
    if steps:
        found["session_step"] = statistics.median(steps)
        found["session_step_max"] = max(steps)
    errors = [abs(r["replay_error"]) for r in rows if r.get("replay_error") is not None]
    if errors:
        found["replay_error_points"] = max(errors)
    shares = [r["unaccounted"] for r in rows if r.get("unaccounted") is not None]
    if shares:
        found["unaccounted"] = max(shares)
    return found


def for_fleet(of: Mapping[str, Compared]) -> dict[str, Any]:
    """Rows of costs, by way and model. What steps lose to a save that is written is in its block already."""
    names = ("block_s", "lag_s", "start_s", "recover_s", "shutdown_s", "publish_s")
    said = {"sync": "baseline", "async": "async", "ours": "ours"}
    rows = []
    for model, compared in of.items():
        for way in compared.longest.ways:
            figures = compared.longest.figures(way)
            costs = {name: getattr(figures, name) for name in names}
            rows.append(
                {
                    "way": said[way],
                    "model": model,
                    "ranks": 2,
                    "status": "ok",
                    **costs,
                    "interference_s": 0.0,
                }
            )
    return {"rows": rows}


def _said(sources: Mapping[str, str]) -> str:
    if len(set(sources.values())) == 1:
        return next(iter(sources.values()))
    return ", ".join(f"{name} {source}" for name, source in sources.items())


def _recover_ratio(c: Compared) -> float:
    ours, sync = (c.longest.figures(way).recover_s for way in ("ours", "sync"))
    return ours / sync if sync else 0.0


def _warm_vs_cold(c: Compared) -> float:
    """Time to the first step of ours after a failure, over that of the first start."""
    shares = []
    for report in c.longest.of["ours", None]:
        warm = [a.time_to_start_s or 0.0 for a in report.attempts[1:]]
        if warm:
            shares.append(statistics.median(warm) / (report.attempts[0].time_to_start_s or 1.0))
    return statistics.median(shares) if shares else 0.0


def _repeated_ratio(c: Compared) -> float:
    """Training done again where sync is at 90%: at long runs intervals differ most."""
    ours, sync = (c.replayed(way, 90).repeated_s for way in ("ours", "sync"))
    return ours / sync if sync else 0.0
