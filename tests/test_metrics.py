"""Metrics: the laws all of them obey, their agreement by independent routes, and measured orders of convergence."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import (
    Bernoulli,
    Beta,
    Binomial,
    Categorical,
    Cauchy,
    ContinuousBernoulli,
    Dirichlet,
    Distribution,
    Exponential,
    Gamma,
    Geometric,
    Gumbel,
    HalfCauchy,
    HalfNormal,
    Independent,
    InverseGamma,
    Laplace,
    LogNormal,
    LowRankMultivariateNormal,
    Multinomial,
    MultivariateNormal,
    NegativeBinomial,
    Normal,
    OneHotCategorical,
    Pareto,
    Poisson,
    Uniform,
    VonMises,
    Weibull,
    Wishart,
)
from torch.nn.functional import softplus

import pullback as pb
import pullback.testing
from problems import PROBLEMS, Problem
from pullback._decoders.pullback import pulled_back

F64 = torch.float64
W = torch.randn(10, 2, generator=torch.Generator().manual_seed(5), dtype=F64)

Decoder = Callable[[Tensor], Distribution]


def h(z: Tensor) -> Tensor:
    """A curved map to ten numbers."""
    y = z @ W.to(z).mT
    return torch.tanh(y) + 0.3 * torch.sin(y**2)


def pos(x: Tensor) -> Tensor:
    return softplus(x) + 0.4


def codes(n: int = 4, dtype: torch.dtype = F64) -> Tensor:
    return torch.randn(n, 2, generator=torch.Generator().manual_seed(6), dtype=F64).to(dtype)


def covariance(y: Tensor) -> Tensor:
    return torch.diag_embed(pos(y[..., :3])) + 0.5 * y[..., 3:6, None] * y[..., None, 3:6]


GAUSSIAN: dict[str, Decoder] = {
    "Normal": lambda z: Normal(h(z)[..., :3], pos(h(z)[..., 3:6])),
    "MultivariateNormal": lambda z: MultivariateNormal(h(z)[..., :3], covariance(h(z)[..., 3:])),
    "LowRankMultivariateNormal": lambda z: LowRankMultivariateNormal(
        h(z)[..., :3], h(z)[..., 3:6, None], pos(h(z)[..., 6:9])
    ),
    "Independent Normal": lambda z: Independent(Normal(h(z)[..., :3], pos(h(z)[..., 3:6])), 1),
    "Product of Gaussians": lambda z: pb.Product(GAUSSIAN["Normal"](z), GAUSSIAN["MultivariateNormal"](z)),
}
MOMENTS: dict[str, Decoder] = {
    "Bernoulli": lambda z: Bernoulli(logits=2 * h(z)),
    "Poisson": lambda z: Poisson(pos(h(z)[..., :4])),
    "OneHotCategorical": lambda z: OneHotCategorical(logits=h(z).unflatten(-1, (2, 5))),
    "Gamma": lambda z: Gamma(pos(h(z)[..., :3]), pos(h(z)[..., 3:6])),
    "Product": lambda z: pb.Product(*(MOMENTS[name](z) for name in ("Bernoulli", "OneHotCategorical", "Gamma"))),
}
SCALAR: dict[str, Decoder] = {
    "Beta": lambda z: Beta(pos(h(z)[..., :2]), pos(h(z)[..., 2:4])),
    "Binomial": lambda z: Binomial(7, logits=h(z)[..., :3]),
    "Categorical": lambda z: Categorical(logits=h(z)),
    "Cauchy": lambda z: Cauchy(h(z)[..., :2], pos(h(z)[..., 2:4])),
    "ContinuousBernoulli": lambda z: ContinuousBernoulli(logits=1.5 + h(z)[..., :3]),
    "Dirichlet": lambda z: Dirichlet(pos(h(z))),
    "Exponential": lambda z: Exponential(pos(h(z)[..., :3])),
    "Geometric": lambda z: Geometric(logits=h(z)[..., :3]),
    "Gumbel": lambda z: Gumbel(h(z)[..., :2], pos(h(z)[..., 2:4])),
    "HalfCauchy": lambda z: HalfCauchy(pos(h(z)[..., :3])),
    "HalfNormal": lambda z: HalfNormal(pos(h(z)[..., :3])),
    "InverseGamma": lambda z: InverseGamma(pos(h(z)[..., :2]), pos(h(z)[..., 2:4])),
    "Laplace": lambda z: Laplace(h(z)[..., :2], pos(h(z)[..., 2:4])),
    "LogNormal": lambda z: LogNormal(h(z)[..., :2], pos(h(z)[..., 2:4])),
    "Multinomial": lambda z: Multinomial(5, logits=h(z)[..., :4]),
    "NegativeBinomial": lambda z: NegativeBinomial(3.5, logits=h(z)[..., :3]),
    "VonMises": lambda z: VonMises(h(z)[..., :2], pos(h(z)[..., 2:4])),
    "Weibull": lambda z: Weibull(pos(h(z)[..., :2]), pos(h(z)[..., 2:4])),
}
FAMILIES = GAUSSIAN | MOMENTS | SCALAR
CONJUGATE = [
    name for name in FAMILIES if name not in ("Cauchy", "Gumbel", "HalfCauchy", "Laplace", "VonMises", "Weibull")
]


def assert_equal(value: Tensor, expected: Tensor, rtol: float) -> None:
    """Relative to the largest entry of the matrix at each code."""
    size = expected.abs().amax((-2, -1), keepdim=True)
    torch.testing.assert_close(value / size, expected / size, rtol=0, atol=rtol)


# --- laws ---


def variants() -> list:
    metrics = {
        "Fisher-Rao": (pb.FisherRaoMetric, FAMILIES, None),
        "Hessian": (pb.DivergenceMetric, MOMENTS | GAUSSIAN, None),
        "Hessian of KL": (lambda f: pb.DivergenceMetric(f, pb.divergences.kl), {"Gamma": MOMENTS["Gamma"]}, None),
        "Hellinger": (lambda f: pb.DivergenceMetric(f, pb.divergences.hellinger), MOMENTS, None),
        "central difference": (
            lambda f: pb.DivergenceMetric(f, method=pb.divergences.CentralDifference()),
            MOMENTS,
            1e-6,
        ),
        "one-sided difference": (
            lambda f: pb.DivergenceMetric(f, pb.divergences.kl, pb.divergences.OneSidedDifference()),
            MOMENTS,
            1e-4,
        ),
        "Monte Carlo": (
            lambda f: pb.DivergenceMetric(f, pb.divergences.monte_carlo_kl(300)),
            {"Normal": GAUSSIAN["Normal"]},
            None,
        ),
        "score": (lambda f: pb.ScoreMetric(f, num_samples=300), MOMENTS | GAUSSIAN, None),
        "Euclidean": (pb.EuclideanMetric, MOMENTS | GAUSSIAN, None),
        "Wasserstein": (pb.WassersteinMetric, GAUSSIAN, None),
    }
    return [
        pytest.param(metric, family, rtol, id=f"{name}, {label}")
        for name, (metric, families, rtol) in metrics.items()
        for label, family in families.items()
    ]


@pytest.mark.parametrize(("metric", "family", "rtol"), variants())
def test_every_metric_obeys_the_laws(metric, family, rtol):
    pb.testing.check_metric(metric(family), codes(2), rtol=rtol)


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_problems_obey_the_laws(problem: Problem):
    pb.testing.check_metric(problem.metric, problem.points(4))


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_integrating_ds2_along_the_geodesic_gives_the_distance_with_order_two(problem: Problem):
    a, b = problem.points(6), problem.points(6)

    def error(num_segments: int) -> Tensor:
        t = torch.linspace(0, 1, num_segments + 1, dtype=F64)
        nodes = problem.path(a, b, t)
        steps = problem.metric.ds2(nodes[:, :-1], nodes[:, 1:]).sqrt()
        torch.testing.assert_close(steps.amax(-1), steps.amin(-1), rtol=1e-9, atol=0)  # constant speed
        return (steps.sum(-1) / problem.distance(a, b) - 1).abs()

    coarse, fine = error(32), error(64)
    assert (coarse < 1e-3).all()
    assert ((fine / coarse - 0.25).abs() < 0.01).all() or (coarse < 1e-12).all()


# --- one metric by many routes ---


@pytest.mark.parametrize("name", FAMILIES)
def test_hessian_of_kl_is_fisher_rao(name):
    z = codes()
    M = pb.FisherRaoMetric(FAMILIES[name]).tensor(z)
    for divergence in (pb.divergences.symmetrized_kl, pb.divergences.kl, lambda p, q: pb.divergences.kl(q, p)):
        assert_equal(pb.DivergenceMetric(FAMILIES[name], divergence).tensor(z), M, 1e-10)


@pytest.mark.parametrize("name", CONJUGATE)
def test_scaled_renyi_and_hellinger_are_fisher_rao(name):
    z = codes()
    M = pb.FisherRaoMetric(FAMILIES[name]).tensor(z)
    for divergence in (
        pb.divergences.renyi(0.3),
        pb.divergences.renyi(0.5),
        pb.divergences.renyi(2.0),
        pb.divergences.hellinger,
    ):
        assert_equal(pb.DivergenceMetric(FAMILIES[name], divergence).tensor(z), M, 1e-10)


@pytest.mark.parametrize("name", FAMILIES)
def test_score_is_within_five_standard_errors_and_positive(name):
    z = codes(2)
    M = pb.FisherRaoMetric(FAMILIES[name]).tensor(z)
    estimates = torch.stack(
        [pb.ScoreMetric(FAMILIES[name], num_samples=400, random_state=seed).tensor(z) for seed in range(20)]
    )
    error = estimates.std(0) / 20**0.5
    assert ((estimates.mean(0) - M).abs() <= 5 * error).all()
    smallest, largest = torch.linalg.eigvalsh(estimates).unbind(-1)
    assert (smallest >= -1e-14 * largest).all()


def test_hessian_of_monte_carlo_kl_is_a_score_covariance():
    z = codes()
    for name in ("Bernoulli", "Gamma", "Laplace"):
        M = pb.DivergenceMetric(FAMILIES[name], pb.divergences.monte_carlo_kl(400)).tensor(z)
        assert (torch.linalg.eigvalsh(M) > 0).all()
        torch.testing.assert_close(M, pb.FisherRaoMetric(FAMILIES[name]).tensor(z), rtol=0.35, atol=0.1)


@pytest.mark.filterwarnings("ignore:Singular sample detected")
def test_wishart_by_its_log_normalizer():
    """torch's own divergence of exponential families is constant to autodiff in its first argument."""

    def decoder(z: Tensor) -> Distribution:
        return Wishart(5 + pos(h(z)[..., 0]), covariance(h(z)[..., 1:]))

    z = codes(2)
    exact = pb.DivergenceMetric(decoder).tensor(z)
    assert_equal(pb.DivergenceMetric(decoder, pb.divergences.kl).tensor(z), exact, 1e-9)
    estimates = torch.stack(
        [pb.ScoreMetric(decoder, num_samples=400, random_state=seed).tensor(z) for seed in range(20)]
    )
    assert ((estimates.mean(0) - exact).abs() <= 5 * estimates.std(0) / 20**0.5).all()
    v = 1e-3 * codes(2).flip(0)
    steps = pb.FisherRaoMetric(decoder).ds2(z, z + v)  # no embedding: twice the symmetrized divergence
    torch.testing.assert_close(steps, torch.einsum("ni,nij,nj->n", v, exact, v), rtol=1e-2, atol=0)


@pytest.mark.parametrize(
    ("method", "order"), [(pb.divergences.OneSidedDifference, 1), (pb.divergences.CentralDifference, 2)]
)
@pytest.mark.parametrize("name", ["Normal", "Beta", "Bernoulli"])
def test_finite_differences_converge_with_their_order(method, order, name):
    z = codes()
    M = pb.FisherRaoMetric(FAMILIES[name]).tensor(z)
    errors = [
        (pb.DivergenceMetric(FAMILIES[name], pb.divergences.kl, method(eps)).tensor(z) - M).norm()
        for eps in (4e-3, 2e-3, 1e-3)
    ]
    orders = [math.log2(a / b) for a, b in pairwise(errors)]
    assert orders == pytest.approx([order, order], abs=0.1)


def test_one_sided_difference_is_the_printed_formula():
    z, eps = codes(), 1e-3
    decoder = FAMILIES["Gamma"]
    M = pb.DivergenceMetric(decoder, pb.divergences.kl, pb.divergences.OneSidedDifference(eps)).tensor(z)

    def printed(*v: float) -> Tensor:
        return torch.distributions.kl_divergence(decoder(z), decoder(z + torch.tensor(v, dtype=F64))).sum(-1)

    i, j, both = printed(eps, 0), printed(0, eps), printed(eps, eps)
    rows = [torch.stack([2 * i, both - i - j], -1), torch.stack([both - i - j, 2 * j], -1)]
    assert_equal(M, torch.stack(rows, -2) / eps**2, 1e-8)


def test_plain_functions_count_as_kullback_leibler():
    z = codes()

    def pearson(p: Bernoulli, q: Bernoulli) -> Tensor:
        return 0.5 * (p.probs - q.probs) ** 2 / (q.probs * (1 - q.probs))

    decoder = FAMILIES["Bernoulli"]
    assert_equal(pb.DivergenceMetric(decoder, pearson).tensor(z), pb.FisherRaoMetric(decoder).tensor(z), 1e-12)


def test_divergence_metric_is_symmetric_whatever_the_divergence():
    a, b = codes(), codes() + 0.1
    metric = pb.DivergenceMetric(FAMILIES["Gamma"], pb.divergences.kl)
    assert torch.equal(metric.ds2(a, b), metric.ds2(b, a))
    torch.testing.assert_close(metric.ds2(a, b), pb.DivergenceMetric(FAMILIES["Gamma"]).ds2(a, b))


@pytest.mark.parametrize("decoder", [lambda z: Uniform(z, z + 1), lambda z: Independent(Pareto(pos(z), pos(z)), 1)])
def test_moving_supports_are_refused(decoder):
    with pytest.raises(NotImplementedError, match=r"support of this .* moves with the code.*EuclideanMetric"):
        pb.DivergenceMetric(decoder).tensor(codes())
    fixed = pb.DivergenceMetric(lambda z: Pareto(torch.ones_like(z), pos(z))).tensor(codes())
    assert_equal(fixed, pb.FisherRaoMetric(lambda z: Exponential(pos(z))).tensor(codes()), 1e-12)


# --- Euclid and Wasserstein ---


@pytest.mark.parametrize("name", [*GAUSSIAN, "Bernoulli", "Poisson", "Product"])
def test_euclidean_metric_is_its_definition(name):
    z = codes()

    def flat(p: Distribution) -> list[Tensor]:
        moments = p.mean + p.stddev if isinstance(p, pb.Product) else (p.mean, p.stddev)
        return [m.flatten() for m in moments]

    metric = pb.EuclideanMetric(FAMILIES[name])
    for code, M in zip(z, metric.tensor(z), strict=True):
        J = torch.autograd.functional.jacobian(lambda w: torch.cat(flat(FAMILIES[name](w))), code)
        torch.testing.assert_close(M, J.mT @ J)
        difference = torch.cat(flat(FAMILIES[name](code + 0.1))) - torch.cat(flat(FAMILIES[name](code)))
        torch.testing.assert_close(metric.ds2(code, code + 0.1), (difference**2).sum())


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_euclidean_metric_is_finite_at_saturation(dtype):
    z = torch.tensor([[100.0, -300.0], [0.0, 1.0]], dtype=dtype)
    assert torch.isfinite(pb.EuclideanMetric(lambda z: Bernoulli(logits=z)).tensor(z)).all()


@pytest.mark.parametrize("metric", [pb.FisherRaoMetric, pb.EuclideanMetric])
def test_codes_may_share_memory_and_be_none(metric):
    z = torch.tensor([0.3, 0.7], dtype=F64)
    tensor = metric(lambda z: Normal(z, torch.exp(z))).tensor
    for shared in (z.expand(3, 2), z[:, None].expand(2, 2), z[0].expand(3, 2)):
        torch.testing.assert_close(tensor(shared), tensor(shared.clone()))
    assert tensor(torch.empty(0, 2, dtype=F64)).shape == (0, 2, 2)


def test_families_without_a_mean_are_refused():
    for decoder in (lambda z: Categorical(logits=h(z)), FAMILIES["Cauchy"]):
        with pytest.raises(NotImplementedError, match=r"has no mean.*OneHotCategorical"):
            pb.EuclideanMetric(decoder).tensor(codes())


@pytest.mark.parametrize("name", GAUSSIAN)
def test_wasserstein_metric_is_the_hessian_of_the_distance(name):
    z = codes()
    M = pb.WassersteinMetric(GAUSSIAN[name]).tensor(z)
    assert_equal(pb.DivergenceMetric(GAUSSIAN[name], pb.divergences.wasserstein2).tensor(z), M, 1e-10)


def test_wasserstein_metric_of_independent_features_is_euclidean():
    z = codes()
    diagonal = pb.WassersteinMetric(
        lambda z: MultivariateNormal(h(z)[..., :3], torch.diag_embed(pos(h(z)[..., 3:6]) ** 2))
    )
    for metric in (pb.WassersteinMetric(GAUSSIAN["Normal"]), diagonal):
        assert_equal(metric.tensor(z), pb.EuclideanMetric(GAUSSIAN["Normal"]).tensor(z), 1e-12)
        torch.testing.assert_close(metric.ds2(z, z + 0.1), pb.EuclideanMetric(GAUSSIAN["Normal"]).ds2(z, z + 0.1))


def test_wasserstein_metric_has_derivatives_at_round_covariances():
    def decoder(z: Tensor) -> Distribution:
        return MultivariateNormal(h(z)[..., :3], covariance(h(z)[..., 3:] - h(torch.zeros_like(z))[..., 3:]))

    z = torch.zeros(1, 2, dtype=F64, requires_grad=True)
    eigenvalues = torch.linalg.eigvalsh(decoder(z).covariance_matrix)
    torch.testing.assert_close(eigenvalues, torch.full_like(eigenvalues, pos(torch.zeros(1, dtype=F64)).item()))
    metric = pb.WassersteinMetric(decoder)
    (gradient,) = torch.autograd.grad(metric.tensor(z).sum(), z)
    v = 1e-5 * codes(1)
    slope = (metric.tensor(z + v).sum() - metric.tensor(z - v).sum()) / 2
    torch.testing.assert_close((gradient * v).sum(), slope, rtol=1e-6, atol=0)


def test_wasserstein_metric_takes_gaussians_only():
    with pytest.raises(NotImplementedError, match=r"Gaussians only, not for Bernoulli.*pullback\.FisherRaoMetric"):
        pb.WassersteinMetric(FAMILIES["Bernoulli"]).tensor(codes())


def test_embedding_of_the_flat_metrics_gives_their_chords():
    z = codes()
    for metric in (pb.EuclideanMetric(FAMILIES["Product"]), pb.WassersteinMetric(GAUSSIAN["Normal"])):
        (phi, psi), (other, _) = metric.embed(z), metric.embed(z + 0.1)
        assert phi is psi
        torch.testing.assert_close(((other - phi) ** 2).sum(-1), metric.ds2(z, z + 0.1))
    assert pb.WassersteinMetric(GAUSSIAN["MultivariateNormal"]).embed(z) is None


# --- invariance ---


def length(metric: pb.Metric, nodes: Tensor) -> Tensor:
    return metric.ds2(nodes[:-1], nodes[1:]).sqrt().sum()


def curve(num_segments: int = 500) -> Tensor:
    t = torch.linspace(0, 1, num_segments + 1, dtype=F64)
    return torch.stack([torch.cos(2 * t), t + torch.sin(3 * t)], -1)


@pytest.mark.parametrize(
    "name", ["Normal", "MultivariateNormal", "Bernoulli", "Gamma", "Product", "Laplace", "Weibull"]
)
def test_lengths_do_not_depend_on_latent_coordinates(name):
    def shear(w: Tensor) -> Tensor:  # a diffeomorphism of the plane, with its inverse below
        return torch.stack([w[..., 0] + torch.sin(w[..., 1]), torch.sinh(w[..., 1])], -1)

    def inverse(z: Tensor) -> Tensor:
        y = torch.asinh(z[..., 1])
        return torch.stack([z[..., 0] - torch.sin(y), y], -1)

    for metric in (pb.FisherRaoMetric(FAMILIES[name]), pb.DivergenceMetric(FAMILIES[name])):
        other = dataclasses.replace(metric, decoder=lambda w: FAMILIES[name](shear(w)))
        torch.testing.assert_close(length(other, inverse(curve())), length(metric, curve()), rtol=1e-9, atol=0)


PARAMETRIZATIONS = {
    "logits and probabilities": (lambda y: Bernoulli(logits=y), lambda y: Bernoulli(torch.sigmoid(y))),
    "categories": (lambda y: Categorical(logits=y), lambda y: Categorical(y.softmax(-1))),
    "rate and scale": (lambda y: Exponential(pos(y)), lambda y: Exponential(1 / (1 / pos(y)))),
    "variance and deviation": (lambda y: Normal(y, pos(y)), lambda y: Normal(y, (pos(y) ** 2).sqrt())),
    "covariance, precision and factor": (
        lambda y: MultivariateNormal(y[..., :3], covariance(y)),
        lambda y: MultivariateNormal(y[..., :3], precision_matrix=torch.linalg.inv(covariance(y))),
        lambda y: MultivariateNormal(y[..., :3], scale_tril=torch.linalg.cholesky(covariance(y))),
    ),
    "x and log x": (lambda y: Normal(y, pos(y)), lambda y: LogNormal(y, pos(y))),
}


@pytest.mark.parametrize("name", PARAMETRIZATIONS)
def test_lengths_do_not_depend_on_the_parameters_of_the_family(name):
    lengths, tensors = [], []
    for family in PARAMETRIZATIONS[name]:
        metric = pb.FisherRaoMetric(lambda z, family=family: family(h(z)))
        lengths.append(length(metric, curve()))
        tensors.append(metric.tensor(codes()))
    for other, M in zip(lengths[1:], tensors[1:], strict=True):
        torch.testing.assert_close(other, lengths[0], rtol=1e-9, atol=0)
        assert_equal(M, tensors[0], 1e-10)


COORDINATES: dict[str, tuple[Decoder, Callable[[Distribution], Tensor], Callable[[Tensor], Tensor]]] = {
    "Bernoulli by probability": (
        lambda z: Bernoulli(logits=h(z)),
        lambda p: p.probs[..., None],
        lambda eta: (1 / (eta * (1 - eta)))[..., None],
    ),
    "Normal by variance": (
        lambda z: Normal(h(z)[..., :3], pos(h(z)[..., 3:6])),
        lambda p: torch.stack([p.loc, p.scale**2], -1),
        lambda eta: torch.diag_embed(torch.stack([1 / eta[..., 1], 0.5 / eta[..., 1] ** 2], -1)),
    ),
    "Exponential by scale": (
        lambda z: Exponential(pos(h(z))),
        lambda p: 1 / p.rate[..., None],
        lambda eta: (1 / eta**2)[..., None],
    ),
    "Poisson by logarithm": (
        lambda z: Poisson(pos(h(z))),
        lambda p: p.rate.log()[..., None],
        lambda eta: eta.exp()[..., None],
    ),
}


@pytest.mark.parametrize("name", COORDINATES)
def test_metric_does_not_depend_on_the_coordinates_of_the_information(name):
    """The textbook matrix in other coordinates of the family pulls back to the same metric."""
    decoder, chart, matrix = COORDINATES[name]
    other = pulled_back(lambda p: pb.Information.from_matrix(chart(p), matrix), decoder, codes())
    assert_equal(other, pb.FisherRaoMetric(decoder).tensor(codes()), 1e-12)


@pytest.mark.parametrize("name", [*GAUSSIAN, *MOMENTS])
def test_single_precision_agrees_with_double(name):
    z = codes()
    metrics = [pb.FisherRaoMetric, pb.DivergenceMetric, pb.EuclideanMetric]
    metrics += [pb.WassersteinMetric] if name in GAUSSIAN else []
    for metric in metrics:
        exact, single = metric(FAMILIES[name]).tensor(z), metric(FAMILIES[name]).tensor(z.float())
        assert single.dtype == torch.float32
        assert_equal(single.double(), exact, 2e-5)


def test_volume_is_minus_infinity_where_the_metric_is_singular():
    z = codes()
    assert torch.isneginf(pb.FisherRaoMetric(lambda z: Normal(z[..., :1], 1.0)).log_volume(z)).all()


# --- steps without an embedding ---


class Logistic(Distribution):
    """A family known by its information alone."""

    arg_constraints: dict = {}  # noqa: RUF012

    def __init__(self, loc: Tensor, scale: Tensor) -> None:
        self.loc, self.scale = loc, scale
        super().__init__(loc.shape, validate_args=False)


@pb.fisher.register
def _(p: Logistic) -> pb.Information:
    def matrix(eta: Tensor) -> Tensor:
        return torch.diag_embed(torch.tensor([1 / 3, (3 + math.pi**2) / 9]).to(eta) / eta[..., 1:] ** 2)

    return pb.Information.from_matrix(torch.stack([p.loc, p.scale], -1), matrix)


def test_a_family_known_by_its_information_alone_has_steps():
    metric = pb.FisherRaoMetric(lambda z: Logistic(h(z)[..., :3], pos(h(z)[..., 3:6])))
    assert metric.embed(codes()) is None
    pb.testing.check_metric(metric, codes())


def test_an_unknown_family_says_what_to_do():
    class Unknown(Logistic.__base__):
        arg_constraints: dict = {}  # noqa: RUF012

        def __init__(self, loc: Tensor) -> None:
            super().__init__(loc.shape, validate_args=False)

    for measure in (pb.FisherRaoMetric(Unknown).tensor, lambda z: pb.FisherRaoMetric(Unknown).ds2(z, z)):
        with pytest.raises(NotImplementedError, match=r"Unknown.*fisher\.register.*ScoreMetric"):
            measure(codes())


# --- the laws themselves can fail ---


@dataclasses.dataclass(frozen=True)
class Altered(pb.Metric):
    """A metric with one law broken."""

    decoder: Decoder
    change: Callable[[Tensor, Tensor], Tensor] = lambda M, z: M
    step: Callable[[Tensor, Tensor, Tensor], Tensor] = lambda ds2, a, b: ds2
    volume: float = 1.0

    def tensor(self, z: Tensor) -> Tensor:
        return self.change(pb.FisherRaoMetric(self.decoder).tensor(z), z)

    def ds2(self, a: Tensor, b: Tensor) -> Tensor:
        return self.step(pb.FisherRaoMetric(self.decoder).ds2(a, b), a, b)

    def log_volume(self, z: Tensor) -> Tensor:
        return self.volume * super().log_volume(z)


class Skewed(Altered.__base__):
    """Wrong inner product and norm."""

    metric = pb.FisherRaoMetric(FAMILIES["Normal"])

    def tensor(self, z: Tensor) -> Tensor:
        return self.metric.tensor(z)

    def ds2(self, a: Tensor, b: Tensor) -> Tensor:
        return self.metric.ds2(a, b)

    def inner(self, z: Tensor, u: Tensor, v: Tensor) -> Tensor:
        return (u * v).sum(-1)


def centered(M: Tensor, z: Tensor) -> Tensor:
    return M * (1 + (z - z.reshape(-1, z.shape[-1]).mean(0)).square().sum(-1))[..., None, None]


def indefinite(M: Tensor, z: Tensor) -> Tensor:
    return M - 1.5 * torch.linalg.eigvalsh(M)[..., :1, None] * torch.eye(2, dtype=F64)


BROKEN = {
    "must have shape": {"change": lambda M, z: M[..., :1]},
    "must keep the dtype": {"change": lambda M, z: M.float()},
    "must be symmetric": {"change": lambda M, z: M + M.new_tensor([[0.0, 1.0], [0.0, 0.0]])},
    "must be positive semi-definite": {"change": indefinite},
    "log_volume": {"volume": 2.0},
    "ds2\\(b, a\\): average": {"step": lambda ds2, a, b: ds2 * (1 + (b - a)[..., 0])},
    "must not be negative": {"step": lambda ds2, a, b: -ds2},
    "must be zero": {"step": lambda ds2, a, b: ds2 + 0.1},
    "Is ds2 a squared length": {"step": lambda ds2, a, b: 0.5 * ds2},
    "one by one": {"change": centered},
    "must not let a NaN": {"step": lambda ds2, a, b: ds2 + 0 * a.sum()},
    "must transform as a tensor": {"change": lambda M, z: M + torch.eye(2, dtype=F64)},
}  # fmt: skip


@pytest.mark.parametrize("sentence", BROKEN)
def test_check_metric_names_the_broken_law(sentence):
    step = {"step": lambda ds2, a, b: ds2 + ((b - a) ** 2).sum(-1)} if "transform" in sentence else {}
    decoder = (lambda z: Normal(h(z), 1.0, validate_args=False)) if "NaN" in sentence else FAMILIES["Normal"]
    metric = Altered(decoder, **(BROKEN[sentence] | step))
    with pytest.raises(AssertionError, match=sentence):
        pb.testing.check_metric(metric, codes())


def test_check_metric_names_a_wrong_inner_product():
    with pytest.raises(AssertionError, match=r"inner\(z, u, v\) must be"):
        pb.testing.check_metric(Skewed(), codes())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_check_metric_has_no_alarm_for_the_rounding_at_its_origin(dtype):
    """There the values of an embedding are zero in one order of operations, and rounding in another."""
    for seed in range(4):
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(2, 5), nn.LayerNorm(5)).to(dtype)
        metric = pb.FisherRaoMetric(lambda z, net=net: Normal(h := net(z), 1 + h**2))
        pb.testing.check_metric(metric, torch.randn(6, 2, dtype=dtype))


def test_check_metric_needs_two_codes():
    with pytest.raises(ValueError, match="at least 2 codes"):
        pb.testing.check_metric(pb.FisherRaoMetric(FAMILIES["Normal"]), codes(1))


def test_check_metric_finds_shared_batch_statistics_in_a_decoder():
    norm = nn.LayerNorm(4).double()
    pb.testing.check_metric(pb.FisherRaoMetric(lambda z: Normal(norm(h(z)[..., :4]), 1.0)), codes())

    def standardized(z: Tensor) -> Distribution:
        y = h(z)
        return Normal(y - y.reshape(-1, 10).mean(0), 1.0)

    with pytest.raises(pb.DecoderError, match="one by one"):
        pb.testing.check_metric(pb.FisherRaoMetric(standardized), codes())
