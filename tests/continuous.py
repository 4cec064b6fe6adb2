"""Decoders of the continuous families, and divergences written out where torch has none or one that autodiff gets
wrong."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
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
from laws import Case

F64 = torch.float64
EULER = 0.57721566490153286


# --- decoders: smooth, curved, every parameter of every feature varies ------------------------------------------------


def curved(num_outputs: int, num_features: int = 2, seed: int = 0) -> Callable[[Tensor], tuple[Tensor, ...]]:
    """A fixed map from the plane to `num_outputs` tensors of shape (*batch, num_features), of order one."""
    g = torch.Generator().manual_seed(seed)
    A = torch.randn(2, 6, generator=g, dtype=F64)
    B = torch.randn(6, num_outputs * num_features, generator=g, dtype=F64) / 6**0.5

    def outputs(z: Tensor) -> tuple[Tensor, ...]:
        hidden = torch.tanh(z @ A.to(z) + 0.3)
        return (hidden @ B.to(z)).unflatten(-1, (num_outputs, num_features)).unbind(-2)

    return outputs


def two(family: Callable[..., Distribution], first: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Distribution]:
    """A decoder of a family with two parameters: a first one mapped by `first`, a positive second one."""
    h = curved(2)

    def decoder(z: Tensor) -> Distribution:
        x, y = h(z)
        return family(first(x), torch.exp(0.7 * y))

    return decoder


def one(family: Callable[..., Distribution]) -> Callable[[Tensor], Distribution]:
    h = curved(1)
    return lambda z: family(torch.exp(h(z)[0]))


def parameter(*values: float) -> list[Tensor]:
    return [torch.tensor(v, dtype=F64) for v in values]


def identity(x: Tensor) -> Tensor:
    return x


student_parameters, plane, shapes, full_parameters, factors = (
    curved(3),
    curved(2),
    curved(3, num_features=2),
    curved(4, num_features=3),
    curved(4, num_features=5),
)


def student(z: Tensor) -> StudentT:
    df, loc, scale = student_parameters(z)
    return StudentT(2 * torch.exp(df), loc, torch.exp(0.7 * scale))


def student_of_fixed_df(z: Tensor) -> StudentT:
    loc, scale = plane(z)
    return StudentT(torch.tensor([1.5, 4.0], dtype=z.dtype), loc, torch.exp(0.7 * scale))


def dirichlet(z: Tensor) -> Dirichlet:
    return Dirichlet(torch.exp(torch.stack(shapes(z), -1)))


def full(z: Tensor) -> dict[str, Tensor]:
    """Parameters of a three-dimensional normal: location and a Cholesky factor with every entry varying."""
    loc, *rest = full_parameters(z)
    entries = torch.stack(rest, -2)
    return {
        "loc": loc,
        "scale_tril": entries.tril(-1) + torch.diag_embed(torch.exp(0.5 * entries.diagonal(dim1=-2, dim2=-1))),
    }


def full_normal(z: Tensor) -> MultivariateNormal:
    return MultivariateNormal(**full(z))


def low_rank(z: Tensor) -> LowRankMultivariateNormal:
    loc, first, second, diag = factors(z)
    return LowRankMultivariateNormal(loc, torch.stack([first, second], -1), torch.exp(diag))


# --- divergences written out: torch has none for some families, and its second derivatives are wrong for others -------


def log_gamma(x: Tensor) -> Tensor:
    """Stirling after a shift by 20. (The second derivative of torch.lgamma is exact to nine digits only.)"""
    y = x + 20
    series = sum(c / y ** (2 * k + 1) for k, c in enumerate([1 / 12, -1 / 360, 1 / 1260, -1 / 1680, 1 / 1188]))
    shift = sum(torch.log(x + j) for j in range(20))
    return (y - 0.5) * torch.log(y) - y + 0.5 * math.log(2 * math.pi) + series - shift


def kl_gamma(p: Distribution, q: Distribution) -> Tensor:
    a, b, c, d = p.concentration, p.rate, q.concentration, q.rate
    return (a - c) * torch.digamma(a) - log_gamma(a) + log_gamma(c) + c * (b.log() - d.log()) + a * (d - b) / b


def kl_dirichlet(p: Distribution, q: Distribution) -> Tensor:
    a, b = (
        torch.stack([r.concentration1, r.concentration0], -1) if isinstance(r, Beta) else r.concentration
        for r in (p, q)
    )
    normalizer = [log_gamma(x.sum(-1)) - log_gamma(x).sum(-1) for x in (a, b)]
    return (
        normalizer[0] - normalizer[1] + ((a - b) * (torch.digamma(a) - torch.digamma(a.sum(-1, keepdim=True)))).sum(-1)
    )


def kl_laplace(p: Laplace, q: Laplace) -> Tensor:
    """With g(t) = (t + exp(-t) - 1) / t² written so that autodiff sees its limit ½ at t = 0."""
    t = (q.loc - p.loc) / p.scale
    small = t.abs() < 1e-3
    safe = torch.where(small, 1.0, t.abs())
    g = torch.where(small, 0.5 - t.abs() / 6, (safe + torch.exp(-safe) - 1) / safe**2)
    ratio = p.scale / q.scale
    return -ratio.log() + ratio * (1 + t**2 * g) - 1


def kl_gumbel(loc: Tensor, scale: Tensor, loc1: Tensor, scale1: Tensor) -> Tensor:
    ratio, shift = scale / scale1, (loc1 - loc) / scale1
    return -ratio.log() - shift + EULER * (ratio - 1) + torch.exp(shift + log_gamma(1 + ratio)) - 1


def kl_weibull(p: Weibull, q: Weibull) -> Tensor:
    return kl_gumbel(-p.scale.log(), 1 / p.concentration, -q.scale.log(), 1 / q.concentration)


def kl_by_quadrature(p: Distribution, q: Distribution) -> Tensor:
    """∫ p log(p/q) by the double-exponential rule, which takes algebraic tails in its stride."""
    t = torch.linspace(-5, 5, 501, dtype=F64).reshape(-1, *[1] * len(p.batch_shape))
    s, ds = math.pi / 2 * torch.sinh(t), math.pi / 2 * torch.cosh(t)
    if isinstance(p, HalfCauchy):
        x, dx = p.scale * torch.exp(s), p.scale * torch.exp(s) * ds
    else:
        x, dx = p.loc + p.scale * torch.sinh(s), p.scale * torch.cosh(s) * ds
    log_prob = student_log_prob if isinstance(p, StudentT) else type(p).log_prob
    log_p = log_prob(p, x)
    return (0.02 * dx * log_p.exp() * (log_p - log_prob(q, x))).sum(0)


def student_log_prob(p: StudentT, x: Tensor) -> Tensor:
    y = (x - p.loc) / p.scale
    normalizer = log_gamma((p.df + 1) / 2) - log_gamma(p.df / 2) - 0.5 * torch.log(math.pi * p.df) - p.scale.log()
    return normalizer - (p.df + 1) / 2 * torch.log1p(y**2 / p.df)


Z = torch.tensor([[0.3, -0.4], [-0.8, 0.5], [1.1, 0.9]], dtype=F64)

CASES = [
    Case("Normal", two(Normal, identity), Z),
    Case("LogNormal", two(LogNormal, identity), Z),
    Case("Laplace", two(Laplace, identity), Z, kl=kl_laplace),
    Case("Cauchy", two(Cauchy, identity), Z),
    Case("Gumbel", two(Gumbel, identity), Z, kl=lambda p, q: kl_gumbel(p.loc, p.scale, q.loc, q.scale)),
    Case("Weibull", two(Weibull, torch.exp), Z, kl=kl_weibull),
    Case("StudentT, free df", student, Z, kl=kl_by_quadrature, embedded=False),
    Case("StudentT, fixed df", student_of_fixed_df, Z, kl=kl_by_quadrature),
    Case("HalfNormal", one(HalfNormal), Z),
    Case("HalfCauchy", one(HalfCauchy), Z, kl=kl_by_quadrature),
    Case("Exponential", one(Exponential), Z),
    Case("Gamma", two(Gamma, torch.exp), Z, kl=kl_gamma),
    Case("InverseGamma", two(InverseGamma, torch.exp), Z, kl=kl_gamma),
    Case("Chi2", one(Chi2), Z, kl=kl_gamma),
    Case("Beta", two(Beta, torch.exp), Z, kl=kl_dirichlet),
    Case("Dirichlet", dirichlet, Z, kl=kl_dirichlet),
    Case("MultivariateNormal", full_normal, Z),
    Case("LowRankMultivariateNormal", low_rank, Z, embedded=False),
]


def length(metric: pb.Metric, curve: Callable[[Tensor], Tensor]) -> Tensor:
    """∫ |γ'| dt by Gauss-Legendre with 60 nodes."""
    nodes, weights = (torch.as_tensor(x) for x in np.polynomial.legendre.leggauss(60))
    z, v = torch.func.jvp(lambda t: curve(t), (0.5 * (nodes + 1),), (torch.ones_like(nodes),))
    return (0.5 * weights * metric.norm(z, v)).sum()
