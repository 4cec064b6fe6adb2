"""Shortest paths as statistics need them: lengths and logarithms of many pairs, none of which may stop the rest.

In flat space they are differences, and no path is solved for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pullback._decoders.contract import unvalidated
from pullback._geometry.geodesic import Start, geodesic
from pullback._geometry.logarithm import logarithm
from pullback._metrics.base import Metric
from pullback._solvers.base import Solver
from pullback._solvers.gauss_newton import GaussNewton
from pullback._typing import Float

_BATCH = 2048  # pairs solved together
_SHARE = 0.1  # of the relative error asked for that the path may have
Starts = Start | Sequence[Start]


@dataclass(frozen=True)
class Flat(Metric):
    """Flat space: the identity for a tensor."""

    def tensor(self, z: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d d"]:
        return torch.eye(z.shape[-1], dtype=z.dtype, device=z.device).expand(*z.shape, z.shape[-1])

    def ds2(self, a: Float[Tensor, "*batch d"], b: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch"]:
        return (b - a).square().sum(-1)

    def embed(
        self, z: Float[Tensor, "*batch d"], origin: Float[Tensor, "*origin d"] | None = None
    ) -> tuple[Tensor, Tensor]:
        return z, z


@dataclass(frozen=True)
class Logs:
    """Logarithms of n pairs, their lengths, their relative errors, and which paths converged; NaN where there is no path."""

    velocity: Tensor  # (n, d)
    distance: Tensor  # (n,)
    error: Tensor  # (n,)
    converged: Tensor  # (n,)


def logs(metric: Metric, a: Tensor, b: Tensor, *, solver: Solver | None, init: Starts, rtol: float) -> Logs:
    """The logarithms at codes ``a`` of codes ``b``, each ``(n, d)``.

    Where the codes agree to half their digits, it is their difference, as far as these digits go.
    """
    v = b - a
    solver = solver_for(rtol) if solver is None else solver
    if isinstance(metric, Flat):
        return Logs(v, torch.linalg.vector_norm(v, dim=-1), torch.zeros_like(v[:, 0]), torch.isfinite(v).all(-1))
    near = v.abs().amax(-1) <= torch.finfo(v.dtype).eps ** 0.5 * (1 + a.abs().amax(-1))
    found = Logs(v, torch.zeros_like(v[:, 0]), torch.zeros_like(v[:, 0]), near.clone())
    if near.any():
        with torch.no_grad(), unvalidated():
            found.distance[near] = metric.norm(a[near], v[near])
    for rows in (~near).nonzero()[:, 0].split(_BATCH) if not near.all() else ():
        part = logarithm(metric, a[rows], b[rows], solver=solver, init=init, rtol=rtol, check=False)
        found.velocity[rows], found.distance[rows] = part.velocity, part.distance
        found.error[rows], found.converged[rows] = part.error, part.geodesic.converged
    return found


def solver_for(rtol: float) -> Solver:
    """The default solver, as accurate as `rtol` deserves."""
    return GaussNewton(rtol=min(max(_SHARE * rtol, 1e-6), 1e-3))


def lengths(metric: Metric, a: Tensor, b: Tensor, *, solver: Solver | None, init: Starts) -> Tensor:
    """The distances of codes ``a`` and ``b``, each ``(n, d)``; infinite where no path was found."""
    if isinstance(metric, Flat) or len(a) == 0:
        return torch.linalg.vector_norm(b - a, dim=-1)
    pairs = zip(a.split(_BATCH), b.split(_BATCH), strict=True)
    found = [geodesic(metric, start, stop, solver=solver, init=init).length for start, stop in pairs]
    return torch.cat(found).nan_to_num(torch.inf)


def all_lengths(metric: Metric, a: Tensor, b: Tensor, *, solver: Solver | None, init: Starts) -> Tensor:
    """The distances ``(n, m)`` of codes ``a``, ``(n, d)``, and ``b``, ``(m, d)``."""
    left, right = a[:, None].expand(-1, len(b), -1), b.expand(len(a), -1, -1)
    return lengths(metric, left.flatten(0, 1), right.flatten(0, 1), solver=solver, init=init).reshape(len(a), len(b))
