"""How families become uncertain, and the paper's reweighting built on it."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.distributions import (
    AffineTransform,
    Bernoulli,
    Beta,
    Binomial,
    Categorical,
    Cauchy,
    Chi2,
    ContinuousBernoulli,
    Dirichlet,
    Distribution,
    Exponential,
    FisherSnedecor,
    Gamma,
    Geometric,
    Gumbel,
    HalfCauchy,
    HalfNormal,
    Independent,
    InverseGamma,
    Kumaraswamy,
    Laplace,
    LogNormal,
    LowRankMultivariateNormal,
    MixtureSameFamily,
    Multinomial,
    MultivariateNormal,
    NegativeBinomial,
    Normal,
    OneHotCategorical,
    Pareto,
    Poisson,
    StudentT,
    TransformedDistribution,
    VonMises,
    Weibull,
)
from torch.nn.functional import normalize

import pullback as pb
from helpers import ring

F64 = torch.float64
G = torch.Generator().manual_seed(0)


def real(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=G, dtype=F64)


def positive(*shape: int) -> Tensor:
    return real(*shape).exp()


def weights(*shape: int) -> Tensor:
    return torch.softmax(real(*shape), -1)


def families() -> list[tuple[Distribution, Distribution]]:
    """Two members of every family, of batch shape (4, 3)."""
    b, k = (4, 3), (4, 3, 5)
    trials = torch.tensor([2.0, 5.0, 9.0], dtype=F64)
    shift = AffineTransform(1.0, 2.0)
    draw = [
        lambda: Normal(real(*b), positive(*b)),
        lambda: Laplace(real(*b), positive(*b)),
        lambda: Cauchy(real(*b), positive(*b)),
        lambda: Gumbel(real(*b), positive(*b)),
        lambda: LogNormal(real(*b), positive(*b)),
        lambda: StudentT(3 + positive(*b), real(*b), positive(*b)),
        lambda: HalfNormal(positive(*b)),
        lambda: HalfCauchy(positive(*b)),
        lambda: Weibull(positive(*b), 1 + positive(*b)),
        lambda: Pareto(trials.expand(4, 3), positive(*b)),
        lambda: Exponential(positive(*b)),
        lambda: Gamma(positive(*b), positive(*b)),
        lambda: InverseGamma(positive(*b), positive(*b)),
        lambda: Chi2(positive(*b)),
        lambda: FisherSnedecor(positive(*b), positive(*b)),
        lambda: Poisson(positive(*b)),
        lambda: Geometric(torch.sigmoid(real(*b))),
        lambda: NegativeBinomial(trials, logits=3 * real(*b)),
        lambda: Beta(1 + positive(*b), 1 + positive(*b)),
        lambda: Kumaraswamy(1 + positive(*b), 1 + positive(*b)),
        lambda: Dirichlet(1 + positive(*k)),
        lambda: Bernoulli(logits=3 * real(*b)),
        lambda: Bernoulli(probs=torch.sigmoid(3 * real(*b))),
        lambda: ContinuousBernoulli(logits=3 * real(*b)),
        lambda: Binomial(trials, logits=3 * real(*b)),
        lambda: Categorical(logits=3 * real(*k)),
        lambda: OneHotCategorical(probs=weights(*k)),
        lambda: Multinomial(6, logits=3 * real(*k)),
        lambda: VonMises(real(*b), positive(*b)),
        lambda: pb.VonMisesFisher(normalize(real(*k), dim=-1), 1 + positive(*b)),
        lambda: MultivariateNormal(real(*k), scale_tril=torch.tril(0.1 * real(*k, 5)) + torch.eye(5, dtype=F64)),
        lambda: LowRankMultivariateNormal(real(*k), real(*k, 2), positive(*k)),
        lambda: Independent(Normal(real(*k), positive(*k)), 1),
        lambda: pb.Product(Normal(real(*b), positive(*b)), Bernoulli(logits=3 * real(*k))),
        lambda: TransformedDistribution(Normal(real(*b), positive(*b)), [shift]),
        lambda: MixtureSameFamily(Categorical(logits=3 * real(*k)), Normal(real(*k), positive(*k))),
    ]
    return [(make(), make()) for make in draw]


FAMILIES = families()
NAMES = [f"{type(p).__name__}{i}" for i, (p, _) in enumerate(FAMILIES)]
each_family = pytest.mark.parametrize(("p", "q"), FAMILIES, ids=NAMES)


def sample(p: Distribution, num: int = 7) -> Tensor:
    torch.manual_seed(1)
    return p.sample(torch.Size([num]))


def same(p: Distribution, q: Distribution) -> bool:
    """Equal as distributions: equal densities at points drawn from the first."""
    x = sample(p)
    return torch.allclose(p.log_prob(x), q.log_prob(x), rtol=1e-9, atol=1e-9)


def entropy(p: Distribution) -> Tensor:
    """From torch where it has a formula, else by Monte Carlo, to about a hundredth."""
    try:
        return p.entropy()
    except NotImplementedError:
        return -p.log_prob(sample(p, 20_000)).mean(0)


@each_family
def test_blend_ends_at_its_two_distributions(p: Distribution, q: Distribution):
    s = torch.zeros(4, 3, dtype=F64)
    assert same(p, pb.blend(p, q, s))
    assert same(q, pb.blend(p, q, s + 1))
    assert not same(p, q)


@each_family
def test_blend_takes_one_weight_for_each_code(p: Distribution, q: Distribution):
    s = torch.tensor([0.0, 0.0, 1.0, 1.0], dtype=F64)[:, None]
    mixed = pb.blend(p, q, s)
    assert mixed.batch_shape == p.batch_shape
    assert type(mixed) is type(p)
    x = sample(p)
    torch.testing.assert_close(mixed.log_prob(x), torch.where(s == 0, p.log_prob(x), q.log_prob(x)))


@each_family
def test_most_uncertain_has_more_entropy(p: Distribution, q: Distribution):
    for member in (p, q):
        target = pb.most_uncertain(member)
        assert type(target) is type(member)
        assert target.batch_shape == member.batch_shape
        gain = entropy(target) - entropy(member)
        assert (gain > -0.05).all()
        assert gain.mean() > 0.1


@pytest.mark.parametrize(
    ("p", "expected"),
    [
        (Bernoulli(logits=torch.tensor(3.0, dtype=F64)), math.log(2)),
        (Categorical(logits=3 * real(5)), math.log(5)),
        (OneHotCategorical(logits=3 * real(5)), math.log(5)),
        (Beta(torch.tensor(3.0, dtype=F64), torch.tensor(2.0, dtype=F64)), 0.0),
        (Dirichlet(positive(4)), -math.lgamma(4)),
    ],
    ids=lambda p: type(p).__name__,
)
def test_bounded_families_become_uniform(p: Distribution, expected: float):
    assert pb.most_uncertain(p).entropy().item() == pytest.approx(expected)


def test_probabilities_blend_as_probabilities():
    p, q = Bernoulli(logits=torch.tensor(4.0, dtype=F64)), Bernoulli(probs=torch.tensor(0.3, dtype=F64))
    mixed = pb.blend(p, q, torch.tensor(0.25, dtype=F64))
    torch.testing.assert_close(mixed.mean, 0.75 * p.mean + 0.25 * q.mean)


def test_every_family_of_the_library_has_rules():
    own = {"object", "UnitNormal"}  # the fallback, and the channel of Extrapolated, which is never blended
    families = (f for f in pb.fisher.registry if not f.__module__.startswith("test"))  # other tests register theirs
    known = {family for family in families if family.__name__ not in own}
    assert known <= set(pb.blend.registry)
    assert known <= set(pb.most_uncertain.registry)


# --- the paper's reweighting ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def support() -> pb.Support:
    return pb.Support.fit(ring(), 70)


def linear(z: Tensor) -> Bernoulli:
    weight = torch.tensor([[1.0, -0.5], [0.3, 0.8], [-0.7, 0.2]], dtype=z.dtype)
    return Bernoulli(logits=z @ weight.T)


def test_reweighting_is_the_papers_formula(support: pb.Support):
    z = torch.tensor([[3.0, 0.0], [2.4, 0.0], [0.0, 3.6], [1.0, 1.0]], dtype=F64)
    distance = (z[:, None] - support.centers).square().sum(-1).amin(-1)
    s = torch.sigmoid(distance / math.log1p(math.exp(-3.5)) - 7)[:, None]
    decoder = pb.Reweighted(linear, support, beta=-3.5, smooth=False)
    torch.testing.assert_close(decoder(z).mean, (1 - s) * linear(z).mean + s / 2, rtol=1e-9, atol=1e-9)
    assert s.min() < 2e-3
    assert s.max() > 0.99


def test_automatic_sharpness_is_half_way_at_the_border(support: pb.Support):
    decoder = pb.Reweighted(linear, support)
    z = torch.stack([torch.linspace(0, 6, 2001, dtype=F64), torch.zeros(2001, dtype=F64)], -1)
    assert torch.equal(decoder.slider(z) <= 0.5, support.contains(z))


def test_target_may_be_a_distribution_or_a_decoder(support: pb.Support):
    far = torch.tensor([[40.0, 0.0], [0.0, -40.0]], dtype=F64)
    fixed = Bernoulli(probs=torch.tensor([0.1, 0.2, 0.3], dtype=F64))
    decoder = pb.Reweighted(linear, support, target=fixed)
    torch.testing.assert_close(decoder(far).mean, fixed.mean.expand(2, 3))
    moving = pb.Reweighted(
        linear, support, target=lambda z: Bernoulli(logits=0.1 * z[..., :1].expand(*z.shape[:-1], 3))
    )
    torch.testing.assert_close(moving(far).logits, 0.1 * far[:, :1].expand(2, 3))


def test_blending_to_a_constant_makes_the_metric_vanish(support: pb.Support):
    """The void: M falls below any bound away from the data, although no path of positive length is free for the decoder
    itself."""
    metric = pb.FisherRaoMetric(pb.Reweighted(linear, support))
    on, off = metric.tensor(torch.tensor([[3.0, 0.0], [0.0, 0.0]], dtype=F64))
    assert torch.linalg.eigvalsh(off).max() < 1e-12 * torch.linalg.eigvalsh(on).min()


def test_reweighted_is_a_module(support: pb.Support):
    net = torch.nn.Linear(2, 3, dtype=F64)

    class Decoder(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net

        def forward(self, z: Tensor) -> Bernoulli:
            return Bernoulli(logits=self.net(z))

    decoder = pb.Reweighted(Decoder(), support, beta=-3.0)
    assert {"beta", "support.offsets", "decoder.net.weight"} <= set(decoder.state_dict())
    decoder(torch.ones(2, 2, dtype=F64)).mean.sum().backward()
    assert net.weight.grad is not None


def test_refuses_what_cannot_be_blended(support: pb.Support):
    class Own(Distribution):
        arg_constraints = {}  # noqa: RUF012

        def __init__(self, z: Tensor):
            super().__init__(z.shape[:-1], validate_args=False)

    with pytest.raises(NotImplementedError, match=r"how Own becomes uncertain .* @pullback.most_uncertain.register"):
        pb.Reweighted(Own, support)
    with pytest.raises(TypeError, match="The target is a Normal, but the decoder returns a Bernoulli"):
        pb.Reweighted(linear, support, target=Normal(0.0, 1.0))
    with pytest.raises(pb.DecoderError, match="returned a tensor"):
        pb.Reweighted(lambda z: z, support)
