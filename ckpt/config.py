"""The only reader of settings: environment variables and TOML files."""

from __future__ import annotations

import os
import tempfile
import tomllib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints
from urllib.parse import urlsplit

from ckpt.errors import BadInputError, NotFoundError
from ckpt.types import DIGEST_NAMES, DigestName

MIB = 1 << 20
_MOST_SECONDS = 30 * 24 * 3600
_MOST_PENDING = 16  # snapshots that row guards can tell apart; more would be copied whole

WhenBusy = Literal["block", "skip", "coalesce"]
WhenSuperseded = Literal["end", "ignore"]
Compression = Literal["auto", "off"]
Snapshot = Literal["guarded", "copied"]
Proof = Literal["sampled", "full"]
Priority = Literal["idle", "normal"]
S3Addressing = Literal["auto", "path", "virtual"]
S3Encryption = Literal["AES256", "aws:kms", "aws:kms:dsse"]
S3_ENVIRONMENT = "SIDESTAGE_S3_"

T = TypeVar("T")


@dataclass(frozen=True)
class KeepBest:
    """Keep the `count` commits whose annotation `metric` is the smallest ("min") or largest ("max")."""

    metric: str
    count: int = 1
    mode: Literal["min", "max"] = "min"

    def __post_init__(self) -> None:
        if not isinstance(self.metric, str) or not self.metric:
            raise BadInputError("keep_best: name the annotation that holds the metric")
        if not _fits(self.count, int) or self.count < 1:
            raise BadInputError(f"keep_best: count = {self.count!r}: give 1 or more")
        if self.mode not in ("min", "max"):
            raise BadInputError(f"keep_best: mode = {self.mode!r}: use min or max")


@dataclass(frozen=True)
class RetentionPolicy:
    """Which commits to keep: those that any rule names. Without a rule, all of them.

    keep_last: the newest so many. keep_every: those whose step is a multiple of it.
    keep_best: the best by a metric. The newest one that verifies is kept whatever the rules.
    """

    keep_last: int | None = None
    keep_every: int | None = None
    keep_best: KeepBest | None = None

    def __post_init__(self) -> None:
        for name in ("keep_last", "keep_every"):
            value = getattr(self, name)
            if value is not None and (not _fits(value, int) or value < 1):
                raise BadInputError(
                    f"{name} = {value!r}: give 1 or more, or leave it out; without any keep_ rule "
                    f"everything is kept"
                )

    @property
    def keeps_all(self) -> bool:
        return self == RetentionPolicy()


@dataclass(frozen=True)
class CheckpointConfig:
    """How to save.

    chunk_bytes: largest piece of a shard that is written, read and verified at once.
    digest: "xxh3-128" against accidents, "sha256" against tampering too.
    compression: "auto" stores a chunk with zstd where a sample of it says that it pays.
    max_pending: snapshots that may be open or staged and not committed yet. Each costs a copy
        of what isn't guarded of this rank's state in host memory, allocated once and reused.
    when_busy: what save() does when that many are pending: "block" until one is done, "skip"
        this save and count it, or "coalesce": give up the newest one that no thread has begun.
        Where that takes longer than `stall_limit_s`, the save is skipped all the same.
    commit_timeout_s: how long a save may take from staged to committed.
    close_timeout_s: how long close() waits for pending saves.
    when_superseded: another attempt has claimed the root, so that no save of this one can be committed
        any more: "end" raises ConflictError from the next save(), and a session from its next step;
        "ignore" trains on, and each save fails.
    raise_after_failures: raise from the next save() or close() once so many saves in a row
        have failed; None never raises, failures are then only counted and reported.
    snapshot: "guarded" leaves embedding tables and what optimizers own in place when save()
        returns and copies them while training goes on, exactly; nothing but training may change
        them until `handle.staged` is done, see `Checkpointer.save`. "copied" copies everything
        before save() returns: anything may be changed at once, for a second copy in memory.
    staging_bytes: memory for the ring, the overlay and upload buffers of guarded snapshots. None:
        a fifth of the guarded tables, at least 64 MiB. It's host memory, but for the overlay of
        tables on a CUDA device: old rows stay on the device, in the same part of its tables.
    stall_limit_s: how long training may wait for a slow store. A snapshot that has made it wait for
        so long, because its overlay was full, is given up and counted as failed. Waits of save() for
        earlier saves are added up until one of them commits; then they are skipped.
    proof: "sampled" reads some megabytes of what is left in place in save(), in turn, and compares
        them with what is written, to find writes that no guard saw; "full" reads all of it: slow, to
        debug a trainer.
    persist_target_s: spread the writing of a guarded snapshot over so many seconds, so that
        training hardly notices. None: half the time between saves, but not slower than
        64 MiB/s; 0: as fast as possible. It's shortened as the overlay fills.
    persist_bytes_per_s: never write faster than this. None: no limit.
    persist_priority: "idle" runs the persist threads only when a core is free, and raises them
        when they fall behind; "normal" competes with training.
    keep_last, keep_every, keep_best: what rank 0 keeps after each commit, see RetentionPolicy;
        all None keeps everything.
    """

    chunk_bytes: int = 16 * MIB
    digest: DigestName = "xxh3-128"
    compression: Compression = "auto"
    max_pending: int = 1
    when_busy: WhenBusy = "block"
    commit_timeout_s: float = 600.0
    close_timeout_s: float = 600.0
    when_superseded: WhenSuperseded = "end"
    raise_after_failures: int | None = None
    snapshot: Snapshot = "guarded"
    staging_bytes: int | None = None
    stall_limit_s: float = 60.0
    proof: Proof = "sampled"
    persist_target_s: float | None = None
    persist_bytes_per_s: int | None = None
    persist_priority: Priority = "idle"
    keep_last: int | None = None
    keep_every: int | None = None
    keep_best: KeepBest | None = None

    def __post_init__(self) -> None:
        hints = get_type_hints(CheckpointConfig)
        for f in fields(self):
            value = getattr(self, f.name)
            # The choices among words are checked below, where they can be named.
            if get_origin(hints[f.name]) is not Literal and not _fits(value, hints[f.name]):
                raise BadInputError(f"{f.name} = {value!r} is not of type {f.type}")
        if self.digest not in DIGEST_NAMES:
            raise BadInputError(f"digest = {self.digest!r}: use one of {', '.join(DIGEST_NAMES)}")
        for name, kind in (
            ("when_busy", WhenBusy),
            ("when_superseded", WhenSuperseded),
            ("compression", Compression),
            ("snapshot", Snapshot),
            ("proof", Proof),
            ("persist_priority", Priority),
        ):
            if getattr(self, name) not in get_args(kind):
                raise BadInputError(
                    f"{name} = {getattr(self, name)!r}: use one of {', '.join(get_args(kind))}"
                )
        if not 4096 <= self.chunk_bytes <= 1 << 30:
            raise BadInputError(f"chunk_bytes = {self.chunk_bytes}: give 4096 to {1 << 30}")
        if not 1 <= self.max_pending <= _MOST_PENDING:
            raise BadInputError(f"max_pending = {self.max_pending}: give 1 to {_MOST_PENDING}")
        if self.when_busy == "coalesce" and self.max_pending < 2:
            raise BadInputError("when_busy = 'coalesce' needs max_pending of at least 2")
        for name in ("commit_timeout_s", "close_timeout_s", "stall_limit_s"):
            if not 0 < getattr(self, name) <= _MOST_SECONDS:  # false for nan, too
                raise BadInputError(
                    f"{name} = {getattr(self, name)}: give seconds above 0, at most {_MOST_SECONDS}"
                )
        if self.persist_target_s is not None and not 0 <= self.persist_target_s <= _MOST_SECONDS:
            raise BadInputError(
                f"persist_target_s = {self.persist_target_s}: give 0 or more seconds"
            )
        for name, least in (("staging_bytes", 16 * MIB), ("persist_bytes_per_s", 1 * MIB)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise BadInputError(f"{name} = {value}: give at least {least}, or leave it out")
        if self.raise_after_failures is not None and self.raise_after_failures < 1:
            raise BadInputError(
                f"raise_after_failures = {self.raise_after_failures}: give 1 or more, or leave it out"
            )
        _ = self.retention  # refuses what isn't a policy

    @property
    def retention(self) -> RetentionPolicy:
        return RetentionPolicy(self.keep_last, self.keep_every, self.keep_best)


@dataclass(frozen=True)
class S3Settings:
    """How to reach an S3 store and write to it. Credentials: from the usual AWS chain, only.

    Each is read by `s3_settings` from the environment variable SIDESTAGE_S3_ and its name.

    endpoint: URL of the store. None: AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL, the AWS profile's
        endpoint_url, else AWS itself.
    region: None: AWS_DEFAULT_REGION, AWS_REGION, else the AWS profile's.
    addressing: bucket in the "path", or in the host name ("virtual"). "auto" takes the path
        where an endpoint is given or the bucket's name has dots.
    encryption: what the store is asked to encrypt new objects with, by the header
        x-amz-server-side-encryption. None: the bucket's default.
    kms_key: id or ARN of the key for "aws:kms" and "aws:kms:dsse". None: the account's default.
    part_bytes: objects above this are sent and read in parts of this size.
    parallel: parts of one object on their way at a time. A writer's memory is at most
        (parallel + 1) x part_bytes for the first 1,000 parts, and grows slowly after.
    """

    endpoint: str | None = None
    region: str | None = None
    addressing: S3Addressing = "auto"
    encryption: S3Encryption | None = None
    kms_key: str | None = None
    part_bytes: int = 16 * MIB
    parallel: int = 4

    def __post_init__(self) -> None:
        if self.endpoint is not None:
            try:
                parts = urlsplit(self.endpoint)
                good = parts.scheme in ("http", "https") and bool(parts.hostname)
                _ = parts.port  # raises for one that is no number
            except ValueError:
                good = False
            if not good:
                raise BadInputError(
                    f"S3 endpoint {self.endpoint!r}: give a URL such as https://host:9000"
                )
        for name, kind in (("addressing", S3Addressing), ("encryption", S3Encryption)):
            value = getattr(self, name)
            if value not in get_args(kind) and (name, value) != ("encryption", None):
                raise BadInputError(
                    f"S3 {name} = {value!r}: use one of {', '.join(get_args(kind))}"
                )
        if self.kms_key is not None and self.encryption in (None, "AES256"):
            raise BadInputError("S3 kms_key is set: set encryption to aws:kms or aws:kms:dsse, too")
        if not 5 * MIB <= self.part_bytes <= 512 * MIB:
            raise BadInputError(
                f"S3 part_bytes = {self.part_bytes}: give {5 * MIB} (5 MiB) to {512 * MIB} (512 MiB)"
            )
        if not 1 <= self.parallel <= 64:
            raise BadInputError(f"S3 parallel = {self.parallel}: give 1 to 64")


def s3_settings() -> S3Settings:
    """The S3 settings in this process's environment."""
    found: dict[str, Any] = {}
    for f in fields(S3Settings):
        name = S3_ENVIRONMENT + f.name.upper()
        text = os.environ.get(name, "")
        if not text:
            continue
        if f.name in ("part_bytes", "parallel"):
            if not text.isdecimal():
                raise BadInputError(f"{name} = {text!r}: give a whole number")
            found[f.name] = int(text)
        else:
            found[f.name] = text
    if "region" not in found and not os.environ.get("AWS_DEFAULT_REGION"):
        # What other AWS clients read; botocore doesn't.
        found["region"] = os.environ.get("AWS_REGION") or None
    return S3Settings(**found)


def dataclass_from(kind: type[T], values: Mapping[str, Any], where: str) -> T:
    """Build a settings dataclass from a table, refusing unknown keys and wrong types by name.

    A field that is a dataclass itself takes a table of its own.
    """
    known = {f.name for f in fields(kind)}  # type: ignore[arg-type]
    hints = get_type_hints(kind)
    values = {k: _nested(v, hints.get(k), f"{where}: {k}") for k, v in values.items()}
    for key, value in values.items():
        if key not in known:
            raise BadInputError(
                f"{where}: unknown setting {key!r}; known are {', '.join(sorted(known))}"
            )
        if not _fits(value, hints[key]):
            raise BadInputError(f"{where}: {key} = {value!r} is not of type {hints[key]}")
    try:
        return kind(**values)
    except TypeError as e:
        raise BadInputError(f"{where}: {e}") from e


def _nested(value: Any, hint: Any, where: str) -> Any:
    """A table as the settings dataclass that its field wants; other values as they are."""
    if isinstance(value, dict):
        for kind in (hint, *get_args(hint)):
            if isinstance(kind, type) and is_dataclass(kind):
                return dataclass_from(kind, value, where)
    return value


def _fits(value: Any, hint: Any) -> bool:
    """Is a TOML value acceptable for a field's type? Containers are checked one level deep."""
    origin, args = getattr(hint, "__origin__", None), get_args(hint)
    if origin is Literal:
        return value in args
    if origin in (tuple, list):
        return isinstance(value, list | tuple) and all(_fits(v, args[0]) for v in value)
    if origin is dict:
        return isinstance(value, dict)
    if args:  # a union
        return any(_fits(value, a) for a in args)
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return not isinstance(hint, type) or isinstance(value, hint)


def load_toml(path: Path) -> dict[str, Any]:
    """Parse a TOML file, with the file's name in every error."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise NotFoundError(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError) as e:
        raise BadInputError(f"{path}: can't be read: {e}") from e
    except tomllib.TOMLDecodeError as e:
        raise BadInputError(f"{path}: not valid TOML: {e}") from e


def trust_file() -> Path | None:
    """Where this host's list of trusted code lies; see `ckpt.trust`. None: this user has no home folder."""
    if named := os.environ.get("SIDESTAGE_TRUST_FILE"):
        return Path(named)
    base = _below_home("XDG_CONFIG_HOME", ".config")
    return base / "sidestage" / "trusted-code" if base is not None else None


def spool_folders() -> tuple[Path, ...]:
    """Where this host may keep what is on its way to a store, the best first.

    $SIDESTAGE_SPOOL_DIR and nowhere else, or this user's cache folder, or one in the temporary folder.
    """
    if named := os.environ.get("SIDESTAGE_SPOOL_DIR"):
        return (Path(named),)
    folders = []
    if (base := _below_home("XDG_CACHE_HOME", ".cache")) is not None:
        folders.append(base / "sidestage" / "spool")
    with suppress(FileNotFoundError):  # no folder for temporary files can be written to
        folders.append(Path(tempfile.gettempdir()) / f"sidestage-spool-{os.getuid()}")
    return tuple(folders)


TRACE_VARIABLE = "SIDESTAGE_TRACE_DIR"


def trace_folder() -> Path | None:
    """Where sessions of this process trace their steps, while a resume is proved; None: they don't."""
    named = os.environ.get(TRACE_VARIABLE)
    return Path(named) if named else None


def _below_home(variable: str, default: str) -> Path | None:
    if named := os.environ.get(variable):
        return Path(named)
    try:
        return Path.home() / default
    except (
        RuntimeError
    ):  # no HOME, and a user id without a name: some container platforms give those
        return None


def access_token(file: Path | None) -> str | None:
    """The bearer token that clients must bring: of `file`, else of $SIDESTAGE_TOKEN; None: no token.

    Never an option's value: command lines are seen by all users of a host. BadInputError if it is
    empty or has characters that a header can't carry.
    """
    if file is None:
        token, what = os.environ.get("SIDESTAGE_TOKEN"), "SIDESTAGE_TOKEN"
        if token is None:
            return None
    else:
        what = str(file)
        try:
            token = file.read_text()
        except FileNotFoundError:
            raise NotFoundError(f"{file}: no such token file") from None
        except (OSError, UnicodeDecodeError) as e:
            raise BadInputError(f"{file}: not a token file: {e}") from None
    token = token.strip()
    if not token or not all("!" <= c <= "~" for c in token):
        raise BadInputError(f"{what}: holds no token: one word of printable ASCII is needed")
    return token


def cache_folder() -> Path | None:
    """Where this host keeps files of versions that it downloaded: $SIDESTAGE_CACHE_DIR; None: nowhere."""
    named = os.environ.get("SIDESTAGE_CACHE_DIR")
    return Path(named) if named else None


def native_allowed() -> bool:
    """May the compiled part be used? SIDESTAGE_NATIVE=0 says no: everything then goes through torch."""
    return os.environ.get("SIDESTAGE_NATIVE", "1") != "0"


def job_moments() -> dict[str, float | None]:
    """When the scheduler got this job and when it gave it machines, Unix seconds; None: nobody said.

    $SIDESTAGE_SUBMITTED_AT and $SIDESTAGE_ALLOCATED_AT. What is no number counts as not said.
    """
    found: dict[str, float | None] = {}
    for key in ("submitted_at_s", "allocated_at_s"):
        try:
            found[key] = float(os.environ.get(f"SIDESTAGE_{key.removesuffix('_s').upper()}", "nan"))
        except ValueError:
            found[key] = None
        if not 0 < (found[key] or 0) < 1e12:  # NaN too
            found[key] = None
    return found


def launched_by_torchrun() -> bool:
    """Is the parent of this process torchrun?"""
    return "TORCHELASTIC_RUN_ID" in os.environ


def launched_ranks() -> tuple[int, int, int]:
    """(rank, world size, ranks on this host) as a launcher says them; (0, 1, 1) where none does.

    A launcher that doesn't say how many are on this host is taken to have put all of them here.
    """
    try:
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    except (KeyError, ValueError):
        return 0, 1, 1
    return rank, world_size, max(1, ranks_here)


def check_joined(what: str) -> None:
    """For a process that is in no process group: BadInputError if a launcher has started several ranks.

    what: would take this process for the only one.
    """
    try:
        world_size = int(os.environ.get("WORLD_SIZE", "1"))
    except ValueError:
        return
    if world_size > 1:
        raise BadInputError(
            f"WORLD_SIZE is {world_size} and this process is in no process group: call "
            f"torch.distributed.init_process_group first ({what} would take this process for the only "
            f"one), or pass rank and world_size"
        )


def restart_count() -> int:
    """How often torchrun has restarted this job; 0 without torchrun."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
