"""`ckpt diff` and `ckpt explain`, as a user types them; explain against what a restore really does."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from ckpt import Checkpointer, PerRank
from ckpt.cli import cli
from ckpt.command import run_command
from ckpt.errors import BadInputError
from ckpt.terms import RestoreTerms


def call(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    code = run_command(cli, args)
    out, err = capsys.readouterr()
    return code, out, err


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
        _, out, _ = call(capsys, *args)
        assert "\x1b" not in out
        assert "\\x1b[2Jt" in out


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
    assert stays == set(result.not_restored)
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


DESCRIPTION: dict[str, Any] = {
    "format": "sidestage.state/1",
    "tensors": [
        {"key": "t", "kind": "replicated", "dtype": "float32", "shape": [2], "boxes": [[[0], [2]]]}
    ],
    "values": {"$": "dict", "v": [["t", {"$": "tensor", "v": "t"}]]},
    "per_rank": [{}],
}


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
        ({"tensors": [{**DESCRIPTION["tensors"][0], "dtype": "object"}]}, 5, "dtype"),
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
