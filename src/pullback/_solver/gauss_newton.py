r"""The default solver: second-order descent, from coarse curves to fine ones, until the answer stops changing.

Each level solves the discrete problem on T segments (`Minimizer`) and then *measures* the path it found: the spline through its
nodes is decoded on 4T segments, and the energies on T, 2T and 4T of them are extrapolated. That number belongs to the path, not
to its discretisation, so levels can be compared. It converges with order four in 1/T, so a fifteenth of its last change
estimates the error that is left; when that is below the tolerance the curve is finished, else it goes on with twice the
segments.

A sharp wall in the metric breaks this. Where a decoder changes and changes back within less than a segment, no chord sees it;
minimising the chord energy then *draws* the nodes to both sides of the wall. The measurement notices: the path has far more
energy on 4T segments than on T. Such a level is discarded, and the curve continues in the *walled* regime: straight pieces
between fewer nodes, each measured in many chords, so that crossing a wall in one piece is as dear as it is in truth.

A path that runs off along directions which a wide decoder hardly uses is *graded* (`pullback._solver.grading`), and a little of
its Euclidean energy is mixed in. That pull falls from solve to solve, on one level as long as its chords see enough, to a share
that the tolerance allows; what is left of it is part of the error.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pullback._curve import Polyline
from pullback._decoder import unvalidated
from pullback._metric.base import Metric
from pullback._solver import spectral
from pullback._solver.base import Solution, Solver, Status
from pullback._solver.choice import BIAS, chosen, smooth_error, spectral_error, straight_error
from pullback._solver.discrete import DiscreteEnergy, NoEmbeddingError, pull_energy, total_energy
from pullback._solver.grading import uneven
from pullback._solver.levels import Measurement, Paths, assemble, join, measure, measure_straight, prepare
from pullback._solver.newton import Descent, Minimizer, Objective
from pullback._solver.rows import take
from pullback._solver.straight import StraightEnergy
from pullback._typing import Float

Key = tuple[int, int]  # what paths are made of on a level, and its number of segments
_CHORDS, _ELEMENTS, _PIECES = range(3)

_SIGHT = 1.15  # a level is blind if finer chords see more than so many times the energy its own do
_COARSE_STEPS = 15  # on all levels but the finest: a curve that takes longer is better off with more segments
_FIRST_STEPS = 6  # on the coarsest level: what it does not finish the next one does, and the batch need not wait
_RTOL = 1e-6  # aimed at by default
_WIDE_RTOL = 1e-3  # aimed at by default where a point with its derivatives has at least `_WIDEST` numbers
_WIDE, _WIDEST = 2**10, 2**12
_FIRST_RTOL = 1e-3  # to which the coarsest level is solved
_SHARE = 1e-2  # to which other levels are solved, as a share of the error of the last: each has a sixteenth of it
_SUBSTEPS = 8  # chords a piece in the walled regime
_WALLED_SEGMENTS = 64  # pieces on its first level
_GUIDED_SEGMENTS = (
    64  # of the coarsest level for paths that start from more than a line: fewer would lose what it knows
)
_PULL = 1e-2  # Euclidean energy mixed in there, as a share of the energy of the path
_GRADED_PULL = 3e-3  # the same for graded paths, at first
_RELAXATION = 6.0  # by which it falls from solve to solve
_RELAXED_SEGMENTS = 32  # a level on which it may fall without more segments
_NARROW = 4  # dimensions up to which the blocks of an element cost less than decoding its nodes
_CLOSE = 0.1  # if finer chords see at most so much more


@dataclass(frozen=True)
class GaussNewton(Solver):
    """Damped Gauss-Newton with a switch to Newton, coarse to fine, with adaptive resolution (the default).

    Args:
        rtol: relative error aimed at for the length; refinement goes on until the estimate of the error falls below it. By
            default 1e-6 where decoding is cheap. Where a point and its derivatives in the codes are more than 1,024 numbers
            it is 1e-3 times their number over 4,096, at most 1e-3, which is less than such a decoder is certain of.
        accept: relative error at which a path still counts as converged where `rtol` is out of reach, because the decoder
            has kinks or sharp walls (rectified units, the nearest of several centres) and refinement no longer pays.
        budget: numbers decoded for one curve and its derivatives on a level, beyond which the default aims at 1e-3 times
            the excess, up to `accept`. An `rtol` that is given holds whatever it costs.
        max_steps: steps of one curve on the finest level.
        min_segments: segments of the coarsest level; a power of two. At least 64 for paths that start from a graph or a
            curve, where decoding is cheap.
        max_segments: segments of the finest level, a power of two.
        chunk_bytes: memory for the decoded points held at a time, by default what suits the device; results do not depend
            on it.
    """

    rtol: float | None = None
    accept: float = 1e-2
    budget: int = 2**21
    max_steps: int = 100
    min_segments: int = 8
    max_segments: int = 1024
    chunk_bytes: int | None = None

    def __post_init__(self) -> None:
        for name in ("min_segments", "max_segments"):
            value = getattr(self, name)
            if value < 4 or value & (value - 1):
                raise ValueError(f"{name} must be a power of two, at least 4; got {value}.")

    def solve(self, metric: Metric, nodes: Float[Tensor, "B n d"]) -> Solution:
        with torch.no_grad(), unvalidated():
            discrete = DiscreteEnergy.of(metric, nodes, self.chunk_bytes)
            solver = self._guided(discrete, nodes)
            try:
                return solver._descend(discrete, nodes.detach())
            except NoEmbeddingError:
                return solver._descend(replace(discrete, num_parts=0), nodes.detach())

    def _guided(self, discrete: DiscreteEnergy, nodes: Tensor) -> GaussNewton:
        """Leaves out coarse levels for paths that start from a graph or a curve, unless decoding is dear."""
        if nodes.shape[1] == 2 or self._is_wide(discrete, nodes):
            return self
        return replace(self, min_segments=max(self.min_segments, min(_GUIDED_SEGMENTS, self.max_segments // 4)))

    def _descend(self, discrete: DiscreteEnergy, nodes: Tensor) -> Solution:
        """Takes each curve from level to level until it is finished."""
        waiting, done = self._start(discrete, nodes)
        levels = {_CHORDS: self._smooth_level, _ELEMENTS: self._spectral_level, _PIECES: self._walled_level}
        while waiting:
            key = min(waiting)
            finished, groups = levels[key[0]](discrete, join(waiting.pop(key)))
            done.append(finished)
            for next_key, group in groups.items():
                if group.index.numel():
                    waiting.setdefault(next_key, []).append(group)
        return assemble(done, discrete)

    def _start(self, discrete: DiscreteEnergy, nodes: Tensor) -> tuple[dict[Key, list[Paths]], list[Paths]]:
        """Sends each start path to the coarsest level whose chords see what finer ones see; bad ones are done at once."""
        num_segments = min(256, self.max_segments) if nodes.shape[1] > 2 else 4 * self.min_segments
        start = Polyline(nodes).resample(num_segments + 1)
        paths, chords = Paths.start(start), discrete.chords(start, num_segments // self.min_segments)
        energies = torch.stack([total_energy(c) for c in chords])
        paths.energy, paths.length = energies[-1], chords[-1].clamp_min(0).sqrt().sum(-1)
        ends = discrete.chords(nodes[:, [0, -1]])[0][:, 0]
        finite = torch.isfinite(paths.energy)
        paths.status[~finite] = Status.NOT_FINITE
        paths.status[~torch.isfinite(ends)] = Status.BAD_END_POINT
        point = finite & (nodes[:, 0] == nodes[:, -1]).all(-1)  # the shortest way from a point to itself is to stay
        _stay(paths, point)
        finite = finite & ~point

        blind = energies[:-1] < paths.energy / _SIGHT
        skipped = blind.flip(0).cummax(0).values.sum(0)  # levels up to and including the last that is blind
        waiting = {}
        for k in skipped[finite].unique().tolist():
            level = self.min_segments * 2**k
            group = take(paths, finite & (skipped == k))
            key = (_PIECES, _WALLED_SEGMENTS) if k and level >= _WALLED_SEGMENTS else (_CHORDS, level)
            waiting.setdefault(key, []).append(prepare(discrete, group, key[1]))
        return waiting, [take(paths, ~finite)]

    def _smooth_level(self, discrete: DiscreteEnergy, paths: Paths) -> tuple[Paths, dict[Key, Paths]]:
        """Solves one level; returns the curves that are finished, and the others by the level they go to."""
        level = paths.nodes.shape[1] - 1
        aim, last = self._aim(discrete, paths.nodes), 2 * level > self.max_segments
        first = level == self.min_segments and not last  # its minimum is only compared with
        descent = self._minimum(discrete, paths, first, last)
        found = measure(discrete, descent.nodes, paths.graded)
        blind = found.energy > _SIGHT * descent.energy
        worse = blind | ~(found.energy <= paths.energy * (1 + 1e-4 + found.error))
        strays = self._strays(discrete, paths, descent, blind)
        worse |= strays & first  # what it found is a matter of its few nodes
        error = smooth_error(paths, descent, found, worse, self._is_wide(discrete, paths.nodes))
        new = chosen(paths, descent, found, worse, error, descent.nodes)
        done = self._judge(new, paths, descent, worse, aim, last) | self._given_up(new, paths, descent, worse)
        close = ~worse & (found.energy <= (1 + _CLOSE) * descent.energy)
        again = self._relax(new, paths, strays, blind, first, aim) & close & (level >= _RELAXED_SEGMENTS)
        walled = blind & (level >= self._blind_segments(discrete, paths.nodes)) & ~paths.returned
        fit = self._fit(discrete, paths, found) & ~worse & ~new.graded & ~again
        routes = {
            (_PIECES, _WALLED_SEGMENTS): walled,
            (_ELEMENTS, 2 * level): fit,
            (_CHORDS, 2 * level): ~walled & ~again & ~fit,
            (_CHORDS, level): ~walled & again,
        }
        return take(new, done), _routed(discrete, new, done, routes)

    def _spectral_level(self, discrete: DiscreteEnergy, paths: Paths) -> tuple[Paths, dict[Key, Paths]]:
        """The same in elements; back to chords where the decoder is not smooth enough for them."""
        level = paths.nodes.shape[1] - 1
        aim, last = self._aim(discrete, paths.nodes), 2 * level > self.max_segments
        energy = spectral.SpectralEnergy.of(discrete, paths.nodes)
        descent = self._minimum(discrete, paths, False, last, energy)
        found, change = spectral.measure(energy, descent.nodes, descent.energy)
        worse = ~((change <= _CLOSE) & (found.energy <= paths.energy * (1 + 1e-4 + change)))
        error = spectral_error(paths, descent, found, worse, change)
        new = chosen(paths, descent, found, worse, error, spectral.evened(descent.nodes))
        done = self._judge(new, paths, descent, worse, aim, last)
        return take(new, done), _routed(
            discrete, new, done, {(_ELEMENTS, 2 * level): ~worse, (_CHORDS, 2 * level): worse}
        )

    def _fit(self, discrete: DiscreteEnergy, paths: Paths, found: Measurement) -> Tensor:
        """Which paths are so smooth, and decoded at such cost, that elements are worth their larger blocks."""
        _, num_nodes, d = paths.nodes.shape
        worth = self._is_wide(discrete, paths.nodes) and d <= _NARROW and num_nodes > 8 and discrete.num_parts > 0
        return found.asymptotic & ~paths.returned & worth

    def _minimum(
        self, discrete: DiscreteEnergy, paths: Paths, first: bool, last: bool, objective: Objective | None = None
    ) -> Descent:
        """The minima of a level, to a share of the error of the last; their energies are without the pull."""
        base = self._base(discrete, paths.nodes)
        least = base if self.rtol or base == _RTOL else base / 2
        enough = (_SHARE * paths.error).nan_to_num(_FIRST_RTOL).clamp(least, max(least, _FIRST_RTOL))
        minimizer = Minimizer(least, _FIRST_STEPS if first else self._max_steps(discrete, paths.nodes, last))
        pull = _weight(paths, paths.pull)
        energy = objective or discrete
        descent = minimizer.run(energy, paths.nodes, paths.damping, rtol=enough, times=paths.times, pull=pull)
        return replace(descent, energy=descent.energy - pull_energy(descent.nodes, pull))

    def _strays(self, discrete: DiscreteEnergy, paths: Paths, descent: Descent, blind: Tensor) -> Tensor:
        """Which paths are to be graded: those that run off along directions which the decoder hardly uses."""
        candidates = ~paths.graded & ~paths.returned & self._is_wide(discrete, paths.nodes)
        return candidates & (blind | uneven(descent.nodes))

    def _relax(self, new: Paths, old: Paths, strays: Tensor, blind: Tensor, first: bool, aim: float) -> Tensor:
        """Lets the pull on graded paths fall, unless they hop over what they do not see; says on which it did."""
        floor = torch.full_like(old.pull, aim / (2 * BIAS))
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

    def _walled_level(self, discrete: DiscreteEnergy, paths: Paths) -> tuple[Paths, dict[Key, Paths]]:
        """The same with straight pieces, each measured in many chords; then back to smooth levels, if they can see now."""
        level = paths.nodes.shape[1] - 1
        last = 4 * level > self.max_segments
        max_steps = min(50 if last else _COARSE_STEPS, self.max_steps)
        minimizer = Minimizer(self.accept / 4, max_steps)
        pull = _weight(paths, torch.full_like(paths.energy, _PULL))
        descent = minimizer.run(StraightEnergy(discrete, _SUBSTEPS), paths.nodes, paths.damping, pull=pull)
        found = measure_straight(discrete, descent.nodes, 2 * _SUBSTEPS)
        kept = measure_straight(discrete, paths.best, max(2, 2 * _SUBSTEPS * level // (paths.best.shape[1] - 1)))
        paths = replace(paths, energy=kept.energy, length=kept.length)
        worse = ~(found.energy <= paths.energy * (1 + 1e-4))
        error = straight_error(paths, descent, found, worse)
        new = chosen(paths, descent, found, worse, error, descent.nodes, smooth=False)
        done = self._judge(new, paths, descent, worse & False, self._aim(discrete, paths.nodes), last)
        rest, back = take(new, ~done), take(new, done)
        back.returned = torch.ones_like(back.returned)
        groups = {(_PIECES, 2 * level): prepare(discrete, rest, 2 * level)}
        return take(back, back.returned & False), groups | {
            (_CHORDS, _WALLED_SEGMENTS): prepare(discrete, back, _WALLED_SEGMENTS)
        }

    def _is_wide(self, discrete: DiscreteEnergy, nodes: Tensor) -> bool:
        return discrete.width(nodes) > _WIDE

    def _max_steps(self, discrete: DiscreteEnergy, nodes: Tensor, last: bool) -> int:
        """Few steps on coarse levels, more of them where finer ones would cost much."""
        wide = self._is_wide(discrete, nodes)
        coarse = max(_COARSE_STEPS, 2560 // nodes.shape[1]) if wide else _COARSE_STEPS
        return self.max_steps if last else min(coarse, self.max_steps)

    def _blind_segments(self, discrete: DiscreteEnergy, nodes: Tensor) -> int:
        """Segments from which a blind level means a wall. Where straight pieces in many chords cost too much, see more first."""
        cost = 4 * _SUBSTEPS * _WALLED_SEGMENTS * discrete.width(nodes)
        return _WALLED_SEGMENTS if cost <= self.budget else 4 * _WALLED_SEGMENTS

    def _base(self, discrete: DiscreteEnergy, nodes: Tensor) -> float:
        """The error aimed at within the budget."""
        if self.rtol is not None or not self._is_wide(discrete, nodes):
            return self.rtol or _RTOL
        return _WIDE_RTOL * min(1.0, discrete.width(nodes) / _WIDEST)

    def _aim(self, discrete: DiscreteEnergy, nodes: Tensor) -> float:
        """The error at which refinement ends: more than usual where the next level would decode too many numbers."""
        base = self._base(discrete, nodes)
        cost = 2 * nodes.shape[1] * discrete.width(nodes) / self.budget
        return base if self.rtol is not None or cost <= 1 else max(base, min(_WIDE_RTOL * cost, self.accept))

    def _judge(self, new: Paths, old: Paths, descent: Descent, discarded: Tensor, aim: float, last: bool) -> Tensor:
        """Which curves are finished; writes the status of each as if it were."""
        ended = new.status
        border = ended == Status.NOT_FINITE
        still = (ended == Status.CONVERGED) | (ended == Status.STALLED) | border
        fine = descent.nodes.shape[1] > _WALLED_SEGMENTS
        slow = still & (new.error <= self.accept) & (new.error > old.error / 3) & fine & ~old.graded
        known = (new.error <= self.accept) & ~border
        new.status = torch.where(known, Status.CONVERGED, torch.where(still & ~border, Status.UNRESOLVED, ended))
        return (~discarded & (slow | ((new.error <= aim) & (still | fine)))) | last


def _routed(discrete: DiscreteEnergy, new: Paths, done: Tensor, routes: dict[Key, Tensor]) -> dict[Key, Paths]:
    """The paths that are not done, prepared for the levels they go to."""
    groups = {}
    for key, rows in routes.items():
        group = prepare(discrete, take(new, rows & ~done), key[1])
        if key[0] == _ELEMENTS:
            group = replace(group, nodes=spectral.placed(group.best, key[1]))
        if key[0] == _PIECES:
            group.error.fill_(torch.nan)
        groups[key] = group
    return groups


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
