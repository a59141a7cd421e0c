"""Plain embeddings with sparse gradients and the torch optimizers that change them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, Optimizer, SparseAdam
from torch.optim.optimizer import _global_optimizer_pre_hooks

from ckpt.attach import Attachment
from ckpt.events import ListSink
from ckpt.tree import PerRank
from tests.unit.attach_recorder import Recorder

ROWS = 40


def attach(*objects: Any) -> tuple[Attachment, Recorder, ListSink]:
    recorder, sink = Recorder(), ListSink()
    attachment = Attachment(recorder, sink)  # type: ignore[arg-type]
    attachment.add(*objects)
    return attachment, recorder, sink


@pytest.fixture(autouse=True)
def _no_hook_stays() -> Any:
    """Each test's global hooks are taken off again."""
    hooks = _global_optimizer_pre_hooks
    before = set(hooks)
    yield
    for key in set(hooks) - before:
        del hooks[key]


class Model(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(ROWS, 4, mode="sum", sparse=True, **options)
        self.one = nn.Embedding(ROWS, 3, sparse=True, **options)
        self.head = nn.Linear(7, 1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.cat([self.bag(ids), self.one(ids[:, 0])], 1))

    def tables(self) -> list[nn.Parameter]:
        return [self.bag.weight, self.one.weight]


def ids(seed: int) -> Tensor:
    return torch.randint(0, ROWS, (5, 2), generator=torch.Generator().manual_seed(seed))


ALLOWED: dict[str, tuple[Callable[..., Optimizer], int]] = {
    "sgd": (lambda p: SGD(p, lr=0.1), 0),
    "adagrad": (lambda p: Adagrad(p, lr=0.1, lr_decay=0.01), 1),
    "sparse_adam": (lambda p: SparseAdam(p, lr=0.1), 2),
}


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # torch's Adagrad, once a process
@pytest.mark.parametrize("kind", ALLOWED)
def test_announces_what_the_step_changes(kind: str) -> None:
    make, states = ALLOWED[kind]
    model = Model()
    sparse, dense = make(model.tables()), Adam(model.head.parameters())
    attachment, recorder, sink = attach({"model": model, "optimizers": [sparse, dense]})
    assert not attachment.refused
    assert not sink.events
    assert list(recorder.tables()) == ["model.bag", "model.one"]
    for seed in range(4):
        attachment.refresh()
        sparse.zero_grad()
        dense.zero_grad()
        with recorder.watch() as changed:
            for accumulated in range(2):
                model(ids(10 * seed + accumulated)).sum().backward()
            assert not any(recorder.touched().values())
            sparse.step()
            dense.step()
        used = torch.cat([ids(10 * seed), ids(10 * seed + 1)])
        assert recorder.touched() == {
            "model.bag": set(used.flatten().tolist()),
            "model.one": set(used[:, 0].tolist()),
        }
        assert changed == recorder.touched()
    # Adagrad's state is there from the start, SparseAdam's from its first step.
    assert {len(t.components) for t in recorder.tables().values()} == {1 + states}
    assert recorder.made == 2 * (2 if kind == "sparse_adam" else 1)


def test_step_without_gradient_and_skipped_steps_touch_nothing() -> None:
    model = Model()
    optimizer = SGD(model.tables(), lr=0.1)
    _, recorder, _ = attach(model, optimizer)
    with recorder.watch() as changed:
        optimizer.step()
        with torch.no_grad():
            model(ids(1))
        model(ids(1)).sum().backward()
    assert not any(changed.values())
    assert not any(recorder.touched().values())


def test_dense_gradient_closure_and_new_settings_touch_all() -> None:
    model = Model()
    optimizer = SGD([{"params": model.head.parameters()}, {"params": model.tables()}], lr=0.1)
    attachment, recorder, sink = attach(model, optimizer)

    def loss() -> Tensor:
        optimizer.zero_grad()
        out = model(ids(1)).sum()
        out.backward()
        return out

    everything = {"bag": set(range(ROWS)), "one": set(range(ROWS))}
    for step in (lambda: optimizer.step(loss), lambda: optimizer.step(closure=loss)):
        with recorder.watch() as changed:
            step()
        assert any(changed.values())
        assert recorder.touched() == everything
    loss()
    for weight in model.tables():
        weight.grad = torch.ones_like(weight)
    with recorder.watch() as changed:
        optimizer.step()
    assert changed == everything == recorder.touched()
    loss()
    optimizer.param_groups[0]["weight_decay"] = 0.1  # the dense part's only
    with recorder.watch():
        optimizer.step()
    assert recorder.touched() != everything
    optimizer.param_groups[1]["weight_decay"] = 0.1
    loss()
    for weight in model.tables():
        weight.grad = weight.grad.to_dense() if weight.grad is not None else None
    with recorder.watch() as changed:
        optimizer.step()
    assert changed == everything == recorder.touched()
    attachment.refresh()
    assert set(attachment.refused.values()) == {
        "SGD with weight_decay=0.1 changes rows without a gradient"
    }
    assert not recorder.groups
    optimizer.param_groups[1]["weight_decay"] = 0
    attachment.refresh()
    assert not attachment.refused
    assert len(recorder.groups) == 2
    assert len(sink.named("table_copied")) == 2


def test_tied_weights_are_one_table() -> None:
    model = Model()
    model.bag = nn.EmbeddingBag(ROWS, 3, mode="sum", sparse=True)
    model.bag.weight = model.one.weight
    optimizer = SGD([model.one.weight], lr=0.1)
    _, recorder, _ = attach(model, optimizer)
    assert list(recorder.tables()) == ["bag"]
    with recorder.watch() as changed:
        (model.bag(ids(1)).sum() + model.one(ids(2)).sum()).backward()
        optimizer.step()
    assert len(changed["bag"]) > 5
    assert recorder.touched() == changed


def test_replaced_weights_state_and_modules_are_followed() -> None:
    model = Model()
    optimizer = Adagrad(model.tables(), lr=0.1)
    attachment, recorder, _ = attach(model, optimizer)
    for _ in range(2):
        attachment.refresh()
    assert recorder.made == 2
    model.bag.weight.data = model.bag.weight.data.clone()
    attachment.refresh()
    assert recorder.made == 3
    optimizer.load_state_dict(optimizer.state_dict())  # copies the state
    attachment.refresh()
    model.double()
    attachment.refresh()
    assert len(recorder.groups) == 2
    model.one.weight = nn.Parameter(torch.randn(ROWS, 3).double())
    attachment.refresh()
    assert attachment.refused == {"one": attachment.refused["one"]}
    assert "no optimizer of the state holds it" in attachment.refused["one"]
    assert [t.name for g in recorder.groups for t in g.tables] == ["bag"]
    model(ids(1)).sum().backward() if model.head.double() else None
    with recorder.watch() as changed:
        optimizer.step()
    assert changed["bag"] == set(ids(1).flatten().tolist())


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda p: SGD(p, lr=0.1, momentum=0.9), "SGD with momentum=0.9"),
        (lambda p: Adam(p, lr=0.1), "Adam may change rows without a gradient"),
        (type("Mine", (SGD,), {}), "Mine may change rows"),
    ],
)
def test_refused_optimizers(make: Any, reason: str) -> None:
    model = Model()
    attachment, recorder, sink = attach({"m": model}, {"o": make(model.tables())})
    assert not recorder.groups
    assert set(attachment.refused) == {"m.bag", "m.one"}
    assert all(reason in r for r in attachment.refused.values())
    attachment.refresh()
    said = [e for e in sink.named("table_copied") if reason in e["reason"]]
    assert [e["table"] for e in said] == ["m.bag", "m.one"]


def test_refused_weights() -> None:
    model = Model(max_norm=1.0)
    attachment, *_ = attach(model, SGD(model.tables(), lr=0.1))
    assert set(attachment.refused.values()) == {"max_norm rewrites rows during lookups"}
    model = Model()
    attachment, *_ = attach(model, SGD(model.tables(), lr=0.1), SGD(model.tables(), lr=0.2))
    assert set(attachment.refused.values()) == {"2 optimizers or parameter groups change it"}
    model = Model()
    model.one.weight.data = torch.randn(3, ROWS).t()
    attachment, recorder, _ = attach(model, SGD(model.tables(), lr=0.1))
    assert attachment.refused == {"one": "its rows aren't contiguous memory"}
    assert list(recorder.tables()) == ["bag"]
    attachment, *_ = attach(Model().to("meta"))
    assert len(attachment.refused) == 2
    barred = type("ManagedCollisionEmbeddingCollection", (nn.Sequential,), {})
    model = Model()
    attachment, *_ = attach(barred(model), SGD(model.tables(), lr=0.1))
    assert "eviction" in attachment.refused["0.bag"]


def test_lookups_that_write_are_told() -> None:
    """For the step fence: such weights change in forward, whether or not they are sparse."""
    model = nn.ModuleDict({"x": nn.Embedding(ROWS, 3, max_norm=1.0), "y": nn.Embedding(ROWS, 3)})
    attachment, *_ = attach(model, Adam(model.parameters()))
    assert [id(t) for t in attachment.lookup_tensors()] == [id(model["x"].weight)]


def test_dense_embeddings_are_nobodys_business() -> None:
    attachment, recorder, sink = attach(nn.Embedding(ROWS, 3))
    assert not attachment.refused
    assert not list(attachment.lookup_tensors())
    assert not recorder.groups
    assert not sink.events


def test_finds_what_other_objects_hold() -> None:
    model = Model()
    optimizer = SGD(model.tables(), lr=0.1)

    class App:
        """A Stateful as DCP's manual writes it."""

        def __init__(self) -> None:
            self.model, self.optimizer, self.itself = model, [("o", optimizer)], self

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, _state: dict[str, Any]) -> None: ...

    attachment, recorder, _ = attach({"app": App(), "rank": PerRank({"lr": 1, "m": (model,)})})
    assert not attachment.refused
    assert list(recorder.tables()) == ["app.model.bag", "app.model.one"]


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # torch's own import
def test_optimizers_made_in_backward() -> None:
    from torch.distributed.optim import _apply_optimizer_in_backward

    model = Model()
    _apply_optimizer_in_backward(SGD, model.tables(), {"lr": 0.1})
    attachment, recorder, _ = attach(model)
    assert not attachment.refused
    with recorder.watch() as changed:
        model(ids(3)).sum().backward()
    assert recorder.touched() == changed
    assert changed["one"] == set(ids(3)[:, 0].tolist())


@pytest.mark.parametrize("cleared", ["_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"])
def test_steps_go_on_where_another_library_clears_an_optimizers_hooks(cleared: str) -> None:
    model = Model()
    sparse = SGD(model.tables(), lr=0.1)
    _, recorder, _ = attach(model, sparse)
    for seed in range(3):
        sparse.zero_grad()
        model(ids(seed)).sum().backward()
        getattr(sparse, cleared).clear()
        with recorder.watch() as changed:
            sparse.step()
        assert recorder.touched() == changed


def test_detaching_takes_the_global_hook_off() -> None:
    model = Model()
    optimizer = SGD(model.tables(), lr=0.1)
    hooks = _global_optimizer_pre_hooks
    before = len(hooks)
    attachment, recorder, _ = attach(model, optimizer)
    assert len(hooks) == before + 1
    attachment.detach()
    attachment.detach()
    assert len(hooks) == before
    assert not recorder.groups
    model(ids(1)).sum().backward()
    optimizer.step()


def test_touched_by_hand() -> None:
    model = Model()
    optimizer = Adagrad(model.tables(), lr=0.1)
    attachment, recorder, _ = attach(model, optimizer)
    assert attachment.touched(model.bag.weight, torch.tensor([1, 2], dtype=torch.int32))
    assert attachment.touched(optimizer.state[model.one.weight]["sum"], None)
    assert not attachment.touched(model.head.weight, None)
    assert not attachment.touched(torch.zeros(0, 4), None)
    assert recorder.touched() == {"bag": {1, 2}, "one": set(range(ROWS))}


def test_two_attachments_do_not_disturb_each_other() -> None:
    model = Model()
    optimizer = SGD(model.tables(), lr=0.1)
    (first, one, _), (_, two, _) = attach(model, optimizer), attach(model, optimizer)
    with one.watch() as a, two.watch() as b:
        model(ids(1)).sum().backward()
        optimizer.step()
    assert a == b
    first.detach()
    model.zero_grad()
    with two.watch() as b:
        model(ids(2)).sum().backward()
        optimizer.step()
    assert any(b.values())
