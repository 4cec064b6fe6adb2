r"""The Fréchet mean: the point with the least sum of squared distances to given points.

.. math:: \mu = \arg\min_z F(z), \qquad F(z) = \sum_i w_i\, d^2(z, z_i), \qquad \nabla F(z) = -2 M(z) \sum_i w_i \mathrm{Log}_z(z_i).

At the mean the logarithms balance, :math:`\sum_i w_i \mathrm{Log}_\mu(z_i) = 0`. The usual iteration walks along that sum (Karcher
1977; Pennec 2006): a gradient step in the inner product of M, which is Newton's method in flat space. On a curved one its Hessian
:math:`2M` is wrong by the curvature times the variance, and the iteration converges slowly (positive curvature) or overshoots (negative).
Differences of gradients correct it (BFGS), and a step, along a geodesic, is taken only if F falls.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pullback._decoders.contract import unvalidated
from pullback._geometry.exponential import exponential
from pullback._geometry.geodesic import Start
from pullback._metrics.base import Metric
from pullback._solvers.base import Solver
from pullback._typing import Float
from pullback.statistics._paths import Flat, Logs, logs, solver_for

_HALVINGS = 8  # of a step before the mean counts as found as well as it can be
_NOISE = 1e-10  # of the variance: error of the distances
_ROUGH = 1e-3  # residual above which logarithms need not be refined
_ROUGHEST = 0.1  # relative error of a velocity that nothing is known about
_MARGIN = 10.0  # by how much the estimated error of the logarithms may exceed the residual asked for
_SUFFICIENT = 1e-4  # share of the predicted decrease of F that a step must bring (Armijo)


@dataclass(frozen=True, eq=False)
class FrechetMean:
    r"""The mean of points under a metric, and what is known about it.

    **Attributes:**

    - `mean`: the point, ``(d,)``.
    - `variance`: :math:`\sum_i w_i d^2(\mu, z_i)` with weights that sum to one; infinite if no path was found.
    - `distances`: of the points from the mean, ``(n,)``.
    - `logarithms`: :math:`\mathrm{Log}_\mu(z_i)`, shape ``(n, d)``; NaN, as the distance, for points that no path reaches and for those of
      weight zero.
    - `residual`: the length of :math:`\sum_i w_i \mathrm{Log}_\mu(z_i)` relative to the standard deviation: 0 at a mean.
    - `converged`, `status`: whether `residual` is below the tolerance and every path was found, as a truth value and a sentence.
    - `num_steps`: times that the logarithms of all points were computed.
    """

    mean: Float[Tensor, " d"]
    variance: Float[Tensor, ""]
    distances: Float[Tensor, " n"]
    logarithms: Float[Tensor, "n d"]
    residual: float
    converged: bool
    status: str
    num_steps: int


def frechet_mean(
    metric: Metric,
    points: Float[Tensor, "n d"],
    weights: Float[Tensor, " n"] | None = None,
    *,
    start: Float[Tensor, " d"] | None = None,
    solver: Solver | None = None,
    init: Start | Sequence[Start] = None,
    rtol: float = 1e-7,
    max_steps: int = 50,
) -> FrechetMean:
    r"""The Fréchet mean :math:`\arg\min_z \sum_i w_i d^2(z, z_i)` of points, by quasi-Newton steps along logarithms.

    A local minimum: unique if the points lie in a ball of less than a quarter of a closed geodesic where the curvature is positive
    (Karcher 1977), and always where it is not. Points that no path reaches are left out of the sum, and the status says so.

    Args:
        metric: the geometry.
        points: codes, shape ``(n, d)``.
        weights: not negative, shape ``(n,)``; equal by default. Only their ratios matter.
        start: where to begin; by default the point nearest to the flat mean (which itself may lie off the data).
        solver: as in `pullback.geodesic`; by default one as accurate as `rtol`.
        init: where each path starts, as in `pullback.geodesic`.
        rtol: largest length of the mean logarithm, relative to the standard deviation of the points.
        max_steps: how many times the logarithms of all points may be computed.

    Returns:
        A `FrechetMean`.
    """
    points, share = _checked(points, weights)
    used = share > 0

    some, solver = points[used], solver_for(rtol) if solver is None else solver

    def at(z: Tensor, accuracy: float) -> _Balance:
        found = logs(metric, z.expand_as(some), some, solver=solver, init=init, rtol=accuracy)
        return _Balance.of(metric, z, found, share[used])

    z = _start(points, share) if start is None else start.detach().to(points)
    search = _Search(metric, at, rtol, max_steps)
    best, num_steps = search.run(z)
    status = _status(best, rtol, num_steps, max_steps)
    logarithms, distances = torch.full_like(points, torch.nan), torch.full_like(share, torch.nan)
    logarithms[used], distances[used] = best.logs.velocity, best.logs.distance
    return FrechetMean(
        mean=best.z,
        variance=best.variance,
        distances=distances,
        logarithms=logarithms,
        residual=best.residual,
        converged=status == "converged",
        status=status,
        num_steps=num_steps,
    )


@dataclass(frozen=True)
class _Balance:
    """The logarithms of all points at one place, and how far they are from balance."""

    z: Tensor
    logs: Logs
    known: Tensor  # which points have a path
    frame: Tensor  # L with M = L Lᵀ
    gradient: Tensor  # of the variance, in the orthonormal frame
    variance: Tensor
    residual: float
    noise: float  # what the errors of the logarithms may contribute to the residual
    num_failed: int

    @classmethod
    def of(cls, metric: Metric, z: Tensor, found: Logs, share: Tensor) -> _Balance:
        known = torch.isfinite(found.velocity).all(-1) & torch.isfinite(found.distance)
        num_failed = int((~found.converged).sum())
        if not known.any():
            nothing, never = torch.zeros_like(z), torch.full_like(z[0], torch.inf)
            return cls(
                z, found, known, torch.zeros_like(torch.outer(z, z)), nothing, never, torch.inf, torch.inf, num_failed
            )
        share = torch.where(known, share, 0)
        share = share / share.sum()
        with torch.no_grad(), unvalidated():
            M = metric.tensor(z)
        total = share @ torch.where(known[:, None], found.velocity, 0)
        variance = share @ torch.where(known, found.distance, 0).square()
        frame = _factor(M)
        errors = torch.where(known, share * found.error.clamp_max(_ROUGHEST) * found.distance, 0)
        sizes = torch.stack([(frame.mT @ total).norm(), errors.norm()])
        residual, noise = (sizes / variance.sqrt()).tolist() if variance > 0 else (0.0, 0.0)
        return cls(z, found, known, frame, -2 * frame.mT @ total, variance, residual, noise, num_failed)


@dataclass(frozen=True)
class _Search:
    """BFGS along geodesics, in orthonormal frames, where the Hessian of flat space is 2; rough logarithms until near the end."""

    metric: Metric
    at: Callable[[Tensor, float], _Balance]
    rtol: float
    max_steps: int

    def run(self, z: Tensor) -> tuple[_Balance, int]:
        """The best place, and how many places were looked at."""
        rough = max(self.rtol, _ROUGH)
        here, hessian, num_steps = self._descend(self.at(z, math.inf), None, rough, math.inf, 1)
        if self.rtol < _ROUGH and here.residual < math.inf and num_steps < self.max_steps:
            here = self.at(here.z, self.rtol)
            here, hessian, num_steps = self._descend(here, hessian, self.rtol, self.rtol, num_steps + 1)
        return here, num_steps

    def _descend(
        self, here: _Balance, hessian: Tensor | None, rtol: float, accuracy: float, num_steps: int
    ) -> tuple[_Balance, Tensor, int]:
        hessian, length = 2 * torch.eye(len(here.z)).to(here.z) if hessian is None else hessian, 1.0
        while rtol < here.residual < math.inf and num_steps < self.max_steps and length > 0.5**_HALVINGS:
            step = -length * torch.linalg.solve(hessian, here.gradient)
            v = torch.linalg.solve_triangular(here.frame.mT, step[:, None], upper=True)[:, 0]
            there = self.at(_walk(self.metric, here.z, v), accuracy)
            num_steps += 1
            if _improves(here, there, step):
                hessian = _updated(hessian, step, there.gradient - here.gradient)
                here, length = there, 1.0
            else:
                length *= 0.5
        return here, hessian, num_steps


def _factor(M: Tensor) -> Tensor:
    """The Cholesky factor of a tensor; directions that it does not see count a little, so that it has one."""
    spare = 1e-10 * M.diagonal().amax().clamp_min(torch.finfo(M.dtype).tiny ** 0.5)
    return torch.linalg.cholesky(M + spare * torch.eye(len(M), dtype=M.dtype, device=M.device))


def _walk(metric: Metric, z: Tensor, v: Tensor) -> Tensor:
    """Where the geodesic arrives, which follows the data; the straight step if it does not."""
    if isinstance(metric, Flat):
        return z + v
    flow = exponential(metric, z, v, rtol=1e-4, atol=1e-4, max_steps=50)
    return flow.end if bool(flow.converged) else z + v


def _improves(here: _Balance, there: _Balance, step: Tensor) -> bool:
    """Whether the variance falls, beyond the error of distances; no point that had a path may have lost it."""
    if not bool((there.known | ~here.known).all()):
        return False
    error = max(_NOISE, min(1e-3 * here.noise, 1e-4))
    expected = (1 + error) * here.variance + _SUFFICIENT * (here.gradient @ step)
    return bool(there.variance <= expected) or bool((there.known & ~here.known).any())


def _updated(hessian: Tensor, step: Tensor, change: Tensor) -> Tensor:
    """The BFGS update; skipped where it would lose positive definiteness."""
    pushed = hessian @ step
    along, before = step @ change, step @ pushed
    if not along > 1e-3 * before:
        return hessian
    return hessian + torch.outer(change, change) / along - torch.outer(pushed, pushed) / before


def _start(points: Tensor, share: Tensor) -> Tensor:
    """The point nearest to the flat mean of those that count."""
    gaps = (points - share @ points).square().sum(-1)
    return points[torch.where(share > 0, gaps, torch.inf).argmin()]


def _status(best: _Balance, rtol: float, num_steps: int, max_steps: int) -> str:
    if best.num_failed:
        return (
            f"{best.num_failed} of {len(best.logs.converged)} paths from the mean did not converge; see pullback.logarithm at the "
            "mean for which, and pass init=, a solver, or fewer points"
        )
    if best.residual <= rtol:
        if best.noise <= _MARGIN * rtol:
            return "converged"
        return (
            f"the logarithms balance to {rtol:.1g} standard deviations, but they are known only to {best.noise:.1g}: smooth the "
            f"decoder's extrapolation, or be content with rtol={best.noise:.0e}"
        )
    if num_steps >= max_steps:
        return f"the variance was still falling after {num_steps} steps; raise max_steps"
    return (
        f"no step lowers the variance, yet the mean logarithm is {best.residual:.1g} standard deviations long; points near "
        "the cut locus of the mean have no unique path: loosen rtol, or give another start"
    )


def _checked(points: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor]:
    """Points, and their weights as shares of one."""
    if points.ndim != 2 or len(points) == 0 or not points.is_floating_point():
        raise ValueError(
            f"The mean needs floating-point codes of shape (n, d), at least one; got {tuple(points.shape)}, {points.dtype}. "
            "Use codes.flatten(0, -2)."
        )
    if weights is None:
        weights = torch.ones(len(points), dtype=points.dtype, device=points.device)
    weights = weights.detach().to(points)
    if weights.shape != (len(points),) or not bool((weights >= 0).all()) or not 0 < weights.sum() < torch.inf:
        raise ValueError(
            f"Weights must be {len(points)} numbers that are finite, not negative and not all zero; got shape "
            f"{tuple(weights.shape)}. Leave them out for equal weights."
        )
    return points.detach(), weights / weights.sum()
