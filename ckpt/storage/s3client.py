"""Calls of one bucket's S3 interface: connections, credentials, deadlines and repeats in one place.

s3fs makes the session and keeps its sockets; its event-loop thread runs every call. Its own
repeats, its listings cache and its file objects stay unused: it repeats a create without
looking whose object is there by then, and a file that is closed by an exception is committed.
"""

from __future__ import annotations

import asyncio
import io
import os
import random
import re
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from concurrent.futures import Future
from typing import Any, TypeVar

from botocore.exceptions import ClientError
from fsspec.asyn import get_loop

from ckpt.config import MIB, S3Settings
from ckpt.errors import BadInputError, DeadlineError, SidestageError
from ckpt.storage.limits import left_s, tell_retried
from ckpt.storage.s3connection import Connection, Here, Patience
from ckpt.storage.s3errors import FAILURES, Kind, code_of, explain, kind_of, status_of

_SLOWEST_BYTES_PER_S = MIB / 8
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}")

T = TypeVar("T")
Params = Mapping[str, Any]
Response = dict[str, Any]


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
        self._here = Here(settings, self.patience)

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
            self._here = Here(self.settings, self.patience)
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
        """What `take` makes of the response of a call; it's repeated, too, if `take` fails.

        The caller's limits (ckpt.storage.limits) end it, except where `patience` is given.
        """
        failed: list[SidestageError] = []
        try:
            async with asyncio.timeout(left_s() if patience is None else None) as limit:
                return await self._repeated(op, params, take, expect, patience, failed)
        except TimeoutError as e:
            if not limit.expired():
                raise
            where = self._where_of(params)
            why = failed[-1] if failed else f"{where}: no answer"
            raise DeadlineError(f"{why}; the time that its caller gave it is over") from e

    async def _repeated(  # noqa: PLR0913, PLR0917 - those of its one caller
        self,
        op: str,
        params: Params,
        take: Callable[[Response], Awaitable[T]],
        expect: tuple[int, ...],
        patience: Patience | None,
        failed: list[SidestageError],
    ) -> T:
        """See `receive`. What each attempt failed with is added to `failed`."""
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
                if 404 in expect and await self._is_absent(connection, op, params, error):
                    raise RefusedError(404, {}) from None
                if status_of(error) in expect and code_of(error) != "NoSuchBucket":
                    headers = error.response["ResponseMetadata"].get("HTTPHeaders", {})
                    raise RefusedError(status_of(error), headers) from None
            kind = kind_of(error)
            if kind == "denied":
                kind = "credentials" if await here.renew_if_replaced(connection) else "fatal"
            pause_s = tries.pause_s(kind, answered=here.answered)
            failed.append(explain(error, op, self._where_of(params), connection.endpoint))
            if pause_s is None:
                raise failed[-1] from error
            if kind == "credentials":
                here.renew(connection)
            tell_retried(self._where_of(params), kind, str(failed[-1]), pause_s)
            await asyncio.sleep(pause_s)

    def _where_of(self, params: Params) -> str:
        return self.where(params.get("Key", params.get("Prefix", "").rstrip("/")))

    async def _attempt(
        self,
        connection: Connection,
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

    async def _is_absent(
        self, connection: Connection, op: str, params: Params, e: ClientError
    ) -> bool:
        """Is there no such object, and 403 only the answer to who may not list the whole bucket?"""
        if op not in ("get_object", "head_object") or code_of(e) != "AccessDenied":
            return False
        key = params["Key"]
        try:
            page = await self._attempt(
                connection, "list_objects_v2", {"Prefix": key, "MaxKeys": 1}, _whole
            )
        except FAILURES:
            return False
        return all(item["Key"] != key for item in page.get("Contents", ()))

    async def _reason(
        self, connection: Connection, op: str, params: Params, e: Exception
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
