"""Calls of one bucket's S3 interface: connections, credentials, deadlines and repeats in one place.

s3fs makes the session and keeps its sockets; its event-loop thread runs every call. Its own
repeats, its listings cache and its file objects stay unused: it repeats a create without
looking whose object is there by then, and a file that is closed by an exception is committed.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import io
import os
import random
import re
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

import s3fs
from botocore.exceptions import ClientError
from fsspec.asyn import get_loop, sync_teardown

from ckpt.config import MIB, S3Settings
from ckpt.errors import BadInputError, SidestageError
from ckpt.storage.s3errors import FAILURES, Kind, code_of, explain, kind_of, status_of

_SLOWEST_BYTES_PER_S = MIB / 8
_MOST_SOCKETS = 256  # opened as needed; who waits for one loses time to answer in
_CLOSE_S = 1.0
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}")

T = TypeVar("T")
Params = Mapping[str, Any]
Response = dict[str, Any]


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


class RefusedError(Exception):
    """An answer of the store that its caller is prepared for, by its HTTP status."""

    def __init__(self, status: int, headers: Mapping[str, str]) -> None:
        super().__init__(f"HTTP {status}")
        self.status = status
        self.headers = headers


class S3Client:
    """Calls to one bucket, from any thread; after a fork, the child makes connections of its own."""

    def __init__(self, bucket: str, settings: S3Settings, patience: Patience | None = None) -> None:
        if not _BUCKET.fullmatch(bucket):
            raise BadInputError(
                f"bucket {bucket!r}: give its name, or an access point's alias, as in s3://bucket/run"
            )
        self.bucket = bucket
        self.settings = settings
        self.patience = patience or Patience()
        self._here = _Here(settings, self.patience)

    def __reduce__(self) -> tuple[type[S3Client], tuple[str, S3Settings, Patience]]:
        return S3Client, (self.bucket, self.settings, self.patience)

    def where(self, key: str) -> str:
        return f"s3://{self.bucket}/{key}" if key else f"s3://{self.bucket}"

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of a coroutine that makes calls."""
        future = self.submit(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Begin to run a coroutine that makes calls."""
        if self._here.pid != os.getpid():
            self._here = _Here(self.settings, self.patience)
        return asyncio.run_coroutine_threadsafe(work, get_loop())

    async def call(
        self,
        op: str,
        params: Params,
        *,
        expect: tuple[int, ...] = (),
        patience: Patience | None = None,
    ) -> Response:
        """The response of one S3 call, repeated where that may help.

        `op` is the call's name in boto3 and `params` its parameters; a `Body` is bytes. Raises
        RefusedError for the HTTP statuses in `expect` (but never for a missing bucket), else
        errors of ckpt.errors.
        """
        return await self.receive(op, params, _whole, expect=expect, patience=patience)

    async def receive(
        self,
        op: str,
        params: Params,
        take: Callable[[Response], Awaitable[T]],
        *,
        expect: tuple[int, ...] = (),
        patience: Patience | None = None,
    ) -> T:
        """What `take` makes of the response of a call; it's repeated, too, if `take` fails."""
        here, tries = self._here, _Tries(patience or self.patience)
        while True:
            connection = await here.connection()
            try:
                return await self._attempt(connection, op, params, take)
            except SidestageError:
                raise
            except FAILURES as e:
                error = await self._reason(connection, op, params, e)
            except Exception as e:  # a client that can't be made of these settings
                error = e
            if isinstance(error, ClientError):
                here.answered = True
                if status_of(error) in expect and code_of(error) != "NoSuchBucket":
                    headers = error.response["ResponseMetadata"].get("HTTPHeaders", {})
                    raise RefusedError(status_of(error), headers) from None
            kind = kind_of(error)
            pause_s = tries.pause_s(kind, answered=here.answered)
            if pause_s is None:
                where = self.where(params.get("Key", params.get("Prefix", "").rstrip("/")))
                raise explain(error, op, where, connection.endpoint) from error
            if kind == "credentials":
                here.renew(connection)
            await asyncio.sleep(pause_s)

    async def _attempt(
        self,
        connection: _Connection,
        op: str,
        params: Params,
        take: Callable[[Response], Awaitable[T]],
    ) -> T:
        sent = params.get("Body", b"")
        # A new body each time: a repeat must not find one that is read to its end already.
        body = {"Body": io.BytesIO(sent)} if sent else {}
        answer_s = self.patience.attempt_s if self._here.answered else self.patience.first_s
        async with asyncio.timeout(answer_s + len(sent) / _SLOWEST_BYTES_PER_S):
            client = await connection.client()
            # The client's own method, not fs.call_s3: that drops parameters which a method
            # doesn't know, and a condition that is dropped is an overwritten object.
            response: Response = await getattr(client, op)(Bucket=self.bucket, **{**params, **body})
        self._here.answered = True
        # A body may take its time, as long as its bytes keep coming (`read_timeout`).
        try:
            return await take(response)
        except BaseException:
            if "Body" in response:
                response["Body"].close()
            raise

    async def _reason(
        self, connection: _Connection, op: str, params: Params, e: Exception
    ) -> Exception:
        """Why a HEAD was refused: its answer has no body to say so. A one-byte GET's has."""
        if op == "head_object" and isinstance(e, ClientError) and status_of(e) in (400, 403):
            try:
                await self._attempt(
                    connection, "get_object", {"Key": params["Key"], "Range": "bytes=0-0"}, _drop
                )
            except FAILURES as reason:
                return reason
        return e


class _Here:
    """What belongs to this process alone, and used only on its event loop."""

    def __init__(self, settings: S3Settings, patience: Patience) -> None:
        self.pid = os.getpid()
        self.answered = False
        self._settings = settings
        self._patience = patience
        self._current: _Connection | None = None

    async def connection(self) -> _Connection:
        if self._current is None:
            self._current = _Connection(self._settings, self._patience)
        return self._current

    def renew(self, stale: _Connection) -> None:
        """Let the next call ask the credentials chain again, unless another call did already."""
        if self._current is stale:
            self._current = None


class _Connection:
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


class _Tries:
    """Counts one call's attempts, and says when it is over."""

    def __init__(self, patience: Patience) -> None:
        self._patience = patience
        self._began_s = asyncio.get_running_loop().time()
        self._count = 0
        self._renewed = False

    def pause_s(self, kind: Kind, *, answered: bool) -> float | None:
        """How long to wait before the next attempt, None if there is none."""
        if kind == "fatal" or (kind == "credentials" and self._renewed):
            return None
        if kind == "credentials":
            self._renewed = True
            return 0.0
        limit_s = self._patience.first_s
        if answered:
            throttled = kind == "throttled"
            limit_s = self._patience.throttled_s if throttled else self._patience.outage_s
        left_s = self._began_s + limit_s - asyncio.get_running_loop().time()
        if left_s <= 0:
            return None
        self._count += 1
        # Spread out, so that thousands of ranks don't come back all at once.
        return min(5.0, left_s, 0.1 * 2.0**self._count) * random.uniform(0.5, 1.0)


async def _whole(response: Response) -> Response:
    return response


async def _drop(response: Response) -> None:
    response["Body"].close()


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
