"""The plane that a picture of a latent space shows, and its pixels."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from matplotlib.axes import Axes
from torch import Tensor

from pullback._decoders.contract import as_codes
from pullback._metrics.base import Metric, codes_for
from pullback._progress import progress
from pullback._typing import Codes

Bounds = tuple[float, float, float, float]
Directions = str | Sequence[int] | Tensor | np.ndarray
# Codes over which the metric is averaged to find the directions that are used most.
_NUM_CODES = 500
# The planes that axes show, for what is drawn on the same axes later.
SHOWN: weakref.WeakKeyDictionary[Axes, Plane] = weakref.WeakKeyDictionary()


@dataclass(frozen=True, eq=False)
class Plane:
    """A plane in the latent space: codes ``center + x @ directions`` with orthonormal ``directions (2, d)``."""

    center: Tensor
    directions: Tensor

    @classmethod
    def of(cls, metric: Metric, codes: Codes, directions: Directions = "used") -> Plane:
        """The plane through the mean of the codes along two directions; see `pullback.plot.latent`."""
        (codes,) = codes_for(metric, codes, a_set=True, finite=True)
        center, d = codes.mean(0), codes.shape[-1]
        if d < 2:
            raise ValueError(f"A plane needs codes of at least two dimensions; got shape {tuple(codes.shape)}.")
        if isinstance(directions, (Tensor, np.ndarray)) and directions.ndim == 2:
            return cls(center, torch.linalg.qr(as_codes(directions, codes).mT)[0].mT)
        if not isinstance(directions, str):
            return cls(center, torch.eye(d).to(codes)[list(directions)])
        if directions not in ("used", "pca"):
            raise ValueError(f'axes must be "used", "pca", two dimensions, or two directions; not {directions!r}.')
        with torch.no_grad():
            some = codes[:: -(-len(codes) // _NUM_CODES)]
            spread = torch.cov(codes.mT) if directions == "pca" else metric.tensor(some).mean(0)
        return cls(center, torch.linalg.eigh(spread)[1].mT.flip(0)[:2])

    def project(self, z: Tensor) -> Tensor:
        """Coordinates ``(*batch, 2)`` of codes ``(*batch, d)`` in the plane."""
        return (z - self.center.to(z)) @ self.directions.to(z).mT

    def lift(self, x: Tensor) -> Tensor:
        """The codes ``(*batch, d)`` of points ``(*batch, 2)`` of the plane."""
        return self.center + x.to(self.center) @ self.directions


def extent(codes: Tensor | None, margin: float = 0.25) -> Bounds:
    """The rectangle (left, right, bottom, top) of the codes, widened by a share of its sides."""
    if codes is None:
        raise ValueError("A plot needs codes= or bounds=(left, right, bottom, top) to know what to draw.")
    if codes.ndim != 2 or codes.shape[-1] != 2:
        raise ValueError(f"Plots draw codes of shape (n, 2), not {tuple(codes.shape)}; choose two dimensions first.")
    codes = as_codes(codes, a_set=True, finite=True)
    low, high = codes.detach().amin(0).cpu(), codes.detach().amax(0).cpu()
    margins = margin * (high - low).clamp_min(1e-3)
    (left, bottom), (right, top) = (low - margins).tolist(), (high + margins).tolist()
    return left, right, bottom, top


def grid(bounds: Bounds, resolution: int, like: Tensor) -> Tensor:
    """Centers of square pixels, of shape ``(rows, columns, 2)``; `resolution` of them along the longer side."""
    left, right, bottom, top = bounds
    pixel = max(right - left, top - bottom) / resolution
    columns, rows = (max(1, round(side / pixel)) for side in (right - left, top - bottom))
    x = left + (torch.arange(columns) + 0.5) * (right - left) / columns
    y = bottom + (torch.arange(rows) + 0.5) * (top - bottom) / rows
    return torch.stack(torch.meshgrid(x, y, indexing="xy"), -1).to(like)


@progress("pixels")
def evaluate(f: Callable[[Tensor], Tensor], grid: Tensor, chunk: int = 4096) -> Tensor:
    """Values ``(rows, columns)`` of a function of codes ``(n, 2)``."""
    with torch.no_grad():
        values = torch.cat([f(z) for z in grid.reshape(-1, 2).split(chunk)])
    return values.reshape(grid.shape[:-1]).double().cpu()
