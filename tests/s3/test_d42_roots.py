"""D42 (s3-connector-for-pytorch#295): any legal bucket and prefix works, or is refused at once."""

from __future__ import annotations

import secrets
from pathlib import Path

import pytest
import torch

from ckpt import Checkpointer
from ckpt.catalog import Catalog
from ckpt.errors import BadInputError, NotFoundError
from ckpt.storage import open_storage
from tests.s3.server import SeaweedFS


def save_and_restore(url: str) -> None:
    with Checkpointer(url) as checkpointer:
        checkpointer.save(7, {"w": torch.arange(5)}).committed.result(60)
    storage = open_storage(url, must_exist=True)
    latest = Catalog(storage).latest()
    assert latest is not None
    assert latest.ref.step == 7
    state = {"w": torch.zeros(5, dtype=torch.int64)}
    with Checkpointer(storage) as checkpointer:
        checkpointer.restore(state)
    assert state["w"].tolist() == [0, 1, 2, 3, 4]
    keys = [info.key for info in storage.list()]
    assert keys
    for key in keys:
        storage.delete(key)
    assert list(storage.list()) == []


@pytest.fixture
def endpoint(seaweedfs: SeaweedFS, monkeypatch: pytest.MonkeyPatch) -> SeaweedFS:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", seaweedfs.endpoint)
    return seaweedfs


@pytest.mark.parametrize("prefix", ["/", "/a b", "/a[1]", "/é", "/100%25#?*/x/"])
def test_d42_s3(endpoint: SeaweedFS, prefix: str) -> None:
    bucket = f"d42-{secrets.token_hex(6)}"
    endpoint.make_bucket(bucket)
    save_and_restore(f"s3://{bucket}{prefix}")


def test_d42_a_bucket_with_dots(endpoint: SeaweedFS) -> None:
    endpoint.make_bucket("my.bucket.d42")
    save_and_restore("s3://my.bucket.d42")


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("s3://bucket//x/", "empty part between slashes; write s3://bucket/x"),
        ("s3://bucket/x//", "write s3://bucket/x"),
        ("s3://bucket/a//b", "write s3://bucket/a/b"),
        ("s3://bucket/a/../b", "no part between slashes may be"),
        ("s3://", "bucket '': give its name"),
        ("s3:///x", "bucket '': give its name"),
        ("s3://user@bucket/x", "give its name"),
        ("s3://-bucket/x", "give its name"),
        ("s3://bu cket/x", "give its name"),
        ("s3://arn:aws:s3:eu-west-1:1:accesspoint/a", "access point's alias"),
    ],
)
def test_d42_what_is_refused_at_construction(url: str, words: str) -> None:
    with pytest.raises(BadInputError, match=words):
        open_storage(url)


def test_d42_a_prefix_that_leaves_no_room_for_keys(credentials: None) -> None:
    storage = open_storage("s3://bucket/" + "/".join(["x" * 200] * 5))
    with pytest.raises(BadInputError, match="has 1025 bytes with the root's prefix"):
        storage.create("y" * 20, b"")


def test_d42_a_root_that_must_exist(endpoint: SeaweedFS) -> None:
    with pytest.raises(
        NotFoundError, match="s3://no-such-bucket-d42/x: can't list: no such bucket"
    ):
        open_storage("s3://no-such-bucket-d42/x", must_exist=True)
    with pytest.raises(NotFoundError, match="s3://ckpt/no/such: nothing there"):
        open_storage("s3://ckpt/no/such", must_exist=True)


@pytest.mark.parametrize("name", ["dir with space", "trailing/", "a[1]", "é", "./relative", "~/x"])
def test_d42_local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    save_and_restore(name)
