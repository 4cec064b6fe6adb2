"""Paths between levels of resolution: how they are refined, measured and compared."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import torch
from scipy import interpolate
from torch import Tensor

from pullback._solver.base import Solution, Status
from pullback._solver.discrete import DiscreteEnergy, lerp_nodes, total_energy
from pullback._solver.rows import concatenate, take


@dataclass
class Paths:
    """Curves at one level, with the best path of each so far and its measurement; one entry a curve in every field."""

    index: Tensor
    nodes: Tensor  # (B, T + 1, d)
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

    @classmethod
    def start(cls, nodes: Tensor) -> Paths:
        index = torch.arange(nodes.shape[0], device=nodes.device)
        unknown = torch.full((nodes.shape[0],), torch.nan, dtype=nodes.dtype, device=nodes.device)
        return cls(
            index=index,
            nodes=nodes,
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
        )


@dataclass(frozen=True)
class Measurement:
    """Energy and length of paths, independent of their nodes up to `error`, relative to the energy.

    `regular` says that the energy converges as the path is cut finer, as it does unless a wall stands in its way.
    """

    energy: Tensor
    length: Tensor
    error: Tensor
    regular: Tensor


def measure(discrete: DiscreteEnergy, nodes: Tensor) -> Measurement:
    """Measures the splines through ``nodes`` of T segments on 4T segments, by Romberg extrapolation."""
    chords = discrete.chords(refine(nodes, 4), 4)
    energy, error, regular = romberg(*map(total_energy, chords))
    length = romberg(*(c.clamp_min(0).sqrt().sum(-1) for c in chords))[0]
    return Measurement(energy, length, _relative(error, energy), regular)


def measure_straight(discrete: DiscreteEnergy, nodes: Tensor, substeps: int) -> Measurement:
    """Measures the straight pieces between ``nodes``, each in `substeps` chords; the error is judged by half as many."""
    coarse, fine = discrete.chords(lerp_nodes(nodes, substeps), 2)
    energy = total_energy(fine)
    length = fine.clamp_min(0).sqrt().sum(-1)
    error = _relative((energy - total_energy(coarse)).abs(), energy)
    return Measurement(energy, length, error, regular=error < 1e-2)


def romberg(coarse: Tensor, middle: Tensor, fine: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Two Richardson steps for values of order two at T, 2T, 4T, an estimate of the error, and whether they are regular.

    Where the differences do not fall by about four the values are not in the asymptotic range: the finest one is returned as
    it is, and the last difference as its error.
    """
    first, second = middle + (middle - coarse) / 3, fine + (fine - middle) / 3
    regular = (fine - middle).abs() <= 0.35 * (middle - coarse).abs() + 1e-12 * fine.abs()
    value = torch.where(regular, second + (second - first) / 15, fine)
    return value, torch.where(regular, (second - first).abs() / 15, (fine - middle).abs()), regular


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


def resample(paths: Paths, num_segments: int) -> Tensor:
    """The best paths on `num_segments` segments, a multiple or a divisor of their own number."""
    present = paths.best.shape[1] - 1
    if num_segments <= present:
        return paths.best[:, :: present // num_segments]
    factor = num_segments // present
    if paths.smooth.all():
        return refine(paths.best, factor)
    return torch.where(paths.smooth[:, None, None], refine(paths.best, factor), lerp_nodes(paths.best, factor))


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
        paths.nodes = paths.nodes[:, :1]  # of as many resolutions as there are levels; the best paths are what counts
    order = torch.cat([paths.index for paths in done]).argsort()
    paths = take(join(done), order)
    return Solution(
        nodes=paths.best,
        energy=paths.energy,
        length=paths.length,
        error=paths.error,
        status=paths.status,
        strict=paths.strict,
        num_steps=paths.num_steps,
        num_segments=torch.cat(levels)[order],
        num_calls=discrete.work.num_calls,
        num_decoded=discrete.work.num_decoded,
    )


def _relative(error: Tensor, energy: Tensor) -> Tensor:
    return error / energy.clamp_min(torch.finfo(energy.dtype).tiny)
