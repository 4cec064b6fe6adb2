"""What is called converged is a minimum, and as long as claimed: where chords see too little, where symmetry holds a
path on a saddle, and where a descent creeps."""

import pytest
import torch
from torch import nn
from torch.distributions import Cauchy, Gamma, Gumbel, Laplace, Normal

import pullback as pb

DOUBLE = torch.float64


def bumps(height: float, width: float, *places: float):
    """A plane that is lifted around places on its first axis."""
    centers = torch.tensor([[x, 0.0] for x in places], dtype=DOUBLE)

    def decoder(z):
        square = (z[..., None, :] - centers).square().sum(-1)
        return Normal(torch.cat([z, height * torch.exp(-square / (2 * width**2))], -1), 1.0)

    return pb.FisherRaoMetric(decoder)


def on_axis(left: float, right: float):
    return torch.tensor([[left, 0.0], [right, 0.0]], dtype=DOUBLE)


@pytest.mark.parametrize(("height", "width", "end"), [(0.2, 0.35, 2.0625), (0.3, 0.5, 2.0)])
def test_a_level_that_saw_too_little_is_measured_again(height, width, end):
    """Coarse chords see less of two bumps than there is. A path on them is not kept for it, up to the finest level."""
    metric = bumps(height, width, -1.0, 1.0)
    path = pb.geodesic(metric, *on_axis(-end, end))
    length = pb.length(metric, path.curve, num_segments=8192, extrapolate=True)
    assert path.converged
    assert (path.length - length).abs() <= 3 * path.error * length
    assert path.num_segments < 1024


@pytest.mark.parametrize(("height", "width", "ends"), [(3.0, 0.1, (-1.4, 1.4)), (0.5, 0.05, (-1.4, 1.4))])
def test_saddles_over_bumps_that_no_segment_sees_are_left(height, width, ends):
    """Straight over a narrow bump is stationary by symmetry, and found in pieces, which have no Hessian."""
    metric, (a, b) = bumps(height, width, 0.0), on_axis(*ends)
    straight = pb.geodesic(metric, a, b)
    t = torch.linspace(0, 1, 257, dtype=DOUBLE)[:, None]
    beside = torch.lerp(a, b, t) + 1e-3 * torch.sin(torch.pi * t) * torch.tensor([0.0, 1.0], dtype=DOUBLE)
    moved = pb.geodesic(metric, a, b, init=beside)
    assert straight.converged
    assert straight.length <= moved.length * (1 + 1e-5)
    assert pb.certify(metric, straight).strict


def test_saddles_of_a_decoder_that_sees_a_square_are_left():
    """It is even in the second coordinate, and curved most along single nodes: a step there is too long, where smooth
    ones beside the axis are not."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 6)).double().requires_grad_(False)

    def decoder(z):
        y = 2 * net(torch.stack([z[..., 0], z[..., 1] ** 2], -1))
        return pb.Product(Gamma(y[..., :3].exp(), y[..., 3:].exp()), Normal(0.01 * z[..., 1:], 1.0))

    metric = pb.FisherRaoMetric(decoder)
    ends = [2 * torch.randn(10, dtype=DOUBLE, generator=torch.Generator().manual_seed(seed)) for seed in (0, 9)]
    a, b = (torch.stack([x, 0 * x], -1) for x in ends)
    path = pb.geodesic(metric, a, b)
    t = torch.linspace(0, 1, 257, dtype=DOUBLE)
    kick = path.curve.resample(257)
    kick[..., 1] += 1e-2 * (a - b).norm(dim=-1)[:, None] * torch.sin(torch.pi * t)
    beside = pb.length(metric, pb.CubicSpline(kick), num_segments=4096)
    assert path.converged.sum() >= 4
    assert (beside >= path.length * (1 - 3 * path.error))[path.converged].all()


def test_a_soft_saddle_is_no_minimum_of_seven_digits():
    """A coarse level took it for a minimum, to fewer digits than are claimed."""
    metric = bumps(0.3, 0.5, 0.0)
    path = pb.geodesic(metric, *on_axis(-3.0, 3.9))
    again = pb.geodesic(metric, *on_axis(-3.0, 3.9), init=path.curve)
    assert path.length - again.length <= 3 * path.error * path.length


FAR = [
    (Cauchy, 1.0, (-32.06484533090408, -10.005558043957475), (38.75337623198432, 0.09128946873678767)),
    (Normal, 0.1, (7.791499177961163, -55.35361187238777), (-11.416868040413393, -137.11921986801096)),
    (Normal, 0.3, (-176.59642373814685, -1.6652182841366723), (31.579677195946644, -29.210119863824904)),
    (Laplace, 0.3, (7.791499177961163, -18.451203957462592), (-11.416868040413393, -45.70640662267032)),
    (Gumbel, 0.1, (7.791499177961163, -55.35361187238777), (-11.416868040413393, -137.11921986801096)),
]


@pytest.mark.parametrize(("family", "rate", "a", "b"), FAR)
def test_descents_that_creep_have_not_converged(family, rate, a, b):
    """The half-plane in (mu, log sigma) where scales differ by ten orders: right to three claims, or not converged."""
    metric = pb.FisherRaoMetric(lambda z: family(z[..., 0], (rate * z[..., 1]).exp()))
    a, b = torch.tensor([a, b], dtype=DOUBLE)
    path = pb.geodesic(metric, a, b)
    truth = pb.rao_distance(metric.decoder(a), metric.decoder(b))
    assert not path.converged or (path.length - truth).abs() <= 3 * path.error * truth
