"""A user's metric of a version on a replayed batch, found in a process of its own.

    python -m publisher.metric STORAGE PREFIX < question

loads a version as a serving host would and prints how well it does. The question is one line of
JSON (`Question`), then the bytes of the batch: a safetensors file with a request and the labels.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Protocol

from ckpt import config
from ckpt.errors import BadInputError
from ckpt.storage import open_storage
from ckpt.trust import TrustList
from ckpt.typed import decode_stored
from publisher.fresh import answer, figure_in_fresh_process
from publisher.policy import MetricGate
from publisher.records import VersionManifest, decode, encode
from publisher.registry import Registry

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
    from publisher.loading import load_tensors, load_version

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


def metric_in_fresh_process(trust: TrustList, timeout_s: float = 600.0) -> MetricCheck:
    """The same in a process of its own, killed after `timeout_s` seconds."""

    def check(
        registry: Registry, manifest: VersionManifest, gate: MetricGate, batch: bytes
    ) -> float:
        head = json.dumps(asdict(Question(encode(manifest).decode(), gate))).encode()
        command = ("publisher.metric", registry.storage.url, registry.prefix)
        data = head + b"\n" + batch
        return figure_in_fresh_process("metric", command, data, trust, timeout_s)

    return check


@dataclass(frozen=True)
class Question:
    """What the fresh process is asked, beside the batch. `manifest`: a sealed document."""

    manifest: str
    gate: MetricGate


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


def _find_out() -> float:
    url, prefix = sys.argv[1:]
    head, _, batch = sys.stdin.buffer.read().partition(b"\n")
    question = decode_stored(Question, json.loads(head), "question")
    draft = decode(VersionManifest, question.manifest.encode(), "draft manifest")
    registry = Registry(open_storage(url, must_exist=True), prefix)
    from publisher.loading import ProgramCache

    programs = ProgramCache(TrustList(config.trust_file()))
    return metric_in_process(programs, registry, draft, question.gate, batch)


if __name__ == "__main__":
    sys.exit(answer(_find_out))
