"""A client that keeps asking over HTTP while versions are swapped beneath it."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ckpt.errors import StorageError

MODEL = "movielens"
TIMEOUT_S = 30.0
PAUSE_S = 0.05

_DATATYPES = {torch.float32: "FP32", torch.int64: "INT64"}


@dataclass(frozen=True)
class Answer:
    """One reply: by which version, when (wall clock), or what went wrong."""

    at_s: float
    version: int | None
    error: str | None
    outputs: dict[str, torch.Tensor]


def body_of(request: Mapping[str, torch.Tensor]) -> bytes:
    """A request in the Open Inference Protocol's JSON."""
    inputs = [
        {
            "name": name,
            "shape": list(t.shape),
            "datatype": _DATATYPES[t.dtype],
            "data": t.flatten().tolist(),
        }
        for name, t in request.items()
    ]
    return json.dumps({"inputs": inputs}).encode()


def ask(port: int, body: bytes) -> Answer:
    """One request on a connection of its own. Never raises: errors are answers too."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
    try:
        headers = {"Content-Type": "application/json"}
        connection.request("POST", f"/v2/models/{MODEL}/infer", body, headers)
        response = connection.getresponse()
        data = response.read()
        if response.status != 200:
            return Answer(time.time(), None, f"{response.status}: {data[:200]!r}", {})
        doc = json.loads(data)
        outputs = {o["name"]: torch.tensor(o["data"]).view(o["shape"]) for o in doc["outputs"]}
        return Answer(time.time(), int(doc["model_version"]), None, outputs)
    except (OSError, http.client.HTTPException, ValueError, KeyError) as e:
        return Answer(time.time(), None, f"{type(e).__name__}: {e}", {})
    finally:
        connection.close()


def is_ready(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
    try:
        connection.request("GET", "/v2/health/ready")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


class Load:
    """Asks all the time, on a thread, and keeps every answer."""

    def __init__(self, port: int, request: Mapping[str, torch.Tensor]) -> None:
        self._port = port
        self._body = body_of(request)
        self._stop = threading.Event()
        self.answers: list[Answer] = []
        self._thread = threading.Thread(target=self._run, name="demo-load", daemon=True)
        self._thread.start()

    def first_from(self, version: int, since_s: float) -> Answer | None:
        """The first answer by `version` that came after `since_s` (wall clock)."""
        return next((a for a in self.answers if a.version == version and a.at_s >= since_s), None)

    @property
    def versions(self) -> list[int]:
        """Versions in the order in which they answered, repeats left out."""
        out: list[int] = []
        for a in self.answers:
            if a.version is not None and (not out or out[-1] != a.version):
                out.append(a.version)
        return out

    @property
    def errors(self) -> list[str]:
        return [a.error for a in self.answers if a.error is not None]

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(2 * TIMEOUT_S)
        if self._thread.is_alive():
            raise StorageError("the demo's client hangs in a request")

    def _run(self) -> None:
        while not self._stop.is_set():
            self.answers.append(ask(self._port, self._body))
            self._stop.wait(PAUSE_S)
