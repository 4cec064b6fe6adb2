r"""Global starts: shortest paths in a graph whose edges carry Riemannian lengths.

A solver ends in the valley it started in; a graph over the latent space sees all valleys at once. Its nodes are codes,
the weight of an edge is the length of the straight piece between them, :math:`\sum_j \sqrt{\mathrm{ds}^2}` over
sub-steps so short that no edge hops over a wall, and Dijkstra's algorithm finds the best route exactly.
"""

from __future__ import annotations

import abc
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from scipy import sparse
from scipy.spatial import KDTree
from torch import Tensor

from pullback._curves.curve import Polyline
from pullback._curves.speed import equal_spacing, mixed_steps
from pullback._curves.steps import safe_sqrt, squared_steps
from pullback._decoders.contract import unvalidated
from pullback._metrics.base import Metric, broadcast, codes_for
from pullback._progress import progress
from pullback._starts.routes import Routes, batches
from pullback._typing import Array, Codes, CodeSet, Float

_MAX_SUBSTEPS = 32
_DIRECT_STEPS = 16  # pairs no more sub-steps apart than this are also joined by a straight edge
_TIE_BREAK = 1e-6  # share of Euclidean length in every weight: crosses flat regions straight
_EUCLIDEAN_SHARE = 0.1  # of the arc length by which paths are resampled


@dataclass(frozen=True, eq=False)
class Graph(abc.ABC):
    """Nodes in the latent space and the Riemannian lengths of the edges between them (abstract).

    Made by `Lattice.fit` or `CodeGraph.fit`, passed as ``init=`` to `pullback.geodesic`.

    Attributes:
        metric: what measured the edges.
        nodes: codes, shape ``(N, d)``.
        weights: symmetric sparse matrix of edge lengths.
        spacing: Euclidean length of the longest sub-step in which an edge to an end point is measured.
        num_links: how many of its nearest nodes an end point is joined to.

    >>> import torch, pullback as pb
    >>> metric = pb.FisherRaoMetric(lambda z: torch.distributions.Normal(z, 0.5))
    >>> graph = pb.CodeGraph.fit(metric, torch.rand(30, 2))
    >>> pb.geodesic(metric, torch.zeros(2), torch.ones(2), init=graph).converged
    tensor(True)
    """

    metric: Metric
    nodes: Float[Tensor, "N d"]
    weights: sparse.csr_array
    spacing: float
    num_links: int

    @classmethod
    @abc.abstractmethod
    def fit(cls, metric: Metric, codes: CodeSet) -> Self:
        """Builds the graph over the region that the codes occupy."""

    @progress("graph")
    def distances(self, a: Codes, b: Codes) -> Float[Tensor, "*batch"]:
        """Lengths of the shortest paths in the graph, in sub-steps: upper bounds of the distances.

        ``inf`` where no path exists (an end point decodes to NaN), NaN where an end point is not finite.
        """
        a, b = self._codes(a, b)
        start, stop = (z.reshape(-1, z.shape[-1]) for z in (a, b))
        total = start.new_full(start.shape[:1], torch.nan)
        for pairs, routes in self._routes(start, stop):
            total[pairs] = torch.from_numpy(routes.total).to(total)
        return total.reshape(a.shape[:-1])

    def paths(self, a: Codes, b: Codes, num_points: int) -> Float[Tensor, "*batch n d"]:
        """Shortest paths in the graph, from exactly a to exactly b, in `num_points` points.

        The points are equally spaced in arc length, nine parts Riemannian and one part Euclidean, so that no two
        coincide where the metric vanishes. A straight line where no path exists.
        """
        a, b = self._codes(a, b)
        start, stop = (z.reshape(-1, z.shape[-1]) for z in (a, b))
        w = torch.linspace(0, 1, num_points, dtype=a.dtype, device=a.device)[:, None]
        result = torch.lerp(start[:, None], stop[:, None], w)
        for pairs, routes in self._routes(start, stop):
            found = np.isfinite(routes.total)
            chosen = pairs[found]
            corners, steps = routes.trace(found, self.nodes, start[chosen], stop[chosen])
            euclidean = corners.diff(dim=1).norm(dim=-1)
            t = equal_spacing(mixed_steps(steps, euclidean, _EUCLIDEAN_SHARE), num_points)
            result[chosen, 1:-1] = Polyline(corners)(t)[:, 1:-1]
        result[:, -1] = stop
        return result.reshape(*a.shape[:-1], num_points, a.shape[-1])

    def _codes(self, *codes: Tensor | Array) -> tuple[Tensor, ...]:
        """End points in one shape and without a gradient, if they belong to the graph."""
        found = broadcast(*(z.detach() for z in codes_for(self.metric, *codes, dim=self.nodes.shape[1])))
        if found[0].device != self.nodes.device:
            raise ValueError(
                f"The graph is on {self.nodes.device} and the end points on {found[0].device}. Fit it there, or move "
                "them."
            )
        return found

    @functools.cached_property
    def _reachable(self) -> tuple[KDTree, np.ndarray]:
        """The nodes that have edges, to be searched by position, and their numbers."""
        linked = np.unique(self.weights.nonzero()[0])
        if not len(linked):
            raise ValueError("No edge of the graph could be measured: the decoder returns NaN at all of its nodes.")
        return KDTree(self.nodes.cpu().double().numpy()[linked]), linked

    def _routes(self, a: Tensor, b: Tensor) -> Iterator[tuple[np.ndarray, Routes]]:
        """Shortest routes, for a few of the pairs with finite ends at a time."""
        finite = (a.isfinite() & b.isfinite()).all(-1).cpu().numpy().nonzero()[0]
        if not len(finite):
            return
        ends, which = torch.cat([a[finite], b[finite]]).unique(dim=0, return_inverse=True)
        source, target = which.cpu().numpy().reshape(2, -1)
        # End points are joined to their nearest nodes ...
        tree, linked = self._reachable
        nodes = linked[nearest(tree, ends.cpu().double().numpy(), min(self.num_links, len(linked)))[1]]
        begin = ends[:, None].expand(-1, nodes.shape[1], -1)
        lengths = edge_lengths(self.metric, begin, self.nodes.to(ends)[nodes], self.spacing)
        links = nodes, np.nan_to_num(lengths, nan=np.inf)
        # ... and to each other where they are a few nodes apart and the detour counts.
        direct = np.full(len(source), np.inf)
        apart = (ends[target] - ends[source]).norm(dim=-1).cpu().numpy()
        near = np.flatnonzero(apart <= _DIRECT_STEPS * self.spacing)
        measured = edge_lengths(self.metric, ends[source[near]], ends[target[near]], self.spacing)
        direct[near] = np.nan_to_num(measured, nan=np.inf)
        for few in batches(source):
            yield finite[few], Routes.search(self.weights, links, source[few], target[few], direct[few])


def nearest(tree: KDTree, positions: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Distances to the k nearest neighbors in a tree, and their numbers, each of shape ``(len(positions), k)``."""
    distance, number = tree.query(positions, k=k)
    return np.reshape(distance, (-1, k)), np.reshape(number, (-1, k))


def symmetric(edges: np.ndarray, weight: np.ndarray, n: int) -> sparse.csr_array:
    """The symmetric sparse matrix of edges ``(2, E)`` that are given once each."""
    ends = np.concatenate([edges, edges[::-1]], axis=1)
    both = sparse.coo_array((np.concatenate([weight, weight]), tuple(ends)), shape=(n, n)).tocsr()
    both.sort_indices()
    return both


def edge_lengths(metric: Metric, a: Tensor, b: Tensor, spacing: float) -> np.ndarray:
    """Lengths of straight pieces in sub-steps no longer than `spacing` (32 at most); NaN where decoding fails."""
    begin, end = a.reshape(-1, a.shape[-1]), b.reshape(-1, b.shape[-1])
    needed = ((end - begin).norm(dim=-1) / spacing).log2().ceil().clamp(0, np.log2(_MAX_SUBSTEPS))
    lengths = begin.new_zeros(len(begin))
    with unvalidated(), torch.no_grad():
        for power in needed.unique().tolist():
            chosen = needed == power
            w = torch.linspace(0, 1, int(2**power) + 1, dtype=begin.dtype, device=begin.device)[:, None]
            pieces = torch.lerp(begin[chosen][:, None], end[chosen][:, None], w)
            lengths[chosen] = safe_sqrt(squared_steps(metric, pieces)[0]).sum(-1)
    return lengths.reshape(a.shape[:-1]).cpu().double().numpy()


def weighted(edges: np.ndarray, lengths: np.ndarray, euclidean: np.ndarray, n: int) -> sparse.csr_array:
    """The matrix of edges ``(2, E)`` whose lengths could be measured. A millionth of the Euclidean length, in units of
    the typical Riemannian one, breaks ties."""
    known = np.isfinite(lengths)
    lengths, euclidean = lengths[known], euclidean[known]
    typical = np.median(lengths / euclidean) if len(lengths) else 0
    return symmetric(edges[:, known], lengths + _TIE_BREAK * (typical or 1) * euclidean, n)
