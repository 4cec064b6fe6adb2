"""First-order descent on splines: it finds the known geodesics, and says when it has not."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Normal

import pullback as pb
from problems import PROBLEMS
from pullback._solvers.base import Status
from pullback._solvers.spline import SplineDescent

DOUBLE = torch.float64
NORMAL = next(p for p in PROBLEMS if p.name == "Normal half-plane")
SPHERE = next(p for p in PROBLEMS if p.name == "sphere S^2")


def pairs(problem, n: int = 3) -> Tensor:
    return torch.stack([problem.points(n), problem.points(n)], 1)


@dataclass(frozen=True)
class StepsOnly(pb.Metric):
    """A metric that can measure steps and nothing else, each with the same relative noise as a Monte-Carlo estimate."""

    metric: pb.Metric
    noise: float = 0.0

    def tensor(self, z: Tensor) -> Tensor:
        raise NotImplementedError("there is no tensor")

    def ds2(self, a: Tensor, b: Tensor) -> Tensor:
        exact = self.metric.ds2(a, b)
        return exact * (1 + self.noise * torch.randn_like(exact))


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_known_geodesics(problem):
    nodes = pairs(problem)
    a, b = nodes[:, 0], nodes[:, 1]
    solution = SplineDescent().solve(problem.metric, nodes)
    assert (solution.status == Status.CONVERGED).all()
    torch.testing.assert_close(solution.length, problem.distance(a, b), rtol=1e-4, atol=0)
    assert (solution.length >= problem.distance(a, b) * (1 - 1e-6)).all()
    torch.testing.assert_close(solution.energy, solution.length**2, rtol=1e-4, atol=0)
    size = (b - a).abs().amax(-1)[:, None, None]
    t = torch.linspace(0, 1, solution.nodes.shape[1], dtype=DOUBLE)
    torch.testing.assert_close(solution.nodes / size, problem.path(a, b, t) / size, rtol=0, atol=2e-2)


def test_both_optimizers_find_the_same_minimum():
    nodes = pairs(NORMAL)
    fast, slow = (SplineDescent(optimizer=o).solve(NORMAL.metric, nodes) for o in ("lbfgs", "adam"))
    assert (slow.status == Status.CONVERGED).all()
    torch.testing.assert_close(fast.energy, slow.energy, rtol=1e-5, atol=0)
    assert (fast.num_steps * 3 < slow.num_steps).all()
    assert fast.num_calls * 3 < slow.num_calls


def test_more_knots_come_closer():
    nodes = pairs(NORMAL)
    exact = NORMAL.distance(nodes[:, 0], nodes[:, 1])
    excess = [
        (SplineDescent(num_knots=k, num_segments=256, rtol=1e-10).solve(NORMAL.metric, nodes).length / exact - 1).max()
        for k in (4, 8, 16)
    ]
    assert excess[0] > 4 * excess[1] > 16 * excess[2] > 0


def test_error_says_how_uneven_the_speed_is():
    nodes = pairs(NORMAL)
    solution = SplineDescent(num_knots=4).solve(NORMAL.metric, nodes)
    uneven = 0.5 * (1 - solution.length**2 / solution.energy)
    assert (solution.error >= 0.99 * uneven).all()
    assert (solution.error < 0.1).all()


def test_energy_is_that_of_the_path_returned():
    nodes = pairs(SPHERE)
    solution = SplineDescent(num_segments=64).solve(SPHERE.metric, nodes)
    assert solution.nodes.shape == (3, 65, 2)
    torch.testing.assert_close(solution.nodes[:, [0, -1]], nodes, rtol=0, atol=0)
    found = pb.energy(SPHERE.metric, solution.nodes, extrapolate=True)
    torch.testing.assert_close(solution.energy, found, rtol=1e-12, atol=0)


def test_a_metric_without_tensor():
    nodes = pairs(SPHERE)
    solution = SplineDescent().solve(StepsOnly(SPHERE.metric), nodes)
    assert (solution.status == Status.CONVERGED).all()
    torch.testing.assert_close(solution.length, SPHERE.distance(nodes[:, 0], nodes[:, 1]), rtol=1e-4, atol=0)


def test_adam_bears_noise():
    """Steps known to 10 % each: the path's energy still comes within 2 % of the least."""
    nodes = pairs(NORMAL)
    solver = SplineDescent(optimizer="adam", num_knots=6, num_segments=64, rtol=1e-3, max_steps=400)
    noisy = solver.solve(StepsOnly(NORMAL.metric, noise=0.1), nodes)
    exact = NORMAL.distance(nodes[:, 0], nodes[:, 1]) ** 2
    found = pb.energy(NORMAL.metric, noisy.nodes, extrapolate=True)
    assert (found < 1.02 * exact).all()
    straight = pb.energy(NORMAL.metric, pb.Polyline(nodes))
    assert ((straight - exact) > 3 * (found - exact)).all()


def test_divergence_known_by_sampling():
    metric = pb.DivergenceMetric(NORMAL.metric.decoder, divergence=pb.divergences.MonteCarloKL(200))
    nodes = torch.tensor([[[-1.0, 0.5], [1.0, 0.5]]], dtype=DOUBLE)
    solver = SplineDescent(optimizer="adam", num_knots=4, num_segments=8, learning_rate=0.2, max_steps=25)
    found = pb.length(NORMAL.metric, pb.CubicSpline(solver.solve(metric, nodes).nodes))
    exact, straight = NORMAL.distance(nodes[:, 0], nodes[:, 1]), pb.length(NORMAL.metric, pb.Polyline(nodes))
    assert straight > 1.2 * exact
    assert found < 1.05 * exact


@pytest.mark.parametrize("optimizer", ["adam", "lbfgs"])
def test_batch_equals_loop(optimizer):
    nodes = pairs(SPHERE)
    solver = SplineDescent(optimizer=optimizer, num_knots=6, num_segments=32)
    together = solver.solve(SPHERE.metric, nodes)
    alone = solver.solve(SPHERE.metric, nodes[1:2])
    torch.testing.assert_close(together.nodes[1:2], alone.nodes, rtol=1e-9, atol=1e-9)
    assert together.num_steps[1] == alone.num_steps[0]


@pytest.mark.parametrize("optimizer", ["adam", "lbfgs"])
def test_bad_curves_have_a_status_and_spare_the_others(optimizer):
    def decoder(z: Tensor) -> Normal:
        hole = ((z - torch.tensor([0.0, 1.5], dtype=z.dtype)) ** 2).sum(-1, keepdim=True) < 0.04
        return Normal(torch.where(hole, torch.nan, z[..., :1]), z[..., 1:], validate_args=False)

    a = [[-0.5, 1.0], [0.3, 0.7], [torch.nan, 1.0], [0.0, 1.5], [0.0, 1.0]]
    b = [[0.5, 1.0], [0.3, 0.7], [0.0, 1.0], [0.5, 1.0], [0.0, 2.0]]
    nodes = torch.stack([torch.tensor(a, dtype=DOUBLE), torch.tensor(b, dtype=DOUBLE)], 1)
    solution = SplineDescent(optimizer=optimizer, num_segments=32).solve(pb.FisherRaoMetric(decoder), nodes)
    bad = [Status.BAD_END_POINT, Status.BAD_END_POINT, Status.NOT_FINITE]
    assert solution.status.tolist() == [Status.CONVERGED, Status.CONVERGED, *bad]
    exact = NORMAL.distance(nodes[:2, 0], nodes[:2, 1])
    torch.testing.assert_close(solution.length[:2], exact, rtol=1e-4, atol=1e-12)


def test_a_wall_found_on_the_way_is_not_crossed():
    """The minimum lies past the border of the decoder's domain: the path stays inside, and is not called converged."""

    def decoder(z: Tensor) -> Normal:
        inside = z[..., 1:] < 1.1
        return Normal(torch.where(inside, z[..., :1], torch.nan), z[..., 1:], validate_args=False)

    nodes = torch.tensor([[[-1.0, 1.0], [1.0, 1.0]]], dtype=DOUBLE)
    solution = SplineDescent(max_steps=200).solve(pb.FisherRaoMetric(decoder), nodes)
    assert solution.status.item() in (Status.STALLED, Status.MAX_STEPS)
    assert torch.isfinite(solution.energy).all()
    assert (solution.energy < pb.energy(NORMAL.metric, pb.Polyline(nodes))).all()
    assert (solution.nodes[..., 1] < 1.1).all()


@pytest.mark.parametrize("optimizer", ["adam", "lbfgs"])
def test_step_limit_is_reported(optimizer):
    solution = SplineDescent(optimizer=optimizer, max_steps=3).solve(NORMAL.metric, pairs(NORMAL))
    assert (solution.status == Status.MAX_STEPS).all()
    assert (solution.num_steps == 3).all()


def test_start_path_is_used():
    """From a start on the far side of a hill in the metric, the path stays on that side."""

    def hill(z: Tensor) -> Normal:
        height = 4 * torch.exp(-4 * (z**2).sum(-1, keepdim=True))
        return Normal(torch.cat([z, height], -1), 1.0)

    metric = pb.FisherRaoMetric(hill)
    t = torch.linspace(0, 1, 17, dtype=DOUBLE)
    above = torch.stack([2 * t - 1, torch.sin(torch.pi * t)], -1)
    nodes = torch.stack([above, above * torch.tensor([1.0, -1.0], dtype=DOUBLE)])
    solution = SplineDescent().solve(metric, nodes)
    assert (solution.status == Status.CONVERGED).all()
    torch.testing.assert_close(solution.energy[0], solution.energy[1], rtol=1e-6, atol=0)
    assert solution.nodes[0, 64, 1] > 0.2
    assert solution.nodes[1, 64, 1] < -0.2


def test_single_precision_and_untouched_parameters():
    net = nn.Linear(2, 5)
    metric = pb.FisherRaoMetric(lambda z: Normal(torch.tanh(net(z)), 1.0))
    nodes = torch.randn(2, 2, 2)
    solution = SplineDescent(num_segments=32, rtol=1e-4).solve(metric, nodes)
    assert solution.nodes.dtype == torch.float32
    assert (solution.status == Status.CONVERGED).all()
    assert all(p.grad is None for p in net.parameters())
    assert not solution.length.requires_grad


def test_as_a_solver_of_geodesic():
    nodes = pairs(SPHERE)
    path = pb.geodesic(SPHERE.metric, nodes[:, 0], nodes[:, 1], solver=SplineDescent())
    assert path.converged.all()
    torch.testing.assert_close(path.length, SPHERE.distance(nodes[:, 0], nodes[:, 1]), rtol=1e-4, atol=0)


def test_wrong_options_are_refused_with_a_sentence():
    with pytest.raises(ValueError, match="'adam' or 'lbfgs'"):
        SplineDescent(optimizer="sgd")
    with pytest.raises(ValueError, match="even num_segments"):
        SplineDescent(num_segments=7)
    with pytest.raises(ValueError, match="num_knots >= 3"):
        SplineDescent(num_knots=2)
