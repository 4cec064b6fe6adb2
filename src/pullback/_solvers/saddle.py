"""Leaving a saddle: where a path would be called a minimum and its exact Hessian is not positive definite.

Gauss-Newton never leaves a set that a symmetry of the metric keeps fixed, such as the distributions that share one
parameter with both ends, although a shorter path may run outside of it. The exact Hessian tells. Its most negative
direction is found by inverse iteration, shifted until the matrix is positive definite, and the path is moved along it
as far as that lowers its energy most.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pullback._numerics.rows import beside
from pullback._numerics.tridiagonal import solve_tridiagonal
from pullback._solvers.objective import Expansion, Objective

# Steps along the direction that are tried, to both sides, as shares of the extent of the path (test_saddles_are_left).
_STEPS = (1e-3, 0.02, 0.5)
# Powers of four by which the shift may grow, also the halvings in which it is found, and the inverse iterations that
# follow (test_saddles_are_left).
_NUM_SHIFTS, _NUM_ITERATIONS = 20, 3


def escape(objective: Objective, nodes: Tensor, constants: Tensor, model: Expansion) -> tuple[Tensor, Tensor]:
    """The lowest curves found along the most negative direction of each Hessian, and how much lower they are.

    Where nothing is lower the curve stays, and the decrease is zero.
    """
    direction = _direction(nodes, model)
    extent = (nodes.amax(1) - nodes.amin(1)).amax(-1)
    size = extent / direction.abs().amax((1, 2)).clamp_min(torch.finfo(extent.dtype).tiny)
    shift = torch.nn.functional.pad(size[:, None, None] * direction, (0, 0, 1, 1))
    steps = torch.tensor([sign * s for s in _STEPS for sign in (1, -1)], dtype=nodes.dtype)
    tried = nodes + beside(steps, nodes)[:, None, None, None] * shift
    energies = objective.energy(tried.flatten(0, 1), constants.repeat(len(steps), 1)).nan_to_num(torch.inf)
    lowest, best = energies.unflatten(0, (len(steps), -1)).min(0)
    energy = beside(model.energy, lowest)
    found = tried[best, torch.arange(len(best), device=best.device)]
    return torch.where((lowest < energy)[:, None, None], found, nodes), (energy - lowest).clamp_min(0).cpu()


def _direction(nodes: Tensor, model: Expansion) -> Tensor:
    """The most negative direction of the exact Hessian in units of Euclidean energy, ``(B, T - 1, d)``: a smooth one,
    as directions that nodes share cost less of it than those of single nodes."""
    hessian = model.diagonal + model.curvature
    scale = model.diagonal.diagonal(dim1=-2, dim2=-1).abs().mean((1, 2))
    eye = torch.eye(hessian.shape[-1], dtype=hessian.dtype, device=hessian.device)
    noise = torch.randn(model.gradient.shape[1:], generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x = beside(noise.to(hessian.dtype), hessian).expand_as(model.gradient)

    def solve(power: Tensor) -> tuple[Tensor, Tensor]:
        stiffness = (1e-6 * scale * 4.0**power)[:, None, None, None] * eye
        padded = torch.nn.functional.pad(x, (0, 0, 1, 1))
        force = 2 * x - padded[:, :-2] - padded[:, 2:]
        return solve_tridiagonal(hessian + 2 * stiffness, model.upper - stiffness, force)

    least, most = torch.zeros_like(scale), torch.full_like(scale, _NUM_SHIFTS)
    for _ in range(_NUM_SHIFTS):
        middle = (least + most) / 2
        _, positive = solve(middle)
        least, most = torch.where(positive, least, middle), torch.where(positive, middle, most)
    for _ in range(_NUM_ITERATIONS):
        x, _ = solve(most)
        x = x / x.flatten(1).norm(dim=1)[:, None, None].clamp_min(torch.finfo(x.dtype).tiny)
    return x.nan_to_num(0.0)
