"""`ckpt diff`: two checkpoints by their bits; `ckpt explain`: what a restore would do."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ckpt.cli.shared import (
    JSON_FLAG,
    STEP_OPTION,
    open_checkpoint,
    print_json,
    print_table,
    size_text,
    split_step,
)
from ckpt.command import printable
from ckpt.errors import BadInputError, InexactError
from ckpt.terms import RestoreTerms

if TYPE_CHECKING:
    from ckpt.description import StateDescription
    from ckpt.equality import Difference
    from ckpt.explain import Explanation

_MEANING = {
    "restored": "would be restored",
    "kept": "stays as it is, as asked",
    "missing": "only the state has it",
    "left": "only the checkpoint has it",
    "unclaimed": "it belongs to single ranks of another number of them",
    "misfit": "both have it, and it can't be restored",
    "unused": "both have it, and it isn't used, as asked",
}


@click.command()
@click.argument("a", metavar="A[@STEP]")
@click.argument("b", metavar="B[@STEP]")
@JSON_FLAG
def diff(a: str, b: str, *, as_json: bool) -> None:
    """Compare two checkpoints bit for bit: keys, shapes, values, rows changed, norms.

    A and B are roots, or ROOT@STEP, ROOT@EPOCH/STEP; they may be one root. Memory is some chunks
    of 16 MiB, and what digests say is equal isn't read. Exit code 9 if they differ.
    """
    from ckpt.equality import compare

    with ExitStack() as stack:
        opened = [
            stack.enter_context(open_checkpoint(*split_step(root), holder="ckpt diff"))
            for root in (a, b)
        ]
        found = compare(*(reader for _, reader in opened))
    if as_json:
        sides = [
            {"root": r, "step": c.ref.step, "epoch": c.ref.epoch}
            for r, (c, _) in zip((a, b), opened, strict=True)
        ]
        differences = [_as_json(d) for d in found.differences]
        print_json({"sides": sides, "entries": found.entries, "differences": differences})
    elif found.differences:
        print_table(
            [
                "key",
                "difference",
                "rows changed",
                "most",
                "norm of A",
                "norm of B",
                "norm of A - B",
            ],
            [[d.key, d.said, *_numbers(d)] for d in found.differences],
        )
    else:
        click.echo(f"equal: {found.entries} entries")
    if found.differences:
        raise InexactError(f"{len(found.differences)} of {found.entries} entries differ")


def _as_json(d: Difference) -> dict[str, Any]:
    side = None if d.only_in is None else "AB"[d.only_in]
    return {
        "key": d.key,
        "said": d.said,
        **({} if side is None else {"only_in": side}),
        **({} if d.tensor is None else asdict(d.tensor)),
    }


def _numbers(d: Difference) -> list[str]:
    if d.tensor is None:
        return [""] * 5
    t = d.tensor
    return [
        f"{t.rows} of {t.of_rows}",
        *("" if n is None else f"{n:.6g}" for n in (t.largest, *t.norms)),
    ]


@click.command()
@click.argument("root")
@click.option(
    "--against",
    required=True,
    metavar="SPEC",
    help="The state: another root (or ROOT@STEP), a file of Checkpointer.describe, or a safetensors file.",
)
@STEP_OPTION
@click.option("--partial", is_flag=True, help="Accept keys that only one side has.")
@click.option("--exclude", multiple=True, metavar="PATTERN", help="Keys that stay as they are.")
@click.option(
    "--rename", multiple=True, metavar="OLD=NEW", help="What a key is called in the state."
)
@click.option("--rows", multiple=True, metavar="PATTERN", help="Tensors whose sizes may differ.")
@click.option("--elastic", is_flag=True, help="Accept another number of ranks.")
@click.option("--other-optimizer", is_flag=True, help="Accept another class of optimizer.")
@click.option("--approximate", is_flag=True, help="Accept column shards cut otherwise.")
@JSON_FLAG
def explain(
    *,
    root: str,
    against: str,
    step: str | None,
    as_json: bool,
    rename: tuple[str, ...],
    **terms: Any,
) -> None:
    """Say what a restore of ROOT into the state SPEC would do: what loads, what not and why, in bytes.

    The options are a restore's terms. Nothing is read but indexes and values. Exit code 2 if the restore
    would be refused.
    """
    from ckpt.explain import explain as explained

    asked = RestoreTerms(rename=dict(_renames(rename)), **terms)
    with ExitStack() as stack:
        state = _described(against, stack)
        found, reader = stack.enter_context(open_checkpoint(root, step, holder="ckpt explain"))
        told = explained(reader, state, asked, _as_option)
    if as_json:
        print_json({"step": found.ref.step, "epoch": found.ref.epoch, **asdict(told)})
    else:
        _print(told)
    if told.refused:
        raise BadInputError(told.refused)


def _renames(given: tuple[str, ...]) -> list[tuple[str, str]]:
    pairs = [text.partition("=") for text in given]
    if wrong := [
        text
        for text, (old, sign, new) in zip(given, pairs, strict=True)
        if not (old and sign and new)
    ]:
        raise BadInputError(f"--rename {wrong[0]}: give OLD=NEW")
    return [(old, new) for old, _, new in pairs]


def _as_option(name: str, value: object) -> str:
    option = f"--{name.replace('_', '-')}"
    if value is True:
        return option
    values = value if isinstance(value, list | tuple) else [value]
    return " ".join(f"{option} {v}" for v in values)


def _described(spec: str, stack: ExitStack) -> StateDescription:
    from ckpt.specs import of_checkpoint, of_file

    if (path := Path(spec)).is_file():
        return of_file(path)
    _, reader = stack.enter_context(open_checkpoint(*split_step(spec), holder="ckpt explain"))
    return of_checkpoint(reader)


def _print(told: Explanation) -> None:
    print_table(
        ["key", "bytes", "outcome"],
        [[o.key, str(o.nbytes) if o.nbytes else "", _MEANING[o.outcome]] for o in told.outcomes],
    )
    click.echo()
    for outcome, meaning in _MEANING.items():
        those = [o for o in told.outcomes if o.outcome == outcome]
        if those:
            click.echo(
                f"{meaning}: {len(those)} entries, {size_text(sum(o.nbytes for o in those))}"
            )
    for text in told.notes:
        click.echo(f"note: {printable(text)}")
    for text in told.problems:
        click.echo(f"refused: {printable(text)}")
