"""The gates that a version must pass, by name. A refused commit keeps the live version as it is.

digests          the commit's record and notes, its files' sizes, every chunk and file as it is read
trusted_code     the program's sha256 is in this host's trust list
names_and_shapes each constant and table of the description is in the checkpoint, as described
coverage         each row of each table was written exactly once
finite           no NaN or infinity in fp32 before quantising, and nothing beyond fp16's range
norm_drift       the lengths of a table's rows are like those of the parent
dequantisation   what a table's format does to its values is small beside them
id_maps          raw ids become the rows that they became in training
golden_parity    the published files, in a fresh process, answer the golden request as fp32 does
metric           a user's metric on a replayed batch is no worse than the live version's
build            anything else that stopped the build
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager

from ckpt.catalog import Catalog
from ckpt.errors import BadInputError, CorruptError, SidestageError, StorageError
from ckpt.manifest import CommitRecord
from ckpt.schema import EVENT_TIME
from ckpt.storage import Storage
from ckpt.types import CommitRef
from ckpt.verify import verify_commit
from publisher.records import GateName, GateResult

_DECIMAL = re.compile(r"[0-9]{1,12}(\.[0-9]{1,9})?")


class GateError(BadInputError):
    """A gate refused a version. `exit_code` is that of what it found.

    value, threshold: where the gate compares numbers.
    """

    def __init__(
        self,
        gate: GateName,
        reason: str,
        exit_code: int = BadInputError.exit_code,
        *,
        value: float | None = None,
        threshold: float | None = None,
    ) -> None:
        super().__init__(f"gate {gate}: {reason}")
        self.gate = gate
        self.reason = reason
        self.exit_code = exit_code
        self.value = _as_json(value)
        self.threshold = _as_json(threshold)


class GateReport:
    """The results of one version's gates, in the order in which they were decided."""

    def __init__(self) -> None:
        self.results: list[GateResult] = []

    def passed(
        self,
        gate: GateName,
        detail: str,
        value: float | None = None,
        threshold: float | None = None,
    ) -> None:
        self.results.append(GateResult(gate, True, detail, value, threshold))

    @contextmanager
    def guard(self, gate: GateName) -> Iterator[None]:
        """Errors about content inside the block are this gate's; storage failures pass.

        A GateError from inside keeps its own name.
        """
        try:
            yield
        except GateError as e:
            self.results.append(GateResult(e.gate, False, e.reason, e.value, e.threshold))
            raise
        except StorageError:
            raise  # nothing was found out about the commit: try again
        except SidestageError as e:
            self.results.append(GateResult(gate, False, str(e)))
            raise GateError(gate, str(e), e.exit_code) from e


def _as_json(figure: float | None) -> float | None:
    """JSON has no NaN and no infinity: the reason tells them."""
    return figure if figure is not None and math.isfinite(figure) else None


def event_time_of(record: CommitRecord) -> float | None:
    """Event time of the newest batch that a commit was trained on, Unix seconds; None if not noted.

    Raises BadInputError if it is noted otherwise than as a decimal: a wrong time would tell a freshness
    that nobody has.
    """
    noted = record.annotations.get(EVENT_TIME)
    if noted is None:
        return None
    if not _DECIMAL.fullmatch(noted):
        raise BadInputError(
            f"step {record.step}: annotation {EVENT_TIME!r} is {noted[:40]!r}, not Unix seconds as a "
            f"decimal such as '1760000000.25'"
        )
    return float(noted)


def check_commit(catalog: Catalog, storage: Storage, ref: CommitRef) -> CommitRecord:
    """A commit's record by its digest, its files checked as far as that is quick.

    Raises CorruptError naming the first file that is missing, of another size, or damaged.
    """
    record = catalog.read(ref)
    report = verify_commit(storage, record, level="quick")
    if not report.ok:
        more = f" (and {len(report.problems) - 1} more)" if len(report.problems) > 1 else ""
        raise CorruptError(f"step {ref.step}: {report.problems[0]}{more}")
    return record
