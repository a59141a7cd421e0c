"""Tables and their optimizer state, from every way of sharding to every other: docs/resharding.md."""

from __future__ import annotations

import json
import re
from pathlib import Path

from ckpt.catalog import Catalog
from ckpt.explain import Explanation, explain
from ckpt.restore import CheckpointReader
from ckpt.specs import of_checkpoint
from ckpt.storage import open_storage
from ckpt.terms import RestoreTerms, as_argument
from tests.distributed.cuts_ranks import OPTIMIZERS, ways
from tests.distributed.launch import run_ranks

DOCS = Path(__file__).parents[2] / "docs/resharding.md"
WORLDS = (1, 2, 4)
SHOWN = {"same": "=", "merged": "m", "split": "a"}


def test_state_follows_its_table_to_any_cut_at_any_number_of_ranks(tmp_path: Path) -> None:
    module = "tests.distributed.cuts_ranks"
    roots = tmp_path / "roots"
    for world in WORLDS:
        run_ranks(module, world, tmp_path / f"save{world}", "save", str(roots))
    seen: dict[tuple[str, str, str], set[str]] = {}
    for world in WORLDS:
        folder = tmp_path / f"check{world}"
        out = run_ranks(module, world, folder, "check", str(roots), *map(str, WORLDS))
        for optimizer, was, here, outcome in json.loads(out[0]):
            seen.setdefault((optimizer, was, here), set()).add(outcome)
    # Every way met every other, with every optimizer.
    assert set(seen) == {(o, a, b) for o in OPTIMIZERS for a in ways(o) for b in ways(o)}
    check_explained(roots)
    found = [[a, *(cell(seen, a, b) for b in ways("rowwise"))] for a in ways("rowwise")]
    rows = [f"| **{way}** | {' | '.join(cells)} |" for way, *cells in found]
    assert printed_table() == found, "\n".join([f"{DOCS.name} should have", *rows])


def check_explained(roots: Path) -> None:
    """`explain`, which has no optimizer and no TorchRec, says of each checkpoint what a restore did."""
    for here in ("rowwise-sharded-1", "rowwise-dtensor-4"):
        told = explained(roots / "rowwise-sharded-2", roots / here)
        dense_cw = f"t{ways('rowwise').index('dense_cw')}"
        tables = [f"t{n}" for n in range(len(ways("rowwise")))]
        split = [dense_cw] if here.endswith("4") else []
        assert [t for t in tables if f".{t}.weight" in told.refused] == split, told.refused
        fitting = [o.key for o in told.outcomes if o.outcome == "restored"]
        others = {(o.outcome, o.key.split(".")[3]) for o in told.outcomes if o.key not in fitting}
        assert others == {("misfit", t) for t in split}
        state = {key.split(".")[3] for key in fitting if key.startswith("optimizer.state.")}
        # All tables have state there: of a split one only its count of steps.
        assert state == set(tables)
    told = explained(roots / "adam-sharded-2", roots / "plain_adam-dtensor-1")
    assert told.refused == ""
    assert {o.outcome for o in told.outcomes} == {"restored"}


def explained(root: Path, other: Path) -> Explanation:
    readers = []
    for folder in (root, other):
        storage = open_storage(str(folder))
        catalog = Catalog(storage)
        readers.append(CheckpointReader(storage, catalog.read(catalog.find(1).ref)))
    return explain(readers[0], of_checkpoint(readers[1]), RestoreTerms(), as_argument)


def test_a_rank_may_have_the_optimizer_of_its_part_for_itself(tmp_path: Path) -> None:
    root = str(tmp_path / "root")
    for action in ("own_save", "own_check"):
        run_ranks("tests.distributed.cuts_ranks", 2, tmp_path / action, action, root)


def test_no_state_goes_to_another_table_row_or_column(tmp_path: Path) -> None:
    run_ranks("tests.distributed.cut_edges_ranks", 2, tmp_path / "meet", str(tmp_path / "roots"))


def test_a_dtensor_of_uneven_columns_is_refused_with_its_name(tmp_path: Path) -> None:
    root = str(tmp_path / "root")
    run_ranks("tests.distributed.cuts_ranks", 2, tmp_path / "meet", "uneven", root)


def cell(seen: dict[tuple[str, str, str], set[str]], was: str, here: str) -> str:
    if "dense_cw" in (was, here):  # which has a column shard for each rank
        return "n"
    (outcome,) = seen["rowwise", was, here]
    return SHOWN[outcome]


def printed_table() -> list[list[str]]:
    """The cells of the matrix in the docs."""
    text = DOCS.read_text()
    rows = re.findall(r"^\| \*\*(\w+)\*\* \|(.*)\|$", text, re.MULTILINE)
    return [[way, *(cell.strip() for cell in cells.split("|"))] for way, cells in rows]
