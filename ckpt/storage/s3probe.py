"""Does an S3 store honour conditional writes? Many accept the headers and ignore them."""

from __future__ import annotations

import contextlib
import secrets
from dataclasses import dataclass

from ckpt.errors import SidestageError
from ckpt.storage.s3client import Params, RefusedError, S3Client
from ckpt.storage.s3connection import BRIEF

_NEVER = '"00000000000000000000000000000000"'
_REFUSED = (404, 412)
_UNKNOWN = 501


@dataclass(frozen=True, slots=True)
class Conditions:
    """The conditional writes that a store honours.

    create: If-None-Match on PutObject. replace: If-Match on PutObject.
    finish: If-None-Match on CompleteMultipartUpload, which some stores with `create` ignore.
    """

    create: bool = True
    replace: bool = True
    finish: bool = True


class ConditionProbe:
    """Asks the store once in a process's life, with a scratch object under `prefix`."""

    def __init__(self, client: S3Client, prefix: str) -> None:
        self._client = client
        self._prefix = prefix
        self._found: Conditions | None = None

    @property
    def assumed(self) -> Conditions:
        """What the store was found to honour; until it is asked, everything."""
        return self._found or Conditions()

    async def ask(self) -> Conditions:
        """Try each condition on an object where it must fail. Some ten small requests."""
        if self._found is None:
            # A name that listings hide, should the process die before it is deleted.
            key = f"{self._prefix}.sidestage-probe-{secrets.token_hex(16)}"
            try:
                self._found = await self._try(key)
            finally:
                with contextlib.suppress(SidestageError):
                    await self._client.call("delete_object", {"Key": key}, patience=BRIEF)
        return self._found

    async def _try(self, key: str) -> Conditions:
        await self._refuses("put_object", {"Key": key, "Body": b"1", "IfNoneMatch": "*"})
        # Where the first one was refused as unknown, there is still no object.
        await self._client.call("put_object", {"Key": key, "Body": b"2"})
        return Conditions(
            create=await self._refuses(
                "put_object", {"Key": key, "Body": b"3", "IfNoneMatch": "*"}
            ),
            replace=await self._refuses(
                "put_object", {"Key": key, "Body": b"4", "IfMatch": _NEVER}
            ),
            finish=await self._refuses_to_finish(key),
        )

    async def _refuses(self, op: str, params: Params) -> bool:
        try:
            await self._client.call(op, params, expect=(*_REFUSED, _UNKNOWN))
        except RefusedError as e:
            return e.status in _REFUSED
        return False

    async def _refuses_to_finish(self, key: str) -> bool:
        call = self._client.call
        began = await call("create_multipart_upload", {"Key": key})
        upload = {"Key": key, "UploadId": began["UploadId"]}
        try:
            part = await call("upload_part", {**upload, "PartNumber": 1, "Body": b"5"})
            parts = {"Parts": [{"PartNumber": 1, "ETag": part["ETag"]}]}
            return await self._refuses(
                "complete_multipart_upload",
                {**upload, "MultipartUpload": parts, "IfNoneMatch": "*"},
            )
        finally:
            with contextlib.suppress(SidestageError, RefusedError):
                await call("abort_multipart_upload", upload, expect=(404,), patience=BRIEF)
