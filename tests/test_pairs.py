"""Dual embeddings as functions of coordinates: what the solver takes instead of differentiating the embedding."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.distributions import Cauchy, Gumbel, Independent, Laplace, LogNormal, Normal, Weibull

import pullback as pb
from pullback._metrics.base import Metric

FAMILIES = {
    "normal": lambda m, s: Normal(m, s),
    "lognormal": lambda m, s: LogNormal(m, s),
    "laplace": lambda m, s: Laplace(m, s),
    "cauchy": lambda m, s: Cauchy(m, s),
    "gumbel": lambda m, s: Gumbel(m, s),
    "weibull": lambda m, s: Weibull((0.3 * m).exp(), 1 / s),
}


@pytest.fixture
def metrics(request):
    """The metric of one family: bare, and with the prior."""
    weights = torch.randn(3, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def decoder(z):
        loc, scale = (torch.tanh(z) @ weights).chunk(2, -1)
        return Independent(FAMILIES[request.param](loc, torch.nn.functional.softplus(scale) + 0.1), 1)

    return pb.FisherRaoMetric(decoder), pb.FisherRaoMetric(pb.WithPrior(decoder))


@pytest.mark.parametrize("metrics", FAMILIES, indirect=True)
def test_frames_are_the_derivatives_of_the_embedding(metrics):
    z = torch.randn(4, 5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    origin = z[:, :1]
    for metric in metrics:
        found, known = metric.frame_at(z, origin=origin), Metric.frame_at(metric, z, origin=origin)
        for x, y in zip((*found.values, *found.tangents), (*known.values, *known.tangents), strict=True):
            torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("metrics", FAMILIES, indirect=True)
def test_an_origin_changes_no_chord(metrics):
    a, b = torch.randn(2, 6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    for metric in metrics:
        chords = []
        for origin in (None, a[:1]):
            first, second = metric.embed(a, origin=origin), metric.embed(b, origin=origin)
            chords.append(((second[0] - first[0]) * (second[1] - first[1])).sum(-1))
        torch.testing.assert_close(chords[0], chords[1], rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(chords[1], metric.ds2(a, b), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("metrics", FAMILIES, indirect=True)
def test_roots_and_slopes_are_those_of_the_pair(metrics):
    """What the solver multiplies instead of the pair's Jacobians: one map whose products are the metric tensor, and
    forces pulled back through the coordinates."""
    generator = torch.Generator().manual_seed(4)
    z = torch.randn(4, 5, 3, dtype=torch.float64, generator=generator)
    for metric in metrics:
        frame = metric.frame_at(z, origin=z[:, :1])
        tensors = [torch.einsum("ibnf,jbnf->bnij", root, root) for (root,) in frame.roots]
        torch.testing.assert_close(sum(tensors), metric.tensor(z))
        forces = [torch.randn(x.shape, dtype=x.dtype, generator=generator) for x in frame.values]
        products = [torch.einsum("ibnf,bnf->bni", J, f) for J, f in zip(frame.tangents, forces, strict=True)]
        torch.testing.assert_close(frame.slopes(forces), products[0] + products[1])


@pytest.mark.parametrize("metrics", FAMILIES, indirect=True)
@pytest.mark.parametrize("d", [3, 5])
def test_blocks_between_nodes_are_those_of_the_pair(metrics, d):
    """With five dimensions they go by the two coordinates of the family, with three by the codes."""
    z = torch.randn(4, 5, d, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    wide = torch.randn(d, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(6))
    for metric in (pb.FisherRaoMetric(lambda z: metrics[0].decoder(z @ wide)), metrics[1]):
        if metric is metrics[1] and d != 3:
            continue
        frame = metric.frame_at(z, origin=z[:, :1])
        phi, psi = (J.movedim(0, -2) for J in frame.tangents)
        expected = phi[:, :-1] @ psi[:, 1:].mT + psi[:, :-1] @ phi[:, 1:].mT
        torch.testing.assert_close(frame.between, expected)
        forces = [torch.randn(x.shape, dtype=x.dtype) for x in frame.values]
        torch.testing.assert_close(frame.hessians(forces), replace(frame, parts=()).hessians(forces))


def test_the_frame_is_the_metric_tensor():
    metric = pb.FisherRaoMetric(lambda z: Normal(z[..., 0], z[..., 1].exp()))
    z = torch.randn(7, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    phi, psi = metric.frame_at(z, origin=z[:1]).tangents
    torch.testing.assert_close(torch.einsum("inf,jnf->nij", phi, psi), metric.tensor(z))
