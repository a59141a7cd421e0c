"""A restore gives back what was saved to what it belongs to, or changes nothing and says why."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ckpt import Checkpointer, PerRank
from ckpt.catalog import Catalog
from ckpt.errors import BadInputError, CorruptError, RestoreError
from ckpt.events import ListSink
from ckpt.layout import DATA
from ckpt.storage.memory import MemoryStorage
from ckpt.verify import verify_commit
from tests.checkpointer.ranks import on_ranks

Optimizer = torch.optim.Optimizer


def saved(*states: dict[str, Any]) -> MemoryStorage:
    storage = MemoryStorage()
    with Checkpointer(storage) as c:
        for step, state in enumerate(states, 1):
            c.save(step, state).committed.result()
    return storage


def restored(storage: MemoryStorage, state: dict[str, Any], **terms: Any) -> Any:
    with Checkpointer(storage, sink=ListSink()) as c:
        return c.restore(state, **terms)


def refused(storage: MemoryStorage, state: dict[str, Any], match: str, **terms: Any) -> str:
    """The message of a refusal after which the state is bit for bit what it was."""
    before = frozen(state)
    with pytest.raises(BadInputError, match=match) as e:
        restored(storage, state, **terms)
    assert same(frozen(state), before)
    return str(e.value)


def frozen(value: Any) -> Any:
    """A deep copy of all that a state holds."""
    if isinstance(value, nn.Module | Optimizer):
        return frozen(value.state_dict())
    if isinstance(value, dict):
        return {k: frozen(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [frozen(v) for v in value]
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return copy.deepcopy(value)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return (
            isinstance(b, torch.Tensor)
            and a.dtype == b.dtype
            and a.shape == b.shape
            and a.contiguous().view(-1).view(torch.uint8).tolist()
            == b.contiguous().view(-1).view(torch.uint8).tolist()
        )
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return type(a) is type(b) and a == b


class Towers(nn.Module):
    """Two layers of one shape, registered in the order given."""

    def __init__(self, order: tuple[str, ...] = ("user", "item"), dtype: Any = None) -> None:
        super().__init__()
        for name in order:
            self.add_module(name, nn.Linear(4, 4, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = x
        for name, layer in sorted(self.named_children()):
            out = layer(out) * (1 + len(name))
        return out


def trained(model: nn.Module, optimizer: Optimizer, steps: int = 3, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    dtype = next(model.parameters()).dtype
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 4, generator=generator).to(dtype)).float().pow(2).sum().backward()
        optimizer.step()


def by_name(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    return {n: frozen(optimizer.state.get(p, {})) for n, p in model.named_parameters()}


ADAM: Callable[..., Optimizer] = lambda ps: torch.optim.Adam(ps, lr=0.01)  # noqa: E731


def job(order: tuple[str, ...] = ("user", "item"), make: Callable[..., Optimizer] = ADAM) -> Any:
    torch.manual_seed(len(order))
    model = Towers(order)
    return model, make(model.parameters())


# -- optimizers: by name --------------------------------------------------------------------------


@pytest.mark.parametrize("wrap", [lambda m: m, torch.compile, nn.DataParallel])
@pytest.mark.parametrize("warm", [False, True])
def test_e02_moments_follow_their_parameters_name(warm: bool, wrap: Any) -> None:
    model, optimizer = job()
    trained(model, optimizer)
    storage = saved({"model": model, "optimizer": optimizer})
    other, second = job(("item", "user"))
    if warm:
        trained(other, second, steps=1, seed=5)
    restored(storage, {"optimizer": second, "model": other})
    assert same(by_name(other, second), by_name(model, optimizer))
    trained(model, optimizer, seed=9)
    trained(other, second, seed=9)
    assert same(dict(sorted(frozen(other).items())), dict(sorted(frozen(model).items())))
    # What wraps a model has no part in its names.
    whole, third = job(("item", "user"))
    storage = saved({"model": {}, "optimizer": optimizer, "m": model})
    restored(storage, {"m": _Inner(wrap(whole)), "optimizer": third, "model": {}})
    assert same(by_name(whole, third), by_name(model, optimizer))


class _Inner(nn.Module):
    """Has a wrapped model's keys, as a trainer that saves the inner one."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self._orig_mod = model

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        inner = getattr(self._orig_mod, "_orig_mod", None) or getattr(
            self._orig_mod, "module", None
        )
        return (inner or self._orig_mod).state_dict()

    def load_state_dict(self, state: Any, *args: Any, **kwargs: Any) -> Any:
        inner = getattr(self._orig_mod, "_orig_mod", None) or getattr(
            self._orig_mod, "module", None
        )
        return (inner or self._orig_mod).load_state_dict(state)


def test_e02_without_its_module_the_names_in_the_groups_count() -> None:
    model, _ = job()
    optimizer = torch.optim.Adam(model.named_parameters(), lr=0.01)
    trained(model, optimizer)
    storage = saved({"optimizer": optimizer})
    other, _ = job(("item", "user"))
    second = torch.optim.Adam(other.named_parameters(), lr=0.5)
    restored(storage, {"optimizer": second})
    assert same(by_name(other, second), by_name(model, optimizer))
    assert second.param_groups[0]["lr"] == 0.01
    assert second.param_groups[0]["param_names"] == [n for n, _ in other.named_parameters()]


def test_without_any_names_parameters_go_by_number_and_shape() -> None:
    model, optimizer = job()
    trained(model, optimizer)
    storage = saved({"optimizer": optimizer})
    other, second = job()
    restored(storage, {"optimizer": second})
    assert same(by_name(other, second), by_name(model, optimizer))
    wide = [nn.Parameter(torch.zeros(3, 3)) for _ in range(4)]
    refused(
        storage,
        {"optimizer": torch.optim.Adam(wide)},
        r"optimizer.state.0.exp_avg: .*\[4, 4\].*\[3, 3\]",
    )


def test_numbers_without_names_go_by_their_order_and_that_is_said() -> None:
    model, optimizer = job()
    trained(model, optimizer)
    storage = saved({"m": model, "o": optimizer.state_dict()})
    other, second = job()
    sink = ListSink()
    with Checkpointer(storage, sink=sink) as c:
        c.restore({"m": other, "o": second})
    assert same(by_name(other, second), by_name(model, optimizer))
    (said,) = [e["note"] for e in sink.named("restored_with")]
    assert said.startswith("o: the checkpoint has no names of its parameters")


def test_two_models_with_the_same_names_are_told_apart() -> None:
    a, b = Towers(), Towers()
    both = torch.optim.Adam([*a.parameters(), *b.parameters()])
    for n, p in enumerate([*a.parameters(), *b.parameters()]):
        p.grad = torch.full_like(p, n + 1.0)
    both.step()
    storage = saved({"a": a, "b": b, "o": both})
    c, d = Towers(("item", "user")), Towers()
    other = torch.optim.Adam([*d.parameters(), *c.parameters()])
    restored(storage, {"b": d, "a": c, "o": other})
    assert same(by_name(c, other), by_name(a, both))
    assert same(by_name(d, other), by_name(b, both))


def test_a_shared_weight_keeps_its_moments_whatever_its_first_name_is() -> None:
    class Tied(nn.Module):
        def __init__(self, names: tuple[str, str]) -> None:
            super().__init__()
            layer = nn.Linear(4, 4)
            for name in names:
                self.add_module(name, layer)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.a(self.b(x))  # type: ignore[no-any-return]

    model = Tied(("a", "b"))
    optimizer = ADAM(model.parameters())
    trained(model, optimizer)
    other = Tied(("b", "a"))
    second = ADAM(other.parameters())
    restored(saved({"m": model, "o": optimizer}), {"m": other, "o": second})
    assert same(frozen(second)["state"], frozen(optimizer)["state"])


class Mixed(torch.optim.Adam):
    """Keeps float32 moments of bfloat16 weights."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state.setdefault("step", torch.tensor(0.0))
                state["step"] += 1
                m = state.setdefault("exp_avg", torch.zeros_like(p, dtype=torch.float32))
                m.lerp_(p.grad.float(), 0.3)
                nested = state.setdefault("more", {"max": torch.zeros_like(p, dtype=torch.float64)})
                nested["max"].add_(m.double() / 3)
                p.data.add_((-0.1 * m).to(p.dtype))


@pytest.mark.parametrize("warm", [False, True])
def test_e03_optimizer_state_comes_back_in_its_own_dtype(warm: bool) -> None:
    model = Towers(dtype=torch.bfloat16)
    optimizer = Mixed(model.parameters())
    trained(model, optimizer)
    other = Towers(dtype=torch.bfloat16)
    second = Mixed(other.parameters())
    if warm:
        trained(other, second, seed=3)
    restored(saved({"m": model, "o": optimizer}), {"m": other, "o": second})
    assert by_name(other, second)["user.weight"]["exp_avg"].dtype == torch.float32
    assert same(by_name(other, second), by_name(model, optimizer))
    trained(model, optimizer, seed=4)
    trained(other, second, seed=4)
    assert same(frozen(other), frozen(model))


def test_e30_state_that_lacks_a_moment_is_refused_by_name() -> None:
    model, optimizer = job()
    trained(model, optimizer)
    del optimizer.state[model.user.weight]["exp_avg_sq"]
    storage = saved({"m": model, "o": optimizer})
    other, second = job()
    refused(storage, {"m": other, "o": second}, r"o.state.user.weight: .*exp_avg_sq")
    record = Catalog(storage).find(1).record
    assert record is not None
    (told,) = verify_commit(storage, record, level="full").problems
    assert told.startswith("values: o.state.user.weight: ")
    assert "exp_avg_sq" in told


def test_a_whole_state_verifies() -> None:
    model, optimizer = job()
    trained(model, optimizer)
    storage = saved({"m": model, "o": optimizer, "own": PerRank({"t": torch.ones(2), "n": 1})})
    record = Catalog(storage).find(1).record
    assert record is not None
    assert verify_commit(storage, record, level="full").ok


def test_e31_moments_of_another_shape_than_the_parameter_are_refused() -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    trained(model, optimizer)
    optimizer.state[model.weight]["exp_avg"] = torch.zeros(3, 3)
    optimizer.state[model.weight]["exp_avg_sq"] = torch.zeros(3, 3)
    storage = saved({"o": optimizer})
    said = refused(
        storage, {"o": torch.optim.AdamW(nn.Linear(4, 2).parameters())}, "o.state.0.exp_avg"
    )
    assert "[3, 3]" in said
    assert "[2, 4]" in said


def test_e32_another_optimizer_class_is_refused_unless_asked_for() -> None:
    model, optimizer = job()
    trained(model, optimizer)
    storage = saved({"m": model, "o": optimizer})
    other, _ = job()
    plain = torch.optim.SGD(other.parameters(), lr=0.5)
    said = refused(storage, {"m": other, "o": plain}, "o: is the state of torch.optim.adam.Adam")
    assert "torch.optim.sgd.SGD" in said
    decayed = torch.optim.AdamW(other.parameters(), lr=0.5)
    restored(storage, {"m": other, "o": decayed}, other_optimizer=True)
    assert same(by_name(other, decayed), by_name(model, optimizer))
    assert decayed.param_groups[0]["lr"] == 0.5  # its options are its own
    third, _ = job()
    fresh = torch.optim.SGD(third.parameters(), lr=0.5)
    result = restored(storage, {"m": third, "o": fresh}, exclude=["o"])
    assert not fresh.state
    assert any(k.startswith("o.") for k in result.not_restored)


def test_e05_other_groups_are_refused_with_both_lists_before_anything_changes() -> None:
    model, _ = job()
    optimizer = ADAM(model.user.parameters())
    optimizer.add_param_group({"params": list(model.item.parameters()), "lr": 0.5})
    trained(model, optimizer)
    storage = saved({"m": model, "o": optimizer})
    other, one = job()
    said = refused(storage, {"m": other, "o": one}, "parameter groups")
    assert "2 (user.weight, user.bias) | 2 (item.weight, item.bias)" in said
    assert "4 (user.weight, user.bias, item.weight and 1 more)" in said
    # In another order they are the same groups.
    turned = ADAM(other.item.parameters())
    turned.add_param_group({"params": list(other.user.parameters())})
    restored(storage, {"m": other, "o": turned})
    assert [g["lr"] for g in turned.param_groups] == [0.5, 0.01]
    assert same(by_name(other, turned), by_name(model, optimizer))


def test_e05_unfrozen_layers_with_partial_keep_what_they_have() -> None:
    model, _ = job()
    optimizer = ADAM(model.user.parameters())
    trained(model, optimizer)
    storage = saved({"m": model, "o": optimizer})
    other, all_of_it = job()
    said = refused(
        storage, {"m": other, "o": all_of_it}, "o: holds other parameters than at the save"
    )
    assert "item.weight" in said
    restored(storage, {"m": other, "o": all_of_it}, partial=True)
    assert same(by_name(other, all_of_it), by_name(model, optimizer))
    trained(other, all_of_it)  # the new ones begin afresh


def test_a_layer_that_is_new_with_partial_leaves_it_as_it_is() -> None:
    model, optimizer = job(("user",))
    trained(model, optimizer)
    storage = saved({"m": model, "o": optimizer})
    other, second = job(("user", "item"))
    before = frozen(other.item)
    refused(storage, {"m": other, "o": second}, "m.item.weight: is in the state but not")
    result = restored(storage, {"m": other, "o": second}, partial=True)
    assert same(frozen(other.item), before)
    assert same(frozen(other.user), frozen(model.user))
    assert {"m.item.weight", "m.item.bias"} <= set(result.not_restored)
    assert set(by_name(other, second)["user.weight"]) == {"step", "exp_avg", "exp_avg_sq"}


def test_a_learning_rate_that_is_a_tensor_follows_its_group() -> None:
    def make(model: Any, first: Any, second: Any, lrs: tuple[float, float]) -> Optimizer:
        o = torch.optim.Adam(first.parameters(), lr=torch.tensor(lrs[0]), capturable=False)
        o.add_param_group({"params": list(second.parameters()), "lr": torch.tensor(lrs[1])})
        return o

    model, _ = job()
    optimizer = make(model, model.user, model.item, (0.25, 0.125))
    storage = saved({"m": model, "o": optimizer})
    other, _ = job()
    second = make(other, other.item, other.user, (1.0, 1.0))
    restored(storage, {"m": other, "o": second})
    assert [float(g["lr"]) for g in second.param_groups] == [0.125, 0.25]


# -- what a checkpoint lacks ----------------------------------------------------------------------


def test_e04_extra_state_has_its_own_size() -> None:
    class Scaled(nn.Linear):
        history = torch.zeros(0, dtype=torch.uint8)

        def get_extra_state(self) -> Any:
            return self.history

        def set_extra_state(self, state: Any) -> None:
            self.history = state

    model, other = Scaled(2, 2), Scaled(2, 2)
    model.history = torch.arange(4096).to(torch.uint8)
    restored(saved({"m": model}), {"m": other})
    assert same(other.history, model.history)
    grown = Scaled(2, 2)
    grown.history = torch.zeros(7000, dtype=torch.uint8)
    restored(saved({"m": model}), {"m": grown})
    assert same(grown.history, model.history)


def test_an_object_of_its_own_kind_gets_what_it_saved_whatever_it_holds_now() -> None:
    class Histogram:
        def __init__(self, n: int) -> None:
            self.bins: Any = torch.zeros(n)

        def state_dict(self) -> dict[str, Any]:
            return {"bins": self.bins, "more": [self.bins[:1] + 1]}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.bins = state["bins"]
            self.more = state["more"]

    full, fresh = Histogram(5), Histogram(0)
    full.bins += 3
    restored(saved({"h": full}), {"h": fresh})
    assert same(fresh.bins, full.bins)
    assert same(fresh.more[0], torch.tensor([4.0]))


@pytest.mark.parametrize(
    ("stored", "state"),
    [
        ([torch.ones(2), "s"], ["x", torch.zeros(2)]),
        ([torch.ones(2)], [torch.zeros(2), torch.zeros(2)]),
        ((torch.ones(2), "s"), [torch.zeros(2), "x"]),
    ],
)
def test_e29_a_list_is_restored_whole_or_not_at_all(stored: Any, state: Any) -> None:
    storage = saved({"a": stored, "b": 1})
    refused(
        storage, {"a": state, "b": 0}, "^step 1 doesn't fit this state: a: the checkpoint has a"
    )
    refused(storage, {"a": state, "b": 0}, "a: the checkpoint has a", partial=True)
    mine = {"a": state, "b": 0}
    before = frozen(mine)
    restored(storage, mine, exclude=["a"])
    assert same(frozen(mine["a"]), before["a"])
    assert mine["b"] == 1


def test_e29_what_only_one_side_has_stays_exactly_as_it_was() -> None:
    t1, t2 = torch.ones(2), torch.full((3,), 2.0)
    storage = saved({"l": [t1, "a", t2, "b"], "n": 7, "d": {"x": 1, "y": 2}})
    state: dict[str, Any] = {"own": [1, torch.zeros(1)], "d": {"x": 0, "z": 5}}
    result = restored(storage, state, partial=True)
    assert same(frozen(state), {"own": [1, torch.zeros(1)], "d": {"x": 1, "z": 5}})
    assert {"own.0", "own.1", "n", "d.y", "d.z", "l.0", "l.1", "l.2", "l.3"} == set(
        result.not_restored
    )
    later: dict[str, Any] = {"l": None, "n": 0, "d": {"x": 0, "y": 0}}
    restored(storage, later)
    assert same(frozen(later["l"]), [t1, "a", t2, "b"])


def test_e34_an_expanded_tensor_comes_back() -> None:
    storage = saved({"t": torch.arange(3.0).expand(5, 3)})
    state = {"t": torch.zeros(1, 3).expand(5, 3)}
    restored(storage, state)
    assert same(state["t"].contiguous(), torch.arange(3.0).expand(5, 3).contiguous())
    uneven = saved({"t": torch.arange(15.0).view(5, 3)})
    refused(uneven, {"t": torch.zeros(1, 3).expand(5, 3)}, "t: is an expanded view")


def test_e72_two_keys_of_one_memory_must_be_equal_in_the_checkpoint() -> None:
    storage = saved({"a": torch.full((3,), 1.0), "b": torch.full((3,), 2.0)})
    t = torch.zeros(3)
    assert "a and b" in refused(storage, {"a": t, "b": t}, "share memory")
    equal = saved({"a": torch.full((3,), 2.0), "b": torch.full((3,), 2.0)})
    state = {"a": t, "b": t}
    restored(equal, state)
    assert t.tolist() == [2.0] * 3
    # Views of one buffer, whether they overlap or only lie beside one another.
    whole = torch.zeros(4, 4)
    refused(
        saved({"w": torch.ones(4, 4), "v": torch.zeros(2)}),
        {"w": whole, "v": whole[1, :2]},
        "w and v",
    )
    columns = saved({"l": torch.ones(4, 2), "r": torch.full((4, 2), 2.0)})
    restored(columns, {"l": whole[:, :2], "r": whole[:, 2:]})
    assert whole.sum(0).tolist() == [4.0, 4.0, 8.0, 8.0]
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    storage = saved({"m": model})
    tied = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    tied[1].weight = tied[0].weight
    refused(storage, {"m": tied}, "m.0.weight and m.1.weight")


# -- what goes wrong later ------------------------------------------------------------------------


@pytest.mark.parametrize("ask", [None, 1])
def test_e37_nothing_of_a_damaged_checkpoint_stays(ask: int | None) -> None:
    model, optimizer = job()
    trained(model, optimizer)
    storage = saved({"m": model, "o": optimizer, "t": torch.ones(5000)})
    key = next(o.key for o in storage.list(DATA) if o.key.endswith(".bin"))
    data = bytearray(storage.read(key))
    data[-1] ^= 1
    storage.put(key, bytes(data))
    other, second = job()
    state = {"m": other, "o": second, "t": torch.zeros(5000)}
    before = frozen(state)
    with pytest.raises(CorruptError):
        restored(storage, state, step=ask)
    assert same(frozen(state), before)


class Fails:
    """Saves itself, and can't take it back."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error

    def state_dict(self) -> dict[str, Any]:
        return {"n": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.error is not None:
            raise self.error


def test_an_error_of_load_state_dict_reaches_all_ranks_at_once_with_rank_and_key() -> None:
    storage = MemoryStorage()

    def save(rank: int, place: dict[str, Any]) -> None:
        with Checkpointer(storage, **place) as c:
            c.save(1, {"a": torch.ones(2), "f": Fails(), "z": 1}).committed.result()

    def restore(rank: int, place: dict[str, Any]) -> None:
        fails = Fails(ValueError("no place") if rank == 1 else None)
        with Checkpointer(storage, sink=ListSink(), **place) as c:
            c.restore({"a": torch.zeros(2), "f": fails, "z": 0})

    assert on_ranks(2, save) == [None, None]
    errors = on_ranks(2, restore)
    for e in errors:
        assert isinstance(e, RestoreError)
        assert "rank 1: step 1: f: ValueError: no place" in str(e)
        assert "build the state anew" in str(e)


def test_what_one_rank_has_against_it_is_refused_on_all_before_anything_changes() -> None:
    storage = MemoryStorage()

    def save(rank: int, place: dict[str, Any]) -> None:
        with Checkpointer(storage, **place) as c:
            c.save(1, {"a": torch.ones(2), "own": PerRank(rank)}).committed.result()

    def restore(rank: int, place: dict[str, Any]) -> Any:
        state = {"a": torch.zeros(2 + rank), "own": PerRank(-1)}
        with (
            Checkpointer(storage, sink=ListSink(), **place) as c,
            pytest.raises(BadInputError) as e,
        ):
            c.restore(state)
        return str(e.value), state["own"].value, state["a"].sum().item()

    assert on_ranks(2, save) == [None, None]
    for said, own, total in on_ranks(2, restore):  # type: ignore[misc]
        assert "a: the checkpoint has float32 [2], the state float32 [3]" in said
        assert (own, total) == (-1, 0.0)


# -- changed models -------------------------------------------------------------------------------


def test_renamed_parts_are_found_with_their_moments() -> None:
    model, optimizer = job(("user", "item"))
    trained(model, optimizer)
    storage = saved({"m": model, "o": optimizer, "ema": {"a": torch.ones(2)}})
    other, second = job(("query", "item"))
    state = {"m": other, "o": second, "average": {"a": torch.zeros(2)}}
    refused(storage, state, "m.query.weight: is in the state but not")
    restored(storage, state, rename={"m.user": "m.query", "ema": "average"})
    assert same(frozen(other.query), frozen(model.user))
    assert same(by_name(other, second)["query.weight"], by_name(model, optimizer)["user.weight"])
    assert state["average"]["a"].tolist() == [1.0, 1.0]
    refused(storage, state, "nothing that is or begins with 'm.usr'", rename={"m.usr": "m.query"})
    refused(storage, state, "which the checkpoint has already", rename={"m.user": "m.item"})


def test_rows_are_restored_where_both_have_them_and_the_rest_stays() -> None:
    def towers(rows: int, seed: int) -> Any:
        torch.manual_seed(seed)
        model = nn.ModuleDict({"table": nn.Embedding(rows, 3), "top": nn.Linear(3, 1)})
        return model, torch.optim.Adam(model.parameters())

    def step(model: Any, optimizer: Optimizer) -> None:
        optimizer.zero_grad()
        model["top"](model["table"](torch.tensor([0, 3]))).sum().backward()
        optimizer.step()

    model, optimizer = towers(4, 0)
    step(model, optimizer)
    storage = saved({"m": model, "o": optimizer})
    other, second = towers(6, 1)
    fresh = frozen(other["table"].weight)
    said = refused(storage, {"m": other, "o": second}, r"m.table.weight: .*\[4, 3\].*\[6, 3\]")
    assert "o.state.table.weight.exp_avg" in said  # one doesn't hide the others
    restored(storage, {"m": other, "o": second}, rows=["m.table.weight"])
    now = other["table"].weight.detach()
    assert same(now[:4].clone(), frozen(model["table"].weight))
    assert same(now[4:].clone(), fresh[4:])
    moments = second.state[other["table"].weight]["exp_avg"]
    assert same(moments[:4].clone(), frozen(optimizer.state[model["table"].weight]["exp_avg"]))
    assert not moments[4:].any()
    step(other, second)
    less, third = towers(2, 2)
    restored(storage, {"m": less, "o": third}, rows=["m.table*"])
    assert same(frozen(less["table"].weight), frozen(model["table"].weight)[:2])


def test_excluded_parts_stay_whatever_the_checkpoint_has_for_them() -> None:
    model, optimizer = job()
    trained(model, optimizer)
    storage = saved({"m": model, "o": optimizer})
    other, second = job()
    trained(other, second, seed=7)
    before, moments = frozen(other.item), by_name(other, second)
    result = restored(
        storage,
        {"m": other, "o": second},
        exclude=["m.item", "o.state.item.weight", "o.state.item.bias"],
    )
    assert same(frozen(other.item), before)
    assert same(frozen(other.user), frozen(model.user))
    now = by_name(other, second)
    assert same(now["item.weight"], moments["item.weight"])
    assert same(now["user.weight"], by_name(model, optimizer)["user.weight"])
    assert "m.item.weight" in result.not_restored


def test_parameters_without_names_go_by_number_and_that_is_said() -> None:
    model, optimizer = job()
    trained(model, optimizer)
    storage = saved({"o": optimizer})
    sink = ListSink()
    other, second = job()
    with Checkpointer(storage, sink=sink) as c:
        c.restore({"o": second})
    assert same(by_name(other, second), by_name(model, optimizer))
    (said,) = [e["note"] for e in sink.named("restored_with")]
    assert said.startswith("o: 4 of its parameters are in no module of the state")


@pytest.mark.parametrize("given", ["old", ["old"], ("old",)])
def test_one_pattern_is_no_list_of_letters(given: Any) -> None:
    storage = saved({"old": 1, "o": 2})
    state = {"old": 0, "o": 0}
    result = restored(storage, state, exclude=given)
    assert state == {"old": 0, "o": 2}
    assert result.not_restored == ("old",)
