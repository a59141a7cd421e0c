"""One rank of a TorchRec run, started by a launcher: trains, dies when told, leaves its last state."""

import argparse
import hashlib
import os
import signal
from pathlib import Path

from trainer.quiet import quiet_libraries

quiet_libraries()

import torch.distributed as dist  # noqa: E402

from ckpt.config import restart_count  # noqa: E402
from tests.trainer.worker_settings import BATCH_SIZE  # noqa: E402
from trainer.config import ModelConfig  # noqa: E402
from trainer.evaluate import progress  # noqa: E402
from trainer.launch import joined, seed_generators  # noqa: E402
from trainer.model import KernelCounters, build_training, to_batch  # noqa: E402
from trainer.movielens import load_movielens  # noqa: E402
from trainer.proof import write_state  # noqa: E402
from trainer.reader import BatchReader  # noqa: E402
from trainer.session import Session  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("root", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--until", type=int, default=20)
    parser.add_argument("--die-at", type=int, default=0)
    parser.add_argument("--elastic", action="store_true")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)

    with joined("cpu") as place:
        data = load_movielens()
        seed_generators(7)
        training = build_training(ModelConfig(), data.rows, place.device, place.world_size)
        reader = BatchReader(
            len(data.train),
            BATCH_SIZE,
            lambda index: to_batch(data.train.take(index)),
            rank=place.rank,
            world_size=place.world_size,
        )
        state = {"model": training.model, "optimizer": training.optimizer}
        counters = KernelCounters(
            training.model
        )  # not in the state: a checkpoint has what it counts
        journal = (args.out / f"trained-{restart_count()}-r{place.rank}.txt").open("w")
        handle = None
        with Session(str(args.root), state, reader, save_every=10, elastic=args.elastic) as session:
            batches = session.batches()
            while session.steps < args.until:
                _, _, labels = progress(training.pipeline, batches)
                handle = session.step(in_flight=len(training.pipeline.batches)) or handle
                digest = hashlib.sha256(labels.numpy().tobytes()).hexdigest()
                print(session.steps, digest, file=journal, flush=True)
                if session.steps == args.die_at and restart_count() == 0:
                    handle.committed.result(timeout=120)
                    dist.barrier()
                    if place.rank == place.world_size - 1:
                        os.kill(os.getpid(), signal.SIGKILL)
            session.finish()
            write_state(session.state, place.rank, args.out)
            print("kernels", counters.state_dict()["iter"], file=journal, flush=True)
        if session.restored:
            print("not_restored:", *session.restored.not_restored, file=journal, flush=True)


main()
