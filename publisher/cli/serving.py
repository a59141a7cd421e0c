"""`publisher serve`."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import click

from ckpt.config import access_token
from publisher.cli.shared import LineSink, as_json_flag, open_existing, registry_option


@click.command()
@click.argument("root")
@registry_option
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
    "--canary", is_flag=True, help="Follow the canary while there is one, else the live version."
)
@click.option(
    "--token-file",
    type=click.Path(path_type=Path),
    help="Requests must bring this file's token. Default: $SIDESTAGE_TOKEN; without it no token.",
)
@click.option(
    "--max-body-mib",
    type=click.IntRange(min=1),
    default=64,
    show_default=True,
    help="Largest request body.",
)
@click.option(
    "--max-numbers",
    type=click.IntRange(min=1),
    default=4 << 20,
    show_default=True,
    help="Most numbers of one request, all its inputs together.",
)
@click.option(
    "--max-in-flight",
    type=click.IntRange(min=1),
    default=64,
    show_default=True,
    help="Most requests at once; more get 503.",
)
@click.option(
    "--body-timeout",
    type=click.FloatRange(min=0, min_open=True),
    default=30.0,
    show_default=True,
    help="Seconds until a request's body must have come.",
)
@click.option(
    "--record/--no-record",
    default=True,
    show_default=True,
    help="Keep in the registry when this host first answered from each version.",
)
@as_json_flag
def serve(  # noqa: PLR0917  (options of a command)
    root: str,
    registry: str | None,
    host: str,
    port: int,
    interval: float,
    canary: bool,
    token_file: Path | None,
    max_body_mib: int,
    max_numbers: int,
    max_in_flight: int,
    body_timeout: float,
    record: bool,
    as_json: bool,
) -> None:
    """Answer requests over HTTP from the live version, and follow the pointer.

    Speaks the Open Inference Protocol; metrics are at /metrics. Answers 503 until a version is
    live. SIGTERM finishes the requests in flight and exits 0.
    """
    opened = open_existing(root, registry)
    token = access_token(token_file)
    from functools import partial

    from ckpt.events import chain
    from publisher.answers import host_id, record_answer
    from publisher.hosting import FirstAnswers, ModelHost
    from publisher.httpd import HttpServer, TokenGate, bind
    from publisher.metrics import ServingMetrics
    from publisher.predictor import Predictor
    from publisher.server import OPEN_PATHS, InferenceApp, ServerLimits

    sock = bind(host, port)
    metrics = ServingMetrics()
    sink = chain(LineSink(as_json=as_json), metrics)
    limits = ServerLimits(
        max_body_bytes=max_body_mib << 20,
        max_numbers=max_numbers,
        body_timeout_s=body_timeout,
        max_in_flight=max_in_flight,
    )
    name = host_id(f"{socket.gethostname()}-{port}" if port else socket.gethostname())
    firsts = FirstAnswers(name, partial(record_answer, opened) if record else None, sink=sink)
    follow: dict[str, Any] = {"follow": "canary"} if canary else {}
    models = ModelHost(lambda: Predictor(opened, **follow), interval, firsts, sink=sink)
    app = InferenceApp(models, metrics, limits, sink=sink)
    gate = TokenGate(app.routes(), token, OPEN_PATHS, metrics.refused)
    server = HttpServer(gate, limits.drain_s)
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
