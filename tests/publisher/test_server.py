"""The HTTP server: a real uvicorn on a free loopback port."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from queue import Queue
from typing import Any

import httpx
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

from ckpt.command import run_command
from ckpt.errors import BadInputError
from ckpt.events import ListSink, chain
from ckpt.schema import EVENT_TIME
from ckpt.storage import LocalStorage
from ckpt.trust import TrustList
from publisher import cli, keys
from publisher.answers import AnswerLog, record_answer
from publisher.hosting import FirstAnswers, ModelHost
from publisher.httpd import AddressError, HttpServer, TokenGate, bind
from publisher.loading import Prediction
from publisher.metrics import ServingMetrics
from publisher.pointer import Reason
from publisher.predictor import Predictor
from publisher.server import OPEN_PATHS, InferenceApp, ServerLimits
from tests.publisher.conftest import Bench, FakeClock, make_bench
from tests.publisher.tiny import (
    GOLDEN,
    TinyRun,
    flip_byte,
    random_tensors,
    request,
    stamped_tensors,
)

DEADLINE_S = 60


class Running:
    """A server on a thread, and a client of it. Its clock stands still."""

    def __init__(self, bench: Bench, limits: ServerLimits, token: str | None) -> None:
        self.told = ListSink()
        self.clock = FakeClock()
        metrics = ServingMetrics()
        sink = chain(self.told, metrics)
        self.firsts = FirstAnswers(
            "host-1", partial(record_answer, bench.registry), clock=self.clock, sink=sink
        )
        self.host = ModelHost(
            lambda: Predictor(bench.registry, trust=bench.run.trust),
            DEADLINE_S,
            self.firsts,
            clock=self.clock,
            sink=sink,
        )
        self.app = InferenceApp(self.host, metrics, limits, clock=self.clock, sink=sink)
        gate = TokenGate(self.app.routes(), token, OPEN_PATHS, metrics.refused)
        self.server = HttpServer(gate, drain_s=10)
        self.socket = bind("127.0.0.1", 0)
        self.port = self.socket.getsockname()[1]
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [self.socket]})
        self.client = httpx.Client(
            base_url=f"http://127.0.0.1:{self.port}", timeout=DEADLINE_S, trust_env=False
        )

    def metric(self, name: str, **labels: str) -> float | None:
        """One sample of /metrics."""
        for family in text_string_to_metric_families(self.client.get("/metrics").text):
            for sample in family.samples:
                if sample.name == name and sample.labels == labels:
                    return sample.value
        return None

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
def running(
    bench: Bench, limits: ServerLimits | None = None, token: str | None = None
) -> Iterator[Running]:
    """Not polling by itself: a test says when to look at the pointer."""
    run = Running(bench, limits or ServerLimits(workers=2), token)
    run.host.poll()
    run.thread.start()
    try:
        yield run
    finally:
        run.client.close()
        run.server.stop()
        run.thread.join(DEADLINE_S)
        run.app.close()
        run.firsts.close()
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
        (live.infer({**GOLDEN, "x": torch.zeros(1)}), "input 'x': unknown; expected dense"),
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
        assert len(run.told.named("waiting_for_version")) == 1  # told once
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
        (told,) = run.told.named("version_not_loaded")
        assert "digest" in told["reason"]
        flip_byte(bench.run.root, key, 5)
        run.host.poll()
        assert run.infer(GOLDEN).json()["model_version"] == "3"
        assert run.metric("sidestage_version_load_failures_total") == 1
        assert run.metric("sidestage_version_load_seconds_count") == 3
        assert run.metric("sidestage_loaded_version") == 3
        assert [e["version"] for e in run.told.named("version_loaded")] == [2, 1, 3]


def test_the_previous_version_answers_under_its_number(bench: Bench) -> None:
    publish(bench, 1)
    with running(bench) as run:
        publish(bench, 2)
        run.host.poll()
        told = run.client.get("/v2/models/tiny").json()
        assert told["versions"] == ["1", "2"]
        answers = {path: run.infer(GOLDEN, path).json() for path in ("", "/versions/1")}
        stamps = {p: a["outputs"][3]["data"][0] for p, a in answers.items()}
        assert stamps == {"": 2.0, "/versions/1": 1.0}
        assert answers["/versions/1"]["model_version"] == "1"
        missing = run.infer(GOLDEN, "/versions/02")
        assert missing.json() == {"error": "version 02 of tiny isn't loaded; 1 and 2 are"}


def test_a_token_is_needed_but_for_health(bench: Bench) -> None:
    publish(bench, 1)
    with running(bench, token="s3cret-t0ken") as run:
        for path in OPEN_PATHS:
            assert run.client.get(path).status_code == 200
        for path in ("/v2", "/v2/models/tiny", "/metrics", "/nothing"):
            response = run.client.get(path)
            assert response.status_code == 401, path
            assert response.headers["www-authenticate"] == 'Bearer realm="sidestage"'
            assert list(response.json()) == ["error"]
        assert run.infer(GOLDEN).status_code == 401
        for wrong in ("Bearer s3cret-t0keN", "Bearer x", "Bearer \xff", "Basic s3cret-t0ken"):
            headers = {b"authorization": wrong.encode("latin-1")}
            response = run.client.get("/v2", headers=headers)  # type: ignore[arg-type]
            assert response.status_code == 401, wrong
            assert 'error="invalid_token"' in response.headers["www-authenticate"]
        run.client.headers["authorization"] = "bearer s3cret-t0ken"
        assert run.infer(GOLDEN).status_code == 200
        assert run.metric("sidestage_requests_refused_total", reason="unauthorised") == 9


def test_more_requests_than_the_limit_are_told_to_come_back(bench: Bench) -> None:
    publish(bench, 1)
    with running(bench, ServerLimits(max_in_flight=1, workers=1)) as run:
        reached, go_on = hold(run)
        got: list[httpx.Response] = []
        first = threading.Thread(target=lambda: got.append(run.infer(GOLDEN)))
        first.start()
        assert reached.wait(DEADLINE_S)
        assert run.metric("sidestage_requests_in_flight") == 1
        refused = run.infer(GOLDEN)
        assert refused.status_code == 503
        assert refused.headers["retry-after"] == "1"
        assert "1 requests are in flight, this server's limit" in refused.json()["error"]
        assert run.client.get("/v2/health/ready").status_code == 200
        go_on.set()
        first.join(DEADLINE_S)
        assert got[0].status_code == 200
        assert run.infer(GOLDEN).status_code == 200
        assert run.metric("sidestage_requests_in_flight") == 0
        assert run.metric("sidestage_requests_refused_total", reason="busy") == 1
        assert run.metric("sidestage_requests_total", status="200") == 2
        assert run.metric("sidestage_requests_total", status="503") == 1
        assert run.metric("sidestage_request_seconds_count") == 2


def test_a_body_that_does_not_come_gives_its_place_back(bench: Bench) -> None:
    publish(bench, 1)
    limits = ServerLimits(max_in_flight=1, workers=1, body_timeout_s=0.05)
    with running(bench, limits) as run:
        with socket.create_connection(("127.0.0.1", run.port), DEADLINE_S) as slow:
            slow.sendall(
                b"POST /v2/models/tiny/infer HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{"
            )
            answer = b""
            while part := slow.recv(4096):  # until the server closes it
                answer += part
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b"didn't come within 0.05 s" in answer
        assert run.metric("sidestage_requests_refused_total", reason="too_slow") == 1
        assert run.metric("sidestage_requests_in_flight") == 0


def test_unknown_ids_are_counted_by_feature(live: Running) -> None:
    assert live.infer(request([[1, 99], [-5]], [[0], [1]])).status_code == 200
    assert live.infer(request([[50]], [[6]])).status_code == 200
    assert live.metric("sidestage_unknown_ids_total", feature="user") == 3
    assert live.metric("sidestage_unknown_ids_total", feature="genre") is None


def test_freshness_is_measured_at_the_first_answer(bench: Bench) -> None:
    """Versions are committed at 10 * step + 1 s; the second one's newest batch is of 12 s."""
    commit, event = "sidestage_commit_to_first_answer", "sidestage_event_to_first_answer"
    publish(bench, 1)
    with running(bench) as run:
        run.clock.now_s = 100.0
        assert run.infer(GOLDEN).status_code == 200
        annotations = {"serving_description": "d1", EVENT_TIME: "12.0"}
        bench.run.commit(2, stamped_tensors(2), annotations=annotations)
        bench.publish(2)
        run.host.poll()
        assert run.metric(f"{commit}_seconds", version="2") is None  # nothing was answered yet
        run.clock.now_s = 24.0
        assert run.client.post("/v2/models/tiny/infer", content=b"{").status_code == 400
        assert run.metric(f"{commit}_seconds", version="2") is None
        for run.clock.now_s in (25.0, 999.0):  # only the first one counts
            assert run.infer(GOLDEN).status_code == 200
        assert run.metric(f"{commit}_seconds", version="2") == 4
        assert run.metric(f"{event}_seconds", version="2") == 13
        # A version that was live when the host started says nothing of how fast publishing is.
        assert run.metric(f"{commit}_seconds", version="1") == 89
        assert run.metric(f"{commit}_distribution_seconds_sum") == 4
        publish(bench, 3)
        run.clock.now_s = 30.5  # half a second before it was committed
        run.host.poll()
        assert run.infer(GOLDEN).status_code == 200
        assert run.metric(f"{commit}_seconds", version="3") == 0
        assert run.metric("sidestage_clock_skew_total") == 1
        assert run.metric(f"{commit}_seconds", version="1") is None  # isn't loaded any more
        (skew,) = run.told.named("clock_skew")
        assert "clock is 0.500 s behind" in skew["reason"]
    kept = AnswerLog(bench.registry).of([1, 2, 3])
    told = {
        v: (a.host, a.commit_to_answer_s, a.event_to_answer_s, a.at_start)
        for v, (a,) in kept.items()
    }
    assert told == {
        1: ("host-1", 89.0, None, True),
        2: ("host-1", 4.0, 13.0, False),
        3: ("host-1", 0.0, None, False),
    }


def hold(run: Running) -> tuple[threading.Event, threading.Event]:
    """Inferences wait: (one has begun, let them go on)."""
    reached, go_on = threading.Event(), threading.Event()
    predictor = run.host.predictor
    assert predictor is not None
    answer = predictor.predict_with

    def slow(*args: Any) -> Any:
        reached.set()
        assert go_on.wait(DEADLINE_S)
        return answer(*args)

    predictor.predict_with = slow  # type: ignore[method-assign, assignment]
    return reached, go_on


def test_a_request_in_flight_is_finished_when_the_server_stops(bench: Bench) -> None:
    publish(bench, 1)
    with running(bench) as run:
        reached, go_on = hold(run)
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

    host = ModelHost(
        lambda: Predictor(bench.registry, trust=bench.run.trust),
        0.01,
        FirstAnswers("host-1"),
        sink=Sink(),
    )
    host.start()
    try:
        publish(bench, 2)
        assert loaded.wait(DEADLINE_S)
    finally:
        host.stop()


def test_a_port_in_use_and_a_host_that_is_none() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(
            AddressError, match=f"127.0.0.1:{port}: is in use .*choose another port"
        ) as e:
            bind("127.0.0.1", port)
        assert e.value.exit_code == 6
    with pytest.raises(BadInputError, match="not an address of this host"):
        bind("no.such.host.invalid", 0)
    with pytest.raises(AddressError, match=r"192\.0\.2\.1:0"):
        bind("192.0.2.1", 0)


def test_the_command_passes_its_options_on(
    tmp_path: Path, trust: TrustList, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this process: the server runs here, on the main thread, until a client is done with it."""
    bench = make_bench(LocalStorage(tmp_path / "root"), trust)
    publish(bench, 1)
    monkeypatch.setenv("SIDESTAGE_TRUST_FILE", str(trust.path))
    monkeypatch.setenv("SIDESTAGE_TOKEN", "of-the-environment")
    token = tmp_path / "token"
    token.write_text("of-the-file\n")
    body = {"inputs": [as_input(n, t) for n, t in GOLDEN.items()]}

    def serve(*args: str, bearer: str) -> list[int]:
        """Statuses of a small, a large and a malformed request."""
        events: Queue[tuple[str, dict[str, Any]]] = Queue()
        got: list[int] = []

        class Sink:
            def __init__(self, *, as_json: bool) -> None:
                assert not as_json

            def emit(self, name: str, /, **fields: Any) -> None:
                events.put((name, fields))

        def ask() -> None:
            try:
                told: dict[str, Any] = {}
                while not {"listening", "version_loaded"} <= set(told):
                    name, told[name] = events.get(timeout=DEADLINE_S)
                path = f"{told['listening']['url']}/v2/models/tiny/infer"
                with httpx.Client(trust_env=False, headers={"Authorization": bearer}) as client:
                    got.append(client.post(path, json=body).status_code)
                    got.append(client.post(path, content=b"{}" + b" " * (1 << 20)).status_code)
                    got.append(client.post(path, content=b"{}").status_code)
            finally:
                os.kill(os.getpid(), signal.SIGTERM)

        monkeypatch.setattr(cli.serving, "LineSink", Sink)
        before = [signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)]
        thread = threading.Thread(target=ask)
        thread.start()
        try:
            argv = ["serve", bench.run.root.url, "--port", "0", "--interval", "0.02", *args]
            assert run_command(cli.cli, argv) == 0
        finally:
            thread.join(DEADLINE_S)
            for s, handler in zip((signal.SIGTERM, signal.SIGINT), before, strict=True):
                signal.signal(s, handler)
        return got

    assert serve("--no-record", bearer="Bearer of-the-environment") == [200, 400, 400]
    assert AnswerLog(bench.registry).of([1]) == {}
    small = ("--token-file", str(token), "--max-body-mib", "1", "--max-numbers", "20")
    assert serve(*small, bearer="Bearer of-the-environment") == [401, 401, 401]
    assert serve(*small, bearer="Bearer of-the-file") == [400, 413, 400]
    assert serve("--token-file", str(token), bearer="Bearer of-the-file")[0] == 200
    assert [a.at_start for a in AnswerLog(bench.registry).of([1])[1]] == [True]


def test_a_token_that_is_none_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    TinyRun(LocalStorage(tmp_path / "root"), TrustList(tmp_path / "trust")).begin()
    serve = ["serve", str(tmp_path / "root"), "--port", "0"]
    assert run_command(cli.cli, [*serve, "--token-file", str(tmp_path / "none")]) == 3
    (tmp_path / "two").write_text("two words")
    assert run_command(cli.cli, [*serve, "--token-file", str(tmp_path / "two")]) == 2
    monkeypatch.setenv("SIDESTAGE_TOKEN", "")
    assert run_command(cli.cli, serve) == 2
    assert "SIDESTAGE_TOKEN: holds no token" in capsys.readouterr().err
