from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import click
import pytest

from ckpt import errors
from ckpt.command import entry, run_command


def command(body: Callable[[], int | None]) -> click.Command:
    @click.command()
    @click.option("--number", type=int)
    def made(number: int | None) -> int | None:
        return body()

    return made


def raising(error: BaseException) -> click.Command:
    def body() -> None:
        raise error

    return command(body)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.SidestageError("x"), 1),
        (errors.BadInputError("x"), 2),
        (errors.UnsupportedFormatError("x"), 2),
        (errors.NotFoundError("x"), 3),
        (errors.ConflictError("x"), 4),
        (errors.CorruptError("x"), 5),
        (errors.StorageError("x"), 6),
        (errors.DeadlineError("x"), 6),
        (errors.SaveError("x"), 7),
    ],
)
def test_an_error_is_one_line_and_its_classes_code(
    error: Exception, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(raising(error), []) == code
    assert capsys.readouterr() == ("", "error: x\n")


def test_every_error_class_documents_a_code_of_its_own_branch() -> None:
    doc = errors.__doc__ or ""
    for kind in vars(errors).values():
        if isinstance(kind, type) and issubclass(kind, errors.SidestageError):
            assert f"{kind.__name__} " in doc
            line = next(ln for ln in doc.splitlines() if f"{kind.__name__} " in ln)
            assert f"exit {kind.exit_code} " in line


def test_a_defect_says_that_it_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(raising(KeyError("k")), []) == 1
    err = capsys.readouterr().err
    assert err == "error: KeyError: 'k' (a defect in sidestage; --debug shows the trace)\n"


@pytest.mark.parametrize("error", [errors.CorruptError("x"), KeyError("x")])
def test_debug_anywhere_shows_the_trace(
    error: Exception, capsys: pytest.CaptureFixture[str]
) -> None:
    for argv in (["--debug"], ["--number", "1", "--debug"], ["--debug", "--number", "1"]):
        run_command(raising(error), argv)
        err = capsys.readouterr().err
        assert err.startswith("Traceback")
        assert "\nerror: " in err


def test_done_is_0_and_a_command_may_choose() -> None:
    assert run_command(command(lambda: None), []) == 0
    assert run_command(command(lambda: 5), []) == 5
    assert run_command(command(lambda: None), ["--help"]) == 0


@pytest.mark.parametrize("argv", [["--number", "x"], ["--unknown"], ["extra"]])
def test_a_wrong_command_line_is_bad_input(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(command(lambda: None), argv) == 2
    err = capsys.readouterr().err
    assert err.startswith("Usage: ")
    assert "Traceback" not in err


def test_interrupted_is_130(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(raising(KeyboardInterrupt()), []) == 130
    assert capsys.readouterr().err.strip() == "interrupted"


def test_a_commands_own_exit_passes() -> None:
    with pytest.raises(SystemExit) as caught:
        run_command(raising(SystemExit(9)), [])
    assert caught.value.code == 9


def test_an_entry_point_exits_with_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["ckpt"])
    with pytest.raises(SystemExit) as caught:
        entry(raising(errors.NotFoundError("x")))()
    assert caught.value.code == 3


@pytest.mark.parametrize("lines", [1, 100_000])
def test_a_reader_that_went_away_is_no_error(lines: int) -> None:
    code = f"""
import click
from ckpt.command import entry
@click.command()
def talk():
    for _ in range({lines}):
        click.echo("x" * 80)
entry(talk)()
"""
    read, write = os.pipe()
    os.close(read)
    try:
        ended = subprocess.run(
            [sys.executable, "-c", code],
            stdout=write,
            stderr=subprocess.PIPE,
            timeout=60,
            check=False,
        )
    finally:
        os.close(write)
    assert (ended.returncode, ended.stderr) == (0, b"")
