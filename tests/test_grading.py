"""Nodes placed at will: a graded path is the same curve, and its times make the discrete energy the squared length."""

import math

import pytest
import torch
from torch.distributions import Independent, Normal

import pullback as pb
from pullback._solvers.discrete import DiscreteEnergy
from pullback._solvers.grading import even, grade, uneven

DOUBLE = torch.float64
FRAME = torch.linalg.qr(torch.randn(600, 2, dtype=DOUBLE, generator=torch.Generator().manual_seed(0))).Q


def stretched(steepness: float):
    """A flat plane in a chart that runs away: ``z = (x, sinh(steepness y))``; wide enough to be graded."""

    def decoder(z):
        y = torch.asinh(z[..., 1]) / steepness
        return Independent(Normal(torch.stack([z[..., 0], y], -1) @ FRAME.mT, 1.0), 1)

    return pb.FisherRaoMetric(decoder)


def chart(points, steepness):
    return torch.stack([points[..., 0], torch.sinh(steepness * points[..., 1])], -1)


def start(steepness=6.0, num_segments=128):
    y = torch.linspace(-1, 1, num_segments + 1, dtype=DOUBLE)
    return chart(torch.stack([0.3 * y, y], -1), steepness)[None]


def discrete(nodes, steepness=6.0):
    return DiscreteEnergy.of(stretched(steepness), nodes)


def test_constant_speed_is_uneven_in_a_chart_that_runs_away():
    assert uneven(start()).all()
    assert not uneven(torch.linspace(0, 1, 9, dtype=DOUBLE)[None, :, None] * torch.ones(3, dtype=DOUBLE)).any()


def test_times_make_the_energy_the_squared_length():
    problem = discrete(start())
    nodes, times = grade(problem, start(), 64)
    assert times.shape == (1, 64)
    torch.testing.assert_close(times.sum(-1), torch.ones(1, dtype=DOUBLE))
    length = problem.chords(nodes)[0].sqrt().sum(-1)
    torch.testing.assert_close(problem.energy(nodes, times), length.square(), rtol=1e-3, atol=0)
    assert problem.energy(nodes) > 1.2 * length.square()  # what equal times would make of these nodes


def test_graded_nodes_lie_on_the_path_and_have_shorter_longest_steps():
    nodes, _ = grade(discrete(start()), start(), 64)
    steps = [x.diff(dim=1).norm(dim=-1) for x in (nodes, start(num_segments=64))]
    assert steps[0].amax() < 0.5 * steps[1].amax()
    y = torch.asinh(nodes[..., 1]) / 6.0
    torch.testing.assert_close(nodes[..., 0], 0.3 * y, rtol=0, atol=1e-5)


def test_even_undoes_grading():
    problem = discrete(start())
    nodes, _ = grade(problem, start(), 128)
    speeds = problem.chords(even(problem, nodes, 128))[0].sqrt()
    torch.testing.assert_close(speeds, speeds.mean(-1, keepdim=True).expand_as(speeds), rtol=1e-3, atol=0)


@pytest.mark.parametrize("steepness", [2.0, 6.0, 10.0])
def test_flat_lengths_in_a_chart_that_runs_away(steepness):
    ends = torch.tensor([[-0.4, -0.9], [0.5, 0.8]], dtype=DOUBLE)
    path = pb.geodesic(stretched(steepness), *chart(ends, steepness))
    exact = (ends[1] - ends[0]).norm().item()
    assert path.converged
    assert math.isclose(path.length.item(), exact, rel_tol=1e-3)
    assert abs(path.length.item() / exact - 1) <= path.error.item() + 1e-9
    assert math.isclose(pb.length(stretched(steepness), path.curve, num_segments=2000).item(), exact, rel_tol=2e-3)


def test_flat_lengths_to_the_tolerance_asked_for():
    ends = torch.tensor([[-0.4, -0.5], [0.5, 0.6]], dtype=DOUBLE)
    path = pb.geodesic(stretched(6.0), *chart(ends, 6.0), solver=pb.GaussNewton(rtol=1e-6))
    assert path.converged
    assert math.isclose(path.length.item(), (ends[1] - ends[0]).norm().item(), rel_tol=1e-6)
