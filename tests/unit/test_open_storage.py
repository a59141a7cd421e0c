from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

from ckpt.errors import BadInputError, NotFoundError, StorageError
from ckpt.storage import BranchedStorage, LocalStorage, open_storage


def test_a_path(tmp_path: Path) -> None:
    for url in (str(tmp_path), tmp_path, f"{tmp_path}/", f"{tmp_path}/x/.."):
        storage = open_storage(url)
        assert isinstance(storage, LocalStorage)
        assert storage.url == str(tmp_path)
        assert open_storage(storage.url).url == storage.url


def test_a_relative_path_is_fixed_when_it_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    storage = open_storage("runs/a b")
    monkeypatch.chdir("/")
    storage.create("k", b"x")
    assert (tmp_path / "runs" / "a b" / "k").read_bytes() == b"x"


def test_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert open_storage("~/runs").url == f"{tmp_path}/runs"
    assert open_storage("~").url == str(tmp_path)
    with pytest.raises(BadInputError, match="no such user"):
        open_storage("~nobody-of-this-name/runs")


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("file://{}/run", "{}/run"),
        ("file://localhost{}/run", "{}/run"),
        ("FILE://{}/a%20b", "{}/a b"),
        ("file:{}/a%20b", "{}/a b"),
        ("File:{}/run", "{}/run"),
        ("{}/a%20b", "{}/a%20b"),
        ("{}/odd: name#1?x=[é]", "{}/odd: name#1?x=[é]"),
    ],
)
def test_file_urls_are_decoded_and_paths_are_not(tmp_path: Path, url: str, path: str) -> None:
    assert open_storage(url.format(tmp_path)).url == path.format(tmp_path)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("gs://bucket/run", "'gs' isn't supported; give a path, file:///path or s3://bucket"),
        ("https://host/run", "'https' isn't supported"),
        ("memory://x", r"MemoryStorage\(\)"),
        ("file://relative/run", "absolute path"),
        ("file://", "absolute path"),
        ("", "not a path"),
        ("a\0b", "not a path"),
    ],
)
def test_what_is_not_supported_says_what_is(url: str, words: str) -> None:
    with pytest.raises(BadInputError, match=words):
        open_storage(url)


def test_a_missing_folder(tmp_path: Path) -> None:
    path = tmp_path / "missing"
    assert list(open_storage(path).list()) == []
    with pytest.raises(NotFoundError, match=f"{path}: no such folder"):
        open_storage(path, must_exist=True)
    assert not path.exists()


@pytest.mark.parametrize("below", ["", "/run"])
def test_a_file_in_its_place(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(BadInputError, match="is a file"):
        open_storage(f"{tmp_path}/file{below}")


def test_no_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(StorageError, match=f"{tmp_path}: can't be read: Permission denied; check"):
        open_storage(tmp_path)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("s3:/bucket/x", "write s3://bucket/x. A folder of that name is ./s3:/bucket/x"),
        ("S3:/bucket/x", "write s3://bucket/x"),
        ("s3:bucket/x", "write s3://bucket/x"),
        ("s3//bucket/x", "write s3://bucket/x"),
        ("s3:\\\\bucket\\x", "write s3://bucket"),
        ("file:run", "write file:///run"),
        ("file//run", "write file:///run"),
        ("gs:/bucket/x", "give a path, file:///path or s3://bucket/path"),
        ("https:/host/x", "neither a path nor a URL"),
        ("abfss:x@y/z", "neither a path nor a URL"),
        (" s3://bucket/x", "begins or ends with white space"),
        ("s3://bucket/x ", "begins or ends with white space"),
        ("/runs/x\n", "begins or ends with white space"),
        ("  ", "begins or ends with white space"),
        (Path("s3://bucket/x"), "write s3://bucket/x as text: a pathlib.Path drops slashes"),
        (Path("gs://bucket/x"), "as text: a pathlib.Path drops slashes"),
        ("S3://", "give its name"),
        ("S3:///bucket", "give its name"),
    ],
)
def test_what_was_meant_for_a_url_makes_no_folder(
    url: str | Path, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadInputError, match=re.escape(words)):
        open_storage(url)
    assert not list(tmp_path.iterdir())


def test_any_folder_can_be_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("./s3:/bucket/x", "s3/bucket", "s3", "runs:2026/x", "a=b:c", f"{tmp_path}/s3:/x"):
        assert open_storage(name).url == str((tmp_path / name).absolute())
    assert open_storage(Path("file:///runs/x")).url == "/runs/x"
    assert isinstance(open_storage("S3://bucket/x"), BranchedStorage)
