"""Downloads that are checked, resumed and never half kept.

`pooch <https://www.fatiando.org/pooch>`_ keeps the cache: a file enters it, by a rename, only once its SHA-256 is the known one. What pooch
lacks is patience with a broken connection, so `ResumingDownloader` writes to a ``.part`` file that the next attempt, or the next program,
continues with an HTTP range request (RFC 9110, section 14). A machine without a network is told within seconds.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import warnings
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from pullback.data._errors import DataError

if TYPE_CHECKING:
    import requests

logger = logging.getLogger("pullback.data")
CACHE = "PULLBACK_CACHE"
PATIENCE = 5.0  # seconds until a machine counts as having no network
CHUNK = 1 << 13  # bytes; what a broken connection may lose


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
    """Files that make up a data set, the cache's folder for them, and what users are told: the origin and the licence."""

    folder: str
    origin: str
    licence: str
    files: tuple[Remote, ...]


def fetch(collection: Collection, *, download: bool) -> Path | None:
    """The folder of the files, or the file if it is only one; None if they are not in the cache and cannot be downloaded."""
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
        pooch.get_logger().info("%s. %s", collection.origin, collection.licence)
    try:
        for remote in wanted:
            _retrieve(remote, cache)
    except OSError as error:
        logger.warning("Could not download %s: %s", collection.origin, error)
        return None
    return cache / collection.files[0].name if len(collection.files) == 1 else cache


def _pooch() -> ModuleType:
    """The package, imported without the warning that its progress bars give in a notebook where ipywidgets is missing."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import pooch
    return pooch


def _is_cached(file: Path, remote: Remote) -> bool:
    return file.is_file() and _pooch().file_hash(str(file)) == remote.sha256


def _retrieve(remote: Remote, cache: Path) -> None:
    """Tries the addresses in turn; raises `OSError` if none answers, `DataError` if one answers with another file."""
    part = cache / (remote.name + ".part")
    # The remains of an earlier attempt may be of another file. Once a wrong file is found it is thrown away: then begin afresh.
    urls = (*remote.urls, remote.urls[0]) if part.exists() else remote.urls
    unreachable, wrong = None, None
    for url in urls:
        try:
            downloader = ResumingDownloader(part, PATIENCE)
            _pooch().retrieve(url, f"sha256:{remote.sha256}", remote.name, cache, downloader=downloader)
            return
        except OSError as error:
            unreachable = error
        except ValueError as error:
            wrong = error
    if wrong is not None:
        raise DataError(
            f"What came from {' and '.join(remote.urls)} is not {remote.name}: its SHA-256 differs from {remote.sha256}. Nothing was "
            "kept. Try again, pass path= a file of your own, or download=False to do without."
        ) from wrong
    raise unreachable or OSError(f"{remote.name} has no address")


@dataclass(frozen=True)
class ResumingDownloader:
    """Downloads for pooch that continue where the last one stopped.

    Goes on by itself after a broken connection as long as every attempt brings something; what has come so far stays in ``part``. A host
    that says nothing for ``patience`` seconds has broken the connection.
    """

    part: Path
    patience: float

    def __call__(self, url: str, output_file: str, pooch: object) -> None:
        """Downloads the address to ``part``, and moves it to the output file once it is complete."""
        del pooch  # part of the signature, for downloaders that want its settings
        while not self._advance(url):
            pass
        os.replace(self.part, output_file)

    def _advance(self, url: str) -> bool:
        """Reads on until the end (True) or until the connection breaks after bringing something (False)."""
        import requests

        before = self._size()
        try:
            self._append(url, before)
        except (requests.ConnectionError, requests.Timeout, requests.exceptions.ChunkedEncodingError):
            if self._size() <= before:
                raise
            logger.info("The connection to %s broke after %d bytes: resuming", url, self._size())
            return False
        return True

    def _size(self) -> int:
        return self.part.stat().st_size if self.part.exists() else 0

    def _append(self, url: str, start: int) -> None:
        from tqdm import tqdm

        response = _open(url, start, self.patience)
        if response.status_code == 416:  # nothing comes after what is here: it is complete, or of another file
            response.close()
            if response.headers.get("Content-Range") == f"bytes */{start}":
                return
            self.part.unlink()
            start, response = 0, _open(url, 0, self.patience)
        with response:
            response.raise_for_status()
            start = start if response.status_code == 206 else 0
            rest = int(response.headers.get("Content-Length", 0))
            bar = tqdm(
                desc=url.rsplit("/", 1)[-1], initial=start, total=start + rest or None, unit="B", unit_scale=True
            )
            with bar, open(self.part, "ab" if start else "wb") as file:
                for chunk in response.iter_content(CHUNK):
                    bar.update(file.write(chunk))
        self._check_complete(url, start + rest)

    def _check_complete(self, url: str, expected: int) -> None:
        import requests

        if self._size() < expected:
            raise requests.ConnectionError(f"{url} stopped after {self._size()} of {expected} bytes")


def _open(url: str, start: int, patience: float) -> requests.Response:
    """The answer to a request for the bytes from ``start`` on.

    The request runs in a thread, because looking up the name of the host has no time limit of its own.
    """
    import requests

    # Compression on the way would make the length and the range those of other bytes.
    headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={start}-"} if start else {})
    answers: queue.SimpleQueue[requests.Response | requests.RequestException] = queue.SimpleQueue()

    def ask() -> None:
        try:
            answers.put(requests.get(url, headers=headers, stream=True, timeout=patience))
        except requests.RequestException as error:
            answers.put(error)

    threading.Thread(target=ask, daemon=True).start()
    try:
        answer = answers.get(timeout=2 * patience)
    except queue.Empty:
        raise requests.ConnectTimeout(f"{url} did not answer within {2 * patience:g} s") from None
    if isinstance(answer, Exception):
        raise answer
    return answer
