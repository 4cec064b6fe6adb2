r"""The logarithm: with which velocity a geodesic must leave ``a`` to be at ``b`` after unit time.

A discrete path knows that better than its first step tells. At the minimum of the discrete energy nothing but the end points can
change it, so its derivative in ``a`` (the momentum with which the path leaves) is that of the squared distance,

.. math:: \mathrm{Log}_a(b) = -\tfrac12\, M(a)^{-1}\, \frac{\partial d^2(a, b)}{\partial a},
          \qquad |\mathrm{Log}_a(b)|_{M(a)} = d(a, b),

and the derivatives on T, 2T and 4T segments can be extrapolated, as those of `pullback.distance` are. Only the first chord
depends on ``a``. That gives ten digits where the decoder is smooth. How many it gives is known, because the velocity must have the
length of the path; where they do not suffice, the geodesic equation is solved between the ends of the path (`pullback.shoot`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pullback._curve import CubicSpline
from pullback._decoder import unvalidated
from pullback._distance import discretised, stationary
from pullback._geodesic import Geodesic, Start, geodesic
from pullback._metric.acceleration import filtered_inverse
from pullback._metric.base import Metric
from pullback._metric.steps import safe_sqrt
from pullback._solver.base import Solver
from pullback._solver.discrete import DiscreteEnergy
from pullback._solver.levels import romberg
from pullback._solver.shooting import shoot
from pullback._solver.tridiagonal import solve_tridiagonal
from pullback._typing import Bool, Float

_MIN_SEGMENTS, _MAX_SEGMENTS = 8, 256  # of the coarsest of the three curves that are extrapolated
_AGREEMENT = 1e-2  # a path that loses more of its energy when it is solved anew has hopped over a wall
_NEAR = 1e-4  # of the path: how far a minimum may still be from where the solver left it
_SPARE = 1e-12  # of the Hessian's diagonal, so that directions the decoder ignores have a solution
_VALLEY = 1e-3  # a geodesic that is longer than its path by more belongs to another valley
_ROUGH = 1e-4  # a velocity known no better is not called a logarithm


@dataclass(frozen=True, eq=False)
class Logarithm:
    r"""Initial velocities of the shortest paths found for a batch of pairs, and what is known about them.

    **Attributes:**

    - `velocity`: :math:`\mathrm{Log}_a(b)`. Where M(a) is singular, what it does not see of the velocity is that of the straight line,
      so that `pullback.expmap` arrives at ``b`` also in the latent dimensions the decoder ignores.
    - `distance`: its length :math:`|\mathrm{Log}_a(b)|_{M(a)}`, which is the distance.
    - `error`: estimate of the relative error of `velocity`: how far the momentum is from having the length of the path, or the
      gaps that are left where the geodesic equation was solved.
    - `polished`: whether the geodesic equation was solved.
    - `geodesic`: the paths, with the solver's own status.
    """

    velocity: Float[Tensor, "*batch d"]
    distance: Float[Tensor, "*batch"]
    error: Float[Tensor, "*batch"]
    polished: Bool[Tensor, "*batch"]
    geodesic: Geodesic

    @property
    def converged(self) -> Bool[Tensor, "*batch"]:
        """Whether the path is a resolved minimum and its velocity known to four digits or better."""
        return self.geodesic.converged & (self.error <= _ROUGH)

    @property
    def status(self) -> np.ndarray:
        """A sentence a pair, as an array of strings of shape ``(*batch,)``."""
        facts = zip(self.geodesic.status.flatten().tolist(), self.error.flatten().tolist(), strict=True)
        rough = (self.geodesic.converged & ~self.converged).flatten().tolist()
        sentences = [_rough_sentence(*fact) if bad else fact[0] for fact, bad in zip(facts, rough, strict=True)]
        return np.array(sentences, dtype=object).reshape(tuple(self.error.shape))


def _rough_sentence(sentence: str, error: float) -> str:
    return (
        f"{sentence}; but the velocity is known only to about {error:.1g}, as the geodesic equation could not be solved along the "
        "path: smooth the decoder's kinks or its extrapolation"
    )


def logmap(
    metric: Metric,
    a: Float[Tensor, "*#batch d"],
    b: Float[Tensor, "*#batch d"],
    *,
    solver: Solver | None = None,
    init: Start | Sequence[Start] = None,
    rtol: float = 1e-7,
) -> Float[Tensor, "*batch d"]:
    r"""The logarithm :math:`\mathrm{Log}_a(b)`: the velocity at ``a`` of the shortest path found to ``b``, its length the distance.

    Inverse to `pullback.expmap` up to the cut locus. A constant: it carries no gradient.

    Args:
        metric: the geometry.
        a: codes, any shape ``(*batch, d)`` that broadcasts with ``b``.
        b: codes.
        solver: as in `pullback.geodesic`.
        init: as in `pullback.geodesic`.
        rtol: relative error sought. Where the momentum of the discrete path does not reach it, the geodesic equation is solved,
            which costs many times as much; infinity for never.

    Raises:
        RuntimeError: if a path did not converge. `pullback.logarithm` returns a status for each pair instead.
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
    rtol: float = 1e-7,
) -> Logarithm:
    r"""Logarithms with a status for each pair: failures are reported by the result, not raised. Arguments as in `logmap`.

    See Marsden and West 2001, *Discrete mechanics and variational integrators*, section 1, for the momenta of discrete paths.
    """
    path = geodesic(metric, a, b, solver=solver, init=init)
    batch, (n, d) = path.length.shape, path.curve.points.shape[-2:]
    found = _Velocities.of(path.curve.points.reshape(-1, n, d), path.length.flatten(), path.num_segments.flatten())
    known = torch.isfinite(found.length) & torch.isfinite(found.nodes).all(-1).all(-1)
    with torch.no_grad(), unvalidated():
        for T in found.levels[known].unique().tolist():
            _by_momentum(metric, found, (known & (found.levels == T)).nonzero()[:, 0], T)
        if rtol < torch.inf:
            _polish(metric, found, (known & (found.length > 0) & (found.error > rtol)).nonzero()[:, 0], 0.1 * rtol)
    return Logarithm(
        velocity=found.velocity.reshape(*batch, d),
        distance=found.length.reshape(batch),
        error=found.error.reshape(batch),
        polished=found.polished.reshape(batch),
        geodesic=path,
    )


@dataclass
class _Velocities:
    """Paths of B pairs and what is known of their initial velocities; one entry a pair in every field."""

    nodes: Tensor
    levels: Tensor
    velocity: Tensor
    length: Tensor
    error: Tensor
    polished: Tensor

    @classmethod
    def of(cls, nodes: Tensor, length: Tensor, num_segments: Tensor) -> _Velocities:
        return cls(
            nodes=nodes,
            levels=num_segments.clamp(_MIN_SEGMENTS, _MAX_SEGMENTS),
            velocity=torch.full_like(nodes[:, 0], torch.nan),
            length=length.clone(),
            error=torch.full_like(length, torch.inf),
            polished=torch.zeros_like(length, dtype=torch.bool),
        )


def _polish(metric: Metric, found: _Velocities, index: Tensor, rtol: float) -> None:
    """Solves the geodesic equation along the paths at `index`, and keeps what belongs to their valley."""
    if len(index) == 0:
        return
    shots = shoot(metric, found.nodes[index], num_pieces=32, rtol=max(rtol, 1e-11), max_steps=10)
    good = shots.converged & (shots.length <= found.length[index] * (1 + _VALLEY))
    index = index[good]
    found.velocity[index], found.length[index] = shots.velocity[good], shots.length[good]
    found.error[index], found.polished[index] = shots.residual[good], True


def _by_momentum(metric: Metric, found: _Velocities, index: Tensor, T: int) -> None:
    """Velocities from the momenta of paths that T segments resolve; the path's own where minimising leads away from it."""
    held = CubicSpline(found.nodes[index]).resample(4 * T + 1)
    own = 2 * T * (4 * held[:, 1] - 3 * held[:, 0] - held[:, 2])
    discrete = discretised(metric, held)
    solved = [_sharpened(discrete, nodes) for nodes in stationary(discrete, held[:, ::4], num_levels=3)]
    square, momentum = _momentum(discrete, solved)
    length = found.length[index]
    astray = (square - length**2).abs() > _AGREEMENT * length**2
    tensor = metric.tensor(held[:, 0])
    line = held[:, -1] - held[:, 0]
    bend = filtered_inverse(tensor) @ (momentum[..., None] - tensor @ line[..., None])  # none where M sees nothing
    velocity = torch.where(astray[:, None], own, line + bend[..., 0])
    length = torch.where(astray, length, safe_sqrt(square))
    norm = safe_sqrt((velocity[:, None] @ tensor @ velocity[..., None])[:, 0, 0])
    ratio = torch.where((norm > 0) & (length > 0), length / norm, 1)
    found.velocity[index], found.length[index] = ratio[:, None] * velocity, length
    found.error[index] = torch.where(astray, 1, (ratio - 1).abs())


def _sharpened(discrete: DiscreteEnergy, nodes: Tensor) -> Tensor:
    """Minima after one more step of Newton's method: energies say when a node is right to 1e-8, gradients go on to 1e-16."""
    if discrete.num_parts == 0:
        return nodes
    model = discrete.expand(nodes, torch.ones_like(nodes[:, 0, 0], dtype=torch.bool))
    spare = _SPARE * model.diagonal.diagonal(dim1=-2, dim2=-1).abs().mean(-1, keepdim=True)
    hessian = model.diagonal + model.curvature + torch.diag_embed(spare.expand_as(nodes[:, 1:-1]))
    step, positive = solve_tridiagonal(hessian, model.upper, -model.gradient)
    small = step.abs().amax((1, 2)) <= _NEAR * (nodes - nodes[:, :1]).abs().amax((1, 2))
    return nodes + torch.nn.functional.pad(torch.where((positive & small)[:, None, None], step, 0), (0, 0, 1, 1))


def _momentum(discrete: DiscreteEnergy, solved: list[Tensor]) -> tuple[Tensor, Tensor]:
    r"""Extrapolated energies of the discrete minima, and :math:`-\frac12` their derivatives in the first node."""
    with torch.enable_grad():
        start = solved[0][:, 0].detach().requires_grad_()
        energies = []
        for nodes in solved:
            chord = discrete.chords(torch.stack([start, nodes[:, 1]], 1))[0][:, 0]
            rest = discrete.energy(nodes[:, 1:]).detach() / (nodes.shape[1] - 2)
            energies.append((nodes.shape[1] - 1) * (chord + rest))
        square = romberg(*energies)[0]
        (slope,) = torch.autograd.grad(square.sum(), start)
    return square.detach(), -0.5 * slope
