"""How near curves stay to the codes."""

from __future__ import annotations

import torch
from torch import Tensor

import pullback as pb

_LINE_POINTS = 17
_NEIGHBOUR = 10


def nearest(points: Tensor, codes: Tensor, *, rank: int = 1) -> Tensor:
    """The distance from each point ``(n, d)`` to the nearest code, or to the one of that rank."""
    return torch.cat([torch.cdist(chunk, codes).kthvalue(rank, dim=-1).values for chunk in points.split(512)])


def distance_to_codes(points: Tensor, codes: Tensor) -> Tensor:
    """The mean distance to the nearest code along curves ``(n, m, d)`` of points, per unit of latent length, shape ``(n,)``."""
    steps = (points[:, 1:] - points[:, :-1]).norm(dim=-1)
    middles = (points[:, 1:] + points[:, :-1]) / 2
    distances = nearest(middles.flatten(0, 1), codes).reshape(steps.shape)
    return (distances * steps).sum(-1) / steps.sum(-1)


def pairs_across_gaps(
    codes: Tensor, num_pairs: int, *, num_candidates: int, seed: int, typical: float = 0.9
) -> tuple[Tensor, Tensor]:
    """Random pairs whose straight lines are among the hundredth that stray farthest from the codes: where it matters which way a path goes.

    Ends are typical codes, that share of them whose tenth neighbour is nearest: an outlier is a gap in itself.
    """
    crowding = nearest(codes, codes, rank=_NEIGHBOUR + 1)
    ends = codes[crowding <= crowding.quantile(typical)]
    generator = torch.Generator().manual_seed(seed)
    i, j = torch.randint(len(ends), (2, num_candidates), generator=generator)
    lines = pb.CubicSpline.straight(ends[i], ends[j], 3).resample(_LINE_POINTS)
    strays = nearest(lines.flatten(0, 1), codes).reshape(-1, _LINE_POINTS).amax(-1)
    chosen = strays.topk(max(num_pairs, num_candidates // 100)).indices.sort().values[:num_pairs]
    return ends[i[chosen]], ends[j[chosen]]
