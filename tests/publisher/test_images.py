"""Tables in memory: several files as one image, checked, cached by digest."""

from __future__ import annotations

import fcntl
import gc
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ckpt.digest import digest_of
from ckpt.errors import BadInputError, CorruptError, StorageError
from ckpt.schema import FeatureSpec, LookupSpec
from ckpt.storage import LocalStorage, MemoryStorage, Storage
from ckpt.types import FileEntry
from publisher.images import Placed, TableCache, map_files, place_tables, table_files
from publisher.loading import load_version
from publisher.predictor import Predictor
from publisher.records import PublishedTable, TablePart, TableStats, VersionManifest
from publisher.registry import Registry
from tests.faults import FaultyStorage
from tests.publisher.conftest import Bench, make_bench
from tests.publisher.packed_tables import pack
from tests.publisher.tiny import GOLDEN, description, flip_byte, stamped_tensors

LONG = torch.arange(600 * 4).reshape(600, 4).float()
SHORT = torch.tensor([[0.0, 255.0, 1.0], [7.0, 7.0, 7.0]])
STATS = TableStats(0.0, 0.0, (), 0.0, 0.0, 0.0, 0.0)
DESCRIBED = description(
    lookups=(
        LookupSpec(
            "lk", (FeatureSpec("a", "long", 600, 4, "sum"), FeatureSpec("b", "short", 2, 3, "sum"))
        ),
    )
)


def two_files(storage: Storage, prefix: str = "") -> VersionManifest:
    """A long table in two files, and a short one behind it."""
    long, short = pack(LONG, "fp32")[0], pack(SHORT, "int8_rowwise")[0]
    rest = long[8192:]
    gap = bytes(-len(rest) % 128)
    content = {"tables-00000.bin": long[:8192], "tables-00001.bin": rest + gap + short}
    for name, data in content.items():
        storage.put(f"{prefix}{name}", data)
    storage.put(f"{prefix}dense.safetensors", b"other")
    files = [FileEntry(n, len(d), digest_of(d)) for n, d in content.items()]
    parts = (
        TablePart("tables-00000.bin", 0, 0, 512),
        TablePart("tables-00001.bin", 0, 512, 88),
    )
    tables = (
        PublishedTable("long", 600, 4, "fp32", 16, parts, STATS),
        PublishedTable(
            "short",
            2,
            3,
            "int8_rowwise",
            7,
            (TablePart("tables-00001.bin", len(rest + gap), 0, 2),),
            STATS,
        ),
    )
    made = make_manifest()
    return replace(
        made, files=(files[1], FileEntry("dense.safetensors", 5, ""), files[0]), tables=tables
    )


def make_manifest() -> VersionManifest:
    from publisher.records import Source

    return VersionManifest(
        version=1,
        parent=None,
        source=Source("run", 1, 1, "d"),
        dense_step=1,
        table_step=1,
        id_map_step=1,
        saved_at_s=0.0,
        committed_at_s=0.0,
        event_time_s=None,
        model="m",
        description_id="d1",
        files=(),
        tables=(),
        gates=(),
        published_by="t",
        lease_epoch=0,
        started_at_s=0.0,
        published_at_s=0.0,
    )


def read_back(image: torch.Tensor, placed: Placed) -> None:
    at, _ = placed["long"]
    assert torch.equal(image[at : at + 9600].view(torch.float32).reshape(600, 4), LONG)
    at, _ = placed["short"]
    assert image[at : at + 14].numpy().tobytes() == pack(SHORT, "int8_rowwise")[0]


@pytest.mark.parametrize("kind", ["local", "object store", "cached object store"])
def test_files_lie_side_by_side_and_outlive_their_names(kind: str, tmp_path: Path) -> None:
    storage: Storage = LocalStorage(tmp_path / "root") if kind == "local" else MemoryStorage()
    manifest = two_files(storage)
    cache = TableCache(tmp_path / "cache" if kind.startswith("cached") else None)
    image = cache.map(storage, [(f.key, f) for f in table_files(manifest)])
    placed = place_tables(manifest, DESCRIBED)
    read_back(image, placed)
    for entry in manifest.files:
        storage.delete(entry.key)
    cache.keep_only(storage, [])
    read_back(image, placed)
    assert [p for p in (tmp_path / "cache").rglob("*") if p.is_file()] == []


def test_the_memory_goes_with_the_last_tensor(tmp_path: Path) -> None:
    def mapped() -> int:
        return Path("/proc/self/maps").read_text().count(str(tmp_path))

    (tmp_path / "f").write_bytes(bytes(5000))
    image = map_files([tmp_path / "f"], [5000])
    part = image[4000:]
    del image
    gc.collect()
    assert int(part.sum()) == 0
    assert mapped() == 1
    del part
    gc.collect()
    assert mapped() == 0


def test_what_cannot_be_mapped_is_named(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(bytes(4096))
    with pytest.raises(CorruptError, match=r"/f: is not of 4000 bytes"):
        map_files([tmp_path / "f"], [4000])
    with pytest.raises(StorageError, match=r"/gone: can't be opened: No such file"):
        map_files([tmp_path / "gone"], [4096])
    assert map_files([], []).numel() == 0


def change(manifest: VersionManifest, table: int, **changes: object) -> VersionManifest:
    tables = list(manifest.tables)
    tables[table] = replace(tables[table], **changes)  # type: ignore[arg-type]
    return replace(manifest, tables=tuple(tables))


@pytest.mark.parametrize(
    ("table", "changes", "why"),
    [
        (0, {"parts": (TablePart("tables-00000.bin", 0, 0, 600),)}, "long: rows up to byte 9600"),
        (0, {"parts": (TablePart("tables-00000.bin", 0, 0, 512),)}, "hold 512 of 600 rows"),
        (
            0,
            {"parts": (TablePart("tables-00000.bin", 0, 0, 511), TablePart("tables-00001.bin", 0, 511, 88))},
            "row 511 should come next, at byte 8176",
        ),
        (
            0,
            {"parts": (TablePart("tables-00001.bin", 0, 512, 88), TablePart("tables-00000.bin", 0, 0, 512))},
            "row 0 should come next",
        ),
        (0, {"parts": ()}, "hold 0 of 600 rows"),
        (0, {"row_bytes": 15}, "rows of 15 bytes, but 4 columns in fp32 have 16"),
        (0, {"format": "fp16"}, "rows of 16 bytes, but 4 columns in fp16 have 8"),
        (1, {"parts": (TablePart("tables-00001.bin", 1415, 0, 2),)}, "up to byte 1429"),
        (1, {"parts": (TablePart("tables-00001.bin", 1400, 0, 2),)}, "bytes 9592 to 9606"),
        (1, {"parts": (TablePart("tables-00009.bin", 0, 0, 2),)}, r"tables-00009\.bin, which has -1"),
        (1, {"rows": 3}, "tables of its manifest aren't those of its description"),
        (1, {"fqn": "long"}, "tables of its manifest aren't those of its description"),
    ],
)  # fmt: skip
def test_a_layout_that_lookups_could_not_trust_is_refused(
    table: int, changes: dict[str, object], why: str
) -> None:
    manifest = change(two_files(MemoryStorage()), table, **changes)
    with pytest.raises(CorruptError, match=why):
        place_tables(manifest, DESCRIBED)


def test_a_file_must_end_with_a_page() -> None:
    manifest = two_files(MemoryStorage())
    first = replace(manifest.files[2], size_bytes=8200)
    with pytest.raises(CorruptError, match=r"before tables-00001\.bin ends inside a page"):
        place_tables(replace(manifest, files=(*manifest.files[:2], first)), DESCRIBED)


def publish(bench: Bench, *steps: int) -> None:
    for step in steps:
        bench.run.commit(step, stamped_tensors(step))
        bench.publish(step)


def test_d59_a_corrupt_cache_is_fetched_again(trust, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """The cache is keyed by digest: no restart takes a stale copy, and a rotten one is replaced."""
    bench = make_bench(MemoryStorage(), trust)
    publish(bench, 1)
    faulty = FaultyStorage(bench.run.root)
    cache = tmp_path / "cache"

    def start() -> Predictor:
        faulty.calls.clear()
        return Predictor(Registry(faulty), trust=trust, cache=cache)

    def fetched() -> list[str]:
        return [k for call, k in faulty.calls if call == "read" and k.endswith(".bin")]

    key = bench.registry.key(1, "tables-00000.bin")
    start()
    assert fetched() == [key]
    start()
    assert fetched() == []  # a restart takes what lies there, digested again
    [kept] = [p for p in cache.rglob("*") if p.is_file()]
    kept.write_bytes(bytes(kept.stat().st_size))
    assert start().predict(GOLDEN).outputs["user_stamp"].tolist() == [1, 2, 0, 1]
    assert fetched() == [key]
    publish(bench, 2)  # while the host is down
    assert start().version == 2
    flip_byte(bench.run.root, bench.registry.key(2, "tables-00000.bin"), 3)
    for path in cache.rglob("*.bin"):
        path.write_bytes(bytes(path.stat().st_size))
    with pytest.raises(CorruptError, match="digest is"):
        start()  # the store's own copy is bad: no loop


def test_the_cache_keeps_only_what_is_loaded(trust, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    bench = make_bench(MemoryStorage(), trust)
    publish(bench, 1)
    predictor = Predictor(bench.registry, trust=trust, cache=tmp_path / "cache")
    for step in (2, 3, 4):
        publish(bench, step)
        predictor.refresh()
    assert len([p for p in (tmp_path / "cache").rglob("*") if p.is_file()]) == 2
    assert sorted(predictor.loaded) == [3, 4]


@pytest.mark.parametrize(
    "digest",
    ["xxh3-128:../../../outside", "xxh3-128:/outside", "../x:00", "xxh3-128", "xxh3-128:00\n", ""],
)
def test_a_digest_never_leads_out_of_the_cache(digest: str, tmp_path: Path) -> None:
    storage = MemoryStorage()
    entry = replace(two_files(storage).files[0], digest=digest)
    cache = TableCache(tmp_path / "a" / "b" / "cache")
    with pytest.raises(CorruptError, match="is no digest"):
        cache.map(storage, [(entry.key, entry)])
    with pytest.raises(CorruptError, match="is no digest"):
        cache.keep_only(storage, [digest])
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == []


@pytest.mark.parametrize("name", ["../../outside.bin", "/outside.bin", "a/../../tables-00000.bin"])
def test_a_manifests_file_names_never_lead_out_of_its_version(bench: Bench, name: str) -> None:
    """Nor those of a table's parts: they only choose among the files."""
    publish(bench, 1)
    manifest = bench.registry.version(1)
    listed = replace(manifest, files=(*manifest.files, FileEntry(name, 3, "xxh3-128:00")))
    with pytest.raises(BadInputError, match="storage key"):
        load_version(bench.registry, listed, bench.programs)
    part = replace(manifest.tables[0].parts[0], file=name)
    with pytest.raises(CorruptError, match="which has -1 bytes"):
        load_version(bench.registry, change(manifest, 0, parts=(part,)), bench.programs)


def test_two_registries_of_a_bucket_share_no_folder(tmp_path: Path) -> None:
    storage = MemoryStorage()
    entry = two_files(storage, "a/").files[0]
    two_files(storage, "b/")
    caches = {p: TableCache(tmp_path, p) for p in ("a/", "b/")}
    for prefix, cache in caches.items():
        cache.map(storage, [(f"{prefix}{entry.key}", entry)])
    caches["a/"].keep_only(storage, [])
    assert len(list(tmp_path.rglob("*.bin"))) == 1


def test_what_a_killed_download_left_is_swept_and_what_goes_on_is_not(tmp_path: Path) -> None:
    """A download is known by its lock, which ends with its process."""
    storage = MemoryStorage()
    entry = two_files(storage).files[0]
    cache = TableCache(tmp_path)
    cache.map(storage, [(entry.key, entry)])
    [kept] = tmp_path.rglob("*.bin")
    stale, busy = kept.with_name("1.part"), kept.with_name("2.part")
    stale.write_bytes(b"x")
    with open(busy, "wb") as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        cache.map(storage, [(entry.key, entry)])
        assert sorted(kept.parent.iterdir()) == sorted([busy, kept])
    cache.map(storage, [(entry.key, entry)])
    assert list(kept.parent.iterdir()) == [kept]
