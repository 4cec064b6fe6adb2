r"""From coarse curves to fine ones, until the answer stops changing.

Each level solves the discrete problem on T segments (`Minimizer`) and then *measures* the path it found: the spline through its
nodes is decoded on 4T segments, and the energies on T, 2T and 4T of them are extrapolated. That number belongs to the path, not
to its discretisation, so levels can be compared. It converges with order four in 1/T, so a fifteenth of its last change
estimates the error that is left; when that is below the tolerance the curve is finished, else it goes on with twice the
segments.

Where decoding is dear and codes have few dimensions, curves are made of *elements* instead of chords (`pullback._solvers.spectral`).
Paths that 32 nodes of these do not fit go on with chords, and come back once chords behave as theory says.

A sharp wall in the metric breaks this. Where a decoder changes and changes back within less than a segment, no chord sees it;
minimising the chord energy then *draws* the nodes to both sides of the wall. The measurement notices: the path has far more
energy on 4T segments than on T. Such a level is discarded, and the curve continues in the *walled* regime: straight pieces
between fewer nodes, each measured in many chords, so that crossing a wall in one piece is as dear as it is in truth. Where such a
path turns it has a node; from level to level its longer pieces are cut, and it is returned as these pieces, not as a spline.

A path that runs off along directions which a wide decoder hardly uses is *graded* (`pullback._solvers.grading`), and a little of
its Euclidean energy is mixed in. That pull falls from solve to solve, on one level as long as its chords see enough, to a share
that the tolerance allows; what is left of it is part of the error.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pullback._curves.curve import Polyline
from pullback._numerics.rows import take
from pullback._solvers import spectral
from pullback._solvers.base import Solution, Status
from pullback._solvers.choice import BIAS, chosen, smooth_error, spectral_error, straight_error
from pullback._solvers.descent import Descent
from pullback._solvers.discrete import DiscreteEnergy, pull_energy, total_energy
from pullback._solvers.effort import COARSE_STEPS, WALLED_SEGMENTS, Effort
from pullback._solvers.elements import DEGREE
from pullback._solvers.grading import uneven
from pullback._solvers.levels import Paths, assemble, join, measure, measure_straight, prepare, spread
from pullback._solvers.newton import Minimizer
from pullback._solvers.straight import StraightEnergy

Key = tuple[int, int]  # what paths are made of on a level, and its number of segments
Outcome = tuple[Paths, dict[Key, Paths]]  # the paths that are finished, and the others by the level they go to
_CHORDS, _ELEMENTS, _PIECES = range(3)

_SIGHT = 1.15  # a level is blind if finer chords see more than so many times the energy its own do
_FIRST_RTOL = 1e-3  # to which the coarsest level is solved
_SHARE = 1e-2  # to which other levels are solved, as a share of the error of the last: each has a sixteenth of it
_PULL = 1e-2  # Euclidean energy mixed in there, as a share of the energy of the path
_GRADED_PULL = 3e-3  # the same for graded paths, at first
_RELAXATION = 3.0  # by which it falls from solve to solve
_RELAXED_SEGMENTS = 32  # a level on which it may fall without more segments
_TRIED = 32  # segments up to which paths stay in elements that do not fit them yet
_CLOSE = 0.1  # if finer chords see at most so much more


@dataclass(frozen=True)
class Refinement:
    """The descent of one batch of curves."""

    discrete: DiscreteEnergy
    effort: Effort
    elements: spectral.SpectralEnergy | None  # where they are worth their while

    @classmethod
    def of(cls, discrete: DiscreteEnergy, effort: Effort, nodes: Tensor) -> Refinement:
        """The descent of curves that start from ``nodes``."""
        return cls(discrete, effort, spectral.SpectralEnergy.of(discrete, nodes) if effort.spectral else None)

    def run(self, nodes: Tensor) -> Solution:
        """Takes each curve from level to level until it is finished."""
        waiting, done = self._start(nodes)
        levels = {_CHORDS: self._smooth_level, _ELEMENTS: self._spectral_level, _PIECES: self._walled_level}
        while waiting:
            key = min(waiting)
            finished, groups = levels[key[0]](join(waiting.pop(key)))
            done.append(finished)
            for next_key, group in groups.items():
                if group.index.numel():
                    waiting.setdefault(next_key, []).append(group)
        return assemble(done, self.discrete)

    def _start(self, nodes: Tensor) -> tuple[dict[Key, list[Paths]], list[Paths]]:
        """Sends each start path to the coarsest level whose chords see what finer ones see; bad ones are done at once."""
        factor = 2 if self.effort.spectral else 4  # elements are measured on many points in any case
        num_segments = min(256, self.effort.max_segments) if nodes.shape[1] > 2 else factor * self.effort.min_segments
        start = Polyline(nodes).resample(num_segments + 1)
        paths = Paths.start(start, spectral.INNER if self.effort.spectral else 0)
        chords = self.discrete.chords(start, num_segments // self.effort.min_segments)
        energies = torch.stack([total_energy(c) for c in chords])
        paths.energy, paths.length = energies[-1], chords[-1].clamp_min(0).sqrt().sum(-1)
        finite = torch.isfinite(paths.energy)
        if not finite.all():
            ends = self.discrete.chords(nodes[:, [0, -1]])[0][:, 0]
            paths.status[~finite] = Status.NOT_FINITE
            paths.status[~torch.isfinite(ends)] = Status.BAD_END_POINT
        point = finite & (nodes[:, 0] == nodes[:, -1]).all(-1)  # the shortest way from a point to itself is to stay
        _stay(paths, point)
        finite = finite & ~point

        blind = energies[:-1] < paths.energy / _SIGHT
        skipped = blind.flip(0).cummax(0).values.sum(0)  # levels up to and including the last that is blind
        waiting, walled = {}, (_PIECES, self.effort.walled_segments)
        for k in skipped[finite].unique().tolist():
            level = self.effort.min_segments * 2**k
            group = take(paths, finite & (skipped == k))
            smooth = (_ELEMENTS if self.effort.spectral and level <= _TRIED else _CHORDS, level)
            key = walled if k and level >= WALLED_SEGMENTS else smooth
            waiting.setdefault(key, []).append(self._prepared(group, key))
        return waiting, [take(paths, ~finite)]

    def _smooth_level(self, paths: Paths) -> Outcome:
        """Solves one level; returns the curves that are finished, and the others by the level they go to."""
        level = paths.nodes.shape[1] - 1
        aim, first, last = self.effort.aim(paths.nodes), self.effort.first(level), self.effort.last(level)
        descent = self._minimum(paths)
        found = measure(self.discrete, descent.nodes, paths.graded)
        blind = found.energy > _SIGHT * descent.energy
        worse = blind | ~(found.energy <= paths.energy * (1 + 1e-4 + found.error))
        strays = self._strays(paths, descent, blind)
        worse |= strays & first  # what it found is a matter of its few nodes
        error = smooth_error(paths, descent, found, worse, self.effort.wide)
        new = chosen(paths, descent, found, worse, error, descent.nodes)
        done = self._judge(new, paths, descent, worse, aim, last) | self._given_up(new, paths, descent, worse)
        close = ~worse & (found.energy <= (1 + _CLOSE) * descent.energy)
        again = self._relax(new, paths, strays, blind, first) & close & (level >= _RELAXED_SEGMENTS)
        walled = blind & (level >= self.effort.blind_segments) & ~paths.returned
        plain = ~worse & ~again & ~new.graded & ~paths.returned
        fit = found.asymptotic & plain & self.effort.spectral
        routes = {
            (_PIECES, self.effort.walled_segments): walled,
            (_ELEMENTS, 2 * level): fit,
            (_CHORDS, 2 * level): ~walled & ~again & ~fit,
            (_CHORDS, level): ~walled & again,
        }
        return take(new, done), self._routed(new, done, routes)

    def _spectral_level(self, paths: Paths) -> Outcome:
        """The same in elements; back to chords where the decoder is not smooth enough for them."""
        level = paths.nodes.shape[1] - 1
        aim, last = self.effort.aim(paths.nodes), self.effort.last(level)
        energy = self.elements
        assert energy is not None
        minimizer = Minimizer(self.effort.least, self.effort.steps(level), *spectral.EXACT)
        held = spectral.held(paths.bend, level // DEGREE)
        descent = minimizer.run(energy, paths.nodes, paths.damping, rtol=self._enough(paths), held=held)
        found, change = spectral.measure(energy, descent.nodes, descent.energy)
        worse = ~((change <= _CLOSE) & (found.energy <= paths.energy * (1 + 1e-4 + change)))
        error = spectral_error(paths, descent, found, worse, change)
        new = chosen(paths, descent, found, worse, error, spectral.evened(descent.nodes))
        done = self._judge(new, paths, descent, worse, aim, last)
        bent = ~done & ~worse
        if level == DEGREE and bent.any():
            new.bend[bent] = energy.bends(descent.nodes[bent])
        stay = ~worse | (level < _TRIED)
        routes = {(_ELEMENTS, 2 * level): stay, (_CHORDS, 2 * level): ~stay}
        return take(new, done), self._routed(new, done, routes)

    def _minimum(self, paths: Paths) -> Descent:
        """The minima of a level of chords; their energies are without the pull."""
        minimizer = Minimizer(self.effort.least, self.effort.steps(paths.nodes.shape[1] - 1))
        pull, enough = _weight(paths, paths.pull), self._enough(paths)
        descent = minimizer.run(self.discrete, paths.nodes, paths.damping, rtol=enough, times=paths.times, pull=pull)
        return replace(descent, energy=descent.energy - pull_energy(descent.nodes, pull))

    def _enough(self, paths: Paths) -> Tensor:
        """The share of the energy that a level may leave: some of the error of the last."""
        least = self.effort.least
        return (_SHARE * paths.error).nan_to_num(_FIRST_RTOL).clamp(least, max(least, _FIRST_RTOL))

    def _strays(self, paths: Paths, descent: Descent, blind: Tensor) -> Tensor:
        """Which paths are to be graded: those that run off along directions which the decoder hardly uses."""
        candidates = ~paths.graded & ~paths.returned & self.effort.wide
        return candidates & (blind | uneven(descent.nodes))

    def _relax(self, new: Paths, old: Paths, strays: Tensor, blind: Tensor, first: bool) -> Tensor:
        """Lets the pull on graded paths fall, unless they hop over what they do not see; says on which it did."""
        floor = torch.full_like(old.pull, self.effort.base / (2 * BIAS))
        start = torch.where(blind | first, _GRADED_PULL, floor)
        relaxed = torch.where(blind, old.pull, torch.fmin(torch.fmax(old.pull / _RELAXATION, floor), old.pull))
        new.pull = torch.where(old.graded, relaxed, torch.where(strays, start, 0.0))
        new.graded = old.graded | strays
        return new.pull < old.pull

    def _given_up(self, new: Paths, old: Paths, descent: Descent, worse: Tensor) -> Tensor:
        """Which paths, back from the walled regime, get no better; they keep what they had."""
        creeps = (descent.status == Status.MAX_STEPS) & (new.energy > 0.99 * old.energy)
        given_up = old.returned & (worse | creeps)
        new.error = torch.where(given_up, old.error, new.error)
        new.status = torch.where(given_up, old.status, new.status)
        return given_up

    def _walled_level(self, paths: Paths) -> Outcome:
        """The same with straight pieces, each measured in many chords; then back to smooth levels, if they can see now."""
        level = paths.nodes.shape[1] - 1
        last, substeps = self.effort.last(level), self.effort.substeps(level)
        minimizer = Minimizer(self.effort.accept / 4, min(50 if last else COARSE_STEPS, self.effort.max_steps))
        pull = _weight(paths, torch.full_like(paths.energy, _PULL * (WALLED_SEGMENTS / level) ** 2))
        descent = minimizer.run(StraightEnergy(self.discrete, substeps), paths.nodes, paths.damping, pull=pull)
        found = measure_straight(self.discrete, descent.nodes, 2 * substeps)
        kept = measure_straight(self.discrete, paths.best, max(2, 2 * substeps * level // (paths.best.shape[1] - 1)))
        paths = replace(paths, energy=kept.energy, length=kept.length)
        worse = ~(found.energy <= paths.energy * (1 + 1e-4))
        error = straight_error(paths, descent, found, worse)
        new = chosen(paths, descent, found, worse, error, descent.nodes, smooth=False)
        done = self._judge(new, paths, descent, worse & False, self.effort.aim(paths.nodes), last)
        back, rest = take(new, done), prepare(self.discrete, take(new, ~done), 2 * level)
        back.returned = torch.ones_like(back.returned)
        cut = spread(self.discrete, descent.nodes[~done & ~worse], 2 * level)
        rest.nodes = rest.nodes.index_put((~worse[~done],), cut)
        smooth = prepare(self.discrete, back, WALLED_SEGMENTS)
        return take(back, back.returned & False), {(_PIECES, 2 * level): rest, (_CHORDS, WALLED_SEGMENTS): smooth}

    def _judge(self, new: Paths, old: Paths, descent: Descent, discarded: Tensor, aim: float, last: bool) -> Tensor:
        """Which curves are finished; writes the status of each as if it were."""
        ended = new.status
        border = ended == Status.NOT_FINITE
        still = (ended == Status.CONVERGED) | (ended == Status.STALLED) | border
        fine = descent.nodes.shape[1] > WALLED_SEGMENTS
        slow = still & (new.error <= self.effort.accept) & (new.error > old.error / 3) & fine & ~old.graded
        known = (new.error <= self.effort.accept) & ~border
        new.status = torch.where(known, Status.CONVERGED, torch.where(still & ~border, Status.UNRESOLVED, ended))
        return (~discarded & (slow | ((new.error <= aim) & (still | fine)))) | last

    def _routed(self, new: Paths, done: Tensor, routes: dict[Key, Tensor]) -> dict[Key, Paths]:
        """The paths that are not done, prepared for the levels they go to."""
        groups = {key: self._prepared(take(new, rows & ~done), key) for key, rows in routes.items()}
        for key in groups:
            if key[0] == _PIECES:
                groups[key].error.fill_(torch.nan)
        return groups

    def _prepared(self, paths: Paths, key: Key) -> Paths:
        """The paths with the nodes of a level."""
        new = prepare(self.discrete, paths, key[1])
        return replace(new, nodes=spectral.placed(paths.best, key[1])) if key[0] == _ELEMENTS else new


def _stay(paths: Paths, point: Tensor) -> None:
    """Makes some of the paths points, with nothing left to solve."""
    paths.best[point] = paths.best[point, :1]
    for values in (paths.energy, paths.length, paths.error):
        values[point] = 0
    paths.status[point] = Status.CONVERGED


def _weight(paths: Paths, share: Tensor) -> Tensor:
    """The weight with which Euclidean energy is mixed in, such that it is a share of the energy of the path."""
    span = paths.nodes.diff(dim=1).norm(dim=-1).sum(-1)
    return share * paths.energy / span.square().clamp_min(torch.finfo(span.dtype).tiny)
