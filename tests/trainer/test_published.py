"""From the trained model to the served answer: exported, saved, published and asked, and compared with it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ckpt import Checkpointer
from ckpt.catalog import Catalog
from ckpt.restore import CheckpointReader
from ckpt.schema import ServingDescription
from ckpt.storage import MemoryStorage
from ckpt.trust import TrustList
from publisher import keys
from publisher.build import ANNOTATION, VersionBuilder
from publisher.loading import Prediction, ProgramCache
from publisher.parity import parity_in_process
from publisher.policy import Policy
from publisher.predictor import Predictor
from publisher.publish import Publisher
from publisher.records import TableFormat
from publisher.registry import Registry
from tests.trainer.served import read_description, request_of
from tests.trainer.served_everything import Everything, train
from tests.trainer.served_models import Ranker
from tests.trainer.test_description_models import emptied
from trainer.description import ServedModel, export_description

BATCHES = (1, 2, 7)
NOT_IN_ANY_TABLE = (10**6, -1, 2**40)
BOUND = Policy().gates.parity_max_abs_err


class Pipeline:
    """A trainer of one model, and publishers into a registry of each format."""

    def __init__(self, kind: Any, folder: Path) -> None:
        torch.manual_seed(3)
        self.kind, self.model, self.storage = kind, kind(), MemoryStorage()
        self.trust = TrustList(folder / "trusted")
        if kind is Everything:
            train(self.model)
        checkpoint = [f"model.{k}" for k in self.model.state_dict()]
        served = ServedModel("m", self.model, kind.request(16), "model.", checkpoint)
        self.description_id = export_description(served, self.storage, self.trust)
        self.checkpointer = Checkpointer(self.storage)

    @property
    def description(self) -> ServingDescription:
        return read_description(self.storage, self.description_id)

    def save(self, step: int) -> None:
        named = {ANNOTATION: self.description_id}
        handle = self.checkpointer.save(step, {"model": self.model}, annotations=named)
        handle.committed.result()

    def registry(self, table_format: TableFormat) -> Registry:
        return Registry(self.storage, f"{table_format}/")

    def publish(self, step: int, table_format: TableFormat) -> None:
        """As a host does that has seen nothing yet of the run."""
        policy, programs = Policy(tables={"*": table_format}), ProgramCache(self.trust)
        builder = VersionBuilder(
            self.storage, self.registry(table_format), programs, CheckpointReader, policy=policy
        )
        parity = partial(parity_in_process, programs)
        publisher = Publisher(builder, parity, "tester@here", policy=policy)
        assert publisher.publish(Catalog(self.storage).find(step), "test").live

    def request(self, args: tuple[Any, ...]) -> dict[str, Tensor]:
        names = list(inspect.signature(self.model.forward).parameters)
        return request_of(self.description, dict(zip(names, args, strict=False)))

    def live_answer(self, args: tuple[Any, ...]) -> list[Tensor]:
        self.model.eval()
        with torch.no_grad():
            return pytree.tree_leaves(self.model(*args))

    def rows_are_ids(self) -> set[str]:
        """The features that no managed collision stands before."""
        found = [f for lk in self.description.lookups for f in lk.features]
        return {f.feature for f in found if f.collision is None}


@pytest.fixture
def no_luck(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Memory that nobody has written to holds NaN, whether Python or torch's own code asked for it."""
    empty = torch.empty

    def nan(*args: Any, **kwargs: Any) -> Tensor:
        made = empty(*args, **kwargs)
        return made.fill_(float("nan")) if made.is_floating_point() else made

    monkeypatch.setattr(torch, "empty", nan)
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    assert torch.zeros(3).new_empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(params=[Ranker, Everything], ids=lambda k: k.__name__)
def pipeline(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Pipeline]:
    made = Pipeline(request.param, tmp_path)
    with made.checkpointer:
        yield made


def with_unknown_ids(request: dict[str, Tensor], features: Iterable[str]) -> dict[str, Tensor]:
    """The same request, with an id at the end of each bag that no table has."""
    out = dict(request)
    for name in features:
        lengths, at = request[f"{name}.lengths"], request[f"{name}.lengths"].cumsum(0).tolist()
        for part, added in (("values", NOT_IN_ANY_TABLE), ("weights", (5.0, 6.0, 7.0))):
            if (key := f"{name}.{part}") not in request:
                continue
            bags = request[key].tensor_split(at[:-1])
            ends = (request[key].new_tensor([added[i % 3]]) for i in range(len(bags)))
            out[key] = torch.cat([t for pair in zip(bags, ends, strict=True) for t in pair])
        out[f"{name}.lengths"] = lengths + 1
    return out


def errors(pipeline: Pipeline, predict: Callable[[dict[str, Tensor]], Prediction]) -> list[float]:
    """How far the answers are from the live model's: each batch, with unknown ids, without any id."""
    found, unknown = [], pipeline.rows_are_ids()
    for batch in BATCHES:
        args = pipeline.kind.request(batch, seed=batch)
        plain = pipeline.request(args)
        for asked, of in (
            (plain, args),
            (with_unknown_ids(plain, unknown), args),
            (pipeline.request(emptied(args)), emptied(args)),
        ):
            got, want = predict(asked), pipeline.live_answer(of)
            strange = asked is not plain and of is args
            assert got.unknown_ids == (dict.fromkeys(unknown, batch) if strange else {})
            for a, b in zip(got.outputs.values(), want, strict=True):
                assert (a.shape, a.dtype) == (b.shape, b.dtype)
                found.append(float((a - b).abs().max()))
    return found


@pytest.mark.usefixtures("no_luck")
def test_d51_published_answers_are_the_models(pipeline: Pipeline) -> None:
    """With fp32 rows the sums are the same, in the same order, and the errors are 0; 1e-6 is for CPUs
    whose kernels fuse or order additions otherwise. With int8 rows, the bound of the gate holds.
    """
    pipeline.save(1)
    predictors = {}
    for table_format in ("fp32", "int8_rowwise"):
        pipeline.publish(1, table_format)
        predictors[table_format] = Predictor(pipeline.registry(table_format), trust=pipeline.trust)
    exact, near = (errors(pipeline, p.predict) for p in predictors.values())
    assert max(exact) <= 1e-6
    assert max(exact) < max(near) < BOUND

    first = pipeline.live_answer(pipeline.kind.request(2, seed=2))
    for parameter in pipeline.model.parameters():
        nn.init.normal_(parameter, std=0.1)
    if pipeline.kind is Everything:
        train(pipeline.model, steps=5)  # other ids have rows then
    assert (
        pipeline.live_answer(pipeline.kind.request(2, seed=2))[0] - first[0]
    ).abs().min() > BOUND
    pipeline.save(2)
    for table_format, predictor in predictors.items():
        pipeline.publish(2, table_format)
        assert predictor.refresh()
        assert predictor.version == 2
    exact, near = (errors(pipeline, p.predict) for p in predictors.values())
    assert max(exact) <= 1e-6
    assert max(exact) < max(near) < BOUND
    before, after = (pipeline.registry("fp32").version(n) for n in (1, 2))
    for name in (keys.PROGRAM, keys.DESCRIPTION, keys.GOLDEN):
        assert before.file(name) == after.file(name)
    assert before.file(keys.DENSE).digest != after.file(keys.DENSE).digest
