"""Raw ids to rows on a serving host: hash, vocabulary, managed collision, and what they don't know."""

from __future__ import annotations

from dataclasses import replace

import pytest
import safetensors.torch
import torch

from ckpt.errors import BadInputError
from ckpt.schema import RequestFeature, ServingDescription
from ckpt.storage import MemoryStorage
from ckpt.trust import TrustList
from publisher.gates import GateError
from publisher.golden import check_golden_ids, id_map_tensors
from publisher.predictor import Predictor
from publisher.registry import Registry
from tests.publisher import rich
from tests.publisher.conftest import Bench, FakeClock
from tests.publisher.tiny import TinyRun


def bench_of(trust: TrustList, described: ServingDescription | None = None) -> Bench:
    storage, clock = MemoryStorage(), FakeClock()
    run = rich.begin(TinyRun(storage, trust), described)
    return Bench(run, Registry(storage, clock=clock), clock)


def serve(bench: Bench, held: dict[str, torch.Tensor]) -> Predictor:
    bench.run.commit(1, held)
    bench.publish(1)
    return Predictor(bench.registry, trust=bench.run.trust)


def with_feature(name: str, **changes: object) -> ServingDescription:
    described = rich.description()
    features = tuple(
        replace(f, **changes) if f.name == name else f  # type: ignore[arg-type]
        for f in described.features
    )
    return replace(described, features=features)


ASKED = rich.request(
    [[1, 2, 3], [], [-9, 2**62]],
    [[100, 5], [2**40], []],
    [[900, -5, 4], [31], [-1]],
    [[6, 2, 1], [], [-1, 5]],
)


def test_answers_are_the_models_whatever_the_map(trust: TrustList) -> None:
    held = rich.tensors()
    got = serve(bench_of(trust), held).predict(ASKED)
    for name, want in rich.plain(held, ASKED).items():
        torch.testing.assert_close(got.outputs[name], want, rtol=0, atol=0.05)
    # A tag that the managed collision doesn't hold has a row: the one that such tags trained.
    assert got.unknown_ids == {"user": 1, "page": 2}


def test_ids_may_be_refused_and_named(trust: TrustList) -> None:
    bench = bench_of(trust, with_feature("page", unknown="refuse"))
    predictor = serve(bench, rich.tensors())
    with pytest.raises(BadInputError, match=r"page: id 6 has no row \(2 such ids\)"):
        predictor.predict(ASKED)
    one = [[0]]
    assert predictor.predict(rich.request(one, one, one, one)).unknown_ids == {"user": 1}


def test_ids_outside_their_table_may_take_a_row(trust: TrustList) -> None:
    held = rich.tensors()
    described = with_feature("page", unknown="row", unknown_row=3)
    asked = rich.request([[]], [[]], [[]], [[77, -1]])
    same = rich.request([[]], [[]], [[]], [[3, 3]])
    got = serve(bench_of(trust, described), held).predict(asked)
    want = rich.plain(held, same)["score"]
    torch.testing.assert_close(got.outputs["score"], want, rtol=0, atol=0.05)
    assert got.unknown_ids == {"page": 2}


def test_a_vocabularys_unknown_ids_may_add_nothing(trust: TrustList) -> None:
    described = with_feature("user", unknown="zero", unknown_row=None)
    golden = {**rich.golden(), "user.rows": torch.tensor([1, -1, 4, 3])}
    storage = MemoryStorage()
    run = rich.begin(TinyRun(storage, trust), described)
    bench = Bench(run, Registry(storage), FakeClock())
    data = safetensors.torch.save(golden)
    from ckpt.digest import digest_of

    storage.put(described.golden_key, data)
    described = replace(described, golden_digest=digest_of(data))
    bench.run.describe("d2", described)
    held = rich.tensors()
    bench.run.commit(1, held, annotations={"serving_description": "d2"})
    bench.publish(1)
    asked = rich.request([[]], [[100, 6]], [[]], [[]])
    got = Predictor(bench.registry, trust=trust).predict(asked)
    x = torch.cat([asked["dense"][0], torch.zeros(2), held[rich.USER][1] / 2, torch.zeros(4)])
    want = held["model.over.weight"] @ x + held["model.over.bias"]
    torch.testing.assert_close(got.outputs["score"], want, rtol=0, atol=0.05)
    assert got.outputs["user_ids"].tolist() == [1, -1]
    assert got.unknown_ids == {"user": 1}


def test_a_map_that_the_trainer_doesnt_use_is_refused(trust: TrustList) -> None:
    """By the gate id_maps, before a table is read; with the feature, the id and both rows."""
    bench = bench_of(trust, with_feature("item", ids=replace(rich.HASH, seed=4)))
    bench.run.commit(1, rich.tensors())
    with pytest.raises(GateError, match=r"item: id 7\d is \d+ in the trainer and \d+ by") as e:
        bench.publish(1)
    assert e.value.gate == "id_maps"
    assert bench.registry.numbers() == []


def test_the_golden_request_must_hold_the_trainers_ids() -> None:
    described = rich.description()
    held = _Reader(rich.tensors())
    root = MemoryStorage()
    root.put(rich.VOCABULARY_KEY, safetensors.torch.save(rich.VOCABULARY))
    maps = id_map_tensors(described, root, held)
    assert sorted(maps) == [
        "collision:tags.raw",
        "collision:tags.row",
        f"position:{rich.POSITION}",
        "user.raw",
        "user.row",
    ]
    assert maps["collision:tags.raw"].tolist() == [-5, 31, 900]  # sorted, no empty slots
    assert maps["collision:tags.row"].tolist() == [0, 6, 2]
    check_golden_ids(described, maps, rich.golden())
    lacking = {n: t for n, t in rich.golden().items() if n != "user.rows"}
    with pytest.raises(BadInputError, match="user.rows is missing"):
        check_golden_ids(described, maps, lacking)


class _Entry:
    kind = "sharded"

    def __init__(self, tensor: torch.Tensor) -> None:
        self.dtype = str(tensor.dtype).removeprefix("torch.")
        self.shape = tuple(tensor.shape)


class _Reader:
    """A checkpoint in memory."""

    def __init__(self, held: dict[str, torch.Tensor]) -> None:
        self._held = held
        self.tensors = {n: _Entry(t) for n, t in held.items()}

    def read(self, fqn: str) -> torch.Tensor:
        return self._held[fqn]

    def read_rows(self, fqn: str, rows: list[int]) -> torch.Tensor:
        return self._held[fqn][rows]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({rich.RAW_TAGS: None}, r"model\.mc\.raw is missing"),
        ({rich.TAG_ROWS: torch.arange(8).int()}, r"model\.mc\.rows: is int32 \(8,\)"),
        ({rich.RAW_TAGS: torch.arange(9)}, r"model\.mc\.raw: is int64 \(9,\)"),
        ({rich.RAW_TAGS: torch.ones(8).long()}, "raw id 1 has two rows"),
        ({rich.TAG_ROWS: torch.arange(8) + 5}, "has row 8, its table has 8"),
        ({rich.POSITION: torch.ones(2, 2)}, r"model\.position is float32 \(2, 2\)"),
        ({rich.POSITION: torch.tensor([1.0, torch.nan])}, "holds NaN or infinity"),
    ],
)
def test_id_maps_of_a_checkpoint_are_checked_by_name(
    changes: dict[str, torch.Tensor | None], why: str
) -> None:
    root = MemoryStorage()
    root.put(rich.VOCABULARY_KEY, safetensors.torch.save(rich.VOCABULARY))
    held = {n: t for n, t in {**rich.tensors(), **changes}.items() if t is not None}
    if rich.TAG_ROWS in changes:
        held[rich.RAW_TAGS] = torch.arange(8)
    with pytest.raises(BadInputError, match=why):
        id_map_tensors(rich.description(), root, _Reader(held))


def test_a_vocabulary_is_checked_by_its_digest() -> None:
    from ckpt.errors import CorruptError

    root = MemoryStorage()
    other = {**rich.VOCABULARY, "row": torch.tensor([4, 1, 2])}
    root.put(rich.VOCABULARY_KEY, safetensors.torch.save(other))
    with pytest.raises(CorruptError, match=r"user\.safetensors: digest is"):
        id_map_tensors(rich.description(), root, _Reader(rich.tensors()))


@pytest.mark.parametrize("key", ["../../outside", "/etc/passwd", "descriptions/../../x"])
def test_a_vocabularys_key_never_leads_out_of_the_root(key: str) -> None:
    ids = replace(rich.description().features[1].ids, key=key)
    described = with_feature("user", ids=ids)
    with pytest.raises(BadInputError, match="storage key"):
        id_map_tensors(described, MemoryStorage(), _Reader(rich.tensors()))


def test_features_that_nothing_reads_need_not_be_sent(trust: TrustList) -> None:
    predictor = serve(bench_of(trust), rich.tensors())
    assert "unused.values" not in predictor.current.request.names()
    assert RequestFeature("unused") in predictor.current.description.features
    with pytest.raises(BadInputError, match="tag.weights: float32 of shape"):
        predictor.predict({**ASKED, "tag.weights": torch.ones(2)})
