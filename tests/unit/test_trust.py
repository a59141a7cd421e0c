from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from ckpt.errors import BadInputError, StorageError
from ckpt.trust import TrustList

CODE = b"code"
SUM = hashlib.sha256(CODE).hexdigest()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "config" / "trusted-code"


def test_nothing_is_trusted_at_first(path: Path) -> None:
    trust = TrustList(path)
    assert trust.sums() == frozenset()
    with pytest.raises(BadInputError, match=f"code/x.pt2: sha256 {SUM} is not trusted.*{path}"):
        trust.check(CODE, "code/x.pt2")
    assert not path.exists()


def test_what_was_added_is_trusted_here_and_by_others(path: Path) -> None:
    assert TrustList(path).add(CODE) == SUM
    TrustList(path).check(CODE, "x")
    TrustList(path).check(bytearray(CODE), "x")
    with pytest.raises(BadInputError):
        TrustList(path).check(CODE + b"!", "x")


def test_only_the_owner_may_read_or_change_it(path: Path) -> None:
    TrustList(path).add(CODE)
    assert path.stat().st_mode & 0o077 == 0
    assert path.parent.stat().st_mode & 0o077 == 0


def test_adding_twice_adds_one_line(path: Path) -> None:
    for _ in range(2):
        TrustList(path).add(CODE)
    assert path.read_text() == f"{SUM}\n"


def test_a_list_kept_by_hand(path: Path) -> None:
    path.parent.mkdir()
    path.write_text(
        f"# who: ünlü\n\n  {SUM.upper()}  # exported on host A\n# {'0' * 64}\n", "utf-8"
    )
    trust = TrustList(path)
    assert trust.sums() == {SUM}
    trust.check(CODE, "x")


def test_a_last_line_left_open_stays_a_line_of_its_own(path: Path) -> None:
    path.parent.mkdir()
    path.write_text("a" * 64)
    TrustList(path).add(CODE)
    assert TrustList(path).sums() == {"a" * 64, SUM}


@pytest.mark.parametrize("line", [SUM[:-1], SUM + "0", f"{SUM} {SUM}", f"sha256:{SUM}", "*"])
def test_what_is_not_exactly_the_sum_trusts_nothing(path: Path, line: str) -> None:
    path.parent.mkdir()
    path.write_text(f"{line}\n")
    with pytest.raises(BadInputError):
        TrustList(path).check(CODE, "x")


def test_bytes_that_are_no_text_trust_nothing(path: Path) -> None:
    path.parent.mkdir()
    path.write_bytes(b"\xff\xfe\n" + SUM.encode() + b"\n")
    assert SUM in TrustList(path).sums()


def test_a_list_that_cannot_be_used_is_named(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        StorageError, match=f"{tmp_path}: the trust list can't be read.*SIDESTAGE_TRUST_FILE"
    ):
        TrustList(tmp_path).sums()

    def refuse(*args: object) -> int:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(StorageError, match=r"can't be written: Read-only.*SIDESTAGE_TRUST_FILE"):
        TrustList(path).add(CODE)


def test_without_a_file_nothing_is_trusted_and_the_setting_is_named(tmp_path: Path) -> None:
    """E64: a user without a home folder."""
    trust = TrustList(None)
    assert trust.sums() == frozenset()
    with pytest.raises(BadInputError, match="add that sum as a line to .* SIDESTAGE_TRUST_FILE"):
        trust.check(CODE, "x")
    with pytest.raises(StorageError, match="no home folder .* SIDESTAGE_TRUST_FILE"):
        trust.add(CODE)
    (tmp_path / "file").touch()
    assert TrustList(tmp_path / "file" / "trusted-code").sums() == frozenset()
