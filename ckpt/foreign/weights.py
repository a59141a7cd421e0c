"""torch.load of files that strangers made: only tensors and plain values, and one clear line if not."""

from __future__ import annotations

import pickle
import pickletools
import re
import warnings
from pathlib import Path
from typing import IO, Any

import torch

from ckpt.errors import BadInputError, CorruptError

ZIP_MAGIC = b"PK\x03\x04"
LEGACY_MAGIC = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19"  # torch.save before version 1.6
_GLOBAL = re.compile(r"GLOBAL (\S+)")


def load_weights(
    source: Path | IO[bytes], what: str, *, mapped: bool = False, device: str = "cpu"
) -> Any:
    """What torch.load(weights_only=True) makes of `source`; `what` names it in errors.

    On the device "meta" no tensor's data is read: a look at what there is.

    Raises BadInputError naming the class of an object that only code could load, CorruptError
    for damage.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about pickle protocols and old storages
            return torch.load(source, map_location=device, weights_only=True, mmap=mapped)
    except pickle.UnpicklingError as e:
        if m := _GLOBAL.search(str(e)):
            raise BadInputError(refusal(what, m[1])) from None
        raise BadInputError(f"{what}: not what torch.save writes ({_reason(e)})") from None
    except (OSError, MemoryError):
        raise
    except Exception as e:  # torch and its unpickler raise anything on bytes that aren't theirs
        if "TorchScript" in str(e):
            raise BadInputError(f"{what}: a TorchScript program, not a state dict") from None
        if "failed locating file" in str(e) or "hasRecord" in str(e):
            raise BadInputError(f"{what}: a zip archive, but not one of torch.save") from None
        raise CorruptError(f"{what}: damaged or cut off ({_reason(e)})") from None


def refusal(what: str, name: str) -> str:
    return (
        f"{what}: holds a {name}, which only running its code could load; save tensors, numbers, "
        f"strings, bytes, lists, tuples, dicts or None"
    )


def class_in(data: bytes) -> str | None:
    """The first class or function that a pickle names, without loading it."""
    strings: list[str] = []
    try:
        for op, arg, _ in pickletools.genops(data):
            if op.name == "GLOBAL":
                return str(arg).replace(" ", ".")
            if op.name == "STACK_GLOBAL" and len(strings) >= 2:
                return ".".join(strings[-2:])
            if isinstance(arg, str):
                strings.append(arg)
    except (ValueError, IndexError):
        return None
    return None


def _reason(error: Exception) -> str:
    """The line of torch's long messages that says something."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = [line for line in lines if line.startswith("Unsupported")]
    return (told or lines or [type(error).__name__])[0].split(". ")[0]
