from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt.digest import digest_of
from ckpt.errors import CorruptError, UnsupportedFormatError
from ckpt.layout import commit_key
from ckpt.manifest import (
    AttemptRecord,
    CommitRecord,
    Receipt,
    RunRecord,
    canonical,
    commit_ref,
    decode,
    encode,
    seal,
    unseal,
)
from ckpt.storage.memory import MemoryStorage
from ckpt.types import CommitRef, FileEntry
from tests.fake_run import FakeRun

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
counts = st.integers(0, 2**63)
times = st.floats(allow_nan=False, allow_infinity=False)
files = st.lists(st.builds(FileEntry, text, counts, text), max_size=3).map(tuple)
refs = st.none() | st.builds(CommitRef, counts, counts, text)
records = st.one_of(
    st.builds(RunRecord, text, times, text),
    st.builds(AttemptRecord, counts, text, text, counts, times, refs),
    st.builds(
        Receipt,
        epoch=counts,
        attempt_token=text,
        step=counts,
        save_id=text,
        rank=counts,
        world_size=counts,
        plan_id=text,
        parent=refs,
        saved_at_s=times,
        annotations=st.dictionaries(text, text, max_size=3),
        values_digest=text,
        tensor_bytes=counts,
        guarded_bytes=counts,
        copied_bytes=counts,
        copied_tables=st.dictionaries(text, text, max_size=3),
        files=files,
    ),
    st.builds(
        CommitRecord,
        run_id=text,
        epoch=counts,
        attempt_token=text,
        step=counts,
        save_id=text,
        world_size=counts,
        parent=refs,
        continues=refs,
        saved_at_s=times,
        committed_at_s=times,
        tensor_bytes=counts,
        stored_bytes=counts,
        annotations=st.dictionaries(text, text, max_size=3),
        receipts=files,
        files=files,
    ),
)
COMMIT = CommitRecord(
    run_id="run",
    epoch=2,
    attempt_token="token",
    step=300,
    save_id="000001",
    world_size=1,
    parent=CommitRef(1, 200, "xxh3-128:00"),
    continues=CommitRef(1, 200, "xxh3-128:00"),
    saved_at_s=1.5,
    committed_at_s=2.0,
    tensor_bytes=10,
    stored_bytes=20,
    annotations={"note": "é"},
    receipts=(FileEntry("data/r.json", 3, "sha256:00"),),
    files=(FileEntry("data/r.bin", 4, "sha256:11"),),
)


@given(records)
def test_round_trip(record: Any) -> None:
    data = encode(record)
    again = decode(type(record), data, "k")
    assert again == record
    assert type(again) is type(record)
    assert encode(again) == data


@given(records)
def test_any_buffer_decodes(record: Any) -> None:
    data = encode(record)
    for buffer in (bytearray(data), memoryview(data)):
        assert decode(type(record), buffer, "k") == record


def test_every_truncation_is_corrupt() -> None:
    data = encode(COMMIT)
    for n in range(len(data)):
        with pytest.raises(CorruptError, match=r"^some/key: "):
            decode(CommitRecord, data[:n], "some/key")


def test_every_flipped_bit_is_found() -> None:
    data = encode(COMMIT)
    for at in range(len(data)):
        for bit in range(8):
            damaged = bytearray(data)
            damaged[at] ^= 1 << bit
            with pytest.raises((CorruptError, UnsupportedFormatError), match=r"^some/key: "):
                decode(CommitRecord, damaged, "some/key")


@given(st.binary(max_size=200))
def test_any_bytes_give_our_errors(data: bytes) -> None:
    with pytest.raises(CorruptError):
        decode(CommitRecord, data, "k")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=10,
)


@given(json_values)
def test_any_json_gives_our_errors(value: Any) -> None:
    for doc in (value, {"format": 0, "kind": "commit", "body": value, "checksum": value}):
        with pytest.raises(CorruptError):
            decode(CommitRecord, json.dumps(doc).encode(), "k")


@given(st.sampled_from(sorted(vars(COMMIT))), json_values)
def test_a_sealed_record_with_any_field_wrong_gives_our_errors(name: str, value: Any) -> None:
    """A checksum only says that the bytes are as written, not that they were written well."""
    body = {**json.loads(encode(COMMIT))["body"], name: value}
    try:
        data = seal("commit", body)
    except ValueError:
        return  # NaN, or half a surrogate pair: nobody can write that
    problem = ""
    try:
        record = decode(CommitRecord, data, "k")
    except CorruptError as e:
        problem = str(e)
    if problem:
        assert problem.startswith(f"k: {name}")
    else:
        assert encode(record) == data or isinstance(value, int)


@pytest.mark.parametrize("extra", [" ", "\n", "\0", "{}"])
def test_trailing_bytes_are_corrupt(extra: str) -> None:
    with pytest.raises(CorruptError):
        decode(CommitRecord, encode(COMMIT) + extra.encode(), "k")


def test_another_spelling_of_the_same_json_is_corrupt() -> None:
    doc = json.loads(encode(COMMIT))
    for data in (json.dumps(doc), json.dumps(doc, indent=1), encode(COMMIT).decode("utf-8")[:-1]):
        with pytest.raises(CorruptError):
            decode(CommitRecord, data.encode(), "k")


@pytest.mark.parametrize("version", [1, -1, "0", None, 10**30])
def test_another_version_is_named(version: Any) -> None:
    doc = {**json.loads(encode(COMMIT)), "format": version}
    with pytest.raises(
        UnsupportedFormatError, match=f"^k: format version {version!r}, but this version reads 0; i"
    ):
        decode(CommitRecord, canonical(doc), "k")


def test_another_kind_is_named() -> None:
    with pytest.raises(CorruptError, match="k: is a 'commit' record, expected 'run'"):
        decode(RunRecord, encode(COMMIT), "k")


def test_missing_and_extra_fields_are_corrupt() -> None:
    body = json.loads(encode(COMMIT))["body"]
    for changed in ({**body, "more": 1}, {k: v for k, v in body.items() if k != "step"}):
        with pytest.raises(CorruptError, match="a commit record has fields"):
            decode(CommitRecord, seal("commit", changed), "k")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("epoch", -1),
        ("epoch", True),
        ("epoch", 1.0),
        ("epoch", "1"),
        ("step", None),
        ("run_id", 5),
        ("saved_at_s", "now"),
        ("saved_at_s", True),
        ("saved_at_s", 10**400),
        ("parent", {"epoch": 1}),
        ("parent", {"epoch": 1, "step": 2, "digest": 3}),
        ("parent", []),
        ("files", {}),
        ("files", [[]]),
        ("files", [{"key": "k", "size_bytes": -1, "digest": "d"}]),
        ("annotations", {"a": 1}),
        ("annotations", []),
    ],
)
def test_wrong_fields_are_named(name: str, value: Any) -> None:
    body = {**json.loads(encode(COMMIT))["body"], name: value}
    with pytest.raises(CorruptError, match=f"^k: {name}"):
        decode(CommitRecord, seal("commit", body), "k")


@pytest.mark.parametrize("opening", [b"[", b'{"a":', b'{"body":{"a":['])
def test_nesting_bombs_are_corrupt(opening: bytes) -> None:
    for depth in (100, 1000, 5000, 200_000):
        with pytest.raises(CorruptError):
            unseal("commit", opening * depth, "k")


def test_nesting_that_can_be_parsed_and_not_written_again_is_corrupt() -> None:
    for depth in range(800, 1100):
        body = b"[" * depth + b"]" * depth
        doc = b'{"body":{"a":%b},"checksum":"x","format":0,"kind":"commit"}' % body
        with pytest.raises(CorruptError):
            unseal("commit", doc, "k")


@pytest.mark.parametrize(
    "document",
    [
        b'{"body":{"a":NaN},"checksum":"x","format":0,"kind":"commit"}',
        b'{"body":{"a":1e999},"checksum":"x","format":0,"kind":"commit"}',
        b'{"body":{"a":"\\ud800"},"checksum":"x","format":0,"kind":"commit"}',
        b'{"body":{"a":' + b"9" * 5000 + b'},"checksum":"x","format":0,"kind":"commit"}',
        b'{"body":{},"checksum":null,"format":0,"kind":"commit"}',
        b'{"body":{},"format":0,"kind":"commit"}',
    ],
)
def test_odd_json_is_corrupt(document: bytes) -> None:
    with pytest.raises(CorruptError):
        unseal("commit", document, "k")


def test_a_document_without_a_body_is_corrupt() -> None:
    envelope: dict[str, Any] = {"format": 0, "kind": "commit", "body": [1]}
    data = canonical({**envelope, "checksum": digest_of(canonical(envelope))}) + b"\n"
    with pytest.raises(CorruptError, match="is a 'commit' record"):
        unseal("commit", data, "k")


def test_equal_values_have_equal_bytes() -> None:
    assert seal("k", {"b": (1, 2), "a": 1}) == seal("k", {"a": 1, "b": [1, 2]})
    assert canonical({"b": 1, "a": "é"}) == '{"a":"é","b":1}'.encode()


def test_a_reference_names_the_stored_bytes() -> None:
    data = encode(COMMIT)
    assert commit_ref(COMMIT, data) == CommitRef(2, 300, digest_of(data))


def test_a_commit_of_an_earlier_version_does_not_say_what_its_attempt_continued() -> None:
    storage = MemoryStorage()
    ref = FakeRun(storage).commit(1, 10)
    key = commit_key(ref.epoch, ref.step)
    body = unseal(CommitRecord.KIND, storage.read(key), key)
    del body["continues"]
    old = decode(CommitRecord, seal(CommitRecord.KIND, body), key)
    assert old.continues is None
    assert old.step == 10
