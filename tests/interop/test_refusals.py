"""`ckpt export` and `ckpt import` on bad input: one clear line, the class's exit code, nothing left."""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import shutil
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from ckpt import Checkpointer, foreign
from ckpt.catalog import Catalog
from ckpt.cli import cli
from ckpt.command import run_command
from ckpt.errors import BadInputError, ConflictError, CorruptError, StorageError
from ckpt.foreign.metadata import parse_metadata
from ckpt.importing import Target, import_checkpoint
from ckpt.storage import LocalStorage, open_storage
from tests.faults import FaultyStorage
from tests.interop.states import FORMATS, contents, exported, imported, saved

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

Make = Callable[[Path], Path]
STATE = {"w": torch.arange(300.0).view(100, 3), "n": {"step": 3, "t": (1, "x")}}


class Evil:
    """Unpickling it makes the folder `marker` in the current one."""

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, ("marker",)


class Config:
    """Harmless, but not a plain value."""


def dcp_of(folder: Path, state: dict[str, Any]) -> Path:
    dcp.save(state, checkpoint_id=folder)
    return folder


def stock(folder: Path) -> Path:
    return dcp_of(folder, STATE)


def torch_of(path: Path, state: Any, **kwargs: Any) -> Path:
    torch.save(state, path, **kwargs)
    return path


def edited(folder: Path, edit: Callable[[Metadata], object]) -> Path:
    """The stock folder with its metadata changed."""
    metadata = dcp.FileSystemReader(stock(folder)).read_metadata()
    edit(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    return folder


def with_item(folder: Path, key: str, item: object) -> Path:
    """The stock folder with the bytes of one item replaced by torch.save's of `item`."""
    metadata = dcp.FileSystemReader(stock(folder)).read_metadata()
    stream = io.BytesIO()
    torch.save(item, stream)
    (folder / "crafted").write_bytes(stream.getvalue())
    for index, info in metadata.storage_data.items():
        if index.fqn == key:
            info.relative_path, info.offset, info.length = "crafted", 0, len(stream.getvalue())
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    return folder


def cut(path: Path, size_bytes: int | None = None) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2 if size_bytes is None else size_bytes])


def cut_file(make: Make) -> Make:
    def made(path: Path) -> Path:
        cut(make(path))
        return path

    return made


def cut_in(folder: Path, name: str) -> Path:
    cut(stock(folder) / name)
    return folder


def without(folder: Path, name: str) -> Path:
    (stock(folder) / name).unlink()
    return folder


def safetensors_of(path: Path, header: object, data: bytes = b"") -> Path:
    entries = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(entries).to_bytes(8, "little") + entries + data)
    return path


def bytes_of(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def zip_of(path: Path) -> Path:
    with zipfile.ZipFile(path, "w") as z:
        z.writestr("letter/text", "hello")
    return path


def deep(path: Path) -> Path:
    """A torch file of dicts in dicts, deeper than Python's stack."""
    depth = 5000
    with (
        zipfile.ZipFile(torch_of(path.with_name("flat"), {})) as flat,
        zipfile.ZipFile(path, "w") as z,
    ):
        for name in flat.namelist():
            data = flat.read(name)
            if name.endswith("data.pkl"):
                data = b"\x80\x02" + b"}X\x01\0\0\0d" * depth + b"N" + b"s" * depth + b"."
            z.writestr(name, data)
    return path


def swap_path(m: Metadata, path: str) -> None:
    next(iter(m.storage_data.values())).relative_path = path


def swap_dtype(m: Metadata, dtype: torch.dtype) -> None:
    m.state_dict_metadata["w"].properties.dtype = dtype  # type: ignore[union-attr]


def swap_chunks(m: Metadata, *boxes: tuple[tuple[int, int], tuple[int, int]]) -> None:
    """Claim that the one item of `w` is these boxes."""
    (info,) = (i for x, i in m.storage_data.items() if x.fqn == "w")
    m.state_dict_metadata["w"].chunks = [  # type: ignore[union-attr]
        ChunkStorageMetadata(torch.Size(o), torch.Size(s)) for o, s in boxes
    ]
    for offsets, _ in boxes:
        m.storage_data[MetadataIndex("w", offsets)] = info


def extension(m: Metadata) -> None:
    next(iter(m.storage_data.values())).transform_descriptors = ["stream.zstd"]


def double_path(m: Metadata) -> None:
    m.planner_data["w"] = ("n",)


MALICIOUS: dict[str, tuple[Make, int, str]] = {
    "torch file": (lambda p: torch_of(p, {"w": Evil()}), 2, "holds a posix.mkdir"),
    "old torch file": (
        lambda p: torch_of(p, {"w": Evil()}, _use_new_zipfile_serialization=False),
        2,
        "holds a posix.mkdir",
    ),
    "bare pickle": (lambda p: bytes_of(p, pickle.dumps(Evil())), 2, "holds a posix.mkdir"),
    "bare old pickle": (lambda p: bytes_of(p, pickle.dumps(Evil(), 2)), 2, "holds a posix.mkdir"),
    "metadata of dcp": (
        lambda p: edited(p, lambda m: setattr(m, "planner_data", Evil())),
        2,
        r".metadata: holds a posix.mkdir",
    ),
    "metadata that is something else": (
        lambda p: bytes_of(stock(p) / ".metadata", pickle.dumps(Evil())).parent,
        2,
        r".metadata: holds a posix.mkdir",
    ),
    "object of dcp": (lambda p: with_item(p, "n.step", Evil()), 2, "n.step: holds a posix.mkdir"),
    "tensor of dcp": (lambda p: with_item(p, "w", Evil()), 2, "w: holds a posix.mkdir"),
    "safetensors": (
        lambda p: safetensors_of(
            p, {"__metadata__": {"sidestage.values": json.dumps({"$": "exec", "v": "mkdir"})}}
        ),
        5,
        "not a value of this format",
    ),
}

BAD: dict[str, tuple[Make, int, str]] = {
    "nothing there": (lambda p: p / "none", 3, "no such file or folder"),
    "an empty folder": (
        lambda p: (p.mkdir(), p)[1],
        2,
        "not a DCP checkpoint: it has no .metadata",
    ),
    "an empty file": (lambda p: bytes_of(p, b""), 2, "neither a safetensors nor a torch.save file"),
    "a text": (lambda p: bytes_of(p, b"hello world, this is text"), 2, "neither a safetensors nor"),
    "another zip": (zip_of, 2, "a zip archive, but not one of torch.save"),
    "a run of ours": (
        lambda p: (saved(p, STATE), p)[1],
        2,
        "is the root of a Sidestage run already",
    ),
    "a save without end": (lambda p: without(p, ".metadata"), 2, "a DCP save that never finished"),
    "a rank for itself": (
        lambda p: (dcp.save({"n": 1}, checkpoint_id=p, use_collectives=False), p)[1],
        2,
        "saved with use_collectives=False",
    ),
    "a class in torch": (lambda p: torch_of(p, {"c": Config()}), 2, "holds a .*Config, which only"),
    "a class in dcp": (
        lambda p: dcp_of(p, {"w": torch.ones(1), "c": Config()}),
        2,
        ": c: holds a .*Config",
    ),
    "values without end": (deep, 2, "nested too deep"),
    "a bare tensor": (lambda p: torch_of(p, torch.ones(1)), 2, "holds a Tensor; only a dict"),
    "a sparse tensor": (
        lambda p: torch_of(p, {"a": {"s": torch.eye(2).to_sparse()}}),
        2,
        r"a\.s: layout torch.sparse_coo",
    ),
    "two names": (
        lambda p: torch_of(p, {"a.b": torch.ones(1), "a": {"b": torch.ones(1)}}),
        2,
        r"a\.b: two tensors have this key",
    ),
    "a torch file cut off": (cut_file(lambda p: torch_of(p, STATE)), 5, "damaged or cut off"),
    "an old torch file cut off": (
        cut_file(lambda p: torch_of(p, STATE, _use_new_zipfile_serialization=False)),
        5,
        "damaged or cut off",
    ),
    "a safetensors file cut off": (
        cut_file(lambda p: (save_file({"w": STATE["w"]}, p), p)[1]),  # type: ignore[dict-item]
        5,
        "not a whole safetensors file",
    ),
    "an unknown dtype in safetensors": (
        lambda p: safetensors_of(
            p, {"w": {"dtype": "F8_E8M0", "shape": [2], "data_offsets": [0, 2]}}, b"\0\0"
        ),
        2,
        "w: dtype F8_E8M0 can't be stored",
    ),
    "values that name what isn't there": (
        lambda p: safetensors_of(
            p, {"__metadata__": {"sidestage.values": json.dumps({"$": "tensor", "v": "x"})}}
        ),
        5,
        "name x, which isn't in it",
    ),
    "metadata cut off": (lambda p: cut_in(p, ".metadata"), 5, ".metadata: not a whole pickle"),
    "a data file cut off": (
        lambda p: cut_in(p, "__0_0.distcp"),
        5,
        r"__0_0\.distcp: has \d+ bytes",
    ),
    "a data file gone": (
        lambda p: without(p, "__0_0.distcp"),
        5,
        r"__0_0\.distcp: the metadata lists this file but it is gone",
    ),
    "a sidecar of another": (
        lambda p: (shutil.copy(sidecar_of(p), dcp_of(p, {"x": 1})), p)[1],
        5,
        "isn't about this checkpoint",
    ),
    "a damaged sidecar": (
        lambda p: (cut(sidecar_of(p)), p.with_name("other"))[1],
        5,
        "sidestage.json",
    ),
    "a dtype of dcp that isn't stored": (
        lambda p: edited(p, lambda m: swap_dtype(m, torch.bits8)),
        2,
        "names torch.bits8, which is no dtype",
    ),
    "a path out of the folder": (
        lambda p: edited(p, lambda m: swap_path(m, "../secret")),
        2,
        "'../secret' is no file name inside",
    ),
    "an extension": (lambda p: edited(p, extension), 2, "stored through an extension of DCP"),
    "a hole": (
        lambda p: edited(p, lambda m: swap_chunks(m, ((0, 0), (99, 3)))),
        5,
        "w: its pieces hold 297 of 300 elements",
    ),
    "an overlap": (
        lambda p: edited(p, lambda m: swap_chunks(m, ((0, 0), (50, 3)), ((49, 0), (50, 3)))),
        5,
        r"w: the pieces at \(0, 0\) and \(49, 0\) overlap",
    ),
    "a piece outside": (
        lambda p: edited(p, lambda m: swap_chunks(m, ((1, 0), (100, 3)))),
        5,
        "passes its shape",
    ),
    "a piece of another shape": (
        lambda p: with_item(p, "w", torch.zeros(3, 100)),
        5,
        r"holds float32 \[3, 100\], the metadata says float32 \[100, 3\]",
    ),
    "a piece that isn't listed": (
        lambda p: edited(p, lambda m: m.storage_data.clear()),
        5,
        "its data at .* isn't listed",
    ),
    "paths that run into each other": (
        lambda p: edited(p, double_path),
        2,
        "runs into that of another",
    ),
}


def sidecar_of(folder: Path) -> Path:
    """The sidecar of an export, which lies beside `folder`."""
    other = folder.with_name("other")
    saved(folder.with_name("base"), STATE)
    return exported(folder.with_name("base"), "dcp", other) / "sidestage.json"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def run(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, str]:
    code = run_command(cli, [str(a) for a in argv])
    out, err = capsys.readouterr()
    if code:
        assert err.startswith("error: ")
        assert err.count("\n") == 1, err
        assert "defect" not in err
        assert not out
    return code, err if code else out


@pytest.mark.parametrize("name", [*MALICIOUS, *BAD])
def test_d23_a_bad_source_is_refused_with_one_line_and_leaves_nothing(
    name: str, here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make, code, message = {**MALICIOUS, **BAD}[name]
    source = make(tmp_path / "source")
    got, err = run(capsys, "import", source, tmp_path / "root", "--step", 1)
    assert got == code, err
    assert re.search(message, err), err
    assert not (tmp_path / "root").exists()
    assert list(here.iterdir()) == []


def test_a_format_that_is_named_is_not_guessed(
    here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = torch_of(tmp_path / "model.safetensors", STATE)
    folder = stock(tmp_path / "folder")
    table = tmp_path / "model.pt"
    save_file({"w": torch.ones(16)}, table)
    for source, form, code, message in (
        (model, "safetensors", 5, "not a whole safetensors file"),
        (model, "dcp", 2, "is a file, and so not a checkpoint of format dcp"),
        (folder, "torch", 2, "is a folder, and so not a checkpoint of format torch"),
        (table, "torch", 2, "not a torch.save file"),
        (tmp_path / "none", "torch", 3, "no such file or folder"),
    ):
        got, err = run(capsys, "import", source, tmp_path / "root", "--step", 1, "--format", form)
        assert got == code, err
        assert message in err
    assert not (tmp_path / "root").exists()
    assert foreign.detect(model) == "torch"
    assert foreign.detect(table) == "safetensors"


def test_metadata_that_ends_anywhere_is_corrupt(tmp_path: Path) -> None:
    data = (stock(tmp_path / "source") / ".metadata").read_bytes()
    for size in range(len(data)):
        with pytest.raises(CorruptError, match="not a whole pickle"):
            parse_metadata(data[:size], "m")


@pytest.mark.parametrize(
    "root",
    [
        None,
        {"state_dict_metadata": {}},
        Metadata([], None, {}),  # type: ignore[arg-type]
        Metadata({"w": 1}, None, {}),  # type: ignore[dict-item]
        Metadata({3: BytesStorageMetadata()}, None, {}),  # type: ignore[dict-item]
        Metadata({"w": BytesStorageMetadata()}, None, None),
        Metadata({}, None, {"w": 1}),
        Metadata({}, None, {MetadataIndex("w"): 1}),
        Metadata(
            {"w": TensorStorageMetadata(TensorProperties(), torch.Size([2]), [(0, 2)])},  # type: ignore[list-item]
            None,
            {},
        ),
        Metadata({"w": TensorStorageMetadata(TensorProperties(), (-1, True), [])}, None, {}),  # type: ignore[arg-type]
    ],
)
def test_a_pickle_that_isnt_dcps_metadata_is_corrupt(root: object) -> None:
    with pytest.raises(CorruptError, match="^m: "):
        parse_metadata(pickle.dumps(root), "m")


def test_a_pickle_cannot_change_the_classes_that_it_names() -> None:
    # BUILD with a pair of states sets attributes of whatever is on the stack, a class included.
    name = b"ctorch.distributed.checkpoint.metadata\nMetadata\n"
    data = b"\x80\x02" + name + b"N}X\x05\x00\x00\x00extraI5\ns\x86b."
    for _ in range(2):
        with pytest.raises(CorruptError):
            parse_metadata(data, "m")
    assert not hasattr(Metadata, "extra")
    for builtin in (b"ctorch\nSize\n", b"ctorch.serialization\n_get_layout\n"):
        with pytest.raises(CorruptError):
            parse_metadata(data.replace(name, builtin), "m")


def test_a_source_that_fails_in_mid_import_leaves_no_object(tmp_path: Path) -> None:
    state = {"a": torch.ones(2000), "b": torch.ones(2000)}
    torch.save(state, tmp_path / "f.pt")
    storage = LocalStorage(tmp_path / "root")
    with foreign.open_foreign(tmp_path / "f.pt") as found:
        (piece,) = found.tensors["b"].pieces

        def broken() -> torch.Tensor:
            raise CorruptError("b: unreadable")

        found.tensors["b"] = replace(found.tensors["b"], pieces=(replace(piece, load=broken),))
        with pytest.raises(CorruptError, match="b: unreadable"):
            import_checkpoint(found, Target(storage, 1))
    assert list(storage.list()) == []


@pytest.mark.parametrize("op", ["writer", "write", "finish", "create"])
def test_a_store_that_fails_in_mid_import_makes_no_checkpoint(op: str, tmp_path: Path) -> None:
    source = torch_of(tmp_path / "f.pt", STATE)
    faulty = FaultyStorage(LocalStorage(tmp_path / "root"))
    faulty.on(op, "data/*").fail(StorageError("no room"))
    with foreign.open_foreign(source) as found:
        with pytest.raises(StorageError, match="no room"):
            import_checkpoint(found, Target(faulty, 1))
        assert list(faulty.list()) == []
        import_checkpoint(found, Target(faulty, 1))  # and once there is room, it works
    assert [c.status for c in Catalog(faulty).commits()] == ["latest"]


def test_a_job_that_begins_in_mid_import_wins(tmp_path: Path) -> None:
    source = torch_of(tmp_path / "f.pt", STATE)
    storage = LocalStorage(tmp_path / "root")

    def begin(_: int) -> None:
        with Checkpointer(storage) as c:
            c.restore({}, fresh=True)

    with (
        foreign.open_foreign(source) as found,
        pytest.raises(ConflictError, match="another job began attempt 1"),
    ):
        import_checkpoint(found, Target(storage, 1), progress=begin)
    assert Catalog(storage).commits() == []
    assert list(storage.list("data/")) == []


def test_a_root_with_checkpoints_is_continued_only_on_request(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root, source = tmp_path / "root", torch_of(tmp_path / "f.pt", STATE)
    for step in (1, 2, 3):
        saved(root, {"n": step}, step=step)
    before = [(c.ref, c.status) for c in Catalog(LocalStorage(root)).commits()]
    for options, code, message in (
        ((9,), 4, "has checkpoints up to step 3: import into a new root, or pass --onto STEP"),
        ((9, "--onto", 7), 3, "no step 7; the lineage has 1, 2, 3"),
        ((2, "--onto", 2), 2, "step 2 isn't above step 2"),
        ((9, "--onto", 2, "--under", ""), 2, "--under: give a name"),
    ):
        got, err = run(capsys, "import", source, root, "--step", *options)
        assert got == code, err
        assert message in err
    assert [(c.ref, c.status) for c in Catalog(LocalStorage(root)).commits()] == before

    code, out = run(capsys, "import", source, root, "--step", 9, "--onto", 2, "--json")
    assert code == 0
    told = json.loads(out)
    assert (told["step"], told["format"], told["tensors"], told["bytes"]) == (9, "torch", 1, 1200)
    status = {c.ref.step: c.status for c in Catalog(LocalStorage(root)).commits()}
    assert status == {1: "ancestor", 2: "ancestor", 3: "abandoned", 9: "latest"}
    _, out = run(capsys, "verify", root)
    assert "step 9: ok" in out


@pytest.mark.parametrize("form", FORMATS)
def test_a_target_that_exists_is_kept(
    form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved(tmp_path / "run", STATE)
    export = ("export", tmp_path / "run")
    file, folder = bytes_of(tmp_path / "file", b"mine"), tmp_path / "folder"
    folder.mkdir()
    for target, options in ((file, ()), (folder, ()), (folder, ("--force",))):
        code, err = run(capsys, *export, target, "--format", form, *options)
        assert code == 4, err
        assert str(target) in err
    assert file.read_bytes() == b"mine"
    assert list(folder.iterdir()) == []
    code, err = run(capsys, *export, tmp_path / "none" / "x", "--format", form)
    assert (code, "no such folder for the output" in err) == (2, True)
    code, err = run(capsys, *export, tmp_path / "x", "--format", form, "--key", "q*")
    assert (code, "no key of step 1 matches" in err) == (3, True)
    code, out = run(capsys, *export, tmp_path / "x", "--format", form, "--json")
    assert (code, json.loads(out)["tensors"]) == (0, 1)
    code, err = run(capsys, *export, file, "--format", form, "--force")
    assert code == (4 if form == "dcp" else 0), err
    left = sorted(p.name for p in tmp_path.iterdir())
    assert left == ["file", "folder", "run", "x"]


@pytest.mark.parametrize("form", FORMATS)
def test_a_damaged_checkpoint_is_not_exported(
    form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved(tmp_path / "run", {"a": torch.ones(4000), "b": torch.randn(4000)})
    (path,) = tmp_path.glob("run/data/*/r00000.bin")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    code, err = run(capsys, "export", tmp_path / "run", tmp_path / "out", "--format", form)
    assert (code, "bytes don't match their digest" in err) == (5, True)
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


def test_what_a_format_cannot_hold_is_said_by_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved(tmp_path / "run", {"c": torch.ones(2, dtype=torch.complex128), "n": {"big": 1 << 3000}})
    for form, key in (("safetensors", "c: safetensors has no dtype complex128"), ("torch", "big")):
        code, err = run(capsys, "export", tmp_path / "run", tmp_path / "out", "--format", form)
        assert (code, key in err) == (2, True), err
        assert [p.name for p in tmp_path.iterdir()] == ["run"]
    saved(tmp_path / "two", {"v": {1: 1, "1": 2}})
    code, err = run(capsys, "export", tmp_path / "two", tmp_path / "out", "--format", "dcp")
    assert (code, "v.1: two parts of the state have this key in DCP" in err) == (2, True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run", "two"]


def test_under_puts_all_of_a_source_under_a_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_file({"w": torch.ones(2)}, tmp_path / "s")
    code, out = run(
        capsys, "import", tmp_path / "s", tmp_path / "root", "--step", 1, "--under", "model"
    )
    assert (code, "1 tensors" in out) == (0, True)
    torch.save({"model": {"w": torch.ones(2)}}, tmp_path / "t")
    imported(tmp_path / "t", tmp_path / "other")
    assert contents(tmp_path / "root") == contents(tmp_path / "other")
    with pytest.raises(BadInputError, match="scheme"):
        Target(open_storage("ftp://x"), 1)


class _Look:
    def __reduce__(self) -> Any:
        return getattr, ("abc", "upper")


def test_a_dcp_pickle_may_look_into_enumerations_only() -> None:
    """Python before 3.11.4 pickles a member of one as getattr(class, name)."""
    from ckpt.foreign.metadata import parse_metadata

    with pytest.raises(BadInputError, match=r"builtins\.getattr"):
        parse_metadata(pickle.dumps(_Look()), ".metadata")
