r"""Kullback-Leibler divergences as sums of positive terms, one rule per family; torch's own for the rest.

For discrete distributions :math:`\sum_i p_i \log(p_i/q_i)` is a difference of nearly equal numbers. Adding :math:`\sum_i (q_i - p_i) = 0`
term by term makes every term positive, :math:`p_i\, g(\log q_i - \log p_i)` with :math:`g(x) = e^x - 1 - x`, so nothing cancels.

The rules are also written so that autodiff differentiates them twice and gets the Fisher information: Laplace without a bare
absolute value, Gamma, Beta, Dirichlet and Gumbel without torch's trigamma, which is exact to nine digits only.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import singledispatch
from typing import Any

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
    Gamma,
    Geometric,
    Gumbel,
    Independent,
    Laplace,
    Multinomial,
    NegativeBinomial,
    Normal,
    OneHotCategorical,
    Poisson,
    VonMises,
    Weibull,
    register_kl,
)
from torch.distributions import kl as torch_kl
from torch.distributions.utils import euler_constant
from torch.nn.functional import logsigmoid

from pullback._autodiff.rewrites import Rewritten
from pullback._autodiff.torch_internals import has_registered_kl
from pullback._families.composite import fixed_base
from pullback._families.embedding import check_equal
from pullback._families.missing import MissingRuleError
from pullback._families.product import Product
from pullback._numerics.elementary import digamma, even_excess, excess, log_gamma

Rule = Callable[[Any, Any], Tensor]


def rule_for(p: Distribution, q: Distribution) -> Rule:
    """The rule of the library for two members of one family, unless `register_kl` has a more specific one; or torch's."""
    family = type(p)
    if family is not type(q):
        return torch_rule
    ours = positive_kl.dispatch(family)
    base = next(cls for cls in family.__mro__ if positive_kl.registry.get(cls) is ours)
    return torch_rule if has_registered_kl(family, base) else ours


@singledispatch
def positive_kl(p: Distribution, q: Distribution) -> Tensor:
    """KL(p, q) of two members of the same family, of shape ``batch_shape``."""
    return torch_rule(p, q)


def torch_rule(p: Distribution, q: Distribution) -> Tensor:
    """torch's divergence, but for two rules of it that autodiff cannot follow, and with a sentence where there is none."""
    rule = torch_kl._dispatch_kl(type(p), type(q))
    if rule is torch_kl._kl_transformed_transformed:
        return kl_of_bases(p, q)
    if rule is torch_kl._kl_expfamily_expfamily:
        return _bregman(p, q)
    if rule is NotImplemented:
        raise MissingRuleError(
            f"No Kullback-Leibler divergence is known for {type(p).__name__} and {type(q).__name__}. Add it with "
            "torch.distributions.register_kl, or estimate it with pullback.divergences.MonteCarloKL(num_samples=1000)."
        )
    return rule(p, q)


def kl_of_bases(p: Any, q: Any) -> Tensor:
    """A fixed bijection of the data changes no divergence. (torch's rule also takes equal values for fixed ones.)"""
    base = fixed_base(p, q)
    return rule_for(base, q.base_dist)(base, q.base_dist)


def _bregman(p: Any, q: Any) -> Tensor:
    r""":math:`A(\theta_q) - A(\theta_p) - \nabla A(\theta_p) \cdot (\theta_q - \theta_p)`. (torch's rule is constant to autodiff in its first argument.)"""
    theta, other = p._natural_params, q._natural_params
    steps = tuple(b - a for a, b in zip(theta, other, strict=True))
    with Rewritten():
        value, slope = torch.func.jvp(p._log_normalizer, theta, steps)[:2]
    return q._log_normalizer(*other) - value - slope


@positive_kl.register
def _(p: Normal, q: Normal) -> Tensor:
    r""":math:`\frac12 (g(2 \log \sigma_p/\sigma_q) + (\Delta\mu/\sigma_q)^2)`."""
    return 0.5 * (excess(2 * (p.scale / q.scale).log()) + ((p.loc - q.loc) / q.scale) ** 2)


@positive_kl.register
def _(p: Exponential, q: Exponential) -> Tensor:
    r""":math:`g(\log \lambda_q/\lambda_p)`."""
    return excess((q.rate / p.rate).log())


@positive_kl.register
def _(p: Laplace, q: Laplace) -> Tensor:
    r""":math:`g(\log b_p/b_q) + \frac{b_p}{b_q} g(-|\Delta\mu|/b_p)`."""
    ratio = p.scale / q.scale
    return excess(ratio.log()) + ratio * even_excess((p.loc - q.loc) / p.scale)


@positive_kl.register
def _(p: Gumbel, q: Gumbel) -> Tensor:
    return _gumbel(p.scale / q.scale, (p.loc - q.loc) / q.scale)


@positive_kl.register
def _(p: Weibull, q: Weibull) -> Tensor:
    r"""That of :math:`-\log x`, a Gumbel variable with location :math:`-\log\lambda` and scale :math:`1/k`."""
    ratio = q.concentration / p.concentration
    return _gumbel(ratio, q.concentration * (q.scale / p.scale).log())


@positive_kl.register
def _(p: VonMises, q: VonMises) -> Tensor:
    r""":math:`\log I_0(\kappa_q) - \log I_0(\kappa_p) + \frac{I_1}{I_0}(\kappa_p) (\kappa_p - \kappa_q \cos\Delta\mu)`."""
    i0, j0 = (torch.special.i0e(r.concentration) for r in (p, q))
    mean = torch.special.i1e(p.concentration) / i0
    gap = q.concentration - p.concentration + (j0 / i0).log()
    return gap + mean * (p.concentration - q.concentration * torch.cos(p.loc - q.loc))


@positive_kl.register
def _(p: Gamma, q: Gamma) -> Tensor:
    r""":math:`\log\frac{\Gamma(\alpha_q)}{\Gamma(\alpha_p)} + (\alpha_p - \alpha_q)\psi(\alpha_p) + (\alpha_p - \alpha_q) x + \alpha_p g(x)`, :math:`x = \log\beta_q/\beta_p`."""
    shape, other = p.concentration, q.concentration
    x = (q.rate / p.rate).log()
    gap = log_gamma(other) - log_gamma(shape) + (shape - other) * (digamma(shape) + x)
    return gap + shape * excess(x)


@positive_kl.register
def _(p: Beta, q: Beta) -> Tensor:
    return _dirichlet(p._dirichlet.concentration, q._dirichlet.concentration)


@positive_kl.register
def _(p: Dirichlet, q: Dirichlet) -> Tensor:
    return _dirichlet(p.concentration, q.concentration)


@positive_kl.register
def _(p: Poisson, q: Poisson) -> Tensor:
    r""":math:`\lambda_p\, g(\log \lambda_q/\lambda_p)`."""
    return _weighted_excess(p.rate, q.rate, q.rate.log() - p.rate.log())


@positive_kl.register
def _(p: Bernoulli, q: Bernoulli) -> Tensor:
    return _binary(p.logits, q.logits)


@positive_kl.register
def _(p: Binomial, q: Binomial) -> Tensor:
    r"""The Bernoulli's, times the number of trials."""
    check_equal("Kullback-Leibler divergence", "total_count", p, q)
    return p.total_count * _binary(p.logits, q.logits)


@positive_kl.register
def _(p: Geometric, q: Geometric) -> Tensor:
    r"""The Bernoulli's, times the expected number of trials :math:`1/p`."""
    return _binary(p.logits, q.logits) / torch.sigmoid(p.logits)


@positive_kl.register
def _(p: NegativeBinomial, q: NegativeBinomial) -> Tensor:
    r"""The Bernoulli's, times the expected number of trials :math:`r/(1-p)`."""
    check_equal("Kullback-Leibler divergence", "total_count", p, q)
    return p.total_count * _binary(p.logits, q.logits) / torch.sigmoid(-p.logits)


@positive_kl.register
def _(p: Categorical, q: Categorical) -> Tensor:
    return _categorical(p.logits, q.logits)


@positive_kl.register
def _(p: OneHotCategorical, q: OneHotCategorical) -> Tensor:
    return _categorical(p.logits, q.logits)


@positive_kl.register
def _(p: Multinomial, q: Multinomial) -> Tensor:
    r"""The categorical's, times the number of trials."""
    check_equal("Kullback-Leibler divergence", "total_count", p, q)
    return p.total_count * _categorical(p.logits, q.logits)


@positive_kl.register
def _(p: Independent, q: Independent) -> Tensor:
    value = rule_for(p.base_dist, q.base_dist)(p.base_dist, q.base_dist)
    return value.flatten(len(p.batch_shape)).sum(-1) if value.ndim > len(p.batch_shape) else value


@register_kl(Product, Product)
@positive_kl.register
def _(p: Product, q: Product) -> Tensor:
    return p.summed([rule_for(a, b)(a, b) for a, b in zip(p.components, q.components, strict=True)])


def _weighted_excess(weight: Tensor, other: Tensor, log_ratio: Tensor) -> Tensor:
    r""":math:`p\, g(\log q - \log p) = q - p - p \log(q/p)`, also where q is many orders larger than p, or one of them is 0."""
    impossible = (weight == 0) & (other == 0)
    x = torch.where(impossible, 0, log_ratio).clamp_max(torch.finfo(log_ratio.dtype).max)
    return torch.where(x > 1, other - weight - weight * x, weight * excess(x.clamp_max(1)))


def _binary(logits: Tensor, others: Tensor) -> Tensor:
    return sum(
        (
            _weighted_excess(torch.sigmoid(a), torch.sigmoid(b), logsigmoid(b) - logsigmoid(a))
            for a, b in ((logits, others), (-logits, -others))
        ),
        start=torch.zeros((), dtype=logits.dtype, device=logits.device),
    )


def _categorical(logits: Tensor, others: Tensor) -> Tensor:
    logits, others = logits.log_softmax(-1), others.log_softmax(-1)
    return _weighted_excess(logits.exp(), others.exp(), others - logits).sum(-1)


def _gumbel(ratio: Tensor, shift: Tensor) -> Tensor:
    r"""With :math:`r = \beta_p/\beta_q`, :math:`\delta = \Delta\mu/\beta_q`: :math:`\Gamma(1 + r) e^{-\delta} - 1 + \delta - \log r + \gamma (r - 1)`."""
    x = log_gamma(1 + ratio) - shift
    return excess(x) + log_gamma(1 + ratio) - ratio.log() + euler_constant * (ratio - 1)


def _dirichlet(alpha: Tensor, other: Tensor) -> Tensor:
    r""":math:`\sum_i h(\alpha_i, \beta_i) - h(\sum\alpha, \sum\beta)`, :math:`h(a, b) = \log\frac{\Gamma(b)}{\Gamma(a)} - (b - a) \psi(a)`."""

    def gap(a: Tensor, b: Tensor) -> Tensor:
        return log_gamma(b) - log_gamma(a) - (b - a) * digamma(a)

    return gap(alpha, other).sum(-1) - gap(alpha.sum(-1), other.sum(-1))
