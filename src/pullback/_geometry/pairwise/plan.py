"""Which pairs are solved together, the blocks of a matrix or of a list of pairs, and the work of one block."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pullback._geometry.geodesic import geodesic
from pullback._metrics.base import Metric
from pullback._solvers.base import Solver, Status, converged
from pullback._starts.graph import CodeGraph, Graph

# The coordinates of a chunk of the result: (row, column) of a matrix, (k,) of a list.
Block = tuple[int, ...]
Slices = tuple[slice, ...]
Starts = Graph | Sequence[Graph | None] | None


@dataclass(frozen=True, eq=False)
class Plan:
    """All pairs of two sets of codes, or of one with itself (each pair once, no code with itself); or a list of pairs.

    The result has a `shape`, ``(n, m)`` or ``(number of pairs,)``, and is cut into blocks with sides of length `size`.
    """

    shape: tuple[int, ...]
    size: int
    symmetric: bool = False
    listed: tuple[np.ndarray, np.ndarray] | None = None

    def blocks(self) -> list[Block]:
        """All blocks to be solved."""
        sides = itertools.product(*(range(-(-n // self.size)) for n in self.shape))
        return [block for block in sides if not self.symmetric or block[0] <= block[1]]

    def slices(self, block: Block) -> Slices:
        """Where a block is in the result."""
        return tuple(slice(b * self.size, min((b + 1) * self.size, n)) for b, n in zip(block, self.shape, strict=True))

    def pairs(self, block: Block) -> tuple[np.ndarray, np.ndarray]:
        """Numbers of the first and of the second codes of a block's pairs."""
        here = self.slices(block)
        i, j = np.mgrid[here].reshape(2, -1) if self.listed is None else (numbers[here] for numbers in self.listed)
        return (i[i < j], j[i < j]) if self._is_diagonal(block) else (i, j)

    def writes(self, block: Block, values: np.ndarray) -> list[tuple[Slices, np.ndarray]]:
        """What to write where for the values of a block's pairs. The chunk at `block` itself comes last."""
        here, (i, j) = self.slices(block), self.pairs(block)
        if self.listed is not None:
            return [(here, values)]
        matrix = np.zeros([s.stop - s.start for s in here], values.dtype)
        matrix[i - here[0].start, j - here[1].start] = values
        if self._is_diagonal(block):
            return [(here, matrix + matrix.T)]
        return [(here[::-1], matrix.T), (here, matrix)] if self.symmetric else [(here, matrix)]

    def chunks(self, block: Block) -> list[Block]:
        """The chunks that `writes` fills."""
        return [block[::-1], block] if self.symmetric and not self._is_diagonal(block) else [block]

    def _is_diagonal(self, block: Block) -> bool:
        return self.symmetric and block[0] == block[1]


@dataclass(frozen=True, eq=False)
class Job:
    """Everything a process needs to solve a block of the pairs that `plan` makes of the codes `first` and `second`."""

    metric: Metric
    first: Tensor
    second: Tensor
    plan: Plan
    solver: Solver
    init: Starts
    batch_size: int

    def __post_init__(self) -> None:
        starts = self.init if isinstance(self.init, (list, tuple)) else [self.init]
        if not all(isinstance(start, Graph | None) for start in starts):
            raise TypeError("init must be None, a fitted graph, or a list of them: a curve would fit one pair only.")

    def solve(self, block: Block) -> tuple[np.ndarray, np.ndarray]:
        """Distances of the block's pairs, NaN where no path was found, and the `Status` of each."""
        i, j = (torch.from_numpy(numbers).to(self.first.device) for numbers in self.plan.pairs(block))
        a, b = self.first[i], self.second[j]
        with _one_thread(a.device):
            length, status = self._paths(a, b, self.init)
            again = (~converged(status) & (status != Status.BAD_END_POINT)).nonzero()[:, 0]
            if len(again) and self._graph is not None:
                length[again], status[again] = self._paths(a[again], b[again], self._graph)
        status[converged(status)] = Status.CONVERGED
        length[status != Status.CONVERGED] = torch.nan
        return length.cpu().numpy(), status.to(torch.int8).cpu().numpy()

    @functools.cached_property
    def _graph(self) -> CodeGraph | None:
        """Where pairs that failed start again; None if no two codes can be joined."""
        codes = torch.cat([self.first, self.second])
        codes = codes[codes.isfinite().all(-1)]
        if len(codes.unique(dim=0)) < 2:
            return None
        graph = CodeGraph.fit(self.metric, codes)
        return graph if graph.weights.nnz else None

    def _paths(self, a: Tensor, b: Tensor, init: Starts) -> tuple[Tensor, Tensor]:
        """Lengths and statuses, a batch at a time; batches are halved where a device's memory does not hold them."""
        length, status = a.new_zeros(len(a)), torch.zeros(len(a), dtype=torch.long, device=a.device)
        begin, size = 0, self.batch_size
        while begin < len(a):
            here = slice(begin, begin + size)
            try:
                path = geodesic(self.metric, a[here], b[here], solver=self.solver, init=init)
            except torch.OutOfMemoryError:
                if size == 1:
                    raise
                torch.cuda.empty_cache()
                size //= 2
            else:
                length[here], status[here] = path.length.detach(), path.status
                begin += size
        return length, status


@contextlib.contextmanager
def _one_thread(device: torch.device) -> Iterator[None]:
    """One thread on a CPU: sums depend on how many share them, and processes, not threads, are what fills the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1 if device.type == "cpu" else before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
