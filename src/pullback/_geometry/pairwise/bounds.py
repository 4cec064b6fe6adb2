r"""Positions in flat space that bound distances from below, and the codes nearest to each other there.

In a metric with a Euclidean embedding :math:`\varphi` no path is shorter than the straight line through the surrounding
space, :math:`|\varphi(a) - \varphi(b)| \le d(a, b)`. An orthogonal projection only shortens lines, and so does taking
the norm of what it leaves out, so a few coordinates suffice for a bound:

.. math:: |P(\varphi_a - \varphi_b)|^2 + (|Q\varphi_a| - |Q\varphi_b|)^2 \le |\varphi_a - \varphi_b|^2,
   \quad Q = 1 - P .
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pullback._curves.steps import MAX_DECODED
from pullback._decoders.contract import unvalidated
from pullback._geometry.certificate import lower_bounds
from pullback._metrics.base import Metric

# Coordinates kept of an embedding. Of the VAEs of benchmarks/distances.py, with 784 pixels, the others hold 1e-4 of the
# variance for 2 latent dimensions and 4e-3 for 10.
_MAX_COORDINATES = 64
# Codes from which the leading coordinates are found, and pairs on which the bound is checked against the family's own.
_SAMPLE = 1024
# Numbers of a matrix of flat distances held at once.
_AT_ONCE = 2**23
# Relative error of a chord between rounded positions.
_ROUNDING = 1e-9


@dataclass(frozen=True, eq=False)
class Positions:
    """Codes as points of flat space, ``(n, r)``.

    `is_bound` says whether no distance falls below the flat one; otherwise positions only rank codes.
    """

    points: Tensor
    is_bound: bool


def positions(metric: Metric, codes: Tensor) -> Positions:
    """In the metric's Euclidean embedding, or the codes themselves if it has none."""
    sample = codes[torch.linspace(0, len(codes) - 1, min(len(codes), _SAMPLE)).long().to(codes.device)]
    embedded = _embed(metric, sample)
    if embedded is None:
        return Positions(codes.double(), False)
    center = embedded.nanmean(0)
    known = embedded[embedded.isfinite().all(-1)] - center
    basis = torch.linalg.svd(known, full_matrices=False).Vh[:_MAX_COORDINATES]
    parts = [_project(_embed(metric, some), center, basis) for some in codes.split(MAX_DECODED)]
    if any(part is None for part in parts):
        return Positions(codes.double(), False)
    points = torch.cat([part for part in parts if part is not None])
    return Positions(points, _is_bound(metric, codes, points))


def nearest_in_position(queries: Tensor, points: Tensor, num: int, *, own: bool) -> tuple[Tensor, Tensor, Tensor]:
    """For each query the `num` nearest points, ``(m, num)``, their flat distances, and the least distance left out,
    ``(m,)``.

    With `own` the queries are the points themselves, and none is its own neighbor.
    """
    size = max(1, _AT_ONCE // max(1, len(points)))
    found = []
    for start in range(0, len(queries), size):
        some = queries[start : start + size]
        flat = torch.cdist(some, points).nan_to_num(torch.inf)
        if own:
            flat[torch.arange(len(some)), torch.arange(start, start + len(some))] = torch.inf
        best = flat.topk(min(num + 1, flat.shape[1]), largest=False, sorted=True)
        index = best.indices[:, :num]
        exact = torch.linalg.vector_norm(some[:, None] - points[index], dim=-1)
        exact[best.values[:, :num].isinf()] = torch.inf
        beyond = best.values[:, num] if best.values.shape[1] > num else flat.new_full((len(some),), torch.inf)
        found.append((index, exact * (1 - _ROUNDING), beyond * (1 - _ROUNDING)))
    index, lower, beyond = (torch.cat(part) for part in zip(*found, strict=True))
    return index, lower, beyond


def _embed(metric: Metric, codes: Tensor) -> Tensor | None:
    with torch.no_grad(), unvalidated():
        dual = metric.embed(codes)
    return dual[0].double() if dual is not None and dual[0] is dual[1] else None


def _project(embedded: Tensor | None, center: Tensor, basis: Tensor) -> Tensor | None:
    """The leading coordinates, and the norm of the rest."""
    if embedded is None:
        return None
    moved = embedded - center
    leading = moved @ basis.mT
    rest = torch.linalg.vector_norm(moved - leading @ basis, dim=-1, keepdim=True)
    return torch.cat([leading, rest], -1)


def _is_bound(metric: Metric, codes: Tensor, points: Tensor) -> bool:
    """Whether the family agrees: an embedding of a subfamily, such as Normals of one scale, bounds nothing if codes
    leave it."""
    i = torch.arange(min(len(codes), _SAMPLE), device=codes.device)
    j = (i * 7919 + 1) % len(codes)
    with torch.no_grad(), unvalidated():
        family = lower_bounds(metric, codes[i], codes[j]).double()
    flat = torch.linalg.vector_norm(points[i] - points[j], dim=-1)
    known = flat.isfinite() & family.isfinite()
    return bool((flat[known] <= family[known] * (1 + _ROUNDING) + 1e-12).all())
