r"""A metric from a table: exact tensors :math:`M_s` are computed once, at points :math:`z_s`, and averaged with a
kernel of bandwidth σ (Hauberg et al. 2012; Arvanitidis et al. 2022, appendix on LAND):

.. math:: M(z) = \sum_s \tilde w_s(z)\, M_s, \quad \tilde w_s = w_s / \sum_r w_r, \quad
   w_s(z) = e^{-|z - z_s|^2 / 2\sigma^2}.

The weights are a softmax: far from all points M tends to the tensor of the nearest of them and never to zero. On a grid
they are a product over the axes: the sum over all nodes is one weighted sum per axis, over a window around each code.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
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
_NUM_FRESH = 256  # points at which the error is measured
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
            axes = f"one number or one for each of {len(self.low)} axes"
            raise ValueError(f"resolution must be at least 2, {axes}; got {self.resolution}.")

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


@dataclass(frozen=True, eq=False)
class PointMean:
    """Values ``(S, k)`` at any points ``(S, d)``: exact sums over all of them."""

    values: Tensor
    bandwidth: Tensor
    points: Tensor

    @property
    def size(self) -> int:
        """Numbers held for one code."""
        return len(self.points)

    def at(self, z: Tensor) -> Tensor:
        """The weighted means ``(n, k)`` at codes ``(n, d)``, of their dtype and on their device."""
        sigma, points = self.bandwidth.to(z), self.points.to(z)
        middle = points.mean(0)  # digits are lost where both are far from zero
        z, nodes = (z - middle) / sigma, (points - middle) / sigma
        return _softmax(torch.nn.functional.linear(z, nodes, -0.5 * nodes.square().sum(-1))) @ self.values.to(z)


@dataclass(frozen=True, eq=False)
class GridMean:
    """The same for the nodes of a grid: sums over a window around each code, one axis after the other."""

    values: Tensor
    bandwidth: Tensor
    grid: Grid

    @functools.cached_property
    def window(self) -> tuple[int, ...]:
        """Nodes read along each axis."""
        reach = (_REACH * self.bandwidth / self.grid.spacing).ceil().long().tolist()
        return tuple(min(count, 2 * max(1, r)) for count, r in zip(self.grid.counts, reach, strict=True))

    @property
    def size(self) -> int:
        return math.prod(self.window) * self.values.shape[-1]

    def at(self, z: Tensor) -> Tensor:
        counts, spacing = self.grid.counts, self.grid.spacing.to(z)
        place = (z - self.grid.low.to(z)) / spacing
        width = torch.tensor(self.window, device=z.device)
        first = place.detach().nan_to_num().clamp(-1e9, 1e9).floor().long() - (width // 2 - 1)
        low = torch.minimum(first.clamp_min(0), torch.tensor(counts, device=z.device) - width)
        node = torch.zeros(len(z), 1, dtype=torch.long, device=z.device)
        for k, width in enumerate(self.window):
            along = low[:, k : k + 1] + torch.arange(width, device=z.device)
            node = (node[:, :, None] * counts[k] + along[:, None, :]).flatten(1)
        value = self.values.to(z).index_select(0, node.flatten()).reshape(len(z), self.size)
        for k, width in enumerate(self.window):
            step = torch.arange(width, dtype=z.dtype, device=z.device)
            scale = (spacing[k] / self.bandwidth[k].to(z)) ** 2
            # the part of the exponent that all nodes share cancels, so that it cannot overflow far away
            weights = _softmax(scale * ((place[:, k : k + 1] - low[:, k : k + 1]) * step - 0.5 * step**2))
            value = (weights[:, None, :] @ value.unflatten(1, (width, -1)))[:, 0]
        return value


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

    mean: PointMean | GridMean
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
        grid = points if isinstance(points, Grid) else None
        nodes = as_codes(points, metric, a_set=True, least=2).detach() if grid is None else grid.points
        table = _evaluate(metric, nodes).flatten(1)
        if bandwidth is not None:
            sigma = torch.full_like(nodes[0], bandwidth)
        else:
            sigma = _typical_gap(nodes) if grid is None else _SPACINGS * grid.spacing
        mean = PointMean(table, sigma, nodes) if grid is None else GridMean(table, sigma, grid)
        fresh = _fresh(grid or nodes, sigma) if held_out is None else held_out
        fresh = as_codes(fresh, nodes, a_set=True, dim=nodes.shape[1])
        exact = _evaluate(metric, fresh).flatten(1)
        with torch.no_grad():
            gap = (_in_parts(mean, fresh) - exact).norm(dim=1)
        error = gap / exact.norm(dim=1).clamp_min(torch.finfo(exact.dtype).tiny)
        found = InterpolationAccuracy(error.median().item(), error.mean().item(), error.max().item(), len(fresh))
        return cls(mean, found)

    @property
    def bandwidth(self) -> Float[Tensor, " d"]:
        """σ along each axis."""
        return self.mean.bandwidth

    @per_code
    def tensor(self, z: Codes) -> Float[Tensor, "*batch d d"]:
        d = len(self.bandwidth)
        if z.shape[-1] != d:
            raise ValueError(f"The metric was fitted to codes of {d} dimensions; got codes of {z.shape[-1]}.")
        return _in_parts(self.mean, z).reshape(-1, d, d)

    @per_code
    def ds2(self, a: Codes, b: Codes) -> Float[Tensor, "*batch"]:
        t, weight = (torch.as_tensor(x, dtype=a.dtype, device=a.device) for x in (0.5 * (_POINTS + 1), 0.5 * _WEIGHTS))
        v = b - a
        M = self.tensor(torch.lerp(a[:, None, :], b[:, None, :], t[:, None]))
        return ((M @ v[:, None, :, None])[..., 0] * v[:, None, :]).sum(-1) @ weight


def _in_parts(mean: PointMean | GridMean, z: Tensor) -> Tensor:
    return torch.cat([mean.at(some) for some in z.split(max(1, _AT_ONCE // mean.size))])


def _typical_gap(codes: Tensor) -> Tensor:
    """The median distance of a code to its nearest neighbor, for each axis the same."""
    # The nearest point of all is the code itself, or a copy of it.
    parts = codes.split(max(1, _AT_ONCE // len(codes)))
    gaps = torch.cat([torch.cdist(some, codes).topk(2, largest=False).values[:, 1] for some in parts])
    if not bool((gaps > 0).any()):
        raise ValueError(
            "The codes are one and the same point, so they have no spacing. Give bandwidth=, or more codes."
        )
    return gaps[gaps > 0].median().repeat(codes.shape[1])


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


def _fresh(points: Grid | Tensor, sigma: Tensor) -> Tensor:
    """Points that are not among those fitted to; the same at every call."""
    source = torch.Generator().manual_seed(0)
    if isinstance(points, Grid):
        noise = torch.rand(_NUM_FRESH, len(sigma), generator=source, dtype=torch.float64).to(sigma)
        return points.low + noise * (points.high - points.low)
    codes = points[torch.randint(len(points), (_NUM_FRESH,), generator=source).to(points.device)]
    return codes + sigma * torch.randn(_NUM_FRESH, len(sigma), generator=source, dtype=torch.float64).to(sigma)
