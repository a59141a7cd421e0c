"""State that a kernel keeps, under the names of an optimizer that does the same, and back."""

import pytest

from ckpt.conversions import as_called_by, depends_on_count, same_kind

ADAM, ADAGRAD = "torch.optim.adam.Adam", "torch.optim.adagrad.Adagrad"


@pytest.mark.parametrize(
    ("kind", "entry", "here", "found"),
    [
        (ADAM, {"t.momentum1": 1, "t.momentum2": 2}, (), {"exp_avg": 1, "exp_avg_sq": 2}),
        (ADAM, {"t.exp_avg": 1, "t.exp_avg_sq": 2}, (), {"exp_avg": 1, "exp_avg_sq": 2}),
        (ADAGRAD, {"t.momentum1": 1}, ("step", "sum"), {"sum": 1}),
        (
            "fbgemm.ADAM",
            {"step": 3, "exp_avg": 1, "exp_avg_sq": 2},
            ("t.momentum1", "t.momentum2"),
            {"t.momentum1": 1, "t.momentum2": 2},
        ),
        (
            "fbgemm.ADAM",
            {"step": 3, "exp_avg": 1, "exp_avg_sq": 2},
            ("t.exp_avg", "t.exp_avg_sq"),
            {"t.exp_avg": 1, "t.exp_avg_sq": 2},
        ),
        ("fbgemm.EXACT_ADAGRAD", {"step": 3, "sum": 1}, ("t.momentum1",), {"t.momentum1": 1}),
        # What the other has no name for stays as it is, and is refused by it.
        ("fbgemm.EXACT_SGD", {"momentum_buffer": 1}, (), {"momentum_buffer": 1}),
        (ADAGRAD, {"t.momentum1": 1, "t.prev_iter": 2}, (), {"sum": 1, "t.prev_iter": 2}),
    ],
)
def test_names(
    kind: str, entry: dict[str, int], here: tuple[str, ...], found: dict[str, int]
) -> None:
    assert as_called_by(kind, entry, here) == found


def test_kinds() -> None:
    assert same_kind("fbgemm.ADAM", ADAM)
    assert not same_kind("fbgemm.ADAM", "torch.optim.adamw.AdamW")
    assert not same_kind(None, None)
    assert depends_on_count("fbgemm.ADAM")
    assert not depends_on_count("EXACT_ADAGRAD")
