"""What the three commands share: one line for an error, an exit code by class, `--debug` for the trace."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ckpt.errors import SidestageError

if TYPE_CHECKING:
    import click


def run_command(command: click.Command, argv: Sequence[str] | None = None) -> int:
    """Run a click command and return its exit code.

    0 done; 1 a defect; 2 bad input; 3 not found; 4 conflict; 5 corrupt; 6 storage or deadline;
    7 save failed; 130 interrupted. `--debug` anywhere on the line shows the trace.
    """
    import click

    args = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in args
    if debug:
        args.remove("--debug")
    try:
        result = command.main(args=args, standalone_mode=False)
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
        print(f"error: {e}", file=sys.stderr)
        return e.exit_code
    except BrokenPipeError:
        # The reader of our output (`| head`) went away: nothing is wrong.
        sys.stderr.close()
        return 0
    except Exception as e:  # the boundary: everything else is a defect of ours
        if debug:
            traceback.print_exc()
        print(
            f"error: {type(e).__name__}: {e} (a defect in sidestage; --debug shows the trace)",
            file=sys.stderr,
        )
        return 1


def entry(command: click.Command) -> Callable[[], None]:
    """A console-script entry point for a command."""

    def main() -> None:
        sys.exit(run_command(command))

    return main
