"""Reading objects from S3: whole, or ranges of them, each range into a buffer that is there."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any

from ckpt.config import MIB
from ckpt.errors import CorruptError, NotFoundError, StorageError
from ckpt.storage.s3client import RefusedError, Response, S3Client


async def head(client: S3Client, key: str) -> Response:
    """An object's attributes; NotFoundError if there is none."""
    try:
        return await client.call("head_object", {"Key": key}, expect=(404,))
    except RefusedError:
        raise _missing(client, key) from None


async def read_whole(client: S3Client, key: str) -> bytes:
    """All bytes of an object; the client checks their checksum if the store kept one."""

    async def take(response: Response) -> bytes | int:
        size = int(response["ContentLength"])
        if size > client.settings.part_bytes:
            response["Body"].close()
            return size
        data: bytes = await response["Body"].read()
        return data

    try:
        found = await client.receive("get_object", {"Key": key}, take, expect=(404,))
    except RefusedError:
        raise _missing(client, key) from None
    if isinstance(found, bytes):
        return found
    buffer = bytearray(found)
    await fill(client, key, 0, memoryview(buffer))
    return bytes(buffer)


async def fill(client: S3Client, key: str, start: int, view: memoryview) -> None:
    """Fill `view` from byte `start` on, in several requests side by side if it is long."""
    step = client.settings.part_bytes
    if len(view) <= step:
        await _fill_part(client, key, start, view, {})
        return
    found = await head(client, key)
    check_inside(client.where(key), start, len(view), int(found["ContentLength"]))
    version = {"IfMatch": found["ETag"]}  # all parts of one version, or none
    slots = asyncio.Semaphore(client.settings.parallel)

    async def part(at: int) -> None:
        async with slots:
            await _fill_part(client, key, start + at, view[at : at + step], version)

    await _together([part(at) for at in range(0, len(view), step)])


def check_inside(where: str, start: int, length: int, size: int) -> None:
    """Raise CorruptError for a range that passes the end of an object of `size` bytes."""
    if start + length > size:
        raise CorruptError(
            f"{where}: has {size} bytes, but bytes [{start}, {start + length}) were asked for"
        )


async def _fill_part(
    client: S3Client, key: str, start: int, view: memoryview, version: Mapping[str, str]
) -> None:
    where = client.where(key)

    async def take(response: Response) -> None:
        size = _total_bytes(str(response.get("ContentRange", "")))
        if size is None:
            raise StorageError(
                f"{where}: the store answered a ranged read without a range; use another store"
            )
        check_inside(where, start, len(view), size)
        await _receive(response["Body"], view)

    params = {"Key": key, "Range": f"bytes={start}-{start + len(view) - 1}", **version}
    try:
        await client.receive("get_object", params, take, expect=(404, 412, 416))
    except RefusedError as e:
        if e.status == 404:
            raise _missing(client, key) from None
        if e.status == 412:
            raise StorageError(f"{where}: was replaced while it was read; read it again") from None
        size = _total_bytes(e.headers.get("content-range", ""))
        if size is None:
            size = int((await head(client, key))["ContentLength"])
        check_inside(where, start, len(view), size)
        raise StorageError(
            f"{where}: bytes [{start}, {start + len(view)}) of {size} were refused; try again"
        ) from None


def _missing(client: S3Client, key: str) -> NotFoundError:
    return NotFoundError(f"{client.where(key)}: no such object")


def _total_bytes(content_range: str) -> int | None:
    """The size of the whole object, from an answer's Content-Range."""
    total = content_range.rpartition("/")[2]
    return int(total) if total.isdecimal() else None


async def _receive(body: Any, view: memoryview) -> None:
    """Read a body that must be as long as `view`; anything else is a broken connection."""
    done = 0
    while piece := await body.read(MIB):
        if done + len(piece) > len(view):
            break
        view[done : done + len(piece)] = piece
        done += len(piece)
    if piece or done != len(view):
        raise ConnectionError(f"another number of bytes came than the {len(view)} asked for")


async def _together(works: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Run all; if one fails, stop the others, wait until they have stopped, and raise."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        # Until then they may still write into the caller's buffer.
        await asyncio.gather(*tasks, return_exceptions=True)
