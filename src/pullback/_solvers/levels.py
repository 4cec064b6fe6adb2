"""Paths between levels of resolution: how they are refined, measured and compared."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pullback._curves.curve import Polyline
from pullback._curves.speed import equal_spacing
from pullback._numerics.rows import concatenate, take
from pullback._numerics.spline import refine
from pullback._solvers.base import Solution, Status
from pullback._solvers.discrete import DiscreteEnergy, equal_times, lerp_nodes, total_energy
from pullback._solvers.grading import even, grade, shares

_FLATTEST, _STEEPEST = 3.0, 5.0  # ratios of errors at T and 2T segments that count as four
_EVEN_FACTOR = 8  # nodes at equal times for each node of a graded path
_UNSTEADY = 1e-2  # what the energy of a path may have over the square of its length
_FINE = 64  # segments below which a path is left as it is: so few are asked for by those who want it rough
_EVEN_NODES = 1024  # in which it is else run through at constant speed
_EUCLIDEAN_SHARE = 3e-3  # of the time of a path goes by its Euclidean length


@dataclass
class Paths:
    """Curves at one level, with the best path of each so far and its measurement; one entry a curve in every field."""

    index: Tensor
    nodes: Tensor  # (B, T + 1, d)
    times: Tensor  # (B, T): shares of the segments in the time
    best: Tensor  # (B, N + 1, d)
    smooth: Tensor  # whether `best` stands for the spline through it, or for the straight pieces between
    damping: Tensor
    energy: Tensor
    length: Tensor
    error: Tensor  # of the length; NaN before the first level
    status: Tensor
    strict: Tensor
    num_steps: Tensor  # on this level
    returned: Tensor  # whether the curve has been through the walled regime
    graded: Tensor  # whether the nodes are placed at will, not at equal times
    settled: Tensor  # whether the last level was solved to its tolerance
    pull: Tensor  # Euclidean energy mixed in on the next level, as a share of the energy
    bend: Tensor  # (B, m, d, d): curvature of the energy along the path, at `m` times; none where elements are not used

    @classmethod
    def start(cls, nodes: Tensor, num_bends: int = 0) -> Paths:
        index = torch.arange(nodes.shape[0], device=nodes.device)
        unknown = torch.full((nodes.shape[0],), torch.nan, dtype=nodes.dtype, device=nodes.device)
        return cls(
            index=index,
            nodes=nodes,
            times=equal_times(nodes),
            best=nodes,
            smooth=torch.zeros_like(index, dtype=torch.bool),
            damping=torch.full_like(unknown, 0.1),
            energy=unknown,
            length=unknown.clone(),
            error=unknown.clone(),
            status=torch.full_like(index, Status.UNRESOLVED),
            strict=torch.zeros_like(index, dtype=torch.bool),
            num_steps=torch.zeros_like(index),
            returned=torch.zeros_like(index, dtype=torch.bool),
            graded=torch.zeros_like(index, dtype=torch.bool),
            settled=torch.zeros_like(index, dtype=torch.bool),
            pull=torch.zeros_like(unknown),
            bend=nodes.new_zeros(len(nodes), num_bends, nodes.shape[-1], nodes.shape[-1]),
        )


@dataclass(frozen=True)
class Measurement:
    """Energy and length of paths, independent of their nodes up to `error`, relative to the energy.

    `chord_length` is the length that the chords between the nodes see; at a minimum of their energy it is its root.
    `asymptotic` says that errors fall by about four as segments are halved, so that theory may be believed.
    """

    energy: Tensor
    length: Tensor
    error: Tensor
    chord_length: Tensor
    asymptotic: Tensor


def measure(discrete: DiscreteEnergy, nodes: Tensor, graded: Tensor | None = None) -> Measurement:
    """Measures the splines through ``nodes`` of T segments on 4T segments, by Romberg extrapolation.

    The energy of `graded` ones is the square of their length, which does not ask when a point is reached.
    """
    chords = discrete.chords(refine(nodes, 4), 4)
    energies = [total_energy(c) for c in chords]
    energy, error = romberg(*energies)
    lengths = [c.clamp_min(0).sqrt().sum(-1) for c in chords]
    length = romberg(*lengths)[0]
    if graded is not None and graded.any():
        square, square_error = romberg(*(x.square() for x in lengths))
        energy, error = torch.where(graded, square, energy), torch.where(graded, square_error, error)
    return Measurement(energy, length, _relative(error, energy), lengths[0], _asymptotic(*energies))


def measure_straight(discrete: DiscreteEnergy, nodes: Tensor, substeps: int) -> Measurement:
    """Measures the straight pieces between ``nodes``, each in `substeps` chords; the error is judged by half as many."""
    coarse, fine = discrete.chords(lerp_nodes(nodes, substeps), 2)
    energy = total_energy(fine)
    length = fine.clamp_min(0).sqrt().sum(-1)
    error = _relative((energy - total_energy(coarse)).abs(), energy)
    return Measurement(energy, length, error, length, error.isnan())


def _asymptotic(coarse: Tensor, middle: Tensor, fine: Tensor) -> Tensor:
    first, second = (middle - coarse).abs(), (fine - middle).abs()
    noise = 64 * torch.finfo(fine.dtype).eps * fine.abs()
    return (second <= noise) | ((first <= _STEEPEST * second) & (first >= _FLATTEST * second))


def romberg(coarse: Tensor, middle: Tensor, fine: Tensor) -> tuple[Tensor, Tensor]:
    """Two Richardson steps for values of order two at T, 2T, 4T, and an estimate of the error.

    Where the differences do not fall by about four the values are not in the asymptotic range: the finest one is returned as
    it is, and the last difference as its error.
    """
    first, second = middle + (middle - coarse) / 3, fine + (fine - middle) / 3
    regular = (fine - middle).abs() <= 0.35 * (middle - coarse).abs() + 1e-12 * fine.abs()
    value = torch.where(regular, second + (second - first) / 15, fine)
    return value, torch.where(regular, (second - first).abs() / 15, (fine - middle).abs())


def resample(paths: Paths, num_segments: int) -> Tensor:
    """The best paths on `num_segments` segments, a multiple or a divisor of their own number."""
    present = paths.best.shape[1] - 1
    if num_segments <= present:
        return paths.best[:, :: present // num_segments]
    factor = num_segments // present
    if paths.smooth.all():
        return refine(paths.best, factor)
    return torch.where(paths.smooth[:, None, None], refine(paths.best, factor), lerp_nodes(paths.best, factor))


def prepare(discrete: DiscreteEnergy, paths: Paths, num_segments: int) -> Paths:
    """The paths with nodes for a level of so many segments."""
    nodes = resample(paths, num_segments)
    times = equal_times(nodes)
    if paths.graded.any():
        nodes = nodes.clone()
        nodes[paths.graded], times[paths.graded] = grade(discrete, paths.best[paths.graded], num_segments)
    return replace(paths, nodes=nodes, times=times)


def spread(discrete: DiscreteEnergy, nodes: Tensor, num_segments: int) -> Tensor:
    """The same path in more straight pieces, more of them where it is longer; all corners stay where they are.

    Corners lie at kinks of the decoder, and nodes do not pass those downhill: only this evens out the speed.
    """
    if not len(nodes):
        return nodes.new_empty(0, num_segments + 1, nodes.shape[2])
    parts, spare = _shares(discrete, nodes), num_segments - (nodes.shape[1] - 1)
    wanted = (num_segments * parts - 1).clamp_min(0)
    ends = (spare * wanted.cumsum(-1) / wanted.sum(-1, keepdim=True).clamp_min(1e-9)).round().long()
    ends = ends + torch.arange(1, ends.shape[1] + 1, device=ends.device)  # every piece is kept, and some are cut
    ends[:, -1] = num_segments
    begins = torch.nn.functional.pad(ends[:, :-1], (1, 0))
    new = torch.arange(num_segments, device=ends.device).expand(len(ends), -1).contiguous()
    piece = torch.searchsorted(ends, new, right=True)
    begin, count = begins.gather(1, piece), (ends - begins).gather(1, piece)
    inner = torch.lerp(_rows(nodes, piece), _rows(nodes, piece + 1), ((new - begin) / count)[..., None].to(nodes))
    return torch.cat([inner, nodes[:, -1:]], 1)


def _shares(discrete: DiscreteEnergy, nodes: Tensor, substeps: int = _EVEN_FACTOR) -> Tensor:
    """Of the pieces in the length of a path, with a little of their Euclidean length, so that none is passed in no time."""
    lengths = discrete.chords(lerp_nodes(nodes, substeps))[0].clamp_min(0).sqrt().unflatten(1, (-1, substeps)).sum(-1)
    euclidean = nodes.diff(dim=1).norm(dim=-1)
    return torch.lerp(shares(lengths), shares(euclidean), _EUCLIDEAN_SHARE)


def _rows(nodes: Tensor, index: Tensor) -> Tensor:
    return nodes.take_along_dim(index[..., None], 1)


def join(groups: list[Paths]) -> Paths:
    """Curves that meet on a level, their best paths brought to the finest of their resolutions."""
    finest = max(group.best.shape[1] - 1 for group in groups)
    for group in groups:
        group.best = resample(group, finest)
    return concatenate(groups)


def assemble(done: list[Paths], discrete: DiscreteEnergy) -> Solution:
    """All curves in their order, on the nodes of the finest among them."""
    levels = [torch.full_like(paths.index, paths.nodes.shape[1] - 1) for paths in done]
    for paths in done:
        _even_out(discrete, paths)
        _steady(discrete, paths)
        paths.nodes, paths.times = (
            paths.nodes[:, :1],
            paths.times[:, :0],
        )  # of as many resolutions as there are levels; the best paths are what counts
    order = torch.cat([paths.index for paths in done]).argsort()
    paths = take(join(done), order)
    straight = ~paths.smooth & torch.isfinite(paths.energy)
    return Solution(
        nodes=paths.best,
        energy=paths.energy,
        length=paths.length,
        error=torch.where(paths.status == Status.NOT_FINITE, torch.nan, paths.error),
        status=paths.status,
        strict=paths.strict,
        num_steps=paths.num_steps,
        num_segments=torch.cat(levels)[order],
        num_calls=discrete.work.num_calls,
        num_decoded=discrete.work.num_decoded,
        straight=straight if straight.any() else None,
    )


def _even_out(discrete: DiscreteEnergy, paths: Paths) -> None:
    """Brings graded paths to equal times; it takes more nodes to show them so."""
    if paths.graded.any():
        best = resample(paths, _EVEN_FACTOR * (paths.best.shape[1] - 1))
        best[paths.graded] = even(discrete, paths.best[paths.graded], best.shape[1] - 1)
        paths.best, paths.graded = best, paths.graded & False


def _steady(discrete: DiscreteEnergy, paths: Paths) -> None:
    """Runs through paths at constant speed, in straight pieces, where that has less energy.

    Where the metric vanishes nodes have no reason to move on. At kinks constant speed may cut corners, and cost more.
    """
    slow = torch.isfinite(paths.energy) & (paths.energy > (1 + _UNSTEADY) * paths.length.square())
    if paths.nodes.shape[1] - 1 < _FINE or not slow.any():
        return
    paths.best = resample(paths, max(_EVEN_NODES, paths.best.shape[1] - 1))
    fine = lerp_nodes(paths.best[slow], _EVEN_FACTOR)
    nodes = Polyline(fine)(equal_spacing(_shares(discrete, fine, 1), paths.best.shape[1]))
    nodes[:, 0], nodes[:, -1] = fine[:, 0], fine[:, -1]
    found = measure_straight(discrete, nodes, 2 * _EVEN_FACTOR)
    better = found.energy < paths.energy[slow]
    rows = slow.nonzero()[better, 0]
    paths.best = paths.best.index_put((rows,), nodes[better])
    paths.energy = paths.energy.index_put((rows,), found.energy[better])
    paths.length = paths.length.index_put((rows,), found.length[better])
    paths.smooth = paths.smooth.index_fill(0, rows, False)


def _relative(error: Tensor, energy: Tensor) -> Tensor:
    return error / energy.clamp_min(torch.finfo(energy.dtype).tiny)
