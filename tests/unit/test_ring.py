"""The ring's buffers: aligned, reused, grown only when needed, and released."""

from __future__ import annotations

import threading

import pytest

from ckpt.errors import BadInputError, SaveError
from ckpt.ring import ALIGN_BYTES, Ring, aligned, buffer_bytes

DEADLINE_S = 30.0
MIB = 1 << 20


@pytest.fixture
def ring() -> Ring:
    return Ring(2, 5000, pinned=False)


def test_buffers_are_aligned_and_the_same_memory_as_tensor_and_view(ring: Ring) -> None:
    buffer = ring.take()
    assert buffer.tensor.data_ptr() % ALIGN_BYTES == 0
    assert buffer.tensor.nbytes == len(buffer.view) == 8192
    buffer.tensor[4999] = 7
    assert buffer.view[4999] == 7
    assert not buffer.view.readonly


def test_large_buffers_can_lie_on_huge_pages() -> None:
    buffer = Ring(2, 3 * MIB, pinned=False).take()
    assert buffer.tensor.data_ptr() % (2 * MIB) == 0
    assert buffer.tensor.nbytes == 4 * MIB


def test_buffers_are_reused_and_never_more_than_promised(ring: Ring) -> None:
    seen = set()
    for _ in range(5):
        taken = [ring.take(), ring.take()]
        seen |= {b.tensor.data_ptr() for b in taken}
        for b in taken:
            ring.give(b)
    assert len(seen) == 2
    assert ring.held_bytes == 2 * 8192


def test_take_waits_for_a_buffer_to_come_back(ring: Ring) -> None:
    first, second = ring.take(), ring.take()
    got = threading.Event()
    thread = threading.Thread(target=lambda: (ring.take(), got.set()))
    thread.start()
    assert not got.is_set()
    ring.give(second)
    assert got.wait(DEADLINE_S)
    thread.join(DEADLINE_S)
    ring.give(first)


def test_a_block_that_needs_more_makes_the_buffers_longer_once_all_are_back(ring: Ring) -> None:
    first = ring.take()
    got: list[int] = []
    thread = threading.Thread(target=lambda: got.append(ring.take(20_000).tensor.nbytes))
    thread.start()
    ring.give(first)
    thread.join(DEADLINE_S)
    assert got == [20_480]
    assert ring.buffer_bytes == 20_480
    assert ring.take(100).tensor.nbytes == 20_480


def test_close_releases_what_is_free_and_what_comes_back(ring: Ring) -> None:
    out, back = ring.take(), ring.take()
    ring.give(back)
    ring.close()
    ring.close()
    assert back.tensor.numel() == 0
    assert out.tensor.numel() == 8192
    ring.give(out)
    assert out.tensor.numel() == 0
    with pytest.raises(SaveError, match="closed"):
        ring.take()


def test_close_wakes_who_waits(ring: Ring) -> None:
    _ = ring.take(), ring.take()
    errors: list[BaseException] = []

    def take() -> None:
        try:
            ring.take(100_000)
        except SaveError as e:
            errors.append(e)

    thread = threading.Thread(target=take)
    thread.start()
    ring.close()
    thread.join(DEADLINE_S)
    assert len(errors) == 1


def test_one_buffer_is_refused() -> None:
    with pytest.raises(BadInputError, match="at least 2"):
        Ring(1, 4096, pinned=False)


@pytest.mark.parametrize(
    ("staging_bytes", "chunk_bytes", "expected"),
    [
        (80 * MIB, 16 * MIB, 5 * MIB),
        (16 * MIB, 16 * MIB, MIB),
        (100 * MIB + 1, 16 * MIB, aligned(100 * MIB // 16)),
        (10_000 * MIB, 16 * MIB, 16 * MIB),
        (64 * MIB, 4096, 4096),
        (64 * MIB, 5000, 8192),
    ],
)
def test_buffers_are_a_small_part_of_the_staging_memory(
    staging_bytes: int, chunk_bytes: int, expected: int
) -> None:
    assert buffer_bytes(staging_bytes, chunk_bytes) == expected
