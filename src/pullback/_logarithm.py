r"""The logarithm: with which velocity a geodesic must leave ``a`` to be at ``b`` after unit time.

A discrete path knows that better than its first step tells. At the minimum of the discrete energy nothing but the end points can
change it, so its derivative in ``a`` (the momentum with which the path leaves) is that of the squared distance,

.. math:: \mathrm{Log}_a(b) = -\tfrac12\, M(a)^{-1}\, \frac{\partial d^2(a, b)}{\partial a},
          \qquad |\mathrm{Log}_a(b)|_{M(a)} = d(a, b),

and the derivatives on T, 2T and 4T segments can be extrapolated, as those of `pullback.distance` are. Only the first chord
depends on ``a``. That gives ten digits where the decoder is smooth, but it takes a minimum: a solver may leave a path whose length
is good to three digits, and whose direction is not. So the path is solved again, to the end. How good the velocity is then shows
by itself, because it must have the length of the path; where it is not good enough, T is doubled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pullback._curve import CubicSpline
from pullback._decoder import unvalidated
from pullback._distance import discretised
from pullback._geodesic import Geodesic, Start, geodesic
from pullback._metric.acceleration import filtered_inverse
from pullback._metric.base import Metric
from pullback._metric.steps import safe_sqrt
from pullback._solver.base import Solver
from pullback._solver.discrete import DiscreteEnergy
from pullback._solver.levels import measure, refine, romberg
from pullback._solver.newton import Minimizer
from pullback._solver.tridiagonal import solve_tridiagonal
from pullback._typing import Bool, Float

_MIN_SEGMENTS, _MAX_SEGMENTS = 8, 64  # of the coarsest curve that is solved
_FINEST = 4096  # segments beyond which nothing is refined
_MAX_STEPS = (200, 40)  # on the coarsest curve, and on each of the finer ones
_AGREEMENT = 1e-2  # a path whose energy differs by more when it is solved or measured anew has hopped over a wall
_NEAR = 1e-4  # of the path: how far a minimum may still be from where the descent left it
_SPARE = 1e-12  # of the Hessian's diagonal, so that directions the decoder ignores have a solution
_ROUGH = 1e-4  # a velocity known no better is not called a logarithm


@dataclass(frozen=True, eq=False)
class Logarithm:
    r"""Initial velocities of the shortest paths found for a batch of pairs, and what is known about them.

    **Attributes:**

    - `velocity`: :math:`\mathrm{Log}_a(b)`. Where M(a) is singular, what it does not see of the velocity is that of the straight line,
      so that `pullback.expmap` arrives at ``b`` also in the latent dimensions the decoder ignores.
    - `distance`: its length :math:`|\mathrm{Log}_a(b)|_{M(a)}`, which is the distance.
    - `error`: estimate of the relative error of `velocity`: how far the momentum is from having the length of the path.
    - `geodesic`: the paths the solver found, with its own status; they are solved to the end only for the velocity.
    """

    velocity: Float[Tensor, "*batch d"]
    distance: Float[Tensor, "*batch"]
    error: Float[Tensor, "*batch"]
    geodesic: Geodesic

    @property
    def converged(self) -> Bool[Tensor, "*batch"]:
        """Whether the velocity is known to four digits or better."""
        return self.error <= _ROUGH

    @property
    def status(self) -> np.ndarray:
        """A sentence a pair, as an array of strings of shape ``(*batch,)``."""
        facts = zip(self.error.flatten().tolist(), self.geodesic.status.flatten().tolist(), strict=True)
        solved = self.geodesic.converged.flatten().tolist()
        sentences = [_sentence(error, found, done) for (error, found), done in zip(facts, solved, strict=True)]
        return np.array(sentences, dtype=object).reshape(tuple(self.error.shape))


def _sentence(error: float, found: str, solved: bool) -> str:
    if error <= _ROUGH:
        return "converged"
    if not solved:
        return found
    return (
        f"{found}; but the velocity is known only to about {error:.1g}, as {_FINEST} segments do not resolve the geodesic: smooth the "
        "decoder's kinks or its extrapolation"
    )


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
        rtol: relative error sought; the path is refined until the velocity is as good, to at most 4096 segments.

    Raises:
        RuntimeError: if a velocity is not known to four digits. `pullback.logarithm` returns a status for each pair instead.
    """
    found = logarithm(metric, a, b, solver=solver, init=init, rtol=rtol)
    failed = (~found.converged).nonzero()
    if len(failed):
        first = tuple(failed[0].tolist())
        raise RuntimeError(
            f"{len(failed)} of {found.converged.numel()} logarithms failed. The first, of pair {first}: {found.status[first]}. "
            "pullback.logarithm returns the others, with a status for each."
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
) -> Logarithm:
    r"""Logarithms with a status for each pair: failures are reported by the result, not raised. Arguments as in `logmap`.

    See Marsden and West 2001, *Discrete mechanics and variational integrators*, section 1, for the momenta of discrete paths.
    """
    path = geodesic(metric, a, b, solver=solver, init=init)
    batch, (n, d) = path.length.shape, path.curve.points.shape[-2:]
    found = _Velocities.of(path.curve.points.reshape(-1, n, d), path.length.flatten())
    known = (found.length > 0) & torch.isfinite(found.length) & torch.isfinite(found.nodes).all(-1).all(-1)
    levels = path.num_segments.flatten().clamp(_MIN_SEGMENTS, _MAX_SEGMENTS)
    with torch.no_grad(), unvalidated():
        for T in levels[known].unique().tolist():
            _solve(metric, found, (known & (levels == T)).nonzero()[:, 0], T, rtol)
    return Logarithm(
        velocity=found.velocity.reshape(*batch, d),
        distance=found.length.reshape(batch),
        error=found.error.reshape(batch),
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

    @classmethod
    def of(cls, nodes: Tensor, length: Tensor) -> _Velocities:
        """To begin with only that of codes at no distance, which is a straight line: M sees nothing of it."""
        still = length == 0
        velocity = torch.where(still[:, None], nodes[:, -1] - nodes[:, 0], torch.nan)
        return cls(nodes, length, velocity, length.clone(), torch.where(still, 0, torch.inf).to(length))


def _solve(metric: Metric, found: _Velocities, index: Tensor, T: int, rtol: float) -> None:
    """Velocities of the paths at `index`: solved on T, 2T and 4T segments, and refined until they are good enough."""
    nodes = CubicSpline(found.nodes[index]).resample(T + 1)
    discrete = discretised(metric, nodes)
    levels = [_minima(discrete, nodes, _MAX_STEPS[0])]
    while len(index):
        while len(levels) < 3:
            levels.append(_minima(discrete, refine(levels[-1], 2), _MAX_STEPS[1]))
        _update(discrete, found, index, levels)
        rest = found.error[index] > rtol
        if levels[-1].shape[1] > _FINEST:
            break
        index, levels = index[rest], [nodes[rest] for nodes in levels[1:]]


def _minima(discrete: DiscreteEnergy, nodes: Tensor, max_steps: int) -> Tensor:
    """Minima of the discrete energy near ``nodes``; one last step of Newton takes them from eight digits to the end.

    Energies do not tell nodes apart that differ by less than 1e-8; their gradients do.
    """
    minimizer = Minimizer(rtol=1e-12, max_steps=max_steps, exact_below=1e-2, exact_above=0.0)
    nodes = minimizer.run(discrete, nodes, torch.full_like(nodes[:, 0, 0], 1e-3)).nodes
    if discrete.num_parts == 0:
        return nodes
    model = discrete.expand(nodes, torch.ones_like(nodes[:, 0, 0], dtype=torch.bool))
    spare = _SPARE * model.diagonal.diagonal(dim1=-2, dim2=-1).abs().mean(-1, keepdim=True)
    hessian = model.diagonal + model.curvature + torch.diag_embed(spare.expand_as(nodes[:, 1:-1]))
    step, positive = solve_tridiagonal(hessian, model.upper, -model.gradient)
    small = step.abs().amax((1, 2)) <= _NEAR * (nodes - nodes[:, :1]).abs().amax((1, 2))
    return nodes + torch.nn.functional.pad(torch.where((positive & small)[:, None, None], step, 0), (0, 0, 1, 1))


def _update(discrete: DiscreteEnergy, found: _Velocities, index: Tensor, levels: list[Tensor]) -> None:
    """Velocities from the momenta of minima on three levels; the path's own where solving it leads away from it."""
    square, momentum = _momentum(discrete, levels)
    path, begin = CubicSpline(found.nodes[index]), levels[0][:, 0]
    measured = measure(discrete, levels[-1]).energy
    walled = ~((measured - square).abs() <= _AGREEMENT * square) | (
        square > (1 + _AGREEMENT) * found.length[index] ** 2
    )
    tensor, line = discrete.metric.tensor(begin), levels[0][:, -1] - begin
    bend = filtered_inverse(tensor) @ (momentum[..., None] - tensor @ line[..., None])  # none where M sees nothing
    own = path.velocity(torch.zeros(1, dtype=begin.dtype, device=begin.device))[:, 0]
    velocity = torch.where(walled[:, None], own, line + bend[..., 0])
    length = torch.where(walled, found.bound[index], safe_sqrt(square))
    norm = safe_sqrt((velocity[:, None] @ tensor @ velocity[..., None])[:, 0, 0])
    ratio = torch.where((norm > 0) & (length > 0), length / norm, 1)
    found.velocity[index], found.length[index] = ratio[:, None] * velocity, length
    found.error[index] = torch.where(walled, 1, (ratio - 1).abs())


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
