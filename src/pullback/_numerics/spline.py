r"""The cubic spline through equally spaced values: not-a-knot at its ends, in O(n) time and memory.

With :math:`m_i` the slope at knot i, per step of the index, the pieces are cubics from :math:`(y_i, m_i)` to
:math:`(y_{i+1}, m_{i+1})`. Their second derivatives agree at the inner knots if

.. math:: m_{i-1} + 4 m_i + m_{i+1} = 3 (y_{i+1} - y_{i-1}),

and the not-a-knot condition at an end is :math:`m_0 + 2 m_1 = (-5 y_0 + 4 y_1 + y_2) / 2`. Without the two end slopes
the system is tridiagonal, symmetric and positive definite, with :math:`2, 4, \dots, 4, 2` on its diagonal. Both sweeps
of its factorization are recurrences :math:`x_i \leftarrow x_i - l_i x_{i \pm 1}` whose factors shrink like
:math:`(2 - \sqrt 3)^k`, so that a few doublings of the distance sum them up to rounding, all curves at once. See de
Boor 1978, *A Practical Guide to Splines*, chapter IV.
"""

from __future__ import annotations

import functools

import numpy as np
import torch
from scipy.interpolate import CubicSpline
from torch import Tensor

# (2 - √3)^32 is 5e-19: the factors over larger distances are below the rounding of float64.
_REACH = 32
# Knots up to which one product with a kept matrix is faster than the sweeps (6 against 130 µs on a CPU core).
_SHORT = 66


def slopes(values: Tensor) -> Tensor:
    """The derivatives by the index, at the knots, of the splines through ``values (*batch, n, d)``."""
    n = values.shape[-2]
    if n <= _SHORT:
        steps = values.diff(dim=-2)
        first = steps[..., :1, :]  # the slopes of a straight line have no rounding
        return first + _kept(n, 0, values.dtype, values.device) @ (steps - first)
    rise = 3 * (values[..., 2:, :] - values[..., :-2, :])
    first = 0.5 * (-5 * values[..., 0, :] + 4 * values[..., 1, :] + values[..., 2, :])
    last = 0.5 * (5 * values[..., -1, :] - 4 * values[..., -2, :] - values[..., -3, :])
    ends = torch.zeros_like(rise)
    ends[..., 0, :], ends[..., -1, :] = first, last
    inner = _sweep(rise - ends, *_factors(n - 2, values.dtype, values.device))
    begin, end = first - 2 * inner[..., 0, :], last - 2 * inner[..., -1, :]
    return torch.cat([begin[..., None, :], inner, end[..., None, :]], -2)


def piece_slopes(values: Tensor) -> tuple[Tensor, Tensor]:
    """The derivatives at both ends of every piece, ``(*batch, n - 1, d)`` each."""
    slope = slopes(values)
    return slope[..., :-1, :], slope[..., 1:, :]


def evaluate(values: Tensor, ends: tuple[Tensor, Tensor], place: Tensor, *, derivative: bool = False) -> Tensor:
    """Cubics between values, with slopes at both ends of each, at real indices ``(m,)`` or ``(*batch, m)``."""
    left = place.detach().floor().long().clamp(0, values.shape[-2] - 2)
    pieces = torch.cat([values[..., :-1, :], values[..., 1:, :], *ends], -1)
    pieces = pieces[..., left, :] if left.ndim == 1 else pieces.take_along_dim(left[..., None], dim=-2)
    p, q, u, v = pieces.chunk(4, -1)
    return hermite(p, q, u, v, (place - left)[..., None], derivative=derivative)


def hermite(p: Tensor, q: Tensor, u: Tensor, v: Tensor, x: Tensor, *, derivative: bool = False) -> Tensor:
    """The cubic from ``p`` to ``q`` with the slopes ``u`` and ``v``, at ``x`` from 0 to 1; exact at both ends."""
    quadratic, cubic = 3 * (q - p) - 2 * u - v, 2 * (p - q) + u + v
    if derivative:
        return u + x * (2 * quadratic + 3 * x * cubic)
    y = 1 - x
    from_right = q - y * (v - y * (3 * (p - q) + 2 * v + u - y * cubic))
    return torch.where(x < 0.5, p + x * (u + x * (quadratic + x * cubic)), from_right)


def refine(nodes: Tensor, factor: int) -> Tensor:
    """Points of the splines through ``nodes (*batch, n, d)`` on `factor` times as many segments, the nodes included."""
    n = nodes.shape[-2]
    if n > _SHORT:
        x = torch.arange(factor, dtype=nodes.dtype, device=nodes.device)[:, None] / factor
        u, v = piece_slopes(nodes)
        inner = hermite(nodes[..., :-1, None, :], nodes[..., 1:, None, :], u[..., None, :], v[..., None, :], x)
    else:
        steps = _kept(n, factor, nodes.dtype, nodes.device) @ nodes.diff(dim=-2)
        inner = nodes[..., :-1, None, :] + steps.unflatten(-2, (n - 1, factor))
    return torch.cat([inner.flatten(-3, -2), nodes[..., -1:, :]], -2)


def _sweep(x: Tensor, pivots: Tensor, products: list[Tensor]) -> Tensor:
    """Forward and backward substitution, each summed up over distances that double."""
    for k, weights in enumerate(products):
        x = torch.cat([x[..., : 2**k, :], x[..., 2**k :, :] + weights * x[..., : -(2**k), :]], -2)
    x = x / pivots
    for k, weights in enumerate(products):
        x = torch.cat([x[..., : -(2**k), :] + weights * x[..., 2**k :, :], x[..., -(2**k) :, :]], -2)
    return x


@functools.lru_cache(maxsize=64)
def _factors(n: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, list[Tensor]]:
    """The pivots of the factorization L D Lᵀ, and the products of L's entries over the distances 1, 2, 4, …"""
    pivots = np.full(n, 4.0)
    pivots[[0, -1]] = 2.0
    for i in range(1, n):
        pivots[i] -= 1 / pivots[i - 1]
    products = [-1 / pivots[:-1]]
    while 2 ** len(products) <= min(_REACH, n - 1):
        step, last = 2 ** (len(products) - 1), products[-1]
        products.append(last[step:] * last[:-step])
    # a cached inference tensor could never be differentiated through again
    with torch.inference_mode(False):
        columns = [torch.as_tensor(x, dtype=dtype, device=device)[:, None] for x in (pivots, *products)]
    return columns[0], columns[1:]


@functools.lru_cache(maxsize=64)
def _kept(n: int, factor: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """From the steps between n knots to those from each knot to `factor` points behind it; for 0, to the slopes."""
    knots = np.tril(np.ones((n, n - 1)), -1)
    spline = CubicSpline(np.arange(n), knots)
    if factor:
        matrix = spline(np.arange((n - 1) * factor) / factor) - np.repeat(knots[:-1], factor, axis=0)
    else:
        matrix = spline(np.arange(n), 1)
    with torch.inference_mode(False):
        return torch.as_tensor(matrix, dtype=dtype, device=device)


def lerp_nodes(nodes: Tensor, factor: int) -> Tensor:
    """Nodes and `factor - 1` points on the straight pieces between each two of them."""
    w = torch.arange(factor, dtype=nodes.dtype, device=nodes.device)[:, None] / factor
    return torch.cat([torch.lerp(nodes[:, :-1, None], nodes[:, 1:, None], w).flatten(1, 2), nodes[:, -1:]], 1)
