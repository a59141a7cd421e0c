"""Which keys a store accepts. The same for every backend, so that a run can move between them."""

from __future__ import annotations

from ckpt.errors import BadInputError

HIDDEN = (".tmp-", ".sidestage-")
"""Names with these beginnings are a backend's own files, never objects."""


def check_key(key: str) -> str:
    """Return `key`, or raise BadInputError saying what is wrong with it."""
    if not key:
        raise BadInputError("empty storage key: give a relative path such as 'commits/x.json'")
    for segment in key.split("/"):
        _check_segment(segment, key)
    return key


def check_prefix(prefix: str) -> str:
    """Return `prefix` if a valid key could start with it, or raise BadInputError."""
    *folders, last = prefix.split("/")
    for segment in folders:
        _check_segment(segment, prefix)
    if last and last not in (".", ".."):  # these two may go on, as in ".config"
        _check_segment(last, prefix)
    return prefix


def _check_segment(segment: str, key: str) -> None:
    if segment in ("", ".", ".."):
        raise BadInputError(
            f"storage key {key!r}: no part between slashes may be empty, '.' or '..', "
            f"and it may not start or end with '/'"
        )
    if segment.startswith(HIDDEN):
        raise BadInputError(
            f"storage key {key!r}: names that start with {' or '.join(HIDDEN)} are the store's own"
        )
    if "\0" in segment:
        raise BadInputError(f"storage key {key!r}: holds a NUL character")
    try:
        size = len(segment.encode())
    except UnicodeEncodeError:
        raise BadInputError(f"storage key {key!r}: isn't valid Unicode") from None
    if size > 255:
        raise BadInputError(
            f"storage key {key[:80]!r}...: a part has {size} bytes, at most 255 fit"
        )
