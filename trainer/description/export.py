"""Describe a live, sharded model for a publisher, and store the description.

Layout: the program under `code/<sha256>.pt2`, named by content; `description.json`, the golden
request and vocabularies under `serving/descriptions/<id>/`. The id is made of the content, so a
restarted trainer that exports the same model finds its description there already.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn

from ckpt.errors import BadInputError, ConflictError, SidestageError
from ckpt.layout import description_prefix
from ckpt.schema import encode_description
from ckpt.storage import Storage
from ckpt.trust import TrustList
from trainer.description.collisions import collisions_of
from trainer.description.description import Probe, describe
from trainer.description.lookups import lookup_of
from trainer.description.proof import LiveTables, check_lookup
from trainer.description.rawids import RawIds
from trainer.description.request import Request
from trainer.description.served import ServedModel
from trainer.description.shadow import Feed, in_eval, shadow_of, to_host, unwrap
from trainer.description.source import user_line


def export_description(served: ServedModel, storage: Storage, trust: TrustList) -> str:
    """Export, check against the live model, store; returns the description's id.

    Collective: call on every rank, with equal golden requests, while no pipeline is attached to
    the model. Rank 0 writes. The program is added to this host's trust list.

    Raises BadInputError on every rank, naming the feature, collection, argument or line, where the
    model can't be described; StorageError where rank 0 can't write.
    """
    probe = _probe(served)
    described: str | SidestageError | None = None
    if _rank() == 0:
        try:
            described = _store(probe, storage, trust)
        except SidestageError as e:
            described = e
        except Exception as e:  # the other ranks are waiting for an answer, whatever it is
            described = SidestageError(f"the model wasn't described: {type(e).__name__}: {e}")
            described.__cause__ = e
    return _agree(described)


def _probe(served: ServedModel) -> Probe:
    """Run the model and its shadow on the golden request, and prove what the collections do."""
    model, feed = unwrap(served.module), Feed()
    shadow, found = shadow_of(model, feed)
    request = Request(model, served.args, served.kwargs)
    collisions = collisions_of(found, served.prefix, served.checkpoint_keys)
    raw = RawIds(served.id_maps, served.raw)
    with in_eval(model):
        live = _answer(model, request)
        feed.begin(None)
        _answer(shadow, request)
        called = {c.embeddings.path for c in feed.calls}
        for embeddings in found:
            if embeddings.path not in called:
                raise BadInputError(
                    f"{embeddings.path} is never called on the golden request; serve a module "
                    f"without it"
                )
        tables = LiveTables(model, served.prefix, collisions)
        features = {f.name: f for f in request.features}
        lookups = []
        for call in feed.calls:
            lookup = lookup_of(call, request.features, served.prefix, served.checkpoint_keys)
            check_lookup(call, lookup, features, tables)
            lookups.append(lookup)
    raw.check(request.features, lookups)
    return Probe(
        model=served.name,
        prefix=served.prefix,
        checkpoint_keys=served.checkpoint_keys,
        live=live,
        shadow=to_host(shadow),
        feed=feed,
        request=request,
        raw=raw,
        lookups=lookups,
        collisions=collisions,
    )


def _answer(model: nn.Module, request: Request) -> Any:
    try:
        return request.call(model)
    except SidestageError:
        raise
    except Exception as e:
        line = user_line(e)
        raise BadInputError(
            f"the model fails on the golden request{f', at {line}' if line else ''} "
            f"({type(e).__name__}: {e})"
        ) from e


def _store(probe: Probe, storage: Storage, trust: TrustList) -> str:
    described = describe(probe)
    _create(storage, described.description.program_key, described.code)
    for key, data in described.files.items():
        _create(storage, key, data)
    key = f"{description_prefix(described.id)}description.json"
    _create(storage, key, encode_description(described.description))
    trust.add(described.code)
    return described.id


def _create(storage: Storage, key: str, data: bytes) -> None:
    """Names come from content, so whoever was there first wrote the same."""
    try:
        storage.create(key, data)
    except ConflictError:
        return


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _agree(described: str | SidestageError | None) -> str:
    """Rank 0's result on every rank, or its error."""
    message: list[Any] = [described]
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.broadcast_object_list(message, src=0)
    result = message[0]
    if isinstance(result, SidestageError):
        raise result
    return str(result)
