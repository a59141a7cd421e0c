"""The S3 server that the storage contract and the S3 tests share: one for the whole test run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.s3.server import ACCESS_KEY, SECRET_KEY, SeaweedFS


@pytest.fixture(scope="session")
def seaweedfs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SeaweedFS]:
    """A running server with an empty bucket, and credentials for it in the environment."""
    server = SeaweedFS(tmp_path_factory.mktemp("seaweedfs"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
        patch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        for name in ("AWS_SESSION_TOKEN", "AWS_PROFILE", "AWS_ENDPOINT_URL"):
            patch.delenv(name, raising=False)
        server.start()
        try:
            yield server
        finally:
            server.kill()
