"""Measuring many short steps at once, every code decoded once, and cutting curves into equally long ones."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pullback._autodiff.derivatives import Tensors
from pullback._metrics.base import Metric, embedding_maps
from pullback._typing import Bool, Float

MAX_DECODED = 4096  # codes decoded at once: what bounds the memory of a measurement
_PIECE = 64  # segments measured around one origin, so that rounding stays local


@dataclass(frozen=True, eq=False)
class Marks:
    """Codes with the maps of the metric's embedding, if it has one: ready to measure the step between any two."""

    metric: Metric
    z: Tensor
    maps: Tensors

    @classmethod
    def of(cls, metric: Metric, z: Tensor, origin: Tensor | None = None) -> Marks:
        """Decodes ``z``; rounding is best near the code `origin`."""
        return cls(metric, z, embedding_maps(metric, z, origin))

    def __getitem__(self, index: Any) -> Marks:
        return Marks(self.metric, self.z[index], tuple(x[index] for x in self.maps))

    def join(self, other: Marks) -> Marks:
        """These codes and, behind them along the first dimension, others."""
        maps = tuple(map(torch.cat, zip(self.maps, other.maps, strict=True)))
        return Marks(self.metric, torch.cat([self.z, other.z]), maps)

    def ds2(self, other: Marks) -> Tensor:
        """Squared steps to other codes of the same metric and origin."""
        if not self.maps:
            return self.metric.ds2(self.z, other.z)
        steps = [y - x for x, y in zip(self.maps, other.maps, strict=True)]
        return (steps[0] * steps[-1]).sum(-1)


def squared_steps(
    metric: Metric, nodes: Float[Tensor, "*batch n d"], *, strides: tuple[int, ...] = (1,)
) -> list[Tensor]:
    """Squared steps between consecutive nodes, or every second, for each stride (1 or 2, a divisor of n - 1).

    Every node is decoded once (twice where pieces meet), in chunks, so that memory does not grow with the batch.
    """
    num_segments = nodes.shape[-2] - 1
    # pieces of an even number of segments, the last one padded
    count = math.ceil(num_segments / _PIECE)
    size = 2 * math.ceil(num_segments / count / 2)
    padding = nodes[..., -1:, :].expand(*nodes.shape[:-2], count * size - num_segments, nodes.shape[-1])
    pieces = torch.cat([nodes, padding], dim=-2).unfold(-2, size + 1, size).movedim(-1, -2).flatten(0, -3)
    # only a dual pair cares for an origin, which has to be decoded too
    with torch.no_grad():
        is_pair = len(embedding_maps(metric, pieces[0, :1])) > 1
    found: list[list[Tensor]] = [[] for _ in strides]
    for chunk in pieces.split(max(1, MAX_DECODED // (size + 1))):
        marks = Marks.of(metric, chunk, origin=chunk[:, size // 2 : size // 2 + 1] if is_pair else None)
        for steps, stride in zip(found, strides, strict=True):
            steps.append(marks[:, :-stride:stride].ds2(marks[:, stride::stride]))
    joined = (torch.cat(steps).reshape(*nodes.shape[:-2], -1) for steps in found)
    return [steps[..., : num_segments // stride] for steps, stride in zip(joined, strides, strict=True)]


def safe_sqrt(x: Tensor) -> Tensor:
    """√x with √0 = 0 and slope 0 there; rounding below zero counts as zero, and NaN stays NaN."""
    zero = x <= 0
    return torch.where(zero, 0, torch.where(zero, 1, x).sqrt())


def nearly_equal(a: Float[Tensor, "*batch d"], b: Float[Tensor, "*batch d"]) -> Bool[Tensor, "*batch"]:
    """Which codes agree in half their digits: chords would be rounding there, and the path is a straight line."""
    size = torch.maximum(a.abs(), b.abs()).amax(-1)
    return (b - a).abs().amax(-1) <= torch.finfo(a.dtype).eps ** 0.5 * (1 + size)


def equal_spacing(steps: Float[Tensor, "*batch m"], n: int) -> Float[Tensor, "*batch n"]:
    """The n parameters in [0, 1] that cut a curve into equally long parts, given the lengths of its m uniform segments;
    uniform for a curve of no length."""
    resolution = torch.finfo(steps.dtype)
    steps = steps + resolution.eps * steps.mean(-1, keepdim=True) + resolution.tiny
    s = torch.nn.functional.pad(steps.cumsum(-1), (1, 0))
    s = s / s[..., -1:]
    u = torch.linspace(0, 1, n, dtype=s.dtype, device=s.device).expand(*s.shape[:-1], n).contiguous()
    i = (torch.searchsorted(s, u, right=True) - 1).clamp(0, steps.shape[-1] - 1)
    before, after = s.gather(-1, i), s.gather(-1, i + 1)
    return (i + (u - before) / (after - before)) / steps.shape[-1]


def mixed_steps(
    lengths: Float[Tensor, "*batch m"], euclidean: Float[Tensor, "*batch m"], share: float
) -> Float[Tensor, "*batch m"]:
    """Steps as parts of the whole, of which the Euclidean lengths make up `share`: none is then passed in no time."""
    first, second = (x / x.sum(-1, keepdim=True).clamp_min(torch.finfo(x.dtype).tiny) for x in (lengths, euclidean))
    return torch.lerp(first, second, share)
