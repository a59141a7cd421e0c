"""Structured events go to an injected sink; the library itself never prints.

What a checkpointer emits, on the trainer's thread or the persist thread, with its fields:

| event | fields |
|---|---|
| `started` | step (None: from scratch), root, why: the line for people; once for each start, on rank 0 |
| `record_lost` | key, why: what that means, and what is taken in its place |
| `attempt_claimed` | epoch, parent |
| `save_staged` | step, blocked_s, staged_bytes, guarded_bytes |
| `save_persisted` | step, bytes, persist_s, lag_s: from save() until this rank's receipt was stored |
| `save_committed` | step, epoch |
| `save_failed` | step, error |
| `save_skipped` | step, error; blocked_s where this rank took no snapshot, and there is no `save_staged` |
| `save_finished` | step, epoch: of an earlier attempt's save that lacked only its commit |
| `save_not_finished` | step, epoch, error |
| `large_value` | key, values, bytes, encode_s: no tensor, and written anew at each save; once for a key |
| `trainer_waited` | why ("overlay", "fence" or "slot"), wait_s |
| `store_retried` | key, kind ("throttled", "outage", "credentials"), pause_s, error: a call comes again |
| `overlay` | bytes in use, fraction of its share |
| `untracked_write` | step, table, rows: the first of those that changed unseen, as far as they are known |
| `prefetched` | objects that this rank's restore had from memory, warmed_bytes of its chunks, error |
| `restored` | step, epoch |
| `not_restored` | step, keys |
| `restored_with` | step, note: what was decided without a name to go by, or fits in part only |
| `checkpoint_set_aside` | step, epoch, error |
| `pruned`, `prune_failed` | steps; error, problems |
| `keep_best_without_metric` | metric, checkpoints, annotations: no commit has it, so all are kept; once |
| `single_writer_only` | root |
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

from ckpt.types import EventSink

_log = logging.getLogger("sidestage")

_WARN = frozenset(
    {
        "record_lost",
        "save_failed",
        "save_skipped",
        "save_not_finished",
        "untracked_write",
        "checkpoint_set_aside",
        "not_restored",
        "restored_with",
        "prune_failed",
        "keep_best_without_metric",
        "single_writer_only",
    }
)


class LogSink:
    """Writes each event as one line to the `sidestage` logger; trouble as a warning.

    What a run begins from is a warning, too: Python shows nothing below where nobody has set up
    logging, and a start from scratch that wasn't meant must not pass unseen.
    """

    def emit(self, name: str, /, **fields: Any) -> None:
        if name == "started":
            _log.warning("%s", fields["why"])
            return
        level = logging.WARNING if name in _WARN else logging.INFO
        if _log.isEnabledFor(level):
            _log.log(level, "%s %s", name, " ".join(f"{k}={v}" for k, v in fields.items()))


@dataclass
class ListSink:
    """Keeps events in memory, for tests and for callers that want to look."""

    events: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    def emit(self, name: str, /, **fields: Any) -> None:
        self.events.append((name, fields))

    def named(self, name: str) -> list[dict[str, Any]]:
        return [f for n, f in self.events if n == name]


class TeeSink:
    """Hands each event to several sinks."""

    def __init__(self, *sinks: Any) -> None:
        self._sinks = sinks

    def emit(self, name: str, /, **fields: Any) -> None:
        for sink in self._sinks:
            sink.emit(name, **fields)


def chain(*sinks: EventSink) -> EventSink:
    """One sink for several, such as a log and metrics: one that raises keeps none from the others."""
    return TeeSink(*(GuardedSink(sink) for sink in sinks))


class GuardedSink:
    """Passes events on, and keeps a sink that raises from harming a save."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def emit(self, name: str, /, **fields: Any) -> None:
        try:
            self._inner.emit(name, **fields)
        except Exception:
            _log.exception("the event sink failed at %s; the save goes on", name)
