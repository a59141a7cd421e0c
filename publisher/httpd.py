"""What the inference server and the status page share: sockets, uvicorn, tokens, JSON. No torch."""

from __future__ import annotations

import errno
import hmac
import json
import signal
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import uvicorn
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from ckpt.errors import BadInputError, StorageError


class AddressError(StorageError):
    """The address to listen on is taken or can't be used."""


class HttpError(Exception):
    """An answer of `status` with one line, {"error": ...}."""

    def __init__(self, status: int, message: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.headers = headers


def bind(host: str, port: int) -> socket.socket:
    """A listening TCP socket; port 0 takes a free one. AddressError if that can't be."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as e:
        raise BadInputError(f"{host}: not an address of this host: {e.strerror}") from None
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind(address)
        sock.listen(1024)
    except OSError as e:
        sock.close()
        why = "is in use by another process" if e.errno == errno.EADDRINUSE else f"{e.strerror}"
        raise AddressError(f"{host}:{port}: {why}; choose another port") from None
    return sock


class HttpServer(uvicorn.Server):
    """A uvicorn server that ends normally on SIGTERM and SIGINT, after draining."""

    def __init__(self, app: ASGIApp, drain_s: int) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                log_level="warning",
                access_log=False,
                server_header=False,
                lifespan="off",
                ws="none",
                timeout_graceful_shutdown=drain_s,
            )
        )

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Not uvicorn's, which raises the signal again at the end: the exit code would not be 0."""
        yield

    def stop(self) -> None:
        """Stop accepting, finish what is in flight, then return from `run`."""
        self.should_exit = True

    def stop_on_signals(self) -> None:
        """Main thread only."""
        for name in (signal.SIGTERM, signal.SIGINT):
            signal.signal(name, lambda *_: self.stop())


class TokenGate:
    """Lets requests through that bring the token, and those for `open_paths`; others get 401.

    Args:
        app: what they are let through to.
        token: what `Authorization: Bearer ...` must say, compared in constant time; None: no gate.
        open_paths: those that need no token.
        refused: called for each 401.
    """

    def __init__(
        self,
        app: ASGIApp,
        token: str | None,
        open_paths: frozenset[str],
        refused: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._app = app
        self._token = token and token.encode()
        self._open = open_paths
        self._refused = refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in self._open or self._knows(scope):
            await self._app(scope, receive, send)
            return
        self._refused("unauthorised")
        given = "authorization" in Headers(scope=scope)
        challenge = 'Bearer realm="sidestage"' + (', error="invalid_token"' if given else "")
        told = (
            "the bearer token is wrong" if given else "needs a header: Authorization: Bearer TOKEN"
        )
        answer = json_response({"error": told}, 401, {"WWW-Authenticate": challenge})
        await answer(scope, receive, send)

    def _knows(self, scope: Scope) -> bool:
        if not self._token:
            return True
        scheme, _, given = Headers(scope=scope).get("authorization", "").partition(" ")
        # Headers are latin-1; the token is ASCII, so a wrong byte can't become a right one.
        same = hmac.compare_digest(given.strip().encode("latin-1"), self._token)
        return same and scheme.lower() == "bearer"


async def read_body(request: Request, limit: int) -> bytes:
    """A request's body; HttpError 413 if it has more than `limit` bytes, without reading them all."""
    too_large = HttpError(413, f"the body is larger than {limit} bytes, this server's limit")
    if int(request.headers.get("content-length", 0)) > limit:
        raise too_large
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > limit:
            raise too_large
        parts.append(part)
    return b"".join(parts)


def json_response(
    body: Any, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    return Response(json.dumps(body), status, headers, media_type="application/json")


async def unrouted(request: Request, error: Exception) -> Response:
    """No such path, or not with this method."""
    assert isinstance(error, HTTPException)
    told = f"{request.method} {request.url.path}: {error.detail.lower()}"
    return json_response({"error": told}, error.status_code, error.headers)
