"""The `trainer` command. `--help` and `ett` import no torch."""

from __future__ import annotations

import gc
import json
import sys
from contextlib import ExitStack, suppress
from pathlib import Path

import click

from ckpt.command import run_command
from ckpt.errors import SidestageError


@click.group(epilog="Every command takes --debug, which shows the trace of an error.")
@click.version_option(package_name="sidestage")
def cli() -> None:
    """Train the reference model, and account for a run's time.

    Exit codes: 0 done, 1 defect, 2 bad input, 3 not found, 4 conflict, 5 corrupt,
    6 storage failed or too slow, 7 the last save failed, 9 a resume isn't exact,
    75 stopped on request and saved, 76 stopped on request and not saved in time, 130 interrupted,
    143 asked to end while another rank was gone.
    """


@cli.command()
@click.option(
    "--config",
    "config_path",
    required=True,
    type=click.Path(path_type=Path),
    help="A TOML file; trainer/configs/movielens.toml shows every setting.",
)
@click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="SECTION.KEY=VALUE",
    help="Override one setting; may be repeated.",
)
def train(config_path: Path, overrides: tuple[str, ...]) -> None:
    """Train on MovieLens-100k, saving as it goes, and resume from the newest commit of the root.

    Start it by itself for a single process, or on every rank:

        torchrun --nproc-per-node 2 --max-restarts 3 -m trainer.cli train --config FILE
    """
    from trainer.ledger import Ledger

    ledger = Ledger()  # before anything that takes time
    with ExitStack() as stack:
        with ledger.span("imports"):
            from ckpt.prefetch import Prefetch
            from trainer.config import load_config
            from trainer.quiet import quiet_libraries

            config = load_config(config_path, overrides)
            ahead = None
            if not config.run.serial_start:
                with suppress(SidestageError):  # the start will meet it, too
                    # Its thread imports nothing, so that it can't disturb the imports here.
                    ahead = stack.enter_context(Prefetch(config.run.root))
            quiet_libraries()
            gc.disable()  # collections are a quarter of what imports take
            from trainer.train import train as run

            gc.freeze()
            gc.enable()

        run(config, click.echo, ledger, ahead)


@cli.command(
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    options_metavar="[--preload MODULE]... [TORCHRUN OPTIONS]",
)
@click.option(
    "--preload",
    multiple=True,
    metavar="MODULE",
    help="Import this before workers are forked, instead of torch and torchrec; may be repeated.",
)
@click.argument("arguments", nargs=-1, required=True, type=click.UNPROCESSED)
def launch(preload: tuple[str, ...], arguments: tuple[str, ...]) -> None:
    """Run torchrun's command line, with workers that needn't import torch at each restart.

        trainer launch --standalone --nproc-per-node 2 --max-restarts 3 -m trainer.cli train --config FILE

    Any training program can be given, as to torchrun, and sees what it would see there.
    """
    from trainer.launcher import launch as run

    run(arguments, preload)


@cli.command(name="prove-resume")
@click.option(
    "--config",
    "config_path",
    type=click.Path(path_type=Path),
    help="Prove `trainer train` of this TOML file.",
)
@click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="SECTION.KEY=VALUE",
    help="Override one setting of it; may be repeated.",
)
@click.option("--nproc-per-node", "ranks", default=1, show_default=True, help="Ranks for --config.")
@click.option("--at", default=20, show_default=True, help="The step to resume at.")
@click.option("--steps", default=5, show_default=True, help="Steps to replay and compare.")
@click.option(
    "--root",
    type=click.Path(path_type=Path),
    help="Keep both lives in this new folder; default is a temporary one.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a line.")
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
def prove_resume(
    *,
    config_path: Path | None,
    overrides: tuple[str, ...],
    ranks: int,
    at: int,
    steps: int,
    root: Path | None,
    as_json: bool,
    command: tuple[str, ...],
) -> None:
    """Prove that a training resumes exactly, or say what differs first and why.

    One life trains to step AT + STEPS, another resumes at step AT in new processes and trains to the same
    step; checkpoints, batches, losses, learning rates and generators are compared bit for bit. A training
    of your own is given as a command, with places for what it is told:

        trainer prove-resume -- torchrun --nproc-per-node 2 train.py --root {root} --steps {until}
        --save-every {save_every}

    Nothing is written to the run's own root. Exit code 9 if the resume isn't exact.
    """
    from ckpt.errors import BadInputError, InexactError
    from trainer.proving import prove, scratch
    from trainer.proving_commands import CommandLife, command_of

    if (config_path is None) == (not command):
        raise BadInputError("name what to prove: --config FILE, or a command after --")
    given = command_of(config_path, overrides, ranks) if config_path else list(command)
    life = CommandLife(given, save_every=at)
    with scratch(root) as folder:
        try:
            proof = prove(life, at, steps, folder)
        except InexactError as e:
            if as_json and e.proof is not None:
                click.echo(json.dumps(e.proof.as_dict(), indent=1, allow_nan=False))
            raise
    click.echo(json.dumps(proof.as_dict(), indent=1) if as_json else str(proof))


@cli.command()
@click.argument("roots", nargs=-1, required=True, metavar="ROOT...")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
@click.option(
    "--what-if",
    "changes",
    metavar="KEY=VALUE,...",
    help="Ask a model of the run: block, interval, start, recover, lag as durations (0.1s, 5m), "
    "failures per time (3/day).",
)
@click.option(
    "--html", type=click.Path(path_type=Path), help="Write one self-contained page to this file."
)
@click.option(
    "--prometheus",
    type=click.Path(path_type=Path),
    help="Write gauges to this .prom file, for node_exporter's textfile collector.",
)
@click.option(
    "--tensorboard", type=click.Path(path_type=Path), help="Write scalars to this folder."
)
def ett(
    roots: tuple[str, ...],
    *,
    as_json: bool,
    changes: str | None,
    html: Path | None,
    prometheus: Path | None,
    tensorboard: Path | None,
) -> None:
    """Show which share of a run's wall time was training on new data, and where the rest went.

    ROOT is a run's root, or the folder that its ledger was kept in. Several are compared.
    """
    from trainer.ett import advise, fleet, losses, parse_changes, read_report
    from trainer.ett.outputs import Places, add_outputs

    wanted = parse_changes(changes) if changes is not None else None
    reports = [read_report(root) for root in roots]
    percent = fleet(reports).ett_percent if len(reports) > 1 else None
    places = Places(html, prometheus, tensorboard)
    for path in add_outputs(reports, losses, advise, places, fleet_percent=percent):
        click.echo(f"written: {path}", err=True)
    if as_json:
        from trainer.ett.written import as_dict

        click.echo(json.dumps(as_dict(reports, wanted), indent=1, allow_nan=False))
    else:
        from trainer.ett.table import show

        show(reports, wanted)


def main() -> None:
    """The `trainer` command."""
    code = run_command(cli, hands_on="launch")
    if "torch" in sys.modules:
        from trainer.leaving import leave

        leave(code)
    sys.exit(code)


if __name__ == "__main__":
    main()
