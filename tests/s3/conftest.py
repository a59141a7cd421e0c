"""A root of its own on the shared server for each test."""

from __future__ import annotations

import secrets
from collections.abc import Callable

import pytest

from ckpt.config import MIB, S3Settings
from ckpt.storage.s3 import S3Storage
from ckpt.storage.s3client import S3Client
from tests.s3.server import BUCKET, SeaweedFS


@pytest.fixture
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some credentials, for servers that check none."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name in ("AWS_SESSION_TOKEN", "AWS_PROFILE", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="session")
def client(seaweedfs: SeaweedFS) -> S3Client:
    """With the smallest parts, so that tests of many parts are short."""
    settings = S3Settings(seaweedfs.endpoint, "us-east-1", part_bytes=5 * MIB)
    return S3Client(BUCKET, settings)


@pytest.fixture
def root() -> str:
    return f"s3/{secrets.token_hex(8)}"


@pytest.fixture
def storage(client: S3Client, root: str) -> S3Storage:
    return S3Storage(client, root)


@pytest.fixture
def through(root: str) -> Callable[[str], S3Storage]:
    """The test's root by way of another endpoint."""

    def make(endpoint: str) -> S3Storage:
        return S3Storage(
            S3Client(BUCKET, S3Settings(endpoint, "us-east-1", part_bytes=5 * MIB)), root
        )

    return make
