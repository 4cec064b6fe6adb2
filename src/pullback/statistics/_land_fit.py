r"""Greatest likelihood for mixtures of locally adaptive normal densities.

Expectation maximisation: responsibilities of the components for the codes, then for each component one step uphill on its part
of the likelihood, with codes weighted by responsibility,

.. math:: \phi(\mu, \Gamma) = \tfrac12 \sum_n r_n \mathrm{Log}_\mu(x_n)^\top \Gamma\, \mathrm{Log}_\mu(x_n) + \log C(\mu, \Gamma).

For a given mean the best precision is found at once (`best_precision`), so the descent is in the mean alone. Its direction is first
that of Arvanitidis et al. (2016), the mean logarithm of the data less that of the density,
:math:`\sum_n r_n \mathrm{Log}_\mu(x_n) - \mathbb{E}_{\mu,\Gamma}[\mathrm{Log}_\mu(z)]`, which takes :math:`D_\mu \mathrm{Log}_\mu = -1`: a whole step is Newton's
where space is flat. Elsewhere it vanishes near the minimum, not at it. So when it helps no more, :math:`D_\mu \mathrm{Log}_\mu` is found by
differences, from the logarithms at d more points, and the steps become those of a quasi-Newton method. All are taken along
geodesics, judged by :math:`\phi` itself, and shortened where that did not fall.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from scipy.sparse.csgraph import dijkstra
from scipy.spatial import KDTree
from torch import Tensor
from tqdm import tqdm

from pullback._starts.graph import Graph
from pullback.statistics._charts import Atlas
from pullback.statistics._normalization import Cloud, Sample, best_precision, quadratic
from pullback.statistics._paths import Flat

_MIN_STEP = 0.05  # shortened more than that, a step is given up
_MAX_STEP = 2.0  # standard deviations
_DIFFERENCE = 0.05  # standard deviations: of the differences that replace derivatives in the mean
_STEEPEST = 10.0  # a logarithm that moves so much faster than the mean has hopped to another path
_MAX_SEEDS = 256  # codes among which the first means are chosen
_NUM_STARTS = 5


@dataclass(frozen=True, eq=False)
class Problem:
    """What stays the same during a fit: codes ``(n, d)``, the sample that normalises, how logarithms are found."""

    atlas: Atlas
    codes: Tensor
    sample: Sample
    reg_covar: float

    def contains(self, z: Tensor) -> bool:
        """Whether a point lies where the sample does."""
        return bool(((z >= self.sample.z.amin(0)) & (z <= self.sample.z.amax(0))).all())


@dataclass(frozen=True, eq=False)
class Component:
    """One normal density: mean, precision, log C, and the logarithms of the codes and the sample at its mean."""

    mean: Tensor
    precision: Tensor
    log_normalizer: Tensor
    v: Tensor
    cloud: Cloud
    converged: Tensor

    def log_density(self) -> Tensor:
        """Of the codes, with respect to the base measure."""
        return -0.5 * quadratic(self.v, self.precision) - self.log_normalizer

    def cost(self, r: Tensor) -> float:
        return float(-(r @ self.log_density()))


@dataclass(frozen=True, eq=False)
class Fit:
    """Components, their weights ``(K,)``, and how the fit went: the mean log-likelihood after every step."""

    components: list[Component]
    weights: Tensor
    bounds: list[float]
    converged: bool


@dataclass(frozen=True, eq=False)
class Slope:
    """The gradient of the cost at a mean, and an estimate of the inverse of its second derivative; `seen` when that was measured."""

    mean: Tensor
    gradient: Tensor
    inverse: Tensor
    seen: bool = False

    @property
    def promise(self) -> float:
        """What a whole step is expected to gain."""
        return 0.5 * float(self.gradient @ self.inverse @ self.gradient)


@dataclass(frozen=True, eq=False)
class Pace:
    """How a component moves: the share of the step that is tried next, the last exact slope (None before there is one), whether
    that is still the slope at the mean, because the last attempt failed, and whether the component is at rest."""

    step: float = 1.0
    exact: bool = False
    slope: Slope | None = None
    failed: bool = False
    rests: bool = False


def fit(problem: Problem, means: Tensor, *, tol: float, max_iter: int, verbose: bool) -> Fit:
    """Expectation maximisation from the given means, until the mean log-likelihood rises by less than `tol`."""
    r = nearest(problem.atlas, problem.codes, means)
    components = [seen_from(problem, mean, _share(r[:, k])) for k, mean in enumerate(means)]
    weights, paces = r.mean(0), [Pace(exact=isinstance(problem.atlas.metric, Flat))] * len(means)
    bounds, done = [float(_log_joint(components, weights).logsumexp(1).mean())], False
    bar = tqdm(total=max_iter, desc="LAND", disable=not verbose, leave=False)
    while not done and len(bounds) <= max_iter:
        r = _log_joint(components, weights).softmax(1)
        weights = r.mean(0)
        moved = [_improve(problem, c, _share(r[:, k]), paces[k], tol) for k, c in enumerate(components)]
        components, paces = [c for c, _ in moved], [pace for _, pace in moved]
        bounds.append(float(_log_joint(components, weights).logsumexp(1).mean()))
        done = all(pace.rests for pace in paces) and bounds[-1] - bounds[-2] < tol
        bar.update()
        bar.set_postfix(log_likelihood=f"{bounds[-1]:.4f}")
    bar.close()
    return Fit(components, weights, bounds, done)


def seen_from(problem: Problem, mean: Tensor, r: Tensor) -> Component:
    """The component at a mean with the precision that suits the codes, weighted by r, best."""
    n = len(problem.codes)
    v, converged = problem.atlas.log(mean, torch.cat([problem.codes, problem.sample.z]))
    cloud = Cloud(v[n:], problem.sample.log_weight)
    return _with_precision(Component(mean, torch.eye(len(mean)).to(mean), mean[0], v[:n], cloud, converged), problem, r)


def _with_precision(component: Component, problem: Problem, r: Tensor) -> Component:
    precision = best_precision(component.cloud, _moment(component, problem, r))
    total = component.cloud.log_normalizer(precision)[0]
    return Component(component.mean, precision, total, component.v, component.cloud, component.converged)


def _moment(component: Component, problem: Problem, r: Tensor) -> Tensor:
    moment = component.v.mT @ (r[:, None] * component.v)
    return moment + problem.reg_covar * torch.eye(len(moment)).to(moment)


def _improve(problem: Problem, component: Component, r: Tensor, pace: Pace, tol: float) -> tuple[Component, Pace]:
    """The component after one attempted step, and how to go on."""
    component = _with_precision(component, problem, r)
    slope, direction = pace.slope, _steepest(component, r)
    if pace.exact and not isinstance(problem.atlas.metric, Flat):
        slope = slope if slope is not None and pace.failed else _slope(problem, component, r, slope)
        if slope.seen and slope.promise < tol:
            return component, Pace(exact=True, slope=slope, failed=True, rests=True)
        direction = -slope.inverse @ slope.gradient
    size = float(quadratic(direction, component.precision).sqrt())
    if slope is None and pace.exact and 0.5 * size**2 < tol:
        return component, Pace(exact=True, rests=True)
    mean = problem.atlas.exp(component.mean, pace.step * min(1.0, _MAX_STEP / max(size, 1e-12)) * direction)
    moved = seen_from(problem, mean, r) if problem.contains(mean) else None
    gain = -torch.inf if moved is None else component.cost(r) - moved.cost(r)
    if moved is not None and gain > 0:
        return moved, Pace(min(1.0, 2 * pace.step), pace.exact or gain < 10 * tol, slope)
    if not pace.exact:
        return component, Pace(exact=True)
    small = pace.step / 4 < _MIN_STEP
    return component, Pace(pace.step if small else pace.step / 4, True, slope, failed=True, rests=small)


def _steepest(component: Component, r: Tensor) -> Tensor:
    return r @ component.v - component.cloud.mean(component.precision)


def _slope(problem: Problem, component: Component, r: Tensor, last: Slope | None) -> Slope:
    """The gradient by differences of the logarithms along the axes of their second moment.

    The inverse of the second derivative is that of Gauss and Newton at first, then corrected by each change of the gradient (BFGS).
    """
    precision, v, n = component.precision, torch.cat([component.v, component.cloud.v]), len(component.v)
    axes = _DIFFERENCE * torch.linalg.cholesky(_moment(component, problem, r)).mT
    scale, slopes = torch.cholesky_inverse(axes.mT), []
    for axis in axes:
        change = problem.atlas.log(component.mean + axis, torch.cat([problem.codes, problem.sample.z]))[0] - v
        hops = quadratic(change, scale).sqrt() > _STEEPEST
        slopes.append(((v @ precision) * torch.where(hops[:, None], -axis, change)).sum(-1))
    slopes = torch.linalg.solve(axes, torch.stack(slopes)).mT
    p = component.cloud.log_terms(precision).softmax(0)
    expected = p @ slopes[n:]
    gradient, centred = r @ slopes[:n] - expected, slopes[n:] - expected
    if last is not None and not torch.equal(last.mean, component.mean):
        return _corrected(last, component.mean, gradient)
    hessian = centred.mT @ (p[:, None] * centred) + 1e-3 * precision
    return Slope(component.mean, gradient, torch.linalg.inv(hessian))


def _corrected(last: Slope, mean: Tensor, gradient: Tensor) -> Slope:
    """The slope at another mean; where the cost bends down between both, longer steps are tried."""
    s, y = mean - last.mean, gradient - last.gradient
    bend = float(s @ y)
    if bend <= 1e-3 * float(s @ torch.linalg.solve(last.inverse, s)):
        return Slope(mean, gradient, 4 * last.inverse, last.seen)
    left = torch.eye(len(s)).to(s) - torch.outer(s, y) / bend
    return Slope(mean, gradient, left @ last.inverse @ left.mT + torch.outer(s, s) / bend, True)


def _share(r: Tensor) -> Tensor:
    return r / r.sum().clamp_min(torch.finfo(r.dtype).tiny)


def _log_joint(components: list[Component], weights: Tensor) -> Tensor:
    return torch.stack([c.log_density() for c in components], 1) + weights.log()


def nearest(atlas: Atlas, codes: Tensor, means: Tensor) -> Tensor:
    """Responsibilities ``(n, K)``, 0 or 1, by the nearest mean."""
    if len(means) == 1:
        return torch.ones_like(codes[:, :1])
    squares = [quadratic(atlas.log(m, codes)[0], M) for m, M in zip(means, atlas.metric.tensor(means), strict=True)]
    return torch.nn.functional.one_hot(torch.stack(squares, 1).argmin(1), len(means)).to(codes)


def first_means(atlas: Atlas, codes: Tensor, num: int, random_state: np.random.RandomState) -> Tensor:
    """Centres to start from: k-means in flat space, k-medoids under the distances of the graph elsewhere."""
    if atlas.graph is None:
        from sklearn.cluster import KMeans

        found = KMeans(num, random_state=random_state).fit(codes.cpu().double().numpy())
        return torch.from_numpy(found.cluster_centers_).to(codes)
    seeds = codes[torch.from_numpy(random_state.permutation(len(codes))[:_MAX_SEEDS])]
    distances = _graph_distances(atlas.graph, seeds)
    found = [_medoids(distances, num, random_state) for _ in range(_NUM_STARTS)]
    return seeds[min(found, key=lambda m: float((distances[m].min(0) ** 2).sum()))]


def _graph_distances(graph: Graph, codes: Tensor) -> np.ndarray:
    """Distances in the graph between the nodes nearest to the codes."""
    linked = np.unique(graph.weights.nonzero()[0])
    tree = KDTree(graph.nodes[linked].cpu().double().numpy())
    nodes = linked[tree.query(codes.cpu().double().numpy())[1]]
    distances = dijkstra(graph.weights, directed=False, indices=nodes)[:, nodes]
    return np.nan_to_num(distances, posinf=2 * distances[np.isfinite(distances)].max())


def _medoids(distances: np.ndarray, num: int, random_state: np.random.RandomState) -> np.ndarray:
    """Alternating k-medoids on squared distances, from seeds far apart."""
    squares = distances**2
    medoids = [random_state.randint(len(squares))]
    while len(medoids) < num:
        gap = squares[medoids].min(0)
        odds = gap / gap.sum() if gap.sum() > 0 else np.full(len(gap), 1 / len(gap))
        medoids.append(random_state.choice(len(gap), p=odds))
    best = np.array(medoids)
    for _ in range(50):
        label = squares[best].argmin(0)
        label[best] = np.arange(num)
        members = [np.flatnonzero(label == k) for k in range(num)]
        new = np.array([m[squares[np.ix_(m, m)].sum(0).argmin()] for m in members])
        if (new == best).all():
            break
        best = new
    return best
