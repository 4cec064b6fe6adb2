"""Continuous families: the closed-form information against independent routes, and one family against another."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributions import (
    Beta,
    Cauchy,
    Chi2,
    Dirichlet,
    Distribution,
    Exponential,
    Gamma,
    Gumbel,
    HalfCauchy,
    HalfNormal,
    InverseGamma,
    Laplace,
    LogNormal,
    LowRankMultivariateNormal,
    MultivariateNormal,
    Normal,
    StudentT,
    Weibull,
)

import pullback as pb
from continuous import CASES, EULER, F64, Z, curved, length, low_rank, parameter, student
from laws import Case, check_embedding, check_frame, check_kl_hessian, check_promises, check_score_covariance
from pullback._autodiff.torch_internals import is_wrapped
from pullback._families import positive

cases = pytest.mark.parametrize("case", CASES, ids=str)
embedded = pytest.mark.parametrize("case", [case for case in CASES if case.embedded], ids=str)


@cases
def test_information_is_the_hessian_of_kl(case: Case) -> None:
    check_kl_hessian(case)


@cases
def test_information_is_the_covariance_of_the_score(case: Case) -> None:
    check_score_covariance(case)


@embedded
def test_embedding_reproduces_the_information(case: Case) -> None:
    check_embedding(case)


@embedded
def test_frame_is_the_derivative_of_the_embedding(case: Case) -> None:
    check_frame(case)
    check_promises(case)


@embedded
def test_chord_does_not_depend_on_the_origin(case: Case) -> None:
    p, q, far = (case.decoder(z) for z in (Z, Z + 0.3, Z - 1))
    chords = []
    for origin in (None, p, far):
        (phi, psi), (phi1, psi1) = pb.embed(p, origin=origin), pb.embed(q, origin=origin)
        chords.append(((phi1 - phi) * (psi1 - psi)).sum(-1))
    torch.testing.assert_close(chords[1], chords[0], rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(chords[1], chords[2], rtol=1e-10, atol=1e-12)


@embedded
def test_one_origin_serves_a_whole_curve(case: Case) -> None:
    """Curves of shape (n, T, d) moved to one origin each, of shape (n, 1)."""
    curve = Z[:, None] + torch.linspace(0, 1, 5, dtype=F64)[:, None]
    whole = pb.embed(case.decoder(curve), origin=case.decoder(Z[:, None]))
    each = [pb.embed(case.decoder(points), origin=case.decoder(Z)) for points in curve.unbind(1)]
    for part, parts in zip(whole, zip(*each, strict=True), strict=True):
        torch.testing.assert_close(part, torch.stack(parts, 1))


def test_families_without_a_pair_have_no_embedding() -> None:
    assert pb.embed(low_rank(Z)) is None
    assert pb.embed(student(Z)) is None
    p, q = (StudentT(torch.full((1,), df, dtype=F64), torch.zeros(1, dtype=F64)) for df in (3.0, 4.0))
    assert pb.embed(p) is not None
    assert pb.embed(q, origin=p) is None


@cases
def test_twice_differentiable(case: Case) -> None:
    """First and second derivatives of the metric in z agree with finite differences."""
    metric = pb.FisherRaoMetric(case.decoder)
    z = case.z[:1].clone().requires_grad_()
    direction = torch.tensor([[0.6, -0.8]], dtype=F64)

    def along(w: Tensor) -> Tensor:
        (g,) = torch.autograd.grad(metric.tensor(w).sum(), w, create_graph=True)
        return g

    h = 1e-4
    (second,) = torch.autograd.grad((along(z) * direction).sum(), z)
    first_fd = (metric.tensor(z + h * direction) - metric.tensor(z - h * direction)).sum() / (2 * h)
    second_fd = (along(z + h * direction) - along(z - h * direction)) / (2 * h)
    torch.testing.assert_close((along(z) * direction).sum(), first_fd, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(second, second_fd, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "case", [c for c in CASES if c.name in ("Gamma", "InverseGamma", "Chi2", "Beta", "Dirichlet")], ids=str
)
def test_special_functions_are_evaluated_at_parameters_and_never_along_tangents(case, monkeypatch) -> None:
    """What is decoded has Jacobians of its coordinates alone: those of the embedding are closed forms of them."""
    seen = []
    for name in ("digamma_excess", "trigamma_excess"):
        own = getattr(positive, name)
        monkeypatch.setattr(positive, name, lambda x, f=own: (seen.append(is_wrapped(x)), f(x))[1])
    frame = pb.FisherRaoMetric(case.decoder).frame_at(case.z, origin=case.z[:1])
    frame.hessians([torch.randn_like(x) for x in frame.values])
    assert frame.tangents[0].shape[0] == case.z.shape[-1]
    assert len(seen) >= 2
    assert not any(seen)


@cases
def test_float32_agrees_with_float64(case: Case) -> None:
    M = pb.FisherRaoMetric(case.decoder).tensor(case.z)
    single = pb.FisherRaoMetric(case.decoder).tensor(case.z.float())
    assert single.dtype == torch.float32
    torch.testing.assert_close(single.double(), M, rtol=1e-5, atol=1e-5 * M.abs().max().item())


# --- textbook matrices ------------------------------------------------------------------------------------------------


TRIGAMMA = {
    1: math.pi**2 / 6,
    2: math.pi**2 / 6 - 1,
    3: math.pi**2 / 6 - 1.25,
    5: math.pi**2 / 6 - 1.25 - 1 / 9 - 1 / 16,
}

TEXTBOOK = {
    "Normal": (Normal(*parameter(3, 2)), [[1 / 4, 0], [0, 2 / 4]]),
    "LogNormal": (LogNormal(*parameter(3, 2)), [[1 / 4, 0], [0, 2 / 4]]),
    "Laplace": (Laplace(*parameter(3, 2)), [[1 / 4, 0], [0, 1 / 4]]),
    "Cauchy": (Cauchy(*parameter(3, 2)), [[1 / 8, 0], [0, 1 / 8]]),
    "Gumbel": (
        Gumbel(*parameter(3, 2)),
        [[1 / 4, (EULER - 1) / 4], [(EULER - 1) / 4, ((EULER - 1) ** 2 + math.pi**2 / 6) / 4]],
    ),
    # ψ₁(½) - ψ₁(1) = π²/3
    "StudentT": (
        StudentT(*parameter(1, 3, 2)),
        [[math.pi**2 / 12 - 3 / 8, 0, -1 / 8], [0, 1 / 8, 0], [-1 / 8, 0, 1 / 8]],
    ),
    "HalfNormal": (HalfNormal(*parameter(2)), [[2 / 4]]),
    "HalfCauchy": (HalfCauchy(*parameter(2)), [[1 / 8]]),
    "Exponential": (Exponential(*parameter(2)), [[1 / 4]]),
    "Gamma": (Gamma(*parameter(3, 2)), [[TRIGAMMA[3], -1 / 2], [-1 / 2, 3 / 4]]),
    "InverseGamma": (InverseGamma(*parameter(3, 2)), [[TRIGAMMA[3], -1 / 2], [-1 / 2, 3 / 4]]),
    "Beta": (
        Beta(*parameter(3, 2)),
        [[TRIGAMMA[3] - TRIGAMMA[5], -TRIGAMMA[5]], [-TRIGAMMA[5], TRIGAMMA[2] - TRIGAMMA[5]]],
    ),
    "Dirichlet": (
        Dirichlet(torch.tensor([1.0, 2, 2], dtype=F64)),
        np.diag([TRIGAMMA[1], TRIGAMMA[2], TRIGAMMA[2]]) - TRIGAMMA[5],
    ),
    # (μ, L) with L = [[2, 0], [0, 1]]: L⁻¹dL has entries dL₁₁/2, dL₂₁, dL₂₂
    "MultivariateNormal": (
        MultivariateNormal(torch.zeros(2, dtype=F64), scale_tril=torch.diag(torch.tensor([2.0, 1], dtype=F64))),
        np.diag([1 / 4, 1, 2 / 4, 1, 2]),
    ),
    # r = 1, D = 1: a Normal of variance w² + δ = 4 + 5, in which dσ² = 2w dw + dδ
    "LowRankMultivariateNormal": (
        LowRankMultivariateNormal(*(torch.tensor(v, dtype=F64) for v in ([0.0], [[2.0]], [5.0]))),
        [[1 / 9, 0, 0], [0, 16 / 162, 4 / 162], [0, 4 / 162, 1 / 162]],
    ),
}


@pytest.mark.parametrize("name", TEXTBOOK)
def test_textbook_matrix(name: str) -> None:
    p, expected = TEXTBOOK[name]
    torch.testing.assert_close(pb.fisher(p).matrix, torch.as_tensor(expected, dtype=F64), rtol=1e-13, atol=1e-14)


def test_weibull_matrix_in_its_own_parameters() -> None:
    """In (λ, k) the textbook has [[k²/λ², (γ-1)/λ], [., ((γ-1)² + π²/6)/k²]]."""

    def decoder(z: Tensor) -> Weibull:
        return Weibull(z[..., 0], z[..., 1])

    M = pb.FisherRaoMetric(decoder).tensor(torch.tensor([2.0, 3.0], dtype=F64))
    expected = [[9 / 4, (EULER - 1) / 2], [(EULER - 1) / 2, ((EULER - 1) ** 2 + math.pi**2 / 6) / 9]]
    torch.testing.assert_close(M, torch.tensor(expected, dtype=F64), rtol=1e-13, atol=0)


def test_missing_rule_says_how_to_add_one() -> None:
    class Mine(Distribution):
        pass

    with pytest.raises(NotImplementedError, match=r"Mine.*@pullback\.fisher\.register.*ScoreMetric"):
        pb.fisher(Mine(validate_args=False))


# --- one family inside another, one family in two parametrizations ----------------------------------------------------


def pair(
    first: Callable[..., Distribution], second: Callable[..., Distribution], num: int
) -> tuple[Callable, Callable]:
    """Decoders of the same positive parameters through two constructors."""
    h = curved(num, seed=3)

    def decode(make: Callable[..., Distribution]) -> Callable[[Tensor], Distribution]:
        return lambda z: make(*(torch.exp(0.7 * x) for x in h(z)))

    return decode(first), decode(second)


SAME = {
    "Normal by variance": pair(Normal, lambda m, s: Normal(m, (s**2).sqrt()), 2),
    "LogNormal is Normal": pair(LogNormal, Normal, 2),
    "HalfNormal is a centered Normal": pair(HalfNormal, lambda s: Normal(torch.zeros_like(s), s), 1),
    "HalfCauchy is a centered Cauchy": pair(HalfCauchy, lambda s: Cauchy(torch.zeros_like(s), s), 1),
    "Cauchy is StudentT of df 1": pair(Cauchy, lambda m, s: StudentT(torch.ones_like(s), m, s), 2),
    "Weibull of k 1 is Exponential": pair(Exponential, lambda r: Weibull(1 / r, torch.ones_like(r)), 1),
    "Gamma of shape 1 is Exponential": pair(Exponential, lambda r: Gamma(torch.ones_like(r), r), 1),
    "Rayleigh: Weibull of k 2": pair(lambda s: Weibull(s, 2 * torch.ones_like(s)), lambda s: Exponential(s**-2), 1),
    "Chi2 is Gamma": pair(Chi2, lambda n: Gamma(n / 2, torch.full_like(n, 0.5)), 1),
    "InverseGamma is Gamma": pair(InverseGamma, Gamma, 2),
    "Beta is Dirichlet": pair(Beta, lambda a, b: Dirichlet(torch.stack([a, b], -1)), 2),
    "Normals are a diagonal MultivariateNormal": pair(
        Normal, lambda m, s: MultivariateNormal(m, scale_tril=torch.diag_embed(s)), 2
    ),
    "LowRank without factors": pair(Normal, lambda m, s: LowRankMultivariateNormal(m, 0 * m[..., None], s**2), 2),
    "LowRank is MultivariateNormal": pair(
        lambda m, w, d: LowRankMultivariateNormal(m, w[..., None], d),
        lambda m, w, d: MultivariateNormal(m, w[..., None] * w[..., None, :] + torch.diag_embed(d)),
        3,
    ),
    "MultivariateNormal by precision": pair(
        lambda m, w, d: MultivariateNormal(m, precision_matrix=(w[..., None] * w[..., None, :] + torch.diag_embed(d))),
        lambda m, w, d: MultivariateNormal(m, torch.linalg.inv(w[..., None] * w[..., None, :] + torch.diag_embed(d))),
        3,
    ),
}


@pytest.mark.parametrize("name", SAME)
def test_same_statistical_model_same_metric(name: str) -> None:
    first, second = (pb.FisherRaoMetric(decoder) for decoder in SAME[name])
    torch.testing.assert_close(first.tensor(Z), second.tensor(Z), rtol=1e-11, atol=1e-12)


PARAMETRIZATIONS = {
    "Normal (μ, σ) and (μ, σ²)": (Normal, lambda m, v: Normal(m, v.sqrt()), lambda m, s: (m, s**2)),
    "Laplace (μ, b) and (μ/b, log b)": (
        Laplace,
        lambda x, y: Laplace(x * torch.exp(y), torch.exp(y)),
        lambda m, b: (m / b, b.log()),
    ),
    "Gamma rate and scale": (Gamma, lambda a, s: Gamma(a, 1 / s), lambda a, r: (a, 1 / r)),
    "Gamma shape and mean": (Gamma, lambda a, m: Gamma(a, a / m), lambda a, r: (a, a / r)),
    "Beta mean and precision": (
        Beta,
        lambda m, n: Beta(m * n, (1 - m) * n),
        lambda a, b: (a / (a + b), a + b),
    ),
    "Weibull (λ, k) and (λᵏ, 1/k)": (Weibull, lambda r, t: Weibull(r**t, 1 / t), lambda s, k: (s**k, 1 / k)),
}


@pytest.mark.parametrize("name", PARAMETRIZATIONS)
def test_length_does_not_depend_on_the_parameters(name: str) -> None:
    first, second, change = PARAMETRIZATIONS[name]

    def curve(t: Tensor) -> tuple[Tensor, Tensor]:
        return 2 + torch.sin(2 * t), 1.5 + torch.cos(3 * t)

    lengths = [
        length(pb.FisherRaoMetric(lambda z, f=f: f(z[..., 0], z[..., 1])), lambda t, g=g: torch.stack(g(*curve(t)), -1))
        for f, g in ((first, lambda x, y: (x, y)), (second, change))
    ]
    torch.testing.assert_close(lengths[0], lengths[1], rtol=1e-9, atol=0)
