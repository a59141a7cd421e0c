"""Raw ids to rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt.errors import BadInputError
from ckpt.idmaps import EMPTY_SLOT, IdMap, KnownIds, Vocabulary, collided, hashed
from ckpt.schema import HashedIds

RAW = st.integers(-(2**63), 2**63 - 2)


def ids(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def splitmix64(raw: int, seed: int) -> int:
    """SplitMix64 in plain integers, as published by its authors."""
    mask = 2**64 - 1
    z = (raw + (seed + 1) * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


def test_the_published_vector() -> None:
    """The generator's first value from state 0."""
    whole = HashedIds(seed=0, modulus=2**63 - 1)
    assert hashed(ids(0), whole)[0] == 0xE220A8397B1DCDAF % (2**63 - 1)


@given(st.lists(RAW, min_size=1, max_size=5), st.integers(0, 2**63), st.integers(1, 2**63 - 1))
def test_hash_is_splitmix64(raw: list[int], seed: int, modulus: int) -> None:
    got = hashed(ids(*raw), HashedIds(seed, modulus))
    assert got.tolist() == [splitmix64(r, seed) % modulus for r in raw]


def test_a_hash_of_nothing_is_refused() -> None:
    with pytest.raises(BadInputError, match="modulus 0"):
        hashed(ids(1), HashedIds(0, 0))


@given(st.dictionaries(RAW, st.integers(0, 99), max_size=8), st.lists(RAW, max_size=8))
def test_known_ids_are_a_dictionary(known: dict[int, int], asked: list[int]) -> None:
    table = KnownIds.of(ids(*known), ids(*known.values()), "vocabulary")
    asked += list(known)[:2]
    assert table.rows(ids(*asked)).tolist() == [known.get(a, -1) for a in asked]


def test_an_id_with_two_rows_is_refused() -> None:
    with pytest.raises(BadInputError, match="mc: raw id 7 has two rows"):
        KnownIds.of(ids(7, 3, 7), ids(0, 1, 2), "mc")


def test_collisions_share_the_row_of_their_block() -> None:
    known = KnownIds.of(ids(EMPTY_SLOT, 30, 4, EMPTY_SLOT), ids(1, 9, 0, 5), "mc")
    got = collided(ids(4, 30, 5, 14, 29), known, 10, (8, 17, 26))
    assert got.tolist() == [0, 9, 8, 17, 26]
    beyond = collided(ids(30 * 2**40 + 1, -1), KnownIds.of(ids(), ids(), "mc"), 10, (8, 17, 26))
    assert beyond.tolist() == [17, [8, 17, 26][(2**64 - 1) % 3]]
    assert collided(ids(4, 5), known, 0, (3,)).tolist() == [0, 3]


def test_a_map_applies_as_serving_does() -> None:
    vocabulary = Vocabulary(ids(70, 10), ids(2, 5))
    assert IdMap(vocabulary).apply(ids(10, 11, 70)).tolist() == [5, -1, 2]
    assert IdMap(vocabulary, "row", 0).apply(ids(10, 11, 70)).tolist() == [5, 0, 2]
    spec = HashedIds(3, 10)
    assert IdMap(spec).apply(ids(10, 11)).tolist() == hashed(ids(10, 11), spec).tolist()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: IdMap(HashedIds(-1, 5)), "seed = -1; give an int from 0 to 18446744073709551615"),
        (lambda: IdMap(HashedIds(2**64, 5)), "seed = 18446744073709551616; give"),
        (lambda: IdMap(HashedIds(0, 0)), "modulus = 0; give an int from 1 to 9223372036854775807"),
        (lambda: IdMap(HashedIds(0, 2**63)), "modulus = 9223372036854775808; give"),
        (lambda: IdMap(HashedIds(0, 1e6)), "modulus = 1000000.0; give an int"),  # type: ignore[arg-type]
        (lambda: IdMap(HashedIds(0, 5), "row", -1), "unknown_row = -1; give an int from 0 to"),
    ],
)
def test_numbers_that_no_description_can_hold_are_refused(make: Any, message: str) -> None:
    with pytest.raises(BadInputError, match=message):
        make()
    assert IdMap(HashedIds(2**64 - 1, 2**63 - 1), "row", 0).apply(ids(1)) >= 0


def test_a_policy_and_its_row_go_together() -> None:
    with pytest.raises(BadInputError, match="unknown = 'zero' with unknown_row = 3"):
        IdMap(HashedIds(0, 5), "zero", 3)
    with pytest.raises(BadInputError, match="unknown = 'row' with unknown_row = None"):
        IdMap(HashedIds(0, 5), "row")
