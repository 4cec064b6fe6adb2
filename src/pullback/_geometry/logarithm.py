r"""The logarithm: with which velocity a geodesic must leave ``a`` to be at ``b`` after unit time.

A discrete path knows that better than its first step tells. At the minimum of the discrete energy nothing but the end points can
change it, so its derivative in ``a`` (the momentum with which the path leaves) is that of the squared distance,

.. math:: \mathrm{Log}_a(b) = -\tfrac12\, M(a)^{-1}\, \frac{\partial d^2(a, b)}{\partial a},
          \qquad |\mathrm{Log}_a(b)|_{M(a)} = d(a, b).

It takes a minimum: a solver may leave a path whose length is good to three digits, and whose direction is not. So the path is
solved again, to the end, in a few polynomial elements (`pullback._solvers.elements`), which gives ten digits where the decoder is
smooth; for metrics without an embedding the squared distance is differentiated. How good the velocity is then shows by
itself, because it must have the length of the path; where it is not good enough, the path is refined.

That says little about the direction, and nothing about what the exponential map makes of the rest: where geodesics part fast, a
millionth at the start is a hundredth at the end. So each velocity is tried out, by one geodesic at moderate precision. Where that
misses ``b``, the path is refined further, and where that does not help the status says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pullback._curves.curve import CubicSpline
from pullback._curves.steps import safe_sqrt
from pullback._decoders.contract import unvalidated
from pullback._geometry.distance import differentiable_energy, discretised
from pullback._geometry.exponential import arrivals
from pullback._geometry.geodesic import Geodesic, Start, geodesic
from pullback._metrics.base import Metric
from pullback._metrics.connection import filtered_inverse
from pullback._solvers import extremals
from pullback._solvers.base import ConvergenceError, Solver
from pullback._solvers.discrete import DiscreteEnergy
from pullback._solvers.elements import ElementEnergy
from pullback._solvers.extremals import Extremals, Report
from pullback._typing import Bool, Float

_AGREEMENT = 1e-2  # a path whose energy differs by more when it is solved or measured anew has hopped over a wall
_ROUGH = 1e-4  # a velocity known no better, or with which b is missed by more, is not called a logarithm
_MISSED = 1e-5  # from which on a path is refined further
_TRIAL, _EXACT = 1e-7, 1e-10  # local errors of the geodesics that try velocities out, and of those that decide
_NUM_RETRIALS = 2
_MAX_STEPS = 1000


@dataclass(frozen=True, eq=False)
class Logarithm:
    r"""Initial velocities of the shortest paths found for a batch of pairs, and what is known about them.

    **Attributes:**

    - `velocity`: :math:`\mathrm{Log}_a(b)`. Where M(a) is singular, what it does not see of the velocity is that of the straight line,
      so that `pullback.expmap` arrives at ``b`` also in the latent dimensions the decoder ignores.
    - `distance`: its length :math:`|\mathrm{Log}_a(b)|_{M(a)}`, which is the distance.
    - `error`: estimate of the relative error of `velocity`, the largest of: how far the momentum is from having the length of the path,
      what more elements would change, and what is left of the descent.
    - `miss`: how far from ``b`` the geodesic with this velocity arrives, as a share of the distance; infinite where it does not
      arrive, NaN where it was not tried, because it was not asked for or the velocity is not known well enough.
    - `geodesic`: the paths the solver found, with its own status; they are solved to the end only for the velocity.
    """

    velocity: Float[Tensor, "*batch d"]
    distance: Float[Tensor, "*batch"]
    error: Float[Tensor, "*batch"]
    miss: Float[Tensor, "*batch"]
    geodesic: Geodesic

    @property
    def converged(self) -> Bool[Tensor, "*batch"]:
        """Whether the velocity is known to four digits or better, and leads to ``b`` to four digits if it was tried."""
        return (self.error <= _ROUGH) & ~(self.miss > _tolerated(self.miss.dtype))

    @property
    def messages(self) -> np.ndarray:
        """One sentence per pair, as an array of strings of shape ``(*batch,)``."""
        facts = (self.converged, self.error, self.miss, self.geodesic.converged, self.geodesic.messages)
        sentences = [_sentence(*fact) for fact in zip(*(f.flatten().tolist() for f in facts), strict=True)]
        return np.array(sentences, dtype=object).reshape(tuple(self.error.shape))


def _sentence(converged: bool, error: float, miss: float, solved: bool, found: str) -> str:
    if converged:
        return "converged"
    if not solved:
        return found
    if error <= _ROUGH:
        return (
            f"{found}; but the geodesic with this velocity misses b by {miss:.1g} of the distance, as neighbouring ones part fast: smooth "
            "the decoder's kinks or its extrapolation, or choose nearer codes"
        )
    return (
        f"{found}; but the velocity is known only to about {error:.1g}, as the finest elements do not resolve the geodesic: smooth the "
        "decoder's kinks or its extrapolation"
    )


def _tolerated(dtype: torch.dtype) -> float:
    return max(_ROUGH, torch.finfo(dtype).eps ** (1 / 3))


def logmap(
    metric: Metric,
    a: Float[Tensor, "*#batch d"],
    b: Float[Tensor, "*#batch d"],
    *,
    solver: Solver | None = None,
    init: Start | Sequence[Start] = None,
    rtol: float = 1e-6,
) -> Float[Tensor, "*batch d"]:
    r"""The logarithm :math:`\mathrm{Log}_a(b)`: the velocity at ``a`` of the shortest path found to ``b``, its length the distance.

    Inverse to `pullback.expmap` up to the cut locus. A constant: it carries no gradient.

    Args:
        metric: the geometry.
        a: codes, any shape ``(*batch, d)`` that broadcasts with ``b``.
        b: codes.
        solver: as in `pullback.geodesic`.
        init: as in `pullback.geodesic`.
        rtol: relative error sought; the path is refined until the velocity is as good, as far as that goes.

    Raises:
        ConvergenceError: if a velocity is not known to four digits. `pullback.logarithm` returns a status for each pair instead.
    """
    found = logarithm(metric, a, b, solver=solver, init=init, rtol=rtol)
    failed = (~found.converged).nonzero()
    if len(failed):
        first = tuple(failed[0].tolist())
        raise ConvergenceError(
            f"{len(failed)} of {found.converged.numel()} logarithms failed. The first, of pair {first}: {found.messages[first]}. "
            "pullback.logarithm returns the others, with a message for each.",
            found,
        )
    return found.velocity


def logarithm(
    metric: Metric,
    a: Float[Tensor, "*#batch d"],
    b: Float[Tensor, "*#batch d"],
    *,
    solver: Solver | None = None,
    init: Start | Sequence[Start] = None,
    rtol: float = 1e-6,
    check: bool = True,
) -> Logarithm:
    r"""Logarithms with a status for each pair: failures are reported by the result, not raised. Arguments as in `logmap`.

    With ``check=False`` the velocities are not tried out by the exponential map, which saves a third of the time and more.

    See Marsden and West 2001, *Discrete mechanics and variational integrators*, section 1, for the momenta of discrete paths.
    """
    path = geodesic(metric, a, b, solver=solver, init=init)
    batch, (n, d) = path.length.shape, path.curve.points.shape[-2:]
    found = _Velocities.of(path.curve.points.reshape(-1, n, d), path.length.flatten())
    known = (found.length > 0) & torch.isfinite(found.length) & torch.isfinite(found.nodes).all(-1).all(-1)
    index = known.nonzero()[:, 0]
    if len(index):
        with torch.no_grad(), unvalidated():
            discrete = discretised(metric, found.nodes[index])
            if discrete.num_parts:
                _by_elements(discrete, found, index, rtol, check)
            else:
                _by_gradient(metric, path, found, index, check)
    return Logarithm(
        velocity=found.velocity.reshape(*batch, d),
        distance=found.length.reshape(batch),
        error=found.error.reshape(batch),
        miss=found.miss.reshape(batch),
        geodesic=path,
    )


@dataclass
class _Velocities:
    """Paths of B pairs and what is known of their initial velocities; one entry a pair in every field."""

    nodes: Tensor
    bound: Tensor  # length of the path
    velocity: Tensor
    length: Tensor
    error: Tensor
    miss: Tensor

    @classmethod
    def of(cls, nodes: Tensor, length: Tensor) -> _Velocities:
        """To begin with only that of codes at no distance, which is a straight line: M sees nothing of it."""
        still = length == 0
        velocity = torch.where(still[:, None], nodes[:, -1] - nodes[:, 0], torch.nan)
        error = torch.where(still, 0, torch.inf).to(length)
        return cls(nodes, length, velocity, length.clone(), error, torch.full_like(length, torch.nan))


def _by_elements(discrete: DiscreteEnergy, found: _Velocities, index: Tensor, rtol: float, check: bool) -> None:
    """Velocities of the paths at `index`, solved in elements; those with which b is missed are solved in more of them."""
    elements = ElementEnergy.of(discrete, found.nodes[index])
    sought = max(0.01 * rtol if check else rtol, torch.finfo(found.length.dtype).eps ** (2 / 3))
    goal, report = 0.1 * sought**0.5, _report(discrete.metric, found, sought)
    levels = extremals.solve(elements, index, found.nodes[index], goal, report)
    if not check:
        return
    missed = _try_out(discrete.metric, found, index, _TRIAL)
    for _ in range(_NUM_RETRIALS if len(missed) else 0):
        goal, wanted = 0.1 * goal, torch.zeros_like(found.length, dtype=torch.bool).index_fill(0, missed, True)
        levels = extremals.refine(elements, levels, wanted, goal, report)
        missed = _try_out(discrete.metric, found, missed, _EXACT)


def _by_gradient(metric: Metric, path: Geodesic, found: _Velocities, index: Tensor, check: bool) -> None:
    """The same for a metric without an embedding: minus half the gradient of the squared distance."""
    ends = path.curve.points.reshape(-1, *path.curve.points.shape[-2:])[:, [0, -1]]
    with torch.enable_grad():
        start = ends[:, 0].detach().clone().requires_grad_()
        square = differentiable_energy(metric, path, start.reshape(*path.length.shape, -1), path.curve.end).flatten()
        (slope,) = torch.autograd.grad(square.sum(), start)
    energy, momentum = square.detach()[index], -0.5 * slope[index]
    report = _report(metric, found, 0.0)
    report(Extremals(index, energy, found.bound[index] ** 2, momentum, torch.zeros_like(energy)))
    if check:
        _try_out(metric, found, index, _TRIAL)


def _report(metric: Metric, found: _Velocities, sought: float) -> Report:
    """Turns energies and momenta into velocities, the path's own where solving it leads away from it; content if they are good."""

    def report(curves: Extremals) -> Tensor:
        index, square = curves.index, curves.energy
        begin, end = found.nodes[index, 0], found.nodes[index, -1]
        walled = ~((curves.measured - square).abs() <= _AGREEMENT * square)
        walled |= square > (1 + _AGREEMENT) * found.bound[index] ** 2
        tensor, line = metric.tensor(begin), end - begin
        bend = filtered_inverse(tensor) @ (
            curves.momentum[..., None] - tensor @ line[..., None]
        )  # none where M sees nothing
        own = CubicSpline(found.nodes[index]).velocity(torch.zeros(1, dtype=begin.dtype, device=begin.device))[:, 0]
        velocity = torch.where(walled[:, None], own, line + bend[..., 0])
        length = torch.where(walled, found.bound[index], safe_sqrt(square))
        norm = safe_sqrt((velocity[:, None] @ tensor @ velocity[..., None])[:, 0, 0])
        ratio = torch.where((norm > 0) & (length > 0), length / norm, 1)
        found.velocity[index], found.length[index] = ratio[:, None] * velocity, length
        found.error[index] = torch.where(walled, 1, torch.maximum((ratio - 1).abs(), curves.error)).nan_to_num(
            torch.inf
        )
        return ~(found.error[index] <= sought)

    return report


def _try_out(metric: Metric, found: _Velocities, index: Tensor, rtol: float) -> Tensor:
    """Finds out where the geodesics with the velocities at `index` arrive, if these are known; returns those that miss."""
    index = index[found.error[index] <= _ROUGH]
    if not len(index):
        return index
    found.miss[index] = _misses(metric, found.nodes[index], found.velocity[index], found.length[index], rtol)
    return index[found.miss[index] > max(_MISSED, 0.1 * _tolerated(found.miss.dtype))]


def _misses(metric: Metric, nodes: Tensor, velocity: Tensor, length: Tensor, rtol: float) -> Tensor:
    """How far from the last node the geodesics from the first arrive, as a share of the distance, in latent space or by the metric."""
    begin, end = nodes[:, 0], nodes[:, -1]
    rtol = max(rtol, _least(nodes.dtype))
    arrived, succeeded = arrivals(metric, begin, velocity, rtol=rtol, max_steps=_MAX_STEPS)
    gap = arrived - end
    with torch.no_grad(), unvalidated():
        miss = torch.maximum(gap.norm(dim=-1) / (end - begin).norm(dim=-1), metric.norm(end, gap) / length)
    return torch.where(succeeded & torch.isfinite(miss), miss, torch.inf)


def _least(dtype: torch.dtype) -> float:
    return 32 * torch.finfo(dtype).eps
