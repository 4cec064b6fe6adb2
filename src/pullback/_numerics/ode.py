r"""A batched adaptive Runge-Kutta integrator: every trajectory keeps its own clock.

Geodesics of one batch need very different step sizes. So the step size, the error test (maximum norm) and the end
belong to each trajectory; those that finish or fail leave the batch, the rest go on.

The method is of order eight, with error estimates of orders five and three and an interpolant of order seven: Dormand
and Prince's pair in the form of Hairer, Nørsett and Wanner, *Solving Ordinary Differential Equations I* (1993), II.5
and II.6; its coefficients are those of `scipy.integrate.DOP853`. At the tolerances geometry asks for (1e-9 to 1e-12) it
needs a third to a sixth of the evaluations of their pair of orders five and four. The field is autonomous.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from scipy.integrate import DOP853
from torch import Tensor

from pullback._numerics.rows import concatenate, take

Field = Callable[[Tensor], Tensor]

_NUM_STAGES = 12


class Outcome(enum.IntEnum):
    """How the integration of one trajectory ended."""

    FINISHED = 0
    TOO_MANY_STEPS = 1
    STEP_TOO_SMALL = 2
    NOT_FINITE = 3


@dataclass(frozen=True)
class DenseOutput:
    """The states between the steps: a polynomial of degree seven per step and trajectory."""

    knots: Tensor  # (n, s + 1), padded with inf
    coefficients: Tensor  # (n, s, 8, k)

    def __call__(self, t: Tensor) -> Tensor:
        """States ``(n, q, k)`` at the times ``t`` of shape ``(n, q)``; NaN outside the time the trajectory covers."""
        num_steps = torch.isfinite(self.knots).sum(-1, keepdim=True) - 1
        step = torch.searchsorted(self.knots, t.contiguous(), right=True) - 1
        step = torch.minimum(step, num_steps - 1).clamp_min(0)
        left, right = self.knots.gather(1, step), self.knots.gather(1, step + 1)
        index = step[:, :, None, None].expand(-1, -1, *self.coefficients.shape[2:])
        c, x = self.coefficients.gather(1, index).unbind(-2), ((t - left) / (right - left))[..., None]
        # c₀ + x (c₁ + (1 - x) (c₂ + x (c₃ + …)))
        states = torch.zeros_like(c[0])
        for i in range(len(c) - 1, 0, -1):
            states = (states + c[i]) * (x if i % 2 else 1 - x)
        states = states + c[0]
        inside = (t >= left) & (t <= right) & torch.isfinite(right)
        return torch.where(inside[..., None], states, torch.nan)


@dataclass(frozen=True)
class Flow:
    """End states of ``n`` trajectories and how they came about, each field of leading shape ``(n,)``."""

    y: Tensor
    t: Tensor
    rtol: Tensor
    outcome: Tensor
    num_steps: Tensor
    num_evaluations: Tensor
    dense: DenseOutput | None


def integrate(
    field: Field,
    y: Tensor,
    *,
    rtol: float = 1e-10,
    atol: float | Tensor = 1e-10,
    max_steps: int = 2000,
    kinked_rtol: float | None = None,
    dense: bool = False,
) -> Flow:
    """Integrates ``y' = field(y)`` from time 0 to 1 for all rows of ``y``, shape ``(n, k)``, differentiably.

    The field is asked for the velocities of any subset of the trajectories. Where one is not finite the step is
    shortened, so it may return NaN outside its domain. The estimated local error of every component stays below
    ``atol + rtol |y|``, with `atol` one number or ``(n,)`` of them; from where on its field has been seen to jump, a
    trajectory is followed with the tolerance `kinked_rtol`. After `max_steps` attempts it is given up as stiff. `dense`
    keeps the interpolants: eight states per step and trajectory, three more evaluations per accepted step.
    """
    k = field(y)
    count = torch.zeros(len(y), dtype=torch.long, device=y.device)
    allowed = torch.as_tensor(atol, dtype=y.dtype, device=y.device).expand(len(y))
    relative = torch.full_like(allowed, rtol)
    h = _initial_step(field, y, k, relative, allowed)
    never, rows = torch.full_like(h, torch.inf), torch.arange(len(y), device=y.device)
    outcome = torch.where(torch.isfinite(k).all(-1) & torch.isfinite(y).all(-1), -1, Outcome.NOT_FINITE)
    batch = _Batch(rows, outcome, torch.zeros_like(h), h, relative, allowed, y, k, count, count, h, never, count)
    gone: list[_Batch] = []
    record: list[tuple[Tensor, ...]] | None = [] if dense else None
    while len(batch.rows) or not gone:
        leave = batch.outcome >= 0
        if leave.any() or not gone:
            gone.append(take(batch, leave))
            batch = take(batch, ~leave)
        if len(batch.rows):
            batch = _advance(field, batch, kinked_rtol or 0.0, max_steps, record)
    joined = concatenate(gone)
    whole = take(joined, joined.rows.argsort())
    extra = 0 if record is None else len(DOP853.A_EXTRA)
    num_evaluations = 2 + _NUM_STAGES * whole.tries + extra * whole.steps
    interpolants = None if record is None else _dense_output(record, whole.steps, y)
    return Flow(whole.y, whole.t, whole.rtol, whole.outcome, whole.steps, num_evaluations, interpolants)


@dataclass(frozen=True)
class _Batch:
    """The trajectories still under way."""

    rows: Tensor
    outcome: Tensor  # -1: under way
    t: Tensor
    h: Tensor
    rtol: Tensor
    atol: Tensor
    y: Tensor
    k: Tensor
    tries: Tensor
    steps: Tensor
    # of attempts that failed in a row: the last step size, its error over the tolerance (infinite if the last attempt
    # succeeded), and how many failed without getting better
    failed_h: Tensor
    failed_ratio: Tensor
    num_stuck: Tensor

    def after(self, h: Tensor, ratio: Tensor, accept: Tensor, kinked_rtol: float) -> dict[str, Tensor]:
        """What the last attempt says about kinks: tolerances, and the record of failed attempts."""
        # A shorter step over a smooth field has an error smaller by its eighth power. Where it is not smaller by its
        # square, twice in a row, the field jumps.
        failed = ~accept & torch.isfinite(ratio)
        stuck = failed & (ratio > (h / self.failed_h).square() * self.failed_ratio)
        num_stuck = torch.where(accept, 0, self.num_stuck + stuck)
        loose = num_stuck >= 2
        least = torch.where(loose, kinked_rtol, 0.0).to(h)
        return {
            "rtol": torch.maximum(self.rtol, least),
            "atol": torch.maximum(self.atol, least),
            "failed_h": h,
            "failed_ratio": torch.where(failed & ~loose, ratio, torch.inf),
            "num_stuck": torch.where(loose, 0, num_stuck),
        }


def _advance(
    field: Field, batch: _Batch, kinked_rtol: float, max_steps: int, record: list[tuple[Tensor, ...]] | None
) -> _Batch:
    last = batch.h >= 1 - batch.t
    h = torch.where(last, 1 - batch.t, batch.h)
    # thirteen stage velocities and the new state; the last stage is the first of the next step
    stages = [batch.k]
    for row in range(1, _NUM_STAGES):
        stages.append(field(batch.y + h[:, None] * _combine("A", row, stages)))
    new = batch.y + h[:, None] * _combine("B", 0, stages)
    stages.append(field(new))
    ratio = _error(stages, h, _scale(torch.maximum(batch.y.abs(), new.abs()), batch.rtol, batch.atol))
    finite = torch.isfinite(ratio)
    accept = finite & (ratio <= 1)
    t = torch.where(last, torch.ones_like(h), batch.t + h)
    if record is not None and accept.any():
        pieces = _polynomial(field, batch.y[accept], new[accept], [k[accept] for k in stages], h[accept])
        record.append((batch.rows[accept], batch.steps[accept], t[accept], pieces))
    growth = torch.where(finite, 0.9 * ratio.clamp(1e-10, 1e10) ** -0.125, 0.2).clamp(0.2, 10.0)
    tries, following, eps = batch.tries + 1, h * growth, torch.finfo(h.dtype).eps
    outcome = torch.full_like(batch.rows, -1)
    outcome[tries >= max_steps] = Outcome.TOO_MANY_STEPS
    outcome[following < eps ** (2 / 3)] = Outcome.STEP_TOO_SMALL
    # an edge of the domain need not be known to all digits
    outcome[~finite & (following < eps ** (1 / 3))] = Outcome.NOT_FINITE
    outcome[accept & last] = Outcome.FINISHED
    return replace(
        batch,
        outcome=outcome,
        t=torch.where(accept, t, batch.t),
        h=following,
        y=torch.where(accept[:, None], new, batch.y),
        k=torch.where(accept[:, None], stages[-1], batch.k),
        tries=tries,
        steps=batch.steps + accept,
        **batch.after(h, ratio, accept, kinked_rtol),
    )


def _combine(table: str, row: int, stages: list[Tensor]) -> Tensor:
    """The sum of the stages, each ``(n, k)``, weighted by a row of the method's coefficients."""
    k = torch.stack(stages)
    return torch.tensordot(_coefficients(table, k.dtype, k.device)[row, : len(stages)], k, 1)


@functools.lru_cache
def _coefficients(table: str, dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.as_tensor(np.atleast_2d(getattr(DOP853, table)), dtype=dtype, device=device)


def _error(stages: list[Tensor], h: Tensor, scale: Tensor) -> Tensor:
    """Estimated error over tolerance: the estimate of order five, damped where that of order three is much larger."""
    fifth = (_combine("E5", 0, stages) / scale).detach().abs().amax(-1)
    third = (_combine("E3", 0, stages) / scale).detach().abs().amax(-1)
    return h * torch.where(fifth == 0, 0, fifth**2 / (fifth**2 + 0.01 * third**2).sqrt())


def _scale(size: Tensor, rtol: Tensor, atol: Tensor) -> Tensor:
    """The error allowed in components of the given size; never below the rounding of the largest of them."""
    return atol[:, None] + rtol[:, None] * size + 4 * torch.finfo(size.dtype).eps * size.amax(-1, keepdim=True)


def _initial_step(field: Field, y: Tensor, k: Tensor, rtol: Tensor, atol: Tensor) -> Tensor:
    """First step size from the size of the field and of its change along one Euler step (Hairer et al., II.4)."""
    y, k = y.detach(), k.detach()
    scale = _scale(y.abs(), rtol, atol)
    size, speed = (y / scale).abs().amax(-1), (k / scale).abs().amax(-1)
    h = (0.01 * size / speed).nan_to_num(1e-6, 1e-6).clamp(1e-6, 1.0)
    change = ((field(y + h[:, None] * k).detach() - k) / scale).abs().amax(-1) / h
    steepest = torch.maximum(speed, change).nan_to_num(torch.inf)
    return torch.minimum((0.01 / steepest) ** 0.125, 100 * h).clamp(1e-6, 1.0)


def _polynomial(field: Field, y: Tensor, new: Tensor, stages: list[Tensor], h: Tensor) -> Tensor:
    """The interpolant's eight coefficients, ``(n, 8, k)``, in the nested basis of `DenseOutput`; three more stages."""
    h, stages = h[:, None], list(stages)
    for row in range(len(DOP853.A_EXTRA)):
        stages.append(field(y + h * _combine("A_EXTRA", row, stages)))
    rise, start, end = new - y, h * stages[0], h * stages[_NUM_STAGES]
    higher = [h * _combine("D", row, stages) for row in range(len(DOP853.D))]
    return torch.stack([y, rise, start - rise, 2 * rise - start - end, *higher], 1)


def _dense_output(record: list[tuple[Tensor, ...]], num_steps: Tensor, y: Tensor) -> DenseOutput:
    num = max([1, *num_steps.tolist()])
    knots = y.new_full((len(y), num + 1), torch.inf)
    knots[:, 0] = 0
    coefficients = y.new_zeros(len(y), num, 8, y.shape[-1])
    if record:
        rows, index, t, polynomials = (torch.cat(parts) for parts in zip(*record, strict=True))
        knots[rows, index + 1] = t
        coefficients = coefficients.index_put((rows, index), polynomials)
    return DenseOutput(knots, coefficients)
