"""Id maps in a description: golden requests of raw ids prove that serving maps them as training did."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import Tensor

from ckpt.errors import BadInputError
from ckpt.idmaps import IdMap, Vocabulary
from ckpt.schema import HashedIds, IdentityIds, ServingDescription, VocabularyIds
from ckpt.storage import MemoryStorage
from ckpt.trust import TrustList
from tests.trainer.served import model_ids, read_description
from tests.trainer.served_models import Refused, ids
from trainer.description import ServedModel, export_description

HASH = IdMap(HashedIds(seed=7, modulus=40))
RAW_B = np.arange(100, 140)[::-1].copy()
KNOWN = IdMap(Vocabulary(RAW_B, np.arange(40)), unknown="row", unknown_row=5)


class Pipeline:
    """A training input pipeline: raw ids, and the model's argument that it makes of them."""

    def __init__(self, a: IdMap = HASH, b: IdMap = KNOWN) -> None:
        plain = ids(["a", "b"], 8, seed=3)
        self.raw = {"a": plain["a"].values() * 10**12 + 7, "b": plain["b"].values() + 98}
        made = [torch.from_numpy(m.apply(self.raw[f].numpy())) for f, m in (("a", a), ("b", b))]
        plain._values = torch.cat(made)
        self.args = (plain,)


def describe(pipeline: Pipeline, storage: MemoryStorage, tmp_path: Path, **maps: Any) -> str:
    model = Refused()
    keys = {f"model.{k}" for k in model.state_dict()}
    options = {"id_maps": {"a": HASH, "b": KNOWN}, "raw": pipeline.raw} | maps
    served = ServedModel("m", model, pipeline.args, "model.", keys, **options)
    return export_description(served, storage, TrustList(tmp_path / "trusted"))


def read_golden(storage: MemoryStorage, description: ServingDescription) -> dict[str, Tensor]:
    return safetensors.torch.load(storage.read(description.golden_key))


def test_golden_request_is_raw_and_maps_to_what_the_model_got(tmp_path: Path) -> None:
    pipeline, storage = Pipeline(), MemoryStorage()
    found = describe(pipeline, storage, tmp_path)
    description = read_description(storage, found)
    golden = read_golden(storage, description)
    a, b = description.features
    assert (a.ids, a.unknown, a.unknown_row) == (HASH.ids, "zero", None)
    assert isinstance(b.ids, VocabularyIds)
    assert (b.unknown, b.unknown_row, b.ids.size) == ("row", 5, 40)
    assert b.ids.key.startswith(f"serving/descriptions/{found}/vocabulary-")
    for feature in (a, b):
        assert torch.equal(golden[f"{feature.name}.values"], pipeline.raw[feature.name])
        got = pipeline.args[0][feature.name].values()
        assert torch.equal(golden[f"{feature.name}.rows"], got)
        assert torch.equal(model_ids(storage, feature, golden[f"{feature.name}.values"]), got)
    stored = [o.key for o in storage.list()]
    assert describe(pipeline, storage, tmp_path) == found  # a restarted trainer finds its own
    assert [o.key for o in storage.list()] == stored


def test_another_vocabulary_is_another_description(tmp_path: Path) -> None:
    pipeline, storage = Pipeline(), MemoryStorage()
    first = describe(pipeline, storage, tmp_path)
    assert isinstance(KNOWN.ids, Vocabulary)
    longer = Vocabulary(np.append(RAW_B, 999), np.append(KNOWN.ids.row, 0))
    second = describe(
        pipeline, storage, tmp_path, id_maps={"a": HASH, "b": IdMap(longer, "row", 5)}
    )
    assert second != first


def test_identity_features_need_no_raw_ids(tmp_path: Path) -> None:
    pipeline, storage = Pipeline(b=IdMap(IdentityIds())), MemoryStorage()
    pipeline.args[0]._values = pipeline.args[0].values() % 40
    identity = IdMap(IdentityIds(), unknown="refuse")
    found = describe(
        pipeline,
        storage,
        tmp_path,
        id_maps={"a": HASH, "b": identity},
        raw={"a": pipeline.raw["a"]},
    )
    description = read_description(storage, found)
    assert description.features[1].unknown == "refuse"
    golden = read_golden(storage, description)
    assert "b.rows" not in golden
    assert torch.equal(golden["b.values"], pipeline.args[0]["b"].values())


def other(spec: Any, **policy: Any) -> dict[str, Any]:
    return {"id_maps": {"a": HASH, "b": IdMap(spec, **policy)}}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"id_maps": {"a": IdMap(HashedIds(8, 40)), "b": KNOWN}},
            r"feature 'a': raw id \d+ has row \d+ by its id map, and the training pipeline gave the "
            r"model \d+; \d+ of \d+ ids differ",
        ),
        (
            other(Vocabulary(RAW_B[:20], np.arange(20))),
            r"feature 'b': raw id \d+ has no row by its id map, and .* gave the model \d+",
        ),
        ({"raw": {}}, "raw: lacks feature 'a', which has an id map"),
        ({"id_maps": {"a": HASH}}, "raw: feature 'b' has no id map"),
        (
            {"id_maps": {"a": HASH, "b": KNOWN, "c": HASH}},
            "no feature 'c' in the golden request; it has a, b",
        ),
        (
            {"raw": {"a": torch.arange(3), "b": torch.arange(3)}},
            r"raw: feature 'a': torch.int64 \(3,\); the golden request has \d+ ids",
        ),
        (
            other(
                Vocabulary(np.append(RAW_B, 1), np.append(np.arange(40), 48)),
                unknown="row",
                unknown_row=5,
            ),
            "feature 'b': its id map gives row 48, and .*t_b.weight has 48 rows",
        ),
        (
            other(Vocabulary(np.append(RAW_B, 100), np.append(np.arange(40), 0))),
            "the vocabulary of feature 'b': raw id 100 has two rows",
        ),
    ],
)
def test_refuses_by_name(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    storage = MemoryStorage()
    with pytest.raises(BadInputError, match=message):
        describe(Pipeline(), storage, tmp_path, **change)
    assert list(storage.list()) == []
