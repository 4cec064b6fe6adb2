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
from scipy.sparse import csgraph
from scipy.spatial import KDTree
from torch import Tensor

from pullback._curves.curve import Polyline
from pullback._curves.steps import equal_spacing, mixed_steps, safe_sqrt, squared_steps
from pullback._decoders.contract import unvalidated
from pullback._metrics.base import Metric, broadcast, codes_for
from pullback._options import check_options
from pullback._progress import progress
from pullback._typing import Codes, CodeSet, Float

_MAX_SUBSTEPS = 32
_MAX_SOURCES = 64  # searches held in memory at once
_MAX_PAIRS = 4096  # routes traced at once
_DIRECT_STEPS = 16  # pairs no more sub-steps apart than this are also joined by a straight edge
_TIE_BREAK = 1e-6  # share of Euclidean length in every weight: crosses flat regions straight
_SUBSTEPS = 4  # sub-steps of a typical edge of a code graph
_EUCLIDEAN_SHARE = 0.1  # of the arc length by which paths are resampled

Links = tuple[np.ndarray, np.ndarray]  # the nodes each end point is joined to, and how far they are (inf if unknown)


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
        start, stop, batch = self._pairs(a, b)
        total = start.new_full(start.shape[:1], torch.nan)
        for pairs, routes in self._routes(start, stop):
            total[pairs] = torch.from_numpy(routes.total).to(total)
        return total.reshape(batch)

    def paths(self, a: Codes, b: Codes, num_points: int) -> Float[Tensor, "*batch n d"]:
        """Shortest paths in the graph, from exactly a to exactly b, in `num_points` points.

        The points are equally spaced in arc length, nine parts Riemannian and one part Euclidean, so that no two
        coincide where the metric vanishes. A straight line where no path exists.
        """
        start, stop, batch = self._pairs(a, b)
        w = torch.linspace(0, 1, num_points, dtype=start.dtype, device=start.device)[:, None]
        result = torch.lerp(start[:, None], stop[:, None], w)
        for pairs, routes in self._routes(start, stop):
            found = np.isfinite(routes.total)
            chosen = pairs[found]
            corners, steps = routes.trace(found, self.nodes, start[chosen], stop[chosen])
            t = equal_spacing(mixed_steps(steps, corners.diff(dim=1).norm(dim=-1), _EUCLIDEAN_SHARE), num_points)
            result[chosen, 1:-1] = Polyline(corners)(t)[:, 1:-1]
        result[:, -1] = stop
        return result.reshape(*batch, *result.shape[1:])

    def _pairs(self, a: Codes, b: Codes) -> tuple[Tensor, Tensor, torch.Size]:
        """End points ``(n, d)`` without a gradient, if they belong to the graph, and their batch shape."""
        d = self.nodes.shape[1]
        a, b = broadcast(*(z.detach() for z in codes_for(self.metric, a, b, dim=d)))
        if a.device != self.nodes.device:
            raise ValueError(
                f"The graph is on {self.nodes.device} and the end points on {a.device}. Fit it there, or move them."
            )
        return a.reshape(-1, d), b.reshape(-1, d), a.shape[:-1]

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
        # Few distinct sources, and not too many pairs, at a time.
        order = np.argsort(source, kind="stable")
        rank = np.unique(source[order], return_inverse=True)[1] // _MAX_SOURCES
        for group in np.split(order, np.flatnonzero(np.diff(rank)) + 1):
            for few in np.array_split(group, -(-len(group) // _MAX_PAIRS)):
                yield finite[few], Routes.search(self.weights, links, source[few], target[few], direct[few])


@dataclass(frozen=True, eq=False)
class Routes:
    """Shortest routes of some pairs, as trees of predecessors over the nodes and, behind them, the sources."""

    total: np.ndarray
    last: np.ndarray
    tree: np.ndarray
    distance: np.ndarray
    before: np.ndarray

    @classmethod
    def search(
        cls, weights: sparse.csr_array, links: Links, source: np.ndarray, target: np.ndarray, direct: np.ndarray
    ) -> Routes:
        """One Dijkstra search for each distinct source."""
        # Sources are appended as nodes that can be left but not entered, and targets are not part of the graph at all,
        # so the route of a pair does not depend on the other pairs.
        nodes, lengths = links
        starts, tree = np.unique(source, return_inverse=True)
        num_nodes, (rows, columns) = len(weights.indptr) - 1, nodes[starts].shape
        indptr = np.concatenate([weights.indptr, weights.indptr[-1] + columns * np.arange(1, rows + 1)])
        ends = np.concatenate([weights.indices, nodes[starts].ravel().astype(weights.indices.dtype)])
        data = np.concatenate([weights.data, lengths[starts].ravel()])
        graph = sparse.csr_array((data, ends, indptr), shape=(num_nodes + rows, num_nodes + rows))
        distance, before = csgraph.dijkstra(graph, indices=num_nodes + np.arange(rows), return_predecessors=True)
        arrival = distance[tree[:, None], nodes[target]] + lengths[target]
        best = arrival.argmin(1)
        total = arrival[np.arange(len(best)), best]
        last = np.where(direct <= total, num_nodes + tree, nodes[target, best])
        return cls(np.minimum(total, direct), last, tree, distance, before)

    def trace(self, chosen: np.ndarray, nodes: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """Corners ``(B, h, d)`` of the chosen routes from a to b, the shorter ones behind copies of a, and the lengths
        ``(B, h - 1)`` of their pieces."""
        tree, num_nodes = self.tree[chosen], len(nodes)
        visited = [self.last[chosen]]
        while (visited[-1] < num_nodes).any():
            here = visited[-1]
            visited.append(np.where(here < num_nodes, self.before[tree, here], here))
        route = np.stack(visited[::-1], axis=1)
        reached = np.concatenate([self.distance[tree[:, None], route], self.total[chosen, None]], axis=1)
        at_source = torch.from_numpy(route >= num_nodes).to(a.device)
        corners = torch.where(at_source[..., None], a[:, None], nodes.to(a)[np.minimum(route, num_nodes - 1)])
        return torch.cat([corners, b[:, None]], dim=1), torch.from_numpy(np.diff(reached, axis=1)).to(a)


def nearest(tree: KDTree, positions: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Distances to the k nearest neighbors in a tree, and their numbers, each of shape ``(len(positions), k)``."""
    distance, number = tree.query(positions, k=k)
    return np.reshape(distance, (-1, k)), np.reshape(number, (-1, k))


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


def weighted(nodes: Tensor, edges: np.ndarray, lengths: np.ndarray) -> sparse.csr_array:
    """The symmetric matrix of the edges ``(2, E)``, given once each, that could be measured. A millionth of the
    Euclidean length, in units of the typical Riemannian one, breaks ties."""
    known = np.isfinite(lengths)
    edges, lengths = edges[:, known], lengths[known]
    positions = nodes.cpu().double().numpy()
    euclidean = np.linalg.norm(positions[edges[1]] - positions[edges[0]], axis=1)
    typical = np.median(lengths / euclidean) if len(lengths) else 0
    weight = lengths + _TIE_BREAK * (typical or 1) * euclidean
    there = sparse.coo_array((weight, tuple(edges)), shape=(len(nodes), len(nodes))).tocsr()
    return sparse.csr_array(there + there.T)


@dataclass(frozen=True, eq=False)
class CodeGraph(Graph):
    """A graph that joins every code to its nearest codes; make one with `CodeGraph.fit`.

    Its paths stay where data are, so they start a solver well where the decoder is uncertain elsewhere. They zigzag
    from code to code: their lengths are a few per cent too long in 2 dimensions and tens of per cent in 8, which
    matters little for a start. In 2 and 3 dimensions `Lattice` is finer.

    >>> import torch, pullback as pb
    >>> metric = pb.FisherRaoMetric(lambda z: torch.distributions.Normal(z, 1.0))
    >>> codes = torch.tensor([[0.0, 0.0], [3.0, 0.0], [3.0, 4.0]])
    >>> pb.CodeGraph.fit(metric, codes, num_neighbors=1).distances(codes[0], codes[2]).round(decimals=2)
    tensor(5.)
    """

    @classmethod
    @progress("graph")
    def fit(
        cls, metric: Metric, codes: CodeSet, *, num_neighbors: int = 12, max_nodes: int = 2048, random_state: int = 0
    ) -> Self:
        """Builds the graph: nearest neighbors, and the shortest links that make it one piece.

        Args:
            metric: what measures the edges, and later the links to end points.
            codes: latent codes of the data.
            num_neighbors: every code is joined to this many of its (Euclidean) nearest ones.
            max_nodes: of more codes than this, a random sample is taken.
            random_state: seed of the sample.
        """
        check_options(num_neighbors=num_neighbors)
        check_options(least=2, max_nodes=max_nodes)
        (codes,) = codes_for(metric, codes, a_set=True, least=2, finite=True)
        nodes = codes.detach().unique(dim=0)
        if len(nodes) > max_nodes:
            chosen = np.random.default_rng(random_state).choice(len(nodes), max_nodes, replace=False)
            nodes = nodes[torch.from_numpy(np.sort(chosen)).to(nodes.device)]
        positions = nodes.cpu().double().numpy()
        k = min(num_neighbors + 1, len(positions))
        near = nearest(KDTree(positions), positions, k)[1][:, 1:]
        pairs = np.stack([np.repeat(np.arange(len(positions)), k - 1), near.ravel()])
        edges = _connect(positions, np.unique(np.sort(pairs, axis=0), axis=1))
        spacing = float(np.median(np.linalg.norm(positions[edges[1]] - positions[edges[0]], axis=1))) / _SUBSTEPS
        lengths = edge_lengths(metric, nodes[edges[0]], nodes[edges[1]], spacing)
        return cls(metric, nodes, weighted(nodes, edges, lengths), spacing, num_neighbors)


def _connect(positions: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Adds the shortest links between the pieces of a graph of edges ``(2, E)`` until it is one (Borůvka)."""
    while True:
        graph = sparse.coo_array((np.ones(edges.shape[1]), tuple(edges)), shape=(len(positions), len(positions)))
        num_parts, part = csgraph.connected_components(graph, directed=False)
        if num_parts == 1:
            return edges
        links = []
        for i in range(num_parts):
            mine, others = np.flatnonzero(part == i), np.flatnonzero(part != i)
            distance, number = nearest(KDTree(positions[others]), positions[mine], 1)
            best = distance.argmin()
            links.append((mine[best], others[number[best, 0]]))
        edges = np.unique(np.concatenate([edges, np.sort(np.array(links).T, axis=0)], axis=1), axis=1)
