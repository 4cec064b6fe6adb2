r"""The affinity :math:`\log \int p^\alpha q^{1-\alpha}` of two members of a family, from which Rényi and Hellinger follow.

In an exponential family :math:`p_\theta = \exp(\theta \cdot t(x) - A(\theta))` it is a gap of the log-normaliser,

.. math:: \log \int p^\alpha q^{1-\alpha} = A(\alpha \theta_p + (1 - \alpha) \theta_q) - \alpha A(\theta_p) - (1 - \alpha) A(\theta_q),

(Nielsen and Nock, "On Rényi and Tsallis entropies and divergences for exponential families", 2011). Families that torch
gives natural parameters use that formula; the others have their own, from the parameters that saturate gracefully.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import singledispatch

import torch
from torch import Tensor
from torch.distributions import (
    Bernoulli,
    Beta,
    Binomial,
    Categorical,
    Dirichlet,
    Distribution,
    Exponential,
    ExponentialFamily,
    Gamma,
    Geometric,
    Gumbel,
    Independent,
    Kumaraswamy,
    LowRankMultivariateNormal,
    Multinomial,
    MultivariateNormal,
    NegativeBinomial,
    Normal,
    OneHotCategorical,
    Poisson,
    TransformedDistribution,
    VonMises,
    Weibull,
)
from torch.nn.functional import logsigmoid

from pullback._families.composite import fixed_base
from pullback._families.embedding import check_equal
from pullback._families.missing import MissingRuleError
from pullback._families.product import Product
from pullback._families.von_mises_fisher import VonMisesFisher
from pullback._numerics.elementary import log_gamma
from pullback._numerics.special import resultant

_WHAT = "Rényi and Hellinger divergence"


@singledispatch
def log_affinity(p: Distribution, q: Distribution, alpha: float) -> Tensor:
    r""":math:`\log \int p^\alpha q^{1-\alpha}` of shape ``batch_shape``; 0 where ``p = q``, below 0 otherwise if 0 < α < 1."""
    raise MissingRuleError(
        f"No closed form of Rényi and Hellinger divergences is known to the library for {type(p).__name__}. Use "
        "pullback.divergences.symmetrized_kl or pullback.divergences.MonteCarloKL(num_samples=1000), or pass a function (p, q) -> Tensor of your own."
    )


for _parametrised in (
    Gumbel,
    Weibull,
    Kumaraswamy,
):  # their parameters sit in the transforms: no rule of the base applies
    log_affinity.register(_parametrised, log_affinity.dispatch(Distribution))


@log_affinity.register
def _(p: ExponentialFamily, q: ExponentialFamily, alpha: float) -> Tensor:
    r"""The gap of torch's own log-normaliser."""
    theta, other = p._natural_params, q._natural_params
    between = tuple(alpha * a + (1 - alpha) * b for a, b in zip(theta, other, strict=True))
    gap = p._log_normalizer(*between) - alpha * p._log_normalizer(*theta) - (1 - alpha) * p._log_normalizer(*other)
    return gap.nan_to_num(nan=torch.inf) if alpha > 1 else gap


@log_affinity.register
def _(p: Gamma, q: Gamma, alpha: float) -> Tensor:
    r"""The gap of :math:`\log\Gamma(a) - a \log b`."""
    theta, other = (torch.stack([r.concentration, r.rate], dim=-1) for r in (p, q))
    return _gap(theta, other, alpha, lambda t: log_gamma(t[..., 0]) - t[..., 0] * t[..., 1].log())


@log_affinity.register
def _(p: Beta, q: Beta, alpha: float) -> Tensor:
    r"""The gap of :math:`\log\Gamma(a) + \log\Gamma(b) - \log\Gamma(a + b)`."""
    return _gap(p._dirichlet.concentration, q._dirichlet.concentration, alpha, _log_beta)


@log_affinity.register
def _(p: Dirichlet, q: Dirichlet, alpha: float) -> Tensor:
    r"""The gap of :math:`\sum_i \log\Gamma(\alpha_i) - \log\Gamma(\sum_i \alpha_i)`."""
    return _gap(p.concentration, q.concentration, alpha, _log_beta)


@log_affinity.register
def _(p: Normal, q: Normal, alpha: float) -> Tensor:
    r"""With :math:`v = \alpha\sigma_q^2 + (1-\alpha)\sigma_p^2`: :math:`-\frac{\alpha(1-\alpha)}{2}\frac{\Delta\mu^2}{v} - \frac12 \log v + (1-\alpha)\log\sigma_p + \alpha\log\sigma_q`."""
    v = alpha * q.scale**2 + (1 - alpha) * p.scale**2
    scales = (1 - alpha) * p.scale.log() + alpha * q.scale.log() - 0.5 * v.log()
    value = scales - 0.5 * alpha * (1 - alpha) * (p.loc - q.loc) ** 2 / v
    return torch.where(v > 0, value, torch.inf)


@log_affinity.register(MultivariateNormal)
@log_affinity.register(LowRankMultivariateNormal)
def _(p: MultivariateNormal, q: MultivariateNormal, alpha: float) -> Tensor:
    r"""The same with matrices, :math:`V = \alpha\Sigma_q + (1-\alpha)\Sigma_p`; infinite where V is not positive definite."""
    V = alpha * q.covariance_matrix + (1 - alpha) * p.covariance_matrix
    L, info = torch.linalg.cholesky_ex(V)
    whitened = torch.linalg.solve_triangular(L, (p.loc - q.loc)[..., None], upper=False)[..., 0]
    half_logdets = [_half_logdet(torch.linalg.cholesky(r.covariance_matrix)) for r in (p, q)]
    scales = (1 - alpha) * half_logdets[0] + alpha * half_logdets[1] - _half_logdet(L)
    value = scales - 0.5 * alpha * (1 - alpha) * (whitened**2).sum(-1)
    return torch.where(info == 0, value, torch.inf)


@log_affinity.register
def _(p: Bernoulli, q: Bernoulli, alpha: float) -> Tensor:
    r""":math:`\log(p^\alpha q^{1-\alpha} + (1-p)^\alpha (1-q)^{1-\alpha})` from logits."""
    return _binary(p.logits, q.logits, alpha)


@log_affinity.register
def _(p: Binomial, q: Binomial, alpha: float) -> Tensor:
    r"""The Bernoulli's, times the number of trials."""
    check_equal(_WHAT, "total_count", p, q)
    return p.total_count * _binary(p.logits, q.logits, alpha)


@log_affinity.register
def _(p: Geometric, q: Geometric, alpha: float) -> Tensor:
    r"""A geometric series: :math:`\log a - \log(1 - b)` with a, b the mixed log-probabilities of success and failure."""
    success = alpha * logsigmoid(p.logits) + (1 - alpha) * logsigmoid(q.logits)
    failure = alpha * logsigmoid(-p.logits) + (1 - alpha) * logsigmoid(-q.logits)
    return success - torch.log(-torch.expm1(failure))


@log_affinity.register
def _(p: NegativeBinomial, q: NegativeBinomial, alpha: float) -> Tensor:
    r"""A negative binomial series: :math:`r (\log b - \log(1 - a))` with a, b as above, for equal total counts."""
    check_equal(_WHAT, "total_count", p, q)
    success = alpha * logsigmoid(p.logits) + (1 - alpha) * logsigmoid(q.logits)
    failure = alpha * logsigmoid(-p.logits) + (1 - alpha) * logsigmoid(-q.logits)
    return p.total_count * (failure - torch.log(-torch.expm1(success)))


@log_affinity.register
def _(p: Categorical, q: Categorical, alpha: float) -> Tensor:
    r""":math:`\log \sum_i p_i^\alpha q_i^{1-\alpha}` from logits."""
    return torch.logsumexp(alpha * p.logits + (1 - alpha) * q.logits, dim=-1)


@log_affinity.register
def _(p: OneHotCategorical, q: OneHotCategorical, alpha: float) -> Tensor:
    r"""That of the categories."""
    return torch.logsumexp(alpha * p.logits + (1 - alpha) * q.logits, dim=-1)


@log_affinity.register
def _(p: Multinomial, q: Multinomial, alpha: float) -> Tensor:
    r"""The categorical's, times the number of trials."""
    check_equal(_WHAT, "total_count", p, q)
    return p.total_count * torch.logsumexp(alpha * p.logits + (1 - alpha) * q.logits, dim=-1)


@log_affinity.register
def _(p: Poisson, q: Poisson, alpha: float) -> Tensor:
    r""":math:`\lambda_p^\alpha \lambda_q^{1-\alpha} - \alpha\lambda_p - (1-\alpha)\lambda_q`."""
    return p.rate**alpha * q.rate ** (1 - alpha) - alpha * p.rate - (1 - alpha) * q.rate


@log_affinity.register
def _(p: Exponential, q: Exponential, alpha: float) -> Tensor:
    r""":math:`\alpha\log\lambda_p + (1-\alpha)\log\lambda_q - \log(\alpha\lambda_p + (1-\alpha)\lambda_q)`."""
    rate = alpha * p.rate + (1 - alpha) * q.rate
    value = alpha * (p.rate / rate).log() + (1 - alpha) * (q.rate / rate).log()
    return torch.where(rate > 0, value, torch.inf)


@log_affinity.register
def _(p: VonMises, q: VonMises, alpha: float) -> Tensor:
    r"""That of von Mises-Fisher on the circle."""
    directions = (torch.stack([torch.cos(r.loc), torch.sin(r.loc)], -1) for r in (p, q))
    return _directional(2, alpha, *directions, p.concentration, q.concentration)


@log_affinity.register
def _(p: VonMisesFisher, q: VonMisesFisher, alpha: float) -> Tensor:
    r"""The gap of the log-partition :math:`\log \int e^{\kappa \mu^\top x}` at the natural parameters :math:`\kappa\mu`."""
    return _directional(p.event_shape[0], alpha, p.loc, q.loc, p.concentration, q.concentration)


def _directional(dim: int, alpha: float, loc: Tensor, loc1: Tensor, kappa: Tensor, kappa1: Tensor) -> Tensor:
    first, second = alpha * kappa, (1 - alpha) * kappa1
    between = first[..., None] * loc + second[..., None] * loc1
    length = torch.linalg.vector_norm(between, dim=-1)
    gap = resultant(dim, length).log_partition - alpha * resultant(dim, kappa).log_partition
    return gap - (1 - alpha) * resultant(dim, kappa1).log_partition + (length - first - second)


@log_affinity.register
def _(p: Independent, q: Independent, alpha: float) -> Tensor:
    r"""The sum over features."""
    value = log_affinity(p.base_dist, q.base_dist, alpha)
    return value.flatten(len(p.batch_shape)).sum(-1) if value.ndim > len(p.batch_shape) else value


@log_affinity.register
def _(p: Product, q: Product, alpha: float) -> Tensor:
    r"""The sum over parts and features."""
    return p.summed([log_affinity(a, b, alpha) for a, b in zip(p.components, q.components, strict=True)])


@log_affinity.register
def _(p: TransformedDistribution, q: TransformedDistribution, alpha: float) -> Tensor:
    r"""That of the base: a fixed bijection changes no divergence."""
    return log_affinity(fixed_base(p, q), q.base_dist, alpha)


def _gap(theta: Tensor, other: Tensor, alpha: float, log_normalizer: Callable[[Tensor], Tensor]) -> Tensor:
    """The gap of a log-normaliser on positive parameters; infinite where the point between is not positive (α > 1)."""
    between = alpha * theta + (1 - alpha) * other
    inside = (between > 0).all(-1)
    safe = torch.where(inside[..., None], between, 1)
    gap = log_normalizer(safe) - alpha * log_normalizer(theta) - (1 - alpha) * log_normalizer(other)
    return torch.where(inside, gap, torch.inf)


def _log_beta(concentration: Tensor) -> Tensor:
    return log_gamma(concentration).sum(-1) - log_gamma(concentration.sum(-1))


def _binary(logits: Tensor, others: Tensor, alpha: float) -> Tensor:
    success = alpha * logsigmoid(logits) + (1 - alpha) * logsigmoid(others)
    failure = alpha * logsigmoid(-logits) + (1 - alpha) * logsigmoid(-others)
    return torch.logaddexp(success, failure)


def _half_logdet(L: Tensor) -> Tensor:
    return L.diagonal(dim1=-2, dim2=-1).log().sum(-1)
