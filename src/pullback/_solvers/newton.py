"""Damped Gauss-Newton and Newton descent for a batch of discrete curves at one resolution."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from pullback._numerics.rows import merge, put, take
from pullback._numerics.tridiagonal import solve_tridiagonal
from pullback._solvers.base import Status
from pullback._solvers.descent import Descent
from pullback._solvers.discrete import Expansion, equal_times

_LEAST_DAMPING = 1e-8  # keeps directions the decoder ignores solvable, and slows no other
_TRIED = 8  # steps after which the pace of the energy itself may end a descent
_DOUBT = 0.2
_HELD_TAIL = 0.03  # decrease to come after a first step with a guessed curvature, over the one predicted
_PATIENCE = 6  # rejected steps in a row after which a curve is called stalled; the damping has then grown by 2^27


class Objective(Protocol):
    """An energy of curves with nodes ``(B, T + 1, d)``, its expansion in the inner nodes, and whether that can be exact."""

    @property
    def curved(self) -> bool: ...

    def energy(self, nodes: Tensor, times: Tensor, pull: Tensor) -> Tensor: ...

    def expand(self, nodes: Tensor, exact: Tensor, times: Tensor, pull: Tensor) -> Expansion: ...


@dataclass(frozen=True)
class Minimizer:
    r"""Levenberg-Marquardt on the energy of discrete curves, each with its own damping (Nielsen's gain-ratio rule).

    Steps solve ``(H + λ D) s = -g``, with H the Gauss-Newton matrix, or the exact Hessian once the predicted decrease is below
    `exact_below` of the energy, has not fallen to less than `exact_above` of the last one (Gauss-Newton is then fast enough, and
    costs a third), and as long as that Hessian is positive definite. The damping matrix D is the diagonal of H over
    T², so that λ = 1 balances the smoothest deformations of the curve at every resolution; a small multiple of its mean keeps
    directions the decoder ignores from running away. A curve has converged when the decrease still to come, estimated from
    the last two predicted decreases, or from the mean of the last actual ones, is below its `rtol` of the energy; it then leaves the batch. `pull` times the Euclidean energy is
    added to that of chords and of straight pieces.
    """

    rtol: float
    max_steps: int
    exact_below: float = 1e-4
    exact_above: float = 0.4

    def run(
        self,
        objective: Objective,
        nodes: Tensor,
        damping: Tensor,
        *,
        rtol: Tensor | None = None,
        pull: Tensor | None = None,
        times: Tensor | None = None,
        held: Tensor | None = None,
    ) -> Descent:
        """Descends from ``nodes``; returns all curves in their order, each with a `Status`. `rtol` is for each its own.

        `held` is a guess of what the exact Hessian adds to the diagonal blocks, from which Gauss-Newton steps profit.
        """
        pull = torch.zeros_like(damping) if pull is None else pull
        rtol = torch.full_like(damping, self.rtol) if rtol is None else rtol
        times = equal_times(nodes) if times is None else times
        model = objective.expand(nodes, torch.zeros_like(damping, dtype=torch.bool), times, pull)
        held = damping.new_empty(len(damping), 0, 0, 0) if held is None else held
        result = Descent.start(nodes, times, damping, pull, held, rtol)
        result.energy = model.energy.clone()
        curves = take(result, result.index)
        curves, model = _retire(result, curves, model, ~torch.isfinite(model.energy), Status.NOT_FINITE)
        for _ in range(self.max_steps):
            if curves.index.numel() == 0:
                break
            curves, model = self._step(objective, result, curves, model)
        put(result, curves.index, curves)
        result.status = torch.where(
            result.border & (result.status != Status.CONVERGED), Status.NOT_FINITE, result.status
        )
        return result

    def _outlook(
        self, curves: Descent, model: Expansion, predicted: Tensor, positive: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Which curves are near enough for the exact Hessian, which take their last step, and the decrease still to come after it."""
        first, saddle = curves.predicted.isinf(), curves.softness.isinf()
        rate = torch.where(first, 1.0, (predicted / curves.predicted).clamp_max(1.0))
        near = positive & ~curves.barred & (predicted < self.exact_below * model.energy)
        near &= saddle | (~first & (rate > self.exact_above))
        start = torch.where(curves.guessed, _HELD_TAIL, 1.0)
        tail = torch.where(first, start, rate / (1 - rate).clamp_min(0.1))  # of a geometric series
        left = predicted * torch.where(curves.newton, torch.minimum(tail, 10 * predicted / model.energy), tail)
        last = positive & (curves.damping <= 1.0) & (left <= curves.rtol * model.energy)
        return near, last & (~saddle | curves.known), left

    def _look(
        self, objective: Objective, curves: Descent, model: Expansion, trial: Tensor, near: Tensor, last: Tensor
    ) -> Expansion:
        """The trial's expansion; only its energy, which costs a fraction, where the step is the `last`."""
        if not last.any():
            return objective.expand(trial, near, curves.times, curves.pull)
        ahead = take(model, torch.arange(last.numel(), device=last.device))
        ahead.energy[last] = objective.energy(trial[last], curves.times[last], curves.pull[last])
        _expand_some(objective, ahead, curves, trial, near, ~last)
        return ahead

    def _step(
        self, objective: Objective, result: Descent, curves: Descent, model: Expansion
    ) -> tuple[Descent, Expansion]:
        """One step of every curve. The trial is expanded at once: most are accepted, and then the next step needs it."""
        step, predicted, positive = _solve(curves, model)
        trial = curves.nodes.clone()
        trial[:, 1:-1] += step
        first, guessed = curves.predicted.isinf(), curves.guessed
        _soften(curves, model, predicted, first & guessed)
        near, last, left = self._outlook(curves, model, predicted, positive)
        near &= objective.curved
        ahead = self._look(objective, curves, model, trial, near, last)
        noise = 64 * torch.finfo(trial.dtype).eps * model.energy
        flat = positive & (predicted <= noise)
        gain = (model.energy - ahead.energy) / predicted
        if curves.held.numel():  # a first step is not the last if it brings other than was predicted
            doubtful = last & first & guessed & ((gain - 1).abs() > _DOUBT)
            _expand_some(objective, ahead, curves, trial, near, doubtful)
            last = last & ~doubtful
        accepted = positive & torch.where(flat, ahead.energy <= model.energy + noise, gain > 1e-3)

        # steps cut short where the decoder ends look like the last ones of a descent
        free = accepted & (curves.damping <= 1.0)
        curves.border = (curves.border | ~torch.isfinite(ahead.energy)) & ~free
        _record(curves, accepted, model.energy - ahead.energy)
        slow = accepted & (curves.num_steps >= _TRIED) & (10 * curves.progress <= curves.rtol * model.energy)
        converged = flat | (accepted & last) | slow
        to_come = torch.where(
            flat, 0.0, torch.where(last, left, torch.where(slow, 10 * curves.progress, 10 * predicted))
        )
        curves.left = torch.where(accepted | flat, to_come, curves.left)
        curves = _moved(curves, trial, ahead, accepted, predicted, near)
        _adapt(curves, accepted, gain)
        model = merge(accepted, ahead, model)
        stalled = (curves.growth > 4.0 * 2**_PATIENCE) & ~converged
        level = stalled & (curves.predicted <= 1e-8 * model.energy)  # what is left is rounding
        settled = torch.where(converged | level, Status.CONVERGED, Status.STALLED)
        status = torch.where(curves.border, Status.NOT_FINITE, settled)
        return _retire(result, curves, model, converged | stalled, status)


def _expand_some(
    objective: Objective, ahead: Expansion, curves: Descent, trial: Tensor, near: Tensor, rows: Tensor
) -> None:
    """Writes the expansions of some trials."""
    rows = rows.nonzero()[:, 0]
    if rows.numel():
        put(ahead, rows, objective.expand(trial[rows], near[rows], curves.times[rows], curves.pull[rows]))


def _solve(curves: Descent, model: Expansion) -> tuple[Tensor, Tensor, Tensor]:
    """The damped step, the decrease the model predicts for it, and whether the damped Hessian is positive definite.

    Where the exact Hessian is not, the curve is `barred` from it and takes a Gauss-Newton step.
    """
    num_segments, d = curves.nodes.shape[1] - 1, curves.nodes.shape[2]
    scale = model.diagonal.diagonal(dim1=-2, dim2=-1).abs()
    scale = (scale + 1e-2 * scale.mean(-1, keepdim=True)) / num_segments**2
    damped = curves.damping[:, None, None] * scale
    hessian = model.diagonal + torch.diag_embed(damped)
    exact = curves.known
    guess = curves.held if curves.held.numel() else 0.0
    full = hessian + torch.where(exact[:, None, None, None], model.curvature, guess)
    step, positive = solve_tridiagonal(full, model.upper, -model.gradient)
    saddle = (exact | curves.guessed) & ~positive
    if saddle.any():
        step[saddle], positive[saddle] = solve_tridiagonal(
            hessian[saddle], model.upper[saddle], -model.gradient[saddle]
        )
        curves.barred |= saddle & exact
        curves.softness = torch.where(saddle & ~exact, torch.inf, curves.softness)
        curves.held = torch.where(saddle[:, None, None, None], 0.0, curves.held)
    predicted = 0.5 * (damped * step * step - model.gradient * step).sum((1, 2))
    positive = positive & torch.isfinite(predicted)
    step = torch.where(positive[:, None, None], step, 0.0).flatten(1)
    return step[:, : (num_segments - 1) * d].unflatten(1, (-1, d)), predicted, positive


def _soften(curves: Descent, model: Expansion, predicted: Tensor, rows: Tensor) -> None:
    """Says how much further the guessed curvature lets curves fall than Gauss-Newton would."""
    if rows.any():
        plain = take(curves, rows)
        plain.held = torch.zeros_like(plain.held)
        curves.softness[rows] = (predicted[rows] / _solve(plain, take(model, rows))[1]).nan_to_num(1.0).clamp_min(1.0)


def _moved(
    curves: Descent, trial: Tensor, ahead: Expansion, accepted: Tensor, predicted: Tensor, near: Tensor
) -> Descent:
    """The curves after their step, where it was accepted; what an exact expansion knew of the curvature is kept."""
    known = (accepted & near)[:, None, None, None]
    return replace(
        curves,
        held=torch.where(known, ahead.curvature, curves.held) if curves.held.numel() else curves.held,
        nodes=torch.where(accepted[:, None, None], trial, curves.nodes),
        energy=torch.where(accepted, ahead.energy, curves.energy),
        predicted=torch.where(accepted, predicted, curves.predicted),
        exact=torch.where(accepted, near, curves.exact),
        num_steps=curves.num_steps + 1,
    )


def _record(curves: Descent, accepted: Tensor, decrease: Tensor) -> None:
    """Keeps the running mean of decreases: in a rough valley steps promise much more than they bring."""
    mean = torch.where(curves.progress.isinf(), decrease, torch.lerp(curves.progress, decrease, 0.3))
    curves.progress = torch.where(accepted, mean, curves.progress)


def _adapt(curves: Descent, accepted: Tensor, gain: Tensor) -> None:
    """Nielsen's rule for the damping."""
    shrink = (1 - (2 * gain - 1) ** 3).clamp(0.1, 1.0)
    raised = (curves.damping * curves.growth).clamp_min(1e-3)
    curves.damping = torch.where(accepted, (curves.damping * shrink).clamp_min(_LEAST_DAMPING), raised)
    curves.growth = torch.where(accepted, 4.0, curves.growth * 2)
    curves.barred = curves.barred & ~accepted


def _retire(
    result: Descent, curves: Descent, model: Expansion, done: Tensor, status: Status | Tensor
) -> tuple[Descent, Expansion]:
    """Takes the curves that are `done` out of the batch and writes them to the result."""
    gone = done.nonzero()[:, 0]
    if gone.numel() == 0:
        return curves, model
    curves.status = torch.where(done, status, curves.status)
    chosen = take(curves, gone)
    put(result, chosen.index, chosen)
    if gone.numel() == done.numel():
        return take(curves, gone[:0]), take(model, gone[:0])
    kept = (~done).nonzero()[:, 0]
    return take(curves, kept), take(model, kept)
