"""Which code artifacts may be loaded on this host.

Exported programs and compiled packages run code when they are loaded, so a store that
anybody else can write to must not decide what runs here. An artifact is loaded only if
its sha256 is in the operator's trust list: one `sha256` in hex a line, `#` for comments.
An exporter adds what it made itself on this host.

The list lies at $SIDESTAGE_TRUST_FILE, else `$XDG_CONFIG_HOME/sidestage/trusted-code`,
else `~/.config/sidestage/trusted-code`. A user without a home folder trusts nothing.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from ckpt.errors import BadInputError, StorageError
from ckpt.types import Buffer


class TrustList:
    """The sha256 sums that this host's operator trusts.

    Args:
        path: the list's file; it need not exist. None: there is none, and nothing is trusted.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path

    @property
    def place(self) -> str:
        """Where a line has to be added to trust something, for messages."""
        return str(self.path or "a file that SIDESTAGE_TRUST_FILE names")

    def sums(self) -> frozenset[str]:
        if self.path is None:
            return frozenset()
        try:
            # Comments may be in any encoding; a sum that isn't ASCII matches nothing.
            lines = self.path.read_bytes().decode("utf-8", "replace").splitlines()
        except (FileNotFoundError, NotADirectoryError):  # HOME=/dev/null is a way to give none
            return frozenset()
        except OSError as e:
            raise StorageError(
                f"{self.path}: the trust list can't be read: {e.strerror}; name another file in "
                f"SIDESTAGE_TRUST_FILE"
            ) from e
        return frozenset(s for line in lines if (s := line.partition("#")[0].strip().lower()))

    def add(self, data: Buffer) -> str:
        """Trust `data` from now on; returns its sha256 in hex."""
        sha256 = hashlib.sha256(data).hexdigest()
        if self.path is None:
            raise StorageError(
                "this user has no home folder to keep the list of trusted code in; name a file in "
                "SIDESTAGE_TRUST_FILE"
            )
        if sha256 not in self.sums():
            try:
                self._append(self.path, sha256)
            except OSError as e:
                raise StorageError(
                    f"{self.path}: the trust list can't be written: {e.strerror}; name another "
                    f"file in SIDESTAGE_TRUST_FILE"
                ) from e
        return sha256

    def _append(self, path: Path, sha256: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            size = os.fstat(fd).st_size
            # An editor may have left the last line open: our sum must not become part of it.
            start = "\n" if size and os.pread(fd, 1, size - 1) != b"\n" else ""
            # One short O_APPEND write, so that two exporters can't interleave.
            os.write(fd, f"{start}{sha256}\n".encode("ascii"))
        finally:
            os.close(fd)

    def check(self, data: Buffer, what: str) -> None:
        """Raise BadInputError unless `data` is trusted. Call it on the bytes that will be loaded."""
        sha256 = hashlib.sha256(data).hexdigest()
        if sha256 not in self.sums():
            raise BadInputError(
                f"{what}: sha256 {sha256} is not trusted on this host, and loading it would run its "
                f"code; if you know where it comes from, add that sum as a line to {self.place}"
            )
