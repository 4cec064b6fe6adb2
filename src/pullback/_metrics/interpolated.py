r"""A metric from a table: evaluated once at some points, and averaged between them.

Exact tensors :math:`M_s` are computed once, at points :math:`z_s`, and averaged with a kernel of bandwidth σ (Hauberg
et al. 2012; Arvanitidis et al. 2022, appendix on LAND):

.. math:: M(z) = \sum_s \tilde w_s(z)\, M_s, \quad \tilde w_s = w_s / \sum_r w_r, \quad
   w_s(z) = e^{-|z - z_s|^2 / 2\sigma^2}.

The weights are a softmax: far from all points M tends to the tensor of the nearest of them and never to zero.
"""

from __future__ import annotations

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
from pullback._metrics.kernel_mean import GridMean, KernelMean, PointMean
from pullback._options import check_options
from pullback._progress import progress
from pullback._typing import Array, Codes, CodeSet, Float

_NUM_NODES = 64**2
_AT_ONCE = 2**22  # distances held at once
_MAX_FITTED = 4096  # codes given to the exact metric at once
_SPACINGS = 0.6  # bandwidth in spacings: the ripple of a sampled Gaussian, 2 exp(-2 π² 0.6²), is then below 0.2 %
_NUM_QUADRATURE = 3  # the middle of a step is one of them: a wall there must not be missed


@dataclass(frozen=True, eq=False)
class Grid:
    """Evenly spaced points of a box: where an `InterpolatedMetric` evaluates the exact one.

    Args:
        low, high: opposite corners of the box, ``(d,)`` each.
        resolution: points along each axis, one number for all or one for each.

    Example:
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


@dataclass(frozen=True, eq=False)
class InterpolatedMetric(Metric):
    r"""The kernel-weighted mean of a table of metric tensors; make one with `InterpolatedMetric.fit`.

    `tensor` costs a few matrix products, whatever the decoder costs. `ds2` is :math:`\int_0^1 \Delta^\top M(a +
    t\Delta)\,\Delta\,dt`, the energy of the straight step, by Gauss-Legendre quadrature of three points: symmetric, and
    it notices a wall between both ends.

    Attributes:
        mean: the points, the table, and the bandwidth σ of their weighted mean.
        error: measured at held-out points, an `InterpolationAccuracy`.

    Example:
        >>> import torch, pullback as pb
        >>> from torch.distributions import Normal
        >>> exact = pb.FisherRaoMetric(lambda z: Normal(z**2, 1.0))
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
            held_out: where `error` is measured. By default 256 random points of the grid's box, or as many codes, moved
                by about one bandwidth.
        """
        check_metric(metric)
        check_options(bandwidth=bandwidth)
        points = points if isinstance(points, Grid) else as_codes(points, metric, a_set=True, least=2).detach()
        nodes = points.points if isinstance(points, Grid) else points
        table = _evaluate(metric, nodes).flatten(1)
        sigma = _bandwidth(points, bandwidth)
        if isinstance(points, Grid):
            mean = GridMean(points.low, points.spacing, points.counts, table, sigma)
        else:
            mean = PointMean(nodes, table, sigma)
        trial = cls(mean, InterpolationAccuracy(math.nan, math.nan, math.nan, 0))
        fresh = _fresh(points, sigma) if held_out is None else as_codes(held_out, nodes, a_set=True)
        return replace(trial, error=_compare(trial, metric, fresh))

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
        t, weight = _quadrature(a.dtype, a.device)
        v = b - a
        M = self.tensor(torch.lerp(a[:, None, :], b[:, None, :], t[:, None]))
        return ((M @ v[:, None, :, None])[..., 0] * v[:, None, :]).sum(-1) @ weight


@functools.lru_cache
def _quadrature(dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Gauss-Legendre points and weights on [0, 1]."""
    points, weights = np.polynomial.legendre.leggauss(_NUM_QUADRATURE)
    with torch.inference_mode(False):
        t, weight = (torch.as_tensor(x, dtype=dtype, device=device) for x in (0.5 * (points + 1), 0.5 * weights))
    return t, weight


def _bandwidth(points: Grid | Tensor, bandwidth: float | None) -> Tensor:
    like = points.low if isinstance(points, Grid) else points[0]
    if bandwidth is not None:
        return torch.full_like(like, bandwidth)
    if isinstance(points, Grid):
        return _SPACINGS * points.spacing
    # The nearest point of all is the code itself, or a copy of it.
    parts = points.split(max(1, _AT_ONCE // len(points)))
    gaps = torch.cat([torch.cdist(some, points).topk(2, largest=False).values[:, 1] for some in parts])
    if not bool((gaps > 0).any()):
        raise ValueError(
            "The codes are one and the same point, so they have no spacing. Give bandwidth=, or more codes."
        )
    return gaps[gaps > 0].median().expand_as(like).clone()


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


def _compare(trial: Metric, metric: Metric, z: Tensor) -> InterpolationAccuracy:
    exact = _evaluate(metric, z)
    with torch.no_grad():
        gap = (trial.tensor(z) - exact).flatten(1).norm(dim=1)
    relative = gap / exact.flatten(1).norm(dim=1).clamp_min(torch.finfo(exact.dtype).tiny)
    return InterpolationAccuracy(relative.median().item(), relative.mean().item(), relative.max().item(), len(z))
