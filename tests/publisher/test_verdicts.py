"""How gates decide, against figures worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from ckpt.errors import BadInputError
from publisher.gates import GateError, GateReport
from publisher.metric import auc, normalised_entropy
from publisher.policy import MetricGate
from publisher.records import PublishedTable, TablePart, TableStats
from publisher.verdicts import (
    decide_dequantisation,
    decide_metric,
    decide_norm_drift,
    dequantisation_error,
    norm_drift,
    octaves_moved,
)


def stats(
    mean: float = 1.0,
    counts: tuple[int, ...] = (),
    rms_err: float = 0.0,
    rms: float = 1.0,
    row_err: float = 0.0,
) -> TableStats:
    return TableStats(mean, 2 * mean, counts, rms_err, rms_err, rms, row_err)


def table(fqn: str, of: TableStats, rows: int = 10) -> PublishedTable:
    part = TablePart("tables-00000.bin", 0, 0, rows)
    return PublishedTable(fqn, rows, 4, "int8_rowwise", 8, (part,), of)


@pytest.mark.parametrize(
    ("now", "before", "drift"),
    [
        (stats(2.0), stats(1.0), 2.0),
        (stats(0.25), stats(1.0), 4.0),
        (stats(0.0), stats(0.0), 1.0),
        (stats(3.0), stats(0.0), 1.0),  # training has begun
        (stats(0.0), stats(3.0), math.inf),  # wiped
        # The mean stays, but half of the rows moved up one octave and half down: by 2 on average.
        (stats(1.0, (0, 5, 0, 5)), stats(1.0, (0, 0, 10, 0)), 2.0),
        # Rows that are zero don't count: that they begin to be trained is no drift.
        (stats(1.0, (0, 0, 10, 0)), stats(1.0, (8, 0, 2, 0)), 1.0),
    ],
)
def test_norm_drift(now: TableStats, before: TableStats, drift: float) -> None:
    assert norm_drift(now, before) == pytest.approx(drift)


def test_norm_drift_of_no_number_is_none() -> None:
    assert math.isnan(norm_drift(stats(math.nan), stats(1.0)))
    assert math.isnan(norm_drift(stats(1.0), stats(math.nan)))


def test_octaves_moved() -> None:
    assert octaves_moved((9, 4, 0, 0, 0), (0, 0, 0, 0, 1)) == 3.0  # all of it, three bins on
    assert octaves_moved((0, 3, 1), (0, 1, 0)) == 0.25  # a quarter, one bin on
    assert octaves_moved((), ()) == octaves_moved((5, 0), (0, 5)) == octaves_moved((0, 1), ()) == 0


def test_the_worst_table_decides_on_drift() -> None:
    report = GateReport()
    now = [
        table("a", stats(2.0)),
        table("b", stats(3.0)),
        table("c", stats(9.0)),
        table("d", stats()),
    ]
    before = [table("a", stats(1.0)), table("b", stats(1.0)), table("d", stats(), rows=9)]
    decide_norm_drift(report, now, (7, before), 3.0)
    (passed,) = report.results
    assert (passed.value, passed.threshold) == (3.0, 3.0)
    assert passed.detail == (
        "b: row lengths changed by a factor of 3 since version 7 (mean 1 to 3); c is new; "
        "d was (9, 4), is (10, 4)"
    )
    with pytest.raises(GateError, match=r"b: .* factor of 3 .*, allowed 2\.9") as e:
        decide_norm_drift(report, now, (7, before), 2.9)
    assert (e.value.gate, e.value.value, e.value.threshold) == ("norm_drift", 3.0, 2.9)
    bad = [*now, table("n", stats(math.nan))]
    with pytest.raises(GateError, match="n: row lengths changed by a factor of nan"):
        decide_norm_drift(report, bad, (7, [*before, table("n", stats())]), 100.0)


def test_a_first_version_has_nothing_to_drift_from() -> None:
    report = GateReport()
    decide_norm_drift(report, [table("a", stats(9.0))], None, 2.0)
    decide_norm_drift(report, [table("a", stats(9.0))], (3, []), 2.0)
    assert [g.detail for g in report.results] == [
        "no parent to compare with",
        "nothing to compare with version 3; a is new",
    ]


def test_dequantisation() -> None:
    assert dequantisation_error(stats(rms_err=0.3, rms=2.0)) == 0.15
    assert dequantisation_error(stats(rms_err=0.0, rms=0.0)) == 0.0
    assert dequantisation_error(stats(rms_err=0.1, rms=0.0)) == math.inf
    assert dequantisation_error(stats(rms_err=0.3, rms=2.0, row_err=0.4)) == 0.4
    assert math.isnan(dequantisation_error(stats(rms_err=0.3, row_err=math.nan)))
    assert math.isnan(dequantisation_error(stats(rms_err=math.nan, row_err=0.3)))
    report = GateReport()
    tables = [table("a", stats(rms_err=0.01)), table("b", stats(rms_err=0.2))]
    decide_dequantisation(report, tables, 0.2)
    assert (report.results[0].value, report.results[0].threshold) == (0.2, 0.2)
    with pytest.raises(GateError, match=r"b as int8_rowwise: relative error 0\.2, allowed 0\.19"):
        decide_dequantisation(report, tables, 0.19)
    with pytest.raises(GateError, match="c as int8_rowwise: relative error nan"):
        decide_dequantisation(report, [*tables, table("c", stats(rms_err=math.nan))], 0.2)


def of(*values: float) -> torch.Tensor:
    return torch.tensor(values)


def test_auc_counts_pairs_and_half_the_ties() -> None:
    # Pairs (positive, negative): 0.8 beats both; 0.4 beats 0.1 and ties with 0.4: 3.5 of 4.
    assert auc(of(0.1, 0.4, 0.8, 0.4), of(0, 1, 1, 0)) == 3.5 / 4
    assert auc(of(1, 1, 1), of(0, 1, 0)) == 0.5
    assert auc(of(3, 2, 1), of(0, 0, 1)) == 0.0
    assert math.isnan(auc(of(math.nan, 1), of(0, 1)))
    generator = torch.Generator().manual_seed(0)
    scores = torch.randint(0, 20, (300,), generator=generator).float()
    labels = torch.randint(0, 2, (300,), generator=generator)
    above = scores[labels == 1][:, None] - scores[labels == 0][None]
    assert auc(scores, labels) == pytest.approx(
        float(((above > 0) + 0.5 * (above == 0)).double().mean()), rel=1e-12
    )


def test_normalised_entropy() -> None:
    # The base rate as prediction is worth nothing: 1.
    assert normalised_entropy(of(0.25, 0.25, 0.25, 0.25), of(1, 0, 0, 0)) == pytest.approx(1.0)
    # -(log 0.8 + log 0.9) / 2 over log 2
    found = normalised_entropy(of(0.8, 0.1), of(1, 0))
    assert found == pytest.approx(-(math.log(0.8) + math.log(0.9)) / 2 / math.log(2), rel=1e-6)
    # A saturated sigmoid that is wrong costs log 1e7, not infinity.
    saturated = normalised_entropy(of(1.0, 1.0), of(1, 0))
    assert saturated == pytest.approx(math.log(1e7) / 2 / math.log(2), rel=1e-5)
    assert math.isnan(normalised_entropy(of(math.nan, 0.5), of(1, 0)))
    with pytest.raises(BadInputError, match="needs probabilities, these are -1 to 2"):
        normalised_entropy(of(-1, 2), of(1, 0))


@pytest.mark.parametrize("labels", [of(1, 1), of(0, 0), of(0, 2), of(0, math.nan)])
@pytest.mark.parametrize("measure", [auc, normalised_entropy])
def test_labels_that_tell_nothing(labels: torch.Tensor, measure) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(BadInputError, match="alike|must be 0 or 1"):
        measure(of(0.1, 0.2), labels)


AUC = MetricGate("auc", "b", "score", "label", max_loss=0.02)
ENTROPY = MetricGate("normalised_entropy", "b", "score", "label", max_loss=0.02)


@pytest.mark.parametrize(
    ("gate", "value", "live", "passes"),
    [
        (AUC, 0.75, (1, 0.76), True),
        (AUC, 0.73, (1, 0.76), False),
        (AUC, math.nan, (1, 0.76), False),
        (ENTROPY, 0.95, (1, 0.94), True),
        (ENTROPY, 0.97, (1, 0.94), False),
        (ENTROPY, 0.5, (1, 0.94), True),
        (ENTROPY, math.nan, (1, 0.94), False),
        (ENTROPY, math.inf, (1, 0.94), False),
        (AUC, 0.1, None, True),
        (AUC, math.nan, None, False),
        (ENTROPY, math.inf, None, False),
        (AUC, 0.9, "it crashed", False),  # never weakened in silence
    ],
)
def test_metric_against_the_live_version(
    gate: MetricGate, value: float, live: tuple[int, float] | str | None, passes: bool
) -> None:
    report = GateReport()
    if passes:
        decide_metric(report, gate, value, live)
        assert report.results[0].value == value
    else:
        with pytest.raises(GateError) as e:
            decide_metric(report, gate, value, live)
        assert e.value.gate == "metric"


@pytest.mark.parametrize("live", [None, "it crashed"])
def test_metric_against_a_floor_where_no_version_can_be_measured(live: str | None) -> None:
    gate = MetricGate("auc", "b", "score", "label", worst=0.6)
    report = GateReport()
    decide_metric(report, gate, 0.6, live)
    assert (report.results[0].value, report.results[0].threshold) == (0.6, 0.6)
    with pytest.raises(GateError, match=r"auc 0\.59, against worst = 0\.6"):
        decide_metric(report, gate, 0.59, live)
