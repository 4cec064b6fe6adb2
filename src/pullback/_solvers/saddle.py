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
_STEPS = (0.02, 0.1, 0.5)
# Powers of four by which the shift may grow, and inverse iterations: the second iterate is within a per cent of the
# direction on all saddles of test_saddles_are_left.
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
    """The most negative direction of the exact Hessian, ``(B, T - 1, d)``."""
    num_inner, d = nodes.shape[1] - 2, nodes.shape[2]
    hessian = model.diagonal + model.curvature
    scale = model.diagonal.diagonal(dim1=-2, dim2=-1).abs().mean((1, 2)) / (num_inner + 1) ** 2
    eye = torch.eye(hessian.shape[-1], dtype=hessian.dtype, device=hessian.device)
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(model.gradient.shape[1:], generator=generator, dtype=torch.float64).to(hessian.dtype)
    x = beside(noise, hessian).expand_as(model.gradient)

    def solve(power: Tensor) -> tuple[Tensor, Tensor]:
        shift = (1e-3 * scale * 4.0**power)[:, None, None, None]
        return solve_tridiagonal(hessian + shift * eye, model.upper, x)

    least, most = torch.zeros_like(scale), torch.full_like(scale, _NUM_SHIFTS)
    for _ in range(_NUM_SHIFTS.bit_length()):
        middle = ((least + most) / 2).floor()
        _, positive = solve(middle)
        least, most = torch.where(positive, least, middle + 1), torch.where(positive, middle, most)
    for _ in range(_NUM_ITERATIONS):
        x, _ = solve(most)
        x = x / x.flatten(1).norm(dim=1)[:, None, None].clamp_min(torch.finfo(x.dtype).tiny)
    return x.flatten(1)[:, : num_inner * d].unflatten(1, (num_inner, d)).nan_to_num(0.0)
