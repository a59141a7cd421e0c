"""May a run be begun at a root? Not where its files and those of another run would be mixed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Protocol, runtime_checkable

from ckpt import layout
from ckpt.errors import BadInputError, NotFoundError, StorageError
from ckpt.storage.branched import owned
from ckpt.storage.protocol import Storage


@runtime_checkable
class Placed(Protocol):
    """A store that lies within others: a folder, or a prefix of a bucket."""

    def above(self) -> Iterator[tuple[Storage, str]]:
        """Each store that this one lies in, the nearest first, and this root's place there.

        The place is a path like a key, without slashes at its ends.
        """
        ...


def check_place(storage: Storage) -> None:
    """Refuse a root in which no run was begun yet, and which is a part of another run.

    It reads, and writes nothing. A folder in a run's root is no part of it if the run never uses
    that name; folders above a run are free, unless the new run would use the run's own folder.

    Raises BadInputError naming the other run.
    """
    storage = owned(storage)
    if _is_run(storage, layout.RUN):
        return
    for name in layout.FOLDERS:
        if _is_run(storage, f"{name}{layout.RUN}"):
            raise BadInputError(
                f"root: {storage.url}: {name} in it is the root of another run, and a run here would "
                f"write there, too; give this run a folder of its own"
            )
    if not isinstance(storage, Placed):
        return
    for other, place in storage.above():
        taken = f"{place}/".startswith(layout.FOLDERS) or place.partition("/")[0] == layout.RUN
        # Only then looked at: who may read one prefix of a bucket is often denied those above.
        if taken and _is_run(other, layout.RUN):
            raise BadInputError(
                f"root: {storage.url} is a part of the run {other.url}; name that, or give this run a "
                f"folder of its own"
            )


def _is_run(storage: Storage, key: str) -> bool:
    with suppress(NotFoundError, StorageError, BadInputError):  # who may not look takes it for none
        storage.stat(key)
        return True
    return False
