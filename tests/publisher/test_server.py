"""The HTTP server: a real uvicorn on a free loopback port."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
import torch

from ckpt.errors import BadInputError
from ckpt.events import ListSink
from publisher import keys
from publisher.hosting import ModelHost
from publisher.loading import Prediction
from publisher.pointer import Reason
from publisher.predictor import Predictor
from publisher.server import AddressError, InferenceApp, InferenceServer, ServerLimits, bind
from tests.publisher.conftest import Bench
from tests.publisher.tiny import GOLDEN, flip_byte, random_tensors, request, stamped_tensors

DEADLINE_S = 60


class Running:
    """A server on a thread, and a client of it."""

    def __init__(self, bench: Bench, limits: ServerLimits) -> None:
        self.sink = ListSink()
        self.host = ModelHost(
            lambda: Predictor(bench.registry, trust=bench.run.trust), DEADLINE_S, self.sink
        )
        self.app = InferenceApp(self.host, limits, self.sink)
        self.server = InferenceServer(self.app, drain_s=10)
        self.socket = bind("127.0.0.1", 0)
        self.port = self.socket.getsockname()[1]
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [self.socket]})
        self.client = httpx.Client(
            base_url=f"http://127.0.0.1:{self.port}", timeout=DEADLINE_S, trust_env=False
        )

    def infer(
        self, tensors: dict[str, torch.Tensor], path: str = "", **more: Any
    ) -> httpx.Response:
        body = {"inputs": [as_input(n, t) for n, t in tensors.items()], **more}
        return self.client.post(f"/v2/models/tiny{path}/infer", json=body)


def as_input(name: str, tensor: torch.Tensor) -> dict[str, Any]:
    datatype = {torch.float32: "FP32", torch.int64: "INT64"}[tensor.dtype]
    return {
        "name": name,
        "shape": list(tensor.shape),
        "datatype": datatype,
        "data": tensor.flatten().tolist(),
    }


@contextmanager
def running(bench: Bench, limits: ServerLimits | None = None) -> Iterator[Running]:
    """Not polling by itself: a test says when to look at the pointer."""
    run = Running(bench, limits or ServerLimits(workers=2))
    run.host.poll()
    run.thread.start()
    try:
        yield run
    finally:
        run.client.close()
        run.server.stop()
        run.thread.join(DEADLINE_S)
        run.app.close()
        run.socket.close()
    assert not run.thread.is_alive()


def publish(bench: Bench, *steps: int) -> None:
    for step in steps:
        bench.run.commit(step, stamped_tensors(step))
        bench.publish(step)


@pytest.fixture
def live(bench: Bench) -> Iterator[Running]:
    """Serving version 1."""
    publish(bench, 1)
    with running(bench) as run:
        yield run


def test_health_and_metadata(live: Running) -> None:
    client = live.client
    assert client.get("/v2").json()["name"] == "sidestage"
    assert client.get("/v2/health/live").json() == {"live": True}
    assert client.get("/v2/health/ready").json() == {"ready": True}
    assert client.get("/v2/models/tiny/ready").json() == {"name": "tiny", "ready": True}
    assert client.get("/v2/models/tiny/versions/1/ready").status_code == 200
    told = client.get("/v2/models/tiny").json()
    assert (told["name"], told["versions"]) == ("tiny", ["1"])
    assert told == client.get("/v2/models/tiny/versions/1").json()


def test_infer_equals_the_predictor(bench: Bench) -> None:
    bench.run.commit(1, random_tensors())
    bench.publish(1)
    want = Predictor(bench.registry, trust=bench.run.trust).predict(GOLDEN)
    with running(bench) as run:
        response = run.infer(GOLDEN, id="q7")
        assert response.status_code == 200
        assert response.headers["content-type"] == "application/json"
        got = response.json()
        assert (got["model_name"], got["model_version"], got["id"]) == ("tiny", "1", "q7")
        for output in got["outputs"]:
            tensor = torch.tensor(output["data"]).reshape(output["shape"])
            torch.testing.assert_close(tensor, want.outputs[output["name"]], rtol=0, atol=0)
        one = run.infer(GOLDEN, outputs=[{"name": "score"}]).json()
        assert [o["name"] for o in one["outputs"]] == ["score"]
        assert run.infer(GOLDEN, "/versions/1").status_code == 200


def test_what_is_not_here_is_404(live: Running) -> None:
    for path in ("/", "/v2/models/other", "/v2/models/other/ready", "/v2/models/tiny/versions/2"):
        assert live.client.get(path).status_code == 404, path
    response = live.infer(GOLDEN, "/versions/9")
    assert response.status_code == 404
    assert response.json() == {"error": "version 9 of tiny isn't loaded; 1 is"}


def test_unknown_paths_and_methods_are_answered_in_json(live: Running) -> None:
    response = live.client.get("/v2/nothing")
    assert response.status_code == 404
    assert response.json() == {"error": "GET /v2/nothing: not found"}
    response = live.client.get("/v2/models/tiny/infer")
    assert response.status_code == 405
    assert response.headers["allow"] == "POST"
    assert response.json() == {"error": "GET /v2/models/tiny/infer: method not allowed"}
    other = live.client.post("/v2/models/other/infer", json={})
    assert other.json() == {"error": "no model 'other'; this host serves 'tiny'"}
    assert live.client.get("/v2/models/tiny/infer").status_code == 405


def test_malformed_requests_are_400_with_one_clear_message(live: Running) -> None:
    bad_lengths = request([[1, 2]], [[0]]) | {"user.lengths": torch.tensor([3])}
    cases: list[tuple[httpx.Response, str]] = [
        (live.client.post("/v2/models/tiny/infer", content=b"{"), "the body is not JSON"),
        (live.client.post("/v2/models/tiny/infer", json={}), 'the body needs "inputs"'),
        (live.infer({}), "request: missing dense, user.values"),
        (live.infer({**GOLDEN, "x": torch.zeros(1)}), "unknown x; expected dense"),
        (live.infer(bad_lengths), "user.lengths: lengths sum to 3, but user.values has 2 ids"),
        (live.infer({**GOLDEN, "dense": torch.zeros(9, 3)}), "batch sizes differ: dense has 9"),
        (live.infer(GOLDEN, outputs=[{"name": "x"}]), "output 'x': unknown"),
    ]
    for response, why in cases:
        assert response.status_code == 400, why
        assert list(response.json()) == ["error"]
        assert why in response.json()["error"]
    assert live.infer(GOLDEN).status_code == 200


def test_an_output_that_is_no_number_is_500_and_the_next_is_answered(
    live: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    predictor = live.host.predictor
    assert predictor is not None
    nan = Prediction({n: torch.tensor([float("nan")]) for n in ("score", "user_stamp")}, 1, {})
    with monkeypatch.context() as patch:
        patch.setattr(predictor, "predict_with", lambda *_: nan)
        response = live.infer(GOLDEN, outputs=[{"name": "score"}])
    assert response.status_code == 500
    assert "not finite for this request" in response.json()["error"]
    assert live.infer(GOLDEN).status_code == 200


def test_a_body_over_the_limit_is_413(bench: Bench) -> None:
    publish(bench, 1)
    with running(bench, ServerLimits(max_body_bytes=2000, workers=1)) as run:
        assert run.infer(GOLDEN).status_code == 200
        path = "/v2/models/tiny/infer"
        for content in (b"x" * 2001, iter([b"x" * 1000] * 3)):  # with its length, and chunked
            response = run.client.post(path, content=content)
            assert response.status_code == 413
            assert "larger than 2000 bytes" in response.json()["error"]
        assert run.infer(GOLDEN).status_code == 200


def test_not_ready_is_503_until_a_version_is_live(bench: Bench) -> None:
    with running(bench) as run:
        assert run.client.get("/v2/health/live").status_code == 200
        for response in (
            run.client.get("/v2/health/ready"),
            run.client.get("/v2/models/tiny"),
            run.infer(GOLDEN),
        ):
            assert response.status_code == 503
            assert response.json() == {"error": "no version is loaded yet; try again"}
        run.host.poll()
        assert len(run.sink.named("waiting_for_version")) == 1  # told once
        publish(bench, 1)
        run.host.poll()
        assert run.client.get("/v2/health/ready").status_code == 200
        assert run.infer(GOLDEN).json()["model_version"] == "1"


def test_follows_the_pointer_and_keeps_what_it_has(bench: Bench) -> None:
    publish(bench, 1, 2)
    with running(bench) as run:
        assert run.infer(GOLDEN).json()["model_version"] == "2"
        bench.registry.rollback(None, Reason("op", "bad"))
        run.host.poll()
        assert run.infer(GOLDEN).json()["model_version"] == "1"
        publish(bench, 3)
        key = bench.registry.key(3, keys.TABLES)
        flip_byte(bench.run.root, key, 5)
        for _ in range(3):
            run.host.poll()
        assert run.infer(GOLDEN).json()["model_version"] == "1"
        (told,) = run.sink.named("version_not_loaded")
        assert "digest" in told["reason"]
        flip_byte(bench.run.root, key, 5)
        run.host.poll()
        assert run.infer(GOLDEN).json()["model_version"] == "3"
        assert [e["version"] for e in run.sink.named("version_loaded")] == [2, 1, 3]


def test_a_request_in_flight_is_finished_when_the_server_stops(bench: Bench) -> None:
    publish(bench, 1)
    reached, go_on = threading.Event(), threading.Event()
    with running(bench) as run:
        predictor = run.host.predictor
        assert predictor is not None
        answer = predictor.predict_with

        def slow(*args: Any) -> Any:
            reached.set()
            assert go_on.wait(DEADLINE_S)
            return answer(*args)

        predictor.predict_with = slow  # type: ignore[method-assign, assignment]
        got: list[httpx.Response] = []
        asking = threading.Thread(target=lambda: got.append(run.infer(GOLDEN)))
        asking.start()
        assert reached.wait(DEADLINE_S)
        # While one is being answered, the event loop answers others.
        assert run.client.get("/v2/health/live").status_code == 200
        run.server.stop()
        go_on.set()
        asking.join(DEADLINE_S)
        assert got[0].status_code == 200


def test_polls_by_itself(bench: Bench) -> None:
    publish(bench, 1)
    loaded = threading.Event()

    class Sink:
        def emit(self, name: str, /, **fields: Any) -> None:
            if name == "version_loaded" and fields["version"] == 2:
                loaded.set()

    host = ModelHost(lambda: Predictor(bench.registry, trust=bench.run.trust), 0.01, Sink())
    host.start()
    try:
        publish(bench, 2)
        assert loaded.wait(DEADLINE_S)
    finally:
        host.stop()


def test_a_port_in_use_and_a_host_that_is_none() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(AddressError, match=f"127.0.0.1:{port}: is in use .*--port") as e:
            bind("127.0.0.1", port)
        assert e.value.exit_code == 6
    with pytest.raises(BadInputError, match="not an address of this host"):
        bind("no.such.host.invalid", 0)
    with pytest.raises(AddressError, match=r"192\.0\.2\.1:0"):
        bind("192.0.2.1", 0)
