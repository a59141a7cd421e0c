"""Checkpoints that others wrote: safetensors, torch.save files and stock DCP folders.

Nothing in them runs: tensors and plain values are taken, everything else is refused by name.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from ckpt.errors import BadInputError, NotFoundError, StorageError
from ckpt.foreign import dcp_folder, safetensors_file, torch_file
from ckpt.foreign.source import Foreign, ForeignTensor, Piece, gather

__all__ = ["Foreign", "ForeignTensor", "Format", "Piece", "detect", "open_foreign"]

Format = Literal["safetensors", "torch", "dcp"]

_READERS = {
    "safetensors": safetensors_file.read,
    "torch": torch_file.read,
    "dcp": dcp_folder.read,
}


@contextmanager
def open_foreign(
    source: Path, form: Format | None = None, *, under: str | None = None
) -> Iterator[Foreign]:
    """A checkpoint of another tool: its tensors, to be read within the block, and its values.

    Args:
        source: a file, or the folder of a DCP checkpoint.
        form: its format; None to find out by its content.
        under: put everything under this name, such as "model" for a model's own state dict.

    Raises NotFoundError if there is none, BadInputError for another kind of thing and for whatever
    is neither a tensor nor a plain value (by key or class), CorruptError for damage.
    """
    form = form or detect(source)
    if not source.exists():
        raise NotFoundError(f"{source}: no such file or folder; check the path")
    if source.is_dir() != (form == "dcp"):
        kind = "folder" if source.is_dir() else "file"
        raise BadInputError(f"{source}: is a {kind}, and so not a checkpoint of format {form}")
    try:
        with _READERS[form](source) as content:
            yield gather(form, content, under)
    except OSError as e:
        raise StorageError(f"{source}: can't be read: {e}") from e


def detect(source: Path) -> Format:
    """The format of what lies at `source`, by its content."""
    if source.is_dir():
        return dcp_folder.recognise(source)
    try:
        with open(source, "rb") as fh:
            head = fh.read(16)
    except FileNotFoundError:
        raise NotFoundError(f"{source}: no such file or folder; check the path") from None
    except OSError as e:
        raise BadInputError(f"{source}: can't be read: {e.strerror}") from e
    # In this order: a header of 128 bytes begins like a pickle.
    if safetensors_file.recognises(head, source.stat().st_size):
        return "safetensors"
    if torch_file.recognises(head):
        return "torch"
    raise BadInputError(
        f"{source}: neither a safetensors nor a torch.save file, nor a DCP folder; name the format "
        f"with --format if it is one"
    )
