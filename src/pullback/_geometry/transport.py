r"""Parallel transport: tangents moved along a curve without turning.

A tangent is parallel along a curve c if its covariant derivative vanishes, :math:`\dot w = -\Gamma(c)[\dot c, w]`. The
curve is given, so the equation is *linear*, its coefficients are known in advance, and one matrix per curve serves all
tangents.

Where the metric has an embedding, no second derivative is needed: parallel means that the image of the tangent changes
only across the surface. So from one node of the curve to the next the image is projected onto the next tangent space.
With Jacobians :math:`J_i`, metric tensors :math:`M_i = J_i^\top J_i = L_i L_i^\top` and orthonormal coordinates
:math:`L_i^\top w`, that is

.. math:: U_i = \operatorname{polar}\bigl(L_{i+1}^{-1} J_{i+1}^\top J_i L_i^{-\top}\bigr),

the rotation nearest to the projection, also across a kink of the decoder. Steps are symmetric, so Romberg's
extrapolation applies: three step sizes share the Jacobians, one per node.

Metrics without an embedding, and the connections of other ``alpha``, are integrated: by collocation at the three Gauss
points of each of N equal steps, of order six (Hairer, Lubich and Wanner, *Geometric Numerical Integration*, II.1.3). In
both cases N is doubled until the result no longer changes.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from pullback._curves.curve import Curve, curve_for
from pullback._decoders.contract import as_codes, unvalidated
from pullback._metrics.base import Metric
from pullback._metrics.connection import connection
from pullback._options import check_options
from pullback._progress import progress
from pullback._solvers.base import ConvergenceError
from pullback._typing import Codes, Float

# Relative error asked for by default: that of the paths, whose curves are good to about five digits; and where the
# decoder has kinks, across which more digits have no meaning.
_RTOL, _KINKED_RTOL = 1e-5, 1e-3
# From so many steps on, changes that do not fall when steps are halved are kinks; smooth decoders quarter them from 64.
_KINKED_SEGMENTS = 256
# The fewest steps, of which a quarter are the largest that are compared, and how many to try first for smooth curves.
_LEAST_SEGMENTS, _FIRST_SEGMENTS = 8, 32
# The collocation at three Gauss points on [0, 1]: its order, nodes, weights, and the integrals of the Lagrange
# polynomials up to each node.
_ORDER, _S = 6, math.sqrt(15)
_NODES, _WEIGHTS = [0.5 - _S / 10, 0.5, 0.5 + _S / 10], [5 / 18, 4 / 9, 5 / 18]
_INTEGRALS = [
    [5 / 36, 2 / 9 - _S / 15, 5 / 36 - _S / 30],
    [5 / 36 + _S / 24, 2 / 9, 5 / 36 - _S / 24],
    [5 / 36 + _S / 30, 2 / 9 + _S / 15, 5 / 36],
]
# Numbers in all Jacobians kept at once, 256 MB of float64.
_CHUNK = 2**25
# Newton-Schulz steps for the nearest rotation; a singular value of 0.1 takes nine to reach 1 to rounding.
_POLAR_STEPS = 10

# Transports, the error left in them, and whether it falls smoothly.
Measured = tuple[Tensor, Tensor, Tensor]


@progress("transport")
def parallel_transport(
    metric: Metric,
    curve: Curve | Float[Tensor, "*curves n d"],
    v: Codes,
    *,
    rtol: float | None = None,
    max_segments: int = 2**13,
    alpha: float = 0.0,
) -> Float[Tensor, "*batch d"]:
    r"""Moves tangents ``v`` along a curve without turning: :math:`\nabla_{\dot c} w = 0`, :math:`w(0) = v`.

    Returns w(1), linear in ``v`` and differentiable in it. Lengths and angles are kept, and the velocity of a geodesic
    stays its velocity; along a closed curve tangents come back turned by the curvature inside.

    Args:
        metric: the geometry.
        curve: a curve or a batch of them, a `pullback.results.Geodesic`, or points ``(*curves, n, d)`` of a polyline.
        v: tangents at its beginning, any shape ``(*batch, d)`` that broadcasts with the curves'.
        rtol: relative error allowed. By default 1e-5, and 1e-3 where the decoder has kinks.
        max_segments: steps after which the curve counts as unresolved.
        alpha: as in `pullback.expmap`. Transports of opposite alpha keep the inner product of two tangents between
            them.

    Raises:
        ConvergenceError: if the metric changes too sharply along a curve, or is not finite on it. Its `result` are the
            matrices ``(*curves, d, d)`` that were found.

    >>> import torch, pullback as pb
    >>> metric = pb.FisherRaoMetric(lambda z: torch.distributions.Normal(z[..., 0], z[..., 1]))
    >>> up = torch.tensor([[0.0, 1.0], [0.0, 2.0]])
    >>> pb.parallel_transport(metric, up, torch.tensor([1.0, 0.0]))
    tensor([2.0000, 0.0000])
    """
    check_options(rtol=rtol, max_segments=max_segments)
    curve = curve_for(metric, getattr(curve, "curve", curve))
    v = as_codes(v, curve.begin, dim=curve.begin.shape[-1])
    with torch.no_grad(), unvalidated():
        matrices = _transports(metric, curve, rtol, max_segments, alpha)
    return (matrices @ v[..., None])[..., 0]


def _transports(metric: Metric, curve: Curve, rtol: float | None, max_segments: int, alpha: float) -> Tensor:
    """The matrices ``(*curves, d, d)`` that take tangents from the beginning to the end."""
    batch, d = curve.begin.shape[:-1], curve.begin.shape[-1]
    embedded = not alpha and metric.embed(curve.begin.reshape(-1, d)[:1]) is not None
    measure = _by_projection if embedded else functools.partial(_by_collocation, alpha=alpha)
    result = curve.begin.new_full((batch.numel(), d, d), torch.nan)
    error = curve.begin.new_full((batch.numel(),), torch.inf)
    left = torch.arange(len(result), device=result.device)
    # a multiple of four, and of the pieces unless these are many, where an eighth of them may do
    segments = math.lcm(4, curve.num_pieces) * math.ceil(_LEAST_SEGMENTS / math.lcm(4, curve.num_pieces))
    if curve.num_pieces % _FIRST_SEGMENTS == 0:
        segments = max(_FIRST_SEGMENTS, curve.num_pieces // 8)
    allowed = torch.full_like(error, max(rtol or _RTOL, 64 * torch.finfo(error.dtype).eps))
    while len(left) and segments <= max(max_segments, 2 * curve.num_pieces):
        found, change, smooth = measure(metric, curve, left, segments, result[left])
        result[left], error[left] = found, (change / found.abs().amax((-2, -1))).nan_to_num(torch.inf)
        if rtol is None and segments >= _KINKED_SEGMENTS:
            allowed[left] = torch.where(smooth, allowed[left], _KINKED_RTOL)
        lost = ~torch.isfinite(found).all(-1).all(-1)
        left, segments = left[~lost & ~(error[left] <= allowed[left])], 2 * segments
    failed = error > allowed
    if failed.any():
        first = int(failed.nonzero()[0])
        cause = "The metric is not finite along it. Keep the curve within the region where the decoder is defined."
        if result[first].isfinite().all():
            cause = (
                f"The metric changes too sharply along it for {max_segments} segments. Raise max_segments, loosen "
                "rtol, or smooth the decoder."
            )
        raise ConvergenceError(
            f"Transport failed along {int(failed.sum())} of {failed.numel()} curves, first number {first}. {cause}",
            result=result.reshape(*batch, d, d),
        )
    return result.reshape(*batch, d, d)


def _by_projection(metric: Metric, curve: Curve, index: Tensor, num_segments: int, _before: Tensor) -> Measured:
    """Transports of the curves at `index` from N, N/2 and N/4 steps, the error left, and whether it is smooth."""
    t = torch.linspace(0, 1, num_segments + 1, dtype=curve.begin.dtype, device=curve.begin.device)
    nodes = curve(t).reshape(-1, len(t), curve.begin.shape[-1])[index]
    width = sum(part.shape[-1] for part in metric.frame_at(nodes[:1, :1]).values)
    size = max(1, _CHUNK // (nodes[0].numel() * width))
    found, change, smooth = zip(*(_romberg(metric, part) for part in nodes.split(size)), strict=True)
    return torch.cat(found), torch.cat(change), torch.cat(smooth)


def _romberg(metric: Metric, nodes: Tensor) -> Measured:
    """The same for curves through given nodes ``(B, N + 1, d)``."""
    frame = metric.frame_at(nodes, origin=nodes[:, nodes.shape[1] // 2, None])
    jacobians = [j.movedim(0, -1).contiguous() for j in frame.tangents]
    factors, floor = _factors(_gram(jacobians, slice(None), slice(None)))
    # a decoder that masks its invalid values with NaN has derivatives there that look harmless
    known = torch.stack([torch.isfinite(value).all(-1) for value in frame.values]).all(0)
    factors = torch.where(known[..., None, None], factors, torch.nan)
    turns = [_turn(jacobians, factors, floor, stride) for stride in (1, 2, 4)]
    first = [(4 * turns[i] - turns[i + 1]) / 3 for i in (0, 1)]
    steps = [(turns[i] - turns[i + 1]).abs().amax((-2, -1)) for i in (0, 1)]
    best = (16 * first[0] - first[1]) / 15
    # halving a step of an order-two method quarters its error, unless there are kinks in it
    smooth = (steps[1] > 2 * steps[0]) | (steps[0] <= 64 * torch.finfo(best.dtype).eps)
    best = _polar(torch.where(smooth[:, None, None], best, turns[0]))
    error = torch.where(smooth, (best - first[0]).abs().amax((-2, -1)), steps[0])
    matrix = torch.linalg.solve_triangular(factors[:, -1].mT, best @ factors[:, 0].mT, upper=True)
    # steps so long that there is no nearest rotation: not yet an answer, but no failure either
    finite, defined = torch.isfinite(matrix).all(-1).all(-1), torch.isfinite(factors).flatten(1).all(-1)
    matrix = torch.where((~finite & defined)[:, None, None], 0.0, matrix)
    return matrix, torch.where(finite, error * matrix.abs().amax((-2, -1)), torch.inf), smooth


def _factors(tensors: Tensor) -> tuple[Tensor, Tensor]:
    """Cholesky factors of the metric along curves ``(B, N + 1, d, d)``, and what was added to it, ``(B, 1, d, d)``."""
    # What the metric does not see moves freely: a little of the identity is added to M and to the projections, as if
    # there were one more observation. As little as possible, and more only for curves where M is singular.
    resolution, eye = torch.finfo(tensors.dtype), torch.eye(tensors.shape[-1]).to(tensors)
    largest = tensors.diagonal(dim1=-2, dim2=-1).amax(-1)
    low, high = (64 * resolution.eps * x.clamp_min(resolution.tiny**0.5) for x in (largest.amin(-1), largest.amax(-1)))
    factors, info = torch.linalg.cholesky_ex(tensors + low[:, None, None, None] * eye)
    singular = (info != 0).any(-1)
    floor = torch.where(singular, high, low)[:, None, None, None] * eye
    if singular.any():
        factors, info = torch.linalg.cholesky_ex(tensors + floor)
    return torch.where((info == 0)[..., None, None], factors, torch.nan), floor


def _gram(jacobians: list[Tensor], left: slice, right: slice) -> Tensor:
    """``sym(Jᵀ J)`` between nodes of each curve, of shape ``(B, n, d, d)``."""
    first, second = jacobians[0], jacobians[-1]
    gram = first[:, left].mT @ second[:, right]
    return gram if first is second else 0.5 * (gram + second[:, left].mT @ first[:, right])


def _turn(jacobians: list[Tensor], factors: Tensor, floor: Tensor, stride: int) -> Tensor:
    """The product of the rotations between every `stride`-th node, in orthonormal coordinates."""
    last = factors.shape[1] - 1
    here, there = slice(0, last, stride), slice(stride, last + 1, stride)
    half = torch.linalg.solve_triangular(factors[:, there], _gram(jacobians, there, here) + floor, upper=False)
    return _product(_polar(torch.linalg.solve_triangular(factors[:, here], half.mT, upper=False).mT))


def _polar(x: Tensor) -> Tensor:
    """The orthogonal matrices next to matrices whose singular values lie between 0 and √3, by Newton-Schulz steps."""
    eye = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
    for _ in range(_POLAR_STEPS):
        x = 0.5 * x @ (3 * eye - x.mT @ x)
    return x


def _product(steps: Tensor) -> Tensor:
    """The product of the matrices ``(B, N, d, d)`` over N, the first one acting first."""
    while steps.shape[1] > 1:
        paired = steps.shape[1] // 2 * 2
        steps = torch.cat([steps[:, 1:paired:2] @ steps[:, :paired:2], steps[:, paired:]], 1)
    return steps[:, 0]


def _by_collocation(
    metric: Metric, curve: Curve, index: Tensor, num_segments: int, before: Tensor, *, alpha: float
) -> Measured:
    """Transports of the curves at `index` from N steps, and how far they are from those of N/2."""
    nodes, weights, inner = (curve.begin.new_tensor(x) for x in (_NODES, _WEIGHTS, _INTEGRALS))
    h, d = 1 / num_segments, curve.begin.shape[-1]
    t = (torch.arange(num_segments, dtype=nodes.dtype, device=nodes.device)[:, None] + nodes).flatten() * h
    points, velocities = (x.reshape(-1, len(t), d)[index] for x in (curve(t), curve.velocity(t)))
    rates = connection(metric, points, velocities, alpha=alpha).unflatten(1, (num_segments, len(nodes)))
    # what each stage adds to each, of shape (B, N, 3, 3, d, d)
    blocks = h * rates[:, :, :, None] * inner[:, :, None, None]
    eye = torch.eye(len(nodes) * d, dtype=t.dtype, device=t.device)
    system = eye - blocks.transpose(-3, -2).flatten(2, 3).flatten(-2)
    stages = torch.linalg.solve_ex(system, rates.flatten(2, 3))[0].unflatten(2, (len(nodes), d))
    found = _product(eye[:d, :d] + h * torch.einsum("i,bnijk->bnjk", weights, stages))
    change = (found - before).abs().amax((-2, -1)) / (2**_ORDER - 1)
    return found, change, torch.ones_like(change, dtype=torch.bool)
