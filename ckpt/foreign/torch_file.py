"""Reads a torch.save file of a nested dict, mapped into memory where its format allows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from ckpt.errors import BadInputError
from ckpt.foreign.source import Content
from ckpt.foreign.weights import LEGACY_MAGIC, ZIP_MAGIC, class_in, load_weights, refusal


def recognises(head: bytes) -> bool:
    """Do these first bytes begin a torch.save file, or a bare pickle, which is refused by what it names?"""
    return head.startswith((ZIP_MAGIC, b"\x80"))


@contextmanager
def read(source: Path) -> Iterator[Content]:
    """The dict in the file. Raises BadInputError for anything but tensors and plain values."""
    with open(source, "rb") as fh:
        head = fh.read(len(LEGACY_MAGIC))
        if not head.startswith((ZIP_MAGIC, LEGACY_MAGIC)):
            found = class_in(head + fh.read()) if head.startswith(b"\x80") else None
            raise BadInputError(
                refusal(str(source), found)
                if found
                else f"{source}: not a torch.save file; name its --format, or save it with torch.save"
            )
    loaded = load_weights(source, str(source), mapped=head.startswith(ZIP_MAGIC))
    if not isinstance(loaded, Mapping):
        raise BadInputError(
            f"{source}: holds a {type(loaded).__name__}; only a dict of names can be imported"
        )
    yield Content(tree=loaded)
