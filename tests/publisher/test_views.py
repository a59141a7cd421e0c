"""Views for other hosts: what is written answers as the version does, and nothing half-made is left."""

from __future__ import annotations

import hashlib
import io
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import safetensors.torch
import torch
from torch.fx.experimental import _config

from ckpt.command import run_command
from ckpt.digest import digest_of
from ckpt.errors import BadInputError, ConflictError, CorruptError, NotFoundError
from ckpt.schema import (
    CollisionSpec,
    ConstantSpec,
    FeatureSpec,
    InputSpec,
    LookupSpec,
    OutputSpec,
    RequestFeature,
    ServingDescription,
    VocabularyIds,
    encode_description,
)
from ckpt.storage import LocalStorage, Storage
from ckpt.trust import TrustList
from ckpt.types import FileEntry
from publisher import cli, keys
from publisher.difference import max_abs_err
from publisher.formats import row_bytes
from publisher.gates import GateError
from publisher.predictor import Predictor
from publisher.records import (
    GateResult,
    PublishedTable,
    Source,
    TableFormat,
    TablePart,
    TableStats,
    VersionManifest,
)
from publisher.registry import Registry
from publisher.views import onnx
from publisher.views.export import ViewSource, export_onnx
from publisher.views.interface import interface_of
from publisher.views.mapping import view_inputs
from publisher.views.place import new_folder
from tests.publisher import tiny
from tests.publisher.conftest import Bench, make_bench
from tests.publisher.tiny import flip_byte, random_tensors

Run = Callable[..., tuple[int, str, str]]
Request = Mapping[str, torch.Tensor]

# Batches 1, 2 and 5; empty bags, requests without any id, and ids that no table has.
REQUESTS = (
    tiny.request([[]], [[]]),
    tiny.request([[49, -1, 50, 3]], [[7]]),
    tiny.request([[], [2**40, 1]], [[0, 0, 6], []]),
    tiny.request([[5], [], [0, 0], [-(2**62)], [7, 8]], [[], [1, 9], [2], [3, 4], []]),
)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def go(*args: object) -> tuple[int, str, str]:
        code = run_command(cli.cli, [str(a) for a in args])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return go


@pytest.fixture
def root(tmp_path: Path, trust: TrustList, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A root on disk whose live version is 1; this host trusts its program."""
    monkeypatch.setenv("SIDESTAGE_TRUST_FILE", str(trust.path))
    bench = make_bench(LocalStorage(tmp_path / "root"), trust)
    bench.run.commit(1, random_tensors())
    bench.publish(1)
    return tmp_path / "root"


def refused(result: tuple[int, str, str], code: int, why: str) -> None:
    got, out, err = result
    assert (got, out, err.count("\n")) == (code, "", 1), result
    assert why in err


def test_a_triton_repository_answers_as_the_version_does(
    root: Path, trust: TrustList, run: Run, tmp_path: Path
) -> None:
    out = tmp_path / "repository"
    code, said, err = run("export", root, out, "--format", "triton", "--json")
    assert (code, err) == (0, "")
    told = json.loads(said)
    assert (told["version"], told["path"]) == (1, str(out / "tiny"))
    assert told["files"] == {
        name: (out / "tiny" / name).stat().st_size for name in ("1/model.pt2", "config.pbtxt")
    }
    assert 0 < told["max_abs_err"] < told["allowed"]  # quantised, so not 0

    text = (out / "tiny" / "config.pbtxt").read_text()
    config = parse_config(text)
    assert config["name"] == ["tiny"]
    assert (config["backend"], config["platform"]) == (["pytorch"], ["torch_aoti"])
    assert config["max_batch_size"] == ["0"]
    assert config["instance_group"] == [{"kind": ["KIND_CPU"], "count": ["1"]}]
    names = re.findall(r"^# (\S+): \w+ \(.*\)$", text, re.M)
    assert names == [
        *("dense", "user.values", "user.lengths", "genre.values", "genre.lengths"),
        *("score", "user_stamp", "genre_stamp", "dense_stamp"),
    ]
    assert [i["name"] for i in config["input"]] == [[f"INPUT__{i}"] for i in range(5)]
    assert config["input"][0]["dims"] == [["-1", "3"]]
    assert config["output"][3] == {
        "name": ["OUTPUT__3"], "data_type": ["TYPE_FP32"], "dims": [["-1"]],
    }  # fmt: skip

    # As Triton's backend loads it: by file, name of the model in it, threads, runners, device.
    package = torch._C._aoti.AOTIModelPackageLoader(
        str(out / "tiny" / "1" / "model.pt2"), "model", False, 1, -1
    )
    predictor = Predictor(root, trust=trust)
    for request in REQUESTS:
        want = predictor.predict(request).outputs
        got = package.run([request[n] for n in names[:5]])
        for name, tensor in zip(names[5:], got, strict=True):
            torch.testing.assert_close(tensor, want[name], atol=1e-5, rtol=1e-5)

    # Nobody checks a request there: ids that no bag holds are as if they weren't there.
    want = predictor.predict(tiny.request([[3], [4]], [[1], []])).outputs
    broken = dict(tiny.request([[3], [4, 5, 6]], [[1], []]))
    broken["user.lengths"] = torch.tensor([1, 1])
    for name, tensor in zip(names[5:], package.run([broken[n] for n in names[:5]]), strict=True):
        torch.testing.assert_close(tensor, want[name], atol=1e-5, rtol=1e-5)

    refused(run("export", root, out, "--format", "triton"), 4, "--force")
    (out / "tiny" / "config.pbtxt").write_text(text + "# tuned\n")
    refused(run("export", root, out, "--format", "triton", "--force"), 4, "another repository")


def test_an_onnx_file_serves_each_format_pooling_weight_and_map(
    trust: TrustList, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SIDESTAGE_TRUST_FILE", str(trust.path))
    monkeypatch.setattr(onnx, "INLINE_BYTES", 0)  # as if one message couldn't hold the weights
    made = make_version(LocalStorage(tmp_path / "root"), trust)
    out = tmp_path / "view"
    out.mkdir()
    (out / "model.onnx").write_text("an older view")
    command = ("export", tmp_path / "root", out, "--format", "onnx", "--version", "1")
    refused(run(*command), 4, "--force")
    code, said, err = run(*command, "--force")
    assert (code, err) == (0, ""), err
    *files, last = said.splitlines()
    assert files == [
        f"{out / name}  {(out / name).stat().st_size:,} bytes"
        for name in ("model.onnx", "model.onnx.data")
    ]
    assert "max abs error" in last
    assert sorted(p.name for p in tmp_path.iterdir()) == ["root", "trusted-code", "view"]

    session = onnxruntime.InferenceSession(str(out / "model.onnx"))
    names = [i.name for i in session.get_inputs()]
    assert names == [
        *("dense", "user.values", "user.lengths", "user.weights", "genre.rows", "genre.lengths"),
        *("item.rows", "item.lengths", "place.values", "place.lengths"),
    ]
    interface = interface_of(made.description)
    for request in (rich_request(1), rich_request(2), rich_request(5), rich_request(1, empty=True)):
        inputs = view_inputs(made.description, interface, ID_MAPS, request)
        arrays = session.run(None, {n: t.numpy() for n, t in zip(names, inputs, strict=True)})
        for array, (name, want) in zip(arrays, made.answer(request).items(), strict=True):
            torch.testing.assert_close(
                torch.from_numpy(array),
                want,
                atol=1e-5,
                rtol=1e-5,
                msg=lambda m, n=name: f"{n}: {m}",
            )


def test_a_view_whose_second_output_is_no_number_fails(
    trust: TrustList, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python's `max` would skip a NaN behind a number."""
    made = make_version(LocalStorage(tmp_path / "root"), trust)
    source = ViewSource(made.registry, made.manifest, trust)
    outputs = list(made.answer(rich_request(3)).values())
    monkeypatch.setattr("publisher.views.export.answer_in_fresh_process", lambda *_: outputs)
    assert source.check("onnx", tmp_path) < 1e-5
    outputs[1] = outputs[1].clone()
    outputs[1][0, 0] = math.nan
    outputs[0] = outputs[0] + 1e-5
    assert math.isnan(source.golden_err("onnx", tmp_path))
    with pytest.raises(GateError, match="is nan off"):
        source.check("onnx", tmp_path)
    outputs.pop()
    with pytest.raises(CorruptError, match="gives 4 outputs, the model 5"):
        source.check("onnx", tmp_path)


def test_the_largest_error_of_outputs() -> None:
    ones, none = torch.ones(2), torch.ones(0)
    nan = torch.tensor([0.0, math.nan])
    assert max_abs_err({"a": ones, "b": none}, {"b": none, "a": ones + 0.5}) == 0.5
    assert math.isnan(max_abs_err({"a": ones, "b": nan, "c": ones}, dict.fromkeys("abc", ones)))
    assert math.isnan(max_abs_err({"a": ones, "b": ones}, {"a": ones, "b": nan}))
    assert max_abs_err({}, {}) == 0.0
    with pytest.raises(CorruptError, match=r"outputs are \['a'\], the reference has \['b'\]"):
        max_abs_err({"a": ones}, {"b": ones})
    for other in (torch.ones(3), torch.ones(2).double()):
        with pytest.raises(CorruptError, match=r"output a is torch\.float32 \(2,\), the reference"):
            max_abs_err({"a": ones}, {"a": other})


def test_a_view_that_fails_its_check_is_not_left(bench: Bench, tmp_path: Path) -> None:
    bench.run.commit(1, random_tensors())
    bench.publish(1)
    manifest, trust = bench.registry.version(1), bench.run.trust

    def export(manifest: VersionManifest, trust: TrustList = trust) -> None:
        export_onnx(ViewSource(bench.registry, manifest, trust), tmp_path / "v", force=False)

    parity = next(g for g in manifest.gates if g.name == "golden_parity")
    strict = replace(manifest, gates=(replace(parity, threshold=1e-9),))
    with pytest.raises(GateError, match="the onnx view of version 1 is 0.00"):
        export(strict)
    with pytest.raises(BadInputError, match="says nothing of golden parity"):
        export(replace(manifest, gates=()))
    with pytest.raises(BadInputError, match="not trusted"):
        export(manifest, TrustList(tmp_path / "none"))
    tables = manifest.tables[0].parts[0].file
    flip_byte(bench.run.root, bench.registry.key(1, tables), 5)
    with pytest.raises(CorruptError, match=f"{tables}: digest"):
        export(manifest)
    assert [p.name for p in tmp_path.iterdir()] == ["trusted-code"]


def test_bad_commands_write_nothing(root: Path, run: Run, tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    out = tmp_path / "out"
    refused(run("export", root, out, "--format", "triton", "--version", "9"), 3, "no version 9")
    refused(run("export", tmp_path / "none", out, "--format", "onnx"), 3, "none")
    for kind in ("triton", "onnx"):
        missing = tmp_path / "no" / "out"
        refused(run("export", root, missing, "--format", kind), 3, "no such folder")
        a_file = tmp_path / "trusted-code"
        assert run("export", root, a_file, "--format", kind, "--force")[0] in (4, 6)
    code, _, err = run("export", root, out, "--format", "torchscript")
    assert code == 2
    assert "'triton', 'onnx'" in err
    assert sorted(tmp_path.rglob("*")) == before


def test_force_replaces_views_only(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.txt").write_text("years of work")
    with (
        pytest.raises(ConflictError, match="holds thesis.txt"),
        new_folder(tmp_path / "home", frozenset({"model.onnx"}), force=True),
    ):
        pass
    with pytest.raises(NotFoundError), new_folder(tmp_path / "a" / "b", frozenset(), force=True):
        pass
    assert [str(p.relative_to(tmp_path)) for p in sorted(tmp_path.rglob("*"))] == [
        *("home", "home/thesis.txt")
    ]


def test_what_no_view_can_serve_is_refused_by_name() -> None:
    described = tiny.description(features=(RequestFeature("user", unknown="refuse"),))
    with pytest.raises(BadInputError, match="user: refuses requests with unknown ids"):
        interface_of(described)

    first = tiny.description().lookups[0]
    user = replace(first.features[0], collision="c")
    twice = tiny.description(lookups=(first, LookupSpec("ebc#1", (user,))))
    with pytest.raises(BadInputError, match=r"user: is read through 2 different maps"):
        interface_of(twice)


# -- a version with everything, made by hand ------------------------------------------------

USER, GENRE, ITEM, PLACE = "t.user", "t.genre", "t.item", "t.place"
TABLES: dict[str, tuple[int, int, TableFormat]] = {
    USER: (30, 4, "int8_rowwise"),
    GENRE: (9, 6, "int4_rowwise"),
    ITEM: (12, 3, "fp16"),
    PLACE: (5, 2, "fp32"),
}
VOCABULARY = {100: 4, -7: 0, 2**50: 8}
UNKNOWN_GENRE = 2
COLLISION = {1000: 3, 1001: 0, 9: 11}
SHARED_ITEM = 5
POSITIONS = (0.5, 2.0, -1.0, 0.25, 3.0)


def _map_tensors(name: str, rows: Mapping[int, int]) -> dict[str, torch.Tensor]:
    return {
        f"{name}.raw": torch.tensor(sorted(rows)),
        f"{name}.row": torch.tensor([rows[r] for r in sorted(rows)]),
    }


ID_MAPS = {
    **_map_tensors("genre", VOCABULARY),
    **_map_tensors("collision:mc", COLLISION),
    "position:t.weights": torch.tensor(POSITIONS),
}


class RichDense(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.over = torch.nn.Linear(3 + 12, 1)

    def forward(
        self,
        dense: torch.Tensor,
        pooled: torch.Tensor,
        rows: torch.Tensor,
        row_ids: torch.Tensor,
        genres: torch.Tensor,
        lengths: torch.Tensor,
        weights: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        score = self.over(torch.cat([dense, pooled], 1)).squeeze(1) + lengths
        return score, rows * 2, row_ids + 0, genres + 1, weights * 2


@dataclass
class Made:
    """A version and the plain way to its answers."""

    registry: Registry
    manifest: VersionManifest
    description: ServingDescription
    values: dict[str, torch.Tensor]
    dense: RichDense

    def answer(self, request: Request) -> dict[str, torch.Tensor]:
        """Bag by bag, id by id."""
        batch = len(request["dense"])
        genres = [VOCABULARY.get(i, UNKNOWN_GENRE) for i in request["genre.values"].tolist()]
        items = [COLLISION.get(i, SHARED_ITEM) for i in request["item.values"].tolist()]
        weights = request["user.weights"].tolist()
        pooled = torch.zeros(batch, 12)
        starts = dict.fromkeys(("user", "genre", "place"), 0)
        for row in range(batch):
            for name, at, columns in (("user", 0, 4), ("genre", 4, 6), ("place", 10, 2)):
                ids = genres if name == "genre" else request[f"{name}.values"].tolist()
                length = int(request[f"{name}.lengths"][row])
                table = self.values[f"t.{name}"]
                for position in range(length):
                    index = starts[name] + position
                    if not 0 <= ids[index] < len(table):
                        continue
                    factor = {"user": weights[index] if name == "user" else 0.0,
                              "genre": 1 / length, "place": POSITIONS[position]}[name]  # fmt: skip
                    pooled[row, at : at + columns] += factor * table[ids[index]]
                starts[name] += length
        rows = torch.stack([self.values[ITEM][i] for i in items]) if items else torch.zeros(0, 3)
        inputs = (
            *(request["dense"], pooled, rows, torch.tensor(items, dtype=torch.int64)),
            *(torch.tensor(genres, dtype=torch.int64), request["item.lengths"]),
            request["user.weights"],
        )
        with torch.inference_mode():
            outputs = self.dense(*inputs)
        return dict(zip(OUTPUTS, outputs, strict=True))


OUTPUTS = {
    "score": ("batch",),
    "rows": ("ids:item", 3),
    "row_ids": ("ids:item",),
    "genres": ("ids:genre",),
    "weights": ("ids:user",),
}


def rich_request(batch: int, *, empty: bool = False) -> dict[str, torch.Tensor]:
    rng = np.random.default_rng(batch)
    known = {
        "user": (*range(30), -1, 30, 2**60),
        "genre": (*VOCABULARY, 5),
        "item": (*COLLISION, 7),
        "place": (*range(5), 5),
    }
    out = {"dense": torch.from_numpy(rng.random((batch, 3), np.float32))}
    for name, ids in known.items():
        lengths = np.zeros(batch, np.int64) if empty else rng.integers(0, 5, batch)
        out[f"{name}.values"] = torch.from_numpy(rng.choice(np.array(ids), int(lengths.sum())))
        out[f"{name}.lengths"] = torch.from_numpy(lengths)
    n = len(out["user.values"])
    out["user.weights"] = torch.from_numpy(rng.standard_normal(n).astype(np.float32))
    return out


def make_version(storage: Storage, trust: TrustList) -> Made:
    """Version 1, its files written one by one."""
    torch.manual_seed(0)
    dense = RichDense().eval()
    program = export_rich(dense)
    trust.add(program)
    registry = Registry(storage)
    described = rich_description(program)
    image, tables, values = make_tables()
    made = Made(registry, None, described, values, dense)  # type: ignore[arg-type]
    golden = rich_request(3)
    reference = {n: t.contiguous() for n, t in made.answer(golden).items()}
    weights = {f"over.{n}": t.detach() for n, t in dense.over.named_parameters()}
    contents = {
        keys.DESCRIPTION: encode_description(described),
        keys.PROGRAM: program,
        keys.DENSE: safetensors.torch.save(weights),
        keys.ID_MAPS: safetensors.torch.save(ID_MAPS),
        keys.GOLDEN: safetensors.torch.save(golden),
        keys.REFERENCE: safetensors.torch.save(reference),
        **image,
    }
    source = Source("run", 1, 7, "xxh3-128:00")
    assert registry.claim(source, "test") == 1
    for name, data in contents.items():
        registry.storage.create(registry.key(1, name), data)
    made.manifest = VersionManifest(
        version=1,
        parent=None,
        source=source,
        dense_step=7,
        table_step=7,
        id_map_step=7,
        saved_at_s=1.0,
        committed_at_s=1.0,
        event_time_s=None,
        model="rich",
        description_id="d1",
        files=tuple(FileEntry(n, len(d), digest_of(d)) for n, d in contents.items()),
        tables=tables,
        gates=(GateResult("golden_parity", True, "", 0.0, 1e-4),),
        published_by="test",
        lease_epoch=1,
        started_at_s=1.0,
        published_at_s=1.0,
    )
    registry.seal(made.manifest)
    return made


def make_tables() -> tuple[dict[str, bytes], tuple[PublishedTable, ...], dict[str, torch.Tensor]]:
    """Files, the manifest's tables, and their values; `user` is in two parts, in two files."""
    rng = np.random.default_rng(3)
    files = {"tables-00000.bin": b"", "tables-00001.bin": b""}
    tables, values = [], {}
    for fqn, (rows, dim, table_format) in TABLES.items():
        raw = rng.integers(0, 256, (rows, row_bytes(table_format, dim)), np.uint8)
        if table_format in ("fp16", "fp32"):
            dtype = np.float16 if table_format == "fp16" else np.float32
            real = rng.standard_normal((rows, dim)).astype(dtype)
            raw = real.view(np.uint8)
        else:
            head = rng.standard_normal((rows, 2)).astype(np.float16)
            raw[:, :4] = head.view(np.uint8)
            bytes_ = raw[:, 4:]
            halves = np.stack([bytes_ & 15, bytes_ >> 4], 2).reshape(rows, -1)
            steps = bytes_ if table_format == "int8_rowwise" else halves
            real = steps * head[:, :1].astype(np.float32) + head[:, 1:].astype(np.float32)
        values[fqn] = torch.from_numpy(real.astype(np.float32))
        parts, at = [], 0
        for file, end in {
            "tables-00000.bin": 20 if fqn == USER else 0,
            "tables-00001.bin": rows,
        }.items():
            if end > at:
                parts.append(TablePart(file, len(files[file]), at, end - at))
                files[file] += raw[at:end].tobytes()
                at = end
        stats = TableStats(0.0, 0.0, (), 0.0, 0.0, 0.0, 0.0)
        tables.append(
            PublishedTable(fqn, rows, dim, table_format, raw.shape[1], tuple(parts), stats)
        )
    return files, tuple(tables), values


def rich_description(program: bytes) -> ServingDescription:
    return ServingDescription(
        model="rich",
        program_key="code/p.pt2",
        program_sha256=hashlib.sha256(program).hexdigest(),
        golden_key="g",
        golden_digest="xxh3-128:00",
        export_max_abs_err=0.0,
        inputs=(
            InputSpec("dense", "dense", "float32", ("batch", 3)),
            InputSpec("ebc#0", "lookup", "float32", ("batch", 12)),
            InputSpec("r", "rows", "float32", ("ids:item", 3), ("ec#0", "item")),
            InputSpec("i", "row_ids", "int64", ("ids:item",), ("ec#0", "item")),
            InputSpec("g", "values", "int64", ("ids:genre",), ("genre",)),
            InputSpec("l", "lengths", "int64", ("batch",), ("item",)),
            InputSpec("w", "weights", "float32", ("ids:user",), ("user",)),
        ),
        lookups=(
            LookupSpec(
                "ebc#0",
                (
                    FeatureSpec("user", USER, 30, 4, "sum", "user", "request"),
                    FeatureSpec("genre", GENRE, 9, 6, "mean", "genre"),
                    FeatureSpec("place", PLACE, 5, 2, "sum", "place", "position", "t.weights"),
                ),
            ),
            LookupSpec("ec#0", (FeatureSpec("item", ITEM, 12, 3, "none", "item", collision="mc"),)),
        ),
        constants=tuple(
            ConstantSpec(f"over.{n}", f"over.{n}", "float32", shape)
            for n, shape in (("weight", (1, 15)), ("bias", (1,)))
        ),
        outputs=tuple(
            OutputSpec(n, "int64" if n in ("row_ids", "genres") else "float32", shape)
            for n, shape in OUTPUTS.items()
        ),
        features=(
            RequestFeature("user", weighted=True),
            RequestFeature(
                "genre", VocabularyIds("v", "xxh3-128:00", len(VOCABULARY)), "row", UNKNOWN_GENRE
            ),
            RequestFeature("item"),
            RequestFeature("place"),
        ),
        collisions=(CollisionSpec("mc", "m.raw", "m.rows", 8, 0, (SHARED_ITEM,)),),
    )


def export_rich(dense: RichDense) -> bytes:
    dim = torch.export.Dim
    batch, items, genres, users = (dim(n, min=0) for n in ("batch", "items", "genres", "users"))
    arguments = (
        *(torch.randn(3, 3), torch.randn(3, 12), torch.randn(4, 3), torch.arange(4)),
        *(torch.arange(5), torch.arange(3), torch.randn(6)),
    )
    dynamic = ({0: batch}, {0: batch}, {0: items}, {0: items}, {0: genres}, {0: batch}, {0: users})
    with _config.patch(backed_size_oblivious=True):
        program = torch.export.export(dense, arguments, dynamic_shapes=dynamic)
    out = io.BytesIO()
    torch.export.save(program, out)
    return out.getvalue()


# -- a reader ----------------------------------------------------------------------------------


def parse_config(text: str) -> dict[str, Any]:
    """Protobuf's text format, as far as a config.pbtxt needs it: field -> its values in order."""
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    tokens = re.findall(r'"(?:[^"\\]|\\.)*"|[\w.+-]+|[{}\[\]:,]', "\n".join(lines))
    assert "".join(tokens) == re.sub(r"\s", "", "".join(lines)), "a character that is no token"
    at = 0

    def value() -> Any:
        nonlocal at
        token = tokens[at]
        at += 1
        if token == "{":
            return message("}")
        if token == "[":
            found = []
            while tokens[at] != "]":
                found.append(value())
                at += tokens[at] == ","
            at += 1
            return found
        return json.loads(token) if token.startswith('"') else token

    def message(end: str | None) -> dict[str, Any]:
        nonlocal at
        fields: dict[str, Any] = {}
        while at < len(tokens) and tokens[at] != end:
            name = tokens[at]
            at += 1
            at += tokens[at] == ":"
            found = value()
            is_list = isinstance(found, list) and name != "dims"
            fields.setdefault(name, []).extend(found if is_list else [found])
        at += 1
        return fields

    return message(None)
