"""Ensembles: averages of members by independent routes, and disagreement that becomes length."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Bernoulli, Distribution, Gamma, Normal
from torch.nn.functional import softplus

import pullback as pb
from pullback.testing import check_metric

F64 = torch.float64


class Member(nn.Module):
    """A small random decoder."""

    def __init__(self, seed: int, family: str = "bernoulli"):
        super().__init__()
        torch.manual_seed(seed)
        self.family = family
        self.net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 6)).double()

    def forward(self, z: Tensor) -> Distribution:
        first, second = self.net(z).chunk(2, -1)
        if self.family == "bernoulli":
            return Bernoulli(logits=3 * first)
        if self.family == "normal":
            return Normal(first, softplus(second))
        return Gamma(softplus(first) + 0.5, softplus(second) + 0.5)


def ensemble(family: str = "bernoulli", num: int = 3) -> pb.EnsembleDecoder:
    return pb.EnsembleDecoder([Member(seed, family).requires_grad_(False) for seed in range(num)])


each_family = pytest.mark.parametrize("family", ["bernoulli", "normal", "gamma"])
Z = torch.randn(6, 2, generator=torch.Generator().manual_seed(0), dtype=F64)


def test_average_of_bernoulli_members_is_their_mixture():
    decoder = ensemble(num=5)
    mixture = torch.stack([member(Z).mean for member in decoder.members]).mean(0)
    torch.testing.assert_close(decoder(Z).mean, mixture)


def test_average_is_linear_in_the_parameters():
    decoder = ensemble("normal", num=4)
    for name in ("loc", "scale"):
        expected = torch.stack([getattr(member(Z), name) for member in decoder.members]).mean(0)
        torch.testing.assert_close(getattr(decoder(Z), name), expected)


@each_family
@pytest.mark.parametrize("correlation_length", [0.5, math.inf])
def test_obeys_the_laws_of_metrics(family: str, correlation_length: float):
    check_metric(pb.EnsembleMetric(ensemble(family), correlation_length), Z)


@each_family
def test_one_member_for_the_whole_curve_gives_the_average_metric(family: str):
    decoder = ensemble(family)
    members = [pb.FisherRaoMetric(member) for member in decoder.members]
    metric = pb.EnsembleMetric(decoder, math.inf)
    torch.testing.assert_close(metric.tensor(Z), torch.stack([m.tensor(Z) for m in members]).mean(0))
    assert (metric.log_volume(Z) > -math.inf).all()


@each_family
def test_disagreement_is_the_mean_over_pairs(family: str):
    """Written out over all ordered pairs of members, a member with itself included."""
    decoder = ensemble(family)
    squares = [torch.zeros(len(Z), dtype=F64)]
    for p, q in product(decoder.each(Z), repeat=2):
        first, second = pb.embed(p), pb.embed(q)
        squares.append(((second[0] - first[0]) * (second[1] - first[1])).flatten(1).sum(-1))
    expected = torch.stack(squares).sum(0) / 9
    torch.testing.assert_close(pb.EnsembleMetric(decoder, 1.0).disagreement(Z), expected)


def test_energy_is_that_of_members_drawn_at_random():
    """A curve cut at the correlation length, each node decoded by a random member: the mean energy over draws (Syrota
    et al. 2024) is the curve's energy under the metric, up to the cut."""
    decoder, num = ensemble(num=4), 40
    a, b = torch.tensor([[-1.0, -0.5], [1.0, 0.6]], dtype=F64)
    nodes = torch.lerp(a, b, torch.linspace(0, 1, num + 1, dtype=F64)[:, None])
    spacing = ((b - a).norm() / num).item()
    phi = torch.stack([pb.embed(p)[0].flatten(1) for p in decoder.each(nodes)])
    draws = torch.randint(4, (20_000, num + 1))
    walks = phi[draws, torch.arange(num + 1)]
    energies = num * walks.diff(dim=1).square().sum((-2, -1))
    metric = pb.EnsembleMetric(decoder, spacing)
    expected = num * metric.ds2(nodes[:-1], nodes[1:]).sum()
    error = energies.std() / len(draws) ** 0.5
    assert abs(energies.mean() - expected) < 5 * error
    assert pb.EnsembleMetric(decoder, math.inf).ds2(nodes[:-1], nodes[1:]).sum() * num < 0.5 * expected


def test_constant_disagreement_is_length():
    """Two members that differ by an offset c everywhere: M = 1 + c²/(2 ε²)."""
    decoder = pb.EnsembleDecoder(
        [lambda z: Normal(z, torch.ones_like(z)), lambda z: Normal(z + 3.0, torch.ones_like(z))]
    )
    M = pb.EnsembleMetric(decoder, 2.0).tensor(Z)
    expected = (1 + 0.5 * 2 * 9 / 4) * torch.eye(2, dtype=F64)
    torch.testing.assert_close(M, expected.expand_as(M))


def test_equal_members_are_one_decoder():
    member = Member(0).requires_grad_(False)
    decoder = pb.EnsembleDecoder([member, member])
    metric, single = pb.EnsembleMetric(decoder, 0.1), pb.FisherRaoMetric(member)
    torch.testing.assert_close(metric.tensor(Z), single.tensor(Z))
    torch.testing.assert_close(metric.ds2(Z, Z + 0.1), single.ds2(Z, Z + 0.1))


def test_is_a_module():
    decoder = ensemble(num=2)
    assert {"member_0.net.0.weight", "member_1.net.0.weight"} <= set(decoder.state_dict())
    assert decoder.float()(Z.float()).mean.dtype == torch.float32


def test_refuses_ensembles_of_one():
    with pytest.raises(ValueError, match="at least two decoders to disagree; got 1"):
        pb.EnsembleDecoder([Member(0)])
    with pytest.raises(ValueError, match=r"correlation_length is 0; it must be positive.*Support\.fit"):
        pb.EnsembleMetric(ensemble(), 0)
