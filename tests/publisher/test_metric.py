"""The metric in a fresh process: its figure, and what becomes of a batch that doesn't fit."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace

import pytest
import safetensors.torch
import torch

from publisher.gates import GateError
from publisher.metric import metric_in_fresh_process, metric_in_process
from publisher.policy import MetricGate
from publisher.spare import SpareProcesses
from tests.publisher.conftest import Bench
from tests.publisher.tiny import request, stamped_tensors

GATE = MetricGate("normalised_entropy", "replay.safetensors", "score", "label")


def batch(**changes: torch.Tensor) -> bytes:
    made = request([[1], [2], [3], []], [[], [], [0, 6], [1]])
    labels = torch.tensor([0, 1, 1, 0])
    return safetensors.torch.save({**made, "label": labels, **changes})


def test_a_fresh_process_finds_what_this_one_finds(local_bench: Bench) -> None:
    local_bench.run.commit(1, stamped_tensors(1))
    local_bench.publish(1)
    manifest = local_bench.registry.version(1)
    here = metric_in_process(local_bench.programs, local_bench.registry, manifest, GATE, batch())
    wrong = MetricGate("auc", "replay.safetensors", "no_such", "label")
    with closing(SpareProcesses(local_bench.run.trust)) as processes:
        fresh = metric_in_fresh_process(processes)
        assert fresh(local_bench.registry, manifest, GATE, batch()) == here
        assert 0.9 < here < 1.1
        with pytest.raises(GateError, match=r"version 1: has no no_such, only dense_stamp, ") as e:
            fresh(local_bench.registry, manifest, wrong, batch())
    assert (e.value.gate, e.value.exit_code) == ("metric", 2)


@pytest.mark.parametrize(
    ("gate", "data", "why"),
    [
        (replace(GATE, label="clicks"), batch(), "replay.safetensors: has no clicks"),
        (GATE, batch(label=torch.tensor([0, 1])), "2 labels, but score has 4 values"),
        (GATE, batch(dense=torch.zeros(4, 2)), "dense"),
        (GATE, b"nonsense", "replay.safetensors: not a safetensors file"),
    ],
)
def test_a_batch_that_does_not_fit(bench: Bench, gate: MetricGate, data: bytes, why: str) -> None:
    from ckpt.errors import SidestageError

    bench.run.commit(1, stamped_tensors(1))
    bench.publish(1)
    with pytest.raises(SidestageError, match=why):
        metric_in_process(bench.programs, bench.registry, bench.registry.version(1), gate, data)
