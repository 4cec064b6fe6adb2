"""Where a data set comes from, in one place.

Every loader asks the same four in turn and takes the first that answers: the ``path=`` of the caller; the folder that
the environment variable ``PULLBACK_DATA`` names; a download, checked by its SHA-256 and kept in a cache; a stand-in,
which needs nothing at all. Only the caller's own files are taken on trust. What was found says so in a sentence
(`Found.source`), which loaders hand on with the data.
"""

from __future__ import annotations

import gzip
import logging
import os
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pullback.data._download import Collection, fetch
from pullback.data._errors import DataError

logger = logging.getLogger("pullback.data")
FOLDER = "PULLBACK_DATA"


@dataclass(frozen=True)
class Found:
    """A file or folder that holds the data, and a sentence that says where it comes from."""

    path: Path
    source: str


def locate(
    what: str,
    path: str | os.PathLike[str] | None,
    *,
    find: Callable[[Path], Path | None],
    collection: Collection | None,
    download: bool,
) -> Found | None:
    """The data's files, from the first of path, ``PULLBACK_DATA`` and download that has them; None leaves the stand-in.

    Args:
        what: the data, as the sentence names them.
        path: the caller's file or folder, which must exist.
        find: the file or folder below a folder that holds the data, or None.
        collection: what to download, or None where nothing can be downloaded.
        download: whether to use the network; files in the cache are used either way.
    """
    if path is not None:
        given = existing(Path(path).expanduser())
        return Found(given, f"{what}, from {given.name}.")
    if (folder := data_folder()) is not None and (file := find(folder)) is not None:
        return Found(file, f"{what}, from {file.name} under {FOLDER}.")
    cached = fetch(collection, download=download) if collection is not None else None
    return Found(cached, f"{what}, downloaded from {collection.origin}.") if collection and cached else None


def existing(path: Path) -> Path:
    """The path itself, if something lies there."""
    if not path.exists():
        raise DataError(f"{path} does not exist: pass path= a file or folder that does, or leave it out.")
    return path


def data_folder() -> Path | None:
    """The folder that the environment variable ``PULLBACK_DATA`` names, or None where it is not set."""
    name = os.environ.get(FOLDER)
    if not name:
        return None
    folder = Path(name).expanduser()
    if not folder.is_dir():
        raise DataError(f"{FOLDER} is {name!r}, which is not a folder: correct the variable or unset it.")
    return folder


def first_file(folder: Path, names: list[str], subfolders: tuple[str, ...]) -> Path | None:
    """The first of the names, plain or with ``.gz``, that lies in the folder or one of its subfolders."""
    places = [folder, *(folder / sub for sub in subfolders)]
    tries = (place / (name + suffix) for name in names for suffix in ("", ".gz") for place in places)
    return next((file for file in tries if file.exists()), None)


def announce(standin: str, remedy: str) -> str:
    """Logs that a stand-in is used and what to do about it, and returns the sentence for the data's ``source``."""
    logger.warning("%s %s", standin, remedy)
    return standin


@contextmanager
def reading(path: Path, kind: str) -> Iterator[None]:
    """Turns whatever a broken file makes its reader raise into a sentence that names the file."""
    try:
        yield
    except DataError:
        raise
    except (OSError, EOFError, ValueError, LookupError, zlib.error, zipfile.BadZipFile) as error:
        cause = str(error).strip().rstrip(".") or type(error).__name__
        raise DataError(
            f"{path} cannot be read as {kind} ({cause}). It is cut off, damaged or something else: "
            "get the file again, or pass path= another."
        ) from error


@contextmanager
def open_npz(path: Path, kind: str) -> Iterator[Mapping[str, np.ndarray]]:
    """The arrays of an npz file, closed in any case: numpy leaves the files open that it cannot read."""
    with reading(path, kind), open(path, "rb") as file:
        arrays = np.load(file)
        if not isinstance(arrays, Mapping):
            raise ValueError("it holds a single array")
        yield arrays


def read_bytes(path: Path) -> bytes:
    """The contents of a file, unpacked if it is gzipped, whatever its name."""
    data = path.read_bytes()
    return gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data
