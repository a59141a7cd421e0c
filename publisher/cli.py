"""The `publisher` command. Each subcommand imports what it needs: `status` needs no torch."""

from __future__ import annotations

import getpass
import json
import os
import signal
import socket
import threading
import time
from typing import TYPE_CHECKING, Any

import click

from ckpt import layout
from ckpt.command import entry
from ckpt.errors import NotFoundError
from ckpt.storage import Storage, open_storage
from publisher.registry import Registry, open_registry

if TYPE_CHECKING:
    from ckpt.types import EventSink
    from publisher.publish import Publisher

_registry = click.option(
    "--registry", metavar="URL", help="Where the versions are. Default: serving/ below ROOT."
)
_json_flag = click.option("--json", "as_json", is_flag=True, help="Machine-readable output.")
_who = click.option("--who", help="Who does this, for the history. Default: user@host.")
_why = click.option("--why", default="", help="Why, for the history.")
_max_error = click.option(
    "--max-error",
    type=click.FloatRange(min=0, min_open=True),
    default=0.01,
    show_default=True,
    help="Golden parity: the largest absolute error must be below this.",
)


class LineSink:
    """Prints events as lines, or as JSON lines."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json

    def emit(self, name: str, /, **fields: Any) -> None:
        if self._as_json:
            click.echo(json.dumps({"event": name, "at_s": time.time(), **fields}))
        else:
            told = " ".join(f"{k}={v}" for k, v in fields.items())
            click.echo(f"{time.strftime('%H:%M:%S')} {name} {told}".rstrip())


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="sidestage")
def cli() -> None:
    """Publish checkpoints as served versions, from outside of the trainer.

    ROOT is the storage root that the trainer writes to. Exit codes: 0 done; 2 bad input, or
    refused by a gate; 3 not found; 4 conflict; 5 corrupt; 6 storage or port; 130 interrupted.
    """


@cli.command()
@click.argument("root")
@_registry
@click.option("--step", type=int, help="Publish this step instead of the newest commit.")
@click.option("--retry", is_flag=True, help="Also if the commit was refused and given up.")
@_max_error
@_who
@_why
@_json_flag
def once(
    root: str, registry: str | None, step: int | None, retry: bool, as_json: bool, **options: Any
) -> None:
    """Publish the newest commit of ROOT, unless that is done.

    It goes live unless it, or a newer commit, was live before.
    """
    storage = _open_root(root)
    sink = _WarnSink()
    publisher = _open_publisher(storage, open_registry(root, registry), sink, options)
    if step is None:
        outcome = publisher.publish_latest(options["why"] or "publisher once", retry=retry)
    else:
        info = publisher.catalog.find(step)
        outcome = publisher.publish(info, options["why"] or f"publisher once --step {step}")
    did = "published" if outcome.built else "was published before"
    live = "live" if outcome.live else "not live: another version is"
    _say(
        as_json,
        {
            "version": outcome.version,
            "epoch": outcome.source.epoch,
            "step": outcome.source.step,
            "built": outcome.built,
            "live": outcome.live,
        },
        f"step {outcome.source.step} {did} as version {outcome.version}, which is {live}",
    )


@cli.command()
@click.argument("root")
@_registry
@click.option(
    "--interval",
    type=click.FloatRange(min=0.05),
    default=2.0,
    show_default=True,
    help="Seconds between two looks.",
)
@_max_error
@_who
@_json_flag
def run(root: str, registry: str | None, interval: float, as_json: bool, **options: Any) -> None:
    """Publish commits as they appear, until SIGTERM or SIGINT; what was begun is finished.

    May be started before the trainer. When behind, takes the newest commit and skips the rest.
    """
    from publisher.daemon import Daemon, Pace

    sink = LineSink(as_json=as_json)
    stop = threading.Event()
    for name in (signal.SIGTERM, signal.SIGINT):
        signal.signal(name, lambda *_: stop.set())

    def open_publisher() -> Publisher:
        return _open_publisher(_open_root(root), open_registry(root, registry), sink, options)

    Daemon(open_publisher, stop.wait, pace=Pace(interval_s=interval), sink=sink).run()
    sink.emit("stopped")


@cli.command(name="compile")
@click.argument("root")
@_registry
@click.option("--version", "number", type=int, help="Whose program. Default: the live version's.")
@_json_flag
def compile_(root: str, registry: str | None, number: int | None, as_json: bool) -> None:
    """Compile a version's program for this CPU, once for all versions that share it.

    The package goes to the registry and its sha256 to this host's trust list; hosts with such a CPU
    that trust it use it from the next version that they load.
    """
    opened = _open_existing(root, registry)
    if number is None:
        move = opened.live()
        number = move.to_version if move is not None else None
        if number is None:
            raise NotFoundError(f"{opened.url}: no version is live yet; publish one first")
    from dataclasses import asdict

    from ckpt.config import trust_file
    from ckpt.trust import TrustList
    from publisher.compiling import compile_version

    record, made = compile_version(opened, opened.version(number), TrustList(trust_file()))
    did = f"compiled in {record.compile_s:.0f} s" if made else "was compiled before"
    _say(
        as_json,
        {**asdict(record), "made": made},
        f"program of version {number} {did}: {record.sha256}.pt2, {record.size_bytes} bytes, "
        f"for {record.instruction_set}",
    )


@cli.command()
@click.argument("root")
@_registry
@_json_flag
def status(root: str, registry: str | None, as_json: bool) -> None:
    """What is live, what is newest, and which commits were refused."""
    from publisher.status import describe_status, status_of

    found = status_of(_open_root(root), open_registry(root, registry))
    _say(as_json, found, describe_status(found))


@cli.command()
@click.argument("root")
@_registry
@click.option("--to", type=int, help="The version to go back to. Default: what was live before.")
@_who
@_why
@_json_flag
def rollback(  # noqa: PLR0917  (options of a command)
    root: str, registry: str | None, to: int | None, who: str | None, why: str, as_json: bool
) -> None:
    """Make an earlier version live, by one move of the pointer; again: one further back.

    The daemon leaves it at that until a newer commit is published.
    """
    from dataclasses import asdict

    from publisher.pointer import Reason

    opened = _open_existing(root, registry)
    move = opened.rollback(to, Reason(who or _user_at_host(), why or "publisher rollback"))
    was = f"was {move.from_version}" if move.from_version is not None else "was unknown"
    _say(
        as_json, asdict(move), f"version {move.to_version} (step {move.source.step}) is live; {was}"
    )


@cli.command()
@click.argument("root")
@_registry
@click.option("--limit", type=click.IntRange(min=1), help="Only the newest N moves.")
@_json_flag
def history(root: str, registry: str | None, limit: int | None, as_json: bool) -> None:
    """Who made which version live, when and why; oldest first."""
    from dataclasses import asdict

    moves = _open_existing(root, registry).history()[-(limit or 0) :]
    lines = [
        f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(m.at_s))}  {m.kind:8}  "
        f"{'-' if m.from_version is None else m.from_version} -> {m.to_version}  "
        f"step {m.source.step}  {m.who}: {m.why}"
        for m in moves
    ]
    _say(
        as_json,
        {"moves": [asdict(m) for m in moves]},
        "\n".join(lines) or "no version was live yet",
    )


@cli.command()
@click.argument("root")
@_registry
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=8080,
    show_default=True,
    help="0 takes a free one.",
)
@click.option(
    "--interval",
    type=click.FloatRange(min=0.02),
    default=1.0,
    show_default=True,
    help="Seconds between two looks at the live pointer.",
)
@click.option(
    "--max-body-mib",
    type=click.IntRange(min=1),
    default=64,
    show_default=True,
    help="Largest request body.",
)
@_json_flag
def serve(  # noqa: PLR0917  (options of a command)
    root: str,
    registry: str | None,
    host: str,
    port: int,
    interval: float,
    max_body_mib: int,
    as_json: bool,
) -> None:
    """Answer requests over HTTP from the live version, and follow the pointer.

    Speaks the Open Inference Protocol. Answers 503 until a version is live. SIGTERM finishes
    the requests in flight and exits 0.
    """
    opened = _open_existing(root, registry)
    from publisher.hosting import ModelHost
    from publisher.predictor import Predictor
    from publisher.server import InferenceApp, InferenceServer, ServerLimits, bind

    sink = LineSink(as_json=as_json)
    sock = bind(host, port)
    limits = ServerLimits(max_body_bytes=max_body_mib << 20)
    models = ModelHost(lambda: Predictor(opened), interval, sink)
    app = InferenceApp(models, limits, sink)
    server = InferenceServer(app, limits.drain_s)
    server.stop_on_signals()
    models.start()
    try:
        address = sock.getsockname()
        sink.emit("listening", url=f"http://{host}:{address[1]}", port=address[1])
        server.run(sockets=[sock])
    finally:
        models.stop()
        app.close()
        sock.close()
    sink.emit("stopped")


class _WarnSink:
    """Tells only what the command's own last line doesn't, on stderr."""

    def emit(self, name: str, /, **fields: Any) -> None:
        if name == "commit_corrupt":
            click.echo(f"step {fields['step']} is passed over: {fields['reason']}", err=True)


def _open_root(root: str) -> Storage:
    """A run's root; NotFoundError if no trainer has made one there."""
    storage = open_storage(root, must_exist=True)
    try:
        storage.stat(layout.RUN)
    except NotFoundError:
        raise NotFoundError(f"{storage.url}: no {layout.RUN} here: not the root of a run") from None
    return storage


def _open_existing(root: str, registry: str | None) -> Registry:
    if registry is None:
        _open_root(root)
    return open_registry(root, registry, must_exist=True)


def _open_publisher(
    root: Storage, registry: Registry, sink: EventSink, options: dict[str, Any]
) -> Publisher:
    from ckpt.config import trust_file
    from ckpt.restore import CheckpointReader
    from ckpt.trust import TrustList
    from publisher.build import VersionBuilder
    from publisher.loading import ProgramCache
    from publisher.parity import parity_in_fresh_process
    from publisher.publish import Publisher, PublishPolicy

    trust = TrustList(trust_file())
    builder = VersionBuilder(root, registry, ProgramCache(trust), CheckpointReader)
    return Publisher(
        builder,
        parity_in_fresh_process(trust),
        options["who"] or _user_at_host(),
        policy=PublishPolicy(parity_max_abs_err=options["max_error"]),
        sink=sink,
    )


def _user_at_host() -> str:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a user id without a name, as in many containers
        user = f"uid{os.getuid()}"
    return f"{user}@{socket.gethostname()}"


def _say(as_json: bool, body: dict[str, Any], text: str) -> None:
    click.echo(json.dumps(body) if as_json else text)


main = entry(cli)

if __name__ == "__main__":
    main()
