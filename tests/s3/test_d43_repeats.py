"""D43 (metaflow#288): a repeated upload sent an empty body, since the first had read it."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from ckpt import Checkpointer
from ckpt.config import MIB
from ckpt.storage.s3 import S3Storage
from tests.s3.fake import FakeS3, Rule
from tests.s3.proxy import CuttingProxy
from tests.s3.server import SeaweedFS


def hang_up(rule: Rule) -> None:
    rule.hang_up()


def be_busy(rule: Rule) -> None:
    rule.answer(503, "SlowDown")


@pytest.mark.parametrize("fail", [hang_up, be_busy])
def test_d43_a_repeated_put_sends_the_whole_body(
    credentials: None, fail: Callable[[Rule], None]
) -> None:
    data = random.Random(1).randbytes(3 * MIB)
    with FakeS3() as server:
        fail(server.on("PUT", "/k"))
        info = server.storage().create("k", data)
        assert len(server.seen("PUT", "/k")) == 2
        assert server.objects["k"].data == data
        assert (info.size_bytes, info.etag) == (len(data), server.objects["k"].etag)


@pytest.mark.parametrize("fail", [hang_up, be_busy])
def test_d43_a_repeated_part_sends_the_whole_part(
    credentials: None, fail: Callable[[Rule], None]
) -> None:
    data = random.Random(2).randbytes(12 * MIB)
    with FakeS3() as server:
        fail(server.on("PUT", "partNumber=2"))
        with server.storage().writer("k") as out:
            for at in range(0, len(data), 1 << 20):
                out.write(data[at : at + (1 << 20)])
        assert len(server.seen("PUT", "partNumber=2")) == 2
        assert server.objects["k"].data == data


def test_d43_a_body_that_is_cut_on_its_way_is_read_again(
    storage: S3Storage, through: Callable[[str], S3Storage], seaweedfs: SeaweedFS
) -> None:
    data = random.Random(3).randbytes(12 * MIB)
    storage.create("k", data)
    with CuttingProxy(seaweedfs.port) as proxy:
        near = through(proxy.endpoint)
        assert near.stat("k").size_bytes == len(data)
        for length in (4 * MIB, len(data), None):
            proxy.cut_after(2 * MIB, "down")
            assert near.read("k", 0, length) == data[:length]
        assert proxy.cuts == 3


def test_d43_an_upload_that_is_cut_is_sent_again(
    storage: S3Storage, through: Callable[[str], S3Storage], seaweedfs: SeaweedFS
) -> None:
    data = random.Random(4).randbytes(12 * MIB)
    with CuttingProxy(seaweedfs.port) as proxy:
        near = through(proxy.endpoint)
        proxy.cut_after(2 * MIB, "up")
        near.create("small", data[: 4 * MIB])
        proxy.cut_after(2 * MIB, "up")
        near.create("large", data)
        assert proxy.cuts == 2
    assert storage.read("small") == data[: 4 * MIB]
    assert storage.read("large") == data
    assert list(storage.unfinished()) == []


def test_d43_a_compressed_checkpoint_survives_a_repeat(credentials: None) -> None:
    state = {"w": torch.arange(1 << 18) % 7}
    with FakeS3() as server:
        server.on("PUT", ".bin").hang_up()
        with Checkpointer(server.storage()) as checkpointer:
            checkpointer.save(1, state).committed.result(60)
        sent = server.seen("PUT", ".bin")
        assert len(sent) == 2
        assert len(sent[1].body) == len(sent[0].body) < state["w"].nbytes / 2
        found = {"w": torch.zeros_like(state["w"])}
        with Checkpointer(server.storage()) as checkpointer:
            checkpointer.restore(found)
        assert torch.equal(found["w"], state["w"])
