r"""Means of tabulated values with the Gaussian weights of `pullback.InterpolatedMetric`, which are a softmax.

On a grid the Gaussian is a product over the axes, and so are the normalized weights: the sum over all nodes is one
weighted sum per axis. Nodes further than eight bandwidths weigh less than rounding, so only a window around each code
is read.
"""

from __future__ import annotations

import abc
import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

_REACH = 8.0  # bandwidths read on each side: exp(-8²/2) is 1e-14
_AT_ONCE = 2**20  # numbers held at once: about what stays in a processor's cache
_FAINTEST = -40.0  # exponent of the least weight: below rounding, and its products are never subnormal, which is slow


class KernelMean(abc.ABC):
    """Values of shape ``(S, k)`` at S points, and their weighted means (abstract)."""

    bandwidth: Tensor  # (d,)

    @property
    @abc.abstractmethod
    def size(self) -> int:
        """Numbers held for one code."""

    @abc.abstractmethod
    def at(self, z: Tensor) -> Tensor:
        """The means ``(n, k)`` at codes ``(n, d)``, all at once."""

    def __call__(self, z: Tensor) -> Tensor:
        """The means ``(n, k)`` at codes ``(n, d)``, in bounded memory, of the dtype and device of the codes."""
        parts = [self.at(some) for some in z.split(max(1, _AT_ONCE // self.size))]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


@dataclass(frozen=True, eq=False)
class PointMean(KernelMean):
    """Values at any points ``(S, d)``: exact sums over all of them."""

    points: Tensor
    values: Tensor
    bandwidth: Tensor

    @property
    def size(self) -> int:
        return len(self.points)

    def at(self, z: Tensor) -> Tensor:
        sigma, points = self.bandwidth.to(z), self.points.to(z)
        middle = points.mean(0)  # digits are lost where both are far from zero
        z, nodes = (z - middle) / sigma, (points - middle) / sigma
        return _softmax(torch.nn.functional.linear(z, nodes, -0.5 * nodes.square().sum(-1))) @ self.values.to(z)


@dataclass(frozen=True, eq=False)
class GridMean(KernelMean):
    """Values at the nodes of a grid with the given lowest corner, spacings and counts, the last axis fastest."""

    corner: Tensor
    spacing: Tensor
    counts: tuple[int, ...]
    values: Tensor
    bandwidth: Tensor

    @functools.cached_property
    def window(self) -> tuple[int, ...]:
        """Nodes read along each axis."""
        reach = (_REACH * self.bandwidth / self.spacing).ceil().long().tolist()
        return tuple(min(count, 2 * max(1, r)) for count, r in zip(self.counts, reach, strict=True))

    @property
    def size(self) -> int:
        return math.prod(self.window) * self.values.shape[-1]

    @functools.cached_property
    def _rows(self) -> Tensor:
        """All windows along the last axis, each in one piece of memory."""
        grid = self.values.reshape(*self.counts, -1)
        return grid.unfold(-2, self.window[-1], 1).movedim(-1, -2).flatten(-2).flatten(0, -2).contiguous()

    def at(self, z: Tensor) -> Tensor:
        place = (z - self.corner.to(z)) / self.spacing.to(z)
        low = self._low(place.detach())
        value = self._windows(low).to(z)
        for k, width in enumerate(self.window):
            step = torch.arange(width, dtype=z.dtype, device=z.device)
            scale = (self.spacing[k] / self.bandwidth[k]).to(z) ** 2
            # the part of the exponent that all nodes share cancels, so that it cannot overflow far away
            weights = _softmax(scale * ((place[:, k : k + 1] - low[:, k : k + 1]) * step - 0.5 * step**2))
            value = (weights[:, None, :] @ value.unflatten(1, (width, -1)))[:, 0]
        return value

    def _low(self, place: Tensor) -> Tensor:
        """The first node of each window."""
        width = torch.tensor(self.window, device=place.device)
        last = torch.tensor(self.counts, device=place.device) - width
        first = place.nan_to_num().clamp(-1e9, 1e9).floor().long() - (width // 2 - 1)
        return torch.minimum(first.clamp_min(0), last)

    def _windows(self, low: Tensor) -> Tensor:
        """The values in each window, ``(n, -1)``."""
        sizes = (*self.counts[:-1], self.counts[-1] - self.window[-1] + 1)
        row = torch.zeros(len(low), 1, dtype=torch.long, device=low.device)
        for k, size in enumerate(sizes):
            width = self.window[k] if k < len(sizes) - 1 else 1
            node = low[:, k : k + 1] + torch.arange(width, device=low.device)
            row = (row[:, :, None] * size + node[:, None, :]).flatten(1)
        rows = self._rows.to(low.device)
        return rows.index_select(0, row.flatten()).reshape(len(low), row.shape[1] * rows.shape[1])


def _softmax(exponent: Tensor) -> Tensor:
    weights = (exponent - exponent.detach().amax(-1, keepdim=True)).clamp_min(_FAINTEST).exp()
    return weights / weights.sum(-1, keepdim=True)
