"""What a session keeps of itself: its steps, and how far its reader's data has been trained on."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from ckpt import PerRank
from ckpt.errors import BadInputError
from ckpt.terms import RestoreTerms

_log = logging.getLogger("sidestage")

POSITION = "session.position"
"""Excluded from a restore, the reader begins its data anew."""


class Progress:
    """Steps and batches trained, and what the batches are counted on. A part of the state.

    Args:
        reader: a `trainer.Reader`.
        terms: of the restore.
    """

    def __init__(self, reader: Any, terms: RestoreTerms) -> None:
        if terms.excludes("session.step"):
            raise BadInputError(
                f"exclude: session.step goes on from the checkpoint; exclude only {POSITION} to begin "
                f"the data anew"
            )
        self.step = 0
        self.position = 0
        self._reader = reader
        self._anew = terms.excludes(POSITION)
        self._way_out = f"begin the data anew with {terms.spelled('exclude', (POSITION,))}"
        self._begun = False
        self._readers_own: Any = None

    def state_dict(self) -> dict[str, Any]:
        """Before `begin` without what older checkpoints and other readers don't have."""
        state: dict[str, Any] = {
            "step": self.step,
            "position": self.position,
            "batch_size": self._reader.batch_size,
        }
        if self._begun:
            if (data := self._data) is not None:
                state["data"] = dict(data)
            if (state_at := getattr(self._reader, "state_at", None)) is not None:
                state["reader"] = PerRank(state_at(self.position))
        return state

    def check_state_dict(self, state: Mapping[str, Any]) -> None:
        """BadInputError where the stored position would point to other data here."""
        if self._anew:
            return
        try:
            self._check_size(state.get("batch_size"))
            self._check_data(state.get("data"), int(state["position"]))
            self._check_own(state.get("reader"), int(state["position"]))
        except BadInputError as e:
            raise BadInputError(f"{e}; or {self._way_out}") from None

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.step = int(state["step"])
        if self._anew:
            return
        self.position = int(state["position"])
        own = state.get("reader")
        self._readers_own = own.value if isinstance(own, PerRank) else None

    def begin(self) -> None:
        """Take the reader to where training stands."""
        if self._readers_own is not None:
            self._reader.load_state(self._readers_own, self.position)
            self._readers_own = None
        else:
            self._reader.seek(self.position)
        self._begun = True

    @property
    def _data(self) -> Mapping[str, Any] | None:
        return getattr(self._reader, "data", None)

    def _check_size(self, saved: Any) -> None:
        if saved != self._reader.batch_size:
            raise BadInputError(
                f"the checkpoint counts batches of {saved} samples and the reader's have "
                f"{self._reader.batch_size}: its position would point to other data; keep the batch size"
            )

    def _check_own(self, saved: Any, position: int) -> None:
        """A reader with a state of its own needs it back, and one without can't use it."""
        wanted = getattr(self._reader, "state_at", None) is not None
        if wanted and not isinstance(saved, PerRank):
            raise BadInputError(
                "the checkpoint has no state of the reader, which this reader needs to go on: use the kind "
                "of reader that it was saved with"
            )
        if wanted and saved.value is None:
            raise BadInputError(
                "the reader's state belongs to each of the ranks that saved it, and there is no rule "
                "to make another number of ranks' of it: restore with as many"
            )
        if not wanted and saved is not None:
            raise BadInputError(
                "the checkpoint was saved by a reader with a state of its own, which this one "
                "doesn't take: use the kind of reader that it was saved with"
            )
        if wanted and (check := getattr(self._reader, "check_state", None)) is not None:
            check(saved.value, position)

    def _check_data(self, saved: Any, position: int) -> None:
        here = self._data
        if here is None or saved is None:
            if here is not None:
                _log.info(
                    "the checkpoint doesn't say what data it was trained on; taken for the reader's"
                )
            elif saved is not None:
                _log.warning(
                    "the reader doesn't say what data it has; the checkpoint's was %s", saved
                )
            return
        continues = getattr(self._reader, "continues", None)
        if continues is not None:
            continues(saved, position)
        elif (said := differing(saved, here)) is not None:
            raise BadInputError(
                f"the checkpoint's position counts other data than the reader has, {said}: give the "
                f"reader that data"
            )


def differing(saved: Mapping[str, Any], here: Mapping[str, Any]) -> str | None:
    """The first thing in which two descriptions of data differ, in words; None: they are alike."""
    for name in [*saved, *(n for n in here if n not in saved)]:
        if saved.get(name) != here.get(name):
            return f"{name} {saved.get(name)!r} there and {here.get(name)!r} here"
    return None
