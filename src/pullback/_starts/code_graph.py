"""A neighbor graph on the codes themselves, for latent spaces of any dimension."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from scipy.sparse import csgraph
from scipy.spatial import KDTree
from torch import Tensor

from pullback._metrics.base import Metric, codes_for
from pullback._options import check_options
from pullback._progress import progress
from pullback._starts.graph import Graph, break_ties, edge_lengths, nearest, symmetric
from pullback._typing import CodeSet

_SUBSTEPS = 4  # sub-steps of a typical edge


@dataclass(frozen=True, eq=False)
class CodeGraph(Graph):
    """A graph that joins every code to its nearest codes; make one with `CodeGraph.fit`.

    Its paths stay where data are, so they start a solver well where the decoder is uncertain elsewhere. They zigzag
    from code to code: their lengths are a few per cent too long in 2 dimensions and tens of per cent in 8, which
    matters little for a start. In 2 and 3 dimensions `Lattice` is finer.

    Example:
        >>> import torch, pullback as pb
        >>> from torch.distributions import Normal
        >>> metric = pb.FisherRaoMetric(lambda z: Normal(z, 1.0))
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
        nodes = _sample(codes, max_nodes, random_state)
        positions = nodes.cpu().double().numpy()
        edges = _connect(positions, _neighbors(positions, num_neighbors))
        euclidean = np.linalg.norm(positions[edges[1]] - positions[edges[0]], axis=1)
        spacing = float(np.median(euclidean)) / _SUBSTEPS
        lengths = edge_lengths(metric, nodes[edges[0]], nodes[edges[1]], spacing)
        known = np.isfinite(lengths)
        weights = break_ties(lengths[known], euclidean[known])
        begin, end = edges[:, known]
        return cls(metric, nodes, symmetric(begin, end, weights, len(nodes)), spacing, num_neighbors)


def _sample(codes: Tensor, max_nodes: int, random_state: int) -> Tensor:
    """Distinct codes, at most `max_nodes` of them."""
    codes = codes.detach().unique(dim=0)
    if len(codes) <= max_nodes:
        return codes
    chosen = np.random.default_rng(random_state).choice(len(codes), max_nodes, replace=False)
    return codes[torch.from_numpy(np.sort(chosen)).to(codes.device)]


def _neighbors(positions: np.ndarray, num_neighbors: int) -> np.ndarray:
    """Edges ``(2, E)``, each once, between every position and its nearest others."""
    k = min(num_neighbors + 1, len(positions))
    near = nearest(KDTree(positions), positions, k)[1][:, 1:]
    pairs = np.stack([np.repeat(np.arange(len(positions)), k - 1), near.ravel()])
    return np.unique(np.sort(pairs, axis=0), axis=1)


def _connect(positions: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Adds the shortest links between the pieces of a graph until it is one (Borůvka's algorithm)."""
    while True:
        graph = symmetric(edges[0], edges[1], np.ones(edges.shape[1]), len(positions))
        num_parts, part = csgraph.connected_components(graph, directed=False)
        if num_parts == 1:
            return edges
        links = [_nearest_outside(positions, part == i) for i in range(num_parts)]
        edges = np.unique(np.concatenate([edges, np.sort(np.array(links).T, axis=0)], axis=1), axis=1)


def _nearest_outside(positions: np.ndarray, inside: np.ndarray) -> tuple[int, int]:
    """The shortest pair of a position inside and one outside."""
    mine, others = np.flatnonzero(inside), np.flatnonzero(~inside)
    distance, number = nearest(KDTree(positions[others]), positions[mine], 1)
    best = distance.argmin()
    return int(mine[best]), int(others[number[best, 0]])
