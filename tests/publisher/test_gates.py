"""Every gate refuses a bad checkpoint made for it, and lets a good one through."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, get_args

import pytest
import safetensors.torch
import torch

from ckpt.restore import CheckpointReader
from ckpt.schema import EVENT_TIME, HashedIds, RequestFeature
from publisher import keys
from publisher.build import VersionBuilder
from publisher.gates import GateError
from publisher.lease import Lease
from publisher.metric import MetricCheck
from publisher.policy import GateLimits, MetricGate, Policy
from publisher.publish import Publisher
from publisher.records import GateName
from publisher.registry import Registry
from tests.publisher.conftest import Bench
from tests.publisher.tiny import (
    GOLDEN,
    USER,
    description,
    flip_byte,
    request,
    stamped_tensors,
)

BATCH = "replay/batch.safetensors"
LIMITS = GateLimits()
METRIC = MetricGate("auc", BATCH, "score", "label", max_loss=0.01)


class LosesRows(CheckpointReader):
    """A reader that skips a chunk, as a defect in resharding would."""

    def iter_rows(self, fqn: str, *where: Any, **how: Any) -> Iterator[tuple[int, torch.Tensor]]:
        for first, rows in super().iter_rows(fqn, *where, **how):
            if first != 16:
                yield first, rows


@dataclass
class Case:
    """A run with step 1 live, about to get step 2."""

    bench: Bench
    tensors: dict[str, torch.Tensor]
    annotations: dict[str, str]
    limits: GateLimits = LIMITS
    metric: MetricGate = METRIC
    reader: type[CheckpointReader] = CheckpointReader
    parity: Callable[..., float] | None = None

    def publisher(
        self, *, lease: Lease | None = None, metric: MetricCheck | None = None
    ) -> Publisher:
        self.bench.policy = Policy(gates=self.limits, metric=self.metric)
        made = self.bench.publisher(self.parity, lease=lease, metric=metric)
        run = self.bench.run
        made._builder = VersionBuilder(
            run.root,
            self.bench.registry,
            self.bench.programs,
            self.reader,
            policy=self.bench.policy,
        )
        return made


def damaged_chunk(case: Case) -> None:
    flip_byte(case.bench.run.root, case.bench.run.data_key(2), 100)


def event_time_in_words(case: Case) -> None:
    case.annotations[EVENT_TIME] = "yesterday"


def untrusted_program(case: Case) -> None:
    case.bench.run.trust.path.write_text("")


def renamed_constant(case: Case) -> None:
    case.tensors["model.over.renamed"] = case.tensors.pop("model.over.weight")


def rows_lost(case: Case) -> None:
    case.reader = LosesRows


def nan_in_a_row(case: Case) -> None:
    case.tensors[USER][33, 2] = float("nan")


def exploded_table(case: Case) -> None:
    case.tensors[USER] *= 100


def collapsed_table(case: Case) -> None:
    case.tensors[USER][5:] = 0


def rows_too_small_for_fp16_scales(case: Case) -> None:
    """Beside a few ordinary ones: of the whole table's squares they are next to nothing."""
    case.limits = replace(LIMITS, norm_drift_max_ratio=1e9)
    case.tensors[USER] = torch.randn(50, 4, generator=torch.Generator().manual_seed(0))
    case.tensors[USER][5:] *= 1e-6


def one_huge_column(case: Case) -> None:
    case.limits = replace(LIMITS, norm_drift_max_ratio=1e9)
    case.tensors[USER] = torch.randn(50, 4, generator=torch.Generator().manual_seed(0))
    case.tensors[USER][::2, 1] = 60_000.0
    case.tensors[USER][1::2, 1] = -60_000.0


def another_hash_than_in_training(case: Case) -> None:
    """The trainer's pipeline made row 17 of the golden request's first user; this map doesn't."""
    features = (RequestFeature("user", HashedIds(seed=1, modulus=50)), RequestFeature("genre"))
    rows = torch.full_like(GOLDEN["user.values"], 17)
    case.bench.run.describe(
        "d2", description(features=features), golden={**GOLDEN, "user.rows": rows}
    )
    case.annotations["serving_description"] = "d2"


def one_huge_value_in_a_golden_row(case: Case) -> None:
    case.limits = replace(case.limits, norm_drift_max_ratio=1e9, dequantisation_max_rel_err=1.0)
    case.tensors[USER][3] = torch.tensor([50.0, 60_000.0, 1.0, 1.0])


def crash_of_the_fresh_process(case: Case) -> None:
    def died(*_: object) -> float:
        raise GateError("golden_parity", "the process that loaded the version died of SIGSEGV")

    case.parity = died


def weights_turned_round(case: Case) -> None:
    case.tensors["model.over.weight"] *= -1


def defect(case: Case) -> None:
    def broken(*_: object) -> float:
        raise RuntimeError("a defect")

    case.parity = broken


BAD: Mapping[str, list[tuple[Callable[[Case], None], str]]] = {
    "digests": [
        (damaged_chunk, "bytes don't match their digest"),
        (event_time_in_words, "annotation 'event_time_s' is 'yesterday', not Unix seconds"),
    ],
    "trusted_code": [(untrusted_program, "is not trusted on this host")],
    "names_and_shapes": [(renamed_constant, r"no model\.over\.weight in the checkpoint")],
    "coverage": [(rows_lost, rf"{re.escape(USER)}: .*row")],
    "finite": [(nan_in_a_row, rf"{re.escape(USER)} row 33: 1 of its values are NaN")],
    "norm_drift": [
        (
            exploded_table,
            rf"{re.escape(USER)}: row lengths changed by a factor of 100 .*, allowed 4",
        ),
        (
            collapsed_table,
            rf"{re.escape(USER)}: row lengths changed by a factor of 10 .*, allowed 4",
        ),
    ],
    "dequantisation": [
        (
            rows_too_small_for_fp16_scales,
            rf"{re.escape(USER)} as int8_rowwise: relative error 0\.[89]\d*, allowed 0\.2",
        ),
        (
            one_huge_column,
            rf"{re.escape(USER)} as int8_rowwise: relative error 0\.94, allowed 0\.2",
        ),
    ],
    "id_maps": [
        (
            another_hash_than_in_training,
            "user: id 3 is 17 in the trainer and 11 by its hashed id map",
        )
    ],
    "golden_parity": [
        (one_huge_value_in_a_golden_row, "max abs error"),
        (crash_of_the_fresh_process, "died of SIGSEGV"),
    ],
    "metric": [(weights_turned_round, r"auc 0, against version 1's 1 less 0\.01 allowed")],
    "build": [(defect, "RuntimeError: a defect")],
}


@pytest.fixture
def case(bench: Bench) -> Case:
    """Step 1 is live, having passed every gate; step 2 would pass them as well."""
    batch = request([[1], [2], [3], [4]], [[0], [1], [0, 6], [1]])
    # All weights are 1 and so are all rows: the score grows with the dense input.
    batch["label"] = torch.tensor([0.0, 0.0, 1.0, 1.0])
    bench.run.root.put(BATCH, safetensors.torch.save(batch))
    made = Case(bench, stamped_tensors(1.0), {"serving_description": "d1"})
    bench.run.commit(1, stamped_tensors(1.0))
    made.publisher().publish(bench.run.info(1), "test")
    return made


def test_every_gate_is_here() -> None:
    assert set(BAD) == set(get_args(GateName))


def test_a_good_checkpoint_passes_all_of_them(case: Case) -> None:
    case.annotations[EVENT_TIME] = "1234.5"
    case.bench.run.commit(2, case.tensors, annotations=case.annotations)
    assert case.publisher().publish(case.bench.run.info(2), "test").live
    manifest = case.bench.registry.version(2)
    found = {g.name: g for g in manifest.gates}
    assert set(found) == set(BAD) - {"build"}
    assert all(g.passed for g in manifest.gates)
    figures = {n: (g.value, g.threshold) for n, g in found.items() if g.value is not None}
    assert figures["norm_drift"] == (1.0, 4.0)
    assert figures["metric"] == (1.0, 0.99)
    assert figures["dequantisation"] == (0.0, 0.2)
    assert figures["golden_parity"][1] == 0.01
    assert (manifest.parent, manifest.event_time_s) == (1, 1234.5)
    assert (manifest.dense_step, manifest.table_step, manifest.id_map_step) == (2, 2, 2)


@pytest.mark.parametrize(
    ("gate", "spoil", "reason"),
    [(gate, *bad) for gate, cases in BAD.items() for bad in cases],
    ids=[f"{gate}-{spoil.__name__}" for gate, cases in BAD.items() for spoil, _ in cases],
)
def test_gate_refuses(case: Case, gate: str, spoil: Callable[[Case], None], reason: str) -> None:
    bench = case.bench
    if spoil is not damaged_chunk:
        spoil(case)
    bench.run.commit(2, case.tensors, annotations=case.annotations)
    info = bench.run.info(2)
    if spoil is damaged_chunk:
        spoil(case)
    with pytest.raises(GateError) as e:
        case.publisher().publish(info, "test")
    assert (e.value.gate, "\n" in str(e.value)) == (gate, False)
    assert re.search(reason, e.value.reason), e.value.reason
    (refusal,) = bench.registry.refusals()
    assert (refusal.gate, refusal.reason, refusal.source.step) == (gate, e.value.reason, 2)
    live = bench.registry.live()
    assert live is not None
    assert (live.to_version, bench.registry.numbers()) == (1, [1])


def test_a_missing_batch_is_no_fault_of_the_commit(case: Case) -> None:
    from ckpt.errors import NotFoundError

    case.bench.run.commit(2, case.tensors)
    case.bench.run.root.delete(BATCH)
    with pytest.raises(NotFoundError, match=r"batch\.safetensors: the batch of \[metric\] isn't"):
        case.publisher().publish(case.bench.run.info(2), "test")
    assert case.bench.registry.refusals() == []


def test_a_live_version_that_nobody_can_read_passes_no_metric(case: Case) -> None:
    """There is nothing to compare with, and only the policy may say that this is fine."""
    registry = case.bench.registry
    case.bench.run.root.put(registry.key(1, keys.MANIFEST), b"{")
    case.bench.registry = Registry(registry.storage, clock=case.bench.clock)
    case.bench.run.commit(2, case.tensors)
    info = case.bench.run.info(2)
    with pytest.raises(
        GateError, match=r"auc 1 can't be compared: parent 1 can't be read: .* worst"
    ):
        case.publisher().publish(info, "test")
    case.metric = replace(METRIC, worst=0.9)
    assert case.publisher().publish(info, "test").live
    found = {g.name: g for g in case.bench.registry.version(3).gates}
    assert found["metric"].threshold == 0.9
    assert found["norm_drift"].detail.startswith("nothing to compare with: parent 1 can't be read")


def test_the_live_version_is_measured_once_for_one_batch(case: Case) -> None:
    measured: list[int] = []

    def count(registry: object, manifest: object, *_: object) -> float:
        measured.append(manifest.version)  # type: ignore[attr-defined]
        return 0.9

    publisher = case.publisher(metric=count)
    for step in (2, 3, 4):
        case.bench.run.commit(step, stamped_tensors(1.0))
        publisher.publish(case.bench.run.info(step), "test")
    assert measured == [2, 1, 3, 4]  # each new one, and the one that was live before
    case.bench.run.root.put(BATCH, case.bench.run.root.read(BATCH) + b" ")
    case.bench.run.commit(5, stamped_tensors(1.0))
    publisher.publish(case.bench.run.info(5), "test")
    assert measured[4:] == [5, 4]


def test_an_owner_that_lost_its_lease_refuses_nothing(case: Case) -> None:
    """Whoever took over may have deleted the files that the gate then misses."""
    from ckpt.errors import CorruptError
    from publisher.lease import LeaseLostError

    bench = case.bench
    mine = Lease(bench.registry, clock=bench.clock)
    other = Lease(bench.registry, clock=bench.clock)
    assert mine.acquire()

    def files_are_gone(*_: object) -> float:
        assert not other.acquire()
        bench.clock.now_s += 20
        assert other.acquire()
        raise CorruptError("program.pt2: missing")

    case.parity = files_are_gone
    bench.run.commit(2, case.tensors)
    with pytest.raises(LeaseLostError):
        case.publisher(lease=mine).publish(bench.run.info(2), "test")
    assert bench.registry.refusals() == []
