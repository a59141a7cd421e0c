"""A writer that is killed, and a server that is."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from ckpt.config import MIB, S3Settings
from ckpt.errors import NotFoundError
from ckpt.storage.s3 import S3Storage
from ckpt.storage.s3client import S3Client
from tests import warm
from tests.s3.server import BUCKET, SeaweedFS

WRITER = """
import sys
from ckpt.storage import open_storage

with open_storage(sys.argv[1]).writer("k") as out:
    out.write(b"x" * (40 << 20))   # more than may be on its way: the first part has arrived
    print("under way", flush=True)
    sys.stdin.read()
"""


def test_a_killed_writer_leaves_no_object(
    seaweedfs: SeaweedFS, root: str, storage: S3Storage
) -> None:
    env = {
        **os.environ,
        "SIDESTAGE_S3_ENDPOINT": seaweedfs.endpoint,
        "SIDESTAGE_S3_PARALLEL": "1",
    }
    writer = warm.Popen(
        [sys.executable, "-c", WRITER, f"s3://{BUCKET}/{root}"],
        env=env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "under way\n"
    finally:
        writer.kill()
        writer.communicate()
    with pytest.raises(NotFoundError):
        storage.stat("k")
    assert list(storage.list()) == []
    (left,) = storage.unfinished()
    assert left.key == "k"
    storage.create("k", b"free")
    storage.abort(left)
    storage.abort(left)
    assert list(storage.unfinished()) == []
    assert storage.read("k") == b"free"


@pytest.mark.crash
def test_a_server_that_restarts_during_a_write_delays_it(
    tmp_path: Path, seaweedfs: SeaweedFS
) -> None:
    """`seaweedfs` only for the credentials: the server that is killed is another one."""
    data = random.Random(5).randbytes(20 * MIB)
    server = SeaweedFS(tmp_path / "server")
    server.start()
    try:
        settings = S3Settings(server.endpoint, "us-east-1", part_bytes=5 * MIB)
        storage = S3Storage(S3Client(BUCKET, settings), "run")
        storage.create("before", b"1")
        with storage.writer("k") as out:
            out.write(data[: 11 * MIB])
            server.kill()
            out.write(data[11 * MIB : 16 * MIB])
            server.start()
            out.write(data[16 * MIB :])
        assert storage.read("k") == data
        assert storage.read("before") == b"1"
        assert list(storage.unfinished()) == []
    finally:
        server.kill()
