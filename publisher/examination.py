"""The gates that look at a version once its files are written: its tables, its answers, its metric."""

from __future__ import annotations

from ckpt.errors import CorruptError, NotFoundError
from publisher.gates import GateReport
from publisher.parity import ParityCheck, parity_verdict
from publisher.policy import GateLimits
from publisher.records import VersionManifest
from publisher.registry import Registry
from publisher.replay import Replay
from publisher.verdicts import decide_dequantisation, decide_norm_drift


class Examination:
    """Decides these gates, the cheap ones first.

    Args:
        limits: thresholds.
        parity: gives the largest error on the golden request.
        replay: the metric gate, if the policy has one.
    """

    def __init__(self, limits: GateLimits, parity: ParityCheck, replay: Replay | None) -> None:
        self._limits = limits
        self._parity = parity
        self._replay = replay

    def batch(self) -> bytes:
        """What the metric is measured on; NotFoundError or BadInputError before a build, not after."""
        return self._replay.batch() if self._replay else b""

    def decide(
        self, report: GateReport, registry: Registry, draft: VersionManifest, batch: bytes
    ) -> None:
        """Raises GateError for the first gate that refuses the draft."""
        parent, problem = self._parent(registry, draft)
        with report.guard("norm_drift"):
            if problem:
                report.passed("norm_drift", f"nothing to compare with: {problem}")
            else:
                known = (parent.version, parent.tables) if parent else None
                limit = self._limits.norm_drift_max_ratio
                decide_norm_drift(report, draft.tables, known, limit)
        with report.guard("dequantisation"):
            limit = self._limits.dequantisation_max_rel_err
            decide_dequantisation(report, draft.tables, limit)
        with report.guard("golden_parity"):
            err = self._parity(registry, draft)
            parity_verdict(report, err, self._limits.parity_max_abs_err)
        if self._replay is not None:
            with report.guard("metric"):
                self._replay.decide(report, registry, draft, problem or parent, batch)

    @staticmethod
    def _parent(
        registry: Registry, draft: VersionManifest
    ) -> tuple[VersionManifest | None, str | None]:
        """The manifest of the version that was live, or why nobody can read it: no fault of the draft."""
        if draft.parent is None:
            return None, None
        try:
            return registry.version(draft.parent), None
        except (NotFoundError, CorruptError) as e:
            return None, f"parent {draft.parent} can't be read: {e}"
