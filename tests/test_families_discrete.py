"""Families of counts and categories: independent routes to the information, saturation, and closed-form distances."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributions import (
    Bernoulli,
    Binomial,
    Categorical,
    ContinuousBernoulli,
    Distribution,
    Geometric,
    Multinomial,
    NegativeBinomial,
    OneHotCategorical,
    OneHotCategoricalStraightThrough,
    Poisson,
    kl_divergence,
)
from torch.nn.functional import softplus

import pullback as pb
from laws import Case, check_embedding, check_frame, check_kl_hessian, check_promises, check_score_covariance
from pullback import testing
from pullback._families.counts import _negative_binomial_root

F32, F64 = torch.float32, torch.float64
Z = torch.tensor([[0.3, -0.8], [1.1, 0.4], [-0.6, 0.9]], dtype=F64)
TRIALS = torch.tensor([3.0, 10.0], dtype=F64)
SIZES = torch.tensor([0.7, 6.0], dtype=F64)


def curved(z: Tensor, num_outputs: int, shift: float = 0.0) -> Tensor:
    """A fixed curved map from codes to ``num_outputs`` numbers."""
    k = torch.arange(1, num_outputs + 1, dtype=z.dtype)
    x, y = z[..., :1], z[..., 1:]
    return torch.sin(k * x + shift) + 0.4 * k * torch.tanh(y - 0.3 * k * x) + 0.5 * y + shift


def categories(z: Tensor) -> Tensor:
    return curved(z, 8).unflatten(-1, (2, 4))


def enumerated_kl(p: Distribution, q: Distribution) -> Tensor:
    """Summed over the support, as far as the probabilities reach."""
    x = torch.arange(1500, dtype=F64).reshape(-1, *[1] * len(p.batch_shape))
    log_p = p.log_prob(x)
    return (log_p.exp() * (log_p - q.log_prob(x))).sum(0)


def multinomial_kl(p: Multinomial, q: Multinomial) -> Tensor:
    return p.total_count * kl_divergence(p._categorical, q._categorical)


def quadrature_kl(p: ContinuousBernoulli, q: ContinuousBernoulli) -> Tensor:
    """With densities normalized by Gauss-Legendre quadrature."""
    x, w = (torch.tensor(v) for v in np.polynomial.legendre.leggauss(40))
    x, log_w = 0.5 * (1 + x), (0.5 * w).log()
    log_p, log_q = (torch.log_softmax(d.logits[..., None] * x + log_w, -1) for d in (p, q))
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def negative_binomial(z: Tensor) -> NegativeBinomial:
    return NegativeBinomial(softplus(curved(z, 2)) + 0.5, logits=curved(z, 2, shift=0.3) - 1)


CASES = [
    Case("Bernoulli", lambda z: Bernoulli(logits=2 * curved(z, 3)), Z),
    Case("Bernoulli-probs", lambda z: Bernoulli(probs=torch.sigmoid(curved(z, 3))), Z),
    Case("ContinuousBernoulli", lambda z: ContinuousBernoulli(logits=4 * curved(z, 3)), Z, kl=quadrature_kl),
    Case("ContinuousBernoulli-flat", lambda z: ContinuousBernoulli(logits=1e-3 * curved(z, 3)), Z, kl=quadrature_kl),
    Case("Binomial", lambda z: Binomial(TRIALS, logits=curved(z, 2)), Z),
    Case("Geometric", lambda z: Geometric(logits=curved(z, 3)), Z),
    Case("Geometric-probs", lambda z: Geometric(probs=torch.sigmoid(curved(z, 3))), Z),
    Case("Poisson", lambda z: Poisson(softplus(3 * curved(z, 3))), Z),
    Case("NegativeBinomial", negative_binomial, Z, kl=enumerated_kl, embedded=False),
    Case("NegativeBinomial-fixed", lambda z: NegativeBinomial(SIZES, logits=curved(z, 2)), Z, kl=enumerated_kl),
    Case("Categorical", lambda z: Categorical(logits=categories(z)), Z),
    Case("Categorical-probs", lambda z: Categorical(probs=softplus(categories(z))), Z),
    Case("OneHotCategorical", lambda z: OneHotCategorical(logits=categories(z)), Z),
    Case("StraightThrough", lambda z: OneHotCategoricalStraightThrough(logits=categories(z)), Z),
    Case("Multinomial", lambda z: Multinomial(5, logits=categories(z)), Z, kl=multinomial_kl),
]
cases = pytest.mark.parametrize("case", CASES, ids=str)
embedded = pytest.mark.parametrize("case", [case for case in CASES if case.embedded], ids=str)


@cases
def test_information_is_the_hessian_of_kl(case):
    check_kl_hessian(case)


@cases
def test_information_is_the_covariance_of_the_score(case):
    check_score_covariance(case)


@embedded
def test_embedding_reproduces_the_information(case):
    check_embedding(case)


@embedded
def test_frame_is_the_derivative_of_the_embedding(case):
    check_frame(case)
    check_promises(case)


@embedded
def test_chord_does_not_depend_on_the_origin(case):
    p, q, far = (case.decoder(z) for z in (Z, Z + 0.3, Z - 1))
    chords = []
    for origin in (None, p, far):
        (phi, psi), (phi1, psi1) = pb.embed(p, origin=origin), pb.embed(q, origin=origin)
        chords.append(((phi1 - phi) * (psi1 - psi)).sum(-1))
    torch.testing.assert_close(chords[1], chords[0], rtol=1e-10, atol=1e-14)
    torch.testing.assert_close(chords[1], chords[2], rtol=1e-10, atol=1e-14)


@cases
def test_information_is_positive_and_of_the_right_shape(case):
    p = case.decoder(Z)
    matrix = pb.fisher(p).matrix
    assert matrix.shape[: len(p.batch_shape)] == p.batch_shape
    assert (torch.linalg.eigvalsh(matrix) > -1e-12).all()


# -- coordinates do not matter -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (lambda x: Bernoulli(logits=x), lambda x: Bernoulli(probs=torch.sigmoid(x))),
        (lambda x: Binomial(7, logits=x), lambda x: Binomial(7, probs=torch.sigmoid(x))),
        (lambda x: ContinuousBernoulli(logits=x), lambda x: ContinuousBernoulli(probs=torch.sigmoid(x))),
        (lambda x: Geometric(logits=x), lambda x: Geometric(probs=torch.sigmoid(x))),
        (lambda x: NegativeBinomial(SIZES[1], logits=x), lambda x: NegativeBinomial(SIZES[1], probs=torch.sigmoid(x))),
        (lambda x: Categorical(logits=x), lambda x: Categorical(probs=torch.softmax(x, -1))),
        (lambda x: Multinomial(4, logits=x), lambda x: Multinomial(4, probs=torch.softmax(x, -1))),
        (lambda x: OneHotCategorical(logits=x), lambda x: Categorical(logits=x + 5)),
    ],
)
def test_lengths_do_not_depend_on_the_parametrization(first, second):
    t = torch.linspace(0, 1, 9, dtype=F64)[:, None]
    curve = Z[0] + t * (Z[1] - Z[0])
    one, two = (pb.FisherRaoMetric(lambda z, f=f: f(curved(z, 4))) for f in (first, second))
    torch.testing.assert_close(one.tensor(curve), two.tensor(curve), rtol=1e-9, atol=1e-12)
    lengths = [metric.ds2(curve[:-1], curve[1:]).sqrt().sum() for metric in (one, two)]
    torch.testing.assert_close(*lengths, rtol=1e-9, atol=0)


def test_a_binomial_is_many_bernoullis_and_two_categories_are_one_bernoulli():
    x = torch.linspace(-5, 5, 11, dtype=F64)[:, None]
    bernoulli = pb.FisherRaoMetric(lambda z: Bernoulli(logits=z)).tensor(x)
    binomial = pb.FisherRaoMetric(lambda z: Binomial(9, logits=z)).tensor(x)
    pair = pb.FisherRaoMetric(lambda z: Categorical(logits=torch.cat([z, torch.zeros_like(z)], -1))).tensor(x)
    torch.testing.assert_close(binomial, 9 * bernoulli)
    torch.testing.assert_close(pair, bernoulli)


def test_a_geometric_is_a_negative_binomial():
    x = torch.linspace(-5, 5, 11, dtype=F64)[:, None]
    p, q = Geometric(logits=x), NegativeBinomial(torch.ones(1, dtype=F64), logits=-x)
    torch.testing.assert_close(pb.fisher(p).matrix[..., 0, 0], pb.fisher(q).matrix[..., 1, 1])
    torch.testing.assert_close(pb.embed(p)[0], pb.embed(q)[0])


# -- saturation --------------------------------------------------------------------------------------------------------

dtypes = pytest.mark.parametrize("dtype", [F32, F64], ids=str)
saturated = pytest.mark.parametrize("logit", [20.0, 50.0, 80.0, 300.0, -20.0, -50.0, -80.0, -300.0])


def information(family: Callable[[Tensor], Distribution], value: float, dtype: torch.dtype) -> float:
    """Of the identity decoder; its derivative must be finite too."""
    z = torch.tensor([value], dtype=dtype, requires_grad=True)
    (M,) = pb.FisherRaoMetric(family).tensor(z).reshape(1)
    (gradient,) = torch.autograd.grad(M, z)
    assert torch.isfinite(gradient).all()
    return M.item()


def step(family: Callable[[Tensor], Distribution], a: float, b: float, dtype: torch.dtype) -> float:
    z = torch.tensor([a], dtype=dtype, requires_grad=True)
    ds2 = pb.FisherRaoMetric(family).ds2(z, torch.tensor([b], dtype=dtype))
    (gradient,) = torch.autograd.grad(ds2, z)
    assert torch.isfinite(gradient).all()
    return ds2.item()


def representable(value: float, dtype: torch.dtype) -> float:
    """What is left of a number in a dtype: zero where it underflows."""
    return value if value > torch.finfo(dtype).tiny else 0.0


@dtypes
@saturated
def test_bernoulli_at_saturation(logit, dtype):
    """I = e^-|l|, and a step of one costs (2 e^(-|l|/2) - 2 e^(-|l + 1|/2))²."""
    rel = {F32: 1e-4, F64: 1e-12}[dtype] + 4 * math.exp(-abs(logit) / 2)
    expected = representable(math.exp(-abs(logit)), dtype)
    assert information(lambda z: Bernoulli(logits=z), logit, dtype) == pytest.approx(expected, rel=rel, abs=0)
    end = logit + math.copysign(1, logit)
    chord = 4 * math.exp(-abs(logit)) * math.expm1(-0.5) ** 2
    assert step(lambda z: Bernoulli(logits=z), logit, end, dtype) == pytest.approx(
        representable(chord, dtype), rel=rel, abs=0
    )


@dtypes
@saturated
def test_categorical_at_saturation(logit, dtype):
    """One category rules, or one disappears: I = 2 e^-l or e^l/2 in the direction of its logit."""

    def family(z: Tensor) -> Categorical:
        return Categorical(logits=torch.nn.functional.pad(z, (0, 2)))

    rel = {F32: 1e-4, F64: 1e-12}[dtype] + 8 * math.exp(-abs(logit) / 2)
    expected = representable((2 if logit > 0 else 0.5) * math.exp(-abs(logit)), dtype)
    assert information(family, logit, dtype) == pytest.approx(expected, rel=rel, abs=0)
    end = logit + math.copysign(1, logit)
    assert step(family, logit, end, dtype) == pytest.approx(4 * expected * math.expm1(-0.5) ** 2, rel=rel, abs=0)


@dtypes
@saturated
def test_geometric_and_negative_binomial_at_saturation(logit, dtype):
    """I = 1 - p: the tail e^-l on one side, one on the other."""
    rel = {F32: 1e-4, F64: 1e-12}[dtype] + 4 * math.exp(-abs(logit) / 2)
    expected = representable(math.exp(-logit), dtype) if logit > 0 else 1.0
    assert information(lambda z: Geometric(logits=z), logit, dtype) == pytest.approx(expected, rel=rel, abs=0)
    size = torch.tensor(3.0, dtype=dtype)
    trials = information(lambda z: NegativeBinomial(size, logits=z), -logit, dtype)
    assert trials == pytest.approx(3 * expected, rel=rel, abs=0)
    if logit < 0:
        assert step(lambda z: Geometric(logits=z), logit, logit - 1, dtype) == pytest.approx(1, rel=rel, abs=0)


@dtypes
@pytest.mark.parametrize("logit", [50.0, 300.0, 700.0, 1e4, -50.0, -700.0, -1e4])
def test_continuous_bernoulli_at_saturation(logit, dtype):
    """An exponential law cut off far away: I = 1/η²."""
    rel = {F32: 1e-5, F64: 1e-12}[dtype]
    assert information(lambda z: ContinuousBernoulli(logits=z), logit, dtype) == pytest.approx(
        logit**-2, rel=rel, abs=0
    )


@dtypes
@pytest.mark.parametrize("logit", [0.0, 1e-6, 0.1, 1.0, 1.99, 2.01, 5.0, -3.0])
def test_continuous_bernoulli_in_the_middle(logit, dtype):
    """1/η² - 1/(4 sinh²(η/2)), or the first terms of its series."""
    closed = (logit or 1.0) ** -2 - 0.25 / math.sinh(0.5 * (logit or 1.0)) ** 2
    series = 1 / 12 - logit**2 / 240 + logit**4 / 6048
    expected = series if abs(logit) < 0.5 else closed
    rel = {F32: 1e-5, F64: 1e-9}[dtype]
    assert information(lambda z: ContinuousBernoulli(logits=z), logit, dtype) == pytest.approx(expected, rel=rel, abs=0)


@dtypes
def test_poisson_with_vanishing_rate(dtype):
    metric = pb.FisherRaoMetric(lambda z: Poisson(torch.exp(z)))
    z = torch.tensor([-1000.0, -60.0, -20.0, 3.0], dtype=dtype)[:, None]
    torch.testing.assert_close(metric.tensor(z)[..., 0], torch.exp(z), rtol=1e-5, atol=0)
    assert torch.isfinite(metric.ds2(z[:-1], z[1:])).all()


@dtypes
def test_probabilities_of_zero_and_one_are_finite(dtype):
    """torch clamps them, so they do not move."""
    probs = torch.tensor([0.0, 0.3, 1.0], dtype=dtype)
    z = torch.ones(1, 1, dtype=dtype)
    for family in (Bernoulli, ContinuousBernoulli):
        metric = pb.FisherRaoMetric(lambda z, family=family: family(probs=probs**z))
        M = metric.tensor(z)
        assert torch.isfinite(M).all()
        assert (M > 0).all()
        assert torch.isfinite(metric.ds2(z, 0.9 * z)).all()


@dtypes
@pytest.mark.parametrize("log_prob", [-20.0, -50.0, -80.0])
def test_small_probabilities_are_not_cut_off(log_prob, dtype):
    """Below the machine precision too, where torch clamps: I = p in the direction of log p, and 1 for a geometric
    law."""
    rel = {F32: 1e-4, F64: 1e-12}[dtype] + 4 * math.exp(log_prob / 2)

    def pair(z: Tensor) -> Tensor:
        return torch.cat([torch.exp(z), 1 - torch.exp(z)], -1)

    for family, expected in (
        (lambda z: Bernoulli(probs=torch.exp(z)), math.exp(log_prob)),
        (lambda z: Categorical(probs=pair(z)), math.exp(log_prob)),
        (lambda z: OneHotCategorical(probs=pair(z)), math.exp(log_prob)),
        (lambda z: Geometric(probs=torch.exp(z)), 1.0),
    ):
        assert information(family, log_prob, dtype) == pytest.approx(expected, rel=rel, abs=0)
        chord = expected if expected == 1 else 4 * expected * math.expm1(-0.5) ** 2
        assert step(family, log_prob, log_prob - 1, dtype) == pytest.approx(chord, rel=rel, abs=0)


def test_masked_categories_do_not_count():
    def decoder(z: Tensor) -> Categorical:
        return Categorical(logits=torch.cat([curved(z, 3), torch.full_like(z[..., :1], -torch.inf)], -1))

    masked, plain = pb.FisherRaoMetric(decoder), pb.FisherRaoMetric(lambda z: Categorical(logits=curved(z, 3)))
    torch.testing.assert_close(masked.tensor(Z), plain.tensor(Z))
    torch.testing.assert_close(masked.ds2(Z, Z + 0.1), plain.ds2(Z, Z + 0.1))
    paths = [pb.geodesic(metric, Z, Z.flip(0) + 0.3, solver=pb.GaussNewton(rtol=1e-6)) for metric in (masked, plain)]
    torch.testing.assert_close(paths[0].length, paths[1].length)
    logs = [pb.logmap(metric, Z[::2], Z[::2].flip(0) + 0.3, rtol=1e-8) for metric in (masked, plain)]
    torch.testing.assert_close(logs[0], logs[1])


# -- total counts ------------------------------------------------------------------------------------------------------


def test_no_pair_where_a_total_count_varies():
    logits = torch.zeros(2, 3, dtype=F64)
    varying, features = torch.tensor([[1.0], [2.0]], dtype=F64), torch.tensor([1.0, 2.0, 3.0], dtype=F64)
    for family in (Binomial, NegativeBinomial):
        assert pb.embed(family(varying, logits=logits)) is None
        assert pb.embed(family(features, logits=logits)) is not None
        p, q = family(features, logits=logits), family(features + 1, logits=logits)
        assert pb.embed(p, origin=p) is not None
        assert pb.embed(q, origin=p) is None


def test_a_fixed_total_count_gives_the_same_information_with_and_without_its_own_term():
    """The shortcut for total counts that do not move."""
    eta = torch.stack([SIZES, torch.tensor([0.3, -0.7], dtype=F64)], -1)
    u = torch.stack([torch.zeros(5, 2, dtype=F64), torch.randn(5, 2, dtype=F64)], -1)
    short, full = _negative_binomial_root(eta, u), _negative_binomial_root(eta, u.clone().requires_grad_())
    assert (short.shape[-1], full.shape[-1]) == (1, 2)
    torch.testing.assert_close((short**2).sum(-1), (full**2).sum(-1))


def test_information_of_a_negative_binomial_is_orthogonal_in_count_and_mean():
    """In (r, log μ): cross term zero, and r σ(l) for the mean."""
    z = torch.tensor([[1.3, 0.4], [8.0, -2.0]], dtype=F64)
    metric = pb.FisherRaoMetric(lambda z: NegativeBinomial(z[..., 0], logits=z[..., 1] - z[..., 0].log()))
    M = metric.tensor(z)
    r, mean = z[:, 0], z[:, 1].exp()
    torch.testing.assert_close(M[:, 0, 1], torch.zeros(2, dtype=F64), rtol=0, atol=1e-14)
    torch.testing.assert_close(M[:, 1, 1], r * mean / (r + mean))


# -- distances ---------------------------------------------------------------------------------------------------------

PROBS = torch.tensor([[0.2, 0.5, 0.3], [0.7, 0.05, 0.25]], dtype=F64)


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        (lambda p: Bernoulli(probs=p), lambda p, q: 2 * abs(math.asin(p**0.5) - math.asin(q**0.5))),
        (lambda p: Binomial(6, probs=p), lambda p, q: 2 * 6**0.5 * abs(math.asin(p**0.5) - math.asin(q**0.5))),
        (lambda p: Poisson(9 * p), lambda p, q: 6 * abs(p**0.5 - q**0.5)),
        (lambda p: Geometric(probs=p), lambda p, q: 2 * abs(math.atanh((1 - p) ** 0.5) - math.atanh((1 - q) ** 0.5))),
        (
            lambda p: NegativeBinomial(SIZES[1], probs=p),
            lambda p, q: 2 * 6**0.5 * abs(math.asinh((p / (1 - p)) ** 0.5) - math.asinh((q / (1 - q)) ** 0.5)),
        ),
    ],
)
@pytest.mark.parametrize(("p", "q"), [(0.2, 0.7), (0.9, 0.05), (0.4, 0.4001)])
def test_distances_on_a_line(family, expected, p, q):
    """Closed form = sum of chords = integral of the metric, for the identity decoder."""
    a, b = torch.tensor([p], dtype=F64), torch.tensor([q], dtype=F64)
    distance = pb.rao_distance(family(a), family(b)).item()
    assert distance == pytest.approx(expected(p, q), rel=1e-11, abs=0)
    metric = pb.FisherRaoMetric(family)
    nodes = a + torch.linspace(0, 1, 17, dtype=F64)[:, None] * (b - a)
    assert metric.ds2(nodes[:-1], nodes[1:]).sqrt().sum().item() == pytest.approx(distance, rel=1e-11, abs=0)
    t, w = (torch.tensor(x) for x in np.polynomial.legendre.leggauss(60))
    speed = metric.norm(a + 0.5 * (1 + t[:, None]) * (b - a), (b - a).expand(60, 1))
    assert (0.5 * w @ speed).item() == pytest.approx(distance, rel=1e-10, abs=0)


@pytest.mark.parametrize(
    ("family", "scale"),
    [
        (lambda x: Categorical(logits=x), 1.0),
        (lambda x: OneHotCategorical(logits=x), 1.0),
        (lambda x: OneHotCategoricalStraightThrough(logits=x), 1.0),
        (lambda x: Multinomial(5, logits=x), 5**0.5),
    ],
)
def test_distance_on_the_simplex_is_a_great_circle(family, scale):
    """2 arccos Σ √(pq), reached with order two by chords along the great circle of √p."""
    first, second = PROBS.sqrt()
    angle = torch.acos(first @ second)
    distance = pb.rao_distance(family(PROBS[0].log()), family(PROBS[1].log()))
    torch.testing.assert_close(distance, 2 * scale * angle)
    metric = pb.FisherRaoMetric(family)

    def length(num_segments: int) -> Tensor:
        t = torch.linspace(0, 1, num_segments + 1, dtype=F64)[:, None]
        root = (torch.sin((1 - t) * angle) * first + torch.sin(t * angle) * second) / torch.sin(angle)
        z = 2 * root.log()
        return metric.ds2(z[:-1], z[1:]).sqrt().sum()

    coarse, fine = length(50), length(100)
    assert ((distance - coarse) / (distance - fine)).item() == pytest.approx(4, rel=1e-3, abs=0)
    torch.testing.assert_close((4 * fine - coarse) / 3, distance, rtol=1e-9, atol=0)


def test_close_categories_keep_their_distance():
    """arccos would round it to zero: for p + dp it is √Σ dp²/p."""
    delta = 1e-9 * torch.tensor([1.0, -2.0, 1.0], dtype=F64)
    distance = pb.rao_distance(
        Categorical(logits=PROBS[0].log()), Categorical(logits=PROBS[0].log() + delta / PROBS[0])
    )
    torch.testing.assert_close(distance, (delta**2 / PROBS[0]).sum().sqrt(), rtol=1e-6, atol=0)


@dtypes
def test_distance_of_saturated_bernoullis(dtype):
    p, q = (Bernoulli(logits=torch.tensor([x, -x], dtype=dtype)) for x in (50.0, 60.0))
    expected = torch.full((2,), 2 * (math.exp(-25) - math.exp(-30)), dtype=dtype)
    torch.testing.assert_close(pb.rao_distance(p, q), expected, rtol=1e-4 if dtype == F32 else 1e-9, atol=0)
    whole = pb.rao_distance(
        Bernoulli(logits=torch.tensor(300.0, dtype=dtype)), Bernoulli(logits=torch.tensor(-300.0, dtype=dtype))
    )
    torch.testing.assert_close(whole, torch.tensor(math.pi, dtype=dtype))


@pytest.mark.parametrize("case", [case for case in CASES if "Continuous" not in case.name], ids=str)
def test_distances_vanish_at_equality_with_finite_gradient(case):
    z = Z.clone().requires_grad_()
    distance = pb.rao_distance(case.decoder(z), case.decoder(Z))
    (gradient,) = torch.autograd.grad(distance.sum(), z)
    assert (distance < 1e-12).all()
    assert torch.isfinite(gradient).all()


def test_continuous_bernoulli_has_no_closed_form_distance():
    p = ContinuousBernoulli(logits=torch.zeros(1))
    with pytest.raises(NotImplementedError, match="identity decoder"):
        pb.rao_distance(p, p)


@pytest.mark.parametrize("family", [Binomial, NegativeBinomial])
def test_distance_needs_equal_total_counts(family):
    p, q = (family(torch.tensor(n), logits=torch.zeros(1)) for n in (2.0, 3.0))
    with pytest.raises(NotImplementedError, match="Keep total_count the same"):
        pb.rao_distance(p, q)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_root_of_bernoulli_is_the_slope_of_its_embedding_at_every_saturation(dtype):
    logits = torch.cat([torch.linspace(-40, 40, 401), torch.tensor([-3000.0, -180.0, 180.0, 3000.0])]).to(dtype)
    info = pb.fisher(Bernoulli(logits=logits))
    assert info.root is not None
    slope = 0.5 / torch.cosh(0.5 * logits.double())
    eps = torch.finfo(dtype).eps
    found = info.root(info.eta, torch.ones_like(info.eta))[..., 0]
    torch.testing.assert_close(found.double(), slope, rtol=64 * eps, atol=1e-30)


class Claimed(torch.distributions.Distribution):
    """A family that says of itself what is not true."""

    def __init__(self, rate: Tensor):
        self.rate = rate
        super().__init__(rate.shape[:-1], rate.shape[-1:], validate_args=False)


@pytest.mark.parametrize(
    ("root", "sentence"),
    [
        (lambda eta, u: u / eta.sqrt(), None),
        (lambda eta, u: -u / eta.sqrt(), "must have its derivative for a root"),
        (lambda eta, u: (u / eta.sqrt()).flip(-1), "each number of which depends"),
        (
            lambda eta, u: u / eta.sqrt() * (1 + (eta.sum(-1, keepdim=True) > 2.99)),
            "each number of which depends",
        ),
    ],
)
def test_what_an_information_promises_is_checked(root, sentence):
    pb.fisher.register(Claimed)(
        lambda p: pb.Information(p.rate, root=root, isometry=lambda eta, _: 2 * eta.sqrt(), separable=True)
    )
    metric = pb.FisherRaoMetric(lambda z: Claimed(z.exp()))
    z = torch.tensor([[0.3, 0.6], [0.4, 0.3990]], dtype=torch.float64)
    if sentence is None:
        pb.testing.check_metric(metric, z)
        return
    with pytest.raises(AssertionError, match=sentence):
        testing._promises(metric, z, 1e-7)


FREE_AND_CONSTANT = {
    "Binomial": (lambda n, z: Binomial(n, logits=z, validate_args=False), 4.0),
    "NegativeBinomial": (lambda n, z: NegativeBinomial(n, logits=z), 4.0),
    "StudentT": (lambda n, z: torch.distributions.StudentT(n, z, torch.ones_like(z)), 4.0),
}


@pytest.mark.parametrize("name", FREE_AND_CONSTANT)
def test_equal_values_do_not_make_a_parameter_a_constant(name):
    """Codes at which a free parameter happens to agree: no embedding, and steps as in a batch where it does not
    agree."""
    family, constant = FREE_AND_CONSTANT[name]
    free = pb.FisherRaoMetric(lambda z: family(z[..., :1].exp(), z[..., 1:]))
    known = pb.FisherRaoMetric(lambda z: family(torch.tensor([constant], dtype=z.dtype), z[..., 1:]))
    z = torch.tensor([[1.0, -0.5], [1.0, 0.3], [1.0, 0.9]], dtype=torch.float64)
    assert free.embed(z) is None
    assert known.embed(z) is not None
    others = torch.tensor([[1.0, 0.1], [1.0, 0.4], [1.2, 0.7]], dtype=torch.float64)
    torch.testing.assert_close(
        free.ds2(z, others), torch.stack([free.ds2(*pair) for pair in zip(z, others, strict=True)])
    )


# --- zero-inflated counts ---------------------------------------------------------------------------------------------

INFLATED = {
    "Poisson": lambda gate, x: pb.ZeroInflated(torch.distributions.Poisson(x.exp()), gate),
    "NegativeBinomial": lambda gate, x: pb.ZeroInflated(NegativeBinomial(x.exp(), logits=0.7 * x - 0.5), gate),
    "Geometric": lambda gate, x: pb.ZeroInflated(torch.distributions.Geometric(logits=x), gate),
}


@pytest.mark.parametrize("name", INFLATED)
def test_information_of_zero_inflated_counts_is_the_enumerated_covariance_of_the_score(name):
    z = torch.tensor([[-1.0, 0.4], [2.0, -1.0], [-40.0, 0.3], [30.0, 0.3]], dtype=F64)
    x = torch.arange(400, dtype=F64)[:, None]

    def log_probs(z: Tensor) -> Tensor:
        return INFLATED[name](z[:, 0], z[:, 1]).log_prob(x)

    values, scores = log_probs(z), torch.func.jacfwd(log_probs)(z).diagonal(dim1=1, dim2=2)
    torch.testing.assert_close(values.exp().sum(0), torch.ones(len(z), dtype=F64))
    expected = torch.einsum("xn,xin,xjn->nij", values.exp(), scores, scores)
    found = pb.FisherRaoMetric(lambda z: INFLATED[name](z[..., 0], z[..., 1])).tensor(z)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-14)


def test_a_closed_gate_leaves_the_base_and_draws_have_the_moments():
    base = NegativeBinomial(torch.tensor(3.0), logits=torch.tensor(0.4))
    p, q = (pb.ZeroInflated(base, torch.tensor(gate)) for gate in (-60.0, 0.5))
    torch.testing.assert_close(p.log_prob(torch.arange(5.0)), base.log_prob(torch.arange(5.0)))
    torch.manual_seed(0)
    draws = q.sample((100_000,))
    assert abs(draws.mean() - q.mean) < 5 * (q.variance / 100_000) ** 0.5
    assert draws.var() == pytest.approx(q.variance.item(), rel=0.05)
    half = pb.blend(q, pb.most_uncertain(q), torch.tensor(0.5))
    assert half.mean > q.mean
    with pytest.raises(NotImplementedError, match="probability of a zero for Poisson, NegativeBinomial and Geometric"):
        pb.fisher(pb.ZeroInflated(Binomial(3, logits=torch.tensor(0.0)), torch.tensor(0.0))).matrix  # noqa: B018
