"""Each benchmark runs at a tiny size and writes what benchmarks/README.md says. No time is asserted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.__main__ import BENCHMARKS, main

ROOT = Path(__file__).parent.parent.parent
DEADLINE_S = 300
STALL_RATIOS = {
    "block_vs_dcp_async",
    "lost_vs_dcp_async",
    "extra_rss_vs_state",
    "step_inflation",
    "exact",
}


def run(tmp_path: Path, name: str, *options: str) -> tuple[dict[str, Any], str]:
    """The figures that one benchmark wrote, and what it printed."""
    file, root = tmp_path / "figures.json", tmp_path / "root"
    command = [sys.executable, "-m", "benchmarks", name, "--json", str(file), "--root", str(root)]
    done = subprocess.run(
        [*command, *options], cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert not list(root.iterdir()), "it left something behind"
    return json.loads(file.read_text()), done.stdout


def test_limits_writes_a_row_for_each_limit(tmp_path: Path) -> None:
    figures, printed = run(tmp_path, "limits", "--quick", "--size-mib", "4")
    assert set(figures) == {"env", "rows", "ratios"}
    rows = {r["name"]: r for r in figures["rows"]}
    for name in (
        "memcpy 1 thread, warm",
        "memcpy all threads, fresh",
        "write buffered",
        "write buffered + fsync",
        "write O_DIRECT + fsync",
        "read cold",
        "digest xxh3_64",
        "digest xxh3_128",
        "digest sha256",
        "digest blake2b",
        "zstd level 1, float32 embeddings",
    ):
        row = rows[name]
        if row["status"] == "skipped":  # a filesystem without O_DIRECT
            assert "O_DIRECT" in name
            assert row["reason"]
        else:
            assert 0 < row["min"] <= row["gb_per_s"] <= row["max"]
        assert name in printed
    assert figures["ratios"]["zstd_ratio"] > 1
    assert figures["env"]["size_mib"] == 4


@pytest.mark.distributed
def test_stall_is_exact_and_compares_in_one_run(tmp_path: Path) -> None:
    modes = ["sidestage", "dcp.async_save + stager"]
    tiny = ("--size-mib", "4", "--saves", "1", "--min-steps", "3", "--ranks", "2")
    figures, printed = run(tmp_path, "stall", "--quick", *tiny, "--modes", ",".join(modes))
    assert set(figures) == {"env", "rows", "ratios"}
    assert [(r["mode"], r["ranks"]) for r in figures["rows"]] == [(m, 2) for m in modes]
    for row in figures["rows"]:
        assert row["status"] == "ok"
        assert row["exact"] is True
        assert row["differing"] == 0
        assert row["saves"] == len(row["samples"]) == 1
        assert 3 << 20 < row["state_mib"] * (1 << 20) < 6 << 20
        for key in ("blocked_ms", "first_blocked_ms", "persist_s", "quiet_step_ms"):
            assert row[key] > 0, key
        assert row["extra_rss_vs_state"] >= 0
        assert row["mode"] in printed
    ratios = figures["ratios"]
    assert set(ratios) == STALL_RATIOS | {f"{n}_2_ranks" for n in STALL_RATIOS}
    assert ratios["exact"] is True
    assert ratios["block_vs_dcp_async"] == ratios["block_vs_dcp_async_2_ranks"] > 0


def test_every_benchmark_is_documented() -> None:
    text = (ROOT / "benchmarks" / "README.md").read_text()
    for name in BENCHMARKS:
        assert f"## {name}" in text


def test_unknown_modes_are_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["stall", "--json", str(tmp_path / "f.json"), "--modes", "sidestage,tensorfile"]
    with pytest.raises(SystemExit):
        main(options)
    assert "unknown mode 'tensorfile'; known: sidestage," in capsys.readouterr().err
    assert os.listdir(tmp_path) == []
