"""The exponential map against closed forms, against an independent integrator, and against its own laws."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.integrate import solve_ivp
from torch import Tensor
from torch.distributions import Normal

import pullback as pb
from helpers import Embedded, Hidden, christoffel_acceleration
from problems import PROBLEMS
from pullback._metrics.connection import acceleration
from pullback._numerics.ode import integrate
from pullback._solvers.base import Status

DOUBLE = torch.float64


def stereographic(z: Tensor) -> Tensor:
    """The unit sphere, from the plane (or space) of its stereographic projection."""
    s = (z**2).sum(-1, keepdim=True)
    return torch.cat([2 * z, s - 1], -1) / (1 + s)


def hyperboloid(z: Tensor) -> Tensor:
    """Normal distributions (μ, σ) on the hyperboloid x² + y² - w² = -1, the last coordinate being w."""
    x, y = z[..., 0] / 2**0.5, z[..., 1]
    return torch.stack([x / y, (x**2 + y**2 - 1) / (2 * y), (x**2 + y**2 + 1) / (2 * y)], -1)


def lowered(z: Tensor) -> Tensor:
    return 2 * hyperboloid(z) * torch.tensor([1.0, 1.0, -1.0], dtype=z.dtype)


def dirichlet(z: Tensor) -> Tensor:
    """A curved family of natural parameters of Dirichlet distributions."""
    return 1 + torch.exp(torch.stack([z[..., 0], z[..., 1], 0.5 * torch.sin(z[..., 0] + z[..., 1])], -1))


def dirichlet_means(z: Tensor) -> Tensor:
    return torch.digamma(dirichlet(z)) - torch.digamma(dirichlet(z).sum(-1, keepdim=True))


SPHERE, HALF_PLANE = Embedded(stereographic), Embedded(hyperboloid, lowered)
PAIRS = {"sphere": SPHERE, "half plane": HALF_PLANE, "dirichlet": Embedded(dirichlet, dirichlet_means)}


def starts(n: int = 4) -> tuple[Tensor, Tensor]:
    """Points with positive last coordinate (inside every chart used here) and velocities."""
    z = torch.randn(n, 2, dtype=DOUBLE) * 0.5
    return torch.stack([z[:, 0], 0.5 + z[:, 1].abs()], -1), torch.randn(n, 2, dtype=DOUBLE)


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("shown", [True, False], ids=["projection", "Lagrangian"])
def test_acceleration_is_minus_the_christoffel_symbols(name, shown):
    pair = PAIRS[name]
    z, v = starts()
    expected = torch.stack([christoffel_acceleration(pair, *row) for row in zip(z, v, strict=True)])
    found = acceleration(Embedded(pair.phi, pair.psi, shown), z, v)
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)


def test_acceleration_of_a_decoder_without_third_derivatives():
    """`torch.cdist` can be differentiated once; its square written out, as often as one likes."""
    centers = torch.randn(5, 2, dtype=DOUBLE)
    once = Embedded(lambda z: torch.exp(-(torch.cdist(z, centers) ** 2)))
    often = Embedded(lambda z: torch.exp(-((z[..., None, :] - centers) ** 2).sum(-1)))
    z, v = starts()
    torch.testing.assert_close(acceleration(once, z, v), acceleration(often, z, v), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_geodesics_of_known_geometries(problem):
    """The flow along the initial velocity of the known path follows that path, at its constant speed, to its end."""
    a, b = problem.points(3), problem.points(3)
    origin = torch.zeros(1, dtype=DOUBLE)
    _, v = torch.func.jvp(lambda t: problem.path(a, b, t), (origin,), (origin + 1,))
    flow = pb.exponential(problem.metric, a, v[:, 0], rtol=1e-10)
    t = torch.linspace(0, 1, 9, dtype=DOUBLE)
    torch.testing.assert_close(flow.end, b, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(flow(t), problem.path(a, b, t), rtol=1e-8, atol=1e-8)
    speed = problem.metric.norm(flow(t), flow.velocity(t))
    torch.testing.assert_close(speed, problem.distance(a, b)[:, None].expand_as(speed), rtol=1e-8, atol=0)


@pytest.mark.parametrize("shown", [True, False])
def test_flat_space_is_straight_exactly(shown):
    A = torch.randn(2, 5, dtype=DOUBLE)
    z, v = starts()
    flow = pb.exponential(Embedded(lambda z: z @ A, shown=shown), z, v, rtol=1e-10)
    torch.testing.assert_close(flow.end, z + v, rtol=1e-13, atol=1e-13)
    assert (flow.num_steps < 10).all()


def test_decoder_against_an_independent_integrator():
    weights = [torch.randn(2, 8, dtype=DOUBLE), torch.randn(8, 12, dtype=DOUBLE)]
    metric = Embedded(lambda z: torch.tanh(z @ weights[0]) @ weights[1])
    z, v = starts(1)

    def textbook(_: float, y: np.ndarray) -> np.ndarray:
        point, velocity = torch.as_tensor(y).chunk(2)
        return torch.cat([velocity, christoffel_acceleration(metric, point, velocity)]).numpy()

    solved = solve_ivp(textbook, (0, 1), torch.cat([z[0], v[0]]).numpy(), method="LSODA", rtol=1e-10, atol=1e-11)
    flow = pb.exponential(metric, z, v, rtol=1e-10)
    found = torch.cat([flow.end, flow.velocity(1.0)], -1)[0]
    torch.testing.assert_close(found, torch.as_tensor(solved.y[:, -1]), rtol=1e-7, atol=1e-7)


def test_drift_is_the_change_of_speed():
    z, v = starts(2)
    metric = PAIRS["dirichlet"]
    flow = pb.exponential(metric, z, v, rtol=1e-5, atol=1e-5)
    change = metric.norm(flow.end, flow.velocity(1.0)) / metric.norm(z, v) - 1
    torch.testing.assert_close(flow.speed_drift, change.abs(), rtol=1e-6, atol=0)
    assert (flow.speed_drift > 1e-12).all()
    assert (pb.exponential(metric, z, v, rtol=1e-10).speed_drift < 1e-8).all()


def test_trajectory_agrees_with_the_map_at_every_time():
    z, v = starts(2)
    flow = pb.exponential(SPHERE, z, v, rtol=1e-10)
    t = torch.tensor([0.0, 0.3, 0.77, 1.0], dtype=DOUBLE)
    expected = torch.stack([pb.expmap(SPHERE, z, v, s, rtol=1e-10) for s in t.tolist()], 1)
    torch.testing.assert_close(flow(t), expected, rtol=0, atol=1e-8)
    torch.testing.assert_close(flow(t[None].expand(2, -1)), flow(t), rtol=0, atol=0)
    torch.testing.assert_close(flow.begin, z, rtol=0, atol=0)
    torch.testing.assert_close(flow.end, expected[:, -1], rtol=0, atol=1e-9)
    h = 1e-5
    slope = (flow(t[1:3] + h) - flow(t[1:3] - h)) / (2 * h)
    torch.testing.assert_close(slope, flow.velocity(t[1:3]), rtol=1e-5, atol=1e-5)


def test_length_of_a_trajectory_is_its_speed():
    z, v = starts(2)
    flow = pb.exponential(SPHERE, z, v, rtol=1e-10)
    torch.testing.assert_close(pb.length(SPHERE, flow, extrapolate=True), SPHERE.norm(z, v), rtol=1e-7, atol=0)


def test_geodesics_run_backwards():
    z, v = starts()
    flow = pb.exponential(HALF_PLANE, z, v, rtol=1e-10)
    torch.testing.assert_close(
        pb.expmap(HALF_PLANE, flow.end, flow.velocity(1.0), -1.0, rtol=1e-10), z, rtol=1e-8, atol=1e-8
    )


def test_result_does_not_depend_on_coordinates():
    def bend(z: Tensor) -> Tensor:
        return torch.stack([z[..., 0] + 0.3 * torch.sin(z[..., 1]), z[..., 1] + 0.1 * z[..., 0] ** 2], -1)

    z, v = starts()
    image, u = torch.func.jvp(bend, (z,), (v,))
    bent = pb.expmap(Embedded(lambda z: stereographic(bend(z))), z, v, rtol=1e-10)
    torch.testing.assert_close(bend(bent), pb.expmap(SPHERE, image, u, rtol=1e-10), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("shown", [True, False])
def test_unused_dimension_moves_freely(shown):
    """Where M is singular, the geodesic is that of the seen coordinates, straight in the unseen direction."""
    turn = torch.linalg.qr(torch.randn(3, 3, dtype=DOUBLE))[0]
    z, v = (torch.nn.functional.pad(x, (0, 1), value=0.7) for x in starts(2))
    flow = pb.exponential(
        Embedded(lambda z: stereographic((z @ turn)[..., :2]), shown=shown), z @ turn.T, v @ turn.T, rtol=1e-10
    )
    assert flow.converged.all()
    found = flow.end @ turn
    torch.testing.assert_close(found[:, :2], pb.expmap(SPHERE, z[:, :2], v[:, :2], rtol=1e-10), rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(found[:, 2], (z + v)[:, 2], rtol=1e-7, atol=1e-7)


def test_metric_that_vanishes_is_crossed_in_a_straight_line():
    z, v = starts()
    flow = pb.exponential(Embedded(lambda z: 0 * z), z, v, rtol=1e-10)
    torch.testing.assert_close(flow.end, z + v, rtol=1e-13, atol=1e-13)


def test_batch_equals_loop_and_broadcasts():
    z, v = starts(3)
    batch = pb.exponential(SPHERE, z[:, None], v[None], rtol=1e-10)
    assert batch.end.shape == (3, 3, 2)
    assert batch(torch.zeros(5, dtype=DOUBLE)).shape == (3, 3, 5, 2)
    for i in range(3):
        single = pb.exponential(SPHERE, z[i], v[i], rtol=1e-10)
        torch.testing.assert_close(batch.end[i, i], single.end, rtol=1e-14, atol=1e-14)
        assert batch.num_steps[i, i] == single.num_steps
        assert single.end.shape == (2,)


def test_empty_batch():
    empty = torch.zeros(0, 2, dtype=DOUBLE)
    assert pb.expmap(SPHERE, empty, empty, rtol=1e-10).shape == (0, 2)
    assert pb.exponential(SPHERE, empty, empty, rtol=1e-10)(torch.zeros(3, dtype=DOUBLE)).shape == (0, 3, 2)


def test_single_precision():
    z, v = starts()
    flow = pb.exponential(SPHERE, z.float(), v.float(), rtol=1e-10)
    assert flow.end.dtype == torch.float32
    assert flow.converged.all()
    torch.testing.assert_close(
        stereographic(flow.end.double()), stereographic(pb.expmap(SPHERE, z, v, rtol=1e-10)), rtol=0, atol=2e-5
    )


def test_inference_mode():
    z, v = starts(2)
    with torch.inference_mode():
        found = pb.expmap(SPHERE, z.clone(), v.clone(), rtol=1e-10)
    torch.testing.assert_close(found.clone(), pb.expmap(SPHERE, z, v, rtol=1e-10), rtol=0, atol=0)


def test_derivative_of_the_map():
    """On the line with M = 1 / z² the map is z exp(v / z)."""
    z = torch.tensor([[0.7], [1.5]], dtype=DOUBLE, requires_grad=True)
    v = torch.tensor([[0.4], [-0.9]], dtype=DOUBLE, requires_grad=True)
    end = pb.expmap(Embedded(torch.log), z, v, rtol=1e-10)
    growth = torch.exp(v / z).detach()
    torch.testing.assert_close(end.detach(), z.detach() * growth, rtol=1e-9, atol=0)
    by_z, by_v = torch.autograd.grad(end.sum(), (z, v))
    torch.testing.assert_close(by_v, growth, rtol=1e-8, atol=0)
    torch.testing.assert_close(by_z, growth * (1 - v / z).detach(), rtol=1e-8, atol=1e-8)


def test_each_failure_has_its_status_and_spares_the_others():
    def wall(z: Tensor) -> Tensor:
        """1 / z runs to infinity in finite time; past 3 there is nothing."""
        return torch.where(z[..., :1] < 0, 1 / z, torch.where(z < 3, z, torch.nan))

    z = torch.tensor([[1.0], [-1.0], [1.0], [torch.nan]], dtype=DOUBLE)
    v = torch.tensor([[1.0], [-2.0], [9.0], [1.0]], dtype=DOUBLE)
    flow = pb.exponential(Embedded(wall), z, v, rtol=1e-6, atol=1e-6)
    assert flow.status.tolist() == [Status.CONVERGED, Status.STALLED, Status.NOT_FINITE, Status.NOT_FINITE]
    torch.testing.assert_close(flow.end[0], z[0] + v[0])
    torch.testing.assert_close(flow.reached[:3], torch.tensor([1, 1 / 2, 2 / 9], dtype=DOUBLE), rtol=1e-4, atol=0)
    for message, word in zip(flow.messages, ["reached", "Left the domain", "Not finite", "Not finite"], strict=True):
        assert word in message
    half = flow(torch.tensor([0.2, 0.9], dtype=DOUBLE))[..., 0]
    torch.testing.assert_close(half[1, 0], torch.tensor(-1 / (1 - 0.4), dtype=DOUBLE), rtol=1e-6, atol=0)
    assert torch.isfinite(half[0]).all()
    assert torch.isnan(half[1:, 1]).all()


def test_a_decoder_that_breaks_its_contract_half_way():
    """Without an embedding the metric itself raises for a code that decodes to NaN; only that trajectory may suffer."""

    def decoder(z: Tensor) -> Normal:
        return Normal(z[..., :1], torch.where(z[..., 1:] < 1, z[..., 1:], torch.nan), validate_args=False)

    metric = Hidden(pb.FisherRaoMetric(decoder))
    z = torch.tensor([[0.0, 0.4], [0.2, 0.5], [0.1, 0.3]], dtype=DOUBLE)
    v = torch.tensor([[0.1, 0.2], [0.0, 2.0], [0.2, -0.1]], dtype=DOUBLE)
    flow = pb.exponential(metric, z, v, rtol=1e-6, atol=1e-6)
    assert flow.status.tolist() == [Status.CONVERGED, Status.NOT_FINITE, Status.CONVERGED]
    assert 1.999 < flow.reached[1].exp() ** 4 <= 2
    torch.testing.assert_close(flow.end[::2], pb.expmap(HALF_PLANE, z[::2], v[::2], rtol=1e-10), rtol=1e-5, atol=1e-5)


def test_step_limit_is_called_stiff():
    z, v = starts(2)
    flow = pb.exponential(SPHERE, z, v, max_steps=3, rtol=1e-10)
    assert (flow.status == Status.MAX_STEPS).all()
    assert "Stiff" in flow.messages[0]
    with pytest.raises(pb.ConvergenceError, match=r"2 of 2 geodesics did not arrive.*Stiff.*raise max_steps"):
        pb.expmap(SPHERE, z, v, max_steps=3, rtol=1e-10)


def test_kinks_are_followed_to_three_digits_or_refused():
    """Geodesics break at the edge of a folded sheet, and the geodesic equation does not know: the speed tells."""
    folded = Embedded(lambda z: torch.cat([z, 2 * torch.relu(z[..., :1])], -1))
    z, v = torch.tensor([[-1.0, 0.0], [-1.0, 0.0]], dtype=DOUBLE), torch.tensor([[3.0, 0.2], [0.1, 3.0]], dtype=DOUBLE)
    flow = pb.exponential(folded, z, v, rtol=1e-10)
    assert flow.status.tolist() == [Status.UNRESOLVED, Status.CONVERGED]
    assert "kinks" in flow.messages[0]
    rough = Embedded(lambda z: torch.cat([z, torch.nn.functional.elu(8 * z[..., :1])], -1))
    flow = pb.exponential(rough, z, v, rtol=1e-10)
    assert flow.converged.all()
    assert (flow.num_steps < 100).all()
    exact = pb.exponential(rough, z, v, rtol=1e-10)
    torch.testing.assert_close(flow.end, exact.end, rtol=1e-2, atol=1e-2)


def test_wrong_input_is_refused_with_a_sentence():
    z, v = starts()
    with pytest.raises(ValueError, match="the same d"):
        pb.expmap(SPHERE, z, v[:, :1], rtol=1e-10)
    with pytest.raises(ValueError, match=r"Move one: a\.to\(b\)"):
        pb.expmap(SPHERE, z, v.float(), rtol=1e-10)
    with pytest.raises(ValueError, match=r"For many times use pullback\.exponential"):
        pb.expmap(SPHERE, z, v, torch.linspace(0, 1, 5))


def test_one_time_is_the_only_one_of_a_list():
    flow = pb.exponential(SPHERE, *starts(), rtol=1e-10)
    for t in (0.5, torch.tensor(0.5), np.float64(0.5)):
        assert torch.equal(flow(t), flow([0.5])[..., 0, :])
        assert torch.equal(flow.velocity(t), flow.velocity([0.5])[..., 0, :])


def test_integrator_meets_its_tolerance_with_order_eight():
    """Error proportional to the tolerance, work to its eighth root, on the harmonic oscillator over one period."""

    def oscillator(y: Tensor) -> Tensor:
        return 2 * torch.pi * torch.stack([y[:, 1], -y[:, 0]], -1)

    y = torch.tensor([[1.0, 0.0], [0.0, 3.0]], dtype=DOUBLE)
    coarse, fine = (integrate(oscillator, y, rtol=tol, atol=tol) for tol in (1e-6, 1e-12))
    assert (coarse.y - y).abs().max() < 1e-5
    assert (fine.y - y).abs().max() < 1e-11
    work = fine.num_evaluations / coarse.num_evaluations
    assert (work < 1.2 * 10 ** (6 / 8)).all()


def test_interpolant_is_as_good_as_the_steps():
    y = torch.tensor([[1.0], [-2.0]], dtype=DOUBLE)
    flow = integrate(lambda y: -3 * y, y, rtol=1e-9, atol=1e-9, dense=True)
    t = torch.linspace(0, 1, 101, dtype=DOUBLE).expand(2, -1)
    assert flow.dense is not None
    torch.testing.assert_close(flow.dense(t), (y * torch.exp(-3 * t))[..., None], rtol=0, atol=3e-8)
