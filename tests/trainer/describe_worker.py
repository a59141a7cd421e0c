"""One rank of a sharded model: describes it, leaves its state and its own answers to a request."""

import sys
from pathlib import Path

from trainer.quiet import quiet_libraries

quiet_libraries()

import safetensors.torch  # noqa: E402
import torch  # noqa: E402

from ckpt.errors import BadInputError  # noqa: E402
from ckpt.storage import open_storage  # noqa: E402
from ckpt.trust import TrustList  # noqa: E402
from tests.trainer import served_models as models  # noqa: E402
from tests.trainer.served_everything import Everything, fill  # noqa: E402
from tests.trainer.sharded import shard  # noqa: E402
from trainer.description import ServedModel, export_description  # noqa: E402
from trainer.launch import joined  # noqa: E402
from trainer.leaving import leave  # noqa: E402
from trainer.proof import write_state  # noqa: E402


def main(out: Path) -> None:
    with joined("cpu") as place:
        for kind in (models.TwoTower, Everything):
            torch.manual_seed(4)
            model = shard(kind("meta"), place.world_size)
            if kind is Everything:
                fill(model)
            folder = out / kind.__name__
            served = ServedModel(
                name=kind.__name__,
                module=model,
                args=kind.request(16),
                prefix="model.",
                checkpoint_keys={f"model.{k}" for k in model.state_dict()},
            )
            trust = TrustList(out / "trusted")
            found = export_description(served, open_storage(folder), trust)
            if kind is models.TwoTower:
                assert export_description(served, open_storage(folder), trust) == found
            write_state({"model": model}, place.rank, folder / "state")
            model.eval()
            with torch.no_grad():
                answer = model(*kind.request(7, seed=3))
            if place.rank == 0:
                (folder / "id").write_text(found)
                named = answer if isinstance(answer, dict) else {"output": answer}
                safetensors.torch.save_file(named, folder / "answer.safetensors")
        refuse_on_every_rank(place.rank, place.world_size, out)


def refuse_on_every_rank(rank: int, world_size: int, out: Path) -> None:
    """What only rank 0 finds out, the others must hear of."""
    model = shard(models.Branches("meta"), world_size)
    served = ServedModel(
        name="refused",
        module=model,
        args=models.Branches.request(8),
        prefix="model.",
        checkpoint_keys={f"model.{k}" for k in model.state_dict()},
    )
    try:
        export_description(served, open_storage(out / "refused"), TrustList(out / "trusted"))
    except BadInputError as e:
        (out / f"refused-{rank}").write_text(str(e))


main(Path(sys.argv[1]))
leave(0)  # tearing down an interpreter that holds sharded models can abort it (std::terminate)
