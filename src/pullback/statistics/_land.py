r"""The locally adaptive normal distribution (LAND): Gaussians that follow the data, and mixtures of them.

Arvanitidis, Hansen and Hauberg, *A locally adaptive normal distribution* (NeurIPS 2016); on known manifolds Pennec (2006). The
density is

.. math:: p(z) = \frac{1}{C(\mu, \Gamma)} \exp\bigl(-\tfrac12\, \mathrm{Log}_\mu(z)^\top\, \Gamma\, \mathrm{Log}_\mu(z)\bigr) ,

a Gaussian in the distances of the metric, with respect to one of two base measures: the Riemannian volume :math:`\sqrt{\det M(z)}\, dz`, as in
these papers, or dz. How it is normalised is told in `normalisation.py`, how it is fitted in `land_fit.py`.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any, Self, get_args

import numpy as np
import torch
from sklearn.base import DensityMixin
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from pullback._metrics.base import Metric
from pullback._solvers.base import Solver
from pullback._starts.graph import Graph
from pullback.statistics._charts import Atlas
from pullback.statistics._estimator import Array, Estimator, generator, like
from pullback.statistics._land_fit import Component, Fit, Problem, first_means, fit, nearest
from pullback.statistics._normalization import (
    BaseMeasure,
    Cloud,
    LogBase,
    Proposal,
    importance_sample,
    log_base,
    log_volume,
    quadratic,
)
from pullback.statistics._paths import Flat
from pullback.statistics._surrogate import Known, log_normalizer

_TOO_MANY_FAILED = 0.1
_TOO_UNCERTAIN = 0.1  # standard error of log C
_FINAL = 2  # times as many points in each batch for the final normalisation constants
_FRESH = 10_000  # between the seeds of the two samples
_NUM_KERNELS = 512


class LAND(DensityMixin, Estimator):
    r"""A mixture of locally adaptive normal distributions :math:`p(z) = \sum_k w_k\, p(z; \mu_k, \Gamma_k)`.

    With ``metric=None`` it is a Gaussian mixture. Otherwise its level sets follow the shortest paths, and so the data, if the metric
    knows where they are (`pullback.Extrapolated`).

    **Arguments:**

    - `metric`: the geometry; None for flat space.
    - `n_components`: how many components.
    - `base_measure`: what the components are densities with respect to. ``"volume"``, the Riemannian volume :math:`\sqrt{\det M}\, dz`: a
      property of the geometry, the same in whatever coordinates. ``"lebesgue"``, dz: a density of codes like that of any other tool,
      whose shape depends on the coordinates. The walls that `pullback.Extrapolated` puts around the data have a large volume, so that
      the first gives them much of its mass; the second gives it to where the codes are. But it needs distances that grow without end:
      where a decoder becomes constant away from the data (`pullback.Reweighted`), the integral over dz is infinite.
    - `tol`: the fit stops when the mean log-likelihood of a code rises by less.
    - `max_iter`: steps of the fit, at most.
    - `num_points`: points that the normalisation constants are estimated with while fitting; up to eight times as many in the end,
      until their standard error is below 0.005.
    - `reg_covar`: added to the diagonal of the second moments of the logarithms.
    - `means_init`: means ``(K, d)`` to start from, those of a fit under a cheaper metric for instance; None for geodesic k-medoids.
    - `graph`: where the search for shortest paths starts: a `Lattice` or `CodeGraph`. By default one over the codes is made, a lattice
      in up to three dimensions.
    - `solver`: of shortest paths. The default, much coarser than that of `pullback.geodesic`, aims at three digits.
    - `random_state`: of the initial means, of the points above, and of `sample`.
    - `verbose`: whether to show a progress bar.

    **Attributes** after `fit`:

    - `weights_` ``(K,)``, `means_` ``(K, d)``, `precisions_` and `covariances_` ``(K, d, d)``: precisions :math:`\Gamma_k` and their inverses, in
      the coordinates of the tangents at the means.
    - `log_normalizers_` ``(K,)``: :math:`\log C(\mu_k, \Gamma_k)`, and `log_normalizer_se_`, their standard errors.
    - `points_` ``(m, d)``: where the density has its mass; `sample` starts from them.
    - `lower_bound_`: mean log-likelihood of the codes with respect to the base measure; `n_iter_`, `converged_`.
    """

    def __init__(
        self,
        metric: Metric | None = None,
        n_components: int = 1,
        *,
        base_measure: BaseMeasure = "volume",
        tol: float = 1e-3,
        max_iter: int = 30,
        num_points: int = 512,
        reg_covar: float = 1e-6,
        means_init: Array | None = None,
        graph: Graph | None = None,
        solver: Solver | None = None,
        random_state: int | np.random.RandomState | None = None,
        verbose: bool = False,
    ):
        self.metric = metric
        self.n_components = n_components
        self.base_measure: BaseMeasure = base_measure
        self.tol = tol
        self.max_iter = max_iter
        self.num_points = num_points
        self.reg_covar = reg_covar
        self.means_init = means_init
        self.graph = graph
        self.solver = solver
        self.random_state = random_state
        self.verbose = verbose

    def fit(self, X: Array, y: Any = None) -> Self:
        """Fits the mixture to codes ``(n, d)`` by expectation maximisation."""
        codes = self._codes(X, reset=True, ensure_min_samples=2).double()
        if not 1 <= self.n_components <= len(codes):
            raise ValueError(
                f"n_components is {self.n_components}; with {len(codes)} codes choose from 1 to that many."
            )
        if self.base_measure not in get_args(BaseMeasure):
            raise ValueError(f"base_measure is {self.base_measure!r}; choose 'volume' or 'lebesgue'.")
        random = check_random_state(self.random_state)
        seed = int(random.randint(2**20))
        with torch.no_grad():
            atlas = Atlas.of(self._metric(), codes, self.graph, self.solver)
            means = self._first_means(atlas, codes, random)
            groups = [codes[chosen > 0] for chosen in nearest(atlas, codes, means).unbind(1)]
            sample = importance_sample(self._log_base, groups, self.num_points, seed)
            problem = Problem(atlas, codes, sample, self.reg_covar)
            found = fit(problem, means, tol=self.tol, max_iter=self.max_iter, verbose=self.verbose)
            self._atlas = atlas
            self._finish(problem, found, seed + _FRESH, X)
        _warn(found, self.max_iter)
        _warn_of_noise(float(self.log_normalizer_se_.max()), self.base_measure)
        return self

    def score_samples(self, X: Array, *, lebesgue: bool | None = None) -> Any:
        r"""Log-densities ``(n,)`` with respect to `base_measure`; with ``lebesgue=True`` to dz, with False to the Riemannian volume.

        The first is the second plus :math:`\tfrac12 \log\det M`, whichever of the two the components are normalised by.
        """
        z = self._codes(X)
        own = self.base_measure == "lebesgue"
        with torch.no_grad():
            value = self._log_joint(z.double()).logsumexp(1)
            if own or lebesgue:
                value = value + self._log_base(z.double())
            if own and lebesgue is False:
                value = torch.where(value == -torch.inf, value, value - log_volume(self._metric(), z.double()))
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

    def sample(self, n_samples: int = 1) -> tuple[Any, Any]:
        """Codes ``(n, d)`` from the density, by rejection, and the components ``(n,)`` they belong to."""
        check_is_fitted(self)
        if n_samples < 1:
            raise ValueError(f"n_samples is {n_samples}; ask for at least one.")
        source = generator(self.random_state, torch.empty(0))
        z, joint = self._rejected(n_samples, source)
        label = torch.multinomial(joint.softmax(1), 1, generator=source)[:, 0]
        return like(z, self.means_), like(label, self.means_)

    def _first_means(self, atlas: Atlas, codes: Tensor, random: np.random.RandomState) -> Tensor:
        if self.means_init is None:
            return first_means(atlas, codes, self.n_components, random)
        means, shape = torch.as_tensor(self.means_init).to(codes), (self.n_components, codes.shape[1])
        if means.shape != shape:
            raise ValueError(f"means_init has shape {tuple(means.shape)}; give one mean a component, {shape}.")
        return means

    def _finish(self, problem: Problem, found: Fit, seed: int, X: Array) -> None:
        """Sets the attributes; the normalisation constants are computed once more, with new points, where the mass is."""
        known = _where_the_mass_is(problem, found, self._log_base, seed)
        num, totals = _FINAL * self.num_points, []
        for k, (c, some) in enumerate(zip(found.components, known, strict=True)):
            totals.append(_normalizer(problem.atlas, self._log_base, c, some, num, seed + (k + 1) * _FRESH))
        precisions = torch.stack([c.precision for c in found.components])
        self.weights_ = like(found.weights, X)
        self.means_ = like(torch.stack([c.mean for c in found.components]), X)
        self.precisions_, self.covariances_ = like(precisions, X), like(torch.linalg.inv(precisions), X)
        self.log_normalizers_ = like(torch.stack([total for total, _ in totals]), X)
        self.log_normalizer_se_ = like(torch.stack([error for _, error in totals]), X)
        self.points_ = like(torch.cat([some.points for some in known]), X)
        self.lower_bound_, self.n_iter_, self.converged_ = found.bounds[-1], len(found.bounds) - 1, found.converged

    def _log_base(self, z: Tensor) -> Tensor:
        return log_base(self._metric(), self.base_measure, z)

    def _log_joint(self, z: Tensor) -> Tensor:
        """log w_k p_k(z), of shape ``(n, K)``."""
        means, precisions, totals, weights = (
            torch.as_tensor(a).to(z) for a in (self.means_, self.precisions_, self.log_normalizers_, self.weights_)
        )
        if not hasattr(self, "_atlas"):
            self._atlas = Atlas.of(self._metric(), torch.as_tensor(self.points_).to(z), self.graph, self.solver)
        rows = zip(means, precisions, totals, strict=True)
        joint = [-0.5 * quadratic(self._atlas.log(m, z)[0], p) - c for m, p, c in rows]
        return torch.stack(joint, 1) + weights.log()

    def _rejected(self, n: int, source: torch.Generator) -> tuple[Tensor, Tensor]:
        """Codes and their joint log-densities, by rejection from kernels at `points_`; the bound rises as in `sample_uniform`."""
        proposal = Proposal.fit(torch.as_tensor(self.points_))
        kept = torch.empty(0, proposal.centers.shape[1] + self.n_components + 1).to(proposal.centers)
        peak, d = -torch.inf, proposal.centers.shape[1]
        while len(kept) < n:
            z = proposal.draw(max(64, 2 * n), int(torch.randint(2**20, (1,), generator=source)))
            joint = self._log_joint(z)
            ratio = joint.logsumexp(1) + self._log_base(z) - proposal.log_density(z)
            level = ratio - torch.rand(len(z), dtype=z.dtype, generator=source).log().to(z.device)
            kept, peak = torch.cat([kept, torch.cat([z, joint, level[:, None]], 1)]), max(peak, float(ratio.max()))
            kept = kept[kept[:, -1] > peak]
        return kept[:n, :d], kept[:n, d:-1]


def _normalizer(
    atlas: Atlas, base: LogBase, component: Component, known: Known, num: int, seed: int
) -> tuple[Tensor, Tensor]:
    """log C and its standard error; in closed form where space is flat."""
    if isinstance(atlas.metric, Flat):
        value = 0.5 * (len(component.mean) * np.log(2 * np.pi) - torch.logdet(component.precision))
        return value, torch.zeros_like(value)
    return log_normalizer(base, functools.partial(_radii, atlas, component), known, num, seed)


def _radii(atlas: Atlas, component: Component, z: Tensor) -> Tensor:
    """The lengths of the logarithms under the precision."""
    return _radius(atlas.log(component.mean, z)[0], component.precision)


def _radius(v: Tensor, precision: Tensor) -> Tensor:
    return quadratic(v, precision).clamp_min(0).sqrt()


def _where_the_mass_is(problem: Problem, found: Fit, base: LogBase, seed: int) -> list[Known]:
    """For each component, points drawn in proportion to its density: from the fit's sample, and from a finer one around those."""
    source = torch.Generator(device=problem.codes.device).manual_seed(seed)
    num = -(-_NUM_KERNELS // len(found.components))
    groups = [_draw(problem.sample.z, c.cloud.log_terms(c.precision), num, source) for c in found.components]
    sample = importance_sample(base, groups, 2 * len(problem.sample.z), seed + 1, adapted=True)
    z, known = torch.cat([problem.codes, problem.sample.z, sample.z]), []
    for c, group in zip(found.components, groups, strict=True):
        cloud = Cloud(problem.atlas.log(c.mean, sample.z)[0], sample.log_weight)
        points = torch.cat([group, _draw(sample.z, cloud.log_terms(c.precision), num, source)])
        v = torch.cat([c.v, c.cloud.v, cloud.v])
        known.append(Known(points, z, _radius(v, c.precision)))
    return known


def _draw(points: Tensor, log_mass: Tensor, num: int, source: torch.Generator) -> Tensor:
    mass = log_mass.softmax(0)
    some = max(points.shape[1] + 1, min(num, int((mass > 1e-4 * mass.max()).sum())))
    return points[torch.multinomial(mass, some, generator=source)]


def _warn(found: Fit, max_iter: int) -> None:
    if not found.converged:
        warnings.warn(
            f"The likelihood was still rising after {max_iter} steps. Raise max_iter, or tol.",
            ConvergenceWarning,
            stacklevel=3,
        )
    failed = [float((~c.converged[: len(c.v)]).double().mean()) for c in found.components]
    if max(failed) > _TOO_MANY_FAILED:
        warnings.warn(
            f"{max(failed):.0%} of the shortest paths from a mean to the codes did not converge, so the density is rough. Give a "
            "finer graph=pullback.Lattice.fit(metric, codes) or solver=pullback.GaussNewton(), or smooth the decoder's extrapolation.",
            ConvergenceWarning,
            stacklevel=3,
        )


def _warn_of_noise(error: float, base_measure: BaseMeasure) -> None:
    if error <= _TOO_UNCERTAIN:
        return
    fix = "Raise num_points."
    if base_measure == "lebesgue":
        fix = (
            "Raise num_points; but if the decoder becomes constant away from the data, the integral over dz is infinite: use "
            "base_measure='volume', or wrap the decoder in pullback.Extrapolated."
        )
    warnings.warn(f"log C is known to ± {error:.2g} only. {fix}", ConvergenceWarning, stacklevel=3)
