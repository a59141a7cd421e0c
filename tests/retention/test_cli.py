"""`ckpt prune`, `pins` and `branch`, as a user types them."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt import Checkpointer
from ckpt.catalog import Catalog
from ckpt.cli import cli
from ckpt.command import run_command
from ckpt.pins import Pin
from ckpt.storage import LocalStorage, open_storage


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Steps 1 to 4 with losses, in one attempt."""
    root = tmp_path / "run"
    losses = {1: "0.5", 2: "0.1", 3: "nan"}
    with Checkpointer(str(root)) as c:
        for step in (1, 2, 3, 4):
            notes = {"loss": losses[step]} if step in losses else {}
            c.save(step, {"t": torch.full((9,), float(step))}, annotations=notes).committed.result()
    return root


class Shell:
    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *args: object, code: int = 0) -> str:
        """What the command printed; its errors if it is to fail."""
        got = run_command(cli, [str(a) for a in args])
        out, err = self._capsys.readouterr()
        assert got == code, err
        assert "Traceback" not in err
        return err if code else out

    def json(self, *args: object) -> Any:
        return json.loads(self(*args, "--json"))


@pytest.fixture
def ckpt(capsys: pytest.CaptureFixture[str]) -> Shell:
    return Shell(capsys)


def steps(root: Path) -> list[int]:
    return [c.ref.step for c in Catalog(LocalStorage(root)).commits()]


def test_prune_shows_what_and_why_and_deletes_only_with_apply(root: Path, ckpt: Shell) -> None:
    rules = ("--keep-last", 1, "--keep-best", "1:loss")
    out = ckpt("prune", root, *rules)
    assert "nothing was changed, --apply deletes it" in out
    lines = [line.split() for line in out.splitlines()]
    assert [line[0] for line in lines[1:5]] == ["delete", "keep", "delete", "keep"]
    assert "one of the best 1 by loss (min)" in out
    assert steps(root) == [1, 2, 3, 4]
    plan = ckpt.json("prune", root, *rules)
    assert plan["applied"] is False
    assert [c["step"] for c in plan["delete"]] == [1, 3]
    assert plan["delete"][0]["reason"] == "no rule keeps it"
    done = ckpt.json("prune", root, *rules, "--apply")
    assert [r["step"] for r in done["deleted"]] == [1, 3]
    assert (len(done["swept"]), done["problems"]) == (2, [])
    assert steps(root) == [2, 4]
    assert ckpt("verify", root, "--all").count("ok") == 2


def test_prune_without_a_rule_finds_only_what_no_checkpoint_lists(root: Path, ckpt: Shell) -> None:
    stray = root / "data" / "000001-000000000002-000000"
    stray.mkdir()
    (stray / "r00000.bin").write_bytes(b"left over")
    assert f"delete  data/{stray.name}/: 1 files, 9 B that no checkpoint lists" in ckpt(
        "prune", root
    )
    assert f"deleted  data/{stray.name}/" in ckpt("prune", root, "--apply")
    assert not stray.exists()
    assert steps(root) == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        (("--keep-last", "0"), "keep_last = 0: give 1 or more"),
        (("--keep-last", "-1"), "keep_last = -1: give 1 or more"),
        (("--keep-every", "0"), "keep_every = 0: give 1 or more"),
        (("--keep-best", "loss"), "--keep-best loss: give N:METRIC"),
        (("--keep-best", "0:loss"), "count = 0: give 1 or more"),
        (("--keep-best", "2:"), "give N:METRIC"),
    ],
)
def test_d35_rules_that_would_delete_everything_are_refused(
    root: Path, ckpt: Shell, rule: tuple[str, str], words: str
) -> None:
    assert words in ckpt("prune", root, *rule, "--apply", code=2)
    assert steps(root) == [1, 2, 3, 4]


def test_best_may_be_the_largest_and_its_name_may_hold_colons(root: Path, ckpt: Shell) -> None:
    plan = ckpt.json("prune", root, "--keep-best", "1:loss:max")
    assert [c["step"] for c in plan["keep"]] == [1, 4]
    plan = ckpt.json("prune", root, "--keep-best", "1:eval:loss")
    assert plan["delete"] == []  # nothing goes in the name of a metric that no commit has
    assert plan["keep"][-1]["reason"] == (
        "latest, none has a number for eval:loss to tell the best 1 by"
    )


def test_a_root_that_is_none(tmp_path: Path, ckpt: Shell) -> None:
    for command in ("prune", "pins"):
        assert "no such folder" in ckpt(command, tmp_path / "no", code=3)
        assert "no Sidestage run" in ckpt(command, tmp_path, code=3)


def test_pins_are_added_listed_honoured_and_removed(root: Path, ckpt: Shell) -> None:
    assert ckpt("pins", root) == "no pins\n"
    assert "golden: step 1 is kept until" in ckpt("pins", root, "add", 1, "--name", "golden")
    made = ckpt.json("pins", root, "add", "1/3", "--note", "for the audit")
    found = {p["id"]: (p["commit"]["step"], p["ttl_s"]) for p in ckpt.json("pins", root)}
    assert found == {"golden": (1, None), made["id"]: (3, None)}
    assert "permanent" in ckpt("pins", root, "list")
    out = ckpt("prune", root, "--keep-last", 1, "--apply")
    assert "pinned by golden: ckpt pins" in out
    assert steps(root) == [1, 3, 4]
    assert ckpt("pins", root, "remove", "golden") == "golden: removed\n"
    ckpt("prune", root, "--keep-last", 1, "--apply")
    assert steps(root) == [3, 4]
    assert "needs STEP" in ckpt("pins", root, "add", code=2)
    assert "needs ID" in ckpt("pins", root, "remove", code=2)
    assert "golden" in ckpt("pins", root, "remove", "golden", code=3)
    assert "no step 9" in ckpt("pins", root, "add", 9, code=3)
    assert "pin id" in ckpt("pins", root, "add", 4, "--name", "a/b", code=2)


def test_a_pin_whose_holder_died_is_seen_to_be_dead_by_watching(
    root: Path, ckpt: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = LocalStorage(root)
    pin = Pin(storage, Catalog(storage).find(1).ref, "dead", ttl_s=60)
    pin.__enter__()
    slept: list[float] = []
    clock = [0.0]

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        clock[0] += seconds

    monkeypatch.setattr("ckpt.cli.retaining.time.sleep", sleep)
    monkeypatch.setattr("ckpt.types.SystemClock.monotonic", lambda _: clock[0])
    plan = ckpt.json("prune", root, "--keep-last", 1, "--watch", 30)
    assert [c["step"] for c in plan["keep"]] == [1, 4]
    assert ckpt.json("pins", root, "--watch", 60)[0]["expired"] is True
    plan = ckpt.json("prune", root, "--keep-last", 1, "--watch", 60, "--apply")
    assert [c["step"] for c in plan["deleted"]] == [1, 2, 3]
    assert plan["expired_pins"] == [pin.pin_id]
    assert slept == [30, 60, 60]
    pin.__exit__(None, None, None)


def test_a_damaged_pin_is_shown_and_stops_pruning(root: Path, ckpt: Shell) -> None:
    (root / "pins").mkdir(exist_ok=True)
    (root / "pins" / "p.json").write_text("?")
    assert "unreadable" in ckpt("pins", root)
    assert "nothing is deleted" in ckpt("prune", root, "--keep-last", 1, "--apply", code=5)
    ckpt("pins", root, "remove", "p")
    ckpt("prune", root, "--keep-last", 1, "--apply")
    assert steps(root) == [4]


def test_restore_and_verify_pin_what_they_read(
    root: Path, tmp_path: Path, ckpt: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[str]] = []
    enter = Pin.__enter__

    def watch(self: Pin) -> Pin:
        pin = enter(self)
        seen.append([p.name for p in (root / "pins").iterdir() if p.suffix == ".json"])
        return pin

    monkeypatch.setattr(Pin, "__enter__", watch)
    ckpt("restore", root, tmp_path / "out.safetensors")
    ckpt("verify", root, "--all")
    ckpt("export", root, tmp_path / "out.pt", "--format", "torch")
    ckpt("show", root)
    assert [len(s) for s in seen] == [1] * 6
    assert not list((root / "pins").glob("*.json"))
    assert not [t for t in threading.enumerate() if t.name == "sidestage-pin"]


def test_case_e67_a_branch_whose_parent_has_moved(root: Path, tmp_path: Path, ckpt: Shell) -> None:
    new, moved = tmp_path / "new", tmp_path / "moved"
    ckpt("branch", f"{root}@2", new)
    root.rename(moved)
    for command in ("ls", "verify", "show"):
        line = ckpt(command, new, code=6)
        assert f"{root}: the parent of {new} isn't there; mount it, or name its new place" in line
        assert "corrupt" not in line.lower()
    assert "is no branch" in ckpt("branch", new, moved, "--moved", code=2)
    assert "first" in ckpt("branch", moved, new, "--moved", "--copy", code=2)
    assert f"reads step 2 from {moved} now" in ckpt("branch", moved, new, "--moved")
    assert "ok" in ckpt("verify", new)
    assert ckpt.json("branch", moved, new, "--moved")["source_url"] == str(moved)


def test_branch_names_a_step_or_takes_the_latest(root: Path, tmp_path: Path, ckpt: Shell) -> None:
    out = ckpt("branch", f"{root}@2", tmp_path / "a")
    assert f"{tmp_path / 'a'}: starts from {root}@2, pinned there as branch-" in out
    made = ckpt.json("branch", root, tmp_path / "b")
    assert made["commit"]["step"] == 4
    copied = ckpt.json("branch", f"{root}@1/3", tmp_path / "c", "--copy")
    assert copied["pin_id"] is None
    assert copied["copied_bytes"] > 0
    for name, step in (("a", 2), ("b", 4), ("c", 3)):
        new = tmp_path / name
        listed = ckpt.json("ls", new)
        assert listed["origin"]["commit"]["step"] == step
        assert [(c["step"], c["status"]) for c in listed["commits"]] == [(step, "latest")]
        assert ckpt("ls", new).startswith(f"branched from {root}@{step} (")
        assert ckpt("verify", new) == f"epoch 1 step {step}: ok\n"
        assert ckpt.json("show", new)["tensors"][0]["key"] == "t"
        ckpt("restore", new, tmp_path / f"{name}.safetensors")
        live = {"t": torch.zeros(9)}
        with Checkpointer(str(new)) as c:
            c.restore(live)
        assert live["t"].tolist() == [float(step)] * 9
    assert len(list(open_storage(root).list("pins/"))) == 2
    assert "isn't empty" in ckpt("branch", f"{root}@2", root, code=4)
    assert "is a branch of" in ckpt("branch", f"{root}@1", tmp_path / "a", code=4)
    assert "no step 9" in ckpt("branch", f"{root}@9", tmp_path / "d", code=3)
    assert "no such folder" in ckpt("branch", tmp_path / "no@1", tmp_path / "d", code=3)
    assert not (tmp_path / "d").exists()


def test_the_commands_need_no_torch(root: Path, tmp_path: Path) -> None:
    import subprocess
    import sys

    for args in (
        ("prune", root),
        ("pins", root),
        ("branch", root, tmp_path / "n"),
        ("doctor", root),
    ):
        code = (
            "import sys; sys.modules['torch'] = None\n"
            "from ckpt.cli import cli; from ckpt.command import run_command\n"
            f"sys.exit(run_command(cli, {[str(a) for a in args]!r}))"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
