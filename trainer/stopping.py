"""The end of a run that was asked to end: what all ranks do at the place where they stop."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

from ckpt import Checkpointer
from trainer.preemption import PreemptedError, PreemptedLateError, Preemption

_PIECE_S = 0.25


def save_and_stop(
    preemption: Preemption,
    checkpointer: Checkpointer,
    step: int,
    restored_step: int,
    save: Callable[[], object],
) -> NoReturn:
    """Save what isn't saved, within the grace, and say how that went. Collective.

    `step` is the last one trained, `restored_step` the one that this attempt began from; `save` saves
    the last one if it has to be.

    Raises PreemptedError if everything trained is committed, else PreemptedLateError, or why no save
    can be committed any more: ConflictError or BadInputError.
    """
    ask = preemption.ask
    assert ask is not None, "nobody stops unasked"
    _drain(preemption, checkpointer)  # so that no policy skips the last save
    save()
    _drain(preemption, checkpointer)
    last = checkpointer.stats.last_commit
    committed = max(last.step if last else 0, restored_step)
    said = f"rank {ask.rank} was asked to end ({ask.why}): stopped after step {step}"
    if committed >= step:
        preemption.saved()
        raise PreemptedError(f"{said}, which is committed; start the run again to go on")
    checkpointer.raise_fatal()
    why = checkpointer.stats.last_error or "give a longer grace"
    raise PreemptedLateError(
        f"{said}, which has no commit within the grace of {preemption.grace_s:g} s: what was trained "
        f"since step {committed} is lost; {why}"
    )


def _drain(preemption: Preemption, checkpointer: Checkpointer) -> None:
    """Wait for pending saves as long as the grace lasts, which may get shorter meanwhile."""
    while not checkpointer.flush(min(preemption.left_s, _PIECE_S)):
        if preemption.left_s <= 0:
            return
