"""What `trainer ett` writes beside the terminal, read back by the readers it is meant for."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.made_runs import sample_advice, sample_losses, sample_run
from ckpt.errors import BadInputError
from trainer.ett.exports import write_tensorboard, write_textfile
from trainer.ett.outputs import Places, add_outputs
from trainer.ett.records import AREAS


def test_gauges_of_runs(tmp_path: Path) -> None:
    runs = [sample_run('a "quoted"\nroot'), sample_run("other", seed=3)]
    write_textfile(runs, tmp_path / "ett.prom")
    families = text_string_to_metric_families((tmp_path / "ett.prom").read_text())
    samples = {(s.name, *s.labels.values()): s.value for f in families for s in f.samples}
    for run in runs:
        assert samples["sidestage_ett_percent", run.root] == run.ett_percent
        assert samples["sidestage_ett_failures", run.root] == 1
        assert samples["sidestage_ett_batches_repeated", run.root] == run.batches_repeated
        assert samples["sidestage_ett_time_to_recover_seconds", run.root] == run.time_to_recover_s
        assert samples["sidestage_ett_save_interval_seconds", run.root] == 600
        keys = [k for k in samples if k[0] == "sidestage_ett_area_seconds" and run.root in k]
        assert len(keys) == len(AREAS)
        assert sum(samples[k] for k in keys) == pytest.approx(run.wall_s)


def test_scalars_of_a_run(tmp_path: Path) -> None:
    reading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run = sample_run()
    write_tensorboard([run], tmp_path)
    write_tensorboard([run], tmp_path)  # replaces what the first call wrote
    read = reading.EventAccumulator(str(tmp_path), size_guidance={reading.SCALARS: 0})
    read.Reload()
    percents = read.Scalars("ett/percent")
    assert [s.step for s in percents] == [1, 2, 3]
    assert percents[-1].value == pytest.approx(run.ett_percent, rel=1e-6)
    assert [s.value for s in read.Scalars("ett_seconds/training_new")] == pytest.approx(
        [a.areas["training_new"] for a in run.attempts], rel=1e-6
    )
    blocked = read.Scalars("save/blocked_s")
    assert [s.step for s in blocked] == [s.step for a in run.attempts for s in a.saves]
    several = write_tensorboard([run, run, sample_run("x/..")], tmp_path / "several")
    assert [p.name for p in several] == ["feed-ranking", "feed-ranking-2", "run"]


def test_all_outputs_at_once(tmp_path: Path) -> None:
    places = {
        "html": tmp_path / "new" / "page.html",
        "prometheus": tmp_path / "new" / "ett.prom",
        "tensorboard": tmp_path / "board",
    }
    written = add_outputs(
        [sample_run()], sample_losses, lambda _: sample_advice(), Places(**places)
    )
    assert written == tuple(places.values())
    assert sample_advice().why in places["html"].read_text()
    assert "sidestage_ett_percent" in places["prometheus"].read_text()
    assert len(list(places["tensorboard"].iterdir())) == 1
    assert add_outputs([sample_run()], sample_losses, lambda _: None, Places()) == ()


def test_what_cannot_be_written_names_the_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    for option, said in (
        ({"html": tmp_path / "file" / "page.html"}, "--html .*: (Not a directory|File exists)"),
        ({"prometheus": tmp_path / "ett.txt"}, "end in .prom"),
    ):
        with pytest.raises(BadInputError, match=said):
            add_outputs([sample_run()], sample_losses, lambda _: None, Places(**option))
    for module, option, said in (
        ("prometheus_client", {"prometheus": tmp_path / "x.prom"}, r"sidestage\[metrics\]"),
        ("tensorboard.compat.proto.event_pb2", {"tensorboard": tmp_path}, r"\[tensorboard\]"),
    ):
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(BadInputError, match=said):
            add_outputs([sample_run()], sample_losses, lambda _: None, Places(**option))
