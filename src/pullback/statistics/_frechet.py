r"""The Fréchet mean: the point with the least sum of squared distances to given points.

At the mean the logarithms balance, :math:`\sum_i w_i \mathrm{Log}_\mu(z_i) = 0`, since :math:`-2 M(z) \sum_i w_i
\mathrm{Log}_z(z_i)` is the gradient of the sum (Karcher 1977; Pennec 2006). Mean and paths are solved for together
(`_stars.py`): Newton's iteration needs a few steps also where the curvature is strong.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pullback._curves.steps import squared_steps
from pullback._decoders.contract import as_codes, unvalidated
from pullback._geometry.geodesic import Starts
from pullback._metrics.base import Metric, codes_for
from pullback._options import check_options
from pullback._progress import progress
from pullback._solvers.base import Solver
from pullback._typing import Array, CodeSet, Float
from pullback.statistics._means import ACCEPT, Balance
from pullback.statistics._paths import Paths
from pullback.statistics._stars import star

# A path from the mean that was solved anew and has less energy by this share runs in another valley, and takes its
# place. So does one in the place of a path that has so much left to gain and does not move.
_OTHER_VALLEY = 1e-2
# Standard deviations that a mean moves before its paths are solved anew (0.2 finds the same means of 200 codes under
# four decoders, d = 16), and times that they are.
_FAR, _MAX_FRESH = 0.5, 6
# Accuracy of the first paths: they are refined when the mean is near.
_FIRST_RTOL = 5e-2
# Residual at which the paths are resolved as well as `rtol` asks: coarse ones find the way to there. A choice.
_NEAR = 3e-3
# Points whose mean begins that of over twice as many, sought up to this residual, as means differ by more. Choices.
_FEW, _ROUGHLY = 50, 3e-2
# Share of `rtol` that is aimed at where the residual is still above it.
_LAST = 0.1
# Steps in which straight lines from candidates for the first mean are measured.
_STEPS = 16
# By how much the error of the logarithms may exceed the residual before the message says so.
_MARGIN = 10.0


@dataclass(frozen=True, eq=False, repr=False)
class FrechetMean:
    r"""The mean of points under a metric, and what is known about it.

    Attributes:
        mean: the point, ``(d,)``.
        variance: :math:`\sum_i w_i d^2(\mu, z_i)` with weights that sum to one; infinite if no path was found.
        distances: of the points from the mean, ``(n,)``.
        logarithms: :math:`\mathrm{Log}_\mu(z_i)`, ``(n, d)``; NaN, as the distance, where no path leads or the weight
            is zero.
        residual: the length of :math:`\sum_i w_i \mathrm{Log}_\mu(z_i)` over the standard deviation: 0 at a mean.
        error: what the errors of the logarithms may contribute to `residual`.
        converged: whether the logarithms balance, as far as they are known, and every path was found.
        message: the same as a sentence.
        num_steps: times that all paths were expanded.

    >>> import torch, pullback as pb
    >>> metric = pb.FisherRaoMetric(lambda z: torch.distributions.Normal(z, 0.5))
    >>> pb.statistics.frechet_mean(metric, [[0.0], [2.0]])
    FrechetMean(2 points, variance 4; converged)
    """

    mean: Float[Tensor, " d"]
    variance: Float[Tensor, ""]
    distances: Float[Tensor, " n"]
    logarithms: Float[Tensor, "n d"]
    residual: float
    error: float
    converged: bool
    message: str
    num_steps: int

    def __repr__(self) -> str:
        return f"FrechetMean({len(self.distances)} points, variance {float(self.variance):.4g}; {self.message})"


@progress("mean")
def frechet_mean(
    metric: Metric,
    points: CodeSet,
    weights: Float[Tensor, " n"] | Array | None = None,
    *,
    init_mean: Float[Tensor, " d"] | Array | None = None,
    solver: Solver | None = None,
    init: Starts = None,
    rtol: float = 1e-6,
    max_steps: int = 50,
) -> FrechetMean:
    r"""The Fréchet mean :math:`\arg\min_z \sum_i w_i d^2(z, z_i)`, by Newton's method on the mean and all paths.

    A local minimum: unique if the points lie in a ball of less than a quarter of a closed geodesic where the curvature
    is positive (Karcher 1977), and always where it is not. Points that no path reaches are left out, and the message
    says so. For decoders with kinks (rectified units) it ends where they allow no more: `FrechetMean.error` says where.

    Args:
        metric: the geometry.
        points: codes, shape ``(n, d)``.
        weights: not negative, shape ``(n,)``; equal by default. Only their ratios matter.
        init_mean: where to begin; by default the flat mean, or the point nearest to it where that lies off the data.
        solver: of the first paths, as in `pullback.geodesic`.
        init: where each of these starts, as in `pullback.geodesic`.
        rtol: largest length of the mean logarithm, relative to the standard deviation of the points.
        max_steps: how many times all paths may be expanded.

    Example:
        >>> import torch, pullback as pb
        >>> from torch.distributions import Poisson
        >>> metric = pb.FisherRaoMetric(lambda z: Poisson(z.exp()))  # flat in the square root of the rate
        >>> z = torch.tensor([[0.0], [2.0]], dtype=torch.float64)
        >>> pb.statistics.frechet_mean(metric, z).mean
        tensor([1.2402], dtype=torch.float64)
    """
    check_options(rtol=rtol, max_steps=max_steps)
    points, share = _checked(metric, points, weights)
    used, paths = share > 0, Paths(metric, init, solver, _FIRST_RTOL)
    some, share = points[used], share[used]
    if init_mean is not None:
        mean = as_codes(init_mean, points).detach()
        if mean.shape != points.shape[1:] or not mean.isfinite().all():
            raise ValueError(
                f"init_mean must be one finite code of {points.shape[1]} dimensions; got shape {tuple(mean.shape)}."
            )
    else:
        mean = _first_mean(metric, some, share)
        if len(some) > 2 * _FEW:
            few = torch.linspace(0, len(some) - 1, _FEW, device=some.device).long()
            mean = _approach(paths, some[few], share[few], mean, max_steps, _ROUGHLY).centers[0]
    found = _approach(paths, some, share, mean, max_steps, max(rtol, _NEAR))
    found.refine(rtol, max_steps)
    found.descend(rtol if found.residual <= rtol else _LAST * rtol, max_steps)
    logarithms, distances = torch.full_like(points, torch.nan), torch.full_like(points[:, 0], torch.nan)
    known = found.share > 0
    logs = torch.where(known[:, None], found.logarithms(some), torch.nan)
    logarithms[used], distances[used] = logs, torch.where(known, found.expansion.energy.clamp_min(0).sqrt(), torch.nan)
    message = _message(found, rtol, max_steps)
    return FrechetMean(
        mean=found.centers[0],
        variance=found.variance[0] if known.any() else torch.full_like(found.variance[0], torch.inf),
        distances=distances,
        logarithms=logarithms,
        residual=float(found.residual),
        error=float(found.noise()),
        converged=message.startswith("converged"),
        message=message,
        num_steps=found.num_steps,
    )


def _approach(paths: Paths, points: Tensor, share: Tensor, mean: Tensor, max_steps: int, rtol: float) -> Balance:
    """The mean with coarse paths, solved anew where it moved far or moves no more, until that finds no better ones."""
    labels = torch.zeros(len(points), dtype=torch.long, device=points.device)
    found = Balance(paths, star(paths, mean.expand_as(points), points), labels, share, mean[None])
    for _ in range(_MAX_FRESH):
        found.descend(rtol, max_steps)
        gap, stuck = found.centers[0] - mean, bool(found.stuck)
        far = bool(gap @ paths.tensor(mean) @ gap > _FAR**2 * found.variance[0])
        lost = stuck & (found.expansion.inner.abs() > _OTHER_VALLEY * found.expansion.energy)
        rows = ((found.share > 0) & (lost | far)).nonzero()[:, 0]
        if not len(rows) or paths.is_flat:
            break
        fresh = star(paths, found.centers.expand(len(rows), -1), points[rows])
        better = lost[rows] | (fresh.energy() < (1 - _OTHER_VALLEY) * found.expansion.energy[rows])
        if not better.any():
            break
        if not better.all():
            rows = rows[better]
            fresh = star(paths, found.centers.expand(len(rows), -1), points[rows])
        found.restart(found.star.replaced(rows, fresh))
        mean = found.centers[0]
    return found


def _first_mean(metric: Metric, points: Tensor, share: Tensor) -> Tensor:
    """The flat mean or the point nearest to it, whichever has the smaller energy of straight lines to the points."""
    middle = share @ points
    choices = torch.stack([middle, points[(points - middle).square().sum(-1).argmin()]])
    t = torch.linspace(0, 1, _STEPS + 1, dtype=points.dtype, device=points.device)[:, None]
    with torch.no_grad(), unvalidated():
        steps = squared_steps(metric, torch.lerp(choices[:, None, None], points[:, None], t))[0]
    return choices[(steps.sum(-1).nan_to_num(torch.inf) @ share).nan_to_num(torch.inf).argmin()]


def _message(found: Balance, rtol: float, max_steps: int) -> str:
    failed = int((~found.star.converged | (found.share == 0)).sum())
    residual, noise = float(found.residual), float(found.noise())
    if failed:
        return (
            f"{failed} of {len(found.labels)} paths from the mean did not converge; see pullback.geodesic at the mean "
            "for which, and pass init=, a solver, or fewer points"
        )
    if noise > ACCEPT:
        return (
            f"the logarithms at the mean are known only to {noise:.1g} standard deviations, as the finest paths do not "
            "resolve the geodesics; smooth the decoder's extrapolation, or leave out far points"
        )
    kinked = found.mostly_kinked
    if noise > _MARGIN * rtol and residual <= (ACCEPT if kinked else max(noise, rtol)):
        limit = "the decoder's kinks allow" if kinked else "the finest paths tell"
        return f"converged, as far as {limit}: the logarithms balance to {max(residual, noise):.1g} standard deviations"
    if residual <= max(rtol, 8 * torch.finfo(found.centers.dtype).eps ** 0.5):
        return "converged"
    if found.num_steps >= max_steps:
        return f"the variance was still falling after {found.num_steps} steps; raise max_steps"
    cause = "points near the cut locus of the mean have no unique path: loosen rtol, or give another init_mean"
    if kinked:
        cause = "it jumps at the decoder's kinks: smooth them (SiLU or softplus units), or take the mean as it is"
    return f"no step lowers the variance, yet the mean logarithm is {residual:.1g} standard deviations long; {cause}"


def _checked(metric: Metric, points: Tensor | Array, weights: Tensor | Array | None) -> tuple[Tensor, Tensor]:
    """Points, and their weights as shares of one."""
    (points,) = codes_for(metric, points, a_set=True, finite=True)
    share = torch.ones_like(points[:, 0]) if weights is None else as_codes(weights, points).detach()
    if share.shape != (len(points),) or not bool((share >= 0).all()) or not 0 < share.sum() < torch.inf:
        raise ValueError(
            f"Weights must be {len(points)} numbers that are finite, not negative and not all zero; got shape "
            f"{tuple(share.shape)}. Leave them out for equal weights."
        )
    return points.detach(), share / share.sum()
