"""What the status page shows: the status, and the newest versions, moves and first answers. No torch."""

from __future__ import annotations

from typing import Any

from ckpt.errors import SidestageError
from ckpt.storage import Storage
from publisher.records import Move, VersionManifest
from publisher.registry import Registry
from publisher.status import StatusReader, freshness_of

MOST_VERSIONS = 60
MOST_MOVES = 100
_NEW_VERSIONS = 4  # hosts may still answer from these for the first time


class Overview:
    """Looks at a registry again and again. Use one registry object for it, shared with no publisher."""

    def __init__(self, root: Storage, registry: Registry) -> None:
        self.registry = registry
        self._status = StatusReader(root, registry)

    def read(self) -> dict[str, Any]:
        """Plain JSON values: what `status_of` gives, and `now_s`, `rollback_to`, `published`, `history`."""
        registry = self.registry
        status = self._status.read()
        moves = registry.history()
        shown = self._shown(status)
        serving = {at["version"] for at in (status["live"], status["canary"]) if at}
        settled = set(shown[_NEW_VERSIONS:]) - serving
        answers = self._status.answers.of(shown, settled=settled)
        published = []
        for number in shown:
            try:
                manifest = registry.version(number)
            except SidestageError as e:  # one damaged manifest must not hide the others
                published.append({"version": number, "problem": str(e)})
                continue
            entry = _version(manifest)
            entry["freshness"] = freshness_of(manifest, moves, answers.get(number, ()))
            published.append(entry)
        return {
            "now_s": registry.clock.time(),
            **status,
            "rollback_to": previous_of(moves),
            "published": published,
            "history": [_move(m) for m in reversed(moves[-MOST_MOVES:])],
        }

    def _shown(self, status: dict[str, Any]) -> list[int]:
        """The newest versions, and those that matter however old they are; newest first."""
        known = status["versions"]
        matter = {at["version"] for at in (status["live"], status["canary"]) if at}
        matter |= {p["version"] for p in status["pins"]}
        return sorted({*known[-MOST_VERSIONS:], *(matter & set(known))}, reverse=True)


def previous_of(moves: list[Move]) -> int | None:
    """The version that a rollback without a number returns to."""
    by_sequence = {m.sequence: m for m in moves}
    earlier = by_sequence.get(moves[-1].falls_back_to or 0) if moves else None
    return earlier.to_version if earlier else None


def _version(manifest: VersionManifest) -> dict[str, Any]:
    sizes = {f.key: f.size_bytes for f in manifest.files}
    return {
        "version": manifest.version,
        "parent": manifest.parent,
        "model": manifest.model,
        "epoch": manifest.source.epoch,
        "step": manifest.source.step,
        "committed_at_s": manifest.committed_at_s,
        "event_time_s": manifest.event_time_s,
        "published_at_s": manifest.published_at_s,
        "published_by": manifest.published_by,
        "publish_s": max(0.0, manifest.published_at_s - manifest.started_at_s),
        "size_bytes": sum(sizes.values()),
        "tables_bytes": sum(n for key, n in sizes.items() if key.startswith("tables")),
        "gates": [
            {
                "name": g.name,
                "passed": g.passed,
                "detail": g.detail,
                "value": g.value,
                "threshold": g.threshold,
            }
            for g in manifest.gates
        ],
    }


def _move(move: Move) -> dict[str, Any]:
    return {
        "sequence": move.sequence,
        "kind": move.kind,
        "from_version": move.from_version,
        "to_version": move.canary if move.kind == "canary" else move.to_version,
        "step": move.source.step,
        "who": move.who,
        "why": move.why,
        "at_s": move.at_s,
    }
