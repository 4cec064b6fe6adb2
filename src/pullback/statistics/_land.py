r"""The locally adaptive normal distribution (LAND): Gaussians that follow the data, and mixtures of them.

Arvanitidis, Hansen and Hauberg, *A locally adaptive normal distribution* (NeurIPS 2016); on known manifolds Pennec
(2006). The density is

.. math:: p(z) = \frac{1}{C(\mu, \Gamma)} \exp\bigl(-\tfrac12\, \mathrm{Log}_\mu(z)^\top\, \Gamma\,
          \mathrm{Log}_\mu(z)\bigr)\, \exp\bigl(-\tfrac12 (z - m)^\top \Lambda\, (z - m)\bigr) ,

the papers' without the second factor, with respect to dz or, as in these papers, to the Riemannian volume. How it is
normalized is told in `_normalization.py`, how it is fitted in `_land_fit.py`.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import KW_ONLY, dataclass
from typing import Any, Self, get_args

import numpy as np
import torch
from sklearn.base import DensityMixin
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from pullback._metrics.base import Metric
from pullback._numerics.random import RandomState, as_generator
from pullback._progress import progress
from pullback._solvers.base import Solver
from pullback._solvers.gauss_newton import GaussNewton
from pullback.statistics import _normalization as normalization
from pullback.statistics._estimator import Array, Estimator, like
from pullback.statistics._land_fit import Component, Fit, Problem, View, first_means, fit
from pullback.statistics._normalization import NUM_REPLICATES, BaseMeasure, LogBase, quadratic
from pullback.statistics._paths import Paths, Starts

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
            means = self._first_means(paths.on(given), codes, source)
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
                volume = self._known_paths().log_volume(z.double())
                value = torch.where(value == -torch.inf, value, value - volume)
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
        peak, d = -torch.inf, proposal.centers.shape[1]
        kept = torch.empty(0, d + self.n_components + 1).to(proposal.centers)
        while len(kept) < n_samples:
            z = proposal.draw(max(64, 2 * n_samples), int(torch.randint(2**20, (1,), generator=source)))
            joint = self._log_joint(z)
            ratio = joint.logsumexp(1) + self._log_base(z) - proposal.log_density(z)
            level = ratio - torch.rand(len(z), dtype=z.dtype, generator=source).log().to(z.device)
            kept, peak = torch.cat([kept, torch.cat([z, joint, level[:, None]], 1)]), max(peak, float(ratio.max()))
            # the bound on the ratio rises, and with it what is rejected
            kept = kept[kept[:, -1] > peak]
        label = torch.multinomial(kept[:n_samples, d:-1].softmax(1), 1, generator=source)[:, 0]
        return like(kept[:n_samples, :d], self.means_), like(label, self.means_)

    def _first_means(self, paths: Paths, codes: Tensor, source: torch.Generator) -> Tensor:
        if self.init_means is None:
            return first_means(paths, codes, self.n_components, source)
        means, shape = torch.as_tensor(self.init_means).to(codes), (self.n_components, codes.shape[1])
        if means.shape != shape:
            raise ValueError(f"init_means has shape {tuple(means.shape)}; give one mean per component, {shape}.")
        return means

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
