r"""Nearest neighbors under a metric, from a few geodesics per code.

Candidates of a code are those nearest to it in an embedding of the metric, where flat distances bound geodesic ones
from below, and in the latent space. The k with the shortest straight lines are solved. The worst of them is farther
than the k-th neighbor, so of the others only those with a smaller bound are solved. If no code left out has a smaller
bound either, the neighbors are certain.

In a Euclidean embedding :math:`\varphi` no path is shorter than the straight line. An orthogonal projection only
shortens lines, and so does taking the norm of what it leaves out, so a few coordinates suffice for a bound:

.. math:: |P(\varphi_a - \varphi_b)|^2 + (|Q\varphi_a| - |Q\varphi_b|)^2 \le |\varphi_a - \varphi_b|^2 \le d(a, b)^2,
   \quad Q = 1 - P .
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from scipy import sparse
from torch import Tensor

from pullback._curves.steps import MAX_DECODED, safe_sqrt, squared_steps
from pullback._decoders.contract import unvalidated
from pullback._geometry.certificate import lower_bounds
from pullback._geometry.geodesic import solver_or_default
from pullback._geometry.pairwise.matrix import Job, Starts, default_batch_size, engine_for, run
from pullback._geometry.pairwise.store import Plan
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
# Coordinates kept of an embedding. Of the VAEs of benchmarks/distances.py, with 784 pixels, the others hold 1e-4 of the
# variance for 2 latent dimensions and 4e-3 for 10.
_MAX_COORDINATES = 64
# Codes from which the leading coordinates are found, and pairs on which the bound is checked against the family's own.
_SAMPLE = 1024
# Numbers of a matrix of flat distances held at once.
_AT_ONCE = 2**23
# Relative error of a chord between rounded positions.
_ROUNDING = 1e-9
# Of the bandwidths of a graph's weights. The least bandwidth is in units of the mean distance, as in umap-learn.
_BISECTIONS = 64
_MIN_SCALE = 1e-3


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
        r"""Weights between 0 and 1 of the symmetric neighbor graph, as in UMAP (McInnes et al. 2018, section 3).

        From code i, a neighbor at distance d weighs :math:`\exp(-(d - \rho_i)_+ / \sigma_i)`, where :math:`\rho_i` is
        the distance of the nearest that is no copy and :math:`\sigma_i` makes the weights of a row sum to
        :math:`\log_2 k`, k counting the code itself. Both directions are joined as probabilities, :math:`a + b - ab`.
        """
        if len(set(self.distances.shape or ())) > 1:
            raise ValueError(
                "Connectivities are those of a set of codes with itself: call pullback.neighbors without queries."
            )
        n, counts = len(self.certified), np.diff(self.distances.indptr)
        rows, d = np.repeat(np.arange(n), counts), self.distances.data.astype(float)
        closest = np.full(n, np.inf)
        np.minimum.at(closest, rows[d > 0], d[d > 0])
        excess = np.maximum(d - np.where(np.isfinite(closest), closest, 0.0)[rows], 0.0)
        low, high, scale, target = np.zeros(n), np.full(n, np.inf), np.ones(n), np.log2(counts + 1.0)
        for _ in range(_BISECTIONS):
            with np.errstate(under="ignore"):
                total = np.bincount(rows, np.exp(-excess / scale[rows]), minlength=n)
            high, low = np.where(total > target, scale, high), np.where(total > target, low, scale)
            scale = np.where(np.isinf(high), 2 * scale, 0.5 * (low + np.minimum(high, 1e300)))
        mean, overall = np.bincount(rows, d, minlength=n) / np.maximum(counts, 1), d.mean() if len(d) else 1.0
        scale = np.maximum(scale, _MIN_SCALE * np.where(mean > 0, mean, overall)).clip(np.finfo(float).tiny)
        one_way = self.distances.astype(float)
        one_way.data = np.exp(-excess / scale[rows])
        return sparse.csr_array(one_way + one_way.T - one_way * one_way.T)

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

    >>> import torch, pullback as pb
    >>> metric = pb.EuclideanMetric(lambda z: torch.distributions.Normal(z, 1.0))
    >>> found = pb.neighbors(metric, torch.tensor([[0.0], [1.0], [3.0]], dtype=torch.float64), k=1)
    >>> found.distances.toarray().round(6).tolist(), found.certified.all().item()
    ([[0.0, 1.0, 0.0], [1.0, 0.0, 0.0], [0.0, 2.0, 0.0]], True)
    """
    check_options(max_candidates=max_candidates, batch_size=batch_size)
    own = queries is None
    Z, asked = (codes.detach() for codes in codes_for(metric, Z, Z if queries is None else queries, a_set=True))
    if not isinstance(k, int | np.integer) or not 1 <= k <= len(Z) - own:
        raise ValueError(f"k={k} must be between 1 and {len(Z) - own}, the number of codes that may be neighbors.")
    most = min(len(Z) - own, max_candidates or _CANDIDATES * k)
    c = _candidates(metric, asked, Z, k, max(k, most), own)
    engine, solver = engine_for(n_jobs, client, devices), solver_or_default(solver)

    def solve(chosen: np.ndarray, name: str) -> np.ndarray:
        plan = Plan((int(chosen.sum()),), _BLOCK, listed=(c.first[chosen], c.second[chosen]))
        job = Job(metric, asked, Z, plan, solver, init, batch_size or default_batch_size(Z))
        found = run(job, engine, plan.blocks(), None if out is None else Path(out) / name, errors)
        return found if out is None else found.distances[:]

    distance, solved = np.full(len(c.first), np.nan), np.zeros(len(c.first), bool)
    wanted = c.least(c.straight, k)
    for name in ("round-0", "round-1"):
        chosen = np.zeros_like(solved)
        chosen[c.pair[wanted]] = True
        chosen &= ~solved
        distance[chosen] = solve(chosen, name)
        solved |= chosen
        matrix, reach = c.nearest(distance, k)
        wanted = c.lower[c.pair] <= reach[c.row]
    certified = reach <= c.beyond
    certified[c.row[(solved & np.isnan(distance))[c.pair]]] = False
    return Neighbors(matrix, certified, int(solved.sum()), k)


@dataclass(frozen=True, eq=False)
class _Candidates:
    """Pairs that may be neighbors, each once, and the graph of them: codes as queries see a pair from both sides."""

    first: np.ndarray
    second: np.ndarray
    lower: np.ndarray  # bounds of their distances
    straight: np.ndarray  # lengths of straight lines
    beyond: np.ndarray  # one per query, bounds the distances of all that are not listed
    row: np.ndarray  # of an entry of the graph: the query
    column: np.ndarray  # the code
    pair: np.ndarray  # the number of the pair
    shape: tuple[int, int]

    def least(self, values: np.ndarray, k: int) -> np.ndarray:
        """The entries with the k least values of each row, by row and then by value, NaN last."""
        order = np.lexsort((self.column, values[self.pair], self.row))
        begins = np.flatnonzero(np.diff(self.row[order], prepend=-1))
        rank = np.arange(len(order)) - np.repeat(begins, np.diff(begins, append=len(order)))
        return order[rank < k]

    def nearest(self, distance: np.ndarray, k: int) -> tuple[sparse.csr_array, np.ndarray]:
        """The k least distances of each row, and the last of them, infinite where fewer are known."""
        kept = self.least(distance, k)
        kept = kept[np.isfinite(distance[self.pair[kept]])]
        counts = np.bincount(self.row[kept], minlength=self.shape[0])
        pointer, values = np.concatenate([[0], np.cumsum(counts)]), distance[self.pair[kept]]
        reach = np.full(len(counts), np.inf)
        reach[counts == k] = values[pointer[1:][counts == k] - 1]
        return sparse.csr_array((values, self.column[kept], pointer), shape=self.shape), reach


def positions(metric: Metric, codes: Tensor) -> tuple[Tensor, bool]:
    """Points ``(n, r)`` in the metric's Euclidean embedding, and whether flat distances are lower bounds.

    If it has none the codes themselves, which only rank.
    """
    sample = _embed(metric, codes[torch.linspace(0, len(codes) - 1, min(len(codes), _SAMPLE)).long().to(codes.device)])
    if sample is None:
        return codes.double(), False
    center, parts = sample.nanmean(0), []
    basis = torch.linalg.svd(sample[sample.isfinite().all(-1)] - center, full_matrices=False).Vh[:_MAX_COORDINATES]
    for some in codes.split(MAX_DECODED):
        if (embedded := _embed(metric, some)) is None:
            return codes.double(), False
        moved = embedded - center
        leading = moved @ basis.mT
        rest = torch.linalg.vector_norm(moved - leading @ basis, dim=-1, keepdim=True)
        parts.append(torch.cat([leading, rest], -1))
    points = torch.cat(parts)
    # Does the family agree? An embedding of a subfamily, such as Normals of one scale, bounds nothing off it.
    i = torch.arange(min(len(codes), _SAMPLE), device=codes.device)
    j = (i * 7919 + 1) % len(codes)
    with torch.no_grad(), unvalidated():
        family = lower_bounds(metric, codes[i], codes[j]).double()
    flat = torch.linalg.vector_norm(points[i] - points[j], dim=-1)
    known = flat.isfinite() & family.isfinite()
    return points, bool((flat[known] <= family[known] * (1 + _ROUNDING) + 1e-12).all())


def _embed(metric: Metric, codes: Tensor) -> Tensor | None:
    with torch.no_grad(), unvalidated():
        dual = metric.embed(codes)
    return dual[0].double() if dual is not None and dual[0] is dual[1] else None


def nearest_in_position(queries: Tensor, points: Tensor, num: int, *, own: bool) -> tuple[Tensor, Tensor, Tensor]:
    """For each query the `num` nearest points, but itself with `own`; their distances, and the least one left out."""
    size = max(1, _AT_ONCE // max(1, len(points)))
    found = []
    for start in range(0, len(queries), size):
        some = queries[start : start + size]
        flat = torch.cdist(some, points, compute_mode="donot_use_mm_for_euclid_dist").nan_to_num(torch.inf)
        if own:
            flat[torch.arange(len(some)), torch.arange(start, start + len(some))] = torch.inf
        best = flat.topk(min(num + 1, flat.shape[1]), largest=False, sorted=True)
        lower = (1 - _ROUNDING) * best.values
        beyond = lower[:, num] if lower.shape[1] > num else flat.new_full((len(some),), torch.inf)
        found.append((best.indices[:, :num], lower[:, :num], beyond))
    index, lower, beyond = (torch.cat(part) for part in zip(*found, strict=True))
    return index, lower, beyond


@progress("candidates")
def _candidates(metric: Metric, queries: Tensor, codes: Tensor, k: int, num: int, own: bool) -> _Candidates:
    points, is_bound = positions(metric, codes if own else torch.cat([codes, queries]))
    asked = points[-len(queries) :]
    index, flat, beyond = (x.cpu().numpy() for x in nearest_in_position(asked, points[: len(codes)], num, own=own))
    # On the far side of a wall codes look alike and are not near, so those nearest in the latent space count too.
    near = [x.cpu().numpy() for x in nearest_in_position(queries.double(), codes.double(), k, own=own)]
    known, index = np.isfinite(np.hstack([flat, near[1]])), np.hstack([index, near[0]])
    row, column = known.nonzero()[0], index[known]
    if own:
        row, column = np.minimum(row, column), np.maximum(row, column)
    first, second = np.divmod(np.unique(row.astype(np.int64) * len(codes) + column), len(codes))
    lower, straight = _measured(metric, queries, codes, first, second)
    if not is_bound:
        beyond = np.full(len(queries), np.inf if num >= len(codes) - own else 0.0)
    row, column, pair = first, second, np.arange(len(first))
    if own:
        row, column, pair = (np.concatenate(x) for x in ((first, second), (second, first), (pair, pair)))
    return _Candidates(first, second, lower, straight, beyond, row, column, pair, (len(queries), len(codes)))


def _measured(metric: Metric, a: Tensor, b: Tensor, *pairs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Lower bounds of the distances of pairs, and the lengths of straight lines, some at a time."""
    w = torch.linspace(0, 1, _STEPS + 1, dtype=a.dtype, device=a.device)[:, None]
    found: list[tuple[np.ndarray, ...]] = [(np.zeros(0), np.zeros(0))]
    with torch.no_grad(), unvalidated():
        for start in range(0, len(pairs[0]), MAX_DECODED):
            i, j = (numbers[start : start + MAX_DECODED] for numbers in pairs)
            steps = squared_steps(metric, torch.lerp(a[i][:, None], b[j][:, None], w))[0]
            measures = lower_bounds(metric, a[i], b[j]), safe_sqrt(steps).sum(-1)
            found.append(tuple(x.double().cpu().numpy() for x in measures))
    lower, straight = map(np.concatenate, zip(*found, strict=True))
    return np.nan_to_num(lower), np.nan_to_num(straight, nan=np.inf)
