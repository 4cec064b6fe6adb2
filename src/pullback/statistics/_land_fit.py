r"""Greatest likelihood for mixtures of locally adaptive normal densities.

Expectation maximization: responsibilities of the components for the codes, then for each component one step uphill on
its part of the likelihood, with codes weighted by responsibility,

.. math:: \phi(\mu, \Gamma) = \tfrac12 \sum_n r_n \mathrm{Log}_\mu(x_n)^\top \Gamma\, \mathrm{Log}_\mu(x_n) + \log
          C(\mu, \Gamma).

For a given mean the best precision, and Gaussian factor, is found at once (`_normalization.py`), so the descent is in
the mean alone. Its direction is first that of Arvanitidis et al. (2016), the mean logarithm of the data less that of
the density, :math:`\sum_n r_n \mathrm{Log}_\mu(x_n) - \mathbb{E}_{\mu,\Gamma}[\mathrm{Log}_\mu(z)]`, which takes
:math:`D_\mu \mathrm{Log}_\mu = -1`: a whole step is Newton's where space is flat. Elsewhere it vanishes near the
minimum, not at it. So when it helps no more, :math:`D_\mu \mathrm{Log}_\mu` is computed, for quasi-Newton steps.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from pullback._metrics.connection import filtered_inverse, velocity_of
from pullback._starts.graph import Graph
from pullback._starts.lattice import Lattice
from pullback.statistics._clustering import GeodesicKMeans, greedy_medoids, swap_medoids
from pullback.statistics._normalization import Factor, Sample, best_precision, best_product, moments, quadratic
from pullback.statistics._paths import Paths
from pullback.statistics._stars import LogStar, Star, star

# A step that was shortened more than that is given up; and the longest step, in standard deviations.
_MIN_STEP, _MAX_STEP = 0.05, 2.0
# Of the differences that replace derivatives in the mean, in standard deviations. A logarithm that moves so much faster
# than the mean has hopped to another path.
_DIFFERENCE, _STEEPEST = 0.05, 10.0
# Codes among which the first means are chosen: 2,016 pairs in a graph take about a second.
_MAX_SEEDS = 64
# Promised decrease of the energy, relative, at which paths that follow a mean count as solved; and steps for that.
_SETTLED, _MAX_RELAXATIONS = 1e-4, 3


class View(NamedTuple):
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
        v = velocity_of(-0.5 * found.slope.to(mean), paths.tensor(mean), points - mean)
        return cls(v, rays.converged, rays)

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


class Problem(NamedTuple):
    """What stays the same during a fit."""

    paths: Paths
    codes: Tensor  # (n, d)
    reg_covar: float = 1e-6  # added to second moments
    gaussian_factor: bool = False  # whether components have one


@dataclass(frozen=True, eq=False)
class Component:
    """One normal density."""

    mean: Tensor
    precision: Tensor
    factor: Factor
    sample: Sample  # that it is normalized with
    view: View  # of codes and sample

    @property
    def v(self) -> Tensor:
        """The logarithms of the codes at the mean."""
        return self.view.v[: -len(self.sample.z)]

    @functools.cached_property
    def log_terms(self) -> Tensor:
        """Logarithms of the terms, one for each point of the sample, whose sum is C."""
        weight, v = self.sample.log_weight + self.factor.log(self.sample.z), self.view.v[-len(self.sample.z) :]
        return weight - 0.5 * quadratic(v, self.precision)

    def log_density(self, codes: Tensor) -> Tensor:
        """Of the codes, with respect to the base measure."""
        return self.factor.log(codes) - 0.5 * quadratic(self.v, self.precision) - self.log_terms.logsumexp(0)

    def cost(self, codes: Tensor, r: Tensor) -> float:
        return float(-(r @ self.log_density(codes)))

    def radii(self, paths: Paths, z: Tensor) -> Tensor:
        """The lengths of the logarithms of points in units of the precision, ``(n,)``."""
        return quadratic(View.of(paths, self.mean, z).v, self.precision).clamp_min(0).sqrt()


class Fit(NamedTuple):
    components: list[Component]
    weights: Tensor  # (K,)
    bounds: list[float]  # the mean log-likelihood after every step
    converged: bool


class Slope(NamedTuple):
    """The gradient of the cost at a mean, and an estimate of its inverse Hessian."""

    mean: Tensor
    gradient: Tensor
    inverse: Tensor
    seen: bool = False  # whether that was measured


class Pace(NamedTuple):
    """How a component moves."""

    step: float = 1.0  # share of the step that is tried next
    exact: bool = False
    slope: Slope | None = None  # the last exact one
    failed: bool = False  # the last attempt, so that `slope` is still that at the mean
    rests: bool = False


def fit(problem: Problem, means: Tensor, samples: list[Sample], r: Tensor, *, tol: float, max_iter: int) -> Fit:
    """Expectation maximization from responsibilities ``(n, K)``, until the likelihood rises by less than `tol`."""
    components = [component_at(problem, *start) for start in zip(means, _shares(r), samples, strict=True)]
    paces, bounds, done = [Pace(exact=problem.paths.is_flat)] * len(means), [], False
    while True:
        weights = r.mean(0)
        joint = torch.stack([c.log_density(problem.codes) for c in components], 1) + weights.log()
        bounds.append(float(joint.logsumexp(1).mean()))
        done = all(pace.rests for pace in paces) and bounds[-1] - bounds[-2] < tol
        if done or len(bounds) > max_iter:
            return Fit(components, weights, bounds, done)
        r = joint.softmax(1)
        moved = [_improve(problem, *state, tol) for state in zip(components, _shares(r), paces, strict=True)]
        components, paces = map(list, zip(*moved, strict=True))


def component_at(problem: Problem, mean: Tensor, r: Tensor, sample: Sample, last: View | None = None) -> Component:
    """The component at a mean with the precision that suits the codes, weighted by r, best."""
    view = View.of(problem.paths, mean, torch.cat([problem.codes, sample.z]), last)
    none = mean.new_zeros(2 * mean.shape)
    return _with_precision(Component(mean, none, Factor(mean, none), sample, view), problem, r)


def _with_precision(component: Component, problem: Problem, r: Tensor) -> Component:
    moment, sample, factor = _moment(component, problem, r), component.sample, component.factor
    tangents = component.view.v[len(problem.codes) :]
    if problem.gaussian_factor:
        # half a second moment of so many codes is known to that: smaller gains would be lost on other codes
        penalty = float(0.5 * r.square().sum()) ** 0.5
        precision, factor = best_product(sample, tangents, moment, moments(problem.codes, r), penalty)
    else:
        precision = best_precision(sample, tangents, moment)
    return replace(component, precision=precision, factor=factor)


def _moment(component: Component, problem: Problem, r: Tensor) -> Tensor:
    moment = component.v.mT @ (r[:, None] * component.v)
    return moment + problem.reg_covar * torch.eye(len(moment)).to(moment)


def _improve(problem: Problem, component: Component, r: Tensor, pace: Pace, tol: float) -> tuple[Component, Pace]:
    """The component after one attempted step, and how to go on."""
    component = _with_precision(component, problem, r)
    mass = torch.cat([r, -component.log_terms.softmax(0)])
    slope, direction = pace.slope, mass @ component.view.v
    if pace.exact and not problem.paths.is_flat:
        slope = slope if slope is not None and pace.failed else _slope(problem, component, r, slope)
        # what a whole step is expected to gain
        if slope.seen and 0.5 * float(slope.gradient @ slope.inverse @ slope.gradient) < tol:
            return component, Pace(exact=True, slope=slope, failed=True, rests=True)
        direction = -slope.inverse @ slope.gradient
    size = float(quadratic(direction, component.precision).sqrt())
    if slope is None and pace.exact and 0.5 * size**2 < tol:
        return component, Pace(exact=True, rests=True)
    mean = component.mean + pace.step * min(1.0, _MAX_STEP / max(size, 1e-12)) * direction
    z = component.sample.z
    if ((mean >= z.amin(0)) & (mean <= z.amax(0))).all():
        moved = component_at(problem, mean, r, component.sample, component.view)
        gain = component.cost(problem.codes, r) - moved.cost(problem.codes, r)
        if gain > 0:
            return moved, Pace(min(1.0, 2 * pace.step), pace.exact or gain < 10 * tol, slope)
    if not pace.exact:
        return component, Pace(exact=True)
    small = pace.step / 4 < _MIN_STEP
    return component, Pace(pace.step if small else pace.step / 4, True, slope, failed=True, rests=small)


def _slope(problem: Problem, component: Component, r: Tensor, last: Slope | None) -> Slope:
    """The gradient of the cost, and an inverse Hessian: of Gauss and Newton at first, then corrected by BFGS."""
    precision, v, n, p = component.precision, component.view.v, len(component.v), component.log_terms.softmax(0)
    derivative = component.view.derivative(problem.paths, component.mean)
    derivative = _differences(problem, component, r) if derivative is None else derivative
    slopes = ((v @ precision)[:, None] @ derivative)[:, 0]
    expected = p @ slopes[n:]
    gradient, centered = r @ slopes[:n] - expected, slopes[n:] - expected
    if last is None or torch.equal(last.mean, component.mean):
        hessian = centered.mT @ (p[:, None] * centered) + 1e-3 * precision
        return Slope(component.mean, gradient, torch.linalg.inv(hessian))
    s, y = component.mean - last.mean, gradient - last.gradient
    bend = float(s @ y)
    # where the cost curves down between both means, longer steps are tried
    if bend <= 1e-3 * float(s @ torch.linalg.solve(last.inverse, s)):
        return Slope(component.mean, gradient, 4 * last.inverse, last.seen)
    left = torch.eye(len(s)).to(s) - torch.outer(s, y) / bend
    return Slope(component.mean, gradient, left @ last.inverse @ left.mT + torch.outer(s, s) / bend, True)


def _differences(problem: Problem, component: Component, r: Tensor) -> Tensor:
    """Derivatives of the tangents in the mean, by differences along the axes of their second moment."""
    axes = _DIFFERENCE * torch.linalg.cholesky(_moment(component, problem, r)).mT
    scale, points, changes = torch.cholesky_inverse(axes.mT), torch.cat([problem.codes, component.sample.z]), []
    for axis in axes:
        change = View.of(problem.paths, component.mean + axis, points).v - component.view.v
        hops = quadratic(change, scale).sqrt() > _STEEPEST
        changes.append(torch.where(hops[:, None], -axis, change))
    return torch.linalg.solve(axes, torch.stack(changes).flatten(1)).reshape(len(axes), *points.shape).permute(1, 2, 0)


def _shares(r: Tensor) -> tuple[Tensor, ...]:
    """The weights of the codes in each component, which sum to one."""
    return (r / r.sum(0).clamp_min(torch.finfo(r.dtype).tiny)).unbind(1)


def first_means(paths: Paths, codes: Tensor, num: int, source: torch.Generator) -> Tensor:
    """Centers to start from: k-means in flat space, k-medoids of squared distances in the graph elsewhere."""
    if paths.is_flat:
        found = GeodesicKMeans(n_clusters=num, n_init=5, random_state=source).fit(codes)
        return torch.as_tensor(found.cluster_centers_).to(codes)
    seeds = codes[torch.randperm(len(codes), generator=source, device=codes.device)[:_MAX_SEEDS]]
    i, j = torch.triu_indices(len(seeds), len(seeds), 1, device=codes.device)
    distances = paths.init.distances if isinstance(paths.init, Graph) else paths.distances
    D = seeds.new_zeros(len(seeds), len(seeds))
    D[i, j] = distances(paths.cast(seeds[i]), paths.cast(seeds[j])).to(D)
    D = (D + D.mT).nan_to_num(posinf=2 * float(D[D.isfinite()].max())).square()
    return seeds[swap_medoids(D, greedy_medoids(D, num), 10 * num)[0]]
