"""What the subcommands share: options, opening a root and its registry, and how results are told."""

from __future__ import annotations

import getpass
import json
import os
import socket
import time
from typing import Any

import click

from ckpt import layout
from ckpt.errors import NotFoundError
from ckpt.storage import Storage, open_storage
from publisher.pointer import Reason
from publisher.registry import Registry, open_registry

registry_option = click.option(
    "--registry", metavar="URL", help="Where the versions are. Default: serving/ below ROOT."
)
as_json_flag = click.option("--json", "as_json", is_flag=True, help="Machine-readable output.")
who_option = click.option("--who", help="Who does this, for the history. Default: user@host.")
why_option = click.option("--why", default="", help="Why, for the history.")


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


def open_root(root: str) -> Storage:
    """A run's root; NotFoundError if no trainer has made one there."""
    storage = open_storage(root, must_exist=True)
    try:
        storage.stat(layout.RUN)
    except NotFoundError:
        raise NotFoundError(f"{storage.url}: no {layout.RUN} here: not the root of a run") from None
    return storage


def open_existing(root: str, registry: str | None) -> Registry:
    """A registry that must be there: its root is a run's, or it has an address of its own."""
    if registry is None:
        open_root(root)
    return open_registry(root, registry, must_exist=True)


def reason(who: str | None, why: str, command: str) -> Reason:
    return Reason(who or user_at_host(), why or command)


def user_at_host() -> str:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a user id without a name, as in many containers
        user = f"uid{os.getuid()}"
    return f"{user}@{socket.gethostname()}"


def say(as_json: bool, body: dict[str, Any], text: str) -> None:
    click.echo(json.dumps(body) if as_json else text)


def when(at_s: float) -> str:
    """A wall-clock time for people; as a number if it's none that a calendar has."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at_s))
    except (OverflowError, ValueError, OSError):
        return f"{at_s:g} s"
