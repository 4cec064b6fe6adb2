"""Paths between levels of resolution: how they are refined, compared and put together."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pullback._curves.curve import CubicSpline, Polyline
from pullback._curves.steps import equal_spacing, mixed_steps
from pullback._numerics.rows import beside, concatenate, inverse, moved_to, take
from pullback._numerics.spline import lerp_nodes, refine
from pullback._solvers.base import Solution, Status
from pullback._solvers.chords import ChordEnergy
from pullback._solvers.measure import Measurement, measure_pieces
from pullback._solvers.newton import START_DAMPING, Descent
from pullback._solvers.plan import FINE_SEGMENTS, START_SEGMENTS, SUBSTEPS

# Excess of the energy of a path over the square of its length from which its speed is made even (VAE of all digits with
# d = 2), and the points it takes at the end (toy problem). That is done on fine levels only: fewer segments are used by
# callers who want a coarse path.
_UNEVEN, _EVEN_POINTS = 1e-2, 4 * START_SEGMENTS
# Part of the time that goes by Euclidean length (toy problem).
_EUCLIDEAN_SHARE = 3e-3


@dataclass
class Paths:
    """Curves at one level, with the best path of each so far and its measurement; one entry per curve in every
    field. All but nodes and points are in the memory of the host, as those of `Descent` are."""

    index: Tensor
    nodes: Tensor  # (B, T + 1, d)
    points: Tensor  # (B, N + 1, d): the best path
    is_spline: Tensor  # whether `points` stand for the spline through them, or for the straight pieces between
    damping: Tensor
    energy: Tensor
    length: Tensor
    change: Tensor  # of the energy by the last level
    noise: Tensor  # rounding of the length
    error: Tensor  # of the length; NaN before the first level
    status: Tensor
    strict: Tensor
    num_steps: Tensor  # on this level
    num_looks: Tensor  # how often the path went on after it had converged
    was_walled: Tensor  # whether the curve has been through the walled regime
    settled: Tensor  # whether the last level was solved to its tolerance
    certified: Tensor  # whether the exact Hessian was positive definite at the minimum of some level

    @classmethod
    def start(cls, nodes: Tensor) -> Paths:
        index = torch.arange(nodes.shape[0])
        unknown = torch.full((nodes.shape[0],), torch.nan, dtype=nodes.dtype)
        off = torch.zeros_like(index, dtype=torch.bool)
        return cls(
            index=index,
            nodes=nodes,
            points=nodes,
            damping=torch.full_like(unknown, START_DAMPING),
            **{name: unknown.clone() for name in ("energy", "length", "change", "noise", "error")},
            **dict.fromkeys(("is_spline", "strict", "was_walled", "settled", "certified"), off),
            status=torch.full_like(index, Status.UNRESOLVED),
            **dict.fromkeys(("num_steps", "num_looks"), torch.zeros_like(index)),
        )

    def on(self, num_segments: int) -> Tensor:
        """The best paths on `num_segments` segments, a multiple or a divisor of their own number."""
        present = self.points.shape[1] - 1
        if num_segments <= present:
            return self.points[:, :: present // num_segments]
        factor = num_segments // present
        if self.is_spline.all():
            return refine(self.points, factor)
        lines = lerp_nodes(self.points, factor)
        return torch.where(beside(self.is_spline, lines)[:, None, None], refine(self.points, factor), lines)


def keep_better(
    paths: Paths, descent: Descent, found: Measurement, worse: Tensor, error: Tensor, *, spline: bool = True
) -> Paths:
    """The path a level found, or the one it started from where that is better."""
    is_spline = torch.full_like(worse, spline)
    width = max(paths.points.shape[1], descent.nodes.shape[1]) - 1
    best = replace(paths, points=descent.nodes, is_spline=is_spline).on(width)
    if worse.any():
        best = torch.where(beside(worse, best)[:, None, None], paths.on(width), best)
    return replace(
        paths,
        nodes=descent.nodes,
        points=best,
        is_spline=torch.where(worse, paths.is_spline, is_spline),
        damping=descent.damping,
        energy=torch.where(worse, paths.energy, found.energy),
        length=torch.where(worse, paths.length, found.length),
        change=found.energy - paths.energy,
        error=error,
        status=torch.where(found.energy.isfinite(), descent.status, Status.NOT_FINITE),
        strict=descent.uses_hessian & ~worse,
        num_steps=descent.num_steps,
        settled=descent.status == Status.CONVERGED,
        # of a path that is discarded, or has no Hessian, nothing was learned
        certified=paths.certified | (descent.firm & ~worse & spline),
    )


def cut_pieces(chords: ChordEnergy, nodes: Tensor, num_segments: int) -> Tensor:
    """The same path in more straight pieces, more of them where it is longer; all corners stay where they are.

    Corners lie at kinks of the decoder, and nodes do not pass those downhill: only this evens out the speed.
    """
    if not len(nodes):
        return nodes.new_empty(0, num_segments + 1, nodes.shape[2])
    parts, spare = _piece_shares(chords, nodes, SUBSTEPS), num_segments - (nodes.shape[1] - 1)
    wanted = (num_segments * parts - 1).clamp_min(0)
    total = wanted.sum(-1, keepdim=True).clamp_min(torch.finfo(wanted.dtype).tiny)
    ends = (spare * wanted.cumsum(-1) / total).round().long()
    ends = ends + torch.arange(1, ends.shape[1] + 1, device=ends.device)  # every piece is kept, and some are cut
    ends[:, -1] = num_segments
    begins = torch.nn.functional.pad(ends[:, :-1], (1, 0))
    new = torch.arange(num_segments, device=ends.device).expand(len(ends), -1).contiguous()
    piece = torch.searchsorted(ends, new, right=True)
    begin, count = begins.gather(1, piece), (ends - begins).gather(1, piece)
    left, right = (nodes.take_along_dim(i[..., None], 1) for i in (piece, piece + 1))
    inner = torch.lerp(left, right, ((new - begin) / count)[..., None].to(nodes))
    return torch.cat([inner, nodes[:, -1:]], 1)


def _piece_shares(chords: ChordEnergy, nodes: Tensor, substeps: int) -> Tensor:
    """The pieces' parts of the length of a path, with a little of the Euclidean length."""
    lengths = chords.chords(lerp_nodes(nodes, substeps))[0].clamp_min(0).sqrt().unflatten(1, (-1, substeps)).sum(-1)
    return mixed_steps(lengths, nodes.diff(dim=1).norm(dim=-1), _EUCLIDEAN_SHARE)


def join(groups: list[Paths]) -> Paths:
    """Curves that meet on a level, their best paths brought to the finest of their resolutions."""
    finest = max(group.points.shape[1] - 1 for group in groups)
    return concatenate([replace(group, points=group.on(finest)) for group in groups])


def assemble(done: list[Paths], chords: ChordEnergy) -> Solution:
    """All curves in their order, on the nodes of the finest among them."""
    levels = [torch.full_like(paths.index, paths.nodes.shape[1] - 1) for paths in done]
    even = [_with_even_speed(chords, paths) for paths in done]
    order = inverse(torch.cat([paths.index for paths in done]))
    # nodes have as many resolutions as there are levels; the best paths are what counts
    paths = take(join([replace(paths, nodes=paths.nodes[:, :1]) for paths in even]), order)
    straight = ~paths.is_spline & torch.isfinite(paths.energy)
    paths = moved_to(paths, paths.points.device)
    num_segments = beside(torch.cat(levels)[order], paths.points)
    few = Polyline(paths.points).resample(FINE_SEGMENTS // 2**3 + 1)
    # along a path errors cancel but for those of its ends; across it they lengthen each of the four chords that a
    # segment of a spline is measured in
    share = (paths.noise / paths.length).nan_to_num(0.0) * paths.is_spline
    rounding = share + 0.5 * (4 * num_segments * share) ** 2
    rounding = torch.maximum(rounding, chords.cancellation(few, num_segments) * (paths.noise > 0))
    # estimates that are one number or another have torch's default dtype
    error = torch.maximum(paths.error, rounding).to(paths.length)
    return Solution(
        nodes=paths.points,
        energy=paths.energy,
        length=paths.length,
        error=error.masked_fill(paths.status == Status.NOT_FINITE, torch.nan),
        status=paths.status,
        strict=paths.strict,
        num_steps=paths.num_steps,
        num_segments=num_segments,
        num_calls=chords.work.num_calls,
        num_decoded=chords.work.num_decoded,
        straight=beside(straight, paths.points) if straight.any() else None,
    )


def evened(chords: ChordEnergy, paths: Paths, num_segments: int) -> Tensor:
    """The best paths on `num_segments` segments, at constant speed where that has less energy than their own.

    Where the metric is small a descent evens out the speed in many steps: nodes have little reason to move on.
    """
    nodes = paths.on(num_segments)
    rows = (paths.is_spline & _is_uneven(paths)).nonzero()[:, 0]
    if num_segments < FINE_SEGMENTS or not rows.numel():
        return nodes
    at = beside(rows, nodes)
    fine = paths.on(2 * num_segments)[at]
    even = CubicSpline(fine)(equal_spacing(_piece_shares(chords, fine, 1), num_segments + 1))
    even[:, 0], even[:, -1] = fine[:, 0], fine[:, -1]
    better = chords.energy(even) < chords.energy(nodes[at])
    return nodes.index_copy(0, at, torch.where(better[:, None, None], even, nodes[at]))


def _is_uneven(paths: Paths) -> Tensor:
    """Which paths are run through at a speed that is far from constant."""
    return torch.isfinite(paths.energy) & (paths.energy > (1 + _UNEVEN) * paths.length.square())


def _with_even_speed(chords: ChordEnergy, paths: Paths) -> Paths:
    """Runs through paths at constant speed, in straight pieces, where that has less energy.

    Where the metric vanishes nodes have no reason to move on. At kinks constant speed may cut corners, and cost more.
    """
    slow = _is_uneven(paths)
    if paths.nodes.shape[1] - 1 < FINE_SEGMENTS or not slow.any():
        return paths
    present = paths.points.shape[1] - 1
    points = paths.on(max(min(_EVEN_POINTS, 2 * present), present))
    fine = lerp_nodes(points[beside(slow.nonzero()[:, 0], points)], SUBSTEPS)
    nodes = Polyline(fine)(equal_spacing(_piece_shares(chords, fine, 1), points.shape[1]))
    nodes[:, 0], nodes[:, -1] = fine[:, 0], fine[:, -1]
    found = measure_pieces(chords, nodes, 2 * SUBSTEPS)
    better = found.energy < paths.energy[slow]
    rows = slow.nonzero()[better, 0]
    return replace(
        paths,
        points=points.index_copy(0, beside(rows, points), nodes[beside(better.nonzero()[:, 0], nodes)]),
        energy=paths.energy.index_put((rows,), found.energy[better]),
        length=paths.length.index_put((rows,), found.length[better]),
        is_spline=paths.is_spline.index_fill(0, rows, False),
    )
