"""The plane that a picture of a latent space of more than two dimensions shows."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from matplotlib.axes import Axes
from torch import Tensor

from pullback._decoders.contract import as_codes
from pullback._metrics.base import Metric, codes_for
from pullback._typing import Codes

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
        if isinstance(directions, str):
            if directions == "used":
                with torch.no_grad():
                    spread = metric.tensor(codes[:: -(-len(codes) // _NUM_CODES)]).mean(0)
            elif directions == "pca":
                spread = torch.cov(codes.mT)
            else:
                raise ValueError(f'axes must be "used", "pca", two dimensions, or two directions; not {directions!r}.')
            return cls(center, torch.linalg.eigh(spread)[1].mT.flip(0)[:2])
        return cls(center, torch.eye(d).to(codes)[list(directions)])

    def project(self, z: Tensor) -> Tensor:
        """Coordinates ``(*batch, 2)`` of codes ``(*batch, d)`` in the plane."""
        return (z - self.center.to(z)) @ self.directions.to(z).mT

    def lift(self, x: Tensor) -> Tensor:
        """The codes ``(*batch, d)`` of points ``(*batch, 2)`` of the plane."""
        return self.center + x.to(self.center) @ self.directions
