"""From a commit to a live version, and what is refused on the way."""

from __future__ import annotations

import torch

from ckpt.storage import Storage
from ckpt.trust import TrustList
from publisher.predictor import Predictor
from tests.publisher.conftest import make_bench
from tests.publisher.tiny import GOLDEN, random_tensors


def test_a_commit_becomes_a_live_version(any_storage: Storage, trust: TrustList) -> None:
    bench = make_bench(any_storage, trust)
    ref = bench.run.commit(3, random_tensors())
    outcome = bench.publish(3)
    assert (outcome.version, outcome.built, outcome.live) == (1, True, True)
    manifest = bench.registry.version(1)
    assert manifest.source.ref == ref
    assert manifest.parent is None
    assert [g.name for g in manifest.gates] == [
        "trusted_code",
        "names_and_shapes",
        "coverage",
        "finite",
        "digests",
        "golden_parity",
    ]
    assert all(g.passed for g in manifest.gates)
    predictor = Predictor(bench.registry, trust=trust)
    got = predictor.predict(GOLDEN)
    assert got.version == 1
    assert torch.isfinite(got.outputs["score"]).all()
