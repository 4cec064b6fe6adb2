"""Downloads: a server on this machine that can hang up, serve ranges or not, and serve the wrong file."""

from __future__ import annotations

import hashlib
import io
import logging
import socket
import sys
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pooch
import pytest

from pullback import data
from pullback.data import _download, _mnist, _motion, _movielens

# pooch leaves the socket and the progress bar of a broken connection to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

NAME = "ml-latest-small.zip"
SOME = 80_000


def archive() -> bytes:
    """A small edition of MovieLens; the padding is incompressible, so that the connection can break in the middle."""
    random = np.random.default_rng(0)
    rows = [f"{user},{movie},4.0,0" for user in range(1, 40) for movie in range(1, 80) if random.random() < 0.2]
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        file.writestr("ml-latest-small/ratings.csv", "\n".join(["userId,movieId,rating,timestamp", *rows, ""]))
        file.writestr("ml-latest-small/padding", random.bytes(300_000))
    return buffer.getvalue()


ARCHIVE = archive()


@dataclass
class Site:
    """What the server does, and the ranges it was asked for (None for the whole)."""

    contents: bytes = ARCHIVE
    ranges: bool = True
    hang_up_after: list[int] = field(default_factory=list)  # bytes, for the first requests
    status: int | None = None
    asked: list[str | None] = field(default_factory=list)
    address: str = ""

    def handler(site) -> type[BaseHTTPRequestHandler]:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                wanted = self.headers.get("Range")
                site.asked.append(wanted)
                start = int(wanted.removeprefix("bytes=").removesuffix("-")) if wanted and site.ranges else 0
                size = len(site.contents)
                self.send_response(site.status or (416 if start >= size else 206 if start else 200))
                if start >= size:
                    self.send_header("Content-Range", f"bytes */{size}")
                elif start:
                    self.send_header("Content-Range", f"bytes {start}-{size - 1}/{size}")
                self.send_header("Content-Length", str(max(size - start, 0)))
                self.end_headers()
                limit = site.hang_up_after.pop(0) if site.hang_up_after else size
                self.wfile.write(site.contents[start : start + limit])

            def log_message(self, format: str, *args: object) -> None:
                pass

        return Handler


@pytest.fixture
def site(monkeypatch, tmp_path) -> Iterator[Site]:
    """The server in the place of files.grouplens.org, with an empty cache."""
    site = Site()
    server = ThreadingHTTPServer(("127.0.0.1", 0), site.handler())
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    site.address = f"http://127.0.0.1:{server.server_port}/"
    monkeypatch.delenv("PULLBACK_DATA", raising=False)
    monkeypatch.setenv("PULLBACK_CACHE", str(tmp_path))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(_movielens, "HOST", site.address)
    monkeypatch.setitem(_movielens.SHA256, "latest-small", hashlib.sha256(ARCHIVE).hexdigest())
    yield site
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def cache(tmp_path) -> Path:
    return tmp_path / "movielens"


def kept(cache: Path) -> list[str]:
    return sorted(file.name for file in cache.iterdir())


def test_download_once(site, cache):
    first = data.movielens()
    assert not first.standin
    assert "files.grouplens.org" in first.source
    assert kept(cache) == [NAME]
    again = data.movielens(download=False)
    assert site.asked == [None]
    assert (first.seen == again.seen).all()


def test_license_is_stated(site, caplog):
    pooch.get_logger().addHandler(caplog.handler)
    try:
        data.movielens()
    finally:
        pooch.get_logger().removeHandler(caplog.handler)
    assert "without commercial use" in caplog.text


def test_nothing_is_downloaded_unasked(site, cache):
    assert data.movielens(download=False).standin
    assert site.asked == []
    assert not cache.exists()


@pytest.mark.parametrize("contents", [b"<html>Please log in</html>", ARCHIVE[:-1] + b"x"], ids=["portal", "one byte"])
def test_wrong_file(site, cache, contents):
    site.contents = contents
    with pytest.raises(data.DataError, match=rf"{NAME}: its SHA-256 .* path="):
        data.movielens()
    assert kept(cache) == []


def test_broken_connection_is_tried_again(site, cache):
    site.hang_up_after = [SOME, SOME]
    assert not data.movielens().standin
    assert kept(cache) == [NAME]
    assert (cache / NAME).read_bytes() == ARCHIVE


def test_connection_that_always_breaks_leaves_nothing(site, cache):
    site.hang_up_after = [SOME] * 10
    assert data.movielens().standin
    assert kept(cache) == []


def test_damaged_cache(site, cache):
    data.movielens()
    (cache / NAME).write_bytes(ARCHIVE[:1000])
    assert data.movielens(download=False).standin
    assert not data.movielens().standin
    assert (cache / NAME).read_bytes() == ARCHIVE


@pytest.mark.parametrize("status", [404, 503])
def test_server_that_refuses(site, caplog, status):
    site.status = status
    result = data.movielens()
    assert result.standin
    assert result.source.startswith("A stand-in")
    assert str(status) in caplog.text


def closed_port() -> str:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{sock.getsockname()[1]}/"


def test_without_network(site, caplog, monkeypatch, cache):
    monkeypatch.setattr(_movielens, "HOST", closed_port())
    with caplog.at_level(logging.WARNING, "pullback.data"):
        assert data.movielens().standin
    assert "A stand-in for MovieLens" in caplog.text
    assert not cache.exists() or kept(cache) == []


def test_host_that_never_answers(site, monkeypatch, caplog):
    monkeypatch.setattr(_download, "PATIENCE", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setattr(_movielens, "HOST", f"http://127.0.0.1:{silent.getsockname()[1]}/")
        assert data.movielens().standin
    assert "Could not download" in caplog.text


def test_without_pooch(site, monkeypatch):
    monkeypatch.setitem(sys.modules, "pooch", None)
    assert data.movielens().standin
    assert site.asked == []


def test_cache_that_cannot_be_written(site, monkeypatch, tmp_path, caplog):
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("PULLBACK_CACHE", str(tmp_path / "file"))
    assert data.movielens().standin
    assert "Could not download" in caplog.text


def test_mirror(site, monkeypatch, tmp_path):
    """Both parts of MNIST come from the second address when the first does not answer."""
    site.contents = b"\0\0\x08\x01\0\0\0\x02\x01\x01"
    monkeypatch.setattr(_mnist, "MIRRORS", (closed_port(), site.address))
    monkeypatch.setattr(_mnist, "SHA256", dict.fromkeys(_mnist.SHA256, hashlib.sha256(site.contents).hexdigest()))
    with pytest.raises(data.DataError, match="not MNIST"):  # the two labels that the server sends for images, too
        data.mnist()
    assert kept(tmp_path / "mnist") == ["train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz"]


def test_addresses():
    """Every file that can be downloaded has an https address and a SHA-256."""
    collections = [
        *map(_mnist._files, (True, False)),
        *map(_motion._collection, _motion.SHA256),
        *map(_movielens._collection, _movielens.SHA256),
    ]
    files = [remote for collection in collections if collection for remote in collection.files]
    assert len(files) == 4 + 3 + 2
    assert len({remote.name for remote in files}) == len({remote.sha256 for remote in files}) == len(files)
    assert all(url.startswith("https://") and url.endswith(remote.name) for remote in files for url in remote.urls)
    assert all(len(bytes.fromhex(remote.sha256)) == 32 for remote in files)
