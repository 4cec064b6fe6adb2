r"""Clusters under a metric: k-means with Fréchet means, and k-medoids.

Both assign codes to the nearest centre by the length of the shortest path, so that a cluster follows the data around a bend. In
k-means the centres are Fréchet means, in k-medoids they are codes. The first solves paths between codes and centres, again and
again; the triangle inequality tells most of the time that a centre cannot have become the nearest (Elkan 2003). The second
solves all pairs once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from sklearn.base import ClusterMixin
from torch import Tensor

from pullback._metrics.base import Metric
from pullback._solvers.base import Solver
from pullback._starts.graph import Graph
from pullback.statistics._estimator import Array, Estimator, generator, like
from pullback.statistics._frechet import frechet_mean
from pullback.statistics._paths import all_lengths, lengths, solver_for

RandomState = int | np.random.RandomState | None


class GeodesicKMeans(ClusterMixin, Estimator):
    r"""k-means with the distance of a metric: minimises :math:`\sum_i \min_j d^2(z_i, \mu_j)` over centres :math:`\mu_j`.

    Lloyd's iteration: assign every code to its nearest centre, move every centre to the Fréchet mean of its codes, until no code
    changes its cluster. In flat space it is `sklearn.cluster.KMeans`.

    **Arguments:**

    - `metric`: the geometry; None for flat space.
    - `n_clusters`: how many.
    - `init`: ``"k-means++"`` (Arthur and Vassilvitskii 2007) or initial centres ``(n_clusters, d)``.
    - `n_init`: runs from different initial centres, of which the best is kept.
    - `max_iter`: rounds of one run.
    - `tol`: relative accuracy of the centres, as in `pullback.statistics.frechet_mean`.
    - `graph`: where the search for shortest paths starts, as `init` in `pullback.geodesic`.
    - `solver`: of shortest paths; by default one as accurate as `tol`.
    - `random_state`: of k-means++.

    **Attributes:** `cluster_centers_` ``(n_clusters, d)``, `labels_` ``(n,)``, `inertia_` (the sum above), `n_iter_`.
    """

    def __init__(
        self,
        metric: Metric | None = None,
        n_clusters: int = 8,
        *,
        init: str | Array = "k-means++",
        n_init: int = 1,
        max_iter: int = 100,
        tol: float = 1e-3,
        graph: Graph | None = None,
        solver: Solver | None = None,
        random_state: RandomState = None,
    ):
        self.metric = metric
        self.n_clusters = n_clusters
        self.init = init
        self.n_init = n_init
        self.max_iter = max_iter
        self.tol = tol
        self.graph = graph
        self.solver = solver
        self.random_state = random_state

    def fit(self, X: Any, y: Any = None) -> Self:
        """Finds the clusters of codes ``(n, d)``."""
        codes = self._codes(X, reset=True)
        _check_count(self.n_clusters, codes)
        source = generator(self.random_state, codes)
        fixed = not isinstance(self.init, str)
        runs = [self._run(codes, self._first(codes, source)) for _ in range(1 if fixed else self.n_init)]
        best = min(runs, key=lambda run: run.inertia)
        self.cluster_centers_ = like(best.centers, X)
        self.labels_ = like(best.labels, X)
        self.inertia_ = best.inertia
        self.n_iter_ = best.num_rounds
        return self

    def predict(self, X: Any) -> Any:
        """The nearest centre of each code, ``(n,)``."""
        codes = self._codes(X)
        return like(self._distances(codes, torch.as_tensor(self.cluster_centers_).to(codes)).argmin(1), X)

    def _first(self, codes: Tensor, source: torch.Generator) -> Tensor:
        if not isinstance(self.init, str):
            centers = torch.as_tensor(self.init).to(codes)
            if centers.shape != (self.n_clusters, codes.shape[1]):
                raise ValueError(
                    f"init must be {self.n_clusters} centres of {codes.shape[1]} dimensions; got {tuple(centers.shape)}."
                )
            return centers
        if self.init != "k-means++":
            raise ValueError(f'init must be "k-means++" or an array of centres; got {self.init!r}.')
        return plus_plus(codes, self.n_clusters, source, self._distances)

    def _run(self, codes: Tensor, centers: Tensor) -> _Run:
        lower = self._distances(codes, centers)
        labels, num_rounds = lower.argmin(1), 0
        while num_rounds < self.max_iter:
            num_rounds += 1
            moved, own = self._means(codes, centers, labels)
            # no distance has fallen by more than its centre has moved; that to a code's own centre is known
            lower = (lower - self._lengths(centers, moved)).clamp_min(0)
            lower[torch.arange(len(codes)), labels] = own
            i, j = (lower < own[:, None]).nonzero(as_tuple=True)
            lower[i, j] = self._lengths(codes[i], moved[j])
            before, centers, labels = labels, moved, lower.argmin(1)
            if bool((labels == before).all()):
                break
        return _Run(centers, labels, lower.amin(1).square().sum().item(), num_rounds)

    def _means(self, codes: Tensor, centers: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """The means of the clusters, and the distance of each code to that of its own."""
        moved, own = centers.clone(), torch.full_like(codes[:, 0], torch.inf)
        for j in labels.unique().tolist():
            members = labels == j
            found = frechet_mean(
                self._metric(),
                codes[members],
                start=centers[j],
                solver=self.solver,
                init=self.graph,
                rtol=self.tol,
            )
            moved[j], own[members] = found.mean, found.distances.nan_to_num(torch.inf)
        for j in sorted(
            set(range(self.n_clusters)) - set(labels.tolist())
        ):  # an empty one goes where it is needed most
            worst = own.argmax()
            moved[j], own[worst], labels[worst] = codes[worst], 0.0, j
        return moved, own

    def _lengths(self, a: Tensor, b: Tensor) -> Tensor:
        return lengths(self._metric(), a, b, solver=self.solver or solver_for(self.tol), init=self.graph)

    def _distances(self, codes: Tensor, centers: Tensor) -> Tensor:
        return all_lengths(self._metric(), codes, centers, solver=self.solver or solver_for(self.tol), init=self.graph)


@dataclass(frozen=True)
class _Run:
    """What one run of Lloyd's iteration found."""

    centers: Tensor
    labels: Tensor
    inertia: float
    num_rounds: int


class GeodesicKMedoids(ClusterMixin, Estimator):
    r"""k-medoids with the distance of a metric: the k codes with the least :math:`\sum_i \min_j d(z_i, m_j)`.

    The centres are codes, so nothing but distances is needed, and a few outlying codes hardly matter, as distances are not
    squared. Starts greedily and swaps a medoid for another code as long as that helps (PAM: Kaufman and Rousseeuw 1990; all
    swaps at once as in Schubert and Rousseeuw 2021), so no single swap improves the result. All pairs of codes are solved: for
    a few hundred codes.

    **Arguments:**

    - `metric`: the geometry; None for flat space.
    - `n_clusters`: how many.
    - `max_iter`: swaps at most.
    - `graph`: where the search for shortest paths starts, as `init` in `pullback.geodesic`.
    - `solver`: of shortest paths.

    **Attributes:** `cluster_centers_` ``(n_clusters, d)``, `medoid_indices_` (which codes they are), `labels_` ``(n,)``, `inertia_` (the
    sum above), `n_iter_`.
    """

    def __init__(
        self,
        metric: Metric | None = None,
        n_clusters: int = 8,
        *,
        max_iter: int = 300,
        graph: Graph | None = None,
        solver: Solver | None = None,
    ):
        self.metric = metric
        self.n_clusters = n_clusters
        self.max_iter = max_iter
        self.graph = graph
        self.solver = solver

    def fit(self, X: Any, y: Any = None, *, distances: Array | None = None) -> Self:
        """Finds the clusters of codes ``(n, d)``. Their matrix of distances ``(n, n)``, if known, need not be computed again."""
        codes = self._codes(X, reset=True)
        _check_count(self.n_clusters, codes)
        D = self._matrix(codes) if distances is None else _square(distances, codes)
        medoids, self.n_iter_ = _swaps(D, _greedy(D, self.n_clusters), self.max_iter)
        self.medoid_indices_ = like(medoids, X)
        self.cluster_centers_ = like(codes[medoids], X)
        self.labels_ = like(D[:, medoids].argmin(1), X)
        self.inertia_ = D[:, medoids].amin(1).sum().item()
        return self

    def predict(self, X: Any) -> Any:
        """The nearest medoid of each code, ``(n,)``."""
        codes = self._codes(X)
        medoids = torch.as_tensor(self.cluster_centers_).to(codes)
        return like(all_lengths(self._metric(), codes, medoids, solver=self.solver, init=self.graph).argmin(1), X)

    def _matrix(self, codes: Tensor) -> Tensor:
        """All distances, each pair solved once."""
        i, j = torch.triu_indices(len(codes), len(codes), 1, device=codes.device)
        D = codes.new_zeros(len(codes), len(codes))
        D[i, j] = lengths(self._metric(), codes[i], codes[j], solver=self.solver, init=self.graph)
        return D + D.mT


def plus_plus(
    codes: Tensor, num: int, source: torch.Generator, distances: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """k-means++: each further centre is a code drawn with probability proportional to its squared distance to the nearest."""
    chosen = torch.randint(len(codes), (1,), generator=source, device=codes.device)
    nearest = distances(codes, codes[chosen])[:, 0]
    while len(chosen) < num:
        odds = nearest.nan_to_num(0.0, 0.0).square()
        odds = odds if odds.sum() > 0 else torch.ones_like(odds)
        chosen = torch.cat([chosen, torch.multinomial(odds, 1, generator=source)])
        nearest = torch.minimum(nearest, distances(codes, codes[chosen[-1:]])[:, 0])
    return codes[chosen]


def _greedy(D: Tensor, num: int) -> Tensor:
    """Medoids one by one, each the code that lowers the sum of distances most."""
    chosen, nearest = [], torch.full_like(D[0], torch.inf)
    for _ in range(num):
        totals = torch.minimum(D, nearest[:, None]).sum(0)
        totals[chosen] = torch.inf
        chosen.append(int(totals.argmin()))
        nearest = torch.minimum(nearest, D[:, chosen[-1]])
    return torch.tensor(chosen, device=D.device)


def _swaps(D: Tensor, medoids: Tensor, max_iter: int) -> tuple[Tensor, int]:
    """Swaps the pair of medoid and code that lowers the sum most, until none does; the number of swaps."""
    medoids, num_swaps = medoids.clone(), 0
    while num_swaps < max_iter:
        change = _changes(D, medoids)
        best = int(change.argmin())
        if change.flatten()[best] >= -1e-12 * D[:, medoids].amin(1).sum():
            break
        medoids[best // len(D)] = best % len(D)
        num_swaps += 1
    return medoids, num_swaps


def _changes(D: Tensor, medoids: Tensor) -> Tensor:
    """How much the sum changes, ``(k, n)``, if a code takes the place of a medoid."""
    to_medoids = torch.cat([D[:, medoids], torch.full_like(D[:, :1], torch.inf)], 1)
    (nearest, second), label = to_medoids.sort(1).values[:, :2].unbind(1), to_medoids.argmin(1)
    gain = (D - nearest[:, None]).clamp_max(0)  # a code moves to the new medoid
    loss = torch.minimum(D, second[:, None]) - nearest[:, None] - gain  # or has lost its own, and takes the next best
    return gain.sum(0) + torch.nn.functional.one_hot(label, len(medoids)).to(D).mT @ loss


def _check_count(n_clusters: int, codes: Tensor) -> None:
    if not 1 <= n_clusters <= len(codes):
        raise ValueError(
            f"n_samples={len(codes)} should be >= n_clusters={n_clusters}, and that at least 1: ask for fewer clusters, or encode more data."
        )


def _square(distances: Array, codes: Tensor) -> Tensor:
    D = torch.as_tensor(distances).to(codes)
    if D.shape != (len(codes), len(codes)):
        raise ValueError(
            f"distances must have shape ({len(codes)}, {len(codes)}), one row a code; got {tuple(D.shape)}."
        )
    return D
