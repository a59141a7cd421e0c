"""A tiny model with its description, and checkpoints of it, written by the format's own codecs.

The model has two tables in one pooled lookup, `user` (sum) and `genre` (mean). All of a
stamped checkpoint's tensors hold one number, the stamp, and three of the outputs give it
back: from the one table, from the other, and from the dense part. So an answer that mixes
two versions shows it.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

import safetensors.torch
import torch

from ckpt import layout
from ckpt.catalog import Catalog, CommitInfo
from ckpt.digest import digest_of, new_hasher
from ckpt.index import ChunkEntry, ShardEntry, TensorEntry, encode_index
from ckpt.manifest import AttemptRecord, CommitRecord, Receipt, RunRecord, encode, seal
from ckpt.schema import (
    ConstantSpec,
    FeatureSpec,
    InputSpec,
    LookupSpec,
    OutputSpec,
    RequestFeature,
    ServingDescription,
    encode_description,
)
from ckpt.storage import Storage
from ckpt.trust import TrustList
from ckpt.types import CommitRef, FileEntry

USERS, GENRES = 50, 7
USER, GENRE = "model.ebc.user.weight", "model.ebc.genre.weight"
LOOKUP = "ebc#0"
RUN_ID = "tiny-run"


class Dense(torch.nn.Module):
    """What remains of the model when its lookups are inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.over = torch.nn.Linear(3 + 6, 1)
        self.scale: torch.Tensor
        self.register_buffer("scale", torch.ones(3))

    def forward(self, dense: torch.Tensor, pooled: torch.Tensor) -> tuple[torch.Tensor, ...]:
        score = torch.sigmoid(self.over(torch.cat([dense * self.scale, pooled], 1)) / 100)
        stamp = self.over.bias + 0 * dense[:, 0]
        return score.squeeze(1), pooled[:, 0] + 0, pooled[:, 4] + 0, stamp


@cache
def program() -> bytes:
    """The exported dense part."""
    batch = torch.export.Dim("batch", min=1, max=4096)
    exported = torch.export.export(
        Dense().eval(),
        (torch.randn(3, 3), torch.randn(3, 6)),
        dynamic_shapes=({0: batch}, {0: batch}),
    )
    out = io.BytesIO()
    torch.export.save(exported, out)
    return out.getvalue()


def request(
    users: Sequence[Sequence[int]], genres: Sequence[Sequence[int]]
) -> dict[str, torch.Tensor]:
    """A request of one bag of each feature per row."""
    out = {"dense": torch.arange(3.0 * len(users)).reshape(-1, 3) / 10}
    for name, bags in (("user", users), ("genre", genres)):
        out[f"{name}.values"] = torch.tensor([i for b in bags for i in b], dtype=torch.int64)
        out[f"{name}.lengths"] = torch.tensor([len(b) for b in bags], dtype=torch.int64)
    return out


GOLDEN = request([[3], [1, 2], [], [49]], [[0, 6], [1], [2], []])


def description(**changes: object) -> ServingDescription:
    """The serving description; `changes` replace its fields."""
    golden = safetensors.torch.save(GOLDEN)
    sha256 = hashlib.sha256(program()).hexdigest()
    made = ServingDescription(
        model="tiny",
        program_key=layout.code_key(sha256, ".pt2"),
        program_sha256=sha256,
        golden_key=f"{layout.description_prefix('d1')}golden.safetensors",
        golden_digest=digest_of(golden),
        export_max_abs_err=0.0,
        inputs=(
            InputSpec("dense", "dense", "float32", ("batch", 3)),
            InputSpec(LOOKUP, "lookup", "float32", ("batch", 6)),
        ),
        lookups=(
            LookupSpec(
                LOOKUP,
                (
                    FeatureSpec("user", USER, USERS, 4, "sum"),
                    FeatureSpec("genre", GENRE, GENRES, 2, "mean"),
                ),
            ),
        ),
        constants=(
            ConstantSpec("over.weight", "model.over.weight", "float32", (1, 9)),
            ConstantSpec("over.bias", "model.over.bias", "float32", (1,)),
            ConstantSpec("scale", None, "float32", (3,)),
        ),
        outputs=tuple(
            OutputSpec(name, "float32", ("batch",))
            for name in ("score", "user_stamp", "genre_stamp", "dense_stamp")
        ),
        features=(RequestFeature("user"), RequestFeature("genre")),
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def random_tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {
        USER: torch.randn(USERS, 4, generator=g),
        GENRE: torch.randn(GENRES, 2, generator=g),
        "model.over.weight": torch.randn(1, 9, generator=g),
        "model.over.bias": torch.randn(1, generator=g),
        "optimizer.state.user.momentum": torch.rand(USERS, generator=g),
    }


def stamped_tensors(stamp: float) -> dict[str, torch.Tensor]:
    return {name: torch.full_like(t, stamp) for name, t in random_tensors().items()}


@dataclass
class TinyRun:
    """A root that a trainer would have written, and the trust list of its host."""

    root: Storage
    trust: TrustList
    rows_per_chunk: int = 16
    continues: dict[int, CommitRef | None] = field(default_factory=dict)

    def begin(self, described: ServingDescription | None = None) -> TinyRun:
        """RUN.json, the first attempt, the program, the golden request, the description."""
        described = described or description()
        self.root.create(layout.RUN, encode(RunRecord(RUN_ID, 1.0, "test")))
        self.attempt(1, None)
        self.trust.add(program())
        self.root.create(described.program_key, program())
        self.root.create(described.golden_key, safetensors.torch.save(GOLDEN))
        self.describe("d1", described)
        return self

    def attempt(self, epoch: int, parent: CommitRef | None) -> None:
        record = AttemptRecord(epoch, RUN_ID, f"token-{epoch}", 1, 1.0, parent)
        self.continues[epoch] = parent
        self.root.create(layout.attempt_key(epoch), encode(record))

    def describe(
        self,
        description_id: str,
        described: ServingDescription,
        golden: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        """Another description, with a golden request of its own or the first one's."""
        prefix = layout.description_prefix(description_id)
        if golden is not None:
            key, data = f"{prefix}golden.safetensors", safetensors.torch.save(dict(golden))
            self.root.create(key, data)
            described = replace(described, golden_key=key, golden_digest=digest_of(data))
        self.root.create(f"{prefix}description.json", encode_description(described))

    def commit(
        self,
        step: int,
        tensors: Mapping[str, torch.Tensor],
        *,
        epoch: int = 1,
        parent: CommitRef | None = None,
        annotations: Mapping[str, str] | None = None,
    ) -> CommitRef:
        """Write one commit of `tensors`, as one rank."""
        prefix = layout.data_prefix(epoch, step, "s0")
        data, entries = bytearray(), []
        for name, t in tensors.items():
            chunks = []
            for row in range(0, t.shape[0], self.rows_per_chunk):
                raw = t[row : row + self.rows_per_chunk].contiguous().view(torch.uint8)
                stored = raw.numpy().tobytes()
                digest = new_hasher("xxh3-128")
                digest.update(stored)
                chunks.append(
                    ChunkEntry(
                        row,
                        min(self.rows_per_chunk, t.shape[0] - row),
                        len(data),
                        len(stored),
                        "raw",
                        digest.digest().ljust(32, b"\0"),
                    )
                )
                data += stored
            shape = tuple(t.shape)
            shard = ShardEntry((0,) * len(shape), shape, tuple(chunks))
            dtype = str(t.dtype).removeprefix("torch.")
            entries.append(TensorEntry(name, "sharded", dtype, shape, (shard,)))
        objects = seal("objects", {"values": None, "per_rank": {}})
        contents = {
            layout.rank_data_key(prefix, 0): bytes(data),
            layout.rank_index_key(prefix, 0): encode_index(entries, "xxh3-128"),
            layout.rank_objects_key(prefix, 0): objects,
        }
        for key, content in contents.items():
            self.root.create(key, content)
        files = tuple(FileEntry(k, len(v), digest_of(v)) for k, v in contents.items())
        receipt = encode(
            Receipt(
                epoch=epoch,
                attempt_token=f"token-{epoch}",
                step=step,
                save_id="s0",
                rank=0,
                world_size=1,
                plan_id="plan",
                parent=parent,
                saved_at_s=10.0 * step,
                annotations={},
                values_digest=digest_of(objects),
                tensor_bytes=len(data),
                guarded_bytes=0,
                copied_bytes=len(data),
                copied_tables={},
                files=files,
            )
        )
        receipt_key = layout.rank_receipt_key(prefix, 0)
        self.root.create(receipt_key, receipt)
        record = CommitRecord(
            run_id=RUN_ID,
            epoch=epoch,
            attempt_token=f"token-{epoch}",
            step=step,
            save_id="s0",
            world_size=1,
            parent=parent,
            continues=self.continues.get(epoch),
            saved_at_s=10.0 * step,
            committed_at_s=10.0 * step + 1,
            tensor_bytes=len(data),
            stored_bytes=len(data),
            annotations=dict({"serving_description": "d1"} if annotations is None else annotations),
            receipts=(FileEntry(receipt_key, len(receipt), digest_of(receipt)),),
            files=files,
        )
        encoded = encode(record)
        self.root.create(layout.commit_key(epoch, step), encoded)
        return CommitRef(epoch, step, digest_of(encoded))

    def data_key(self, step: int, epoch: int = 1) -> str:
        return layout.rank_data_key(layout.data_prefix(epoch, step, "s0"), 0)

    def info(self, step: int) -> CommitInfo:
        return Catalog(self.root).find(step)


def flip_byte(root: Storage, key: str, at: int) -> None:
    """Damage one stored object in place."""
    data = bytearray(root.read(key))
    data[at] ^= 0x10
    root.put(key, bytes(data))
