"""Files of ratings, of every edition of MovieLens, read in pieces.

Only two columns matter, who and which movie. They are whole numbers between separators, so a piece of the file is read
as an array of bytes: where the separators are, then one digit of every row at a time. That is fast, and the 25 million
ratings need no more memory than one piece.
"""

from __future__ import annotations

import csv
import gzip
import io
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO

import numpy as np

from pullback.data._errors import DataError
from pullback.data._source import open_npz, reading

PIECE = 1 << 21  # bytes read at once
Stream = IO[bytes] | gzip.GzipFile
Pairs = tuple[np.ndarray, np.ndarray]  # users and movies, one entry of each for every rating


@dataclass(frozen=True)
class Layout:
    """How an edition writes its ratings, and the name and separator of its file of titles."""

    ratings: str
    separator: bytes
    header: bool
    titles: str
    titles_separator: str


LAYOUTS = (
    Layout("ratings.csv", b",", True, "movies.csv", ","),  # latest, latest-small, 20M, 25M, 32M
    Layout("ratings.dat", b"::", False, "movies.dat", "::"),  # 1M, 10M
    Layout("u.data", b"\t", False, "u.item", "|"),  # 100K
)


@dataclass(frozen=True)
class Ratings:
    """A file of ratings: alone, in a folder, in a zip archive, or as arrays in an npz."""

    path: Path

    def pieces(self) -> Iterator[Pairs]:
        """Users and movies of all ratings, a piece of the file at a time."""
        if self.path.suffix == ".npz":
            with open_npz(self.path, "an npz of ratings") as arrays:
                yield arrays["user"].astype(np.int64), arrays["movie"].astype(np.int64)
            return
        name, layout = self._member()
        with self._open(name) as file:
            yield from _pairs(file, layout)

    def titles(self) -> dict[int, str]:
        """The titles of the movies; empty if there is no file of them."""
        if self.path.suffix == ".npz":
            beside = self.path.with_name(f"{self.path.stem}_movies.csv.gz")
            return _titles(gzip.decompress(beside.read_bytes()), ",") if beside.exists() else {}
        name, layout = self._member()
        other = str(PurePosixPath(name).with_name(layout.titles))
        if other not in self._names():
            return {}
        with self._open(other) as file:
            return _titles(file.read(), layout.titles_separator)

    def _names(self) -> list[str]:
        """Files that belong to the data: names in the archive or the folder, or the file itself and its neighbors."""
        if self.path.suffix == ".zip":
            with reading(self.path, "a zip archive"), zipfile.ZipFile(self.path) as archive:
                return archive.namelist()
        folder = self.path if self.path.is_dir() else self.path.parent
        return [file.name for file in folder.iterdir()]

    def _member(self) -> tuple[str, Layout]:
        names = [self.path.name] if self.path.is_file() and self.path.suffix != ".zip" else self._names()
        for layout in LAYOUTS:
            for name in names:
                if PurePosixPath(name).name.removesuffix(".gz") == layout.ratings:
                    return name, layout
        expected = ", ".join(layout.ratings for layout in LAYOUTS)
        raise DataError(
            f"{self.path} has no file of ratings ({expected}): pass path= an edition of MovieLens, zipped or unpacked."
        )

    @contextmanager
    def _open(self, name: str) -> Iterator[Stream]:
        with reading(self.path, f"MovieLens ({name})"):
            if self.path.suffix == ".zip":
                with zipfile.ZipFile(self.path) as archive, archive.open(name) as file:
                    yield file
            else:
                file = (self.path if self.path.is_dir() else self.path.parent) / name
                with gzip.open(file) if name.endswith(".gz") else open(file, "rb") as stream:
                    yield stream


def _pairs(file: Stream, layout: Layout) -> Iterator[Pairs]:
    if layout.header:
        header = file.readline(1000).strip().lower().replace(b"\xef\xbb\xbf", b"")
        if not header.startswith(b"userid,movieid,rating"):
            raise ValueError(f"its first line is {header[:60]!r}, not userId,movieId,rating,timestamp")
    rest, row = b"", 1 + layout.header
    while piece := file.read(PIECE):
        rest, newline, tail = _cut(rest + piece)
        if newline:
            users, movies = _columns(rest, layout.separator, row)
            row += len(users)
            yield users, movies
        rest = tail
    if rest.strip():
        yield _columns(rest + b"\n", layout.separator, row)


def _cut(data: bytes) -> tuple[bytes, bool, bytes]:
    """The complete lines, whether there are any, and the beginning of the next."""
    end = data.rfind(b"\n") + 1
    return data[:end], end > 0, data[end:]


def _columns(lines: bytes, separator: bytes, row: int) -> Pairs:
    """The first two of the four columns."""
    data = np.frombuffer(lines, np.uint8)
    ends = np.flatnonzero(data == ord("\n"))
    marks = np.flatnonzero(data == separator[0])
    width = 3 * len(separator)
    per_line = np.diff(np.searchsorted(marks, ends), prepend=0)
    if (per_line != width).any():
        raise ValueError(f"line {row + int(np.argmax(per_line != width))} does not have four columns")
    marks = marks.reshape(-1, width)
    starts = np.concatenate([[0], ends[:-1] + 1])
    users = _integers(data, starts, marks[:, 0], row)
    return users, _integers(data, marks[:, len(separator) - 1] + 1, marks[:, len(separator)], row)


def _integers(data: np.ndarray, start: np.ndarray, stop: np.ndarray, row: int) -> np.ndarray:
    """The whole numbers in ``data[start:stop]``, one for each entry."""
    lengths = stop - start
    values = np.zeros(len(start), np.int64)
    wrong = (lengths < 1) | (lengths > 9)
    for place in range(int(lengths.max(initial=0)) if not wrong.any() else 0):
        inside = place < lengths
        digit = data[np.minimum(start + place, stop - 1)].astype(np.int64) - ord("0")
        wrong |= inside & ((digit < 0) | (digit > 9))
        values = np.where(inside, 10 * values + digit, values)
    if wrong.any():
        raise ValueError(f"line {row + int(np.argmax(wrong))} does not begin with the numbers of a user and a movie")
    return values


def _titles(data: bytes, separator: str) -> dict[int, str]:
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:  # the older editions
        text = data.decode("latin-1")
    if separator == ",":
        rows = list(csv.reader(io.StringIO(text)))[1:]
    else:
        rows = [line.split(separator) for line in text.splitlines()]
    return {int(row[0]): row[1] for row in rows if len(row) > 1}
