"""A sharding plan is made once: a restart reads it, and neither plans nor broadcasts.

    request = PlanRequest(model, sharders, Topology(world_size, "cuda"), batch_size=512)
    plan = plan_for(request, open_storage(root)).plan
    model = DistributedModelParallel(model, plan=plan, sharders=sharders)

Entries lie under `plans/<key>.json`, JSON with plain types, each made once and never changed. The key is
a sum over all that TorchRec's planner looks at: tables, sharders, topology, batch size, constraints,
and the versions of all that is installed.
"""

from __future__ import annotations

import enum
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode
from torch import nn
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharding_spec.api import EnumerableShardingSpec
from torchrec.distributed.planner import EmbeddingShardingPlanner
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.types import (
    EmbeddingModuleShardingPlan,
    ParameterSharding,
    ShardingPlan,
)
from torchrec.modules.embedding_configs import DataType

from ckpt.coordinator import Coordinator, join
from ckpt.digest import digest_of
from ckpt.errors import BadInputError, ConflictError, CorruptError, NotFoundError, SidestageError
from ckpt.layout import plan_key
from ckpt.manifest import seal, unseal
from ckpt.storage import Storage
from ckpt.typed import decode_stored
from trainer.plain import UnprovableError, class_name, installed, plain, sha256

_KIND = "sharding_plan"
_AGREE_S = 600.0
_OF_TRAINING = ("init_fn", "weight_init_max", "weight_init_min")
_log = logging.getLogger("sidestage")


@dataclass(frozen=True)
class Planned:
    """A plan, equal on every rank, and whether an earlier start had made it."""

    plan: ShardingPlan
    reused: bool


@dataclass(frozen=True)
class PlanRequest:
    """All that TorchRec's planner is asked.

    model, sharders: as for DistributedModelParallel; the model isn't sharded yet.
    topology, batch_size, constraints: as for EmbeddingShardingPlanner.
    settings: what else the plan depends on, if a planner of your own makes it.
    """

    model: nn.Module
    sharders: Sequence[Any]
    topology: Any
    batch_size: int | None = None
    constraints: Mapping[str, Any] | None = None
    settings: str = ""


def plan_for(
    request: PlanRequest,
    storage: Storage,
    *,
    make: Callable[[], ShardingPlan] | None = None,
    coordinator: Coordinator | None = None,
) -> Planned:
    """The plan that an earlier start of the run has stored for the same request, else a new one.

    Collective: call on every rank, after the process group. Each rank reads the store itself. Then the
    ranks compare what they have read by a small key in the job's store: if it differs (one was slower
    than a write, or sees another root), all of them plan anew.

    Args:
        request: what is to be planned.
        storage: the run's root.
        make: makes the plan on every rank, by default EmbeddingShardingPlanner with a seventh of each
            device left free (FixedPercentageStorageReservation, 15%).
        coordinator: for tests; by default the job's.
    """
    coordinator = coordinator or join(f"{storage.url}#plans", None, None, None)
    try:
        key: str | None = key_of(request)
    except UnprovableError as e:
        _log.info("the sharding plan is made anew: %s, which can't be compared", e)
        key = None
    found = cached_plan(key, storage) if key else None
    if _all_read(coordinator, found):
        assert found is not None
        return Planned(found.plan, reused=True)
    plan = make() if make else _planned(request, alone=coordinator.world_size == 1)
    if key and coordinator.rank == 0:
        _keep(key, plan, storage)
    return Planned(plan, reused=False)


def _planned(request: PlanRequest, *, alone: bool) -> ShardingPlan:
    planner = EmbeddingShardingPlanner(
        topology=request.topology,
        batch_size=request.batch_size,
        constraints=request.constraints,
        storage_reservation=FixedPercentageStorageReservation(percentage=0.15),
    )
    plan: ShardingPlan = (planner.plan if alone else planner.collective_plan)(
        request.model, request.sharders
    )
    return plan


@dataclass(frozen=True)
class Cached:
    """A stored plan. digest: of the file that it was read from."""

    plan: ShardingPlan
    digest: str


def key_of(request: PlanRequest) -> str:
    """64 hex digits over the request. UnprovableError names what of it can't be compared."""
    question = {
        "model": _tables(request.model, request.sharders),
        "sharders": [_any(s, "a sharder") for s in request.sharders],
        "topology": _any(request.topology, "the topology"),
        "batch_size": request.batch_size,
        "constraints": _any(dict(request.constraints or {}), "constraints"),
        "settings": request.settings,
        "versions": installed(),
    }
    return sha256(json.dumps(question, sort_keys=True).encode())


def cached_plan(key: str, storage: Storage) -> Cached | None:
    """The plan stored under a key, or None, with a message if it is there and can't be used."""
    name = plan_key(key)
    try:
        data = storage.read(name)
        body = unseal(_KIND, data, name)
        if body.get("key") != key:
            raise CorruptError(f"{name}: is of another key")
        return Cached(decode_plan(body.get("plan"), name), digest_of(data, "sha256"))
    except NotFoundError:
        return None
    except SidestageError as e:
        _log.warning("the sharding plan is made anew: %s", e)
        return None


def encode_plan(plan: ShardingPlan) -> dict[str, Any]:
    """A plan as JSON. UnprovableError names what of it has no place there, such as cache parameters."""
    return {
        path: {n: _encode(p, f"{path}.{n}") for n, p in module.items()}
        for path, module in plan.plan.items()
    }


def decode_plan(body: Any, what: str) -> ShardingPlan:
    """The plan that `encode_plan` has written; CorruptError names `what` and the place."""
    if not isinstance(body, dict) or not all(isinstance(m, dict) for m in body.values()):
        raise CorruptError(f"{what}: not a plan of modules and their tables")
    return ShardingPlan(
        {
            path: EmbeddingModuleShardingPlan(
                {n: _decode(p, f"{what}: {path}.{n}") for n, p in module.items()}
            )
            for path, module in body.items()
        }
    )


@dataclass(frozen=True)
class _Shard:
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    placement: str | None


@dataclass(frozen=True)
class _Parameter:
    """A ParameterSharding; enumerations by name, a placement as `rank:0/cuda:0`."""

    sharding_type: str
    compute_kernel: str
    ranks: tuple[int, ...] | None
    shards: tuple[_Shard, ...] | None
    enforce_hbm: bool | None
    stochastic_rounding: bool | None
    bounds_check_mode: str | None
    output_dtype: str | None


_PLACES = {"cache_params", "key_value_params", "sharding_spec"}  # beside what a _Parameter names


def _encode(p: ParameterSharding, what: str) -> dict[str, Any]:
    unknown = {f.name for f in fields(p)} - {f.name for f in fields(_Parameter)} - _PLACES
    for name in sorted({"cache_params", "key_value_params", *unknown}):
        if getattr(p, name) is not None:
            raise UnprovableError(f"{what} has {name}")
    spec = p.sharding_spec
    if spec is not None and type(spec) is not EnumerableShardingSpec:
        raise UnprovableError(f"{what} has a {type(spec).__name__}")
    return {
        "sharding_type": str(p.sharding_type),
        "compute_kernel": str(p.compute_kernel),
        "ranks": p.ranks,
        "shards": None
        if spec is None
        else [
            {
                "offsets": list(s.shard_offsets),
                "sizes": list(s.shard_sizes),
                "placement": None if s.placement is None else str(s.placement),
            }
            for s in spec.shards
        ],
        "enforce_hbm": p.enforce_hbm,
        "stochastic_rounding": p.stochastic_rounding,
        "bounds_check_mode": p.bounds_check_mode and p.bounds_check_mode.name,
        "output_dtype": p.output_dtype and p.output_dtype.name,
    }


def _decode(body: Any, what: str) -> ParameterSharding:
    p = decode_stored(_Parameter, body, what)
    try:
        return ParameterSharding(
            sharding_type=p.sharding_type,
            compute_kernel=p.compute_kernel,
            ranks=None if p.ranks is None else list(p.ranks),
            sharding_spec=None
            if p.shards is None
            else EnumerableShardingSpec(
                [ShardMetadata(list(s.offsets), list(s.sizes), s.placement) for s in p.shards]
            ),
            enforce_hbm=p.enforce_hbm,
            stochastic_rounding=p.stochastic_rounding,
            bounds_check_mode=p.bounds_check_mode and BoundsCheckMode[p.bounds_check_mode],
            output_dtype=p.output_dtype and DataType[p.output_dtype],
        )
    except (ValueError, KeyError, RuntimeError) as e:
        raise CorruptError(f"{what}: {type(e).__name__}: {e}") from None


def _tables(model: nn.Module, sharders: Sequence[Any]) -> list[Any]:
    """What sharders would shard of the model: modules, and each one's tables as the planner sees them."""
    found = []
    for path, module in model.named_modules():
        for sharder in (s for s in sharders if s.module_type is type(module)):
            configs = next(
                (
                    getattr(module, name)()
                    for name in ("embedding_bag_configs", "embedding_configs")
                    if hasattr(module, name)
                ),
                None,
            )
            if configs is None:
                raise UnprovableError(f"{path} is a {type(module).__name__} without configurations")
            shardable = sharder.shardable_parameters(module)
            found.append(
                [
                    path,
                    class_name(type(module), path),
                    {n: [list(p.shape), str(p.dtype)] for n, p in shardable.items()},
                    [
                        {
                            f.name: plain(getattr(c, f.name), path)
                            for f in fields(c)
                            if f.name not in _OF_TRAINING
                        }
                        for c in configs
                    ],
                    # apply_optimizer_in_backward: how much state each table has.
                    {
                        n: [o.__name__ for o in getattr(p, "_optimizer_classes", [])]
                        for n, p in shardable.items()
                    },
                ]
            )
    if not found:
        raise BadInputError(f"{type(model).__name__} has nothing that these sharders shard")
    return found


def _any(value: Any, what: str) -> Any:
    """`plain`, also for TorchRec's own objects: they are what is in them."""
    own = type(value).__module__.startswith("torchrec.") and not isinstance(value, enum.Enum)
    if own and hasattr(value, "__dict__"):
        inner = {n: _any(v, f"{what}: {n}") for n, v in sorted(vars(value).items())}
        return [class_name(type(value), what), inner]
    if isinstance(value, list | tuple):
        return [_any(v, what) for v in value]
    if isinstance(value, Mapping):
        return [[plain(k, what), _any(v, what)] for k, v in value.items()]
    return plain(value, what)


def _all_read(coordinator: Coordinator, found: Cached | None) -> bool:
    """Have all ranks read the same entry? One small exchange, no collective."""
    mine = {"digest": found.digest if found else None}

    def rule(payloads: list[dict[str, Any]]) -> bool:
        digests = {p["digest"] for p in payloads}
        if len(digests) > 1:
            _log.warning(
                "the ranks have read different sharding plans (%s); it is made anew",
                ", ".join(str(p["digest"]) for p in payloads),
            )
        return digests != {None} and len(digests) == 1

    return bool(coordinator.decide("plan", mine, rule, _AGREE_S))


def _keep(key: str, plan: ShardingPlan, storage: Storage) -> None:
    """On rank 0. Without an entry the next start plans again, which is all that is lost."""
    name = plan_key(key)
    try:
        storage.create(name, seal(_KIND, {"key": key, "plan": encode_plan(plan)}))
    except ConflictError:
        _log.warning("%s is there already and wasn't used; delete it to skip planning again", name)
    except (SidestageError, UnprovableError) as e:
        _log.warning("the next start has to plan again: %s", e)
