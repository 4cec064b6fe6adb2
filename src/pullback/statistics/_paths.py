"""Shortest paths of many pairs, none of which may stop the rest.

Here alone it is decided what happens in flat space (differences, and no path is solved for), how accurate paths are,
and what stands in for a geodesic that does not arrive.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pullback._decoders.contract import unvalidated
from pullback._geometry.certificate import lower_bounds
from pullback._geometry.exponential import exponential
from pullback._geometry.geodesic import Geodesic, Starts, geodesic
from pullback._geometry.logarithm import logarithm
from pullback._metrics.base import Metric
from pullback._solvers.base import Solver
from pullback._solvers.gauss_newton import GaussNewton
from pullback._starts.graph import CodeGraph
from pullback._starts.lattice import Lattice
from pullback._typing import Float

# Pairs solved together: 2,048 paths of 16 nodes at 784 outputs stay below 1 GB.
_BATCH = 2048
# Codes whose volume is measured together.
_CHUNK = 4096
# Nodes of the lattices that start paths: 80 x 80 sees the ring of `pullback reproduce toy` (test_land_measures.py).
_LATTICE_NODES = {2: 80**2, 3: 20**3}
# Steps of a geodesic that is followed: across kinks it would take thousands for digits nobody asked for.
_MAX_STEPS = 300
# Accuracy of paths where nothing else is asked for: what a rectified decoder can give.
DEFAULT_RTOL = 1e-3

# Segments of paths of three digits: where the decoder has kinks, more of them mostly do not make paths better. And the
# error from which on paths are solved again after all. Choices.
_SEGMENTS, ROUGH = 16, 0.03
# That error for distances alone, in multiples of `rtol`: ten of 816 paths in a k-means of 200 codes under a rectified
# decoder took half of its time, and changed no label.
_LOOSE = 10.0


@dataclass(frozen=True)
class Flat(Metric):
    """Flat space: the identity for a tensor."""

    def tensor(self, z: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d d"]:
        return torch.eye(z.shape[-1], dtype=z.dtype, device=z.device).expand(*z.shape, z.shape[-1])

    def ds2(self, a: Float[Tensor, "*batch d"], b: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch"]:
        return (b - a).square().sum(-1)


@dataclass(frozen=True, eq=False)
class Logs:
    """Logarithms of n pairs; NaN where there is no path."""

    velocity: Tensor  # (n, d)
    distance: Tensor  # their lengths, (n,)
    error: Tensor  # estimates of their relative errors, (n,)
    converged: Tensor  # which of the paths converged, (n,)


@dataclass(frozen=True, eq=False)
class Paths:
    """How paths are found: `init` and `solver` as in `pullback.geodesic`."""

    metric: Metric
    init: Starts = None
    solver: Solver | None = None  # None for one as accurate as `rtol`
    rtol: float = DEFAULT_RTOL  # of paths and exponentials; of logarithms, if it is finer than the default
    dtype: torch.dtype | None = None  # in which the decoder works, if not that of the codes

    @property
    def is_flat(self) -> bool:
        return isinstance(self.metric, Flat)

    def on(self, codes: Tensor) -> Paths:
        """The same with a graph over the codes, unless a start is given or space is flat or a line."""
        if self.init is not None or self.is_flat or codes.shape[1] == 1:
            return self
        codes = codes.detach().to(self.dtype or codes.dtype)
        num = _LATTICE_NODES.get(codes.shape[1])
        graph = CodeGraph.fit(self.metric, codes) if num is None else Lattice.fit(self.metric, codes, num_nodes=num)
        return replace(self, init=graph)

    def logarithms(self, a: Tensor, b: Tensor) -> Logs:
        """The logarithms at codes ``a`` of codes ``b``, each ``(n, d)``."""
        v = b - a
        if self.is_flat or not len(v):
            size = torch.linalg.vector_norm(v, dim=-1)
            return Logs(v, size, torch.zeros_like(size), torch.isfinite(size))
        pairs = zip(self.cast(a).split(_BATCH), self.cast(b).split(_BATCH), strict=True)
        solver, rtol = self.path_solver(), min(self.rtol, DEFAULT_RTOL)
        found = [logarithm(self.metric, x, y, solver=solver, init=self.init, rtol=rtol) for x, y in pairs]
        rows = zip(*((f.velocity, f.distance, f.error, f.geodesic.converged) for f in found), strict=True)
        velocity, distance, error, converged = map(torch.cat, rows)
        return Logs(velocity.to(v), distance.to(v), error.to(v), converged)

    def exponentials(self, z: Tensor, v: Tensor) -> Tensor:
        """Where geodesics arrive; NaN for those that do not."""
        if self.is_flat:
            return z + v
        rtol = max(0.1 * self.rtol, 32 * torch.finfo(self.dtype or z.dtype).eps)
        flow = exponential(self.metric, self.cast(z), self.cast(v), rtol=rtol, atol=rtol, max_steps=_MAX_STEPS)
        return torch.where(flow.converged[..., None], flow.end, torch.nan).to(v)

    def distances(self, a: Tensor, b: Tensor) -> Tensor:
        """The distances of codes ``a`` and ``b``, each ``(n, d)``; infinite where no path was found."""
        if self.is_flat or len(a) == 0:
            return torch.linalg.vector_norm(b - a, dim=-1)
        lengths = []
        for x, y in zip(self.cast(a).split(_BATCH), self.cast(b).split(_BATCH), strict=True):
            # a coarse path is an upper bound, good enough for those that ask for no more
            (_, path), *rest = self.geodesics(x, y, max(ROUGH, _LOOSE * self.rtol))
            for again, finer in rest:
                path.length[again] = finer.length
            lengths.append(path.length)
        return torch.cat(lengths).nan_to_num(torch.inf).to(a)

    def geodesics(self, a: Tensor, b: Tensor, rough: float = ROUGH) -> list[tuple[Tensor, Geodesic]]:
        """Shortest paths of pairs ``(n, d)``, coarse ones of all, and finer ones where the error is above `rough`."""
        rows = torch.arange(len(a), device=a.device)
        path = geodesic(self.metric, a, b, solver=self.path_solver(), init=self.init)
        rest = rows[~(path.error <= rough) & torch.isfinite(path.length)]
        if self.solver is not None or not len(rest) or self.rtol < DEFAULT_RTOL:
            return [(rows, path)]
        finer = geodesic(self.metric, a[rest], b[rest], solver=GaussNewton(rtol=self.rtol), init=self.init)
        return [(rows, path), (rest, finer)]

    def matrix(self, a: Tensor, b: Tensor | None = None) -> Tensor:
        """Distances ``(n, m)`` of ``a``, ``(n, d)``, and ``b``, ``(m, d)``; of ``a`` alone each pair is solved once."""
        if b is None:
            i, j = torch.triu_indices(len(a), len(a), 1, device=a.device)
            D = a.new_zeros(len(a), len(a))
            D[i, j] = self.distances(a[i], a[j])
            return D + D.mT
        left, right = a[:, None].expand(-1, len(b), -1), b.expand(len(a), -1, -1)
        return self.distances(left.flatten(0, 1), right.flatten(0, 1)).reshape(len(a), len(b))

    def lower_bounds(self, a: Tensor, b: Tensor) -> Tensor:
        """Numbers ``(n, m)`` that no distance of codes ``a``, ``(n, d)``, and ``b``, ``(m, d)``, falls below."""
        if self.is_flat:
            return torch.linalg.vector_norm(a[:, None] - b, dim=-1)
        with torch.no_grad(), unvalidated():
            dual = self.metric.embed(self.cast(torch.cat([a, b])))
            if dual is not None and dual[0] is dual[1]:
                left, right = dual[0].split([len(a), len(b)])
                bounds = torch.cdist(left, right, compute_mode="donot_use_mm_for_euclid_dist")
            else:
                pairs = a[:, None].expand(-1, len(b), -1).flatten(0, 1), b.repeat(len(a), 1)
                chunks = zip(*(self.cast(x).split(_CHUNK) for x in pairs), strict=True)
                bounds = torch.cat([lower_bounds(self.metric, *chunk) for chunk in chunks]).reshape(len(a), len(b))
        # rounded down, so that they hold
        return bounds.nan_to_num().to(a) * (1 - 1e-5)

    def tensor(self, z: Tensor) -> Tensor:
        with torch.no_grad(), unvalidated():
            return self.metric.tensor(self.cast(z)).to(z)

    def log_volume(self, z: Tensor) -> Tensor:
        """½ log det M at codes ``(n, d)``; -inf where it is not finite."""
        with torch.no_grad(), unvalidated():
            values = torch.cat([self.metric.log_volume(part) for part in self.cast(z).split(_CHUNK)])
        return values.nan_to_num(-torch.inf, -torch.inf, -torch.inf).to(z)

    def cast(self, z: Tensor) -> Tensor:
        """Codes in the precision of the decoder."""
        return z if self.dtype is None else z.to(self.dtype)

    def path_solver(self) -> Solver:
        if self.solver is not None:
            return self.solver
        if self.rtol >= DEFAULT_RTOL:
            return GaussNewton(rtol=self.rtol, max_segments=_SEGMENTS)
        return GaussNewton(rtol=max(0.1 * self.rtol, 1e-6))
