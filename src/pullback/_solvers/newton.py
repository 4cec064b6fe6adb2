r"""Damped Gauss-Newton and Newton descent for a batch of curves at one resolution.

Levenberg-Marquardt: a step solves ``(H + λ D) s = -g``, each curve with its own damping λ (Nielsen's gain-ratio rule,
Madsen, Nielsen and Tingleff 2004, *Methods for non-linear least squares problems*). H is the Gauss-Newton matrix at
first. It becomes the exact Hessian near the minimum, where Gauss-Newton is slow, and before a curve may be called
converged for the first time: Gauss-Newton does not see that a path is a saddle. A curve whose exact Hessian is not
positive definite there moves along the Hessian's most negative direction (`pullback._solvers.saddle`) and descends
again.

The damping matrix D is the diagonal of H over T², so that λ = 1 balances the smoothest deformations of a curve at every
resolution. A share of its mean keeps directions the decoder ignores from running away.

With many latent dimensions an expansion costs many times as much as a gradient, which takes no tangents. There the
matrix of a step is kept for the next ones, corrected by what each step changed of the gradient (L-BFGS, Nocedal 1980,
*Updating quasi-Newton matrices with limited storage*), as long as steps are taken in full and that converges fast.

A curve has converged when the decrease of the energy still to come is below its `rtol` of the energy. It is estimated
from the last two predicted decreases, as the rest of a geometric series, or from the mean of the last actual ones. It
then leaves the batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pullback._autodiff.derivatives import Tensors
from pullback._numerics.rows import beside, concatenate, inverse, put, take
from pullback._numerics.tridiagonal import solve_tridiagonal
from pullback._solvers.base import Status
from pullback._solvers.objective import NOISE, Expansion, Objective
from pullback._solvers.saddle import escape

# Keeps directions the decoder ignores solvable, and slows no other (VAE with d = 8 in benchmarks/geodesics.py).
_LEAST_DAMPING = 1e-9
# Share of the mean that all directions are damped with: walls stand also where the metric is small (toy problem).
_EVEN_DAMPING = 1e-2
# Damping up to which the convergence of exact steps is quadratic (test_newton_converges_quadratically).
_SLIGHT_DAMPING = 1e-3
# Exact steps are taken once the predicted decrease is below this part of the energy, and falls by less than this factor
# from step to step: Gauss-Newton is then slower, although it costs a third (VAE with d = 2).
EXACT_BELOW, EXACT_ABOVE = 1e-3, 0.4
# Where the predicted decrease falls faster than by this factor from step to step, second derivatives are kept: a step
# then costs a quarter (logarithms of the VAE with d = 8).
_FAST = 0.1
# Where gradients cost a fraction of expansions, a Hessian is kept while the predicted decrease falls by this factor per
# step, or by as much as makes the steps to come cheaper than an expansion, and is corrected by so many steps
# (benchmarks/latent.py, d = 8 to 32).
_HELD, _MEMORY = 0.5, 4
# Share of the Gauss-Newton matrix that an exact Hessian must exceed for its certificate to hold on finer levels: else
# Gauss-Newton forecasts too little of what is left, and a minimum may become a saddle (claims on VAEs with d = 2).
_FIRM = 0.25
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
    """Curves on their way down; one entry per curve in every field.

    Nodes and constants are where the decoder is. All else is in the memory of the host, where decisions are made: on an
    accelerator each operation on one number per curve would be a launch, and each decision a wait.
    """

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
    firm: Tensor  # whether that holds for finer levels too
    moves: Tensor  # (B, m, n, k): the last steps since the Hessian is kept
    turns: Tensor  # (B, m, n, k): what they changed of the gradient
    trusted: Tensor  # whether the last step was taken in full
    left: Tensor  # whether the curve left a saddle on its way
    hit_domain_edge: Tensor  # whether a step met a decoder that is not finite, and none has been taken freely since
    status: Tensor
    num_steps: Tensor

    @property
    def uses_hessian(self) -> Tensor:
        """Which curves step with the exact Hessian."""
        return self.exact & ~self.indefinite

    @classmethod
    def start(
        cls, nodes: Tensor, constants: Tensor, damping: Tensor, rtol: Tensor, certified: Tensor, memory: Tensor
    ) -> Descent:
        batch = torch.arange(nodes.shape[0])
        unknown, off = torch.full_like(damping, torch.inf), torch.zeros_like(batch, dtype=torch.bool)
        return cls(
            index=batch,
            nodes=nodes,
            constants=constants,
            moves=memory,
            turns=memory,
            rtol=rtol,
            damping=damping,
            **dict.fromkeys(("energy", "predicted", "progress"), unknown),
            **dict.fromkeys(("exact", "stale", "indefinite", "firm", "trusted", "left", "hit_domain_edge"), off),
            growth=torch.full_like(damping, 4.0),
            remaining=torch.zeros_like(damping),
            certified=certified,
            status=torch.full_like(batch, Status.MAX_STEPS),
            num_steps=torch.zeros_like(batch),
        )


@dataclass
class Trial:
    """Where a step leads; one entry per curve in every field but the last.

    A trial is expanded at once: most are accepted, and then the next step needs it. Where the Hessian is held only the
    gradient is taken, which for many latent dimensions costs a fraction.
    """

    nodes: Tensor
    predicted: Tensor  # by how much less energy
    near: Tensor  # whether the exact Hessian is wanted there
    held: Tensor  # whether the Hessian is kept
    gradient: Tensor  # where it is
    energy: Tensor
    accepted: Tensor
    expansions: list[tuple[Tensor, Expansion]]  # of other curves, by their rows; later ones replace earlier ones
    pending: list[tuple[Tensor, Tensor]]  # rows, and energies that an accelerator is still at

    def expand(self, objective: Objective, curves: Descent, rows: Tensor) -> None:
        """Adds the expansions of some curves, or only their gradients."""
        if self.held.any() and len(held := rows[self.held[rows]]):
            at = beside(held, self.nodes)
            energy, gradient = objective.slopes(self.nodes[at], curves.constants[at])
            self.pending.append((held, energy))
            self.gradient = self.gradient.index_copy(0, at, gradient)
            rows = rows[~self.held[rows]]
            if not len(rows):
                return
        at = slice(None) if len(rows) == len(self.near) else beside(rows, self.nodes)
        ahead = objective.expand(self.nodes[at], self.near.index_select(0, rows), curves.constants[at])
        self.pending.append((rows, ahead.energy))
        self.expansions.append((rows, ahead))

    def wait(self) -> None:
        """Brings the energies that were asked for to the host."""
        for rows, energy in self.pending:
            self.energy = self.energy.index_copy(0, rows, energy.cpu())
        self.pending.clear()

    def moved(self, model: Expansion, kept: Tensor) -> Expansion:
        """The expansion after the step, where it was accepted; some curves have `kept` their second derivatives."""
        if len(held := (self.accepted & self.held).nonzero()[:, 0]):
            model.energy[held] = self.energy[held]
            held = beside(held, self.nodes)
            model.gradient[held] = self.gradient[held]
        for rows, ahead in self.expansions:
            ahead.energy = self.energy.index_select(0, rows)
            if kept.any() and (same := kept[rows]).any():
                old, new = beside(rows[same], self.nodes), beside(same.nonzero()[:, 0], self.nodes)
                ahead.curvature[new] = model.curvature[old]
            chosen = self.accepted.index_select(0, rows).nonzero()[:, 0]
            if len(chosen) == len(self.near):
                model = ahead
            else:
                put(model, rows.index_select(0, chosen), take(ahead, chosen))
        return model


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
        model: Expansion | None = None,
    ) -> Descent:
        """Descends from ``nodes``; returns all curves in their order, each with a `Status`.

        Curves that are not `certified` (by default all are) end only where their exact Hessian is positive definite.
        The `model` is the expansion at the nodes, if it is known.
        """
        constants = nodes.new_empty(len(nodes), 0) if constants is None else constants
        every = torch.ones(len(nodes), dtype=torch.bool)
        certified = every if certified is None or not objective.has_hessian else certified.cpu()
        exact = every & (self.always_exact and objective.has_hessian)
        model = objective.expand(nodes, exact, constants) if model is None else model
        model.energy = model.energy.cpu()
        memory = model.gradient.new_zeros(len(nodes), _MEMORY * objective.has_slopes, *model.gradient.shape[1:])
        curves = Descent.start(nodes, constants, damping.cpu(), rtol.cpu(), certified, memory)
        curves.firm, curves.exact, curves.trusted = every & (not objective.has_hessian), exact, exact
        curves.energy = model.energy
        done: list[Descent] = []
        curves, model = _retire(done, curves, model, ~torch.isfinite(model.energy), Status.NOT_FINITE)
        for step in range(self.max_steps):
            if curves.index.numel() == 0:
                break
            curves, model = self._step(objective, done, curves, model, final=step + 1 == self.max_steps)
        parts = [part for part in (*done, curves) if len(part.index)] or [curves]
        result = concatenate(parts)
        result = result if len(parts) == 1 else take(result, inverse(result.index))
        blocked = result.hit_domain_edge & (result.status != Status.CONVERGED)
        result.status = torch.where(blocked, Status.NOT_FINITE, result.status)
        return result

    def _step(
        self, objective: Objective, done: list[Descent], curves: Descent, model: Expansion, final: bool
    ) -> tuple[Descent, Expansion]:
        """One step of every curve; after the `final` one there is nothing to expand for."""
        nodes, predicted, positive = _proposed(curves, model)
        noise = NOISE * torch.finfo(predicted.dtype).eps * model.energy
        flat = positive & (predicted <= noise)
        near, held, last, remaining = self._forecast(curves, model, predicted, positive, flat)
        leaving = (last | flat) & curves.indefinite & ~curves.certified
        if leaving.any():
            _leave(objective, curves, model, leaving, nodes, predicted)
        flat, last = flat & ~leaving, last & ~leaving
        near, held = near & (objective.has_hessian and not final), held & ~(leaving | final)
        trial = Trial(nodes, predicted, near, held, model.gradient, curves.energy, torch.zeros_like(last), [], [])
        _try(objective, curves, trial, last | final)
        # asked for while an accelerator is at the energies
        firm = _is_firm(model, (last | flat) & curves.uses_hessian & (not self.always_exact))
        trial.wait()
        gain = (model.energy - trial.energy) / predicted
        trial.accepted = positive & torch.where(flat, trial.energy <= model.energy + noise, gain > _LEAST_GAIN)
        outside = ~(trial.energy.abs() < torch.inf)
        short = positive & ~(trial.accepted | flat | leaving)
        if short.any():
            _shorten(objective, curves, trial, short.nonzero()[:, 0], final)
            last = last & ~short
        accepted, decrease = trial.accepted, model.energy - trial.energy
        kept = (curves.uses_hessian & ~trial.near & self.always_exact) | trial.held
        # steps cut short where the decoder ends look like the last ones of a descent
        curves.hit_domain_edge = (curves.hit_domain_edge | outside) & ~(accepted & (curves.damping <= 1.0))
        curves.certified = curves.certified | (leaving & ~accepted)
        converged = self._converged(curves, flat, last, accepted, firm)
        left = torch.where(last | flat, remaining, _TO_COME * trial.predicted)
        curves.remaining = torch.where(accepted | flat, left, curves.remaining)
        _remember(curves, model, trial)
        model = trial.moved(model, kept)
        _move(curves, trial, decrease, kept)
        _adapt(curves, accepted, gain.masked_fill(flat, 1.0), short, outside)
        if leaving.any():
            _restart(curves, leaving & accepted)
        stalled = (curves.growth > 4.0 * 2**_PATIENCE) & ~converged
        return _retire(done, curves, model, converged | stalled, _status(curves, model, converged, stalled))

    def _converged(self, curves: Descent, flat: Tensor, last: Tensor, accepted: Tensor, firm: Tensor) -> Tensor:
        """Which curves have converged, with a certificate of those that step with the exact Hessian."""
        proven = (last | flat) & curves.uses_hessian
        curves.certified, curves.firm = curves.certified | proven, curves.firm | (proven & firm.cpu())
        settled = flat & curves.certified
        if self.always_exact:
            settled = settled & (curves.damping <= _SLIGHT_DAMPING**2)
        return settled | (accepted & last)

    def _forecast(
        self, curves: Descent, model: Expansion, predicted: Tensor, positive: Tensor, flat: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Which curves want the exact Hessian next, which may keep the one they have, which take their last step, and
        the decrease still to come after it."""
        first, enough, keeps = curves.predicted == torch.inf, curves.rtol * model.energy, curves.moves.shape[1] > 0
        # nothing after nothing is no decrease
        rate = (predicted / curves.predicted).nan_to_num_(0.0).clamp_max_(1.0).masked_fill_(first, 1.0)
        tail = (rate / (1 - rate).clamp_min_(0.1)).masked_fill_(first, 1.0)  # of a geometric series
        quadratic = torch.minimum(tail, _TO_COME * predicted / model.energy)
        newton = curves.uses_hessian & ~curves.stale & (curves.damping <= _SLIGHT_DAMPING)
        remaining = predicted * torch.where(newton, quadratic, tail)
        regular = (curves.damping <= 1.0) & (remaining <= enough)
        to_come = _TO_COME * curves.progress
        crawling = (curves.num_steps >= _MIN_STEPS) & (to_come <= enough)
        last = positive & (regular | crawling)
        unsure = (last | flat) & ~curves.certified & ~curves.exact
        close = predicted < EXACT_BELOW * model.energy
        slow = ~first & (rate > EXACT_ABOVE)
        near = unsure | (slow & close & ~curves.indefinite & (not keeps))
        # a gradient costs three decoded points, and an expansion one and a tangent for each dimension
        steps = (1 + curves.nodes.shape[-1]) / 3
        pays = rate <= ((enough / predicted).clamp_max(1.0) ** (1 / steps)).clamp_min(_HELD)
        if self.always_exact:
            fast = (curves.trusted & (pays | ~curves.stale)) if keeps else rate <= _FAST
            near = near | ~((first | fast) & close & curves.uses_hessian)
        held = positive & ~near & curves.trusted & (pays | ~curves.stale) & keeps
        return positive & near, held, last & ~unsure, torch.where(crawling & ~regular, to_come, remaining)


def _leave(
    objective: Objective, curves: Descent, model: Expansion, leaving: Tensor, nodes: Tensor, predicted: Tensor
) -> None:
    """Writes to the trial's nodes what is lowest beside the saddles that some curves leave."""
    rows = beside(leaving.nonzero()[:, 0], nodes)
    nodes[rows], decrease = escape(objective, curves.nodes[rows], curves.constants[rows], take(model, leaving))
    # with nothing lower the step is rejected
    predicted[leaving] = torch.where(decrease > 0, decrease, torch.inf)


def _try(objective: Objective, curves: Descent, trial: Trial, last: Tensor) -> None:
    """Expands a trial; where the step is the `last` only the energy is taken, which costs a fraction."""
    if len(rows := last.nonzero()[:, 0]):
        at = beside(rows, trial.nodes)
        trial.pending.append((rows, objective.energy(trial.nodes[at], curves.constants[at])))
    if len(rows) < len(last):
        trial.expand(objective, curves, (~last).nonzero()[:, 0])


def _shorten(objective: Objective, curves: Descent, trial: Trial, rows: Tensor, final: bool) -> None:
    """Takes a part of the steps of some curves, which were too long, where that lowers the energy. Energies cost a
    fraction of an expansion, and rough valleys many rejections."""
    at = beside(rows, trial.nodes)
    nodes, constants = curves.nodes[at], curves.constants[at]
    step, shares = trial.nodes[at] - nodes, torch.tensor(_SHARES, dtype=curves.energy.dtype)
    tried = (nodes + beside(shares, step)[:, None, None, None] * step).flatten(0, 1)
    energies = objective.energy(tried, constants.repeat(len(shares), 1)).cpu().nan_to_num(torch.inf)
    lowest, best = energies.unflatten(0, (len(shares), -1)).min(0)
    share = shares[best]
    good = curves.energy[rows] - lowest > _LEAST_GAIN * share * trial.predicted[rows]
    if not good.any():
        return
    trial.nodes[at] = nodes + beside(share, step)[:, None, None] * step
    rows = rows[good]
    trial.accepted[rows] = True
    trial.predicted[rows] *= share[good]
    trial.energy[rows] = lowest[good]
    if not final:
        trial.expand(objective, curves, rows)
        trial.wait()


def _proposed(curves: Descent, model: Expansion) -> tuple[Tensor, Tensor, Tensor]:
    """Trial nodes, the decrease the model predicts for them, and whether the damped Hessian is positive definite.

    Where the exact Hessian is not, the curve takes a Gauss-Newton step.
    """
    num_inner, d = curves.nodes.shape[1] - 2, curves.nodes.shape[2]
    shares = beside(curves.damping / (num_inner + 1) ** 2, curves.nodes)
    damped = shares[:, None, None] * damping_scale(model.diagonal, d)
    hessian, uses = model.diagonal.clone(), curves.uses_hessian
    hessian.diagonal(dim1=-2, dim2=-1).add_(damped)
    full = hessian
    if uses.any():
        # it is zero where the Hessian is not exact
        bend, unfit = model.curvature, curves.indefinite
        full = hessian + (bend.masked_fill(beside(unfit, bend)[:, None, None, None], 0.0) if unfit.any() else bend)
    memory = curves.moves, curves.turns
    least, most = curves.nodes.aminmax(dim=1)
    extent = (most - least).amax(-1)
    step, predicted = _solve(full, model.upper, model.gradient, damped, d, memory, extent)
    saddle = uses & predicted.isnan()
    if saddle.any():
        rows = beside(saddle.nonzero()[:, 0], step)
        some = hessian[rows], model.upper[rows], model.gradient[rows], damped[rows]
        step[rows], predicted[saddle] = _solve(*some, d, (memory[0][rows], memory[1][rows]), extent[rows])
        curves.indefinite = curves.indefinite | saddle
    positive = predicted.abs() < torch.inf
    if not positive.all():
        step[beside((~positive).nonzero()[:, 0], step)] = 0.0
    # unknowns beyond the inner nodes are the end, which does not move
    step = torch.nn.functional.pad(step.flatten(1)[:, : num_inner * d], (d, d)).unflatten(1, (-1, d))
    return curves.nodes + step, predicted, positive


def _is_firm(model: Expansion, rows: Tensor) -> Tensor:
    """Which of some curves have an exact Hessian H that is at least a share of the Gauss-Newton matrix G: `H - _FIRM G`
    is positive definite; on the device."""
    at = beside(rows.nonzero()[:, 0], model.diagonal)
    if not len(at):
        return rows
    diagonal, upper, curvature = (x[at] for x in (model.diagonal, model.upper, model.curvature))
    share = 1 - _FIRM
    _, positive = solve_tridiagonal(share * diagonal + curvature, share * upper, model.gradient[at])
    return torch.zeros(rows.shape, dtype=torch.bool, device=at.device).index_copy_(0, at, positive)


def _solve(
    diagonal: Tensor, upper: Tensor, gradient: Tensor, damped: Tensor, d: int, memory: Tensors, extent: Tensor
) -> tuple[Tensor, Tensor]:
    """Damped steps, no node's longer than the `extent` of its path, and the decrease predicted for them: NaN where the
    Hessian is not positive definite. Blocks of several nodes share the last of them.

    A Hessian that is kept is corrected by the last steps: the two loops of L-BFGS.
    """
    moves, turns = (x.unbind(1) for x in memory)
    weights = [(1 / _dot(s, y)).nan_to_num(0.0, 0.0, 0.0).clamp_min(0) for s, y in zip(moves, turns, strict=True)]
    force, shares = -gradient, []
    for s, y, w in zip(moves, turns, weights, strict=True):
        shares.append(w * _dot(s, force))
        force = force - shares[-1] * y
    step, positive = solve_tridiagonal(diagonal, upper, force, d)
    damping = torch.addcmul(-gradient, damped, step)
    for s, y, w, share in reversed(list(zip(moves, turns, weights, shares, strict=True))):
        step = step + (share - w * _dot(y, step)) * s
    predicted = 0.5 * _dot(damping, step)[:, 0, 0]
    share = (extent / torch.linalg.vector_norm(step, torch.inf, (1, 2))).nan_to_num(1.0).clamp_max(1.0)
    return share[:, None, None] * step, torch.where(positive, share * (2 - share) * predicted, torch.nan).cpu()


def _dot(x: Tensor, y: Tensor) -> Tensor:
    """The products of vectors of each curve, ``(B, 1, 1)``."""
    return (x * y).sum((1, 2), keepdim=True)


def damping_scale(blocks: Tensor, d: int) -> Tensor:
    """The diagonal D of the damping, ``(B, n, k)``, times T²."""
    scale = blocks.diagonal(dim1=-2, dim2=-1).abs().unflatten(-1, (-1, d))
    return torch.add(scale, scale.mean(-1, keepdim=True), alpha=_EVEN_DAMPING).flatten(2)


def _remember(curves: Descent, model: Expansion, trial: Trial) -> None:
    """Writes down the steps that were taken with a Hessian that is kept; forgets them where it is new."""
    if not curves.moves.shape[1]:
        return
    held, new = (beside(trial.accepted & x, trial.nodes)[:, None, None, None] for x in (trial.held, ~trial.held))
    turn = trial.gradient - model.gradient
    move = (trial.nodes - curves.nodes)[:, 1:].flatten(1)[:, : turn[0].numel()].view_as(turn)

    def after(old: Tensor, last: Tensor) -> Tensor:
        return torch.where(held, torch.cat([last[:, None], old[:, :-1]], 1), old).masked_fill(new, 0.0)

    curves.moves, curves.turns = after(curves.moves, move), after(curves.turns, turn)


def _move(curves: Descent, trial: Trial, decrease: Tensor, kept: Tensor) -> None:
    """Moves the curves where their step was accepted, and keeps the running mean of decreases."""
    everywhere = bool(trial.accepted.all())

    def chosen(new: Tensor, old: Tensor) -> Tensor:
        mask = trial.accepted.reshape(-1, *[1] * (new.ndim - 1))
        return new if everywhere else torch.where(beside(mask, new), new, old)

    mean = torch.where(curves.progress == torch.inf, decrease, torch.lerp(curves.progress, decrease, 0.3))
    curves.nodes, curves.progress = chosen(trial.nodes, curves.nodes), chosen(mean, curves.progress)
    curves.energy, curves.predicted = chosen(trial.energy, curves.energy), chosen(trial.predicted, curves.predicted)
    curves.exact, curves.stale = chosen(trial.near | (kept & curves.exact), curves.exact), chosen(kept, curves.stale)
    curves.num_steps = curves.num_steps + 1


def _adapt(curves: Descent, accepted: Tensor, gain: Tensor, short: Tensor, outside: Tensor) -> None:
    """Nielsen's rule for the damping; after a part of a step it is raised as after none, and where the decoder ends so
    far that no step is free."""
    shrink = (1 - (2 * gain - 1) ** 3).clamp(0.1, 1.0)
    raised = (curves.damping * curves.growth).clamp_min(_SLIGHT_DAMPING)
    raised = torch.where(outside, raised.clamp_min(4.0**2), raised)
    curves.damping = torch.where(accepted & ~short, (curves.damping * shrink).clamp_min(_LEAST_DAMPING), raised)
    curves.growth = torch.where(accepted, 4.0, curves.growth * 2)
    curves.trusted = accepted & ~short
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
    done: list[Descent], curves: Descent, model: Expansion, ended: Tensor, status: Status | Tensor
) -> tuple[Descent, Expansion]:
    """Takes the curves that have ended out of the batch."""
    if not ended.any():
        return curves, model
    curves.status = torch.where(ended, status, curves.status)
    if ended.all():
        done.append(curves)
        return take(curves, slice(0)), take(model, slice(0))
    done.append(take(curves, ended))
    return take(curves, ~ended), take(model, ~ended)
