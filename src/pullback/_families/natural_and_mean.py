r"""The two flat connections of an exponential family.

An exponential family :math:`p(x) = h(x) \exp(\eta \cdot T(x) - A(\eta))` has two systems of coordinates that matter, the natural
parameters :math:`\eta` and the mean parameters :math:`\mu = E\,T(x) = \nabla A(\eta)`. A straight line in the first is a geometric mixture
of its ends, :math:`\log p_t = (1 - t) \log p_0 + t \log p_1` up to a constant: a geodesic of the *exponential* connection. A straight
line in the second mixes the expectations: a geodesic of the *mixture* connection. Neither keeps lengths, but together they do,
:math:`ds^2 = d\eta \cdot d\mu`, and Levi-Civita's connection is half-way between them (Amari and Nagaoka 2000, *Methods of Information
Geometry*, chapters 2 and 3). A decoder pulls both back by projection, as it pulls back the metric.

Here is what the family must know for that: its pair of coordinates. (`pullback.embed` has the pair of some families, and for
others a Euclidean or hyperbolic embedding, which serves Levi-Civita's connection only.)
"""

from __future__ import annotations

from functools import singledispatch

import torch
from torch import Tensor
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
    Independent,
    Multinomial,
    MultivariateNormal,
    NegativeBinomial,
    Normal,
    OneHotCategorical,
    Poisson,
    TransformedDistribution,
    VonMises,
)

from pullback._families.composite import fixed_base
from pullback._families.embedding import Dual, embed, fixed
from pullback._families.missing import MissingRuleError
from pullback._families.product import Product
from pullback._families.von_mises_fisher import VonMisesFisher


@singledispatch
def natural_and_mean(p: Distribution) -> tuple[Tensor, Tensor]:
    r"""The natural parameters and the mean parameters :math:`(\eta, \mu)` of `p`, each of shape ``(*batch_shape, m)``.

    They belong to one sufficient statistic T: the density is :math:`h(x) \exp(\eta \cdot T(x) - A(\eta))` and :math:`\mu = E\,T(x)`. Then
    :math:`I = D\eta^\top D\mu`, and :math:`\Delta\eta \cdot \Delta\mu` is the Jeffreys divergence. The α-geodesics of `pullback.expmap` and
    `pullback.exponential` are built on this pair. To add an exponential family, register a function of its distribution:

    .. code-block:: python

        @pullback.natural_and_mean.register
        def _(p: Maxwell):
            return (-1 / p.scale**2)[..., None], 1.5 * (p.scale**2)[..., None]  # of the statistic x²/2

    **Arguments:**

    - `p`: the distribution.
    """
    raise MissingRuleError(
        f"{type(p).__name__} has no rule for its natural and mean parameters, so it has no α-connection. If it is an exponential "
        "family, register a function that returns the pair, each of shape (*batch_shape, m): @pullback.natural_and_mean.register. "
        "Otherwise leave alpha at 0, which needs none."
    )


@natural_and_mean.register
def _(p: Normal) -> Dual:
    """T = (x, x²)."""
    precision = p.scale**-2
    return _stack(p.loc * precision, -0.5 * precision), _stack(p.loc, p.loc**2 + p.scale**2)


@natural_and_mean.register(MultivariateNormal)
@natural_and_mean.register(ContinuousBernoulli)
@natural_and_mean.register(VonMises)
@natural_and_mean.register(VonMisesFisher)
def _(p: Distribution) -> Dual:
    """T = (x, xxᵀ), or x; for an angle, (cos x, sin x). The pair is the family's dual embedding."""
    dual = embed(p)
    assert dual is not None
    return dual


@natural_and_mean.register
def _(p: Bernoulli) -> Dual:
    """T = x."""
    return _stack(p.logits), _stack(p.probs)


@natural_and_mean.register
def _(p: Binomial) -> Dual:
    """T = x, for a fixed number of trials."""
    _check_constant(p, "total_count")
    return _stack(p.logits), _stack(p.total_count * p.probs)


@natural_and_mean.register(Categorical)
@natural_and_mean.register(OneHotCategorical)
def _(p: Categorical | OneHotCategorical) -> Dual:
    """T = x in one-hot form. The statistics add up to one, so logits count up to a constant, which no chord sees."""
    return p.logits, p.probs


@natural_and_mean.register
def _(p: Multinomial) -> Dual:
    """T = x, the counts."""
    return p.logits, p.total_count * p.probs


@natural_and_mean.register
def _(p: Poisson) -> Dual:
    """T = x."""
    return _stack(torch.log(p.rate)), _stack(p.rate)


@natural_and_mean.register
def _(p: Geometric) -> Dual:
    """T = x."""
    return _stack(torch.log1p(-p.probs)), _stack(1 / p.probs - 1)


@natural_and_mean.register
def _(p: NegativeBinomial) -> Dual:
    """T = x, for a fixed total count."""
    _check_constant(p, "total_count")
    return _stack(torch.nn.functional.logsigmoid(p.logits)), _stack(p.total_count * torch.exp(p.logits))


@natural_and_mean.register
def _(p: Exponential) -> Dual:
    """T = x."""
    return _stack(-p.rate), _stack(1 / p.rate)


@natural_and_mean.register
def _(p: Gamma) -> Dual:
    """T = (log x, x)."""
    shape, rate = torch.broadcast_tensors(p.concentration, p.rate)
    return _stack(shape, -rate), _stack(torch.digamma(shape) - torch.log(rate), shape / rate)


@natural_and_mean.register
def _(p: Beta) -> Dual:
    """T = (log x, log(1 - x))."""
    return _of_dirichlet(torch.stack([p.concentration1, p.concentration0], -1))


@natural_and_mean.register
def _(p: Dirichlet) -> Dual:
    """T = log x."""
    return _of_dirichlet(p.concentration)


def _of_dirichlet(alpha: Tensor) -> Dual:
    return alpha, torch.digamma(alpha) - torch.digamma(alpha.sum(-1, keepdim=True))


@natural_and_mean.register
def _(p: Independent) -> Dual:
    """The pairs of the features, side by side."""
    return _merged(natural_and_mean(p.base_dist), len(p.batch_shape))


@natural_and_mean.register
def _(p: Product) -> Dual:
    """The pairs of the parts, side by side."""
    pairs = [_merged(natural_and_mean(part), len(p.batch_shape)) for part in p.components]
    eta, mu = (torch.cat(parts, -1) for parts in zip(*pairs, strict=True))
    return eta, mu


@natural_and_mean.register
def _(p: TransformedDistribution) -> Dual:
    """The pair of the base: a fixed transform of x leaves its statistic, as a random variable, as it is."""
    return natural_and_mean(fixed_base(p))


def _stack(*parameters: Tensor) -> Tensor:
    return torch.stack(torch.broadcast_tensors(*parameters), -1)


def _merged(pair: Dual, num_batch: int) -> Dual:
    return pair[0].flatten(num_batch), pair[1].flatten(num_batch)


def _check_constant(p: Distribution, name: str) -> None:
    if not fixed(getattr(p, name)):
        raise MissingRuleError(
            f"{type(p).__name__} is an exponential family only for a fixed {name}, which here varies with the code. Keep it constant, "
            "or leave alpha at 0."
        )
