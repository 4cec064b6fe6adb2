"""Shooting: from a curve that is roughly a geodesic to one that solves the geodesic equation to the last digits."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.distributions import Normal

import pullback as pb
from problems import PROBLEMS, half_plane
from pullback._solvers.base import Solution, Solver, Status
from pullback._solvers.shooting import Shooting, shoot

DOUBLE = torch.float64
NORMAL = next(p for p in PROBLEMS if p.name == "Normal half-plane")
SPHERE = next(p for p in PROBLEMS if p.name == "sphere S^2")


def rough(problem, a: Tensor, b: Tensor, size: float, n: int = 33) -> Tensor:
    """The known geodesic, bent and run through at uneven speed by a relative amount `size`."""
    t = torch.linspace(0, 1, n, dtype=DOUBLE)
    uneven = problem.path(a, b, t + size * torch.sin(torch.pi * t) ** 2)
    bump = size * (b - a).abs().amax(-1)[:, None, None] * torch.sin(torch.pi * t)[:, None]
    return uneven + bump * torch.linspace(-1, 1, a.shape[-1], dtype=DOUBLE).sign()


def pairs(problem, n: int = 2) -> tuple[Tensor, Tensor]:
    return problem.points(n), problem.points(n)


@dataclass(frozen=True)
class Given(Solver):
    """Returns a prepared path, with what a solver would say about it."""

    nodes: Tensor
    length: Tensor
    status: int = Status.CONVERGED

    def solve(self, metric: pb.Metric, nodes: Tensor) -> Solution:
        one = torch.ones_like(self.length)
        count = torch.ones_like(self.length, dtype=torch.long)
        return Solution(
            nodes=self.nodes,
            energy=self.length**2,
            length=self.length,
            error=1e-3 * one,
            status=self.status * count,
            strict=count > 0,
            num_steps=5 * count,
            num_segments=32 * count,
            num_calls=7,
            num_decoded=70,
        )


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_distance_to_ten_digits(problem):
    a, b = pairs(problem)
    shots = shoot(problem.metric, rough(problem, a, b, 1e-3))
    assert shots.converged.all()
    torch.testing.assert_close(shots.length, problem.distance(a, b), rtol=1e-10, atol=0)
    t = torch.linspace(0, 1, 33, dtype=DOUBLE)
    torch.testing.assert_close(shots.nodes, problem.path(a, b, t), rtol=1e-9, atol=1e-9)


def test_velocity_is_the_logarithm():
    a, b = pairs(NORMAL)
    shots = shoot(NORMAL.metric, rough(NORMAL, a, b, 1e-2))
    torch.testing.assert_close(pb.expmap(NORMAL.metric, a, shots.velocity), b, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(NORMAL.metric.norm(a, shots.velocity), shots.length, rtol=1e-10, atol=0)


def test_convergence_is_fast():
    a, b = pairs(SPHERE)
    shots = shoot(SPHERE.metric, rough(SPHERE, a, b, 1e-3))
    assert (shots.num_steps <= 4).all()
    assert (shots.residual <= 1e-11).all()


@pytest.mark.parametrize("num_pieces", [1, 32])
def test_result_does_not_depend_on_the_pieces(num_pieces):
    a, b = pairs(SPHERE, 1)
    shots = shoot(SPHERE.metric, rough(SPHERE, a, b, 1e-2), num_pieces=num_pieces)
    assert shots.converged.all()
    torch.testing.assert_close(shots.length, SPHERE.distance(a, b), rtol=1e-10, atol=0)


def test_far_start_needs_damping():
    a, b = pairs(NORMAL, 1)
    shots = shoot(NORMAL.metric, rough(NORMAL, a, b, 0.3))
    assert shots.converged.all()
    torch.testing.assert_close(shots.length, NORMAL.distance(a, b), rtol=1e-10, atol=0)


def test_long_paths_where_neighbours_part_exponentially():
    """Twenty units in curvature -1/2: a single shot would multiply an error at its start by e^14, a million."""
    problem = half_plane("far", Normal, 1.0, 2.0)
    a = torch.tensor([[0.0, 0.01]], dtype=DOUBLE)
    b = torch.tensor([[20.0, 0.01]], dtype=DOUBLE)
    t = torch.linspace(0, 1, 129, dtype=DOUBLE)
    exact = problem.path(a, b, t)
    nodes = exact * (1 + 1e-3 * torch.sin(torch.pi * t)[:, None])
    shots = shoot(problem.metric, nodes)
    assert problem.distance(a, b) > 20
    assert shots.converged.all()
    torch.testing.assert_close(shots.length, problem.distance(a, b), rtol=1e-10, atol=0)


def test_unused_dimension():
    """With a singular metric the polished curve is straight in the direction the decoder ignores."""
    metric = pb.FisherRaoMetric(lambda z: SPHERE.metric.decoder(z[..., :2]))
    a, b = pairs(SPHERE, 1)
    nodes = torch.cat([rough(SPHERE, a, b, 1e-3), torch.linspace(0, 1, 33, dtype=DOUBLE)[None, :, None] ** 2], -1)
    shots = shoot(metric, nodes)
    assert shots.converged.all()
    torch.testing.assert_close(shots.length, SPHERE.distance(a, b), rtol=1e-10, atol=0)
    torch.testing.assert_close(shots.velocity[:, 2], torch.ones(1, dtype=DOUBLE), rtol=1e-9, atol=0)


def test_batch_equals_loop():
    a, b = pairs(NORMAL, 2)
    nodes = rough(NORMAL, a, b, 1e-2)
    together = shoot(NORMAL.metric, nodes)
    alone = shoot(NORMAL.metric, nodes[1:])
    torch.testing.assert_close(together.nodes[1:], alone.nodes, rtol=1e-11, atol=1e-11)


def test_solver_polishes_what_another_found():
    a, b = pairs(NORMAL)
    nodes = rough(NORMAL, a, b, 1e-3)
    found = Given(nodes, NORMAL.distance(a, b) * 1.0001).solve(NORMAL.metric, nodes)
    solution = Shooting(first=Given(found.nodes, found.length)).solve(NORMAL.metric, nodes)
    assert (solution.status == Status.CONVERGED).all()
    torch.testing.assert_close(solution.length, NORMAL.distance(a, b), rtol=1e-10, atol=0)
    torch.testing.assert_close(solution.energy, solution.length**2, rtol=1e-15, atol=0)
    assert (solution.error <= 1e-11).all()
    assert (solution.num_steps > found.num_steps).all()
    assert solution.num_calls > found.num_calls
    assert solution.num_decoded > found.num_decoded


def test_default_solver_and_shooting_from_a_pair_of_codes():
    a, b = pairs(SPHERE)
    path = pb.geodesic(SPHERE.metric, a, b, solver=Shooting())
    assert path.converged.all()
    torch.testing.assert_close(path.length, SPHERE.distance(a, b), rtol=1e-10, atol=0)


def test_longer_geodesics_are_not_taken():
    """A great circle the long way round is a geodesic too, but not the one that was asked for."""
    a, b = pairs(SPHERE, 1)
    nodes = rough(SPHERE, a, b, 1e-3)
    first = Given(nodes, 0.5 * SPHERE.distance(a, b))
    solution = Shooting(first=first).solve(SPHERE.metric, nodes)
    assert solution.status.item() == Status.STALLED
    torch.testing.assert_close(solution.nodes, nodes, rtol=0, atol=0)


def test_a_path_that_cannot_be_polished_keeps_what_was_found_and_says_so():
    """Where the decoder is NaN there is no geodesic equation; the neighbour in the batch is polished all the same."""

    def decoder(z: Tensor) -> Normal:
        p = SPHERE.metric.decoder(z)
        return Normal(torch.where(z[..., :1] > 5, torch.nan, p.loc), p.scale, validate_args=False)

    metric = pb.FisherRaoMetric(decoder)
    a, b = pairs(SPHERE, 1)
    nodes = rough(SPHERE, a, b, 1e-3)
    lost = nodes + torch.tensor([9.0, 0.0], dtype=DOUBLE)
    broken = torch.where(torch.arange(33)[:, None] == 10, torch.nan, nodes)
    paths = torch.cat([nodes, lost, broken])
    solution = Shooting(first=Given(paths, SPHERE.distance(a, b).repeat(3))).solve(metric, paths)
    assert solution.status.tolist() == [Status.CONVERGED, Status.STALLED, Status.CONVERGED]
    torch.testing.assert_close(solution.length[:1], SPHERE.distance(a, b), rtol=1e-10, atol=0)
    torch.testing.assert_close(solution.nodes[1:], paths[1:], rtol=0, atol=0, equal_nan=True)


def test_step_limit_is_reported():
    a, b = pairs(NORMAL, 1)
    nodes = rough(NORMAL, a, b, 0.1)
    solution = Shooting(first=Given(nodes, NORMAL.distance(a, b)), max_steps=1).solve(NORMAL.metric, nodes)
    assert solution.status.item() == Status.MAX_STEPS
    torch.testing.assert_close(solution.nodes, nodes, rtol=0, atol=0)


def test_single_precision():
    a, b = pairs(SPHERE)
    shots = shoot(SPHERE.metric, rough(SPHERE, a, b, 1e-2).float(), rtol=1e-4)
    assert shots.nodes.dtype == torch.float32
    assert shots.converged.all()
    torch.testing.assert_close(shots.length.double(), SPHERE.distance(a, b), rtol=1e-4, atol=0)
