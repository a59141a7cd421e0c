"""Every kind of model that can be described: the stored program, fed from tables, equals the live model."""

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torchrec import JaggedTensor, KeyedJaggedTensor

from ckpt.storage import MemoryStorage
from ckpt.trust import TrustList
from tests.trainer import served_zoo as zoo
from tests.trainer.served import read_description, request_of, serve
from tests.trainer.served_everything import Everything, train
from trainer.description import ServedModel, export_description


class Exported:
    """A model of the zoo and its description; exported once for all tests of a kind."""

    def __init__(self, kind: Any, folder: Path) -> None:
        torch.manual_seed(3)
        self.model, self.storage = kind(), MemoryStorage()
        self.names = list(inspect.signature(self.model.forward).parameters)
        if kind is Everything:
            train(self.model)
        served = ServedModel("m", self.model, kind.request(16), "model.", self.checkpoint)
        trust = TrustList(folder / "trusted")
        self.description = read_description(
            self.storage, export_description(served, self.storage, trust)
        )

    @property
    def checkpoint(self) -> dict[str, Tensor]:
        return {f"model.{k}": v for k, v in self.model.state_dict().items()}

    def golden(self) -> dict[str, Tensor]:
        return safetensors.torch.load(self.storage.read(self.description.golden_key))

    def serve(self, args: tuple[Any, ...]) -> list[Tensor]:
        return self.answer(request_of(self.description, dict(zip(self.names, args, strict=False))))

    def answer(self, request: dict[str, Tensor]) -> list[Tensor]:
        return [*serve(self.storage, self.description, self.checkpoint, request).values()]


@pytest.fixture(scope="module", params=zoo.ZOO, ids=lambda k: k.__name__)
def exported(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Iterator[Exported]:
    return Exported(request.param, tmp_path_factory.mktemp("trust"))


def test_stored_program_equals_the_model(exported: Exported) -> None:
    assert exported.description.export_max_abs_err == 0.0
    for parameter in exported.model.parameters():  # the next checkpoint's weights
        nn.init.normal_(parameter, std=0.3)
    exported.model.eval()
    requests = [exported.model.request(batch, seed=batch) for batch in (1, 2, 7)]
    requests.append(emptied(exported.model.request(3)))
    got = [exported.serve(args) for args in requests]
    got.append(exported.answer(exported.golden()))  # all that the program needs is in it
    for answer, args in zip(got, [*requests, exported.model.request(16)], strict=True):
        with torch.no_grad():
            expected = exported.model(*args)
        want = [t for t in pytree.tree_leaves(expected) if isinstance(t, Tensor)]
        for a, b in zip(answer, want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def emptied(args: Any) -> Any:
    """A request without ids, but for features that need one a row."""

    def empty(leaf: Any) -> Any:
        if not isinstance(leaf, KeyedJaggedTensor):
            return leaf
        parts = {}
        for key, jagged in leaf.to_dict().items():
            weights, keep = jagged.weights_or_none(), slice(None if key == "target" else 0)
            parts[key] = JaggedTensor(
                jagged.values()[keep],
                None if weights is None else weights[keep],
                jagged.lengths() * (key == "target"),
            )
        return KeyedJaggedTensor.from_jt_dict(parts)

    return pytree.tree_map(empty, args, is_leaf=lambda x: isinstance(x, KeyedJaggedTensor))


INPUTS: dict[Any, list[tuple[str, str, tuple[int | str, ...]]]] = {
    zoo.Rankers: [
        ("dense", "dense", ("batch", 5)),
        *(
            (f"{m}.sparse_arch.embedding_bag_collection", "lookup", ("batch", 16))
            for m in ("dlrm", "dcn", "projection", "deepfm")
        ),
    ],
    zoo.Towers: [
        ("query", "lookup", ("batch", 24)),
        ("item", "lookup", ("batch", 16)),
        ("item#1", "lookup", ("batch", 16)),
    ],
    zoo.Tasks: [
        ("dense", "dense", ("batch", 3)),
        ("user", "lookup", ("batch", 16)),
        ("item", "lookup", ("batch", 12)),
    ],
    zoo.Reader: [
        ("first", "lookup", ("batch", 24)),
        ("second", "lookup", ("batch", 16)),
        ("a.lengths", "lengths", ("batch",)),
        ("b.values", "values", ("ids:b",)),
        ("b.lengths", "lengths", ("batch",)),
        ("c.lengths", "lengths", ("batch",)),
        ("c.weights", "weights", ("ids:c",)),
    ],
    zoo.History: [
        ("visit.flags.clicked", "dense", ("batch",)),
        ("visit.flags.age", "dense", ("batch",)),
        ("items.seen.rows", "rows", ("ids:seen", 8)),
        ("items.target.rows", "rows", ("batch", 8)),  # exactly one id a row
        ("items.target.row_ids", "row_ids", ("batch",)),
        ("seen.lengths", "lengths", ("batch",)),
    ],
    Everything: [
        ("sequence.sa.rows", "rows", ("ids:sa", 8)),
        ("sequence.sb.rows", "rows", ("ids:sb", 8)),
        ("collided", "lookup", ("batch", 16)),
        ("weighted", "lookup", ("batch", 12)),
        ("positions", "lookup", ("batch", 16)),
        ("positions#1", "lookup", ("batch", 16)),
        ("each_position", "lookup", ("batch", 8)),
        ("collided_rows.ma.rows", "rows", ("ids:ma", 8)),
        *((f"{f}.lengths", "lengths", ("batch",)) for f in ("sa", "sb", "ma")),
    ],
}


def test_inputs(exported: Exported) -> None:
    inputs = [(i.name, i.kind, i.shape) for i in exported.description.inputs]
    assert inputs == INPUTS[type(exported.model)]


def test_requests_hold_what_is_used(exported: Exported) -> None:
    parts = {n.rpartition(".")[2] for n in exported.golden()} - {"clicked", "age", "dense"}
    weighted = {f.name for f in exported.description.features if f.weighted}
    used = {zoo.Tasks: {"u1", "u2"}, zoo.Reader: {"c"}, Everything: {"wa", "wb"}}
    assert weighted == used.get(type(exported.model), set())
    assert parts == {"values", "lengths", *(["weights"] if weighted else [])}
