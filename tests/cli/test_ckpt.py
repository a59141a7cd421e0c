"""The `ckpt` command, as a user types it: output, exit codes, one line for an error."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from ckpt import Checkpointer, PerRank
from ckpt.cli import cli
from ckpt.command import run_command
from ckpt.commit import claim_epoch, open_run
from ckpt.errors import StorageError
from ckpt.receipts import SaveTerms, Taken, Written, commit_parts, seal_objects, store_part
from ckpt.storage import LocalStorage, open_storage
from ckpt.types import SystemClock
from ckpt.values import encode_value
from tests.faults import FaultyStorage

TABLE = torch.arange(60.0).view(20, 3)


@pytest.fixture(scope="module")
def run_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with steps 1 and 2; don't change it."""
    root = tmp_path_factory.mktemp("ckpt") / "a run [1]"
    with Checkpointer(str(root), annotations={"note": "hello"}) as c:
        for step in (1, 2):
            state = {
                "model": {"table": TABLE + step, "half": torch.ones(3, dtype=torch.bfloat16)},
                "progress": {"step": step, "lr": 0.5},
                "mine": PerRank(torch.tensor(step)),
            }
            c.save(step, state).committed.result()
    return root


@pytest.fixture
def broken_root(run_root: Path, tmp_path: Path) -> Path:
    """The same with a flipped byte in step 2."""
    import shutil

    root = tmp_path / "broken"
    shutil.copytree(run_root, root)
    (data,) = root.glob("data/*000002-*/r00000.bin")
    content = bytearray(data.read_bytes())
    content[5] ^= 1
    data.write_bytes(content)
    return root


def call(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    code = run_command(cli, args)
    out, err = capsys.readouterr()
    return code, out, err


def as_json(capsys: pytest.CaptureFixture[str], *args: str) -> Any:
    code, out, err = call(capsys, *args, "--json")
    assert code == 0, err
    return json.loads(out)


def test_ls(run_root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = as_json(capsys, "ls", str(run_root))
    assert [(c["step"], c["status"]) for c in found["commits"]] == [(1, "ancestor"), (2, "latest")]
    assert found["commits"][0]["annotations"] == {"note": "hello"}
    code, out, _ = call(capsys, "ls", str(run_root))
    assert code == 0
    assert "latest" in out


def test_show(run_root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = as_json(capsys, "show", str(run_root), "--step", "1")
    tensors = {t["key"]: t for t in found["tensors"]}
    assert tensors["model.table"]["shape"] == [20, 3]
    assert tensors["model.half"]["dtype"] == "bfloat16"
    assert tensors["mine@0"]["kind"] == "per_rank"
    code, out, _ = call(capsys, "show", str(run_root))
    assert code == 0
    assert "step 2, epoch 1, latest" in out
    assert "note = hello" in out


def test_show_tells_how_the_snapshot_was_taken(
    run_root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert as_json(capsys, "show", str(run_root))["copied_tables"] == {}
    storage = LocalStorage(tmp_path / "run")
    attempt = claim_epoch(storage, open_run(storage, SystemClock()), 2, None, SystemClock())
    parts = []
    for rank in range(2):
        terms = SaveTerms(1, attempt.token, 5, "000001", rank, 2, "plan", None, 1.0, {})
        tables = {f"table_{rank}": "its optimizer changes all rows"}
        written = Written(
            (), 0, Taken(guarded_bytes=3 << 20, copied_bytes=10, copied_tables=tables)
        )
        objects = seal_objects(encode_value({}), {})
        parts.append(store_part(storage, terms, written, objects, "xxh3-128"))
    commit_parts(storage, attempt, parts, SystemClock())
    found = as_json(capsys, "show", storage.url)
    assert (found["guarded_bytes"], found["copied_bytes"]) == (6 << 20, 20)
    assert found["copied_tables"] == {
        f"table_{rank}": "its optimizer changes all rows" for rank in range(2)
    }
    code, out, err = call(capsys, "show", storage.url)
    assert code == 0, err
    assert "snapshot: 6.0 MiB stayed in place, 20 B were copied in save()" in out
    assert "table_1       its optimizer changes all rows" in out


def test_a_receipt_names_a_bounded_number_of_tables() -> None:
    taken = Taken(copied_tables={f"t{n:04d}": "x" * 1000 for n in range(250)})
    kept = taken.bounded_tables()
    assert len(kept) == 101
    assert kept["t0099"] == "x" * 200
    assert kept["..."] == "and 150 more tables"


def test_doctor_tells_of_a_save_that_lacks_only_its_commit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    storage = FaultyStorage(LocalStorage(tmp_path / "run"))
    storage.on("create", "commits/*").fail(StorageError("no route"))
    storage.on("delete", "data/*").always().fail(StorageError("no route"))
    with Checkpointer(storage) as c:
        assert c.save(3, {"a": 1}).committed.exception()
    found = as_json(capsys, "doctor", storage.url)["findings"]
    (unfinished,) = (f for f in found if f["name"] == "unfinished")
    assert unfinished["level"] == "warn"
    assert unfinished["values"] == {"epoch": 1, "step": 3}
    with Checkpointer(storage.url) as c:
        result = c.restore({"a": 0})
        assert result is not None
        assert result.step == 3
    found = as_json(capsys, "doctor", storage.url)["findings"]
    assert [f["level"] for f in found if f["name"] == "unfinished"] == ["ok"]


def test_verify(run_root: Path, broken_root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert as_json(capsys, "verify", str(run_root), "--all")["commits"][1]["ok"] is True
    code, out, err = call(capsys, "verify", str(broken_root), "--all")
    assert code == 5
    assert "step 1: ok" in out
    assert "step 2: DAMAGED" in out
    assert "r00000.bin" in out
    assert err.count("\n") == 1
    code, out, err = call(capsys, "verify", str(broken_root), "--quick")
    assert code == 0, "a flipped byte is below what --quick looks at"


@pytest.mark.parametrize("command", [["verify"], ["show"], ["restore"], ["branch"]])
def test_a_run_in_which_nothing_verifies_is_corrupt(
    command: list[str], run_root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import shutil

    root = tmp_path / "damaged"
    shutil.copytree(run_root, root)
    for data in root.glob("data/*/r00000.bin"):
        data.write_bytes(b"cut")
    more = [str(tmp_path / "out")] if command[0] in ("restore", "branch") else []
    code, _, err = call(capsys, *command, str(root), *more)
    assert code == 5
    assert err == "error: no checkpoint of this run verifies (2 damaged); see `ckpt ls`\n"


def test_a_run_without_checkpoints_has_none_to_be_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Checkpointer(str(tmp_path)) as c:
        c.restore({"step": 1})
    code, _, err = call(capsys, "verify", str(tmp_path))
    assert code == 3
    assert err == "error: this run has no checkpoint yet; see `ckpt ls`\n"


def test_restore(run_root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.safetensors"
    assert as_json(capsys, "restore", str(run_root), str(out))["tensors"] == 3
    with safe_open(out, "pt") as f:
        assert torch.equal(f.get_tensor("model.table"), TABLE + 2)
        assert f.get_tensor("model.half").dtype is torch.bfloat16
        assert f.get_tensor("mine@0").item() == 2
        assert json.loads(f.metadata()["sidestage.values"])
    code, _, err = call(capsys, "restore", str(run_root), str(out))
    assert code == 4
    assert "--force" in err
    code, _, _ = call(
        capsys, "restore", str(run_root), str(out), "--step", "1/1", "--key", "model.t*", "--force"
    )
    assert code == 0
    with safe_open(out, "pt") as f:
        assert list(f.keys()) == ["model.table"]
        assert torch.equal(f.get_tensor("model.table"), TABLE + 1)


def test_restore_of_a_damaged_step_leaves_no_output(
    broken_root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "new"
    folder.mkdir()
    code, _, err = call(capsys, "restore", str(broken_root), str(folder / "o.safetensors"))
    assert code == 5
    assert "don't match their digest" in err
    assert not list(folder.iterdir())


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (("ls", "{tmp}/nowhere"), 3, "no such folder"),
        (("ls", "{tmp}"), 3, "no Sidestage run at"),
        (("ls", "{file}"), 2, "file"),
        (("ls", "ftp://host/x"), 2, "ftp"),
        (("show", "{root}", "--step", "9"), 3, "9"),
        (("show", "{root}", "--step", "x"), 2, "give a number, or EPOCH/STEP"),
        (("verify", "{root}", "--all", "--step", "1"), 2, "not both"),
        (("restore", "{root}", "{tmp}/o", "--key", "nope*"), 3, "nope*"),
        (("restore", "{root}", "{tmp}/no/o"), 2, "no such folder for the output"),
        (("restore", "{root}"), 2, "OUTPUT"),
        (("nope",), 2, "nope"),
    ],
)
def test_bad_input_is_one_line_and_a_code_by_class(
    args: tuple[str, ...],
    code: int,
    message: str,
    run_root: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "file"
    file.write_text("not a folder")
    filled = [a.format(tmp=tmp_path, file=file, root=run_root) for a in args]
    got, _, err = call(capsys, *filled)
    assert got == code, err
    assert message in err
    assert "Traceback" not in err
    assert err.startswith(("error: ", "Usage: "))


def test_an_unknown_format_and_a_cut_manifest_are_told_apart(
    broken_root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    commit = next(broken_root.glob("commits/*/*0002.json"))
    commit.write_bytes(commit.read_bytes()[:100])
    found = as_json(capsys, "ls", str(broken_root))
    assert [c["status"] for c in found["commits"]] == ["latest", "corrupt"]
    run = broken_root / "RUN.json"
    run.write_text(run.read_text().replace('"format":0', '"format":7'))
    code, _, err = call(capsys, "ls", str(broken_root))
    assert code == 2
    assert "format version 7" in err


def test_debug_shows_the_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = call(capsys, "ls", str(tmp_path / "no"), "--debug")
    assert code == 3
    assert "Traceback" in err


def test_ls_and_verify_run_without_torch(run_root: Path) -> None:
    for command in ("ls", "verify"):
        code = (
            "import sys; sys.modules['torch'] = None\n"
            "from ckpt.cli import cli; from ckpt.command import run_command\n"
            f"sys.exit(run_command(cli, [{command!r}, {str(run_root)!r}]))"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


def test_every_command_is_in_the_readme() -> None:
    from publisher.cli import cli as publisher
    from trainer.cli import cli as trainer

    readme = (Path(__file__).parent.parent.parent / "README.md").read_text()
    for name, group in (("ckpt", cli), ("publisher", publisher), ("trainer", trainer)):
        for command in group.commands:
            assert f"`{name} {command}" in readme or f", `{command} " in readme, f"{name} {command}"


def test_open_storage_takes_a_run_by_url(run_root: Path) -> None:
    assert open_storage(f"file://{run_root}").url == str(run_root)
