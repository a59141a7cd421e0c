"""The metric gate: the new version on a replayed batch, against the live version on the same one."""

from __future__ import annotations

import math
import os
from pathlib import Path

from ckpt.digest import digest_of
from ckpt.errors import BadInputError, NotFoundError
from ckpt.storage import Storage
from publisher.gates import GateError, GateReport
from publisher.metric import MetricCheck
from publisher.policy import MetricGate
from publisher.records import VersionManifest
from publisher.registry import Registry
from publisher.verdicts import decide_metric


class Replay:
    """One metric gate of a publisher.

    Args:
        gate: what is measured.
        root: the run's storage, where the batch may be.
        check: measures one version.
    """

    def __init__(self, gate: MetricGate, root: Storage, check: MetricCheck) -> None:
        self._gate = gate
        self._root = root
        self._check = check
        self._figures: dict[tuple[int, str], float] = {}

    def batch(self) -> bytes:
        """The batch as it is now; NotFoundError or BadInputError, which are no commit's fault."""
        named = os.path.expanduser(self._gate.batch)
        where = named if os.path.isabs(named) else f"{self._root.url}/{named}"
        try:
            return Path(named).read_bytes() if os.path.isabs(named) else self._root.read(named)
        except (FileNotFoundError, NotFoundError):
            raise NotFoundError(
                f"{where}: the batch of [metric] isn't there; put it there"
            ) from None
        except OSError as e:
            raise BadInputError(f"{where}: the batch of [metric] can't be read: {e}") from None

    def decide(
        self,
        report: GateReport,
        registry: Registry,
        draft: VersionManifest,
        live: VersionManifest | str | None,
        batch: bytes,
    ) -> None:
        """Raises GateError if the draft does worse than the live version, or can't be measured.

        `live`: its manifest, or why there is none; None: no version is live.
        """
        digest = digest_of(batch)
        value = self._check(registry, draft, self._gate, batch)
        self._figures = {key: f for key, f in self._figures.items() if key[1] == digest}
        compared: tuple[int, float] | str | None = live if isinstance(live, str) else None
        if isinstance(live, VersionManifest):
            at = (live.version, digest)
            try:
                if at not in self._figures:
                    self._figures[at] = self._check(registry, live, self._gate, batch)
                compared = (live.version, self._figures[at])
                if math.isnan(self._figures[at]):
                    compared = f"that of live version {live.version} is no number"
            except (GateError, BadInputError) as e:
                reason = e.reason if isinstance(e, GateError) else str(e)
                compared = f"live version {live.version} can't be measured: {reason}"
        decide_metric(report, self._gate, value, compared)
        self._figures[draft.version, digest] = value
