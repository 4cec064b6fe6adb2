r"""Divergences between distributions: callables ``(p, q) -> Tensor`` of shape ``batch_shape``.

A smooth divergence D vanishes for equal arguments and is positive otherwise, so to second order it is a metric: with its
own *scale* s,

.. math:: ds^2 = s\, D(p_z, p_{z + dz}).

The scale is 2 for the Kullback-Leibler divergence, :math:`2/\alpha` for Rényi's, 8 for the squared Hellinger distance and 1 for
a squared distance such as Wasserstein's; all but the last give the Fisher-Rao metric. A divergence carries it as the
attribute ``scale``; a plain function without one counts as 2. Features (further batch dimensions) are not summed here: the
metric does that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import singledispatch
from typing import ClassVar, TypeVar

import torch
from torch import Tensor
from torch.distributions import (
    Distribution,
    Independent,
    LowRankMultivariateNormal,
    MultivariateNormal,
    Normal,
    Pareto,
    Uniform,
)

from pullback._families.affinity import log_affinity
from pullback._families.kl import rule_for
from pullback._families.missing import MissingRuleError
from pullback._families.product import Product
from pullback._families.score import depends_on_code, fixed_noise, tensors_in
from pullback._numerics.elementary import excess
from pullback._numerics.matrix_roots import sqrtm

Divergence = Callable[[Distribution, Distribution], Tensor]
Function = TypeVar("Function", bound=Callable[..., object])


def _facts(**attributes: object) -> Callable[[Function], Function]:
    """Gives a function attributes that metrics read."""

    def mark(function: Function) -> Function:
        vars(function).update(attributes)
        return function

    return mark


def check_smooth(p: Distribution) -> None:
    """Raises if automatic differentiation of the Kullback-Leibler divergence twice would be silently wrong for this family."""
    if isinstance(p, Independent):
        check_smooth(p.base_dist)
    elif isinstance(p, Product):
        for part in p.components:
            check_smooth(part)
    elif isinstance(p, Uniform) or (isinstance(p, Pareto) and depends_on_code(p.scale)):
        raise MissingRuleError(
            f"The support of this {type(p).__name__} moves with the code, so it has no Fisher information and its divergence is "
            "infinite on one side. Use pullback.EuclideanMetric(decoder), or a likelihood with fixed support."
        )


@_facts(scale=2.0, check_smooth=check_smooth)
def kl(p: Distribution, q: Distribution) -> Tensor:
    r"""The Kullback-Leibler divergence :math:`\int p \log(p/q)`, right at saturation.

    torch's own divergences of discrete families subtract nearly equal numbers: in float32 at logits of 20 they come out
    negative, and infinite with zero gradient for saturated probabilities. Here they are sums of terms that are each
    positive, computed from logits: :math:`\sum_i p_i\, g(\log q_i - \log p_i)`, :math:`g(x) = e^x - 1 - x`. Others (Laplace, Weibull,
    Wishart) have a Hessian that autodiff of torch's rule gets wrong without notice; here it is the Fisher information.
    Multinomial, negative binomial and von Mises divergences are missing in torch. Everything else is torch's, to which
    `torch.distributions.register_kl` adds families.
    """
    return rule_for(p, q)(p, q)


@_facts(scale=2.0, symmetric=True, check_smooth=check_smooth)
def symmetrized_kl(p: Distribution, q: Distribution) -> Tensor:
    r"""The mean of the Kullback-Leibler divergences in both directions, half of Jeffreys' divergence.

    Curves measured with it converge with order two in the number of points, with one direction alone only with order one.
    """
    return 0.5 * (kl(p, q) + kl(q, p))


@dataclass(frozen=True)
class MonteCarloKL:
    r"""The Kullback-Leibler divergence estimated from samples, for a family with neither a divergence nor an information.

    Half of the samples come from p and half from q, weighted as samples of :math:`m = (p + q)/2`. With :math:`r = q/p`,

    .. math:: KL(p, q) = E_m\Big[\frac{2 (r - 1 - \log r)}{1 + r}\Big].

    Every term is positive, of second order in the distance of p and q, and bounded by twice ``max(1, -log r)``: unlike the mean of
    :math:`-\log r` under p it is accurate for neighbours, needs no absolute value, and has a finite variance for distant pairs.
    Its Hessian at ``p = q`` is the covariance of the score. The noise is fixed by the seed, so the estimate is a function
    of p and q (common random numbers). Veach and Guibas, "Optimally combining sampling techniques" (1995).

    Samples are constants to autodiff; their weights carry the gradient of sampling, so discrete families and families
    whose samplers cannot be differentiated twice work alike.

    **Arguments:**

    - `num_samples`: of both distributions together.
    - `seed`: fixes the noise; the caller's random state is untouched.
    """

    num_samples: int = 1000
    seed: int = 0
    scale: ClassVar[float] = 2.0
    random: ClassVar[bool] = True

    def __call__(self, p: Distribution, q: Distribution) -> Tensor:
        device = next(tensors_in(p)).device
        with fixed_noise(self.seed, device):
            terms = [self._terms(p, q, source) for source in (p, q)]
        return torch.stack(terms).mean((0, 1))

    def _terms(self, p: Distribution, q: Distribution, source: Distribution) -> Tensor:
        shape = torch.Size([max(1, self.num_samples // 2)])
        with torch.no_grad():
            x = source.sample(shape)
        first, second = p.log_prob(x), q.log_prob(x)
        own = first if source is p else second
        weight = (own - own.detach()).exp()  # 1, with the gradient of sampling
        return weight * _balanced_excess((second - first).clamp_max(torch.finfo(first.dtype).max))


def _balanced_excess(log_ratio: Tensor) -> Tensor:
    """``2 (r - 1 - log r) / (1 + r)`` without overflow for large r and without cancellation near 1."""
    small = log_ratio.abs() < 0.5
    near = torch.where(small, log_ratio, 0)
    far = 2 * (torch.tanh(0.5 * log_ratio) - log_ratio * torch.sigmoid(-log_ratio))
    return torch.where(small, 2 * torch.sigmoid(-near) * excess(near), far)


@dataclass(frozen=True)
class Renyi:
    r"""Rényi's divergence of order α, :math:`\frac{1}{\alpha - 1} \log \int p^\alpha q^{1-\alpha}`, with scale :math:`2/\alpha`.

    Closed form for exponential families; infinite where the integral diverges, which for :math:`\alpha > 1` may be nearby. The limit
    :math:`\alpha \to 1` is the Kullback-Leibler divergence. Rényi, "On measures of entropy and information" (1961).

    **Arguments:**

    - `alpha`: the order, positive and not 1.
    """

    alpha: float = 0.5

    def __post_init__(self) -> None:
        if self.alpha <= 0 or self.alpha == 1:
            raise ValueError(
                f"Rényi's order must be positive and not 1, got {self.alpha}. Its limit at 1 is pullback.divergences.kl; 0.5 is symmetric."
            )

    @property
    def scale(self) -> float:
        """The factor 2/α that turns the divergence into a squared length."""
        return 2 / self.alpha

    @property
    def symmetric(self) -> bool:
        """Only the order ½ treats both arguments alike."""
        return self.alpha == 0.5

    def __call__(self, p: Distribution, q: Distribution) -> Tensor:
        return log_affinity(p, q, self.alpha) / (self.alpha - 1)


@_facts(scale=8.0, symmetric=True)
def hellinger(p: Distribution, q: Distribution) -> Tensor:
    r"""The squared Hellinger distance :math:`1 - \int \sqrt{pq}`, between 0 and 1, with scale 8."""
    return -torch.expm1(log_affinity(p, q, 0.5))


@_facts(scale=1.0, symmetric=True)
def wasserstein2(p: Distribution, q: Distribution) -> Tensor:
    r"""The squared 2-Wasserstein distance of Gaussians, with scale 1.

    .. math:: |\Delta\mu|^2 + \mathrm{tr}\big(\Sigma_p + \Sigma_q - 2 (\Sigma_p^{1/2} \Sigma_q \Sigma_p^{1/2})^{1/2}\big),

    which for independent features is :math:`|\Delta\mu|^2 + |\Delta\sigma|^2`. Olkin and Pukelsheim, "The distance between two random
    vectors with given dispersion matrices" (1982). Its metric measures how far mass moves, not how well p and q can be told
    apart: it depends on the units of the data.
    """
    return _wasserstein2(p, q)


@singledispatch
def _wasserstein2(p: Distribution, q: Distribution) -> Tensor:
    raise MissingRuleError(
        f"The Wasserstein distance has a closed form for Gaussians only, not for {type(p).__name__}. Use a Normal or "
        "MultivariateNormal decoder, or pullback.FisherRaoMetric(decoder)."
    )


@_wasserstein2.register
def _(p: Normal, q: Normal) -> Tensor:
    return (p.loc - q.loc) ** 2 + (p.scale - q.scale) ** 2


@_wasserstein2.register(MultivariateNormal)
@_wasserstein2.register(LowRankMultivariateNormal)
def _(p: MultivariateNormal, q: MultivariateNormal) -> Tensor:
    r"""With :math:`\Sigma_p = LL^\top`, the trace is :math:`|L^{-\top}((L^\top \Sigma_q L)^{1/2} - L^\top L)|^2`: no cancellation for neighbours."""
    L = torch.linalg.cholesky(p.covariance_matrix)
    difference = sqrtm(L.mT @ q.covariance_matrix @ L) - L.mT @ L
    moved = torch.linalg.solve_triangular(L.mT, difference, upper=True)
    return ((p.loc - q.loc) ** 2).sum(-1) + (moved**2).sum((-2, -1))


@_wasserstein2.register
def _(p: Independent, q: Independent) -> Tensor:
    value = _wasserstein2(p.base_dist, q.base_dist)
    return value.flatten(len(p.batch_shape)).sum(-1) if value.ndim > len(p.batch_shape) else value


@_wasserstein2.register
def _(p: Product, q: Product) -> Tensor:
    return p.summed([_wasserstein2(a, b) for a, b in zip(p.components, q.components, strict=True)])
