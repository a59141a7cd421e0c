"""What is sent: settings, pages, parts and ranges; and what isn't imported for a local root."""

from __future__ import annotations

import pickle
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ckpt.config import MIB, S3Settings, s3_settings
from ckpt.errors import BadInputError, CorruptError, StorageError
from ckpt.storage import Storage, open_storage
from ckpt.storage.s3 import S3Storage
from ckpt.storage.s3client import S3Client
from tests.s3.fake import BUCKET, QUICK, FakeS3


def test_a_local_root_imports_no_s3_client(tmp_path: Path) -> None:
    code = (
        "import sys; from ckpt.storage import open_storage; from ckpt.catalog import Catalog\n"
        f"list(open_storage({str(tmp_path)!r}).list())\n"
        "from ckpt.cli import main\n"
        f"sys.argv = ['ckpt', 'ls', {str(tmp_path)!r}]\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "print(sorted({'s3fs', 'fsspec', 'botocore', 'aiohttp', 'torch'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr


@pytest.mark.usefixtures("credentials")
class TestSettings:
    def test_from_the_environment(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with FakeS3() as server:
            monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
            monkeypatch.setenv("SIDESTAGE_S3_ENDPOINT", str(server.settings.endpoint))
            monkeypatch.setenv("AWS_REGION", "eu-north-1")
            monkeypatch.delenv("AWS_DEFAULT_REGION", raising=False)
            monkeypatch.setenv("SIDESTAGE_S3_ENCRYPTION", "aws:kms")
            monkeypatch.setenv("SIDESTAGE_S3_KMS_KEY", "alias/mine")
            monkeypatch.setenv("SIDESTAGE_S3_PART_BYTES", str(5 * MIB))
            storage = open_storage(f"s3://{BUCKET}/run")
            storage.create("small", b"x")
            storage.create("large", b"x" * 6 * MIB)
            small, began = server.seen("PUT", "/small")[0], server.seen("POST", "uploads")[0]
            for request in (small, began):
                assert request.headers["x-amz-server-side-encryption"] == "aws:kms"
                assert (
                    request.headers["x-amz-server-side-encryption-aws-kms-key-id"] == "alias/mine"
                )
                assert "/eu-north-1/s3/" in request.headers["Authorization"]
            assert len(server.seen("PUT", "partNumber")) == 2

    def test_bytes_arrive_with_a_checksum_that_the_store_can_check(self) -> None:
        with FakeS3() as server:
            server.storage().create("k", b"x")
            assert server.requests[0].headers["x-amz-checksum-crc32"]

    def test_a_storage_goes_to_another_process(self) -> None:
        with FakeS3() as server:
            storage = server.storage("run")
            storage.create("k", b"x")
            copy = pickle.loads(pickle.dumps(storage))
            assert isinstance(copy, Storage)
            assert (copy.url, copy.read("k")) == (storage.url, b"x")


@pytest.mark.usefixtures("credentials")
class TestPages:
    def test_all_are_listed(self) -> None:
        with FakeS3(page=3) as server:
            storage = server.storage("run")
            for n in range(10):
                storage.create(f"a/{n}", b"")
            assert [i.key for i in storage.list("a/")] == [f"a/{n}" for n in range(10)]
            assert len(server.seen("GET", "list-type")) == 4

    def test_what_another_tool_put_there_is_passed_over(self) -> None:
        with FakeS3() as server:
            storage = server.storage("run")
            etag = storage.create("a/b", b"x").etag
            foreign = ["run/", "run/a/", "run/a//b", "run/../x", "run/.tmp-1", "runner/a", "z"]
            for key in foreign:
                server.objects[key] = server.objects["run/a/b"]
            assert [(i.key, i.etag) for i in storage.list()] == [("a/b", etag)]


def test_a_real_server_lists_more_than_a_page(storage: S3Storage) -> None:
    keys = [f"n/{n:04d}" for n in range(1003)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda key: storage.put(key, b""), keys))
    assert [info.key for info in storage.list()] == keys


@pytest.mark.usefixtures("credentials")
class TestLongReads:
    def test_go_in_ranges_of_one_version(self) -> None:
        data = random.Random(6).randbytes(12 * MIB)
        with FakeS3() as server:
            storage = server.storage()
            storage.create("k", data)
            assert storage.read("k", 1, 11 * MIB) == data[1 : 1 + 11 * MIB]
            ranges = server.seen("GET", "/k")
            assert len(ranges) == 3
            assert {r.headers["If-Match"] for r in ranges} == {server.objects["k"].etag}
            buffer = bytearray(len(data))
            storage.read_into("k", 0, memoryview(buffer))
            assert buffer == data

    def test_past_the_end_allocate_nothing(self) -> None:
        with FakeS3() as server:
            storage = server.storage()
            storage.create("k", b"x")
            with pytest.raises(CorruptError, match="has 1 bytes"):
                storage.read("k", 0, 1 << 60)

    def test_of_an_object_that_changes_fail(self) -> None:
        with FakeS3() as server:
            storage = server.storage()
            storage.create("k", b"x" * 12 * MIB)
            gate = server.on("GET", "/k").always().block()
            with ThreadPoolExecutor(1) as pool:
                read = pool.submit(storage.read, "k", 0, 12 * MIB)
                gate.wait_reached()
                storage.put("k", b"y" * 12 * MIB)
                gate.open()
                with pytest.raises(StorageError, match="replaced while it was read"):
                    read.result(30)


@pytest.mark.usefixtures("credentials")
class TestParts:
    def test_more_than_s3_takes_are_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("ckpt.storage.s3upload._MOST_PARTS", 2)
        with FakeS3() as server:
            with pytest.raises(BadInputError, match="set SIDESTAGE_S3_PART_BYTES higher"):
                server.storage().create("k", b"x" * 16 * MIB)
            assert (server.objects, server.uploads) == ({}, {})

    def test_they_grow(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("ckpt.storage.s3upload._GROWTH_PARTS", 2)
        with FakeS3() as server:
            data = random.Random(7).randbytes(21 * MIB)
            server.storage().create("k", data)
            sizes = [len(r.body) // MIB for r in server.seen("PUT", "partNumber")]
            assert sorted(sizes) == [1, 5, 5, 10]
            assert server.objects["k"].data == data

    def test_go_one_at_a_time_if_asked(self) -> None:
        with FakeS3() as server:
            settings = replace(server.settings, parallel=1)
            storage = S3Storage(S3Client(BUCKET, settings, QUICK))
            storage.create("k", b"x" * 16 * MIB)
            parts = [r.target for r in server.seen("PUT", "partNumber")]
            assert len(parts) == 4
            assert all(f"partNumber={n}" in target for n, target in enumerate(parts, 1))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"endpoint": "host:9000"}, "S3 endpoint 'host:9000': give a URL"),
        ({"endpoint": "ftp://host"}, "give a URL such as https://"),
        ({"endpoint": "http://"}, "give a URL"),
        ({"endpoint": "http://host:port"}, "give a URL"),
        ({"addressing": "host"}, "S3 addressing = 'host': use one of auto, path, virtual"),
        ({"encryption": "rot13"}, "S3 encryption = 'rot13': use one of AES256, aws:kms"),
        ({"kms_key": "k"}, "set encryption to aws:kms"),
        ({"kms_key": "k", "encryption": "AES256"}, "set encryption to aws:kms"),
        ({"part_bytes": 1}, "S3 part_bytes = 1: give 5242880"),
        ({"part_bytes": 1 << 30}, "part_bytes"),
        ({"parallel": 0}, "S3 parallel = 0: give 1 to 64"),
    ],
)
def test_settings_are_checked(change: dict[str, Any], words: str) -> None:
    with pytest.raises(BadInputError, match=words):
        S3Settings(**change)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("PART_BYTES", "16MiB", "SIDESTAGE_S3_PART_BYTES = '16MiB': give a whole number"),
        ("PARALLEL", "-1", "SIDESTAGE_S3_PARALLEL = '-1': give a whole number"),
        ("ENDPOINT", "host", "give a URL"),
    ],
)
def test_the_environment_is_checked_when_a_root_is_opened(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, words: str
) -> None:
    monkeypatch.setenv(f"SIDESTAGE_S3_{name}", value)
    with pytest.raises(BadInputError, match=words):
        open_storage("s3://bucket/run")


def test_an_empty_variable_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ENDPOINT", "REGION", "ENCRYPTION", "PARALLEL"):
        monkeypatch.setenv(f"SIDESTAGE_S3_{name}", "")
    monkeypatch.delenv("AWS_REGION", raising=False)
    assert s3_settings() == S3Settings()
