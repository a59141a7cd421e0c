"""The exporter, on models in one process, sharded and not."""

import io
import zipfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ckpt.digest import check_digest
from ckpt.errors import BadInputError
from ckpt.idmaps import EMPTY_SLOT
from ckpt.storage import MemoryStorage, open_storage
from ckpt.tree import flatten
from ckpt.trust import TrustList
from tests.trainer import served_models as models
from tests.trainer.launch import read_state, run_ranks
from tests.trainer.served import read_description, request_of, serve
from tests.trainer.served_everything import Everything, fill
from tests.trainer.sharded import shard
from trainer.description import ServedModel, export_description


@pytest.fixture
def trust(tmp_path: Path) -> TrustList:
    return TrustList(tmp_path / "trusted")


def keys_of(model: nn.Module) -> dict[str, Tensor]:
    return {f"model.{k}": v for k, v in model.state_dict().items()}


def describe(
    model: Any, storage: MemoryStorage, trust: TrustList, args: tuple[Any, ...] | None = None
) -> str:
    served = ServedModel("m", model, args or model.request(16), "model.", keys_of(model))
    return export_description(served, storage, trust)


def outputs(model: nn.Module, args: tuple[Any, ...]) -> list[Tensor]:
    with torch.no_grad():
        out = model(*args)
    return (
        list(out.values())
        if isinstance(out, dict)
        else [out]
        if isinstance(out, Tensor)
        else [*out]
    )


def test_names_and_shapes(trust: TrustList) -> None:
    storage = MemoryStorage()
    tower = read_description(storage, describe(models.TwoTower(), storage, trust))
    assert [(i.name, i.kind, i.shape) for i in tower.inputs] == [
        ("query", "lookup", ("batch", 24)),
        ("item", "lookup", ("batch", 16)),
        ("item#1", "lookup", ("batch", 16)),
    ]
    assert [(o.name, o.shape) for o in tower.outputs] == [
        ("match", ("batch",)),
        ("norm", ("batch",)),
    ]
    first = tower.lookups[0].features
    assert [(f.feature, f.pooling, f.dim) for f in first] == [("u", "mean", 8), ("ctx", "mean", 16)]
    assert first[0].table_fqn == "model.query.embedding_bags.q_u.weight"
    task = read_description(storage, describe(models.MultiTask(), storage, trust))
    assert [i.name for i in task.inputs] == ["dense", "bags"]  # `unused` reaches no output
    assert [(o.name, o.shape) for o in task.outputs] == [("0", ("batch",)), ("1", ("batch", 2))]
    kept = {c.name for c in task.constants if c.fqn is None}
    assert "model.prior" in kept
    assert {c.fqn for c in task.constants} >= {"model.norm.running_mean", "model.one.weight"}


def test_equal_models_give_the_same_description(trust: TrustList) -> None:
    storage = MemoryStorage()
    torch.manual_seed(1)
    first = describe(models.Ranker(), storage, trust)
    stored = [o.key for o in storage.list()]
    torch.manual_seed(2)  # other weights
    assert describe(models.Ranker(), storage, trust) == first
    assert [o.key for o in storage.list()] == stored
    other = describe(models.Ranker(), storage, trust, models.Ranker.request(8))
    assert other != first


def test_the_program_holds_no_weights_and_no_paths(trust: TrustList) -> None:
    model, storage = models.MultiTask(), MemoryStorage()
    for parameter in model.parameters():
        nn.init.constant_(parameter, 0.123)
    description = read_description(storage, describe(model, storage, trust))
    code = storage.read(description.program_key)
    program = torch.export.load(io.BytesIO(code))
    for c in description.constants:
        assert c.fqn is None or not program.state_dict[c.name].any(), c.name
    assert torch.equal(program.state_dict["model.prior"], model.prior)
    with zipfile.ZipFile(io.BytesIO(code)) as archive:
        text = b"".join(archive.read(n) for n in archive.namelist())
    assert str(Path(__file__).parent).encode() not in text
    assert b"served_models.py" not in text


def test_golden_request_and_trust(trust: TrustList) -> None:
    model, storage = models.Ranker(), MemoryStorage()
    args = model.request(16)
    description = read_description(storage, describe(model, storage, trust, args))
    golden = storage.read(description.golden_key)
    check_digest(golden, description.golden_digest, "golden")
    tensors = safetensors.torch.load(golden)
    assert set(tensors) == {"dense", *(f"{f}.{p}" for f in "abcd" for p in ("values", "lengths"))}
    assert torch.equal(tensors["dense"], args[0])
    assert torch.equal(tensors["c.values"], args[1]["c"].values())
    assert trust.sums() == {description.program_sha256}
    trust.check(storage.read(description.program_key), "program")


def test_leaves_the_model_as_it_was(trust: TrustList) -> None:
    model = models.MultiTask()
    model.drop.eval()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    modes = {n: m.training for n, m in model.named_modules()}
    describe(model, MemoryStorage(), trust)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert {n: m.training for n, m in model.named_modules()} == modes


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            models.Rewrites,
            "bags: feature 'a' isn't looked up with the ids of the request: the model rew",
        ),
        (
            models.RewritesLargeIds,
            r"bags: id -?\d+ of feature 'a' arrives as \d: the model rewrites",
        ),
        (models.ClampsIds, r"bags: id \d\d+ of feature 'b' arrives as 9: the model rewrites ids"),
        (models.CutsPositions, r"bags: id -?\d+ of feature 'a' arrives as \d: the model rewrites"),
        (models.CutsRows, r"bags: a row of \d{3,} ids of feature 'a' arrives with 5 ids"),
        (models.SquaresWeights, r"bags: weight -\S+ of feature 'a' arrives as \d\S*: the model"),
        (models.Branches, r"at served_models.py:\d+ in forward \(.*no control flow"),
        (models.LongestRow, r"at served_models.py:\d+ in forward \(.*no control flow"),
        (
            models.FixedBatch,
            r"can't be exported \(it takes batch to be 16, always\).*any batch size",
        ),
        (models.ThreeIds, r"takes ids:a to be 3 ?\* ?batch, always"),
        (models.Random, "output output: the exported program is .* away from the model"),
        (models.NoCollection, "NoCollection has no EmbeddingBagCollection"),
        (models.NotCalled, "spare is never called on the golden request"),
        (models.ComputesWeights, "bags: the weights of feature 'a' aren't those of the request"),
        (models.OtherProcessor, "bags: feature 'a' is processed by Doubles; only PositionWeighted"),
        (models.EqualIds, "bags: feature 'a' has the ids of x and of y in the golden"),
        (
            models.Fails,
            r"fails on the golden request, at served_models.py:\d+ in forward \(RuntimeError",
        ),
        (models.VariableStride, "argument features: its features have batch sizes of their own"),
        (models.OtherBatch, "batch sizes differ: features 16, table 3"),
        (models.Opaque, "argument table is a object; .*register its class"),
        (
            lambda: models.Collides(models.probing_collision),
            "bags.t_a: managed collision by HashZchManagedCollisionModule",
        ),
        (
            lambda: models.Collides(partial(models.sorted_collision, input_hash_func=hash)),
            "bags.t_a: its ids are hashed by an input_hash_func",
        ),
        (
            lambda: models.Collides(models.shifted_collision),
            "bags: feature 'a' isn't the sum of the rows that bags.t_a gives it",
        ),
        (
            lambda: models.Collides(models.sorted_collision, return_remapped_features=True),
            r"bags \(ManagedCollision\w+\): it returns the remapped ids",
        ),
    ],
    ids=lambda v: v.__name__ if isinstance(v, type) else None,
)
def test_refuses_by_name(make: Any, message: str, trust: TrustList) -> None:
    storage = MemoryStorage()
    with pytest.raises(BadInputError, match=message):
        describe(make(), storage, trust)
    assert list(storage.list()) == []
    assert trust.sums() == frozenset()


def test_takes_renamed_and_permuted_features(trust: TrustList) -> None:
    storage = MemoryStorage()
    description = read_description(storage, describe(models.PassesOn(), storage, trust))
    (lookup,) = description.lookups
    assert [(f.feature, f.output, f.weights) for f in lookup.features] == [
        ("b", "a", "request"),
        ("a", "b", "request"),
    ]


exports: list[str | None] = []
"""Not the model's own: the exporter copies that."""


class Peeks(nn.Module):
    """A ranker that notes its exports; it looks at the lengths of `peek`, but only while exported."""

    def __init__(self, peek: str | None) -> None:
        super().__init__()
        self.peek = peek
        self.ranker = models.Ranker()

    def forward(self, dense: Tensor, features: Any) -> Tensor:
        logits = self.ranker(dense, features)
        if torch.compiler.is_exporting():
            exports.append(self.peek)
            if self.peek is not None:
                logits = logits + 0 * features[self.peek].lengths()
        return logits


@pytest.fixture
def noted() -> Iterator[list[str | None]]:
    exports.clear()
    yield exports
    exports.clear()


def test_features_that_are_only_looked_up_take_no_second_trace(
    trust: TrustList, noted: list[str | None]
) -> None:
    model, storage = Peeks(None), MemoryStorage()
    args = models.Ranker.request(16)
    description = read_description(storage, describe(model, storage, trust, args))
    assert [i.name for i in description.inputs] == ["dense", "ranker.bags"]
    assert noted == [None]


def test_a_feature_that_only_an_export_reads_is_an_input(
    trust: TrustList, noted: list[str | None]
) -> None:
    model, storage = Peeks("b"), MemoryStorage()
    args = models.Ranker.request(16)
    description = read_description(storage, describe(model, storage, trust, args))
    assert "b.lengths" in [i.name for i in description.inputs]
    request = request_of(description, dict(zip(["dense", "features"], args, strict=True)))
    (served,) = serve(storage, description, keys_of(model), request).values()
    assert torch.equal(served, outputs(model, args)[0])
    assert len(noted) > 1


def test_refuses_a_wrong_prefix(trust: TrustList) -> None:
    model = models.Ranker()
    served = ServedModel("m", model, model.request(4), "other.", keys_of(model))
    with pytest.raises(BadInputError, match=r"no other\.bags\.embedding_bags\.t_a\.weight"):
        export_description(served, MemoryStorage(), trust)


@pytest.fixture
def one_rank() -> Iterator[None]:
    store = vars(dist)["HashStore"]()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
def test_describes_a_sharded_model_at_world_1(trust: TrustList) -> None:
    torch.manual_seed(5)
    sharded, storage = shard(Everything("meta"), world_size=1), MemoryStorage()
    fill(sharded)
    served = ServedModel("m", sharded, Everything.request(16), "model.", keys_of(sharded))
    description = read_description(storage, export_description(served, storage, trust))
    assert description.export_max_abs_err < 1e-6
    whole = {
        fqn: leaf.shards[0].tensor for fqn, leaf in flatten({"model": sharded}, 0).leaves.items()
    }
    sharded.eval()
    for batch in (1, 5):
        args = Everything.request(batch, seed=9)
        named = dict(zip(("weighted", "plain"), args, strict=True))
        got = serve(storage, description, whole, request_of(description, named))
        for a, b in zip(got.values(), outputs(sharded, args), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("one_rank")
def test_refuses_a_collection_that_pools_otherwise_than_it_says(trust: TrustList) -> None:
    sharded = shard(models.TwoTower("meta"), world_size=1, mix_means=True)
    served = ServedModel("m", sharded, models.TwoTower.request(16), "model.", keys_of(sharded))
    with pytest.raises(BadInputError, match="query: feature 'ctx' isn't the mean of its rows"):
        export_description(served, MemoryStorage(), trust)


@pytest.mark.distributed
def test_describes_sharded_models_at_world_2(tmp_path: Path) -> None:
    """Tables split by rows, by columns, on one rank and replicated, all in one collection."""
    for ended in run_ranks("tests.trainer.describe_worker", tmp_path, ranks=2, restarts=0):
        assert ended.returncode == 0, ended.stderr
    for kind, names in {
        models.TwoTower: ("query", "items"),
        Everything: ("weighted", "plain"),
    }.items():
        folder = tmp_path / kind.__name__
        storage = open_storage(folder)
        description = read_description(storage, (folder / "id").read_text())
        assert description.export_max_abs_err < 1e-6
        arguments = dict(zip(names, kind.request(7, 3), strict=True))
        request = request_of(description, arguments)
        got = serve(storage, description, read_state(folder / "state"), request)
        expected = safetensors.torch.load_file(folder / "answer.safetensors")
        assert set(got) == set(expected)
        for name, tensor in got.items():
            torch.testing.assert_close(tensor, expected[name], rtol=1e-5, atol=1e-5)
        if kind is Everything:
            assert [len(c.unknown_rows) for c in description.collisions] == [2, 2, 2]
            for c in description.collisions:
                raw = read_state(folder / "state")[c.raw_ids_fqn]
                assert all((part < EMPTY_SLOT).any() for part in raw.chunk(2)), c.name
    messages = [(tmp_path / f"refused-{rank}").read_text() for rank in (0, 1)]
    assert messages[0] == messages[1]
    assert "can't be exported" in messages[0]
