r"""Curves in the latent space, and how long they are.

A curve is a map :math:`c: [0, 1] \to Z`, here cubic between its values at uniform parameters. Energy and length need
nothing of a metric but its squared steps. These are symmetric, so both have order two, and order four after one
Richardson extrapolation.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from pullback._curves.steps import equal_spacing, safe_sqrt, squared_steps
from pullback._decoders.contract import as_codes, real_numbers
from pullback._metrics.base import Metric, broadcast, check_metric
from pullback._numerics import spline
from pullback._options import check_options
from pullback._progress import progress
from pullback._typing import Bool, Codes, Float, Points

Parameters = Tensor | np.ndarray | Sequence[float] | float


class Curve(abc.ABC):
    """A curve, or a batch of curves, over the parameter t in [0, 1] (abstract).

    >>> import torch, pullback as pb
    >>> path = pb.CubicSpline.straight([0.0, 0.0], [2.0, 4.0], num_knots=5)
    >>> isinstance(path, pb.Curve), path(0.5), path.velocity(0.5)
    (True, tensor([1., 2.]), tensor([2., 4.]))
    """

    @property
    @abc.abstractmethod
    def begin(self) -> Float[Tensor, "*batch d"]:
        """The point at t = 0."""

    @property
    @abc.abstractmethod
    def end(self) -> Float[Tensor, "*batch d"]:
        """The point at t = 1."""

    @abc.abstractmethod
    def __call__(self, t: Float[Tensor, "*t m"]) -> Float[Tensor, "*batch m d"]:
        """Points at the parameters ``t``: the same ``(m,)`` for all curves, or ``(*batch, m)``."""

    @abc.abstractmethod
    def velocity(self, t: Float[Tensor, "*t m"]) -> Float[Tensor, "*batch m d"]:
        """The derivative in t at the parameters ``t``."""

    @property
    def num_pieces(self) -> int:
        """Pieces of equal parameter length on which the curve is smooth."""
        return 1

    def resample(self, n: int) -> Float[Tensor, "*batch n d"]:
        """Points at n uniform parameters, both ends included."""
        return self(torch.linspace(0, 1, n, dtype=self.begin.dtype, device=self.begin.device))


@dataclass(frozen=True, eq=False)
class _Interpolant(Curve):
    """A curve that is cubic between its values ``points`` at n uniform parameters (abstract)."""

    points: Points

    def __post_init__(self) -> None:
        object.__setattr__(self, "points", as_codes(self.points))
        shape = tuple(self.points.shape)
        if len(shape) < 2 or shape[-2] < 2:
            raise ValueError(
                f"A curve needs points of shape (*batch, n, d) with n >= 2; got {shape}. A single curve is (n, d)."
            )

    @abc.abstractmethod
    def piece_slopes(self) -> tuple[Tensor, Tensor]:
        """The derivatives at both ends of every piece, by its parameter from 0 to 1, each ``(*batch, n - 1, d)``."""

    @property
    def begin(self) -> Float[Tensor, "*batch d"]:
        return self.points[..., 0, :]

    @property
    def end(self) -> Float[Tensor, "*batch d"]:
        return self.points[..., -1, :]

    @property
    def batch_shape(self) -> torch.Size:
        """The shape of the batch of curves."""
        return self.points.shape[:-2]

    @property
    def num_pieces(self) -> int:
        return self.points.shape[-2] - 1

    def __call__(self, t: Parameters) -> Tensor:
        """Points at the parameters ``t``: ``(m,)`` for all curves, or ``(*batch, m)``; a number for one point."""
        return self._at(t, derivative=False)

    def velocity(self, t: Parameters) -> Tensor:
        """The derivative in t, exact; at a corner, that of the piece after it."""
        return self.num_pieces * self._at(t, derivative=True)

    def __getitem__(self, index: Any) -> Self:
        """The curves at an index of the batch."""
        index = (*(index if isinstance(index, tuple) else (index,)), ..., slice(None), slice(None))
        return type(self)(*(x[index] for x in vars(self).values()))

    def constant_speed(self, metric: Metric, *, num_points: int | None = None, num_segments: int | None = None) -> Self:
        r"""The same route at constant speed: a curve through points of this one that are equally spaced in arc length.

        The arc length :math:`s(t)` is summed over `num_segments` steps and inverted by linear interpolation. The points
        are differentiable; the parameters at which they lie are constants.

        Args:
            metric: what measures the speed.
            num_points: points of the result. By default as many as this curve has, and at least 129 to keep its shape.
            num_segments: steps of the arc length. By default at least 1024.
        """
        check_options(least=2, num_points=num_points)
        with torch.no_grad():
            steps = safe_sqrt(squared_steps(metric, _nodes(self, num_segments, at_least=1024))[0])
            t = equal_spacing(steps, num_points or max(self.points.shape[-2], 129))
        inner = self(t)[..., 1:-1, :]
        return replace(self, points=torch.cat([self.points[..., :1, :], inner, self.points[..., -1:, :]], dim=-2))

    def _at(self, t: Parameters, derivative: bool) -> Tensor:
        t = parameters(t, self.begin)
        if t.ndim == 0:
            return self._at(t[None], derivative)[..., 0, :]
        return spline.evaluate(self.points, self.piece_slopes(), t * self.num_pieces, derivative=derivative)


@dataclass(frozen=True, eq=False)
class Polyline(_Interpolant):
    """Straight pieces between ``points`` of shape ``(*batch, n, d)``, one for each ``1 / (n - 1)`` of the parameter.

    >>> import torch, pullback as pb
    >>> pb.Polyline(torch.tensor([[0.0, 0.0], [1.0, 0.0], [1.0, 2.0]]))(0.75)
    tensor([1., 1.])
    """

    def piece_slopes(self) -> tuple[Tensor, Tensor]:
        steps = self.points.diff(dim=-2)
        return steps, steps


@dataclass(frozen=True, eq=False)
class CubicSpline(_Interpolant):
    r"""The cubic spline through ``points`` of shape ``(*batch, n, d)``: C², not-a-knot at its ends, of order four.

    See de Boor 1978, *A Practical Guide to Splines*, chapter IV. Costs O(n) time and memory.

    >>> import torch, pullback as pb
    >>> t = torch.linspace(0, 1, 9)[:, None]
    >>> pb.CubicSpline(t**3).velocity(1.0).round(decimals=3)
    tensor([3.])
    """

    @classmethod
    def straight(cls, a: Codes, b: Codes, num_knots: int) -> CubicSpline:
        """The straight line from a to b at constant (Euclidean) speed."""
        a = as_codes(a)
        a, b = broadcast(a, as_codes(b, a))
        w = torch.linspace(0, 1, num_knots, dtype=a.dtype, device=a.device)[:, None]
        return cls(torch.lerp(a[..., None, :], b[..., None, :], w))

    def piece_slopes(self) -> tuple[Tensor, Tensor]:
        return spline.piece_slopes(self.points)


@dataclass(frozen=True, eq=False)
class PiecewiseCubic(_Interpolant):
    """Splines and, where `straight`, polylines.

    Shortest paths are returned as such a curve: most are splines, and those along sharp walls are polylines, because a
    spline would swing past the corners and into the wall.
    """

    straight: Bool[Tensor, "*batch 1 1"]

    @classmethod
    def mixed(cls, points: Float[Tensor, "*batch n d"], straight: Bool[Tensor, "*batch"] | None) -> PiecewiseCubic:
        """Polylines where `straight` is true, splines elsewhere."""
        none = torch.zeros(points.shape[:-2], dtype=torch.bool, device=points.device)
        return cls(points, (none if straight is None else straight)[..., None, None])

    @property
    def is_polyline(self) -> Bool[Tensor, "*batch"]:
        """Which curves of the batch are made of straight pieces."""
        return self.straight[..., 0, 0]

    def piece_slopes(self) -> tuple[Tensor, Tensor]:
        begin, end = spline.piece_slopes(self.points)
        steps = self.points.diff(dim=-2)
        return torch.where(self.straight, steps, begin), torch.where(self.straight, steps, end)

    def flatten(self) -> PiecewiseCubic:
        """The same curves in a batch of one dimension."""
        return PiecewiseCubic(*(x.reshape(-1, *x.shape[-2:]) for x in (self.points, self.straight)))


def parameters(t: Parameters, begin: Float[Tensor, "*batch d"]) -> Tensor:
    """Parameters in the dtype and on the device of curves from `begin`: a number, ``(m,)`` or ``(*batch, m)``."""
    t = real_numbers(t, "Curve parameters").to(begin)
    sizes = zip(t.shape[:-1], begin.shape[:-1], strict=False)
    if t.ndim not in (0, 1, begin.ndim) or any(n != m and 1 not in (n, m) for n, m in sizes):
        raise ValueError(
            "Curve parameters are a number, or have shape (m,) or (*batch, m) for curves of batch shape "
            f"{tuple(begin.shape[:-1])}; got {tuple(t.shape)}. Use t.flatten()."
        )
    return t


def curve_for(metric: Any, curve: Curve | Points) -> Curve:
    """A curve as it is, and the polyline through points, in the dtype and on the device of the metric."""
    check_metric(metric)
    return curve if isinstance(curve, Curve) else Polyline(as_codes(curve, metric))


def energy(
    metric: Metric, curve: Curve | Points, *, num_segments: int | None = None, extrapolate: bool = False
) -> Float[Tensor, "*batch"]:
    r"""The energy :math:`\int_0^1 \langle \dot c, \dot c\rangle\, dt`, without ½: the squared length at constant speed.

    Computed as :math:`T \sum_i \mathrm{ds}^2(c(t_i), c(t_{i+1}))`, of order two in the number T of segments.
    (Arvanitidis et al. 2022 print a one-sided sum of KL divergences, which is of order one and lacks the factor 2T.)

    Args:
        metric: what measures the steps.
        curve: a curve, a `Geodesic`, or points ``(*batch, n, d)`` at uniform parameters.
        num_segments: T. By default n - 1 for points, and at least 256 for a curve.
        extrapolate: combines T and T/2 segments to order four: ``(4 E_T - E_{T/2}) / 3``. T must be even.

    >>> import torch, pullback as pb
    >>> metric = pb.FisherRaoMetric(lambda z: torch.distributions.Normal(z, 0.5))
    >>> pb.energy(metric, [[0.0], [1.0], [3.0]])  # 2 · ((1 / 0.5)² + (2 / 0.5)²)
    tensor(40.)
    """
    return _measure(metric, curve, num_segments, extrapolate, lambda ds2: ds2.sum(-1) * ds2.shape[-1])


def length(
    metric: Metric, curve: Curve | Points, *, num_segments: int | None = None, extrapolate: bool = False
) -> Float[Tensor, "*batch"]:
    r"""The length :math:`\int_0^1 \sqrt{\langle \dot c, \dot c\rangle}\, dt`, the same for every parametrization.

    Computed as :math:`\sum_i \sqrt{\mathrm{ds}^2(c(t_i), c(t_{i+1}))}`, of order two. (Arvanitidis et al. 2022 print
    the root of the sum, which tends to zero as the curve is refined.) Arguments as for `energy`.

    >>> import torch, pullback as pb
    >>> metric = pb.FisherRaoMetric(lambda z: torch.distributions.Normal(z, 0.5))
    >>> pb.length(metric, [[0.0], [1.0], [3.0]])  # 3 / 0.5
    tensor(6.)
    """
    return _measure(metric, curve, num_segments, extrapolate, lambda ds2: safe_sqrt(ds2).sum(-1))


@progress("lengths")
def _measure(
    metric: Metric, curve: Curve | Points, num_segments: int | None, extrapolate: bool, total: Callable[..., Tensor]
) -> Tensor:
    path = curve_for(metric, curve)
    as_given = num_segments is None and not isinstance(curve, Curve)
    nodes = _nodes(path, path.num_pieces if as_given else num_segments)
    if not extrapolate:
        return total(*squared_steps(metric, nodes))
    if nodes.shape[-2] % 2 == 0:
        raise ValueError(
            f"Extrapolation compares T with T/2 segments, and T = {nodes.shape[-2] - 1} is odd. Choose an even "
            "num_segments."
        )
    fine, coarse = squared_steps(metric, nodes, strides=(1, 2))
    return (4 * total(fine) - total(coarse)) / 3


def _nodes(curve: Curve, num_segments: int | None, at_least: int = 256) -> Tensor:
    """The points between which a curve is measured; by default they include all its knots."""
    if num_segments is None:
        num_segments = 2 * curve.num_pieces * math.ceil(at_least / 2 / curve.num_pieces)
    check_options(num_segments=num_segments)
    if isinstance(curve, _Interpolant) and num_segments == curve.num_pieces:
        return curve.points
    return curve.resample(num_segments + 1)
