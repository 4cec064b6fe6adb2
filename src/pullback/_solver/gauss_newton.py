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
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pullback._curve import Polyline
from pullback._decoder import unvalidated
from pullback._metric.base import Metric
from pullback._solver.base import Solution, Solver, Status
from pullback._solver.discrete import DiscreteEnergy, NoEmbeddingError, total_energy
from pullback._solver.levels import Measurement, Paths, assemble, join, measure, measure_straight, resample
from pullback._solver.newton import Descent, Minimizer
from pullback._solver.rows import take
from pullback._typing import Float

_SIGHT = 1.15  # a level is blind if finer chords see more than so many times the energy its own do
_COARSE_STEPS = 15  # on all levels but the finest: a curve that takes longer is better off with more segments
_FIRST_STEPS = 6  # on the coarsest level: what it does not finish the next one does, and the batch need not wait
_RTOL = 1e-6  # aimed at by default
_COSTLY_RTOL = 1e-3  # aimed at by default at the end of the budget
_FIRST_RTOL = 1e-3  # to which the coarsest level is solved
_SHARE = 1e-2  # to which other levels are solved, as a share of the error of the last: each has a sixteenth of it
_SUBSTEPS = 8  # chords a piece in the walled regime
_WALLED_SEGMENTS = 64  # pieces on its first level
_PULL = 1e-2  # Euclidean energy mixed in there, as a share of the energy of the path


@dataclass(frozen=True)
class GaussNewton(Solver):
    """Damped Gauss-Newton with a switch to Newton, coarse to fine, with adaptive resolution (the default).

    Args:
        rtol: relative error aimed at for the length; refinement goes on until the estimate of the error falls below it. By
            default 1e-6 within the `budget`.
        accept: relative error at which a path still counts as converged where `rtol` is out of reach, because the decoder
            has kinks or sharp walls (rectified units, the nearest of several centres) and refinement no longer pays.
        budget: numbers decoded for one curve and its derivatives on a level, beyond which the default aims at 1e-3 of the
            length and, with the cost, up to `accept`: wide decoders are not followed to the finest levels for digits nobody
            looks at. An `rtol` that is given holds whatever it costs.
        max_steps: steps of one curve on the finest level.
        min_segments: segments of the coarsest level; a power of two.
        max_segments: segments of the finest level, a power of two.
        chunk_bytes: memory for the decoded points held at a time, by default what suits the device; results do not depend
            on it.
    """

    rtol: float | None = None
    accept: float = 1e-2
    budget: int = 2**19
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
            try:
                return self._descend(discrete, nodes.detach())
            except NoEmbeddingError:
                return self._descend(replace(discrete, num_parts=0), nodes.detach())

    def _descend(self, discrete: DiscreteEnergy, nodes: Tensor) -> Solution:
        """Takes each curve from level to level until it is finished."""
        waiting, done = self._start(discrete, nodes)
        while waiting:
            key = min(waiting)
            run = self._walled_level if key[0] else self._smooth_level
            finished, groups = run(discrete, join(waiting.pop(key)))
            done.append(finished)
            for next_key, group in groups.items():
                if group.index.numel():
                    waiting.setdefault(next_key, []).append(group)
        return assemble(done, discrete)

    def _start(
        self, discrete: DiscreteEnergy, nodes: Tensor
    ) -> tuple[dict[tuple[bool, int], list[Paths]], list[Paths]]:
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
            key = (True, _WALLED_SEGMENTS) if k and level >= _WALLED_SEGMENTS else (False, level)
            group.nodes = resample(group, key[1])
            waiting.setdefault(key, []).append(group)
        return waiting, [take(paths, ~finite)]

    def _smooth_level(self, discrete: DiscreteEnergy, paths: Paths) -> tuple[Paths, dict[tuple[bool, int], Paths]]:
        """Solves one level; returns the curves that are finished, and the others by the level they go to."""
        level = paths.nodes.shape[1] - 1
        last = 2 * level > self.max_segments
        first = level == self.min_segments and not last  # its minimum is only compared with
        max_steps = _FIRST_STEPS if first else self._max_steps(discrete, paths.nodes, last)
        aim = self._aim(discrete, paths.nodes)
        least = self.rtol or (_RTOL if aim == _RTOL else _COSTLY_RTOL / 10)
        enough = (_SHARE * paths.error).nan_to_num(_FIRST_RTOL).clamp(least, max(least, _FIRST_RTOL))
        descent = Minimizer(least, max_steps).run(discrete, paths.nodes, paths.damping, rtol=enough)
        found = measure(discrete, descent.nodes)
        blind = found.energy > _SIGHT * descent.energy
        worse = blind | ~(found.energy <= paths.energy * (1 + 1e-4 + found.error))
        new = _chosen(paths, descent, found, worse, order=4)
        done = self._judge(new, paths, descent, worse, aim, last)
        creeps = (descent.status == Status.MAX_STEPS) & (found.energy > 0.99 * paths.energy)
        given_up = paths.returned & (worse | creeps)
        new.error = torch.where(given_up, paths.error, new.error)
        new.status = torch.where(given_up, paths.status, new.status)
        done |= given_up
        walled = blind & (level >= self._blind_segments(discrete, paths.nodes)) & ~paths.returned
        groups = {}
        for key, chosen in (((True, _WALLED_SEGMENTS), walled & ~done), ((False, 2 * level), ~walled & ~done)):
            groups[key] = take(new, chosen)
            groups[key].nodes = resample(groups[key], key[1])
        groups[True, _WALLED_SEGMENTS].error.fill_(torch.nan)
        return take(new, done), groups

    def _walled_level(self, discrete: DiscreteEnergy, paths: Paths) -> tuple[Paths, dict[tuple[bool, int], Paths]]:
        """The same with straight pieces, each measured in many chords; then back to smooth levels, if they can see now."""
        level = paths.nodes.shape[1] - 1
        last = 4 * level > self.max_segments
        max_steps = min(50 if last else _COARSE_STEPS, self.max_steps)
        minimizer = Minimizer(self.accept / 4, max_steps, substeps=_SUBSTEPS)
        span = paths.nodes.diff(dim=1).norm(dim=-1).sum(-1)
        pull = _PULL * paths.energy / span.square().clamp_min(torch.finfo(span.dtype).tiny)
        descent = minimizer.run(discrete, paths.nodes, paths.damping, pull=pull)
        found = measure_straight(discrete, descent.nodes, 2 * _SUBSTEPS)
        kept = measure_straight(discrete, paths.best, max(2, 2 * _SUBSTEPS * level // (paths.best.shape[1] - 1)))
        paths = replace(paths, energy=kept.energy, length=kept.length)
        worse = ~(found.energy <= paths.energy * (1 + 1e-4))
        new = _chosen(paths, descent, found, worse, order=2)
        done = self._judge(new, paths, descent, worse & False, self._aim(discrete, paths.nodes), last)
        rest, back = take(new, ~done), take(new, done)
        rest.nodes, back.nodes = resample(rest, 2 * level), resample(back, _WALLED_SEGMENTS)
        back.returned = torch.ones_like(back.returned)
        groups = {(True, 2 * level): rest}
        return take(back, back.returned & False), groups | {(False, _WALLED_SEGMENTS): back}

    def _max_steps(self, discrete: DiscreteEnergy, nodes: Tensor, last: bool) -> int:
        """Few steps on coarse levels, more of them where finer ones would cost much."""
        wide = discrete.num_features * (1 + nodes.shape[2]) > 1024
        coarse = max(_COARSE_STEPS, 2560 // nodes.shape[1]) if wide else _COARSE_STEPS
        return self.max_steps if last else min(coarse, self.max_steps)

    def _blind_segments(self, discrete: DiscreteEnergy, nodes: Tensor) -> int:
        """Segments from which a blind level means a wall. Where straight pieces in many chords cost too much, see more first."""
        cost = _SUBSTEPS * _WALLED_SEGMENTS * discrete.num_features * (1 + nodes.shape[2])
        return _WALLED_SEGMENTS if cost <= self.budget else 4 * _WALLED_SEGMENTS

    def _aim(self, discrete: DiscreteEnergy, nodes: Tensor) -> float:
        """The error at which refinement ends: more than usual where the next level would decode too many numbers."""
        if self.rtol is not None:
            return self.rtol
        cost = 2 * nodes.shape[1] * discrete.num_features * (1 + nodes.shape[2]) / self.budget
        return min(_COSTLY_RTOL * cost, self.accept) if cost > 1 else _RTOL

    def _judge(self, new: Paths, old: Paths, descent: Descent, discarded: Tensor, aim: float, last: bool) -> Tensor:
        """Which curves are finished; writes the status of each as if it were."""
        border = descent.status == Status.NOT_FINITE
        still = (descent.status == Status.CONVERGED) | (descent.status == Status.STALLED) | border
        fine = descent.nodes.shape[1] > _WALLED_SEGMENTS
        slow = still & (new.error <= self.accept) & (new.error > old.error / 3) & fine
        known = (new.error <= self.accept) & ~border
        new.status = torch.where(
            known, Status.CONVERGED, torch.where(still & ~border, Status.UNRESOLVED, descent.status)
        )
        return (~discarded & (slow | ((new.error <= aim) & (still | fine)))) | last


def _stay(paths: Paths, point: Tensor) -> None:
    """Makes some of the paths points, with nothing left to solve."""
    paths.best[point] = paths.best[point, :1]
    for values in (paths.energy, paths.length, paths.error):
        values[point] = 0
    paths.status[point] = Status.CONVERGED


def _chosen(paths: Paths, descent: Descent, found: Measurement, worse: Tensor, order: int) -> Paths:
    """The path a level found, or the one it started from where that is better."""
    smooth = torch.full_like(worse, order == 4)
    level = descent.nodes.shape[1] - 1
    width = max(paths.best.shape[1] - 1, level)
    new = replace(paths, nodes=descent.nodes, best=descent.nodes, smooth=smooth)
    scale = torch.fmin(paths.energy, found.energy).clamp_min(torch.finfo(found.energy.dtype).tiny)
    change = (found.energy - paths.energy).abs() / scale
    share = torch.where(worse, 1.0, 1 / (2**order - 1))  # what the finer of two levels lacks of their difference
    # alone, a level is judged by what refinement adds: nodes that are off by h² cost h⁴ (thirty times that covers all we met)
    alone = 30 * ((found.energy - descent.energy) / scale).square() if order == 4 else torch.inf
    change = torch.where(paths.error.isnan(), alone, (share * change).nan_to_num(torch.inf))
    return Paths(
        index=paths.index,
        nodes=descent.nodes,
        best=torch.where(worse[:, None, None], resample(paths, width), resample(new, width)),
        smooth=torch.where(worse, paths.smooth, smooth),
        damping=descent.damping,
        energy=torch.where(worse, paths.energy, found.energy),
        length=torch.where(worse, paths.length, found.length),
        error=0.5 * (found.error + change + descent.left / scale),  # of the length, half that of the energy
        status=descent.status,
        strict=descent.exact & ~worse,
        num_steps=descent.num_steps,
        returned=paths.returned,
    )
