r"""Nearest neighbors and kernel densities under a metric: lower bounds tell which pairs need no path."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass
from typing import Any, Self

import numpy as np
import torch
from sklearn.base import DensityMixin
from torch import Tensor

from pullback._geometry.pairwise.neighbors import neighbors
from pullback._solvers.base import ConvergenceError
from pullback.statistics._estimator import Estimator, like
from pullback.statistics._paths import DEFAULT_RTOL, Paths

# Bandwidths beyond which a kernel counts as zero: exp(-18) is 1.5e-8.
_REACH = 6.0
# Accuracy of neighboring geodesics, as a share of `rtol`; their distance in bandwidths is its cubic root, which
# balances the error of differences and that of geodesics.
_NUDGE_RTOL = 1e-2


@dataclass(eq=False, repr=False)
class GeodesicNeighbors(Estimator):
    r"""The codes nearest to others by the length of the shortest path.

    By `pullback.neighbors` with all codes for candidates, so the answer is that of solving all pairs.

    Args:
        metric: the geometry; None for flat space.
        n_neighbors: how many, unless `kneighbors` is told otherwise.
        init, solver: as in `pullback.geodesic`.

    Attributes:
        codes_: those fitted to, ``(n, d)``.
        n_solved_: how many pairs the last call solved.

    >>> import torch, pullback as pb
    >>> z = torch.tensor([[0.0], [1.0], [5.0]], dtype=torch.float64)
    >>> pb.statistics.GeodesicNeighbors(n_neighbors=1).fit(z).kneighbors(return_distance=False)
    tensor([[1],
            [0],
            [1]])
    """

    n_neighbors: int = 5

    def fit(self, X: Any, y: Any = None) -> Self:
        """Remembers the codes ``(n, d)``."""
        self.codes_ = like(self._codes(X, reset=True).clone(), X)
        return self

    def kneighbors(self, X: Any = None, n_neighbors: int | None = None, return_distance: bool = True) -> Any:
        """Distances and indices, ``(m, n_neighbors)`` each and nearest first, of the neighbors of codes ``(m, d)``.

        Without ``X``, of the fitted codes themselves, none of which then counts as its own neighbor.
        """
        kind = self.codes_ if X is None and hasattr(self, "codes_") else X
        queries = self._codes(kind)
        codes = torch.as_tensor(self.codes_).to(queries)
        num, most = self.n_neighbors if n_neighbors is None else n_neighbors, len(codes) - (X is None)
        if not 1 <= num <= most:
            raise ValueError(
                f"n_neighbors={num} must be between 1 and {most}, the number of codes that may be neighbors."
            )
        if self.metric is None:
            self.n_solved_ = 0
            flat = torch.linalg.vector_norm(queries[:, None] - codes, dim=-1)
            found = (flat.fill_diagonal_(torch.inf) if X is None else flat).sort(dim=1, stable=True)
            distance, index = found.values[:, :num], found.indices[:, :num]
        else:
            others = None if X is None else queries
            options: dict[str, Any] = {"solver": self.solver, "init": self.init, "n_jobs": 1}
            near = neighbors(self.metric, codes, num, queries=others, max_candidates=len(codes), **options)
            self.n_solved_ = near.num_solved
            short = np.flatnonzero(np.diff(near.distances.indptr) < num)
            if len(short):
                sentence = f"Code {short[0]} has fewer than {num} codes that a path reaches. Ask for fewer."
                raise ConvergenceError(sentence, near)
            parts = (near.distances.data, near.distances.indices.astype(np.int64))
            distance, index = (torch.from_numpy(part.reshape(-1, num)).to(queries.device) for part in parts)
        return (like(distance.to(queries), kind), like(index, kind)) if return_distance else like(index, kind)


@dataclass(eq=False, repr=False)
class GeodesicKernelDensity(DensityMixin, Estimator):
    r"""A Gaussian kernel density with respect to the Riemannian volume :math:`\sqrt{\det M}\, dz`.

    .. math:: \rho(z) = \frac1n \sum_i \frac{1}{\theta_i(z)}\, (2\pi h^2)^{-d/2}\, e^{-d^2(z_i, z) / 2h^2},

    where :math:`\theta_i(z) = \lvert\det D\mathrm{Exp}_{z_i}\rvert`, taken in orthonormal frames at :math:`v =
    \mathrm{Log}_{z_i}(z)`, is by how much the exponential map stretches volume on the way (Pelletier 2005). Each
    kernel is a Gaussian in the tangent space, carried to the manifold, so it integrates to one over the volume: exactly
    up to the cut locus, and up to truncation at six bandwidths. Add `metric.log_volume(z)` for the density of
    coordinates, on the flat latent space. In flat space it is `sklearn.neighbors.KernelDensity`, where θ = 1.

    Args:
        metric: the geometry; None for flat space.
        bandwidth: h, in units of length of the metric.
        stretch: whether to compute θ, from neighboring geodesics: 2 d for each pair within reach. Without it the
            integral of a kernel is off by the order of h² times the curvature.
        rtol: relative accuracy of distances.
        init, solver: as in `pullback.geodesic`.

    Attributes:
        codes_: those fitted to, ``(n, d)``.

    >>> import torch, pullback as pb
    >>> z = torch.zeros(1, 1, dtype=torch.float64)
    >>> pb.statistics.GeodesicKernelDensity().fit(z).score_samples(z).exp()  # one over the root of 2π
    tensor([0.3989], dtype=torch.float64)
    """

    bandwidth: float = 1.0
    _: KW_ONLY
    stretch: bool = True
    rtol: float = DEFAULT_RTOL

    def fit(self, X: Any, y: Any = None) -> Self:
        """Remembers the codes ``(n, d)``."""
        if not self.bandwidth > 0:
            raise ValueError(f"bandwidth must be positive; got {self.bandwidth}.")
        self.codes_ = like(self._codes(X, reset=True).clone(), X)
        return self

    def score_samples(self, X: Any) -> Any:
        """The log-density ``(m,)`` at codes ``(m, d)`` with respect to the volume; ``-inf`` where no kernel reaches."""
        queries, paths, h = self._codes(X), self._paths(), self.bandwidth
        codes = torch.as_tensor(self.codes_).to(queries)
        reach = math.inf if paths.is_flat else _REACH * h
        i, j = (paths.lower_bounds(queries, codes) <= reach).nonzero(as_tuple=True)
        found = paths.logarithms(codes[j], queries[i])
        near = found.distance <= reach
        i, j, v, distance = i[near], j[near], found.velocity[near], found.distance[near]
        exponent = torch.full((len(queries), len(codes)), -torch.inf).to(queries)
        exponent[i, j] = -0.5 * (distance / h) ** 2
        if self.stretch and not paths.is_flat and len(i):
            exponent[i, j] -= log_stretch(self._paths(_NUDGE_RTOL * self.rtol), codes[j], v, h)
        constant = math.log(len(codes)) + 0.5 * codes.shape[1] * math.log(2 * math.pi * h**2)
        return like(exponent.logsumexp(1) - constant, X)

    def score(self, X: Any, y: Any = None) -> float:
        """The sum of the log-densities of codes."""
        return float(torch.as_tensor(self.score_samples(X)).sum())


def log_stretch(paths: Paths, z: Tensor, v: Tensor, scale: float) -> Tensor:
    """log θ at codes and tangents ``(n, d)``, by central differences of geodesics; infinite where one fails."""
    factor, info = torch.linalg.cholesky_ex(paths.tensor(z))
    if info.any():
        raise ValueError(
            f"M is singular at {int((info > 0).sum())} codes, so volumes there are zero. Wrap the decoder in "
            "pullback.WithPrior, or pass stretch=False."
        )
    # orthonormal tangents, one at a time
    width = max(paths.rtol, torch.finfo(v.dtype).eps) ** (1 / 3) * scale
    nudge = width * torch.linalg.inv(factor).transpose(0, 1)
    ends = paths.exponentials(z, torch.cat([v[None], v + nudge, v - nudge]))
    plus, minus = ends[1:].chunk(2)
    slopes = ((plus - minus) / (2 * width)).transpose(0, 1)
    arrived = ends.isfinite().all(-1).all(0)
    stretch = torch.full_like(v[:, 0], torch.inf)
    stretch[arrived] = torch.linalg.slogdet(slopes[arrived]).logabsdet + paths.log_volume(ends[0][arrived])
    return stretch
