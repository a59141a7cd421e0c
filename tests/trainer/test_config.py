import re
from pathlib import Path

import pytest

from ckpt.errors import BadInputError, NotFoundError
from trainer.config import load_config

EXAMPLE = Path(__file__).parents[2] / "trainer" / "configs" / "movielens.toml"


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(text)
    return path


def test_the_example_shows_the_defaults(tmp_path: Path) -> None:
    shortest = load_config(write(tmp_path, '[run]\nroot = "build/movielens"\n'))
    assert load_config(EXAMPLE) == shortest


def test_the_example_names_every_setting() -> None:
    text = EXAMPLE.read_text()
    config = load_config(EXAMPLE)
    for section in ("run", "data", "model", "serving", "proof", "fault"):
        for name in vars(getattr(config, section)):
            assert re.search(rf"^(# )?{name} = ", text, re.M), f"[{section}] {name}"


def test_overrides_are_toml_values(tmp_path: Path) -> None:
    path = write(tmp_path, '[run]\nroot = "a"\n')
    sets = [
        "run.root=/data/b c",
        "run.epochs=2",
        "model.row_wise=['item']",
        "model.dense_lr = 1e-3",
        "run.elastic=true",
        'run.result="12"',
        "checkpoint.when_busy=skip",
    ]
    config = load_config(path, sets)
    assert (config.run.root, config.run.epochs, config.run.elastic) == ("/data/b c", 2, True)
    assert (config.model.row_wise, config.model.dense_lr) == (["item"], 0.001)
    assert (config.run.result, config.checkpoint.when_busy) == ("12", "skip")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"root is missing"),
        ("[runs]\n", r"unknown section \[runs\]; known are run, data"),
        ("run = 3\n", r"run must be a table"),
        ("[run]\nroot = 'a'\nepoch = 3\n", r"\[run\]: unknown setting 'epoch'; known are .*epochs"),
        ("[run]\nroot = 'a'\nepochs = '3'\n", r"epochs = '3' is not of type"),
        ("[run]\nroot = 'a'\nepochs = 0\n", r"epochs = 0: give at least 1"),
        ("[run]\nroot = 'a'\ndevice = 'tpu'\n", r"device = 'tpu' is not of type"),
        ("[run]\nroot = 'a'\n[data]\nbatch_size = 0\n", r"batch_size = 0"),
        ("[run]\nroot = 'a'\n[model]\nover_layers = [0]\n", r"widths of 1 or more"),
        ("[run]\nroot = 'a'\n[model]\ntable_lr = 0\n", r"must be above 0"),
        ("[run]\nroot = 'a'\n[fault]\nkill_rank = 1\n", r"kill_rank and kill_at_step go together"),
        ("[run]\nroot = 'a'\n[checkpoint]\nmax_pending = 0\n", r"max_pending = 0"),
        ("[run\n", r"run\.toml: not valid TOML"),
    ],
)
def test_names_what_is_wrong(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(BadInputError, match=message):
        load_config(write(tmp_path, text))


@pytest.mark.parametrize("text", ["epochs=2", "run.epochs", "run.=2", ".epochs=2"])
def test_refuses_a_malformed_override(tmp_path: Path, text: str) -> None:
    with pytest.raises(BadInputError, match=r"write section\.key=value"):
        load_config(write(tmp_path, '[run]\nroot = "a"\n'), [text])


def test_names_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no such file"):
        load_config(tmp_path / "none.toml")
