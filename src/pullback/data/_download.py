"""Downloads that are checked and never half kept.

`pooch <https://www.fatiando.org/pooch>`_ downloads and keeps the cache: a file enters it, by a rename, only once its
SHA-256 is the known one. A broken connection is tried again, at the next address if there is one.
"""

from __future__ import annotations

import logging
import os
import warnings
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from pullback._progress import is_watched
from pullback.data._errors import DataError

logger = logging.getLogger("pullback.data")
CACHE = "PULLBACK_CACHE"
# Seconds without an answer until a connection counts as broken: a machine without a network is told soon.
PATIENCE = 5.0
# Rounds over all addresses of a file.
ATTEMPTS = 3


@dataclass(frozen=True)
class Remote:
    """One file: its addresses, the first preferred, and its SHA-256."""

    urls: tuple[str, ...]
    sha256: str

    @property
    def name(self) -> str:
        """The file's name in the cache."""
        return self.urls[0].rsplit("/", 1)[-1]


@dataclass(frozen=True)
class Collection:
    """Files that make up a data set, the cache's folder for them, and what users are told: the origin and the
    license."""

    folder: str
    origin: str
    license: str
    files: tuple[Remote, ...]


def fetch(collection: Collection, *, download: bool) -> Path | None:
    """The folder of the files, or the file if it is only one; None if they are not in the cache and cannot be
    downloaded."""
    try:
        pooch = _pooch()
    except ImportError:
        logger.info("Downloads need pooch: pip install 'pullback[data]'")
        return None
    cache = Path(os.environ.get(CACHE) or pooch.os_cache("pullback")) / collection.folder
    wanted = [remote for remote in collection.files if not _is_cached(cache / remote.name, remote)]
    if wanted and not download:
        return None
    if wanted:
        pooch.get_logger().info("%s. %s", collection.origin, collection.license)
    try:
        for remote in wanted:
            _retrieve(remote, cache)
    except OSError as error:
        logger.warning("Could not download %s: %s", collection.origin, error)
        return None
    return cache / collection.files[0].name if len(collection.files) == 1 else cache


def _pooch() -> ModuleType:
    """The package, imported without the warning that its progress bars give in a notebook where ipywidgets is
    missing."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import pooch
    return pooch


def _is_cached(file: Path, remote: Remote) -> bool:
    return file.is_file() and _pooch().file_hash(str(file)) == remote.sha256


def _retrieve(remote: Remote, cache: Path) -> None:
    """Tries the addresses in turn, and all of them again; raises `OSError` if none answers, `DataError` for another
    file."""
    pooch = _pooch()
    unreachable, wrong = None, None
    for url in remote.urls * ATTEMPTS:
        try:
            downloader = pooch.HTTPDownloader(timeout=PATIENCE, progressbar=is_watched())
            pooch.retrieve(url, f"sha256:{remote.sha256}", remote.name, cache, downloader=downloader)
            return
        except OSError as error:
            unreachable = error
        except ValueError as error:
            wrong = error
    if wrong is not None:
        raise DataError(
            f"What came from {' and '.join(remote.urls)} is not {remote.name}: its SHA-256 differs from "
            f"{remote.sha256}. Nothing was kept. Try again, pass path= a file of your own, or download=False to do "
            "without."
        ) from wrong
    raise unreachable or OSError(f"{remote.name} has no address")
