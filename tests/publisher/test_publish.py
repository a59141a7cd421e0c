"""From a commit to a live version, and what each gate refuses on the way."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from ckpt import layout
from ckpt.errors import StorageError
from ckpt.pins import PinBoard
from ckpt.restore import CheckpointReader
from ckpt.schema import (
    ConstantSpec,
    FeatureSpec,
    InputSpec,
    LookupSpec,
    OutputSpec,
    RequestFeature,
    ServingDescription,
)
from ckpt.storage import MemoryStorage, Storage
from ckpt.trust import TrustList
from ckpt.types import CommitRef
from publisher import keys
from publisher.build import VersionBuilder
from publisher.gates import GateError
from publisher.loading import ProgramCache
from publisher.policy import GateLimits, Policy
from publisher.predictor import Predictor
from publisher.publish import Publisher
from publisher.records import VersionManifest
from publisher.registry import Registry
from tests.faults import FaultyStorage
from tests.publisher.conftest import Bench, make_bench
from tests.publisher.tiny import (
    GENRE,
    GOLDEN,
    USER,
    TinyRun,
    description,
    flip_byte,
    program,
    random_tensors,
    stamped_tensors,
)


def test_retention_leaves_a_commit_alone_while_it_is_published(
    any_storage: Storage, trust: TrustList
) -> None:
    bench = make_bench(any_storage, trust)
    ref = bench.run.commit(3, random_tensors())
    seen: list[CommitRef] = []

    def parity(registry: Registry, draft: VersionManifest) -> float:
        seen.extend(p.record.commit for p in PinBoard(any_storage, bench.clock).look() if p.record)
        return 0.001

    bench.publisher(parity).publish(bench.run.info(3), "test")
    assert seen == [ref]
    assert not list(any_storage.list(layout.PINS))


def test_a_commit_becomes_a_live_version(any_storage: Storage, trust: TrustList) -> None:
    bench = make_bench(any_storage, trust)
    ref = bench.run.commit(3, random_tensors())
    outcome = bench.publish(3)
    assert (outcome.version, outcome.built, outcome.live) == (1, True, True)
    manifest = bench.registry.version(1)
    assert manifest.source.ref == ref
    assert (manifest.parent, manifest.model, manifest.description_id) == (None, "tiny", "d1")
    assert (manifest.saved_at_s, manifest.published_by) == (30.0, "tester@here")
    assert {g.name for g in manifest.gates} == {
        "digests",
        "trusted_code",
        "names_and_shapes",
        "id_maps",
        "coverage",
        "finite",
        "norm_drift",
        "dequantisation",
        "golden_parity",
    }
    assert all(g.passed for g in manifest.gates)
    parity = manifest.gates[-1]
    assert parity.value is not None
    assert 0 < parity.value < 0.01
    assert [(t.fqn, t.rows, t.dim, len(t.parts)) for t in manifest.tables] == [
        (USER, 50, 4, 1),
        (GENRE, 7, 2, 1),
    ]
    stored = {o.key for o in any_storage.list("serving/versions/")}
    assert stored == {
        bench.registry.key(1, name)
        for name in (*(f.key for f in manifest.files), keys.CLAIM, keys.MANIFEST)
    }


def test_a_version_needs_nothing_of_the_run(bench: Bench) -> None:
    """Only the version's own files: the checkpoint, the description and the program may go."""
    bench.run.commit(1, random_tensors())
    bench.publish(1)
    root = bench.run.root
    for o in list(root.list()):
        if not o.key.startswith(("serving/versions", "serving/live")):
            root.delete(o.key)
    got = Predictor(bench.registry, trust=bench.run.trust).predict(GOLDEN)
    assert torch.isfinite(got.outputs["score"]).all()


def test_the_same_commit_is_published_once(bench: Bench) -> None:
    bench.run.commit(1, random_tensors())
    assert bench.publish(1).built
    again = bench.publish(1)
    assert (again.version, again.built, again.live) == (1, False, True)
    assert bench.registry.numbers() == [1]
    assert len(bench.registry.history()) == 1


def test_d52_every_part_of_a_version_is_of_one_commit(bench: Bench) -> None:
    """An older commit is published while a newer one exists: nothing of the newer one gets in."""
    for step in (100, 200):
        bench.run.commit(step, stamped_tensors(step / 100))
    bench.publish(100)
    manifest = bench.registry.version(1)
    parts = (manifest.dense_step, manifest.table_step, manifest.id_map_step)
    assert (manifest.source.step, *parts) == (100, 100, 100, 100)
    got = Predictor(bench.registry, trust=bench.run.trust).predict(GOLDEN)
    for output in ("user_stamp", "genre_stamp", "dense_stamp"):
        assert got.outputs[output][0] == 1.0


def candidates(bench: Bench) -> list[int]:
    """Steps that would go live by themselves, newest first."""
    publisher = bench.publisher()
    return [c.ref.step for c in publisher.candidates(publisher.catalog.commits())]


def test_d53_rollback_is_not_undone_and_a_newer_commit_goes_live(bench: Bench) -> None:
    from publisher.pointer import Reason

    for step in (1, 2, 3):
        bench.run.commit(step, stamped_tensors(step))
        bench.publish(step)
    bench.registry.rollback(None, Reason("op@here", "bad"))
    again = bench.publisher().publish_latest("again")
    assert (again.version, again.built, again.live) == (3, False, False)
    assert candidates(bench) == []
    assert Predictor(bench.registry, trust=bench.run.trust).version == 2
    bench.run.commit(4, stamped_tensors(4))
    assert bench.publisher().publish_latest("newer").live
    assert bench.registry.version(4).parent == 2


def test_d53_a_late_older_commit_gets_a_version_that_is_not_live(bench: Bench) -> None:
    bench.run.commit(3, random_tensors())
    bench.publish(3)
    bench.run.commit(2, random_tensors(2))
    assert candidates(bench) == []
    outcome = bench.publish(2)
    assert (outcome.version, outcome.built, outcome.live) == (2, True, False)
    assert [m.to_version for m in bench.registry.history()] == [1]


def test_a_newer_attempt_that_went_back_goes_live(bench: Bench) -> None:
    for step in (10, 20, 30):
        ref = bench.run.commit(step, random_tensors(step))
        if step == 20:
            parent = ref
    bench.publish(30)
    bench.run.attempt(2, parent)
    bench.run.commit(25, random_tensors(25), epoch=2, parent=parent)
    assert candidates(bench) == [25]
    assert bench.publisher().publish_latest("went back").live


# -- one gate after the other ---------------------------------------------------------------


def with_row(name: str, row: int, value: float) -> dict[str, torch.Tensor]:
    tensors = random_tensors()
    tensors[name][row, 0] = value
    return tensors


def refused(bench: Bench, gate: str, reason: str, *, step: int = 2) -> GateError:
    """Publishing `step` is refused by that gate, on record, and version 1 stays live."""
    with pytest.raises(GateError) as e:
        bench.publish(step)
    assert e.value.gate == gate
    assert re.search(reason, str(e.value)), str(e.value)
    assert "\n" not in str(e.value)
    (refusal,) = [r for r in bench.registry.refusals() if r.source.step == step]
    assert (refusal.gate, refusal.attempt, refusal.reason) == (gate, 1, e.value.reason)
    assert any(not g.passed and g.name == gate for g in refusal.gates)
    live = bench.registry.live()
    assert live is not None
    assert live.source.step == 1
    number = refusal.version
    if number is not None:  # its files are gone, its number stays taken
        prefix = bench.registry.prefix + keys.version_prefix(number)
        assert [o.key for o in bench.run.root.list(prefix)] == [prefix + keys.CLAIM]
    return e.value


@pytest.fixture
def live_bench(bench: Bench) -> Bench:
    """Step 1 is live."""
    bench.run.commit(1, random_tensors())
    bench.publish(1)
    return bench


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_d50_gate_finite_tables(live_bench: Bench, value: float) -> None:
    live_bench.run.commit(2, with_row(USER, 33, value))
    refused(live_bench, "finite", rf"{re.escape(USER)} row 33: 1 of its values are NaN or inf")


def test_d50_gate_finite_dense_constants(live_bench: Bench) -> None:
    live_bench.run.commit(2, with_row("model.over.weight", 0, float("nan")))
    refused(live_bench, "finite", r"model\.over\.weight row 0: 1 of its values")


def test_d50_the_optimizer_may_hold_anything(live_bench: Bench) -> None:
    tensors = random_tensors()
    tensors["optimizer.state.user.momentum"][3] = float("nan")
    live_bench.run.commit(2, tensors)
    assert live_bench.publish(2).live


def test_gate_finite_beyond_fp16(live_bench: Bench) -> None:
    live_bench.run.commit(2, with_row(GENRE, 6, -70_000.0))
    refused(live_bench, "finite", rf"{re.escape(GENRE)} row 6: .* beyond 65504")


def test_d51_gate_names_and_shapes_lists_everything(live_bench: Bench) -> None:
    tensors = random_tensors()
    tensors["model.over.renamed"] = tensors.pop("model.over.weight")
    tensors["model.over.bias"] = tensors["model.over.bias"].double()
    tensors[USER] = torch.zeros(51, 4)
    del tensors[GENRE]
    live_bench.run.commit(2, tensors)
    error = refused(
        live_bench, "names_and_shapes", r"constant over\.weight: no model\.over\.weight in the"
    )
    assert "constant over.bias: model.over.bias is sharded float64 (1,) in the checkpoint" in (
        str(error)
    )
    assert f"table {USER}: the checkpoint has sharded float32 (51, 4), described as (50, 4)" in (
        str(error)
    )
    assert f"table {GENRE}: not in the checkpoint" in str(error)


def test_gate_names_and_shapes_table_of_another_kind(live_bench: Bench) -> None:
    tensors = random_tensors()
    tensors[USER] = torch.zeros(50, 4, dtype=torch.int64)
    live_bench.run.commit(2, tensors)
    refused(live_bench, "names_and_shapes", r"the checkpoint has sharded int64 \(50, 4\)")


DESCRIBED = description()


@pytest.mark.parametrize(
    ("described", "gate", "reason"),
    [
        (
            replace(DESCRIBED, constants=DESCRIBED.constants[1:]),
            "names_and_shapes",
            r"over\.weight: in the program, but not described",
        ),
        (
            replace(
                DESCRIBED,
                constants=(*DESCRIBED.constants, ConstantSpec("x", None, "float32", (1,))),
            ),
            "names_and_shapes",
            "x: described, but not in the program",
        ),
        (
            replace(
                DESCRIBED,
                constants=(
                    replace(DESCRIBED.constants[0], shape=(9, 1)),
                    *DESCRIBED.constants[1:],
                ),
            ),
            "names_and_shapes",
            r"over\.weight: described as float32 \(9, 1\), the program has float32 \(1, 9\)",
        ),
        (
            replace(DESCRIBED, outputs=DESCRIBED.outputs[:2]),
            "names_and_shapes",
            "the program gives 4 outputs, 2 are described",
        ),
        (
            replace(DESCRIBED, outputs=(OutputSpec("score", "float64", ("batch",)),) * 4),
            "names_and_shapes",
            r"score: described as float64 \('batch',\), the program has float32 \(",
        ),
        (
            replace(
                DESCRIBED,
                inputs=(
                    InputSpec("dense", "dense", "float32", ("batch", 4)),
                    *DESCRIBED.inputs[1:],
                ),
            ),
            "names_and_shapes",
            r"dense: described as float32 \('batch', 4\), the program has float32 \(s\d+, 3\)",
        ),
        (
            replace(
                DESCRIBED,
                inputs=(
                    InputSpec("dense", "dense", "float32", ("batch", "batch")),
                    *DESCRIBED.inputs[1:],
                ),
            ),
            "digests",
            "a dense input of shape",
        ),
        (replace(DESCRIBED, inputs=DESCRIBED.inputs[:1]), "digests", "aren't the program's"),
        (
            replace(
                DESCRIBED,
                lookups=(
                    LookupSpec(
                        DESCRIBED.lookups[0].input,
                        (*DESCRIBED.lookups[0].features, FeatureSpec("u", USER, 50, 4, "sum")),
                    ),
                ),
                features=(*DESCRIBED.features, RequestFeature("u")),
            ),
            "digests",
            "gives 10 columns, its input is float32",
        ),
        (replace(DESCRIBED, golden_digest="xxh3-128:00"), "digests", r"golden\.safetensors"),
        (replace(DESCRIBED, golden_key="serving/none"), "digests", "no such object"),
        (replace(DESCRIBED, program_key="code/none.pt2"), "trusted_code", "no such object"),
        (replace(DESCRIBED, program_sha256="0" * 64), "trusted_code", "expected sha256:0000"),
    ],
)
def test_descriptions_that_do_not_fit(
    live_bench: Bench, described: ServingDescription, gate: str, reason: str
) -> None:
    live_bench.run.describe("d2", described)
    live_bench.run.commit(2, random_tensors(), annotations={"serving_description": "d2"})
    refused(live_bench, gate, reason)


@pytest.mark.parametrize("named", [{}, {"serving_description": "../x"}])
def test_a_commit_without_a_description(live_bench: Bench, named: dict[str, str]) -> None:
    live_bench.run.commit(2, random_tensors(), annotations=named)
    refused(live_bench, "digests", "names no serving description")


def test_a_description_that_is_not_there(live_bench: Bench) -> None:
    live_bench.run.commit(2, random_tensors(), annotations={"serving_description": "d9"})
    refused(live_bench, "digests", r"descriptions/d9/description\.json")


def test_gate_trusted_code(live_bench: Bench) -> None:
    live_bench.run.trust.path.write_text("# nothing\n")
    live_bench.run.commit(2, random_tensors())
    refused(live_bench, "trusted_code", "is not trusted on this host")


def test_gate_trusted_code_wants_the_very_bytes(live_bench: Bench) -> None:
    """A trusted name with other bytes under it is as foreign as any."""
    flip_byte(live_bench.run.root, description().program_key, len(program()) // 2)
    live_bench.run.commit(2, random_tensors())
    refused(live_bench, "trusted_code", "is not trusted on this host")


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda run: flip_byte(run.root, run.data_key(2), 100), "bytes don't match their digest"),
        (
            lambda run: run.root.put(run.data_key(2), run.root.read(run.data_key(2))[:-9]),
            "the commit says",
        ),
        (lambda run: run.root.delete(run.data_key(2)), "missing"),
        (lambda run: flip_byte(run.root, run.data_key(2)[:-3] + "idx", 40), "checksum|digest"),
    ],
    ids=["bit", "short", "gone", "index"],
)
def test_d54_gate_digests(
    live_bench: Bench, damage: Callable[[TinyRun], object], reason: str
) -> None:
    live_bench.run.commit(2, random_tensors())
    info = live_bench.run.info(2)
    damage(live_bench.run)
    with pytest.raises(GateError, match=reason) as e:
        live_bench.publisher().publish(info, "test")
    assert (e.value.gate, e.value.exit_code) == ("digests", 5)


class _Uncovered(CheckpointReader):
    """A reader that loses rows, as a defect in resharding would."""

    def iter_rows(self, fqn: str, first: int = 0, rows: int | None = None, **kwargs: Any):  # type: ignore[no-untyped-def]
        for at, block in super().iter_rows(fqn, first, rows, **kwargs):
            if at != 16:
                yield at, block


def test_gate_coverage(live_bench: Bench) -> None:
    live_bench.run.commit(2, random_tensors())
    run, registry = live_bench.run, live_bench.registry
    builder = VersionBuilder(run.root, registry, ProgramCache(run.trust), _Uncovered)
    publisher = Publisher(builder, lambda *_: 0.0, "x")
    with pytest.raises(GateError, match=rf"{re.escape(USER)}: got rows 32\+ .* row 16") as e:
        publisher.publish(run.info(2), "test")
    assert e.value.gate == "coverage"


@pytest.mark.parametrize("err", [0.01, 5.0, float("nan"), float("inf")])
def test_gate_golden_parity(live_bench: Bench, err: float) -> None:
    live_bench.run.commit(2, random_tensors())
    publisher = live_bench.publisher(lambda *_: err)
    with pytest.raises(GateError, match=r"max abs error .*, allowed below 0\.01") as e:
        publisher.publish(live_bench.run.info(2), "test")
    assert e.value.gate == "golden_parity"
    assert live_bench.registry.numbers() == [1]


def test_gate_golden_parity_sees_what_int8_does_to_a_wide_row(live_bench: Bench) -> None:
    """One huge value in a row takes the steps from the others: finite, and wrong all the same."""
    tensors = random_tensors()
    tensors[USER][3, 1] = 60_000.0
    live_bench.policy = Policy(gates=GateLimits(norm_drift_max_ratio=1e9))
    live_bench.run.commit(2, tensors)
    refused(live_bench, "golden_parity", "max abs error")


def test_any_other_failure_is_refused_too(live_bench: Bench) -> None:
    def broken(*_: object) -> float:
        raise RuntimeError("defect")

    live_bench.run.commit(2, random_tensors())
    with pytest.raises(GateError, match="RuntimeError: defect") as e:
        live_bench.publisher(broken).publish(live_bench.run.info(2), "test")
    assert (e.value.gate, e.value.exit_code) == ("build", 1)
    assert [r.gate for r in live_bench.registry.refusals()] == ["build"]


def test_a_storage_failure_is_nobodys_fault(trust: TrustList) -> None:
    """It is raised as it is, nothing is quarantined, and the next try succeeds."""
    memory = MemoryStorage()
    faulty = FaultyStorage(memory)
    run = TinyRun(memory, trust).begin()
    run.commit(1, random_tensors())
    bench = Bench(TinyRun(faulty, trust), Registry(faulty))
    for op, pattern in (
        ("read_into", "data/*"),
        ("write", "*tables-*.bin"),
        ("finish", "*tables-*.bin"),
        ("create", "*dense.safetensors"),
        ("create", "*manifest.json"),
        ("create", "*live.json"),
    ):
        faulty.on(op, pattern).fail(StorageError("503"))
        with pytest.raises(StorageError, match="503"):
            bench.publish(1)
    assert bench.registry.refusals() == []
    assert bench.publish(1).live
    (number,) = bench.registry.numbers()
    for o in memory.list("serving/versions/"):
        parsed = keys.parse_version_key(o.key.removeprefix("serving/"))
        assert parsed is not None
        assert parsed[0] == number or parsed[1] == keys.CLAIM or number > parsed[0]


def test_given_up_after_so_many_refusals(live_bench: Bench) -> None:
    live_bench.run.commit(2, with_row(USER, 0, float("nan")))
    publisher = live_bench.publisher()
    for attempt in (1, 2, 3):
        with pytest.raises(GateError, match="row 0"):
            publisher.publish_latest("test")
        assert len(live_bench.registry.refusals()) == attempt
    with pytest.raises(GateError, match=r"step 2 was refused 3 times and given up \(--retry"):
        publisher.publish_latest("test")
    assert len(live_bench.registry.refusals()) == 3
    with pytest.raises(GateError, match="row 0"):
        publisher.publish_latest("test", retry=True)
    live_bench.run.commit(3, random_tensors())
    assert publisher.publish_latest("test").live


def test_another_publisher_was_faster(live_bench: Bench) -> None:
    live_bench.run.commit(2, random_tensors())

    def slow(*_: object) -> float:
        live_bench.publish(2)
        return 0.0

    outcome = live_bench.publisher(slow).publish(live_bench.run.info(2), "test")
    assert live_bench.registry.numbers() == [1, 3]
    assert (outcome.version, outcome.live) == (3, True)


def test_a_version_whose_files_were_damaged_is_built_again(live_bench: Bench) -> None:
    live_bench.run.commit(2, random_tensors())
    root = live_bench.run.root
    faulty = FaultyStorage(root)
    faulty.on("replace_if", "*live.json").fail(StorageError("killed"))
    with pytest.raises(StorageError):
        Bench(TinyRun(faulty, live_bench.run.trust), Registry(faulty)).publish(2)
    root.put(live_bench.registry.key(2, keys.TABLES), b"cut")
    outcome = live_bench.publish(2)
    assert (outcome.version, outcome.built, outcome.live) == (3, True, True)
    again = live_bench.publish(2)
    assert (again.version, again.built) == (3, False)
    (refusal,) = live_bench.registry.refusals()
    assert (refusal.version, refusal.gate) == (2, "digests")
    assert "the manifest of version 2 says" in refusal.reason


def test_a_store_that_damages_every_version_is_given_up(live_bench: Bench) -> None:
    live_bench.run.commit(2, random_tensors())
    publisher, registry = live_bench.publisher(), live_bench.registry
    for number in (2, 3, 4):
        faulty = FaultyStorage(live_bench.run.root)
        faulty.on("replace_if", "*live.json").fail(StorageError("killed"))
        with pytest.raises(StorageError):
            Bench(TinyRun(faulty, live_bench.run.trust), Registry(faulty)).publish(2)
        live_bench.run.root.delete(registry.key(number, keys.DENSE))
    with pytest.raises(GateError, match="missing from version 4") as e:
        publisher.publish_latest("test")
    assert e.value.exit_code == 5
    with pytest.raises(GateError, match="refused 3 times and given up"):
        publisher.publish_latest("test")
    assert publisher.publish_latest("mended", retry=True).live
    assert registry.numbers() == [1, 2, 3, 4, 5]


def test_files_that_vanish_before_the_manifest_are_a_refusal(live_bench: Bench) -> None:
    live_bench.run.commit(2, random_tensors())

    def loses(registry: Registry, draft: VersionManifest) -> float:
        live_bench.run.root.delete(registry.key(draft.version, keys.DENSE))
        return 0.0

    with pytest.raises(GateError, match="missing from version 2"):
        live_bench.publisher(loses).publish(live_bench.run.info(2), "test")
    assert [r.gate for r in live_bench.registry.refusals()] == ["digests"]


@pytest.mark.parametrize(
    "trouble",
    [
        lambda: [b"x" * (1 << 62)],
        lambda: torch.empty(1 << 50, dtype=torch.uint8),
        lambda: open("/proc/self/none"),  # noqa: SIM115
    ],
    ids=["memory", "torch memory", "disk"],
)
def test_a_hosts_trouble_is_no_refusal(live_bench: Bench, trouble: Callable[[], Any]) -> None:
    def parity(*_: object) -> float:
        trouble()
        return 0.0

    live_bench.run.commit(2, random_tensors())
    with pytest.raises(StorageError, match="this host's trouble"):
        live_bench.publisher(parity).publish(live_bench.run.info(2), "test")
    assert live_bench.registry.refusals() == []
    assert live_bench.publish(2).live


def test_no_commit_yet(bench: Bench) -> None:
    from ckpt.errors import NotFoundError

    with pytest.raises(NotFoundError, match="no committed checkpoint here yet"):
        bench.publisher().publish_latest("test")
    assert layout.RUN in {o.key for o in bench.run.root.list()}
