"""One object on its way to S3: in a single request if it is small, else in parts side by side.

Nothing is visible before the last request, and that one carries the condition. Every object
has a random token in its metadata, so that a refused create can tell our own object, made by
a request whose reply was lost, from another writer's.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
from collections.abc import Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any

from ckpt.errors import (
    BadInputError,
    ConflictError,
    NotFoundError,
    SidestageError,
    StorageError,
)
from ckpt.storage.s3client import RefusedError, S3Client
from ckpt.storage.s3connection import BRIEF
from ckpt.storage.s3probe import ConditionProbe, Conditions
from ckpt.types import Buffer

TOKEN = "sidestage-write"
_MOST_PARTS = 10_000
_GROWTH_PARTS = 1_000

Condition = Mapping[str, str]
ANY: Condition = {}
ABSENT: Condition = {"IfNoneMatch": "*"}


def same(etag: str) -> Condition:
    return {"IfMatch": etag}


class Upload:
    """An object being written. Used by one thread at a time; sends in the background.

    Memory: at most settings.parallel parts on their way, and the one being filled.
    """

    def __init__(
        self, client: S3Client, key: str, condition: Condition, probe: ConditionProbe
    ) -> None:
        self._client = client
        self._key = key
        self._condition = condition
        self._probe = probe
        self._pid = os.getpid()
        self._token = secrets.token_hex(16)
        self._filling: _Part | None = None
        self._upload_id: str | None = None
        self._parts: list[Future[str]] = []
        self._pending: list[Future[str]] = []
        self.size_bytes = 0
        self.closed = False
        self.failed: SidestageError | None = None

    def write(self, data: Buffer) -> None:
        """Append `data`; waits while the most parts allowed are on their way."""
        if self.closed:
            raise BadInputError(f"{self._where}: written to after its block ended")
        self._check_usable()
        view = memoryview(data)
        view = view.cast("B") if view.nbytes else memoryview(b"")
        while view:
            self._filling = self._filling or _Part(self._part_bytes())
            taken = self._filling.append(view)
            if not taken:  # full, and more to come: only then is it not the last part
                with self._remembered():
                    self._send_part()
            self.size_bytes += taken
            view = view[taken:]

    def finish(self) -> str:
        """Make the object visible; its etag. Raises ConflictError if the condition failed."""
        self._check_usable()
        with self._remembered():
            return self._finish()

    def abort(self) -> None:
        """Give up: no object, and no parts left in the store. Never raises."""
        if self._pid != os.getpid():  # a forked child's copy: the upload is the parent's
            return
        for part in self._parts:
            part.cancel()
        self._filling = None
        if self._upload_id is not None:
            upload = {"Key": self._key, "UploadId": self._upload_id}
            with contextlib.suppress(SidestageError, RefusedError):
                self._client.run(
                    self._client.call(
                        "abort_multipart_upload", upload, expect=(404,), patience=BRIEF
                    )
                )

    def _check_usable(self) -> None:
        if self._pid != os.getpid():
            raise BadInputError(f"{self._where}: was begun before this process was forked off")
        if self.failed is not None:
            raise StorageError(f"{self.failed} (an earlier write of this object failed)")

    @contextlib.contextmanager
    def _remembered(self) -> Iterator[None]:
        """Keep a failure: once a part is lost, nothing may make half an object visible."""
        try:
            yield
        except SidestageError as e:
            self.failed = e
            raise

    @property
    def _where(self) -> str:
        return self._client.where(self._key)

    def _part_bytes(self) -> int:
        """Size of the next part. It grows, since 10,000 parts of 16 MiB are only 156 GiB."""
        return self._client.settings.part_bytes * (1 + len(self._parts) // _GROWTH_PARTS)

    def _send_part(self) -> None:
        """Begin to send the part that was filled, once one of those on their way is through."""
        if len(self._parts) == _MOST_PARTS:
            raise BadInputError(
                f"{self._where}: is longer than {_MOST_PARTS} parts hold ({self.size_bytes} "
                f"bytes); set SIDESTAGE_S3_PART_BYTES higher"
            )
        if self._upload_id is None:
            self._upload_id = self._client.run(self._begin())
        if len(self._pending) >= self._client.settings.parallel:
            wait(self._pending, return_when=FIRST_COMPLETED)
        for part in self._pending:
            if part.done():
                part.result()  # raises what it failed with
        number, data = len(self._parts) + 1, self._filled()
        sending = self._client.submit(self._send(self._upload_id, number, data))
        self._parts.append(sending)
        self._pending = [*(part for part in self._pending if not part.done()), sending]

    def _filled(self) -> bytes:
        part, self._filling = self._filling, None
        return part.taken() if part is not None else b""

    async def _begin(self) -> str:
        response = await self._client.call(
            "create_multipart_upload", {"Key": self._key, **self._attributes()}
        )
        return str(response["UploadId"])

    async def _send(self, upload_id: str, number: int, data: bytes) -> str:
        response = await self._client.call(
            "upload_part",
            {"Key": self._key, "UploadId": upload_id, "PartNumber": number, "Body": data},
        )
        return str(response["ETag"])

    def _finish(self) -> str:
        if self._upload_id is None:
            body = self._filled()
            return self._client.run(
                self._conclude("put_object", {"Body": body, **self._attributes()})
            )
        self._send_part()
        parts = [
            {"PartNumber": number, "ETag": part.result()}
            for number, part in enumerate(self._parts, 1)
        ]
        params = {"UploadId": self._upload_id, "MultipartUpload": {"Parts": parts}}
        return self._client.run(self._conclude("complete_multipart_upload", params))

    def _attributes(self) -> dict[str, Any]:
        settings = self._client.settings
        found: dict[str, Any] = {"Metadata": {TOKEN: self._token}}
        if settings.encryption:
            found["ServerSideEncryption"] = settings.encryption
        if settings.kms_key:
            found["SSEKMSKeyId"] = settings.kms_key
        return found

    async def _conclude(self, op: str, params: Mapping[str, Any]) -> str:
        """Send the request that makes the object visible."""
        honoured = self._honoured(op, self._probe.assumed)
        if not honoured:
            await self._check_condition()
        condition = self._condition if honoured else ANY
        expect: tuple[int, ...] = (404, 412, 501) if condition else ()
        if op == "complete_multipart_upload":
            # 404: a lost reply, or somebody dropped the upload. 409: no use to try this one again.
            expect = (404, 409, 412, 501)
        try:
            response = await self._client.call(
                op, {"Key": self._key, **params, **condition}, expect=expect
            )
        except RefusedError as e:
            if e.status == 501 and condition:
                await self._probe.ask()
                if not self._honoured(op, self._probe.assumed):
                    return await self._conclude(op, params)
            return await self._after_refusal(e)
        if not honoured:
            await self._check_sole_writer()
        return str(response["ETag"])

    def _honoured(self, op: str, conditions: Conditions) -> bool:
        if not self._condition:
            return True
        if "IfMatch" in self._condition:
            return conditions.replace
        return conditions.create if op == "put_object" else conditions.finish

    async def _after_refusal(self, refusal: RefusedError) -> str:
        """The etag of our own object, if a lost reply is all there was; else raise."""
        found = await self._look()
        if found is not None and found["Metadata"].get(TOKEN) == self._token:
            return str(found["ETag"])
        self._raise_unmet(found)
        raise StorageError(
            f"{self._where}: the store dropped the upload (HTTP {refusal.status}); another writer, "
            f"or a lifecycle rule, was at it; try again"
        )

    async def _check_condition(self) -> None:
        """The condition, looked up beforehand, for a store that doesn't check it itself."""
        self._raise_unmet(await self._look())

    def _raise_unmet(self, found: Mapping[str, Any] | None) -> None:
        """Raise if the object that is there now doesn't meet the condition."""
        expected = self._condition.get("IfMatch")
        if expected is None:
            if self._condition and found is not None:
                raise ConflictError(f"{self._where}: exists already; it was made by another")
        elif found is None:
            raise NotFoundError(f"{self._where}: no such object")
        elif found["ETag"] != expected:
            raise ConflictError(
                f"{self._where}: etag is {found['ETag']}, expected {expected}: "
                f"another client replaced it; read it again"
            )

    async def _check_sole_writer(self) -> None:
        """Did another write this object at the same time? Seen only if its write came last."""
        found = await self._look()
        if found is None or found["Metadata"].get(TOKEN) != self._token:
            raise ConflictError(
                f"{self._where}: another wrote it at the same time, and this store doesn't honour "
                f"conditional writes: let only one process write to it, or use another store"
            )

    async def _look(self) -> Mapping[str, Any] | None:
        try:
            return await self._client.call("head_object", {"Key": self._key}, expect=(404,))
        except RefusedError:
            return None


class _Part:
    """The bytes of one part while it's being filled.

    Made at its full size, and filled as a C extension fills new bytes: a buffer that grows is
    copied, and one that isn't bytes is copied by botocore, each time with the GIL held.
    """

    def __init__(self, size: int) -> None:
        self._bytes = bytes(size)
        self._address = ctypes.cast(ctypes.c_char_p(self._bytes), ctypes.c_void_p).value or 0
        self._used = 0

    def append(self, view: memoryview) -> int:
        """Copy as much of `view` as there is room for; how much that was."""
        view = view[: len(self._bytes) - self._used]
        if view:
            source = (ctypes.c_char * len(view)).from_buffer_copy(view) if view.readonly else view
            start = ctypes.addressof(ctypes.c_char.from_buffer(source))
            ctypes.memmove(self._address + self._used, start, len(view))
        self._used += len(view)
        return len(view)

    def taken(self) -> bytes:
        """What was filled. Nothing may be appended after."""
        return self._bytes if self._used == len(self._bytes) else self._bytes[: self._used]
