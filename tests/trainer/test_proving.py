"""Trainings that resume exactly, and others that leave something out: the cause is named."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

import trainer
from ckpt import PerRank
from ckpt.errors import InexactError
from tests import warm
from tests.trainer.launch import run_ranks
from trainer import BatchReader, LoaderReader, Session, prove_resume

X = torch.randn(96, 4, generator=torch.Generator().manual_seed(1))


class Training:
    """What a script builds at each start. Subclasses leave something out."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1)
        )
        self.optimizer: Any = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 3, 0.5)
        self.reader: Any = LoaderReader(DataLoader(X, 8, shuffle=True))

    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "schedule": self.schedule}

    def loss(self, batch: Tensor) -> Tensor:
        return self.model(batch).square().mean()

    def run(self, root: str, until: int, save_every: int) -> None:
        with Session(root, self.state(), self.reader, save_every=save_every) as session:
            while session.steps < until:
                for batch in session.batches():
                    self.optimizer.zero_grad()
                    loss = self.loss(batch)
                    loss.backward()
                    self.optimizer.step()
                    self.schedule.step()
                    session.step(loss=loss)
                    if session.steps == until:
                        break


class OwnDropout(Training):
    def __init__(self) -> None:
        super().__init__()
        self.noise = torch.Generator().manual_seed(3)

    def loss(self, batch: Tensor) -> Tensor:
        keep = torch.rand(batch.shape, generator=self.noise) > 0.5
        return super().loss(batch * keep)


class SavedDropout(OwnDropout):
    """Follows the advice."""

    def state_dict(self) -> dict[str, Any]:
        return {"noise": PerRank(self.noise.get_state())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.noise.set_state(state["noise"].value)

    def state(self) -> dict[str, Any]:
        return {**super().state(), "dropout": self}


class Astray(BatchReader[Tensor]):
    """Says that it is where it was, and begins with the first batch."""

    lost = 0

    def seek(self, position: int) -> None:
        super().seek(position)
        self.lost = position

    def indices(self, position: int) -> Tensor:
        return super().indices(position - self.lost)


class LostReader(Training):
    def __init__(self) -> None:
        super().__init__()
        self.reader = Astray(len(X), 8, lambda index: X[index])


class NoSchedule(Training):
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}


class NoOptimizer(Training):
    def state(self) -> dict[str, Any]:
        return {"model": self.model}


class Hidden(Training):
    """Counts for itself how strong its noise is."""

    strength = 0.0

    def loss(self, batch: Tensor) -> Tensor:
        self.strength += 0.1
        return super().loss(batch) * self.strength


class Drawing(Training):
    """Draws once after each start, beside the generators that were restored."""

    begun = False

    def loss(self, batch: Tensor) -> Tensor:
        if not self.begun:
            self.begun = True
            torch.rand(3)
        return super().loss(batch)


class LateState(Training):
    """An optimizer that keeps an average from the eighth step of a process on."""

    count = 0

    def loss(self, batch: Tensor) -> Tensor:
        self.count += 1
        if self.count > 7:
            for p in self.model.parameters():
                self.optimizer.state[p].setdefault("late", torch.zeros_like(p))
        return super().loss(batch)


def life_of(kind: type[Training]) -> Callable[[str, int, int], None]:
    return lambda root, until, save_every: kind().run(root, until, save_every)


@pytest.mark.parametrize("kind", [Training, SavedDropout])
def test_an_exact_resume_is_proved(kind: type[Training], tmp_path: Path) -> None:
    proof = prove_resume(life_of(kind), at=7, steps=8, folder=tmp_path / "proof")
    assert proof.exact
    assert (proof.losses, proof.differences, proof.first_step) == (8, (), None)
    assert (
        str(proof)
        == f"exact: 8 of 8 losses and {proof.entries} of {proof.entries} entries are equal"
    )
    assert 25 < proof.entries < 100
    assert json.loads(json.dumps(proof.as_dict()))["exact"] is True


@pytest.mark.parametrize(
    ("kind", "cause", "told", "first_step", "key"),
    [
        (OwnDropout, "generator", "the torch.Generator 'noise' differs", 8, "model.0.weight"),
        (LostReader, "reader", "other batches, from batch 8 on", 8, "model.0.weight"),
        (NoSchedule, "learning_rate", "put the scheduler into the", None, "model.0.weight"),
        (NoOptimizer, "optimizer", "SGD steps and isn't in the state", 9, "model.0.weight"),
        (Hidden, "unknown", "such as an attribute", 8, "model.0.weight"),
        (
            Drawing,
            "generator",
            "torch's generator of the process differs at step 8",
            8,
            "model.0.weight",
        ),
        (LateState, "late_state", "optimizer.state.0.weight.late is in one", None, None),
    ],
)
def test_what_is_left_out_is_named(
    kind: type[Training],
    cause: str,
    told: str,
    first_step: int | None,
    key: str | None,
    tmp_path: Path,
) -> None:
    with pytest.raises(InexactError, match="not exact: ") as e:
        prove_resume(life_of(kind), at=7, steps=3, folder=tmp_path / "proof")
    proof = e.value.proof
    assert proof.cause.name == cause, str(e.value)
    assert told in str(e.value)
    assert "\n" not in str(e.value)
    assert proof.first_step == first_step
    if key is not None:
        assert proof.differences[0].key == key
        assert f"first {key} (" in str(e.value)


class Deaf(BatchReader[Tensor]):
    def seek(self, position: int) -> None:
        pass


def test_a_life_that_cannot_resume_is_not_exact(tmp_path: Path) -> None:
    class Unsought(Training):
        def __init__(self) -> None:
            super().__init__()
            self.reader = Deaf(len(X), 8, lambda index: X[index])

    with pytest.raises(
        InexactError, match="resumes at step 7 failed: step 8 trained on no batch: the reader has"
    ):
        prove_resume(life_of(Unsought), at=7, steps=3, folder=tmp_path / "proof")


def test_a_life_that_begins_from_scratch_proves_nothing(tmp_path: Path) -> None:
    def life(root: str, until: int, save_every: int) -> None:
        shutil.rmtree(root, ignore_errors=True)
        Training().run(root, until, save_every)

    with pytest.raises(InexactError, match="a training that began from scratch, not from step 7"):
        prove_resume(life, at=7, steps=3, folder=tmp_path / "proof")


def test_a_life_that_was_interrupted_is_no_measure(tmp_path: Path) -> None:
    def life(root: str, until: int, save_every: int) -> None:
        Training().run(root, 7, save_every)
        Training().run(root, until, save_every)

    with pytest.raises(
        InexactError, match="the first life's last .* from step 7, not from scratch"
    ):
        prove_resume(life, at=7, steps=3, folder=tmp_path / "proof")


KINDS = {kind.__name__: kind for kind in (Training, OwnDropout, NoSchedule)}


def test_several_ranks_prove_together(tmp_path: Path) -> None:
    """A static graph regroups DistributedDataParallel's buckets after the first iteration of a life."""
    for end in run_ranks("tests.trainer.proving_ranks", tmp_path, ranks=4, restarts=0):
        assert end.returncode == 0, end.stderr
    told = [json.loads((tmp_path / f"told-r{rank}.json").read_text()) for rank in range(4)]
    assert told[1:] == told[:1] * 3
    assert told[0]["False"]["exact"]
    assert told[0]["False"]["losses"] == 5
    assert told[0]["True"]["cause"]["name"] == "ddp_buckets"


def prove(*args: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "trainer.cli", "prove-resume", *args]
    return warm.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=240)


def prove_script(kind: str, *args: str | Path) -> subprocess.CompletedProcess[str]:
    script = (sys.executable, "-m", "tests.trainer.proved_script")
    return prove(*args, "--", *script, "{root}", "{until}", "{save_every}", kind)


def test_a_command_is_proved_in_fresh_processes(tmp_path: Path) -> None:
    end = prove_script("Training", "--at", "7", "--steps", "3", "--root", tmp_path / "kept")
    assert (end.returncode, end.stderr) == (0, "")
    assert end.stdout.startswith("exact: 3 of 3 losses and ")
    assert {"straight", "resumed"} <= {p.name for p in (tmp_path / "kept").iterdir()}
    again = prove_script("Training", "--root", tmp_path / "kept")
    assert again.returncode == 2
    assert "isn't empty; name a new folder" in again.stderr


def test_a_command_that_is_not_exact_ends_with_9_and_says_why(tmp_path: Path) -> None:
    end = prove_script(
        "OwnDropout", "--at", "3", "--steps", "2", "--json", "--root", tmp_path / "kept"
    )
    assert end.returncode == 9
    told = json.loads(end.stdout)
    assert told["cause"]["name"] == "generator"
    assert told["first_step"] == 4
    assert told["differences"][0]["key"] == "model.0.weight"
    assert end.stderr.count("\n") == 1
    assert "error: not exact: step 4 is the first whose loss differs" in end.stderr


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        ([], 2, "name what to prove: --config FILE, or a command after --"),
        (["--", "train.py", "{root}", "{until}"], 2, "the command has no {save_every}"),
        (["--", "/no/such", "{root}{until}{save_every}"], 2, "/no/such: can't be started"),
        (
            ["--", sys.executable, "-c", "print('{root}{until}{save_every}'); raise OSError('oh')"],
            1,
            "the command ended with 1: OSError: oh; see ",
        ),
        (
            ["--", sys.executable, "-c", "'{root}{until}{save_every}'"],
            2,
            "has no checkpoint of step 20, but of none: the training must keep its root where",
        ),
    ],
)
def test_a_command_that_cannot_be_proved_is_told_why(
    args: list[str], code: int, message: str, tmp_path: Path
) -> None:
    end = prove("--root", tmp_path / "kept", *args)
    assert message in end.stderr
    assert end.returncode == code


def test_the_reference_trainer_is_proved_and_leaves_its_own_root_alone(tmp_path: Path) -> None:
    config = tmp_path / "train.toml"
    config.write_text(
        f'[run]\nroot = "{tmp_path}/own"\nresult = "{tmp_path}/own.json"\nledger = "{tmp_path}/own-ledger"\n'
        f'device = "cpu"\n[proof]\ndir = "{tmp_path}/own-proof"\n[checkpoint]\nkeep_last = 1\n'
    )
    end = prove("--config", config, "--nproc-per-node", "2", "--at", "5", "--steps", "4")
    assert end.returncode == 0, end.stderr
    assert end.stdout.startswith("exact: 4 of 4 losses and ")
    assert [p.name for p in tmp_path.iterdir()] == ["train.toml"]


def test_the_example_of_the_documentation_proves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (Path(__file__).parents[2] / "docs" / "training.md").read_text()
    example = text.partition("### Prove it")[2].partition("```python\n")[2].partition("```")[0]
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def build() -> tuple[Any, ...]:
        training = Training()
        return training.model, training.optimizer, training.reader

    def train_step(model: Any, optimizer: Any, batch: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    exec(example, {"build": build, "train_step": train_step, "trainer": trainer})
    assert capsys.readouterr().out.startswith("exact: 5 of 5 losses and ")
    assert list(tmp_path.iterdir()) == []  # where all is equal nothing is kept
