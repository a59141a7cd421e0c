"""What ranks have written: their receipts, and saves that lack only the commit. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ckpt import layout
from ckpt.digest import digest_of
from ckpt.errors import CorruptError
from ckpt.lineage import Tree
from ckpt.manifest import AttemptRecord, Receipt, decode
from ckpt.parallel import each
from ckpt.storage import Storage, owned
from ckpt.types import FileEntry

_WORKERS = 16  # small reads in flight: an object store takes tens of milliseconds for each


@dataclass(frozen=True)
class WrittenSave:
    """A save of which the receipts of all ranks are stored. `sizes`: its files' bytes, by key."""

    prefix: str
    epoch: int
    step: int
    save_id: str
    world_size: int
    sizes: Mapping[str, int]


def written_save(storage: Storage, prefix: str, world_size: int) -> WrittenSave | None:
    """The save below a data prefix, once all its ranks have stored their receipts."""
    sizes = {o.key: o.size_bytes for o in owned(storage).list(prefix)}
    return _complete(prefix, sizes, world_size)


def uncommitted(storage: Storage, tree: Tree) -> tuple[AttemptRecord | None, list[WrittenSave]]:
    """The newest attempt and its saves above its last commit that lack only a commit, newest first.

    Those of older attempts can't be committed any more.
    """
    attempt = tree.attempt(tree.newest_epoch).record if tree.newest_epoch else None
    if attempt is None:
        return None, []
    saves: dict[str, dict[str, int]] = {}
    for key, size in _data_above(storage, attempt.epoch, tree.steps.get(attempt.epoch, set())):
        if place := layout.parse_data_key(key):
            saves.setdefault(place[0], {})[key] = size
    found = [_complete(p, sizes, attempt.world_size) for p, sizes in saves.items()]
    complete = [s for s in found if s is not None]
    return attempt, sorted(complete, key=lambda s: (s.step, int(s.save_id)), reverse=True)


def read_receipt(storage: Storage, entry: FileEntry) -> Receipt:
    """A receipt that must be exactly the one that was named, else CorruptError."""
    data = storage.read(entry.key)
    if digest_of(data, entry.digest.partition(":")[0]) != entry.digest:
        raise CorruptError(f"{entry.key}: not what its rank wrote; is another job using this root?")
    return decode(Receipt, data, entry.key)


def read_receipts(storage: Storage, entries: Sequence[FileEntry]) -> list[Receipt]:
    """Several at once, in order."""
    return list(each(lambda e: read_receipt(storage, e), entries, _WORKERS))


def find_receipts(storage: Storage, save: WrittenSave) -> list[tuple[FileEntry, Receipt]]:
    """The receipts of a save and their file entries, in rank order, digested as its files are."""

    def find(rank: int) -> tuple[FileEntry, Receipt]:
        key = layout.rank_receipt_key(save.prefix, rank)
        data = storage.read(key)
        receipt = decode(Receipt, data, key)
        digest = receipt.files[0].digest.partition(":")[0] if receipt.files else "xxh3-128"
        return FileEntry(key, len(data), digest_of(data, digest)), receipt

    return list(each(find, range(save.world_size), _WORKERS))


def _complete(prefix: str, sizes: Mapping[str, int], world_size: int) -> WrittenSave | None:
    receipts = (layout.rank_receipt_key(prefix, rank) for rank in range(world_size))
    place = layout.parse_data_key(f"{prefix}-")
    if place is None or not all(key in sizes for key in receipts):
        return None
    _, epoch, step, _ = place
    save_id = prefix.rstrip("/").rpartition("-")[2]
    return WrittenSave(prefix, epoch, step, save_id, world_size, sizes)


def _data_above(storage: Storage, epoch: int, steps: set[int]) -> Iterable[tuple[str, int]]:
    """The data of an attempt's saves above all of `steps`: keys and sizes."""
    own = owned(storage)
    if steps:
        prefixes = list(layout.data_prefixes_above(epoch, max(steps)))
    else:
        prefixes = [layout.epoch_data_prefix(epoch)]

    def listed(prefix: str) -> list[tuple[str, int]]:
        return [(o.key, o.size_bytes) for o in own.list(prefix)]

    for found in each(listed, prefixes, _WORKERS):
        yield from found
