"""D41 (ray#35519): a process-wide client kept credentials that had expired."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from ckpt import Checkpointer
from ckpt.catalog import Catalog
from ckpt.errors import StorageError
from tests.s3.fake import FakeS3


class CredentialsFile:
    """The usual file, as a rotating agent writes it."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, token: str) -> None:
        self._path.write_text(
            "[default]\naws_access_key_id = key\naws_secret_access_key = secret\n"
            f"aws_session_token = {token}\n"
        )


@pytest.fixture
def file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, credentials: None) -> CredentialsFile:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    return CredentialsFile(tmp_path / "credentials")


def test_d41_a_save_takes_up_new_credentials(file: CredentialsFile) -> None:
    file.write("A")
    with FakeS3(tokens={"A"}) as server, Checkpointer(server.storage()) as checkpointer:
        state = {"w": torch.arange(4)}
        for step in (1, 2):
            checkpointer.save(step, state).committed.result(60)
        server.tokens = {"B"}
        file.write("B")
        checkpointer.save(3, state).committed.result(60)
        latest = Catalog(server.storage()).latest()
        assert latest is not None
        assert latest.ref.step == 3


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (403, "InvalidTokenId"),  # MinIO
        (403, "AccessDenied"),  # Ceph
        (403, "InvalidSecurity"),  # Google's interface for S3 clients
        (401, "Unauthorized"),  # Cloudflare R2
        (403, "SecurityTokenExpired"),  # Alibaba
        (400, "TokenRefreshRequired"),
        (403, "WordOfNoStoreWeKnow"),
    ],
)
def test_d41_whatever_the_store_calls_it_new_credentials_are_taken_up(
    file: CredentialsFile, status: int, code: str
) -> None:
    """E63: MinIO's word for a session token that it doesn't take is InvalidTokenId."""
    file.write("A")
    with FakeS3(tokens={"A"}, other_token=(status, code)) as server:
        storage = server.storage()
        storage.put("k", b"x")
        server.tokens = {"B"}
        file.write("B")
        with ThreadPoolExecutor(4) as pool:  # all are refused, and share one renewal
            assert list(pool.map(storage.read, ["k"] * 4)) == [b"x"] * 4
        assert storage.stat("k").size_bytes == 1
        storage.put("k", b"xx")
        assert [info.size_bytes for info in storage.list()] == [2]


def test_d41_a_token_that_the_store_does_not_take_is_told_as_one(file: CredentialsFile) -> None:
    file.write("A")
    with FakeS3(tokens={"B"}, other_token=(403, "InvalidTokenId")) as server:
        with pytest.raises(StorageError, match=r"know these credentials \(InvalidTokenId\); check"):
            server.storage().put("k", b"x")
        assert len(server.requests) == 2


def test_d41_what_is_denied_is_sent_again_only_with_other_credentials(
    file: CredentialsFile,
) -> None:
    """Who may not delete is told so at once, and the chain isn't asked for each object."""
    file.write("A")
    with FakeS3() as server:
        server.on("DELETE").always().answer(403, "AccessDenied")
        storage = server.storage()
        for key in ("a", "b"):
            with pytest.raises(StorageError, match="AccessDenied.*allow s3:DeleteObject there"):
                storage.delete(key)
        assert len(server.requests) == 2


def test_d41_without_new_credentials_a_save_fails_and_training_goes_on(
    file: CredentialsFile,
) -> None:
    file.write("A")
    with FakeS3(tokens={"A"}) as server, Checkpointer(server.storage()) as checkpointer:
        state = {"w": torch.arange(4)}
        checkpointer.save(1, state).committed.result(60)
        server.tokens = {"B"}
        with pytest.raises(StorageError, match="the session token has expired"):
            checkpointer.save(2, state).committed.result(60)
        file.write("B")
        checkpointer.save(3, state).committed.result(60)
        assert (checkpointer.stats.commits, checkpointer.stats.failed) == (2, 1)


def test_d41_the_chain_is_asked_again_once(file: CredentialsFile) -> None:
    file.write("A")
    with FakeS3(tokens={"B"}) as server:
        with pytest.raises(StorageError, match="s3://fake/k: can't write: the session token"):
            server.storage().put("k", b"x")
        assert len(server.requests) == 2


def test_d41_credentials_that_come_a_moment_late_are_found(file: CredentialsFile) -> None:
    """torchsnapshot#142: with many processes the chain sometimes comes back empty-handed."""
    with FakeS3() as server:
        storage = server.storage()
        with pytest.raises(StorageError, match=r"s3://fake/k: can't write: no credentials"):
            storage.put("k", b"x")
        file.write("A")
        storage.put("k", b"x")
        assert server.objects["k"].data == b"x"


def test_d41_a_stat_learns_why_it_was_refused(file: CredentialsFile) -> None:
    """The answer to a HEAD request has no body that could say "expired"."""
    file.write("A")
    with FakeS3(tokens={"A"}) as server:
        storage = server.storage()
        info = storage.put("k", b"x")
        server.tokens = {"B"}
        file.write("B")
        assert storage.stat("k") == info


def test_d41_calls_under_way_survive_a_renewal(file: CredentialsFile) -> None:
    file.write("A")
    with FakeS3(tokens={"A"}) as server, ThreadPoolExecutor(2) as pool:
        storage = server.storage()
        storage.put("k", b"x")
        gate = server.on("GET", "/k").block()
        slow = pool.submit(storage.read, "k")
        gate.wait_reached()
        server.tokens = {"A", "B"}
        server.on("PUT", "/k2").answer(400, "ExpiredToken")
        file.write("B")
        storage.put("k2", b"y")
        assert server.requests[-1].headers["X-Amz-Security-Token"] == "B"
        gate.open()
        assert slow.result(30) == b"x"
