"""The `ckpt` command: look at, verify, compare, restore and retain checkpoints. `--help` imports no torch."""

from __future__ import annotations

import click

from ckpt.cli.comparing import diff, explain
from ckpt.cli.converting import export, import_
from ckpt.cli.doctoring import doctor
from ckpt.cli.inspection import ls, show, verify
from ckpt.cli.restoring import restore
from ckpt.cli.retaining import branch, pins, prune
from ckpt.command import entry


@click.group(epilog="Every command takes --debug, which shows the trace of an error.")
@click.version_option(package_name="sidestage")
def cli() -> None:
    """Look at, verify, compare, restore, retain and branch Sidestage checkpoints.

    Exit codes: 0 done, 1 defect, 2 bad input, 3 not found, 4 conflict, 5 corrupt,
    6 storage failed or too slow, 9 not equal, 130 interrupted.
    """


_COMMANDS = (
    *(ls, show, verify, diff, explain, restore),
    *(export, import_, prune, pins, branch, doctor),
)
for _command in _COMMANDS:
    cli.add_command(_command)

main = entry(cli)
