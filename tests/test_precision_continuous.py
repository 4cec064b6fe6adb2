"""Far corners of the continuous families: large and small parameters, small steps, single precision."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.distributions import (
    Beta,
    Cauchy,
    Chi2,
    Dirichlet,
    Exponential,
    Gamma,
    Gumbel,
    HalfNormal,
    InverseGamma,
    Laplace,
    LowRankMultivariateNormal,
    MultivariateNormal,
    Normal,
    StudentT,
    Weibull,
)

import pullback as pb
from continuous import F64, Z, factors
from pullback._families.rules import squared_chord


def stirling_excess(x: Tensor) -> Tensor:
    """x² ψ₁(x) - x for large x."""
    return 0.5 + 1 / (6 * x) - 1 / (30 * x**3) + 1 / (42 * x**5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("size", [1e2, 1e4, 1e6])
def test_large_shapes_keep_their_digits(size: float, dtype: torch.dtype) -> None:
    """Along α at fixed mean the information is a small difference of large numbers; it must survive."""
    rtol = 1e-12 if dtype == torch.float64 else 2e-6
    alpha = size * torch.tensor([1.0, 2, 5], dtype=dtype)
    alpha64 = alpha.double()
    gamma = pb.fisher(Gamma(alpha, alpha))
    along = gamma.root(gamma.eta, gamma.eta)
    torch.testing.assert_close((along**2).sum(-1).double(), stirling_excess(alpha64), rtol=rtol, atol=0)
    simplex = pb.fisher(Dirichlet(alpha))
    expected = stirling_excess(alpha64).sum() - stirling_excess(alpha64.sum())
    torch.testing.assert_close((simplex.root(alpha, alpha) ** 2).sum().double(), expected, rtol=rtol, atol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_student_approaches_the_normal(dtype: torch.dtype) -> None:
    """As ν grows, I_μμ and I_σσ become the Normal's, and ν⁴ I_νν tends to 7/2, ν⁴ times its Schur complement to 3/2."""
    df = torch.tensor([1e6, 1e8], dtype=dtype)
    p = StudentT(df, torch.zeros_like(df), 2 * torch.ones_like(df))
    rule = pb.fisher(p)
    units = torch.diag(torch.tensor([1.0, 2, 2], dtype=dtype))[:, None] * torch.stack(
        [df**2, 1 + 0 * df, 1 + 0 * df], -1
    )
    gram = rule.gram(rule.eta, units, 1).double()
    limit = torch.tensor([[3.5, 0, -2], [0, 1, 0], [-2, 0, 2]], dtype=F64).expand(2, 3, 3)
    torch.testing.assert_close(gram, limit, rtol=2e-5, atol=1e-5)


def diagonal_normal(loc: Tensor, scale: Tensor) -> MultivariateNormal:
    return MultivariateNormal(loc, scale_tril=torch.diag_embed(scale))


SMALL_STEPS = {  # family, parameters, which of them change by one part in eight thousand
    "Normal": (Normal, (50.0, 0.01), (0, 1)),
    "Normal, loc": (Normal, (50.0, 3.0), (1, 1)),
    "Gumbel": (Gumbel, (50.0, 0.01), (0, 1)),
    "Weibull": (Weibull, (50.0, 9.0), (1, 1)),
    "HalfNormal": (HalfNormal, (300.0,), (1,)),
    "Gamma": (Gamma, (200.0, 0.01), (0, 1)),
    "Gamma, equal mean": (Gamma, (200.0, 10.0), (1, 1)),
    "Beta, equal mean": (Beta, (200.0, 300.0), (1, 1)),
    "Dirichlet, equal mean": (lambda a, b: Dirichlet(torch.stack([a, b, b], -1)), (3e4, 2e4), (1, 1)),
    "Dirichlet": (lambda a, b: Dirichlet(torch.stack([a, b, b], -1)), (1e-3, 200.0), (1, 0)),
    "MultivariateNormal": (diagonal_normal, (50.0, 0.01), (0, 1)),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", SMALL_STEPS)
def test_small_chords_keep_their_digits(name: str, dtype: torch.dtype) -> None:
    """Chords between near neighbors far from the origin of the parameters, in single precision too."""
    family, values, moved = SMALL_STEPS[name]
    first = [torch.full((3,), x, dtype=dtype) for x in values]
    h = 2.0**-13
    second = [x * (1 + h * k) for x, k in zip(first, moved, strict=True)]
    chord = squared_chord(family(*first), family(*second), 0)
    rules = [pb.fisher(family(*(x.double() for x in parameters))) for parameters in (first, second)]
    middle, step = 0.5 * (rules[0].eta + rules[1].eta), rules[1].eta - rules[0].eta
    expected = rules[0].gram(middle, step[None], 0)[0, 0]
    torch.testing.assert_close(chord.double(), expected, rtol=8 * torch.finfo(dtype).eps / h + 4 * h**2, atol=0)


EXTREMES = {  # families of positive parameters (the first is a location where there is one)
    "Normal": (Normal, 2),
    "Laplace": (Laplace, 2),
    "Cauchy": (Cauchy, 2),
    "Gumbel": (Gumbel, 2),
    "Weibull": (Weibull, 2),
    "StudentT": (lambda df, scale: StudentT(df, scale, scale), 2),
    "HalfNormal": (HalfNormal, 1),
    "Exponential": (Exponential, 1),
    "Gamma": (Gamma, 2),
    "InverseGamma": (InverseGamma, 2),
    "Chi2": (Chi2, 1),
    "Beta": (Beta, 2),
    "Dirichlet": (lambda a, b: Dirichlet(torch.stack([a, b, b], -1)), 2),
    "MultivariateNormal": (lambda a, b: diagonal_normal(torch.stack([b, a], -1), torch.stack([a, b], -1)), 2),
    "LowRankMultivariateNormal": (
        lambda a, b: LowRankMultivariateNormal(
            torch.stack([b, a], -1), torch.stack([a, a], -1)[..., None], torch.stack([b, b], -1)
        ),
        2,
    ),
}


@pytest.mark.parametrize(("dtype", "decades"), [(torch.float64, 6), (torch.float32, 4)])
@pytest.mark.parametrize("name", EXTREMES)
def test_far_corners_are_finite_and_positive(name: str, dtype: torch.dtype, decades: int) -> None:
    """Every parameter from 10⁻⁶ to 10⁶ (10⁻⁴ to 10⁴): the metric is finite, semi-definite, and has two finite
    derivatives."""
    family, num = EXTREMES[name]
    axis = math.log(10.0) * torch.tensor([-decades, -decades / 2, 0, decades / 2, decades], dtype=dtype)
    z = torch.cartesian_prod(*[axis] * num).reshape(-1, num).requires_grad_()
    M = pb.FisherRaoMetric(lambda z: family(*torch.exp(z).unbind(-1))).tensor(z)
    (first,) = torch.autograd.grad(M.sum(), z, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), z) if first.requires_grad else (torch.zeros_like(z),)
    for values in (M, first, second):
        assert torch.isfinite(values).all()
    D = M.diagonal(dim1=-2, dim2=-1)
    assert (D >= 0).all()
    smallest = torch.linalg.eigvalsh(M.double())[..., 0]
    assert (smallest >= -10 * torch.finfo(dtype).eps * D.amax(-1).double()).all()


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float64, 1e-12), (torch.float32, 1e-3)])
def test_low_rank_where_factors_dominate(dtype: torch.dtype, rtol: float) -> None:
    """Factors 10³ times the noise. Along dW = WK the information is ½ tr(HSHS), H = WᵀΣ⁻¹W = 1 - (1 + WᵀW)⁻¹, S = K +
    Kᵀ; a plain Woodbury difference is off by a percent there in single precision.
    """
    loc, first, second, _ = factors(Z[0].to(dtype))
    W = 1e3 * torch.stack([first, second], -1)
    K = torch.tensor([[1.0, 0.5], [-0.3, 2.0]], dtype=dtype)
    rule = pb.fisher(LowRankMultivariateNormal(loc, W, torch.ones_like(loc)))
    u = torch.cat([torch.zeros_like(loc), (W @ K).flatten(), torch.zeros_like(loc)])
    H = torch.eye(2, dtype=F64) - torch.linalg.inv(torch.eye(2, dtype=F64) + W.double().mT @ W.double())
    HS = H @ (K + K.mT).double()
    torch.testing.assert_close(
        rule.gram(rule.eta, u[None], 0)[0, 0].double(), 0.5 * (HS @ HS).trace(), rtol=rtol, atol=0
    )


def test_low_rank_needs_no_large_matrix() -> None:
    """A hundred thousand features: a D×D matrix would take 80 GB."""
    D = 100_000
    g = torch.Generator().manual_seed(0)
    base, slope = torch.randn(2, D, 4, generator=g, dtype=F64)

    def decoder(z: Tensor) -> LowRankMultivariateNormal:
        x = base + z[..., None, :1] * slope
        return LowRankMultivariateNormal(x[..., 0], x[..., 1:3], torch.exp(x[..., 3]))

    M = pb.FisherRaoMetric(decoder).tensor(torch.tensor([0.1], dtype=F64))
    assert torch.isfinite(M).all()
    assert M.item() > 0


def test_one_category_carries_no_information() -> None:
    alpha = torch.tensor([2.0], dtype=F64, requires_grad=True)
    M = pb.fisher(Dirichlet(alpha)).matrix
    (gradient,) = torch.autograd.grad(M.sum(), alpha)
    torch.testing.assert_close(torch.cat([M[0], gradient]), torch.zeros(2, dtype=F64), rtol=0, atol=1e-15)
