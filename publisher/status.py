"""What `publisher status` tells: live and newest, and the refused commits. No torch."""

from __future__ import annotations

import time
from typing import Any

from ckpt.catalog import Catalog
from ckpt.storage import Storage
from publisher.records import Refusal, source_of
from publisher.registry import Registry


def status_of(root: Storage, registry: Registry) -> dict[str, Any]:
    """The state of a registry beside its run, as plain JSON values."""
    live = registry.live()
    newest = Catalog(root).latest()
    published = None
    if newest is not None and newest.record is not None:
        published = registry.find(source_of(newest.record, newest.ref))
    return {
        "root": root.url,
        "registry": registry.url,
        "live": live
        and {
            "version": live.to_version,
            "epoch": live.source.epoch,
            "step": live.source.step,
            "since_s": live.at_s,
            "who": live.who,
            "why": live.why,
        },
        "newest_commit": newest
        and {
            "epoch": newest.ref.epoch,
            "step": newest.ref.step,
            "version": published and published.version,
        },
        "versions": registry.numbers(),
        "refused": _refused(registry.refusals()),
    }


def describe_status(found: dict[str, Any]) -> str:
    """The same for people."""
    live, newest = found["live"], found["newest_commit"]
    lines = [f"registry  {found['registry']}"]
    if live is None:
        lines.append("live      nothing yet")
    else:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(live["since_s"]))
        lines.append(
            f"live      version {live['version']} (step {live['step']}) since {since} "
            f"by {live['who']}: {live['why']}"
        )
    if newest is None:
        lines.append("newest    no commit yet")
    else:
        version = newest["version"]
        told = "not published" if version is None else f"version {version}"
        lines.append(f"newest    step {newest['step']}, {told}")
    lines.append(f"versions  {len(found['versions'])}")
    lines += [
        f"refused   step {r['step']}, {r['attempts']} times, gate {r['gate']}: {r['reason']}"
        for r in found["refused"]
    ]
    return "\n".join(lines)


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
