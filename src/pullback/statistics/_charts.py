r"""Logarithms from one point to many, again and again while the point moves.

A fit asks for :math:`\mathrm{Log}_\mu` at the same thousand codes for every new mean :math:`\mu`. Three digits are enough, so the paths are short
polygons, started from shortest paths in a graph, and the velocity is read off the discrete path: the momentum of its first
chord, :math:`-\tfrac12 M(\mu)^{-1}\, \partial_\mu (T\, \mathrm{ds}^2(\mu, z_1))`, which is right to second order in the length of a segment,
scaled to the length of the path, which is right to fourth.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pullback._decoders.contract import unvalidated
from pullback._geometry.exponential import exponential
from pullback._geometry.geodesic import Geodesic, geodesic
from pullback._metrics.base import Metric
from pullback._metrics.connection import filtered_inverse
from pullback._solvers.base import Solver
from pullback._solvers.gauss_newton import GaussNewton
from pullback._starts.code_graph import CodeGraph
from pullback._starts.graph import Graph
from pullback._starts.lattice import Lattice
from pullback.statistics._paths import Flat

_COARSE = GaussNewton(rtol=1e-3, min_segments=8, max_segments=32, max_steps=8)
_POINTS = 33
_LATTICE_NODES = {2: 80**2, 3: 20**3}
_AGREEMENT = 0.05  # a momentum whose length differs by more belongs to a path that is no discrete minimum


@dataclass(frozen=True, eq=False)
class Atlas:
    """How paths are found: the metric, a graph to start from (None for straight lines) and a solver (None for the default)."""

    metric: Metric
    graph: Graph | None
    solver: Solver | None

    @classmethod
    def of(cls, metric: Metric, codes: Tensor, graph: Graph | None = None, solver: Solver | None = None) -> Atlas:
        """With a graph over the codes, unless one is given or space is flat or a line."""
        if graph is None and not isinstance(metric, Flat) and codes.shape[1] > 1:
            graph = _graph(metric, codes.detach())
        return cls(metric, graph, solver)

    def log(self, center: Tensor, points: Tensor) -> tuple[Tensor, Tensor]:
        """Logarithms ``(m, d)`` of points ``(m, d)`` at a centre ``(d,)``, and which of their paths converged.

        The others are taken as they are: their lengths are a few per cent off, and to resolve them would take most of the time.
        """
        if isinstance(self.metric, Flat):
            return points - center, torch.ones_like(points[:, 0], dtype=torch.bool)
        start = None if self.graph is None else self.graph.paths(center.expand_as(points), points, _POINTS)
        path = geodesic(self.metric, center, points, solver=self.solver or _COARSE, init=start)
        return _velocities(self.metric, center, path), path.converged

    def exp(self, z: Tensor, v: Tensor) -> Tensor:
        """Where one geodesic arrives, roughly; the end of the straight line if it does not."""
        if isinstance(self.metric, Flat):
            return z + v
        flow = exponential(self.metric, z, v, rtol=1e-5, atol=1e-6, max_steps=300)
        return flow.end if bool(flow.converged) and bool(flow.end.isfinite().all()) else z + v


def _graph(metric: Metric, codes: Tensor) -> Graph:
    if codes.shape[1] in _LATTICE_NODES:
        return Lattice.fit(metric, codes, num_nodes=_LATTICE_NODES[codes.shape[1]])
    return CodeGraph.fit(metric, codes)


def _velocities(metric: Metric, center: Tensor, path: Geodesic) -> Tensor:
    nodes, finest = path.curve.points, path.curve.points.shape[1] - 1
    step = finest // path.num_segments
    rows = torch.arange(len(nodes), device=nodes.device)
    first, second = nodes[rows, step], nodes[rows, (2 * step).clamp_max(finest)]
    num = path.num_segments.to(nodes)[:, None]
    own = 0.5 * num * (4 * first - 3 * center - second)
    with unvalidated():
        tensor = metric.tensor(center).detach()
        momentum = -0.5 * num * _slopes(metric, center, first)
    v = own + (momentum - own @ tensor) @ filtered_inverse(tensor)
    size = path.length.nan_to_num(0.0)
    agree = (_norm(v, tensor) - size).abs() <= _AGREEMENT * size
    v = torch.where(agree[:, None], v, own)
    norm = _norm(v, tensor)
    return v * torch.where(norm > 0, size / norm.clamp_min(torch.finfo(norm.dtype).tiny), 1.0)[:, None]


def _norm(v: Tensor, tensor: Tensor) -> Tensor:
    return ((v @ tensor) * v).sum(-1).clamp_min(0).sqrt()


def _slopes(metric: Metric, center: Tensor, first: Tensor) -> Tensor:
    """The derivatives of ds²(μ, z₁) in μ."""
    with torch.enable_grad():
        start = center.detach().expand_as(first).clone().requires_grad_()
        (slope,) = torch.autograd.grad(metric.ds2(start, first.detach()).sum(), start)
    return slope
