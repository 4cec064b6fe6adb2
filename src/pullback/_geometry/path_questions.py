r"""Questions about a given path: which features it changes, and where on it a code lies.

Features of a decoder are independent given the code, so their Fisher informations add up, and so do squared lengths:

.. math:: E(c) = \sum_f \int_0^1 \dot c^\top M_f(c)\, \dot c\; dt .

Wrappers of a decoder are observations too: wall, prior and reading each have a row of their own.

The nearest point of a path c to a code z is where :math:`d^2(z, c(t))` is least. Along a geodesic that function is
nearly a parabola in t (exactly one in flat space, and for codes on the path), so a few distances find its vertex:
candidates come from the chords between what the code and points of the path decode to, one decoding each; the best of
them is improved by parabolas through shortest paths.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from html import escape

import torch
from torch import Tensor
from torch.distributions import Distribution, Independent

from pullback._curves.curve import Curve, Polyline, curve_for
from pullback._curves.steps import MAX_DECODED, Marks
from pullback._decoders.contract import as_codes, observe, unvalidated
from pullback._decoders.extrapolated import Extrapolated
from pullback._decoders.reading import WithPrior, WithReading
from pullback._families.composite import Product
from pullback._families.divergences import symmetrized_kl
from pullback._families.information import MissingRuleError
from pullback._families.rules import squared_chord
from pullback._geometry.geodesic import Geodesic, geodesic
from pullback._metrics.base import Metric
from pullback._metrics.fisher_rao import FisherRaoMetric
from pullback._progress import progress
from pullback._solvers.base import Solver
from pullback._typing import Bool, CodeSet, Float, Points

_WRAPPERS = {Extrapolated: "wall", WithPrior: "prior", WithReading: "reading"}
# Points of the path among which nearest ones are sought, and how many of them are looked at by shortest paths.
_NUM_TIMES, _NUM_CANDIDATES = 65, 3
# Parabolas, each so much narrower than the one before it.
_NUM_PARABOLAS, _NARROWING = 2, 8.0


@dataclass(frozen=True, eq=False)
class Contributions:
    """What each feature adds to the energy of paths. `pullback.plot.contributions` draws the largest.

    Attributes:
        labels: names of the features, in the order of `energy`.
        energy: what each adds, of shape ``(*batch, F)``; the sum over features is the energy of the path.

    >>> import torch, pullback as pb
    >>> metric = pb.FisherRaoMetric(lambda z: torch.distributions.Normal(z * torch.tensor([1.0, 2.0]), 1.0))
    >>> line = torch.tensor([[0.0, 0.0], [1.0, 1.0]])
    >>> print(pb.contributions(metric, line, labels=["height", "weight"]))
    weight  4  80.0 %
    height  1  20.0 %
    """

    labels: tuple[str, ...]
    energy: Float[Tensor, "*batch F"]

    @property
    def total(self) -> Float[Tensor, "*batch"]:
        """The energy of each path."""
        return self.energy.sum(-1)

    @property
    def share(self) -> Float[Tensor, "*batch F"]:
        """The part of the energy that each feature adds; they sum to 1."""
        return self.energy / self.energy.sum(-1, keepdim=True)

    def table(self, num: int | None = None) -> list[tuple[str, float, float]]:
        """The `num` largest rows (label, energy, share), by default all; averaged over the paths of a batch."""
        energy = self.energy.reshape(-1, len(self.labels)).mean(0)
        rows = list(zip(self.labels, energy.tolist(), (energy / energy.sum()).tolist(), strict=True))
        return [rows[i] for i in energy.argsort(descending=True)[:num].tolist()]

    def __str__(self) -> str:
        rows = self.table(20)
        width = max(len(label) for label, _, _ in rows)
        lines = [f"{label:<{width}}  {value:.4g}  {100 * share:.1f} %" for label, value, share in rows]
        rest = len(self.labels) - len(rows)
        return "\n".join([*lines, *([f"and {rest} more"] if rest else [])])

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td>{escape(label)}</td><td>{value:.4g}</td><td>{100 * share:.1f} %</td></tr>"
            for label, value, share in self.table(20)
        )
        return f"<table><tr><th>feature</th><th>energy</th><th>share</th></tr>{rows}</table>"


@progress("contributions")
def contributions(
    metric: Metric, path: Geodesic | Curve | Points, labels: Sequence[str] | None = None, *, num_segments: int = 256
) -> Contributions:
    """How much each feature adds to the energy along a path.

    Args:
        metric: a `pullback.FisherRaoMetric`, or any metric with an embedding, whose coordinates are then the features.
        path: a geodesic, a curve, or points of a polyline. The contributions to a `pullback.results.Geodesic` sum to
            its `energy`, those to a curve to ``pullback.energy(metric, curve, num_segments=..., extrapolate=True)``.
        labels: names of the decoder's features in the order of its output; numbers by default. Walls, priors and
            readings of wrappers have rows named after them.
        num_segments: steps of the sum, an even number; by default shares are good to six digits on smooth paths.

    >>> import torch, pullback as pb
    >>> metric = pb.FisherRaoMetric(lambda z: torch.distributions.Normal(z * torch.tensor([1.0, 2.0]), 1.0))
    >>> pb.contributions(metric, [[0.0, 0.0], [1.0, 1.0]]).energy
    tensor([1., 4.])
    """
    curve = curve_for(metric, path)
    if num_segments < 2 or num_segments % 2:
        raise ValueError(f"num_segments must be an even number of at least 2; got {num_segments}.")
    with torch.no_grad(), unvalidated():
        nodes = curve.resample(num_segments + 1)
        flat = nodes.reshape(-1, *nodes.shape[-2:])
        found = [_measured(metric, part) for part in flat.split(max(1, MAX_DECODED // flat.shape[1]))]
        names, energy = found[0][0], torch.cat([values for _, values in found])
    energy = energy.reshape(*nodes.shape[:-2], energy.shape[-1])
    if isinstance(path, Geodesic):
        energy = energy * (path.energy / energy.sum(-1))[..., None]
    count = sum(name is None for name in names)
    given = [str(label) for label in (range(count) if labels is None else labels)]
    if len(given) != count:
        both = f"{count} features and {len(given)} labels"
        raise ValueError(f"The decoder has {both} were given. Give one label per feature.")
    features = iter(given)
    return Contributions(tuple(next(features) if name is None else name for name in names), energy)


def _measured(metric: Metric, nodes: Tensor) -> tuple[list[str | None], Tensor]:
    """Names of wrappers (None for features) and energies ``(B, F)``, extrapolated from T and T/2 steps."""
    names, energies = [], []
    for polyline in (nodes, nodes[:, ::2]):
        a, b = (x.reshape(-1, nodes.shape[-1]) for x in (polyline[:, :-1], polyline[:, 1:]))
        found = [(name, part(a, b)) for name, part in _parts(metric)]
        found = [(name, steps if name is None else steps.sum(-1, keepdim=True)) for name, steps in found]
        names = [name for name, steps in found for _ in range(steps.shape[-1])]
        steps = torch.cat([steps for _, steps in found], -1).reshape(len(nodes), -1, len(names))
        energies.append(steps.shape[1] * steps.sum(1))
    return names, (4 * energies[0] - energies[1]) / 3


def _parts(metric: Metric) -> list[tuple[str | None, Callable[[Tensor, Tensor], Tensor]]]:
    """The independent observations of a metric: the name of a wrapper or None, and their squared steps ``(n, F)``."""
    if not isinstance(metric, FisherRaoMetric):
        return [(None, partial(_embedded_steps, metric))]
    parts, decoder = [], metric.decoder
    while isinstance(decoder, Extrapolated | WithPrior | WithReading):
        parts.append((_WRAPPERS[type(decoder)], decoder.channel))
        decoder = decoder.decoder
    parts.append((None, partial(observe, decoder)))
    return [(name, lambda a, b, f=f: _family_steps(f(a), f(b))) for name, f in reversed(parts)]


def _family_steps(p: Distribution, q: Distribution) -> Tensor:
    """Squared steps per feature, ``(n, F)``, between distributions of batch shape ``(n, *features)``."""
    if isinstance(p, Product) and isinstance(q, Product):
        return torch.cat([_family_steps(*pair) for pair in zip(p.components, q.components, strict=True)], -1)
    if isinstance(p, Independent) and isinstance(q, Independent):
        return _family_steps(p.base_dist, q.base_dist)
    if (chord := squared_chord(p, q, len(p.batch_shape))) is not None:
        return chord.reshape(p.batch_shape[0], -1)
    try:
        return 2 * symmetrized_kl(p, q).reshape(p.batch_shape[0], -1)
    except MissingRuleError as error:
        raise MissingRuleError(
            f"{error} Without it the energy of a {type(p).__name__} cannot be told apart by feature."
        ) from error


def _embedded_steps(metric: Metric, a: Tensor, b: Tensor) -> Tensor:
    first, second = metric.embed(a, origin=a), metric.embed(b, origin=a)
    if first is None or second is None:
        raise TypeError(
            f"{type(metric).__name__} has no embedding, so its energy does not fall into features. Use "
            "pullback.FisherRaoMetric(decoder)."
        )
    return (second[0] - first[0]) * (second[1] - first[1])


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
    point = curve(t)
    found = geodesic(metric, codes, point, solver=solver)
    return Projection(t, found.length, point, found.converged)


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
    points = curve(times.flatten()).unflatten(0, times.shape)
    square = geodesic(metric, codes[:, None], points, solver=solver).length ** 2
    slope, bend = (square[:, 2] - square[:, 0]) / 2, square[:, 2] - 2 * square[:, 1] + square[:, 0]
    shift = torch.where(bend > 0, -slope / bend, -2 * slope.sign()).clamp(-2, 2)
    found = (middle + width * shift).clamp(0, 1)
    return torch.where(torch.isfinite(found), found, t)
