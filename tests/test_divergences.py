"""Divergences against integrals and sums, at saturation, and as estimates; and the functions they are made of."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import scipy.linalg
import scipy.special
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.distributions import (
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
    ExpTransform,
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
    Poisson,
    StudentT,
    TransformedDistribution,
    Uniform,
    VonMises,
    Weibull,
)

import pullback as pb
from pullback._numerics.matrix_roots import lyapunov, sqrtm
from pullback._numerics.special import digamma, excess, log_gamma

F64 = torch.float64
Pair = tuple[Distribution, Distribution]


def tensor(*values: float) -> Tensor:
    return torch.tensor(values, dtype=F64)


def number(value: float) -> Tensor:
    return torch.tensor(value, dtype=F64)


@dataclass(frozen=True)
class Case:
    """Two members of a family and its support: an interval for an integral, or a list of points for a sum."""

    name: str
    p: Distribution
    q: Distribution
    support: tuple[float, float] | Tensor
    affinity: bool = True  # whether Rényi and Hellinger are known in closed form

    def __str__(self) -> str:
        return self.name

    def expectation(self, f: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """∫ f(log p, log q) dx by tanh-sinh quadrature, or the sum over the support."""
        if isinstance(self.support, Tensor):
            return f(self.p.log_prob(self.support), self.q.log_prob(self.support)).sum()
        low, high = self.support
        t = torch.linspace(-4.2, 4.2, 4001, dtype=F64)
        s = 0.5 * math.pi * torch.sinh(t)
        near = torch.exp(-s.abs()) / (2 * torch.cosh(s))  # distance to the nearer end, relative to the interval
        x = torch.where(s < 0, low + (high - low) * near, high - (high - low) * near)
        weight = 0.25 * (high - low) * math.pi * torch.cosh(t) / torch.cosh(s) ** 2 * (t[1] - t[0])
        values = f(self.p.log_prob(x), self.q.log_prob(x))
        return (weight * torch.where(weight > 1e-280, values, 0)).nansum()


N = torch.arange(400, dtype=F64)
CIRCLE = (-math.pi, math.pi)
FOUR = torch.stack([N[:5], 4 - N[:5]], -1)
CASES = [
    Case("Bernoulli", Bernoulli(logits=number(0.4)), Bernoulli(logits=number(-1.1)), N[:2]),
    Case("Bernoulli by probabilities", Bernoulli(number(0.2)), Bernoulli(number(0.7)), N[:2]),
    Case("Binomial", Binomial(9, logits=number(0.4)), Binomial(9, logits=number(-1.1)), N[:10]),
    Case("Geometric", Geometric(number(0.3)), Geometric(number(0.6)), N),
    Case("Negative binomial", NegativeBinomial(3.5, number(0.3)), NegativeBinomial(3.5, number(0.5)), N),
    Case("Poisson", Poisson(number(3.0)), Poisson(number(7.5)), N[:150]),
    Case("Categorical", Categorical(tensor(0.2, 0.5, 0.3)), Categorical(tensor(0.6, 0.3, 0.1)), N[:3]),
    Case("One-hot", OneHotCategorical(tensor(0.2, 0.8)), OneHotCategorical(tensor(0.6, 0.4)), torch.eye(2, dtype=F64)),
    Case("Multinomial", Multinomial(4, tensor(0.2, 0.8)), Multinomial(4, tensor(0.6, 0.4)), FOUR),
    Case("Normal", Normal(number(0.3), number(1.2)), Normal(number(-0.5), number(0.8)), (-15.0, 15.0)),
    Case("Exponential", Exponential(number(1.3)), Exponential(number(0.4)), (0.0, 120.0)),
    Case("Gamma", Gamma(number(2.5), number(1.3)), Gamma(number(1.2), number(0.6)), (0.0, 120.0)),
    Case("Chi2", Chi2(number(5.0)), Chi2(number(3.0)), (0.0, 150.0)),
    Case("Inverse gamma", InverseGamma(number(4.5), number(1.3)), InverseGamma(number(5.2), number(0.6)), (0.0, 2e4)),
    Case("Beta", Beta(number(2.5), number(1.3)), Beta(number(1.2), number(3.6)), (0.0, 1.0)),
    Case("Continuous Bernoulli", ContinuousBernoulli(number(0.2)), ContinuousBernoulli(number(0.8)), (0.0, 1.0)),
    Case("Gumbel", Gumbel(number(0.5), number(1.2)), Gumbel(number(-0.2), number(1.9)), (-12.0, 80.0), affinity=False),
    Case("Weibull", Weibull(number(0.8), number(1.4)), Weibull(number(1.3), number(2.1)), (0.0, 15.0), affinity=False),
    Case("von Mises", VonMises(number(0.5), number(1.2)), VonMises(number(-0.9), number(3.1)), CIRCLE, affinity=False),
    Case("Log-normal", LogNormal(number(0.3), number(0.5)), LogNormal(number(-0.2), number(0.4)), (0.0, 80.0)),
    Case("Half-normal", HalfNormal(number(1.2)), HalfNormal(number(0.8)), (0.0, 12.0)),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_kl_is_its_integral(case):
    expected = case.expectation(lambda p, q: p.exp() * (p - q))
    torch.testing.assert_close(pb.divergences.kl(case.p, case.q), expected, rtol=1e-8, atol=0)
    backward = case.expectation(lambda p, q: q.exp() * (q - p))
    torch.testing.assert_close(
        pb.divergences.symmetrized_kl(case.p, case.q), 0.5 * (expected + backward), rtol=1e-8, atol=0
    )


@pytest.mark.parametrize("case", [c for c in CASES if c.affinity], ids=str)
def test_renyi_and_hellinger_are_their_integrals(case):
    def affinity(alpha: float) -> Tensor:
        return case.expectation(lambda p, q: (alpha * p + (1 - alpha) * q).exp())

    for alpha in (0.3, 0.5, 1.2):
        expected = affinity(alpha).log() / (alpha - 1)
        torch.testing.assert_close(pb.divergences.renyi(alpha)(case.p, case.q), expected, rtol=1e-7, atol=0)
    torch.testing.assert_close(pb.divergences.hellinger(case.p, case.q), 1 - affinity(0.5), rtol=1e-7, atol=0)


def test_shifted_laplace_is_its_integral():
    p, q = Laplace(tensor(0.7), tensor(1.2)), Laplace(tensor(-0.4), tensor(0.8))
    pieces = [
        Case("", Laplace(p.loc[0], p.scale[0]), Laplace(q.loc[0], q.scale[0]), s)
        for s in ((-60, -0.4), (-0.4, 0.7), (0.7, 60))
    ]
    expected = sum(piece.expectation(lambda p, q: p.exp() * (p - q)) for piece in pieces)
    torch.testing.assert_close(pb.divergences.kl(p, q)[0], expected, rtol=1e-9, atol=0)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_divergences_vanish_for_equal_arguments_and_are_positive_otherwise(case):
    divergences = [pb.divergences.kl, pb.divergences.symmetrized_kl, pb.divergences.monte_carlo_kl(50)]
    divergences += (
        [pb.divergences.hellinger, pb.divergences.renyi(0.4), pb.divergences.renyi(1.5)] if case.affinity else []
    )
    for divergence in divergences:
        assert divergence(case.p, case.p).abs() <= 1e-12
        assert divergence(case.p, case.q) > 1e-3


def test_renyi_tends_to_kl():
    p, q = Normal(tensor(0.3), tensor(1.2)), Normal(tensor(-0.5), tensor(0.8))
    errors = [(pb.divergences.renyi(1 - h)(p, q) - pb.divergences.kl(p, q)).abs().item() for h in (1e-2, 1e-3)]
    assert errors[1] == pytest.approx(errors[0] / 10, rel=0.1)


@pytest.mark.parametrize("alpha", [2.0, 5.0])
def test_renyi_is_infinite_where_its_integral_diverges(alpha):
    cases = [
        (Normal(tensor(0.0), tensor(2.0)), Normal(tensor(0.0), tensor(1.0))),
        (Exponential(tensor(1.0)), Exponential(tensor(3.0))),
        (Gamma(tensor(1.0), tensor(1.0)), Gamma(tensor(2.0), tensor(3.0))),
        (Beta(tensor(1.0), tensor(1.0)), Beta(tensor(4.0), tensor(1.0))),
        tuple(MultivariateNormal(tensor(0.0, 0.0), s * torch.eye(2, dtype=F64)) for s in (4, 1)),
    ]  # fmt: skip
    for p, q in cases:
        assert torch.isposinf(pb.divergences.renyi(alpha)(p, q)).all(), p


# --- saturation ---

SHARP = torch.tensor([-60.0, -40.0, -20.0, -19.9, -3.0, 0.0, 0.1, 19.9, 20.0, 40.0, 60.0])


@pytest.mark.parametrize(
    "family", [lambda x: Bernoulli(logits=x), lambda x: Categorical(logits=torch.stack([x, -x / 3, 0 * x], -1))]
)
def test_single_precision_agrees_with_double_at_saturation(family):
    a, b = (x.flatten() for x in torch.meshgrid(SHARP, SHARP, indexing="ij"))
    value = pb.divergences.kl(family(a), family(b))
    exact = pb.divergences.kl(family(a.double()), family(b.double()))
    assert (value >= 0).all()
    torch.testing.assert_close(value.double(), exact, rtol=3e-5, atol=1e-30)


def test_double_precision_is_exact_at_saturation():
    """Against the definition in 400 digits."""
    import mpmath

    mpmath.mp.dps = 400
    for a, b in [(20.0, 20.5), (40.0, 39.0), (-35.0, -35.001), (30.0, -30.0), (0.0, 700.0)]:
        p, q = (1 / (1 + mpmath.exp(-mpmath.mpf(x))) for x in (a, b))
        exact = p * mpmath.log(p / q) + (1 - p) * mpmath.log((1 - p) / (1 - q))
        value = pb.divergences.kl(Bernoulli(logits=tensor(a)), Bernoulli(logits=tensor(b))).item()
        assert value == pytest.approx(float(exact), rel=1e-11)


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_gradients_stay_finite_at_saturation(dtype):
    a, b = (x.flatten().to(dtype).requires_grad_() for x in torch.meshgrid(SHARP, SHARP, indexing="ij"))
    value = pb.divergences.symmetrized_kl(Bernoulli(logits=a), Bernoulli(logits=b))
    gradients = torch.autograd.grad(value.sum(), (a, b))
    assert torch.isfinite(value).all()
    assert all(torch.isfinite(g).all() for g in gradients)
    apart = a != b
    assert (gradients[0][apart & (a.abs() < 30)] != 0).all()


def test_saturated_probabilities_keep_a_finite_divergence_and_a_gradient():
    probs = torch.tensor([1 - 1e-6, 1e-6, 1.0, 0.0], requires_grad=True)
    value = pb.divergences.symmetrized_kl(Bernoulli(probs), Bernoulli(torch.full((4,), 0.5)))
    (gradient,) = torch.autograd.grad(value.sum(), probs)
    assert torch.isfinite(value).all()
    assert (gradient[:2].abs() > 1).all()


def test_masked_categories_contribute_nothing():
    free = torch.tensor([0.3, -0.2], dtype=F64, requires_grad=True)
    masked = torch.cat([free, tensor(-math.inf)])
    other = tensor(0.1, 0.9, -math.inf)
    value = pb.divergences.kl(Categorical(logits=masked), Categorical(logits=other))
    assert value == pb.divergences.kl(Categorical(logits=free), Categorical(logits=other[:2]))
    assert torch.isfinite(torch.autograd.grad(value, free)[0]).all()
    assert torch.isposinf(pb.divergences.kl(Categorical(logits=tensor(0.0, 0.0, 0.0)), Categorical(logits=other)))


# --- vectors, products ---


def covariance(seed: int) -> Tensor:
    A = torch.randn(3, 3, generator=torch.Generator().manual_seed(seed), dtype=F64)
    return A @ A.mT + 0.5 * torch.eye(3, dtype=F64)


def gaussians() -> Pair:
    return MultivariateNormal(tensor(0.1, 0.2, 0.3), covariance(0)), MultivariateNormal(
        tensor(-0.4, 0.5, 0.0), covariance(1)
    )


def test_divergences_of_gaussians_decouple_in_a_common_eigenbasis():
    Q = torch.linalg.qr(covariance(2))[0]
    means, scales = torch.randn(2, 3, dtype=F64), torch.rand(2, 3, dtype=F64) + 0.5
    p, q = (MultivariateNormal(Q @ m, Q @ torch.diag(s**2) @ Q.mT) for m, s in zip(means, scales, strict=True))
    a, b = (Independent(Normal(m, s), 1) for m, s in zip(means, scales, strict=True))
    for divergence in (
        pb.divergences.kl,
        pb.divergences.symmetrized_kl,
        pb.divergences.renyi(0.3),
        pb.divergences.hellinger,
        pb.divergences.wasserstein2,
    ):
        torch.testing.assert_close(divergence(p, q), divergence(a, b), rtol=1e-10, atol=1e-12)


def test_low_rank_gaussians_are_gaussians():
    factors = [
        (torch.randn(3, dtype=F64), torch.randn(3, 2, dtype=F64), torch.rand(3, dtype=F64) + 0.1) for _ in range(2)
    ]
    p, q = (LowRankMultivariateNormal(*f) for f in factors)
    full = tuple(MultivariateNormal(r.loc, r.covariance_matrix) for r in (p, q))
    for divergence in (
        pb.divergences.kl,
        pb.divergences.renyi(0.3),
        pb.divergences.hellinger,
        pb.divergences.wasserstein2,
    ):
        torch.testing.assert_close(divergence(p, q), divergence(*full), rtol=1e-9, atol=1e-10)


def test_dirichlet_of_two_is_beta():
    p, q = Beta(tensor(0.7), tensor(2.2)), Beta(tensor(1.7), tensor(0.2))
    d, e = (Dirichlet(torch.stack([r.concentration1, r.concentration0], -1)) for r in (p, q))
    for divergence in (pb.divergences.kl, pb.divergences.renyi(0.3), pb.divergences.hellinger):
        torch.testing.assert_close(divergence(p, q), divergence(d, e), rtol=1e-13, atol=0)


def test_wasserstein_of_gaussians_is_its_definition():
    p, q = gaussians()
    A, B = p.covariance_matrix.numpy(), q.covariance_matrix.numpy()
    root = scipy.linalg.sqrtm(A)
    expected = ((p.loc - q.loc) ** 2).sum() + np.trace(A + B - 2 * scipy.linalg.sqrtm(root @ B @ root).real)
    torch.testing.assert_close(pb.divergences.wasserstein2(p, q), expected, rtol=1e-10, atol=0)
    torch.testing.assert_close(pb.divergences.wasserstein2(q, p), expected, rtol=1e-10, atol=0)


def test_divergences_of_parts_add():
    a, b = (Normal(torch.randn(4, 2, dtype=F64), torch.rand(4, 2, dtype=F64) + 0.5) for _ in range(2))
    c, d = (Normal(torch.randn(4, dtype=F64), 1.0) for _ in range(2))
    p, q = pb.Product(Independent(a, 1), c), pb.Product(Independent(b, 1), d)
    for divergence in (
        pb.divergences.kl,
        pb.divergences.symmetrized_kl,
        pb.divergences.renyi(0.3),
        pb.divergences.wasserstein2,
    ):
        expected = divergence(a, b).sum(-1) + divergence(c, d)
        torch.testing.assert_close(divergence(p, q), expected, rtol=1e-12, atol=0)
    joint = 1 - (1 - pb.divergences.hellinger(a, b)).prod(-1) * (1 - pb.divergences.hellinger(c, d))
    torch.testing.assert_close(pb.divergences.hellinger(p, q), joint, rtol=1e-12, atol=0)


def test_fixed_bijections_change_no_divergence():
    p, q = (Normal(torch.randn(3, dtype=F64), torch.rand(3, dtype=F64) + 0.5) for _ in range(2))
    images = [TransformedDistribution(r, [ExpTransform()]) for r in (p, q)]
    for divergence in (
        pb.divergences.kl,
        pb.divergences.symmetrized_kl,
        pb.divergences.renyi(0.3),
        pb.divergences.hellinger,
    ):
        torch.testing.assert_close(divergence(*images), divergence(p, q), rtol=0, atol=0)


# --- Monte Carlo ---

NOISY = [
    (Normal(tensor(0.0), tensor(1.0)), Normal(tensor(1.0), tensor(2.0))),
    (Normal(tensor(0.0), tensor(2.0)), Normal(tensor(0.01), tensor(2.0))),
    (Poisson(tensor(3.0)), Poisson(tensor(5.0))),
    (Beta(tensor(2.0), tensor(3.0)), Beta(tensor(4.0), tensor(1.5))),
    (Laplace(tensor(0.0), tensor(1.0)), Laplace(tensor(1.0), tensor(0.5))),
]


def estimates(divergence: Callable[[int], Tensor], seeds: int = 40) -> tuple[Tensor, Tensor]:
    """Mean over seeds and its standard error."""
    values = torch.stack([divergence(seed) for seed in range(seeds)])
    return values.mean(0), values.std(0) / seeds**0.5


@pytest.mark.parametrize(("p", "q"), NOISY, ids=str)
def test_monte_carlo_kl_is_unbiased_and_positive(p, q):
    mean, error = estimates(lambda seed: pb.divergences.monte_carlo_kl(200, seed)(p, q))
    assert ((mean - pb.divergences.kl(p, q)).abs() <= 5 * error).all()
    assert (error <= 0.06 * mean).all()  # also for neighbors, where the plain mean of log p - log q drowns in noise
    assert all((pb.divergences.monte_carlo_kl(10, seed)(p, q) >= 0).all() for seed in range(20))


@pytest.mark.parametrize(
    "family", [lambda x: Poisson(x.exp()), lambda x: Normal(x, 1.0), lambda x: Bernoulli(logits=x)]
)
def test_gradient_of_monte_carlo_kl_is_unbiased(family):
    def gradient(divergence: Callable[[Distribution, Distribution], Tensor]) -> Tensor:
        x = tensor(0.3, 0.8).requires_grad_()
        return torch.autograd.grad(divergence(family(x[0]), family(x[1])), x)[0]

    mean, error = estimates(lambda seed: gradient(pb.divergences.monte_carlo_kl(400, seed)))
    assert ((mean - gradient(pb.divergences.kl)).abs() <= 5 * error).all()


def test_monte_carlo_kl_has_fixed_noise_and_leaves_the_random_state_alone():
    p, q = NOISY[0]
    state = torch.get_rng_state()
    first = pb.divergences.monte_carlo_kl(100)(p, q)
    assert torch.equal(torch.get_rng_state(), state)
    torch.randn(3)
    assert torch.equal(pb.divergences.monte_carlo_kl(100)(p, q), first)
    assert not torch.equal(pb.divergences.monte_carlo_kl(100, random_state=1)(p, q), first)


def test_monte_carlo_kl_is_infinite_on_disjoint_supports():
    p, q = (Uniform(tensor(low), tensor(low + 1), validate_args=False) for low in (0.0, 5.0))
    assert torch.isposinf(pb.divergences.monte_carlo_kl(100)(p, q))


# --- errors ---


def test_missing_divergences_say_what_to_do():
    p, q = StudentT(tensor(3.0), tensor(0.0), tensor(1.0)), StudentT(tensor(3.0), tensor(1.0), tensor(1.0))
    with pytest.raises(NotImplementedError, match=r"StudentT and StudentT.*register_kl.*monte_carlo_kl"):
        pb.divergences.kl(p, q)
    with pytest.raises(
        NotImplementedError,
        match=r"StudentT\. Use pullback\.divergences\.symmetrized_kl or pullback\.divergences\.monte_carlo_kl",
    ):
        pb.divergences.hellinger(p, q)
    with pytest.raises(NotImplementedError, match=r"closed form for Gaussians only, not for StudentT"):
        pb.divergences.wasserstein2(p, q)
    with pytest.raises(NotImplementedError, match=r"No closed form.*Weibull"):
        pb.divergences.renyi(0.5)(Weibull(tensor(1.0), tensor(2.0)), Weibull(tensor(1.0), tensor(2.0)))


@pytest.mark.parametrize(
    "pair",
    [
        (Exponential(tensor(1.0)), Poisson(tensor(1.0))),
        (Poisson(tensor(1.0)), Exponential(tensor(1.0))),
        (Bernoulli(tensor(0.3)), Geometric(tensor(0.3))),
        (Binomial(3, tensor(0.3)), NegativeBinomial(3, tensor(0.3))),
        (Normal(tensor(0.0), tensor(1.0)), Laplace(tensor(0.0), tensor(1.0))),
    ],
    ids=lambda pair: " and ".join(type(p).__name__ for p in pair),
)
@pytest.mark.parametrize("divergence", [pb.divergences.hellinger, pb.divergences.renyi(0.3)])
def test_affinities_of_two_families_are_refused(pair, divergence):
    names = " and ".join(type(p).__name__ for p in pair)
    for p, q in (pair, [Independent(r.expand([2]), 1) for r in pair]):
        with pytest.raises(NotImplementedError, match=rf"No closed form.* {names}\. Use .*monte_carlo_kl"):
            divergence(p, q)


def test_families_with_a_common_one_have_affinities():
    p, q = Exponential(tensor(1.3)), Gamma(tensor(2.0), tensor(0.7))
    as_gamma = Gamma(tensor(1.0), tensor(1.3))
    torch.testing.assert_close(pb.divergences.hellinger(p, q), pb.divergences.hellinger(as_gamma, q))


@pytest.mark.parametrize("alpha", [0.0, 1.0, -1.0])
def test_impossible_orders_are_refused(alpha):
    with pytest.raises(ValueError, match=r"positive and not 1.*pullback\.divergences\.kl"):
        pb.divergences.renyi(alpha)


@pytest.mark.parametrize("family", [Binomial, NegativeBinomial, Multinomial])
@pytest.mark.parametrize("measure", ["kl", "symmetrized_kl", "hellinger", "renyi", "rao_distance"])
def test_different_total_counts_are_refused(family, measure):
    functions = {"renyi": pb.divergences.renyi(0.4), "rao_distance": pb.rao_distance}
    divergence = functions.get(measure) or getattr(pb.divergences, measure)
    p, q = (family(n, probs=tensor(0.3, 0.7)) for n in (3, 5))
    with pytest.raises(NotImplementedError, match="Keep total_count the same for all codes"):
        divergence(p, q)


def test_different_transforms_are_refused():
    p, q = Kumaraswamy(tensor(1.0), tensor(2.0)), Kumaraswamy(tensor(1.5), tensor(2.0))
    with pytest.raises(
        NotImplementedError, match=r"depend on the code.*Move the parameters into the base distribution"
    ):
        pb.divergences.kl(p, q)


def test_cross_family_divergences_are_those_of_torch():
    p, q = Exponential(tensor(1.3)), Gamma(tensor(2.0), tensor(0.7))
    assert pb.divergences.kl(p, q) == torch.distributions.kl_divergence(p, q)


def test_registered_divergences_are_used():
    mixture = MixtureSameFamily(Categorical(tensor(0.5, 0.5)), Cauchy(tensor(0.0, 1.0), tensor(1.0, 1.0)))

    class Named(MixtureSameFamily):
        pass

    @torch.distributions.register_kl(Named, Named)
    def _(p, q):
        return tensor(7.0)[0]

    named = Named(mixture.mixture_distribution, mixture.component_distribution)
    assert pb.divergences.kl(named, named) == 7.0


def test_a_registered_divergence_of_a_subclass_wins_over_the_rule_of_its_base():
    class Shifted(Normal):
        pass

    class Further(Shifted):
        pass

    p, q = Normal(tensor(0.0), tensor(1.0)), Normal(tensor(1.0), tensor(1.0))
    before = pb.divergences.kl(p, q)
    torch.distributions.register_kl(Shifted, Shifted)(lambda p, q: 7 + 0 * p.loc)
    for family in (Shifted, Further):
        first, second = (family(r.loc, r.scale) for r in (p, q))
        assert pb.divergences.kl(first, second) == 7
        assert pb.divergences.kl(Independent(first, 1), Independent(second, 1)) == 7
        assert pb.divergences.kl(pb.Product(first, p), pb.Product(second, q)) == 7 + before
    assert pb.divergences.kl(p, q) == before


def test_half_cauchy_has_the_divergence_of_cauchy():
    scales = tensor(0.7), tensor(2.2)
    half, full = [HalfCauchy(s) for s in scales], [Cauchy(torch.zeros_like(s), s) for s in scales]
    torch.testing.assert_close(pb.divergences.kl(*half), pb.divergences.kl(*full), rtol=0, atol=0)


# --- what the divergences are made of ---


def test_excess_has_full_relative_accuracy():
    x = torch.cat([-torch.logspace(-150, 1.5, 300, dtype=F64), torch.logspace(-150, 1.5, 300, dtype=F64)])
    small = x.abs() < 1e-3
    series = x**2 / 2 * (1 + x / 3 * (1 + x / 4 * (1 + x / 5 * (1 + x / 6))))
    torch.testing.assert_close(excess(x)[small], series[small], rtol=1e-14, atol=0)
    direct = torch.expm1(x) - x
    torch.testing.assert_close(excess(x)[~small], direct[~small], rtol=1e-12, atol=0)


def test_gamma_functions_have_exact_derivatives():
    x = torch.logspace(-3, 4, 50, dtype=F64).requires_grad_()
    (first,) = torch.autograd.grad(log_gamma(x).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    numpy = x.detach().numpy()
    np.testing.assert_allclose(log_gamma(x).detach(), scipy.special.gammaln(numpy), rtol=1e-13, atol=1e-13)
    np.testing.assert_allclose(first.detach(), scipy.special.digamma(numpy), rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(second, scipy.special.polygamma(1, numpy), rtol=1e-12)
    np.testing.assert_allclose(digamma(x).detach(), scipy.special.digamma(numpy), rtol=1e-12, atol=1e-13)
    assert gradcheck(log_gamma, x.detach()[20:30].requires_grad_(), check_forward_ad=True)


@pytest.mark.parametrize("S", [covariance(0), 2 * torch.eye(3, dtype=F64)], ids=["generic", "round"])
def test_matrix_roots_can_be_differentiated_also_at_round_covariances(S):
    C = covariance(1) - covariance(2)
    X = sqrtm(S)
    torch.testing.assert_close(X @ X, S)
    Y = lyapunov(X, C)
    torch.testing.assert_close(X @ Y + Y @ X, C)

    def symmetric(A: Tensor) -> Tensor:
        return 0.5 * (A + A.mT)

    def root(S: Tensor) -> Tensor:
        return sqrtm(symmetric(S))

    def solution(X: Tensor, C: Tensor) -> Tensor:
        return lyapunov(symmetric(X), symmetric(C))

    S, C = S.clone().requires_grad_(), C.clone().requires_grad_()
    assert gradcheck(root, S, check_forward_ad=True)
    assert gradgradcheck(root, S)
    assert gradcheck(solution, (S, C), check_forward_ad=True)
    assert gradgradcheck(solution, (S, C))
