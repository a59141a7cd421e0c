"""Every kind of model that can be described: the stored program, fed from tables, equals the live model."""

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ckpt.storage import MemoryStorage
from ckpt.trust import TrustList
from tests.trainer import served_zoo as zoo
from tests.trainer.served import read_description, request_of, serve
from tests.trainer.served_everything import train
from trainer.description import ServedModel, export_description


class Exported:
    """A model of the zoo and its description; exported once for all tests of a kind."""

    def __init__(self, kind: Any, folder: Path) -> None:
        torch.manual_seed(3)
        self.model, self.storage = kind(), MemoryStorage()
        self.names = list(inspect.signature(self.model.forward).parameters)
        if kind is zoo.Everything:
            train(self.model)
        served = ServedModel("m", self.model, kind.request(16), "model.", self.checkpoint)
        trust = TrustList(folder / "trusted")
        self.description = read_description(
            self.storage, export_description(served, self.storage, trust)
        )

    @property
    def checkpoint(self) -> dict[str, Tensor]:
        return {f"model.{k}": v for k, v in self.model.state_dict().items()}

    def serve(self, args: tuple[Any, ...]) -> list[Tensor]:
        request = request_of(self.description, dict(zip(self.names, args, strict=False)))
        return [*serve(self.storage, self.description, self.checkpoint, request).values()]


@pytest.fixture(scope="module", params=zoo.ZOO, ids=lambda k: k.__name__)
def exported(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Iterator[Exported]:
    return Exported(request.param, tmp_path_factory.mktemp("trust"))


def test_stored_program_equals_the_model(exported: Exported) -> None:
    assert exported.description.export_max_abs_err == 0.0
    for parameter in exported.model.parameters():  # the next checkpoint's weights
        nn.init.normal_(parameter, std=0.3)
    exported.model.eval()
    for batch in (1, 2, 7):
        args = exported.model.request(batch, seed=batch)
        with torch.no_grad():
            expected = exported.model(*args)
        got = exported.serve(args)
        want = [t for t in torch.utils._pytree.tree_leaves(expected) if isinstance(t, Tensor)]
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
