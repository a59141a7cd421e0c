"""One rank of four that prove a resume of their DistributedDataParallel, and write what they were told."""

import json
import sys
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel

from ckpt.errors import InexactError
from trainer import BatchReader, Session, prove_resume
from trainer.launch import joined

X = torch.randn(1024, 64, generator=torch.Generator().manual_seed(1))


def train(root: str, until: int, save_every: int, *, static_graph: bool) -> None:
    torch.manual_seed(0)
    layers = [m for _ in range(6) for m in (torch.nn.Linear(64, 64), torch.nn.Tanh())]
    model = DistributedDataParallel(
        torch.nn.Sequential(*layers),
        static_graph=static_graph,
        find_unused_parameters=not static_graph,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    reader = BatchReader(len(X), 64, lambda index: X[index])
    state = {"model": model.module, "optimizer": optimizer}
    with Session(root, state, reader, save_every=save_every) as session:
        for batch in session.batches():
            optimizer.zero_grad()
            loss = (model(batch) - batch).square().mean()
            loss.backward()
            optimizer.step()
            session.step(loss=loss)
            if session.steps == until:
                break


def main(out: Path) -> None:
    told = {}
    with joined("cpu") as place:
        for static_graph in (False, True):
            try:
                proof = prove_resume(
                    lambda *given, static=static_graph: train(*given, static_graph=static),
                    at=3,
                    steps=5,
                    folder=out / f"static-{static_graph}",
                )
            except InexactError as e:
                proof = e.proof
            told[str(static_graph)] = proof.as_dict()
    (out / f"told-r{place.rank}.json").write_text(json.dumps(told))


main(Path(sys.argv[1]))
