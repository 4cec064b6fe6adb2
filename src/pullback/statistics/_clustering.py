r"""Clusters under a metric: k-means with Fréchet means, and k-medoids.

Both assign codes to the nearest center by the length of the shortest path, so that a cluster follows the data around a
bend. k-means moves all centers together with the paths to their codes (`_stars.py`), and solves other paths only where
neither the triangle inequality (Elkan 2003) nor the straight line through the embedding tells that a center cannot have
become the nearest. k-medoids needs all pairs, once.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any, Self

import torch
from sklearn.base import ClassNamePrefixFeaturesOutMixin, ClusterMixin, TransformerMixin
from sklearn.exceptions import NotFittedError
from torch import Tensor

from pullback._numerics.random import RandomState, as_generator
from pullback._progress import progress
from pullback.statistics._estimator import Array, Estimator, like
from pullback.statistics._means import Balance
from pullback.statistics._paths import DEFAULT_RTOL, Paths
from pullback.statistics._stars import Star, star

# Newton steps of the centers between two assignments. A choice: fewer would assign codes to centers still on the move.
_STEPS_PER_ROUND = 2
# Accuracy of the paths that tell which center is nearest over that of the centers. At 1e-2 instead of 1e-3 a path takes
# half the time under a rectified decoder and two thirds under a smooth one, and its energy is off by 0.14 and 0.04 %
# (30 codes of a convolutional decoder with d = 2 and of a VAE with d = 16).
_COARSER = 10.0
# Relative decrease of the inertia in a round without changes after which there is nothing left to gain: Newton's steps
# square what is left, and kinks of a decoder allow no more.
_STALE = 1e-4


@dataclass(eq=False, repr=False)
class GeodesicKMeans(ClassNamePrefixFeaturesOutMixin, TransformerMixin, ClusterMixin, Estimator):
    r"""k-means with the distance of a metric: minimizes :math:`\sum_i \min_j d^2(z_i, \mu_j)` over the centers.

    Lloyd's iteration: assign every code to its nearest center, move every center toward the Fréchet mean of its
    codes, until no code changes its cluster and the centers rest. In flat space it is `sklearn.cluster.KMeans`.

    Args:
        metric: the geometry; None for flat space.
        n_clusters: how many.
        init_centers: ``"k-means++"`` (Arthur and Vassilvitskii 2007) or initial centers ``(n_clusters, d)``.
        n_init: runs from different initial centers, of which the best is kept.
        max_iter: rounds of one run.
        rtol: relative accuracy of the centers, as in `pullback.statistics.frechet_mean`.
        init, solver: as in `pullback.geodesic`.
        random_state: of k-means++.

    Attributes:
        cluster_centers_, labels_: the centers ``(n_clusters, d)``, and the cluster of each code, ``(n,)``.
        inertia_: the sum above.
        n_iter_, converged_: rounds of the best run, and whether it came to rest within `max_iter` of them.

    >>> import torch, pullback as pb
    >>> z = torch.tensor([[0.0], [0.1], [5.0], [5.1]], dtype=torch.float64)
    >>> pb.statistics.GeodesicKMeans(n_clusters=2, random_state=0).fit(z).cluster_centers_.sort(0).values
    tensor([[0.0500],
            [5.0500]], dtype=torch.float64)
    """

    n_clusters: int = 8
    _: KW_ONLY
    init_centers: str | Array = "k-means++"
    n_init: int = 1
    max_iter: int = 100
    rtol: float = DEFAULT_RTOL
    random_state: RandomState = None

    @progress("k-means")
    def fit(self, X: Any, y: Any = None) -> Self:
        """Finds the clusters of codes ``(n, d)``."""
        codes = self._codes(X, reset=True)
        _check_count(self.n_clusters, codes)
        source = as_generator(self.random_state, codes.device)
        runs = [self._run(codes, source) for _ in range(self.n_init if isinstance(self.init_centers, str) else 1)]
        self.inertia_, centers, labels, self.n_iter_, self.converged_ = min(runs, key=lambda run: run[0])
        self.cluster_centers_, self.labels_ = like(centers, X), like(labels, X)
        return self

    def predict(self, X: Any) -> Any:
        """The nearest center of each code, ``(n,)``."""
        return _nearest(self, X)

    def transform(self, X: Any) -> Any:
        """The distances of codes to all centers, ``(n, n_clusters)``."""
        codes = self._codes(X)
        return like(self._paths().matrix(codes, torch.as_tensor(self.cluster_centers_).to(codes)), X)

    @property
    def _n_features_out(self) -> int:
        return len(self.cluster_centers_)

    def _first(self, codes: Tensor, source: torch.Generator) -> tuple[Tensor, Tensor]:
        """Initial centers, and lower bounds of all distances to them."""
        if isinstance(self.init_centers, str):
            if self.init_centers != "k-means++":
                raise ValueError(f'init_centers must be "k-means++" or an array of centers; got {self.init_centers!r}.')
            return plus_plus(self._paths(), codes, self.n_clusters, source)
        centers, num, d = torch.as_tensor(self.init_centers).to(codes), self.n_clusters, codes.shape[1]
        if centers.shape != (num, d):
            raise ValueError(f"init_centers must be {num} centers of {d} dimensions; got {tuple(centers.shape)}.")
        return centers, self._paths().lower_bounds(codes, centers)

    def _run(self, codes: Tensor, source: torch.Generator) -> tuple[float, Tensor, Tensor, int, bool]:
        """Lloyd's iteration, with the paths to the centers carried along: inertia, centers, labels, rounds, success."""
        # paths are solved coarsely, and then again with their centers
        paths = self._paths(_COARSER * self.rtol)
        centers, lower = self._first(codes, source)
        rows, labels = torch.arange(len(codes), device=codes.device), lower.argmin(1)
        rays = star(paths, centers[labels], codes)
        lower[rows, labels] = rays.energy().clamp_min(0).sqrt().nan_to_num(torch.inf)
        labels, rays, lower, _ = _reassign(paths, codes, centers, lower, labels, rays)
        inertia, kinked = torch.inf, None
        for num_rounds in range(1, self.max_iter + 1):
            labels, centers, rays = _fill(paths, codes, labels, centers, rays, lower)
            found = Balance(paths, rays, labels, torch.ones_like(codes[:, 0]), centers, kinked)
            kinked = found.kinked
            found.descend(self.rtol, 2 if found.mostly_kinked else 1 + _STEPS_PER_ROUND)
            own = found.expansion.energy.clamp_min(0).sqrt().nan_to_num(torch.inf)
            # no distance has fallen by more than its center has moved; that to a code's own center is known
            lower = (lower - paths.distances(centers, found.centers)).clamp_min(0)
            centers = found.centers
            lower = torch.maximum(lower, torch.where(lower < own[:, None], paths.lower_bounds(codes, centers), 0))
            lower[rows, labels] = own
            labels, rays, lower, changed = _reassign(paths, codes, centers, lower, labels, found.star)
            last, inertia = inertia, own.square().sum().item()
            # across kinks distances are known to `rtol`, and so is what a round has gained
            stale = last - inertia <= (self.rtol if found.mostly_kinked else _STALE) * inertia
            rests = stale or not found.moving(self.rtol).any()
            if (not changed and rests) or (found.mostly_kinked and stale):
                return inertia, centers, labels, num_rounds, True
        return lower[rows, labels].square().sum().item(), centers, labels, self.max_iter, False


@dataclass(eq=False, repr=False)
class GeodesicKMedoids(ClusterMixin, Estimator):
    r"""k-medoids with the distance of a metric: the k codes with the least :math:`\sum_i \min_j d(z_i, m_j)`.

    The centers are codes, so only distances are needed, and outlying codes hardly matter, as they are not squared.
    Starts greedily and swaps a medoid for another code until no single swap helps (PAM: Kaufman and Rousseeuw 1990; all
    swaps at once as in Schubert and Rousseeuw 2021). All pairs of codes are solved: for a few hundred codes.

    Args:
        metric: the geometry; None for flat space.
        n_clusters: how many.
        max_iter: swaps at most.
        init, solver: as in `pullback.geodesic`.

    Attributes:
        cluster_centers_, medoid_indices_: the centers ``(n_clusters, d)``, None if only distances were given, and which
            codes they are.
        labels_, inertia_: the cluster of each code, ``(n,)``, and the sum above.
        n_iter_, converged_: the number of swaps, and whether no further one helps.

    >>> import torch, pullback as pb
    >>> D = torch.tensor([[0.0, 1.0, 9.0], [1.0, 0.0, 9.0], [9.0, 9.0, 0.0]])
    >>> pb.statistics.GeodesicKMedoids(n_clusters=2).fit(None, distances=D).labels_
    tensor([0, 0, 1])
    """

    n_clusters: int = 8
    _: KW_ONLY
    max_iter: int = 300

    @progress("k-medoids")
    def fit(self, X: Any, y: Any = None, *, distances: Array | None = None) -> Self:
        """Finds the clusters of codes ``(n, d)``. Distances ``(n, n)`` alone will do: ``fit(None, distances=D)``."""
        kind = distances if X is None else X
        if X is None and distances is not None:
            codes, D = None, torch.as_tensor(distances)
        else:
            codes = self._codes(X, reset=True)
            D = self._paths().matrix(codes) if distances is None else torch.as_tensor(distances).to(codes)
        num = len(D if codes is None else codes)
        if D.shape != (num, num):
            raise ValueError(f"distances must have shape ({num}, {num}), one row per code; got {tuple(D.shape)}.")
        _check_count(self.n_clusters, D)
        medoids, self.n_iter_ = swap_medoids(D, greedy_medoids(D, self.n_clusters), self.max_iter)
        self.medoid_indices_, self.labels_ = like(medoids, kind), like(D[:, medoids].argmin(1), kind)
        self.cluster_centers_ = None if codes is None else like(codes[medoids], X)
        self.inertia_, self.converged_ = D[:, medoids].amin(1).sum().item(), self.n_iter_ < self.max_iter
        return self

    def predict(self, X: Any) -> Any:
        """The nearest medoid of each code, ``(n,)``."""
        if hasattr(self, "inertia_") and self.cluster_centers_ is None:
            raise NotFittedError("Only distances were given to fit, so medoids have no codes: fit(codes, distances=D).")
        return _nearest(self, X)


def plus_plus(paths: Paths, codes: Tensor, num: int, source: torch.Generator) -> tuple[Tensor, Tensor]:
    """k-means++ by lower bounds of distances: the centers, and these bounds ``(n, num)``."""
    chosen = torch.randint(len(codes), (1,), generator=source, device=codes.device)
    bounds: list[Tensor] = []
    while True:
        center = codes[chosen[-1:]]
        bound = paths.lower_bounds(codes, center)[:, 0]
        # only metrics without an embedding have their paths solved
        bounds.append(bound if bound.any() else paths.distances(codes, center.expand_as(codes)))
        if len(bounds) == num:
            return codes[chosen], torch.stack(bounds, 1)
        odds = torch.stack(bounds).amin(0).nan_to_num(0.0, 0.0, 0.0).square()
        odds = odds if odds.sum() > 0 else torch.ones_like(odds)
        chosen = torch.cat([chosen, torch.multinomial(odds, 1, generator=source)])


def _nearest(model: GeodesicKMeans | GeodesicKMedoids, X: Any) -> Any:
    codes, paths = model._codes(X), model._paths()
    centers = torch.as_tensor(model.cluster_centers_).to(codes)
    lower = paths.lower_bounds(codes, centers)
    labels = lower.argmin(1, keepdim=True)
    lower.scatter_(1, labels, paths.distances(codes, centers[labels[:, 0]])[:, None])
    return like(_assign(paths, codes, centers, lower, labels[:, 0])[0], X)


def _assign(paths: Paths, codes: Tensor, centers: Tensor, lower: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The nearest centers, from lower bounds that are distances at the labels, and bounds that are where needed."""
    rows, lower = torch.arange(len(codes), device=codes.device), lower.clone()
    i, j = (lower < lower[rows, labels][:, None]).nonzero(as_tuple=True)
    lower[i, j] = paths.distances(codes[i], centers[j])
    best = lower.argmin(1)
    # a tie is no reason to change
    return torch.where(lower[rows, best] < lower[rows, labels], best, labels), lower


def _reassign(
    paths: Paths, codes: Tensor, centers: Tensor, lower: Tensor, labels: Tensor, rays: Star
) -> tuple[Tensor, Star, Tensor, int]:
    """The nearest centers, the paths from them, lower bounds, and how many codes changed their cluster."""
    new, lower = _assign(paths, codes, centers, lower, labels)
    changed = (new != labels).nonzero()[:, 0]
    if len(changed):
        rays = rays.replaced(changed, star(paths, centers[new[changed]], codes[changed]))
    return new, rays, lower, len(changed)


def _fill(
    paths: Paths, codes: Tensor, labels: Tensor, centers: Tensor, rays: Star, lower: Tensor
) -> tuple[Tensor, Tensor, Star]:
    """Gives an empty cluster the code that is farthest from its center."""
    own = lower.gather(1, labels[:, None])[:, 0]
    for j in sorted(set(range(len(centers))) - set(labels.tolist())):
        worst = own.argmax()[None]
        labels, centers = labels.clone(), centers.clone()
        labels[worst], centers[j], own[worst], lower[worst, j] = j, codes[worst[0]], 0.0, 0.0
        rays = rays.replaced(worst, star(paths, codes[worst], codes[worst]))
    return labels, centers, rays


def greedy_medoids(D: Tensor, num: int) -> Tensor:
    """Medoids one by one, each the code that lowers the sum of distances ``D (n, n)`` most."""
    chosen, nearest = [], torch.full_like(D[0], torch.inf)
    for _ in range(num):
        totals = torch.minimum(D, nearest[:, None]).sum(0)
        totals[chosen] = torch.inf
        chosen.append(int(totals.argmin()))
        nearest = torch.minimum(nearest, D[:, chosen[-1]])
    return torch.tensor(chosen, device=D.device)


def swap_medoids(D: Tensor, medoids: Tensor, max_iter: int) -> tuple[Tensor, int]:
    """Swaps the pair of medoid and code that lowers the sum most, until none does; the number of swaps."""
    medoids = medoids.clone()
    for num_swaps in range(max_iter):
        to_medoids = torch.cat([D[:, medoids], torch.full_like(D[:, :1], torch.inf)], 1)
        (nearest, second), label = to_medoids.sort(1).values[:, :2].unbind(1), to_medoids.argmin(1)
        # a code moves to the new medoid, or has lost its own and takes the next best
        gain = (D - nearest[:, None]).clamp_max(0)
        loss = torch.minimum(D, second[:, None]) - nearest[:, None] - gain
        # how much the sum changes, (k, n), if a code takes the place of a medoid
        change = gain.sum(0) + torch.nn.functional.one_hot(label, len(medoids)).to(D).mT @ loss
        best = int(change.argmin())
        if change.flatten()[best] >= -1e-12 * nearest.sum():
            return medoids, num_swaps
        medoids[best // len(D)] = best % len(D)
    return medoids, max_iter


def _check_count(n_clusters: int, codes: Tensor) -> None:
    if not 1 <= n_clusters <= len(codes):
        raise ValueError(
            f"n_samples={len(codes)} should be >= n_clusters={n_clusters}, and that at least 1: ask for fewer "
            "clusters, or encode more data."
        )
