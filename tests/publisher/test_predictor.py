"""Loading, answering, and swapping whole."""

from __future__ import annotations

import random
import threading
import time
from dataclasses import replace

import pytest
import safetensors.torch
import torch

from ckpt.digest import digest_of
from ckpt.errors import BadInputError, CorruptError, NotFoundError
from ckpt.storage import LocalStorage, MemoryStorage, Storage
from ckpt.trust import TrustList
from ckpt.types import FileEntry
from publisher import keys
from publisher.pointer import Reason
from publisher.predictor import Predictor
from publisher.records import Pointer, encode
from publisher.registry import Registry
from tests.faults import FaultyStorage
from tests.publisher.conftest import Bench, make_bench
from tests.publisher.tiny import (
    GENRE,
    GOLDEN,
    USER,
    flip_byte,
    random_tensors,
    request,
    stamped_tensors,
)

WHY = Reason("op@here", "test")


def open_predictor(bench: Bench, version: int | None = None) -> Predictor:
    return Predictor(bench.registry, version, trust=bench.run.trust)


def publish_stamped(bench: Bench, *steps: int) -> None:
    for step in steps:
        bench.run.commit(step, stamped_tensors(step))
        bench.publish(step)


def test_answers_are_the_models(bench: Bench) -> None:
    tensors = random_tensors()
    bench.run.commit(1, tensors)
    bench.publish(1)
    asked = request([[3, 50, 7], [], [-1]], [[0, 1, 7], [6], []])
    got = open_predictor(bench).predict(asked)
    user, genre = tensors[USER], tensors[GENRE]
    pooled = torch.zeros(3, 6)
    pooled[0, :4] = user[3] + user[7]
    pooled[0, 4:] = (genre[0] + genre[1]) / 3
    pooled[1, 4:] = genre[6]
    logits = torch.cat([asked["dense"], pooled], 1) @ tensors["model.over.weight"].T
    score = torch.sigmoid((logits + tensors["model.over.bias"]) / 100).squeeze(1)
    torch.testing.assert_close(got.outputs["score"], score, rtol=0, atol=1e-3)
    torch.testing.assert_close(got.outputs["user_stamp"], pooled[:, 0], rtol=0, atol=0.02)
    assert (got.version, got.unknown_ids) == (1, {"user": 2, "genre": 1})
    assert list(got.outputs) == ["score", "user_stamp", "genre_stamp", "dense_stamp"]


def test_unknown_ids_are_counted_over_requests(bench: Bench) -> None:
    publish_stamped(bench, 1)
    predictor = open_predictor(bench)
    for _ in range(3):
        predictor.predict(request([[99, 0]], [[0]]))
    predictor.predict(request([[0]], [[-5, -6]]))
    assert predictor.unknown_ids == {"user": 3, "genre": 2}


def test_a_malformed_request_is_refused_and_the_next_is_answered(bench: Bench) -> None:
    publish_stamped(bench, 1)
    predictor = open_predictor(bench)
    with pytest.raises(BadInputError, match="missing dense"):
        predictor.predict({n: t for n, t in GOLDEN.items() if n != "dense"})
    assert predictor.predict(GOLDEN).version == 1


def test_follows_the_pointer_there_and_back(bench: Bench) -> None:
    publish_stamped(bench, 1)
    predictor = open_predictor(bench)
    assert not predictor.refresh()
    publish_stamped(bench, 2, 3)
    assert predictor.version == 1
    assert predictor.refresh()
    assert predictor.version == 3
    bench.registry.rollback(None, WHY)
    assert predictor.refresh()
    assert predictor.predict(GOLDEN).outputs["dense_stamp"].tolist() == [2.0] * 4


def test_a_named_version_stays(bench: Bench) -> None:
    publish_stamped(bench, 1, 2)
    predictor = open_predictor(bench, 1)
    assert not predictor.refresh()
    assert predictor.version == 1
    with pytest.raises(NotFoundError, match="no version 7 here; the newest are: 1, 2"):
        open_predictor(bench, 7)


def test_d59_a_restarted_host_asks_the_pointer(bench: Bench) -> None:
    publish_stamped(bench, 1)
    assert open_predictor(bench).version == 1
    publish_stamped(bench, 2)
    assert open_predictor(bench).version == 2
    bench.registry.rollback(None, WHY)
    assert open_predictor(bench).version == 1


def test_nothing_to_load(bench: Bench, tmp_path) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(NotFoundError, match="no version is live yet"):
        open_predictor(bench)
    with pytest.raises(NotFoundError, match="no such folder"):
        Predictor(str(tmp_path / "nowhere"))
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInputError, match="is a file"):
        Predictor(tmp_path / "file")


def test_by_path(local_bench: Bench) -> None:
    publish_stamped(local_bench, 1)
    assert isinstance(local_bench.run.root, LocalStorage)
    predictor = Predictor(local_bench.run.root.url, trust=local_bench.run.trust)
    assert predictor.predict(GOLDEN).version == 1


def test_an_untrusted_program_is_not_loaded(bench: Bench) -> None:
    publish_stamped(bench, 1, 2)
    predictor = open_predictor(bench, None)
    bench.registry.rollback(None, WHY)
    bench.run.trust.path.write_text("# trust taken back\n")
    with pytest.raises(BadInputError, match="is not trusted on this host"):
        predictor.refresh()
    assert predictor.predict(GOLDEN).version == 2


def files_of(bench: Bench, version: int) -> list[str]:
    return [f.key for f in bench.registry.version(version).files]


@pytest.mark.parametrize("wrapped", [False, True], ids=["mapped", "copied"])
def test_d55_one_flipped_bit_anywhere_is_refused(tmp_path, trust: TrustList, wrapped: bool) -> None:  # type: ignore[no-untyped-def]
    local = LocalStorage(tmp_path / "root")
    storage: Storage = FaultyStorage(local) if wrapped else local
    bench = make_bench(storage, trust)
    publish_stamped(bench, 1)
    predictor = open_predictor(bench)
    publish_stamped(bench, 2)
    for name in files_of(bench, 2):
        key = bench.registry.key(2, name)
        good = local.read(key)
        flip_byte(local, key, len(good) // 2)
        with pytest.raises((CorruptError, BadInputError), match=r"digest|checksum|not trusted"):
            predictor.refresh()
        assert predictor.predict(GOLDEN).outputs["dense_stamp"].tolist() == [1.0] * 4
        local.put(key, good)
    assert predictor.refresh()
    assert predictor.predict(GOLDEN).outputs["user_stamp"].tolist() == [2.0, 4.0, 0.0, 2.0]


@pytest.mark.parametrize("order", ["manifest first", "manifest last", "one short"])
def test_d55_a_slow_copy_is_loaded_when_it_is_whole(trust: TrustList, order: str) -> None:
    bench = make_bench(MemoryStorage(), trust)
    publish_stamped(bench, 1, 2)
    target = MemoryStorage()
    copied = Registry(target)

    def copy(key: str, cut: int = 0) -> None:
        data = bench.run.root.read(key)
        target.put(key, data[: len(data) - cut])

    def copy_version(number: int) -> list[str]:
        prefix = f"serving/{keys.version_prefix(number)}"
        return [o.key for o in bench.run.root.list(prefix)]

    for key in copy_version(1):
        copy(key)
    first = bench.registry.history()[0]
    target.put("serving/live.json", encode(Pointer(first, 0, (), 0)))
    predictor = Predictor(copied, trust=trust)
    target.put("serving/live.json", bench.run.root.read("serving/live.json"))
    names = copy_version(2)
    manifest = f"serving/{keys.version_key(2, keys.MANIFEST)}"
    names.remove(manifest)
    names = [manifest, *names] if order == "manifest first" else [*names, manifest]
    for key in names:
        with pytest.raises((CorruptError, NotFoundError)):
            predictor.refresh()
        assert predictor.predict(GOLDEN).version == 1
        if order == "one short":
            copy(key, cut=2)
            with pytest.raises((CorruptError, NotFoundError)):
                predictor.refresh()
        copy(key)
    assert predictor.refresh()
    assert predictor.predict(GOLDEN).version == 2


def test_a_refused_version_is_read_again_only_when_it_changed(trust: TrustList) -> None:
    memory = MemoryStorage()
    bench = make_bench(memory, trust)
    publish_stamped(bench, 1)
    faulty = FaultyStorage(memory)
    predictor = Predictor(Registry(faulty), trust=trust)
    publish_stamped(bench, 2)
    key = bench.registry.key(2, keys.TABLES)
    good = memory.read(key)
    flip_byte(memory, key, 0)
    with pytest.raises(CorruptError, match="digest"):
        predictor.refresh()
    before = len(faulty.calls)
    with pytest.raises(CorruptError, match="digest"):
        predictor.refresh()
    assert ("read", key) not in faulty.calls[before:]
    memory.put(key, good)
    assert predictor.refresh()
    assert predictor.version == 2


@pytest.mark.parametrize("damage", ["outside", "rows"])
def test_a_manifest_that_points_outside_its_file_is_refused(bench: Bench, damage: str) -> None:
    """The lookup reads memory by these numbers and checks nothing."""
    publish_stamped(bench, 1)
    manifest = bench.registry.version(1)
    table = manifest.tables[0]
    part = table.parts[0]
    bad = {
        "outside": replace(table, parts=(replace(part, offset=1 << 20),)),
        "rows": replace(table, rows=51, parts=(replace(part, rows=51),)),
    }[damage]
    changed = replace(manifest, tables=(bad, *manifest.tables[1:]))
    bench.run.root.put(bench.registry.key(1, keys.MANIFEST), encode(changed))
    with pytest.raises(CorruptError, match=r"up to byte|aren't those of its description"):
        Predictor(Registry(bench.run.root), trust=bench.run.trust)


def test_d56_hot_swap_under_load(local_bench: Bench) -> None:
    """Twenty swaps while threads ask: no error, every answer wholly of one version, none backwards."""
    publish_stamped(local_bench, 1)
    predictor = open_predictor(local_bench)
    stop = threading.Event()
    errors: list[Exception] = []
    answered = [0] * 3

    def ask(thread: int) -> None:
        rng, newest = random.Random(thread), 0
        try:
            while not stop.wait(0.001):
                batch = rng.randint(1, 8)
                bags = [[rng.randrange(50)] for _ in range(batch)]
                got = predictor.predict(request(bags, [[b[0] % 7] for b in bags]))
                want = [float(got.version)] * batch
                for name in ("user_stamp", "genre_stamp", "dense_stamp"):
                    assert got.outputs[name].tolist() == want, (name, got)
                assert got.version >= newest
                newest = got.version
                answered[thread] += 1
        except Exception as e:
            errors.append(e)

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(3)]
    for t in threads:
        t.start()
    try:
        for step in range(2, 22):
            publish_stamped(local_bench, step)
            assert predictor.refresh()
            wait_for_answers(answered, errors)
    finally:
        stop.set()
        for t in threads:
            t.join()
    assert errors == []
    assert predictor.version == 21


def wait_for_answers(answered: list[int], errors: list[Exception]) -> None:
    """Until there is another answer, or an error."""
    before, deadline = sum(answered), time.monotonic() + 30
    while sum(answered) == before and not errors:
        assert time.monotonic() < deadline
        threading.Event().wait(0.001)


def test_requests_in_flight_keep_their_version(local_bench: Bench) -> None:
    publish_stamped(local_bench, 1)
    predictor = open_predictor(local_bench)
    begun = predictor.current
    publish_stamped(local_bench, 2)
    predictor.refresh()
    for version in (1, 2):  # even when its files are gone meanwhile
        for name in files_of(local_bench, version):
            local_bench.run.root.delete(local_bench.registry.key(version, name))
    assert predictor.predict_with(begun, GOLDEN).outputs["user_stamp"].tolist() == [1, 2, 0, 1]
    assert predictor.predict(GOLDEN).outputs["user_stamp"].tolist() == [2, 4, 0, 2]


def test_the_previous_version_answers_at_once_after_a_rollback(bench: Bench) -> None:
    """It stays loaded: nothing of it is read again, and its files may be gone."""
    publish_stamped(bench, 1)
    memory = bench.run.root
    faulty = FaultyStorage(memory)
    predictor = Predictor(Registry(faulty), trust=bench.run.trust)
    first = predictor.current
    publish_stamped(bench, 2, 3)
    predictor.refresh()
    assert sorted(predictor.loaded) == [1, 3]
    bench.registry.rollback(1, WHY)
    faulty.calls.clear()
    assert predictor.refresh()
    assert predictor.current is first
    assert {key for _, key in faulty.calls} == {"serving/live.json"}
    assert sorted(predictor.loaded) == [1, 3]
    assert predictor.loaded[3].predict(GOLDEN).version == 3
    bench.registry.rollback(3, WHY)
    assert predictor.refresh()
    assert predictor.version == 3


def move(bench: Bench, **changes: object) -> None:
    """Put another move where the pointer is."""
    live = bench.registry.live()
    assert live is not None
    moved = replace(live, **changes)  # type: ignore[arg-type]
    bench.run.root.put("serving/live.json", encode(Pointer(moved, 0, (), 0)))


def test_a_canary_is_followed_while_there_is_one(bench: Bench) -> None:
    publish_stamped(bench, 1, 2)
    move(bench, to_version=1, canary=2, sequence=3)
    canary = Predictor(bench.registry, follow="canary", trust=bench.run.trust)
    live = open_predictor(bench)
    assert (canary.version, live.version) == (2, 1)
    move(bench, canary=None, sequence=4)
    assert canary.refresh()
    assert not live.refresh()
    assert (canary.version, live.version) == (1, 1)


def test_an_old_copy_of_the_pointer_moves_nothing_back(bench: Bench) -> None:
    publish_stamped(bench, 1)
    old = bench.run.root.read("serving/live.json")
    publish_stamped(bench, 2)
    predictor = open_predictor(bench)
    bench.run.root.put("serving/live.json", old)
    assert not predictor.refresh()
    assert predictor.version == 2


def test_a_version_that_answers_otherwise_here_is_not_swapped_in(bench: Bench) -> None:
    """Its files are whole, but its golden request isn't answered as it was when it was published."""
    publish_stamped(bench, 1)
    predictor = Predictor(Registry(bench.run.root), trust=bench.run.trust)
    publish_stamped(bench, 2)
    key = bench.registry.key(2, keys.REFERENCE)
    wrong = {n: t + 0.02 for n, t in safetensors.torch.load(bench.run.root.read(key)).items()}
    data = safetensors.torch.save(wrong)
    manifest = bench.registry.version(2)
    files = tuple(
        FileEntry(f.key, len(data), digest_of(data)) if f.key == keys.REFERENCE else f
        for f in manifest.files
    )
    bench.run.root.put(key, data)
    bench.run.root.put(bench.registry.key(2, keys.MANIFEST), encode(replace(manifest, files=files)))
    with pytest.raises(CorruptError, match=r"golden request is 0\.02 away from fp32"):
        predictor.refresh()
    with pytest.raises(CorruptError, match=r"golden request is 0\.02 away"):
        predictor.refresh()
    assert predictor.version == 1


def test_d57_parts_of_two_versions_are_refused(bench: Bench) -> None:
    """A manifest must be of one step; a half-replaced version keeps the old one, label and weights."""
    publish_stamped(bench, 1)
    predictor = open_predictor(bench)
    publish_stamped(bench, 2)
    tables = bench.run.root.read(bench.registry.key(2, keys.TABLES))
    bench.run.root.put(
        bench.registry.key(2, keys.TABLES),
        bench.run.root.read(bench.registry.key(1, keys.TABLES)),
    )
    with pytest.raises(CorruptError, match="digest is"):
        predictor.refresh()
    answer = predictor.predict(GOLDEN)
    assert (answer.version, answer.outputs["user_stamp"].tolist()) == (1, [1, 2, 0, 1])
    bench.run.root.put(bench.registry.key(2, keys.TABLES), tables)
    assert predictor.refresh()
    assert predictor.predict(GOLDEN).outputs["user_stamp"].tolist() == [2, 4, 0, 2]
    mixed = replace(bench.registry.version(2), table_step=1)
    bench.run.root.put(bench.registry.key(2, keys.MANIFEST), encode(mixed))
    with pytest.raises(
        CorruptError, match="its parts don't belong together: .* the tables of step 1"
    ):
        Predictor(Registry(bench.run.root), trust=bench.run.trust)
