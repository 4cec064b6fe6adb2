r"""A regular grid of the latent space as a graph, in 2 and 3 dimensions.

Paths on a grid can only run along its edges. With edges to a stencil S of neighbors, the shortest path in a flat space
is longer than the straight line by at most :math:`1/r - 1`, with r the radius of the largest ball in the convex hull of
the unit vectors :math:`s/|s|`: 1.3 % for 32 neighbors in the plane, 1.7 % for 218 in space. Edges are measured in
sub-steps of about one cell. The points between are shared by many edges, so some shifted grids are decoded, once each:
9 grids in the plane, 43 in space.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Self

import numpy as np
import torch
from torch import Tensor

from pullback._curves.steps import MAX_DECODED, Marks, safe_sqrt
from pullback._decoders.contract import unvalidated
from pullback._metrics.base import Metric, codes_for, embedding_maps
from pullback._options import check_options
from pullback._progress import progress
from pullback._starts.graph import Graph, weighted
from pullback._typing import CodeSet

# Offsets to neighbors, up to order and signs of their coordinates.
_SHAPES = {
    2: [(1, 0), (1, 1), (2, 1), (3, 1), (3, 2)],
    3: [(1, 0, 0), (1, 1, 0), (1, 1, 1), (2, 1, 0), (2, 1, 1), (2, 2, 1), (3, 1, 0), (3, 1, 1), (3, 2, 1), (4, 1, 1)],
}
_NUM_NODES = {2: 160**2, 3: 24**3}
_MANY_NODES = {2: 480**2, 3: 24**3}  # where decoding is cheap
_CHEAP = 64  # numbers in the embedding of a code
_NUM_LINKS = {2: 12, 3: 64}
_LINK_STEP = 1.25  # cells: about the longest sub-step of an edge
_MIN_COUNT = 5

Offset = tuple[int, ...]
Residue = tuple[Fraction, ...]


def stencil(d: int) -> list[Offset]:
    """Offsets to the neighbors of a node, one of two opposite ones: the first non-zero coordinate is positive."""
    reach = max(map(max, _SHAPES[d]))
    every = itertools.product(range(-reach, reach + 1), repeat=d)
    return [o for o in every if o > (0,) * d and tuple(sorted(map(abs, o), reverse=True)) in _SHAPES[d]]


@dataclass(frozen=True, eq=False)
class Lattice(Graph):
    """A regular grid over the codes, each node joined to a wide stencil of neighbors; make one with `Lattice.fit`.

    It sees the whole region, also where no codes are, and in a flat space its distances are at most 2 % too long.

    >>> import torch, pullback as pb
    >>> metric = pb.FisherRaoMetric(lambda z: torch.distributions.Normal(z, 1.0))
    >>> codes = torch.tensor([[0.0, 0.0], [3.0, 4.0]])
    >>> pb.Lattice.fit(metric, codes, num_nodes=400).distances(*codes).round(decimals=2)
    tensor(5.0300)
    """

    @classmethod
    @progress("lattice")
    def fit(cls, metric: Metric, codes: CodeSet, *, num_nodes: int | None = None, margin: float = 0.1) -> Self:
        """Builds the grid over the bounding box of the codes. Nodes that decode to NaN get no edges.

        Args:
            metric: what measures the edges, and later the links to end points.
            codes: latent codes of the data, in 2 or 3 dimensions.
            num_nodes: about how many nodes the grid has, by default 25,600 in the plane and 13,824 in space; 230,400 in
                the plane where the embedding of a code is at most 64 numbers, because valleys narrower than a cell are
                lost. A metric with an embedding decodes 9 codes a node in the plane and 43 in space.
            margin: how far the grid reaches beyond the codes, as a share of their largest extent.
        """
        check_options(least=2, num_nodes=num_nodes)
        if not margin >= 0:
            raise ValueError(f"margin must not be negative; got {margin}.")
        (codes,) = codes_for(metric, codes, a_set=True, least=2, finite=True)
        d = codes.shape[1]
        if d not in _SHAPES:
            raise ValueError(f"A lattice lies in 2 or 3 dimensions, and the codes in {d}. Use pullback.CodeGraph.fit.")
        low, high = codes.detach().amin(0), codes.detach().amax(0)
        room = margin * ((high - low).max().item() or 1.0)
        span = high - low + 2 * room
        cell = (span.double().prod().item() / (num_nodes or default_nodes(metric, codes))) ** (1 / d)
        counts = tuple(max(_MIN_COUNT, math.ceil(side / cell) + 1) for side in span.tolist())
        surplus = torch.tensor([cell * (count - 1) for count in counts]).to(span) - span
        grid = _Grid(metric, low - room - surplus / 2, cell, counts)
        begin, end, lengths = grid.edges()
        nodes = grid.codes(0, counts[0], (Fraction(0),) * d).flatten(0, -2)
        return cls(metric, nodes, weighted(nodes, np.stack([begin, end]), lengths), _LINK_STEP * cell, _NUM_LINKS[d])


def default_nodes(metric: Metric, codes: Tensor) -> int:
    """About how many nodes a grid over the codes has: more where decoding is cheap."""
    with unvalidated(), torch.no_grad():
        maps = embedding_maps(metric, codes[:1])
    cheap = bool(maps) and maps[0].shape[-1] <= _CHEAP
    return (_MANY_NODES if cheap else _NUM_NODES)[codes.shape[1]]


@dataclass(frozen=True, eq=False)
class _Grid:
    """The grid of cubic cells while its edges are measured, a few rows (along the first axis) at a time."""

    metric: Metric
    corner: Tensor
    cell: float
    counts: tuple[int, ...]

    def edges(self) -> list[np.ndarray]:
        """Both ends of every edge, and its length."""
        offsets = sorted(stencil(len(self.counts)), key=_num_substeps)
        with unvalidated(), torch.no_grad():
            sweeps = [self._sweep(list(group)) for _, group in itertools.groupby(offsets, key=_num_substeps)]
        return [np.concatenate(part) for part in zip(*itertools.chain.from_iterable(sweeps), strict=True)]

    def _sweep(self, offsets: list[Offset]) -> list[list[np.ndarray]]:
        """Moves a window over the grid that is as high as the offsets reach."""
        reach = max(offset[0] for offset in offsets)
        residues = sorted({residue for offset in offsets for _, residue in _stops(offset)})
        num_rows = max(1, 4 * MAX_DECODED // (math.prod(self.counts[1:]) * len(residues)))
        found, window, decoded = [], {}, 0
        for first in range(0, self.counts[0], num_rows):
            last = min(self.counts[0], first + num_rows + reach)
            window = {r: self._extend(window.get(r), num_rows, decoded, last, r) for r in residues}
            decoded = last
            found += [self._measure(window, first, min(num_rows, self.counts[0] - first), o) for o in offsets]
        return found

    def codes(self, first: int, last: int, residue: Residue) -> Tensor:
        """The shifted grid's codes in some rows, shape ``(rows, *counts[1:], d)``."""
        axes = torch.arange(first, last), *(torch.arange(count) for count in self.counts[1:])
        steps = torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1).to(self.corner)
        return self.corner + self.cell * (steps + self.corner.new_tensor([float(shift) for shift in residue]))

    def _extend(self, marks: Marks | None, drop: int, first: int, last: int, residue: Residue) -> Marks:
        """Forgets the rows of a window that are done and decodes the next ones."""
        if marks is not None and first == last:
            return marks[drop:]
        new = Marks.of(self.metric, self.codes(first, last, residue))
        # Between far nodes the products of a true dual pair cancel, which single precision does not survive.
        if len(new.maps) > 1 and new.z.dtype != torch.float64:
            new = Marks(self.metric, new.z, ())
        return new if marks is None else marks[drop:].join(new)

    def _measure(self, window: dict[Residue, Marks], first: int, num_rows: int, offset: Offset) -> list[np.ndarray]:
        """The edges with one offset that begin in some rows."""
        low = [max(0, -o) for o in offset]
        high = [count - max(0, o) for count, o in zip(self.counts, offset, strict=True)]
        low[0], high[0] = first, min(first + num_rows, high[0])

        def box(shift: Offset) -> tuple[slice, ...]:
            return tuple(slice(a + s, max(a, b) + s) for a, b, s in zip(low, high, shift, strict=True))

        # the window begins in the first row
        stops = [window[residue][box((shift[0] - first, *shift[1:]))] for shift, residue in _stops(offset)]
        length = torch.stack([safe_sqrt(p.ds2(q)) for p, q in itertools.pairwise(stops)]).sum(0)
        numbers = np.arange(math.prod(self.counts)).reshape(self.counts)
        begin, end = (numbers[box(shift)].ravel() for shift in ((0,) * len(offset), offset))
        return [begin, end, length.cpu().double().numpy().ravel()]


def _num_substeps(offset: Offset) -> int:
    return max(2, *map(abs, offset))


def _stops(offset: Offset) -> list[tuple[Offset, Residue]]:
    """The points between which an edge is measured: whole steps on the grid, and what is left over."""
    m = _num_substeps(offset)
    points = [[Fraction(k * o, m) for o in offset] for k in range(m + 1)]
    return [(tuple(math.floor(x) for x in point), tuple(x % 1 for x in point)) for point in points]
