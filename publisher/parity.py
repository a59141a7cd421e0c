"""The golden-parity gate: do the published files answer as the fp32 checkpoint does?

The version is loaded in a process of its own (`publisher.spare`), from the published bytes
alone; they are digested again, and the answer to the golden request is compared with the reference.
Whatever crashes there fails the gate, not the publisher.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Protocol

from ckpt.trust import TrustList
from publisher.gates import GateError, GateReport
from publisher.records import VersionManifest
from publisher.registry import Registry
from publisher.spare import SpareProcesses

if TYPE_CHECKING:
    from publisher.loading import ProgramCache


class ParityCheck(Protocol):
    """Gives the largest absolute error of a version on its golden request."""

    def __call__(self, registry: Registry, manifest: VersionManifest, /) -> float: ...


def parity_in_process(
    programs: ProgramCache, registry: Registry, manifest: VersionManifest
) -> float:
    """Load a version from its files, answer the golden request, and compare.

    Raises CorruptError if a file differs from the manifest or an output has another shape.
    """
    from publisher.loading import load_version

    return load_version(registry, manifest, programs).golden_error()


class FreshParity:
    """The same in a process of its own.

    Args:
        processes: gives them; `close()` ends what waits there.
    """

    def __init__(self, processes: SpareProcesses) -> None:
        self.processes = processes

    def __call__(self, registry: Registry, manifest: VersionManifest, /) -> float:
        answer = self.processes.run(
            "publisher.parity:answer_golden", registry, manifest, "golden_parity"
        )
        try:
            return float(answer["max_abs_err"])
        except (KeyError, TypeError, ValueError):
            raise GateError("golden_parity", f"no figure in the answer {answer!r}") from None

    def start(self) -> None:
        """Let the next check's process import what it needs already."""
        self.processes.start()

    def close(self) -> None:
        """End the process that waits for the next check."""
        self.processes.close()


def parity_in_fresh_process(trust: TrustList, timeout_s: float = 600.0) -> FreshParity:
    """A check whose process is killed after `timeout_s` seconds. Close it in the end.

    The first process begins to import at once, so that it's ready when a version is built.
    """
    check = FreshParity(SpareProcesses(trust, timeout_s))
    check.start()
    return check


def parity_verdict(report: GateReport, err: float, threshold: float) -> None:
    """Decide the golden-parity gate: a NaN is no small error."""
    if math.isnan(err) or err >= threshold:
        raise GateError("golden_parity", f"max abs error {err:g}, allowed below {threshold:g}")
    report.passed("golden_parity", f"max abs error {err:.3g}", err, threshold)


def answer_golden(
    registry: Registry, manifest: VersionManifest, programs: ProgramCache
) -> dict[str, Any]:
    """What the fresh process does."""
    return {"max_abs_err": parity_in_process(programs, registry, manifest)}
