"""One rank of a TorchRec run whose pipeline reads ahead from a DataLoader: it proves its resume."""

import argparse
from pathlib import Path
from typing import Any

from trainer.quiet import quiet_libraries

quiet_libraries()

import torch  # noqa: E402
from torch.utils.data import DataLoader, DistributedSampler  # noqa: E402

from ckpt.errors import BadInputError  # noqa: E402
from trainer import LoaderReader, Session, prove_resume  # noqa: E402
from trainer.config import ModelConfig  # noqa: E402
from trainer.evaluate import progress  # noqa: E402
from trainer.launch import joined, seed_generators  # noqa: E402
from trainer.model import build_training, to_batch  # noqa: E402
from trainer.movielens import load_movielens  # noqa: E402

SAMPLES = 1024
BATCH = 128


def train(place: Any, data: Any, root: str, until: int, save_every: int) -> None:
    """Epochs of eight batches."""
    seed_generators(7)
    training = build_training(ModelConfig(), data.rows, place.device, place.world_size)
    samples = list(range(SAMPLES))
    loader = DataLoader(
        samples,  # type: ignore[arg-type]
        BATCH // place.world_size,
        sampler=DistributedSampler(samples),  # type: ignore[arg-type]
        collate_fn=lambda index: to_batch(data.train.take(torch.tensor(index))),
    )
    reader: LoaderReader[Any] = LoaderReader(loader)
    state = {"model": training.model, "optimizer": training.optimizer}
    with Session(root, state, reader, save_every=save_every, elastic=True) as session:
        while session.steps < until:
            batches = session.batches()
            while (
                session.steps < until and (out := progress(training.pipeline, batches)) is not None
            ):
                session.step(in_flight=len(training.pipeline.batches), loss=out[0])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("root", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    with joined("cpu") as place:
        data = load_movielens()
        if place.world_size == 1:  # another number of ranks
            try:
                train(place, data, str(args.root / "at-5" / "straight"), 20, 5)
            except BadInputError as e:
                args.out.write_text(str(e))
            return
        told = [
            prove_resume(
                lambda *given: train(place, data, *given),
                at=at,
                steps=6,
                folder=args.root / f"at-{at}",
            )
            for at in (5, 8)
        ]
    if place.rank == 0:
        args.out.write_text("\n".join(map(str, told)))


main()
