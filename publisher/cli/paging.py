"""`publisher page`, and the status page beside a daemon."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ckpt.config import access_token
from publisher.cli.shared import (
    LineSink,
    as_json_flag,
    open_existing,
    open_root,
    registry_option,
    user_at_host,
    who_option,
)
from publisher.registry import open_registry

if TYPE_CHECKING:
    from ckpt.types import EventSink

Command = Callable[..., None]


def page_options(*, prefix: str) -> Callable[[Command], Command]:
    """Where the status page is, and who may use it."""
    port: dict[str, Any] = {"help": "Serve the status page here; 0 takes a free port."}
    if not prefix:
        port = {"default": 8081, "show_default": True, "help": "0 takes a free one."}

    def add(command: Command) -> Command:
        for option in (
            click.option(
                f"--{prefix}token-file",
                "page_token_file",
                type=click.Path(path_type=Path),
                help="The page needs this file's token. Default: $SIDESTAGE_TOKEN; else none.",
            ),
            click.option(
                f"--{prefix}host",
                "page_host",
                default="127.0.0.1",
                show_default=True,
                help="Address the page listens on; others than this host's own need a token.",
            ),
            click.option(f"--{prefix}port", "page_port", type=click.IntRange(0, 65535), **port),
        ):
            command = option(command)
        return command

    return add


@click.command()
@click.argument("root")
@registry_option
@page_options(prefix="")
@who_option
@as_json_flag
def page(root: str, registry: str | None, as_json: bool, **options: Any) -> None:
    """The status page without a publisher: what is live, why, how fresh, and a roll-back button."""
    sink = LineSink(as_json=as_json)
    stop = threading.Event()
    for name in (signal.SIGTERM, signal.SIGINT):
        signal.signal(name, lambda *_: stop.set())
    open_existing(root, registry)
    with status_page(root, registry, sink, options):
        stop.wait()
    sink.emit("stopped")


@contextmanager
def status_page(
    root: str, registry: str | None, sink: EventSink, options: dict[str, Any]
) -> Iterator[None]:
    """The status page while the block runs, if a port is given for it."""
    port, host = options["page_port"], options["page_host"]
    if port is None:
        yield
        return
    from publisher.httpd import bind
    from publisher.overview import Overview
    from publisher.page import PageThread, StatusPage, check_exposure

    token = access_token(options["page_token_file"])
    check_exposure(host, token)

    def open_overview() -> Overview:
        return Overview(open_root(root), open_registry(root, registry))

    shown = StatusPage(open_overview, options["who"] or user_at_host(), token=token)
    sock = bind(host, port)
    thread = PageThread(shown, sock, sink)
    thread.start()
    taken = sock.getsockname()[1]
    sink.emit("page", url=f"http://{f'[{host}]' if ':' in host else host}:{taken}/", port=taken)
    try:
        yield
    finally:
        thread.stop()
