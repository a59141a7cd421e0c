"""Real table-batched embeddings of fbgemm: each changed row is announced, before it changes."""

from __future__ import annotations

import copy
import functools
import gc
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ckpt import native
from ckpt.attach import Attachment
from ckpt.events import ListSink
from ckpt.rows import RowGuards
from ckpt.rows.device import HostDevice
from ckpt.rows.device_pool import DevicePool
from ckpt.rows.torch_pool import TorchPool
from ckpt.types import SystemClock
from tests.unit.attach_recorder import Recorder, train

tbe = pytest.importorskip("fbgemm_gpu.split_table_batched_embeddings_ops_training")
common = pytest.importorskip("fbgemm_gpu.split_table_batched_embeddings_ops_common")
configs = pytest.importorskip("fbgemm_gpu.split_embedding_configs")

Optim = configs.EmbOptimType
Decay = tbe.WeightDecayMode
Check = common.BoundsCheckMode
HOST = common.EmbeddingLocation.HOST
CPU = tbe.ComputeDevice.CPU
ROWS, BATCH = 60, 5
EVERY = Optim.EXACT_ROWWISE_ADAGRAD


def lookup(optimizer: Any = EVERY, dims: tuple[int, ...] = (8, 4, 16), **options: Any) -> Any:
    options.setdefault("table_names", [f"t{i}" for i in range(len(dims))])
    module = tbe.SplitTableBatchedEmbeddingBagsCodegen(
        [(ROWS, d, HOST, CPU) for d in dims],
        optimizer=optimizer,
        learning_rate=0.1,
        **options,
    )
    module.init_embedding_weights_uniform(-1, 1)
    return module


def batch(features: int = 3, seed: int = 0, top: int = ROWS) -> tuple[Tensor, Tensor]:
    """(indices, offsets) of bags of 0 to 3 ids."""
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 4, (features * BATCH,), generator=g)
    offsets = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)])
    return torch.randint(0, top, (int(offsets[-1]),), generator=g), offsets


def guarded(module: Any) -> tuple[Attachment, Recorder]:
    recorder = Recorder()
    attachment = Attachment(recorder, ListSink())  # type: ignore[arg-type]
    attachment.add({"model": module})
    assert not attachment.refused
    return attachment, recorder


def ids_of(indices: Tensor, offsets: Tensor, feature: int) -> set[int]:
    a, b = int(offsets[feature * BATCH]), int(offsets[(feature + 1) * BATCH])
    return set(indices[a:b].tolist())


def decays() -> list[dict[str, Any]]:
    return [
        {},
        {"weight_decay": 0.1, "weight_decay_mode": Decay.L2},
        {"weight_decay": 0.1, "weight_decay_mode": Decay.DECOUPLE},
        {
            "weight_decay": 0.1,
            "weight_decay_mode": Decay.COUNTER,
            "counter_based_regularization": tbe.CounterBasedRegularizationDefinition(),
        },
        {
            "weight_decay": 0.1,
            "weight_decay_mode": Decay.COWCLIP,
            "cowclip_regularization": tbe.CowClipDefinition(),
        },
    ]


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [(EVERY, o) for o in decays()] + [(Optim.EXACT_SGD, {}), (Optim.EXACT_ADAGRAD, {})],
)
def test_touches_what_each_optimizer_changes_and_no_more(
    optimizer: Any, options: dict[str, Any]
) -> None:
    module = lookup(optimizer, **options)
    _, recorder = guarded(module)
    states = {EVERY: 3 if "COUNTER" in str(options) or "COWCLIP" in str(options) else 1}
    assert {len(t.components) for t in recorder.tables().values()} == {
        1 + states.get(optimizer, int(optimizer is not Optim.EXACT_SGD))
    }
    assert list(recorder.tables()) == ["model.t0", "model.t1", "model.t2"]
    for seed in range(3):
        indices, offsets = batch(seed=seed)
        with recorder.watch() as changed:
            train(module, indices, offsets)
        assert recorder.groups[0].calls == 1
        for n in range(3):
            assert recorder.touched()[f"model.t{n}"] == ids_of(indices, offsets, n)
            assert changed[f"model.t{n}"] == ids_of(indices, offsets, n)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("mode", ["WARNING", "IGNORE", "V2_WARNING", "V2_IGNORE"])
@pytest.mark.parametrize("optimizer", [EVERY, Optim.EXACT_SGD])
def test_ids_out_of_range_train_row_zero(optimizer: Any, mode: str, dtype: torch.dtype) -> None:
    module = lookup(optimizer, bounds_check_mode=Check[mode])
    _, recorder = guarded(module)
    indices, offsets = batch()
    indices = indices.to(dtype).clamp_(min=1)
    indices[::3] = torch.tensor([ROWS, -7, 2**31 - 1] * 20)[: indices[::3].numel()].to(dtype)
    with recorder.watch() as changed:
        train(module, indices, offsets)
    assert all(0 in rows for rows in changed.values())
    assert recorder.touched() == changed


def test_a_lookup_that_raises_is_heard_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """fbgemm has counted it by then: out of memory, say, after which trainers try a smaller batch."""
    module = lookup()
    attachment, recorder = guarded(module)

    def full(*_args: Any, **_kwargs: Any) -> Tensor:
        raise MemoryError

    lookups = "fbgemm_gpu.split_embedding_codegen_lookup_invokers"
    with monkeypatch.context() as patch:
        patch.setattr(f"{lookups}.lookup_rowwise_adagrad.invoke", full)
        with pytest.raises(MemoryError):
            module(*batch())
    with recorder.watch() as changed:
        train(module, *batch(seed=1))
    attachment.refresh()
    assert not attachment.refused
    assert recorder.touched() == changed


def test_ids_cast_to_int32_are_those_that_the_kernel_reads() -> None:
    module = lookup(embedding_table_index_type=torch.int32, embedding_table_offset_type=torch.int32)
    _, recorder = guarded(module)
    indices, offsets = batch()
    wrapped = 7 + (indices + 2**32)  # row id + 7 once cast
    with recorder.watch() as changed:
        train(module, wrapped, offsets)
    assert recorder.touched() == changed
    assert changed["model.t0"] == {
        (i + 7) if i + 7 < ROWS else 0 for i in ids_of(indices, offsets, 0)
    }


@pytest.mark.parametrize("mode", ["FATAL", "WARNING", "IGNORE"])
def test_ids_that_the_kernel_refuses_change_nothing(mode: str) -> None:
    """fbgemm on CPU: minus one passes the bounds check in each mode and fails in the lookup."""
    module = lookup(bounds_check_mode=Check[mode])
    _, recorder = guarded(module)
    indices, offsets = batch()
    indices[0] = -1
    with recorder.watch() as changed, pytest.raises(RuntimeError):
        train(module, indices, offsets)
    assert not any(changed.values())


def test_without_bounds_check() -> None:
    module = lookup(bounds_check_mode=Check.NONE)
    _, recorder = guarded(module)
    with recorder.watch() as changed:
        train(module, *batch())
    assert recorder.touched() == changed


def test_corrected_offsets_bound_the_segments() -> None:
    module = lookup(bounds_check_mode=Check.IGNORE)
    _, recorder = guarded(module)
    indices, offsets = batch()
    offsets[-1] += 5  # beyond the ids: fbgemm moves it back
    with recorder.watch() as changed:
        train(module, indices, offsets.to(torch.int64))
    assert recorder.touched() == changed


def test_keyword_arguments_and_unpooled_lookups() -> None:
    module = lookup(dims=(8, 8), pooling_mode=common.PoolingMode.NONE)
    _, recorder = guarded(module)
    indices = torch.tensor([1, 2, 3, 9, 8])
    with recorder.watch() as changed:
        train(module, indices=indices, offsets=torch.tensor([0, 2, 3, 4, 5]))
    assert changed == {"model.t0": {1, 2, 3}, "model.t1": {8, 9}} == recorder.touched()


def test_variable_batch_per_feature() -> None:
    module = lookup(dims=(8, 8))
    _, recorder = guarded(module)
    indices = torch.tensor([1, 2, 3, 4, 5, 6])
    with recorder.watch() as changed:
        train(
            module,
            indices,
            torch.tensor([0, 1, 2, 3, 6]),
            batch_size_per_feature_per_rank=[[1], [3]],
        )
    assert changed == {"model.t0": {1}, "model.t1": {2, 3, 4, 5, 6}} == recorder.touched()


def test_several_features_of_one_table() -> None:
    module = lookup(dims=(8, 8), feature_table_map=[0, 0, 1])
    _, recorder = guarded(module)
    indices = torch.tensor([1, 2, 3, 4, 5, 6])
    with recorder.watch() as changed:
        train(module, indices, torch.tensor([0, 1, 2, 3, 4, 5, 6]))
    assert changed == {"model.t0": {1, 2, 3, 4}, "model.t1": {5, 6}} == recorder.touched()


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")  # fbgemm's own hook
def test_gradients_rewritten_before_the_update() -> None:
    """fbgemm's writeback hook wraps the output; the announcement still comes before the update."""
    module = lookup(
        Optim.EXACT_SGD,
        dims=(8,),
        extra_optimizer_config=tbe.UserEnabledConfigDefinition(use_writeback_bwd_prehook=True),
    )
    _, recorder = guarded(module)
    with recorder.watch() as changed:
        train(module, torch.tensor([4, 2, 4]), torch.arange(4))
    assert changed == {"model.t0": {2, 4}} == recorder.touched()
    assert recorder.groups[0].calls == 1


@pytest.mark.parametrize("precision", ["FP16", "FP32"])
def test_half_precision_with_stochastic_rounding(precision: str) -> None:
    module = lookup(weights_precision=configs.SparseType[precision], stochastic_rounding=True)
    _, recorder = guarded(module)
    with recorder.watch() as changed:
        train(module, *batch())
    assert changed == recorder.touched()


def test_empty_batches() -> None:
    module = lookup()
    _, recorder = guarded(module)
    with recorder.watch() as changed:
        train(
            module, torch.zeros(0, dtype=torch.long), torch.zeros(3 * BATCH + 1, dtype=torch.long)
        )
    assert not any(changed.values())
    assert not any(recorder.touched().values())


def test_two_forwards_then_two_backwards() -> None:
    module = lookup()
    _, recorder = guarded(module)
    one, two = batch(seed=1), batch(seed=2)
    outs = [module(*one), module(*two)]
    with recorder.watch() as changed:
        outs[1].sum().backward()
        outs[0].sum().backward()
    assert recorder.groups[0].calls == 2
    assert recorder.touched() == changed


def test_each_backward_of_a_kept_graph_is_announced() -> None:
    module = lookup(Optim.EXACT_SGD)
    _, recorder = guarded(module)
    out = module(*batch())
    for _ in range(2):
        with recorder.watch() as changed:
            out.sum().backward(retain_graph=True)
        assert any(changed.values())
        assert recorder.groups[0].calls == 1


def test_several_lookups_in_one_step() -> None:
    module = lookup()
    _, recorder = guarded(module)
    with recorder.watch() as changed:
        loss = sum(module(*batch(seed=s)).sum() * (s + 1) for s in range(3))
        loss.backward()
    assert recorder.touched() == changed
    assert recorder.groups[0].calls == 3


def test_output_changed_in_place_after_the_lookup() -> None:
    module = lookup()
    _, recorder = guarded(module)
    with recorder.watch() as changed:
        out = module(*batch())
        out.mul_(3)
        out.sum().backward()
    assert any(changed.values())


def test_lookups_without_backward_touch_nothing() -> None:
    module = lookup()
    _, recorder = guarded(module)
    with recorder.watch() as changed:
        module(*batch())
        module.eval()
        with torch.no_grad():
            module(*batch())
        module.train()
    assert not any(changed.values())
    assert not any(recorder.touched().values())


def test_checkpointed_activations_run_lookups_again() -> None:
    module = lookup()
    _, recorder = guarded(module)
    scale = torch.ones(1, requires_grad=True)
    indices, offsets = batch()
    with recorder.watch() as changed:
        out = torch.utils.checkpoint.checkpoint(
            lambda s: module(indices, offsets) * s, scale, use_reentrant=False
        )
        out.sum().backward()
    assert any(changed.values())
    assert recorder.touched() == changed


def test_replaced_weights_and_state_are_followed() -> None:
    module = lookup()
    attachment, recorder = guarded(module)
    attachment.refresh()
    assert recorder.made == 1
    module.weights_host = nn.Parameter(module.weights_host.detach().clone())
    attachment.refresh()
    module.momentum1_host.data = module.momentum1_host.detach().clone()
    attachment.refresh()
    attachment.refresh()
    assert recorder.made == 3
    assert len(recorder.groups) == 1
    with recorder.watch() as changed:
        train(module, *batch())
    assert any(changed.values())
    live = module.split_embedding_weights()[1].data_ptr()
    assert recorder.tables()["model.t1"].components[0].data_ptr() == live


def test_a_lookup_from_before_a_replacement_is_announced_to_the_new_group() -> None:
    module = lookup()
    attachment, recorder = guarded(module)
    out = module(*batch())
    module.momentum1_host.data = module.momentum1_host.detach().clone()
    attachment.refresh()
    out.sum().backward()
    assert recorder.groups[0].calls == 1


def test_adding_again_and_detaching() -> None:
    module = lookup()
    attachment, recorder = guarded(module)
    attachment.add({"model": module}, [module], nn.ModuleDict({"x": module}))
    assert recorder.made == 1
    out = module(*batch())
    attachment.detach()
    assert not recorder.groups
    assert "forward" not in vars(module)
    assert not module.placeholder_autograd_tensor._backward_hooks
    out.sum().backward()
    train(module, *batch())


def test_a_copy_of_a_module_is_nobodys_business() -> None:
    module = lookup()
    _, recorder = guarded(module)
    copied = copy.deepcopy(module)
    before = module.weights_host.clone()
    train(copied, *batch())
    assert recorder.groups[0].calls == 0
    assert torch.equal(module.weights_host, before)
    assert not torch.equal(copied.weights_host, before)


@pytest.mark.filterwarnings("ignore")  # what TorchScript and fbgemm say of each other
def test_a_guarded_module_and_its_copy_can_be_scripted() -> None:
    module = lookup()
    guarded(module)
    for one in (module, copy.deepcopy(module)):
        scripted = torch.jit.script(one)
        assert torch.equal(scripted(*batch()), one(*batch()))


@pytest.mark.filterwarnings("ignore")  # what compilers and fbgemm say of each other
@pytest.mark.parametrize("way", ["class", "scripted", "compiled"])
def test_an_update_that_nobody_heard_of_ends_the_guard(way: str) -> None:
    module = lookup()
    attachment, recorder = guarded(module)
    call = {
        "class": lambda: functools.partial(type(module).forward, module),
        "scripted": lambda: torch.jit.script(module),
        "compiled": lambda: torch.compile(module, backend="eager"),
    }[way]()
    train(module, *batch())
    attachment.refresh()
    assert not attachment.refused
    [group] = recorder.groups
    call(*batch()).sum().backward()
    assert group.barred
    attachment.refresh()
    assert not recorder.groups
    assert set(attachment.refused.values()) == {group.barred}
    assert "lookup" in group.barred or "looked up" in group.barred


def test_forward_may_be_called_directly() -> None:
    module = lookup()
    attachment, recorder = guarded(module)
    with recorder.watch() as changed:
        module.forward(*batch()).sum().backward()
    assert changed == recorder.touched()
    attachment.refresh()
    assert not attachment.refused


def test_what_other_hooks_make_of_the_output_doesnt_matter() -> None:
    module = lookup()
    module.register_forward_hook(lambda _m, _a, out: out * 2)
    attachment, recorder = guarded(module)
    module.register_forward_hook(lambda _m, _a, out: out.clone())
    with recorder.watch() as changed:
        train(module, *batch())
    assert changed == recorder.touched()
    attachment.refresh()
    assert not attachment.refused


def test_lookups_of_several_threads_are_told_apart() -> None:
    """One looks up without an update, over and over; what fbgemm keeps of a lookup is its last."""
    module = lookup()
    attachment, recorder = guarded(module)
    ended = threading.Event()

    def evaluate() -> None:
        other = batch(seed=9)
        while not ended.is_set():
            with torch.no_grad():
                module(*other)

    thread = threading.Thread(target=evaluate)
    thread.start()
    try:
        for seed in range(20):
            with recorder.watch() as changed:
                train(module, *batch(seed=seed))
            assert all(changed[t] <= recorder.touched()[t] for t in changed)
    finally:
        ended.set()
        thread.join()
    attachment.refresh()
    assert not attachment.refused


def test_a_lookup_from_before_waits_unheard_of() -> None:
    module = lookup()
    waiting = module(*batch()).sum()
    recorder = Recorder()
    attachment = Attachment(recorder, ListSink())  # type: ignore[arg-type]
    attachment.add(module)
    assert not recorder.groups
    assert "before" in next(iter(attachment.refused.values()))
    train(module, *batch())
    attachment.refresh()
    assert not recorder.groups
    waiting.backward()
    del waiting
    attachment.refresh()
    assert recorder.groups
    assert not attachment.refused


def test_what_is_seen_late_is_guarded_once_it_was_announced() -> None:
    module = lookup()
    recorder = Recorder()
    attachment = Attachment(recorder, ListSink())  # type: ignore[arg-type]
    attachment.add(module, early=True)
    assert not recorder.groups
    assert "restore()" in next(iter(attachment.refused.values()))
    with torch.no_grad():
        module(*batch())
    attachment.refresh()
    assert not recorder.groups
    train(module, *batch())
    attachment.refresh()
    assert recorder.groups


def test_a_module_that_no_object_shows_is_found_by_its_memory() -> None:
    module, other = lookup(), lookup()
    recorder = Recorder()
    attachment = Attachment(recorder, ListSink())  # type: ignore[arg-type]
    assert not attachment.claim([("dense", torch.zeros(3))])
    later = lookup()
    for one, key in ((module, "a"), (later, "b")):
        state = {f"{key}.{n}": w.detach() for n, w in enumerate(one.split_embedding_weights())}
        assert attachment.claim(state.items())
        assert not attachment.claim(state.items())
    memory = {t.data_ptr() for t in attachment.lookup_tensors()}
    assert {m.weights_host.data_ptr() for m in (module, other, later)} <= memory
    for one in (module, later):
        train(one, *batch())
    attachment.refresh()
    assert len(recorder.groups) == 2


def test_modules_may_die() -> None:
    module = lookup()
    attachment, recorder = guarded(module)
    ref = weakref.ref(module)
    del module
    gc.collect()
    assert ref() is None
    attachment.refresh()
    assert not recorder.groups


def test_tables_put_in_the_place_of_others_are_found() -> None:
    """As resharding does."""
    model = nn.ModuleDict({"x": lookup(), "y": lookup(), "z": nn.Embedding(5, 2, sparse=True)})
    recorder = Recorder()
    attachment = Attachment(recorder, ListSink())  # type: ignore[arg-type]
    attachment.add(model)
    for name in ("x", "z"):
        kept = model[name]
        model[name] = lookup() if name == "x" else nn.Embedding(5, 2, sparse=True)
        del kept
        gc.collect()
        attachment.add(model)
        attachment.refresh()
    assert sorted(recorder.tables()) == [f"{m}.t{n}" for m in "xy" for n in range(3)]
    assert list(attachment.refused) == ["z"]
    assert all("forward" in vars(model[m]) for m in "xy")
    with recorder.watch() as changed:
        train(model["x"], *batch())
        train(model["y"], *batch())
    assert changed == recorder.touched()


def test_touched_by_hand() -> None:
    module = lookup()
    attachment, recorder = guarded(module)
    weights, states = module.split_embedding_weights(), module.split_optimizer_states()
    assert attachment.touched(weights[1], torch.tensor([3, -1]))
    assert attachment.touched(states[2][0], torch.arange(ROWS) < 2)
    assert attachment.touched(weights[0][10:20], torch.tensor([0, 5]))
    assert recorder.touched() == {
        "model.t0": {10, 15},
        "model.t1": {3, ROWS - 1},
        "model.t2": {0, 1},
    }
    assert attachment.touched(weights[0][20:22, 2:], None)
    assert recorder.touched()["model.t0"] == {10, 15, 20, 21}
    assert attachment.touched(weights[0], None)
    assert len(recorder.touched()["model.t0"]) == ROWS
    assert not attachment.touched(torch.zeros(ROWS, 8), None)
    assert not attachment.touched(weights[0].clone(), torch.tensor([1]))


@pytest.mark.parametrize(
    ("optimizer", "options", "reason"),
    [
        (
            Optim.EMAINPLACE_ROWWISE_ADAGRAD,
            {"emainplace_mode": tbe.EmainplaceModeDefinition()},
            "EMAINPLACE_ROWWISE_ADAGRAD may change rows",
        ),
    ],
)
def test_refused_optimizers(optimizer: Any, options: dict[str, Any], reason: str) -> None:
    recorder, sink = Recorder(), ListSink()
    attachment = Attachment(recorder, sink)  # type: ignore[arg-type]
    module = lookup(optimizer, **options)
    for _ in range(2):
        attachment.add(module)
        attachment.refresh()
    assert not recorder.groups
    assert reason in attachment.refused["t0"]
    assert [e["table"] for e in sink.named("table_copied")] == ["t0", "t1", "t2"]
    train(module, *batch())


def test_what_this_machine_cannot_run_is_judged_by_its_settings() -> None:
    """GPU-only kinds, caches and unknown decay modes, by the attributes that fbgemm gives them."""

    class Named:
        def __init__(self, name: str) -> None:
            self.name = name

    def judged(**attributes: Any) -> str | None:
        module = lookup()
        for name, value in attributes.items():
            setattr(module, name, value)
        recorder = Recorder()
        attachment = Attachment(recorder, ListSink())  # type: ignore[arg-type]
        attachment.add(module)
        return attachment.refused.get("t0")

    for kind in ("ADAM", "LAMB", "LARS_SGD", "PARTIAL_ROWWISE_ADAM", "PARTIAL_ROWWISE_LAMB"):
        module = lookup()
        module.optimizer = Named(kind)
        module.split_optimizer_states = list
        recorder = Recorder()
        Attachment(recorder, ListSink()).add(module)  # type: ignore[arg-type]
        assert recorder.groups, kind
    assert "ENSEMBLE" in (judged(optimizer=Optim.ENSEMBLE_ROWWISE_ADAGRAD) or "")
    assert "NONE may change" in (judged(optimizer=Optim.NONE) or "")
    assert "decay mode SOME" in (judged(weight_decay_mode=Named("SOME")) or "")
    cached = [common.EmbeddingLocation.MANAGED_CACHING] * 3
    assert "newer rows may be in its cache" in (judged(weights_physical_placements=cached) or "")


@pytest.mark.parametrize("pool", ["native", "torch", "device"])
def test_real_guards_give_the_state_at_opening(pool: str) -> None:
    if pool == "native" and native.load() is None:
        pytest.skip("the native part wasn't built: no C compiler at installation")
    module = lookup()
    guards = RowGuards(SystemClock(), 5.0)
    if pool == "torch":
        guards._pool = TorchPool()
    elif pool == "device":
        guards._pool = DevicePool(HostDevice())
    attachment = Attachment(guards, ListSink())
    attachment.add(module)
    guards.lay_out(1 << 16, 1 << 22)
    train(module, *batch(seed=1))
    pending = module(*batch(seed=2))
    snapshot = guards.open()
    live = list(zip(module.split_embedding_weights(), module.split_optimizer_states(), strict=True))
    want = [(w.clone(), s[0].clone()) for w, s in live]
    pending.sum().backward()
    for seed in range(3, 9):
        train(module, *batch(seed=seed))
    for (weight, _), before in zip(live, want, strict=True):
        place = snapshot.find(weight)
        assert place is not None
        got = [torch.zeros_like(p) for p in place.table.components]
        old = 0
        for a in range(0, ROWS, place.chunk_rows):
            rows = slice(a, a + place.chunk_rows)
            out = [g[rows].reshape(-1).view(torch.uint8) for g in got]
            old += snapshot.copy(place, a // place.chunk_rows, out)
        assert old
        for g, b in zip(got, before, strict=True):
            assert torch.equal(g, b)
        assert not torch.equal(weight, before[0])
    snapshot.close()
