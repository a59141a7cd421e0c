"""The settings of `trainer train`: one TOML file, each table of it a small dataclass."""

from __future__ import annotations

import hashlib
import json
import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, cast, get_type_hints

from ckpt.config import CheckpointConfig, dataclass_from, load_toml
from ckpt.errors import BadInputError
from ckpt.terms import RestoreTerms, patterns
from ckpt.typed import decode_settings


@dataclass(frozen=True)
class RunConfig:
    """What to run and where to keep it.

    root: the storage root of the run's checkpoints.
    save_every: steps between saves, or "auto": as often as loses least.
    grace_s: from SIGTERM on any rank until all have saved and ended; 0 leaves the signal alone.
    epochs: passes over the training samples in all, earlier attempts included.
    max_steps: end after so many steps in all, if that comes before.
    device: "auto" takes CUDA where there is one.
    result: a JSON file for the figures of the run, written by rank 0 at the end.
    ledger: a local folder for the ledgers of this run; default is the root itself, or a spool of this host.
    elastic: permit a restore at another world size than that of the checkpoint.
    serial_start: start stage by stage on one thread, always in the same order, to find a defect.
    """

    root: str = ""
    epochs: int = 4
    max_steps: int | None = None
    seed: int = 7
    device: Literal["auto", "cpu", "cuda"] = "auto"
    save_every: int | Literal["auto"] = 100
    grace_s: float = 25.0
    result: str | None = None
    ledger: str | None = None
    elastic: bool = False
    serial_start: bool = False

    def __post_init__(self) -> None:
        if not self.root:
            raise BadInputError("[run] root is missing: name the folder for the checkpoints")
        _at_least(1, "run", epochs=self.epochs)
        if self.max_steps is not None:
            _at_least(1, "run", max_steps=self.max_steps)
        if self.save_every != "auto":
            _at_least(1, "run", save_every=self.save_every)
        if not self.grace_s >= 0:
            raise BadInputError(f"[run] grace_s = {self.grace_s}: give seconds, or 0 for none")


@dataclass(frozen=True)
class DataConfig:
    """folder: where the ml-100k.* files are; default is the installed recbole package."""

    folder: str | None = None
    batch_size: int = 512

    def __post_init__(self) -> None:
        _at_least(1, "data", batch_size=self.batch_size)


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and learning rates.

    dense_layers, over_layers: hidden layer widths before and after the feature interaction.
    row_wise: features whose tables are split by rows; the others lie whole on one rank each.
    """

    embedding_dim: int = 16
    dense_layers: list[int] = field(default_factory=lambda: [32])
    over_layers: list[int] = field(default_factory=lambda: [64, 32])
    row_wise: list[str] = field(default_factory=lambda: ["user", "item"])
    table_lr: float = 0.1
    dense_lr: float = 0.002

    def __post_init__(self) -> None:
        _at_least(1, "model", embedding_dim=self.embedding_dim)
        if not (self.table_lr > 0 and self.dense_lr > 0):
            raise BadInputError("[model] table_lr and dense_lr must be above 0")
        if min([*self.dense_layers, *self.over_layers], default=1) < 1:
            raise BadInputError(
                "[model] dense_layers and over_layers must hold widths of 1 or more"
            )


@dataclass(frozen=True)
class CompileConfig:
    """enabled: compile the dense part. dynamic: once for all batch sizes. cache: keep the result in the root.

    mode: "max-autotune-no-cudagraphs" also measures kernels against each other, on CUDA.
    """

    enabled: bool = False
    dynamic: bool = True
    cache: bool = True
    mode: Literal["default", "max-autotune-no-cudagraphs"] = "default"


@dataclass(frozen=True)
class ServingConfig:
    """export: describe the model for a publisher at start. golden_rows: requests in the golden batch."""

    export: bool = True
    golden_rows: int = 64

    def __post_init__(self) -> None:
        _at_least(2, "serving", golden_rows=self.golden_rows)


@dataclass(frozen=True)
class ProofConfig:
    """dir: where each rank writes its last state, for a comparison with the restored checkpoint."""

    dir: str | None = None
    predictions: int = 64


@dataclass(frozen=True)
class FaultConfig:
    """Kill one rank on purpose: `kill_rank` dies after `kill_at_step`, on one attempt only.

    after_commits: not before this attempt has made so many commits.
    """

    kill_rank: int | None = None
    kill_at_step: int | None = None
    only_on_attempt: int = 0
    after_commits: int = 0

    def __post_init__(self) -> None:
        if (self.kill_rank is None) != (self.kill_at_step is None):
            raise BadInputError("[fault] kill_rank and kill_at_step go together: set both or none")


@dataclass(frozen=True)
class RestoreConfig(RestoreTerms):
    """What a restore may do where the checkpoint and this run aren't alike: ckpt.terms.RestoreTerms."""

    def spelled(self, name: str, value: object) -> str:
        """As it is written in the file."""
        if name == "fresh":
            return "another [run] root"
        if name in ("exclude", "rows"):
            value = list(patterns(cast("Any", value)))
        return f"[restore] {name} = {json.dumps(value)}"


@dataclass(frozen=True)
class TrainConfig:
    """All tables of the file. Each may be left out but [run]."""

    run: RunConfig
    data: DataConfig
    model: ModelConfig
    compile: CompileConfig
    checkpoint: CheckpointConfig
    restore: RestoreConfig
    serving: ServingConfig
    proof: ProofConfig
    fault: FaultConfig


def load_config(path: Path, overrides: Sequence[str] = ()) -> TrainConfig:
    """Read a TOML file, with `section.key=value` overrides laid over it.

    BadInputError names the file, the section and the key that is unknown or of a wrong type.
    """
    tables = load_toml(path)
    for text in overrides:
        section, key, value = _parse_override(text)
        table = tables.setdefault(section, {})
        if isinstance(table, dict):
            table[key] = value
    return config_from(tables, str(path))


def agent_store_address() -> tuple[str, int] | None:
    """(host, port) of the store that torchrun's agent keeps for its workers, or None."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    return os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])


def launched_place() -> tuple[int, int, int] | None:
    """(rank, world size, local rank) as torchrun tells them, or None without a launcher."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    if not all(n in os.environ for n in names):
        return None
    rank, world_size, local_rank = (int(os.environ[n]) for n in names)
    return rank, world_size, local_rank


def launch_name() -> str:
    """A name for this life of this job on this host, the same for all of its ranks here."""
    names = ("TORCHELASTIC_RUN_ID", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")
    if launched_place() is None:
        return f"p{os.getpid()}"
    told = "-".join(os.environ.get(n, "") for n in names)
    return hashlib.sha256(told.encode()).hexdigest()[:16]


def config_from(tables: Mapping[str, Any], where: str) -> TrainConfig:
    """Build the settings from parsed TOML tables; `where` is named in errors."""
    kinds = get_type_hints(TrainConfig)
    sections: dict[str, Any] = {}
    for name, table in tables.items():
        if name not in kinds:
            raise BadInputError(f"{where}: unknown section [{name}]; known are {', '.join(kinds)}")
        if not isinstance(table, dict):
            raise BadInputError(f"{where}: {name} must be a table, [{name}]")
    for f in fields(TrainConfig):
        table, what = tables.get(f.name, {}), f"{where} [{f.name}]"
        if f.name == "restore":  # has lists and a table of names in it
            sections[f.name] = decode_settings(RestoreConfig, table, what)
        else:
            sections[f.name] = dataclass_from(kinds[f.name], table, what)
    return TrainConfig(**sections)


def _parse_override(text: str) -> tuple[str, str, Any]:
    """`section.key=value`; the value is TOML, and a bare word is a string."""
    name, equals, raw = text.partition("=")
    section, dot, key = name.strip().partition(".")
    if not (equals and dot and section and key):
        raise BadInputError(f"--set {text}: write section.key=value, for example run.epochs=2")
    try:
        return section, key, tomllib.loads(f"v = {raw}")["v"]
    except tomllib.TOMLDecodeError:
        return section, key, raw.strip()


def _at_least(least: int, section: str, **values: int) -> None:
    for name, value in values.items():
        if value < least:
            raise BadInputError(f"[{section}] {name} = {value}: give at least {least}")
