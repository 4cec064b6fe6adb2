"""Exponential, logarithm, transport and curvature in charts of spheres and hyperbolic planes, against formulas in the
space around."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.distributions import Categorical, Distribution, Independent, Normal, OneHotCategorical, Poisson

import pullback as pb

DOUBLE = torch.float64


@dataclass(frozen=True)
class Form:
    """A sphere (sign 1) or hyperboloid (sign -1) of curvature ``sign / radius²`` in flat space, in some chart.

    `ambient` maps codes to points with ``<x, x> = sign``; the last coordinate of a hyperboloid counts negative.
    """

    name: str
    metric: pb.Metric
    ambient: Callable[[Tensor], Tensor]
    center: Tensor
    sign: int
    radius: float

    def __str__(self) -> str:
        return self.name

    def product(self, x: Tensor, y: Tensor) -> Tensor:
        flat = (x * y).sum(-1, keepdim=True)
        return flat if self.sign > 0 else flat - 2 * (x * y)[..., -1:]

    def push(self, z: Tensor, v: Tensor) -> Tensor:
        return torch.func.jvp(self.ambient, (z,), (v,))[1]

    def pull(self, z: Tensor, w: Tensor) -> Tensor:
        """The tangent at ``z`` whose image is ``w``."""
        columns = torch.stack([self.push(z, e.expand_as(z)) for e in torch.eye(z.shape[-1], dtype=DOUBLE)], -1)
        return torch.linalg.lstsq(columns, w[..., None]).solution[..., 0]

    def exponential(self, z: Tensor, v: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        """Where the geodesic arrives, and the tangent w carried there, both in the space around."""
        x, u, w = self.ambient(z), self.push(z, v), self.push(z, w)
        size = self.product(u, u).sqrt()
        cos, sin = (torch.cos(size), torch.sin(size)) if self.sign > 0 else (torch.cosh(size), torch.sinh(size))
        u = u / size
        along = self.product(w, u)
        return cos * x + sin * u, w + along * ((cos - 1) * u - self.sign * sin * x)

    def logarithm(self, z: Tensor, end: Tensor) -> Tensor:
        x, y = self.ambient(z), self.ambient(end)
        chord = y - x
        half = 0.5 * self.product(chord, chord).sqrt()
        size = 2 * (torch.asin(half) if self.sign > 0 else torch.asinh(half))
        tangent = y - self.sign * self.product(x, y) * x
        return self.pull(z, tangent * size / self.product(tangent, tangent).sqrt())

    def draw(self, n: int, longest: float) -> tuple[Tensor, Tensor]:
        """Points near the center, and velocities up to the given length."""
        z = self.center + 0.1 * torch.randn(n, len(self.center), dtype=DOUBLE)
        v = torch.randn_like(z)
        return z, v * (longest * torch.linspace(0.2, 1, n, dtype=DOUBLE) / self.metric.norm(z, v))[:, None]


def hyperboloid(mu: Tensor, sigma: Tensor) -> Tensor:
    """Normal distributions on the hyperboloid of radius √2."""
    x, square = mu / 2**0.5, mu**2 / 2 + sigma**2
    return torch.stack([x / sigma, (1 - square) / (2 * sigma), (1 + square) / (2 * sigma)], -1)


def normal(name: str, chart: Callable[[Tensor], tuple[Tensor, Tensor]], center: list[float]) -> Form:
    metric = pb.FisherRaoMetric(lambda z: Normal(*chart(z)))
    return Form(name, metric, lambda z: hyperboloid(*chart(z)), torch.tensor(center, dtype=DOUBLE), -1, 2**0.5)


def disc(z: Tensor) -> tuple[Tensor, Tensor]:
    """From the Poincaré disc to the half-plane, by Cayley's map."""
    x, y = z.unbind(-1)
    size = (1 - x) ** 2 + y**2
    return 2**0.5 * 2 * y / size, (1 - x**2 - y**2) / size


def angles(z: Tensor) -> Tensor:
    polar, azimuth = z.unbind(-1)
    return torch.stack([polar.sin() * azimuth.cos(), polar.sin() * azimuth.sin(), polar.cos()], -1)


def orthogonal(z: Tensor) -> Tensor:
    return torch.cat([z, (1 - z.square().sum(-1, keepdim=True)).sqrt()], -1)


def sphere(name: str, embed: Callable[[Tensor], Tensor], center: list[float]) -> Form:
    metric = pb.EuclideanMetric(lambda z: Normal(embed(z), 1.0))
    return Form(name, metric, embed, torch.tensor(center, dtype=DOUBLE), 1, 1.0)


def simplex(name: str, family: Callable[[Tensor], Distribution], probs: Callable[[Tensor], Tensor], k: int) -> Form:
    center = torch.zeros(k - 1, dtype=DOUBLE)
    return Form(name, pb.FisherRaoMetric(family), lambda z: probs(z).sqrt(), center, 1, 2.0)


def softmax(z: Tensor) -> Tensor:
    return torch.softmax(torch.cat([z, torch.zeros_like(z[..., :1])], -1), -1)


FORMS = [
    normal("Normal (μ, log σ)", lambda z: (z[..., 0], z[..., 1].exp()), [0.3, -0.4]),
    normal("Normal (μ/σ, 1/σ²)", lambda z: (z[..., 0] * z[..., 1] ** -0.5, z[..., 1] ** -0.5), [0.5, 1.5]),
    normal("Poincaré disc", disc, [0.1, -0.2]),
    sphere("sphere in angles", angles, [1.4, 0.3]),
    sphere("sphere from above", orthogonal, [0.1, 0.2]),
    simplex("three categories", lambda z: Categorical(probs=softmax(z)), softmax, 3),
    simplex("four categories", lambda z: OneHotCategorical(softmax(z)), softmax, 4),
    simplex("five categories", lambda z: Categorical(softmax(z)), softmax, 5),
]


def longest(form: Form) -> float:
    """Up to 2, within half of what the chart covers around its center."""
    return {"sphere from above": 0.9, "sphere in angles": 1.0}.get(form.name, 2.0 if form.sign < 0 else 0.8)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_exponential_and_transport(form):
    z, v = form.draw(5, longest(form))
    w = torch.randn_like(z)
    flow = pb.exponential(form.metric, z, v, rtol=1e-10)
    assert flow.converged.all()
    end, carried = form.exponential(z, v, w)
    torch.testing.assert_close(form.ambient(flow.end), end, rtol=1e-8, atol=1e-8)
    t = torch.linspace(0, 1, 9, dtype=DOUBLE)
    speed = form.metric.norm(flow(t), flow.velocity(t))
    torch.testing.assert_close(speed, form.metric.norm(z, v)[:, None].expand_as(speed), rtol=1e-8, atol=0)
    found = pb.parallel_transport(form.metric, flow, w, rtol=1e-10)
    torch.testing.assert_close(form.push(flow.end, found), carried, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_logarithm_and_both_ways(form):
    z, v = form.draw(5, longest(form))
    end = pb.expmap(form.metric, z, v, rtol=1e-10)
    log = pb.logarithm(form.metric, z, end, rtol=1e-10)
    assert log.converged.all()
    torch.testing.assert_close(log.velocity, form.logarithm(z, end), rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(log.velocity, v, rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(pb.expmap(form.metric, z, log.velocity, rtol=1e-10), end, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_curvature(form):
    z, v = form.draw(5, 1.0)
    found = pb.sectional_curvature(form.metric, z, v, torch.randn_like(z))
    torch.testing.assert_close(found, torch.full_like(found, form.sign / form.radius**2), rtol=1e-8, atol=0)


def test_products_are_walked_factor_by_factor():
    """Normals, counts and categories side by side: a geodesic of the product is one in each."""
    first, last = FORMS[0], FORMS[5]

    def decoder(z: Tensor) -> Distribution:
        counts = Independent(Poisson(z[..., 2:4].exp()), 1)
        return pb.Product(Normal(z[..., 0], z[..., 1].exp()), counts, Categorical(softmax(z[..., 4:])))

    metric = pb.FisherRaoMetric(decoder)
    parts = [(first.draw(4, 1.0), first), (last.draw(4, 0.7), last)]
    rates, drift = torch.randn(2, 4, 2, dtype=DOUBLE)
    z = torch.cat([parts[0][0][0], rates, parts[1][0][0]], -1)
    v = torch.cat([parts[0][0][1], 0.3 * drift, parts[1][0][1]], -1)
    end = pb.expmap(metric, z, v, rtol=1e-10)
    for (start, velocity), form, found in ((*parts[0], end[:, :2]), (*parts[1], end[:, 4:])):
        torch.testing.assert_close(
            form.ambient(found), form.exponential(start, velocity, velocity)[0], rtol=1e-8, atol=1e-8
        )
    roots = (rates / 2).exp() * (1 + 0.15 * drift)  # of rates, which is where counts are flat
    torch.testing.assert_close(end[:, 2:4], 2 * roots.log(), rtol=1e-8, atol=1e-8)
    log = pb.logarithm(metric, z, end, rtol=1e-10)
    assert log.converged.all()
    torch.testing.assert_close(log.velocity, v, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("form", [FORMS[0], FORMS[2], FORMS[6]], ids=str)
def test_mean_of_points_symmetric_about_a_center(form):
    z, v = (x[-1:] for x in form.draw(3, 0.8))
    w = torch.randn(2, z.shape[-1], dtype=DOUBLE)
    v = torch.cat([v, w * 0.5 / form.metric.norm(z.expand_as(w), w)[:, None]])
    points = pb.expmap(form.metric, z, torch.cat([v, -v]), rtol=1e-10)
    mean = pb.statistics.frechet_mean(form.metric, points)
    torch.testing.assert_close(mean.mean, z[0], rtol=0, atol=1e-6)


def test_means_of_counts_and_of_categories():
    """The mean rate is the square of the mean root; categories average on the sphere, by a fixed point of the closed
    forms."""
    rates = torch.randn(6, 3, dtype=DOUBLE)
    share = torch.rand(6, dtype=DOUBLE) + 0.5
    share /= share.sum()
    found = pb.statistics.frechet_mean(
        pb.FisherRaoMetric(lambda z: Independent(Poisson(z.exp()), 1)), rates, share
    ).mean
    torch.testing.assert_close(found, 2 * (share @ (rates / 2).exp()).log(), rtol=0, atol=1e-6)
    form = FORMS[7]
    points = 0.7 * torch.randn(6, 4, dtype=DOUBLE)
    x, mean = form.ambient(points), form.ambient(points).mean(0)
    for _ in range(200):
        mean = mean / mean.norm()
        tangent = x - (x @ mean)[:, None] * mean
        logs = tangent * (torch.acos((x @ mean).clamp(-1, 1)) / tangent.norm(dim=-1))[:, None]
        step = share @ logs
        mean = mean + step
    found = pb.statistics.frechet_mean(form.metric, points, share).mean
    torch.testing.assert_close(form.ambient(found), mean / mean.norm(), rtol=0, atol=1e-6)
