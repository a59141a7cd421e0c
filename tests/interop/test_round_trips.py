"""Sidestage to each format and back, bit for bit; and what the formats' own tools write and read."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from ckpt import Checkpointer, PerRank
from ckpt.catalog import Catalog
from ckpt.export import dcp_folder
from ckpt.formats import SAFETENSORS_DTYPES
from ckpt.storage import LocalStorage
from ckpt.types import ITEMSIZE
from ckpt.verify import verify_commit
from tests.checkpointer.ranks import on_ranks, values
from tests.interop.states import (
    FORMATS,
    NESTED,
    bits,
    contents,
    every_dtype,
    exported,
    imported,
    reader,
    saved,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tables of some KiB are cut as those of GiB would be."""
    monkeypatch.setattr(dcp_folder, "_PIECE_BYTES", 1000)
    return


def rich_state(form: str) -> dict[str, Any]:
    without = [d for d in ITEMSIZE if form == "safetensors" and d not in SAFETENSORS_DTYPES]
    return {
        "dtypes": every_dtype(tuple(without)),
        "values": NESTED,
        "pair": (torch.arange(3), {"deep": torch.ones(2, 2)}),
        "list": [torch.zeros(1), 5, {"x": torch.ones(1)}],
        "flat.key": torch.full((300, 7), math.pi, dtype=torch.float64),
        "none": {},
    }


@pytest.mark.parametrize("form", FORMATS)
def test_there_and_back_is_bit_for_bit(form: str, tmp_path: Path) -> None:
    saved(tmp_path / "run", rich_state(form), step=7)
    target = exported(tmp_path / "run", form, tmp_path / "out")
    ref = imported(target, tmp_path / "back", step=7)
    assert contents(tmp_path / "back") == contents(tmp_path / "run")
    storage = LocalStorage(tmp_path / "back")
    (commit,) = Catalog(storage).commits()
    assert commit.record is not None
    assert (commit.ref, commit.status) == (ref, "latest")
    assert commit.record.annotations == {"imported_from": form}
    assert verify_commit(storage, commit.record, level="full").problems == []
    # And once more, from what was imported.
    again = exported(tmp_path / "back", form, tmp_path / "again")
    imported(again, tmp_path / "third")
    assert contents(tmp_path / "third") == contents(tmp_path / "run")


@pytest.mark.parametrize("form", FORMATS)
def test_a_checkpoint_of_several_ranks_keeps_the_parts_of_each(form: str, tmp_path: Path) -> None:
    def body(rank: int, place: dict[str, Any]) -> None:
        own = {"seed": rank, "state": torch.full((2,), float(rank))}
        state = {"w": torch.ones(4), "loader": PerRank(own), "n": 1}
        with Checkpointer(str(tmp_path / "run"), **place) as c:
            c.save(1, state).committed.result()

    values(on_ranks(2, body))
    imported(exported(tmp_path / "run", form, tmp_path / "out"), tmp_path / "back")
    own = {r: {"seed": None, "state": torch.zeros(2)} for r in range(2)}
    state: dict[str, Any] = {"w": torch.zeros(4), "n": 0, "loader": own}
    with Checkpointer(str(tmp_path / "back")) as c:
        c.restore(state)
    assert state["w"].tolist() == [1] * 4
    assert {r: (p["seed"], p["state"].tolist()) for r, p in own.items()} == {
        0: (0, [0, 0]),
        1: (1, [1, 1]),
    }
    assert contents(tmp_path / "back") == contents(tmp_path / "run")


@pytest.mark.parametrize("form", FORMATS)
def test_chosen_keys_only(form: str, tmp_path: Path) -> None:
    state = {"a": {"x": torch.ones(1), "y": torch.ones(2)}, "b": {"z": torch.ones(3)}, "n": 5}
    saved(tmp_path / "run", state)
    imported(exported(tmp_path / "run", form, tmp_path / "out", "a.x", "b.*"), tmp_path / "back")
    assert set(reader(tmp_path / "back").tensors) == {"a.x", "b.z"}
    assert reader(tmp_path / "back").values()["n"] == 5


def test_the_formats_own_tools_read_what_is_exported(tmp_path: Path) -> None:
    table = torch.randn(500, 3)
    state = {"m": {"w": table, "b": torch.tensor(2, dtype=torch.int16)}, "n": [1, {"x": (2,)}]}
    saved(tmp_path / "run", state)
    tensors = load_file(exported(tmp_path / "run", "safetensors", tmp_path / "s"))
    assert bits(tensors["m.w"]) == bits(table)

    loaded = torch.load(exported(tmp_path / "run", "torch", tmp_path / "t"), weights_only=True)
    assert bits(loaded["m"]["w"]) == bits(table)
    assert loaded["n"] == state["n"]

    folder = exported(tmp_path / "run", "dcp", tmp_path / "d")
    target = {
        "m": {"w": torch.zeros(500, 3), "b": torch.zeros((), dtype=torch.int16)},
        "n": [0, {"x": 0}],
    }
    dcp.load(target, checkpoint_id=folder)
    assert bits(target["m"]["w"]) == bits(table)  # type: ignore[call-overload, index]
    assert target["n"] == state["n"]
    chunks = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata["m.w"].chunks
    assert [c.sizes[0] for c in chunks] == [83] * 6 + [2]
    dcp_to_torch_save(folder, tmp_path / "converted")
    assert bits(torch.load(tmp_path / "converted")["m"]["w"]) == bits(table)


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag = torch.nn.EmbeddingBag(40, 4)
        self.head = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.BatchNorm1d(2))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.bag(ids))


def trained() -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(5)
    model = Net()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    model(torch.randint(0, 40, (8, 2))).square().mean().backward()
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("form", ["safetensors", "torch", "legacy torch", "dcp"])
def test_a_models_own_state_dict_restores_into_the_model(form: str, tmp_path: Path) -> None:
    model, _ = trained()
    source = tmp_path / "source"
    if form == "safetensors":
        save_file(model.state_dict(), source)
    elif form == "dcp":
        dcp.save(model.state_dict(), checkpoint_id=source)
    else:
        torch.save(model.state_dict(), source, _use_new_zipfile_serialization=form == "torch")
    imported(source, tmp_path / "run", under="model")
    fresh = Net()
    with Checkpointer(str(tmp_path / "run")) as c:
        result = c.restore({"model": fresh})
        assert result is not None
        assert result.not_restored == ()
    for key, value in model.state_dict().items():
        assert bits(fresh.state_dict()[key]) == bits(value), key


def test_names_that_tell_no_tree_fill_the_tensors_of_any(tmp_path: Path) -> None:
    model, _ = trained()
    save_file({f"model.{k}": v for k, v in model.state_dict().items()}, tmp_path / "flat")
    imported(tmp_path / "flat", tmp_path / "run")
    fresh = Net()
    state: dict[str, Any] = {"model": fresh}
    with Checkpointer(str(tmp_path / "run")) as c:
        c.restore(state)
    assert list(state) == ["model"]
    for key, value in model.state_dict().items():
        assert bits(fresh.state_dict()[key]) == bits(value), key


@pytest.mark.parametrize("form", ["torch", "dcp"])
def test_a_training_job_of_another_tool_goes_on_here(form: str, tmp_path: Path) -> None:
    model, optimizer = trained()
    whole = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 1}
    if form == "torch":
        torch.save(whole, tmp_path / "source")
    else:
        dcp.save(whole, checkpoint_id=tmp_path / "source")
    imported(tmp_path / "source", tmp_path / "run", step=1)

    fresh, other = Net(), torch.optim.Adagrad
    state: dict[str, Any] = {
        "model": fresh,
        "optimizer": other(fresh.parameters(), lr=9.0),
        "step": 0,
    }
    with Checkpointer(str(tmp_path / "run")) as c:
        c.restore(state)
        assert state["step"] == 1
        ids = torch.randint(0, 40, (8, 2))
        for m, o in ((model, optimizer), (fresh, state["optimizer"])):
            o.zero_grad()
            m(ids).square().mean().backward()
            o.step()
        for key, value in model.state_dict().items():
            assert bits(fresh.state_dict()[key]) == bits(value), key
        assert (
            state["optimizer"].state_dict()["state"].keys()
            == optimizer.state_dict()["state"].keys()
        )
        c.save(2, state).committed.result()
    assert [c.ref.step for c in Catalog(LocalStorage(tmp_path / "run")).lineage()] == [2, 1]


def test_a_folder_whose_sidecar_is_gone_imports_by_dcps_own_paths(tmp_path: Path) -> None:
    saved(tmp_path / "run", {"w": torch.ones(2), "v": {7: {"a": 1}, "e": {}, "t": (1,)}})
    folder = exported(tmp_path / "run", "dcp", tmp_path / "out")
    (folder / "sidestage.json").unlink()
    imported(folder, tmp_path / "back")
    assert reader(tmp_path / "back").values()["v"] == {"7": {"a": 1}, "t": (1,)}


def test_views_and_shared_storage_of_a_torch_file_are_taken_by_value(tmp_path: Path) -> None:
    base = torch.arange(24.0).view(4, 6)
    state = {
        "t": base.t(),
        "column": base[:, 2],
        "same": base,
        "expanded": torch.ones(1, 3).expand(5, 3),
        "parameter": torch.nn.Parameter(torch.ones(2)),
    }
    torch.save(state, tmp_path / "f.pt")
    imported(tmp_path / "f.pt", tmp_path / "run")
    r = reader(tmp_path / "run")
    for key, tensor in state.items():
        assert torch.equal(r.read(key), tensor.detach()), key


def test_an_export_holds_one_piece_in_memory_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path / "run", {f"w{n}": torch.ones(500) for n in range(20)})
    r = reader(tmp_path / "run")
    pieces: list[torch.Tensor] = []
    read_into = r.read_into

    def watched(fqn: str, out: torch.Tensor, offsets: Sequence[int]) -> None:
        assert not any(t.untyped_storage().nbytes() for t in pieces)
        pieces.append(out)
        read_into(fqn, out, offsets)

    monkeypatch.setattr(r, "read_into", watched)
    folder = tmp_path / "out"
    dcp_folder.export_dcp(r, folder, sorted(r.tensors))
    assert len(pieces) == 40
    imported(folder, tmp_path / "back")
    assert contents(tmp_path / "back") == contents(tmp_path / "run")
