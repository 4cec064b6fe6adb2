"""A neighbor graph on the codes themselves, for latent spaces of any dimension."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from scipy import sparse
from scipy.sparse import csgraph
from scipy.spatial import KDTree

from pullback._metrics.base import Metric, codes_for
from pullback._options import check_options
from pullback._progress import progress
from pullback._starts.graph import Graph, edge_lengths, nearest, weighted
from pullback._typing import CodeSet

_SUBSTEPS = 4  # sub-steps of a typical edge


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
