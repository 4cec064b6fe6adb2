r"""A metric from a table: exact tensors :math:`M_s` are computed once, at points :math:`z_s`, and averaged with a
kernel of bandwidth σ (Hauberg et al. 2012; Arvanitidis et al. 2022, appendix on LAND):

.. math:: M(z) = \sum_s \tilde w_s(z)\, M_s, \quad \tilde w_s = w_s / \sum_r w_r, \quad
   w_s(z) = e^{-|z - z_s|^2 / 2\sigma^2}.

The weights are a softmax: far from all points M tends to the tensor of the nearest of them and never to zero. On a grid
they are a product over the axes: the sum over all nodes is one weighted sum per axis, over a window around each code.
"""

from __future__ import annotations

import abc
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import torch
from torch import Tensor

from pullback._decoders.contract import as_codes, unvalidated
from pullback._metrics.base import Metric, check_metric, per_code
from pullback._options import check_options
from pullback._progress import progress
from pullback._typing import Array, Codes, CodeSet, Float

_NUM_NODES = 64**2
_REACH = 8.0  # bandwidths read on each side: exp(-8²/2) is 1e-14
_AT_ONCE = 2**20  # numbers held at once: about what stays in a processor's cache
_FAINTEST = -40.0  # exponent of the least weight: below rounding, and its products are never subnormal, which is slow
_MAX_FITTED = 4096  # codes given to the exact metric at once
_SPACINGS = 0.6  # bandwidth in spacings: the ripple of a sampled Gaussian, 2 exp(-2 π² 0.6²), is then below 0.2 %
# Gauss-Legendre quadrature on [-1, 1]; the middle of a step is one of three points: a wall there must not be missed.
_POINTS, _WEIGHTS = np.polynomial.legendre.leggauss(3)


@dataclass(frozen=True, eq=False)
class Grid:
    """Evenly spaced points of a box: where an `InterpolatedMetric` evaluates the exact one.

    Args:
        low, high: opposite corners of the box, ``(d,)`` each.
        resolution: points along each axis, one number for all or one for each.

    >>> import torch, pullback as pb
    >>> pb.Grid(torch.zeros(2), torch.ones(2), resolution=3).points.shape
    torch.Size([9, 2])
    """

    low: Float[Tensor, " d"] | Array
    high: Float[Tensor, " d"] | Array
    resolution: int | Sequence[int]

    def __post_init__(self) -> None:
        object.__setattr__(self, "low", as_codes(self.low))
        object.__setattr__(self, "high", as_codes(self.high, self.low))
        if self.low.ndim != 1 or self.low.shape != self.high.shape or not bool((self.low < self.high).all()):
            raise ValueError(
                f"The corners of a grid are tensors of shape (d,), low below high in every coordinate; got {self.low} "
                f"and {self.high}. Use Grid.around(codes)."
            )
        if len(self.counts) != len(self.low) or min(self.counts) < 2:
            raise ValueError(
                f"resolution must be at least 2, one number or one for each of {len(self.low)} axes; got "
                f"{self.resolution}."
            )

    @classmethod
    def around(cls, codes: CodeSet, *, resolution: int | Sequence[int] | None = None, margin: float = 0.25) -> Self:
        """The box of the codes, with `margin` times its extent added on every side; about 4,096 points by default.

        The number of points is a power of the dimension. Beyond four dimensions fit the metric to codes instead.
        """
        codes = as_codes(codes, a_set=True).detach()
        low, high = codes.amin(0), codes.amax(0)
        room = margin * (high - low).clamp_min(1e-3)
        if resolution is None:
            resolution = max(4, round(_NUM_NODES ** (1 / codes.shape[-1])))
        return cls(low - room, high + room, resolution)

    @property
    def counts(self) -> tuple[int, ...]:
        """Points along each axis."""
        return (self.resolution,) * len(self.low) if isinstance(self.resolution, int) else tuple(self.resolution)

    @property
    def spacing(self) -> Float[Tensor, " d"]:
        """The distance of neighbors along each axis."""
        return (self.high - self.low) / (torch.tensor(self.counts).to(self.low) - 1)

    @property
    def points(self) -> Float[Tensor, "n d"]:
        """All points, the last axis fastest."""
        index = torch.cartesian_prod(*(torch.arange(n) for n in self.counts)).reshape(-1, len(self.low))
        return self.low + self.spacing * index.to(self.low)


@dataclass(frozen=True)
class InterpolationAccuracy:
    r"""How far an interpolated metric is from the exact one: :math:`\|\hat M - M\|_F / \|M\|_F`, held out.

    >>> import pullback as pb
    >>> print(pb.results.InterpolationAccuracy(median=0.01, mean=0.02, max=0.05, num_points=100))
    1.00% (median), 2.00% (mean), 5.00% (largest of 100)
    """

    median: float
    mean: float
    max: float
    num_points: int

    def __str__(self) -> str:
        return f"{self.median:.2%} (median), {self.mean:.2%} (mean), {self.max:.2%} (largest of {self.num_points})"


class KernelMean(abc.ABC):
    """Values of shape ``(S, k)`` at S points, and their weighted means (abstract)."""

    bandwidth: Tensor  # (d,)
    size: int  # numbers held for one code

    @abc.abstractmethod
    def at(self, z: Tensor) -> Tensor:
        """The means ``(n, k)`` at codes ``(n, d)``, all at once."""

    def __call__(self, z: Tensor) -> Tensor:
        """The means in bounded memory, of the dtype and device of the codes."""
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
        width = torch.tensor(self.window, device=z.device)
        last = torch.tensor(self.counts, device=z.device) - width
        first = place.detach().nan_to_num().clamp(-1e9, 1e9).floor().long() - (width // 2 - 1)
        low = torch.minimum(first.clamp_min(0), last)  # the first node of each window
        value = self._windows(low).to(z)
        for k, width in enumerate(self.window):
            step = torch.arange(width, dtype=z.dtype, device=z.device)
            scale = (self.spacing[k] / self.bandwidth[k]).to(z) ** 2
            # the part of the exponent that all nodes share cancels, so that it cannot overflow far away
            weights = _softmax(scale * ((place[:, k : k + 1] - low[:, k : k + 1]) * step - 0.5 * step**2))
            value = (weights[:, None, :] @ value.unflatten(1, (width, -1)))[:, 0]
        return value

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


@dataclass(frozen=True, eq=False)
class InterpolatedMetric(Metric):
    r"""The kernel-weighted mean of a table of metric tensors; make one with `InterpolatedMetric.fit`.

    `tensor` costs a few matrix products, whatever the decoder costs. `ds2` is :math:`\int_0^1 \Delta^\top M(a +
    t\Delta)\,\Delta\,dt`, the energy of the straight step, by Gauss-Legendre quadrature of three points: symmetric, and
    it notices a wall between both ends.

    Attributes:
        mean: the points, the table, and the bandwidth σ of their weighted mean.
        error: measured at held-out points, an `InterpolationAccuracy`.

    >>> import torch, pullback as pb
    >>> exact = pb.FisherRaoMetric(lambda z: torch.distributions.Normal(z**2, 1.0))
    >>> grid = pb.Grid(torch.tensor([0.0]), torch.tensor([2.0]), resolution=200)
    >>> pb.InterpolatedMetric.fit(exact, grid).tensor(torch.ones(1)).round(decimals=2)  # (2 z)²
    tensor([[4.]])
    """

    mean: KernelMean
    error: InterpolationAccuracy

    @classmethod
    @progress("table")
    def fit(
        cls, metric: Metric, points: Grid | CodeSet, *, bandwidth: float | None = None, held_out: Codes | None = None
    ) -> Self:
        r"""Evaluates the exact metric at the points, and its distance from the mean at others.

        A grid is fast and even, in two or three dimensions. Codes follow the data into any dimension; away from them
        the metric stays that of the nearest code, so a wall around the data must be among the points to be seen.

        Args:
            metric: the exact metric.
            points: a `Grid`, or codes of shape ``(S, d)``; exact sums over all of them, so a few thousand.
            bandwidth: σ. By default 0.6 times the spacing of the grid along each axis, or the median distance of a code
                to its nearest neighbor. A larger one is smoother and blurs M, by about :math:`\sigma^2 \nabla^2 M / 2`.
            held_out: where `error` is measured. By default 256 random points of the box, or codes moved by about σ.
        """
        check_metric(metric)
        check_options(bandwidth=bandwidth)
        points = points if isinstance(points, Grid) else as_codes(points, metric, a_set=True, least=2).detach()
        nodes = points.points if isinstance(points, Grid) else points
        table, sigma = _evaluate(metric, nodes).flatten(1), _bandwidth(points, bandwidth)
        if isinstance(points, Grid):
            mean = GridMean(points.low, points.spacing, points.counts, table, sigma)
        else:
            mean = PointMean(nodes, table, sigma)
        trial = cls(mean, InterpolationAccuracy(math.nan, math.nan, math.nan, 0))
        fresh = _fresh(points, sigma) if held_out is None else as_codes(held_out, nodes, a_set=True)
        exact = _evaluate(metric, fresh)
        with torch.no_grad():
            gap = (trial.tensor(fresh) - exact).flatten(1).norm(dim=1)
        error = gap / exact.flatten(1).norm(dim=1).clamp_min(torch.finfo(exact.dtype).tiny)
        found = InterpolationAccuracy(error.median().item(), error.mean().item(), error.max().item(), len(fresh))
        return replace(trial, error=found)

    @property
    def bandwidth(self) -> Float[Tensor, " d"]:
        """σ along each axis."""
        return self.mean.bandwidth

    @per_code
    def tensor(self, z: Codes) -> Float[Tensor, "*batch d d"]:
        d = len(self.bandwidth)
        if z.shape[-1] != d:
            raise ValueError(f"The metric was fitted to codes of {d} dimensions; got codes of {z.shape[-1]}.")
        return self.mean(z).reshape(-1, d, d)

    @per_code
    def ds2(self, a: Codes, b: Codes) -> Float[Tensor, "*batch"]:
        t, weight = (torch.as_tensor(x, dtype=a.dtype, device=a.device) for x in (0.5 * (_POINTS + 1), 0.5 * _WEIGHTS))
        v = b - a
        M = self.tensor(torch.lerp(a[:, None, :], b[:, None, :], t[:, None]))
        return ((M @ v[:, None, :, None])[..., 0] * v[:, None, :]).sum(-1) @ weight


def _bandwidth(points: Grid | Tensor, bandwidth: float | None) -> Tensor:
    if bandwidth is not None:
        return torch.full_like(points.low if isinstance(points, Grid) else points[0], bandwidth)
    if isinstance(points, Grid):
        return _SPACINGS * points.spacing
    # The nearest point of all is the code itself, or a copy of it.
    parts = points.split(max(1, _AT_ONCE // len(points)))
    gaps = torch.cat([torch.cdist(some, points).topk(2, largest=False).values[:, 1] for some in parts])
    if not bool((gaps > 0).any()):
        raise ValueError(
            "The codes are one and the same point, so they have no spacing. Give bandwidth=, or more codes."
        )
    return gaps[gaps > 0].median().repeat(points.shape[1])


def _evaluate(metric: Metric, z: Tensor) -> Tensor:
    with torch.no_grad(), unvalidated():
        tensors = torch.cat([metric.tensor(some) for some in z.split(_MAX_FITTED)])
    bad = ~torch.isfinite(tensors).flatten(1).all(1)
    if bad.any():
        raise ValueError(
            f"The exact metric is not finite at {int(bad.sum())} of {len(z)} points, the first {z[bad][0].tolist()}. "
            "Fit to points where the decoder is defined: a smaller grid, or codes."
        )
    return tensors


def _fresh(points: Grid | Tensor, sigma: Tensor, num: int = 256) -> Tensor:
    """Points that are not among those fitted to; the same at every call."""
    source = torch.Generator().manual_seed(0)
    if isinstance(points, Grid):
        noise = torch.rand(num, len(sigma), generator=source, dtype=torch.float64).to(sigma)
        return points.low + noise * (points.high - points.low)
    codes = points[torch.randint(len(points), (num,), generator=source).to(points.device)]
    return codes + sigma * torch.randn(num, len(sigma), generator=source, dtype=torch.float64).to(sigma)
