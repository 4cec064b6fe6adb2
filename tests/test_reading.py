"""Readings: the metric gains DgᵀDg, paths go around what they must not cross."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributions import Bernoulli, Normal

import pullback as pb
from pullback.testing import check_metric

F64 = torch.float64


def smooth(z: torch.Tensor, _p: object) -> torch.Tensor:
    return torch.stack([z.prod(-1), z[..., 0].sin()], -1)


def decoder() -> object:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 5)).double().requires_grad_(False)
    return lambda z: Bernoulli(logits=net(z))


def test_the_metric_gains_the_square_of_the_derivative():
    plain, z = decoder(), torch.randn(5, 2, dtype=F64)
    J = torch.func.vmap(torch.func.jacrev(lambda x: smooth(x, None)))(z)
    total = pb.FisherRaoMetric(pb.WithReading(plain, smooth)).tensor(z)
    torch.testing.assert_close(total, pb.FisherRaoMetric(plain).tensor(z) + J.mT @ J)
    check_metric(pb.FisherRaoMetric(pb.WithReading(plain, smooth)), z)


def test_a_reading_of_what_is_decoded():
    """Reading the mean of a unit Normal doubles its information."""

    def plain(z):
        return Normal(z**3, 1.0)

    z = torch.randn(4, 2, dtype=F64)
    doubled = pb.FisherRaoMetric(pb.WithReading(plain, lambda z, p: p.mean)).tensor(z)
    bare = torch.diag_embed((3 * z**2) ** 2)
    euclid = pb.EuclideanMetric(plain).tensor(z)
    torch.testing.assert_close(euclid, bare)
    torch.testing.assert_close(doubled, 2 * bare)


def test_a_steep_reading_is_an_obstacle():
    """Around a disk of radius 1 the shortest way has a length between the tangent-arc-tangent path and a little
    more."""

    def wall(z, _p):
        return 20 * torch.sigmoid(20 * (1 - z.norm(dim=-1)))

    metric = pb.FisherRaoMetric(pb.WithReading(lambda z: pb.WithPrior(lambda y: Normal(y, 1.0)).channel(z), wall))
    a, b = torch.tensor([-2.0, 0.01], dtype=F64), torch.tensor([2.0, 0.01], dtype=F64)
    path = pb.geodesic(metric, a, b)
    assert path.curve.resample(200).norm(dim=-1).min() > 0.95
    taut = 2 * (3**0.5) + torch.pi - 2 * torch.acos(torch.tensor(0.5))
    assert 0.97 * taut < path.length < 1.15 * taut


def test_a_reading_of_another_shape_gets_a_sentence():
    metric = pb.FisherRaoMetric(pb.WithReading(decoder(), lambda z, p: z.sum()))
    with pytest.raises(pb.DecoderError, match="one number or one vector per code"):
        metric.tensor(torch.zeros(3, 2, dtype=F64))
