r"""The paper's own way to a shortest path: a graph for the start, then a cubic spline and Adam.

A uniform grid of the latent plane becomes a graph, whose edges carry the energy of a straight piece at unit speed,
:math:`2\,\mathrm{KL}(p_a, p_b)/|b - a|`, as the appendix on cubic splines says, or its length
:math:`\sqrt{2\,\mathrm{KL}}`, as in the authors' published code. Dijkstra's path in it is fitted by a spline, whose
energy :math:`2/\delta t \sum \mathrm{KL}` Adam then lowers. Energies do not add up to anything that a geodesic
minimizes, and favor paths of many small steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import dijkstra
from scipy.spatial import KDTree
from torch import Tensor
from torch.distributions import Distribution

import pullback as pb
from pullback.experiments.spline_descent import SplineDescent

# To half of the eight neighbors.
STEPS = ((0, 1), (1, 0), (1, 1), (1, -1))
POINTS = 65


@dataclass(frozen=True)
class SampledKL:
    r"""The Monte Carlo divergence that the paper resorts to, the mean of :math:`\log p(x) - \log q(x)` over samples of
    p.

    It may be negative; with `absolute`, as in the authors' code, its absolute value is taken, bone by bone.
    `pullback.divergences.monte_carlo_kl` cannot be negative, and is far more accurate between neighbors.
    """

    num_samples: int = 100
    absolute: bool = False

    def __call__(self, p: Distribution, q: Distribution) -> Tensor:
        x = p.sample(torch.Size([self.num_samples]))
        mean = (p.log_prob(x) - q.log_prob(x)).mean(0)
        return mean.abs() if self.absolute else mean


@dataclass(frozen=True)
class Recipe:
    """Sizes of the graph and of the spline.

    Edges of the graph are measured by `num_samples` samples, or in closed form if it is None. Adam has the closed form.
    """

    num_rows: int = 60
    weight: Literal["energy", "length"] = "energy"
    num_samples: int | None = None
    num_knots: int = 12
    num_segments: int = 20
    max_steps: int = 150

    def __call__(self, decoder: torch.nn.Module, codes: Tensor, a: Tensor, b: Tensor) -> pb.results.Geodesic:
        """Paths from ``a`` to ``b``, each ``(n, 2)``."""
        metric = pb.DivergenceMetric(decoder, divergence=pb.divergences.symmetrized_kl)
        edges = metric
        if self.num_samples is not None:
            edges = pb.DivergenceMetric(decoder, divergence=SampledKL(self.num_samples, absolute=True))
        solver = SplineDescent(num_knots=self.num_knots, num_segments=self.num_segments, max_steps=self.max_steps)
        return pb.geodesic(metric, a, b, init=self._start(edges, codes, a, b), solver=solver)

    def _start(self, metric: pb.Metric, codes: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """Paths of the graph, shape ``(n, POINTS, 2)``."""
        grid = _grid(codes, self.num_rows)
        graph = _graph(metric, grid, self.weight)
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
def _graph(metric: pb.Metric, grid: Tensor, weight: str) -> csr_matrix:
    number = torch.arange(grid[..., 0].numel()).reshape(grid.shape[:2])
    rows, columns, weights = [], [], []
    for dy, dx in STEPS:
        (a, b), (i, j) = _shifted(grid, dy, dx), _shifted(number, dy, dx)
        # Rounding makes it negative where the decoder is constant.
        ds2 = torch.cat([metric.ds2(*ends) for ends in zip(a.split(8), b.split(8), strict=True)]).clamp_min(0)
        weights.append((ds2.sqrt() if weight == "length" else ds2 / (b - a).norm(dim=-1)).flatten())
        rows.append(i.flatten())
        columns.append(j.flatten())
    data, i, j = (torch.cat(part).numpy() for part in (weights, rows, columns))
    return csr_matrix((data + np.finfo(float).tiny, (i, j)), shape=(number.numel(), number.numel()))


def _shifted(values: Tensor, dy: int, dx: int) -> tuple[Tensor, Tensor]:
    """All nodes that have a neighbor dy rows on and dx columns aside, and those neighbors."""
    height, width = values.shape[:2]
    left, right = max(0, -dx), width - max(0, dx)
    return values[: height - dy, left:right], values[dy:, left + dx : right + dx]


def _trace(before: np.ndarray, first: int, last: int) -> list[int]:
    path = [last]
    while path[-1] != first:
        path.append(int(before[path[-1]]))
    return path[::-1]
