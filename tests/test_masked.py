"""Missing entries: silent features add nothing, and the rest is as if they were not there."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributions import Bernoulli, Independent, Normal, Poisson

import pullback as pb
from helpers import network
from pullback.testing import check_metric

F64 = torch.float64
SEEN = torch.tensor([True, False, True, True, False, True])


FAMILIES = {
    "Bernoulli": lambda h: Bernoulli(logits=h),
    "Normal": lambda h: Normal(h, nn.functional.softplus(h + 1)),
    "Poisson": lambda h: Poisson(h.exp()),
    "Independent": lambda h: Independent(Normal(h, 1.0), 1),
    "Product": lambda h: pb.Product(Bernoulli(logits=h[..., :2]), Poisson(h[..., 2:].exp())),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_silent_features_are_as_if_they_were_not_there(family):
    net, make, z = network(2, 8, 6), FAMILIES[family], torch.randn(5, 2, dtype=F64)
    masked = pb.FisherRaoMetric(lambda z: pb.masked(make(net(z)), SEEN))
    check_metric(masked, z)
    if family == "Product":
        left = pb.FisherRaoMetric(lambda z: make(net(z)[..., [0, 0, 2, 3, 5]]))
        expected = left.tensor(z) - pb.FisherRaoMetric(lambda z: Bernoulli(logits=net(z)[..., :1])).tensor(z)
    else:
        expected = pb.FisherRaoMetric(lambda z: make(net(z)[..., SEEN])).tensor(z)
    torch.testing.assert_close(masked.tensor(z), expected)
    torch.testing.assert_close(
        pb.divergences.kl(*(pb.masked(make(net(z)), SEEN) for _ in "ab")).sum(), torch.zeros((), dtype=F64)
    )


def test_paths_agree_with_those_of_the_features_seen():
    net, a, b = network(2, 8, 6), *torch.randn(2, 4, 2, dtype=F64)
    masked = pb.FisherRaoMetric(lambda z: pb.masked(Bernoulli(logits=net(z)), SEEN))
    chosen = pb.FisherRaoMetric(lambda z: Bernoulli(logits=net(z)[..., SEEN]))
    torch.testing.assert_close(pb.distance(masked, a, b), pb.distance(chosen, a, b), rtol=1e-5, atol=0)


def test_each_code_may_have_its_own_mask():
    net, z = network(2, 8, 6), torch.randn(3, 2, dtype=F64)
    masks = torch.rand(3, 6) < 0.5
    together = pb.fisher(pb.masked(Bernoulli(logits=net(z)), masks)).matrix
    for k in range(3):
        alone = pb.fisher(pb.masked(Bernoulli(logits=net(z[k])), masks[k])).matrix
        torch.testing.assert_close(together[k], alone)


def test_missing_values_do_not_count():
    p = FAMILIES["Product"](torch.zeros(4, 6))
    seen = torch.tensor([[True, False], [False, True]]).repeat(2, 3)
    x = torch.ones(4, 6).masked_fill(~seen, torch.nan)
    value = pb.masked(p, seen).log_prob((x[:, :2], x[:, 2:]))
    one, none = (
        Bernoulli(logits=torch.tensor(0.0)).log_prob(torch.tensor(1.0)),
        Poisson(1.0).log_prob(torch.tensor(1.0)),
    )
    torch.testing.assert_close(value, (one + 2 * none).expand(4))


def test_masks_of_other_shapes_get_a_sentence():
    with pytest.raises(ValueError, match="does not fit the 6 features of this Product"):
        pb.masked(FAMILIES["Product"](torch.zeros(4, 6)), torch.ones(5))
    with pytest.raises(ValueError, match="does not fit features of shape"):
        pb.masked(Bernoulli(logits=torch.zeros(4, 6)), torch.ones(5))
