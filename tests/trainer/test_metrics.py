import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer.metrics import auc


def brute_force(scores: list[float], labels: list[int]) -> float:
    pairs = [
        1.0 if p > n else 0.5 if p == n else 0.0
        for p, lp in zip(scores, labels, strict=True)
        if lp
        for n, ln in zip(scores, labels, strict=True)
        if not ln
    ]
    return sum(pairs) / len(pairs) if pairs else math.nan


@given(st.lists(st.tuples(st.integers(-3, 3), st.booleans()), max_size=40))
def test_equals_the_count_over_all_pairs(samples: list[tuple[int, bool]]) -> None:
    scores, labels = [s / 4 for s, _ in samples], [int(y) for _, y in samples]
    got = auc(torch.tensor(scores), torch.tensor(labels, dtype=torch.float32))
    expected = brute_force(scores, labels)
    assert math.isnan(got) if math.isnan(expected) else abs(got - expected) < 1e-12


def test_ends_and_middle() -> None:
    labels = torch.tensor([0.0, 0, 1, 1])
    assert auc(torch.tensor([1.0, 2, 3, 4]), labels) == 1.0
    assert auc(torch.tensor([4.0, 3, 2, 1]), labels) == 0.0
    assert auc(torch.tensor([7.0, 7, 7, 7]), labels) == 0.5
    assert math.isnan(auc(torch.tensor([1.0, 2]), torch.tensor([1.0, 1])))
