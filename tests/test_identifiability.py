"""Distances over retrained models: what does not depend on coordinates does not vary, and what does varies as computed
by hand."""

from __future__ import annotations

import pytest
import torch
from torch.distributions import Normal

import pullback as pb


def decoder(z):
    return Normal(torch.stack([z[..., 0], z[..., 1], (z**2).sum(-1)], -1), 1.0)


def warp(z):
    """A reparametrization of the plane."""
    return torch.stack([2 * z[..., 0], z[..., 1] + z[..., 0] ** 2], -1)


def unwarp(w):
    return torch.stack([w[..., 0] / 2, w[..., 1] - (w[..., 0] / 2) ** 2], -1)


@pytest.fixture
def codes():
    return torch.randn(12, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def test_distances_do_not_depend_on_coordinates(codes):
    metrics = [pb.FisherRaoMetric(decoder), pb.FisherRaoMetric(lambda w: decoder(unwarp(w)))]
    pulled = pb.statistics.identifiability(metrics, [codes, warp(codes)], num_pairs=6)
    euclidean = pb.statistics.identifiability(None, [codes, warp(codes)], num_pairs=6)
    assert pulled.converged.all()
    assert pulled.variation.max() < 1e-4
    assert euclidean.variation.mean() > 0.1
    assert torch.equal(pulled.pairs, euclidean.pairs)
    assert (pulled.pairs[:, 0] != pulled.pairs[:, 1]).all()


def test_variation_is_the_standard_deviation_over_the_mean(codes):
    scales = torch.tensor([1.0, 2.0, 6.0], dtype=torch.float64)
    found = pb.statistics.identifiability(None, [scale * codes for scale in scales], num_pairs=5)
    torch.testing.assert_close(found.variation, (scales.std() / scales.mean()).expand(5))
    same = pb.statistics.identifiability(None, [scale * codes for scale in scales], num_pairs=5, normalize=True)
    assert same.variation.max() < 1e-12


def test_graphs_are_made_by_the_caller_if_asked(codes):
    metrics = [pb.FisherRaoMetric(lambda z: Normal(z, 1.0))] * 2
    made = []

    def graph(metric, z):
        made.append(metric)
        return pb.Lattice.fit(metric, z, num_nodes=100)

    found = pb.statistics.identifiability(metrics, [codes, codes], num_pairs=3, init=graph)
    assert len(made) == 2
    a, b = codes[found.pairs].unbind(1)
    torch.testing.assert_close(found.distances, (b - a).norm(dim=-1).expand(2, -1), rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("num_metrics", "sizes", "message"),
    [(2, (5, 6), "same observations"), (1, (5, 5), "one of each"), (1, (5,), "two models")],
)
def test_models_that_cannot_be_compared_are_refused(num_metrics, sizes, message):
    metrics = [pb.FisherRaoMetric(decoder)] * num_metrics
    with pytest.raises(ValueError, match=message):
        pb.statistics.identifiability(metrics, [torch.zeros(n, 2) for n in sizes])
