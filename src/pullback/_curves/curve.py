r"""Curves in the latent space, and how long they are.

A curve is a map :math:`c: [0, 1] \to Z`. Both curves here are known by their values at the uniform parameters
:math:`t_i = i / (n - 1)` and are linear in them, so a whole batch of curves is evaluated by one product with a matrix of weights:
`Polyline` interpolates linearly, `CubicSpline` by the natural cubic spline.

Energy and length need nothing of a metric but its squared steps,

.. math:: E_T(c) = T \sum_i \mathrm{ds}^2(c(t_i), c(t_{i+1})), \qquad L_T(c) = \sum_i \sqrt{\mathrm{ds}^2(c(t_i), c(t_{i+1}))}.

Squared steps are symmetric in their ends, so the errors of both are even series in :math:`1/T`: order two as they stand, and
order four after one Richardson extrapolation, which reuses the decoded points.
"""

from __future__ import annotations

import abc
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from scipy import interpolate
from torch import Tensor

from pullback._curves.steps import safe_sqrt, squared_steps
from pullback._metrics.base import Metric
from pullback._typing import Bool, Float


class Curve(abc.ABC):
    """A curve, or a batch of curves, over the parameter t in [0, 1] (abstract)."""

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
    """A curve that is linear in its values ``points`` at n uniform parameters (abstract)."""

    points: Float[Tensor, "*batch n d"]

    def __post_init__(self) -> None:
        shape = tuple(self.points.shape)
        if len(shape) < 2 or shape[-2] < 2:
            raise ValueError(
                f"A curve needs points of shape (*batch, n, d) with n >= 2; got {shape}. A single curve is (n, d)."
            )

    @abc.abstractmethod
    def _value(self, i: Tensor, w: Tensor) -> Tensor:
        """Points at ``t = (i + w) / (n - 1)``."""

    @abc.abstractmethod
    def _slope(self, i: Tensor, w: Tensor) -> Tensor:
        """Derivatives in t there."""

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

    def __call__(self, t: Float[Tensor, "*t m"]) -> Float[Tensor, "*batch m d"]:
        return self._value(*self._locate(t))

    def velocity(self, t: Float[Tensor, "*t m"]) -> Float[Tensor, "*batch m d"]:
        """The derivative in t, exact; at a corner of a polyline, that of the piece after it."""
        return self._slope(*self._locate(t))

    def __getitem__(self, index: Any) -> Self:
        """The curves at an index of the batch."""
        index = index if isinstance(index, tuple) else (index,)
        return replace(self, points=self.points[(*index, ..., slice(None), slice(None))])

    def constant_speed(self, metric: Metric, *, num_points: int | None = None, num_segments: int | None = None) -> Self:
        r"""The same route at constant speed: a curve through points of this one that are equally spaced in arc length.

        The arc length :math:`s(t)` is summed over `num_segments` steps and inverted by linear interpolation. The points are
        differentiable; the parameters at which they lie are constants.

        Args:
            metric: what measures the speed.
            num_points: points of the result. By default as many as this curve has, and at least 129 to keep its shape.
            num_segments: steps of the arc length. By default at least 1024.
        """
        num_points = num_points or max(self.points.shape[-2], 129)
        with torch.no_grad():
            steps = safe_sqrt(squared_steps(metric, _nodes(self, num_segments, at_least=1024))[0])
            t = equal_spacing(steps, num_points)
        begin, inner, end = self.points[..., :1, :], self(t)[..., 1:-1, :], self.points[..., -1:, :]
        return replace(self, points=torch.cat([begin, inner, end], dim=-2))

    def _locate(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """The piece each t lies in, and where in it, 0 to 1."""
        if t.ndim == 0:
            raise ValueError("Curve parameters have shape (m,) or (*batch, m); got a scalar. Use t.reshape(1).")
        x = t.to(self.points) * self.num_pieces
        i = x.detach().floor().long().clamp(0, self.num_pieces - 1)
        return i, x - i


@dataclass(frozen=True, eq=False)
class Polyline(_Interpolant):
    """Straight pieces between ``points`` of shape ``(*batch, n, d)``, one piece for each ``1 / (n - 1)`` of the parameter."""

    def _value(self, i: Tensor, w: Tensor) -> Tensor:
        return torch.lerp(self._point(i), self._point(i + 1), w[..., None])

    def _slope(self, i: Tensor, w: Tensor) -> Tensor:
        return (self._point(i + 1) - self._point(i)) * self.num_pieces

    def _point(self, i: Tensor) -> Tensor:
        return self.points[..., i, :] if i.ndim == 1 else self.points.take_along_dim(i[..., None], dim=-2)


@dataclass(frozen=True, eq=False)
class CubicSpline(_Interpolant):
    r"""The natural cubic spline through ``points`` of shape ``(*batch, n, d)``: C², with no curvature at its ends.

    With the second derivatives :math:`S''_i` at the knots (a constant matrix times the points) and :math:`h = 1/(n-1)`, the piece
    from knot i is :math:`(1-w)\,p_i + w\,p_{i+1} + \tfrac{h^2}{6}\left[((1-w)^3 - (1-w))\,S''_i + (w^3 - w)\,S''_{i+1}\right]`:
    exact at the knots in floating point (de Boor 1978, *A Practical Guide to Splines*, chapter IV).

    Curves of a batch that are `cornered` keep straight pieces between their points instead, as in a `Polyline`: a spline
    swings past the corners of a path that leans on walls, and into them.
    """

    cornered: Bool[Tensor, "*batch"] | None = None  # None for none of them

    @classmethod
    def through(cls, points: Float[Tensor, "*batch m d"], *, num_knots: int | None = None) -> CubicSpline:
        """The spline through all points, or the least-squares one of `num_knots` knots with the same end points."""
        if num_knots is None or num_knots == points.shape[-2]:
            return cls(points)
        t = torch.linspace(0, 1, points.shape[-2], dtype=points.dtype, device=points.device)
        basis = cls(torch.eye(num_knots, dtype=points.dtype, device=points.device))(t)
        begin, end = points[..., :1, :], points[..., -1:, :]
        rest = points - basis[:, :1] * begin - basis[:, -1:] * end
        return cls(torch.cat([begin, torch.linalg.pinv(basis[:, 1:-1]) @ rest, end], dim=-2))

    @classmethod
    def straight(cls, a: Float[Tensor, "*batch d"], b: Float[Tensor, "*batch d"], num_knots: int) -> CubicSpline:
        """The straight line from a to b at constant (Euclidean) speed."""
        w = torch.linspace(0, 1, num_knots, dtype=a.dtype, device=a.device)[:, None]
        return cls(torch.lerp(a[..., None, :], b[..., None, :], w))

    def _value(self, i: Tensor, w: Tensor) -> Tensor:
        eye, bend, h, u, w = *self._matrices(), 1 / self.num_pieces, (1 - w)[..., None], w[..., None]
        bent = (u**3 - u) * bend[i] + (w**3 - w) * bend[i + 1]
        return self._unless_cornered(
            (u * eye[i] + w * eye[i + 1] + h**2 / 6 * bent) @ self.points, Polyline._value, i, w[..., 0]
        )

    def _slope(self, i: Tensor, w: Tensor) -> Tensor:
        eye, bend, h, u, w = *self._matrices(), 1 / self.num_pieces, (1 - w)[..., None], w[..., None]
        bent = (1 - 3 * u**2) * bend[i] + (3 * w**2 - 1) * bend[i + 1]
        return self._unless_cornered(
            ((eye[i + 1] - eye[i]) / h + h / 6 * bent) @ self.points, Polyline._slope, i, w[..., 0]
        )

    def __getitem__(self, index: Any) -> Self:
        index = index if isinstance(index, tuple) else (index,)
        points = self.points[(*index, ..., slice(None), slice(None))]
        return replace(self, points=points, cornered=None if self.cornered is None else self.cornered[index])

    def _unless_cornered(self, smooth: Tensor, straight: Callable[..., Tensor], i: Tensor, w: Tensor) -> Tensor:
        if self.cornered is None:
            return smooth
        return torch.where(self.cornered[..., None, None], straight(Polyline(self.points), i, w), smooth)

    def _matrices(self) -> tuple[Tensor, Tensor]:
        return _knot_matrices(self.points.shape[-2], self.points.dtype, self.points.device)


@functools.lru_cache(maxsize=64)
def _knot_matrices(n: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """What takes the values at n uniform knots to themselves and to the second derivatives of their natural spline."""
    with torch.inference_mode(False):  # a cached inference tensor could never be differentiated through again
        t = torch.linspace(0, 1, n, dtype=torch.float64).numpy()
        eye = torch.eye(n, dtype=torch.float64)
        bend = torch.from_numpy(interpolate.CubicSpline(t, eye.numpy(), bc_type="natural")(t, 2))
        return eye.to(dtype=dtype, device=device), bend.to(dtype=dtype, device=device)


def energy(
    metric: Metric,
    curve: Curve | Float[Tensor, "*batch n d"],
    *,
    num_segments: int | None = None,
    extrapolate: bool = False,
) -> Float[Tensor, "*batch"]:
    r"""The energy :math:`\int_0^1 \langle \dot c, \dot c\rangle\, dt`, without ½: the squared length, if the speed is constant.

    Computed as :math:`T \sum_i \mathrm{ds}^2(c(t_i), c(t_{i+1}))`, of order two in the number T of segments. (Arvanitidis et al. 2022
    print a one-sided sum of KL divergences, which is of order one and lacks the factor 2T.)

    Args:
        metric: what measures the steps.
        curve: a curve, or points ``(*batch, n, d)`` at uniform parameters.
        num_segments: T. By default n - 1 for points, and at least 256 for a curve.
        extrapolate: combines T and T/2 segments to order four: ``(4 E_T - E_{T/2}) / 3``. T must be even.
    """
    return _measure(metric, curve, num_segments, extrapolate, lambda ds2: ds2.sum(-1) * ds2.shape[-1])


def length(
    metric: Metric,
    curve: Curve | Float[Tensor, "*batch n d"],
    *,
    num_segments: int | None = None,
    extrapolate: bool = False,
) -> Float[Tensor, "*batch"]:
    r"""The length :math:`\int_0^1 \sqrt{\langle \dot c, \dot c\rangle}\, dt`, the same for every parametrisation of the route.

    Computed as :math:`\sum_i \sqrt{\mathrm{ds}^2(c(t_i), c(t_{i+1}))}`, of order two. (Arvanitidis et al. 2022 print the root of the sum,
    which tends to zero as the curve is refined.) Arguments as for `energy`.
    """
    return _measure(metric, curve, num_segments, extrapolate, lambda ds2: safe_sqrt(ds2).sum(-1))


def _measure(metric, curve, num_segments, extrapolate, total) -> Tensor:
    nodes = _nodes(curve, num_segments)
    if not extrapolate:
        return total(*squared_steps(metric, nodes))
    if nodes.shape[-2] % 2 == 0:
        raise ValueError(
            f"Extrapolation compares T with T/2 segments, and T = {nodes.shape[-2] - 1} is odd. Choose an even num_segments."
        )
    fine, coarse = squared_steps(metric, nodes, strides=(1, 2))
    return (4 * total(fine) - total(coarse)) / 3


def _nodes(curve: Curve | Tensor, num_segments: int | None, at_least: int = 256) -> Tensor:
    """The points between which a curve is measured; by default they include all its knots."""
    if isinstance(curve, Tensor):
        if num_segments is None:
            return Polyline(curve).points
        curve = Polyline(curve)
    if num_segments is None:
        num_segments = 2 * curve.num_pieces * math.ceil(at_least / 2 / curve.num_pieces)
    if num_segments < 1:
        raise ValueError(f"num_segments must be at least 1; got {num_segments}.")
    if isinstance(curve, _Interpolant) and num_segments == curve.num_pieces:
        return curve.points
    return curve.resample(num_segments + 1)


def equal_spacing(steps: Float[Tensor, "*batch m"], n: int) -> Float[Tensor, "*batch n"]:
    """The n parameters in [0, 1] that cut a curve into equally long parts, given the lengths of its m uniform segments.

    Segments of no length are passed over in no time; a curve of no length is cut uniformly.
    """
    resolution = torch.finfo(steps.dtype)
    steps = steps + resolution.eps * steps.mean(-1, keepdim=True) + resolution.tiny
    s = torch.nn.functional.pad(steps.cumsum(-1), (1, 0))
    s = s / s[..., -1:]
    u = torch.linspace(0, 1, n, dtype=s.dtype, device=s.device).expand(*s.shape[:-1], n).contiguous()
    i = (torch.searchsorted(s, u, right=True) - 1).clamp(0, steps.shape[-1] - 1)
    before, after = s.gather(-1, i), s.gather(-1, i + 1)
    return (i + (u - before) / (after - before)) / steps.shape[-1]
