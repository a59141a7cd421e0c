"""HTTP for the published model: the Open Inference Protocol on Starlette and uvicorn.

Inference runs on worker threads; the event loop only moves bytes.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import signal
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from ckpt.errors import BadInputError, SidestageError, StorageError
from ckpt.events import LogSink
from ckpt.types import EventSink
from publisher.hosting import ModelHost
from publisher.inference import metadata_of, parse_request, response_of, wanted_outputs
from publisher.loading import LoadedVersion
from publisher.predictor import Predictor


@dataclass(frozen=True)
class ServerLimits:
    """What a server takes on. Bytes of one request's body; inferences at once; seconds to drain."""

    max_body_bytes: int = 64 << 20
    workers: int = max(2, os.cpu_count() or 1)
    drain_s: int = 30


class _HttpError(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class InferenceApp:
    """The routes. One line of JSON, {"error": ...}, answers whatever can't be served."""

    def __init__(
        self, host: ModelHost, limits: ServerLimits | None = None, sink: EventSink | None = None
    ) -> None:
        self._host = host
        self._limits = limits or ServerLimits()
        self._sink = sink or LogSink()
        self._pool = ThreadPoolExecutor(self._limits.workers, "inference")

    def routes(self) -> Starlette:
        """The ASGI application."""
        model, version = "/v2/models/{model}", "/versions/{version}"
        get: list[tuple[str, Callable[[Request], Any]]] = [
            ("/v2", self._server),
            ("/v2/health/live", self._live),
            ("/v2/health/ready", self._ready),
            (model, self._metadata),
            (f"{model}/ready", self._model_ready),
            (f"{model}{version}", self._metadata),
            (f"{model}{version}/ready", self._model_ready),
        ]
        routes = [Route(path, self._answering(of)) for path, of in get]
        routes += [
            Route(path, self._answering(self._infer), methods=["POST"])
            for path in (f"{model}/infer", f"{model}{version}/infer")
        ]
        return Starlette(routes=routes, exception_handlers={HTTPException: _unrouted})

    def close(self) -> None:
        """Wait for inferences in flight."""
        self._pool.shutdown()

    def _answering(self, of: Callable[[Request], Any]) -> Callable[[Request], Any]:
        """A handler whose errors become statuses: no trace reaches a client."""

        async def handler(request: Request) -> Response:
            try:
                body = await of(request)
            except _HttpError as e:
                return _json({"error": str(e)}, e.status)
            except BadInputError as e:
                return _json({"error": str(e)}, 400)
            except ClientDisconnect:
                return Response(status_code=400)
            except Exception as e:
                reason = f"{type(e).__name__}: {e}"
                self._sink.emit("request_failed", path=request.url.path, reason=reason)
                known = isinstance(e, SidestageError)
                return _json({"error": str(e) if known else "internal error; see the log"}, 500)
            return body if isinstance(body, Response) else _json(body)

        return handler

    async def _server(self, request: Request) -> dict[str, Any]:
        return {"name": "sidestage", "version": "2", "extensions": []}

    async def _live(self, request: Request) -> dict[str, Any]:
        return {"live": True}

    async def _ready(self, request: Request) -> dict[str, Any]:
        self._predictor()
        return {"ready": True}

    async def _model_ready(self, request: Request) -> dict[str, Any]:
        loaded = self._loaded(request, self._predictor())
        return {"name": loaded.description.model, "ready": True}

    async def _metadata(self, request: Request) -> dict[str, Any]:
        loaded = self._loaded(request, self._predictor())
        return metadata_of(loaded.description, loaded.version)

    async def _infer(self, request: Request) -> Response:
        predictor = self._predictor()
        loaded = self._loaded(request, predictor)
        body = await self._body(request)

        def work() -> bytes:
            tensors, doc = parse_request(body)
            names = wanted_outputs(doc, loaded.description)
            prediction = predictor.predict_with(loaded, tensors)
            return response_of(prediction, loaded.description.model, names, doc)

        answer = await asyncio.get_running_loop().run_in_executor(self._pool, work)
        return Response(answer, media_type="application/json")

    def _predictor(self) -> Predictor:
        if self._host.predictor is None:
            raise _HttpError(503, "no version is loaded yet; try again")
        return self._host.predictor

    def _loaded(self, request: Request, predictor: Predictor) -> LoadedVersion:
        """The current version, if it is the one that the path names."""
        loaded = predictor.current
        model, version = request.path_params["model"], request.path_params.get("version")
        if model != loaded.description.model:
            raise _HttpError(
                404, f"no model {model!r}; this host serves {loaded.description.model!r}"
            )
        if version is not None and version != str(loaded.version):
            raise _HttpError(404, f"version {version} of {model} isn't loaded; {loaded.version} is")
        return loaded

    async def _body(self, request: Request) -> bytes:
        limit = self._limits.max_body_bytes
        too_large = _HttpError(413, f"the body is larger than {limit} bytes, this server's limit")
        if int(request.headers.get("content-length", 0)) > limit:
            raise too_large
        parts, size = [], 0
        async for part in request.stream():
            size += len(part)
            if size > limit:
                raise too_large
            parts.append(part)
        return b"".join(parts)


class AddressError(StorageError):
    """The address to listen on is taken or can't be used."""


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
        raise AddressError(f"{host}:{port}: {why}; choose another with --port") from None
    return sock


class InferenceServer(uvicorn.Server):
    """A uvicorn server that ends normally on SIGTERM and SIGINT, after draining."""

    def __init__(self, app: InferenceApp, drain_s: int) -> None:
        super().__init__(
            uvicorn.Config(
                app.routes(),
                log_level="warning",
                access_log=False,
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


async def _unrouted(request: Request, error: Exception) -> Response:
    """No such path, or not with this method."""
    assert isinstance(error, HTTPException)
    told = f"{request.method} {request.url.path}: {error.detail.lower()}"
    return Response(
        json.dumps({"error": told}), error.status_code, error.headers, media_type="application/json"
    )


def _json(body: dict[str, Any], status: int = 200) -> Response:
    return Response(json.dumps(body), status, media_type="application/json")
