"""The work of one block: its geodesics, and a second attempt from a graph for those that failed."""

from __future__ import annotations

import contextlib
import functools
import io
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from pullback._geometry.geodesic import geodesic
from pullback._geometry.pairwise.plan import Block, Plan
from pullback._metrics.base import Metric
from pullback._solvers.base import Solver, Status, converged
from pullback._starts.code_graph import CodeGraph
from pullback._starts.graph import Graph

Starts = Graph | Sequence[Graph | None] | None


@dataclass(frozen=True, eq=False)
class Job:
    """Everything a process needs to solve a block.

    Attributes:
        metric: the geometry.
        first, second: codes, ``(n, d)`` and ``(m, d)``, that the plan's pairs number.
        plan: which pairs make a block.
        solver: of the paths.
        init: where paths start.
        batch_size: pairs solved together.
    """

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
            status[converged(status)] = Status.CONVERGED
            again = ((status != Status.CONVERGED) & (status != Status.BAD_END_POINT)).nonzero()[:, 0]
            if len(again) and self._graph is not None:
                length[again], status[again] = self._paths(a[again], b[again], self._graph)
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
        size = self.batch_size
        while True:
            try:
                parts = [self._batch(a[k : k + size], b[k : k + size], init) for k in range(0, len(a), size)]
            except torch.OutOfMemoryError:
                if size == 1:
                    raise
                torch.cuda.empty_cache()
                size //= 2
                continue
            empty = (a.new_zeros(0), torch.zeros(0, dtype=torch.long, device=a.device))
            length, status = (torch.cat(part) for part in zip(*parts, empty, strict=True))
            return length, status

    def _batch(self, a: Tensor, b: Tensor, init: Starts) -> tuple[Tensor, Tensor]:
        path = geodesic(self.metric, a, b, solver=self.solver, init=init)
        return path.length.detach(), path.status


@contextlib.contextmanager
def _one_thread(device: torch.device) -> Iterator[None]:
    """One thread on a CPU: sums depend on how many share them, and processes, not threads, are what fills the cores."""
    if device.type != "cpu":
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def dumps(job: Job) -> bytes:
    """A job as bytes that other processes can load, also one with lambdas."""
    import cloudpickle

    stream = io.BytesIO()
    try:
        torch.save(replace(job), stream, pickle_module=cloudpickle)
    except (TypeError, AttributeError, RuntimeError, pickle.PicklingError) as error:
        raise TypeError(
            f"The metric, solver or init cannot be sent to other processes ({error}). Solve in this one with n_jobs=1, "
            "or have each process make its own: pullback distances my_module:make_decoder ... --shard i/n."
        ) from error
    return stream.getvalue()


def loads(payload: bytes, device: str | None = None) -> Job:
    """The job of `dumps`, its tensors on another device if one is named."""
    return torch.load(io.BytesIO(payload), map_location=device, weights_only=False)


@functools.lru_cache(maxsize=2)
def load_file(file: str, device: str | None = None) -> Job:
    """The job in a file; a process reads it once and solves many blocks."""
    return loads(Path(file).read_bytes(), device)
