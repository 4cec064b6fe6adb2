"""Curves against scipy, autograd and quadrature; energy and length against closed forms, with measured orders."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from scipy import interpolate
from torch import Tensor
from torch.distributions import Bernoulli, Normal

import pullback as pb
from helpers import Hidden, network
from pullback._curves import steps
from pullback._curves.curve import PiecewiseCubic

KINDS = [pb.Polyline, pb.CubicSpline]


@dataclass(frozen=True)
class Flat(pb.Metric):
    """The Euclidean metric."""

    def tensor(self, z: Tensor) -> Tensor:
        return torch.eye(z.shape[-1], dtype=z.dtype).expand(*z.shape, -1)

    def ds2(self, a: Tensor, b: Tensor) -> Tensor:
        return (b - a).square().sum(-1)


def bernoulli() -> pb.FisherRaoMetric:
    net = network(2, 16, 12, seed=3)
    return pb.FisherRaoMetric(lambda z: Bernoulli(logits=net(z)))


def normal() -> pb.FisherRaoMetric:
    net = network(2, 16, 12, seed=3)
    return pb.FisherRaoMetric(lambda z: Normal(net(z)[..., :6], net(z)[..., 6:].exp()))


HALF_PLANE = pb.FisherRaoMetric(lambda z: Normal(z[..., 0], z[..., 1]))
METRICS = {
    "bernoulli": bernoulli(),
    "normal": normal(),
    "bernoulli, ds2 only": Hidden(bernoulli()),
    "normal, ds2 only": Hidden(normal()),
}


def wave(n: int = 6, batch: tuple[int, ...] = (3,)) -> Tensor:
    """Points of gentle curves in the plane."""
    torch.manual_seed(5)
    t = torch.linspace(0, 1, n, dtype=torch.float64)
    a, b = torch.randn(2, *batch, 1, 2, dtype=torch.float64)
    return torch.stack([2 * t - 1, torch.sin(3 * t)], -1) * a + b * t[:, None] ** 2


# Curves


@pytest.mark.parametrize("n", [2, 3, 4, 5, 6, 66, 67, 300])
def test_cubic_spline_is_the_one_of_scipy(n):
    """Not-a-knot, also of few points and of more than fit the small matrix."""
    points, t = wave(n), torch.linspace(0, 1, 37, dtype=torch.float64)
    expected = interpolate.CubicSpline(np.linspace(0, 1, n), points.numpy(), axis=1)
    curve = pb.CubicSpline(points)
    np.testing.assert_allclose(curve(t), expected(t.numpy()), rtol=0, atol=1e-13)
    np.testing.assert_allclose(curve.velocity(t), expected(t.numpy(), 1), rtol=0, atol=1e-11)


def test_long_splines_take_memory_in_proportion():
    """A hundred thousand points: a matrix of their size would take 80 GB."""
    t = torch.linspace(0, 1, 100_001, dtype=torch.float64)[:, None]
    curve = pb.CubicSpline(torch.cat([t.sin(), t**3], -1))
    torch.testing.assert_close(curve.velocity(0.25), torch.tensor([np.cos(0.25), 3 / 16]), rtol=1e-9, atol=0)


def test_one_curve_may_hold_splines_and_polylines():
    points, straight = wave(7), torch.tensor([True, False, True])
    curve, t = PiecewiseCubic.mixed(points, straight), torch.rand(20, dtype=torch.float64)
    for method in (pb.Curve.__call__, pb.Curve.velocity):
        name = method.__name__
        pick = [getattr(kind(points), name)(t) for kind in (pb.Polyline, pb.CubicSpline)]
        expected = torch.where(straight[:, None, None], *pick)
        torch.testing.assert_close(getattr(curve, name)(t), expected)
    assert curve.is_polyline.tolist() == straight.tolist()
    assert curve[1:].is_polyline.tolist() == [False, True]
    assert curve.constant_speed(Flat()).is_polyline.tolist() == straight.tolist()


def test_parameters_may_be_numbers_lists_and_arrays():
    curve = pb.CubicSpline(wave())
    assert torch.equal(curve(0.5), curve(torch.tensor([0.5]))[:, 0])
    assert torch.equal(curve([0.0, 0.5]), curve(np.array([0.0, 0.5])))


def test_polyline_interpolates_linearly():
    points, t = wave(), torch.linspace(0, 1, 37, dtype=torch.float64)
    expected = interpolate.make_interp_spline(np.linspace(0, 1, 6), points.numpy(), k=1, axis=1)
    np.testing.assert_allclose(pb.Polyline(points)(t), expected(t.numpy()), rtol=0, atol=1e-14)


@pytest.mark.parametrize("kind", KINDS)
def test_curves_pass_exactly_through_their_points(kind):
    points = wave(9)  # t = i / 8 has no rounding
    t = torch.arange(9, dtype=torch.float64) / 8
    assert torch.equal(kind(points)(t), points)
    assert torch.equal(kind(points).begin, points[..., 0, :])
    assert torch.equal(kind(points).end, points[..., -1, :])


@pytest.mark.parametrize("kind", KINDS)
def test_velocity_is_the_derivative_in_t(kind):
    curve = kind(wave())
    t = torch.rand(20, dtype=torch.float64)
    _, expected = torch.func.jvp(curve, (t,), (torch.ones_like(t),))
    torch.testing.assert_close(curve.velocity(t), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_batch_is_loop_and_index_picks_curves(kind):
    curve = kind(wave(batch=(4, 3)))
    t = torch.rand(7, dtype=torch.float64)
    assert curve.batch_shape == (4, 3)
    torch.testing.assert_close(curve[2](t), curve(t)[2])
    torch.testing.assert_close(curve[1, 2](t), curve(t)[1, 2])
    torch.testing.assert_close(curve[:, 1:].velocity(t), curve.velocity(t)[:, 1:])
    assert [c.batch_shape for c in curve] == [(3,)] * 4
    with pytest.raises(IndexError):
        curve[0, 0, 0]


@pytest.mark.parametrize("kind", KINDS)
def test_every_curve_may_have_its_own_parameters(kind):
    curve = kind(wave())
    t = torch.rand(3, 7, dtype=torch.float64)
    for method in (kind.__call__, kind.velocity):
        torch.testing.assert_close(method(curve, t), torch.stack([method(c, s) for c, s in zip(curve, t, strict=True)]))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_curves_keep_dtype(kind, dtype):
    curve = kind(wave().to(dtype))
    for values in (curve.resample(5), curve.velocity(torch.rand(3)), curve.constant_speed(Flat()).points):
        assert values.dtype == dtype


def test_splines_are_used_outside_the_inference_mode_they_were_first_seen_in():
    n = 53  # a number of knots no other test uses
    with torch.inference_mode():
        pb.CubicSpline.straight(torch.zeros(2), torch.ones(2), n).resample(4)
    points = torch.rand(n, 2, requires_grad=True)
    pb.CubicSpline(points).resample(4).sum().backward()
    assert points.grad is not None


def test_straight_spline_is_a_line():
    a, b = torch.randn(2, 4, 3, dtype=torch.float64)
    curve, t = pb.CubicSpline.straight(a, b, 7), torch.rand(11, dtype=torch.float64)
    torch.testing.assert_close(curve(t), a[:, None] + t[:, None] * (b - a)[:, None])
    torch.testing.assert_close(curve.velocity(t), (b - a)[:, None].expand(4, 11, 3))


# Energy and length


@pytest.mark.parametrize("kind", KINDS)
def test_energy_and_length_of_a_straight_line(kind):
    a, b = torch.randn(2, 5, 3, dtype=torch.float64)
    curve = kind(torch.lerp(a[:, None], b[:, None], torch.linspace(0, 1, 4, dtype=torch.float64)[:, None]))
    distance = (b - a).norm(dim=-1)
    torch.testing.assert_close(pb.length(Flat(), curve), distance)
    torch.testing.assert_close(pb.energy(Flat(), curve), distance**2)
    torch.testing.assert_close(pb.energy(Flat(), curve.points), distance**2)


def test_closed_form_on_the_half_plane():
    """σ from 1 to e at fixed μ is a geodesic of length √2; the circle (2 cos s, √2 sin s) is one too."""
    s = torch.linspace(0, 1, 4097, dtype=torch.float64)
    vertical = torch.stack([torch.zeros_like(s), s.exp()], -1)
    assert pb.length(HALF_PLANE, vertical).item() == pytest.approx(math.sqrt(2), rel=1e-7)
    angle = 0.5 + s
    circle = torch.stack([2 * angle.cos(), math.sqrt(2) * angle.sin()], -1)
    expected = pb.rao_distance(Normal(*circle[0]), Normal(*circle[-1])).item()
    assert pb.length(HALF_PLANE, circle, extrapolate=True).item() == pytest.approx(expected, rel=1e-11)


def quadrature(metric: pb.Metric, curve: pb.Curve, power: float) -> Tensor:
    """∫ <c', c'>^power dt by Gauss-Legendre on every piece, from the metric tensor: a route without ds2."""
    x, w = (torch.from_numpy(v) for v in np.polynomial.legendre.leggauss(40))
    piece = torch.arange(curve.num_pieces, dtype=torch.float64)[:, None]
    t = ((piece + (x + 1) / 2) / curve.num_pieces).ravel()
    v = curve.velocity(t)
    return metric.inner(curve(t), v, v).pow(power) @ (w / 2 / curve.num_pieces).repeat(curve.num_pieces)


@pytest.mark.parametrize("metric", METRICS.values(), ids=METRICS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("measure", "power"), [(pb.energy, 1), (pb.length, 0.5)], ids=["energy", "length"])
def test_orders_two_and_four(metric, kind, measure, power):
    curve = kind(wave())
    expected = quadrature(metric, curve, power)

    def error(num_segments: int, extrapolate: bool) -> float:
        found = measure(metric, curve, num_segments=num_segments, extrapolate=extrapolate)
        return ((found - expected) / expected).norm().item()

    assert math.log2(error(40, False) / error(80, False)) == pytest.approx(2, abs=0.1)
    assert math.log2(error(80, False) / error(160, False)) == pytest.approx(2, abs=0.05)
    assert math.log2(error(80, True) / error(160, True)) == pytest.approx(4, abs=0.3)


@pytest.mark.parametrize("metric", METRICS.values(), ids=METRICS)
def test_energy_is_at_least_length_squared(metric):
    curve = pb.CubicSpline(wave(batch=(10,)))
    assert (pb.energy(metric, curve) > pb.length(metric, curve) ** 2).all()


@pytest.mark.parametrize("kind", KINDS)
def test_length_does_not_depend_on_the_parametrization(kind):
    curve, t = pb.CubicSpline(wave()), torch.linspace(0, 1, 1001, dtype=torch.float64)
    slow_then_fast = kind(curve((t + t**2) / 2))
    torch.testing.assert_close(
        pb.length(bernoulli(), slow_then_fast), pb.length(bernoulli(), curve, num_segments=1000), rtol=1e-5, atol=0
    )
    change = pb.energy(bernoulli(), slow_then_fast) / pb.energy(bernoulli(), curve) - 1
    assert (change.abs() > 0.01).all()


@pytest.mark.parametrize(("kind", "num_points"), [(pb.Polyline, 1601), (pb.CubicSpline, 201)])
def test_constant_speed(kind, num_points):
    """Same route (up to the corners a polyline cuts), energy = length², and equal steps."""
    metric, curve = bernoulli(), kind(pb.CubicSpline(wave()).resample(200))
    steady = curve.constant_speed(metric, num_points=num_points, num_segments=8000)
    assert torch.equal(steady.begin, curve.begin)
    assert torch.equal(steady.end, curve.end)
    length = pb.length(metric, steady, num_segments=4000)
    torch.testing.assert_close(length, pb.length(metric, curve, num_segments=4000), rtol=2e-5, atol=0)
    torch.testing.assert_close(pb.energy(metric, steady, num_segments=4000), length**2, rtol=2e-5, atol=0)
    assert (pb.energy(metric, curve) > 1.01 * length**2).all()
    speed = torch.stack(
        [pb.length(metric, piece) for piece in steady.points.unfold(-2, 2, 1).movedim(-1, -2).unbind(1)]
    )
    assert (speed.std(0) / speed.mean(0)).max() < 1e-3


def test_constant_speed_passes_over_flat_stretches_and_keeps_points_in_place():
    """Where the metric vanishes no time is spent; a curve of no length stays as it is."""
    metric = pb.FisherRaoMetric(lambda z: Normal(torch.relu(z), 1.0))
    line = torch.linspace(-1, 1, 101, dtype=torch.float64)[:, None]
    steady = pb.Polyline(line).constant_speed(metric, num_points=11)
    torch.testing.assert_close(steady.points[1:, 0], torch.linspace(0.1, 1, 10, dtype=torch.float64))
    still = pb.Polyline(torch.linspace(-2, -1, 5, dtype=torch.float64)[:, None])
    torch.testing.assert_close(still.constant_speed(metric, num_points=5).points, still.points)


# Cost, rounding, derivatives


def test_every_node_is_decoded_once_and_memory_is_bounded():
    sizes: list[int] = []
    net = network(2, 16, 12, seed=3)

    def decoder(z: Tensor) -> Bernoulli:
        sizes.append(z[..., 0].numel())
        return Bernoulli(logits=net(z))

    with torch.no_grad():
        pb.energy(pb.FisherRaoMetric(decoder), pb.Polyline(wave(batch=(100,))), num_segments=512, extrapolate=True)
    assert sum(sizes) < 1.05 * 100 * 513
    assert max(sizes) <= steps.MAX_DECODED


@pytest.mark.parametrize("num_segments", [1, 2, 3, 63, 64, 65, 130])
@pytest.mark.parametrize("metric", METRICS.values(), ids=METRICS)
def test_chunks_do_not_change_the_result(metric, num_segments, monkeypatch):
    nodes = pb.CubicSpline(wave(batch=(2, 5))).resample(num_segments + 1)
    expected = metric.ds2(nodes[..., :-1, :], nodes[..., 1:, :])
    monkeypatch.setattr(steps, "MAX_DECODED", 100)
    (found,) = steps.squared_steps(metric, nodes)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-14)
    torch.testing.assert_close(pb.energy(metric, nodes), num_segments * expected.sum(-1), rtol=1e-9, atol=0)


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float64, 1e-11), (torch.float32, 1e-4)])
def test_rounding_stays_local_far_from_the_base_point(dtype, rtol):
    """At μ/σ = 1000 the coordinates of the embedding are a million times the steps; the origin moves along with the
    curve."""
    s = torch.linspace(0, 1, 257, dtype=torch.float64)
    nodes = torch.stack([1 + 1e-3 * s, 1e-3 * (1 + 0.1 * s)], -1).to(dtype)
    expected = pb.energy(Hidden(HALF_PLANE), nodes.double())
    assert pb.energy(HALF_PLANE, nodes).double().item() == pytest.approx(expected.item(), rel=rtol)


@pytest.mark.parametrize("measure", [pb.energy, pb.length])
@pytest.mark.parametrize("metric", METRICS.values(), ids=METRICS)
def test_gradients_in_the_points(measure, metric):
    points = wave(5, batch=(2,)).requires_grad_()
    assert torch.autograd.gradcheck(
        lambda p: measure(metric, pb.CubicSpline(p), num_segments=12, extrapolate=True), points
    )


def test_gradients_in_the_parameters_of_the_decoder():
    points = wave(5)

    def energy(weight: Tensor) -> Tensor:
        return pb.energy(pb.FisherRaoMetric(lambda z: Bernoulli(logits=torch.tanh(z @ weight))), points)

    assert torch.autograd.gradcheck(energy, torch.randn(2, 4, dtype=torch.float64, requires_grad=True))


def test_a_curve_that_stands_still_has_length_zero_and_a_finite_gradient():
    points = torch.ones(3, 2, dtype=torch.float64, requires_grad=True)
    length = pb.length(bernoulli(), points)
    length.backward()
    assert length.item() == 0
    assert torch.equal(points.grad, torch.zeros_like(points))


def test_nan_is_not_taken_for_zero():
    points = torch.tensor([[0.0, 0.0], [torch.nan, 0.0], [1.0, 1.0]])
    assert pb.length(Flat(), points).isnan()
    assert pb.energy(Flat(), points).isnan()
    assert pb.Polyline(points).constant_speed(Flat()).points[1:-1].isnan().any()


def test_wrong_input_gets_a_sentence():
    with pytest.raises(ValueError, match="n >= 2"):
        pb.Polyline(torch.zeros(1, 2))
    with pytest.raises(ValueError, match="n >= 2"):
        pb.energy(Flat(), torch.zeros(2))
    with pytest.raises(ValueError, match="even num_segments"):
        pb.energy(Flat(), torch.zeros(4, 2), extrapolate=True)
    with pytest.raises(ValueError, match="at least 1"):
        pb.length(Flat(), pb.Polyline(torch.zeros(4, 2)), num_segments=0)
