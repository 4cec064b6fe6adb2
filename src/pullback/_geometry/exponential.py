r"""The exponential map: geodesics from a point and a velocity.

:math:`\mathrm{Exp}_z(v)` is where the geodesic that leaves ``z`` with velocity ``v`` arrives after unit time. The
geodesic equation :math:`\ddot z = -\Gamma(z)[\dot z, \dot z]` is integrated with error control for each trajectory by
itself: one that is bent sharply, at the edge of the data, must neither slow down nor spoil the others of its batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pullback._curves.curve import Curve, Parameters, parameters
from pullback._decoders.contract import unvalidated
from pullback._geometry.geodesic import sentences
from pullback._metrics.base import Metric, broadcast, codes_for
from pullback._metrics.connection import differentiable, geodesic_field
from pullback._numerics.ode import DenseOutput, integrate
from pullback._options import check_options
from pullback._progress import progress
from pullback._solvers.base import ConvergenceError, Status
from pullback._typing import Bool, Codes, Float, Int

# Local error by default, with which ends are good to about five digits; from where the decoder has kinks, more than the
# second has no meaning.
_RTOL, _KINKED_RTOL = {torch.float64: 1e-6, torch.float32: 1e-4}, 1e-3
# What rounding leaves: no tolerance below this many units of the machine is asked for.
_ROUNDING = 256
# A geodesic whose speed changes by more does not solve the geodesic equation; smooth decoders keep it to 1e-4.
_MAX_DRIFT = 1e-2
# For each `Outcome` of an integration, in their order.
_STATUS = [Status.CONVERGED, Status.MAX_STEPS, Status.STALLED, Status.NOT_FINITE]
_SENTENCES = {
    Status.CONVERGED: "The geodesic reached its end.",
    Status.UNRESOLVED: (
        "Not a geodesic: the speed changes on the way. The decoder has kinks (ReLU), at which shortest paths break and "
        "the geodesic equation does not: use pullback.geodesic and pullback.logarithm, or a smooth activation such as "
        "SiLU."
    ),
    Status.MAX_STEPS: (
        "Stiff: the step limit was reached. The decoder bends too sharply here; raise max_steps, loosen rtol and atol, "
        "or smooth the decoder's extrapolation."
    ),
    Status.STALLED: (
        "Left the domain: the velocity grows without bound, so the geodesic ends at a singularity or at the boundary "
        "of the latent space. Shorten v."
    ),
    Status.NOT_FINITE: (
        "Not finite: the start, or the metric on the way, is NaN or infinite. Shorten v, or keep within the region "
        "where the decoder is defined."
    ),
}
_ROUGH = (
    "The geodesic reached its end, to about three digits: the decoder has kinks, across which more have no meaning."
)


@dataclass(frozen=True, eq=False)
class Trajectory(Curve):
    r"""Geodesics from given points with given velocities, as curves over t in [0, 1] with a status each.

    Where one failed, its points and velocities are NaN past the time `reached`, and its `end` is where it stopped.

    Attributes:
        states: position and velocity at both ends, of shape ``(*batch, 2, 2, d)``.
        reached: the time up to which each geodesic is known; 1 if it arrived.
        status: how each geodesic ended, as integers of `pullback.results.Status`; see `messages` for sentences.
        rtol: the tolerance each was followed with: the one asked for, or 1e-3 where the decoder has kinks.
        speed_drift: the relative change of the speed :math:`\sqrt{\dot z^\top M \dot z}` between both ends. The speed
            is constant along an exact geodesic (of Levi-Civita's connection), so this checks the integration.
        num_steps, num_evaluations: accepted steps of each geodesic, and evaluations of the geodesic equation.
        dense: the states between the steps; None in the result of a `ConvergenceError` raised by `expmap`.

    >>> import torch, pullback as pb
    >>> metric = pb.FisherRaoMetric(lambda z: torch.distributions.Normal(z[..., 0], z[..., 1]))
    >>> pb.exponential(metric, [0.0, 1.0], [0.0, 1.0]).messages.item()
    'The geodesic reached its end.'
    """

    states: Float[Tensor, "*batch 2 2 d"]
    reached: Float[Tensor, "*batch"]
    status: Int[Tensor, "*batch"]
    rtol: Float[Tensor, "*batch"]
    speed_drift: Float[Tensor, "*batch"]
    num_steps: Int[Tensor, "*batch"]
    num_evaluations: Int[Tensor, "*batch"]
    dense: DenseOutput | None

    @property
    def begin(self) -> Float[Tensor, "*batch d"]:
        return self.states[..., 0, 0, :]

    @property
    def end(self) -> Float[Tensor, "*batch d"]:
        return self.states[..., 1, 0, :]

    @property
    def converged(self) -> Bool[Tensor, "*batch"]:
        """Which geodesics arrived."""
        return self.status == Status.CONVERGED

    @property
    def messages(self) -> np.ndarray:
        """One sentence per geodesic, as an array of strings of shape ``(*batch,)``."""
        rough = self.converged & (self.rtol >= _KINKED_RTOL)
        return sentences(lambda code, rough: _ROUGH if rough else _SENTENCES[code], self.status, rough)

    def __call__(self, t: Parameters) -> Tensor:
        return self._at(t).chunk(2, -1)[0]

    def velocity(self, t: Parameters) -> Tensor:
        return self._at(t).chunk(2, -1)[1]

    def _at(self, t: Parameters) -> Tensor:
        t = parameters(t, self.begin)
        if self.dense is None:
            raise ValueError("Only both ends of these geodesics are known. Use pullback.exponential for all of them.")
        if t.ndim == 0:
            return self._at(t[None])[..., 0, :]
        batch, m = self.reached.shape, t.shape[-1]
        states = self.dense(t.to(self.reached).expand(*batch, m).reshape(self.reached.numel(), m))
        return states.reshape(*batch, m, states.shape[-1])


@progress("exponentials")
def expmap(
    metric: Metric,
    z: Codes,
    v: Codes,
    t: float = 1.0,
    *,
    rtol: float | None = None,
    atol: float | None = None,
    max_steps: int = 2000,
    alpha: float = 0.0,
) -> Float[Tensor, "*batch d"]:
    r"""The exponential map :math:`\mathrm{Exp}_z(t v)`: where the geodesic from ``z`` along ``v`` is at time ``t``.

    Differentiable in ``z``, ``v`` and the decoder's parameters, through the steps taken, if ``z`` or ``v`` asks for it.

    Args:
        metric: what measures the speed.
        z: points, of shape ``(*batch, d)``.
        v: velocities, of shape ``(*batch, d)``; the two batches are broadcast.
        t: time, of either sign.
        rtol: bound on the local error of every component of position and velocity, relative to its size. By default
            1e-6 (1e-4 in single precision), and 1e-3 from where the decoder turns out to have kinks; a value that is
            given is kept, down to what rounding allows. Use 1e-10 for ten digits, at three times the cost.
        atol: absolute bound, added to the relative one; by default the same.
        max_steps: attempted steps after which a geodesic counts as stiff.
        alpha: which connection of an exponential family to follow (Amari and Nagaoka 2000): 0 for Levi-Civita's, whose
            geodesics are shortest paths; 1 for the exponential one, straight in natural parameters; -1 for the mixture
            one, straight in mean parameters; any number between or beyond. Others than 0 need a
            `pullback.FisherRaoMetric` whose family has a rule in `pullback.natural_and_mean`.

    Raises:
        ConvergenceError: if a geodesic does not arrive. `pullback.exponential` returns a status for each instead.

    >>> import torch, pullback as pb
    >>> metric = pb.FisherRaoMetric(lambda z: torch.distributions.Normal(z[..., 0], z[..., 1]))
    >>> pb.expmap(metric, torch.tensor([0.0, 1.0]), torch.tensor([0.0, 1.0]))
    tensor([0.0000, 2.7183])
    """
    if np.ndim(t) or not np.isfinite(t):
        raise ValueError(f"t is one finite number; got {t}. For many times use pullback.exponential(metric, z, v)(t).")
    found = follow(metric, z, v, t, rtol=rtol, atol=atol, max_steps=max_steps, alpha=alpha)
    failed = ~found.converged.flatten()
    if failed.any():
        first = int(failed.nonzero()[0])
        raise ConvergenceError(
            f"{int(failed.sum())} of {failed.numel()} geodesics did not arrive; number {first} stopped at t = "
            f"{t * found.reached.flatten()[first].item():.4g}. {found.messages.flatten()[first]} "
            "pullback.exponential returns the others.",
            result=found,
        )
    return found.end


@progress("exponentials")
def exponential(
    metric: Metric,
    z: Codes,
    v: Codes,
    *,
    rtol: float | None = None,
    atol: float | None = None,
    max_steps: int = 2000,
    alpha: float = 0.0,
) -> Trajectory:
    r"""The whole geodesics :math:`t \mapsto \mathrm{Exp}_z(t v)`, 0 ≤ t ≤ 1, with a status for each.

    Arguments as in `expmap`; failures are reported by the result, not raised.

    >>> import torch, pullback as pb
    >>> metric = pb.FisherRaoMetric(lambda z: torch.distributions.Normal(z[..., 0], z[..., 1]))
    >>> pb.exponential(metric, [0.0, 1.0], [0.0, 1.0])(0.5)
    tensor([0.0000, 1.6487])
    """
    return follow(metric, z, v, rtol=rtol, atol=atol, max_steps=max_steps, alpha=alpha, dense=True)


def follow(
    metric: Metric,
    z: Codes,
    v: Codes,
    t: float = 1.0,
    *,
    rtol: float | None,
    atol: float | None = None,
    max_steps: int,
    alpha: float = 0.0,
    dense: bool = False,
) -> Trajectory:
    """The geodesics from ``z`` along ``t v``, of which without `dense` both ends are known."""
    check_options(rtol=rtol, atol=atol, max_steps=max_steps)
    z, v = broadcast(*codes_for(metric, z, v))
    v, d = t * v, z.shape[-1]
    kinked = _KINKED_RTOL if rtol is None else None
    least = _ROUNDING * torch.finfo(z.dtype).eps
    rtol = max(_RTOL.get(z.dtype, _KINKED_RTOL) if rtol is None else rtol, least)
    atol = rtol if atol is None else max(atol, least)
    with unvalidated(), torch.inference_mode(False), torch.set_grad_enabled(differentiable(z, v)):
        start = torch.stack([z, v], -2)
        state = start.reshape(-1, 2 * d)
        field = geodesic_field(metric, state[:, :d], alpha=alpha)
        flow = integrate(field, state, rtol=rtol, atol=atol, max_steps=max_steps, kinked_rtol=kinked, dense=dense)
        states = torch.stack([start, flow.y.reshape(start.shape)], -3)
    status = torch.tensor(_STATUS, device=z.device)[flow.outcome]
    drift = torch.full_like(flow.t, torch.nan)
    # other connections do not keep the speed, and need no information matrix
    moved = (flow.t > 0) & (alpha == 0)
    if moved.any():
        with torch.no_grad():
            ends = states.detach().reshape(-1, 2, 2, d)[moved]
            speed = metric.norm(ends[:, :, 0], ends[:, :, 1])
        drift[moved] = torch.where(speed[:, 0] == speed[:, 1], 0, (speed[:, 1] / speed[:, 0] - 1).abs())
        status = torch.where((status == Status.CONVERGED) & (drift > _MAX_DRIFT), Status.UNRESOLVED, status)
    facts = (flow.t, status, flow.rtol, drift, flow.num_steps, flow.num_evaluations)
    return Trajectory(states, *(fact.reshape(z.shape[:-1]) for fact in facts), dense=flow.dense)
