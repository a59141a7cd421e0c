"""The status page's API: what it tells, who may move the pointer, and that nothing harms the daemon."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.screenshots import Clock, Play, fill, served
from ckpt import layout
from ckpt.command import run_command
from ckpt.errors import BadInputError, NotFoundError, StorageError
from ckpt.events import ListSink
from ckpt.manifest import RunRecord, encode
from ckpt.storage import LocalStorage
from publisher import cli, keys
from publisher.httpd import bind
from publisher.overview import Overview
from publisher.page import PageThread, StatusPage, check_exposure
from publisher.pointer import Reason
from publisher.registry import Registry
from publisher.status import describe_status, status_of

REPO = Path(__file__).parents[2]
DEADLINE_S = 60
OURS = {"X-Sidestage": "page"}


@pytest.fixture
def play() -> Play:
    """Versions 1 to 3 of steps 10, 20, 30; 3 is the canary; step 40 was refused twice."""
    play = Play(Clock(1000.0))
    for step in (10, 20, 30):
        play.clock.now_s += 100
        manifest = play.publish(play.commit(step), canary=step == 30)
        play.answer(manifest, "serve-1", 2.0)
        play.answer(manifest, "serve-2", 3.0)
    record = play.commit(40)
    for _ in range(2):
        play.refuse(record, "finite", "table t: row 5 holds NaN")
    return play


@pytest.fixture
def client(play: Play) -> Iterator[httpx.Client]:
    with served(play) as url, httpx.Client(base_url=url, trust_env=False, timeout=60) as client:
        yield client


def test_what_it_tells(client: httpx.Client) -> None:
    found = client.get("/api/status").json()
    assert found["live"]["version"] == 2
    assert found["live"]["step"] == 20
    assert found["live"]["why"] == "newest commit"
    # Committed, built for 1 s, moved 0.2 s later; answered 2 s and 3 s after it was published.
    fresh = found["live"]["freshness"]
    assert fresh["commit_to_live_s"] == pytest.approx(1.2)
    assert fresh["event_to_live_s"] == pytest.approx(32.7)
    assert fresh["commit_to_answer_s"] == pytest.approx(4.0)
    assert [h["host"] for h in fresh["hosts"]] == ["serve-1", "serve-2"]
    assert (found["canary"]["version"], found["canary"]["step"]) == (3, 30)
    assert found["canary"]["freshness"]["commit_to_live_s"] is None
    assert (found["newest_commit"]["step"], found["newest_commit"]["version"]) == (40, None)
    assert found["rollback_to"] == 1
    assert [p["version"] for p in found["published"]] == [3, 2, 1]
    third = found["published"][0]
    assert (third["size_bytes"], third["publish_s"]) == (1000, 1.0)
    gates = {g["name"]: g for g in third["gates"]}
    assert gates["golden_parity"]["threshold"] == 0.01
    assert [(m["kind"], m["to_version"]) for m in found["history"]] == [
        ("canary", 3),
        ("publish", 2),
        ("publish", 1),
    ]
    (refused,) = found["refused"]
    assert (refused["step"], refused["attempts"], refused["gate"]) == (40, 2, "finite")


def test_the_command_tells_the_same_in_words(play: Play) -> None:
    lines = describe_status(status_of(play.storage, play.registry)).splitlines()
    told = [line for line in lines if line.startswith(("live", "canary", "  "))]
    assert told[0].startswith("live      version 2 (step 20) since ")
    assert told[1].strip() == (
        "commit to live 1.2 s, commit to first answer 4.0 s, event to live 32.7 s, "
        "event to first answer 35.5 s"
    )
    assert told[2].startswith("canary    version 3 (step 30) since ")


def test_roll_back_and_promote(play: Play, client: httpx.Client) -> None:
    body = {"to": 1, "seen": 2, "who": "mira", "why": "bad clicks"}
    answer = client.post("/api/rollback", json=body, headers=OURS)
    assert answer.status_code == 200, answer.text
    assert answer.json()["move"]["to_version"] == 1
    live = play.registry.live()
    assert live is not None
    assert (live.to_version, live.who, live.why) == (1, "mira (status page)", "bad clicks")
    assert client.get("/api/status").json()["live"]["version"] == 1
    # What the user saw isn't so any more: nothing moves.
    late = client.post("/api/rollback", json=body, headers=OURS)
    assert (late.status_code, late.json()) == (
        409,
        {"error": "version 1 is live by now, not 2: look again"},
    )
    refused = {
        404: {"to": 99},
        409: {"to": 1},
        400: {"to": "1"},
    }
    for status, wrong in refused.items():
        assert client.post("/api/rollback", json=wrong, headers=OURS).status_code == status
    for wrong in ({"to": True}, {"to": 2, "why": "a\nb"}, {"to": 2, "who": "x" * 501}, [], 3):
        assert client.post("/api/rollback", json=wrong, headers=OURS).status_code == 400, wrong
    assert client.post("/api/rollback", content=b"{" * 20000, headers=OURS).status_code == 413
    assert client.post("/api/promote", json={}, headers=OURS).status_code == 400
    assert play.registry.live() == live


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"X-Sidestage": "page", "Origin": "http://evil.example"},
        {"X-Sidestage": "page", "Origin": "null"},
        {"X-Sidestage": "page", "Origin": "http://127.0.0.1:1"},
        {"X-Sidestage": "page", "Sec-Fetch-Site": "cross-site"},
        {"X-Sidestage": "page", "Sec-Fetch-Site": "same-site"},
        {"X-Sidestage": "page", "Host": "evil.example"},  # a name that was given our address
    ],
)
def test_another_sites_page_moves_nothing(
    headers: dict[str, str], play: Play, client: httpx.Client
) -> None:
    before = play.registry.live()
    for path in ("/api/rollback", "/api/promote"):
        answer = client.post(path, json={"to": 1, "version": 3}, headers=headers)
        assert answer.status_code == 403, answer.text
        assert not [h for h in answer.headers if h.startswith("access-control")]
    assert client.get("/api/rollback").status_code == 405
    assert play.registry.live() == before


def test_a_name_that_was_given_our_address_reads_nothing(client: httpx.Client) -> None:
    for host in ("evil.example:80", "[::", "127.0.0.1.evil.example", ""):
        assert client.get("/api/status", headers={"Host": host}).status_code == 403, host
    for host in ("localhost:8081", "[::1]:8081", "10.1.2.3", socket.gethostname()):
        assert client.get("/api/status", headers={"Host": host}).status_code == 200, host


def test_with_a_token(play: Play) -> None:
    with served(play, token="open-sesame") as url, httpx.Client(base_url=url, trust_env=False) as c:
        assert (
            c.get("/").status_code == 200
        )  # the page itself holds nothing, and asks for the token
        for answer in (
            c.get("/api/status"),
            c.post("/api/rollback", json={"to": 1}, headers=OURS),
            c.get("/api/status", headers={"Authorization": "Bearer open-sesamE"}),
        ):
            assert answer.status_code == 401
            assert answer.headers["www-authenticate"].startswith("Bearer")
        c.headers["Authorization"] = "Bearer open-sesame"
        assert c.get("/api/status", headers={"Host": "publisher.example"}).status_code == 200
        assert c.post("/api/rollback", json={"to": 1}, headers=OURS).status_code == 200


def test_the_browser_is_told_to_run_nothing_else(client: httpx.Client) -> None:
    for path in ("/", "/page.js", "/api/status", "/plot.js", "/page.css", "/icon.svg"):
        answer = client.get(path)
        assert answer.status_code == 200
        assert answer.headers["content-security-policy"].startswith("default-src 'self'; ")
        assert answer.headers["x-content-type-options"] == "nosniff"
    page = client.get("/").text
    assert "style=" not in page
    assert "onclick" not in page
    assert "http" not in page.replace("http-equiv", "")  # nothing comes from the internet


def test_trouble_is_shown_and_passes(play: Play) -> None:
    """No root yet, a store that fails, a damaged pointer, manifest, pin and lease."""
    trouble: list[Exception] = [NotFoundError("no RUN.json here"), StorageError("store is away")]

    def opened() -> Overview:
        if trouble:
            raise trouble.pop(0)
        return Overview(play.storage, Registry(play.storage, clock=play.clock))

    clock = Clock(0.0)
    page, sink = StatusPage(opened, "op@here", clock=clock), ListSink()
    sock = bind("127.0.0.1", 0)
    url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    thread = PageThread(page, sock, sink)
    thread.start()
    try:
        with httpx.Client(base_url=url, trust_env=False, timeout=DEADLINE_S) as client:

            def look() -> tuple[int, Any]:
                clock.now_s += 10
                answer = client.get("/api/status")
                return answer.status_code, answer.json()

            assert look() == (503, {"error": "no RUN.json here"})
            assert client.get("/api/status").json() == {"error": "no RUN.json here"}  # kept for 1 s
            assert look() == (503, {"error": "store is away"})
            assert look()[1]["live"]["version"] == 2
            key = play.registry.prefix + keys.LIVE
            good = play.storage.read(key)
            play.storage.put(key, b"{}")
            status, told = look()
            assert status == 503
            assert "publisher rollback ROOT --to N" in told["error"]
            play.storage.put(key, good)
            play.publish(play.commit(50))
            play.storage.put(play.registry.key(4, keys.MANIFEST), b"{}")
            status, told = look()
            assert status == 200
            assert [("problem" in p, p["version"]) for p in told["published"]] == [
                (True, 4),
                (False, 3),
                (False, 2),
                (False, 1),
            ]
            assert (told["live"]["version"], told["live"]["freshness"]) == (4, None)
            registry = play.registry
            for number in (1, 2):
                registry.pin(number, Reason("op@here", "keep"))
            play.storage.put(registry.prefix + keys.pin_key(1), b"{}")
            play.storage.put(registry.prefix + keys.LEASE, b"{}")
            status, told = look()
            assert status == 200
            assert "delete it" in told["lease"]["problem"]
            assert [(p["version"], "problem" in p) for p in told["pins"]] == [(1, True), (2, False)]
            assert "pins/000001.json" in told["pins"][0]["problem"]
            words = describe_status(status_of(play.storage, registry))
            assert "\nlease     " in words
            assert "\npinned    version 1 " in words
    finally:
        thread.stop()
    assert sink.events == []


def test_a_registry_that_hangs_holds_up_nothing_else(play: Play) -> None:
    reached, go_on = threading.Event(), threading.Event()

    def hangs() -> Overview:
        reached.set()
        assert go_on.wait(DEADLINE_S)
        raise StorageError("gave up")

    sock = bind("127.0.0.1", 0)
    url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    thread = PageThread(StatusPage(hangs, "op@here"), sock, ListSink())
    thread.start()

    def ask() -> None:
        with suppress(httpx.TransportError):  # the page is closed under it
            httpx.get(f"{url}/api/status", trust_env=False, timeout=DEADLINE_S)

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        assert reached.wait(DEADLINE_S)
        assert httpx.get(url, trust_env=False, timeout=DEADLINE_S).status_code == 200
        thread.stop()  # the daemon's last step isn't held up either
    finally:
        go_on.set()
        asking.join(DEADLINE_S)


def test_a_page_that_cannot_serve_is_told_and_no_more(play: Play) -> None:
    sock, sink = bind("127.0.0.1", 0), ListSink()
    sock.close()
    thread = PageThread(StatusPage(lambda: Overview(play.storage, play.registry), "x"), sock, sink)
    thread.start()
    thread.stop()
    assert len(sink.named("page_stopped")) == 1


def test_a_page_that_others_reach_needs_a_token(tmp_path: Path) -> None:
    for host in ("127.0.0.1", "::1", "localhost"):
        check_exposure(host, None)
    check_exposure("0.0.0.0", "token")
    for host in ("0.0.0.0", "::", "10.0.0.1", "publisher.example"):
        with pytest.raises(BadInputError, match="could roll back; give it a token"):
            check_exposure(host, None)
    argv = ["run", str(tmp_path / "root"), "--page-port", "0"]
    assert run_command(cli.cli, [*argv, "--page-host", "0.0.0.0"]) == 2
    assert run_command(cli.cli, [*argv, "--page-token-file", str(tmp_path / "none")]) == 3
    (tmp_path / "empty").write_text(" \n")
    assert run_command(cli.cli, [*argv, "--page-token-file", str(tmp_path / "empty")]) == 2
    with socket.create_server(("127.0.0.1", 0)) as other:
        argv[-1] = str(other.getsockname()[1])
        assert run_command(cli.cli, argv) == 6


def test_the_daemon_serves_it_before_there_is_a_run(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("open-sesame\n")
    argv = ["run", str(tmp_path / "root"), "--page-port", "0", "--interval", "0.05", "--json"]
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "publisher.cli",
            *argv,
            "--page-token-file",
            str(tmp_path / "token"),
        ],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(REPO)},
    )
    try:
        assert process.stdout is not None
        events = (json.loads(line) for line in process.stdout)
        url = next(e["url"] for e in events if e["event"] == "page")
        headers = {"Authorization": "Bearer open-sesame"}
        with httpx.Client(base_url=url, headers=headers, trust_env=False, timeout=60) as client:
            answer = client.get("/api/status")
            assert answer.status_code == 503
            assert "no such folder" in answer.json()["error"]
            assert client.post("/api/rollback", json={}, headers=OURS).status_code == 404
        process.send_signal(signal.SIGTERM)
        assert [e["event"] for e in events][-1] == "stopped"
        assert process.wait(DEADLINE_S) == 0
    finally:
        process.kill()
        process.communicate()


def test_the_page_without_a_daemon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In this process: it is served until SIGTERM."""
    root = LocalStorage(tmp_path / "root")
    root.create(layout.RUN, encode(RunRecord("r", 1.0, "test")))
    monkeypatch.delenv("SIDESTAGE_TOKEN", raising=False)
    got: list[Any] = []

    class Sink:
        def __init__(self, *, as_json: bool) -> None:
            self.as_json = as_json

        def emit(self, name: str, /, **fields: Any) -> None:
            if name == "page":
                threading.Thread(target=ask, args=(fields["url"],)).start()

    def ask(url: str) -> None:
        try:
            got.append(httpx.get(f"{url}api/status", trust_env=False, timeout=DEADLINE_S).json())
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(cli.paging, "LineSink", Sink)
    before = [signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)]
    try:
        assert run_command(cli.cli, ["page", root.url, "--port", "0"]) == 0
    finally:
        for s, handler in zip((signal.SIGTERM, signal.SIGINT), before, strict=True):
            signal.signal(s, handler)
    assert [(g["live"], g["newest_commit"], g["published"]) for g in got] == [(None, None, [])]
    assert run_command(cli.cli, ["page", str(tmp_path / "none")]) == 3
    assert "no such folder" in capsys.readouterr().err


def test_no_torch_and_few_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page that is open all day reads each record once, then lists."""
    play = fill(1_000_000.0)
    overview = Overview(play.storage, Registry(play.storage, clock=play.clock))
    first = overview.read()
    reads: list[str] = []
    read = play.storage.read

    def counted(key: str, start: int = 0, length: int | None = None) -> bytes:
        reads.append(key)
        return read(key, start, length)

    monkeypatch.setattr(play.storage, "read", counted)
    assert overview.read() == first
    again = {k for k in reads if "quarantine" not in k}
    small = {play.registry.prefix + key for key in (keys.LIVE, keys.LEASE)}
    assert again == small | {play.registry.prefix + keys.pin_key(27)}
    code = "import sys, publisher.page; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=REPO).returncode == 0
