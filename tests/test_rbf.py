"""A standard deviation that grows away from the data by construction, before and after training."""

from __future__ import annotations

import pytest
import torch
from torch.distributions import Normal

import pullback as pb
from helpers import ring, support_at

F64 = torch.float64


def test_is_the_reciprocal_of_a_sum_of_bumps():
    """One center, written out: σ = a (w exp(-|z - c|²/2h²) + ε)⁻¹, with w = 1 at the start."""
    support = support_at(torch.tensor([[1.0, 2.0]], dtype=F64), scale=0.7)
    sigma = pb.RBFPrecision(support, 3, scale=0.4, ceiling=50.0)
    z = torch.randn(2, 5, 2, dtype=F64)
    bump = torch.exp(-0.5 * (z - support.centers).square().sum(-1) / 0.7**2)
    expected = (0.4 / (bump + 1 / 50))[..., None].expand(2, 5, 3)
    torch.testing.assert_close(sigma(z), expected)


def test_starts_at_the_scale_on_the_data_and_rises_to_the_ceiling():
    codes = ring()
    sigma = pb.RBFPrecision(pb.Support.fit(codes), 4, scale=0.3, ceiling=100.0)
    assert sigma(codes).median().item() == pytest.approx(0.3, rel=0.1)
    torch.testing.assert_close(sigma(torch.full((1, 2), 50.0, dtype=F64)), torch.full((1, 4), 30.0, dtype=F64))
    radii = torch.linspace(3.3, 12, 60, dtype=F64)
    outwards = sigma(torch.stack([radii, torch.zeros_like(radii)], -1))
    assert (outwards.diff(dim=0) >= 0).all()


def test_learns_the_noise_and_keeps_growing_off_the_data():
    """Maximum likelihood finds the noise of each feature on the data; far away the ceiling's ratio to it remains."""
    codes = ring(2000)
    true = torch.tensor([0.05, 0.2, 1.0], dtype=F64)
    residuals = true * torch.randn(2000, 3, dtype=F64)
    sigma = pb.RBFPrecision(pb.Support.fit(codes), 3)
    optimizer = torch.optim.Adam(sigma.parameters(), lr=0.1)
    for _ in range(200):
        optimizer.zero_grad()
        loss = -Normal(0.0, sigma(codes)).log_prob(residuals).sum(-1).mean()
        loss.backward()
        optimizer.step()
    learned = sigma(codes).detach().median(0).values
    torch.testing.assert_close(learned, true, rtol=0.15, atol=0)
    far = sigma(torch.full((1, 2), 50.0, dtype=F64)).detach()[0]
    assert (far > 20 * learned).all()


def test_gives_a_geometry_that_grows_at_the_edge_of_the_data():
    """As the noise of a Gaussian decoder it makes the way out of the data long: √2 log(σ_far/σ_data) for each
    feature."""
    sigma = pb.RBFPrecision(pb.Support.fit(ring()), 5, ceiling=100.0).requires_grad_(False)
    metric = pb.FisherRaoMetric(lambda z: Normal(torch.zeros(*z.shape[:-1], 5, dtype=F64), sigma(z)))
    way = torch.stack([torch.linspace(3, 40, 4000, dtype=F64), torch.zeros(4000, dtype=F64)], -1)
    ratio = sigma(way[-1:]) / sigma(way[:1])
    expected = (2 * ratio.log().square().sum()).sqrt()
    assert pb.length(metric, pb.Polyline(way)).item() == pytest.approx(expected.item(), rel=1e-3)


def test_refuses_a_ceiling_that_does_not_grow():
    with pytest.raises(ValueError, match=r"ceiling is 1\.0; it must be above 1"):
        pb.RBFPrecision(pb.Support.fit(ring()), 2, ceiling=1.0)
