"""Certificates: brackets that hold the true distance, and the nature of the minimum."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.distributions import (
    Bernoulli,
    Beta,
    Binomial,
    Categorical,
    Cauchy,
    Dirichlet,
    Exponential,
    Gamma,
    Geometric,
    Gumbel,
    HalfCauchy,
    HalfNormal,
    Independent,
    Laplace,
    LogNormal,
    Multinomial,
    MultivariateNormal,
    NegativeBinomial,
    Normal,
    Poisson,
    SigmoidTransform,
    StudentT,
    TransformedDistribution,
    VonMises,
    Weibull,
)

import pullback as pb
from helpers import Given
from problems import PROBLEMS
from pullback._geometry.certificate import lower_bounds

DOUBLE = torch.float64
NORMAL, SPHERE = (next(p for p in PROBLEMS if p.name == name) for name in ("Normal half-plane", "sphere S^2"))


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_bracket_holds_the_closed_form(problem):
    a, b = problem.points(8), problem.points(8)
    certificate = pb.certify(problem.metric, pb.geodesic(problem.metric, a, b))
    exact, rounding = problem.distance(a, b), 1e-14
    assert (certificate.lower <= exact + rounding).all()
    assert (exact <= certificate.upper + rounding).all()
    torch.testing.assert_close(certificate.upper, exact, rtol=1e-5, atol=0)
    assert (certificate.lower >= 0.5 * exact).all()
    assert certificate.strict.all()


@pytest.mark.parametrize("problem", PROBLEMS[:7], ids=str)
def test_bracket_closes_where_the_codes_are_the_family(problem):
    a, b = problem.points(4), problem.points(4)
    certificate = pb.certify(problem.metric, pb.geodesic(problem.metric, a, b))
    torch.testing.assert_close(certificate.lower, certificate.upper, rtol=1e-5, atol=0)


def test_a_geodesic_past_its_conjugate_point_is_no_minimum():
    """A great circle the long way round is a saddle, as the Hessian shows; the solver leaves it."""
    metric, b = SPHERE.metric, torch.tensor([[3.0, 0.0], [0.8, 0.0]], dtype=DOUBLE)
    angle = torch.atan(b[:, :1]) * torch.linspace(-2, 2, 65, dtype=DOUBLE) / 2
    circles = torch.stack([torch.tan(angle), torch.zeros_like(angle)], -1)
    path = pb.geodesic(metric, -b, b, solver=Given(circles))
    assert (path.length > torch.pi).tolist() == [True, False]
    found = pb.geodesic(metric, -b, b)
    # the short way of the first pair leads through infinity, where the chart ends
    assert ((found.length < torch.pi) | ~found.converged).tolist() == [True, True]
    beside = torch.tensor([0.0, 0.1], dtype=DOUBLE)
    found = pb.geodesic(metric, beside - b, beside + b)
    assert found.converged.all()
    assert (found.length < torch.pi).all()
    assert pb.certify(metric, path).strict.tolist() == [False, True]


def test_no_strict_minimum_where_a_dimension_is_ignored():
    metric = pb.EuclideanMetric(lambda z: SPHERE.metric.decoder(z[..., :2]))
    a, b = (torch.cat([SPHERE.points(2), torch.zeros(2, 1, dtype=DOUBLE)], -1) for _ in range(2))
    assert not pb.certify(metric, pb.geodesic(metric, a, b)).strict.any()


def turned(z: Tensor) -> Tensor:
    return torch.stack([torch.cos(z), torch.sin(z), torch.zeros_like(z)], -1)


def full_normal(z: Tensor) -> MultivariateNormal:
    factor = torch.zeros(*z.shape[:-1], 2, 2, dtype=z.dtype)
    factor[..., [0, 1], [0, 1]], factor[..., 1, 0] = z[..., 2:4].exp(), z[..., 4]
    return MultivariateNormal(z[..., :2], scale_tril=factor)


# Whole families: the codes are all their parameters. The ends share the first one of those in which a closed form takes
# it for known.
FAMILIES = {
    "Bernoulli": (lambda z: Bernoulli(logits=z[..., 0]), [-2.0], [3.0]),
    "Binomial": (lambda z: Binomial(z[..., 0].exp(), logits=z[..., 1], validate_args=False), [3.0, -3.0], [3.0, 3.0]),
    "Geometric": (lambda z: Geometric(logits=z[..., 0]), [-2.0], [3.0]),
    "Poisson": (lambda z: Poisson(z[..., 0].exp()), [-2.0], [3.0]),
    "NegativeBinomial": (lambda z: NegativeBinomial(z[..., 0].exp(), logits=z[..., 1]), [1.0, -4.0], [1.0, 4.0]),
    "Categorical": (lambda z: Categorical(logits=z), [3.0, 0.0, -1.0], [-3.0, 0.0, 1.0]),
    "Multinomial": (lambda z: Multinomial(7, logits=z), [3.0, 0.0, -1.0], [-3.0, 0.0, 1.0]),
    "Normal": (lambda z: Normal(z[..., 0], z[..., 1].exp()), [-4.0, 0.0], [4.0, 0.5]),
    "Laplace": (lambda z: Laplace(z[..., 0], z[..., 1].exp()), [-4.0, 0.0], [4.0, 0.5]),
    "Cauchy": (lambda z: Cauchy(z[..., 0], z[..., 1].exp()), [-4.0, 0.0], [4.0, 0.5]),
    "Gumbel": (lambda z: Gumbel(z[..., 0], z[..., 1].exp()), [-4.0, 0.0], [4.0, 0.5]),
    "LogNormal": (lambda z: LogNormal(z[..., 0], z[..., 1].exp()), [-4.0, 0.0], [4.0, 0.5]),
    "Weibull": (lambda z: Weibull(z[..., 0].exp(), z[..., 1].exp()), [-4.0, 0.0], [4.0, 0.5]),
    "StudentT": (lambda z: StudentT(z[..., 0].exp(), z[..., 1], z[..., 2].exp()), [0.0, -9.0, 0.0], [0.0, 9.0, 0.0]),
    "HalfNormal": (lambda z: HalfNormal(z[..., 0].exp()), [-2.0], [3.0]),
    "HalfCauchy": (lambda z: HalfCauchy(z[..., 0].exp()), [-2.0], [3.0]),
    "Exponential": (lambda z: Exponential(z[..., 0].exp()), [-2.0], [3.0]),
    "VonMises": (lambda z: VonMises(z[..., 1], z[..., 0].exp()), [2.5, -1.5], [2.5, 1.4]),
    "VonMisesFisher": (lambda z: pb.VonMisesFisher(turned(z[..., 1]), z[..., 0].exp()), [2.5, -1.5], [2.5, 1.4]),
    "MultivariateNormal": (full_normal, [-3.0, 0, 0, 0, 0.3], [3.0, 1, 0, 0.5, -0.2]),
    "MultivariateNormal, equal Σ": (full_normal, [-3.0, 0, 0, 0, 0.3], [3.0, 1, 0, 0, 0.3]),
    "Gamma": (lambda z: Gamma(z[..., 0].exp(), z[..., 1].exp()), [2.0, 3.0], [2.0, -1.0]),
    "Beta": (lambda z: Beta(z[..., 0].exp(), z[..., 1].exp()), [2.0, 3.0], [2.0, -1.0]),
    "Dirichlet": (lambda z: Dirichlet(z.exp()), [2.0, 0.0, -1.0], [-1.0, 0.0, 2.0]),
    "TransformedDistribution": (
        lambda z: TransformedDistribution(StudentT(z[..., 0].exp(), z[..., 1], z[..., 2].exp()), SigmoidTransform()),
        [0.0, -9.0, 0.0],
        [0.0, 9.0, 0.0],
    ),
    "Independent": (
        lambda z: Independent(NegativeBinomial(z[..., :1].exp(), logits=z[..., 1:]), 1),
        [1.0, -4.0, 2.0],
        [1.0, 4.0, -2.0],
    ),
    "Masked": (
        lambda z: pb.masked(NegativeBinomial(z[..., :1].exp(), logits=z[..., 1:]), torch.tensor([True, False])),
        [1.0, -4.0, 2.0],
        [1.0, 4.0, -2.0],
    ),
    "Product": (
        lambda z: pb.Product(VonMises(z[..., 1], z[..., 0].exp()), Gamma(z[..., 2].exp(), z[..., 3].exp())),
        [2.5, -1.5, 2.0, 3.0],
        [2.5, 1.4, 2.0, -1.0],
    ),
}


def shortest_detour(metric: pb.Metric, a: Tensor, b: Tensor) -> Tensor:
    """The length of the shortest of many explicit paths: the straight line, bent along one coordinate up to six
    units."""
    t = torch.linspace(0, 1, 151, dtype=DOUBLE)[:, None]
    bends = torch.linspace(-6, 6, 25, dtype=DOUBLE)[:, None, None] * torch.eye(len(a), dtype=DOUBLE)
    paths = a + t * (b - a) + bends.reshape(-1, 1, len(a)) * (1 - (2 * t - 1) ** 4)
    return metric.ds2(paths[:, :-1], paths[:, 1:]).clamp_min(0).sqrt().sum(-1).min()


@pytest.mark.parametrize("name", FAMILIES)
def test_no_path_through_the_family_is_shorter_than_the_lower_bound(name):
    decoder, *ends = FAMILIES[name]
    a, b = (torch.tensor(end, dtype=DOUBLE) for end in ends)
    metric = pb.FisherRaoMetric(decoder)
    lower, shortest = lower_bounds(metric, a[None], b[None]), shortest_detour(metric, a, b)
    assert lower <= shortest * (1 + 1e-3)
    informed = name not in (
        "Binomial",
        "NegativeBinomial",
        "StudentT",
        "TransformedDistribution",
        "Independent",
        "Masked",
    )
    assert (lower > 0.1 * shortest) if informed else (lower == 0)


def test_the_law_above_sees_every_closed_form():
    named = {name.split(",")[0] for name in FAMILIES} | {"object", "Distribution", "OneHotCategorical", "UnitNormal"}
    assert {family.__name__ for family in pb.rao_distance.registry} <= named


@pytest.mark.parametrize(
    "decoder",
    {
        "κ": lambda z: pb.VonMisesFisher(turned(z[..., 0]), torch.tensor(9.0, dtype=DOUBLE)),
        "df": lambda z: StudentT(3.0, z, 1.0),
        "count": lambda z: NegativeBinomial(3.0, logits=z),
    }.values(),
)
def test_a_constant_of_the_model_may_be_taken_for_known(decoder):
    a, b = torch.tensor([[-0.5]], dtype=DOUBLE), torch.tensor([[0.9]], dtype=DOUBLE)
    metric = pb.FisherRaoMetric(decoder)
    certificate = pb.certify(metric, pb.geodesic(metric, a, b))
    distance = pb.rao_distance(*(Independent(decoder(z), len(decoder(z).batch_shape) - 1) for z in (a, b)))
    torch.testing.assert_close(certificate.lower, distance)


def test_nothing_is_known_of_a_pair_without_a_path():
    a, b = NORMAL.points(3), NORMAL.points(3)
    a[1] = torch.nan
    certificate = pb.certify(NORMAL.metric, pb.geodesic(NORMAL.metric, a, b))
    good = pb.certify(NORMAL.metric, pb.geodesic(NORMAL.metric, a[::2], b[::2]))
    assert (certificate.lower[1], certificate.upper[1]) == (0, torch.inf)
    assert certificate.strict.tolist() == [True, False, True]
    torch.testing.assert_close(certificate.upper[::2], good.upper, rtol=1e-9, atol=0)
    assert pb.certify(NORMAL.metric, pb.geodesic(NORMAL.metric, a[1], b[1])).upper == torch.inf


def test_certificates_are_sentences():
    a, b = NORMAL.points(4), NORMAL.points(4)
    one = pb.certify(NORMAL.metric, pb.geodesic(NORMAL.metric, a[0], b[0]))
    many = pb.certify(NORMAL.metric, pb.geodesic(NORMAL.metric, a, b))
    assert f"{one.lower.item():.6g} <= distance <= {one.upper.item():.6g}" in str(one)
    assert "a strict local minimum" in str(one)
    assert str(many).startswith("4 distances")
    assert "4 of the paths are strict local minima" in str(many)
