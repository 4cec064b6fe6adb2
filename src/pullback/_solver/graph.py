r"""Global starts: shortest paths in a graph whose edges carry Riemannian lengths.

A geodesic solver walks downhill from its start and ends in the valley it started in. A graph over the latent space sees all
valleys at once: its nodes are codes, the weight of an edge is the length of the straight piece between them,
:math:`\sum_j \sqrt{\mathrm{ds}^2}` over sub-steps so short that no edge hops over a wall, and Dijkstra's algorithm finds the best
route exactly. A graph is built once and serves thousands of pairs; each distinct start costs one search.

A weight is a *length*. Squared lengths (energies, KL divergences) would reward many small steps, and lengths divided by the
Euclidean step would not add up along a path.
"""

from __future__ import annotations

import abc
import functools
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from os import PathLike
from typing import Any, Self

import numpy as np
import torch
from jaxtyping import Float
from scipy import sparse
from scipy.sparse import csgraph
from scipy.spatial import KDTree
from torch import Tensor

from pullback._curve import Polyline, equal_spacing
from pullback._decoder import unvalidated
from pullback._metric.base import Metric
from pullback._metric.steps import safe_sqrt, squared_steps

_MAX_SOURCES = 64  # searches held in memory at once
_MAX_PAIRS = 4096  # paths traced at once
_MAX_SUBSTEPS = 32
_TIE_BREAK = 1e-6  # share of Euclidean length in every weight: crosses flat regions straight
_EUCLIDEAN_SHARE = 0.1  # of the arc length by which paths are resampled


@dataclass(frozen=True, eq=False)
class Graph(abc.ABC):
    """Nodes in the latent space and the Riemannian lengths of the edges between them (abstract).

    Made by `Lattice.fit` or `CodeGraph.fit`, passed as ``init=`` to `pullback.geodesic`.

    **Attributes:**

    - `metric`: what measured the edges.
    - `nodes`: codes, shape ``(N, d)``.
    - `weights`: symmetric sparse matrix of edge lengths.
    - `spacing`: Euclidean length of the longest sub-step in which an edge to an end point is measured.
    - `num_links`: how many of its nearest nodes an end point is joined to.
    """

    metric: Metric
    nodes: Float[Tensor, "N d"]
    weights: sparse.csr_array
    spacing: float
    num_links: int

    @classmethod
    @abc.abstractmethod
    def fit(cls, metric: Metric, codes: Float[Tensor, "n d"]) -> Self:
        """Builds the graph over the region that the codes occupy."""

    def distances(self, a: Float[Tensor, "*batch d"], b: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch"]:
        """Lengths of the shortest paths in the graph: upper bounds of the distances, up to the rounding off of corners.

        ``inf`` where no path exists (an end point decodes to NaN), NaN where an end point is not finite.
        """
        start, stop = self._check(a), self._check(b)
        total = start.new_full(start.shape[:1], torch.nan)
        for pairs, routes in self._routes(start, stop):
            total[pairs] = torch.from_numpy(routes.total).to(total)
        return total.reshape(a.shape[:-1])

    def paths(
        self, a: Float[Tensor, "*batch d"], b: Float[Tensor, "*batch d"], num_points: int
    ) -> Float[Tensor, "*batch n d"]:
        """Shortest paths in the graph, from exactly a to exactly b, in `num_points` points.

        The points are equally spaced in arc length, nine parts Riemannian and one part Euclidean, so that no two coincide
        where the metric vanishes. A straight line where no path exists.
        """
        start, stop = self._check(a), self._check(b)
        w = torch.linspace(0, 1, num_points, dtype=a.dtype, device=a.device)[:, None]
        result = torch.lerp(start[:, None], stop[:, None], w)
        for pairs, routes in self._routes(start, stop):
            found = np.isfinite(routes.total)
            chosen = pairs[found]
            corners, steps = routes.trace(found, self.nodes, start[chosen], stop[chosen])
            result[chosen, 1:-1] = _resample(corners, steps, num_points)[:, 1:-1]
        result[:, -1] = stop
        return result.reshape(*a.shape[:-1], num_points, a.shape[-1])

    def save(self, file: str | PathLike[str]) -> None:
        """Writes the graph to a NumPy ``.npz`` file. The metric is not part of it: `Graph.load` is given one."""
        upper = sparse.triu(self.weights).tocoo()
        probe = np.stack([upper.row, upper.col])[:, np.linspace(0, upper.nnz - 1, 16).astype(int)]
        with open(file, "wb") as stream:
            np.savez(
                stream,
                kind=type(self).__name__,
                nodes=self.nodes.cpu().numpy(),
                row=upper.row.astype(np.int32),
                column=upper.col.astype(np.int32),
                weight=upper.data,
                spacing=self.spacing,
                num_links=self.num_links,
                probe=probe,
                probe_ds2=_probe(self.metric, self.nodes, probe),
            )

    @staticmethod
    def load(metric: Metric, file: str | PathLike[str], *, device: torch.device | str = "cpu") -> Graph:
        """Reads a saved graph, and warns if the metric measures some of its edges differently than the one it was built with."""
        with np.load(file, allow_pickle=False) as stored:
            kinds = {cls.__name__: cls for cls in Graph.__subclasses__()}
            nodes = torch.from_numpy(stored["nodes"]).to(device)
            weights = symmetric(stored["row"], stored["column"], stored["weight"], len(nodes))
            graph = kinds[str(stored["kind"])](metric, nodes, weights, float(stored["spacing"]), int(stored["num_links"]))
            _check_probe(graph, stored["probe"], stored["probe_ds2"], file)
        return graph

    def _check(self, z: Tensor) -> Tensor:
        if z.shape[-1] != self.nodes.shape[1]:
            raise ValueError(
                f"The graph lies in {self.nodes.shape[1]} dimensions and an end point in {z.shape[-1]}. Fit the graph on "
                "codes of the same model."
            )
        if z.device != self.nodes.device:
            raise ValueError(
                f"The graph is on {self.nodes.device} and the end points on {z.device}. Fit or load it there, or move them."
            )
        return z.detach().reshape(-1, z.shape[-1])

    @functools.cached_property
    def _reachable(self) -> tuple[KDTree, np.ndarray]:
        """The nodes that have edges, to be searched by position, and their numbers."""
        linked = np.flatnonzero(np.diff(self.weights.indptr))
        return KDTree(self.nodes.cpu().double().numpy()[linked]), linked

    def _routes(self, a: Tensor, b: Tensor) -> Iterator[tuple[np.ndarray, _Routes]]:
        """Shortest routes, for a few of the pairs with finite ends at a time."""
        finite = (a.isfinite() & b.isfinite()).all(-1).cpu().numpy().nonzero()[0]
        if not len(finite):
            return
        ends, which = torch.cat([a[finite], b[finite]]).unique(dim=0, return_inverse=True)
        links = self._link(ends)
        source, target = which.cpu().numpy().reshape(2, -1)
        direct = self._direct(ends, links, source, target)
        for few in _batches(source):
            yield finite[few], _Routes.search(self.weights, links, source[few], target[few], direct[few])

    def _link(self, ends: Tensor) -> _Links:
        """Joins end points to their nearest nodes."""
        tree, linked = self._reachable
        distance, near = tree.query(ends.cpu().double().numpy(), k=range(1, min(self.num_links, len(linked)) + 1))
        nodes = linked[near]
        begin = ends[:, None].expand(-1, nodes.shape[1], -1)
        lengths = edge_lengths(self.metric, begin, self.nodes.to(ends)[nodes], self.spacing)
        return _Links(nodes, np.nan_to_num(lengths, nan=np.inf), distance[:, -1])

    def _direct(self, ends: Tensor, links: _Links, source: np.ndarray, target: np.ndarray) -> np.ndarray:
        """Lengths of the straight lines between end points no farther apart than the nodes they are joined to; else inf."""
        length = np.full(len(source), np.inf)
        apart = (ends[target] - ends[source]).norm(dim=-1).cpu().numpy()
        near = np.flatnonzero(apart <= links.radius[source])
        measured = edge_lengths(self.metric, ends[source[near]], ends[target[near]], self.spacing)
        length[near] = np.nan_to_num(measured, nan=np.inf)
        return length


@dataclass(frozen=True, eq=False)
class _Links:
    """The nodes each end point is joined to, how far they are, and the Euclidean distance of the farthest."""

    nodes: np.ndarray
    lengths: np.ndarray
    radius: np.ndarray


@dataclass(frozen=True, eq=False)
class _Routes:
    """Shortest routes of some pairs, as trees of predecessors over the nodes and, behind them, the sources."""

    total: np.ndarray
    last: np.ndarray
    tree: np.ndarray
    distance: np.ndarray
    before: np.ndarray

    @classmethod
    def search(cls, weights: sparse.csr_array, links: _Links, source: Any, target: Any, direct: np.ndarray) -> _Routes:
        """One Dijkstra search for each distinct source.

        Sources are appended as nodes that can be left but not entered, and targets are not part of the graph at all, so the
        route of a pair does not depend on the other pairs.
        """
        starts, tree = np.unique(source, return_inverse=True)
        num_nodes = weights.shape[0]
        graph = _with_sources(weights, links.nodes[starts], links.lengths[starts])
        indices = num_nodes + np.arange(len(starts))
        distance, before = csgraph.dijkstra(graph, indices=indices, return_predecessors=True)
        arrival = distance[tree[:, None], links.nodes[target]] + links.lengths[target]
        best = arrival.argmin(1)
        last = links.nodes[target, best]
        total = arrival[np.arange(len(best)), best]
        last = np.where(direct <= total, num_nodes + tree, last)
        return cls(np.minimum(total, direct), last, tree, distance, before)

    def trace(self, chosen: np.ndarray, nodes: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """Corners ``(B, h, d)`` of the chosen routes from a to b, and the lengths ``(B, h - 1)`` of the pieces between them.

        Routes have different numbers of corners; the shorter ones begin with copies of a.
        """
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


def symmetric(row: np.ndarray, column: np.ndarray, weight: np.ndarray, n: int) -> sparse.csr_array:
    """The symmetric sparse matrix of edges that are given once each."""
    upper = sparse.coo_array((weight, (row, column)), shape=(n, n))
    both = (upper + upper.T).tocsr()
    both.sort_indices()
    return both


def edge_lengths(metric: Metric, a: Tensor, b: Tensor, spacing: float) -> np.ndarray:
    """Lengths of straight pieces, summed over sub-steps no longer than `spacing` (32 at most); NaN where decoding fails."""
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


def break_ties(lengths: np.ndarray, euclidean: np.ndarray) -> np.ndarray:
    """Adds a millionth of the Euclidean length, in units of the typical Riemannian one."""
    typical = np.median(lengths / euclidean) if len(lengths) else 0
    return lengths + _TIE_BREAK * typical * euclidean
