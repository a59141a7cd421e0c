"""Ranking metrics."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def auc(scores: Tensor, labels: Tensor) -> float:
    """Exact area under the ROC curve; equal scores count half. NaN where one class is missing.

    Args:
        scores: (n,), any finite numbers; higher means more likely.
        labels: (n,), 1 for positives, 0 for negatives.
    """
    positive = labels > 0.5
    n_pos = int(positive.sum())
    n_neg = len(labels) - n_pos
    if n_pos == 0 or n_neg == 0:
        return math.nan
    # Mann-Whitney: the mean rank of each group of equal scores is exact in float64.
    _, group, count = torch.unique(scores, sorted=True, return_inverse=True, return_counts=True)
    last = torch.cumsum(count, 0).double()
    rank = (last - (count - 1).double() / 2)[group]
    return (float(rank[positive].sum()) - n_pos * (n_pos + 1) / 2) / (n_pos * n_neg)
