"""The policy file: what it may say, what it says if it says nothing, and what is wrong in it."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckpt.errors import BadInputError, NotFoundError
from publisher.policy import Policy, describe_policy, read_policy

WHOLE = """
[tables]
"model.ebc.user.*" = "fp16"
"größe.\\"*🙂" = "fp32"
"*" = "int4_rowwise"
[gates]
parity_max_abs_err = 0.5
[metric]
kind = "auc"
batch = "replay/batch.safetensors"
output = "score"
label = "label"
max_loss = 0.002
[release]
canary = true
[retention]
keep = 3
[build]
workers = 2
"""


def read(tmp_path: Path, text: str) -> Policy:
    path = tmp_path / "policy.toml"
    path.write_text(text)
    return read_policy(path)


def test_a_whole_policy(tmp_path: Path) -> None:
    policy = read(tmp_path, WHOLE)
    assert policy.format_of("model.ebc.user.weight") == "fp16"
    assert policy.format_of("model.ebc.item.weight") == "int4_rowwise"
    assert policy.metric is not None
    assert (policy.metric.kind, policy.metric.max_loss, policy.metric.worst) == ("auc", 0.002, None)
    assert (policy.gates.parity_max_abs_err, policy.gates.norm_drift_max_ratio) == (0.5, 4.0)
    assert (policy.release.canary, policy.retention.keep, policy.build.workers) == (True, 3, 2)


def test_an_empty_one_has_the_defaults(tmp_path: Path) -> None:
    assert read(tmp_path, "") == Policy()
    assert Policy().format_of("any") == "int8_rowwise"


@pytest.mark.parametrize("text", ["", WHOLE])
def test_what_is_printed_says_the_same(tmp_path: Path, text: str) -> None:
    policy = read(tmp_path, text)
    assert read(tmp_path, describe_policy(policy)) == policy


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[gate]\nparity_max_abs_err = 1", r"policy\.toml: missing nothing; unknown gate;"),
        (
            "[gates]\nparity = 1",
            "gates: missing nothing; unknown parity; the fields are parity_max",
        ),
        ("[gates]\nparity_max_abs_err = 'x'", "gates: parity_max_abs_err: expected float"),
        ("[gates]\nparity_max_abs_err = nan", r"gates\.parity_max_abs_err = nan: give a number"),
        ("[gates]\ndequantisation_max_rel_err = -1", r"gates\.dequantisation_max_rel_err = -1"),
        ("[gates]\nnorm_drift_max_ratio = 0.5", r"norm_drift_max_ratio = 0\.5: 1 or more"),
        ("[tables]\n'*' = 'int3'", "tables.*: 'int3' is not one of int8_rowwise, int4_rowwise"),
        ("[metric]\nkind = 'auc'", "metric: missing batch, label, output; unknown nothing"),
        ("[release]\nmax_attempts = 0", r"release\.max_attempts = 0"),
        ("[release]\ncanary = 1", "release: canary: expected bool"),
        ("[retention]\nkeep = -1", "retention: keep: -1 is below 0"),
        ("[build]\nmemory_mib = 0", r"build\.memory_mib = 0"),
        ("[gates", "not a policy file"),
    ],
)
def test_wrong_fields_are_named(tmp_path: Path, text: str, why: str) -> None:
    with pytest.raises(BadInputError, match=why) as e:
        read(tmp_path, text)
    assert "\n" not in str(e.value)


def test_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no such policy file"):
        read_policy(tmp_path / "none")
    with pytest.raises(BadInputError, match="not a policy file"):
        read_policy(tmp_path)
