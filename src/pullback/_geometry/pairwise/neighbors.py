r"""Nearest neighbors under a metric, from a few geodesics per code.

Candidates of a code are those nearest to it in an embedding of the metric, where flat distances bound geodesic ones
from below, and in the latent space. The k with the shortest straight lines are solved. The worst of them is farther
than the k-th neighbor, so of the others only those with a smaller bound are solved. If no code left out has a smaller
bound either, the neighbors are certain.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from scipy import sparse
from scipy.spatial import KDTree
from torch import Tensor

from pullback._curves.steps import MAX_DECODED, safe_sqrt, squared_steps
from pullback._decoders.contract import unvalidated
from pullback._geometry.certificate import lower_bounds
from pullback._geometry.geodesic import solver_or_default
from pullback._geometry.pairwise.bounds import nearest_in_position, positions
from pullback._geometry.pairwise.connectivities import fuzzy_union
from pullback._geometry.pairwise.engines import Engine, run
from pullback._geometry.pairwise.job import Job, Starts
from pullback._geometry.pairwise.matrix import default_batch_size, stored
from pullback._geometry.pairwise.plan import ListPlan
from pullback._metrics.base import Metric, codes_for
from pullback._options import check_options
from pullback._progress import progress
from pullback._solvers.base import Solver
from pullback._typing import Array, Float

# Candidates per neighbor asked for. With 4, all rows of 5,000 codes were certified, in 2 and 10 dimensions
# (docs/scaling.md).
_CANDIDATES = 4
# Straight lines are measured in this many steps, which only decides who is solved first.
_STEPS = 4
# Pairs in a block of a list; what a killed process loses.
_BLOCK = 4096


@dataclass(frozen=True, eq=False)
class Neighbors:
    """Nearest neighbors, and what is known about them.

    Attributes:
        distances: sparse ``(m, n)``: row i has the distances of query i to its neighbors, nearest first.
        certified: ``(m,)``, whether a row is right for certain, up to the tolerance of the solver: no code that was not
            solved can be nearer.
        num_solved: pairs that were solved.
        n_neighbors: how many were asked for. Rows with failed pairs may have fewer.

    >>> import torch, pullback as pb
    >>> metric = pb.FisherRaoMetric(lambda z: torch.distributions.Normal(z, 0.5))
    >>> found = pb.neighbors(metric, torch.tensor([[0.0], [1.0], [3.0]]), k=1)
    >>> found.distances.toarray()[2]
    array([0., 4., 0.])
    """

    distances: sparse.csr_array
    certified: np.ndarray
    num_solved: int
    n_neighbors: int

    def connectivities(self) -> sparse.csr_array:
        """Weights between 0 and 1 of the symmetric neighbor graph, as in UMAP (McInnes et al. 2018)."""
        rows, columns = self.distances.shape or (0, 0)
        if rows != columns:
            raise ValueError(
                "Connectivities are those of a set of codes with itself: call pullback.neighbors without queries."
            )
        return fuzzy_union(self.distances)

    def to_anndata(self, adata: Any, *, key: str = "pullback", use_rep: str | None = None) -> None:
        """Puts the neighbors where scanpy looks for them.

        Afterward ``sc.tl.umap(adata, neighbors_key="pullback")``, ``sc.tl.leiden`` and ``sc.tl.dpt`` run on them.

        Args:
            adata: the annotated data whose cells the codes belong to, in the same order. Its ``obsp`` and ``uns`` are
                written.
            key: name in ``uns``, and beginning of the names in ``obsp``.
            use_rep: name in ``obsm`` of the codes, for the record.
        """
        names = {"distances": f"{key}_distances", "connectivities": f"{key}_connectivities"}
        adata.obsp[names["distances"]] = sparse.csr_matrix(self.distances)
        adata.obsp[names["connectivities"]] = sparse.csr_matrix(self.connectivities())
        parameters = {"n_neighbors": self.n_neighbors + 1, "method": "umap", "metric": "pullback"}
        if use_rep is not None:
            parameters["use_rep"] = use_rep
        adata.uns[key] = {f"{name}_key": where for name, where in names.items()} | {"params": parameters}

    def __repr__(self) -> str:
        rows, certain = len(self.certified), int(self.certified.sum())
        return f"Neighbors({self.n_neighbors} of {rows} codes, {certain} certified; {self.num_solved} pairs solved)"


def neighbors(
    metric: Metric,
    Z: Float[Tensor, "n d"] | Array,
    k: int,
    *,
    queries: Float[Tensor, "m d"] | Array | None = None,
    max_candidates: int | None = None,
    solver: Solver | None = None,
    init: Starts = None,
    n_jobs: int | None = None,
    client: Any = None,
    devices: Sequence[str] | None = None,
    out: str | os.PathLike[str] | None = None,
    batch_size: int | None = None,
    errors: Literal["nan", "raise"] = "nan",
) -> Neighbors:
    r"""The k codes nearest to each code, for sets whose distance matrix is out of reach.

    Memory and geodesics grow as ``n k``; bounds are compared for all pairs, without solving them.

    Args:
        metric: the geometry.
        Z: codes, ``(n, d)``.
        k: how many neighbors. No code is its own.
        queries: other codes, whose neighbors in ``Z`` are asked for.
        max_candidates: candidates of each code, ``4 k`` by default, besides the k nearest in the latent space. Those
            are solved whose bounds do not exclude them. With ``len(Z)`` the answer is that of solving all pairs.
        solver: as in `pullback.geodesic`.
        init: as in `pullback.pairwise_distances`.
        n_jobs: as in `pullback.pairwise_distances`.
        client: as in `pullback.pairwise_distances`.
        devices: as in `pullback.pairwise_distances`.
        out: a folder for the distances solved, from which a run that was killed goes on.
        batch_size: as in `pullback.pairwise_distances`.
        errors: as in `pullback.pairwise_distances`. Pairs that fail are no neighbors.

    Example:
        >>> import torch, pullback as pb
        >>> metric = pb.EuclideanMetric(lambda z: torch.distributions.Normal(z, 1.0))
        >>> found = pb.neighbors(metric, torch.tensor([[0.0], [1.0], [3.0]], dtype=torch.float64), k=1)
        >>> found.distances.toarray().round(6).tolist(), found.certified.all().item()
        ([[0.0, 1.0, 0.0], [1.0, 0.0, 0.0], [0.0, 2.0, 0.0]], True)
    """
    check_options(max_candidates=max_candidates, batch_size=batch_size)
    own = queries is None
    Z, asked = codes_for(metric, Z, Z if queries is None else queries, a_set=True)
    if not isinstance(k, int | np.integer) or not 1 <= k <= len(Z) - own:
        raise ValueError(f"k={k} must be between 1 and {len(Z) - own}, the number of codes that may be neighbors.")
    most = min(len(Z) - own, max_candidates or _CANDIDATES * k)
    candidates = _candidates(metric, asked.detach(), Z.detach(), k, max(k, most), own)
    engine = Engine(n_jobs, client, devices and [str(device) for device in devices])
    batch = batch_size or default_batch_size(Z)
    nothing = ListPlan(np.zeros(0, int), np.zeros(0, int), _BLOCK)
    job = Job(metric, asked.detach(), Z.detach(), nothing, solver_or_default(solver), init, batch)
    return _Search(job, engine, candidates, k, None if out is None else Path(out), errors).run()


@dataclass(frozen=True, eq=False)
class _Candidates:
    """Pairs that may be neighbors, each once, ordered by query.

    `row` and `column` number them; `lower` bounds their distances, `straight` is the length of the straight line,
    `beyond` ``(m,)`` bounds all that are not listed. With `own`, a pair serves both of its codes.
    """

    row: np.ndarray
    column: np.ndarray
    lower: np.ndarray
    straight: np.ndarray
    beyond: np.ndarray
    num_rows: int
    num_columns: int
    own: bool

    def views(self, values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """The pairs as seen from each of their codes: row, column, value, number of the pair."""
        number = np.arange(len(self.row))
        if not self.own:
            return self.row, self.column, values, number
        rows, columns = np.concatenate([self.row, self.column]), np.concatenate([self.column, self.row])
        return rows, columns, np.concatenate([values, values]), np.concatenate([number, number])


@progress("candidates")
def _candidates(metric: Metric, queries: Tensor, codes: Tensor, k: int, num: int, own: bool) -> _Candidates:
    both = positions(metric, codes if own else torch.cat([codes, queries]))
    points, asked = both.points[: len(codes)], both.points if own else both.points[len(codes) :]
    index, flat, beyond = (x.cpu().numpy() for x in nearest_in_position(asked, points, num, own=own))
    known = np.isfinite(flat)
    row, column = known.nonzero()[0], index[known]
    # On the far side of a wall codes look alike and are not near, so those nearest in the latent space count too.
    near = _near_in_latent_space(queries, codes, k, own)
    row, column = _unique(np.concatenate([row, near[0]]), np.concatenate([column, near[1]]), len(codes), own)
    lower = np.nan_to_num(_measured(partial(lower_bounds, metric), queries, codes, row, column))
    left_out = beyond if both.is_bound else np.full(len(queries), np.inf if num >= len(codes) - own else 0.0)
    straight = np.nan_to_num(_measured(partial(_straight_lengths, metric), queries, codes, row, column), nan=np.inf)
    return _Candidates(row, column, lower, straight, left_out, len(queries), len(codes), own)


def _near_in_latent_space(queries: Tensor, codes: Tensor, num: int, own: bool) -> tuple[np.ndarray, np.ndarray]:
    finite = np.flatnonzero(codes.isfinite().all(-1).cpu().numpy())
    asked = np.flatnonzero(queries.isfinite().all(-1).cpu().numpy())
    if not len(finite) or not len(asked):
        return np.zeros(0, int), np.zeros(0, int)
    tree = KDTree(codes.cpu().double().numpy()[finite])
    # One more, as the nearest of all is the code itself.
    number = min(num + own, len(finite))
    found = tree.query(queries.cpu().double().numpy()[asked], k=number)[1].reshape(len(asked), number)
    row, column = np.repeat(asked, number), finite[found.ravel()]
    return (row[row != column], column[row != column]) if own else (row, column)


def _unique(row: np.ndarray, column: np.ndarray, num_columns: int, own: bool) -> tuple[np.ndarray, np.ndarray]:
    if own:
        row, column = np.minimum(row, column), np.maximum(row, column)
    pairs = np.unique(row.astype(np.int64) * num_columns + column)
    return pairs // num_columns, pairs % num_columns


def _measured(measure: Callable[[Tensor, Tensor], Tensor], a: Tensor, b: Tensor, *pairs: np.ndarray) -> np.ndarray:
    """What is measured of the pairs that two arrays of numbers name, some at a time."""
    found = [np.zeros(0)]
    with torch.no_grad(), unvalidated():
        for start in range(0, len(pairs[0]), MAX_DECODED):
            i, j = (numbers[start : start + MAX_DECODED] for numbers in pairs)
            found.append(measure(a[i], b[j]).double().cpu().numpy())
    return np.concatenate(found)


def _straight_lengths(metric: Metric, a: Tensor, b: Tensor) -> Tensor:
    w = torch.linspace(0, 1, _STEPS + 1, dtype=a.dtype, device=a.device)[:, None]
    return safe_sqrt(squared_steps(metric, torch.lerp(a[:, None], b[:, None], w))[0]).sum(-1)


@dataclass(frozen=True, eq=False)
class _Search:
    """Solves the candidates that the bounds do not exclude."""

    job: Job
    engine: Engine
    candidates: _Candidates
    k: int
    out: Path | None
    errors: Literal["nan", "raise"]

    def run(self) -> Neighbors:
        c = self.candidates
        distance = np.full(len(c.row), np.nan)
        solved = np.zeros(len(c.row), bool)
        self._solve(self._most_promising(c.straight), distance, solved, "round-0")
        reach = self._reach(distance)
        rows, _, lower, number = c.views(c.lower)
        needed = np.zeros(len(c.row), bool)
        needed[number[lower <= reach[rows]]] = True
        self._solve(needed & ~solved, distance, solved, "round-1")
        certified = (self._reach(distance) <= c.beyond) & self._without_failures(distance, solved)
        return Neighbors(self._matrix(distance), certified, int(solved.sum()), self.k)

    def _solve(self, chosen: np.ndarray, distance: np.ndarray, solved: np.ndarray, name: str) -> None:
        """Fills in the distances of some pairs."""
        c = self.candidates
        plan = ListPlan(c.row[chosen], c.column[chosen], _BLOCK)
        job = replace(self.job, plan=plan)
        blocks, out = list(plan.blocks()), None if self.out is None else self.out / name
        if out is None:
            values, _ = run(job, self.engine, blocks, None, errors=self.errors)
        else:
            values = stored(job, self.engine, blocks, out, self.errors).distances[:]
        distance[chosen], solved[chosen] = values, True

    def _most_promising(self, values: np.ndarray) -> np.ndarray:
        """The pairs among the k least values of one of their codes."""
        rows, _, _, number = self._sorted(values)
        chosen = np.zeros(len(values), bool)
        chosen[number[_rank(rows) < self.k]] = True
        return chosen

    def _reach(self, distance: np.ndarray) -> np.ndarray:
        """The k-th least distance of each row, infinite where fewer are known."""
        rows, _, values, _ = self._sorted(distance)
        reach = np.full(self.candidates.num_rows, np.inf)
        last = (_rank(rows) == self.k - 1) & np.isfinite(values)
        reach[rows[last]] = values[last]
        return reach

    def _without_failures(self, distance: np.ndarray, solved: np.ndarray) -> np.ndarray:
        rows, _, failed, _ = self.candidates.views(solved & np.isnan(distance))
        right = np.ones(self.candidates.num_rows, bool)
        right[rows[failed]] = False
        return right

    def _matrix(self, distance: np.ndarray) -> sparse.csr_array:
        rows, columns, values, _ = self._sorted(distance)
        kept = (_rank(rows) < self.k) & np.isfinite(values)
        pointer = np.concatenate([[0], np.cumsum(np.bincount(rows[kept], minlength=self.candidates.num_rows))])
        shape = self.candidates.num_rows, self.candidates.num_columns
        return sparse.csr_array((values[kept], columns[kept], pointer), shape=shape)

    def _sorted(self, values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """The pairs as seen from each code, by code and then by value, NaN last."""
        rows, columns, seen, number = self.candidates.views(values)
        order = np.lexsort((columns, seen, rows))
        return rows[order], columns[order], seen[order], number[order]


def _rank(rows: np.ndarray) -> np.ndarray:
    """Places within runs of equal numbers: 0, 1, ... from the beginning of each."""
    begins = np.flatnonzero(np.diff(rows, prepend=-1))
    return np.arange(len(rows)) - np.repeat(begins, np.diff(begins, append=len(rows)))
