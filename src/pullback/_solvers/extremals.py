"""Geodesics between the ends of given paths, to many digits: curves in elements, which are refined where it takes more of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pullback._numerics.rows import concatenate, take
from pullback._solvers.elements import ElementEnergy
from pullback._solvers.mesh import SIZES, adapted, halved, moved, placed, tails, uniform
from pullback._solvers.relaxation import relax

_COARSE = 5e-3  # tails of the elements on which a path is first solved
_FAR, _NEAR = 1e-3, 1e-8  # damping for paths as they come, and for curves that were solved on fewer elements
_AGREEMENT = 1e-2  # between energies of a curve on elements and on their halves, unless it hops over a wall
_UNSETTLED = 1e-6
_CAREFUL = 100.0  # error of the momentum over the square of the largest tail; 200 covers all we met


@dataclass
class Extremals:
    """What is known of curves that were solved on some mesh; one entry a curve in every field.

    `energy` is that of the discrete problem, `measured` that of the same curve on elements half as long, which agrees unless the curve
    hops over something. `error` estimates the relative error of energy and momentum.
    """

    index: Tensor
    energy: Tensor
    measured: Tensor
    momentum: Tensor
    error: Tensor


@dataclass
class Level:
    """Curves of as many elements each; one entry a curve in every field."""

    index: Tensor
    edges: Tensor  # (B, K + 1): times at which elements begin and end
    nodes: Tensor  # (B, K p + 1, d)
    damping: Tensor  # of the first step


Report = Callable[[Extremals], Tensor]


def solve(elements: ElementEnergy, index: Tensor, paths: Tensor, goal: float, report: Report) -> list[Level]:
    """Solves the curves between the ends of ``paths (B, n, d)``, beginning with the splines through their nodes.

    `goal` is the tail an element may have. `report` is told what is known of some curves, which `index` names, and says which of them
    need more elements. Returns the curves as they were solved last.
    """
    rows = torch.arange(len(paths), device=paths.device)
    waiting, ready = [(rows, uniform(len(paths), paths, SIZES[0]))], []
    while waiting:
        rows, edges = waiting.pop()
        nodes = placed(paths[rows], edges)
        shares = tails(elements, nodes)
        coarse = (shares.amax(1) > 2 * _COARSE) & (edges.shape[1] <= SIZES[-3])
        ready.append(take(Level(index[rows], edges, nodes, torch.full_like(edges[:, 0], _FAR)), ~coarse))
        meshes = adapted(edges[coarse], shares[coarse], _COARSE, edges.shape[1])
        waiting += [(rows[coarse][chosen], new) for chosen, new in meshes]
    return _run(elements, ready, goal, report)


def refine(elements: ElementEnergy, levels: list[Level], wanted: Tensor, goal: float, report: Report) -> list[Level]:
    """Solves those of the curves that are `wanted`, a mask over what `index` names, on more elements."""
    pending, rest = [], []
    for level in levels:
        again = wanted[level.index] & (level.edges.shape[1] <= SIZES[-1])
        rest.append(take(level, ~again))
        if again.any():
            pending += _finer(elements, take(level, again), goal)
    return [*rest, *_run(elements, pending, goal, report)]


def _run(elements: ElementEnergy, pending: list[Level], goal: float, report: Report) -> list[Level]:
    """Solves curves level by level, the coarsest first, until the report is content or no finer mesh is allowed."""
    done = []
    while pending := [level for level in pending if len(level.index)]:
        width = min(level.edges.shape[1] for level in pending)
        level, found = _solved(elements, concatenate([x for x in pending if x.edges.shape[1] == width]))
        pending = [x for x in pending if x.edges.shape[1] != width]
        more = report(found) & (width <= SIZES[-1])
        done.append(take(level, ~more))
        if more.any():
            pending += _finer(elements, take(level, more), goal)
    return done


def _solved(elements: ElementEnergy, level: Level) -> tuple[Level, Extremals]:
    """The curves after their descent, and what is known of them."""
    relaxed = relax(elements, level.nodes, level.edges.diff(dim=1), level.damping)
    fine = halved(level.edges)
    measured = elements.energy(moved(relaxed.nodes, level.edges, fine), fine.diff(dim=1))
    change = (measured - relaxed.energy).abs() / relaxed.energy
    damping = torch.where((relaxed.left > _UNSETTLED) | ~(change <= _AGREEMENT), _FAR, _NEAR).to(change)
    unresolved = _CAREFUL * tails(elements, relaxed.nodes).amax(1).square()
    error = torch.stack([unresolved, change, relaxed.left]).amax(0)
    found = Extremals(level.index, relaxed.energy, measured, relaxed.momentum, error)
    return Level(level.index, level.edges, relaxed.nodes, damping), found


def _finer(elements: ElementEnergy, level: Level, goal: float) -> list[Level]:
    """The curves on meshes of more elements, placed by the tails on halves of those they have."""
    fine = halved(level.edges)
    shares = tails(elements, moved(level.nodes, level.edges, fine))
    return [
        Level(level.index[rows], new, moved(level.nodes[rows], level.edges[rows], new), level.damping[rows])
        for rows, new in adapted(fine, shares, goal, level.edges.shape[1])
    ]
