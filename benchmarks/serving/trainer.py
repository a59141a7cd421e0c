"""A trainer beside a publisher: prints the start and seconds of each step, until stdin closes."""

from __future__ import annotations

import sys
import threading
import time

import torch

from benchmarks.training.tables import FusedTables

TABLES, ROWS, DIM, SAMPLES, LOOKUPS = 4, 250_000, 32, 1024, 4096


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    over = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), over.set()), daemon=True).start()
    tables = FusedTables(TABLES, ROWS, DIM, torch.device("cpu"))
    mlp = torch.nn.Sequential(
        torch.nn.Linear(TABLES * DIM, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1)
    )
    optimizer = torch.optim.SGD(mlp.parameters(), lr=0.01)
    offsets = torch.arange(0, LOOKUPS, LOOKUPS // SAMPLES)
    while not over.is_set():
        began = time.time()
        ids = torch.randint(0, ROWS, (TABLES, LOOKUPS))
        loss = mlp(tables.lookup(ids, offsets)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        tables.update()
        print(began, time.time() - began, flush=True)


if __name__ == "__main__":
    main()
