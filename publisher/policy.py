"""What a version must reach and how it is made: one TOML file, all of it optional.

[tables]                      # format of each table: the first pattern that fits its key wins
"model.ebc.user.*" = "fp16"
"*" = "int8_rowwise"
[gates]
parity_max_abs_err = 0.01
[metric]                      # a user's metric on a replayed batch, against the live version
kind = "auc"
batch = "replay/batch.safetensors"
output = "score"
label = "label"
max_loss = 0.002
[release]
canary = true
[retention]
keep = 10
[build]
workers = 2
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from fnmatch import fnmatchcase
from math import inf, isfinite
from pathlib import Path
from typing import Literal

from ckpt.errors import BadInputError, NotFoundError
from ckpt.typed import decode_settings
from publisher.records import TableFormat

MetricKind = Literal["auc", "normalised_entropy"]
Engine = Literal["processes", "ray"]


@dataclass(frozen=True)
class GateLimits:
    """Thresholds of the gates.

    parity_max_abs_err: the golden request's answers must be closer to fp32 than this.
    dequantisation_max_rel_err: largest error of a table's stored values relative to the fp32 ones, of
        the table as a whole and of its rows on average, see `verdicts.dequantisation_error`. The
        default is twice what int4 does to normally distributed embeddings.
    norm_drift_max_ratio: a table's mean row length must stay within this factor of its parent's.
    """

    parity_max_abs_err: float = 0.01
    dequantisation_max_rel_err: float = 0.2
    norm_drift_max_ratio: float = 4.0


@dataclass(frozen=True)
class MetricGate:
    """A metric of the new version on a replayed batch, which must not be worse than the live one's.

    batch: storage key under the run's root, or a local path: a safetensors file with a request
        and the labels. output: the served output, a probability or a score (auc), (batch,).
    label: name of the labels in the file, (batch,), 0 or 1.
    max_loss: how much worse than the live version's it may be, absolute.
    worst: the worst value that passes where no version is live to compare with.
    """

    kind: MetricKind
    batch: str
    output: str
    label: str
    max_loss: float = 0.0
    worst: float | None = None


@dataclass(frozen=True)
class ReleasePolicy:
    """canary: new versions become the canary and wait for `publisher promote`.

    max_attempts: refusals after which a commit is given up.
    """

    canary: bool = False
    max_attempts: int = 3


@dataclass(frozen=True)
class RetentionPolicy:
    """keep: how many of the newest versions stay beside live, canary, previous and pinned; 0: all do."""

    keep: int = 10


@dataclass(frozen=True)
class BuildPolicy:
    """How tables are streamed.

    engine: `processes` of this host, or a Ray cluster. workers: 0 works in this process.
    memory_mib: what all workers of a host together may hold of tables at once.
    """

    engine: Engine = "processes"
    workers: int = 0
    memory_mib: int = 64


@dataclass(frozen=True)
class Policy:
    """All settings of a publisher that concern versions."""

    tables: Mapping[str, TableFormat] = field(default_factory=dict)
    gates: GateLimits = GateLimits()
    metric: MetricGate | None = None
    release: ReleasePolicy = ReleasePolicy()
    retention: RetentionPolicy = RetentionPolicy()
    build: BuildPolicy = BuildPolicy()

    def format_of(self, fqn: str) -> TableFormat:
        """The format of a table: of the first pattern that fits its key, else int8."""
        for pattern, table_format in self.tables.items():
            if fnmatchcase(fqn, pattern):
                return table_format
        return "int8_rowwise"


def read_policy(path: Path) -> Policy:
    """A policy file. BadInputError names the field that is wrong, NotFoundError the missing file."""
    try:
        body = tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise NotFoundError(f"{path}: no such policy file") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as e:
        raise BadInputError(f"{path}: not a policy file: {e}") from None
    policy = decode_settings(Policy, body, str(path))
    check_policy(policy, str(path))
    return policy


def check_policy(policy: Policy, what: str) -> None:
    """BadInputError for a value that no publisher could work by; `what` names the file."""
    gates, metric, release, build = policy.gates, policy.metric, policy.release, policy.build
    limits = {f"gates.{f.name}": getattr(gates, f.name) for f in fields(gates)}
    if metric:
        limits["metric.max_loss"] = metric.max_loss
    wrong = [f"{n} = {v:g}: give a number from 0 on" for n, v in limits.items() if not 0 <= v < inf]
    if metric and metric.worst is not None and not isfinite(metric.worst):
        wrong.append(f"metric.worst = {metric.worst:g}: give a number")
    if gates.norm_drift_max_ratio < 1:
        wrong.append(f"gates.norm_drift_max_ratio = {gates.norm_drift_max_ratio:g}: 1 or more")
    if release.max_attempts < 1:
        wrong.append("release.max_attempts = 0: 1 or more")
    if build.memory_mib < 1:
        wrong.append("build.memory_mib = 0: 1 or more")
    if wrong:
        raise BadInputError(f"{what}: {'; '.join(wrong)}")


def _toml(value: object) -> str:
    """A string, number or truth value, which TOML spells as JSON does, but for escaped letters."""
    return json.dumps(value, ensure_ascii=False)


def describe_policy(policy: Policy) -> str:
    """A policy with all its settings as the file that would say so."""
    lines = []
    for section in fields(policy):
        found = getattr(policy, section.name)
        if found is None:
            lines.append(f"# [{section.name}] isn't set\n")
            continue
        settings = found if isinstance(found, Mapping) else asdict(found)
        lines.append(f"[{section.name}]")
        for name, value in settings.items():
            key = name if re.fullmatch(r"\w+", name, re.ASCII) else _toml(name)
            lines.append(f"# {key} isn't set" if value is None else f"{key} = {_toml(value)}")
        lines.append("")
    return "\n".join(lines)
