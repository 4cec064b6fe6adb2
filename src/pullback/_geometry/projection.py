r"""Where on a path a code lies, and how far from it: pseudotime.

The nearest point of a path c to a code z is where :math:`d^2(z, c(t))` is least. Along a geodesic that function is
nearly a parabola in t (exactly one in flat space, and for codes on the path), so a few distances find its vertex:
candidates come from the chords between what the code and points of the path decode to, one decoding each; the best of
them is improved by parabolas through shortest paths.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pullback._curves.curve import Curve, Polyline, curve_for
from pullback._curves.steps import Marks
from pullback._decoders.contract import as_codes, unvalidated
from pullback._geometry.geodesic import Geodesic, geodesic
from pullback._metrics.base import Metric
from pullback._progress import progress
from pullback._solvers.base import Solver
from pullback._typing import Bool, CodeSet, Float, Points

# Points of the path among which candidates are sought, and how many of them are looked at by shortest paths.
_NUM_TIMES, _NUM_CANDIDATES = 65, 3
# Each parabola is this much narrower than the one before it.
_NARROWING = 8.0
_NUM_PARABOLAS = 2


@dataclass(frozen=True, eq=False)
class Projection:
    """Where codes lie on a path.

    Attributes:
        time: the parameter of the nearest point on the path, between 0 and 1, one per code.
        distance: the distance from it.
        point: the nearest point itself.
        converged: whether the shortest path to it was found.

    >>> import torch, pullback as pb
    >>> metric = pb.FisherRaoMetric(lambda z: torch.distributions.Normal(z, 0.5))
    >>> found = pb.project(metric, [[0.0, 0.0], [4.0, 0.0]], [[1.0, 1.0]])
    >>> found.time, found.distance
    (tensor([0.2500]), tensor([2.]))
    """

    time: Float[Tensor, " n"]
    distance: Float[Tensor, " n"]
    point: Float[Tensor, "n d"]
    converged: Bool[Tensor, " n"]

    def __repr__(self) -> str:
        return f"Projection of {len(self.time)} codes (median distance {self.distance.median():.4g} from the path)"


@progress("projections")
def project(
    metric: Metric, path: Geodesic | Curve | Points, codes: CodeSet, *, solver: Solver | None = None
) -> Projection:
    """The nearest point on a path to each code: its time, which serves as pseudotime, and the distance from it.

    About nine shortest paths are solved per code.

    Args:
        metric: the geometry.
        path: one geodesic, one curve, or points of a polyline.
        codes: codes of shape ``(m, d)``.
        solver: as in `pullback.geodesic`.

    >>> import torch, pullback as pb
    >>> metric = pb.FisherRaoMetric(lambda z: torch.distributions.Normal(z, 1.0))
    >>> line = torch.tensor([[0.0, 0.0], [4.0, 0.0]])
    >>> found = pb.project(metric, line, torch.tensor([[1.0, 2.0]]))
    >>> [round(x.item(), 4) for x in (found.time, found.distance)]
    [0.25, 2.0]
    """
    curve = curve_for(metric, path)
    number = curve.begin.shape[:-1].numel()
    if number != 1:
        raise ValueError(f"project takes one path, and this is a batch of {number}. Choose one: path.curve[i].")
    if curve.begin.ndim > 1:
        curve = Polyline(curve.resample(1025).reshape(1025, -1))
    codes = as_codes(codes, curve.begin, a_set=True, dim=curve.begin.shape[-1])
    t = _best_candidate(metric, curve, codes, solver)
    width = 1 / (_NUM_TIMES - 1)
    for _ in range(_NUM_PARABOLAS):
        t, width = _vertex(metric, curve, codes, t, width, solver), width / _NARROWING
    point = _at(curve, t)
    found = geodesic(metric, codes, point, solver=solver)
    return Projection(t, found.length, point, found.converged)


def _at(curve: Curve, t: Tensor) -> Tensor:
    return curve(t.flatten()).reshape(*t.shape, -1)


def _best_candidate(metric: Metric, curve: Curve, codes: Tensor, solver: Solver | None) -> Tensor:
    """For each code the time, among a few where the chord is least, from which the shortest path is shortest."""
    t = torch.linspace(0, 1, _NUM_TIMES, dtype=codes.dtype, device=codes.device)
    points = curve(t)
    with torch.no_grad(), unvalidated():
        on_path, given = Marks.of(metric, points), Marks.of(metric, codes)
        columns = torch.arange(len(t), device=codes.device)[:, None].expand(-1, len(codes))
        chords = torch.stack([given.ds2(on_path[column]) for column in columns], -1)
    padded = torch.nn.functional.pad(chords, (1, 1), value=torch.inf)
    valley = (chords <= padded[:, :-2]) & (chords <= padded[:, 2:])
    index = torch.where(valley, chords, torch.inf).topk(_NUM_CANDIDATES, largest=False).indices
    lengths = geodesic(metric, codes[:, None], points[index], solver=solver).length
    return t[index.gather(1, lengths.nan_to_num(torch.inf).argmin(1, keepdim=True))[:, 0]]


def _vertex(metric: Metric, curve: Curve, codes: Tensor, t: Tensor, width: float, solver: Solver | None) -> Tensor:
    """The time of least squared distance on the parabola through three times; at most a width beyond them."""
    middle = t.clamp(width, 1 - width)
    times = middle[:, None] + width * torch.tensor([-1.0, 0.0, 1.0], dtype=t.dtype, device=t.device)
    square = geodesic(metric, codes[:, None], _at(curve, times), solver=solver).length ** 2
    slope, bend = (square[:, 2] - square[:, 0]) / 2, square[:, 2] - 2 * square[:, 1] + square[:, 0]
    shift = torch.where(bend > 0, -slope / bend, -2 * slope.sign()).clamp(-2, 2)
    found = (middle + width * shift).clamp(0, 1)
    return torch.where(torch.isfinite(found), found, t)
