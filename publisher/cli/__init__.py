"""The `publisher` command. Each subcommand imports what it needs: `status` needs no torch."""

from __future__ import annotations

import click

from ckpt.command import entry
from publisher.cli import compiling, moving, paging, publishing, retaining, serving, telling
from publisher.views.command import export


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="sidestage")
def cli() -> None:
    """Publish checkpoints as served versions, from outside of the trainer.

    ROOT is the storage root that the trainer writes to. Exit codes: 0 done; 2 bad input, or
    refused by a gate; 3 not found; 4 conflict; 5 corrupt; 6 storage or port; 130 interrupted.
    """


for command in (
    *(publishing.run, publishing.once, publishing.policy),
    *(telling.status, telling.history),
    *(moving.rollback, moving.promote),
    *(retaining.pin, retaining.unpin, retaining.pins, retaining.prune),
    *(serving.serve, paging.page, export, compiling.compile_),
):
    cli.add_command(command)

main = entry(cli)
