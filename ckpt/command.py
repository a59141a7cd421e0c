"""What the three commands share: one line for an error, an exit code by class, `--debug` for the trace."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ckpt.errors import SidestageError

if TYPE_CHECKING:
    import click


def printable(text: str) -> str:
    """Text that others wrote, such as a key, without what would move a terminal's cursor or colour it."""
    return "".join(
        c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text
    )


def run_command(
    command: click.Command, argv: Sequence[str] | None = None, *, hands_on: str | None = None
) -> int:
    """Run a click command and return its exit code.

    0 done; 1 a defect; 2 bad input; 3 not found; 4 conflict; 5 corrupt; 6 storage or deadline;
    7 save failed; 9 what should be equal isn't; 130 interrupted. `--debug` anywhere on the line shows
    the trace.

    Args:
        command: the group of commands.
        argv: by default this process's.
        hands_on: a command whose arguments are another program's: `--debug` is ours up to its name or
            right after it, and that program's from there on.
    """
    import click

    args = list(sys.argv[1:] if argv is None else argv)
    streams = (sys.stdout, sys.stderr)
    named = next((n for n, a in enumerate(args) if not a.startswith("-")), None)
    until = named + 2 if named is not None and args[named] == hands_on else len(args)
    debug = "--debug" in args[:until]
    if debug:
        args.remove("--debug")
    try:
        result = command.main(args=args, standalone_mode=False)
        sys.stdout.flush()  # here, where a reader that went away can still be dealt with
        return result if isinstance(result, int) else 0
    except click.exceptions.Exit as e:
        return e.exit_code
    except click.Abort:
        print("interrupted", file=sys.stderr)
        return 130
    except click.ClickException as e:
        e.show()
        return 2
    except SidestageError as e:
        if debug:
            traceback.print_exc()
        print(f"error: {printable(str(e))}", file=sys.stderr)
        return e.exit_code
    except BrokenPipeError:
        return _reader_gone()
    except SystemExit:
        # click's own answer to a broken pipe: it wraps both streams and exits with 1.
        if (sys.stdout, sys.stderr) == streams:
            raise
        sys.stdout, sys.stderr = streams
        return _reader_gone()
    except Exception as e:  # the boundary: everything else is a defect of ours
        if debug:
            traceback.print_exc()
        print(
            f"error: {type(e).__name__}: {printable(str(e))} "
            f"(a defect in sidestage; --debug shows the trace)",
            file=sys.stderr,
        )
        return 1


def _reader_gone() -> int:
    """The reader of our output (`| head`) went away: nothing is wrong, and nothing is to be said."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.__stdout__.fileno() if sys.__stdout__ else 1)
    os.close(null)
    return 0


def entry(command: click.Command) -> Callable[[], None]:
    """A console-script entry point for a command."""

    def main() -> None:
        sys.exit(run_command(command))

    return main
