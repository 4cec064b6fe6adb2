r"""The paper's own way to a shortest path: a graph for the start, then a cubic spline and Adam.

A uniform grid of the latent plane becomes a graph whose edges carry the energy of a straight piece at unit speed, :math:`2\,\mathrm{KL}(p_a, p_b)/|b - a|`;
Dijkstra's path in it is fitted by a spline, whose energy :math:`2/\delta t \sum \mathrm{KL}` Adam then lowers (Arvanitidis et al. 2022, appendix on cubic splines). The
weights are energies, not lengths: they do not add up to anything that the geodesic minimises, and favour paths of many small steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import dijkstra
from scipy.spatial import KDTree
from torch import Tensor

import pullback as pb
from pullback.experiments.spline_descent import SplineDescent

STEPS = ((0, 1), (1, 0), (1, 1), (1, -1))  # to half of the eight neighbours
POINTS = 65


@dataclass(frozen=True)
class Recipe:
    """Sizes of the graph and of the spline."""

    num_rows: int = 60
    num_knots: int = 12
    num_segments: int = 20
    max_steps: int = 150

    def __call__(self, decoder: torch.nn.Module, codes: Tensor, a: Tensor, b: Tensor) -> pb.Geodesic:
        """Paths from ``a`` to ``b``, each ``(n, 2)``."""
        metric = pb.DivergenceMetric(decoder, divergence=pb.divergences.symmetrized_kl)
        start = self._start(metric, codes, a, b)
        solver = SplineDescent(num_knots=self.num_knots, num_segments=self.num_segments, max_steps=self.max_steps)
        return pb.geodesic(metric, a, b, init=start, solver=solver)

    def _start(self, metric: pb.Metric, codes: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """Paths of the graph, shape ``(n, POINTS, 2)``."""
        grid = _grid(codes, self.num_rows)
        graph = _graph(metric, grid)
        nodes = grid.reshape(-1, 2)
        tree = KDTree(nodes.numpy())
        first, last = (np.asarray(tree.query(z.numpy())[1]) for z in (a, b))
        before = dijkstra(graph, directed=False, indices=first, return_predecessors=True)[1]
        paths = [_trace(row, int(i), int(j)) for row, i, j in zip(before, first, last, strict=True)]
        ends = zip(a[:, None], b[:, None], paths, strict=True)
        return torch.stack([pb.Polyline(torch.cat([z, nodes[path], w])).resample(POINTS) for z, w, path in ends])


def _grid(codes: Tensor, num_rows: int) -> Tensor:
    """Nodes ``(num_rows, num_rows, 2)`` over the codes' box, with a margin of a tenth."""
    low, high = codes.amin(0), codes.amax(0)
    t = torch.linspace(-0.1, 1.1, num_rows, dtype=codes.dtype)
    x, y = torch.meshgrid(t, t, indexing="xy")
    return low + torch.stack([x, y], -1) * (high - low)


@torch.no_grad()
def _graph(metric: pb.Metric, grid: Tensor) -> csr_matrix:
    number = torch.arange(grid[..., 0].numel()).reshape(grid.shape[:2])
    rows, columns, weights = [], [], []
    for dy, dx in STEPS:
        (a, b), (i, j) = _shifted(grid, dy, dx), _shifted(number, dy, dx)
        energy = metric.ds2(a, b).clamp_min(0) / (b - a).norm(dim=-1)  # rounding, where the decoder is constant
        weights.append(energy.flatten())
        rows.append(i.flatten())
        columns.append(j.flatten())
    data, i, j = (torch.cat(part).numpy() for part in (weights, rows, columns))
    return csr_matrix((data + np.finfo(float).tiny, (i, j)), shape=(number.numel(), number.numel()))


def _shifted(values: Tensor, dy: int, dx: int) -> tuple[Tensor, Tensor]:
    """All nodes that have a neighbour dy rows on and dx columns aside, and those neighbours."""
    height, width = values.shape[:2]
    left, right = max(0, -dx), width - max(0, dx)
    return values[: height - dy, left:right], values[dy:, left + dx : right + dx]


def _trace(before: np.ndarray, first: int, last: int) -> list[int]:
    path = [last]
    while path[-1] != first:
        path.append(int(before[path[-1]]))
    return path[::-1]
