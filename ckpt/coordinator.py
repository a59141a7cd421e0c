"""Agreement between ranks through the job's key-value store: no collectives, always a deadline.

A process group's collectives would have to be ordered against the trainer's own; small
keys in the store need no order. One `Coordinator` belongs to one thread at a time; the
persist thread gets a `clone`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol, cast

import torch.distributed as dist

from ckpt import errors
from ckpt.config import check_joined, restart_count
from ckpt.digest import digest_of
from ckpt.errors import BadInputError, DeadlineError, SidestageError, StorageError


class Store(Protocol):
    """What is used of torch.distributed's stores (TCPStore, PrefixStore, HashStore, FileStore)."""

    def set(self, key: str, value: str, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def add(self, key: str, amount: int, /) -> int: ...
    def check(self, keys: list[str], /) -> bool: ...
    def wait(self, keys: list[str], timeout: timedelta, /) -> None: ...
    def delete_key(self, key: str, /) -> bool: ...
    def clone(self) -> Store: ...


class Coordinator:
    """This rank's end of the conversation.

    Args:
        rank: this process, 0 to world_size - 1. Rank 0 decides.
        world_size: how many take part.
        store: the job's store; needed only with more than one rank.
        namespace: prefix of all keys; unique per checkpointer in the job.
        assumed: nobody said that this process is alone; it was in no process group.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        store: Store | None,
        namespace: str,
        *,
        assumed: bool = False,
    ) -> None:
        if world_size > 1 and store is None:
            raise BadInputError(
                f"world_size is {world_size} but there is no store: call "
                f"torch.distributed.init_process_group first, or pass store="
            )
        self.rank = rank
        self.world_size = world_size
        self._store = store
        self._namespace = namespace
        self._assumed = assumed

    def check_place(self) -> None:
        """BadInputError if this process has joined others since it was taken for the only one."""
        if self._assumed and dist.is_initialized() and (ranks := dist.get_world_size()) > 1:
            raise BadInputError(
                f"this Session or Checkpointer was made before the process group of {ranks} ranks, and each "
                f"rank would save for itself: make it after torch.distributed.init_process_group"
            )

    def clone(self) -> Coordinator:
        """The same conversation over a connection of its own, for another thread."""
        store = self._store.clone() if self._store is not None else None
        return Coordinator(self.rank, self.world_size, store, self._namespace)

    def post(self, tag: str, payload: dict[str, Any]) -> None:
        """Make this rank's payload under `tag` readable by rank 0. Returns at once."""
        if self._store is not None:
            self._set(f"{tag}/{self.rank}", payload)

    def collect(
        self, tag: str, mine: dict[str, Any], timeout_s: float, ranks: Sequence[int] | None = None
    ) -> list[dict[str, Any]]:
        """On rank 0: every rank's payload under `tag`, in rank order, its own being `mine`."""
        others = [r for r in (ranks or range(self.world_size)) if r != self.rank]
        keys = [f"{tag}/{r}" for r in others]
        got = dict(zip(others, self._wait(keys, timeout_s), strict=True))
        got[self.rank] = mine
        for key in keys:
            self._delete(key)
        return [got[r] for r in sorted(got)]

    def announce(self, tag: str, payload: dict[str, Any]) -> None:
        """Tell all ranks; of several that speak under one tag the last is heard. Returns at once."""
        if self._store is not None and self.world_size > 1:
            self._set(f"{tag}/out", payload)

    def hear(self, tag: str, timeout_s: float) -> dict[str, Any]:
        """On other ranks: what rank 0 announced under `tag`."""
        return self._wait([f"{tag}/out"], timeout_s)[0]

    def peek(self, tag: str) -> dict[str, Any] | None:
        """What was announced under `tag` so far, on any rank. Doesn't wait."""
        if self._store is None or self.world_size == 1:
            return None
        try:
            if not self._store.check([self._namespace + f"{tag}/out"]):
                return None
        except RuntimeError as e:
            raise StorageError(
                f"rank {self.rank}: the job's store failed ({e}); did its host end?"
            ) from e
        return self.hear(tag, 1.0)

    def forget(self, tag: str, *, posts: bool) -> None:
        """Drop an announcement that every rank has heard, and posts that nobody will collect."""
        self._delete(f"{tag}/out")
        for rank in range(1, self.world_size if posts else 1):
            self._delete(f"{tag}/{rank}")

    def decide(
        self,
        tag: str,
        mine: dict[str, Any],
        rule: Callable[[list[dict[str, Any]]], Any],
        timeout_s: float,
    ) -> Any:
        """Call on every rank: rank 0 applies `rule` to all payloads, all return its result.

        A SidestageError of `rule` is raised on every rank, as the same class.
        """
        if self.rank != 0:
            self.post(tag, mine)
            answer = self.hear(tag, timeout_s)
            if "error" in answer:
                raise revive(answer)
            return answer["result"]
        try:
            result = rule(self.collect(tag, mine, timeout_s))
        except Exception as e:
            self.announce(tag, describe(e))  # the others must not wait for a rank that gave up
            raise
        self.announce(tag, {"result": result})
        return result

    def _wait(self, keys: list[str], timeout_s: float) -> list[dict[str, Any]]:
        if not keys:
            return []
        assert self._store is not None
        names = [self._namespace + k for k in keys]
        try:
            self._store.wait(names, timedelta(seconds=max(timeout_s, 0.001)))
            return [json.loads(self._store.get(n)) for n in names]
        except dist.DistStoreError as e:
            missing = [k for k, n in zip(keys, names, strict=True) if not self._has(n)]
            raise DeadlineError(
                f"rank {self.rank}: no word within {timeout_s:g} s on {', '.join(missing[:4])}"
                f"{' ...' if len(missing) > 4 else ''}; is that rank alive and calling in step?"
            ) from e
        except (RuntimeError, ValueError) as e:
            raise StorageError(
                f"rank {self.rank}: the job's store failed ({e}); did its host end?"
            ) from e

    def _has(self, name: str) -> bool:
        try:
            return bool(self._store is not None and self._store.check([name]))
        except RuntimeError:
            return False

    def _set(self, key: str, payload: dict[str, Any]) -> None:
        assert self._store is not None
        try:
            self._store.set(self._namespace + key, json.dumps(payload))
        except RuntimeError as e:
            raise StorageError(
                f"rank {self.rank}: the job's store failed ({e}); did its host end?"
            ) from e

    def _delete(self, key: str) -> None:
        if self._store is not None:
            try:
                self._store.delete_key(self._namespace + key)
            except RuntimeError:
                # A store that can't delete, or is gone: this is only housekeeping.
                return


def join(url: str, rank: int | None, world_size: int | None, store: Store | None) -> Coordinator:
    """This process's place among the ranks; what isn't given is taken from torch.distributed.

    Checkpointers of different roots (`url`) don't hear each other. BadInputError where a launcher has
    started several ranks and this one hasn't joined them.
    """
    initialised = dist.is_available() and dist.is_initialized()
    alone = not initialised and (world_size is None or (rank is None and world_size > 1))
    if alone:
        check_joined("a Session, a Checkpointer or a plan")
    if rank is None:
        rank = dist.get_rank() if initialised else 0
    if world_size is None:
        world_size = dist.get_world_size() if initialised else 1
    if not 0 <= rank < world_size:
        raise BadInputError(f"rank {rank} is outside [0, {world_size})")
    if world_size == 1:
        return Coordinator(rank, world_size, None, "", assumed=alone)
    if store is None and initialised:
        # Not public, but the only way to the job's store; `store=` avoids it.
        store = cast(Store, dist.distributed_c10d._get_default_store())
    if store is None:
        return Coordinator(rank, world_size, None, "")  # raises, with what to do
    # A launcher may keep one store over restarts: keys of an earlier life must not be read.
    base = f"sidestage/{digest_of(url.encode())[-8:]}/{restart_count()}"
    # Each rank counts its own checkpointers: the n-th on every rank belong together.
    return Coordinator(rank, world_size, store, f"{base}/{store.add(f'{base}/{rank}', 1)}/")


def describe(error: BaseException) -> dict[str, Any]:
    """An error as a payload."""
    return {"error": type(error).__name__, "message": str(error)}


def revive(payload: dict[str, Any]) -> SidestageError:
    """The error of a payload, of the same class where it is one of ours."""
    kind = getattr(errors, str(payload["error"]), None)
    if not (isinstance(kind, type) and issubclass(kind, SidestageError)):
        return SidestageError(f"{payload['error']}: {payload['message']}")
    return kind(str(payload["message"]))


def raise_first(payloads: list[dict[str, Any]]) -> None:
    """A rule for `decide`: the first rank's error is everybody's."""
    for rank, p in enumerate(payloads):
        if "error" in p:
            error = revive(p)
            raise type(error)(f"rank {rank}: {error}" if len(payloads) > 1 else str(error))
