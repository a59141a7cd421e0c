"""The status page: one page with a roll-back button, on a thread beside the daemon. No torch.

    GET /               the page; needs no token: it holds no data
    GET /api/status     what it shows, as JSON
    POST /api/rollback  {"to": 7, "seen": 8, "who": "...", "why": "..."}
    POST /api/promote   {"version": 9, "seen": 8, "who": "...", "why": "..."}

`seen` is the live version that the user saw: if another one is live by now, nothing moves (409).

A page of another site must not be able to move the pointer through a browser that reaches this one:
writes need a header that such a page can't send, and an origin that is ours. Nor must it read or
write by giving its own name this host's address: without a token, only requests to an IP address,
`localhost` or this host's name are answered.
"""

from __future__ import annotations

import ipaddress
import json
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from importlib import resources
from typing import Any
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from ckpt.errors import (
    BadInputError,
    ConflictError,
    CorruptError,
    NotFoundError,
    SidestageError,
)
from ckpt.types import Clock, EventSink, SystemClock
from publisher.httpd import HttpError, HttpServer, TokenGate, json_response, read_body, unrouted
from publisher.overview import Overview
from publisher.pointer import Reason
from publisher.records import Move
from publisher.registry import Registry

_FILES = {
    "/": ("page.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
    "/plot.js": ("plot.js", "text/javascript"),
    "/words.js": ("words.js", "text/javascript"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
_STATUS = ((NotFoundError, 404), (ConflictError, 409), (CorruptError, 409), (BadInputError, 400))
_BODY_BYTES = 16 << 10
_TEXT_CHARACTERS = 500
_STALE_S = 1.0
_DRAIN_S = 1


class StatusPage:
    """The page's routes.

    Args:
        open_overview: opens the registry; NotFoundError while there is none.
        who: of moves made here whose user gives no name.
        token: what API requests must bring; None: no token is needed.
        clock: how old an answer may be that is given again.
    """

    def __init__(
        self,
        open_overview: Callable[[], Overview],
        who: str,
        *,
        token: str | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._open = open_overview
        self._who = who
        self._token = token
        self._clock = clock or SystemClock()
        self._names = {"localhost", socket.gethostname().lower()}
        self._lock = threading.Lock()
        self._overview: Overview | None = None
        self._status = json_response({})
        self._fresh_until_s: float | None = None

    def app(self) -> ASGIApp:
        """The ASGI application."""
        routes = [Route(path, self._guarded(_file), methods=["GET"]) for path in _FILES]
        routes += [
            Route("/api/status", self._guarded(self._get_status), methods=["GET"]),
            Route("/api/rollback", self._guarded(self._post_rollback), methods=["POST"]),
            Route("/api/promote", self._guarded(self._post_promote), methods=["POST"]),
        ]
        app = Starlette(routes=routes, exception_handlers={HTTPException: unrouted})
        return TokenGate(app, self._token, frozenset(_FILES))

    def _guarded(self, of: Callable[[Request], Any]) -> Callable[[Request], Any]:
        async def handler(request: Request) -> Response:
            try:
                self._check_host(request)
                response: Response = await of(request)
            except HttpError as e:
                response = json_response({"error": str(e)}, e.status)
            except SidestageError as e:
                status = next((s for kind, s in _STATUS if isinstance(e, kind)), 503)
                response = json_response({"error": str(e)}, status)
            except ClientDisconnect:
                response = Response(status_code=400)
            except Exception as e:  # shown on the page: the daemon beside it goes on
                response = json_response({"error": f"{type(e).__name__}: {e}"}, 500)
            response.headers.update(_HEADERS)
            return response

        return handler

    def _check_host(self, request: Request) -> None:
        name = _host_in(f"//{request.headers.get('host', '')}")
        if self._token is None and name not in self._names and not _is_address(name):
            raise HttpError(
                403, f"host {name!r}: without a token this page answers by IP address or localhost"
            )

    async def _get_status(self, request: Request) -> Response:
        return await run_in_threadpool(self._current)

    def _current(self) -> Response:
        """What was read a moment ago, or else now: many open pages cost no more than one."""
        with self._lock:
            began_s = self._clock.monotonic()
            if self._fresh_until_s is None or began_s >= self._fresh_until_s:
                try:
                    self._status = json_response(self._opened().read())
                except SidestageError as e:
                    self._status = json_response({"error": str(e)}, 503)
                took_s = self._clock.monotonic() - began_s
                # A slow store is read for a small part of the time only.
                self._fresh_until_s = began_s + max(_STALE_S, 5 * took_s)
            return Response(
                self._status.body, self._status.status_code, media_type="application/json"
            )

    async def _post_rollback(self, request: Request) -> Response:
        doc, reason = await self._wanted(request, "rolled back on the status page")
        to = _version_in(doc, "to")

        seen = _version_in(doc, "seen")
        return await run_in_threadpool(
            self._move, lambda registry: registry.rollback(to, reason, expected=seen)
        )

    async def _post_promote(self, request: Request) -> Response:
        doc, reason = await self._wanted(request, "promoted on the status page")
        version = _version_in(doc, "version")
        if version is None:
            raise BadInputError("version: name the canary that is to go live")

        seen = _version_in(doc, "seen")
        return await run_in_threadpool(
            self._move, lambda registry: registry.promote(reason, version, expected=seen)
        )

    def _move(self, move: Callable[[Registry], Move]) -> Response:
        with self._lock:
            made = move(self._opened().registry)
            self._fresh_until_s = None
        return json_response({"move": asdict(made)})

    async def _wanted(self, request: Request, why: str) -> tuple[dict[str, Any], Reason]:
        """The body of a request that may change something, and its reason for the history."""
        headers = request.headers
        origin = headers.get("origin")
        own = origin is None or origin.partition("://")[2] == headers.get("host")
        site = headers.get("sec-fetch-site", "same-origin")
        if not own or site != "same-origin" or headers.get("x-sidestage") != "page":
            raise HttpError(
                403, "only this page itself may ask for that; scripts send X-Sidestage: page"
            )
        try:
            doc = json.loads(await read_body(request, _BODY_BYTES))
        except (ValueError, RecursionError):
            doc = None
        if not isinstance(doc, dict):
            raise BadInputError("the body is no JSON object")
        who = _text_in(doc, "who")
        return doc, Reason(
            f"{who} (status page)" if who else f"{self._who} (status page)",
            _text_in(doc, "why") or why,
        )

    def _opened(self) -> Overview:
        if self._overview is None:
            self._overview = self._open()
        return self._overview


class PageThread:
    """Serves a page on a thread of its own, until `stop`. What goes wrong there is told, no more."""

    def __init__(self, page: StatusPage, sock: socket.socket, sink: EventSink) -> None:
        self._server = HttpServer(page.app(), _DRAIN_S)
        self._socket = sock
        self._sink = sink
        self._thread = threading.Thread(target=self._run, name="status-page", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Close the page; waits for a request in flight, but not for long."""
        self._server.stop()
        self._thread.join(2 * _DRAIN_S)
        self._socket.close()

    def _run(self) -> None:
        try:
            self._server.run(sockets=[self._socket])
        except BaseException as e:  # uvicorn exits the process where it can't start
            self._sink.emit("page_stopped", reason=f"{type(e).__name__}: {e}")


def check_exposure(host: str, token: str | None) -> None:
    """BadInputError for a page that other hosts would reach without a token: it can roll back."""
    if token is None and host != "localhost" and not _is_address(host, loopback=True):
        raise BadInputError(
            f"page host {host}: other hosts reach it and could roll back; give it a token: "
            f"--page-token-file, or SIDESTAGE_TOKEN"
        )


async def _file(request: Request) -> Response:
    name, media_type = _FILES[request.url.path]
    body = resources.files("publisher").joinpath("page_files", name).read_bytes()
    return Response(body, media_type=media_type)


def _version_in(doc: dict[str, Any], name: str) -> int | None:
    value = doc.get(name)
    if value is not None and (type(value) is not int or value < 1):
        raise BadInputError(f"{name}: {value!r} is no version")
    return value


def _text_in(doc: dict[str, Any], name: str) -> str:
    value = doc.get(name, "")
    if not isinstance(value, str) or len(value) > _TEXT_CHARACTERS or not value.isprintable():
        raise BadInputError(f"{name}: give one line of at most {_TEXT_CHARACTERS} characters")
    return value.strip()


def _host_in(url: str) -> str:
    """The host that a URL names, without its port; empty if it is none."""
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


def _is_address(name: str, *, loopback: bool = False) -> bool:
    with suppress(ValueError):
        address = ipaddress.ip_address(name.partition("%")[0])
        return address.is_loopback or not loopback
    return False
