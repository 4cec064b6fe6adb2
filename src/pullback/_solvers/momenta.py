r"""Momenta of discrete paths under a metric that has no embedding.

The energy of the minimum on T segments has a derivative in the first node, of which only the first chord knows. Those on T, 2T and
4T segments are extrapolated; where that is not good enough, T is doubled.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pullback._curves.curve import CubicSpline
from pullback._numerics.spline import refine
from pullback._solvers.discrete import DiscreteEnergy
from pullback._solvers.extremals import Extremals, Report
from pullback._solvers.levels import measure, romberg
from pullback._solvers.newton import Minimizer

_MIN_SEGMENTS, _MAX_SEGMENTS = 8, 64  # of the coarsest curve that is solved
_FINEST = 4096  # segments beyond which nothing is refined
_MAX_STEPS = (200, 40)  # on the coarsest curve, and on each of the finer ones


def solve(discrete: DiscreteEnergy, index: Tensor, paths: Tensor, num_segments: Tensor, report: Report) -> None:
    """Solves the curves near ``paths (B, n, d)``, beginning with about `num_segments` segments, until the report is content."""
    levels = num_segments.clamp(_MIN_SEGMENTS, _MAX_SEGMENTS)
    for T in levels.unique().tolist():
        rows = levels == T
        _solve(discrete, index[rows], CubicSpline(paths[rows]).resample(T + 1), report)


def _solve(discrete: DiscreteEnergy, index: Tensor, nodes: Tensor, report: Report) -> None:
    levels = [_minima(discrete, nodes, _MAX_STEPS[0])]
    while len(index):
        while len(levels) < 3:
            levels.append(_minima(discrete, refine(levels[-1], 2), _MAX_STEPS[1]))
        energy, momentum = _momentum(discrete, levels)
        measured = measure(discrete, levels[-1]).energy
        rest = report(Extremals(index, energy, measured, momentum, torch.zeros_like(energy)))
        if levels[-1].shape[1] > _FINEST:
            break
        index, levels = index[rest], [nodes[rest] for nodes in levels[1:]]


def _minima(discrete: DiscreteEnergy, nodes: Tensor, max_steps: int) -> Tensor:
    minimizer = Minimizer(rtol=1e-12, max_steps=max_steps, exact_below=1e-2, exact_above=0.0)
    return minimizer.run(discrete, nodes, torch.full_like(nodes[:, 0, 0], 1e-3)).nodes


def _momentum(discrete: DiscreteEnergy, levels: list[Tensor]) -> tuple[Tensor, Tensor]:
    r"""Extrapolated energies of the discrete minima, and :math:`-\frac12` their derivatives in the first node."""
    with torch.enable_grad():
        start = levels[0][:, 0].detach().requires_grad_()
        energies = []
        for nodes in levels:
            chord = discrete.chords(torch.stack([start, nodes[:, 1]], 1))[0][:, 0]
            rest = discrete.energy(nodes[:, 1:]).detach() / (nodes.shape[1] - 2)
            energies.append((nodes.shape[1] - 1) * (chord + rest))
        square = romberg(*energies)[0]
        (slope,) = torch.autograd.grad(square.sum(), start)
    return square.detach(), -0.5 * slope
