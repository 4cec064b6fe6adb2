r"""Geodesic regression: the geodesic that runs closest to codes, as a function of known numbers.

Codes :math:`z_i` were observed at covariates :math:`x_i`. The model is the straight line of a curved space,

.. math:: \hat z(x) = \mathrm{Exp}_p\Bigl(\sum_k (x_k - \bar x_k)\, v_k\Bigr), \qquad (p, v) = \arg\min \sum_i
          d^2\bigl(z_i, \hat z(x_i)\bigr)

(Fletcher 2011; with several covariates Kim et al. 2014). The residual of a code is its logarithm at the prediction, and
derivatives come from neighboring geodesics. Gauss-Newton on these needs a few steps, and one in flat space.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any, Self

import torch
from sklearn.base import RegressorMixin
from sklearn.utils import Tags
from sklearn.utils.validation import check_consistent_length
from torch import Tensor

from pullback._decoders.contract import as_codes, real_numbers
from pullback._metrics.base import codes_for
from pullback._progress import progress
from pullback._solvers.base import ConvergenceError
from pullback.statistics._estimator import Estimator, like
from pullback.statistics._frechet import FrechetMean, frechet_mean
from pullback.statistics._paths import DEFAULT_RTOL, Paths

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
        init, solver: as in `pullback.geodesic`.

    Attributes:
        origin_: the mean of the covariates, ``(p,)``.
        intercept_: the prediction there, ``(d,)``.
        coef_: the velocity for each covariate, ``(d, p)`` (without the dimension d for targets ``(n,)``).
        sum_of_squares_: of the distances between codes and predictions.
        n_iter_, converged_: steps taken, and whether the last of them promised less than `tol`.

    >>> import torch, pullback as pb
    >>> t = torch.tensor([[0.0], [1.0], [2.0]], dtype=torch.float64)
    >>> pb.statistics.GeodesicRegression().fit(t, 3 * t + 1).predict(torch.tensor([[5.0]], dtype=torch.float64))
    tensor([[16.]], dtype=torch.float64)
    """

    _: KW_ONLY
    rtol: float = DEFAULT_RTOL
    tol: float = 1e-6
    max_iter: int = 30

    @progress("regression")
    def fit(self, X: Any, y: Any = None) -> Self:
        """Fits the geodesic to codes ``y``, ``(n, d)`` or ``(n,)``, observed at covariates ``X``, ``(n, p)``."""
        if y is None:
            raise ValueError(
                "GeodesicRegression requires y to be passed, but the target y is None: fit(t[:, None], codes)."
            )
        x, targets = self._codes(X, reset=True, ensure_min_samples=2), self._targets(y)
        check_consistent_length(x, targets)
        codes = targets.reshape(len(targets), -1)
        x = x.to(codes)
        self.origin_ = like(x.mean(0), X)
        x, mean = x - x.mean(0), self._mean(codes)
        first = torch.cat([mean.mean[None], torch.linalg.pinv(x) @ mean.logarithms.nan_to_num()])
        # where the codes lie on a geodesic there is nothing to decrease
        floor = self.tol * len(codes) * mean.variance
        found, self.sum_of_squares_, self.n_iter_, self.converged_ = self._closest(x, codes, first, floor)
        parts = (found[0], found[1:].mT)
        self.intercept_, self.coef_ = (like(part[0] if targets.ndim == 1 else part, y) for part in parts)
        return self

    def predict(self, X: Any) -> Any:
        """The points ``(n, d)`` of the fitted geodesic at covariates ``(n, p)``."""
        x = self._codes(X)
        intercept, velocities = (torch.as_tensor(part).to(x) for part in (self.intercept_, self.coef_))
        parameters = torch.cat([intercept.reshape(1, -1), velocities.reshape(-1, x.shape[1]).mT])
        x = x - torch.as_tensor(self.origin_).to(x)
        predicted = self._paths().exponentials(parameters[0].expand(len(x), -1), x @ parameters[1:])
        return like(predicted if intercept.ndim else predicted[:, 0], X)

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        r"""The share of the variance that is explained, :math:`R^2 = 1 - \sum_i d^2(z_i, \hat z_i) / \sum_i d^2(z_i,
        \mu)` (Fletcher 2011)."""
        both = self._targets(y), torch.as_tensor(self.predict(X))
        codes, predicted = (z[:, None].to(both[0]) if z.ndim == 1 else z.to(both[0]) for z in both)
        a, b = tuple(predicted.shape), tuple(codes.shape)
        if a != b:
            raise ValueError(f"Predictions have shape {a} and the codes y {b}: give one code per row of X.")
        share = torch.ones_like(codes[:, 0]) if sample_weight is None else as_codes(sample_weight, codes).detach()
        found, total = self._paths().logarithms(predicted, codes), self._mean(codes, share).variance
        return 1 - (share @ found.distance**2 / share.sum() / total).item()

    def _targets(self, y: Any) -> Tensor:
        """The codes ``(n, d)`` or ``(n,)``, in the precision of the metric's decoder."""
        codes = real_numbers(y, "Codes").detach()
        codes = codes if codes.is_floating_point() else codes.double()
        codes = codes if self.metric is None else codes_for(self.metric, codes)[0]
        if codes.ndim > 2 or not torch.isfinite(codes).all():
            raise ValueError("The codes y must be (n, d) or (n,), without NaN or infinity. Drop such rows of X and y.")
        return codes

    def _mean(self, codes: Tensor, share: Tensor | None = None) -> FrechetMean:
        return frechet_mean(self._paths().metric, codes, share, solver=self.solver, init=self.init, rtol=self.rtol)

    def _closest(self, x: Tensor, codes: Tensor, found: Tensor, floor: Tensor) -> tuple[Tensor, float, int, bool]:
        """Parameters ``(1 + p, d)`` by Gauss-Newton, the sum of squares, the number of steps, and success."""
        spread = (codes - codes.mean(0)).square().sum(-1).mean().sqrt()
        expand = partial(_expand, self._paths(), x, codes, _NUDGE * spread.clamp_min(torch.finfo(codes.dtype).tiny))
        (total, hessian, gradient), length = expand(found), 1.0
        if not torch.isfinite(total):
            raise ConvergenceError(
                "Some codes have no path from the first guess of the geodesic. Remove codes that are off the data, or "
                "pass init=.",
                found,
            )
        for num_steps in range(1, self.max_iter + 1):
            step = torch.linalg.pinv(hessian, rtol=1e-12, hermitian=True) @ gradient
            trial = found + length * step.reshape(found.shape)
            there, small = expand(trial), bool(step @ gradient <= self.tol * (total + floor))
            length *= 0.5
            if there[0] <= total:
                found, (total, hessian, gradient), length = trial, there, 1.0
            if small or length < 0.5**_HALVINGS:
                return found, total.item(), num_steps, small
        return found, total.item(), self.max_iter, False

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.target_tags.required = True
        tags.target_tags.multi_output = True
        return tags


def _expand(paths: Paths, x: Tensor, codes: Tensor, nudge: Tensor, parameters: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The sum of squares, and its Hessian and slope as Gauss and Newton have them; infinite where a path is missing."""
    predicted = paths.exponentials(parameters[0].expand(len(x), -1), x @ parameters[1:])
    found = paths.logarithms(predicted, codes)
    if not torch.isfinite(found.velocity).all():
        return torch.full_like(nudge, torch.inf), parameters, parameters
    slopes = _slopes(paths, parameters, x, nudge)
    weighted = slopes @ paths.tensor(predicted)
    hessian = torch.einsum("nai,nbi->ab", weighted, slopes)
    return found.distance.square().sum(), hessian, torch.einsum("nai,ni->a", weighted, found.velocity)


def _slopes(paths: Paths, parameters: Tensor, x: Tensor, nudge: Tensor) -> Tensor:
    """Derivatives ``(n, (1 + p) d, d)`` of the predictions in the parameters, by central differences of geodesics."""
    num, (rows, d) = len(x), parameters.shape
    size = torch.ones(rows, 1).to(x)
    size[1:, 0] = 1 / x.abs().amax(0).clamp_min(torch.finfo(x.dtype).tiny)
    change = torch.diag_embed((nudge * size).expand(rows, d).flatten()).reshape(-1, rows, d)
    trials = torch.cat([parameters + change, parameters - change])
    plus, minus = paths.exponentials(trials[:, :1].expand(-1, num, -1), x @ trials[:, 1:]).chunk(2)
    return ((plus - minus) / (2 * change.sum((1, 2)))[:, None, None]).transpose(0, 1).nan_to_num()
