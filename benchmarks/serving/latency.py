"""Latency of a published version and of the live model, in turn: `latency.py ROOT ROWS REQUESTS`."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.report import median
from benchmarks.serving.models import Ranker, request_tensors
from publisher import Predictor

BATCHES = (1, 64, 512)
WARM = 20


def main(root: str, rows: int, requests: int) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    model = Ranker(rows).eval()
    predictor = Predictor(root)
    out = []
    for batch in BATCHES:
        args = [model.request(batch, seed) for seed in range(8)]
        asked = [request_tensors(a) for a in args]

        def live(n: int, args: list[Any] = args) -> None:
            with torch.inference_mode():
                model(*args[n % len(args)])

        def published(n: int, asked: list[Any] = asked) -> None:
            predictor.predict(asked[n % len(asked)])

        engine = str(predictor.current.engine)
        for name, of, samples in _in_turn({"eager fp32": live, "published": published}, requests):
            samples.sort()
            out.append(
                {
                    "name": name,
                    "status": "ok",
                    "engine": engine if of is published else "torchrec",
                    "batch": batch,
                    "p50_ms": 1000 * (median(samples) or 0.0),
                    "p99_ms": 1000 * samples[int(0.99 * (len(samples) - 1))],
                }
            )
    return out


def _in_turn(
    work: dict[str, Callable[[int], None]], requests: int
) -> list[tuple[str, Callable[[int], None], list[float]]]:
    """Seconds of each request. One after the other in short rounds, in both orders."""
    samples: dict[str, list[float]] = {name: [] for name in work}
    for of in work.values():
        for n in range(WARM):
            of(n)
    for n in range(requests):
        order = list(work.items())
        for name, of in order if n % 2 == 0 else reversed(order):
            began = time.perf_counter()
            of(n)
            samples[name].append(time.perf_counter() - began)
    return [(name, of, samples[name]) for name, of in work.items()]


if __name__ == "__main__":
    torch.set_num_threads(int(sys.argv[4]) if len(sys.argv) > 4 else 1)
    print(json.dumps(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))))
