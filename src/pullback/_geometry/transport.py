r"""Parallel transport: tangents moved along a curve without turning.

A tangent is parallel along a curve c if its covariant derivative vanishes, :math:`\dot w = -\Gamma(c)[\dot c, w]`. The curve is
given, so unlike the geodesic equation this one is *linear*, with coefficients known in advance: they are computed for the
whole curve in one batch, and serve all tangents. On each of N equal steps the solution is found by collocation at the three Gauss
points, of order six (Hairer, Lubich and Wanner, *Geometric Numerical Integration*, II.1.3). That is a matrix for each step, and the
transport is their product. N is doubled until the product no longer changes.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from pullback._curves.curve import Curve, Polyline
from pullback._metrics.base import Metric
from pullback._metrics.connection import connection
from pullback._solvers.base import ConvergenceError
from pullback._typing import Float

_LEAST_SEGMENTS = 8
_ORDER = 6


def parallel_transport(
    metric: Metric,
    curve: Curve | Float[Tensor, "*curves n d"],
    v: Float[Tensor, "*#batch d"],
    *,
    rtol: float = 1e-10,
    max_segments: int = 2**13,
    alpha: float = 0.0,
) -> Float[Tensor, "*batch d"]:
    r"""Tangents ``v`` at the begin of a curve, moved to its end without turning: :math:`\nabla_{\dot c} w = 0`, :math:`w(0) = v`.

    Linear in ``v``, and differentiable in it. Lengths and angles are kept, and the velocity of a geodesic stays its velocity; along a
    closed curve tangents come back turned by the curvature inside.

    Args:
        metric: the geometry.
        curve: a curve or a batch of them, such as the `curve` of a `pullback.Geodesic`, or points ``(*curves, n, d)`` of a polyline.
        v: tangents at its begin, any shape ``(*batch, d)`` that broadcasts with the curves'.
        rtol: relative error allowed.
        max_segments: steps after which the curve counts as unresolved.
        alpha: as in `pullback.expmap`. Transports of opposite alpha keep the inner product of two tangents between them.

    Raises:
        ConvergenceError: if the metric changes too sharply along a curve, or is not finite on it.
    """
    curve = Polyline(curve) if isinstance(curve, Tensor) else curve
    if v.ndim == 0 or v.shape[-1] != curve.begin.shape[-1]:
        raise ValueError(
            f"Tangents of shape {tuple(v.shape)} do not belong to curves in {curve.begin.shape[-1]} dimensions. Pass (*batch, d)."
        )
    if v.dtype != curve.begin.dtype or v.device != curve.begin.device:
        raise ValueError(f"Tangents are {v.dtype} on {v.device}, the curve is not. Use v.to(curve.begin).")
    with torch.no_grad():
        matrices = _transports(metric, curve, rtol, max_segments, alpha)
    return (matrices @ v[..., None])[..., 0]


def _transports(metric: Metric, curve: Curve, rtol: float, max_segments: int, alpha: float) -> Tensor:
    """The matrices ``(*curves, d, d)`` that take tangents from begin to end."""
    batch, d = curve.begin.shape[:-1], curve.begin.shape[-1]
    result = curve.begin.new_full((batch.numel(), d, d), torch.nan)
    left = torch.arange(len(result), device=result.device)
    error = curve.begin.new_full((len(result),), torch.inf)
    segments = curve.num_pieces * math.ceil(_LEAST_SEGMENTS / curve.num_pieces)
    rtol = max(rtol, 64 * torch.finfo(result.dtype).eps)
    while len(left) and segments <= max(max_segments, 2 * curve.num_pieces):
        found = _product(_steps(metric, curve, left, segments, alpha))
        change = (found - result[left]).abs().amax((-2, -1)) / (2**_ORDER - 1)
        result[left], error[left] = found, (change / found.abs().amax((-2, -1))).nan_to_num(torch.inf)
        lost = ~torch.isfinite(found).all(-1).all(-1)
        left, segments = left[~lost & ~(error[left] <= rtol)], 2 * segments
    _raise_if_failed(error > rtol, torch.isfinite(result).all(-1).all(-1), max_segments)
    return result.reshape(*batch, d, d)


def _steps(metric: Metric, curve: Curve, index: Tensor, num_segments: int, alpha: float) -> Tensor:
    """The matrices ``(B, N, d, d)`` over each of N equal steps of the curves at `index`."""
    nodes, weights, inner = _gauss(curve.begin.dtype, curve.begin.device)
    h, d = 1 / num_segments, curve.begin.shape[-1]
    t = (torch.arange(num_segments, dtype=nodes.dtype, device=nodes.device)[:, None] + nodes).flatten() * h
    points, velocities = (x.reshape(-1, len(t), d)[index] for x in (curve(t), curve.velocity(t)))
    rates = connection(metric, points, velocities, alpha=alpha).unflatten(1, (num_segments, len(nodes)))
    blocks = h * rates[:, :, :, None] * inner[:, :, None, None]  # (B, N, 3, 3, d, d): what each stage adds to each
    system = torch.eye(len(nodes) * d, dtype=t.dtype, device=t.device) - blocks.transpose(-3, -2).flatten(2, 3).flatten(
        -2
    )
    stages = torch.linalg.solve_ex(system, rates.flatten(2, 3))[0].unflatten(2, (len(nodes), d))
    return torch.eye(d, dtype=t.dtype, device=t.device) + h * torch.einsum("i,bnijk->bnjk", weights, stages)


@functools.lru_cache
def _gauss(dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Nodes, weights and the integrals of the Lagrange polynomials up to each node, on [0, 1]."""
    with torch.inference_mode(False):
        s = math.sqrt(15)
        nodes = [0.5 - s / 10, 0.5, 0.5 + s / 10]
        weights = [5 / 18, 4 / 9, 5 / 18]
        inner = [
            [5 / 36, 2 / 9 - s / 15, 5 / 36 - s / 30],
            [5 / 36 + s / 24, 2 / 9, 5 / 36 - s / 24],
            [5 / 36 + s / 30, 2 / 9 + s / 15, 5 / 36],
        ]
        first, second, third = (torch.tensor(x, dtype=dtype, device=device) for x in (nodes, weights, inner))
        return first, second, third


def _product(steps: Tensor) -> Tensor:
    """The product of the matrices ``(B, N, d, d)`` over N, the first one acting first."""
    while steps.shape[1] > 1:
        paired = steps.shape[1] // 2 * 2
        steps = torch.cat([steps[:, 1:paired:2] @ steps[:, :paired:2], steps[:, paired:]], 1)
    return steps[:, 0]


def _raise_if_failed(failed: Tensor, finite: Tensor, max_segments: int) -> None:
    if not failed.any():
        return
    first = int(failed.nonzero()[0])
    cause = (
        f"The metric changes too sharply along it for {max_segments} segments. Raise max_segments, loosen rtol, or smooth the decoder."
        if finite[first]
        else "The metric is not finite along it. Keep the curve within the region where the decoder is defined."
    )
    raise ConvergenceError(
        f"Transport failed along {int(failed.sum())} of {failed.numel()} curves, first number {first}. {cause}"
    )
