"""Newton's method for curves in elements: from a rough path to a minimum of its energy, to the last digits."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pullback._numerics.rows import put, take
from pullback._numerics.tridiagonal import solve_tridiagonal
from pullback._solvers.elements import DEGREE, ElementEnergy, Expansion
from pullback._typing import Float

_LEAST_DAMPING = 1e-9  # keeps directions the decoder ignores solvable
_EVEN = 0.1  # share of the mean that all directions are damped with, as walls stand also where the metric is small
_SLIGHT_DAMPING = 1e-6  # up to which convergence is quadratic, also in directions the decoder hardly uses
_PATIENCE = 10  # rejected steps in a row after which a curve is given up


@dataclass(frozen=True)
class Relaxed:
    """Curves after their descent; one entry a curve in every field.

    `momentum` is minus half the derivative of the energy in the first node; `left` estimates how far the curve still is from the
    minimum, relative to its length, by the last step.
    """

    nodes: Float[Tensor, "B n d"]
    energy: Float[Tensor, " B"]
    momentum: Float[Tensor, "B d"]
    left: Float[Tensor, " B"]


@dataclass
class _Curves:
    """Curves under way; one entry a curve in every field."""

    index: Tensor
    nodes: Tensor
    times: Tensor
    damping: Tensor
    growth: Tensor  # factor by which the next rejection raises the damping
    left: Tensor


def relax(elements: ElementEnergy, nodes: Tensor, times: Tensor, damping: Tensor, *, max_steps: int = 60) -> Relaxed:
    """Minima of the energy near ``nodes``: steps of Newton's, damped as far as the energy demands it.

    Where the exact Hessian is not positive definite, the Gauss-Newton matrix takes its place. Energies do not tell nodes apart that
    differ by less than half the digits; from there on steps are Newton's own, and end when the next would change nothing. Paths that are
    near the minimum want little `damping` to begin with, others about 1e-3.
    """
    index = torch.arange(len(nodes), device=nodes.device)
    ones = torch.ones_like(times[:, 0])
    curves = _Curves(index, nodes.clone(), times, damping, 4 * ones, ones)
    model = elements.expand(nodes, times)
    result = _outcome(curves, model)
    for _ in range(max_steps):
        curves, model, settled = _step(elements, curves, model)
        put(result, curves.index, _outcome(curves, model))
        rest = ~settled & (curves.growth <= 4.0 * 2**_PATIENCE)
        curves, model = take(curves, rest), take(model, rest)
        if len(curves.index) == 0:
            break
    return result


def _outcome(curves: _Curves, model: Expansion) -> Relaxed:
    return Relaxed(curves.nodes.clone(), model.energy.clone(), -0.5 * model.gradient[:, 0], curves.left.clone())


def _step(elements: ElementEnergy, curves: _Curves, model: Expansion) -> tuple[_Curves, Expansion, Tensor]:
    """One step of every curve, and which of them it ends."""
    step, predicted, exact = _solve(curves, model)
    trial = curves.nodes + torch.nn.functional.pad(step, (0, 0, 1, 0))
    energy = elements.energy(trial, curves.times)  # costs a fraction of an expansion
    eps = torch.finfo(trial.dtype).eps
    noise = 256 * eps * model.energy
    flat = predicted <= noise
    gain = (model.energy - energy) / predicted
    accepted = torch.isfinite(energy) & torch.where(flat, energy <= model.energy + noise, gain > 1e-3)
    settled = accepted & exact & (predicted <= eps**0.75 * model.energy) & (curves.damping <= _SLIGHT_DAMPING)
    left = torch.where(settled, predicted / model.energy, (predicted / model.energy).clamp_min(0).sqrt())
    shrink = torch.where(flat, 1e-3, (1 - (2 * gain - 1) ** 3).clamp(0.1, 1.0))
    raised = (curves.damping * curves.growth).clamp_min(_SLIGHT_DAMPING)
    if accepted.any():
        put(model, accepted, elements.expand(trial[accepted], curves.times[accepted]))
    curves = replace(
        curves,
        nodes=torch.where(accepted[:, None, None], trial, curves.nodes),
        damping=torch.where(accepted, (curves.damping * shrink).clamp_min(_LEAST_DAMPING), raised),
        growth=torch.where(accepted, 4.0, 2 * curves.growth),
        left=left,
    )
    return curves, model, settled


def _solve(curves: _Curves, model: Expansion) -> tuple[Tensor, Tensor, Tensor]:
    """The damped step of the nodes after the first, the decrease the model predicts, and where the Hessian is the exact one."""
    B, K, n = model.diagonal.shape[:3]
    scale = model.diagonal.diagonal(dim1=-2, dim2=-1).unflatten(-1, (DEGREE, -1))
    scale = (scale + _EVEN * scale.mean(-1, keepdim=True)).flatten(2) / (K * DEGREE) ** 2
    damped = curves.damping[:, None, None] * scale
    slope = model.gradient[:, 1:].clone()
    slope[:, -1] = 0
    slope = slope.reshape(B, K, n)
    gauss = model.diagonal + torch.diag_embed(damped)
    step, exact = solve_tridiagonal(gauss + model.curvature, model.upper, -slope)
    if not exact.all():
        other = ~exact
        step[other] = solve_tridiagonal(gauss[other], model.upper[other], -slope[other])[0]
    predicted = 0.5 * (damped * step * step - slope * step).sum((1, 2))
    return step.reshape(B, K * DEGREE, -1), predicted, exact
