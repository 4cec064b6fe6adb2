"""What the explorer shows: a decoder, codes of data, and how to draw what is decoded."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from pullback._decoders.contract import Decoder
from pullback.explorer.render import Renderer, automatic, together

# More distinct labels than this are shown as ranges.
MAX_CLASSES = 12
NUM_RANGES = 5
AUTOMATIC = together(automatic)


@dataclass(frozen=True, eq=False)
class Model:
    """A latent space to look at.

    Attributes:
        title: shown above the picture.
        decoder: maps codes ``(n, d)`` to a distribution.
        codes: of the data, ``(n, d)``.
        labels: one per code, or None.
        renderer: turns what codes decode to into what the page draws.
        source: where the data come from, in a sentence.
        lines: Python lines that define ``decoder`` and ``codes``.
    """

    title: str
    decoder: Decoder
    codes: Tensor
    labels: Sequence[Any] | np.ndarray | Tensor | None = None
    renderer: Renderer = AUTOMATIC
    source: str = ""
    lines: str = "decoder, codes = ...  # yours"

    def __post_init__(self) -> None:
        if self.codes.ndim != 2 or self.codes.shape[1] < 2 or not self.codes.is_floating_point():
            raise ValueError(
                "The explorer needs floating-point codes of shape (n, d) with d at least 2; got "
                f"{tuple(self.codes.shape)}, {self.codes.dtype}."
            )
        if not self.codes.isfinite().all():
            raise ValueError("Some codes are NaN or infinite. Drop them: codes[codes.isfinite().all(-1)].")
        if self.labels is not None and len(self.labels) != len(self.codes):
            raise ValueError(
                f"There are {len(self.codes)} codes and {len(self.labels)} labels. Give one label per code."
            )

    def classes(self) -> tuple[list[str], list[int]]:
        """The names of the classes, and the class of each code."""
        if self.labels is None:
            return ["codes"], [0] * len(self.codes)
        labels = np.asarray(self.labels.cpu() if isinstance(self.labels, Tensor) else self.labels)
        names, index = np.unique(labels, return_inverse=True)
        if len(names) > MAX_CLASSES and np.issubdtype(labels.dtype, np.number):
            return _ranges(labels)
        order = sorted(range(len(names)), key=lambda i: _natural(str(names[i])))
        return [str(names[i]) for i in order], np.argsort(order)[index].tolist()


def _ranges(labels: np.ndarray) -> tuple[list[str], list[int]]:
    """Classes of about equally many codes, named by their smallest and largest label."""
    edges = np.unique(np.quantile(labels, np.linspace(0, 1, NUM_RANGES + 1)))
    index = np.clip(np.searchsorted(edges, labels, side="right") - 1, 0, len(edges) - 2)
    return [f"{low:.3g} – {high:.3g}" for low, high in itertools.pairwise(edges)], index.tolist()


def _natural(name: str) -> list[tuple[float, str]]:
    """A key that sorts numbers in names by their values: 9 stands before 10."""
    return [(float(number or "inf"), text) for number, text in re.findall(r"(-?\d+)|((?:(?!-?\d).)+)", name)]
