"""`publisher run`, `publisher once` and `publisher policy`: commits become versions."""

from __future__ import annotations

import signal
import threading
import time
from contextlib import ExitStack, closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ckpt.catalog import Catalog
from ckpt.storage import Storage
from publisher.cli.paging import page_options, status_page
from publisher.cli.shared import (
    LineSink,
    as_json_flag,
    open_root,
    registry_option,
    say,
    user_at_host,
    who_option,
    why_option,
)
from publisher.policy import Policy, read_policy
from publisher.registry import Registry, open_registry

if TYPE_CHECKING:
    from ckpt.types import EventSink
    from publisher.compiling import BackgroundCompiler
    from publisher.lease import Lease
    from publisher.publish import Outcome, Publisher

_policy_option = click.option(
    "--policy",
    "policy_file",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Thresholds, formats, release and retention, in TOML; see `publisher policy`.",
)
_max_error = click.option(
    "--max-error",
    type=click.FloatRange(min=0, min_open=True),
    help="Golden parity: the largest absolute error must be below this. Before the policy's.",
)
_engine = click.option(
    "--engine",
    type=click.Choice(("processes", "ray")),
    help="Where tables are written: on this host, or on a Ray cluster. Before the policy's.",
)
_workers = click.option(
    "--workers",
    type=click.IntRange(min=0),
    help="Processes that write tables; 0: this one. Before the policy's.",
)
_lease_ttl = click.option(
    "--lease-ttl",
    type=click.FloatRange(min=0.5),
    default=20.0,
    show_default=True,
    help="Seconds for which this publisher must stand still before another one takes over.",
)


@click.command()
@click.argument("root")
@registry_option
@click.option("--step", type=int, help="Publish this step instead of the newest commit.")
@click.option("--retry", is_flag=True, help="Also if the commit was refused and given up.")
@_policy_option
@_engine
@_workers
@_max_error
@_lease_ttl
@who_option
@why_option
@as_json_flag
def once(
    root: str, registry: str | None, step: int | None, retry: bool, as_json: bool, **options: Any
) -> None:
    """Publish the newest commit of ROOT, unless that is done.

    It goes live, or becomes the canary, unless it, or a newer commit, was so before. Refused while
    another publisher lives on the same registry.
    """
    policy = _effective(options)
    storage, opened = open_root(root), open_registry(root, registry)
    # Before anything is written: the lease is, too.
    info = None if step is None else Catalog(storage).find(step)
    with _leased(opened, options["lease_ttl"]).kept() as lease, ExitStack() as stack:
        lease.acquire_or_fail(_Waiting(lease))
        publisher = _open_publisher(
            storage, opened, policy, lease, _WarnSink(), options["who"], stack
        )
        if info is None:
            outcome = publisher.publish_latest(options["why"] or "publisher once", retry=retry)
        else:
            outcome = publisher.publish(info, options["why"] or f"publisher once --step {step}")
    did = "published" if outcome.built else "was published before"
    is_now = "live" if outcome.live else "not live: another version is"
    if outcome.canary and not outcome.live:
        is_now = "the canary: `publisher promote` makes it live"
    say(
        as_json,
        {
            "version": outcome.version,
            "epoch": outcome.source.epoch,
            "step": outcome.source.step,
            "built": outcome.built,
            "live": outcome.live,
            "canary": outcome.canary,
            "settings": _settings(opened, policy, options),
        },
        f"step {outcome.source.step} {did} as version {outcome.version}, which is {is_now}",
    )


@click.command()
@click.argument("root")
@registry_option
@click.option(
    "--interval",
    type=click.FloatRange(min=0.05),
    default=1.0,
    show_default=True,
    help="Seconds between two looks, each of two listings.",
)
@page_options(prefix="page-")
@click.option(
    "--compile/--no-compile",
    "compile_programs",
    default=True,
    show_default=True,
    help="Compile new programs for this CPU in the background, where there is a compiler.",
)
@_policy_option
@_engine
@_workers
@_max_error
@_lease_ttl
@who_option
@as_json_flag
def run(
    root: str,
    registry: str | None,
    interval: float,
    compile_programs: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Publish commits as they appear, until SIGTERM or SIGINT; what was begun is finished.

    May be started before the trainer, and beside others: one works, the rest stand by. When behind,
    takes the newest commit and skips those between. With --page-port a status page with a roll-back
    button is served beside it.
    """
    from publisher.daemon import Daemon, Pace

    policy = _effective(options)
    sink = LineSink(as_json=as_json)
    stop = threading.Event()
    for name in (signal.SIGTERM, signal.SIGINT):
        signal.signal(name, lambda *_: stop.set())
    compilers: list[BackgroundCompiler] = []
    with ExitStack() as stack:

        def open_publisher() -> Publisher:
            storage, opened = open_root(root), open_registry(root, registry)
            lease = _leased(opened, options["lease_ttl"])
            publisher = _open_publisher(storage, opened, policy, lease, sink, options["who"], stack)
            stack.enter_context(lease.kept())
            if compile_programs:
                compilers.append(stack.enter_context(closing(_compiler(opened, sink))))
            sink.emit("settings", interval_s=interval, **_settings(opened, policy, options))
            return publisher

        def compile_for(outcome: Outcome) -> None:
            for compiler in compilers:
                compiler.consider(outcome.version)

        stack.enter_context(status_page(root, registry, sink, options))
        pace = Pace(interval_s=interval)
        Daemon(open_publisher, stop.wait, pace=pace, sink=sink, after=compile_for).run()
    sink.emit("stopped")


@click.command()
@click.argument("policy_file", metavar="[FILE]", required=False, type=click.Path(path_type=Path))
@as_json_flag
def policy(policy_file: Path | None, as_json: bool) -> None:
    """The settings that a policy FILE comes to, defaults included, as such a file."""
    from publisher.policy import describe_policy

    found = read_policy(policy_file) if policy_file else Policy()
    say(as_json, asdict(found), describe_policy(found).rstrip())


class _Waiting:
    """Sleeps, after saying once what for."""

    def __init__(self, lease: Lease) -> None:
        self._lease = lease
        self._said = False

    def __call__(self, seconds: float) -> None:
        rival = self._lease.rival
        if rival is not None and not self._said:
            self._said = True
            told = f"{rival.owner.pid} on {rival.owner.host}"
            click.echo(
                f"waiting up to {rival.ttl_s:g} s for a sign of life of pid {told}", err=True
            )
        time.sleep(seconds)


class _WarnSink:
    """Tells only what the command's own last line doesn't, on stderr."""

    def emit(self, name: str, /, **fields: Any) -> None:
        if name == "commit_corrupt":
            click.echo(f"step {fields['step']} is passed over: {fields['reason']}", err=True)


def _effective(options: dict[str, Any]) -> Policy:
    """The policy file's settings, and what the command line says instead."""
    file, max_error = options["policy_file"], options["max_error"]
    found = read_policy(file) if file else Policy()
    if max_error is not None:
        found = replace(found, gates=replace(found.gates, parity_max_abs_err=max_error))
    build = {n: options[n] for n in ("engine", "workers") if options[n] is not None}
    return replace(found, build=replace(found.build, **build))


def _settings(registry: Registry, policy: Policy, options: dict[str, Any]) -> dict[str, Any]:
    """What takes effect, wherever it was given, as plain JSON values."""
    return {
        "registry": registry.url,
        "who": options["who"] or user_at_host(),
        "lease_ttl_s": options["lease_ttl"],
        "policy": asdict(policy),
    }


def _leased(registry: Registry, ttl_s: float) -> Lease:
    from publisher.lease import Lease, require_conditions

    require_conditions(registry.storage)
    return Lease(registry, ttl_s=ttl_s)


def _compiler(registry: Registry, sink: EventSink) -> BackgroundCompiler:
    from ckpt.config import trust_file
    from ckpt.trust import TrustList
    from publisher.compiling import BackgroundCompiler

    return BackgroundCompiler(registry, TrustList(trust_file()), sink)


def _open_publisher(  # noqa: PLR0917  (one place that wires everything)
    root: Storage,
    registry: Registry,
    policy: Policy,
    lease: Lease,
    sink: EventSink,
    who: str | None,
    stack: ExitStack,
) -> Publisher:
    from ckpt.config import trust_file
    from ckpt.restore import CheckpointReader
    from ckpt.trust import TrustList
    from publisher.build import VersionBuilder
    from publisher.loading import ProgramCache
    from publisher.metric import metric_in_fresh_process
    from publisher.parity import parity_in_fresh_process
    from publisher.program import rehearse
    from publisher.publish import Publisher

    rehearse()  # what torch imports at the first program is no part of publishing one
    trust = TrustList(trust_file())
    # Its process imports while tables stream.
    parity = stack.enter_context(closing(parity_in_fresh_process(trust)))
    builder = VersionBuilder(root, registry, ProgramCache(trust), CheckpointReader, policy=policy)
    return Publisher(
        builder,
        parity,
        who or user_at_host(),
        policy=policy,
        metric=metric_in_fresh_process(parity.processes),
        lease=lease,
        sink=sink,
    )
