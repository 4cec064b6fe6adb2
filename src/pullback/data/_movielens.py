"""Movies seen: MovieLens as a table of zeros and ones."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from torch import Tensor

from pullback.data._download import Collection, Remote
from pullback.data._errors import DataError
from pullback.data._ratings import Pairs, Ratings
from pullback.data._source import announce, first_file, locate, reading
from pullback.data._tastes import viewings

if TYPE_CHECKING:
    from jaxtyping import Bool, Integer

Edition = Literal["latest-small", "25m"]

LICENSE = (
    "F. M. Harper and J. A. Konstan, The MovieLens datasets, ACM TiiS 5(4):19, 2015. For research, without endorsement "
    "by the University of Minnesota and without commercial use; redistribution as the README of each edition says."
)
HOST = "https://files.grouplens.org/datasets/movielens/"
SHA256: dict[Edition, str] = {
    "latest-small": "696d65a3dfceac7c45750ad32df2c259311949efec81f0f144fdfb91ebc9e436",
    "25m": "8b21cfb7eb1706b4ec0aac894368d90acf26ebdfb6aced3ebd4ad5bd1eb9c6aa",
}
LOCAL = (
    "ml-25m",
    "ml_latest_2148_users.npz",
    "ml-latest-small",
)  # any of them will do if no edition is asked for, the largest first
STANDIN = "A stand-in for MovieLens: generated viewers with generated tastes. No real person or movie."
REMEDY = "Set PULLBACK_DATA, or pass path= an edition of MovieLens, zipped or unpacked."


@dataclass(frozen=True)
class Viewings:
    """Who has seen which movie.

    Attributes:
        seen: a row for each viewer, a column for each movie, the most rated first.
        titles: of the movies.
        movies: their numbers in MovieLens.
        users: the viewers' numbers in MovieLens.
        source: a sentence that says where the data come from.
        license: the terms they come under.
        standin: whether they stand in for the data that were asked for.
    """

    seen: Bool[Tensor, "users movies"]
    titles: tuple[str, ...]
    movies: Integer[Tensor, " movies"]
    users: Integer[Tensor, " users"]
    source: str
    license: str
    standin: bool


@dataclass(frozen=True)
class Filter:
    """Which movies and which viewers to keep."""

    num_movies: int
    min_seen: int
    max_seen: int
    num_users: int | None
    seed: int

    def __post_init__(self) -> None:
        nobody = self.num_users is not None and self.num_users < 1
        if self.num_movies < 1 or not 0 <= self.min_seen <= self.max_seen or nobody:
            raise DataError(
                f"num_movies={self.num_movies}, min_seen={self.min_seen}, max_seen={self.max_seen}, "
                f"num_users={self.num_users} keep nothing: give positive numbers with min_seen <= max_seen."
            )


def movielens(
    path: str | os.PathLike[str] | None = None,
    *,
    edition: Edition | None = None,
    num_movies: int = 60,
    min_seen: int = 2,
    max_seen: int = 30,
    num_users: int | None = 10_000,
    seed: int = 0,
    download: bool = True,
) -> Viewings:
    """Who has seen which of the most rated movies, from ``path``, ``PULLBACK_DATA``, a download or, failing all,
    generated.

    The preprocessing of Arvanitidis et al. 2022: the 60 most rated movies, then viewers who have seen 2 to 30 of them,
    at most 10,000. (The paper mentions the bounds three times, each a little differently; they are included here.)

    Args:
        path: ``ratings.csv``, ``ratings.dat`` or ``u.data``; the folder or the zip archive of any edition with one of
            them; or an npz with arrays ``user`` and ``movie``.
        edition: ``"25m"`` is the paper's (262 MB), ``"latest-small"`` has 610 users (1 MB). If not given, the largest
            under ``PULLBACK_DATA`` is taken, and the small one downloaded.
        num_movies: how many movies to keep; of those rated equally often, the ones added to MovieLens last.
        min_seen: viewers have seen at least so many of those movies,
        max_seen: and at most so many.
        num_users: how many viewers to keep, drawn at random if there are more; all if None.
        seed: of that draw, and of the stand-in.
        download: whether to download what is neither at ``path`` nor under ``PULLBACK_DATA``.

    Raises:
        DataError: a file is missing, broken, cut off or of another kind, or nobody is left.
    """
    keep = Filter(num_movies, min_seen, max_seen, num_users, seed)
    if edition not in (None, *SHA256):
        raise DataError(
            f"edition must be one of {', '.join(SHA256)}, not {edition!r}; for another one pass path= its archive."
        )
    what = "MovieLens" if edition is None else f"MovieLens {edition}"
    collection = _collection(edition or "latest-small")
    found = locate(what, path, find=_finder(edition), collection=collection, download=download)
    if found is None:
        return _generated(keep)
    file = (_finder(edition)(found.path) or found.path) if found.path.is_dir() else found.path
    with reading(file, "MovieLens"):
        return _viewings(Ratings(file).pieces, Ratings(file).titles, keep, found.source)


def _collection(edition: Edition) -> Collection:
    remote = Remote((f"{HOST}ml-{edition}.zip",), SHA256[edition])
    return Collection("movielens", f"MovieLens {edition} at files.grouplens.org", LICENSE, (remote,))


def _finder(edition: Edition | None) -> Callable[[Path], Path | None]:
    names = [name for name in LOCAL if edition is None or name == f"ml-{edition}"]
    tries = [name + suffix for name in names for suffix in ("", ".zip") if not (suffix and name.endswith(".npz"))]
    return lambda folder: first_file(folder, tries, ("movielens",))


def _generated(keep: Filter) -> Viewings:
    seen, titles = viewings(keep.seed)
    users, movies = np.nonzero(seen)
    source = announce(STANDIN, REMEDY)
    result = _viewings(lambda: iter([(users, movies)]), lambda: dict(enumerate(titles)), keep, source)
    return Viewings(result.seen, result.titles, result.movies, result.users, source, "Generated: none.", standin=True)


def _viewings(
    pieces: Callable[[], Iterator[Pairs]], titles: Callable[[], dict[int, str]], keep: Filter, source: str
) -> Viewings:
    """Reads the ratings twice, to count and to collect, so that they are never in memory all at once."""
    movies = _most_rated(pieces(), keep.num_movies)
    users, seen = _table(pieces(), movies)
    rows = _chosen(seen.sum(1), keep)
    names = titles()
    return Viewings(
        seen=torch.from_numpy(seen[rows]),
        titles=tuple(names.get(int(movie), f"movie {movie}") for movie in movies),
        movies=torch.from_numpy(movies),
        users=torch.from_numpy(users[rows].astype(np.int64)),
        source=source,
        license=LICENSE,
        standin=False,
    )


def _most_rated(pieces: Iterator[Pairs], num_movies: int) -> np.ndarray:
    """The numbers of the movies with the most ratings; the higher number first where they have equally many."""
    counts = np.zeros(0, np.int64)
    for _, movies in pieces:
        more = np.bincount(movies, minlength=len(counts))
        more[: len(counts)] += counts
        counts = more
    order = np.lexsort((-np.arange(len(counts)), -counts))[:num_movies]
    if len(order) < num_movies or not counts[order[-1]]:
        raise DataError(
            f"There are {np.count_nonzero(counts)} movies with ratings: ask for num_movies of at most that many."
        )
    return order


def _table(pieces: Iterator[Pairs], movies: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The viewers of any of the movies in ascending order, and the table of what they have seen."""
    column = np.full(movies.max() + 1, -1)
    column[movies] = np.arange(len(movies))
    found: list[Pairs] = []
    for users, rated in pieces:
        place = np.where(rated < len(column), column[np.minimum(rated, len(column) - 1)], -1)
        found.append((users[place >= 0].astype(np.int32), place[place >= 0].astype(np.int32)))
    viewers, columns = (np.concatenate(part) for part in zip(*found, strict=True))
    users, rows = np.unique(viewers, return_inverse=True)
    seen = np.zeros((len(users), len(movies)), bool)
    seen[rows, columns] = True
    return users, seen


def _chosen(num_seen: np.ndarray, keep: Filter) -> np.ndarray:
    """The rows to keep, in their order."""
    rows = np.flatnonzero((num_seen >= keep.min_seen) & (num_seen <= keep.max_seen))
    if not len(rows):
        raise DataError(
            f"No viewer has seen {keep.min_seen} to {keep.max_seen} of the {keep.num_movies} most rated movies: widen "
            "min_seen and max_seen."
        )
    if keep.num_users is None or len(rows) <= keep.num_users:
        return rows
    return np.sort(np.random.default_rng(keep.seed).choice(rows, keep.num_users, replace=False))
