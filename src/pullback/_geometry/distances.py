"""Matrices of distances between a few hundred codes: all pairs in batches, each pair once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pullback._geometry.geodesic import Geodesic, geodesic
from pullback._metrics.base import Metric
from pullback._solvers.base import Solver
from pullback._starts.graph import Graph
from pullback._typing import Float

_BATCH = 1024  # pairs solved together


def distances(
    metric: Metric,
    Z: Float[Tensor, "n d"],
    W: Float[Tensor, "m d"] | None = None,
    *,
    solver: Solver | None = None,
    init: Graph | Sequence[Graph | None] | None = None,
) -> Float[Tensor, "n m"]:
    """The distances of all pairs: the matrix ``d(Z[i], W[j])``, or of ``Z`` with itself, symmetric and zero on its diagonal.

    For small sets: the cost is that of as many geodesics, and for ``Z`` alone each pair is solved once. Long work shows a progress
    bar. A constant: it carries no gradient.

    Args:
        metric: the geometry.
        Z: codes, ``(n, d)``.
        W: other codes, ``(m, d)``.
        solver: as in `pullback.geodesic`.
        init: None for straight lines, or a fitted graph, or a list of several starts, as in `pullback.geodesic`. A curve would
            fit one pair only.

    Raises:
        RuntimeError: if a path did not converge. `pullback.geodesic` returns a status for each pair instead.
    """
    from tqdm import tqdm  # only here: the package imports without it

    _check(Z, W)
    shape = (len(Z), len(Z if W is None else W))
    i, j = torch.triu_indices(*shape, 1, device=Z.device) if W is None else _all_pairs(*shape, Z.device)
    first, second = Z.detach()[i], (Z if W is None else W).detach()[j]
    result = Z.new_zeros(shape)
    batches = torch.arange(len(i), device=Z.device).split(_BATCH) if len(i) else ()
    for rows in tqdm(batches, desc="distances", delay=2, leave=False):
        path = geodesic(metric, first[rows], second[rows], solver=solver, init=init)
        _raise_if_failed(path, i[rows], j[rows])
        result[i[rows], j[rows]] = path.length.detach()
    return result + result.mT if W is None else result


def _all_pairs(n: int, m: int, device: torch.device) -> tuple[Tensor, Tensor]:
    index = torch.arange(n * m, device=device)
    return index // m, index % m


def _raise_if_failed(path: Geodesic, i: Tensor, j: Tensor) -> None:
    failed = ~path.converged
    if failed.any():
        first = int(failed.nonzero()[0])
        raise RuntimeError(
            f"{int(failed.sum())} of {len(i)} paths failed, the first between codes {int(i[first])} and {int(j[first])}: "
            f"{path.messages[first]}. pullback.geodesic returns a status for each pair."
        )


def _check(Z: Tensor, W: Tensor | None) -> None:
    if Z.ndim != 2 or (W is not None and W.ndim != 2):
        shapes = " and ".join(str(tuple(x.shape)) for x in (Z, W) if x is not None)
        raise ValueError(
            f"Sets of codes must have shape (n, d); got {shapes}. Use pullback.distance for pairs in any shape."
        )
