"""Shortest routes between end points that lie beside a graph's nodes, by Dijkstra's algorithm."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from scipy import sparse
from scipy.sparse import csgraph
from torch import Tensor

_MAX_SOURCES = 64  # searches held in memory at once
_MAX_PAIRS = 4096  # routes traced at once

Links = tuple[np.ndarray, np.ndarray]  # the nodes each end point is joined to, and how far they are (inf if unknown)


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
        """One Dijkstra search for each distinct source.

        Sources are appended as nodes that can be left but not entered, and targets are not part of the graph at all, so
        the route of a pair does not depend on the other pairs.
        """
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


def batches(source: np.ndarray) -> Iterator[np.ndarray]:
    """Cuts pairs into batches of few distinct sources and not too many pairs; gives their numbers."""
    order = np.argsort(source, kind="stable")
    rank = np.unique(source[order], return_inverse=True)[1] // _MAX_SOURCES
    for group in np.split(order, np.flatnonzero(np.diff(rank)) + 1):
        yield from np.array_split(group, -(-len(group) // _MAX_PAIRS))
