"""What `publisher status` tells: live, canary and newest, who publishes, what was refused. No torch."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from ckpt import layout
from ckpt.catalog import Catalog, CommitInfo
from ckpt.errors import CorruptError, NotFoundError, SidestageError
from ckpt.storage import Storage
from publisher.answers import AnswerLog, FirstAnswer
from publisher.records import Move, Refusal, VersionManifest, source_of
from publisher.registry import Registry
from publisher.retention import pinned, read_pin


class StatusReader:
    """Looks at a registry beside its run, again and again; what can't change is read once."""

    def __init__(self, root: Storage, registry: Registry) -> None:
        self.registry = registry
        self.answers = AnswerLog(registry)
        self._root = root
        self._catalog = Catalog(root)
        self._commits: tuple[object, ...] | None = None
        self._newest: CommitInfo | None = None

    def read(self) -> dict[str, Any]:
        """The state as plain JSON values; times are Unix seconds."""
        registry = self.registry
        live = registry.live()
        canary = _canary_of(live)
        # The newest move says all that is needed, unless it concerned a canary.
        plain = live is not None and live.kind != "canary" and canary is None
        moves = [live] if live is not None and plain else registry.history()
        serving = live.to_version if live is not None else None
        first = self.answers.of([n for n in (serving, canary) if n is not None])
        newest = self._newest_commit()
        published = None
        if newest is not None and newest.record is not None:
            published = registry.find(source_of(newest.record, newest.ref))
        return {
            "root": self._root.url,
            "registry": registry.url,
            "live": serving and _standing(registry, serving, moves, first.get(serving, ())),
            "canary": canary and _standing(registry, canary, moves, first.get(canary, ())),
            "newest_commit": newest
            and {
                "epoch": newest.ref.epoch,
                "step": newest.ref.step,
                "committed_at_s": newest.record and newest.record.committed_at_s,
                "version": published and published.version,
            },
            "lease": _lease_of(registry),
            "pins": _pins_of(registry),
            "versions": registry.numbers(),
            "refused": _refused(registry.refusals()),
        }

    def _newest_commit(self) -> CommitInfo | None:
        """Its files are checked again only when a commit has come or gone."""
        commits = tuple((o.key, o.etag) for o in self._root.list(layout.COMMITS))
        if commits != self._commits:
            self._newest = self._catalog.latest()
            self._commits = commits
        return self._newest


def status_of(root: Storage, registry: Registry) -> dict[str, Any]:
    """The state of a registry beside its run, as plain JSON values."""
    return StatusReader(root, registry).read()


def freshness_of(
    manifest: VersionManifest, moves: Iterable[Move], answers: Iterable[FirstAnswer]
) -> dict[str, Any]:
    """How old a version was when it went live, and when each host first answered from it.

    Hosts that loaded it when they started, long after, don't count for `commit_to_answer_s` and
    `event_to_answer_s`, which are those of the slowest host.
    """
    went_live = [m.at_s for m in moves if m.to_version == manifest.version and m.kind != "canary"]
    live_at_s = min(went_live, default=None)
    prompt = [a for a in answers if not a.at_start]
    events = [a.event_to_answer_s for a in prompt if a.event_to_answer_s is not None]
    return {
        "commit_to_live_s": _since(manifest.committed_at_s, live_at_s),
        "event_to_live_s": _since(manifest.event_time_s, live_at_s),
        "commit_to_answer_s": max((a.commit_to_answer_s for a in prompt), default=None),
        "event_to_answer_s": max(events, default=None),
        "hosts": [
            {
                "host": a.host,
                "first_answered_at_s": a.first_answered_at_s,
                "commit_to_answer_s": a.commit_to_answer_s,
                "event_to_answer_s": a.event_to_answer_s,
                "at_start": a.at_start,
            }
            for a in answers
        ],
    }


def describe_status(found: dict[str, Any]) -> str:
    """The same for people."""
    newest, lease = found["newest_commit"], found["lease"]
    lines = [f"registry  {found['registry']}"]
    if found["live"] is None:
        lines.append("live      nothing yet")
    for name in ("live", "canary"):
        if (at := found[name]) is not None:
            lines.append(f"{name:8}  version {at['version']} (step {at['step']}){_moved(at)}")
            if told := _fresh(at["freshness"]):
                lines.append(f"          {told}")
    if newest is None:
        lines.append("newest    no commit yet")
    else:
        version = newest["version"]
        told = "not published" if version is None else f"version {version}"
        lines.append(f"newest    step {newest['step']}, {told}")
    if lease is not None and "problem" in lease:
        lines.append(f"lease     {lease['problem']}")
    elif lease is not None:
        left = ", released" if lease["released"] else ""
        lines.append(f"lease     {lease['owner']}, epoch {lease['epoch']}{left}")
    lines.append(f"versions  {len(found['versions'])}")
    for p in found["pins"]:
        told = p["problem"] if "problem" in p else f"by {p['who']}: {p['why']}"
        lines.append(f"pinned    version {p['version']} {told}")
    lines += [
        f"refused   step {r['step']}, {r['attempts']} times, gate {r['gate']}: {r['reason']}"
        for r in found["refused"]
    ]
    return "\n".join(lines)


def _standing(
    registry: Registry, version: int, moves: list[Move], answers: Iterable[FirstAnswer]
) -> dict[str, Any]:
    """A version that serves: what it is made of, who put it there, how fresh it is."""
    put = [m for m in moves if version == (m.canary if m.kind == "canary" else m.to_version)]
    move = put[-1] if put else None
    try:
        manifest = registry.version(version)
    except SidestageError:  # it may be damaged; where the pointer stands is told all the same
        manifest = None
    source = manifest.source if manifest else move and move.source
    return {
        "version": version,
        "epoch": source and source.epoch,
        "step": source and source.step,
        "since_s": move and move.at_s,
        "who": move and move.who,
        "why": move and move.why,
        "freshness": manifest and freshness_of(manifest, moves, answers),
    }


def _moved(at: dict[str, Any]) -> str:
    if at["since_s"] is None:
        return ""
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at["since_s"]))
    return f" since {since} by {at['who']}: {at['why']}"


def _fresh(freshness: dict[str, Any] | None) -> str:
    names = {"commit_to_live": "commit to live", "commit_to_answer": "commit to first answer"}
    names |= {"event_to_live": "event to live", "event_to_answer": "event to first answer"}
    found = [(told, (freshness or {}).get(f"{name}_s")) for name, told in names.items()]
    return ", ".join(f"{told} {seconds:.1f} s" for told, seconds in found if seconds is not None)


def _since(from_s: float | None, to_s: float | None) -> float | None:
    return None if from_s is None or to_s is None else max(0.0, to_s - from_s)


def _canary_of(move: Move | None) -> int | None:
    """The canary's number."""
    return move.canary if move is not None else None


def _pins_of(registry: Registry) -> list[dict[str, Any]]:
    """Versions that somebody keeps: version, who, why, at_s; or version, problem: it counts all the same."""
    found: list[dict[str, Any]] = []
    for number in sorted(pinned(registry)):
        try:
            found.append(asdict(read_pin(registry, number)))
        except NotFoundError:
            continue
        except CorruptError as e:
            told = f"{e}; `publisher unpin` removes it"
            found.append({"version": number, "problem": told})
    return found


def _lease_of(registry: Registry) -> dict[str, Any] | None:
    """Who may publish: owner, epoch, since_s, released; or problem: nobody does until it is mended."""
    try:
        found = registry.lease()
    except CorruptError as e:
        return {"problem": str(e)}
    if found is None:
        return None
    return {
        "owner": f"{found.owner.host} pid {found.owner.pid}",
        "epoch": found.epoch,
        "since_s": found.since_s,
        "released": found.released,
    }


def _refused(refusals: list[Refusal]) -> list[dict[str, Any]]:
    """The last refusal of each commit, with the number of attempts."""
    last: dict[Any, Refusal] = {r.source: r for r in refusals}
    attempts = {s: sum(r.source == s for r in refusals) for s in last}
    return [
        {
            "epoch": s.epoch,
            "step": s.step,
            "attempts": attempts[s],
            "gate": r.gate,
            "reason": r.reason,
            "at_s": r.at_s,
        }
        for s, r in last.items()
    ]
