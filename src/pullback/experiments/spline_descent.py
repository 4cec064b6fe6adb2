r"""The paper's solver: Adam on the knots of a cubic spline.

The path is a cubic spline with a few free knots. Its energy :math:`T \sum_i \mathrm{ds}^2(c(t_i), c(t_{i+1}))` is
minimized by automatic differentiation (Arvanitidis et al. 2022, section 4). Nothing is asked of the metric but `ds2`.
`pullback.GaussNewton` needs a tenth of the steps or less, and can say what it left undone; this solver is here to
reproduce the paper and to be compared with.

Every curve is a problem of its own: step sizes and moments are kept for each, and finished curves leave the batch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pullback._curves.curve import CubicSpline, Polyline
from pullback._curves.steps import MAX_DECODED, safe_sqrt, squared_steps
from pullback._decoders.contract import unvalidated
from pullback._metrics.base import Metric
from pullback._numerics.rows import put, take
from pullback._solvers.base import Solution, Solver, Status
from pullback._typing import Float

# Steps without progress after which the step size is halved. The paper does not say; 20 of its 150 steps.
_PATIENCE = 20


@dataclass(frozen=True)
class SplineDescent(Solver):
    """Minimizes the energy of a cubic spline by Adam (the paper's solver).

    A curve counts as converged when Adam has stopped gaining `rtol` of its energy at step sizes down to a thousandth of
    the first. That says that the *spline* is a minimum: how near it is to a geodesic depends on the number of knots,
    and `error` only measures how far its speed is from constant.

    Args:
        num_knots: knots of the spline, both end points included.
        num_segments: segments on which the energy is summed; even.
        learning_rate: length of the first step, as a fraction of the extent of the start path.
        max_steps: evaluations of one curve's energy and gradient.
        rtol: relative decrease of the energy that does not matter anymore.
    """

    num_knots: int = 12
    num_segments: int = 128
    learning_rate: float = 0.05
    max_steps: int = 1000
    rtol: float = 1e-6

    def __post_init__(self) -> None:
        if self.num_knots < 4 or self.num_segments < 2 or self.num_segments % 2:
            raise ValueError(
                "A spline needs num_knots >= 4 and an even num_segments >= 2; got "
                f"num_knots={self.num_knots} and num_segments={self.num_segments}."
            )

    def solve(self, metric: Metric, nodes: Float[Tensor, "B n d"]) -> Solution:
        fine = Polyline(nodes.detach()).resample(4 * max(self.num_knots, nodes.shape[1]) + 1)
        knots = least_squares_knots(fine, self.num_knots)
        problem = _Problem(metric, _weights(self.num_knots, self.num_segments, knots))
        with unvalidated():
            curves = _start(problem, knots, self.learning_rate)
            return _measured(problem, _adam(problem, curves, self.rtol, self.max_steps))


def least_squares_knots(points: Float[Tensor, "B n d"], num_knots: int) -> Float[Tensor, "B k d"]:
    """The knots of the spline nearest to points at uniform parameters, with the same end points."""
    t = torch.linspace(0, 1, points.shape[-2], dtype=points.dtype, device=points.device)
    basis = CubicSpline(torch.eye(num_knots, dtype=points.dtype, device=points.device))(t)
    begin, end = points[..., :1, :], points[..., -1:, :]
    rest = points - basis[:, :1] * begin - basis[:, -1:] * end
    return torch.cat([begin, torch.linalg.pinv(basis[:, 1:-1]) @ rest, end], dim=-2)


@dataclass
class _Problem:
    metric: Metric
    weights: Tensor  # (T + 1, K): from knots to the points between which the energy is summed
    num_calls: int = 0
    num_decoded: int = 0

    def __call__(self, knots: Tensor) -> tuple[Tensor, Tensor]:
        """Energies ``(B,)`` of splines and their gradients in the inner knots, ``(B, K - 2, d)``, in chunks."""
        parts = [self._differentiate(chunk) for chunk in knots.split(max(1, MAX_DECODED // len(self.weights)))]
        energy, gradient = (torch.cat(part) for part in zip(*parts, strict=True))
        return energy, torch.where(torch.isfinite(energy)[:, None, None], gradient, torch.nan)

    def _differentiate(self, knots: Tensor) -> tuple[Tensor, Tensor]:
        self.num_calls += 1
        self.num_decoded += 3 * knots.shape[0] * len(self.weights)
        with torch.enable_grad():
            knots = knots.detach().requires_grad_()
            ds2 = squared_steps(self.metric, self.weights @ knots)[0]
            energy = ds2.shape[-1] * ds2.sum(-1)
            (gradient,) = torch.autograd.grad(energy.sum(), knots)
        return energy.detach(), gradient[:, 1:-1]


def _weights(num_knots: int, num_segments: int, like: Tensor) -> Tensor:
    return CubicSpline(torch.eye(num_knots, dtype=like.dtype, device=like.device)).resample(num_segments + 1)


@dataclass(frozen=True)
class _Splines:
    """Splines on their way, with one entry per curve in every field: Adam's position, its best point, its moments."""

    index: Tensor
    knots: Tensor  # (B, K, d)
    gradient: Tensor  # (B, K - 2, d)
    best: Tensor  # knots of least energy
    energy: Tensor  # their energy
    first: Tensor
    second: Tensor
    extent: Tensor  # length of the first step
    rate: Tensor  # length of the next one
    age: Tensor  # steps since the last restart
    waited: Tensor  # steps without progress
    status: Tensor
    num_steps: Tensor


def _start(problem: _Problem, knots: Tensor, learning_rate: float) -> _Splines:
    energy, gradient = problem(knots)
    index = torch.arange(len(knots), device=knots.device)
    extent = (knots.amax(1) - knots.amin(1)).amax(-1)
    still = extent <= 64 * torch.finfo(extent.dtype).eps * knots.abs().amax((1, 2))
    status = torch.where(still, int(Status.CONVERGED), int(Status.MAX_STEPS))
    status = torch.where(torch.isfinite(energy), status, int(Status.NOT_FINITE))
    zero, none = torch.zeros_like(gradient), torch.zeros_like(index)
    return _Splines(
        index=index,
        knots=knots,
        gradient=gradient,
        best=knots,
        energy=energy,
        first=zero,
        second=zero,
        extent=learning_rate * extent,
        rate=learning_rate * extent,
        age=none,
        waited=none,
        status=torch.where(_ends_are_finite(problem.metric, knots), status, int(Status.BAD_END_POINT)),
        num_steps=none,
    )


def _ends_are_finite(metric: Metric, knots: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.isfinite(squared_steps(metric, knots[:, [0, -1]])[0][:, 0])


def _adam(problem: _Problem, curves: _Splines, rtol: float, max_steps: int) -> _Splines:
    """Adam (Kingma and Ba 2015) with restarts: from the best point, at half the step size, whenever progress ends."""
    result = take(curves, curves.index)
    for _ in range(max_steps):
        slow = (curves.rate <= 1e-3 * curves.extent) & (curves.status == Status.MAX_STEPS)
        curves = replace(curves, status=torch.where(slow, int(Status.CONVERGED), curves.status))
        settled = curves.status != Status.MAX_STEPS
        put(result, curves.index[settled], take(curves, settled))
        curves = take(curves, ~settled)
        if len(curves.index) == 0:
            break
        curves = _step(problem, curves, rtol)
    put(result, curves.index, curves)
    return result


def _step(problem: _Problem, curves: _Splines, rtol: float) -> _Splines:
    first, second = 0.9 * curves.first + 0.1 * curves.gradient, 0.99 * curves.second + 0.01 * curves.gradient**2
    age = (curves.age + 1)[:, None, None]
    direction = (first / (1 - 0.9**age)) / (second / (1 - 0.99**age)).sqrt().clamp_min(torch.finfo(first.dtype).tiny)
    knots = curves.knots - torch.nn.functional.pad(curves.rate[:, None, None] * direction, (0, 0, 1, 1))
    energy, gradient = problem(knots)
    waited = torch.where(energy < (1 - rtol) * curves.energy, 0, curves.waited + 1)
    tired = (waited >= _PATIENCE) | ~torch.isfinite(energy)
    lower = energy < curves.energy
    best = torch.where(lower[:, None, None], knots, curves.best)
    if tired.any():
        knots = torch.where(tired[:, None, None], best, knots)
        gradient = gradient.index_put((tired,), problem(best[tired])[1])
    return replace(
        curves,
        knots=knots,
        gradient=gradient,
        best=best,
        energy=torch.where(lower, energy, curves.energy),
        first=torch.where(tired[:, None, None], 0, first),
        second=torch.where(tired[:, None, None], 0, second),
        rate=torch.where(tired, 0.5, 1.0) * curves.rate,
        age=torch.where(tired, 0, curves.age + 1),
        waited=torch.where(tired, 0, waited),
        num_steps=curves.num_steps + 1,
    )


def _measured(problem: _Problem, curves: _Splines) -> Solution:
    """Energy and length of order four; the error is that of the sums, or how far the speed is from constant."""
    nodes, num_segments = problem.weights @ curves.best, len(problem.weights) - 1
    nodes[:, 0], nodes[:, -1] = curves.knots[:, 0], curves.knots[:, -1]
    with torch.no_grad():
        fine, coarse = squared_steps(problem.metric, nodes, strides=(1, 2))
    energies = [ds2.shape[-1] * ds2.sum(-1) for ds2 in (fine, coarse)]
    lengths = [safe_sqrt(ds2).sum(-1) for ds2 in (fine, coarse)]
    energy, length = ((4 * x - y) / 3 for x, y in (energies, lengths))
    size = energy.abs().clamp_min(torch.finfo(energy.dtype).tiny)
    error = 0.5 * torch.maximum((energies[0] - energies[1]).abs() / 3, energy - length**2) / size
    return Solution(
        nodes=nodes,
        energy=energy,
        length=length,
        error=error,
        status=curves.status,
        strict=torch.zeros_like(curves.status, dtype=torch.bool),
        num_steps=curves.num_steps,
        num_segments=torch.full_like(curves.num_steps, num_segments),
        num_calls=problem.num_calls,
        num_decoded=problem.num_decoded,
    )
