"""The paper's solver, which the experiments compare with: it finds the known geodesics, and says when it has not."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.distributions import Normal

import pullback as pb
from problems import PROBLEMS
from pullback._solvers.base import Status
from pullback.experiments.spline_descent import SplineDescent, least_squares_knots

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


@pytest.mark.parametrize("problem", [NORMAL, SPHERE], ids=str)
def test_known_geodesics(problem):
    nodes = pairs(problem)
    a, b = nodes[:, 0], nodes[:, 1]
    path = pb.geodesic(StepsOnly(problem.metric), a, b, solver=SplineDescent(num_knots=8, num_segments=64))
    assert path.converged.all()
    torch.testing.assert_close(path.length, problem.distance(a, b), rtol=1e-3, atol=0)
    assert (path.length >= problem.distance(a, b) * (1 - 1e-6)).all()
    torch.testing.assert_close(pb.energy(problem.metric, path.curve, extrapolate=True), path.energy, rtol=1e-4, atol=0)


def test_adam_bears_noise():
    """Steps known to 10 % each: the path's energy still comes within 2 % of the least."""
    nodes = pairs(NORMAL)
    solver = SplineDescent(num_knots=6, num_segments=64, rtol=1e-3, max_steps=400)
    noisy = solver.solve(StepsOnly(NORMAL.metric, noise=0.1), nodes)
    exact = NORMAL.distance(nodes[:, 0], nodes[:, 1]) ** 2
    found = pb.energy(NORMAL.metric, noisy.nodes, extrapolate=True)
    assert (found < 1.02 * exact).all()


def test_batch_equals_loop():
    nodes = pairs(SPHERE)
    solver = SplineDescent(num_knots=6, num_segments=32, rtol=1e-4)
    together = solver.solve(SPHERE.metric, nodes)
    alone = solver.solve(SPHERE.metric, nodes[1:2])
    torch.testing.assert_close(together.nodes[1:2], alone.nodes, rtol=1e-9, atol=1e-9)
    assert together.num_steps[1] == alone.num_steps[0]


def test_bad_curves_have_a_status_and_spare_the_others():
    def decoder(z: Tensor) -> Normal:
        hole = ((z - torch.tensor([0.0, 1.5], dtype=z.dtype)) ** 2).sum(-1, keepdim=True) < 0.04
        return Normal(torch.where(hole, torch.nan, z[..., :1]), z[..., 1:], validate_args=False)

    a = [[-0.5, 1.0], [0.3, 0.7], [torch.nan, 1.0], [0.0, 1.5], [0.0, 1.0]]
    b = [[0.5, 1.0], [0.3, 0.7], [0.0, 1.0], [0.5, 1.0], [0.0, 2.0]]
    nodes = torch.stack([torch.tensor(a, dtype=DOUBLE), torch.tensor(b, dtype=DOUBLE)], 1)
    solution = SplineDescent(num_knots=6, num_segments=32, rtol=1e-4).solve(pb.FisherRaoMetric(decoder), nodes)
    bad = [Status.BAD_END_POINT, Status.BAD_END_POINT, Status.NOT_FINITE]
    assert solution.status.tolist() == [Status.CONVERGED, Status.CONVERGED, *bad]
    exact = NORMAL.distance(nodes[:2, 0], nodes[:2, 1])
    torch.testing.assert_close(solution.length[:2], exact, rtol=1e-3, atol=1e-12)


def test_step_limit_is_reported():
    solution = SplineDescent(max_steps=3).solve(NORMAL.metric, pairs(NORMAL))
    assert (solution.status == Status.MAX_STEPS).all()
    assert (solution.num_steps == 3).all()


def test_wrong_options_are_refused_with_a_sentence():
    with pytest.raises(ValueError, match="even num_segments"):
        SplineDescent(num_segments=7)
    with pytest.raises(ValueError, match="num_knots >= 4"):
        SplineDescent(num_knots=2)


def test_least_squares_knots_recover_a_spline_and_are_optimal():
    torch.manual_seed(5)
    knots, noise = torch.randn(3, 6, 2, dtype=DOUBLE), 0.1 * torch.randn(3, 50, 2, dtype=DOUBLE)
    dense = pb.CubicSpline(knots).resample(50)
    torch.testing.assert_close(least_squares_knots(dense, 6), knots)
    points = dense + noise
    fitted = least_squares_knots(points, 6)
    assert torch.equal(fitted[:, [0, -1]], points[:, [0, -1]])
    inner = fitted[:, 1:-1].clone().requires_grad_()
    curve = pb.CubicSpline(torch.cat([points[:, :1], inner, points[:, -1:]], dim=1))
    (gradient,) = torch.autograd.grad((curve.resample(50) - points).square().sum(), inner)
    assert gradient.abs().max() < 1e-12
