"""The small modules of the lowest layers."""

from __future__ import annotations

import hashlib
import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt import layout
from ckpt.digest import check_digest, digest_of, new_hasher
from ckpt.errors import CorruptError, UnsupportedFormatError
from ckpt.events import ListSink, LogSink, TeeSink
from ckpt.storage.keys import check_key


class TestDigest:
    def test_known_values(self) -> None:
        assert digest_of(b"") == "xxh3-128:99aa06d3014798d86001c324468d497f"
        assert digest_of(b"abc", "sha256") == f"sha256:{hashlib.sha256(b'abc').hexdigest()}"

    @pytest.mark.parametrize("name", ["xxh3-128", "sha256"])
    def test_pieces_give_the_same(self, name: str) -> None:
        hasher = new_hasher(name)
        hasher.update(b"one")
        hasher.update(memoryview(b"two"))
        assert f"{name}:{hasher.hexdigest()}" == digest_of(b"onetwo", name)
        assert bytes.fromhex(hasher.hexdigest()) == hasher.digest()

    @pytest.mark.parametrize("name", ["xxh3-128", "sha256"])
    def test_check(self, name: str) -> None:
        check_digest(b"abc", digest_of(b"abc", name), "k")
        with pytest.raises(CorruptError, match=f"^k: digest is {name}:.*, expected {name}:"):
            check_digest(b"abd", digest_of(b"abc", name), "k")

    @pytest.mark.parametrize("expected", ["md5:00", "", "nonsense", ":00"])
    def test_an_unknown_algorithm_is_named(self, expected: str) -> None:
        with pytest.raises(UnsupportedFormatError, match="this version knows xxh3-128, sha256"):
            check_digest(b"abc", expected, "k")


numbers = st.integers(0, 10**15)


class TestLayout:
    def test_examples(self) -> None:
        prefix = layout.data_prefix(3, 100, "000007")
        assert prefix == "data/000003-000000000100-000007/"
        assert layout.rank_data_key(prefix, 12) == f"{prefix}r00012.bin"
        assert layout.rank_index_key(prefix, 12) == f"{prefix}r00012.idx"
        assert layout.rank_objects_key(prefix, 12) == f"{prefix}r00012.objects.json"
        assert layout.rank_receipt_key(prefix, 12) == f"{prefix}r00012.receipt.json"
        assert layout.ledger_key(3, 12) == "events/000003/r00012.jsonl"
        assert layout.description_prefix("abc") == "serving/descriptions/abc/"
        assert layout.code_key("ff00", ".pt2") == "code/ff00.pt2"

    @given(numbers, numbers)
    def test_keys_are_read_back(self, epoch: int, step: int) -> None:
        assert layout.parse_attempt_key(layout.attempt_key(epoch)) == epoch
        assert layout.parse_commit_key(layout.commit_key(epoch, step)) == (epoch, step)
        check_key(layout.commit_key(epoch, step))

    @given(numbers, numbers)
    def test_keys_of_usual_length_sort_by_number(self, a: int, b: int) -> None:
        a, b = a % 10**12, b % 10**12
        assert (layout.commit_key(1, a) < layout.commit_key(1, b)) == (a < b)

    @pytest.mark.parametrize(
        "key",
        [
            "attempts/1.json",
            "attempts/0000001.json",
            "attempts/00000x.json",
            "attempts/000001.json.bak",
            "attempts/000001/000001.json",
            "attempts/٠٠٠٠٠١.json",
            "attempts/-00001.json",
            "commits/000001.json",
            "commits/000001/1.json",
            "commits/000001/0000000000001.json",
            "commits/1/000000000001.json",
            "commits/000001/00000000000١.json",
            "xcommits/000001/000000000001.json",
            "commits/000001/000000000001.json\n",
        ],
    )
    def test_strays_are_not_read(self, key: str) -> None:
        assert layout.parse_attempt_key(key) is None
        assert layout.parse_commit_key(key) is None


class TestEvents:
    def test_log_lines(self, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.INFO, "sidestage"):
            LogSink().emit("committed", step=5, epoch=1)
            LogSink().emit("save_failed", error="x")
        assert [(r.levelname, r.getMessage()) for r in caplog.records] == [
            ("INFO", "committed step=5 epoch=1"),
            ("WARNING", "save_failed error=x"),
        ]

    def test_a_field_may_be_called_name(self) -> None:
        sink = ListSink()
        sink.emit("event", name="x")
        assert sink.named("event") == [{"name": "x"}]

    def test_tee(self) -> None:
        first, second = ListSink(), ListSink()
        TeeSink(first, second).emit("a", n=1)
        TeeSink(first).emit("b", n=2)
        assert first.events == [("a", {"n": 1}), ("b", {"n": 2})]
        assert second.events == [("a", {"n": 1})]
