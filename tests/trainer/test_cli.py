import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors import safe_open

from ckpt.catalog import Catalog
from ckpt.command import run_command
from ckpt.schema import EVENT_TIME
from ckpt.storage import open_storage
from tests import warm
from tests.trainer.launch import ROOT, read_state
from tests.trainer.scripted_run import Script
from tests.trainer.served import read_description, serve
from trainer.cli import cli
from trainer.launch import lost_a_peer
from trainer.movielens import load_movielens

EXAMPLE = ROOT / "trainer" / "configs" / "movielens.toml"


@pytest.mark.parametrize("args", [["--help"], ["train", "--help"], ["ett", "--help"]])
def test_help(args: list[str]) -> None:
    shown = CliRunner().invoke(cli, args)
    assert shown.exit_code == 0
    assert "Usage" in shown.output


def script_a_run(root: Path) -> None:
    """12 steps of 10 s, a save of 2 s after each fourth; a crash after step 10, 6 s down, 4 s to restore."""
    run = Script(root)
    ledger = run.begin(1)
    for at in (0, 4):
        run.steps(ledger, at + 1, at + 4, 10.0)
        run.save(ledger, at + 4, 2.0)
        ledger.record("save_committed", step=at + 4)
    run.steps(ledger, 9, 10, 10.0)
    run.clock.advance(6.0)
    ledger = run.attempt(2)
    run.spend(ledger, "restore", 4.0)
    ledger.record("restored", step=8, position=8, epoch=1)
    run.steps(ledger, 9, 12, 10.0)
    run.close(ledger)


def test_ett_as_table_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script_a_run(tmp_path / "a")
    assert run_command(cli, ["ett", str(tmp_path / "a")]) == 0
    shown = capsys.readouterr().out
    assert "ETT 77.9% of 154.0 s" in shown
    assert "1. training repeated: 13.0 points (20.0 s). 2 batches were trained again" in shown
    assert "Time to start 10.0 s, time to recover 40.0 s, 1 failures, 0 preemptions." in shown
    assert "Save every 24.8 s (2 steps)" in shown
    asked = ["ett", str(tmp_path / "a"), "--json", "--what-if", "failures=0/day"]
    assert run_command(cli, asked) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ett_percent"] == pytest.approx(100 * 120 / 154)
    assert found["attempts"][1]["areas"]["training_repeated"] == 20.0
    assert (found["batches_repeated"], found["lost_batches"]) == (2, 0)
    assert [loss["area"] for loss in found["losses"]] == [
        *("training_repeated", "between_attempts", "restore")
    ]
    assert found["advice"]["interval_steps"] == 2
    assert found["what_if"]["ett_percent_then"] > found["what_if"]["ett_percent_model"]

    script_a_run(tmp_path / "b")
    assert run_command(cli, ["ett", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    assert "2 runs: ETT 77.9%" in capsys.readouterr().out
    assert run_command(cli, ["ett", str(tmp_path / "a"), str(tmp_path / "b"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ett_percent"] == pytest.approx(100 * 120 / 154)
    assert len(found["runs"]) == 2


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (["ett", "{tmp}/none"], 3, "no ledger under events/"),
        (["ett", "{tmp}", "--what-if", "block=3"], 2, "block='3': give a duration such as 0.5s"),
        (["train", "--config", "{tmp}/none.toml"], 3, "no such file"),
        (["train", "--config", str(EXAMPLE), "--set", "run.epoch=1"], 2, "unknown setting 'epoch'"),
        (["train", "--config", str(EXAMPLE), "--set", "epochs"], 2, "write section.key=value"),
        (["train"], 2, "--config"),
    ],
)
def test_errors_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], args: list[str], code: int, message: str
) -> None:
    assert run_command(cli, [a.format(tmp=tmp_path) for a in args]) == code
    shown = capsys.readouterr().err
    assert message in shown
    assert "Traceback" not in shown


def test_knows_a_lost_peer_from_other_errors() -> None:
    assert lost_a_peer(RuntimeError("[/x/gloo/transport/tcp/pair.cc:537] Read error [::1]:2445"))
    assert not lost_a_peer(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))


@pytest.fixture(scope="module")
def killed_and_resumed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One epoch of 22 steps in a single process, killed at step 15 and started again."""
    tmp = tmp_path_factory.mktemp("train")
    settings = {
        "run.root": tmp / "root",
        "run.epochs": 1,
        "run.save_every": 5,
        "run.result": tmp / "result.json",
        "data.batch_size": 4096,
        "proof.dir": tmp / "proof",
    }
    command = [sys.executable, "-m", "trainer.cli", "train", "--config", str(EXAMPLE)]
    for key, value in settings.items():
        command += ["--set", f"{key}={value}"]
    env = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "SIDESTAGE_TRUST_FILE": str(tmp / "trusted"),
    }
    fault = ["--set", "fault.kill_rank=0", "--set", "fault.kill_at_step=15"]
    killed = warm.run(command + fault, env=env, timeout=240)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    ended = subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=240, check=False
    )
    assert ended.returncode == 0, ended.stderr
    (tmp / "stdout").write_text(ended.stdout)
    (tmp / "stderr").write_text(ended.stderr)
    return tmp


@pytest.mark.crash
def test_train_ends_where_it_should(killed_and_resumed: Path) -> None:
    result = json.loads((killed_and_resumed / "result.json").read_text())
    assert (result["steps"], result["batches"], result["world_size"]) == (22, 22, 1)
    # The save at step 10 waited for the commit of step 5, and that at 15 for step 10's.
    assert result["resumed_step"] in (10, 15)
    assert result["failed_saves"] == result["skipped_saves"] == 0
    assert len(result["auc"]) == 1
    assert 0.6 < result["auc"][0] < 0.9
    assert result["auc_item_mean"] == pytest.approx(0.739, abs=0.001)
    assert (
        f"resumed at step {result['resumed_step']}" in (killed_and_resumed / "stdout").read_text()
    )
    assert "epoch 1/1: AUC 0." in (killed_and_resumed / "stdout").read_text()
    (said,) = (killed_and_resumed / "stderr").read_text().splitlines()
    assert said.endswith("(epoch 1, saved by 1 rank)")  # the one line of a start
    latest = Catalog(open_storage(killed_and_resumed / "root")).latest()
    assert latest is not None
    assert latest.record is not None
    assert latest.ref.step == 22
    assert latest.record.annotations["serving_description"] == result["serving_description"]
    trained = load_movielens().train.event_times_s[: 22 * 4096]
    assert float(latest.record.annotations[EVENT_TIME]) == int(trained.max())


@pytest.mark.crash
def test_the_stored_description_serves_the_last_state(killed_and_resumed: Path) -> None:
    """Nothing but storage: the program, the tables and dense weights give the trainer's predictions."""
    result = json.loads((killed_and_resumed / "result.json").read_text())
    storage = open_storage(killed_and_resumed / "root")
    description = read_description(storage, result["serving_description"])
    with safe_open(killed_and_resumed / "proof" / "predictions.safetensors", "pt") as file:
        request = {k: file.get_tensor(k) for k in file.keys()}  # noqa: SIM118 - not a mapping
    got = serve(storage, description, read_state(killed_and_resumed / "proof"), request)
    torch.testing.assert_close(got["probability"], request["probability"], rtol=1e-5, atol=1e-6)
    descriptions = {o.key.split("/")[2] for o in storage.list("serving/descriptions/")}
    assert descriptions == {result["serving_description"]}  # the restart made no second one
