"""The α-connections of exponential families: straight lines in natural and in mean parameters, and duality."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import (
    Bernoulli,
    Beta,
    Binomial,
    Categorical,
    ContinuousBernoulli,
    Dirichlet,
    Distribution,
    Exponential,
    Gamma,
    Geometric,
    HalfNormal,
    Independent,
    InverseGamma,
    LogNormal,
    Multinomial,
    MultivariateNormal,
    NegativeBinomial,
    Normal,
    OneHotCategorical,
    Poisson,
    StudentT,
    VonMises,
)

import pullback as pb
from helpers import Embedded, wiggle
from pullback._metrics.connection import acceleration

DOUBLE = torch.float64
Decoder = Callable[[Tensor], Distribution]


@dataclass(frozen=True)
class Case:
    """A family in a chart of d unconstrained coordinates, which are neither natural nor mean parameters."""

    name: str
    d: int
    family: Decoder

    def __str__(self) -> str:
        return self.name

    @property
    def metric(self) -> pb.FisherRaoMetric:
        return pb.FisherRaoMetric(self.family)


def logits(z: Tensor) -> Tensor:
    """Log-odds against the last category."""
    return torch.cat([2 * torch.asinh(z), torch.zeros_like(z[..., :1])], -1)


def odds(z: Tensor) -> Tensor:
    return 2 * torch.asinh(z[..., 0])


def full(z: Tensor) -> MultivariateNormal:
    rows = [torch.stack([z[..., 2].exp(), 0 * z[..., 2]], -1), torch.stack([z[..., 3], z[..., 4].exp()], -1)]
    return MultivariateNormal(z[..., :2], scale_tril=torch.stack(rows, -2))


CASES = [
    Case("Normal", 2, lambda z: Normal(z[..., 0], z[..., 1].exp())),
    Case("LogNormal", 2, lambda z: LogNormal(z[..., 0], z[..., 1].exp())),
    Case("HalfNormal", 1, lambda z: HalfNormal(z[..., 0].exp())),
    Case("MultivariateNormal", 5, full),
    Case("Bernoulli", 1, lambda z: Bernoulli(logits=odds(z))),
    Case("Binomial", 1, lambda z: Binomial(7, logits=odds(z))),
    Case("Categorical", 3, lambda z: Categorical(logits=logits(z))),
    Case("OneHotCategorical", 2, lambda z: OneHotCategorical(logits=logits(z))),
    Case("Multinomial", 2, lambda z: Multinomial(5, logits=logits(z))),
    Case("ContinuousBernoulli", 1, lambda z: ContinuousBernoulli(logits=odds(z) + 3)),
    Case("Poisson", 1, lambda z: Poisson(odds(z).exp())),
    Case("Geometric", 1, lambda z: Geometric(logits=odds(z))),
    Case("NegativeBinomial", 1, lambda z: NegativeBinomial(4.5, logits=odds(z))),
    Case("Exponential", 1, lambda z: Exponential(2 + torch.tanh(z[..., 0]))),
    Case("Gamma", 2, lambda z: Gamma(z[..., 0].exp(), (z[..., 1] + z[..., 0]).exp())),
    Case("InverseGamma", 2, lambda z: InverseGamma(z[..., 0].exp(), (z[..., 1] + z[..., 0]).exp())),
    Case("Beta", 2, lambda z: Beta(z[..., 0].exp(), z[..., 1].exp())),
    Case("Dirichlet", 3, lambda z: Dirichlet(z.exp())),
    Case("VonMises", 2, lambda z: VonMises(z[..., 0], z[..., 1].exp())),
    Case("Product", 2, lambda z: pb.Product(Poisson(z[..., 0].exp()), Exponential(z[..., 1].exp()))),
    Case("Independent", 2, lambda z: Independent(Poisson(z.exp()), 1)),
]


def starts(case: Case, n: int = 3) -> tuple[Tensor, Tensor]:
    return 0.5 * torch.randn(n, case.d, dtype=DOUBLE), 0.1 * torch.randn(n, case.d, dtype=DOUBLE)


def minimal(x: Tensor, case: Case) -> Tensor:
    """Logits count up to a constant; only their differences are natural parameters."""
    return x - x[..., -1:] if case.name in ("Categorical", "OneHotCategorical", "Multinomial") else x


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize(("alpha", "which"), [(1.0, 0), (-1.0, 1)], ids=["e", "m"])
def test_straight_in_their_own_parameters(case, alpha, which):
    z, v = starts(case)

    def coordinates(z: Tensor) -> Tensor:
        return minimal(pb.natural_and_mean(case.family(z))[which], case)

    flow = pb.exponential(case.metric, z, v, alpha=alpha, rtol=1e-10)
    assert flow.converged.all()
    begin, velocity = torch.func.jvp(coordinates, (z,), (v,))
    t = torch.tensor([0.25, 0.5, 1.0], dtype=DOUBLE)
    expected = begin[:, None] + t[:, None] * velocity[:, None]
    torch.testing.assert_close(coordinates(flow(t)), expected, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(pb.expmap(case.metric, z, v, alpha=alpha, rtol=1e-10), flow.end, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_levi_civita_is_half_way(case):
    """The mean of the two flat connections is the default, although that goes through another embedding."""
    z, v = starts(case)
    e, m, tiny = (acceleration(case.metric, z, v, alpha=alpha) for alpha in (1.0, -1.0, 1e-300))
    expected = acceleration(case.metric, z, v)
    torch.testing.assert_close(0.5 * (e + m), expected, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(tiny, expected, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(acceleration(case.metric, z, v, alpha=0.5), 0.75 * e + 0.25 * m, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_pair_is_natural_and_mean(case):
    """Their product is the information, and for differences the Jeffreys divergence."""
    z, w = starts(case)[0], starts(case)[0]
    p, q = case.family(z), case.family(w)
    (eta, mu), (eta_q, mu_q) = pb.natural_and_mean(p), pb.natural_and_mean(q)
    assert eta.shape[:-1] == mu.shape[:-1] == p.batch_shape
    jeffreys = ((eta_q - eta) * (mu_q - mu)).sum(-1)
    torch.testing.assert_close(jeffreys, 2 * pb.divergences.symmetrized_kl(p, q), rtol=1e-7, atol=1e-9)
    jacobians = [torch.func.jacrev(lambda x, k=k: pb.natural_and_mean(case.family(x))[k])(z[0]) for k in (0, 1)]
    torch.testing.assert_close(jacobians[0].T @ jacobians[1], case.metric.tensor(z[0]), rtol=1e-7, atol=1e-9)


def test_opposite_transports_are_dual():
    """⟨Πᵅu, Π⁻ᵅv⟩ = ⟨u, v⟩ along any curve, although neither keeps lengths."""
    case = CASES[14]
    a, b = 0.5 * torch.randn(2, 3, 2, dtype=DOUBLE)
    curve, (u, v) = wiggle(a, b), torch.randn(2, 3, 2, dtype=DOUBLE)
    moved = [pb.parallel_transport(case.metric, curve, w, alpha=s, rtol=1e-10) for w, s in ((u, 1.0), (v, -1.0))]
    before, after = case.metric.inner(a, u, v), case.metric.inner(b, *moved)
    torch.testing.assert_close(after, before, rtol=1e-8, atol=1e-8)
    assert ((case.metric.norm(b, moved[0]) / case.metric.norm(a, u) - 1).abs() > 1e-3).any()


def test_flat_connections_do_not_depend_on_the_way():
    case = CASES[0]
    a, b = 0.5 * torch.randn(2, 2, 2, dtype=DOUBLE)
    v = torch.randn(2, 2, dtype=DOUBLE)
    detour = pb.Polyline(torch.stack([a, 0.3 * torch.randn(2, 2, dtype=DOUBLE), b], 1))
    for alpha in (1.0, -1.0):
        ways = [
            pb.parallel_transport(case.metric, curve, v, alpha=alpha, rtol=1e-10) for curve in (wiggle(a, b), detour)
        ]
        torch.testing.assert_close(*ways, rtol=1e-8, atol=1e-8)


def test_decoders_project():
    """In a curved model the acceleration of an e-geodesic, in natural parameters, has no component along the model."""
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 6)).double().requires_grad_(False)
    metric = pb.FisherRaoMetric(lambda z: Poisson(torch.exp(model(z))))
    z, v = torch.randn(2, 3, 2, dtype=DOUBLE)
    flow = pb.exponential(metric, z, v, alpha=1.0, rtol=1e-12, atol=1e-12)
    h, t = 1e-3, torch.tensor([0.5], dtype=DOUBLE)
    eta = torch.stack([model(flow(t + k * h)[:, 0]) for k in (-1, 0, 1)])
    bend = (eta[0] - 2 * eta[1] + eta[2]) / h**2
    rates = torch.stack([torch.func.jacrev(lambda x: torch.exp(model(x)))(x) for x in flow(t)[:, 0]])
    along = (rates.mT @ bend[..., None])[..., 0]
    scale = rates.norm(dim=(1, 2)) * bend.norm(dim=-1)
    assert (along.norm(dim=-1) < 1e-5 * scale).all()
    assert (bend.norm(dim=-1) > 1e-2).all()


def test_extrapolated_decoders_have_alpha_geodesics():
    codes = torch.randn(200, 2, dtype=DOUBLE)
    metric = pb.FisherRaoMetric(pb.Extrapolated(lambda z: Poisson(torch.exp(z)), pb.Support.fit(codes)))
    z, v = codes[:2], 0.1 * torch.randn(2, 2, dtype=DOUBLE)
    e, m = (acceleration(metric, z, v, alpha=alpha) for alpha in (1.0, -1.0))
    torch.testing.assert_close(0.5 * (e + m), acceleration(metric, z, v), rtol=1e-7, atol=1e-7)


def test_gradient():
    case = CASES[0]
    z, v = (x.requires_grad_() for x in starts(case, 1))
    assert torch.autograd.gradcheck(lambda z, v: pb.expmap(case.metric, z, v, alpha=1.0, rtol=1e-10), (z, v))


def test_missing_rules_say_how_to_add_them():
    z, v = torch.randn(2, 2, 2, dtype=DOUBLE)
    student = pb.FisherRaoMetric(lambda z: StudentT(5.0, z[..., 0], z[..., 1].exp()))
    with pytest.raises(
        NotImplementedError, match=r"StudentT has no rule.*@pullback\.natural_and_mean\.register.*alpha at 0"
    ):
        pb.expmap(student, z, v, alpha=1.0, rtol=1e-10)
    assert pb.expmap(student, z, v, rtol=1e-10).shape == (2, 2)
    with pytest.raises(TypeError, match=r"not to Embedded.*pullback\.FisherRaoMetric\(decoder\)"):
        pb.expmap(Embedded(lambda z: z), z, v, alpha=1.0, rtol=1e-10)
    varying = pb.FisherRaoMetric(lambda z: NegativeBinomial(z[..., 0].exp(), logits=z[..., 1]))
    with pytest.raises(NotImplementedError, match="only for a fixed total_count"):
        pb.expmap(varying, z, v, alpha=-1.0, rtol=1e-10)


def test_a_family_of_ones_own():
    """Rayleigh distributions, with the statistic x²/2."""

    class Rayleigh(Distribution):
        def __init__(self, scale: Tensor):
            self.scale = scale
            super().__init__(scale.shape, validate_args=False)

    @pb.natural_and_mean.register(Rayleigh)
    def _(p: Rayleigh) -> tuple[Tensor, Tensor]:
        return (-(p.scale**-2))[..., None], (p.scale**2)[..., None]

    metric = pb.FisherRaoMetric(lambda z: Rayleigh(z[..., 0].exp()))
    z, v = torch.zeros(1, 1, dtype=DOUBLE), torch.full((1, 1), 0.2, dtype=DOUBLE)
    end = pb.expmap(metric, z, v, alpha=-1.0, rtol=1e-10)
    torch.testing.assert_close((2 * end).exp(), torch.full((1, 1), 1.4, dtype=DOUBLE), rtol=1e-9, atol=0)
