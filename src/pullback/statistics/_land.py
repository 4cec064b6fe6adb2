r"""The locally adaptive normal distribution (LAND): Gaussians that follow the data, and mixtures of them.

Arvanitidis, Hansen and Hauberg, *A locally adaptive normal distribution* (NeurIPS 2016); on known manifolds Pennec
(2006). The density is

.. math:: p(z) = \frac{1}{C(\mu, \Gamma)} \exp\bigl(-\tfrac12\, \mathrm{Log}_\mu(z)^\top\, \Gamma\,
          \mathrm{Log}_\mu(z)\bigr)\, \exp\bigl(-\tfrac12 (z - m)^\top \Lambda\, (z - m)\bigr) ,

the papers' without the second factor, with respect to dz or, as in these papers, to the Riemannian volume. How it is
normalized is told in `_normalization.py`.

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
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, NamedTuple, Self, get_args

import numpy as np
import torch
from sklearn.base import DensityMixin
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from pullback._metrics.base import Metric
from pullback._metrics.connection import filtered_inverse, velocity_of
from pullback._numerics.random import RandomState, as_generator
from pullback._progress import progress
from pullback._solvers.base import Solver
from pullback._solvers.gauss_newton import GaussNewton
from pullback._starts.graph import Graph
from pullback._starts.lattice import Lattice
from pullback.statistics import _normalization as normalization
from pullback.statistics._clustering import GeodesicKMeans, greedy_medoids, swap_medoids
from pullback.statistics._estimator import Array, Estimator, like
from pullback.statistics._normalization import NUM_REPLICATES, BaseMeasure, Factor, LogBase, Sample, moments, quadratic
from pullback.statistics._paths import Paths, Starts
from pullback.statistics._sampling import rejected
from pullback.statistics._stars import LogStar, Star, star

# Most of the time goes into paths, and two digits are enough: they are solved again in elements.
_COARSE = GaussNewton(rtol=1e-2, min_segments=8, max_segments=16, max_steps=8)
# Share of paths that may fail, and standard error of log C or share of C far away, before a warning says so.
_TOO_MANY_FAILED, _TOO_UNCERTAIN = 0.1, 0.1
# Times as many points in each batch for the final normalization constants.
_FINAL = 2
# Between the seeds of different samples.
_FRESH = 10_000
# Points that stand for where the density has its mass.
_NUM_KERNELS = 512
# A step that was shortened more than that is given up; and the longest step, in standard deviations.
_MIN_STEP, _MAX_STEP = 0.05, 2.0
# Of the differences that replace derivatives in the mean, in standard deviations. A logarithm that moves so much faster
# than the mean has hopped to another path.
_DIFFERENCE, _STEEPEST = 0.05, 10.0
# Codes among which the first means are chosen: 2,016 pairs in a graph take about a second.
_MAX_SEEDS = 64
# Promised decrease of the energy, relative, at which paths that follow a mean count as solved; and steps for that.
_SETTLED, _MAX_RELAXATIONS = 1e-4, 3


@dataclass(eq=False, repr=False)
class LAND(DensityMixin, Estimator):
    r"""A mixture of locally adaptive normal distributions :math:`p(z) = \sum_k w_k\, p(z; \mu_k, \Gamma_k)`.

    With ``metric=None`` it is a Gaussian mixture. Otherwise its level sets follow the shortest paths, and so the data,
    if the metric knows where they are (`pullback.Extrapolated`). Where it does not, distances say less about the codes
    than coordinates do, and a LAND alone would predict them worse than a Gaussian: so each component is multiplied by a
    Gaussian of the coordinates, which is fitted with it. Where distances say nothing, that factor is all of it.

    Args:
        metric: the geometry; None for flat space.
        n_components: how many components.
        base_measure: what the components are densities with respect to. ``"lebesgue"``, dz: a density of codes like
            that of any other tool, which predicts held-out codes best. It needs distances that grow without end: where
            a decoder becomes constant away from the data (`pullback.Reweighted`), the integral over dz is infinite.
            ``"volume"``, the Riemannian volume :math:`\sqrt{\det M}\, dz`: a property of the geometry, the same in
            whatever coordinates. The walls of `pullback.Extrapolated` have a large volume, and get much of the mass.
        gaussian_factor: whether components have the factor :math:`\exp(-\tfrac12 (z - m)^\top \Lambda (z - m))`. False
            for the LAND of the paper.
        tol: the fit stops when the mean log-likelihood of a code rises by less.
        max_iter: steps of the fit, at most.
        num_points: points that the normalization constants are estimated with while fitting, by default 512, or 16 d²;
            up to eight times as many in the end, until their standard error is below 0.01.
        reg_covar: added to the diagonal of the second moments of the logarithms.
        init_means: means ``(K, d)`` to start from, as of a fit under a cheaper metric; None for geodesic k-medoids.
        init: where shortest paths start: a `Lattice` or `CodeGraph`; by default a lattice over the
            codes in up to three dimensions.
        solver: of shortest paths. The default aims at two digits, and paths are then solved again.
        random_state: of the initial means, of the points above, and of `sample`.

    Attributes:
        weights_: ``(K,)``.
        means_: ``(K, d)``.
        precisions_: :math:`\Gamma_k`, ``(K, d, d)``, in coordinates of the tangents at the means; `covariances_` are
            their inverses.
        factor_means_: m of the Gaussian factors, ``(K, d)``.
        factor_precisions_: their :math:`\Lambda`, ``(K, d, d)``, zero if there are none.
        log_normalizers_: :math:`\log C(\mu_k, \Gamma_k)`, ``(K,)``.
        log_normalizer_se_: their standard errors.
        codes_: those fitted to, ``(n, d)``.
        points_: where the density has its mass, ``(m, d)``; `sample` starts from them.
        lower_bound_: mean log-likelihood of the codes with respect to the base measure.
        n_iter_: steps taken.
        converged_: whether the likelihood rose by less than `tol` in the end.

    Example:
        >>> import torch, pullback as pb
        >>> z = torch.randn(100, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        >>> land = pb.statistics.LAND(random_state=0).fit(z)  # flat space: the Gaussian of greatest likelihood
        >>> bool((land.means_[0] - z.mean(0)).norm() < 0.01)
        True
    """

    metric: Metric | None = None
    n_components: int = 1
    _: KW_ONLY
    base_measure: BaseMeasure = "lebesgue"
    gaussian_factor: bool = True
    tol: float = 1e-3
    max_iter: int = 30
    num_points: int | None = None
    reg_covar: float = 1e-6
    init_means: Array | None = None
    init: Starts = None
    solver: Solver | None = None
    random_state: RandomState = None

    @progress("LAND")
    def fit(self, X: Array, y: Any = None) -> Self:
        """Fits the mixture to codes ``(n, d)`` by expectation maximization."""
        given = self._codes(X, reset=True, ensure_min_samples=2)
        codes, K = given.double(), self.n_components
        if not 1 <= K <= len(codes):
            raise ValueError(f"n_components is {K}; with {len(codes)} codes choose from 1 to that many.")
        if self.base_measure not in get_args(BaseMeasure):
            raise ValueError(f"base_measure is {self.base_measure!r}; choose 'volume' or 'lebesgue'.")
        source = as_generator(self.random_state, codes.device)
        seed = int(torch.randint(2**20, (1,), generator=source, device=codes.device))
        num = max(512, 16 * codes.shape[1] ** 2) if self.num_points is None else self.num_points
        self.codes_ = like(given.clone(), X)
        with torch.no_grad():
            paths = self._known_paths(refresh=True)
            means = first_means(paths.on(given), codes, self.n_components, source, self.init_means)
            nearest = paths.matrix(codes, means).argmin(1) if K > 1 else torch.zeros_like(codes[:, 0], dtype=torch.long)
            r = torch.nn.functional.one_hot(nearest, K).to(codes)
            groups = [codes[chosen > 0] for chosen in r.unbind(1)]
            # too few codes have no covariance
            groups = [group if len(group) > 2 * codes.shape[1] else codes for group in groups]
            seeds = range(seed, seed + NUM_REPLICATES * len(groups), NUM_REPLICATES)
            pairs = zip(groups, seeds, strict=True)
            samples = [normalization.importance_sample(self._log_base, z, num, k) for z, k in pairs]
            problem = Problem(paths, codes, self.reg_covar, self.gaussian_factor and not paths.is_flat)
            found = fit(problem, means, samples, r, tol=self.tol, max_iter=self.max_iter)
            self._finish(problem, found, _FINAL * num, seed + _FRESH, X)
            far = max(_far_share(problem, self._log_base, c, seed) for c in found.components)
        for message in _doubts(found, self.max_iter, float(self.log_normalizer_se_.max()), far, self.base_measure):
            warnings.warn(message, ConvergenceWarning, stacklevel=2)
        return self

    def _known_paths(self, refresh: bool = False) -> Paths:
        """How paths are found, in the precision of the codes."""
        if refresh or not hasattr(self, "_cached_paths"):
            codes = torch.as_tensor(self.codes_)
            solver = _COARSE if self.solver is None else self.solver
            paths = Paths(self._paths().metric, self.init, solver, dtype=codes.dtype)
            # in more than three dimensions a graph would make paths twice as expensive and no shorter (100 paths of a
            # VAE with d = 8)
            self._cached_paths = paths.on(codes) if codes.shape[1] <= normalization.FEW_DIMENSIONS else paths
        return self._cached_paths

    @progress("LAND")
    def score_samples(self, X: Array, *, lebesgue: bool | None = None) -> Any:
        r"""Log-densities ``(n,)`` with respect to `base_measure`; with ``lebesgue=True`` to dz, False to the volume.

        The first is the second plus :math:`\tfrac12 \log\det M`, whichever of the two the components are normalized by.
        """
        z = self._codes(X)
        lebesgue = self.base_measure == "lebesgue" if lebesgue is None else lebesgue
        with torch.no_grad():
            base = self._log_base(z.double())
            # there is no density where there is no metric
            value = torch.where(base == -torch.inf, base, self._log_joint(z.double()).logsumexp(1) + base)
            if not lebesgue:
                value = torch.where(value == -torch.inf, value, value - self._known_paths().log_volume(z.double()))
        return like(value.to(z.dtype), X)

    def score(self, X: Array, y: Any = None) -> float:
        """The mean of `score_samples`."""
        return float(self.score_samples(X).mean())

    def predict_proba(self, X: Array) -> Any:
        """Responsibilities ``(n, K)`` of the components."""
        z = self._codes(X)
        with torch.no_grad():
            return like(self._log_joint(z.double()).softmax(1).to(z.dtype), X)

    def predict(self, X: Array) -> Any:
        """The component with the largest responsibility, ``(n,)``."""
        return self.predict_proba(X).argmax(1)

    @progress("LAND")
    def sample(self, n_samples: int = 1) -> tuple[Any, Any]:
        """Codes ``(n, d)`` from the density, by rejection, and the components ``(n,)`` they belong to."""
        check_is_fitted(self)
        if n_samples < 1:
            raise ValueError(f"n_samples is {n_samples}; ask for at least one.")
        source = as_generator(self.random_state)
        proposal = normalization.Proposal.fit(torch.as_tensor(self.points_).double())
        d = proposal.centers.shape[1]

        def draw() -> tuple[Tensor, Tensor]:
            z = proposal.draw(max(64, 2 * n_samples), int(torch.randint(2**20, (1,), generator=source)))
            joint = self._log_joint(z)
            return torch.cat([z, joint], 1), joint.logsumexp(1) + self._log_base(z) - proposal.log_density(z)

        kept = rejected(draw, n_samples, source, "the density is not where it was found to be. Raise num_points.")
        label = torch.multinomial(kept[:, d:].softmax(1), 1, generator=source)[:, 0]
        return like(kept[:, :d], self.means_), like(label, self.means_)

    def _finish(self, problem: Problem, found: Fit, num: int, seed: int, X: Array) -> None:
        """Sets the attributes; normalization constants are computed once more, with new points, where the mass is."""
        kernels = -(-_NUM_KERNELS // len(found.components))
        seeds = [(seed + 1 + k * NUM_REPLICATES, seed + (k + 1) * _FRESH) for k in range(len(found.components))]
        pairs = zip(found.components, seeds, strict=True)
        finished = [_finished(problem, c, self._log_base, kernels, num, some) for c, some in pairs]
        points, totals, errors = zip(*finished, strict=True)

        def stacked(values: Iterable[Tensor]) -> Any:
            return like(torch.stack(list(values)), X)

        self.weights_, self.points_ = like(found.weights, X), like(torch.cat(points), X)
        self.means_ = stacked(c.mean for c in found.components)
        self.precisions_ = stacked(c.precision for c in found.components)
        self.covariances_ = stacked(torch.linalg.inv(c.precision) for c in found.components)
        self.factor_means_ = stacked(c.factor.mean for c in found.components)
        self.factor_precisions_ = stacked(c.factor.precision for c in found.components)
        self.log_normalizers_, self.log_normalizer_se_ = stacked(totals), stacked(errors)
        self.lower_bound_, self.n_iter_, self.converged_ = found.bounds[-1], len(found.bounds) - 1, found.converged

    def _log_base(self, z: Tensor) -> Tensor:
        return normalization.log_base(self._known_paths(), self.base_measure, z)

    def _log_joint(self, z: Tensor) -> Tensor:
        """log w_k p_k(z), of shape ``(n, K)``."""
        names = ("means", "precisions", "factor_means", "factor_precisions", "log_normalizers")
        rows = zip(*(torch.as_tensor(getattr(self, f"{name}_")).to(z) for name in names), strict=True)
        joint = [
            -0.5 * (quadratic(View.of(self._known_paths(), mean, z).v, precision) + quadratic(z - m, factor)) - total
            for mean, precision, m, factor, total in rows
        ]
        return torch.stack(joint, 1) + torch.as_tensor(self.weights_).to(z).log()


def _finished(
    problem: Problem, c: Component, base: LogBase, kernels: int, num: int, seeds: tuple[int, int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Points in proportion to a component's density, log C and its standard error."""
    points, base = _drawn(c.sample.z, c.log_terms, kernels), c.factor.times(base)
    z, radii = torch.cat([problem.codes, c.sample.z]), quadratic(c.view.v, c.precision).clamp_min(0).sqrt()
    # from a finer sample around those too; in more dimensions they are too sparse to guess anything between them
    if z.shape[1] <= normalization.FEW_DIMENSIONS:
        finer = normalization.importance_sample(base, points, 2 * len(c.sample.z), seeds[0], adapted=True)
        more = c.radii(problem.paths, finer.z)
        points = torch.cat([points, _drawn(finer.z, finer.log_weight - 0.5 * more.square(), kernels)])
        z, radii = torch.cat([z, finer.z]), torch.cat([radii, more])
    if problem.paths.is_flat:
        total = 0.5 * (len(c.mean) * np.log(2 * np.pi) - torch.logdet(c.precision))
        return points, total, torch.zeros_like(total)
    find, known = functools.partial(c.radii, problem.paths), normalization.KnownRadii(points, z, radii)
    return points, *normalization.log_normalizer(base, find, known, num, seeds[1])


def _drawn(z: Tensor, log_weight: Tensor, num: int) -> Tensor:
    """Points in proportion to their weights, evenly: each as often as its share says, up to one."""
    mass = log_weight.softmax(0)
    grid = (torch.arange(num, dtype=mass.dtype, device=mass.device) + 0.5) / num
    return z[torch.searchsorted(mass.cumsum(0) / mass.sum(), grid).clamp_max(len(z) - 1)]


def _far_share(problem: Problem, base: LogBase, component: Component, seed: int) -> float:
    """The mass in a shell beyond all points of the sample, as a share of C: next to nothing unless C is infinite."""
    if problem.paths.is_flat or problem.gaussian_factor:
        return 0.0
    sample = normalization.shell(base, problem.codes, seed)
    terms = (sample.log_weight - 0.5 * component.radii(problem.paths, sample.z).square()).nan_to_num(-torch.inf)
    return float((terms.logsumexp(0) - component.log_terms.logsumexp(0)).exp())


def _doubts(found: Fit, max_iter: int, error: float, far: float, base_measure: BaseMeasure) -> Iterator[str]:
    """What to warn of, given the error of log C and the share of C far away."""
    if not found.converged:
        yield f"The likelihood was still rising after {max_iter} steps. Raise max_iter, or tol."
    failed = max(float((~c.view.converged[: len(c.v)]).double().mean()) for c in found.components)
    if failed > _TOO_MANY_FAILED:
        yield (
            f"{failed:.0%} of the shortest paths from a mean to the codes did not converge, so the density is "
            "rough. Give a finer init=pullback.Lattice.fit(metric, codes) or solver=pullback.GaussNewton(), or smooth "
            "the decoder's extrapolation."
        )
    if far > _TOO_UNCERTAIN:
        name, other = ("dz", "base_measure='volume', or ") if base_measure == "lebesgue" else ("the volume", "")
        yield (
            f"As far as can be seen the integral over {name} is infinite: far from the codes the density does not "
            f"fall, as the decoder becomes constant there. Use {other}wrap the decoder in pullback.Extrapolated or "
            "pullback.WithPrior."
        )
    elif error > _TOO_UNCERTAIN:
        yield f"log C is known to ± {error:.2g} only. Raise num_points."


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
        return cls(velocity_of(-0.5 * found.slope.to(mean), paths.tensor(mean), points - mean), rays.converged, rays)

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
        precision, factor = normalization.best_product(sample, tangents, moment, moments(problem.codes, r), penalty)
    else:
        precision = normalization.best_precision(sample, tangents, moment)
    return replace(component, precision=precision, factor=factor)


def _moment(component: Component, problem: Problem, r: Tensor) -> Tensor:
    moment = component.v.mT @ (r[:, None] * component.v)
    return moment + problem.reg_covar * torch.eye(len(moment)).to(moment)


def _improve(problem: Problem, component: Component, r: Tensor, pace: Pace, tol: float) -> tuple[Component, Pace]:
    """The component after one attempted step, and how to go on."""
    component = _with_precision(component, problem, r)
    slope, direction = pace.slope, torch.cat([r, -component.log_terms.softmax(0)]) @ component.view.v
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


def first_means(paths: Paths, codes: Tensor, num: int, source: torch.Generator, given: Array | None = None) -> Tensor:
    """Given means, or k-means in flat space and k-medoids of squared distances in the graph elsewhere."""
    if given is not None:
        means, shape = torch.as_tensor(given).to(codes), (num, codes.shape[1])
        if means.shape != shape:
            raise ValueError(f"init_means has shape {tuple(means.shape)}; give one mean per component, {shape}.")
        return means
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
