"""The dense part compiled once, and a warm-up that leaves no trace. One real compilation for all tests."""

import logging
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from ckpt.errors import BadInputError
from ckpt.storage import MemoryStorage
from ckpt.trust import TrustList
from tests.trainer.fake_clock import FakeClock
from trainer import compile_folder, pt2
from trainer.compiling import MAX_GRAPHS, CompiledDense, compile_dense
from trainer.config import CompileConfig, ModelConfig
from trainer.description import ServedModel, export_description
from trainer.launch import joined, seed_generators
from trainer.ledger import Ledger
from trainer.model import (
    DENSE_PARTS,
    KernelCounters,
    build_model,
    scorer_of,
    shard_training,
    to_batch,
)
from trainer.movielens import DENSE_FEATURES, FEATURES, Samples
from trainer.warmup import warm_up

META = torch.device("meta")

pytestmark = [
    # The compiler looks at every tensor's gradient, which warns of those that have none.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    # What it imports calls what torch itself has deprecated.
    pytest.mark.filterwarnings("ignore:`torch.jit.:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:This API is deprecated:DeprecationWarning"),
]


class Tower(nn.Module):
    """Takes rows of the batch and rows of single ids."""

    def __init__(self, *, p: float = 0.0) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)
        self.dropout = nn.Dropout(p)

    def forward(self, pooled: Tensor, single: Tensor) -> Tensor:
        return self.dropout(self.layer(pooled)).tanh().sum(1) + single.mean()


class Model(nn.Module):
    """Pooled and unpooled lookups, on meta or not, and a tower."""

    def __init__(self, device: torch.device | None = None, *, p: float = 0.0) -> None:
        super().__init__()
        bag = EmbeddingBagConfig(name="a", feature_names=["a"], num_embeddings=9, embedding_dim=8)
        ids = EmbeddingConfig(name="b", feature_names=["b"], num_embeddings=9, embedding_dim=8)
        self.bags = EmbeddingBagCollection(tables=[bag], device=device or META)
        self.rows = EmbeddingCollection(tables=[ids], device=device or META)
        self.norm = nn.BatchNorm1d(8)
        self.tower = Tower(p=p)

    def forward(self, features: Any) -> Tensor:
        pooled = self.norm(self.bags(features).values())
        return self.tower(pooled, single=self.rows(features)["b"].values())


def request(batch: int, ids: int) -> Any:
    """Feature a: one id a row. b: `ids` ids, all of the first row."""
    lengths = torch.zeros(2, batch, dtype=torch.int64)
    lengths[0] = 1
    lengths[1, 0] = ids
    values = torch.arange(batch + ids) % 9
    return KeyedJaggedTensor(keys=["a", "b"], values=values, lengths=lengths.reshape(-1))


def as_it_is(graph: Any, inputs: Any) -> Any:
    """A backend that costs nothing: the traced graph itself."""
    return graph


def train(model: nn.Module, features: Any) -> float:
    out = model(features)
    out.sum().backward()
    return float(out.sum().detach())


@dataclass(frozen=True)
class Real:
    """A model that was really compiled, the storage that got the cache, and who trusts it."""

    model: Model
    prepared: pt2.Prepared
    storage: MemoryStorage
    trust: TrustList
    misses: int
    prepare: Callable[[], tuple[Model, pt2.Prepared]]


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Real]:
    from torch._dynamo.utils import counters
    from torch._inductor import config as inductor

    base = tmp_path_factory.mktemp("compiled")
    storage, trust = MemoryStorage(), TrustList(base / "trusted")

    def prepare() -> tuple[Model, pt2.Prepared]:
        model = Model(torch.device("cpu"))
        prepared = pt2.prepare(
            model,
            (request(8, 20),),
            storage=storage,
            trust=trust,
            ledger=Ledger(FakeClock(), 0.0),
            settings=CompileConfig(enabled=True),
            parts=["tower"],
        )
        prepared.wait()
        return model, prepared

    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
        patch.setattr(compile_folder.tempfile, "gettempdir", lambda: str(base))
        # No pool of processes for one kernel or two.
        patch.setattr(inductor, "compile_threads", 1)
        counters.clear()
        model, prepared = prepare()
        misses = counters["inductor"]["fxgraph_cache_miss"]
        yield Real(model, prepared, storage, trust, misses, prepare)
        prepared.close()
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", "")  # so that what was there before comes back


def dense_of(prepared: pt2.Prepared) -> CompiledDense:
    assert prepared.dense is not None
    return prepared.dense


def test_one_compilation_serves_all_sizes_forward_and_backward(real: Real) -> None:
    dense = dense_of(real.prepared)
    assert dense.failures() == {}
    assert (dense.graphs, real.misses) == (1, 2), "one graph, compiled forward and backward"
    eager = Model(torch.device("cpu"))
    eager.load_state_dict(real.model.state_dict())
    for batch, ids in [(8, 20), (64, 3), (64, 64), (512, 500), (3, 2), (1, 1), (5, 0)]:
        if batch == 1:
            continue_in_eval(real.model, eager)
        else:
            assert train(real.model, request(batch, ids)) == pytest.approx(
                train(eager, request(batch, ids)), rel=1e-4, nan_ok=True
            )
    for name, parameter in eager.named_parameters():
        gradient = dict(real.model.named_parameters())[name].grad
        assert torch.allclose(gradient, parameter.grad, 1e-3, 1e-5, equal_nan=True), name
    from torch._dynamo.utils import counters

    assert (dense.graphs, dense.parts[0].reasons) == (1, [])
    assert counters["inductor"]["fxgraph_cache_miss"] == 2


def continue_in_eval(*models: nn.Module) -> None:
    """Evaluate; eval mode is eager, so equal weights give equal bits and nothing is compiled."""
    with torch.no_grad():
        answers = [m.eval()(request(7, 9)) for m in models]
    assert torch.equal(*answers)
    for model in models:
        model.train()


def test_a_restart_takes_the_compiler_s_work_from_the_run(real: Real) -> None:
    from torch._dynamo.utils import counters

    assert real.prepared.cache is not None
    assert real.prepared.cache.found == "none"
    (saved,) = real.storage.list("compile-cache/")
    assert saved.size_bytes < 1 << 20
    real.prepared.close()
    torch._dynamo.reset()
    counters.clear()
    model, again = real.prepare()
    try:
        assert again.cache is not None
        assert again.cache.found == "loaded"
        assert counters["aot_autograd"]["autograd_cache_hit"] == 1
        assert counters["inductor"]["fxgraph_cache_miss"] == 0
        train(model, request(30, 4))
        assert (dense_of(again).graphs, dense_of(again).failures()) == (1, {})
        assert len(list(real.storage.list("compile-cache/"))) == 1, "saved once"
    finally:
        again.close()


def test_a_recompilation_is_counted_and_logged_with_its_reason(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = Model(torch.device("cpu"))
    dense = compile_dense(model, parts=["tower"], dynamic=False, backend=as_it_is)
    with caplog.at_level(logging.WARNING, "sidestage"):
        train(model, request(8, 20))
        assert (dense.graphs, dense.recompiles, caplog.records) == (1, 0, [])
        train(model, request(9, 20))
    assert (dense.graphs, dense.recompiles) == (2, 1)
    (message,) = [r.getMessage() for r in caplog.records]
    assert message.startswith("tower is compiled again")
    assert "expected 8, actual 9" in message
    for batch in range(10, 20):
        train(model, request(batch, 20))
    assert dense.graphs == MAX_GRAPHS
    assert "compiled 4 times already" in dense.failures()["tower"]


def test_parts_hold_no_tables() -> None:
    model = Model()
    assert [p.name for p in compile_dense(model, backend=as_it_is).parts] == ["norm", "tower"]
    for wrong, message in [("bags", "looks up embeddings"), ("nothing", "no submodule 'nothing'")]:
        with pytest.raises(BadInputError, match=message):
            compile_dense(model, parts=[wrong])
    with pytest.raises(BadInputError, match="no dense part"):
        compile_dense(nn.Sequential(nn.Embedding(3, 3)))


def test_what_cannot_be_compiled_runs_eagerly(caplog: pytest.LogCaptureFixture) -> None:
    class Breaking(Tower):
        def forward(self, pooled: Tensor, single: Tensor) -> Tensor:
            return super().forward(pooled, single) * (
                2 if float(single.detach().sum()) > 1e9 else 1
            )

    model = Model(torch.device("cpu"))
    model.tower = Breaking()
    dense = compile_dense(model, parts=["tower"], backend=as_it_is)
    with caplog.at_level(logging.WARNING, "sidestage"):
        warm_up(model, (request(8, 20),))
        train(model, request(8, 20))
    assert "can't be compiled" in dense.failures()["tower"]
    assert len(caplog.records) == 1


def test_without_a_compiler_training_goes_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    model = Model(torch.device("cpu"))
    with caplog.at_level(logging.WARNING, "sidestage"):
        prepared = pt2.prepare(
            model,
            (request(8, 20),),
            storage=MemoryStorage(),
            trust=TrustList(tmp_path / "trusted"),
            ledger=Ledger(FakeClock(), 0.0),
            settings=CompileConfig(enabled=True),
        )
    assert prepared.dense is None
    assert "no C++ compiler" in caplog.text
    train(model, request(8, 20))


def test_a_warm_up_leaves_model_flags_and_generators_as_they_were() -> None:
    """Batch norm has buffers, dropout draws, the tables are on meta, one part is in eval mode."""
    seed_generators(1)
    model = Model(p=0.5)
    model.norm.eval()
    compile_dense(model, parts=["tower"], backend=as_it_is)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    drawn = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    warm_up(model, (request(8, 20),))
    for name, value in model.state_dict().items():
        assert value.is_meta or torch.equal(value, before[name]), name
    assert all(p.grad is None for p in model.parameters())
    assert (model.norm.training, model.tower.training) == (False, True)
    assert torch.equal(torch.get_rng_state(), drawn[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == drawn[1:]


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    monkeypatch.delenv("RANK", raising=False)
    rows = dict.fromkeys(FEATURES, 40)

    def samples(begin: int, count: int) -> Samples:
        index = torch.arange(begin, begin + count)
        singles = len(FEATURES) - 1
        return Samples(
            dense=torch.stack([index / 100] * len(DENSE_FEATURES), 1),
            ids=torch.stack([(index * k) % 40 for k in range(1, singles + 1)], 1),
            genres=index % 7,
            genre_lengths=torch.ones(count, dtype=torch.int64),
            labels=(index % 2).float(),
            event_times_s=index,
        )

    def run(*, compiled: bool = True, warm: bool = False, describe: bool = True) -> dict[str, Any]:
        with joined("cpu") as place:
            seed_generators(3)
            config = ModelConfig()
            model = build_model(config, rows, place.device)
            names = list(model.state_dict())
            dense = None
            if compiled:
                dense = compile_dense(model, parts=DENSE_PARTS, backend=as_it_is)
            if warm:
                warm_up(model, (to_batch(samples(0, 16)),))
            assert list(model.state_dict()) == names
            training = shard_training(model, config, place.device, place.world_size)
            golden = to_batch(samples(0, 8))
            served = ServedModel(
                name="m",
                module=scorer_of(training.model),
                args=(golden.dense_features, golden.sparse_features),
                prefix="model.",
                checkpoint_keys={f"model.{k}" for k in training.model.state_dict()},
            )
            described = None
            if describe:
                described = export_description(served, MemoryStorage(), TrustList(Path(os.devnull)))
            counters = KernelCounters(training.model)
            before = counters.state_dict()["iter"]  # the export has looked up, too
            batches = iter([to_batch(samples(100 * n, 32 - n)) for n in range(4)])
            training.model.train()
            for _ in range(4):
                training.pipeline.progress(batches)
            return {
                "names": names,
                "description": described,
                "model": {k: _whole(v) for k, v in training.model.state_dict().items()},
                "optimizer": {
                    k: _whole(v)
                    for state in training.optimizer.state_dict()["state"].values()
                    for k, v in state.items()
                },
                "kernel_steps": counters.state_dict()["iter"] - before,
                "generator": torch.get_rng_state(),
                "graphs": dense.graphs if dense else 0,
                "reasons": [p.reasons for p in dense.parts] if dense else [],
            }

    return run


def _whole(value: Any) -> Any:
    return (
        value.local_shards()[0].tensor.clone() if hasattr(value, "local_shards") else value.clone()
    )


def test_a_run_with_a_warm_up_is_bitwise_the_run_without(
    trained: Callable[..., dict[str, Any]],
) -> None:
    """The reference model, sharded, with its pipeline, its optimizers and its exported description."""
    eager = trained(compiled=False)
    without = trained(warm=False, describe=False)
    warm = trained(warm=True)
    for part in ("model", "optimizer"):
        assert warm[part].keys() == without[part].keys()
        for name, value in warm[part].items():
            assert torch.equal(value, without[part][name]), f"{part} {name}"
    assert torch.equal(warm["generator"], without["generator"])
    assert warm["kernel_steps"] == without["kernel_steps"] == eager["kernel_steps"]
    assert warm["graphs"] == 3, warm["reasons"]
    assert warm["names"] == eager["names"]
    # The export sees the modules themselves: compiled or not, the same program of the same id.
    assert warm["description"] == eager["description"]
