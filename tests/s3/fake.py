"""An S3 server in this process, as bad as a test wants it: for what SeaweedFS can't be made to do.

    with FakeS3(conditions="ignore") as server:
        server.on("PUT", "/key").times(2).answer(503, "SlowDown")
        server.on("PUT", "/key").hang_up()      # the body was read, nothing was stored
        server.on("PUT", "/key").lose_reply()   # it was stored
        gate = server.on("PUT", "partNumber=").always().block()

It knows one bucket, checks no signatures, and keeps everything in memory.
"""

from __future__ import annotations

import hashlib
import socket
import threading
import urllib.parse
from contextlib import suppress
from dataclasses import dataclass, field
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal
from xml.sax.saxutils import escape

from ckpt.config import S3Settings
from ckpt.storage.s3 import S3Storage
from ckpt.storage.s3client import S3Client
from ckpt.storage.s3connection import Patience
from tests.faults import Gate

BUCKET = "fake"
QUICK = Patience(attempt_s=5.0, connect_s=1.0, first_s=4.0, outage_s=1.5, throttled_s=1.5)
Conditions = Literal["honour", "put only", "ignore", "reject"]


@dataclass
class Stored:
    data: bytes
    etag: str
    metadata: dict[str, str]


@dataclass
class Request:
    method: str
    target: str
    headers: Message
    body: bytes


@dataclass
class Rule:
    """What to do to the first so many requests of a method whose target contains a text."""

    method: str
    text: str
    count: int | None = 1
    reply: tuple[int, str] | None = None
    stored: bool = False
    gate: Gate | None = None

    def times(self, count: int) -> Rule:
        self.count = count
        return self

    def always(self) -> Rule:
        self.count = None
        return self

    def answer(self, status: int, code: str) -> None:
        self.reply = (status, code)

    def hang_up(self) -> None:
        self.reply = (0, "")

    def lose_reply(self) -> None:
        self.reply, self.stored = (0, ""), True

    def block(self) -> Gate:
        self.gate = Gate()
        return self.gate

    def meets(self, request: Request) -> bool:
        if self.count == 0 or request.method != self.method or self.text not in request.target:
            return False
        if self.count is not None:
            self.count -= 1
        return True


@dataclass
class FakeS3:
    conditions: Conditions = "honour"
    tokens: set[str] | None = None
    """Session tokens that are accepted; None: all requests are."""
    other_token: tuple[int, str] = (400, "ExpiredToken")
    """The answer to any other."""
    page: int = 1000
    objects: dict[str, Stored] = field(default_factory=dict)
    uploads: dict[str, tuple[str, dict[str, str], dict[int, bytes]]] = field(default_factory=dict)
    requests: list[Request] = field(default_factory=list)
    rules: list[Rule] = field(default_factory=list)
    connections: list[socket.socket] = field(default_factory=list)
    lock: threading.RLock = field(default_factory=threading.RLock)

    def on(self, method: str, text: str = "") -> Rule:
        rule = Rule(method, text)
        self.rules.append(rule)
        return rule

    def __enter__(self) -> FakeS3:
        handler = type("Handler", (_Handler,), {"fake": self})
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._http.daemon_threads = True
        threading.Thread(target=self._http.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        for rule in self.rules:
            if rule.gate is not None:
                rule.gate.open()
        self._http.shutdown()
        self._http.server_close()
        for connection in self.connections:  # those that are kept alive would go on
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    @property
    def settings(self) -> S3Settings:
        endpoint = f"http://127.0.0.1:{self._http.server_address[1]}"
        return S3Settings(endpoint=endpoint, region="us-east-1", part_bytes=5 << 20)

    def storage(self, prefix: str = "", patience: Patience | None = None) -> S3Storage:
        return S3Storage(S3Client(BUCKET, self.settings, patience), prefix)

    def seen(self, method: str, text: str = "") -> list[Request]:
        return [r for r in self.requests if r.method == method and text in r.target]


class _RefusedError(Exception):
    def __init__(self, status: int, code: str) -> None:
        super().__init__(code)
        self.status = status
        self.code = code


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else each body waits 40 ms for the answer to its head
    fake: FakeS3

    def setup(self) -> None:
        super().setup()
        self.fake.connections.append(self.connection)

    def log_message(self, *args: object) -> None:
        pass

    def _handle(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        request = Request(self.command, self.path, self.headers, body)
        with self.fake.lock:
            self.fake.requests.append(request)
            rule = next((r for r in self.fake.rules if r.meets(request)), None)
        if rule is not None and rule.gate is not None:
            rule.gate.hold()
        try:
            if rule is not None and rule.reply is not None and not rule.stored:
                raise _RefusedError(*rule.reply)
            with self.fake.lock:
                status, headers, answer = self._answer(request)
            if rule is not None and rule.stored:
                raise _RefusedError(0, "")
        except _RefusedError as e:
            if e.status == 0:
                self.close_connection = True
                self.connection.close()
                return
            status, headers = e.status, {}
            answer = f"<Error><Code>{e.code}</Code><Message>said so</Message></Error>".encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if "Content-Length" not in headers:
            self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer)

    def handle(self) -> None:
        with suppress(OSError):  # a client that went away
            super().handle()

    do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = _handle  # noqa: N815 - its interface

    def _answer(self, request: Request) -> tuple[int, dict[str, str], bytes]:
        fake = self.fake
        token = request.headers.get("X-Amz-Security-Token", "")
        if fake.tokens is not None and token not in fake.tokens:
            raise _RefusedError(*fake.other_token)
        path, _, query_text = request.target.partition("?")
        query = dict(urllib.parse.parse_qsl(query_text, keep_blank_values=True))
        bucket, _, key = urllib.parse.unquote(path).lstrip("/").partition("/")
        if bucket != BUCKET:
            raise _RefusedError(404, "NoSuchBucket")
        if not key:
            return self._list(query)
        upload = fake.uploads.get(query.get("uploadId", ""))
        if "uploadId" in query and upload is None:
            raise _RefusedError(404, "NoSuchUpload")
        match request.method:
            case "POST" if "uploads" in query:
                name = f"u{len(fake.requests)}"
                fake.uploads[name] = (key, self._metadata(), {})
                return 200, {}, f"<R><UploadId>{name}</UploadId></R>".encode()
            case "PUT" if upload is not None:
                upload[2][int(query["partNumber"])] = request.body
                return 200, {"ETag": _etag(request.body)}, b""
            case "POST" if upload is not None:
                self._check(key, fake.conditions == "put only")
                etag = self._store(
                    key, b"".join(d for _, d in sorted(upload[2].items())), upload[1]
                )
                del fake.uploads[query["uploadId"]]
                return 200, {}, f"<R><ETag>{escape(etag)}</ETag></R>".encode()
            case "DELETE" if upload is not None:
                del fake.uploads[query["uploadId"]]
                return 204, {}, b""
            case "PUT":
                self._check(key, False)
                return 200, {"ETag": self._store(key, request.body, self._metadata())}, b""
            case "DELETE":
                fake.objects.pop(key, None)
                return 204, {}, b""
        return self._get(key)

    def _get(self, key: str) -> tuple[int, dict[str, str], bytes]:
        if key not in self.fake.objects:
            raise _RefusedError(404, "NoSuchKey")
        found = self.fake.objects[key]
        headers = {"ETag": found.etag, **{f"x-amz-meta-{k}": v for k, v in found.metadata.items()}}
        if (wanted := self.headers.get("If-Match")) and wanted != found.etag:
            raise _RefusedError(412, "PreconditionFailed")
        if not (span := self.headers.get("Range")):
            return 200, {**headers, "Content-Length": str(len(found.data))}, found.data
        start, end = (int(n) for n in span.removeprefix("bytes=").split("-"))
        if start >= len(found.data):
            raise _RefusedError(416, "InvalidRange")
        data = found.data[start : end + 1]
        span = f"bytes {start}-{start + len(data) - 1}/{len(found.data)}"
        return 206, {**headers, "Content-Range": span, "Content-Length": str(len(data))}, data

    def _list(self, query: dict[str, str]) -> tuple[int, dict[str, str], bytes]:
        prefix, after = query.get("prefix", ""), query.get("continuation-token", "")
        keys = sorted(k for k in self.fake.objects if k.startswith(prefix) and k > after)
        page = keys[: min(self.fake.page, int(query.get("max-keys", 1000)))]
        items = "".join(
            f"<Contents><Key>{urllib.parse.quote(k)}</Key><Size>{len(o.data)}</Size>"
            f"<ETag>{escape(o.etag)}</ETag></Contents>"
            for k, o in ((k, self.fake.objects[k]) for k in page)
        )
        more = len(keys) > len(page)
        following = f"<NextContinuationToken>{page[-1]}</NextContinuationToken>" if more else ""
        answer = (
            f"<ListBucketResult><EncodingType>url</EncodingType>{items}{following}"
            f"<IsTruncated>{str(more).lower()}</IsTruncated></ListBucketResult>"
        )
        return 200, {}, answer.encode()

    def _metadata(self) -> dict[str, str]:
        names = [n for n in self.headers if n.lower().startswith("x-amz-meta-")]
        return {n.lower().removeprefix("x-amz-meta-"): self.headers[n] for n in names}

    def _check(self, key: str, ignore: bool) -> None:
        condition = self.headers.get("If-None-Match") or self.headers.get("If-Match")
        if condition is None or self.fake.conditions == "ignore" or ignore:
            return
        if self.fake.conditions == "reject":
            raise _RefusedError(501, "NotImplemented")
        found = self.fake.objects.get(key)
        if (found is not None) if condition == "*" else (found is None or found.etag != condition):
            raise _RefusedError(412, "PreconditionFailed")

    def _store(self, key: str, data: bytes, metadata: dict[str, str]) -> str:
        self.fake.objects[key] = Stored(data, _etag(data), metadata)
        return self.fake.objects[key].etag


def _etag(data: bytes) -> str:
    return f'"{hashlib.md5(data).hexdigest()}"'
