"""`publisher serve`."""

from __future__ import annotations

import click

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
    "--max-body-mib",
    type=click.IntRange(min=1),
    default=64,
    show_default=True,
    help="Largest request body.",
)
@as_json_flag
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
    opened = open_existing(root, registry)
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
