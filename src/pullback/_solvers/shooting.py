r"""Polishing: Newton's method on the exponential map, to the last digits.

A discrete curve is a geodesic up to its resolution. A solution of the geodesic equation that starts at ``a`` and ends at ``b`` is
one up to the tolerance of the integrator, so the last step from 1e-6 to 1e-12 is cheaper by shooting. Shooting over the whole
curve is unstable: neighbouring geodesics part exponentially. The curve is therefore cut into pieces that are shot at the same
time (in one batch, so that more pieces take less time, not more), and Newton's method closes the gaps between them:

.. math:: \Phi(z_i, w_i) = (z_{i+1}, w_{i+1}), \qquad z_0 = a, \quad z_m = b,

with :math:`\Phi` the geodesic flow over one piece and :math:`w` the velocity in units of a piece. The derivatives of
:math:`\Phi` are differences of neighbouring trajectories, integrated in the same batch (Stoer and Bulirsch, *Introduction to
Numerical Analysis*, 7.3.5).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import torch
from scipy import interpolate
from torch import Tensor

from pullback._decoders.contract import unvalidated
from pullback._metrics.base import Metric
from pullback._metrics.connection import geodesic_field
from pullback._numerics.ode import DenseOutput, Flow, Outcome, integrate
from pullback._numerics.rows import concatenate, put, take
from pullback._solvers.base import Solution, Solver, Status
from pullback._solvers.discrete import Work
from pullback._solvers.gauss_newton import GaussNewton
from pullback._typing import Bool, Float, Int

_NUDGE = 1e-4  # of a piece's velocity: distance of the neighbouring trajectories
_CHUNK = 2**25  # numbers in the linear systems held at once


@dataclass(frozen=True)
class Shots:
    """Geodesics found by shooting; one entry a curve in every field.

    `residual` is the largest gap between two pieces relative to a piece's velocity; `velocity` is the initial velocity, that is
    the logarithm of the end point. Where `converged` is false the curve is the last one tried, and `length` is NaN.
    """

    velocity: Float[Tensor, "B d"]
    nodes: Float[Tensor, "B n d"]
    length: Float[Tensor, " B"]
    residual: Float[Tensor, " B"]
    converged: Bool[Tensor, " B"]
    num_steps: Int[Tensor, " B"]


@dataclass(frozen=True)
class Shooting(Solver):
    """Multiple shooting: solves the geodesic equation between the end points of the paths another solver found.

    A path that cannot be polished (kinks in the decoder, pieces that leave its domain) is returned as it was found, with a
    status that says so.

    Args:
        first: the solver whose paths are polished.
        rtol: largest gap between pieces, relative to a piece's length.
        max_steps: Newton steps of one curve.
        num_pieces: pieces of a curve; paths that resist are tried again with four times as many.
    """

    first: Solver = field(default_factory=GaussNewton)
    rtol: float = 1e-11
    max_steps: int = 20
    num_pieces: int = 16

    def solve(self, metric: Metric, nodes: Float[Tensor, "B n d"]) -> Solution:
        found, work = self.first.solve(metric, nodes), Work()
        near = (found.status == Status.CONVERGED) | (found.error < 0.05)
        usable = near & torch.isfinite(found.nodes).all(-1).all(-1) & (found.length > 0)
        if not usable.any():
            return found
        options = {"rtol": self.rtol, "max_steps": self.max_steps, "work": work}
        shots = shoot(metric, found.nodes[usable], num_pieces=self.num_pieces, **options)
        if (left := ~shots.converged).any():
            put(shots, left, shoot(metric, found.nodes[usable][left], num_pieces=4 * self.num_pieces, **options))
        return _merge(found, usable, shots, self.max_steps, work)


def shoot(
    metric: Metric,
    nodes: Float[Tensor, "B n d"],
    *,
    num_pieces: int = 16,
    rtol: float = 1e-11,
    max_steps: int = 20,
    work: Work | None = None,
) -> Shots:
    """Solves the geodesic equation between the first and last of ``nodes``, starting from the curves through them.

    Args:
        metric: the geometry.
        nodes: points of approximate geodesics at uniform parameters.
        num_pieces: pieces each curve is cut into.
        rtol: largest gap between pieces, relative to a piece's velocity.
        max_steps: Newton steps of one curve.
        work: where to count decoder calls.
    """
    problem = _Problem(metric, nodes.shape[-1], rtol, Work() if work is None else work)
    size = max(1, _CHUNK // (2 * num_pieces * nodes.shape[-1]) ** 2)
    with torch.no_grad(), unvalidated():
        return concatenate([_shoot(problem, chunk, num_pieces, max_steps) for chunk in nodes.split(size)])


@dataclass(frozen=True)
class _Curves:
    """Curves under way, cut into m pieces; one entry a curve in every field."""

    index: Tensor
    pieces: Tensor  # (B, m, 2 d): point and velocity at the start of each piece
    end: Tensor  # (B, d)
    gaps: Tensor  # (B, m, 2 d)
    slopes: Tensor  # (B, m, 2 d, 2 d): derivative of the flow over each piece
    stale: Tensor  # whether the slopes belong to an earlier curve
    residual: Tensor
    allowed: Tensor
    damping: Tensor
    num_steps: Tensor


@dataclass(frozen=True)
class _Problem:
    metric: Metric
    d: int
    rtol: float
    work: Work

    def flow(self, states: Tensor, rtol: float, dense: bool = False) -> Flow:
        """The geodesic flow over unit time from states ``(n, 2 d)``, with an error relative to the velocity."""
        field = geodesic_field(self.metric, states[:, : self.d])

        def counted(state: Tensor) -> Tensor:
            self.work.add(len(state) * (4 + self.d))
            return field(state)

        rtol = max(rtol, 4 * torch.finfo(states.dtype).eps)
        atol = rtol * states[:, self.d :].abs().amax(-1)
        return integrate(counted, states, rtol=rtol, atol=atol, max_steps=500, dense=dense)

    def arrivals(self, states: Tensor, rtol: float) -> Tensor:
        flow = self.flow(states.reshape(-1, 2 * self.d), rtol)
        arrived = (flow.outcome == Outcome.FINISHED)[:, None]
        return torch.where(arrived, flow.y, torch.inf).reshape(states.shape)

    def gaps(self, pieces: Tensor, end: Tensor) -> Tensor:
        """How far each piece misses the start of the next, the last one the end point (its velocity is free)."""
        arrivals = self.arrivals(pieces, 0.01 * self.rtol)
        goal = torch.cat([end, arrivals[:, -1, self.d :]], -1)
        return arrivals - torch.cat([pieces[:, 1:], goal[:, None]], 1)

    def slopes(self, pieces: Tensor) -> Tensor:
        """Derivatives ``(B, m, 2 d, 2 d)`` of the flow, good to about three digits, which is all Newton's method needs."""
        nudge = _NUDGE * pieces[..., self.d :].abs().amax(-1)[..., None, None]
        basis = torch.eye(2 * self.d, dtype=pieces.dtype, device=pieces.device)
        near = pieces[..., None, :] + nudge * torch.cat([torch.zeros_like(basis[:1]), basis])
        arrivals = self.arrivals(near, 1e-5 * _NUDGE)
        return ((arrivals[..., 1:, :] - arrivals[..., :1, :]) / nudge).mT


def _shoot(problem: _Problem, nodes: Tensor, num_pieces: int, max_steps: int) -> Shots:
    curves = _start(problem, nodes, num_pieces)
    result = take(curves, curves.index)
    for _ in range(max_steps):
        active = (curves.residual > curves.allowed) & (curves.damping > 1e-3)
        put(result, curves.index[~active], take(curves, ~active))
        curves = take(curves, active)
        if len(curves.index) == 0:
            break
        curves = _newton_step(problem, curves)
    put(result, curves.index, curves)
    return _shots(problem, result, nodes.shape[1])


def _start(problem: _Problem, nodes: Tensor, num_pieces: int) -> _Curves:
    value, slope = _sampling(nodes.shape[1] - 1, num_pieces, nodes)
    pieces = torch.cat([value @ nodes, slope @ nodes / num_pieces], -1)[:, :-1]
    pieces[:, 0, : problem.d], end = nodes[:, 0], nodes[:, -1]
    gaps = problem.gaps(pieces, end)
    allowed = problem.rtol + 64 * torch.finfo(nodes.dtype).eps * (1 + nodes.abs().amax((1, 2)) / _size(problem, pieces))
    return _Curves(
        index=torch.arange(len(nodes), device=nodes.device),
        pieces=pieces,
        end=end,
        gaps=gaps,
        slopes=problem.slopes(pieces),
        stale=torch.zeros_like(allowed, dtype=torch.bool),
        residual=_residual(problem, pieces, gaps),
        allowed=allowed,
        damping=torch.ones_like(allowed),
        num_steps=torch.zeros_like(allowed, dtype=torch.long),
    )


def _sampling(num_segments: int, num_pieces: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Matrices from values at uniform nodes to those of their spline at the joints, and to its derivatives there."""
    t, joints = np.linspace(0, 1, num_segments + 1), np.linspace(0, 1, num_pieces + 1)
    spline = interpolate.make_interp_spline(t, np.eye(num_segments + 1), k=min(3, num_segments))
    value, slope = (torch.as_tensor(spline(joints, nu), dtype=like.dtype, device=like.device) for nu in (0, 1))
    return value, slope


def _size(problem: _Problem, pieces: Tensor) -> Tensor:
    return pieces[..., problem.d :].abs().amax((1, 2)).clamp_min(torch.finfo(pieces.dtype).tiny)


def _residual(problem: _Problem, pieces: Tensor, gaps: Tensor) -> Tensor:
    return (gaps.abs().amax((1, 2)) / _size(problem, pieces)).nan_to_num(torch.inf)


def _newton_step(problem: _Problem, curves: _Curves) -> _Curves:
    """One damped step: accepted if the gaps shrink; the slopes are kept as long as they shrink fast."""
    trial = curves.pieces + curves.damping[:, None, None] * _correction(curves.gaps, curves.slopes)
    gaps = problem.gaps(trial, curves.end)
    residual = _residual(problem, trial, gaps)
    better = torch.isfinite(residual) & (residual <= (1 - 0.25 * curves.damping) * curves.residual)
    pieces = torch.where(better[:, None, None], trial, curves.pieces)
    renew = torch.where(better, residual > torch.maximum(0.1 * curves.residual, curves.allowed), curves.stale)
    slopes = curves.slopes.index_put((renew,), problem.slopes(pieces[renew])) if renew.any() else curves.slopes
    damping = torch.where(better, (4 * curves.damping).clamp_max(1), torch.where(renew, 1, 0.25) * curves.damping)
    return replace(
        curves,
        pieces=pieces,
        gaps=torch.where(better[:, None, None], gaps, curves.gaps),
        slopes=slopes,
        stale=(curves.stale | better) & ~renew,
        residual=torch.where(better, residual, curves.residual),
        damping=damping,
        num_steps=curves.num_steps + 1,
    )


def _correction(gaps: Tensor, slopes: Tensor) -> Tensor:
    """Newton's correction of the pieces ``(B, m, 2 d)``: ``G_i δ_i - δ_{i+1} = -gap_i``, with both end points fixed."""
    B, m, k = gaps.shape
    d = k // 2
    system = gaps.new_zeros(B, m, k, m, k)
    pieces = torch.arange(m, device=gaps.device)
    system[:, pieces, :, pieces] = slopes.transpose(0, 1)
    system[:, pieces[:-1], :, pieces[1:]] = -torch.eye(k, dtype=gaps.dtype, device=gaps.device)
    system[:, -1, d:] = 0
    system[:, -1, d:, 0, :d] = torch.eye(d, dtype=gaps.dtype, device=gaps.device)
    solution, info = torch.linalg.solve_ex(system.reshape(B, m * k, m * k), -gaps.reshape(B, m * k))
    return torch.where((info == 0)[:, None], solution, torch.nan).reshape(B, m, k)


def _shots(problem: _Problem, curves: _Curves, n: int) -> Shots:
    """Reads the polished curves off a last flow with dense output."""
    B, m, d = len(curves.index), curves.pieces.shape[1], problem.d
    flow = problem.flow(curves.pieces.reshape(-1, 2 * d), 0.01 * problem.rtol, dense=True)
    assert flow.dense is not None
    nodes = _read(flow.dense, B, m, n)[..., :d]
    nodes[:, 0], nodes[:, -1] = curves.pieces[:, 0, :d], curves.end
    converged = curves.residual <= curves.allowed
    length = torch.full_like(curves.residual, torch.nan)
    length[converged] = m * problem.metric.norm(*curves.pieces[converged].chunk(2, -1)).mean(1)
    return Shots(
        velocity=m * curves.pieces[:, 0, d:],
        nodes=nodes,
        length=length,
        residual=curves.residual,
        converged=converged,
        num_steps=curves.num_steps,
    )


def _read(dense: DenseOutput, B: int, m: int, n: int) -> Tensor:
    """States at n uniform parameters of curves of m pieces each."""
    t = m * torch.linspace(0, 1, n, dtype=dense.knots.dtype, device=dense.knots.device)
    piece = t.long().clamp_max(m - 1)
    rows = (m * torch.arange(B, device=t.device)[:, None] + piece).flatten()
    part = DenseOutput(dense.knots[rows], dense.coefficients[rows])
    return part((t - piece).repeat(B)[:, None]).reshape(B, n, -1)


def _merge(found: Solution, usable: Tensor, shots: Shots, max_steps: int, work: Work) -> Solution:
    """The polished curves where there are any; a geodesic longer than the path it came from belongs to another valley."""
    better = shots.converged & (shots.length <= found.length[usable] * (1 + 1e-3))
    where = usable.nonzero()[:, 0]
    gained, lost = where[better], where[~better]
    failed = torch.where(shots.num_steps[~better] >= max_steps, int(Status.MAX_STEPS), int(Status.STALLED))
    failed = torch.where(found.status[lost] == Status.CONVERGED, failed, found.status[lost])
    return replace(
        found,
        nodes=found.nodes.index_put((gained,), shots.nodes[better]),
        energy=found.energy.index_put((gained,), shots.length[better] ** 2),
        length=found.length.index_put((gained,), shots.length[better]),
        error=found.error.index_put((gained,), shots.residual[better]),
        status=found.status.index_fill(0, gained, Status.CONVERGED).index_put((lost,), failed),
        num_steps=found.num_steps.index_add(0, where, shots.num_steps),
        num_calls=found.num_calls + work.num_calls,
        num_decoded=found.num_decoded + work.num_decoded,
        cornered=None if found.cornered is None else found.cornered.index_fill(0, gained, False),
    )
