"""`ckpt diff` and `ckpt explain`, as a user types them; explain against what a restore really does."""

from __future__ import annotations

import enum
import json
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from ckpt import CheckpointConfig, Checkpointer, PerRank, RngState
from ckpt.catalog import Catalog
from ckpt.cli import cli
from ckpt.command import run_command
from ckpt.equality import compare
from ckpt.errors import BadInputError
from ckpt.restore import CheckpointReader
from ckpt.storage import open_storage
from ckpt.terms import RestoreTerms
from tests.checkpointer.ranks import on_ranks, values


def call(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    code = run_command(cli, args)
    out, err = capsys.readouterr()
    return code, out, err


class Own:
    """An object that saves itself."""

    def __init__(self, held: dict[str, Any]) -> None:
        self.held = held

    def state_dict(self) -> dict[str, Any]:
        return dict(self.held)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.held = state


def life(
    width: int = 8,
    kind: Callable[..., torch.optim.Optimizer] = torch.optim.Adam,
    *,
    steps: int = 1,
    layers: int = 1,
) -> dict[str, Any]:
    torch.manual_seed(1)
    parts = [nn.Embedding(100, width), *(nn.Linear(width, width) for _ in range(layers))]
    model = nn.Sequential(*parts)
    optimizer = kind(model.parameters(), lr=0.1)
    for _ in range(steps):
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
    return {"model": model, "optimizer": optimizer, "progress": {"step": steps}}


def saved(root: Path, state: dict[str, Any]) -> str:
    with Checkpointer(str(root)) as c:
        c.save(1, state).committed.result()
    return str(root)


# -- diff -----------------------------------------------------------------------------------------


def test_equal_checkpoints_are_equal_whatever_their_roots(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = saved(tmp_path / "a", life()), saved(tmp_path / "b", life())
    code, out, err = call(capsys, "diff", a, f"{b}@1")
    assert (code, err) == (0, "")
    assert out.startswith("equal: ")


def test_diff_says_how_much_of_a_tensor_has_changed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = torch.zeros(10, 3)
    other = table.clone()
    other[2, 1], other[7, 0] = 3.0, 4.0
    half = torch.ones(4, dtype=torch.bfloat16)
    nan = torch.tensor([float("nan")])
    one = {"t": table, "h": half, "lr": 0.1, "gone": nan, "same": nan, "k": torch.ones(2) == 1}
    two = {"t": other, "h": half.float(), "lr": 0.2, "same": nan, "k": torch.zeros(2) == 1}
    code, out, err = call(
        capsys, "diff", saved(tmp_path / "a", one), saved(tmp_path / "b", two), "--json"
    )
    found = {d["key"]: d for d in json.loads(out)["differences"]}
    assert code == 9
    assert err == "error: 5 of 6 entries differ\n"
    assert (found["t"]["rows"], found["t"]["of_rows"], found["t"]["elements"]) == (2, 10, 2)
    assert found["t"]["norms"] == [0.0, 5.0, 5.0]
    assert found["t"]["largest"] == 4.0
    assert found["h"]["said"] == "bfloat16 [4] and float32 [4]"
    assert found["lr"]["said"] == "0.1 and 0.2"
    assert found["gone"]["only_in"] == "A"
    assert found["k"]["rows"] == 2
    assert "same" not in found


def test_numbers_that_are_not_finite_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = torch.tensor([1.0, float("nan"), float("inf"), 5.0])
    two = torch.tensor([1.0, 2.0, float("-inf"), 6.0])
    roots = [saved(tmp_path / n, {"t": t}) for n, t in (("a", one), ("b", two))]
    code, out, _ = call(capsys, "diff", *roots, "--json")
    (found,) = json.loads(out)["differences"]
    assert code == 9
    assert (found["elements"], found["not_finite"], found["largest"]) == (3, 2, 1.0)
    assert found["norms"] == [None, None, None]
    assert found["said"] == "3 of 4 elements, 2 of them infinite or no number"


@pytest.mark.parametrize(
    "dtype", [torch.float8_e4m3fn, torch.complex64, torch.int64, torch.float16]
)
def test_diff_knows_all_dtypes(
    dtype: torch.dtype, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = torch.ones(4, 2).to(dtype), torch.ones(4, 2).to(dtype)
    b[3] = 2
    roots = [saved(tmp_path / n, {"t": t}) for n, t in (("a", a), ("b", b))]
    code, out, _ = call(capsys, "diff", *roots, "--json")
    (found,) = json.loads(out)["differences"]
    assert code == 9
    assert found["rows"] == 1
    assert found["norms"][2] == pytest.approx(2**0.5)


def test_what_digests_say_is_equal_is_not_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = saved(tmp_path / "a", life()), saved(tmp_path / "b", life())
    for data in (tmp_path / "b").glob("data/*/*.bin"):
        data.write_bytes(bytes(data.stat().st_size))
    assert call(capsys, "diff", a, b)[0] == 0


def test_keys_of_others_move_no_cursor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    roots = [
        saved(tmp_path / n, {"\x1b[2Jt": torch.full((2,), v)}) for n, v in (("a", 1.0), ("b", 2.0))
    ]
    for args in (
        ("diff", *roots),
        ("explain", roots[0], "--against", roots[1]),
        ("show", roots[0]),
    ):
        _, out, err = call(capsys, *args)
        assert "\x1b" not in out + err
        assert "\\x1b[2Jt" in out
    _, out, err = call(
        capsys, "explain", roots[0], "--against", saved(tmp_path / "c", {"\x1b[2Ju": 1})
    )
    assert "\x1b" not in out + err
    assert "\\x1b[2Ju" in err


def test_diff_takes_what_is_not_finite_by_its_bits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    odd = {"nan": float("nan"), "inf": float("inf")}
    one = {k: torch.tensor([v, 1.0, 2.0]) for k, v in odd.items()}
    two = {k: torch.tensor([v, 1.0, 4.0]) for k, v in odd.items()}
    one["end"], two["end"] = torch.tensor([1.0, 3.0]), torch.tensor([float("inf"), 4.0])
    roots = saved(tmp_path / "a", one), saved(tmp_path / "b", two)

    def no_constant(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    _, out, _ = call(capsys, "diff", *roots, "--json")
    found = {d["key"]: d for d in json.loads(out, parse_constant=no_constant)["differences"]}
    for key in odd:
        assert found[key]["norms"] == [None, None, 2.0]
        assert (found[key]["rows"], found[key]["largest"]) == (1, 2.0)
    assert (found["end"]["rows"], found["end"]["largest"], found["end"]["not_finite"]) == (
        2,
        1.0,
        1,
    )


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint64])
def test_diff_tells_neighbours_of_64_bits_apart(
    dtype: torch.dtype, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    far = -(2**63) if dtype == torch.int64 else 0
    one = torch.tensor([2**60, far, 5], dtype=dtype)
    two = torch.tensor([2**60 + 1, 2**63 - 1, 5], dtype=dtype)
    roots = [saved(tmp_path / n, {"t": t}) for n, t in (("a", one), ("b", two))]
    (found,) = json.loads(call(capsys, "diff", *roots, "--json")[1])["differences"]
    assert found["largest"] == float(2**63 - 1 - far)
    roots = [saved(tmp_path / n, {"t": t[:1]}) for n, t in (("c", one), ("d", two))]
    (found,) = json.loads(call(capsys, "diff", *roots, "--json")[1])["differences"]
    assert found["largest"] == found["norms"][2] == 1.0


def test_diff_reads_each_chunk_once_however_both_are_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = torch.arange(9000.0).view(3000, 3)
    readers = []
    for name, chunk_bytes in (("a", 4096), ("b", 5000)):
        config = CheckpointConfig(chunk_bytes=chunk_bytes)
        with Checkpointer(str(tmp_path / name), config) as c:
            c.save(1, {"t": table + (name == "b") * (table == 8997)}).committed.result()
        storage = open_storage(str(tmp_path / name))
        catalog = Catalog(storage)
        readers.append(CheckpointReader(storage, catalog.read(catalog.find(1).ref)))
    loaded: list[object] = []
    real = CheckpointReader.load_chunk

    def counted(self: CheckpointReader, *args: Any) -> torch.Tensor:
        loaded.append((id(self), args[2].row))
        return real(self, *args)

    monkeypatch.setattr(CheckpointReader, "load_chunk", counted)
    (found,) = compare(*readers).differences
    assert found.tensor is not None
    assert (found.tensor.rows, found.tensor.of_rows, found.tensor.norms[2]) == (1, 3000, 1.0)
    assert found.tensor.norms[0] == pytest.approx(float(table.double().norm()))
    assert len(loaded) == len(set(loaded)) > 12


# -- explain --------------------------------------------------------------------------------------

STATES: dict[str, Callable[[], dict[str, Any]]] = {
    "the same": life,
    "fresh": lambda: life(steps=0),
    "wider": lambda: life(12),
    "a layer more": lambda: life(layers=2),
    "another optimizer": lambda: life(kind=torch.optim.SGD),
    "no optimizer": lambda: {"model": life()["model"], "progress": {"step": 0}},
    "another name": lambda: {("net" if k == "model" else k): v for k, v in life().items()},
    "per rank": lambda: {**life(), "mine": PerRank({"seed": 1})},
    "a list": lambda: {**life(), "parts": [torch.ones(2), torch.ones(3)]},
    "another own object": lambda: {**life(), "own": Own({"seen": [1]})},
}
TERMS: dict[str, tuple[RestoreTerms, list[str]]] = {
    "none": (RestoreTerms(), []),
    "partial": (RestoreTerms(partial=True), ["--partial"]),
    "rows": (RestoreTerms(rows=("model.*",)), ["--rows", "model.*"]),
    "exclude": (RestoreTerms(exclude=("optimizer",)), ["--exclude", "optimizer"]),
    "rename": (RestoreTerms(rename={"model": "net"}), ["--rename", "model=net"]),
    "all": (
        RestoreTerms(partial=True, rows=("model.*",), other_optimizer=True),
        ["--partial", "--rows", "model.*", "--other-optimizer"],
    ),
}


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("terms", TERMS)
def test_explain_says_what_a_restore_then_does(
    state: str, terms: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = saved(tmp_path / "a", life())
    term, options = TERMS[terms]
    with Checkpointer(str(tmp_path / "other")) as c:
        c.describe(STATES[state](), tmp_path / "state.json")
    code, out, err = call(
        capsys, "explain", root, "--against", str(tmp_path / "state.json"), "--json", *options
    )
    told = json.loads(out)
    restored = {o["key"] for o in told["outcomes"] if o["outcome"] == "restored"}
    live = STATES[state]()
    with Checkpointer(root) as c:
        try:
            result = c.restore(live, **term.asked())
        except BadInputError as e:
            assert code == 2
            assert "error: " in err
            assert told["refused"].split("; ")[0].split(". Nothing was")[0] in str(e)
            assert told["refused"].count("the checkpoint") == str(e).count("the checkpoint")
            return
    assert (code, told["refused"]) == (0, ""), told
    assert result is not None
    stays = {o["key"] for o in told["outcomes"] if o["outcome"] != "restored"}
    unused = {o["key"] for o in told["outcomes"] if o["outcome"] == "unused"}
    assert stays - unused == set(result.not_restored)
    assert all(k.startswith("optimizer.state.") for k in unused)
    assert not restored & stays
    weights = {f"{k}.{n}" for k in ("model", "net") if k in live for n in live[k].state_dict()}
    assert restored & weights == weights - stays


def test_another_root_and_a_safetensors_file_are_states_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = saved(tmp_path / "a", life())
    model = life(steps=0)["model"]
    save_file({f"model.{k}": v for k, v in model.state_dict().items()}, tmp_path / "m.safetensors")
    for spec in (saved(tmp_path / "b", {"model": model}), str(tmp_path / "m.safetensors")):
        code, out, _ = call(capsys, "explain", root, "--against", spec, "--partial", "--json")
        outcomes = json.loads(out)["outcomes"]
        assert code == 0
        assert {o["key"]: o["nbytes"] for o in outcomes if o["outcome"] == "restored"} == {
            "model.0.weight": 3200,
            "model.1.weight": 256,
            "model.1.bias": 32,
        }
        assert sum(o["nbytes"] for o in outcomes if o["outcome"] == "left") == 3 * 4 + 2 * 3488
        code, out, err = call(capsys, "explain", root, "--against", spec)
        assert code == 2
        assert "pass --partial" in err
        assert "only the checkpoint has it" in out


def explained(
    capsys: pytest.CaptureFixture[str], root: str, spec: str | Path, *options: str
) -> tuple[str, dict[str, str], dict[str, int]]:
    """Why it would be refused, outcomes by key, and bytes by key."""
    code, out, err = call(capsys, "explain", root, "--against", str(spec), "--json", *options)
    assert code in (0, 2), err
    told = json.loads(out)
    outcomes = {o["key"]: o["outcome"] for o in told["outcomes"]}
    assert bool(told["refused"]) == (code == 2)
    return told["refused"], outcomes, {o["key"]: o["nbytes"] for o in told["outcomes"]}


def described(path: Path, state: dict[str, Any]) -> Path:
    with Checkpointer(str(path.with_suffix(".root"))) as c:
        c.describe(state, path)
    return path


def test_an_object_takes_what_a_dict_could_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = saved(tmp_path / "a", {"own": Own({"n": 1, "seen": [1, 2], "t": torch.ones(5)})})
    state = {"own": Own({"n": 1, "t": torch.ones(2)})}
    assert explained(capsys, root, described(tmp_path / "s.json", state))[0] == ""
    with Checkpointer(root) as c:
        assert c.restore(state) is not None
    # A root doesn't know what it was, and says so.
    refused, _, _ = explained(capsys, root, saved(tmp_path / "b", {"own": Own({"n": 1})}))
    assert "own.t: is in the checkpoint but not in the state" in refused
    _, out, _ = call(capsys, "explain", root, "--against", str(tmp_path / "b"))
    assert "note: the state isn't described by its trainer" in out


def test_parameters_in_no_module_go_by_their_shapes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def state(width: int, *, steps: int) -> dict[str, Any]:
        model = nn.Linear(width, 4)
        optimizer = torch.optim.Adam(model.parameters())
        for _ in range(steps):
            model(torch.ones(1, width)).sum().backward()
            optimizer.step()
        return {"parts": [torch.ones(7), torch.ones(9)], "optimizer": optimizer}

    root = saved(tmp_path / "a", state(3, steps=1))
    for steps in (0, 1):
        told = explained(capsys, root, described(tmp_path / f"{steps}.json", state(3, steps=steps)))
        assert told[0] == ""
        assert told[1]["optimizer.state.0.exp_avg"] == "restored"
        assert told[2]["optimizer.state.0.exp_avg"] == 48
        spec = described(tmp_path / f"other{steps}.json", state(2, steps=steps))
        told = explained(capsys, root, spec)
        assert "optimizer.state.0.exp_avg: the checkpoint has float32 [4, 3]" in told[0]
        assert told[1]["optimizer.state.0.exp_avg"] == "misfit"
        assert told[2]["optimizer.state.0.exp_avg"] == 48
    assert explained(capsys, root, saved(tmp_path / "b", state(3, steps=1)))[0] == ""


def test_flat_keys_of_a_state_are_no_nested_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root, flat = saved(tmp_path / "a", {"a": {"b": torch.ones(2)}}), {"a.b": torch.ones(2)}
    with Checkpointer(root) as c, pytest.raises(BadInputError, match="is in the state but not"):
        c.restore(flat)
    assert "a.b: is in the state but not" in explained(capsys, root, saved(tmp_path / "b", flat))[0]
    save_file(flat, tmp_path / "t.safetensors")  # which has no other keys
    assert explained(capsys, root, tmp_path / "t.safetensors")[1] == {"a.b": "restored"}


def stored_bytes(root: str) -> int:
    storage = open_storage(root)
    catalog = Catalog(storage)
    return catalog.read(catalog.find(1).ref).tensor_bytes


def test_what_each_rank_has_for_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def state(rank: int) -> dict[str, Any]:
        only = {"only": PerRank({"x": torch.ones(3)})} if rank else {}
        return {
            "w": torch.ones(2),
            "rng": RngState(),
            "mine": PerRank({"g": torch.ones(2)}),
            **only,
        }

    def run(root: Path) -> str:
        def body(rank: int, kwargs: dict[str, Any]) -> None:
            with Checkpointer(str(root), **kwargs) as c:
                c.describe(state(rank), tmp_path / "state.json")
                c.save(1, state(rank)).committed.result()

        values(on_ranks(2, body))
        return str(root)

    root, other = run(tmp_path / "a"), run(tmp_path / "b")
    for spec in (other, tmp_path / "state.json"):
        refused, outcomes, nbytes = explained(capsys, root, spec)
        assert refused == ""
        assert set(outcomes.values()) == {"restored"}
        assert sum(nbytes.values()) == stored_bytes(root)
        assert {"mine.g@0", "mine.g@1", "only.x@1", "w"} <= set(outcomes)
    alone = described(tmp_path / "alone.json", {"w": torch.ones(2), "mine": PerRank({"g": 1})})
    assert "was saved by 2 ranks, this job has 1" in explained(capsys, root, alone)[0]
    refused, outcomes, nbytes = explained(capsys, root, alone, "--elastic", "--partial")
    assert refused == ""
    assert outcomes["w"] == "restored"
    assert (outcomes["mine"], nbytes["mine"]) == ("unclaimed", 8)


def test_classes_of_values_need_not_be_here(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = types.ModuleType("their_module")
    color = enum.Enum("Color", "RED BLUE", module="their_module")
    vars(theirs)["Color"] = color
    monkeypatch.setitem(sys.modules, "their_module", theirs)
    root = saved(tmp_path / "a", {"c": vars(color)["RED"], "w": torch.ones(2)})
    spec = described(tmp_path / "s.json", {"c": vars(color)["BLUE"], "w": torch.ones(2)})
    monkeypatch.delitem(sys.modules, "their_module")
    assert explained(capsys, root, spec)[0] == ""


DESCRIPTION: dict[str, Any] = {
    "format": "sidestage.state/1",
    "objects": [],
    "tensors": [
        {"key": "t", "kind": "replicated", "dtype": "float32", "shape": [2], "boxes": [[[0], [2]]]}
    ],
    "values": {"$": "dict", "v": [["t", {"$": "tensor", "v": "t"}]]},
    "per_rank": [{}],
}

TENSOR: dict[str, Any] = DESCRIPTION["tensors"][0]


@pytest.mark.parametrize(
    ("change", "code", "said"),
    [
        ({"format": "else"}, 2, "isn't a state description"),
        ({"tensors": 3}, 5, "tensors"),
        ({"per_rank": []}, 5, "per_rank"),
        ({"values": {"$": "code", "v": 1}}, 5, "values"),
        ({"values": {"$": "dict", "v": [["t", {"$": "tensor", "v": "u"}]]}}, 5, "u"),
        ({"tensors": [{**DESCRIPTION["tensors"][0], "boxes": [[[1], [2]]]}]}, 5, "a box"),
        ({"tensors": [{**DESCRIPTION["tensors"][0], "shape": [1 << 40, 1 << 40]}]}, 5, "shape"),
        ({"tensors": [{**TENSOR, "shape": [0, 1 << 70], "boxes": []}]}, 5, "no tensor has shape"),
        ({"tensors": [{**TENSOR, "shape": [1] * 500, "boxes": []}]}, 5, "no tensor has shape"),
        ({"tensors": [{**DESCRIPTION["tensors"][0], "dtype": "object"}]}, 5, "dtype"),
        ({"objects": [{"path": "t", "kind": "code", "shapes": []}]}, 5, "kind"),
        ({"objects": [{"path": "t", "kind": "other", "shapes": [[0, 1 << 70]]}]}, 5, "shape"),
        ({"tensors": DESCRIPTION["tensors"] * 2}, 5, "twice"),
    ],
)
def test_a_bad_description_is_refused_by_what_is_wrong(
    change: dict[str, Any], code: int, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = saved(tmp_path / "a", {"t": torch.ones(2)})
    spec = tmp_path / "state.json"
    spec.write_text(json.dumps(DESCRIPTION))
    assert call(capsys, "explain", root, "--against", str(spec))[0] == 0
    spec.write_text(json.dumps(DESCRIPTION | change))
    found, _, err = call(capsys, "explain", root, "--against", str(spec))
    assert found == code, err
    assert err.startswith("error: ")
    assert said in err
    assert "defect" not in err


@pytest.mark.parametrize(
    "content", [b"{", b"", b"nothing of ours", b"[" * 100_000, b'{"format": ' * 50_000]
)
def test_a_file_of_another_kind_is_refused(
    content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = saved(tmp_path / "a", {"t": torch.ones(2)})
    (tmp_path / "spec").write_bytes(content)
    code, _, err = call(capsys, "explain", root, "--against", str(tmp_path / "spec"))
    assert code in (2, 5)
    assert "defect" not in err


def test_a_spec_that_is_not_there_is_not_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = saved(tmp_path / "a", {"t": torch.ones(2)})
    assert call(capsys, "explain", root, "--against", str(tmp_path / "none"))[0] == 3
    assert call(capsys, "explain", root, "--against", root, "--rename", "x")[0] == 2


def node(fields: dict[Any, Any]) -> dict[str, Any]:
    return {"$": "dict", "v": [[k, v] for k, v in fields.items()]}


@pytest.mark.parametrize(
    "optimizer",
    [
        {"class": "Adam", "param_groups": []},
        {"class": "a.b\0c", "param_groups": []},
        {"class": "a.\ud800c", "param_groups": []},
        {"class": "a.b", "param_groups": [node({})]},
        {"class": "a.b", "param_groups": [3]},
        {"class": "a.b", "param_groups": [node({"params": 5})]},
        {"class": "a.b", "param_groups": [node({"params": [{"$": "tensor", "v": "t"}]})]},
        {"class": "a.b", "param_groups": [node({"params": [0, 0, "t", "t", 7]})]},
        {"groups": node({0: 5})},
        {"groups": node({0: [node({})]})},
        {"groups": node({})},
    ],
)
@pytest.mark.parametrize("steps", [0, 1])
def test_a_crafted_optimizer_is_an_odd_state_and_no_defect(
    optimizer: dict[str, Any], steps: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = saved(tmp_path / "a", {"t": torch.ones(2), "o": life(steps=steps)["optimizer"]})
    tree = {"t": {"$": "tensor", "v": "t"}, "o": node({"state": node({}), **optimizer})}
    spec = tmp_path / "state.json"
    spec.write_text(json.dumps({**DESCRIPTION, "values": node(tree)}))
    code, _, err = call(capsys, "explain", root, "--against", str(spec))
    assert code in (0, 2), err
    assert "defect" not in err


def test_a_part_of_a_rank_that_is_not_there_is_only_in_the_state(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = saved(tmp_path / "a", {"t": torch.ones(2)})
    tree = {"t": {"$": "tensor", "v": "t"}, "p": {"$": "per_rank", "v": "nothing"}}
    (tmp_path / "s.json").write_text(json.dumps({**DESCRIPTION, "values": node(tree)}))
    assert explained(capsys, root, tmp_path / "s.json")[1] == {"t": "restored"}


@pytest.mark.parametrize(
    ("shape", "padded", "code"), [([2], True, 0), ([2], False, 0), ([0, 1 << 63], False, 5)]
)
def test_the_header_of_a_safetensors_file(
    shape: list[int], padded: bool, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = saved(tmp_path / "a", {"t": torch.ones(2)})
    size = 0 if 0 in shape else 8
    header = json.dumps({"t": {"dtype": "F32", "shape": shape, "data_offsets": [0, size]}}).encode()
    if padded:  # the file's first byte, of the header's length, is a brace like that of JSON
        header += b" " * ((ord("{") - len(header)) % 256)
    spec = tmp_path / "t.safetensors"
    spec.write_bytes(len(header).to_bytes(8, "little") + header + bytes(size))
    found, _, err = call(capsys, "explain", root, "--against", str(spec))
    assert found == code, err
    assert "defect" not in err
