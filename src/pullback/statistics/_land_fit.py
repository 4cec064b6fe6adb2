r"""Greatest likelihood for mixtures of locally adaptive normal densities.

Expectation maximization: responsibilities of the components for the codes (and of a given density that may stand beside
them), then for each component one step uphill on its part of the likelihood, with codes weighted by responsibility,

.. math:: \phi(\mu, \Gamma) = \tfrac12 \sum_n r_n \mathrm{Log}_\mu(x_n)^\top \Gamma\, \mathrm{Log}_\mu(x_n) + \log
          C(\mu, \Gamma).

For a given mean the best precision is found at once (`best_precision`), so the descent is in the mean alone. Its
direction is first that of Arvanitidis et al. (2016), the mean logarithm of the data less that of the density,
:math:`\sum_n r_n \mathrm{Log}_\mu(x_n) - \mathbb{E}_{\mu,\Gamma}[\mathrm{Log}_\mu(z)]`, which takes
:math:`D_\mu \mathrm{Log}_\mu = -1`: a whole step is Newton's where space is flat. Elsewhere it vanishes near the
minimum, not at it. So when it helps no more, :math:`D_\mu \mathrm{Log}_\mu` is computed, from the Hessians of the
squared distances or by differences, and the steps become those of a quasi-Newton method. All are judged by
:math:`\phi` itself, and shortened where that did not fall.

The integral C is a sum over points around the component. When the component has become so narrow, or has moved so far,
that few of them count, new ones are drawn where it is now (adaptive importance sampling; Cappé et al. 2004).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pullback._metrics.connection import filtered_inverse
from pullback._starts.graph import Graph
from pullback._starts.lattice import Lattice
from pullback.statistics._clustering import GeodesicKMeans, greedy_medoids, swap_medoids
from pullback.statistics._normalization import Cloud, Sample, best_precision, gaussian_of, quadratic
from pullback.statistics._paths import Paths
from pullback.statistics._stars import LogStar, Star, star

# A step that was shortened more than that is given up.
_MIN_STEP = 0.05
# Longest step, in standard deviations.
_MAX_STEP = 2.0
# Of the differences that replace derivatives in the mean, in standard deviations.
_DIFFERENCE = 0.05
# A logarithm that moves so much faster than the mean has hopped to another path.
_STEEPEST = 10.0
# Codes among which the first means are chosen: 2,016 pairs in a graph take about a second.
_MAX_SEEDS = 64
# Share of the points of a sample that must count (effective sample size), points around which a new one is drawn, and
# rounds of expectation maximization between two steps of the means, which cost next to nothing. Choices.
_TOO_FEW, _NUM_DRAWN, _MAX_SETTLING = 0.15, 512, 20
# Least weight of the background, so that it has a logarithm.
_LEAST = 1e-12
# Promised decrease of the energy, relative, at which paths that follow a mean count as solved; and steps for that.
_SETTLED, _MAX_RELAXATIONS = 1e-4, 3


@dataclass(frozen=True, eq=False)
class View:
    """Points as seen from a mean: tangents ``(m, d)``, which paths converged ``(m,)``, and the paths themselves."""

    v: Tensor
    converged: Tensor
    star: Star | None = None

    @classmethod
    def of(cls, paths: Paths, mean: Tensor, points: Tensor, last: View | None = None) -> View:
        """The logarithms of points at a mean; paths of the `last` view, if given, follow the mean."""
        if paths.is_flat:
            return cls(points - mean, torch.ones_like(points[:, 0], dtype=torch.bool))
        center = paths.cast(mean)
        # a lattice sees all valleys, so there paths are solved anew
        if last is None or last.star is None or isinstance(last.star, LogStar) or isinstance(paths.init, Lattice):
            rays = star(paths, center.expand(len(points), -1), paths.cast(points), rough=True)
        else:
            rays = last.star.moved(center - last.star.centers, torch.ones_like(points[:, 0]).to(center))
        found = rays.expand(exact=False)
        for _ in range(_MAX_RELAXATIONS):
            rows = found.inner > _SETTLED * found.energy
            if not rows.any():
                break
            rays = rays.moved(torch.zeros_like(rays.centers), rows.to(found.energy))
            found = rays.expand(exact=False)
        M = paths.tensor(mean)
        line = points - mean
        gap = -0.5 * found.slope.to(mean) - line @ M
        return cls(line + gap @ filtered_inverse(M), rays.converged, rays)

    def replaced(self, first: int, new: View) -> View:
        """The view with other points from the number `first` on."""
        rows = torch.arange(first, len(self.v), device=self.v.device)
        star = None if self.star is None or new.star is None else self.star.replaced(rows, new.star)
        v, converged = torch.cat([self.v[:first], new.v]), torch.cat([self.converged[:first], new.converged])
        return View(v, converged, star)

    def derivative(self, paths: Paths, mean: Tensor) -> Tensor | None:
        r"""The derivatives ``(m, d, d)`` of the tangents in the mean, by the Hessians H of half the squared distances.

        With the momenta :math:`p = M v`, :math:`D_\mu p = -H`, so :math:`D_\mu v = -M^{-1}(H + (D_\mu M) v)`.
        """
        if self.star is None or isinstance(self.star, LogStar):
            return None
        hessian = 0.5 * self.star.expand(exact=True).hessian.to(mean)
        M, width = paths.tensor(mean), 1e-3 * (1 + mean.abs().amax())
        shifts = width * torch.eye(len(mean)).to(mean)
        slopes = (paths.tensor(mean + shifts) - paths.tensor(mean - shifts)) / (2 * width)
        return -filtered_inverse(M) @ (hessian + torch.einsum("kij,nj->nik", slopes, self.v))


@dataclass(frozen=True, eq=False)
class Problem:
    """What stays the same during a fit.

    Attributes:
        paths: how paths are found.
        codes: ``(n, d)``.
        sample: that normalizes at first.
        reg_covar: added to second moments.
        log_background: the log-density ``(n,)`` of what stands beside the components, with respect to the base measure.
        redraw: a sample around given points; None if the first is to stay.
    """

    paths: Paths
    codes: Tensor
    sample: Sample
    reg_covar: float
    log_background: Tensor | None = None
    redraw: Callable[[Tensor], Sample] | None = None

    def contains(self, z: Tensor) -> bool:
        """Whether a point lies where the first sample does."""
        return bool(((z >= self.sample.z.amin(0)) & (z <= self.sample.z.amax(0))).all())


@dataclass(frozen=True, eq=False)
class Component:
    """One normal density: mean, precision, log C, the sample it is normalized with, and the logarithms of the codes and
    the sample at its mean."""

    mean: Tensor
    precision: Tensor
    log_normalizer: Tensor
    sample: Sample
    v: Tensor
    cloud: Cloud
    view: View

    @property
    def mass(self) -> Tensor:
        """The share of each point of the sample in C."""
        return self.cloud.log_terms(self.precision).softmax(0)

    @property
    def count(self) -> float:
        """For how large a share of the points the sample counts."""
        return float(1 / self.mass.square().sum()) / len(self.sample.z)

    def log_density(self) -> Tensor:
        """Of the codes, with respect to the base measure."""
        return -0.5 * quadratic(self.v, self.precision) - self.log_normalizer

    def cost(self, r: Tensor) -> float:
        return float(-(r @ self.log_density()))


@dataclass(frozen=True, eq=False)
class Fit:
    """Components, their weights ``(K,)``, which lack that of the background of one, and how the fit went: the mean
    log-likelihood after every step."""

    components: list[Component]
    weights: Tensor
    bounds: list[float]
    converged: bool


@dataclass(frozen=True, eq=False)
class Slope:
    """The gradient of the cost at a mean, and an estimate of the inverse of its second derivative; `seen` when that
    was measured.
    """

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
    """How a component moves: the share of the step that is tried next, the last exact slope (None before there is
    one), whether that is still the slope at the mean, because the last attempt failed, and whether the component is at
    rest."""

    step: float = 1.0
    exact: bool = False
    slope: Slope | None = None
    failed: bool = False
    rests: bool = False


def fit(problem: Problem, means: Tensor, *, tol: float, max_iter: int, r: Tensor | None = None) -> Fit:
    """Expectation maximization from the given means, until the mean log-likelihood rises by less than `tol`.

    It starts from responsibilities r, ``(n, K)``, by default those of the nearest mean.
    """
    r = nearest(problem.paths, problem.codes, means) if r is None else r
    components = [component_at(problem, mean, _share(r[:, k])) for k, mean in enumerate(means)]
    weights, paces = r.mean(0), [Pace(exact=problem.paths.is_flat)] * len(means)
    bounds, done = [log_joint(problem, components, weights).logsumexp(1).mean().item()], False
    while not done and len(bounds) <= max_iter:
        components, weights, r = _settle(problem, components, weights, tol)
        moved = [_improve(problem, c, _share(r[:, k]), paces[k], tol) for k, c in enumerate(components)]
        components, paces = [c for c, _ in moved], [pace for _, pace in moved]
        bounds.append(log_joint(problem, components, weights).logsumexp(1).mean().item())
        done = all(pace.rests for pace in paces) and bounds[-1] - bounds[-2] < tol
    return Fit(components, weights, bounds, done)


def _settle(
    problem: Problem, components: list[Component], weights: Tensor, tol: float
) -> tuple[list[Component], Tensor, Tensor]:
    """Weights and precisions while the means stay, which takes no new path unless a sample has to be drawn anew."""
    last = -torch.inf
    for k in range(_MAX_SETTLING if problem.log_background is not None else 1):
        r = log_joint(problem, components, weights).softmax(1)[:, : len(components)]
        weights = r.mean(0)
        if k or problem.log_background is not None:
            components = [_with_precision(c, problem, _share(r[:, j])) for j, c in enumerate(components)]
            components = [_covered(problem, c, _share(r[:, j])) for j, c in enumerate(components)]
        now = log_joint(problem, components, weights).logsumexp(1).mean().item()
        if now - last < tol:
            break
        last = now
    return components, weights, r


def _covered(problem: Problem, component: Component, r: Tensor) -> Component:
    """The component with a new sample if few points of the old one count."""
    if problem.redraw is None or component.count > _TOO_FEW:
        return component
    half = max(_NUM_DRAWN // 2, len(component.mean) + 1)
    where = [draw(problem.codes, r, half), draw(component.sample.z, component.mass, half)]
    sample, n = problem.redraw(torch.cat(where)), len(problem.codes)
    view = component.view.replaced(n, View.of(problem.paths, component.mean, sample.z))
    cloud = Cloud(view.v[n:], sample.log_weight)
    return _with_precision(replace(component, sample=sample, cloud=cloud, view=view), problem, r)


def draw(points: Tensor, mass: Tensor, num: int) -> Tensor:
    """Points in proportion to their mass, evenly: each as often as its share says, up to one."""
    grid = (torch.arange(num, dtype=mass.dtype, device=mass.device) + 0.5) / num
    return points[torch.searchsorted(mass.cumsum(0) / mass.sum(), grid).clamp_max(len(points) - 1)]


def component_at(
    problem: Problem, mean: Tensor, r: Tensor, last: View | None = None, sample: Sample | None = None
) -> Component:
    """The component at a mean with the precision that suits the codes, weighted by r, best."""
    n, sample = len(problem.codes), problem.sample if sample is None else sample
    view = View.of(problem.paths, mean, torch.cat([problem.codes, sample.z]), last)
    cloud, one = Cloud(view.v[n:], sample.log_weight), torch.eye(len(mean)).to(mean)
    return _with_precision(Component(mean, one, mean[0], sample, view.v[:n], cloud, view), problem, r)


def _with_precision(component: Component, problem: Problem, r: Tensor) -> Component:
    precision = best_precision(component.cloud, _moment(component, problem, r))
    total = component.cloud.log_normalizer(precision)[0]
    return replace(component, precision=precision, log_normalizer=total)


def _moment(component: Component, problem: Problem, r: Tensor) -> Tensor:
    """The second moment of the logarithms.

    That of all codes is mixed in by the square of d over the number of codes that count, the order to which a moment of
    so few is known: nothing for hundreds of codes, much for a component that is about to collapse onto a handful.
    """
    every, moment = component.v.mT @ component.v / len(r), component.v.mT @ (r[:, None] * component.v)
    share = (len(moment) * r.square().sum()).square().clamp_max(0.5)
    return torch.lerp(moment, every, share) + problem.reg_covar * torch.eye(len(moment)).to(moment)


def _improve(problem: Problem, component: Component, r: Tensor, pace: Pace, tol: float) -> tuple[Component, Pace]:
    """The component after one attempted step, and how to go on."""
    component = _with_precision(component, problem, r)
    slope, direction = pace.slope, _steepest(component, r)
    if pace.exact and not problem.paths.is_flat:
        slope = slope if slope is not None and pace.failed else _slope(problem, component, r, slope)
        if slope.seen and slope.promise < tol:
            return component, Pace(exact=True, slope=slope, failed=True, rests=True)
        direction = -slope.inverse @ slope.gradient
    size = float(quadratic(direction, component.precision).sqrt())
    if slope is None and pace.exact and 0.5 * size**2 < tol:
        return component, Pace(exact=True, rests=True)
    mean = component.mean + pace.step * min(1.0, _MAX_STEP / max(size, 1e-12)) * direction
    moved = component_at(problem, mean, r, component.view, component.sample) if problem.contains(mean) else None
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
    """The gradient of the cost.

    The inverse of the second derivative is that of Gauss and Newton at first, then corrected by each change of the
    gradient (BFGS).
    """
    precision, v, n = component.precision, component.view.v, len(component.v)
    derivative = component.view.derivative(problem.paths, component.mean)
    derivative = _differences(problem, component, r) if derivative is None else derivative
    slopes = ((v @ precision)[:, None] @ derivative)[:, 0]
    p = component.cloud.log_terms(precision).softmax(0)
    expected = p @ slopes[n:]
    gradient, centered = r @ slopes[:n] - expected, slopes[n:] - expected
    if last is not None and not torch.equal(last.mean, component.mean):
        return _corrected(last, component.mean, gradient)
    hessian = centered.mT @ (p[:, None] * centered) + 1e-3 * precision
    return Slope(component.mean, gradient, torch.linalg.inv(hessian))


def _differences(problem: Problem, component: Component, r: Tensor) -> Tensor:
    """Derivatives of the tangents in the mean, by differences along the axes of their second moment."""
    axes = _DIFFERENCE * torch.linalg.cholesky(_moment(component, problem, r)).mT
    scale, points, changes = torch.cholesky_inverse(axes.mT), torch.cat([problem.codes, component.sample.z]), []
    for axis in axes:
        change = View.of(problem.paths, component.mean + axis, points).v - component.view.v
        hops = quadratic(change, scale).sqrt() > _STEEPEST
        changes.append(torch.where(hops[:, None], -axis, change))
    return torch.linalg.solve(axes, torch.stack(changes).flatten(1)).reshape(len(axes), *points.shape).permute(1, 2, 0)


def _corrected(last: Slope, mean: Tensor, gradient: Tensor) -> Slope:
    """The slope at another mean; where the cost curves down between both, longer steps are tried."""
    s, y = mean - last.mean, gradient - last.gradient
    bend = float(s @ y)
    if bend <= 1e-3 * float(s @ torch.linalg.solve(last.inverse, s)):
        return Slope(mean, gradient, 4 * last.inverse, last.seen)
    left = torch.eye(len(s)).to(s) - torch.outer(s, y) / bend
    return Slope(mean, gradient, left @ last.inverse @ left.mT + torch.outer(s, s) / bend, True)


def _share(r: Tensor) -> Tensor:
    return r / r.sum().clamp_min(torch.finfo(r.dtype).tiny)


def log_joint(problem: Problem, components: list[Component], weights: Tensor) -> Tensor:
    """log w_k p_k of the codes, ``(n, K)``, with the background ``(n, K + 1)``."""
    joint = torch.stack([c.log_density() for c in components], 1) + weights.log()
    if problem.log_background is None:
        return joint
    rest = (1 - weights.sum()).clamp_min(_LEAST).log()
    return torch.cat([joint, (problem.log_background + rest)[:, None]], 1)


def nearest(paths: Paths, codes: Tensor, means: Tensor) -> Tensor:
    """Responsibilities ``(n, K)``, 0 or 1, by the nearest mean."""
    if len(means) == 1:
        return torch.ones_like(codes[:, :1])
    return torch.nn.functional.one_hot(paths.matrix(codes, means).argmin(1), len(means)).to(codes)


def inner_halves(codes: Tensor, r: Tensor) -> Tensor:
    """Responsibilities ``(n, K)`` for that half of its codes alone that is nearest to the middle of each component.

    Beside a Gaussian that explains all codes to begin with, components have to be better somewhere.
    """
    kept = torch.zeros_like(r)
    for k in range(r.shape[1]):
        rows = r[:, k].nonzero()[:, 0]
        gaussian = gaussian_of(codes[rows])
        radius = torch.linalg.solve_triangular(gaussian.scale_tril, (codes[rows] - gaussian.loc).mT, upper=False)
        square = radius.square().sum(0)
        kept[rows, k] = r[rows, k] * (square <= square.median())
    return kept


def first_means(paths: Paths, codes: Tensor, num: int, source: torch.Generator) -> Tensor:
    """Centers to start from: k-means in flat space, k-medoids of squared distances in the graph elsewhere."""
    if paths.is_flat:
        found = GeodesicKMeans(n_clusters=num, n_init=5, random_state=source).fit(codes)
        return torch.as_tensor(found.cluster_centers_).to(codes)
    seeds = codes[torch.randperm(len(codes), generator=source, device=codes.device)[:_MAX_SEEDS]]
    i, j = torch.triu_indices(len(seeds), len(seeds), 1, device=codes.device)
    a, b = paths.cast(seeds[i]), paths.cast(seeds[j])
    D = seeds.new_zeros(len(seeds), len(seeds))
    D[i, j] = (paths.init.distances(a, b) if isinstance(paths.init, Graph) else paths.distances(a, b)).to(D)
    D = (D + D.mT).nan_to_num(posinf=2 * float(D[D.isfinite()].max())).square()
    return seeds[swap_medoids(D, greedy_medoids(D, num), 10 * num)[0]]
