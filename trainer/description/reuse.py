"""A restart takes up the description that an earlier start of the run has stored, without an export.

Beside the descriptions lie records, `serving/exports/<fingerprint>.json`, each made once and never
changed: with this fingerprint, that description came out. A record is only a hint where to look:
everything that it leads to is checked as a publisher would, and the program must be on this
host's trust list. Whatever is missing, damaged or not trusted leads to a new export.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch.distributed as dist

from ckpt.digest import check_digest
from ckpt.errors import ConflictError, NotFoundError, SidestageError
from ckpt.layout import description_prefix, export_key
from ckpt.manifest import seal, unseal
from ckpt.schema import VocabularyIds, decode_description
from ckpt.storage import Storage
from ckpt.trust import TrustList
from ckpt.typed import decode_stored
from trainer.description.fingerprint import fingerprint_of
from trainer.description.served import ServedModel
from trainer.plain import UnprovableError

_Export = Callable[[ServedModel, Storage, TrustList], str]
_KIND = "export_record"
_log = logging.getLogger("sidestage")


@dataclass(frozen=True)
class Reused:
    """A description's id, and whether an earlier start had made it."""

    description_id: str
    reused: bool


@dataclass(frozen=True)
class _Record:
    fingerprint: str
    description_id: str


def describe_once(
    served: ServedModel,
    storage: Storage,
    trust: TrustList,
    *,
    depends_on: str = "",
    export: _Export | None = None,
) -> Reused:
    """`export_description`, unless an earlier start of the run has described the very same.

    Collective: call on every rank, like `export_description`. Rank 0 looks, and the others hear from it.

    Args:
        served: as for `export_description`.
        storage: the run's root.
        trust: this host's list.
        depends_on: what else the module's forward reads: settings in globals, files. The code of
            loaded modules, versions, and the model's own attributes are compared anyway.
        export: in place of `export_description`, for tests.
    """
    fingerprint: str | None = None
    found: str | None = None
    if _rank() == 0:
        try:
            fingerprint = fingerprint_of(served, depends_on)
            found = _look_up(fingerprint, storage, trust)
        except UnprovableError as e:
            _log.info("the serving description is exported anew: %s, which can't be compared", e)
        except (
            Exception
        ) as e:  # a look-up is never a reason not to start, nor to leave peers waiting
            _log.warning("no serving description was looked up: %s: %s", type(e).__name__, e)
    found = _told(found)
    if found is not None:
        return Reused(found, reused=True)
    description_id = (export or _exporter())(served, storage, trust)
    if fingerprint is not None:
        _keep(_Record(fingerprint, description_id), storage)
    return Reused(description_id, reused=False)


def _look_up(fingerprint: str, storage: Storage, trust: TrustList) -> str | None:
    key = export_key(fingerprint)
    try:
        record = decode_stored(_Record, unseal(_KIND, storage.read(key), key), key)
        if record.fingerprint != fingerprint:
            _log.warning("%s: is of another fingerprint; the description is exported anew", key)
            return None
        _check(record.description_id, storage, trust)
    except NotFoundError as e:
        if key not in str(e):
            _log.warning("the serving description is exported anew: %s", e)
        return None
    except SidestageError as e:
        _log.warning("the serving description is exported anew: %s", e)
        return None
    return record.description_id


def _check(description_id: str, storage: Storage, trust: TrustList) -> None:
    """Raise unless the description is there, whole, and trusted on this host."""
    key = f"{description_prefix(description_id)}description.json"
    description = decode_description(storage.read(key), key)
    trust.check(storage.read(description.program_key), description.program_key)
    files = {description.golden_key: description.golden_digest}
    maps = [f.ids for f in description.features]
    files |= {m.key: m.digest for m in maps if isinstance(m, VocabularyIds)}
    for name, digest in files.items():
        check_digest(storage.read(name), digest, name)


def _keep(record: _Record, storage: Storage) -> None:
    """On rank 0. Without a record the next start exports again, which is all that is lost."""
    try:
        storage.create(export_key(record.fingerprint), seal(_KIND, asdict(record)))
    except ConflictError:
        _log.warning(
            "%s is there already and couldn't be used; delete it to skip exports again",
            export_key(record.fingerprint),
        )
    except SidestageError as e:
        _log.warning("the next start has to export the serving description again: %s", e)


def _exporter() -> _Export:
    from trainer.description.export import export_description  # slow to import

    return export_description


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _told(found: str | None) -> str | None:
    """What rank 0 has found, on every rank."""
    message: list[Any] = [found]
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.broadcast_object_list(message, src=0)
    result: str | None = message[0]
    return result
