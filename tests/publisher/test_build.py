"""A version's tables under a policy: formats, several files, statistics, the engines it names."""

from __future__ import annotations

import pytest

from ckpt.restore import CheckpointReader
from publisher import keys
from publisher.build import VersionBuilder
from publisher.engine import InProcess
from publisher.formats import tables_file
from publisher.gates import GateReport
from publisher.policy import BuildPolicy, Policy
from publisher.processes import ProcessPool
from tests.publisher.conftest import Bench
from tests.publisher.packed_tables import unpack
from tests.publisher.tiny import GENRE, USER, random_tensors

POLICY = Policy(tables={"*.genre.*": "fp16", USER: "int4_rowwise"}, build=BuildPolicy(workers=2))


def builder(bench: Bench, policy: Policy, file_bytes: int) -> VersionBuilder:
    run = bench.run
    return VersionBuilder(
        run.root,
        bench.registry,
        bench.programs,
        CheckpointReader,
        policy=policy,
        file_bytes=file_bytes,
    )


@pytest.mark.parametrize("workers", [0, 2])
def test_tables_follow_the_policy(local_bench: Bench, workers: int) -> None:
    tensors = random_tensors()
    local_bench.run.commit(1, tensors)
    record = local_bench.run.info(1).record
    assert record is not None
    policy = Policy(tables=POLICY.tables, build=BuildPolicy(workers=workers, memory_mib=8))
    report = GateReport()
    built = builder(local_bench, policy, 1).build(1, record, report)
    assert [(t.fqn, t.format, t.row_bytes) for t in built.tables] == [
        (USER, "int4_rowwise", 6),
        (GENRE, "fp16", 4),
    ]
    names = [f.key for f in built.files]
    assert names[:4] == [keys.DESCRIPTION, keys.PROGRAM, keys.DENSE, tables_file(0)]
    for t in built.tables:
        (part,) = t.parts
        data = local_bench.registry.storage.read(local_bench.registry.key(1, part.file))
        stored = data[part.offset :][: t.rows * t.row_bytes]
        errors = unpack(stored, t.dim, t.format) - tensors[t.fqn]
        assert t.stats.max_abs_err == pytest.approx(float(errors.abs().max()), rel=1e-4)
        assert t.stats.mean_norm == pytest.approx(float(tensors[t.fqn].norm(dim=1).mean()))
        assert 0 < t.stats.rms_err < t.stats.rms / 3
    details = {g.name: g.detail for g in report.results}
    assert details["coverage"].startswith("57 rows of 2 tables, each once, by ")
    assert details["finite"] == "57 rows and all dense constants"


def test_the_engine_of_a_policy(local_bench: Bench) -> None:
    assert isinstance(builder(local_bench, Policy(), 1)._engine, InProcess)
    assert isinstance(builder(local_bench, POLICY, 1)._engine, ProcessPool)
