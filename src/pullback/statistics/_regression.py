r"""Geodesic regression: the geodesic that runs closest to codes, as a function of known numbers.

Codes :math:`z_i` were observed at covariates :math:`x_i`. The model is the straight line of a curved space,

.. math:: \hat z(x) = \mathrm{Exp}_p\Bigl(\sum_k (x_k - \bar x_k)\, v_k\Bigr), \qquad (p, v) = \arg\min \sum_i
          d^2\bigl(z_i, \hat z(x_i)\bigr)

(Fletcher 2011; with several covariates Kim et al. 2014). The residual of a code is its logarithm at the prediction, and
derivatives come from neighboring geodesics. Gauss-Newton on these needs a few steps, and one in flat space.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Any, Self

import torch
from sklearn.base import RegressorMixin
from sklearn.utils import Tags
from sklearn.utils.validation import check_consistent_length
from torch import Tensor

from pullback._decoders.contract import real_numbers
from pullback._metrics.base import Metric, codes_for
from pullback._progress import progress
from pullback._solvers.base import ConvergenceError, Solver
from pullback.statistics._estimator import Estimator, like, owned
from pullback.statistics._frechet import FrechetMean, frechet_mean
from pullback.statistics._paths import DEFAULT_RTOL, Paths, Starts

# Distance of neighboring geodesics relative to the spread of the codes: wide enough for geodesics of four digits.
_NUDGE = 3e-2
# Halvings of a step before the fit is given up.
_HALVINGS = 10


@dataclass(eq=False, repr=False)
class GeodesicRegression(RegressorMixin, Estimator):
    r"""Least squares on a manifold: the geodesic closest to codes that depend on numbers such as time.

    As in scikit-learn ``X`` holds what is known and ``y`` what is predicted: `fit` takes covariates ``(n, p)`` (time:
    ``t[:, None]``) and codes ``(n, d)``. In flat space it is `sklearn.linear_model.LinearRegression`.

    Args:
        metric: the geometry of the codes; None for flat space.
        rtol: relative accuracy of the residuals and of the predictions.
        tol: relative decrease of the sum of squares at which the fit stops.
        max_iter: Gauss-Newton steps.
        init: where the search for shortest paths starts, as in `pullback.geodesic`.
        solver: of shortest paths.

    Attributes:
        origin_: the mean of the covariates, ``(p,)``.
        intercept_: the prediction there, ``(d,)``.
        coef_: the velocity for each covariate, ``(d, p)`` (without the dimension d for targets ``(n,)``).
        sum_of_squares_: of the distances between codes and predictions.
        n_iter_: steps taken.
        converged_: whether the last of them promised less than `tol`.

    Example:
        >>> import torch, pullback as pb
        >>> t = torch.tensor([[0.0], [1.0], [2.0]], dtype=torch.float64)
        >>> pb.statistics.GeodesicRegression().fit(t, 3 * t + 1).predict(torch.tensor([[5.0]], dtype=torch.float64))
        tensor([[16.]], dtype=torch.float64)
    """

    metric: Metric | None = None
    _: KW_ONLY
    rtol: float = DEFAULT_RTOL
    tol: float = 1e-6
    max_iter: int = 30
    init: Starts = None
    solver: Solver | None = None

    @progress("regression")
    def fit(self, X: Any, y: Any = None) -> Self:
        """Fits the geodesic to codes ``y``, ``(n, d)`` or ``(n,)``, observed at covariates ``X``, ``(n, p)``."""
        if y is None:
            raise ValueError(
                "GeodesicRegression requires y to be passed, but the target y is None: fit(t[:, None], codes)."
            )
        x, targets = self._codes(X, reset=True, ensure_min_samples=2), self._targets(y)
        check_consistent_length(x, targets)
        codes = _columns(targets)
        x = x.to(codes)
        self.origin_ = like(x.mean(0), X)
        x, mean = x - x.mean(0), self._mean(codes)
        first = torch.cat([mean.mean[None], torch.linalg.pinv(x) @ mean.logarithms.nan_to_num()])
        # where the codes lie on a geodesic there is nothing to decrease
        floor = self.tol * len(codes) * mean.variance
        found = _gauss_newton(self._state(x, codes), first, self.tol, floor, self.max_iter)
        parts, one = (found.parameters[0], found.parameters[1:].mT), targets.ndim == 1
        self.intercept_, self.coef_ = (like(part[0] if one else part, y) for part in parts)
        self.sum_of_squares_, self.n_iter_, self.converged_ = found.total.item(), found.num_steps, found.converged
        return self

    def predict(self, X: Any) -> Any:
        """The points ``(n, d)`` of the fitted geodesic at covariates ``(n, p)``."""
        x = self._codes(X)
        intercept, velocities = (torch.as_tensor(part).to(x) for part in (self.intercept_, self.coef_))
        parameters = torch.cat([intercept.reshape(1, -1), velocities.reshape(-1, x.shape[1]).mT])
        predicted = _predict(self._paths(), parameters, x - torch.as_tensor(self.origin_).to(x))
        return like(predicted if intercept.ndim else predicted[:, 0], X)

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        r"""The share of the variance that is explained, :math:`R^2 = 1 - \sum_i d^2(z_i, \hat z_i) / \sum_i d^2(z_i,
        \mu)` (Fletcher 2011)."""
        codes = _columns(self._targets(y))
        predicted = _columns(torch.as_tensor(self.predict(X)).to(codes))
        a, b = tuple(predicted.shape), tuple(codes.shape)
        if a != b:
            raise ValueError(f"Predictions have shape {a} and the codes y {b}: give one code per row of X.")
        share = torch.ones_like(codes[:, 0]) if sample_weight is None else owned(sample_weight).to(codes)
        found, total = self._paths().logarithms(predicted, codes), self._mean(codes, share).variance
        return 1 - (share @ found.distance**2 / share.sum() / total).item()

    def _targets(self, y: Any) -> Tensor:
        """The codes ``(n, d)`` or ``(n,)``, in the precision of the metric's decoder."""
        codes = (y if isinstance(y, Tensor) else real_numbers(y, "Codes")).detach()
        codes = codes if codes.is_floating_point() else codes.double()
        codes = codes if self.metric is None else codes_for(self.metric, codes)[0]
        if codes.ndim > 2 or not torch.isfinite(codes).all():
            raise ValueError("The codes y must be (n, d) or (n,), without NaN or infinity. Drop such rows of X and y.")
        return codes

    def _mean(self, codes: Tensor, share: Tensor | None = None) -> FrechetMean:
        return frechet_mean(self._paths().metric, codes, share, solver=self.solver, init=self.init, rtol=self.rtol)

    def _state(self, x: Tensor, codes: Tensor) -> Callable[[Tensor], _Fit]:
        paths, spread = self._paths(), (codes - codes.mean(0)).square().sum(-1).mean().sqrt()
        nudge = _NUDGE * spread.clamp_min(torch.finfo(codes.dtype).tiny)

        def state(parameters: Tensor) -> _Fit:
            predicted = _predict(paths, parameters, x)
            found = paths.logarithms(predicted, codes)
            if not torch.isfinite(found.velocity).all():
                nothing = torch.zeros_like(parameters)
                return _Fit(parameters, torch.full_like(nothing[0, 0], torch.inf), nothing, nothing)
            slopes = _slopes(paths, parameters, x, nudge)
            weighted = slopes @ paths.tensor(predicted)
            hessian = torch.einsum("nai,nbi->ab", weighted, slopes)
            gradient = torch.einsum("nai,ni->a", weighted, found.velocity)
            return _Fit(parameters, found.distance.square().sum(), hessian, gradient)

        return state

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.target_tags.required = True
        tags.target_tags.multi_output = True
        return tags


@dataclass
class _Fit:
    """Parameters ``(1 + p, d)``, the sum of squares, and its Gauss-Newton expansion; how the search for them went."""

    parameters: Tensor
    total: Tensor
    hessian: Tensor
    gradient: Tensor
    num_steps: int = 0
    converged: bool = False


def _gauss_newton(state: Callable[[Tensor], _Fit], first: Tensor, tol: float, floor: Tensor, max_iter: int) -> _Fit:
    here, length = state(first), 1.0
    if not torch.isfinite(here.total):
        raise ConvergenceError(
            "Some codes have no path from the first guess of the geodesic. Remove codes that are off the data, or pass "
            "init=.",
            here,
        )
    for num_steps in range(1, max_iter + 1):
        step = (torch.linalg.pinv(here.hessian, rtol=1e-12, hermitian=True) @ here.gradient).reshape(first.shape)
        predicted = step.flatten() @ here.gradient
        there = state(here.parameters + length * step)
        small = bool(predicted <= tol * (here.total + floor))
        here, length = (there, 1.0) if there.total <= here.total else (here, 0.5 * length)
        here.num_steps, here.converged = num_steps, small
        if small or length < 0.5**_HALVINGS:
            break
    return here


def _predict(paths: Paths, parameters: Tensor, x: Tensor) -> Tensor:
    """Where the geodesics from the intercept arrive; NaN for those that do not."""
    return paths.exponentials(parameters[0].expand(len(x), -1), x @ parameters[1:])


def _slopes(paths: Paths, parameters: Tensor, x: Tensor, nudge: Tensor) -> Tensor:
    """Derivatives ``(n, (1 + p) d, d)`` of the predictions in the parameters, by central differences of geodesics."""
    num, (rows, d) = len(x), parameters.shape
    size = torch.ones(rows, 1).to(x)
    size[1:, 0] = 1 / x.abs().amax(0).clamp_min(torch.finfo(x.dtype).tiny)
    change = torch.diag_embed((nudge * size).expand(rows, d).flatten()).reshape(-1, rows, d)
    trials = torch.cat([parameters + change, parameters - change])
    plus, minus = paths.exponentials(trials[:, :1].expand(-1, num, -1), x @ trials[:, 1:]).chunk(2)
    slopes = (plus - minus) / (2 * change.sum((1, 2)))[:, None, None]
    return slopes.transpose(0, 1).nan_to_num()


def _columns(codes: Tensor) -> Tensor:
    return codes[:, None] if codes.ndim == 1 else codes
