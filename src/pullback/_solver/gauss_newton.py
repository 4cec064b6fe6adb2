r"""The default solver: second-order descent, from coarse curves to fine ones, until the answer stops changing.

Each level solves the discrete problem on T segments (`Minimizer`) and then *measures* the path it found: the natural spline
through its nodes is decoded on 4T segments, and the energies on T, 2T and 4T of them are extrapolated (Romberg). That number
belongs to the path, not to its discretisation, so levels can be compared:

- it must not rise from one level to the next. If it does, the coarse nodes have hopped over a wall of the metric that no chord
  saw; the level is discarded and the path before it is refined instead;
- it converges with order four in 1/T, so a fifteenth of its last change estimates the error that is left. When that is below
  the tolerance the curve is finished; else it goes on with twice the segments.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from scipy import interpolate
from torch import Tensor

from pullback._curve import Polyline
from pullback._decoder import unvalidated
from pullback._metric.base import Metric
from pullback._solver.base import Solution, Solver, Status
from pullback._solver.discrete import DiscreteEnergy
from pullback._solver.newton import Descent, Minimizer
from pullback._solver.rows import concatenate, take

_COARSE_STEPS = 15  # on all levels but the finest: a curve that takes longer is better off with more segments
_SIGHT = 1.15  # a level is left out if finer chords see more than so many times the energy its own do


@dataclass(frozen=True)
class Measurement:
    """Energy and length of paths, independent of their nodes up to `error`, relative to the energy."""

    energy: Tensor
    length: Tensor
    error: Tensor


def measure(discrete: DiscreteEnergy, nodes: Tensor, smooth: Tensor) -> Measurement:
    """Measures paths with ``nodes`` of T segments on 4T segments."""
    T = nodes.shape[1] - 1
    chords = discrete.chords(_resample(nodes, 4 * T, smooth), 4)
    energy, error = romberg(*(m * c.sum(-1) for m, c in zip((T, 2 * T, 4 * T), chords, strict=True)))
    length, _ = romberg(*(c.clamp_min(0).sqrt().sum(-1) for c in chords))
    return Measurement(energy, length, error / energy.clamp_min(torch.finfo(energy.dtype).tiny))


def romberg(coarse: Tensor, middle: Tensor, fine: Tensor) -> tuple[Tensor, Tensor]:
    """Two Richardson steps for values of order two at T, 2T, 4T, and an estimate of the error.

    Where the differences do not fall by about four the values are not in the asymptotic range: the finest one is returned as
    it is, and the last difference as its error.
    """
    first, second = middle + (middle - coarse) / 3, fine + (fine - middle) / 3
    regular = (fine - middle).abs() <= 0.35 * (middle - coarse).abs() + 1e-12 * fine.abs()
    value = torch.where(regular, second + (second - first) / 15, fine)
    return value, torch.where(regular, (second - first).abs() / 15, (fine - middle).abs())


def refine(nodes: Tensor, factor: int) -> Tensor:
    """Nodes of the cubic spline through ``nodes`` on `factor` times as many segments.

    Not-a-knot ends keep order four up to the end points; natural ones, free of curvature, would lose it there.
    """
    return _refinement(nodes.shape[1] - 1, factor, nodes.dtype, nodes.device) @ nodes


@functools.lru_cache(maxsize=64)
def _refinement(num_segments: int, factor: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    t = np.linspace(0, 1, num_segments + 1)
    weights = interpolate.CubicSpline(t, np.eye(num_segments + 1))(np.linspace(0, 1, factor * num_segments + 1))
    weights[::factor] = np.eye(num_segments + 1)  # the nodes themselves, to the last digit
    with torch.inference_mode(False):
        return torch.as_tensor(weights, dtype=dtype, device=device)


@dataclass
class Paths:
    """Curves at one level, with the best path of each so far and its measurement; one entry a curve in every field."""

    index: Tensor
    nodes: Tensor  # (B, T + 1, d)
    best: Tensor  # (B, N + 1, d), N a multiple of T
    smooth: Tensor  # whether `best` stands for the spline through it, or, at the start, for straight pieces
    damping: Tensor
    energy: Tensor
    length: Tensor
    error: Tensor  # infinite before two levels have been compared
    status: Tensor
    strict: Tensor
    num_steps: Tensor  # on this level


@dataclass(frozen=True)
class GaussNewton(Solver):
    """Damped Gauss-Newton with a switch to Newton, coarse to fine, with adaptive resolution (the default).

    Args:
        rtol: relative error aimed at for the length; refinement goes on until the estimate of the error falls below it.
        accept: relative error at which a path still counts as converged where `rtol` is out of reach, because the decoder
            has kinks (rectified units, the nearest of several centres) and refinement no longer pays.
        max_steps: steps of one curve on one level.
        min_segments: segments of the coarsest level; a power of two.
        max_segments: segments of the finest level.
        chunk_bytes: memory for the decoded points held at a time; results do not depend on it.
    """

    rtol: float = 1e-6
    accept: float = 1e-2
    max_steps: int = 50
    min_segments: int = 8
    max_segments: int = 1024
    chunk_bytes: int = 2**25

    def solve(self, metric: Metric, nodes: Float[Tensor, "B n d"]) -> Solution:
        with torch.no_grad(), unvalidated():
            discrete = DiscreteEnergy.of(metric, nodes, self.chunk_bytes)
            waiting, done = self._start(discrete, nodes.detach())
            while waiting:
                level = min(waiting)
                finished, rest = self._level(discrete, concatenate(waiting.pop(level)))
                done.append(finished)
                if rest.index.numel():
                    waiting.setdefault(2 * level, []).append(rest)
            return _assemble(done, discrete)

    def _start(self, discrete: DiscreteEnergy, nodes: Tensor) -> tuple[dict[int, list[Paths]], list[Paths]]:
        """Sends each start path to the coarsest level whose chords see what finer ones see; bad ones are done at once."""
        num_segments = min(256, self.max_segments) if nodes.shape[1] > 2 else 4 * self.min_segments
        start = Polyline(nodes).resample(num_segments + 1)
        paths, chords = _new_paths(start), discrete.chords(start, num_segments // self.min_segments)
        energies = torch.stack([c.shape[1] * c.sum(-1) for c in chords])
        paths.energy, paths.length = energies[-1], chords[-1].clamp_min(0).sqrt().sum(-1)
        ends = discrete.chords(nodes[:, [0, -1]])[0][:, 0]
        finite = torch.isfinite(paths.energy)
        paths.status[~finite] = Status.NOT_FINITE
        paths.status[~torch.isfinite(ends)] = Status.BAD_END_POINT

        blind = energies[:-1] < paths.energy / _SIGHT
        skipped = (blind.flip(0).cummax(0).values).sum(0)  # levels up to and including the last that is blind
        waiting = {}
        for k in skipped[finite].unique().tolist():
            level = self.min_segments * 2**k
            group = take(paths, finite & (skipped == k))
            group.nodes = group.best[:, :: num_segments // level]
            waiting[level] = [group]
        return waiting, [take(paths, ~finite)]

    def _level(self, discrete: DiscreteEnergy, paths: Paths) -> tuple[Paths, Paths]:
        """Solves one level; returns the curves that are finished, and the others on the next level."""
        level = paths.nodes.shape[1] - 1
        last = 2 * level > self.max_segments
        max_steps = self.max_steps if last else min(_COARSE_STEPS, self.max_steps)
        rtol = self.rtol if level > self.min_segments else 30 * self.rtol  # the first level is only compared with
        descent = Minimizer(rtol=rtol, max_steps=max_steps).run(discrete, paths.nodes, paths.damping)
        found = measure(discrete, descent.nodes, torch.ones_like(descent.exact))
        new = _better(discrete, paths, descent, found)
        usable = (descent.status == Status.CONVERGED) | (descent.status == Status.STALLED) | last
        slow = (new.error <= self.accept) & (new.error > paths.error / 3)
        finished = (usable & ((new.error <= self.rtol) | slow)) | last
        good = usable & (new.error <= self.accept)
        new.status = torch.where(good, Status.CONVERGED, torch.where(usable, Status.UNRESOLVED, descent.status))
        rest = take(new, ~finished)
        rest.nodes = _resample(rest.best, 2 * level, rest.smooth)
        return take(new, finished), rest


def _better(discrete: DiscreteEnergy, paths: Paths, descent: Descent, found: Measurement) -> Paths:
    """The path a level found, or the one it started from where that has less energy, measured as finely."""
    bound = found.energy * (1 + found.error)
    blind = found.energy > _SIGHT * descent.energy  # the nodes hop over walls that only the refinement sees
    worse = blind | ~(bound <= paths.energy * (1 + 1e-4))
    if worse.any():
        again = measure(discrete, paths.best[worse], paths.smooth[worse])
        paths.energy[worse], paths.length[worse] = again.energy, again.length
        worse = blind | ~(bound <= paths.energy * (1 + 1e-4))
    scale = paths.energy.clamp_min(torch.finfo(found.energy.dtype).tiny)
    change = (found.energy - paths.energy).abs() / scale
    change = torch.where(
        worse, change, change / 15
    )  # minima of order four differ by fifteen times what the finer lacks
    change = torch.where(paths.error.isnan(), torch.inf, change.nan_to_num(torch.inf))
    left = torch.where(descent.status == Status.MAX_STEPS, 10 * descent.predicted / scale, 0.0)
    error = 0.5 * (found.error + change + left)  # of the length, half that of the energy
    width = max(paths.best.shape[1], descent.nodes.shape[1]) - 1
    kept, new = _resample(paths.best, width, paths.smooth), _resample(descent.nodes, width, torch.ones_like(worse))
    return Paths(
        index=paths.index,
        nodes=descent.nodes,
        best=torch.where(worse[:, None, None], kept, new),
        smooth=torch.where(worse, paths.smooth, True),
        damping=descent.damping,
        energy=torch.where(worse, paths.energy, found.energy),
        length=torch.where(worse, paths.length, found.length),
        error=error,
        status=descent.status,
        strict=descent.exact & ~worse,
        num_steps=descent.num_steps,
    )


def _resample(nodes: Tensor, num_segments: int, smooth: Tensor) -> Tensor:
    """Nodes on `num_segments` segments, a multiple or a divisor of the present number."""
    present = nodes.shape[1] - 1
    if num_segments <= present:
        return nodes[:, :: present // num_segments]
    bent, straight = refine(nodes, num_segments // present), Polyline(nodes).resample(num_segments + 1)
    return torch.where(smooth[:, None, None], bent, straight)


def _new_paths(nodes: Tensor) -> Paths:
    index = torch.arange(nodes.shape[0], device=nodes.device)
    unknown = torch.full((nodes.shape[0],), torch.nan, dtype=nodes.dtype, device=nodes.device)
    return Paths(
        index=index,
        nodes=nodes,
        best=nodes,
        smooth=torch.zeros_like(index, dtype=torch.bool),
        damping=torch.full_like(unknown, 0.1),
        energy=unknown,
        length=unknown,
        error=unknown,
        status=torch.full_like(index, Status.UNRESOLVED),
        strict=torch.zeros_like(index, dtype=torch.bool),
        num_steps=torch.zeros_like(index),
    )


def _assemble(done: list[Paths], discrete: DiscreteEnergy) -> Solution:
    """All curves in their order, on the nodes of the finest among them."""
    levels = [paths.nodes.shape[1] - 1 for paths in done]
    finest = max(paths.best.shape[1] - 1 for paths in done)
    num_segments = torch.cat([torch.full_like(paths.index, level) for paths, level in zip(done, levels, strict=True)])
    for paths in done:
        paths.nodes = paths.best = _resample(paths.best, finest, paths.smooth)
    paths = concatenate(done)
    order = paths.index.argsort()
    paths = take(paths, order)
    return Solution(
        nodes=paths.nodes,
        energy=paths.energy,
        length=paths.length,
        error=paths.error,
        status=paths.status,
        strict=paths.strict,
        num_steps=paths.num_steps,
        num_segments=num_segments[order],
        num_calls=discrete.work.num_calls,
        num_decoded=discrete.work.num_decoded,
    )
