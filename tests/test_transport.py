"""Parallel transport: holonomy in closed form, isometry, and curves of every kind."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Bernoulli

import pullback as pb
from helpers import Embedded, Hidden, christoffel_acceleration, wiggle
from problems import PROBLEMS
from pullback._geometry.transport import _by_collocation
from pullback._metrics.connection import connection

DOUBLE = torch.float64
NORMAL, SIMPLEX, SPHERE, LINEAR = (PROBLEMS[i] for i in (3, 5, 7, 9))
CURVATURE = {NORMAL.name: -0.5, SPHERE.name: 1.0, SIMPLEX.name: 0.25}


@dataclass(frozen=True, eq=False)
class Circle(pb.Curve):
    """Once around a circle in the plane; over the stereographic chart, a circle of latitude."""

    center: Tensor
    radius: Tensor

    @property
    def begin(self) -> Tensor:
        return self(torch.zeros(1, dtype=DOUBLE))[..., 0, :]

    @property
    def end(self) -> Tensor:
        return self.begin

    def __call__(self, t: Tensor) -> Tensor:
        angle = 2 * torch.pi * t
        unit = torch.stack([torch.cos(angle), torch.sin(angle)], -1)
        return self.center[..., None, :] + self.radius[..., None, None] * unit

    def velocity(self, t: Tensor) -> Tensor:
        return torch.func.jvp(self, (t,), (torch.ones_like(t),))[1]


def turned(v: Tensor, angle: Tensor) -> Tensor:
    cos, sin = torch.cos(angle), torch.sin(angle)
    return torch.stack([cos * v[..., 0] - sin * v[..., 1], sin * v[..., 0] + cos * v[..., 1]], -1)


def test_holonomy_of_circles_of_latitude():
    """A tangent carried around comes back turned by the area enclosed, 4π r²/(1 + r²) for a circle of radius r in the
    chart."""
    radius = torch.tensor([0.2, 0.5, 1.0, 2.0], dtype=DOUBLE)
    v = torch.randn(4, 2, dtype=DOUBLE)
    found = pb.parallel_transport(SPHERE.metric, Circle(torch.zeros(2, dtype=DOUBLE), radius), v, rtol=1e-10)
    torch.testing.assert_close(found, turned(v, 4 * math.pi * radius**2 / (1 + radius**2)), rtol=0, atol=1e-9)


def test_holonomy_in_the_half_plane():
    """The turn is curvature times area: -½ · 2 · 2π (cosh r - 1), for the circle that is Euclidean with center (0, √2
    cosh r)."""
    r = torch.tensor([0.3, 1.0], dtype=DOUBLE)
    stretch = torch.tensor([2**0.5, 1.0], dtype=DOUBLE)  # (μ, σ) = (√2 x, y) with (x, y) in the half-plane
    metric = pb.FisherRaoMetric(lambda z: NORMAL.metric.decoder(z * stretch))
    center = torch.stack([torch.zeros_like(r), torch.cosh(r)], -1)
    v = torch.randn(2, 2, dtype=DOUBLE)
    found = pb.parallel_transport(metric, Circle(center, torch.sinh(r)), v, rtol=1e-10)
    torch.testing.assert_close(found, turned(v, -2 * math.pi * (torch.cosh(r) - 1)), rtol=0, atol=1e-9)


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_geodesics_carry_their_velocity(problem):
    a, b = problem.points(3), problem.points(3)
    flow = pb.exponential(problem.metric, a, pb.logmap(problem.metric, a, b, rtol=1e-10), rtol=1e-12, atol=1e-12)
    found = pb.parallel_transport(problem.metric, flow, flow.velocity(torch.zeros(1, dtype=DOUBLE))[:, 0], rtol=1e-10)
    torch.testing.assert_close(found, flow.velocity(1.0), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_lengths_and_angles_are_kept(problem):
    a, b = problem.points(3), problem.points(3)
    curve, (u, v) = wiggle(a, b), torch.randn(2, *a.shape, dtype=DOUBLE)
    moved = [pb.parallel_transport(problem.metric, curve, w, rtol=1e-10) for w in (u, v)]
    for pair, images in (((u, u), (moved[0], moved[0])), ((u, v), moved)):
        before, after = problem.metric.inner(a, *pair), problem.metric.inner(b, *images)
        torch.testing.assert_close(after, before, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("problem", [NORMAL, SPHERE, SIMPLEX], ids=str)
def test_closed_form_along_geodesics(problem):
    """Where K is constant, a Jacobi field across a geodesic is the transported tangent times sin(√K s) / √K s."""
    a, b = problem.points(2), problem.points(2)
    v = pb.logmap(problem.metric, a, b, rtol=1e-10)
    w = torch.randn(2, 2, dtype=DOUBLE)
    w = w - (problem.metric.inner(a, v, w) / problem.metric.inner(a, v, v))[:, None] * v
    found = pb.parallel_transport(problem.metric, pb.exponential(problem.metric, a, v, rtol=1e-10), w, rtol=1e-10)
    start = v.clone().requires_grad_()
    end = pb.expmap(problem.metric, a, start, rtol=1e-10)
    slopes = [torch.autograd.grad(x.sum(), start, retain_graph=True)[0] for x in end.unbind(-1)]
    field = torch.stack([(slope * w).sum(-1) for slope in slopes], -1)
    angle = problem.metric.norm(a, v)[:, None].to(torch.complex128) * complex(CURVATURE[problem.name]) ** 0.5
    torch.testing.assert_close(field, (torch.sin(angle) / angle).real * found, rtol=1e-8, atol=1e-8)


def test_flat_space():
    a, b = LINEAR.points(2), LINEAR.points(2)
    v = torch.randn(2, 3, dtype=DOUBLE)
    torch.testing.assert_close(
        pb.parallel_transport(LINEAR.metric, wiggle(a, b), v, rtol=1e-10), v, rtol=1e-12, atol=1e-12
    )


def test_transport_is_linear_and_broadcasts():
    a, b = SPHERE.points(2), SPHERE.points(2)
    curve, basis = wiggle(a, b), torch.eye(2, dtype=DOUBLE)
    matrices = pb.parallel_transport(SPHERE.metric, curve, basis[:, None], rtol=1e-10)  # (2 tangents, 2 curves, 2)
    v = torch.randn(2, 2, dtype=DOUBLE)
    expected = torch.einsum("ij,jik->ik", v, matrices)
    torch.testing.assert_close(
        pb.parallel_transport(SPHERE.metric, curve, v, rtol=1e-10), expected, rtol=1e-13, atol=1e-13
    )
    alone = pb.parallel_transport(SPHERE.metric, curve[1], v[1], rtol=1e-10)
    torch.testing.assert_close(alone, expected[1], rtol=1e-9, atol=1e-9)


def test_there_and_back():
    a, b = NORMAL.points(2), NORMAL.points(2)
    curve, v = wiggle(a, b), torch.randn(2, 2, dtype=DOUBLE)
    there = pb.parallel_transport(NORMAL.metric, curve, v, rtol=1e-10)
    back = pb.parallel_transport(NORMAL.metric, pb.CubicSpline(curve.points.flip(-2)), there, rtol=1e-10)
    torch.testing.assert_close(back, v, rtol=1e-9, atol=1e-9)


def test_corners_are_no_obstacle():
    """A polyline is a chain of curves, also where its points are given alone."""
    points = SPHERE.points(4)
    v = torch.randn(2, dtype=DOUBLE)
    chain = v
    for i in range(3):
        chain = pb.parallel_transport(SPHERE.metric, pb.Polyline(points[i : i + 2]), chain, rtol=1e-10)
    for curve in (pb.Polyline(points), points):
        torch.testing.assert_close(
            pb.parallel_transport(SPHERE.metric, curve, v, rtol=1e-10), chain, rtol=1e-9, atol=1e-9
        )


def test_the_rate_is_that_of_the_christoffel_symbols():
    """Both forms of the connection, against all derivatives of M by polarization of the textbook formula."""
    z, v, w = 0.5 * torch.randn(3, 2, dtype=DOUBLE)
    metric = SPHERE.metric
    parts = [christoffel_acceleration(metric, z, x) for x in (v + w, v - w)]
    for form in (metric, Hidden(metric)):
        found = connection(form, z[None], v[None])[0] @ w
        torch.testing.assert_close(found, 0.25 * (parts[0] - parts[1]), rtol=1e-10, atol=1e-10)


def test_metrics_without_an_embedding():
    a, b = SPHERE.points(2), SPHERE.points(2)
    curve, v = wiggle(a, b), torch.randn(2, 2, dtype=DOUBLE)
    found = pb.parallel_transport(Hidden(SPHERE.metric), curve, v, rtol=1e-10)
    torch.testing.assert_close(found, pb.parallel_transport(SPHERE.metric, curve, v, rtol=1e-10), rtol=1e-9, atol=1e-9)


def test_decoder_keeps_lengths():
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 20)).double()
    metric = pb.FisherRaoMetric(lambda z: Bernoulli(logits=model(z)))
    a, b, v = torch.randn(3, 2, 3, dtype=DOUBLE)
    found = pb.parallel_transport(metric, wiggle(a, b), v, rtol=1e-10)
    torch.testing.assert_close(metric.norm(b, found), metric.norm(a, v), rtol=1e-8, atol=0)


def by_collocation(metric, curve, num_segments):
    index = torch.arange(curve.begin.shape[:-1].numel())
    return _by_collocation(metric, curve, index, num_segments, torch.zeros(2, 2), alpha=0.0)[0]


def test_order_six():
    """Twice the steps, a sixty-fourth of the error."""
    curve = Circle(torch.zeros(2, dtype=DOUBLE), torch.tensor([0.7], dtype=DOUBLE))
    exact = turned(torch.eye(2, dtype=DOUBLE), torch.tensor(4 * math.pi * 0.49 / 1.49, dtype=DOUBLE)).mT
    errors = [(by_collocation(SPHERE.metric, curve, n) - exact).abs().max() for n in (8, 16, 32)]
    assert errors[0] / errors[1] > 45
    assert errors[1] / errors[2] > 45


def test_projection_and_collocation_meet():
    """Two routes: from Jacobians at nodes, and from the connection; at the accuracy of each level."""
    a, b = NORMAL.points(2), NORMAL.points(2)
    curve, v = wiggle(a, b), torch.randn(2, 2, dtype=DOUBLE)
    by_connection = (by_collocation(NORMAL.metric, curve, 64) @ v[..., None])[..., 0]
    for rtol in (1e-4, 1e-7, 1e-10):
        found = pb.parallel_transport(NORMAL.metric, curve, v, rtol=rtol)
        torch.testing.assert_close(found, by_connection, rtol=0, atol=10 * rtol)


def test_a_kink_turns_nothing_but_what_it_must():
    """Across the edge of a folded sheet of paper, which is flat, tangents keep their components on the paper."""
    slope = torch.tensor([2.0], dtype=DOUBLE)
    folded = Embedded(lambda z: torch.cat([z, slope * torch.relu(z[..., :1])], -1))
    line = pb.Polyline(torch.tensor([[-1.0, 0.0], [1.1, 0.3]], dtype=DOUBLE))
    v = torch.tensor([[1.0, 0.0], [0.0, 1.0]], dtype=DOUBLE)
    found = pb.parallel_transport(folded, line, v, rtol=1e-10)
    torch.testing.assert_close(found, v / torch.tensor([(1 + 4) ** 0.5, 1.0], dtype=DOUBLE), rtol=1e-3, atol=1e-3)


def test_gradient_in_the_tangent():
    a, b = SPHERE.points(1), SPHERE.points(1)
    v = torch.randn(1, 2, dtype=DOUBLE, requires_grad=True)
    assert torch.autograd.gradcheck(lambda v: pb.parallel_transport(SPHERE.metric, wiggle(a, b), v, rtol=1e-10), (v,))


def test_single_precision():
    a, b = SPHERE.points(2), SPHERE.points(2)
    v = torch.randn(2, 2, dtype=DOUBLE)
    single = pb.parallel_transport(SPHERE.metric, pb.CubicSpline(wiggle(a, b).points.float()), v.float(), rtol=1e-10)
    assert single.dtype == torch.float32
    torch.testing.assert_close(
        single.double(), pb.parallel_transport(SPHERE.metric, wiggle(a, b), v, rtol=1e-10), rtol=0, atol=1e-4
    )


def test_failures_are_sentences():
    a, b = SPHERE.points(2), SPHERE.points(2)
    curve, v = wiggle(a, b), torch.randn(2, 2, dtype=DOUBLE)
    with pytest.raises(RuntimeError, match=r"2 of 2 curves, first number 0.*too sharply.*Raise max_segments"):
        pb.parallel_transport(SPHERE.metric, curve, v, max_segments=8, rtol=1e-10)
    broken = Embedded(lambda z: torch.where(z[..., :1] > 3, torch.nan, z))
    far = pb.Polyline(torch.stack([torch.stack([a, b], 1)[0], torch.full((2, 2), 4.0, dtype=DOUBLE)]))
    with pytest.raises(RuntimeError, match=r"1 of 2 curves, first number 1.*not finite"):
        pb.parallel_transport(broken, far, v, rtol=1e-10)
    with pytest.raises(ValueError, match="tangents of 2 dimensions are expected"):
        pb.parallel_transport(SPHERE.metric, curve, v[:, :1], rtol=1e-10)
    # tangents get the dtype of the curve
    moved = pb.parallel_transport(SPHERE.metric, curve, v.float())
    assert torch.equal(moved, pb.parallel_transport(SPHERE.metric, curve, v.float().double()))
