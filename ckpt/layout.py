"""The only builder of storage keys. See docs/format.md for the tree."""

from __future__ import annotations

import re

RUN = "RUN.json"
ATTEMPTS = "attempts/"
COMMITS = "commits/"
DATA = "data/"
EVENTS = "events/"
SERVING = "serving/"
CODE = "code/"

_ATTEMPT = re.compile(r"attempts/(\d{6,})\.json")
_COMMIT = re.compile(r"commits/(\d{6,})/(\d{12,})\.json")


def attempt_key(epoch: int) -> str:
    return f"{ATTEMPTS}{epoch:06d}.json"


def parse_attempt_key(key: str) -> int | None:
    """The epoch of an attempt record's key, or None for a stray."""
    m = _ATTEMPT.fullmatch(key)
    return int(m[1]) if m and attempt_key(int(m[1])) == key else None


def commit_key(epoch: int, step: int) -> str:
    return f"{COMMITS}{epoch:06d}/{step:012d}.json"


def parse_commit_key(key: str) -> tuple[int, int] | None:
    """(epoch, step) of a commit's key, or None for a stray."""
    m = _COMMIT.fullmatch(key)
    if m and commit_key(int(m[1]), int(m[2])) == key:
        return int(m[1]), int(m[2])
    return None


def data_prefix(epoch: int, step: int, save_id: str) -> str:
    """Folder of one save. `save_id` is unique within the epoch, so no key is ever reused."""
    return f"{DATA}{epoch:06d}-{step:012d}-{save_id}/"


def rank_data_key(prefix: str, rank: int) -> str:
    return f"{prefix}r{rank:05d}.bin"


def rank_index_key(prefix: str, rank: int) -> str:
    return f"{prefix}r{rank:05d}.idx"


def rank_objects_key(prefix: str, rank: int) -> str:
    return f"{prefix}r{rank:05d}.objects.json"


def rank_receipt_key(prefix: str, rank: int) -> str:
    return f"{prefix}r{rank:05d}.receipt.json"


def ledger_key(epoch: int, rank: int) -> str:
    """Event file of one rank of one attempt."""
    return f"{EVENTS}{epoch:06d}/r{rank:05d}.jsonl"


def description_prefix(description_id: str) -> str:
    return f"{SERVING}descriptions/{description_id}/"


def code_key(sha256_hex: str, suffix: str) -> str:
    """Code artifacts are named by content: what is trusted can't change under its name."""
    return f"{CODE}{sha256_hex}{suffix}"
