"""A description is exported once for each model, and again as soon as anything may differ."""

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ckpt.layout import CODE
from ckpt.storage import MemoryStorage, Storage
from ckpt.trust import TrustList
from tests.trainer import served_models as models
from trainer.description import ServedModel, describe_once, export_description
from trainer.description.fingerprint import fingerprint_of
from trainer.plain import UnprovableError


class Scaled(models.Ranker):
    """Reads an attribute and a buffer that no checkpoint holds."""

    def __init__(self) -> None:
        super().__init__()
        self.offset = 0.5
        self.act: Any = torch.relu
        self.register_buffer("steps", torch.zeros(2), persistent=False)

    def forward(self, dense: Tensor, features: Any) -> Tensor:
        return self.act(super().forward(dense, features)) + self.offset + self.steps.sum()


def served(model: nn.Module, **changes: Any) -> ServedModel:
    keys = {f"model.{k}" for k in model.state_dict()}
    return replace(ServedModel("m", model, models.Ranker.request(16), "model.", keys), **changes)


def test_weights_of_the_checkpoint_are_no_part_of_it() -> None:
    torch.manual_seed(1)
    first = Scaled()
    torch.manual_seed(2)
    second = Scaled().train()
    assert not torch.equal(first.over[0].weight, second.over[0].weight)
    assert fingerprint_of(served(first)) == fingerprint_of(served(second))


def _changed(change: Callable[[Scaled], Any]) -> ServedModel:
    model = Scaled()
    change(model)
    return served(model)


@pytest.mark.parametrize(
    "other",
    [
        lambda: _changed(lambda m: setattr(m, "offset", 0.25)),
        lambda: _changed(lambda m: setattr(m, "act", torch.sigmoid)),
        lambda: _changed(lambda m: m.steps.fill_(1)),
        lambda: _changed(lambda m: setattr(m, "over", nn.Sequential(*list(m.over)[::2]))),
        lambda: _changed(lambda m: setattr(m.bags._embedding_bag_configs[1], "num_embeddings", 99)),
        lambda: served(Scaled(), args=models.Ranker.request(16, seed=3)),
        lambda: served(Scaled(), name="n"),
        lambda: served(Scaled(), checkpoint_keys={"model.over.0.weight"}),
    ],
    ids=["attribute", "function", "buffer", "layers", "rows", "request", "name", "keys"],
)
def test_whatever_a_description_depends_on_changes_it(other: Callable[[], ServedModel]) -> None:
    assert fingerprint_of(other()) != fingerprint_of(served(Scaled()))


def test_code_versions_and_settings_change_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import importlib

    source = tmp_path / "sidestage_made_up_layers.py"
    source.write_text("SCALE = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(__import__("sys").modules, source.stem, raising=False)
    importlib.import_module(source.stem)
    base = served(Scaled())
    sums = [fingerprint_of(base), fingerprint_of(base, depends_on="lr = 1")]
    source.write_text("SCALE = 2\n")
    sums.append(fingerprint_of(base))
    (tmp_path / "layers-9.9.dist-info").mkdir()
    sums.append(fingerprint_of(base))
    monkeypatch.setenv("TORCH_MADE_UP", "1")
    sums.append(fingerprint_of(base))
    assert len(set(sums)) == len(sums)


def test_what_cannot_be_compared_is_named() -> None:
    model = Scaled()
    model.act = lambda x: x * 2
    with pytest.raises(UnprovableError, match=r"\.act holds .*lambda"):
        fingerprint_of(served(model))
    model = Scaled()
    model.helper = object()
    with pytest.raises(UnprovableError, match=r"\.helper holds a object"):
        fingerprint_of(served(model))
    model = Scaled()
    model.over.register_forward_hook(lambda *_: None)
    with pytest.raises(UnprovableError, match="over has _forward_hooks"):
        fingerprint_of(served(model))


class Exporter:
    """The real exporter the first time; it takes seconds, so then what it has made, laid down again."""

    def __init__(self) -> None:
        self.calls = 0
        self._id = ""
        self._made: dict[str, bytes] = {}

    def __call__(self, what: ServedModel, storage: Storage, trust: TrustList) -> str:
        self.calls += 1
        if not self._made:
            self._id = export_description(what, storage, trust)
            self._made = {o.key: storage.read(o.key) for o in storage.list()}
        for key, data in self._made.items():
            storage.put(key, data)
            if key.startswith(CODE):
                trust.add(data)
        return self._id


def _key_of(storage: MemoryStorage, part: str) -> str:
    (key,) = [o.key for o in storage.list() if part in o.key]
    return key


def test_an_export_happens_once_until_something_is_wrong(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    storage, export, trust = MemoryStorage(), Exporter(), TrustList(tmp_path / "trusted")

    def start(model: nn.Module, trusted: TrustList = trust) -> tuple[str, bool, int]:
        done = describe_once(served(model), storage, trusted, export=export)
        return done.description_id, done.reused, export.calls

    first, reused, _ = start(models.Ranker())
    assert not reused
    assert start(models.Ranker()) == (first, True, 1)
    assert not [r for r in caplog.records if r.name == "sidestage"]

    # Another host trusts nothing yet: it must make the program itself.
    other = TrustList(tmp_path / "other")
    assert start(models.Ranker(), other) == (first, False, 2)
    assert "is not trusted on this host" in caplog.text
    assert start(models.Ranker(), other) == (first, True, 2)

    caplog.clear()
    program = _key_of(storage, "code/")
    storage.put(
        program, storage.read(program)[:-1] + b"?"
    )  # a damaged program isn't what is trusted
    assert start(models.Ranker()) == (first, False, 3)
    assert f"{program}: sha256" in caplog.text

    caplog.clear()
    golden = _key_of(storage, "golden")
    kept = storage.read(golden)
    storage.delete(golden)
    assert start(models.Ranker())[1:] == (False, 4)
    assert golden in caplog.text
    assert storage.read(golden) == kept

    caplog.clear()
    record = _key_of(storage, "exports/")
    storage.put(record, storage.read(record)[:40])
    assert start(models.Ranker())[1:] == (False, 5)
    assert f"{record}: not a whole JSON document" in caplog.text
    assert "delete it to skip exports again" in caplog.text
    storage.delete(record)
    assert start(models.Ranker())[1:] == (False, 6)
    assert start(models.Ranker())[1:] == (True, 6)


def test_a_model_that_cannot_be_compared_is_exported_each_time(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "sidestage")
    storage, calls = MemoryStorage(), []
    model = models.Ranker()
    model.helper = object()

    def export(*_: Any) -> str:
        calls.append(1)
        return "an id"

    for _ in range(2):
        done = describe_once(served(model), storage, TrustList(tmp_path / "t"), export=export)
        assert (done.description_id, done.reused) == ("an id", False)
    assert len(calls) == 2
    assert "exported anew: .helper holds a object" in caplog.text
    assert list(storage.list()) == []
