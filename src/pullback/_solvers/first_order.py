"""Adam and L-BFGS for a batch of splines, each curve with step sizes, line search and memory of its own.

Both take an energy that gives values and gradients for any number of curves, and return the curves with a `Status` each. Curves
whose status is settled leave the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from pullback._numerics.rows import put, take
from pullback._solvers.base import Status

Energy = Callable[[Tensor], tuple[Tensor, Tensor]]
Memory = TypeVar("Memory", "_Moments", "_Pairs")

_PATIENCE = 20  # steps of Adam without progress after which its step size is halved
_MEMORY = 10  # pairs of steps and gradient changes that L-BFGS keeps


@dataclass(frozen=True)
class Splines:
    """Splines under way, one entry a curve in every field."""

    index: Tensor
    knots: Tensor  # (B, K, d)
    energy: Tensor
    gradient: Tensor  # (B, K - 2, d)
    extent: Tensor  # length of the first step
    status: Tensor
    num_steps: Tensor


def _moved(curves: Splines, step: Tensor) -> Tensor:
    return curves.knots + torch.nn.functional.pad(step, (0, 0, 1, 1))


@dataclass(frozen=True)
class _Moments:
    """What Adam remembers of each curve: its best knots and energy, running moments, step size, and two counts."""

    knots: Tensor
    energy: Tensor
    first: Tensor
    second: Tensor
    rate: Tensor
    age: Tensor
    waited: Tensor


def adam(problem: Energy, curves: Splines, rtol: float, max_steps: int) -> Splines:
    """Adam (Kingma and Ba 2015) with restarts: from the best point, at half the step size, whenever progress ends."""
    zero, none = torch.zeros_like(curves.gradient), torch.zeros_like(curves.num_steps)
    memory = _Moments(curves.knots, curves.energy, zero, zero, curves.extent, none, none)
    result = take(curves, curves.index)
    for _ in range(max_steps):
        slow = (memory.rate <= 1e-3 * curves.extent) & (curves.status == Status.MAX_STEPS)
        curves = replace(curves, status=torch.where(slow, int(Status.CONVERGED), curves.status))
        curves, memory = _retire(result, replace(curves, knots=memory.knots), curves, memory)
        if len(curves.index) == 0:
            break
        curves, memory = _adam_step(problem, curves, memory, rtol)
    put(result, curves.index, replace(curves, knots=memory.knots))
    return result


def _adam_step(problem: Energy, curves: Splines, memory: _Moments, rtol: float) -> tuple[Splines, _Moments]:
    first, second = 0.9 * memory.first + 0.1 * curves.gradient, 0.99 * memory.second + 0.01 * curves.gradient**2
    age = (memory.age + 1)[:, None, None]
    direction = (first / (1 - 0.9**age)) / (second / (1 - 0.99**age)).sqrt().clamp_min(torch.finfo(first.dtype).tiny)
    knots = _moved(curves, -memory.rate[:, None, None] * direction)
    energy, gradient = problem(knots)
    waited = torch.where(energy < (1 - rtol) * memory.energy, 0, memory.waited + 1)
    tired = (waited >= _PATIENCE) | ~torch.isfinite(energy)
    lower = (energy < memory.energy)[:, None, None]
    best = torch.where(lower, knots, memory.knots)
    if tired.any():
        knots = torch.where(tired[:, None, None], best, knots)
        gradient = gradient.index_put((tired,), problem(best[tired])[1])
    memory = _Moments(
        knots=best,
        energy=torch.where(lower[:, 0, 0], energy, memory.energy),
        first=torch.where(tired[:, None, None], 0, first),
        second=torch.where(tired[:, None, None], 0, second),
        rate=torch.where(tired, 0.5, 1.0) * memory.rate,
        age=torch.where(tired, 0, memory.age + 1),
        waited=torch.where(tired, 0, waited),
    )
    return replace(curves, knots=knots, gradient=gradient, num_steps=curves.num_steps + 1), memory


@dataclass(frozen=True)
class _Pairs:
    """What L-BFGS remembers of each curve: its last steps and changes of gradient ``(B, m, n)``, and its damping."""

    steps: Tensor
    changes: Tensor
    damping: Tensor


def lbfgs(problem: Energy, curves: Splines, rtol: float, max_steps: int) -> Splines:
    """L-BFGS (Nocedal and Wright 2006, 7.2) with a backtracking line search, all curves at once."""
    history = curves.gradient.new_zeros(len(curves.index), _MEMORY, curves.gradient[0].numel())
    memory = _Pairs(history, history, torch.ones_like(curves.energy))
    result = take(curves, curves.index)
    for _ in range(max_steps):
        direction = _quasi_newton(curves, memory)
        predicted = -(direction * curves.gradient.flatten(1)).sum(-1)
        stalled = torch.where(memory.damping < 1e-8, int(Status.STALLED), curves.status)
        status = torch.where(predicted <= rtol * curves.energy, int(Status.CONVERGED), stalled)
        status = torch.where(curves.status == Status.MAX_STEPS, status, curves.status)
        curves = replace(curves, status=status)
        direction = direction[status == Status.MAX_STEPS]
        curves, memory = _retire(result, curves, curves, memory)
        if len(curves.index) == 0:
            break
        curves, memory = _lbfgs_step(problem, curves, memory, direction)
    put(result, curves.index, curves)
    return result


def _lbfgs_step(problem: Energy, curves: Splines, memory: _Pairs, direction: Tensor) -> tuple[Splines, _Pairs]:
    step = memory.damping[:, None] * direction
    knots = _moved(curves, step.reshape(curves.gradient.shape))
    energy, gradient = problem(knots)
    slope = (step * curves.gradient.flatten(1)).sum(-1)
    accept = energy <= curves.energy + 1e-4 * slope
    change = (gradient - curves.gradient).flatten(1)
    curved = accept & ((step * change).sum(-1) > 1e-10 * step.norm(dim=-1) * change.norm(dim=-1))
    memory = _Pairs(
        steps=_remember(memory.steps, step, curved),
        changes=_remember(memory.changes, change, curved),
        damping=torch.where(accept, (4 * memory.damping).clamp_max(1), 0.25 * memory.damping),
    )
    here = accept[:, None, None]
    moved = replace(
        curves,
        knots=torch.where(here, knots, curves.knots),
        energy=torch.where(accept, energy, curves.energy),
        gradient=torch.where(here, gradient, curves.gradient),
        num_steps=curves.num_steps + 1,
    )
    return moved, memory


def _remember(history: Tensor, entry: Tensor, where: Tensor) -> Tensor:
    return torch.where(where[:, None, None], torch.cat([history[:, 1:], entry[:, None]], 1), history)


def _quasi_newton(curves: Splines, memory: _Pairs) -> Tensor:
    """The two-loop recursion; empty places of the memory are zero and change nothing."""
    q, tiny = curves.gradient.flatten(1), torch.finfo(curves.energy.dtype).tiny
    products = (memory.steps * memory.changes).sum(-1)
    inverse = torch.where(products > 0, 1 / products.clamp_min(tiny), 0)
    shares: list[Tensor] = []
    for i in reversed(range(_MEMORY)):
        shares.append(inverse[:, i] * (memory.steps[:, i] * q).sum(-1))
        q = q - shares[-1][:, None] * memory.changes[:, i]
    newest = memory.changes[:, -1].square().sum(-1)
    first = curves.extent / q.abs().amax(-1).clamp_min(tiny)
    q = q * torch.where(newest > 0, products[:, -1] / newest.clamp_min(tiny), first)[:, None]
    for i in range(_MEMORY):
        share = inverse[:, i] * (memory.changes[:, i] * q).sum(-1)
        q = q + (shares[-1 - i] - share)[:, None] * memory.steps[:, i]
    return -q


def _retire(result: Splines, final: Splines, curves: Splines, memory: Memory) -> tuple[Splines, Memory]:
    """Writes the curves whose status is settled to `result`; the others go on."""
    settled = curves.status != Status.MAX_STEPS
    put(result, curves.index[settled], take(final, settled))
    return take(curves, ~settled), take(memory, ~settled)
