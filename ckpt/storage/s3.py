"""Objects in a bucket of an S3 store that is strongly consistent, as AWS and most others are.

Etags are the store's own. Most stores derive them from the content, so a version that is
replaced by one of equal content keeps its etag: give content that is compared and set a
counter. `list` sorts by itself, since not every store lists in key order.

Imported only for `s3://` roots: s3fs takes most of a second to load.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any

from ckpt.config import S3Settings, s3_settings
from ckpt.errors import BadInputError, NotFoundError, StorageError
from ckpt.storage.keys import check_key, check_prefix
from ckpt.storage.s3client import RefusedError, S3Client
from ckpt.storage.s3probe import ConditionProbe
from ckpt.storage.s3read import check_inside, fill, head, read_whole
from ckpt.storage.s3upload import ABSENT, ANY, Condition, Upload, same
from ckpt.types import Buffer, ObjectInfo

_MOST_KEY_BYTES = 1024


@dataclass(frozen=True, slots=True)
class UnfinishedUpload:
    """Parts that a writer sent and neither finished nor gave up. They cost money until aborted."""

    key: str
    upload_id: str
    began_s: float


class S3Storage:
    """The store in a client's bucket, below `prefix`. Any thread may call, also after a fork.

    A StorageError of a write leaves open whether the object exists: read it back.
    """

    def __init__(self, client: S3Client, prefix: str = "") -> None:
        self._client = client
        self._prefix = f"{check_key(prefix)}/" if prefix else ""
        self._probe = ConditionProbe(client, self._prefix)

    @classmethod
    def at(cls, url: str, settings: S3Settings | None = None) -> S3Storage:
        """The store at s3://bucket/prefix. Nothing in the URL is decoded: keys are what it says."""
        bucket, _, prefix = url.partition("://")[2].partition("/")
        prefix = prefix.removesuffix("/")
        if prefix.startswith("/") or "//" in prefix or prefix.endswith("/"):
            plain = "/".join(part for part in (bucket, *prefix.split("/")) if part)
            raise BadInputError(f"{url}: empty part between slashes; write s3://{plain}")
        return cls(S3Client(bucket, settings or s3_settings()), prefix)

    def __reduce__(self) -> tuple[type[S3Storage], tuple[Any, ...]]:
        return S3Storage, (self._client, self._prefix.removesuffix("/"))

    @property
    def url(self) -> str:
        return self._client.where(self._prefix.removesuffix("/"))

    @property
    def upload_bytes(self) -> int:
        """Of the first 1,000 parts: later ones grow, so that 10,000 are enough."""
        settings = self._client.settings
        return (settings.parallel + 1) * settings.part_bytes

    def probe(self) -> bool:
        found = self._client.run(self._probe.ask())
        return found.create and found.replace

    def above(self) -> Iterator[tuple[S3Storage, str]]:
        """Each prefix that the root lies in, the nearest first, and the root's place there."""
        parts = self._prefix.removesuffix("/").split("/")
        for n in range(len(parts) - 1, -1, -1):
            if parts[n]:
                yield S3Storage(self._client, "/".join(parts[:n])), "/".join(parts[n:])

    def check_exists(self) -> None:
        """Raise NotFoundError if there is no bucket, or nothing at all under the prefix."""
        page = self._client.run(
            self._client.call("list_objects_v2", {"Prefix": self._prefix, "MaxKeys": 1})
        )
        if not page.get("Contents"):
            raise NotFoundError(f"{self.url}: nothing there; check the bucket and the prefix")

    def time_s(self) -> float:
        """Seconds since 1970 by the store's clock, now, to whole seconds."""
        page = self._client.run(
            self._client.call("list_objects_v2", {"Prefix": self._prefix, "MaxKeys": 1})
        )
        said = str(page["ResponseMetadata"]["HTTPHeaders"].get("date", ""))
        try:
            return parsedate_to_datetime(said).timestamp()
        except ValueError:
            raise StorageError(
                f"{self.url}: answers with the Date {said!r}, which is none"
            ) from None

    def put(self, key: str, data: Buffer) -> ObjectInfo:
        return self._write(key, data, ANY)

    def create(self, key: str, data: Buffer) -> ObjectInfo:
        return self._write(key, data, ABSENT)

    def replace_if(self, key: str, data: Buffer, etag: str) -> ObjectInfo:
        return self._write(key, data, same(etag))

    @contextmanager
    def writer(self, key: str) -> Iterator[Upload]:
        with self._upload(key, ABSENT) as upload:
            try:
                yield upload
            finally:
                upload.closed = True
            upload.finish()

    def read(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        full = self._key(key)
        self._check_range(full, start, length)
        if length is None and start == 0:
            return self._client.run(read_whole(self._client, full))
        if length is None or length > self._client.settings.part_bytes:
            size = self.stat(key).size_bytes
            length = max(0, size - start) if length is None else length
            check_inside(self._client.where(full), start, length, size)  # before it is allocated
        buffer = bytearray(length)
        self.read_into(key, start, memoryview(buffer))
        return bytes(buffer)

    def read_into(self, key: str, start: int, buffer: memoryview) -> None:
        full = self._key(key)
        self._check_range(full, start, None)
        if not buffer.nbytes:  # S3 has no empty ranges
            check_inside(self._client.where(full), start, 0, self.stat(key).size_bytes)
            return
        self._client.run(fill(self._client, full, start, buffer.cast("B")))

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        check_prefix(prefix)
        return self._list(prefix)

    def stat(self, key: str) -> ObjectInfo:
        found = self._client.run(head(self._client, self._key(key)))
        return ObjectInfo(key, int(found["ContentLength"]), str(found["ETag"]))

    def delete(self, key: str) -> None:
        call = self._client.call("delete_object", {"Key": self._key(key)}, expect=(404,))
        try:
            self._client.run(call)
        except RefusedError:
            return

    def unfinished(self, prefix: str = "") -> Iterator[UnfinishedUpload]:
        """Uploads under way below this root, those of killed writers among them."""
        check_prefix(prefix)
        marker: dict[str, str] = {}
        while True:
            params = {"Prefix": self._prefix + prefix, **marker}
            try:
                page = self._client.run(self._client.call("list_multipart_uploads", params))
            except NotFoundError:
                # SeaweedFS denies that there is a bucket until it has seen an upload.
                self._client.run(self._client.call("list_objects_v2", {"MaxKeys": 1}))
                return
            for found in page.get("Uploads", ()):
                key, began = found["Key"].removeprefix(self._prefix), found["Initiated"]
                yield UnfinishedUpload(key, found["UploadId"], began.timestamp())
            if not page.get("IsTruncated"):
                return
            marker = {
                "KeyMarker": page["NextKeyMarker"],
                "UploadIdMarker": page["NextUploadIdMarker"],
            }

    def abort(self, upload: UnfinishedUpload) -> None:
        """Drop an unfinished upload's parts; if its writer is alive, its write fails."""
        params = {"Key": self._key(upload.key), "UploadId": upload.upload_id}
        try:
            self._client.run(self._client.call("abort_multipart_upload", params, expect=(404,)))
        except RefusedError:
            return

    def _key(self, key: str) -> str:
        full = self._prefix + check_key(key)
        if len(full.encode()) > _MOST_KEY_BYTES:
            raise BadInputError(
                f"{self._client.where(full)[:120]}...: the key has {len(full.encode())} bytes with "
                f"the root's prefix, S3 takes {_MOST_KEY_BYTES}; use a shorter root"
            )
        return full

    def _check_range(self, full: str, start: int, length: int | None) -> None:
        if start < 0 or (length is not None and length < 0):
            raise BadInputError(f"{self._client.where(full)}: range {start}+{length} is negative")

    @contextmanager
    def _upload(self, key: str, condition: Condition) -> Iterator[Upload]:
        upload = Upload(self._client, self._key(key), condition, self._probe)
        try:
            yield upload
        except BaseException:
            upload.abort()
            raise

    def _write(self, key: str, data: Buffer, condition: Condition) -> ObjectInfo:
        with self._upload(key, condition) as upload:
            upload.write(data)
            return ObjectInfo(key, upload.size_bytes, upload.finish())

    def _list(self, prefix: str) -> Iterator[ObjectInfo]:
        found = self._client.run(self._all(self._prefix + prefix))
        yield from sorted(found, key=lambda info: info.key)

    async def _all(self, prefix: str) -> Sequence[ObjectInfo]:
        found: list[ObjectInfo] = []
        more: dict[str, str] = {}
        while True:
            page = await self._client.call("list_objects_v2", {"Prefix": prefix, **more})
            for item in page.get("Contents", ()):
                key = item["Key"].removeprefix(self._prefix)
                if _is_key(key):
                    found.append(ObjectInfo(key, int(item["Size"]), item.get("ETag", "")))
            if not page.get("IsTruncated"):
                return found
            more = {"ContinuationToken": page["NextContinuationToken"]}


def _is_key(key: str) -> bool:
    """False for what another tool put there under a name that no key of ours can have."""
    try:
        check_key(key)
    except BadInputError:
        return False
    return True
