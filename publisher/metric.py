"""A user's metric of a version on a replayed batch, found in a process of its own (`publisher.spare`).

The process loads the version as a serving host would. The batch is a safetensors file with a
request and the labels.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Protocol

from ckpt.errors import BadInputError
from ckpt.typed import decode_stored
from publisher.policy import MetricGate
from publisher.records import VersionManifest
from publisher.registry import Registry
from publisher.spare import SpareProcesses

if TYPE_CHECKING:
    import torch

    from publisher.loading import ProgramCache

# As float32 ends near 1: a sigmoid that is exactly 1 there is no certainty.
_SURE = 1e-7


class MetricCheck(Protocol):
    """Gives the metric of a version on a batch, the bytes of a safetensors file."""

    def __call__(
        self, registry: Registry, manifest: VersionManifest, gate: MetricGate, batch: bytes, /
    ) -> float: ...


def auc(scores: torch.Tensor, labels: torch.Tensor) -> float:
    """Area under the ROC curve of (batch,) scores against (batch,) labels 0 and 1; ties count half.

    Exact, by the ranks of the scores (Mann-Whitney). NaN if a score is NaN. Raises BadInputError
    if all labels are alike.
    """
    import torch

    positive = _positives(labels)
    if scores.isnan().any():
        return math.nan
    _, which, counts = torch.unique(scores.double(), return_inverse=True, return_counts=True)
    ranks = counts.cumsum(0).double() - (counts.double() - 1) / 2
    n = int(positive.sum())
    above = float(ranks[which][positive].sum()) - n * (n + 1) / 2
    return above / (n * (len(positive) - n))


def normalised_entropy(probabilities: torch.Tensor, labels: torch.Tensor) -> float:
    """Mean log loss over the entropy of the labels' base rate (He et al., 2014): below 1 is of use.

    NaN if a probability is NaN. Raises BadInputError outside [0, 1] and if all labels are alike.
    """
    positive = _positives(labels)
    p = probabilities.double()
    if p.isnan().any():
        return math.nan
    if float(p.min()) < 0 or float(p.max()) > 1:
        raise BadInputError(
            f"normalised entropy needs probabilities, these are {float(p.min()):g} to "
            f"{float(p.max()):g}; take auc for scores"
        )
    p = p.clamp(_SURE, 1 - _SURE)
    loss = -float(p.where(positive, 1 - p).log().mean())
    rate = float(positive.double().mean())
    return loss / -(rate * math.log(rate) + (1 - rate) * math.log(1 - rate))


def metric_in_process(
    programs: ProgramCache,
    registry: Registry,
    manifest: VersionManifest,
    gate: MetricGate,
    batch: bytes,
) -> float:
    """Load a version from its files, answer the batch, and measure.

    Raises CorruptError if a file differs from the manifest, BadInputError if the batch doesn't fit.
    """
    from publisher.golden import load_tensors
    from publisher.loading import load_version

    loaded = load_version(registry, manifest, programs)
    tensors = load_tensors(batch, gate.batch)
    labels = _pick(gate.label, tensors, gate.batch)
    outputs = loaded.predict(loaded.request.select(tensors)).outputs
    found = _pick(gate.output, outputs, f"version {manifest.version}").reshape(-1)
    if len(found) != labels.numel():
        raise BadInputError(
            f"{gate.batch}: {labels.numel()} labels, but {gate.output} has {len(found)} values"
        )
    measure = auc if gate.kind == "auc" else normalised_entropy
    return measure(found, labels.reshape(-1))


def metric_in_fresh_process(processes: SpareProcesses) -> MetricCheck:
    """The same in a process of its own."""

    def check(
        registry: Registry, manifest: VersionManifest, gate: MetricGate, batch: bytes
    ) -> float:
        answer = processes.run(
            "publisher.metric:answer_metric",
            registry,
            manifest,
            "metric",
            measure=asdict(gate),
            batch=base64.b64encode(batch).decode(),
        )
        figure = answer.get("figure")
        return math.nan if figure is None else float(figure)

    return check


def answer_metric(
    registry: Registry,
    manifest: VersionManifest,
    programs: ProgramCache,
    *,
    measure: dict[str, Any],
    batch: str,
) -> dict[str, Any]:
    """What the fresh process does. JSON has no NaN: no figure stands for it."""
    gate = decode_stored(MetricGate, measure, "metric")
    found = metric_in_process(programs, registry, manifest, gate, base64.b64decode(batch))
    return {"figure": found if math.isfinite(found) else None}


def _positives(labels: torch.Tensor) -> torch.Tensor:
    positive = labels == 1
    if not (positive | (labels == 0)).all():
        raise BadInputError("labels must be 0 or 1")
    if positive.all() or not positive.any():
        raise BadInputError(f"all {len(labels)} labels are alike: nothing can be told apart")
    return positive


def _pick(name: str, tensors: Mapping[str, torch.Tensor], where: str) -> torch.Tensor:
    if name not in tensors:
        raise BadInputError(f"{where}: has no {name}, only {', '.join(sorted(tensors))}")
    return tensors[name]
