r"""Geometries with known answers: the decoder is (a chart of) the family itself, so its latent space is the family.

Each problem has its distance in closed form and the minimal geodesic between any two of its points, at constant speed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributions import Bernoulli, Categorical, Exponential, Laplace, Normal, Poisson

import pullback as pb

Points = Callable[[int], Tensor]
Distance = Callable[[Tensor, Tensor], Tensor]
Path = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Problem:
    """A metric on codes ``(*batch, d)`` whose distances and minimal geodesics are known.

    `points(n)` draws n codes ``(n, d)``; `distance(a, b)` is exact; `path(a, b, t)` with ``t`` of shape ``(m,)`` gives
    codes ``(n, m, d)``.
    """

    name: str
    metric: pb.Metric
    points: Points
    distance: Distance
    path: Path

    def __str__(self) -> str:
        return self.name


def box(low: list[float], high: list[float]) -> Points:
    """Uniform codes in a box, in float64."""
    a, b = torch.tensor(low, dtype=torch.float64), torch.tensor(high, dtype=torch.float64)
    return lambda n: a + (b - a) * torch.rand(n, len(low), dtype=torch.float64)


def line(
    name: str, family: Callable[[Tensor], torch.distributions.Distribution], chart: Callable, inverse: Callable
) -> Problem:
    """A family of one parameter: a line with the variance-stabilizing coordinate `chart`, whose inverse is
    `inverse`."""

    def path(a: Tensor, b: Tensor, t: Tensor) -> Tensor:
        return inverse(torch.lerp(chart(a)[:, None], chart(b)[:, None], t[:, None]))

    return Problem(
        name,
        pb.FisherRaoMetric(lambda z: family(z[..., 0])),
        box([-2.0], [2.0]),
        lambda a, b: (chart(a) - chart(b)).abs()[..., 0],
        path,
    )


def half_plane(name: str, family: Callable, a: float, c: float) -> Problem:
    """A location-scale family with I = diag(a, c)/σ² in the chart (μ, σ): the hyperbolic plane of curvature -1/c."""

    def hyperboloid(z: Tensor) -> Tensor:
        mu, sigma = z[..., 0] * (a / c) ** 0.5, z[..., 1]
        return torch.stack([mu / sigma, 1 / sigma, (mu**2 + sigma**2) / sigma], dim=-1)

    def angle(p: Tensor, q: Tensor) -> Tensor:
        d = q - p
        half = (hyperboloid(p)[..., 1] * hyperboloid(q)[..., 1]) * (d[..., 0] ** 2 * a / c + d[..., 1] ** 2)
        return 2 * torch.asinh(0.5 * half.sqrt())

    def path(p: Tensor, q: Tensor, t: Tensor) -> Tensor:
        d = angle(p, q)[:, None]
        weights = torch.stack([torch.sinh((1 - t) * d), torch.sinh(t * d)], dim=-1) / torch.sinh(d)[..., None]
        x = weights[..., :1] * hyperboloid(p)[:, None] + weights[..., 1:] * hyperboloid(q)[:, None]
        return torch.stack([x[..., 0] / x[..., 1] * (c / a) ** 0.5, 1 / x[..., 1]], dim=-1)

    metric = pb.FisherRaoMetric(lambda z: family(z[..., 0], z[..., 1]))
    return Problem(name, metric, box([-1.0, 0.5], [1.0, 2.0]), lambda p, q: c**0.5 * angle(p, q), path)


def spherical(name: str, metric: pb.Metric, points: Points, embed: Callable, chart: Callable, radius: float) -> Problem:
    """A part of a sphere of the given radius: `embed` maps codes to the unit sphere and `chart` maps back."""

    def angle(a: Tensor, b: Tensor) -> Tensor:
        return 2 * torch.asin(0.5 * torch.linalg.vector_norm(embed(a) - embed(b), dim=-1))

    def path(a: Tensor, b: Tensor, t: Tensor) -> Tensor:
        theta = angle(a, b)[:, None]
        weights = torch.stack([torch.sin((1 - t) * theta), torch.sin(t * theta)], dim=-1) / torch.sin(theta)[..., None]
        return chart(weights[..., :1] * embed(a)[:, None] + weights[..., 1:] * embed(b)[:, None])

    return Problem(name, metric, points, lambda a, b: radius * angle(a, b), path)


def simplex(k: int) -> Problem:
    """Categorical distributions in the chart of log-odds: an orthant of the sphere of radius 2."""

    def logits(z: Tensor) -> Tensor:
        return torch.cat([z, torch.zeros_like(z[..., :1])], dim=-1)

    def chart(x: Tensor) -> Tensor:
        return 2 * (x[..., :-1].log() - x[..., -1:].log())

    return spherical(
        f"categorical simplex, {k} categories",
        pb.FisherRaoMetric(lambda z: Categorical(logits=logits(z))),
        box([-1.5] * (k - 1), [1.5] * (k - 1)),
        lambda z: (0.5 * logits(z).log_softmax(-1)).exp(),
        chart,
        2.0,
    )


def sphere(n: int) -> Problem:
    """The unit sphere in stereographic coordinates, as the mean of a Normal with constant deviation."""

    def embed(z: Tensor) -> Tensor:
        square = (z**2).sum(-1, keepdim=True)
        return torch.cat([2 * z, square - 1], dim=-1) / (1 + square)

    metric = pb.EuclideanMetric(lambda z: Normal(embed(z), torch.ones_like(embed(z))))
    points = box([-0.5] * n, [0.5] * n)
    return spherical(f"sphere S^{n}", metric, points, embed, lambda x: x[..., :-1] / (1 - x[..., -1:]), 1.0)


def linear(d: int, num_features: int) -> Problem:
    """A linear decoder with unit noise: Euclidean space."""
    A = torch.randn(num_features, d, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return Problem(
        "linear decoder",
        pb.FisherRaoMetric(lambda z: Normal(z @ A.to(z).mT, 1.0)),
        box([-1.0] * d, [1.0] * d),
        lambda a, b: torch.linalg.vector_norm((b - a) @ A.mT, dim=-1),
        lambda a, b, t: torch.lerp(a[:, None], b[:, None], t[:, None]),
    )


PROBLEMS = [
    line(
        "Bernoulli",
        lambda z: Bernoulli(logits=z),
        lambda z: 2 * torch.asin(torch.sigmoid(z).sqrt()),
        lambda x: torch.logit(torch.sin(x / 2) ** 2),
    ),
    line("Poisson", lambda z: Poisson(z.exp()), lambda z: 2 * (z / 2).exp(), lambda x: 2 * (x / 2).log()),
    line("Exponential", lambda z: Exponential(z.exp()), lambda z: z, lambda x: x),
    half_plane("Normal half-plane", Normal, 1.0, 2.0),
    half_plane("hyperbolic plane (Laplace)", Laplace, 1.0, 1.0),
    simplex(3),
    simplex(6),
    sphere(2),
    sphere(5),
    linear(3, 7),
]
