"""TorchRec's keyed optimizers: groups of each rank by their parameters' keys, and state made at a restore."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ckpt import Checkpointer
from ckpt.errors import BadInputError
from ckpt.events import ListSink
from ckpt.storage.memory import MemoryStorage
from tests.checkpointer.ranks import on_ranks, values

keyed = pytest.importorskip("torchrec.optim.keyed", reason="TorchRec isn't installed")

Make = Callable[[Any], torch.optim.Optimizer]
ALL = ("a.w", "b.w", "d.w")
OF_RANK = (("a.w", "d.w"), ("b.w", "d.w"))
"""Each rank has a table of its own and one that both have."""


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=0.1)


def wrapped(make: Make, *names: str) -> Any:
    torch.manual_seed(0)
    params = {n: nn.Parameter(torch.rand(3)) for n in names}
    return keyed.KeyedOptimizerWrapper(params, make)


def stepped(optimizer: Any, steps: int = 1) -> Any:
    for _ in range(steps):
        for p in optimizer.params.values():
            p.grad = torch.ones_like(p)
        optimizer.step()
    return optimizer


def set_lr(optimizer: Any, lr: float) -> Any:
    for group in optimizer.param_groups:
        group["lr"] = lr
    return optimizer


def lr_of(optimizer: Any) -> list[float]:
    return [group["lr"] for group in optimizer.param_groups]


def save(storage: MemoryStorage, *optimizers: Any) -> None:
    """Of as many ranks as there are optimizers."""

    def rank(r: int, job: dict[str, Any]) -> None:
        with Checkpointer(storage, sink=ListSink(), **job) as c:
            c.save(1, {"optimizer": optimizers[r]}).committed.result()

    values(on_ranks(len(optimizers), rank))


def restore(storage: MemoryStorage, *optimizers: Any, **terms: Any) -> list[Any]:
    def rank(r: int, job: dict[str, Any]) -> Any:
        with Checkpointer(storage, sink=ListSink(), **job) as c:
            return c.restore({"optimizer": optimizers[r]}, **terms)

    return values(on_ranks(len(optimizers), rank))


def saved_by_two(rates: tuple[float, float]) -> MemoryStorage:
    storage = MemoryStorage()
    save(
        storage,
        *(
            set_lr(stepped(wrapped(adam, *names), 2), lr)
            for names, lr in zip(OF_RANK, rates, strict=True)
        ),
    )
    return storage


@pytest.mark.parametrize("save_groups", [False, True])
def test_groups_are_saved_whatever_save_param_groups_says(save_groups: bool) -> None:
    storage = MemoryStorage()
    ranks = [set_lr(stepped(wrapped(adam, *names)), 0.03) for names in OF_RANK]
    for optimizer in ranks:
        optimizer.save_param_groups(save_groups)
    save(storage, *ranks)
    fresh = [wrapped(adam, *names) for names in OF_RANK]
    for optimizer in fresh:
        optimizer.save_param_groups(save_groups)
    restore(storage, *fresh)
    assert [lr_of(o) for o in fresh] == [[0.03], [0.03]]


def test_case_e28_a_keyed_optimizer_that_wraps_none() -> None:
    def made(rank: int, lr: float) -> Any:
        p = nn.Parameter(torch.zeros(2))
        state = {p: {"momentum": torch.full((2,), lr)}}
        optimizer = keyed.KeyedOptimizer({f"t{rank}": p}, state, [{"params": [p], "lr": lr}])
        optimizer.save_param_groups(True)
        return optimizer

    storage = MemoryStorage()
    save(storage, made(0, 0.5), made(1, 0.5))
    fresh = made(0, 0.1), made(1, 0.1)
    restore(storage, *fresh)
    for optimizer in fresh:
        assert lr_of(optimizer) == [0.5]
        (state,) = optimizer.state.values()
        assert state["momentum"].tolist() == [0.5, 0.5]


def test_each_rank_gets_its_own_groups_back() -> None:
    fresh = [wrapped(adam, *names) for names in OF_RANK]
    restore(saved_by_two((0.03, 0.04)), *fresh)
    assert [lr_of(o) for o in fresh] == [[0.03], [0.04]]


def test_on_other_ranks_groups_go_by_their_keys() -> None:
    both = wrapped(adam, *ALL)
    restore(saved_by_two((0.03, 0.03)), both)
    assert lr_of(both) == [0.03]
    assert {float(s["step"]) for s in both.state.values()} == {2.0}


def test_what_ranks_had_differently_is_no_other_jobs_to_choose() -> None:
    storage = saved_by_two((0.03, 0.04))
    both = wrapped(adam, *ALL)
    with pytest.raises(BadInputError, match=r"d\.w: ranks 0, 1 .* lr \(0\.03, 0\.04\)") as e:
        restore(storage, both)
    assert "exclude='optimizer.groups'" in str(e.value)
    assert lr_of(both) == [0.1]
    assert not both.state
    restore(storage, both, exclude=["optimizer.groups"])
    assert lr_of(both) == [0.1]
    assert len(both.state) == 3


def test_parameters_that_had_different_options_are_no_one_group() -> None:
    storage = saved_by_two((0.03, 0.04))
    with pytest.raises(BadInputError, match=r"parameter groups are others .* of lr"):
        restore(storage, wrapped(adam, "a.w", "b.w"), partial=True)


def test_adam_needs_no_first_step_before_a_restore() -> None:
    storage, went_on = MemoryStorage(), stepped(wrapped(adam, *ALL), 3)
    save(storage, went_on)
    fresh = wrapped(adam, *ALL)
    restore(storage, fresh)
    for key, p in fresh.params.items():
        p.data.copy_(went_on.params[key])
    assert alike(stepped(fresh, 2), stepped(went_on, 2))
    assert all(p.equal(went_on.params[key]) for key, p in fresh.params.items())


def test_init_state_leaves_no_trace() -> None:
    storage, untrained = MemoryStorage(), wrapped(adam, *ALL)
    save(storage, untrained)
    fresh = wrapped(adam, *ALL)
    fresh.init_state()
    restore(storage, fresh)
    assert not fresh.state
    storage, trained = MemoryStorage(), stepped(wrapped(adam, *ALL), 3)
    save(storage, trained)
    fresh = wrapped(adam, *ALL)
    fresh.init_state()
    restore(storage, fresh)
    assert alike(fresh, trained)


def test_a_step_count_lies_where_a_fused_step_wants_it() -> None:
    def fused(params: Any) -> torch.optim.Optimizer:
        return torch.optim.Adam(params, lr=torch.tensor(0.1), fused=True)

    storage, went_on = MemoryStorage(), stepped(wrapped(fused, *ALL), 3)
    went_on.param_groups[0]["lr"].fill_(0.25)
    save(storage, went_on)
    fresh = wrapped(fused, *ALL)
    rate = fresh.param_groups[0]["lr"]
    restore(storage, fresh)
    assert fresh.param_groups[0]["lr"] is rate  # filled in place, as compiled steps need it
    assert float(rate) == 0.25
    assert alike(fresh, went_on)
    stepped(fresh)


def test_another_class_is_refused_by_name() -> None:
    storage = MemoryStorage()
    save(storage, stepped(wrapped(adam, *ALL)))
    sgd = wrapped(lambda params: torch.optim.SGD(params, lr=1.0), *ALL)
    with pytest.raises(BadInputError, match=r"a\.w, b\.w, d\.w is of torch\.optim\.adam\.Adam"):
        restore(storage, sgd)
    assert not sgd.state
    adamw = wrapped(lambda params: torch.optim.AdamW(params, lr=1.0), *ALL)
    restore(storage, adamw, other_optimizer=True)
    assert lr_of(adamw) == [1.0]
    assert len(adamw.state) == 3


def test_state_of_another_shape_is_refused_by_name() -> None:
    storage = MemoryStorage()
    save(storage, stepped(wrapped(adam, *ALL)))
    other = wrapped(adam, *ALL)
    other.params["a.w"].data = torch.zeros(4)
    with pytest.raises(BadInputError, match=r"state\.a\.w\.exp_avg: .*\[3\].*\[4\]"):
        restore(storage, other)
    assert not other.state


def test_a_parameter_that_the_checkpoint_lacks_is_named() -> None:
    storage = MemoryStorage()
    save(storage, stepped(wrapped(adam, "a.w")))
    both = wrapped(adam, "a.w", "b.w")
    with pytest.raises(BadInputError, match=r"optimizer\.state\.b\.w: is in the state but not in"):
        restore(storage, both)
    restore(storage, both, partial=True)
    assert len(both.state) == 1


def test_one_that_only_the_checkpoint_has_is_named() -> None:
    storage = MemoryStorage()
    save(storage, stepped(wrapped(adam, *ALL)))
    with pytest.raises(BadInputError, match=r"state\.b\.w\.exp_avg: is in the checkpoint but not"):
        restore(storage, wrapped(adam, "a.w", "d.w"))


def test_a_plain_optimizers_checkpoint_and_back() -> None:
    torch.manual_seed(1)
    model = nn.Linear(2, 1)
    plain = stepped_plain(torch.optim.Adam(model.named_parameters(), lr=0.5))
    storage = MemoryStorage()
    save(storage, plain)
    inner = keyed.KeyedOptimizerWrapper(dict(model.named_parameters()), adam)
    restore(storage, inner)
    assert lr_of(inner) == [0.5]
    assert inner.state[model.weight]["exp_avg"].equal(plain.state[model.weight]["exp_avg"])
    back = MemoryStorage()
    save(back, set_lr(inner, 0.7))
    again = torch.optim.Adam(model.named_parameters(), lr=0.1)
    restore(back, again)
    assert lr_of(again) == [0.7]
    assert again.state[model.bias]["exp_avg"].equal(plain.state[model.bias]["exp_avg"])


def stepped_plain(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.ones_like(p)
    optimizer.step()
    return optimizer


def test_a_state_dict_without_groups_is_restored_and_that_is_said() -> None:
    storage, sink = MemoryStorage(), ListSink()
    trained = set_lr(stepped(wrapped(adam, *ALL), 2), 0.9)
    save(storage, trained.state_dict())
    fresh = wrapped(adam, *ALL)
    with Checkpointer(storage, sink=sink) as c:
        c.restore({"optimizer": fresh})
    assert lr_of(fresh) == [0.1]
    assert len(fresh.state) == 3
    (said,) = sink.named("restored_with")
    assert "no groups" in said["note"]


def test_renamed_parameters_bring_their_state_and_groups() -> None:
    class Table(nn.Module):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.register_parameter(name, nn.Parameter(torch.zeros(3)))

    def state_of(name: str) -> dict[str, Any]:
        model = Table(name)
        return {
            "model": model,
            "optimizer": keyed.KeyedOptimizerWrapper(dict(model.named_parameters()), adam),
        }

    old, new, storage = state_of("old"), state_of("new"), MemoryStorage()
    set_lr(stepped(old["optimizer"], 2), 0.6)
    with Checkpointer(storage) as c:
        c.save(1, old).committed.result()
    with Checkpointer(storage) as c:
        c.restore(new, rename={"model.old": "model.new"})
    assert lr_of(new["optimizer"]) == [0.6]
    assert new["model"].new.equal(old["model"].old)
    assert float(new["optimizer"].state[new["model"].new]["step"]) == 2.0


def test_a_keyed_optimizer_of_another_kind_keeps_its_groups() -> None:
    """Its state isn't where that of a wrapped optimizer is: it must have made it before."""
    semi_sync = pytest.importorskip("torchrec.optim.semi_sync")

    def made() -> Any:
        local = wrapped(adam, *ALL)
        params = list(local.params.values())
        outer = keyed.KeyedOptimizerWrapper(
            local.params, lambda p: torch.optim.SGD(p, lr=0.7, momentum=0.9)
        )
        return semi_sync.SemisyncOptimizer(params, local, outer, num_local_steps=1)

    storage, trained = MemoryStorage(), made()
    for inner in (trained._optimizer, trained._global_optimizer):
        set_lr(stepped(inner, 2), 0.3)
    save(storage, trained)
    fresh = made()
    with pytest.raises(BadInputError, match=r"call its init_state\(\) before"):
        restore(storage, fresh)
    for inner in (fresh._optimizer, fresh._global_optimizer):
        stepped(inner)
    restore(storage, fresh)
    assert lr_of(fresh) == [0.3, 0.3]
    assert alike(fresh._optimizer, trained._optimizer)
    assert alike(fresh._global_optimizer, trained._global_optimizer)


def alike(a: Any, b: Any) -> bool:
    """Equal in state, down to its keys."""
    return a.state_dict()["state"].keys() == b.state_dict()["state"].keys() and all(
        torch.equal(v, b.state[b.params[key]][k])
        for key, p in a.params.items()
        for k, v in a.state[p].items()
    )
