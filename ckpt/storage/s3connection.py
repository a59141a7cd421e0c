"""Connections to an S3 store: one s3fs session at a time for each process, renewed or left to a parent."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import math
import os
import weakref
from dataclasses import dataclass
from typing import Any

import aiohttp
import s3fs
from aiobotocore.session import AioSession, get_session
from botocore.exceptions import BotoCoreError, ClientError
from fsspec.asyn import get_loop, sync_teardown

from ckpt.config import S3Settings

_MOST_SOCKETS = 256  # opened as needed; who waits for one loses time to answer in
_CLOSE_S = 1.0
_ASK_AGAIN_S = 5.0  # of what isn't allowed there may be many, and a role's credentials cost a call


@dataclass(frozen=True)
class Patience:
    """How long to keep trying, in seconds.

    attempt_s: for the answer to one request, besides 1 s for each 128 KiB that it sends; and
        for each further piece of the answer.
    connect_s: for a connection.
    first_s: before this process has heard from the store at all, for one answer and for all
        attempts. Short: an endpoint that doesn't answer at first is usually a wrong one.
    outage_s: through an outage of a store that has answered before.
    throttled_s: while the store asks to slow down, or another writer is at the same object.
    """

    attempt_s: float = 30.0
    connect_s: float = 4.0
    first_s: float = 8.0
    outage_s: float = 30.0
    throttled_s: float = 120.0


BRIEF = Patience(first_s=3.0, outage_s=3.0, throttled_s=3.0)
"""For cleaning up after a failure, which must not take long to be reported."""


class Here:
    """What belongs to this process alone, and used only on its event loop."""

    def __init__(self, settings: S3Settings, patience: Patience) -> None:
        self.pid = os.getpid()
        self.answered = False
        self._settings = settings
        self._patience = patience
        self._current: Connection | None = None
        self._asking = asyncio.Lock()
        self._asked_s = -math.inf

    async def connection(self) -> Connection:
        if self._current is None:
            self._current = Connection(self._settings, self._patience)
        return self._current

    def renew(self, stale: Connection) -> None:
        """Let the next call ask the credentials chain again, unless another call did already."""
        if self._current is stale:
            self._current = None

    async def renew_if_replaced(self, stale: Connection) -> bool:
        """Like `renew`, if the credentials chain has others by now; False if it hasn't.

        For refusals that may have another reason. It's asked every few seconds at most.
        """
        async with self._asking:
            now_s = asyncio.get_running_loop().time()
            if self._current is stale:
                if now_s < self._asked_s + _ASK_AGAIN_S:
                    return False
                self._asked_s = now_s
                if not await stale.is_replaced():
                    return False
            self.renew(stale)
            return True


class Connection:
    """An s3fs session: credentials as the chain gave them once, and a pool of sockets."""

    def __init__(self, settings: S3Settings, patience: Patience) -> None:
        self.endpoint = settings.endpoint or "the S3 endpoint"
        self._fs = s3fs.S3FileSystem(
            asynchronous=True,  # our calls run on the loop, and we close it
            skip_instance_cache=True,  # a shared instance would hold expired credentials
            use_listings_cache=False,
            endpoint_url=settings.endpoint,
            client_kwargs={"region_name": settings.region} if settings.region else {},
            config_kwargs={
                "connect_timeout": patience.connect_s,
                "read_timeout": patience.attempt_s,
                "retries": {"total_max_attempts": 1},
                "max_pool_connections": _MOST_SOCKETS,
                "s3": {"addressing_style": settings.addressing},
            },
        )
        self._clients: list[Any] = []
        # Calls under way hold this object: a connection that was renewed closes after the last.
        weakref.finalize(self, _close, self._fs, self._clients, get_loop(), os.getpid())

    async def client(self) -> Any:
        client = await self._fs.set_session()
        if not self._clients:
            self._clients.append(client)
            self.endpoint = client.meta.endpoint_url
        return client

    async def is_replaced(self) -> bool:
        """Does the credentials chain, asked anew, give others than those of this connection?"""
        try:
            ours, now = [await _frozen(s) for s in (self._fs.session, get_session())]
        except (BotoCoreError, ClientError, aiohttp.ClientError, OSError):
            return False  # the refusal says more than what is wrong with the chain
        return now is not None and now != ours


async def _frozen(session: AioSession) -> tuple[str, str, str | None] | None:
    """The credentials of a session as they are now."""
    found = await session.get_credentials()
    if found is None:
        return None
    frozen = await found.get_frozen_credentials()
    return frozen.access_key, frozen.secret_key, frozen.token


def _close(fs: object, clients: list[Any], loop: asyncio.AbstractEventLoop, pid: int) -> None:
    """Close a connection's sockets, in the process that opened them."""
    if os.getpid() != pid:
        # A forked child shares the parent's sockets and its epoll instance: taking these
        # objects apart here would deregister the parent's own. They are never freed instead.
        for inherited in (fs, *clients):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(inherited))
        return
    for client in clients:
        with contextlib.suppress(Exception):  # at exit the loop may be gone
            sync_teardown(loop, client.close, timeout=_CLOSE_S)
