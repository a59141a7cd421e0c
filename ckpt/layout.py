"""The only builder of storage keys. See docs/format.md for the tree."""

from __future__ import annotations

import re
from collections.abc import Iterator

RUN = "RUN.json"
ORIGIN = "ORIGIN.json"
ATTEMPTS = "attempts/"
COMMITS = "commits/"
DATA = "data/"
PINS = "pins/"
EVENTS = "events/"
SERVING = "serving/"
DESCRIPTIONS = f"{SERVING}descriptions/"
CODE = "code/"
COMPILE_CACHE = "compile-cache/"
PLANS = "plans/"
FOLDERS = (ATTEMPTS, COMMITS, DATA, PINS, EVENTS, SERVING, CODE, COMPILE_CACHE, PLANS)
"""All that a run writes below its root, beside RUN.json and ORIGIN.json."""

# What a rank's files of a save end with.
DATA_SUFFIX = ".bin"
INDEX_SUFFIX = ".idx"
OBJECTS_SUFFIX = ".objects.json"

_ATTEMPT = re.compile(r"attempts/(\d{6,})\.json")
_COMMIT = re.compile(r"commits/(\d{6,})/(\d{12,})\.json")
_DATA = re.compile(r"data/(\d{6,})-(\d{12,})-(\d{6,})/.+", re.DOTALL)
_COMPILE_CACHE = re.compile(r"compile-cache/[0-9a-f]{32}/([0-9a-f]{64})\.tar\.zst")
_PIN = re.compile(r"pins/([A-Za-z0-9][A-Za-z0-9._-]{0,99})\.json")


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


def parse_data_key(key: str) -> tuple[str, int, int, int] | None:
    """(data prefix, epoch, step, save id) of any file of a save, or None for a stray."""
    m = _DATA.fullmatch(key)
    if m is None:
        return None
    prefix = data_prefix(int(m[1]), int(m[2]), m[3])
    return (prefix, int(m[1]), int(m[2]), int(m[3])) if key.startswith(prefix) else None


def epoch_data_prefix(epoch: int) -> str:
    """What all data keys of an attempt begin with."""
    return f"{DATA}{epoch:06d}-"


def data_prefixes_above(epoch: int, step: int) -> Iterator[str]:
    """What the data keys of an attempt's saves above `step` begin with, each in one way.

    Some hundred short listings, whatever lies below: an attempt may hold a million files.
    """
    digits = f"{step:012d}"
    for n, digit in enumerate(digits):
        for higher in range(int(digit) + 1, 10):
            yield f"{epoch_data_prefix(epoch)}{digits[:n]}{higher}"


def step_data_prefix(epoch: int, step: int) -> str:
    """What the data keys of an attempt's saves of one step begin with."""
    return f"{epoch_data_prefix(epoch)}{step:012d}-"


def pin_key(pin_id: str) -> str:
    return f"{PINS}{pin_id}.json"


def parse_pin_key(key: str) -> str | None:
    """The id of a pin's key, or None for a stray. Ids are letters, digits and . _ - only."""
    m = _PIN.fullmatch(key)
    return m[1] if m else None


def scratch_prefix(token: str) -> str:
    """Where `ckpt doctor` tries a store out; it removes what it writes."""
    return f"doctor-{token}/"


def rank_data_key(prefix: str, rank: int) -> str:
    return f"{prefix}r{rank:05d}{DATA_SUFFIX}"


def rank_index_key(prefix: str, rank: int) -> str:
    return f"{prefix}r{rank:05d}{INDEX_SUFFIX}"


def rank_objects_key(prefix: str, rank: int) -> str:
    return f"{prefix}r{rank:05d}{OBJECTS_SUFFIX}"


def rank_receipt_key(prefix: str, rank: int) -> str:
    return f"{prefix}r{rank:05d}.receipt.json"


def epoch_ledger_prefix(epoch: int) -> str:
    """What the keys of all event files of an attempt begin with."""
    return f"{EVENTS}{epoch:06d}/"


def ledger_key(epoch: int, rank: int) -> str:
    """Event file of one rank of one attempt."""
    return f"{epoch_ledger_prefix(epoch)}r{rank:05d}.jsonl"


def description_prefix(description_id: str) -> str:
    return f"{DESCRIPTIONS}{description_id}/"


def export_key(fingerprint: str) -> str:
    """Record of which description an export with this fingerprint has led to."""
    return f"{SERVING}exports/{fingerprint}.json"


def plan_key(key: str) -> str:
    """A sharding plan, named by all that it depends on."""
    return f"{PLANS}{key}.json"


def code_key(sha256_hex: str, suffix: str) -> str:
    """Code artifacts are named by content: what is trusted can't change under its name."""
    return f"{CODE}{sha256_hex}{suffix}"


def compile_cache_prefix(cache_key: str) -> str:
    """Folder of the compile caches that fit one code, version, device and flags: 32 hex digits."""
    return f"{COMPILE_CACHE}{cache_key}/"


def compile_cache_key(cache_key: str, sha256_hex: str) -> str:
    """One compile cache, named by content as all code is."""
    return f"{compile_cache_prefix(cache_key)}{sha256_hex}.tar.zst"


def parse_compile_cache_key(key: str) -> str | None:
    """The sha256 in a compile cache's key, or None for a stray."""
    m = _COMPILE_CACHE.fullmatch(key)
    return m[1] if m else None
