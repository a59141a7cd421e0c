"""torchrun's rendezvous, with a store for each life of the workers.

torchrun's agent keeps one store over all restarts, and torch 2.13 puts every life's keys in the same place:
a rank that starts before its peers reads addresses of dead ones, and `init_process_group` hangs
(pytorch#135712). TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 helps against that, too, by a store in rank 0, which
ends with it. This one is the agent's: ranks that are left can still agree on how they end.
"""

from __future__ import annotations

import copy
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

_BACKEND = "c10d-with-a-store-for-each-life"
# Exported by torch.distributed, but not for type checkers.
_TCP_STORE: Any = vars(dist)["TCPStore"]
_PREFIX_STORE: Any = vars(dist)["PrefixStore"]


def each_life_a_store(backend: str) -> str:
    """The name of the rendezvous to take for the one that torchrun would take."""
    if backend != "c10d":  # a static one, or somebody's own
        return backend
    rendezvous_handler_registry.register(_BACKEND, _create)
    return _BACKEND


def _create(parameters: RendezvousParameters) -> RendezvousHandler:
    usual = copy.copy(parameters)
    usual.backend = "c10d"
    return _StoreForEachLife(rendezvous_handler_registry.create_handler(usual))


class _StoreForEachLife(RendezvousHandler):
    def __init__(self, usual: RendezvousHandler) -> None:
        self._usual = usual
        self._server: Any = None

    def next_rendezvous(self) -> RendezvousInfo:
        met = self._usual.next_rendezvous()
        shared = met.bootstrap_store_info
        if not self.use_agent_store or shared is None:
            return met
        port = None
        if met.rank == 0:
            # That of the life before goes with this.
            self._server = _TCP_STORE(shared.master_addr, 0, is_master=True, multi_tenant=True)
            port = self._server.port
        told = RendezvousStoreInfo.build(
            met.rank, _PREFIX_STORE("each-life", met.store), shared.master_addr, port
        )
        return RendezvousInfo(met.store, met.rank, met.world_size, told)

    def get_backend(self) -> str:
        return _BACKEND

    @property
    def use_agent_store(self) -> bool:
        return self._usual.use_agent_store

    def is_closed(self) -> bool:
        return self._usual.is_closed()

    def set_closed(self) -> None:
        self._usual.set_closed()  # type: ignore[no-untyped-call]

    def num_nodes_waiting(self) -> int:
        return self._usual.num_nodes_waiting()

    def get_run_id(self) -> str:
        return self._usual.get_run_id()

    def shutdown(self) -> bool:
        return self._usual.shutdown()
