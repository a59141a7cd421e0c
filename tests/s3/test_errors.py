"""What goes wrong with a store, each said in one line with what to do."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ckpt.config import S3Settings
from ckpt.errors import (
    BadInputError,
    DeadlineError,
    NotFoundError,
    SidestageError,
    StorageError,
)
from ckpt.storage.s3 import S3Storage
from ckpt.storage.s3client import S3Client
from ckpt.storage.s3connection import Patience
from tests.s3.fake import BUCKET as FAKE_BUCKET
from tests.s3.fake import QUICK, FakeS3
from tests.s3.server import BUCKET, SeaweedFS


def failure(storage: S3Storage) -> SidestageError:
    with pytest.raises(SidestageError) as caught:
        storage.create("a/b", b"x")
    assert "\n" not in str(caught.value)
    return caught.value


class TestRealAnswers:
    def test_no_such_bucket(self, seaweedfs: SeaweedFS) -> None:
        storage = S3Storage(S3Client("no-such-bucket", seaweedfs.settings), "run")
        for call in (
            lambda: storage.create("k", b""),
            lambda: storage.read("k"),
            lambda: list(storage.list()),
            lambda: storage.create("large", b"x" * (17 << 20)),
            storage.probe,
        ):
            with pytest.raises(NotFoundError, match="s3://no-such-bucket.*no such bucket at http"):
                call()

    def test_a_wrong_secret(self, seaweedfs: SeaweedFS, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
        error = failure(S3Storage(S3Client(BUCKET, seaweedfs.settings), "run"))
        assert isinstance(error, StorageError)
        assert str(error).startswith(f"s3://{BUCKET}/run/a/b: can't write: ")
        assert "check AWS_SECRET_ACCESS_KEY" in str(error)

    def test_an_unknown_key(self, seaweedfs: SeaweedFS, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "unknown")
        error = failure(S3Storage(S3Client(BUCKET, seaweedfs.settings), "run"))
        assert "doesn't know these credentials (InvalidAccessKeyId)" in str(error)

    def test_no_credentials(
        self, seaweedfs: SeaweedFS, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.delenv(name)
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
        monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
        error = failure(S3Storage(S3Client(BUCKET, seaweedfs.settings), "run"))
        assert "no credentials" in str(error)
        assert "set AWS_PROFILE" in str(error)

    def test_the_command_says_it_in_one_line(self, seaweedfs: SeaweedFS) -> None:
        env = {**os.environ, "AWS_ENDPOINT_URL": seaweedfs.endpoint}
        done = subprocess.run(
            [sys.executable, "-m", "ckpt.cli", "ls", "s3://no-such-bucket/run"],
            cwd=Path(__file__).parents[2],
            env=env,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == NotFoundError.exit_code
        assert "s3://no-such-bucket" in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.usefixtures("credentials")
class TestAnswers:
    @pytest.mark.parametrize(
        ("status", "code", "kind", "words"),
        [
            (403, "AccessDenied", StorageError, "allow s3:PutObject"),
            (403, "SignatureDoesNotMatch", StorageError, "check AWS_SECRET_ACCESS_KEY"),
            (403, "RequestTimeTooSkewed", StorageError, "set this machine's clock"),
            (400, "KeyTooLongError", BadInputError, "choose another root"),
            (403, "QuotaExceeded", StorageError, "make room"),
            (507, "XMinioStorageFull", StorageError, "make room"),
            (400, "Strange", StorageError, "HTTP 400 Strange: said so"),
        ],
    )
    def test_refusals_are_not_repeated(
        self, status: int, code: str, kind: type[SidestageError], words: str
    ) -> None:
        with FakeS3() as server:
            server.on("PUT").always().answer(status, code)
            error = failure(server.storage("run"))
            assert isinstance(error, kind)
            assert str(error).startswith("s3://fake/run/a/b: can't write: ")
            assert words in str(error)
            # The one that another set of credentials may mend is tried with it, once.
            assert len(server.requests) == (2 if code == "SignatureDoesNotMatch" else 1)

    @pytest.mark.parametrize(
        ("call", "action"),
        [
            (lambda s: s.read("k"), "s3:GetObject and s3:ListBucket"),
            (lambda s: s.stat("k"), "s3:GetObject and s3:ListBucket"),
            (lambda s: list(s.list()), "s3:ListBucket"),
            (lambda s: s.delete("k"), "s3:DeleteObject"),
        ],
    )
    def test_access_denied_names_the_action_to_allow(self, call: object, action: str) -> None:
        with FakeS3() as server:
            for method in ("GET", "HEAD", "DELETE"):
                server.on(method).always().answer(403, "AccessDenied")
            with pytest.raises(StorageError, match=f"AccessDenied.*allow {action} there"):
                call(server.storage())  # type: ignore[operator]

    def test_a_denied_read_of_nothing_is_not_found(self) -> None:
        """AWS answers 403 for what isn't there to those who may list only below a prefix."""
        with FakeS3() as server:
            storage = server.storage("run")
            storage.create("k/2", b"x")
            server.on("GET", "/run/k").always().answer(403, "AccessDenied")
            server.on("HEAD", "/run/k").always().answer(403, "AccessDenied")
            for call in (storage.read, storage.stat):
                with pytest.raises(NotFoundError, match="s3://fake/run/k: no such object"):
                    call("k")
                with pytest.raises(StorageError, match="access denied"):
                    call("k/2")

    def test_an_outage_is_sat_out(self) -> None:
        with FakeS3() as server:
            for answer in ((500, "InternalError"), (503, "SlowDown"), (502, "BadGateway")):
                server.on("PUT").answer(*answer)
            server.storage().create("k", b"x")
            assert len(server.requests) == 4

    def test_an_outage_that_lasts_is_reported(self) -> None:
        with FakeS3() as server:
            server.on("PUT").always().answer(503, "ServiceUnavailable")
            error = failure(server.storage(patience=QUICK))
            assert "HTTP 503 ServiceUnavailable" in str(error)

    def test_a_throttled_call_says_so(self) -> None:
        with FakeS3() as server:
            server.on("PUT").always().answer(503, "SlowDown")
            assert "throttles" in str(failure(server.storage(patience=QUICK)))

    def test_a_body_that_is_no_xml(self) -> None:
        with FakeS3() as server:
            server.on("GET", "list-type").always().answer(400, "<")
            with pytest.raises(StorageError, match="s3://fake: can't list"):
                list(server.storage().list())


@pytest.mark.usefixtures("credentials")
class TestUnreachable:
    def test_within_fifteen_seconds(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
        began_s = time.monotonic()
        settings = S3Settings(f"http://127.0.0.1:{port}")
        error = failure(S3Storage(S3Client(BUCKET, settings)))
        assert time.monotonic() - began_s < 15.0
        assert isinstance(error, StorageError)
        assert f"http://127.0.0.1:{port} can't be reached" in str(error)
        assert "check SIDESTAGE_S3_ENDPOINT" in str(error)

    def test_a_name_that_does_not_resolve(self) -> None:
        settings = S3Settings("http://no-such-host.invalid")
        patience = Patience(connect_s=1.0, first_s=2.5)
        error = failure(S3Storage(S3Client(BUCKET, settings, patience)))
        assert "http://no-such-host.invalid can't be reached" in str(error)

    def test_one_that_never_answers(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            settings = S3Settings(f"http://127.0.0.1:{listener.getsockname()[1]}")
            patience = Patience(attempt_s=0.5, first_s=0.4)
            error = failure(S3Storage(S3Client(FAKE_BUCKET, settings, patience)))
        assert isinstance(error, DeadlineError)
        assert "no answer from http://127.0.0.1" in str(error)

    def test_one_that_does_not_speak_tls(self) -> None:
        with FakeS3() as server:
            endpoint = str(server.settings.endpoint).replace("http:", "https:")
            error = failure(S3Storage(S3Client(FAKE_BUCKET, S3Settings(endpoint), QUICK)))
        assert endpoint in str(error)

    def test_a_store_that_goes_away(self) -> None:
        with FakeS3() as server:
            storage = server.storage(patience=QUICK)
            storage.create("k", b"x")
        assert "can't be reached" in str(failure(storage))
