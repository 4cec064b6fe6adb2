r"""Nodes where a path needs them.

The minimum of the energy runs through the codes at constant Fisher-Rao speed. Where the metric is nearly singular that is an
uneven pace: a direction which the decoder hardly uses is crossed in no time, and nodes at equal times leave most of the way to
one or two long steps. Any other placement of nodes will do as well if each segment is given its share :math:`\Delta t_i` of
the length as time, since

.. math::
   \min_{\Delta t} \sum_i \frac{\mathrm{ds}_i^2}{\Delta t_i} = \Big( \sum_i \mathrm{ds}_i \Big)^2
   \quad\text{at}\quad \Delta t_i = \frac{\mathrm{ds}_i}{\sum_j \mathrm{ds}_j},

so a *graded* path spaces its nodes evenly in the mean of both lengths, Fisher-Rao and Euclidean. Everything is done along the
index of the nodes, in which a graded path is smooth.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pullback._numerics.spline import refine
from pullback._solvers.discrete import DiscreteEnergy

_EUCLIDEAN = 0.5  # share of the Euclidean length in the pace of a graded path
_UNEVEN = 5.0  # longest step over the mean step, from which on a path is graded
_FACTOR = 4  # points a segment at which lengths are measured


def uneven(nodes: Tensor) -> Tensor:
    """Which paths have steps so unequal that their nodes should be graded."""
    steps = nodes.diff(dim=1).norm(dim=-1)
    return steps.amax(-1) > _UNEVEN * steps.mean(-1)


def grade(discrete: DiscreteEnergy, nodes: Tensor, num_segments: int) -> tuple[Tensor, Tensor]:
    """Graded nodes of the splines through ``nodes``, and the times of their segments."""
    return _placed(discrete, nodes, num_segments, _EUCLIDEAN)


def even(discrete: DiscreteEnergy, nodes: Tensor, num_segments: int) -> Tensor:
    """Nodes at equal Fisher-Rao distances on the splines through ``nodes``."""
    return _placed(discrete, nodes, num_segments, 0.0)[0]


def _placed(discrete: DiscreteEnergy, nodes: Tensor, num_segments: int, share: float) -> tuple[Tensor, Tensor]:
    fine = refine(nodes, _FACTOR)
    rao = shares(_known(discrete.chords(fine)[0].clamp_min(0).sqrt()))
    pace = _smooth((1 - share) * rao + share * shares(fine.diff(dim=1).norm(dim=-1)))
    place = _inverse(_cumulated(pace), num_segments)
    placed = _interpolated(fine, place)
    placed[:, 0], placed[:, -1] = nodes[:, 0], nodes[:, -1]
    times = _interpolated(_cumulated(_smooth(rao))[..., None], place)[..., 0].diff(dim=1)
    return placed, shares(times.clamp_min(1e-3 / num_segments))


def _known(lengths: Tensor) -> Tensor:
    """The lengths; equal ones for paths with any that is not finite, or none above zero."""
    known = torch.isfinite(lengths).all(-1, keepdim=True) & (lengths > 0).any(-1, keepdim=True)
    return torch.where(known, lengths, 1.0)


def shares(values: Tensor) -> Tensor:
    """The values over their sum."""
    return values / values.sum(-1, keepdim=True).clamp_min(torch.finfo(values.dtype).tiny)


def _smooth(values: Tensor) -> Tensor:
    """Averages over neighbours: a pace that jumps would leave kinks in the placement."""
    for _ in range(_FACTOR):
        padded = torch.cat([values[:, :1], values, values[:, -1:]], 1)
        values = 0.25 * padded[:, :-2] + 0.5 * padded[:, 1:-1] + 0.25 * padded[:, 2:]
    return values


def _cumulated(pace: Tensor) -> Tensor:
    """The share of the way done at each point, from 0 to 1."""
    return torch.nn.functional.pad(pace.cumsum(-1), (1, 0)) / pace.sum(-1, keepdim=True)


def _inverse(way: Tensor, num_segments: int) -> Tensor:
    """Indices, as real numbers, at which equal shares of the way are done."""
    share = torch.linspace(0, 1, num_segments + 1, dtype=way.dtype, device=way.device).expand(len(way), -1).contiguous()
    right = torch.searchsorted(way, share).clamp(1, way.shape[1] - 1)
    low, high = way.gather(1, right - 1), way.gather(1, right)
    place = right - 1 + ((share - low) / (high - low).clamp_min(torch.finfo(way.dtype).tiny)).clamp(0, 1)
    slope = _slopes(way[..., None])
    for _ in range(3):  # Newton's steps on the smooth interpolant
        value = _interpolated(way[..., None], place)[..., 0]
        rise = _interpolated(slope, place)[..., 0]
        step = ((share - value) / rise).nan_to_num(0.0).clamp(-0.5, 0.5)
        place = (place + step).clamp(0, way.shape[1] - 1)
    return place


def _slopes(values: Tensor) -> Tensor:
    """Derivatives by the index, by central differences."""
    steps = values.diff(dim=1)
    inner = 0.5 * (steps[:, :-1] + steps[:, 1:])
    return torch.cat([2 * steps[:, :1] - inner[:, :1], inner, 2 * steps[:, -1:] - inner[:, -1:]], 1)


def _interpolated(values: Tensor, place: Tensor) -> Tensor:
    """Cubic interpolation of ``values`` (B, n, k) at real indices ``place`` (B, m)."""
    left = place.floor().clamp(0, values.shape[1] - 2).long()
    x = (place - left)[..., None]
    index = left[..., None].expand(-1, -1, values.shape[2])
    slopes = _slopes(values)
    p, q = values.gather(1, index), values.gather(1, index + 1)
    u, v = slopes.gather(1, index), slopes.gather(1, index + 1)
    cubic = 3 * (q - p) - 2 * u - v + x * (2 * (p - q) + u + v)
    return p + x * (u + x * cubic)
