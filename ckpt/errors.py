"""The error tree, arranged by what the caller should do.

    SidestageError                    exit 1   something went wrong
    ├── BadInputError                 exit 2   fix the input and call again
    │   └── UnsupportedFormatError    exit 2   written by another version: upgrade or convert
    ├── NotFoundError                 exit 3   name something that exists
    ├── ConflictError                 exit 4   somebody else was first, or the target exists
    ├── CorruptError                  exit 5   do not use this object; take another copy
    ├── StorageError                  exit 6   the store failed or refused: retry, or mend it
    │   └── DeadlineError             exit 6   it took longer than allowed
    ├── SaveError                     exit 7   a checkpoint was not committed; training may go on
    │   ├── SaveSkippedError          exit 7   not begun, by policy: earlier saves were pending
    │   └── UntrackedWriteError       exit 7   something but training changed state in an open snapshot
    ├── RestoreError                  exit 8   a restore failed halfway: build the state anew
    └── InexactError                  exit 9   two things differ that are to be equal: see which, and why

Every message names the key, the numbers and the next step, in one line.
"""

from __future__ import annotations

from typing import Any


class SidestageError(Exception):
    """Base of all errors that this project raises on purpose."""

    exit_code = 1


class BadInputError(SidestageError):
    """The caller's input can't be used as it is."""

    exit_code = 2


class UnsupportedFormatError(BadInputError):
    """An object was written in a format that this version doesn't read."""


class NotFoundError(SidestageError):
    """A named root, step, key, version or file doesn't exist."""

    exit_code = 3


class ConflictError(SidestageError):
    """A create-only key exists already, or a compare-and-set lost."""

    exit_code = 4


class CorruptError(SidestageError):
    """Stored bytes don't match their digest, size or format."""

    exit_code = 5


class StorageError(SidestageError):
    """The store failed or refused an operation."""

    exit_code = 6


class DeadlineError(StorageError):
    """An operation didn't end within its deadline."""


class SaveError(SidestageError):
    """A save ended without a commit. The previous commit is untouched."""

    exit_code = 7


class SaveSkippedError(SaveError):
    """A save was given up by policy, on some rank, before it was written."""


class UntrackedWriteError(SaveError):
    """State that a snapshot still needed was changed and neither guard nor fence saw it."""


class RestoreError(SidestageError):
    """A part of the state refused what it was given, when others had theirs: the state is a mixture."""

    exit_code = 8


class InexactError(SidestageError):
    """Two things differ that are to be equal, such as a training that was resumed and one that was not.

    proof: a `trainer.proving.ResumeProof`, if there was one to compare.
    """

    exit_code = 9

    def __init__(self, message: str, proof: Any = None) -> None:
        super().__init__(message)
        self.proof = proof
