r"""Damped Gauss-Newton and Newton descent for a batch of curves at one resolution.

Levenberg-Marquardt: a step solves ``(H + λ D) s = -g``, each curve with its own damping λ (Nielsen's gain-ratio rule,
Madsen, Nielsen and Tingleff 2004, *Methods for non-linear least squares problems*). H is the Gauss-Newton matrix at
first. It becomes the exact Hessian near the minimum, where Gauss-Newton is slow, and before a curve may be called
converged for the first time: Gauss-Newton does not see that a path is a saddle. A curve whose exact Hessian is not
positive definite there moves along the Hessian's most negative direction (`pullback._solvers.saddle`) and descends
again.

The damping matrix D is the diagonal of H over T², so that λ = 1 balances the smoothest deformations of a curve at every
resolution. A share of its mean keeps directions the decoder ignores from running away.

A curve has converged when the decrease of the energy still to come is below its `rtol` of the energy. It is estimated
from the last two predicted decreases, as the rest of a geometric series, or from the mean of the last actual ones. It
then leaves the batch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pullback._numerics.rows import merge, put, take
from pullback._numerics.tridiagonal import solve_tridiagonal
from pullback._solvers.base import Status
from pullback._solvers.objective import NOISE, Expansion, Objective
from pullback._solvers.saddle import escape

# Keeps directions the decoder ignores solvable, and slows no other (VAE with d = 8 in benchmarks/geodesics.py).
_LEAST_DAMPING = 1e-9
# Share of the mean that all directions are damped with: walls stand also where the metric is small (toy problem).
_EVEN_DAMPING = 1e-2
# Damping up to which the convergence of exact steps is quadratic (test_steps_with_the_exact_hessian_converge_fast).
_SLIGHT_DAMPING = 1e-3
# Exact steps are taken once the predicted decrease is below this part of the energy, and falls by less than this factor
# from step to step: Gauss-Newton is then slower, although it costs a third (VAE with d = 2).
EXACT_BELOW, EXACT_ABOVE = 1e-3, 0.4
# Where the predicted decrease falls faster than by this factor from step to step, second derivatives are kept: a step
# then costs a quarter (logarithms of the VAE with d = 8).
_FAST = 0.1
# Steps after which the mean decrease of the energy may end a descent, and what is still to come over that mean: in a
# rough valley steps promise more than they bring (toy problem).
_MIN_STEPS, _TO_COME = 8, 10.0
# Rejected steps in a row after which a curve is stalled; the damping has then grown by 2^27.
_PATIENCE = 6
# Part of the predicted decrease that a step must bring, and parts of steps that are tried if it does not: on a VAE of
# all digits with d = 2 they halve the points that are decoded.
_LEAST_GAIN, _SHARES = 1e-3, (0.5, 0.25, 0.1)
# Damping that a descent begins with: between Gauss-Newton and the smoothest descent (toy problem and VAE).
START_DAMPING = 0.1


@dataclass
class Descent:
    """Curves on their way down; one entry per curve in every field."""

    index: Tensor  # position in the caller's batch
    nodes: Tensor  # (B, T + 1, d)
    constants: Tensor  # (B, m): what the objective knows of a curve
    energy: Tensor
    damping: Tensor
    rtol: Tensor  # share of the energy that may be left to gain
    growth: Tensor  # factor by which the next rejection raises the damping
    predicted: Tensor  # decrease predicted for the last accepted step
    progress: Tensor  # running mean of the decrease by accepted steps
    remaining: Tensor  # estimate of the decrease still to come
    exact: Tensor  # whether the expansion holds the exact Hessian
    stale: Tensor  # whether its second derivatives are those of an earlier step
    indefinite: Tensor  # whether the exact Hessian was not positive definite here
    certified: Tensor  # whether it was positive definite near a minimum, or nothing lower was found along it
    left: Tensor  # whether the curve left a saddle on its way
    hit_domain_edge: Tensor  # whether a step met a decoder that is not finite, and none has been taken freely since
    status: Tensor
    num_steps: Tensor

    @property
    def uses_hessian(self) -> Tensor:
        """Which curves step with the exact Hessian."""
        return self.exact & ~self.indefinite

    @classmethod
    def start(cls, nodes: Tensor, constants: Tensor, damping: Tensor, rtol: Tensor, certified: Tensor) -> Descent:
        batch = torch.arange(nodes.shape[0], device=nodes.device)
        off = torch.zeros_like(batch, dtype=torch.bool)
        full = torch.full_like
        return cls(
            index=batch,
            nodes=nodes.clone(),
            constants=constants,
            energy=full(damping, torch.nan),
            damping=damping.clone(),
            rtol=rtol.clone(),
            growth=full(damping, 4.0),
            predicted=full(damping, torch.inf),
            progress=full(damping, torch.inf),
            remaining=full(damping, 0.0),
            exact=off,
            stale=off.clone(),
            indefinite=off.clone(),
            certified=certified.clone(),
            left=off.clone(),
            hit_domain_edge=off.clone(),
            status=full(batch, Status.MAX_STEPS),
            num_steps=torch.zeros_like(batch),
        )


@dataclass(frozen=True)
class Minimizer:
    """The descent of a batch of curves on one objective.

    Attributes:
        max_steps: steps per curve.
        always_exact: use the exact Hessian from the first step on, for many digits. Near the minimum second derivatives
            of the decoder are kept from an earlier step as long as that converges fast.
    """

    max_steps: int
    always_exact: bool = False

    def run(
        self,
        objective: Objective,
        nodes: Tensor,
        damping: Tensor,
        rtol: Tensor,
        *,
        constants: Tensor | None = None,
        certified: Tensor | None = None,
    ) -> Descent:
        """Descends from ``nodes``; returns all curves in their order, each with a `Status`.

        Curves that are not `certified` (by default all are) end only where their exact Hessian is positive definite.
        """
        constants = nodes.new_empty(len(nodes), 0) if constants is None else constants
        every = torch.ones_like(damping, dtype=torch.bool)
        certified = every if certified is None or not objective.has_hessian else certified
        result = Descent.start(nodes, constants, damping, rtol, certified)
        result.exact = every & (self.always_exact and objective.has_hessian)
        model = objective.expand(nodes, result.exact, constants)
        result.energy = model.energy.clone()
        curves = take(result, result.index)
        curves, model = _retire(result, curves, model, ~torch.isfinite(model.energy), Status.NOT_FINITE)
        for _ in range(self.max_steps):
            if curves.index.numel() == 0:
                break
            curves, model = self._step(objective, result, curves, model)
        put(result, curves.index, curves)
        blocked = result.hit_domain_edge & (result.status != Status.CONVERGED)
        result.status = torch.where(blocked, Status.NOT_FINITE, result.status)
        return result

    def _step(
        self, objective: Objective, result: Descent, curves: Descent, model: Expansion
    ) -> tuple[Descent, Expansion]:
        """One step of every curve. The trial is expanded at once: most are accepted, and then the next step needs
        it."""
        trial, predicted, positive, flat = self._proposed(curves, model)
        near, last, remaining = self._forecast(curves, model, predicted, positive, flat)
        near = near & objective.has_hessian
        leaving = (last | flat) & curves.indefinite & ~curves.certified
        if leaving.any():
            some = curves.nodes[leaving], curves.constants[leaving], take(model, leaving)
            trial[leaving], decrease = escape(objective, *some)
            # with nothing lower the step is rejected
            predicted[leaving] = torch.where(decrease > 0, decrease, torch.inf)
        flat, last = flat & ~leaving, last & ~leaving
        ahead = _expand_trial(objective, curves, model, trial, near, last)
        gain = (model.energy - ahead.energy) / predicted
        accepted = positive & torch.where(flat, ahead.energy <= model.energy + _noise(model), gain > _LEAST_GAIN)
        outside = ~torch.isfinite(ahead.energy)
        short = positive & ~(accepted | flat | leaving)
        if short.any():
            _shorten(objective, curves, model, short.nonzero()[:, 0], near, trial, predicted, accepted, ahead)
            last = last & ~short
        kept = curves.uses_hessian & ~near & self.always_exact
        ahead.curvature = torch.where(kept[:, None, None, None], model.curvature, ahead.curvature)

        # steps cut short where the decoder ends look like the last ones of a descent
        free = accepted & (curves.damping <= 1.0)
        curves.hit_domain_edge = (curves.hit_domain_edge | outside) & ~free
        curves.certified = curves.certified | ((last | flat) & curves.uses_hessian) | (leaving & ~accepted)
        precise = curves.damping <= _SLIGHT_DAMPING**2
        settled = flat & curves.certified & (precise | (not self.always_exact))
        converged = settled | (accepted & last)
        _record(curves, accepted, model.energy - ahead.energy)
        left = torch.where(last | flat, remaining, _TO_COME * predicted)
        curves.remaining = torch.where(accepted | flat, left, curves.remaining)
        curves = _moved(curves, trial, ahead, accepted, predicted, near | kept)
        curves.stale = torch.where(accepted, kept, curves.stale)
        _adapt(curves, accepted, torch.where(flat, 1.0, gain), short, outside)
        _restart(curves, leaving & accepted)
        model = merge(accepted, ahead, model)
        stalled = (curves.growth > 4.0 * 2**_PATIENCE) & ~converged
        return _retire(result, curves, model, converged | stalled, _status(curves, model, converged, stalled))

    def _proposed(self, curves: Descent, model: Expansion) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Trial nodes, the decrease predicted for them, where that is positive definite, and where it is only
        rounding."""
        step, predicted, positive = _solve(curves, model)
        trial = curves.nodes.clone()
        trial[:, 1:-1] += step
        return trial, predicted, positive, positive & (predicted <= _noise(model))

    def _forecast(
        self, curves: Descent, model: Expansion, predicted: Tensor, positive: Tensor, flat: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Which curves want the exact Hessian next, which take their last step, and the decrease still to come after
        it."""
        first, enough = curves.predicted.isinf(), curves.rtol * model.energy
        rate = torch.where(first, 1.0, (predicted / curves.predicted).clamp_max(1.0))
        tail = torch.where(first, 1.0, rate / (1 - rate).clamp_min(0.1))  # of a geometric series
        quadratic = torch.minimum(tail, _TO_COME * predicted / model.energy)
        newton = curves.uses_hessian & ~curves.stale & (curves.damping <= _SLIGHT_DAMPING)
        remaining = predicted * torch.where(newton, quadratic, tail)
        regular = (curves.damping <= 1.0) & (remaining <= enough)
        to_come = _TO_COME * curves.progress
        crawling = (curves.num_steps >= _MIN_STEPS) & (to_come <= enough)
        last = positive & (regular | crawling)
        unsure = (last | flat) & ~curves.certified & ~curves.exact
        slow = ~first & (rate > EXACT_ABOVE) & (predicted < EXACT_BELOW * model.energy) & ~curves.indefinite
        fast = (first | (rate <= _FAST)) & (predicted <= EXACT_BELOW * model.energy) & curves.uses_hessian
        near = positive & (slow | unsure | (~fast & self.always_exact))
        return near, last & ~unsure, torch.where(crawling & ~regular, to_come, remaining)


def _noise(model: Expansion) -> Tensor:
    """The rounding of energies."""
    return NOISE * torch.finfo(model.energy.dtype).eps * model.energy


def _expand_trial(
    objective: Objective, curves: Descent, model: Expansion, trial: Tensor, near: Tensor, last: Tensor
) -> Expansion:
    """The trial's expansion; only its energy, which costs a fraction, where the step is the `last`."""
    if not last.any():
        return objective.expand(trial, near, curves.constants)
    ahead = take(model, torch.arange(last.numel(), device=last.device))
    ahead.energy[last] = objective.energy(trial[last], curves.constants[last])
    rows = (~last).nonzero()[:, 0]
    if rows.numel():
        put(ahead, rows, objective.expand(trial[rows], near[rows], curves.constants[rows]))
    return ahead


def _shorten(
    objective: Objective,
    curves: Descent,
    model: Expansion,
    rows: Tensor,
    near: Tensor,
    trial: Tensor,
    predicted: Tensor,
    accepted: Tensor,
    ahead: Expansion,
) -> None:
    """Takes a part of the steps of some curves, which were too long, where that lowers the energy: writes the trial,
    what it promised and its expansion. Energies cost a fraction of an expansion, and rough valleys many rejections."""
    nodes, constants = curves.nodes[rows], curves.constants[rows]
    step = trial[rows] - nodes
    shares = torch.tensor(_SHARES, dtype=step.dtype, device=step.device)
    tried = (nodes + shares[:, None, None, None] * step).flatten(0, 1)
    energies = objective.energy(tried, constants.repeat(len(shares), 1)).nan_to_num(torch.inf)
    lowest, best = energies.unflatten(0, (len(shares), -1)).min(0)
    share = shares[best]
    good = model.energy[rows] - lowest > _LEAST_GAIN * share * predicted[rows]
    rows, share = rows[good], share[good]
    if not rows.numel():
        return
    trial[rows], accepted[rows] = nodes[good] + share[:, None, None] * step[good], True
    predicted[rows] *= share
    put(ahead, rows, objective.expand(trial[rows], near[rows], constants[good]))


def _solve(curves: Descent, model: Expansion) -> tuple[Tensor, Tensor, Tensor]:
    """The damped step, the decrease the model predicts for it, and whether the damped Hessian is positive definite.

    Where the exact Hessian is not, the curve takes a Gauss-Newton step.
    """
    num_inner, d = curves.nodes.shape[1] - 2, curves.nodes.shape[2]
    damped = curves.damping[:, None, None] * damping_scale(model, d, num_inner + 1)
    hessian = model.diagonal + torch.diag_embed(damped)
    full = hessian + torch.where(curves.uses_hessian[:, None, None, None], model.curvature, 0.0)
    step, positive = solve_tridiagonal(full, model.upper, -model.gradient)
    saddle = curves.uses_hessian & ~positive
    if saddle.any():
        gauss = hessian[saddle], model.upper[saddle], -model.gradient[saddle]
        step[saddle], positive[saddle] = solve_tridiagonal(*gauss)
        curves.indefinite = curves.indefinite | saddle
    predicted = 0.5 * (damped * step * step - model.gradient * step).sum((1, 2))
    positive = positive & torch.isfinite(predicted)
    step = torch.where(positive[:, None, None], step, 0.0)
    return inner_nodes(step, num_inner, d), predicted, positive


def damping_scale(model: Expansion, d: int, num_segments: int) -> Tensor:
    """The diagonal D of the damping, ``(B, n, k)``."""
    scale = model.diagonal.diagonal(dim1=-2, dim2=-1).abs().unflatten(-1, (-1, d))
    return (scale + _EVEN_DAMPING * scale.mean(-1, keepdim=True)).flatten(2) / num_segments**2


def inner_nodes(step: Tensor, num_inner: int, d: int) -> Tensor:
    """A step in the unknowns of an expansion, as a step of the inner nodes ``(B, num_inner, d)``."""
    return step.flatten(1)[:, : num_inner * d].unflatten(1, (num_inner, d))


def _moved(
    curves: Descent, trial: Tensor, ahead: Expansion, accepted: Tensor, predicted: Tensor, near: Tensor
) -> Descent:
    """The curves after their step, where it was accepted."""
    return replace(
        curves,
        nodes=torch.where(accepted[:, None, None], trial, curves.nodes),
        energy=torch.where(accepted, ahead.energy, curves.energy),
        predicted=torch.where(accepted, predicted, curves.predicted),
        exact=torch.where(accepted, near, curves.exact),
        num_steps=curves.num_steps + 1,
    )


def _record(curves: Descent, accepted: Tensor, decrease: Tensor) -> None:
    """Keeps the running mean of decreases."""
    mean = torch.where(curves.progress.isinf(), decrease, torch.lerp(curves.progress, decrease, 0.3))
    curves.progress = torch.where(accepted, mean, curves.progress)


def _adapt(curves: Descent, accepted: Tensor, gain: Tensor, short: Tensor, outside: Tensor) -> None:
    """Nielsen's rule for the damping; after a part of a step it is raised as after none, and where the decoder ends so
    far that no step is free."""
    shrink = (1 - (2 * gain - 1) ** 3).clamp(0.1, 1.0)
    raised = (curves.damping * curves.growth).clamp_min(_SLIGHT_DAMPING)
    raised = torch.where(outside, raised.clamp_min(4.0**2), raised)
    curves.damping = torch.where(accepted & ~short, (curves.damping * shrink).clamp_min(_LEAST_DAMPING), raised)
    curves.growth = torch.where(accepted, 4.0, curves.growth * 2)
    curves.indefinite = curves.indefinite & ~accepted


def _restart(curves: Descent, rows: Tensor) -> None:
    """Begins the descent anew for curves that left a saddle."""
    curves.predicted = torch.where(rows, torch.inf, curves.predicted)
    curves.progress = torch.where(rows, torch.inf, curves.progress)
    curves.damping = torch.where(rows, START_DAMPING, curves.damping)
    curves.left = curves.left | rows


def _status(curves: Descent, model: Expansion, converged: Tensor, stalled: Tensor) -> Tensor:
    """How curves end that have converged or stalled; what is left to the stalled may be rounding."""
    rounded = stalled & (curves.predicted <= 1e-8 * model.energy)
    status = torch.where(converged | rounded, Status.CONVERGED, Status.STALLED)
    return torch.where(curves.hit_domain_edge, Status.NOT_FINITE, status)


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
