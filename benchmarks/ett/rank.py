"""One rank of a life: `python -m benchmarks.ett.rank JOB`, under torchrun or `trainer launch`.

The ledger begins before anything is imported. All ways share the model, the batches and the rule by
which they choose how often to save; they differ in what they save with and what they keep for a restart.
"""

from __future__ import annotations

import sys
from pathlib import Path

from trainer.ledger import Ledger


def main() -> None:
    ledger = Ledger()
    with ledger.span("imports"):
        from benchmarks.ett.job import LifeJob
        from trainer.quiet import quiet_libraries

        quiet_libraries()
        from benchmarks.ett import ours, peers

        job = LifeJob.read(Path(sys.argv[1]))
    if job.way == "ours":
        ours.live(job, ledger)
    else:
        peers.live(job, ledger)


if __name__ == "__main__":
    from ckpt.errors import SidestageError

    try:
        main()
    except SidestageError as e:
        print(f"{type(e).__name__}: {e}", file=sys.stderr, flush=True)
        sys.exit(e.exit_code)
