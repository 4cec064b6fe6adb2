r"""First-order descent on a spline: the way of the paper, for any energy that can be differentiated once.

The path is a natural cubic spline with a few free knots, and its energy :math:`T \sum_i \mathrm{ds}^2(c(t_i), c(t_{i+1}))` is minimised by
automatic differentiation (Arvanitidis et al. 2022, section 4). Nothing is asked of the metric but `ds2`: no tensor, no
embedding, no exactness, so this is the solver for divergences known by sampling only. Where there is more, `GaussNewton` needs
a tenth of the steps or less, and can say what it left undone.

Every curve is its own problem: step sizes, line searches and memories are kept for each, and finished curves leave the batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from pullback._curves.curve import CubicSpline, Polyline
from pullback._curves.steps import MAX_DECODED, safe_sqrt, squared_steps
from pullback._decoders.contract import unvalidated
from pullback._metrics.base import Metric
from pullback._solvers.base import Solution, Solver, Status
from pullback._solvers.discrete import Work
from pullback._solvers.first_order import Splines, adam, lbfgs
from pullback._typing import Float


@dataclass(frozen=True)
class SplineDescent(Solver):
    """Minimises the energy of a cubic spline by a first-order method (the paper's solver).

    A curve counts as converged when L-BFGS predicts that less than `rtol` of its energy is left to gain, or when Adam has
    stopped gaining that much at step sizes down to a thousandth of the first. Both say that the *spline* is a minimum: how
    near it is to a geodesic depends on the number of knots, and `error` only measures how far its speed is from constant.

    Args:
        num_knots: knots of the spline, both end points included.
        num_segments: segments on which the energy is summed; even.
        optimizer: ``"lbfgs"``, or ``"adam"`` for energies that are noisy.
        learning_rate: length of the first step, as a fraction of the extent of the start path.
        max_steps: evaluations of one curve's energy and gradient.
        rtol: relative decrease of the energy that does not matter any more.
    """

    num_knots: int = 12
    num_segments: int = 128
    optimizer: Literal["adam", "lbfgs"] = "lbfgs"
    learning_rate: float = 0.05
    max_steps: int = 1000
    rtol: float = 1e-6

    def __post_init__(self) -> None:
        if self.optimizer not in ("adam", "lbfgs"):
            raise ValueError(f"optimizer must be 'adam' or 'lbfgs'; got {self.optimizer!r}.")
        if self.num_knots < 3 or self.num_segments < 2 or self.num_segments % 2:
            raise ValueError(
                "A spline needs num_knots >= 3 and an even num_segments >= 2; got "
                f"num_knots={self.num_knots} and num_segments={self.num_segments}."
            )

    def solve(self, metric: Metric, nodes: Float[Tensor, "B n d"]) -> Solution:
        fine = Polyline(nodes.detach()).resample(4 * max(self.num_knots, nodes.shape[1]) + 1)
        knots = CubicSpline.through(fine, num_knots=self.num_knots).points
        problem = _Problem(metric, _weights(self.num_knots, self.num_segments, knots), Work())
        descend = adam if self.optimizer == "adam" else lbfgs
        with unvalidated():
            found = descend(problem, _start(problem, knots, self.learning_rate), self.rtol, self.max_steps)
            return _measured(problem, found)


@dataclass(frozen=True)
class _Problem:
    metric: Metric
    weights: Tensor  # (T + 1, K): from knots to the points between which the energy is summed
    work: Work

    def __call__(self, knots: Tensor) -> tuple[Tensor, Tensor]:
        """Energies ``(B,)`` of splines and their gradients in the inner knots, ``(B, K - 2, d)``, in chunks."""
        parts = [self._differentiate(chunk) for chunk in knots.split(max(1, MAX_DECODED // len(self.weights)))]
        energy, gradient = (torch.cat(part) for part in zip(*parts, strict=True))
        return energy, torch.where(torch.isfinite(energy)[:, None, None], gradient, torch.nan)

    def _differentiate(self, knots: Tensor) -> tuple[Tensor, Tensor]:
        self.work.add(3 * knots.shape[0] * len(self.weights))
        with torch.enable_grad():
            knots = knots.detach().requires_grad_()
            ds2 = squared_steps(self.metric, self.weights @ knots)[0]
            energy = ds2.shape[-1] * ds2.sum(-1)
            (gradient,) = torch.autograd.grad(energy.sum(), knots)
        return energy.detach(), gradient[:, 1:-1]


def _weights(num_knots: int, num_segments: int, like: Tensor) -> Tensor:
    return CubicSpline(torch.eye(num_knots, dtype=like.dtype, device=like.device)).resample(num_segments + 1)


def _start(problem: _Problem, knots: Tensor, learning_rate: float) -> Splines:
    energy, gradient = problem(knots)
    index = torch.arange(len(knots), device=knots.device)
    ends = _ends_are_finite(problem.metric, knots)
    extent = (knots.amax(1) - knots.amin(1)).amax(-1)
    still = extent <= 64 * torch.finfo(extent.dtype).eps * knots.abs().amax((1, 2))
    status = torch.where(still, int(Status.CONVERGED), int(Status.MAX_STEPS))
    status = torch.where(torch.isfinite(energy), status, int(Status.NOT_FINITE))
    return Splines(
        index=index,
        knots=knots,
        energy=energy,
        gradient=gradient,
        extent=learning_rate * extent,
        status=torch.where(ends, status, int(Status.BAD_END_POINT)),
        num_steps=torch.zeros_like(index),
    )


def _ends_are_finite(metric: Metric, knots: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.isfinite(squared_steps(metric, knots[:, [0, -1]])[0][:, 0])


def _measured(problem: _Problem, curves: Splines) -> Solution:
    """Energy and length of order four; the error is that of the sums, or how far the speed is from constant."""
    nodes, num_segments = problem.weights @ curves.knots, len(problem.weights) - 1
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
        num_calls=problem.work.num_calls,
        num_decoded=problem.work.num_decoded,
    )
