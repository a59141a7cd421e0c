"""Two ranks, and state that could go elsewhere without a word: `cut_edges_ranks.py FOLDER`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ckpt import Checkpointer
from ckpt.errors import BadInputError
from tests.distributed.cuts_ranks import Trained, boxes, build
from tests.distributed.launch import join, leave

FEW, MORE = 4, 6


def save(root: str, state: dict[str, Any]) -> None:
    with Checkpointer(root) as c:
        c.save(1, state).committed.result()


def restore(root: str, state: dict[str, Any], **terms: Any) -> None:
    with Checkpointer(root) as c:
        assert c.restore(state, **terms) is not None


def refused(what: Callable[[], None], *said: str) -> None:
    try:
        what()
    except BadInputError as e:
        assert all(part in str(e) for part in said), str(e)
    else:
        raise AssertionError(f"{said}: was taken")


def stepped(trained: Trained) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Each parameter that has elements here, and its first moment, which a step of no gradient has made."""
    parameters = [p for g in trained.optimizer.param_groups for p in g["params"] if p.numel()]
    for p in parameters:
        p.grad = torch.zeros_like(p)
    trained.optimizer.step()
    return [(p, trained.optimizer.state[p]["exp_avg"]) for p in parameters]


def grown(root: str) -> None:
    """A part of a table that has grown gets the rows that it holds, not the first ones of the table."""
    rank = dist.get_rank()
    trained = build("plain_adam", "sharded", {"t0": "dense_rw"}, FEW)
    ((_, moment),) = stepped(trained)
    moment.copy_(torch.arange(len(moment)).view(-1, 1).expand_as(moment) + 2 * rank + 1.0)
    save(root, trained.state)
    for fresh in (False, True):
        again = build("plain_adam", "sharded", {"t0": "dense_rw"}, MORE)
        if not fresh:
            ((_, moment),) = stepped(again)
            moment.fill_(-1)
        restore(root, again.state, rows=["model"])
        (entry,) = again.optimizer.state.values()
        new = 0.0 if fresh else -1.0
        wanted = [[1.0, 2.0, 3.0], [4.0, new, new]][rank]
        assert entry["exp_avg"][:, 0].tolist() == wanted, (fresh, entry["exp_avg"][:, 0])


def by_number(root: str) -> None:
    """Ranks that mean different tables by one number: neither's state is stored for both."""
    trained = build("plain_adam", "sharded", {"t0": "dense_tw_first", "t1": "dense_tw"}, FEW)
    own = [p for g in trained.optimizer.param_groups for p in g["params"] if p.numel()]
    optimizer = torch.optim.Adam(own)
    for p in own:
        p.grad = torch.full_like(p, dist.get_rank() + 1.0)
    optimizer.step()
    state = {"model": trained.model.state_dict(), "optimizer": optimizer}
    refused(lambda: save(root, state), "optimizer.state.0.")


def renamed_rows(root: str) -> None:
    """Column shards' row-wise state isn't resized, whatever the module was called."""
    save(root, build("rowwise", "sharded", {"t0": "cw"}, FEW).state)
    again = build("rowwise", "sharded", {"t0": "cw"}, MORE)
    state = {"net": again.model, "optimizer": again.optimizer}
    for rows in (["net"], ["net", "optimizer"]):
        refused(
            lambda rows=rows: restore(root, state, rows=rows, rename={"model": "net"}),  # type: ignore[misc]
            "optimizer.state.embedding_bags.t0.weight.t0.momentum1",
            "net.embedding_bags.t0.weight",
        )


def uneven(root: str) -> None:
    """Column shards of other widths, as many, are others: known by the table, or not taken."""
    trained = build("rowwise", "sharded", {"t0": "narrow_wide"}, FEW)
    save(f"{root}/alone", {"optimizer": trained.optimizer})
    again = build("rowwise", "sharded", {"t0": "wide_narrow"}, FEW)
    said = "optimizer.state.embedding_bags.t0.weight.t0.momentum1", "of 4, 12 columns here"
    refused(lambda: restore(f"{root}/alone", {"optimizer": again.optimizer}), *said)
    refused(lambda: restore(f"{root}/alone", again.state, partial=True), *said)
    save(f"{root}/both", trained.state)
    refused(lambda: restore(f"{root}/both", {"optimizer": again.optimizer}, partial=True), *said)
    refused(lambda: restore(f"{root}/both", again.state), said[0], "approximate=True")


def to_plain(root: str) -> None:
    """A plain optimizer doesn't take a kernel's state, whatever is asked for, and nothing is changed."""
    save(root, build("adagrad", "sharded", {"t0": "rw"}, FEW).state)
    again = build("plain_adagrad", "sharded", {"t0": "dense_rw"}, FEW)
    for _, _, _, t in boxes(again.model):
        t.fill_(-1)
    for terms in ({}, {"other_optimizer": True}):
        refused(
            lambda terms=terms: restore(root, again.state, **terms),
            "fbgemm.EXACT_ADAGRAD",
            "exclude",
        )  # type: ignore[misc]
    assert all((t == -1).all() for _, _, _, t in boxes(again.model))


def main() -> None:
    join()
    for case in (grown, by_number, renamed_rows, uneven, to_plain):
        case(f"{sys.argv[1]}/{case.__name__}")
    leave()


if __name__ == "__main__":
    main()
