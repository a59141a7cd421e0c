"""The pictures of docs/images: `python -m benchmarks.screenshots` draws them again.

The status page and the page of `trainer ett` are shown as they are, in a real Chromium, of a made-up
registry in memory and of a made-up run.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.made_runs import sample_advice, sample_losses, sample_run
from ckpt import layout
from ckpt.digest import digest_of
from ckpt.events import LogSink
from ckpt.manifest import AttemptRecord, CommitRecord, Receipt, RunRecord, encode
from ckpt.storage import MemoryStorage
from ckpt.types import CommitRef, FileEntry, ObjectInfo
from publisher import keys, records
from publisher.answers import measure, record_answer
from publisher.httpd import bind
from publisher.overview import Overview
from publisher.page import PageThread, StatusPage
from publisher.pointer import Reason
from publisher.records import (
    GateResult,
    LeaseOwner,
    LeaseRecord,
    Refusal,
    Source,
    VersionManifest,
)
from publisher.registry import Registry
from trainer.ett.page import write_page

RUN_ID = "feed-ranking"
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
ARGS = (
    *(
        "--no-sandbox",
        "--disable-gpu",
        "--disable-lcd-text",
        "--disable-quic",
        "--no-first-run",
        "--disable-sync",
    ),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)


@dataclass
class Clock:
    """Time that moves when it is told to."""

    now_s: float

    def time(self) -> float:
        return self.now_s

    def monotonic(self) -> float:
        return self.now_s


class Stage(MemoryStorage):
    """A store whose files are said to be larger than they are."""

    def __init__(self) -> None:
        super().__init__("feed-ranking")
        self.said_bytes: dict[str, int] = {}

    def stat(self, key: str) -> ObjectInfo:
        info = super().stat(key)
        return replace(info, size_bytes=self.said_bytes.get(key, info.size_bytes))


@dataclass
class Play:
    """A run and its registry, written record by record: nothing is trained or built."""

    clock: Clock
    storage: Stage = field(default_factory=Stage)

    def __post_init__(self) -> None:
        self.registry = Registry(self.storage, clock=self.clock)
        self.storage.create(layout.RUN, encode(RunRecord(RUN_ID, self.clock.now_s, "0.1.0")))
        attempt = AttemptRecord(1, RUN_ID, "token", 1, self.clock.now_s, None)
        self.storage.create(layout.attempt_key(1), encode(attempt))

    def commit(self, step: int) -> CommitRecord:
        prefix = layout.data_prefix(1, step, "s0")
        receipt = encode(
            Receipt(
                epoch=1,
                attempt_token="token",
                step=step,
                save_id="s0",
                rank=0,
                world_size=1,
                plan_id="plan",
                parent=None,
                saved_at_s=self.clock.now_s - 3,
                annotations={},
                values_digest="",
                tensor_bytes=0,
                guarded_bytes=0,
                copied_bytes=0,
                copied_tables={},
                files=(),
            )
        )
        key = layout.rank_receipt_key(prefix, 0)
        self.storage.create(key, receipt)
        record = CommitRecord(
            run_id=RUN_ID,
            epoch=1,
            attempt_token="token",
            step=step,
            save_id="s0",
            world_size=1,
            parent=None,
            continues=None,
            saved_at_s=self.clock.now_s - 3,
            committed_at_s=self.clock.now_s,
            tensor_bytes=0,
            stored_bytes=0,
            annotations={},
            receipts=(FileEntry(key, len(receipt), digest_of(receipt)),),
            files=(),
        )
        self.storage.create(layout.commit_key(1, step), encode(record))
        return record

    def publish(
        self, record: CommitRecord, *, took_s: float = 1.0, size_bytes: int = 1000, **move: Any
    ) -> VersionManifest:
        """A version of a commit, made live, or the canary."""
        source = self._source(record)
        number = self.registry.claim(source, "publisher@ingest-2")
        started_at_s = self.clock.now_s
        self.clock.now_s += took_s
        key = self.registry.key(number, "tables-00000.bin")
        self.storage.create(key, b"")
        self.storage.said_bytes[key] = size_bytes
        live = self.registry.live()
        manifest = VersionManifest(
            version=number,
            parent=live.to_version if live else None,
            source=source,
            dense_step=record.step,
            table_step=record.step,
            id_map_step=record.step,
            saved_at_s=record.saved_at_s,
            committed_at_s=record.committed_at_s,
            event_time_s=record.committed_at_s - 31.5,
            model="feed-ranking",
            description_id="d1",
            files=(FileEntry("tables-00000.bin", size_bytes, digest_of(b"")),),
            tables=(),
            gates=gates(number),
            published_by="publisher@ingest-2",
            lease_epoch=3,
            started_at_s=started_at_s,
            published_at_s=self.clock.now_s,
        )
        self.registry.seal(manifest)
        self.release(manifest, **move)
        return manifest

    def release(
        self, manifest: VersionManifest, why: str = "newest commit", *, canary: bool = False
    ) -> None:
        self.clock.now_s += 0.2
        self.registry.release(
            manifest,
            Reason("publisher@ingest-2", why),
            canary=canary,
            lease_epoch=self.registry.lease_epoch(),
        )

    def refuse(self, record: CommitRecord, gate: records.GateName, reason: str) -> Refusal:
        source, who, at_s = self._source(record), "publisher@ingest-2", self.clock.now_s
        return self.registry.refuse(Refusal(source, 0, gate, reason, (), None, who, at_s))

    def answer(self, manifest: VersionManifest, host: str, after_s: float) -> None:
        at_s = manifest.published_at_s + after_s
        record_answer(self.registry, measure(manifest, host, at_s, at_start=False)[0])

    def _source(self, record: CommitRecord) -> Source:
        ref = CommitRef(1, record.step, digest_of(encode(record)))
        return records.source_of(record, ref)


def gates(seed: int) -> tuple[GateResult, ...]:
    rng = random.Random(seed)
    return (
        GateResult("trusted_code", True, "program 4f1c09ab2e77"),
        GateResult("names_and_shapes", True, "61 constants, 26 tables"),
        GateResult("finite", True, "26 tables, 61 constants"),
        GateResult("norm_drift", True, "largest: user_history", 1 + rng.random() / 9, 4.0),
        GateResult("dequantisation", True, "largest: ad_id", 0.004 + rng.random() / 400, 0.2),
        GateResult("coverage", True, "186 402 113 rows, each once"),
        GateResult("digests", True, "commit record, 412 files, every chunk read"),
        GateResult("golden_parity", True, "max abs error", rng.random() / 900, 0.01),
        GateResult("metric", True, "auc 0.7934, live 0.7931", 0.7934, 0.7911),
    )


def fill(now_s: float) -> Play:
    """A day in the life of a registry, up to `now_s`."""
    rng, versions = random.Random(7), 34
    play = Play(Clock(now_s - versions * 600 - 240))
    lease = LeaseRecord(
        1, LeaseOwner("ingest-2", 4127, "token"), 900, 20.0, False, play.clock.now_s
    )
    play.storage.create(play.registry.prefix + keys.LEASE, records.encode(lease))
    for n in range(1, versions + 1):
        play.clock.now_s = now_s - (versions - n) * 600 - 240
        record = play.commit(20_000 + n * 2_000)
        play.clock.now_s += 1
        if n == 12:
            play.refuse(
                record,
                "finite",
                "model.sparse.ebc.user_history.weight: row 48120311 holds NaN",
            )
        elif n in (22, 23):
            for _ in range(3):
                play.refuse(
                    record,
                    "metric",
                    "auc 0.7412 on replay/batch.safetensors, live version 20 has 0.7925: "
                    "0.0513 worse, at most 0.002 is allowed",
                )
                play.clock.now_s += 8
        else:
            manifest = play.publish(
                record,
                took_s=2.4 + rng.random() * 1.3 + (3 if n == 17 else 0),
                size_bytes=int((286 + n * 1.7 + rng.random() * 2) * 2**20),
                canary=n == versions,
            )
            for host in range(4):
                if n != versions or host == 0:
                    play.answer(manifest, f"serve-{host + 1}", 0.7 + rng.random())
        if n == 31:
            play.clock.now_s += 150
            play.registry.rollback(
                27, Reason("mira (status page)", "click-through fell on the new slate; INC-4127")
            )
            play.registry.pin(27, Reason("mira", "what the incident is compared with"))
    play.clock.now_s = now_s
    return play


# -- a real browser -------------------------------------------------------------------------


def chromium() -> str | None:
    """Where a Chromium is on this host."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


@contextmanager
def browser() -> Iterator[Any]:
    """A headless Chromium, driven by playwright."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as p:
        launched = p.chromium.launch(executable_path=chromium(), args=list(ARGS))
        try:
            yield launched
        finally:
            launched.close()


@contextmanager
def served(play: Play, token: str | None = None) -> Iterator[str]:
    """The status page of a registry: its URL."""
    page = StatusPage(lambda: Overview(play.storage, play.registry), "op@here", token=token)
    sock = bind("127.0.0.1", 0)
    thread = PageThread(page, sock, LogSink())
    thread.start()
    try:
        yield f"http://127.0.0.1:{sock.getsockname()[1]}/"
    finally:
        thread.stop()


def shoot_status(folder: Path, *, scheme: str = "light", width: int = 1200) -> Path:
    target = folder / "status-page.png"
    with served(fill(time.time())) as url, browser() as chrome:
        page = _page(chrome, scheme, width, 1060)
        page.goto(url)
        page.wait_for_selector("#card-live .big")
        page.screenshot(path=target, full_page=True)
    return _small(target)


def shoot_ett(folder: Path, *, scheme: str = "light", width: int = 1200) -> Path:
    """The upper part of the page: figures, waterfall, losses, the first timelines."""
    target, report = folder / "ett-page.png", sample_run()
    with tempfile.TemporaryDirectory() as scratch, browser() as chrome:
        html = Path(scratch) / "ett.html"
        write_page([report], [sample_losses(report)], [sample_advice()], html)
        page = _page(chrome, scheme, width, 1250)
        page.goto(html.as_uri())
        page.wait_for_selector("#timeline-0-1 rect")
        page.screenshot(path=target)
    return _small(target)


def _page(chrome: Any, scheme: str, width: int, height: int) -> Any:
    size = {"width": width, "height": height}
    return chrome.new_page(viewport=size, color_scheme=scheme, reduced_motion="reduce")


def _small(target: Path) -> Path:
    with suppress(ImportError):  # a third of the size, where Pillow is installed
        from PIL import Image

        image = Image.open(target).convert("RGB")
        # Covering all colours, not the frequent ones: legends have few pixels.
        image.quantize(128, Image.Quantize.MAXCOVERAGE).save(target, optimize=True)
    return target


PICTURES = {"status": shoot_status, "ett": shoot_ett}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.screenshots", description=__doc__)
    parser.add_argument("--to", type=Path, default=Path("docs/images"))
    parser.add_argument("--scheme", choices=("light", "dark"), default="light")
    parser.add_argument("--width", type=int, default=1200)
    parser.add_argument("--only", choices=tuple(PICTURES))
    args = parser.parse_args()
    args.to.mkdir(parents=True, exist_ok=True)
    for name in [args.only] if args.only else PICTURES:
        target = PICTURES[name](args.to, scheme=args.scheme, width=args.width)
        print(f"{target}: {target.stat().st_size >> 10} KiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
