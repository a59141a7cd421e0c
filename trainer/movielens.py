"""MovieLens-100k as a click-prediction task: will this user rate this film 4 or more?

The data set (Harper and Konstan, 2015; GroupLens) is read where the `recbole` package
installed it and never copied. Rows of the user and item tables are the data set's own
numbers, so a request to a served model names users and films as GroupLens does.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Container, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ckpt.errors import BadInputError, NotFoundError

SINGLE_FEATURES = ("user", "item", "age", "gender", "occupation", "year", "hour")
"""Features with exactly one id a sample, in the order of `Samples.ids`' columns."""

FEATURES = (*SINGLE_FEATURES, "genres")
DENSE_FEATURES = ("timestamp", "age", "year")
HELD_OUT = 0.1

_AGE_BOUNDS = (18, 25, 35, 45, 50, 56)
_FIRST_YEAR = 1921  # year ids start at 1; 0 stands for unknown
_RATINGS_HEADER = "user_id:token\titem_id:token\trating:float\ttimestamp:float"
_INSTALL = "install it with `pip install --no-deps recbole==1.2.1`, or set [data] folder"


@dataclass(frozen=True)
class Samples:
    """Some ratings, oldest first.

    ids: int64 (n, 7), one column for each of SINGLE_FEATURES.
    genres, genre_lengths: int64, the film's genre ids of all samples one after another, and how
        many each has.
    dense: float32 (n, 3), the columns of DENSE_FEATURES, each about in [-2, 2].
    labels: float32 (n,), 1 where the rating is 4 or 5.
    event_times_s: int64 (n,), when each rating was given, Unix seconds.
    """

    ids: Tensor
    genres: Tensor
    genre_lengths: Tensor
    dense: Tensor
    labels: Tensor
    event_times_s: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, index: Tensor) -> Samples:
        """The samples at `index`, int64 (m,), in that order."""
        where, lengths = _of_lists(self.genre_lengths, index)
        return Samples(
            self.ids[index],
            self.genres[where],
            lengths,
            self.dense[index],
            self.labels[index],
            self.event_times_s[index],
        )


@dataclass(frozen=True)
class MovieLens:
    """The whole task: training samples, each user's newest tenth held out, and table sizes."""

    train: Samples
    test: Samples
    rows: dict[str, int]


def find_dataset() -> Path:
    """The folder that holds `ml-100k.inter`, inside the installed recbole, which isn't imported."""
    spec = importlib.util.find_spec("recbole")
    places = list(spec.submodule_search_locations or ()) if spec else []
    for place in places:
        folder = Path(place) / "dataset_example" / "ml-100k"
        if (folder / "ml-100k.inter").is_file():
            return folder
    raise NotFoundError(
        f"MovieLens-100k comes with the recbole package, not found here: {_INSTALL}"
    )


def load_movielens(folder: Path | None = None) -> MovieLens:
    """Read the three atomic files of `folder`, or of the installed recbole.

    NotFoundError where a file is missing, BadInputError naming file and line where one is broken.
    """
    folder = find_dataset() if folder is None else folder
    users, occupations = _read_users(folder / "ml-100k.user")
    items, genre_rows, genre_count = _read_items(folder / "ml-100k.item")
    ratings = _read_ratings(folder / "ml-100k.inter", users.keys(), items.keys())
    # Many ratings share a second. They stay in the file's order: sorting them by film would hold
    # out mostly films with high numbers.
    ratings = ratings[np.argsort(ratings[:, 3], kind="stable")]
    user, item, rating, stamp = ratings.T

    # Facts are looked up once for each user and film, and then laid out over the ratings.
    each_user, of_user = np.unique(user, return_inverse=True)
    each_item, of_item = np.unique(item, return_inverse=True)
    age, gender, occupation = np.array([users[u] for u in each_user])[of_user].T
    year = np.array([items[i] for i in each_item])[of_item]
    ids = np.stack(
        [
            user,
            item,
            np.digitize(age, _AGE_BOUNDS),
            gender,
            occupation,
            np.where(year > 0, np.clip(year - _FIRST_YEAR, 0, 79) + 1, 0),
            stamp // 3600 % 24,  # the hour in UTC
        ],
        axis=1,
    )
    known_year = np.where(year > 0, year, 1990)
    span = max(1, int(stamp.max() - stamp.min()))
    dense = np.stack(
        [2 * (stamp - stamp.min()) / span - 1, (age - 36) / 12, (known_year - 1990) / 15], axis=1
    )
    lists = [genre_rows[i] for i in each_item]
    in_lists = torch.tensor([g for row in lists for g in row], dtype=torch.int64)
    list_lengths = torch.tensor([len(row) for row in lists], dtype=torch.int64)
    where, genre_lengths = _of_lists(list_lengths, torch.from_numpy(of_item))
    samples = Samples(
        ids=torch.from_numpy(ids.astype(np.int64)),
        genres=in_lists[where],
        genre_lengths=genre_lengths,
        dense=torch.from_numpy(dense.astype(np.float32)),
        labels=torch.from_numpy((rating >= 4).astype(np.float32)),
        event_times_s=torch.from_numpy(stamp.astype(np.int64)),
    )
    held = torch.from_numpy(_held_out(user))
    rows = {
        "user": max(users) + 1,
        "item": max(items) + 1,
        "age": len(_AGE_BOUNDS) + 1,
        "gender": 2,
        "occupation": occupations,
        "year": 81,
        "hour": 24,
        "genres": genre_count,
    }
    every = torch.arange(len(samples))
    return MovieLens(samples.take(every[~held]), samples.take(every[held]), rows)


def item_mean_scores(train: Samples, items: Tensor, smoothing: float = 2.0) -> Tensor:
    """The baseline: each film's share of high ratings in `train`, drawn towards the overall mean.

    Args:
        train: the ratings to learn from.
        items: int64 (m,), the films to score.
        smoothing: how many ratings at the overall mean each film is given beforehand.
    """
    item = train.ids[:, SINGLE_FEATURES.index("item")]
    size = int(torch.cat([item, items]).max()) + 1
    labels = train.labels.double()
    count = torch.bincount(item, minlength=size).double()
    high = torch.bincount(item, weights=labels, minlength=size)
    return ((high + smoothing * labels.mean()) / (count + smoothing))[items]


def _of_lists(lengths: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """Where in the concatenation of lists those at `index` have their values, and their lengths."""
    starts = torch.cumsum(lengths, 0) - lengths
    taken = lengths[index]
    # Position of each value: its list's start, plus how far into that list it is.
    ends = torch.cumsum(taken, 0)
    within = torch.arange(int(taken.sum())) - torch.repeat_interleave(ends - taken, taken)
    return torch.repeat_interleave(starts[index], taken) + within, taken


def _held_out(user: np.ndarray) -> np.ndarray:
    """Mask of each user's last tenth; `user` is in time order."""
    held = np.zeros(len(user), dtype=bool)
    by_user = np.argsort(user, kind="stable")
    _, starts, counts = np.unique(user[by_user], return_index=True, return_counts=True)
    for start, count in zip(starts, counts, strict=True):
        held[by_user[start + count - int(count * HELD_OUT) : start + count]] = True
    return held


def _rows(path: Path, columns: tuple[str, ...]) -> Iterator[tuple[int, list[str]]]:
    """(line number, the named columns) of one tab-separated atomic file."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        raise NotFoundError(f"{path}: no such file; {_INSTALL}") from None
    except (OSError, UnicodeDecodeError) as e:
        raise BadInputError(f"{path}: can't be read: {e}") from e
    header = [c.partition(":")[0] for c in lines[0].split("\t")] if lines else []
    missing = [c for c in columns if c not in header]
    if missing:
        raise BadInputError(f"{path}: no column {missing[0]!r} in its first line; {_INSTALL}")
    where = [header.index(c) for c in columns]
    for number, line in enumerate(lines[1:], 2):
        cells = line.split("\t")
        if len(cells) != len(header):
            raise BadInputError(f"{path}:{number}: {len(cells)} cells, expected {len(header)}")
        yield number, [cells[i] for i in where]


def _int(text: str, path: Path, number: int) -> int:
    try:
        return int(float(text))
    except ValueError:
        raise BadInputError(f"{path}:{number}: {text!r} is not a number") from None


def _read_users(path: Path) -> tuple[dict[int, tuple[int, int, int]], int]:
    """User -> (age in years, gender id, occupation id), and the number of occupations."""
    rows = [
        (_int(u, path, n), _int(a, path, n), int(g == "F"), o)
        for n, (u, a, g, o) in _rows(path, ("user_id", "age", "gender", "occupation"))
    ]
    vocabulary = {name: i for i, name in enumerate(sorted({o for *_, o in rows}))}
    return {u: (a, g, vocabulary[o]) for u, a, g, o in rows}, len(vocabulary)


def _read_items(path: Path) -> tuple[dict[int, int], dict[int, list[int]], int]:
    """Film -> release year (0: unknown), film -> genre ids, and the number of genres."""
    # Two films have no year: the file says "unkonwn" and "V" there.
    rows = [
        (_int(i, path, n), int(y) if y.isdecimal() else 0, g.split())
        for n, (i, y, g) in _rows(path, ("item_id", "release_year", "class"))
    ]
    vocabulary = {name: i for i, name in enumerate(sorted({g for *_, gs in rows for g in gs}))}
    years = {i: y for i, y, _ in rows}
    return years, {i: [vocabulary[g] for g in gs] for i, _, gs in rows}, len(vocabulary)


def _ratings_at_once(path: Path, users: Container[int], items: Container[int]) -> np.ndarray | None:
    """What `_read_ratings` returns, in a fifth of its time; None where it has something to object to."""
    try:
        header, *lines = path.read_text(encoding="utf-8").splitlines()
        if header != _RATINGS_HEADER or not lines:
            return None
        ratings = np.loadtxt(lines, delimiter="\t", comments=None, ndmin=2).astype(np.int64)
    except (OSError, ValueError):
        return None
    known = all(u in users for u in np.unique(ratings[:, 0])) and all(
        i in items for i in np.unique(ratings[:, 1])
    )
    return ratings if known and ratings.shape == (len(lines), 4) else None


def _read_ratings(path: Path, users: Container[int], items: Container[int]) -> np.ndarray:
    """int64 (n, 4): user, film, rating, timestamp in seconds since 1970."""
    if (quick := _ratings_at_once(path, users, items)) is not None:
        return quick
    ratings = []
    for n, cells in _rows(path, ("user_id", "item_id", "rating", "timestamp")):
        row = [_int(c, path, n) for c in cells]
        if row[0] not in users:
            raise BadInputError(f"{path}:{n}: user {row[0]} is not in ml-100k.user; {_INSTALL}")
        if row[1] not in items:
            raise BadInputError(f"{path}:{n}: film {row[1]} is not in ml-100k.item; {_INSTALL}")
        ratings.append(row)
    if not ratings:
        raise BadInputError(f"{path}: no ratings; {_INSTALL}")
    return np.array(ratings)
