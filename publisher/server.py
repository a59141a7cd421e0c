"""HTTP for the published model: the Open Inference Protocol on Starlette and uvicorn.

Inference runs on worker threads; the event loop only moves bytes. Tensors are JSON: the binary
tensor extension isn't offered, and `/v2` says so by listing no extensions.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from ckpt.errors import BadInputError, SidestageError
from ckpt.events import LogSink
from ckpt.types import Clock, EventSink, SystemClock
from publisher.hosting import ModelHost
from publisher.httpd import HttpError, json_response, read_body, unrouted
from publisher.inference import metadata_of, parse_request, response_of, wanted_outputs
from publisher.loading import LoadedVersion
from publisher.metrics import ServingMetrics
from publisher.predictor import Predictor

OPEN_PATHS = frozenset({"/v2/health/live", "/v2/health/ready"})
"""What needs no token: an orchestrator's probes have none, and these tell nothing of the model."""


@dataclass(frozen=True)
class ServerLimits:
    """What a server takes on.

    max_body_bytes, max_numbers: of one request: its body, and all its tensors' elements.
    body_timeout_s: until a request's body must have come.
    max_in_flight: requests being read or answered; more get 503 at once.
    workers: inferences at once. drain_s: for those in flight when the server stops.
    """

    max_body_bytes: int = 64 << 20
    max_numbers: int = 4 << 20
    body_timeout_s: float = 30.0
    max_in_flight: int = 64
    workers: int = max(2, os.cpu_count() or 1)
    drain_s: int = 30


class InferenceApp:
    """The routes. One line of JSON, {"error": ...}, answers whatever can't be served.

    Args:
        host: what is served.
        metrics: counts; its text is at /metrics.
        limits, clock, sink: what it takes on, time, and who is told of defects.
    """

    def __init__(
        self,
        host: ModelHost,
        metrics: ServingMetrics,
        limits: ServerLimits | None = None,
        *,
        clock: Clock | None = None,
        sink: EventSink | None = None,
    ) -> None:
        self._host = host
        self._metrics = metrics
        self._limits = limits or ServerLimits()
        self._clock = clock or SystemClock()
        self._sink = sink or LogSink()
        self._pool = ThreadPoolExecutor(self._limits.workers, "inference")
        self._in_flight = 0  # touched on the event loop only

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
            ("/metrics", self._metrics_text),
        ]
        routes = [Route(path, self._answering(of)) for path, of in get]
        routes += [
            Route(path, self._counted(self._answering(self._infer)), methods=["POST"])
            for path in (f"{model}/infer", f"{model}{version}/infer")
        ]
        return Starlette(routes=routes, exception_handlers={HTTPException: unrouted})

    def close(self) -> None:
        """Wait for inferences in flight."""
        self._pool.shutdown()

    def _counted(self, handler: Callable[[Request], Any]) -> Callable[[Request], Any]:
        async def counted(request: Request) -> Response:
            began_s = self._clock.monotonic()
            response: Response = await handler(request)
            self._metrics.answered(response.status_code, self._clock.monotonic() - began_s)
            return response

        return counted

    def _answering(self, of: Callable[[Request], Any]) -> Callable[[Request], Any]:
        """A handler whose errors become statuses: no trace reaches a client."""

        async def handler(request: Request) -> Response:
            try:
                body = await of(request)
            except HttpError as e:
                return json_response({"error": str(e)}, e.status, e.headers)
            except BadInputError as e:
                return json_response({"error": str(e)}, 400)
            except ClientDisconnect:
                return Response(status_code=400)
            except Exception as e:
                reason = f"{type(e).__name__}: {e}"
                self._sink.emit("request_failed", path=request.url.path, reason=reason)
                known = isinstance(e, SidestageError)
                told = str(e) if known else "internal error; see the log"
                return json_response({"error": told}, 500)
            return body if isinstance(body, Response) else json_response(body)

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
        predictor = self._predictor()
        loaded = self._loaded(request, predictor)
        return metadata_of(loaded.description, sorted(predictor.loaded))

    async def _metrics_text(self, request: Request) -> Response:
        text, media_type = self._metrics.text()
        return Response(text, headers={"Content-Type": media_type})

    async def _infer(self, request: Request) -> Response:
        predictor = self._predictor()
        loaded = self._loaded(request, predictor)
        with self._slot():
            body = await self._body(request)

            def work() -> bytes:
                known = loaded.request.names()
                tensors, doc = parse_request(body, known, self._limits.max_numbers)
                names = wanted_outputs(doc, loaded.description)
                prediction = predictor.predict_with(loaded, tensors)
                self._metrics.unknown_ids(prediction.unknown_ids)
                answer = response_of(prediction, loaded.description.model, names, doc)
                self._host.answered(loaded)
                return answer

            answer = await asyncio.get_running_loop().run_in_executor(self._pool, work)
        return Response(answer, media_type="application/json")

    @contextmanager
    def _slot(self) -> Iterator[None]:
        """One of the requests in flight; 503 at once if there are too many."""
        if self._in_flight >= self._limits.max_in_flight:
            self._metrics.refused("busy")
            told = f"{self._in_flight} requests are in flight, this server's limit; try again"
            raise HttpError(503, told, {"Retry-After": "1"})
        self._in_flight += 1
        self._metrics.began()
        try:
            yield
        finally:
            self._in_flight -= 1
            self._metrics.ended()

    async def _body(self, request: Request) -> bytes:
        timeout_s = self._limits.body_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                return await read_body(request, self._limits.max_body_bytes)
        except TimeoutError:
            self._metrics.refused("too_slow")
            told = f"the body didn't come within {timeout_s:g} s, this server's limit"
            raise HttpError(408, told, {"Connection": "close"}) from None
        except HttpError:
            self._metrics.refused("too_large")
            raise

    def _predictor(self) -> Predictor:
        if self._host.predictor is None:
            told = "no version is loaded yet; try again"
            raise HttpError(503, told, {"Retry-After": "1"})
        return self._host.predictor

    def _loaded(self, request: Request, predictor: Predictor) -> LoadedVersion:
        """The version that the path names, if it is loaded; without one, the current one."""
        current, loaded = predictor.current, predictor.loaded
        model, asked = request.path_params["model"], request.path_params.get("version")
        if model != current.description.model:
            raise HttpError(
                404, f"no model {model!r}; this host serves {current.description.model!r}"
            )
        if asked is None:
            return current
        for number, version in loaded.items():
            if asked == str(number):
                return version
        has = " and ".join(map(str, sorted(loaded)))
        raise HttpError(
            404,
            f"version {asked} of {model} isn't loaded; {has} {'is' if len(loaded) == 1 else 'are'}",
        )
