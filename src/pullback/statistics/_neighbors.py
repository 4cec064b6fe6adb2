r"""Nearest neighbours and kernel densities under a metric.

Both compare a code with all codes of the data, and most of these are far away. A lower bound on the distance that needs no path tells
which: in a metric with a Euclidean embedding :math:`\varphi` no path is shorter than the straight line through the surrounding space,

.. math:: d(a, b) \ge |\varphi(a) - \varphi(b)| .

The bound is certain, so a code it excludes is not a neighbour. Metrics without such an embedding (a dual pair, a table) get the bound zero,
and every pair is solved.
"""

from __future__ import annotations

import math
from typing import Any, Self

import torch
from sklearn.base import DensityMixin
from torch import Tensor

from pullback._curves.steps import MAX_DECODED
from pullback._decoders.contract import unvalidated
from pullback._geometry.exponential import exponential
from pullback._metrics.base import Metric
from pullback._solvers.base import Solver
from pullback._starts.graph import Graph
from pullback.statistics._estimator import Estimator, like
from pullback.statistics._paths import Flat, lengths, logs

_REACH = 6.0  # bandwidths beyond which a kernel counts as zero: exp(-18) is 1.5e-8
_BATCH = 2048  # pairs whose geodesics are followed at once
_NUDGE = 1e-4  # distance of neighbouring geodesics, in bandwidths


class GeodesicNeighbors(Estimator):
    r"""The codes nearest to others by the length of the shortest path.

    A first few candidates, those with the least lower bound, are solved; the worst of the k best is then an upper bound on the
    distance of the k-th neighbour, and only codes whose lower bound is smaller are solved as well. The answer is that of solving all pairs.

    **Arguments:**

    - `metric`: the geometry; None for flat space.
    - `n_neighbors`: how many, unless `kneighbors` is told otherwise.
    - `graph`: where the search for shortest paths starts, as `init` in `pullback.geodesic`.
    - `solver`: of shortest paths.

    **Attributes:** `codes_` ``(n, d)``, those fitted to; `n_solved_`, how many pairs the last call of `kneighbors` solved.
    """

    def __init__(
        self,
        metric: Metric | None = None,
        n_neighbors: int = 5,
        *,
        graph: Graph | None = None,
        solver: Solver | None = None,
    ):
        self.metric = metric
        self.n_neighbors = n_neighbors
        self.graph = graph
        self.solver = solver

    def fit(self, X: Any, y: Any = None) -> Self:
        """Remembers the codes ``(n, d)``."""
        self.codes_ = like(self._codes(X, reset=True).clone(), X)
        return self

    def kneighbors(self, X: Any = None, n_neighbors: int | None = None, return_distance: bool = True) -> Any:
        """Distances and indices, ``(m, n_neighbors)`` each and nearest first, of the neighbours of codes ``(m, d)``.

        Without ``X``, of the fitted codes themselves, none of which then counts as its own neighbour.
        """
        own = X is None
        X = self.codes_ if own else X
        queries, codes = self._codes(X), torch.as_tensor(self.codes_)
        num = self.n_neighbors if n_neighbors is None else n_neighbors
        most = len(codes) - own
        if not 1 <= num <= most:
            raise ValueError(
                f"n_neighbors={num} must be between 1 and {most}, the number of codes that may be neighbours."
            )
        distance = self._candidates(queries, codes.to(queries), num, own)
        found = distance.sort(dim=1, stable=True)
        index, best = found.indices[:, :num], found.values[:, :num]
        return (like(best, X), like(index, X)) if return_distance else like(index, X)

    def _candidates(self, queries: Tensor, codes: Tensor, num: int, own: bool) -> Tensor:
        """Distances ``(m, n)`` of all pairs that may be neighbours; infinite for those that cannot."""
        lower = lower_bounds(self._metric(), queries, codes)
        if own:
            lower.fill_diagonal_(torch.inf)
        distance = torch.full_like(lower, torch.inf)
        first = lower.topk(num, largest=False).indices
        rows = torch.arange(len(queries), device=queries.device)[:, None].expand_as(first)
        self._solve(distance, queries, codes, rows.flatten(), first.flatten())
        reach = distance.gather(1, first).amax(1, keepdim=True)
        rest = ((lower <= reach) & (lower < torch.inf) & ~torch.isfinite(distance)).nonzero(as_tuple=True)
        self._solve(distance, queries, codes, *rest)
        self.n_solved_ = first.numel() + len(rest[0])
        return distance

    def _solve(self, distance: Tensor, queries: Tensor, codes: Tensor, i: Tensor, j: Tensor) -> None:
        distance[i, j] = lengths(self._metric(), queries[i], codes[j], solver=self.solver, init=self.graph)


class GeodesicKernelDensity(DensityMixin, Estimator):
    r"""A Gaussian kernel density on the latent manifold, with respect to the Riemannian volume :math:`\sqrt{\det M}\, dz`.

    .. math:: \rho(z) = \frac1n \sum_i \frac{1}{\theta_i(z)}\, (2\pi h^2)^{-d/2}\, e^{-d^2(z_i, z) / 2h^2},

    where :math:`\theta_i(z) = \lvert\det D\mathrm{Exp}_{z_i}\rvert`, taken in orthonormal frames at :math:`v = \mathrm{Log}_{z_i}(z)`, is by how much the
    exponential map stretches volume on the way (Pelletier 2005). Each kernel is a Gaussian in the tangent space, carried to the
    manifold, so it integrates to one over the volume: exactly up to the cut locus, and up to truncation at six bandwidths. The density of
    coordinates is :math:`\rho(z) \sqrt{\det M(z)}`: add `metric.log_volume(z)` to compare with a density on the flat latent space. In flat
    space it is `sklearn.neighbors.KernelDensity`, where θ = 1.

    **Arguments:**

    - `metric`: the geometry; None for flat space.
    - `bandwidth`: h, in units of length of the metric.
    - `stretch`: whether to compute θ, from neighbouring geodesics: 2 d for each pair within reach. Without it the integral of a kernel
      is off by the order of h² times the curvature.
    - `graph`: where the search for shortest paths starts, as `init` in `pullback.geodesic`.
    - `solver`: of shortest paths.

    **Attributes:** `codes_` ``(n, d)``, those fitted to.
    """

    def __init__(
        self,
        metric: Metric | None = None,
        bandwidth: float = 1.0,
        *,
        stretch: bool = True,
        graph: Graph | None = None,
        solver: Solver | None = None,
    ):
        self.metric = metric
        self.bandwidth = bandwidth
        self.stretch = stretch
        self.graph = graph
        self.solver = solver

    def fit(self, X: Any, y: Any = None) -> Self:
        """Remembers the codes ``(n, d)``."""
        if not self.bandwidth > 0:
            raise ValueError(f"bandwidth must be positive; got {self.bandwidth}.")
        self.codes_ = like(self._codes(X, reset=True).clone(), X)
        return self

    def score_samples(self, X: Any) -> Any:
        """The log-density ``(m,)`` at codes ``(m, d)`` with respect to the Riemannian volume; ``-inf`` beyond the reach of all kernels."""
        queries = self._codes(X)
        codes, h = torch.as_tensor(self.codes_).to(queries), self.bandwidth
        flat = isinstance(self._metric(), Flat)
        reach = math.inf if flat else _REACH * h
        i, j = (lower_bounds(self._metric(), queries, codes) <= reach).nonzero(as_tuple=True)
        found = logs(self._metric(), codes[j], queries[i], solver=self.solver, init=self.graph, rtol=1e-6)
        near = found.distance <= reach
        i, j, v, distance = i[near], j[near], found.velocity[near], found.distance[near]
        exponent = torch.full((len(queries), len(codes)), -torch.inf).to(queries)
        exponent[i, j] = -0.5 * (distance / h) ** 2
        if self.stretch and not flat:
            exponent[i, j] -= log_stretch(self._metric(), codes[j], v, h)
        constant = math.log(len(codes)) + 0.5 * codes.shape[1] * math.log(2 * math.pi * h**2)
        return like(exponent.logsumexp(1) - constant, X)

    def score(self, X: Any, y: Any = None) -> float:
        """The sum of the log-densities of codes."""
        return float(torch.as_tensor(self.score_samples(X)).sum())


def lower_bounds(metric: Metric, a: Tensor, b: Tensor) -> Tensor:
    """Numbers ``(n, m)`` that no distance of codes ``a``, ``(n, d)``, and ``b``, ``(m, d)``, falls below; rounded down."""
    if isinstance(metric, Flat):
        return torch.linalg.vector_norm(a[:, None] - b, dim=-1)
    with torch.no_grad(), unvalidated():
        dual = metric.embed(torch.cat([a, b]))
        if dual is None or dual[0] is not dual[1]:
            return torch.zeros(len(a), len(b)).to(a)
        left, right = dual[0].split([len(a), len(b)])
        size = max(1, MAX_DECODED // max(1, len(b)))
        chords = torch.cat([torch.linalg.vector_norm(some[:, None] - right, dim=-1) for some in left.split(size)])
    return chords.nan_to_num() * (1 - 1e-5)


def log_stretch(metric: Metric, z: Tensor, v: Tensor, scale: float) -> Tensor:
    r"""The logarithm of :math:`\theta = \lvert\det D\mathrm{Exp}_z(v)\rvert \sqrt{\det M(\mathrm{Exp}_z v) / \det M(z)}`, shape ``(n,)``.

    By central differences of geodesics whose velocities differ by `scale` times 1e-4 in length. Infinite where one does not arrive.
    """
    if len(z) == 0:
        return v.new_zeros(0)
    parts = [_log_stretch(metric, *some, scale) for some in zip(z.split(_BATCH), v.split(_BATCH), strict=True)]
    return torch.cat(parts)


def _log_stretch(metric: Metric, z: Tensor, v: Tensor, scale: float) -> Tensor:
    with torch.no_grad(), unvalidated():
        factor, info = torch.linalg.cholesky_ex(metric.tensor(z))
        if info.any():
            raise ValueError(
                f"M is singular at {int((info > 0).sum())} codes, so volumes there are zero. Drop the latent dimensions that the "
                "decoder ignores, or pass stretch=False."
            )
        nudge = _NUDGE * scale * torch.linalg.inv(factor).transpose(0, 1)  # orthonormal tangents, one at a time
        middle = exponential(metric, z, v, rtol=1e-10)
        ends = exponential(metric, z, torch.stack([v + nudge, v - nudge]), rtol=1e-10)
        slopes = (ends.end[0] - ends.end[1]) / (2 * _NUDGE * scale)
        stretch = torch.linalg.slogdet(slopes.transpose(0, 1)).logabsdet + metric.log_volume(middle.end)
    return torch.where(middle.converged & ends.converged.all(0).all(0), stretch, torch.inf)
