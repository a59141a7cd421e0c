"""A malformed request is refused by name and number."""

from __future__ import annotations

import pytest
import torch

from ckpt.errors import BadInputError
from publisher.request import RequestSpec
from tests.publisher.tiny import GOLDEN, description, request

SPEC = RequestSpec.of(description())
IDS = torch.tensor([1, 2])


def test_a_good_request_tells_its_batch_size() -> None:
    assert SPEC.check(GOLDEN) == 4
    assert SPEC.check(request([[]], [[]])) == 1
    assert SPEC.names() == [
        "dense",
        "user.values",
        "user.lengths",
        "genre.values",
        "genre.lengths",
    ]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"dense": None}, "missing dense; unknown nothing; expected dense, user.values"),
        ({"user.values": None, "item": IDS}, "missing user.values; unknown item"),
        ({"dense": torch.zeros(4, 3, dtype=torch.float64)}, "dense: dtype is float64, expected"),
        ({"dense": torch.zeros(4, 2)}, r"dense: shape is \(4, 2\), expected \(batch, 3\)"),
        ({"dense": torch.zeros(12)}, r"dense: shape is \(12,\)"),
        ({"dense": torch.zeros(5, 3)}, "dense has 5, user.lengths has 4, genre.lengths has 4"),
        ({"user.values": IDS.int()}, r"user.values: int32 of shape \(2,\), expected int64"),
        ({"user.lengths": torch.ones(2, 2).long()}, r"user.lengths: int64 of shape \(2, 2\)"),
        ({"user.values": IDS}, "user.lengths: lengths sum to 4, but user.values has 2 ids"),
        ({"user.lengths": torch.tensor([5, -1, 0, 0])}, "user.lengths: holds -1; lengths can't"),
        (
            {"user.lengths": torch.tensor([2**62, 2**62, 2**62, 2**62 + 4])},
            "lengths sum to 18446744073709551620, but user.values has 4",
        ),
        (
            {"user.values": torch.zeros(4, dtype=torch.int64, device="meta")},
            r"user.values: is strided, on meta; send a dense tensor on the CPU: tensor.cpu\(\)",
        ),
        ({"dense": torch.zeros(4, 3, device="meta")}, "dense: is strided, on meta"),
        ({"dense": torch.zeros(4, 3).to_sparse()}, "dense: is sparse_coo, on cpu"),
        ({"user.lengths": torch.zeros(0).long()}, "user.lengths: is empty, but user.values has 4"),
    ],
)
def test_a_malformed_request_is_refused(changes: dict[str, torch.Tensor | None], why: str) -> None:
    made = {n: t for n, t in {**GOLDEN, **changes}.items() if t is not None}
    with pytest.raises(BadInputError, match=why):
        SPEC.check(made)


def test_an_empty_batch_is_refused() -> None:
    empty = request([], [])
    empty["dense"] = torch.zeros(0, 3)
    with pytest.raises(BadInputError, match="a batch of 0 rows"):
        SPEC.check(empty)
