"""Geodesics between the ends of given paths, to many digits: curves in elements, refined where it takes more of
them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pullback._numerics.lobatto import DEGREE
from pullback._numerics.rows import concatenate, moved_to, take
from pullback._solvers.base import Status
from pullback._solvers.elements import ElementEnergy, Local, assemble
from pullback._solvers.mesh import SIZES, adapted, halved, moved, placed, uniform
from pullback._solvers.newton import Minimizer
from pullback._solvers.plan import COARSE_STEPS

# Tails of the elements on which a path is first solved, and steps there (logarithms of the VAE,
# benchmarks/geodesics.py).
_COARSE_TAIL, _MAX_STEPS = 5e-3, 3 * COARSE_STEPS
# Damping for paths as they come, and for curves that were solved on fewer elements.
_FAR, _NEAR = 1e-3, 1e-8
# Excess from which on it says little of how many elements are needed: three times as many.
_MOST_AT_ONCE = 3.0**DEGREE
# Change of the energy on halves of the elements from which on a curve hops over a wall (test_logarithm).
_AGREEMENT = 1e-2
# Error of the momentum over the root of the decrease still to come, relative to the energy: 7 was met on the sphere S^5
# (test_three_digits_by_default).
_CAUTION = 10.0


@dataclass
class Extremals:
    """What is known of curves that were solved on some mesh; one entry per curve in every field.

    `energy` is that of the discrete problem, `measured` that of the same curve on elements half as long or shorter,
    which agrees unless the curve hops over something. `error` estimates the relative error of the energy, and that of
    the momentum due to what is left of the descent.
    """

    index: Tensor
    energy: Tensor
    measured: Tensor
    momentum: Tensor
    error: Tensor


@dataclass
class Level:
    """Curves of as many elements each; one entry per curve in every field."""

    index: Tensor
    edges: Tensor  # (B, K + 1): times at which elements begin and end
    nodes: Tensor  # (B, K p + 1, d)
    damping: Tensor  # of the first step
    rtol: Tensor  # relative error of the momentum that is aimed at


Excess = Callable[[Extremals, Level, Local], Tensor]


@dataclass(frozen=True)
class ExtremalSolver:
    """Solves curves in elements until none needs refinement.

    Attributes:
        elements: the energy.
        rtol: relative error of the momentum aimed at, to begin with.
        num_segments: of all paths, as the solver found them; solutions are measured on as many.
        excess: is told what is known of some curves, with the expansions of their elements before they moved, and says
            how many times too large what they leave is: 0 for those that need no more elements, 1 where that is not
            known.
        max_elements: beyond which no curve is refined.
    """

    elements: ElementEnergy
    rtol: float
    num_segments: Tensor
    excess: Excess
    max_elements: int = SIZES[-1]

    def solve(self, index: Tensor, paths: Tensor) -> list[Level]:
        """Solves the curves between the ends of ``paths (B, n, d)``, beginning with the splines through their nodes."""
        rows = torch.arange(len(paths), device=paths.device)
        waiting, ready = [(rows, uniform(len(paths), paths, SIZES[0]))], []
        while waiting:
            rows, edges = waiting.pop()
            nodes = placed(paths[rows], edges)
            tails = self.elements.tails(nodes)
            coarse = (tails.amax(1) > 2 * _COARSE_TAIL) & (edges.shape[1] <= self.max_elements // 4)
            facts = (torch.full_like(edges[:, 0], value) for value in (_FAR, self.rtol))
            ready.append(take(Level(index[rows], edges, nodes, *facts), ~coarse))
            meshes = adapted(edges[coarse], tails[coarse], _COARSE_TAIL, torch.tensor(edges.shape[1]))
            waiting += [(rows[coarse][chosen], new) for chosen, new in meshes]
        return self._run(ready)

    def refine(self, levels: list[Level], wanted: Tensor, rtol: float) -> list[Level]:
        """Solves those of the curves that are `wanted`, a mask over what `index` names, on more elements."""
        pending, rest = [], []
        for level in levels:
            again = wanted[level.index] & (level.edges.shape[1] <= self.max_elements)
            rest.append(take(level, ~again))
            if again.any():
                some = take(level, again)
                pending += self._finer(replace(some, rtol=some.rtol.clamp_max(rtol)), torch.ones_like(some.rtol))
        return [*rest, *self._run(pending)]

    def _run(self, pending: list[Level]) -> list[Level]:
        """Solves curves level by level, the coarsest first."""
        done = []
        while pending := [level for level in pending if len(level.index)]:
            width = min(level.edges.shape[1] for level in pending)
            level = concatenate([x for x in pending if x.edges.shape[1] == width])
            local = self.elements.expand_each(level.nodes, level.edges.diff(dim=1), exact=True)
            level, found, settled = self._solved(level, local)
            pending = [x for x in pending if x.edges.shape[1] != width]
            excess = self.excess(found, level, local)
            more = (excess > 0) & settled & (width <= self.max_elements)
            done.append(take(level, ~more))
            if more.any():
                pending += self._finer(take(level, more), excess[more].clamp_max(_MOST_AT_ONCE))
        return done

    def _solved(self, level: Level, local: Local) -> tuple[Level, Extremals, Tensor]:
        """The curves after their descent, what is known of them, and whether it came to an end."""
        times = level.edges.diff(dim=1)
        minimizer = Minimizer(_MAX_STEPS, always_exact=True)
        start = {"constants": times, "model": assemble(*vars(local).values())}
        descent = minimizer.run(self.elements, level.nodes, level.damping, (level.rtol / _CAUTION) ** 2, **start)
        descent = moved_to(descent, times.device)
        fine = halved(level.edges)
        while DEGREE * fine.shape[1] < self.num_segments[level.index].amax():
            fine = halved(fine)
        measured = self.elements.energy(moved(descent.nodes, level.edges, fine), fine.diff(dim=1))
        change = (measured - descent.energy).abs() / descent.energy
        left = _CAUTION * (descent.remaining / descent.energy).clamp_min(0).sqrt()
        settled = descent.status == Status.CONVERGED
        damping = torch.where(settled & (change <= _AGREEMENT), _NEAR, _FAR).to(change)
        momentum = self.elements.momentum(descent.nodes, times)
        found = Extremals(level.index, descent.energy, measured, momentum, torch.maximum(change, left))
        return replace(level, nodes=descent.nodes, damping=damping), found, settled

    def _finer(self, level: Level, excess: Tensor) -> list[Level]:
        """The curves with more to aim at, on meshes of more elements, placed by the tails on halves of those they have.
        What is left falls with the power p of the size of elements."""
        fine, width = halved(level.edges), level.edges.shape[1]
        at_least, rtol = (width * excess ** (1 / DEGREE)).floor().long(), level.rtol / excess
        tails = self.elements.tails(moved(level.nodes, level.edges, fine))
        meshes = adapted(fine, tails, 0.1 * rtol[:, None] ** 0.5, at_least)
        finer = [(replace(take(level, rows), rtol=rtol[rows]), new) for rows, new in meshes]
        return [replace(some, edges=new, nodes=moved(some.nodes, some.edges, new)) for some, new in finer]
