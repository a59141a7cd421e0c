from __future__ import annotations

import math
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

from ckpt.config import (
    CheckpointConfig,
    dataclass_from,
    launched_ranks,
    load_toml,
    spool_folders,
    trust_file,
)
from ckpt.errors import BadInputError, NotFoundError
from ckpt.storage import open_storage


class TestCheckpointConfig:
    def test_defaults_are_valid(self) -> None:
        assert dataclass_from(CheckpointConfig, {}, "x") == CheckpointConfig()

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            ({"digest": "md5"}, "digest = 'md5': use one of xxh3-128, sha256"),
            ({"when_busy": "wait"}, "when_busy = 'wait': use one of block, skip, coalesce"),
            ({"compression": 3}, "compression = 3: use one of auto, off"),
            ({"chunk_bytes": 4095}, "chunk_bytes = 4095: give 4096 to 1073741824"),
            ({"chunk_bytes": (1 << 30) + 1}, "chunk_bytes"),
            ({"chunk_bytes": 1e6}, "chunk_bytes = 1000000.0 is not of type int"),
            ({"chunk_bytes": True}, "chunk_bytes = True is not of type int"),
            ({"chunk_bytes": "16 MiB"}, "chunk_bytes = '16 MiB' is not of type int"),
            ({"max_pending": 0}, "max_pending = 0: give 1 to 16"),
            ({"when_busy": "coalesce"}, "when_busy = 'coalesce' needs max_pending of at least 2"),
            ({"commit_timeout_s": 0}, "commit_timeout_s = 0: give seconds above 0"),
            ({"commit_timeout_s": math.nan}, "commit_timeout_s = nan"),
            ({"close_timeout_s": math.inf}, "close_timeout_s = inf"),
            ({"close_timeout_s": -1.0}, "close_timeout_s = -1.0"),
            ({"close_timeout_s": "1"}, "close_timeout_s = '1' is not of type float"),
            ({"snapshot": "lazy"}, "snapshot = 'lazy': use one of guarded, copied"),
            ({"proof": "none"}, "proof = 'none': use one of sampled, full"),
            ({"persist_priority": "low"}, "persist_priority = 'low': use one of idle, normal"),
            ({"staging_bytes": 1 << 20}, "staging_bytes = 1048576: give at least 16777216"),
            ({"persist_bytes_per_s": 1}, "persist_bytes_per_s = 1: give at least 1048576"),
            ({"persist_target_s": -1.0}, "persist_target_s = -1.0: give 0 or more seconds"),
            ({"persist_target_s": math.nan}, "persist_target_s = nan"),
            ({"stall_limit_s": 0.0}, "stall_limit_s = 0.0: give seconds above 0"),
            ({"raise_after_failures": 0}, "raise_after_failures = 0: give 1 or more"),
            ({"raise_after_failures": "1"}, "raise_after_failures = '1' is not of type"),
        ],
    )
    def test_what_is_wrong_is_named(self, change: dict[str, Any], words: str) -> None:
        with pytest.raises(BadInputError, match=words):
            CheckpointConfig(**change)
        with pytest.raises(BadInputError):
            dataclass_from(CheckpointConfig, change, "train.toml")


@dataclass(frozen=True)
class Settings:
    name: str
    steps: int = 1
    rate: float = 0.5
    verbose: bool = False
    mode: Literal["a", "b"] = "a"
    tables: tuple[str, ...] = ()
    limit: int | None = None


class TestDataclassFrom:
    def test_fills_every_kind_of_field(self) -> None:
        table = {"name": "x", "steps": 2, "rate": 1, "verbose": True, "mode": "b", "limit": 3}
        assert dataclass_from(Settings, table, "x") == Settings("x", 2, 1, True, "b", (), 3)
        assert list(dataclass_from(Settings, {"name": "x", "tables": ["t"]}, "x").tables) == ["t"]

    def test_an_unknown_setting_lists_the_known_ones(self) -> None:
        with pytest.raises(
            BadInputError, match=r"^f.toml: unknown setting 'stepz'; known are limit, mode, name,"
        ):
            dataclass_from(Settings, {"name": "x", "stepz": 1}, "f.toml")

    @pytest.mark.parametrize(
        ("key", "value"),
        [
            ("name", 5),
            ("steps", 1.5),
            ("steps", True),
            ("steps", "1"),
            ("rate", "fast"),
            ("rate", False),
            ("verbose", 1),
            ("mode", "c"),
            ("tables", "t"),
            ("tables", [1]),
            ("limit", "none"),
        ],
    )
    def test_a_wrong_type_is_named(self, key: str, value: Any) -> None:
        with pytest.raises(
            BadInputError, match=f"^f.toml: {key} = {value!r} is not of type".replace("[", r"\[")
        ):
            dataclass_from(Settings, {"name": "x", key: value}, "f.toml")

    def test_a_missing_setting_is_named(self) -> None:
        with pytest.raises(BadInputError, match=r"^f.toml: .*'name'"):
            dataclass_from(Settings, {}, "f.toml")


class TestLoadToml:
    def test_reads(self, tmp_path: Path) -> None:
        path = tmp_path / "a.toml"
        path.write_text('name = "é"\n[table]\nn = 1\n', encoding="utf-8")
        assert load_toml(path) == {"name": "é", "table": {"n": 1}}

    def test_a_missing_file(self, tmp_path: Path) -> None:
        with pytest.raises(NotFoundError, match=f"^{tmp_path}/no.toml: no such file"):
            load_toml(tmp_path / "no.toml")

    @pytest.mark.parametrize(
        ("content", "words"), [(b"a = ", "not valid TOML"), (b"\xff", "can't be read")]
    )
    def test_broken_files(self, tmp_path: Path, content: bytes, words: str) -> None:
        path = tmp_path / "a.toml"
        path.write_bytes(content)
        with pytest.raises(BadInputError, match=f"^{path}: {words}"):
            load_toml(path)

    def test_a_folder(self, tmp_path: Path) -> None:
        with pytest.raises(BadInputError, match="can't be read"):
            load_toml(tmp_path)


def test_where_the_trust_list_lies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("SIDESTAGE_TRUST_FILE", raising=False)
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert trust_file() == tmp_path / ".config/sidestage/trusted-code"
    monkeypatch.setenv("XDG_CONFIG_HOME", "/etc/xdg")
    assert trust_file() == Path("/etc/xdg/sidestage/trusted-code")
    monkeypatch.setenv("SIDESTAGE_TRUST_FILE", "/srv/trusted")
    assert trust_file() == Path("/srv/trusted")


def test_a_user_without_a_name_and_a_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """E64: as some container platforms run everybody."""
    for name in ("HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME", "SIDESTAGE_TRUST_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("SIDESTAGE_SPOOL_DIR", raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 1000660000)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert trust_file() is None
    assert spool_folders() == (tmp_path / "sidestage-spool-1000660000",)
    with pytest.raises(BadInputError, match="give the whole path"):
        open_storage("~/run")


@pytest.mark.parametrize(
    ("told", "ranks"),
    [
        ({}, (0, 1, 1)),
        ({"RANK": "3", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}, (3, 8, 4)),
        ({"RANK": "3", "WORLD_SIZE": "8"}, (3, 8, 8)),
        ({"RANK": "x", "WORLD_SIZE": "8"}, (0, 1, 1)),
    ],
)
def test_ranks_as_a_launcher_says_them(
    monkeypatch: pytest.MonkeyPatch, told: dict[str, str], ranks: tuple[int, int, int]
) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    assert launched_ranks() == ranks
