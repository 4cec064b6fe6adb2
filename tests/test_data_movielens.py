"""Viewings: every layout of the same ratings reads the same, and the paper's filter against a count by hand."""

from __future__ import annotations

import gzip
import os
import zipfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from pullback import data
from pullback.data import _ratings

REAL = os.environ.get("PULLBACK_DATA")
needs_real = pytest.mark.skipif(not REAL, reason="PULLBACK_DATA is not set")


@pytest.fixture
def nothing(monkeypatch, tmp_path):
    """No data anywhere."""
    monkeypatch.delenv("PULLBACK_DATA", raising=False)
    monkeypatch.setenv("PULLBACK_CACHE", str(tmp_path / "cache"))


def ratings(num_users: int = 60, num_movies: int = 30) -> list[tuple[int, int]]:
    """Movies with a low number are popular, users with a high number see much."""
    chance = np.outer(np.linspace(0.1, 1, num_users), np.linspace(0.9, 0.05, num_movies))
    users, movies = np.nonzero(np.random.default_rng(0).random(chance.shape) < chance)
    return [(int(user) + 1, 7 * int(movie) + 5) for user, movie in zip(users, movies, strict=True)]


PAIRS = ratings()
TITLES = {movie: f'Café, the "{movie}th" (1999)' for movie in sorted({movie for _, movie in PAIRS})}


def table(separator: str, end: str = "\n") -> str:
    return "".join(separator.join([str(user), str(movie), "3.5", "1147880044"]) + end for user, movie in PAIRS)


def write_edition(folder: Path, layout: str) -> Path:
    """One of the layouts in which MovieLens is published; returns what to pass as path."""
    folder.mkdir(parents=True, exist_ok=True)
    quoted = {movie: title.replace('"', '""') for movie, title in TITLES.items()}
    csv = "userId,movieId,rating,timestamp\r\n" + table(",", "\r\n")
    titles = "movieId,title,genres\r\n" + "".join(f'{movie},"{title}",Drama\r\n' for movie, title in quoted.items())
    match layout:
        case "csv" | "folder" | "gz":
            (folder / "movies.csv").write_text(titles, encoding="utf-8", newline="")
            (folder / "ratings.csv").write_text(csv, newline="")
            if layout == "gz":
                (folder / "ratings.csv.gz").write_bytes(gzip.compress((folder / "ratings.csv").read_bytes()))
            return {"csv": folder / "ratings.csv", "folder": folder, "gz": folder / "ratings.csv.gz"}[layout]
        case "zip":
            with zipfile.ZipFile(folder / "ml-25m.zip", "w", zipfile.ZIP_DEFLATED) as archive:
                archive.writestr("ml-25m/ratings.csv", csv)
                archive.writestr("ml-25m/movies.csv", titles)
            return folder / "ml-25m.zip"
        case "dat":
            (folder / "ratings.dat").write_text(table("::").rstrip("\n"))  # no newline at the end
            lines = (f"{movie}::{title}::Drama\n" for movie, title in TITLES.items())
            (folder / "movies.dat").write_text("".join(lines), encoding="latin-1")
        case "100k":
            (folder / "u.data").write_text(table("\t"))
            lines = (f"{movie}|{title}|01-Jan-1995||\n" for movie, title in TITLES.items())
            (folder / "u.item").write_text("".join(lines), encoding="latin-1")
        case "npz":
            user, movie = np.array(PAIRS, np.int32).T
            np.savez(folder / "some.npz", user=user, movie=movie)
            (folder / "some_movies.csv.gz").write_bytes(gzip.compress(titles.encode()))
            return folder / "some.npz"
    return folder


LAYOUTS = ["csv", "folder", "gz", "zip", "dat", "100k", "npz"]


@pytest.mark.parametrize("piece", [5, 100, 1 << 21])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_filter_agrees_with_counting(tmp_path, monkeypatch, layout, piece):
    monkeypatch.setattr(_ratings, "PIECE", piece)
    views = data.movielens(write_edition(tmp_path, layout), num_movies=12, min_seen=3, max_seen=8)
    counts = Counter(movie for _, movie in PAIRS)
    popular = sorted(counts, key=lambda movie: (-counts[movie], -movie))[:12]
    seen = {user: {movie for u, movie in PAIRS if u == user} & set(popular) for user, _ in PAIRS}
    users = sorted(user for user, movies in seen.items() if 3 <= len(movies) <= 8)
    assert views.movies.tolist() == popular
    assert views.users.tolist() == users
    assert views.seen.tolist() == [[movie in seen[user] for movie in popular] for user in users]
    assert views.titles == tuple(TITLES[movie] for movie in popular)
    assert not views.standin


def test_some_viewers_are_drawn(tmp_path):
    path = write_edition(tmp_path, "csv")
    everyone = data.movielens(path, num_movies=12, max_seen=8)
    some = data.movielens(path, num_movies=12, max_seen=8, num_users=9)
    again = data.movielens(path, num_movies=12, max_seen=8, num_users=9)
    other = data.movielens(path, num_movies=12, max_seen=8, num_users=9, seed=1)
    assert some.seen.shape == (9, 12)
    assert torch.equal(some.users, again.users)
    assert not torch.equal(some.users, other.users)
    rows = [everyone.users.tolist().index(user) for user in some.users.tolist()]
    assert rows == sorted(rows)
    assert torch.equal(everyone.seen[rows], some.seen)


def test_editions_under_the_environment(tmp_path, monkeypatch, nothing):
    """The largest edition is taken unless one is asked for."""
    monkeypatch.setenv("PULLBACK_DATA", str(tmp_path))
    write_edition(tmp_path / "movielens" / "ml-latest-small", "folder")
    options = {"num_movies": 12, "download": False}
    assert "ml-latest-small" in data.movielens(**options).source
    assert data.movielens(edition="25m", **options).standin
    write_edition(tmp_path / "movielens", "zip")
    assert data.movielens(**options).source == "MovieLens, from ml-25m.zip under PULLBACK_DATA."
    assert "ml-latest-small" in data.movielens(edition="latest-small", **options).source


CSV = "userId,movieId,rating,timestamp\n" + table(",")
NPY = b"\x93NUMPY\x01\x00v\x00" + b"{'descr': '|u1', 'fortran_order': False, 'shape': (2,)}".ljust(117) + b"\n\x01\x02"
MOVIES_BROKEN = {
    "empty": ("ratings.csv", b"", "its first line is"),
    "other table": ("ratings.csv", b"a,b,c\n1,2,3\n", "its first line is"),
    "web page": ("ratings.csv", b"<html></html>", "its first line is"),
    "cut": ("ratings.csv", CSV[:-20].encode(), "does not have four columns"),
    "letter": ("ratings.csv", CSV.replace("\n9,", "\n9x,", 1).encode(), "does not begin with the numbers"),
    "no user": ("ratings.csv", CSV.replace("\n9,", "\n,", 1).encode(), "does not begin with the numbers"),
    "zip": ("ml.zip", b"PK\3\4 nothing else", "cannot be read as a zip archive"),
    "gzip": ("ratings.csv.gz", gzip.compress(CSV.encode())[:-20], "cannot be read as MovieLens"),
    "npz": ("some.npz", b"nothing", "cannot be read as an npz of ratings"),
    "single array": ("some.npz", NPY, "it holds a single array"),
    "other file": ("movies.csv", b"1,2,3", "has no file of ratings"),
    "other archive": ("ml.tar", b"", "has no file of ratings"),
}


@pytest.mark.parametrize("case", MOVIES_BROKEN)
def test_broken_ratings(tmp_path, case):
    name, contents, message = MOVIES_BROKEN[case]
    (tmp_path / name).write_bytes(contents)
    with pytest.raises(data.DataError, match=message) as raised:
        data.movielens(tmp_path / name)
    assert str(tmp_path / name) in str(raised.value)


def test_broken_line_is_named(tmp_path):
    lines = CSV.splitlines(keepends=True)
    lines[200] = "12;34\n"
    (tmp_path / "ratings.csv").write_text("".join(lines))
    with pytest.raises(data.DataError, match="line 201 does not have four columns"):
        data.movielens(tmp_path / "ratings.csv")


def test_truncated_archive(tmp_path):
    path = write_edition(tmp_path, "zip")
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(data.DataError, match=r"ml-25m\.zip cannot be read"):
        data.movielens(path)
    path.write_bytes(whole[:300] + bytes(200) + whole[500:])
    with pytest.raises(data.DataError, match=r"ml-25m\.zip cannot be read"):
        data.movielens(path, num_movies=12)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_movies": 0}, "give positive numbers"),
        ({"min_seen": 9, "max_seen": 3}, "min_seen <= max_seen"),
        ({"num_users": 0}, "give positive numbers"),
        ({"num_movies": 31}, "There are 30 movies with ratings"),
        ({"num_movies": 12, "min_seen": 0, "max_seen": 0}, "widen min_seen and max_seen"),
        ({"edition": "32m"}, "edition must be one of latest-small, 25m"),
    ],
)
def test_wrong_filter(tmp_path, options, message):
    with pytest.raises(data.DataError, match=message):
        data.movielens(write_edition(tmp_path, "csv"), **options)


def test_generated_viewings(nothing, caplog):
    views = data.movielens(download=False)
    assert views.standin
    assert views.source.startswith("A stand-in")
    assert views.source in caplog.text
    assert views.seen.shape == (10_000, 60)
    assert all(title.startswith("Generated") for title in views.titles)
    num_seen = views.seen.sum(1)
    assert num_seen.min() >= 2
    assert num_seen.max() <= 30
    assert views.seen.sum(0).min() >= 0.06 * len(views.seen)  # the paper's check of its own data
    assert torch.equal(views.seen, data.movielens(download=False).seen)


def test_generated_viewings_have_tastes(nothing):
    """Those who have seen a movie have seen more of its genre than others, and fewer of the opposite genre."""
    views = data.movielens(download=False)
    seen, genres = views.seen.double(), [title.split()[1] for title in views.titles]
    shares = {name: seen[:, [g == name for g in genres]].sum(1) / seen.sum(1) for name in set(genres)}
    for name, opposite in (("adventure", "drama"), ("comedy", "thriller"), ("romance", "science")):
        fans = views.seen[:, genres.index(name)]
        assert shares[name][fans].mean() > 1.3 * shares[name][~fans].mean()
        assert shares[opposite][fans].mean() < 0.8 * shares[opposite][~fans].mean()


@needs_real
@pytest.mark.parametrize(
    ("name", "num_users", "views", "mean"),
    [("ml_latest_2148_users.npz", 1391, (142, 240, 581), 11.5), ("ml-latest-small.zip", 459, (54, 99, 226), 14.0)],
)
def test_published_counts(name, num_users, views, mean):
    """Counts that were made without this reader."""
    table = data.movielens(Path(str(REAL)) / "movielens" / name)
    counts = table.seen.sum(0).numpy()
    assert table.seen.shape == (num_users, 60)
    assert (counts.min(), int(np.median(counts)), counts.max()) == views  # 99.5 is given as 99
    assert round(float(table.seen.sum(1).double().mean()), 1) == mean
    assert counts.min() >= 0.06 * num_users
    assert "Shawshank Redemption, The (1994)" in table.titles
