"""Adversaries for the runner itself: each ends as no real one may."""

from __future__ import annotations

import ctypes
import os
import threading

import torch

from ckpt.errors import SaveError
from tests.guarded.adversaries.registry import adversary
from tests.guarded.adversaries.stage import Stage


@adversary("dies")
def dies(stage: Stage) -> None:
    ctypes.memset(8, 0, 1)


@adversary("stalls", deadline_s=1.0)
def stalls(stage: Stage) -> None:
    threading.Event().wait()


@adversary("stalls in a child that it leaves behind", deadline_s=1.0)
def leaves_a_child(stage: Stage) -> None:
    if not os.fork():
        threading.Event().wait()
    threading.Event().wait()


@adversary("raises")
def raises(stage: Stage) -> None:
    stage.job()
    raise RuntimeError("a trainer's own error")


@adversary("is committed with other bytes")
def silent(stage: Stage) -> None:
    job = stage.job(settled=False)
    stage.save()
    [(_, truth, _)] = stage.keeper.open
    truth.boxes["model.users.weight"][0][1][7] += 1
    job.train()


@adversary("is refused without a name")
def unnamed(stage: Stage) -> None:
    stage.keeper.checkpointer.save = _refuse("something was changed; call touched() before")  # type: ignore[method-assign]
    stage.job(settled=False)
    stage.save()


@adversary("is refused without advice")
def unadvised(stage: Stage) -> None:
    stage.keeper.checkpointer.save = _refuse("model.users: changed")  # type: ignore[method-assign]
    stage.job(settled=False)
    stage.save()


def _refuse(message: str):  # type: ignore[no-untyped-def]
    def save(*_: object) -> None:
        raise SaveError(message)

    return save


@adversary("is refused, and must be exact", right="exact")
def needlessly(stage: Stage) -> None:
    job = stage.job()
    stage.save()
    with torch.no_grad():
        job.table[5] += 1


@adversary("is exact, and must be refused", right="refused")
def too_kindly(stage: Stage) -> None:
    stage.job()
    stage.save()


@adversary("is refused for ever")
def for_ever(stage: Stage) -> None:
    job = stage.job(settled=False)
    job.more["bad"] = torch.zeros((2, 2)).to_sparse()
    stage.save()


@adversary("copies everything", guarded=True)
def copies_everything(stage: Stage) -> None:
    stage.another(snapshot="copied")
    stage.job()


@adversary("saves nothing")
def nothing(stage: Stage) -> None: ...


@adversary("leaves a hook behind")
def leaves_a_hook(stage: Stage) -> None:
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    stage.job()
    register_optimizer_step_pre_hook(lambda *_: None)


@adversary("is well", right="exact")
def well(stage: Stage) -> None:
    stage.job()
    stage.save()


@adversary("is well on two ranks", "ranks", right="exact")
def well_on_ranks(stage: Stage) -> None:
    stage.job()
    stage.save()


@adversary("dies on one rank", "ranks", worlds=(2,))
def dies_on_one(stage: Stage) -> None:
    job = stage.job(settled=False)
    if stage.rank == 1:
        os.kill(os.getpid(), 9)
    job.train()
