r"""From coarse curves to fine ones, until the answer stops changing.

Each level solves the discrete problem on T segments (`Minimizer`) and then *measures* the path it found: the spline
through its nodes is decoded on 4T segments, and the energies on T, 2T and 4T of them are extrapolated. That number
belongs to the path, not to its discretization, so levels can be compared. It converges with order four in 1/T, so a
fifteenth of its last change estimates the error that is left; when that is below the tolerance the curve is finished,
else it goes on with twice the segments.

A sharp wall in the metric breaks this. Where a decoder changes and changes back within less than a segment, no chord
sees it; minimizing the chord energy then *draws* the nodes to both sides of the wall. The measurement notices: the path
has far more energy on 4T segments than on T. On a fine level the curve then continues in the *walled* regime:
straight pieces between fewer nodes, each measured in many chords, so that crossing a wall in one piece is as expensive
as it is in truth. Where such a path turns it has a node; from level to level its longer pieces are cut, and it is
returned as these pieces, not as a spline.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pullback._curves.curve import Polyline
from pullback._curves.steps import nearly_equal
from pullback._metrics.base import spared
from pullback._numerics.rows import beside, take
from pullback._numerics.tridiagonal import solve_tridiagonal
from pullback._solvers.base import Solution, Status, converged
from pullback._solvers.chords import ChordEnergy, total_energy, total_length
from pullback._solvers.errors import judge, piece_error, spline_error
from pullback._solvers.measure import Measurement, measure_pieces, measure_spline
from pullback._solvers.newton import START_DAMPING, Descent, Minimizer
from pullback._solvers.objective import Expansion
from pullback._solvers.paths import Paths, assemble, cut_pieces, evened, join, keep_better
from pullback._solvers.pieces import PieceEnergy
from pullback._solvers.plan import COARSE_STEPS, FINE_SEGMENTS, START_SEGMENTS, Plan
from pullback._solvers.saddle import escape

Key = tuple[int, int]  # what paths are made of on a level, and its number of segments
LevelResult = tuple[Paths, dict[Key, Paths]]  # the paths that are finished, and the others by the level they go to
_CHORDS, _PIECES = range(2)

# A level is blind if finer chords see more than so many times the energy that its own do (toy problem).
_BLIND = 1.15
# To what share of the energy levels are solved: the coarsest, and others in parts of the error of the last, of which
# each has a sixteenth (VAE).
_FIRST_RTOL, _SHARE = 1e-3, 1e-2
# Euclidean energy mixed in at the first walled level, as a share of the energy of the path (toy problem).
_EUCLIDEAN = 1e-2
# Part of `accept` to which walled levels are solved (toy problem).
_WALLED_SHARE = 0.25
# By how much the energy of a level's path may be above that of the last (toy problem).
_SLACK = 1e-4
# How often a path may go on from where it had converged, as long as that makes it shorter (half-plane).
_LOOKS = 2
# Length of a path, in units of the rounding of decoded points, below which chords on a hundred segments are not known
# to a per cent (float32).
_ROUNDING = 1e4


@dataclass(frozen=True)
class Refinement:
    """The descent of one batch of curves."""

    chords: ChordEnergy
    plan: Plan

    def run(self, nodes: Tensor) -> Solution:
        """Takes each curve from level to level until it is finished."""
        waiting, done = self._start(nodes)
        levels = {_CHORDS: self._chord_level, _PIECES: self._piece_level}
        while waiting:
            key = min(waiting)
            finished, groups = levels[key[0]](join(waiting.pop(key)))
            finished, again = self._proven(finished)
            done.append(finished)
            for next_key, group in [*groups.items(), *again]:
                if group.index.numel():
                    waiting.setdefault(next_key, []).append(group)
        return assemble(done, self.chords)

    def _start(self, nodes: Tensor) -> tuple[dict[Key, list[Paths]], list[Paths]]:
        """Sends each start path to the coarsest level whose chords see what finer ones see; some are done at once."""
        plan = self.plan
        num_segments = min(START_SEGMENTS, plan.max_segments) if plan.guided else 4 * plan.min_segments
        start = Polyline(nodes).resample(num_segments + 1)
        chords = self.chords.chords(start, num_segments // plan.min_segments)
        ends = torch.stack([nodes[:, 0], nodes[:, -1]], 1)
        noise, equal = self.chords.noise(ends), nearly_equal(*ends.unbind(1))
        known = [*map(total_energy, chords), total_length(chords[-1]), noise, equal.to(noise)]
        *energies, length, noise, equal = torch.stack(known).cpu()
        paths = replace(Paths.start(start), energy=energies[-1], length=length, noise=noise)
        ready = self._at_once(paths, ends, equal > 0)

        # levels up to and including the last that is blind; all of them at once would keep all threads of a host busy
        skipped = torch.zeros_like(paths.index)
        for k, energy in enumerate(energies[:-1], 1):
            skipped = skipped.masked_fill(energy < paths.energy / _BLIND, k)
        waiting = {}
        for k in range(len(energies)):
            if not (rows := ~ready & (skipped == k)).any():
                continue
            level = plan.min_segments * 2**k
            key = (_PIECES, plan.walled_segments) if k and level >= FINE_SEGMENTS else (_CHORDS, level)
            waiting.setdefault(key, []).append(self._prepared(take(paths, rows), key))
        return waiting, [take(paths, ready)]

    def _at_once(self, paths: Paths, ends: Tensor, equal: Tensor) -> Tensor:
        """Writes the status of paths with nothing to solve: bad starts, and codes too close for their chords to be
        known, or `equal`.

        Chords are differences of decoded points, and lose half their digits to rounding where codes agree in as many.
        There the path is a straight line, of a length that the metric tensor gives.
        """
        finite = torch.isfinite(paths.energy)
        if not finite.all():
            paths.status[~finite] = Status.NOT_FINITE
            paths.status[~torch.isfinite(self.chords.chords(ends)[0][:, 0]).cpu()] = Status.BAD_END_POINT
        near = (finite & (equal | (paths.length <= _ROUNDING * paths.noise))).nonzero()[:, 0]
        if near.numel():
            some = ends[beside(near, ends)]
            step, places = some[:, 1] - some[:, 0], (some[:, 0], some.mean(1), some[:, 1])
            first, middle, last = (spared(self.chords.metric.norm, z, step).cpu() for z in places)
            length = torch.lerp(middle, 0.5 * (first + last), 1 / 3)  # Simpson
            bend = ((first - 2 * middle + last).abs() / length).nan_to_num(0.0)
            # what is far from straight, on a large offset, is better known from chords
            straight = equal[near] | (bend <= self.plan.accept)
            near, length, bend = near[straight], length[straight], bend[straight]
            paths.length[near], paths.energy[near], paths.noise[near] = length, length.square(), 0.0
            paths.error[near] = (bend + torch.finfo(ends.dtype).eps ** 0.5) * (length > 0)
            paths.status[near] = torch.where(length.isfinite(), Status.CONVERGED, Status.NOT_FINITE)
        return paths.status != Status.UNRESOLVED

    def _chord_level(self, paths: Paths) -> LevelResult:
        """Solves one level of chords; returns the curves that are finished, and the others by the level they go to."""
        level = paths.nodes.shape[1] - 1
        descent = self._minimum(paths)
        found = measure_spline(self.chords, descent.nodes)
        blind = found.energy > _BLIND * descent.energy
        worse = _is_worse(found, paths)
        if worse.any():
            paths, found = self._measured_again(paths, found, worse)
            worse = _is_worse(found, paths)
        error = spline_error(paths, descent, found, worse, self.plan.expensive)
        new = keep_better(paths, descent, found, worse, error)
        same = worse | (found.energy > (1 - error) * paths.energy)
        new.num_looks = new.num_looks.masked_fill(same & (new.num_looks > 0), _LOOKS)
        new.status, done = judge(self.plan, new, paths, worse, found.asymptotic)
        # the minimum of a level that does not resolve the path may be a saddle on the next; where its curvature is a
        # share ε, energies fall by ε²
        new.certified = new.certified & (new.error <= min(self.plan.accept, self.plan.rtol**0.5))
        done |= _stuck_after_walls(new, paths, descent, worse)
        # it starts at a saddle, and what is lower cannot be resolved
        new.status = torch.where(worse & descent.left, Status.UNRESOLVED, new.status)
        walled = blind & (level >= self.plan.blind_segments) & ~paths.was_walled
        routes = {(_PIECES, self.plan.walled_segments): walled, (_CHORDS, 2 * level): ~walled}
        rows = {key: (mask & ~done).nonzero()[:, 0] for key, mask in routes.items()}
        return take(new, done), {key: self._prepared(take(new, i), key) for key, i in rows.items() if i.numel()}

    def _measured_again(self, paths: Paths, found: Measurement, rows: Tensor) -> tuple[Paths, Measurement]:
        """The same with some paths measured on this level too: what coarse chords made of them may be too low."""
        level, energy, length, error = paths.nodes.shape[1] - 1, paths.energy, paths.length, found.error
        for splines in (True, False):
            at = (rows & (paths.is_spline == splines)).nonzero()[:, 0]
            if not at.numel():
                continue
            some = take(paths, at)
            new = measure_spline(self.chords, some.on(level)) if splines else self._measured(some.points, 4 * level)
            more = new.energy > some.energy
            at, new = at[more], take(new, more)
            energy, length = energy.index_copy(0, at, new.energy), length.index_copy(0, at, new.length)
            error = error.index_copy(0, at, torch.maximum(error[at], new.error))
        return replace(paths, energy=energy, length=length), replace(found, error=error)

    def _measured(self, points: Tensor, num_chords: int) -> Measurement:
        """The straight pieces between points, measured in so many chords in all, or two each."""
        return measure_pieces(self.chords, points, max(2, num_chords // (points.shape[1] - 1)))

    def _proven(self, paths: Paths) -> tuple[Paths, list[tuple[Key, Paths]]]:
        """The paths that are finished, and those that go on from where they are.

        Straight pieces have no certificate, and descents that creep along a wall or end with small steps have none that
        counts. There the exact Hessian of the chords tells: a saddle is left, and a path that a step without damping
        would shorten by more than its error descends again.
        """
        sure = (paths.certified | paths.strict) & paths.is_spline & paths.settled & (paths.damping <= 1.0)
        doubtful = converged(paths.status) & ~sure
        if not (self.chords.has_hessian and doubtful.any()):
            return paths, []
        some, rest = take(paths, doubtful), take(paths, ~doubtful)
        present = some.points.shape[1] - 1
        level = min(present if some.is_spline.all() else START_SEGMENTS, START_SEGMENTS, self.plan.max_segments)
        nodes, gain, saddle = self._beyond(some.on(level))
        # a step that would bring less than is aimed at is claimed instead; at kinks it promises more than it brings
        known = some.error.clamp_min(self.plan.stop_rtol(some.nodes))
        again = (saddle | (0.5 * gain > known)) & (some.num_looks < _LOOKS)
        missing = ~again & (gain > 0.25)
        claim = torch.where(missing, 0.5 * gain, (0.5 * gain).clamp_max(self.plan.accept))
        some.error = torch.maximum(some.error, claim)
        some.status = some.status.masked_fill(missing, Status.UNRESOLVED)
        damping = torch.full_like(some.damping, START_DAMPING)
        begun = replace(some, nodes=nodes, damping=damping, num_looks=some.num_looks + 1)
        return join([rest, take(some, ~again)]), [((_CHORDS, level), take(begun, again))]

    def _beyond(self, nodes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Where paths go on; the share of their energy that a Newton step has to gain; and which are at a saddle."""
        gain, model = self._decrement(nodes, exact=True)
        saddle = gain.isnan()
        if saddle.any():
            at = beside(saddle.nonzero()[:, 0], nodes)
            beyond, less = escape(self.chords, nodes[at], nodes.new_empty(len(at), 0), take(model, at))
            gain = gain.masked_scatter(saddle, self._decrement(nodes[at], exact=False)[0].nan_to_num(0.0))
            nodes, saddle = nodes.index_copy(0, at, beyond), saddle.masked_scatter(saddle, less > 0)
        return nodes, gain, saddle

    def _decrement(self, nodes: Tensor, *, exact: bool) -> tuple[Tensor, Expansion]:
        """What a step without damping would gain, NaN where the Hessian is not positive definite; and the expansion."""
        model = self.chords.expand(nodes, torch.full((len(nodes),), exact))
        step, positive = solve_tridiagonal(model.diagonal + model.curvature, model.upper, -model.gradient)
        gain = -0.5 * (step * model.gradient).sum((1, 2)) / model.energy
        return torch.where(positive, gain, torch.nan).cpu(), model

    def _minimum(self, paths: Paths) -> Descent:
        """The minima of a level, solved to some of the error of the last."""
        least = self.plan.solve_rtol
        rtol = (_SHARE * paths.error).nan_to_num(_FIRST_RTOL).clamp(least, max(least, _FIRST_RTOL))
        # paths that are looked at again have converged before
        steps = COARSE_STEPS if paths.num_looks.all() else self.plan.steps(paths.nodes.shape[1] - 1)
        minimizer = Minimizer(min(steps, self.plan.max_steps))
        return minimizer.run(self.chords, paths.nodes, paths.damping, rtol, certified=paths.certified)

    def _piece_level(self, paths: Paths) -> LevelResult:
        """The same with straight pieces, each measured in many chords; then back to chords, if they can see now."""
        level = paths.nodes.shape[1] - 1
        substeps = self.plan.substeps(level)
        span = paths.nodes.diff(dim=1).norm(dim=-1).sum(-1).clamp_min(torch.finfo(paths.nodes.dtype).tiny).cpu()
        weight = _EUCLIDEAN * (FINE_SEGMENTS / level) ** 2 * paths.energy / span.square()
        rtol = torch.full_like(paths.energy, _WALLED_SHARE * self.plan.accept)
        objective, minimizer = PieceEnergy(self.chords, substeps), Minimizer(self.plan.walled_steps(level))
        constants = beside(weight, paths.nodes)[:, None]
        descent = minimizer.run(objective, paths.nodes, paths.damping, rtol, constants=constants)
        found = measure_pieces(self.chords, descent.nodes, 2 * substeps)
        kept = self._measured(paths.points, 2 * substeps * level)
        paths = replace(paths, energy=kept.energy, length=kept.length)
        worse = ~(found.energy <= paths.energy * (1 + _SLACK))
        new = keep_better(paths, descent, found, worse, piece_error(paths, descent, found, worse), spline=False)
        new.status, done = judge(self.plan, new, paths, torch.zeros_like(worse))
        back, rest = take(new, done), take(new, ~done)
        rest.nodes = rest.on(2 * level)
        moving = beside((~done & ~worse).nonzero()[:, 0], descent.nodes)
        cut = cut_pieces(self.chords, descent.nodes[moving], 2 * level)
        rest.nodes = rest.nodes.index_copy(0, beside((~worse[~done]).nonzero()[:, 0], cut), cut)
        back = replace(back, nodes=back.on(FINE_SEGMENTS), was_walled=torch.ones_like(back.was_walled))
        return take(back, slice(0)), {(_PIECES, 2 * level): rest, (_CHORDS, FINE_SEGMENTS): back}

    def _prepared(self, paths: Paths, key: Key) -> Paths:
        """The paths with the nodes of a level."""
        kind, level = key
        if kind == _PIECES:
            return replace(paths, nodes=paths.on(level), error=torch.full_like(paths.error, torch.nan))
        return replace(paths, nodes=evened(self.chords, paths, level))


def _is_worse(found: Measurement, paths: Paths) -> Tensor:
    """Which paths of a level have more energy than those they started from."""
    return ~(found.energy <= paths.energy * (1 + _SLACK + found.error))


def _stuck_after_walls(new: Paths, old: Paths, descent: Descent, worse: Tensor) -> Tensor:
    """Which paths, back from the walled regime, get no better; they keep what they had."""
    creeps = (descent.status == Status.MAX_STEPS) & (new.energy > 0.99 * old.energy)
    stuck = old.was_walled & (worse | creeps)
    new.error = torch.where(stuck, old.error, new.error)
    new.status = torch.where(stuck, old.status, new.status)
    return stuck
