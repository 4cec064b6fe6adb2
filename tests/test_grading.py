"""Charts that run away: a direction the decoder hardly uses is crossed in no time, and the length is still right."""

import math

import pytest
import torch
from torch.distributions import Independent, Normal

import pullback as pb

DOUBLE = torch.float64
FRAME = torch.linalg.qr(torch.randn(600, 2, dtype=DOUBLE, generator=torch.Generator().manual_seed(0))).Q


def stretched(steepness: float):
    """A flat plane in a chart that runs away: ``z = (x, sinh(steepness y))``."""

    def decoder(z):
        y = torch.asinh(z[..., 1]) / steepness
        return Independent(Normal(torch.stack([z[..., 0], y], -1) @ FRAME.mT, 1.0), 1)

    return pb.FisherRaoMetric(decoder)


def chart(points, steepness):
    return torch.stack([points[..., 0], torch.sinh(steepness * points[..., 1])], -1)


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
