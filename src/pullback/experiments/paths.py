"""How near curves stay to the codes, and how a route differs from the pace at which it is run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from scipy import sparse
from torch import Tensor

import pullback as pb

LINE_POINTS = 17
NEIGHBOR = 10
# Of the paper's slider: below, the decoder has not faded.
CERTAIN = 0.5
# Points of the graph's paths where the solver starts.
START_POINTS = 257


def nearest(points: Tensor, codes: Tensor, *, rank: int = 1) -> Tensor:
    """The distance from each point ``(n, d)`` to the nearest code, or to the one of that rank."""
    return torch.cat([torch.cdist(chunk, codes).kthvalue(rank, dim=-1).values for chunk in points.split(512)])


def distance_to_codes(points: Tensor, codes: Tensor) -> Tensor:
    """The mean distance to the nearest code along curves ``(n, m, d)`` of points, per unit of latent length, shape
    ``(n,)``.
    """
    return by_latent_length(points, lambda z: nearest(z, codes))


def share_outside(points: Tensor, support: pb.Support) -> Tensor:
    """The share of the latent length of curves ``(n, m, d)`` that lies off the support, shape ``(n,)``."""
    return by_latent_length(points, lambda z: (~support.contains(z)).double())


def by_latent_length(points: Tensor, value: Callable[[Tensor], Tensor]) -> Tensor:
    """The mean of a function of codes ``(n, d)`` along curves ``(n, m, d)``, each piece by its latent length, shape
    ``(n,)``.
    """
    steps = (points[:, 1:] - points[:, :-1]).norm(dim=-1)
    middles = (points[:, 1:] + points[:, :-1]) / 2
    values = value(middles.flatten(0, 1)).reshape(steps.shape)
    return (values * steps).sum(-1) / steps.sum(-1)


def straight(a: Tensor, b: Tensor, metric: pb.Metric | None = None) -> pb.CubicSpline:
    """Straight lines at constant latent speed or, with a metric, at constant speed in it: the same route at another
    pace.
    """
    line = pb.CubicSpline.straight(a, b, 3)
    return line if metric is None else line.constant_speed(metric, num_points=513)  # pyright: ignore[reportReturnType]


def keeping_to(inside: Callable[[Tensor], Tensor], lattice: pb.Lattice) -> pb.Lattice:
    """The part of a lattice whose nodes ``(n, d)`` lie inside: its paths never leave the data."""
    kept = sparse.diags_array(inside(lattice.nodes).double().numpy())
    weights = sparse.csr_array(kept @ lattice.weights @ kept)
    weights.eliminate_zeros()
    return replace(lattice, weights=weights)


def both_ways(
    metric: pb.Metric, lattice: pb.Lattice, decoder: pb.Reweighted, a: Tensor, b: Tensor, solver: pb.Solver
) -> tuple[pb.results.Geodesic, pb.results.Geodesic]:
    """Geodesics from the lattice's shortest paths, and from its shortest paths where the decoder is certain.

    What the support contains would be too much: the slider reaches the void before the support ends.
    """
    certain = keeping_to(lambda z: decoder.slider(z) < CERTAIN, lattice)
    starts = (lattice, certain.paths(a, b, START_POINTS))
    first, second = (pb.geodesic(metric, a, b, init=s, solver=solver, support=decoder.support) for s in starts)
    return first, second


def pairs_across_gaps(
    codes: Tensor, num_pairs: int, *, num_candidates: int, seed: int, typical: float = 0.9
) -> tuple[Tensor, Tensor]:
    """Random pairs whose straight lines are among the hundredth that stray farthest from the codes: the route matters
    there.

    Ends are typical codes, that share of them whose tenth neighbor is nearest: an outlier is a gap in itself.
    """
    crowding = nearest(codes, codes, rank=NEIGHBOR + 1)
    ends = codes[crowding <= crowding.quantile(typical)]
    generator = torch.Generator().manual_seed(seed)
    i, j = torch.randint(len(ends), (2, num_candidates), generator=generator)
    lines = pb.CubicSpline.straight(ends[i], ends[j], 3).resample(LINE_POINTS)
    strays = nearest(lines.flatten(0, 1), codes).reshape(-1, LINE_POINTS).amax(-1)
    chosen = strays.topk(max(num_pairs, num_candidates // 100)).indices.sort().values[:num_pairs]
    return ends[i[chosen]], ends[j[chosen]]


def random_pairs(codes: Tensor, num_pairs: int, *, seed: int) -> tuple[Tensor, Tensor]:
    """Pairs of different random codes."""
    order = torch.randperm(len(codes), generator=torch.Generator().manual_seed(seed))[: 2 * num_pairs]
    return codes[order[: len(order) // 2]], codes[order[len(order) // 2 : 2 * (len(order) // 2)]]
