"""How the gates with thresholds decide, from figures alone. A figure that is no number never passes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

from publisher.gates import GateError, GateReport
from publisher.policy import MetricGate
from publisher.records import PublishedTable, TableStats


def norm_drift(now: TableStats, before: TableStats) -> float:
    """By which factor the lengths of a table's rows changed, 1 or more: the larger of two.

    The ratio of the mean lengths, whichever way; and how far a row that isn't zero moved on average
    between powers of two (the earth mover's distance of the two histograms, in octaves). A table
    that was all zeros has nothing to compare with: 1. One that became all zeros: infinite.
    """
    if math.isnan(now.mean_norm) or math.isnan(before.mean_norm):
        return math.nan
    if before.mean_norm == 0:
        return 1.0
    if now.mean_norm == 0:
        return math.inf
    ratio = now.mean_norm / before.mean_norm
    return max(ratio, 1 / ratio, math.exp2(octaves_moved(now.norm_counts, before.norm_counts)))


def octaves_moved(now: Sequence[int], before: Sequence[int]) -> float:
    """Earth mover's distance of two histograms over powers of two, their first bin (zero) aside."""
    here, there = now[1:], before[1:]
    if len(here) != len(there) or not sum(here) or not sum(there):
        return 0.0
    shares = (n / sum(here) - b / sum(there) for n, b in zip(here, there, strict=True))
    return sum(abs(moved) for moved in accumulate(shares))


def decide_norm_drift(
    report: GateReport,
    tables: Sequence[PublishedTable],
    parent: tuple[int, Sequence[PublishedTable]] | None,
    limit: float,
) -> None:
    """Compare each table with that of the parent, (its version, its tables); the worst one decides."""
    if parent is None:
        report.passed("norm_drift", "no parent to compare with")
        return
    number, earlier = parent
    known = {t.fqn: t for t in earlier}
    found, notes = [], []
    for table in tables:
        before = known.get(table.fqn)
        if before is None:
            notes.append(f"{table.fqn} is new")
        elif (before.rows, before.dim) != (table.rows, table.dim):
            was = f"({before.rows}, {before.dim})"
            notes.append(f"{table.fqn} was {was}, is ({table.rows}, {table.dim})")
        else:
            found.append((norm_drift(table.stats, before.stats), table, before))
    if not found:
        report.passed(
            "norm_drift", "; ".join([f"nothing to compare with version {number}", *notes])
        )
        return
    drift, table, before = max(found, key=lambda f: (math.isnan(f[0]), f[0]))
    told = (
        f"{table.fqn}: row lengths changed by a factor of {drift:.3g} since version {number} "
        f"(mean {before.stats.mean_norm:.3g} to {table.stats.mean_norm:.3g})"
    )
    if not drift <= limit:
        raise GateError("norm_drift", f"{told}, allowed {limit:g}", value=drift, threshold=limit)
    report.passed("norm_drift", "; ".join([told, *notes]), drift, limit)


def dequantisation_error(stats: TableStats) -> float:
    """What a table's format does to its values, relative to them: the larger of two figures.

    The root mean square of the error over that of the values, to which large values count most; and
    the mean error of a row, to which all rows count alike and their largest value doesn't
    (`TableStats.mean_row_err`). Both of embeddings from a normal or uniform distribution, of 4 to 128
    columns: int8 up to 0.006, int4 up to 0.103, fp16 0.0002.
    """
    whole = math.inf
    if stats.rms != 0 or stats.rms_err == 0:
        whole = stats.rms_err / (stats.rms or 1.0)
    return max(whole, stats.mean_row_err, key=lambda x: (math.isnan(x), x))


def decide_dequantisation(
    report: GateReport, tables: Sequence[PublishedTable], limit: float
) -> None:
    """The table that suffered most from its format decides."""
    found = [(dequantisation_error(t.stats), t) for t in tables]
    if not found:
        report.passed("dequantisation", "no tables", 0.0, limit)
        return
    worst, table = max(found, key=lambda f: (math.isnan(f[0]), f[0]))
    told = f"{table.fqn} as {table.format}: relative error {worst:.3g}"
    if not worst <= limit:
        raise GateError(
            "dequantisation",
            f"{told}, allowed {limit:g}; give it a wider format in [tables]",
            value=worst,
            threshold=limit,
        )
    report.passed("dequantisation", told, worst, limit)


def decide_metric(
    report: GateReport, gate: MetricGate, value: float, live: tuple[int, float] | str | None
) -> None:
    """Compare with the live version: (its number, its figure), why it has none, or None: none is live."""
    higher = gate.kind == "auc"
    if isinstance(live, tuple):
        number, figure = live
        threshold = figure - gate.max_loss if higher else figure + gate.max_loss
        against = f"version {number}'s {figure:.6g} less {gate.max_loss:g} allowed"
        if not higher:
            against = f"version {number}'s {figure:.6g} and {gate.max_loss:g} allowed"
    elif gate.worst is not None:
        threshold, against = gate.worst, f"worst = {gate.worst:g}"
    elif live is None and math.isfinite(value):
        report.passed("metric", f"{gate.kind} {value:.6g}; no live version to compare with", value)
        return
    else:
        why = live or "it is no number"
        raise GateError(
            "metric",
            f"{gate.kind} {value:.6g} can't be compared: {why}; set [metric] worst",
            value=value,
        )
    told = f"{gate.kind} {value:.6g}, against {against}"
    if not (value >= threshold if higher else value <= threshold):
        raise GateError("metric", told, value=value, threshold=threshold)
    report.passed("metric", told, value, threshold)
