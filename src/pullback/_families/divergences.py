r"""Divergences between distributions: functions ``(p, q) -> Tensor`` of shape ``batch_shape``.

A smooth divergence D vanishes for equal arguments and is positive otherwise, so to second order it is a metric: with
its own *scale* s,

.. math:: ds^2 = s\, D(p_z, p_{z + dz}).

The scale is 2 for the Kullback-Leibler divergence, :math:`2/\alpha` for Rényi's, 8 for the squared Hellinger distance
and 1 for a squared distance such as Wasserstein's; all but the last give the Fisher-Rao metric. Features (further batch
dimensions) are not summed here: the metric does that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributions import Distribution

from pullback._families.gaussian import wasserstein2
from pullback._families.rules import kl, log_affinity
from pullback._families.score import fixed_noise, tensors_in
from pullback._numerics.random import RandomState, as_seed
from pullback._numerics.special import excess

Function = Callable[[Distribution, Distribution], Tensor]


@dataclass(frozen=True)
class Divergence:
    r"""A divergence, and what a metric must know of it. Called, it is its function.

    Attributes:
        function: maps two distributions to a tensor of their batch shape.
        scale: the factor s that turns the divergence into a squared length, :math:`ds^2 = s\,D`; 2 for
            Kullback-Leibler.
        symmetric: whether both arguments are treated alike; otherwise metrics average both directions.
        random: whether the value is an estimate with fixed noise, which is then made for one code at a time.

    >>> from torch.distributions import Bernoulli
    >>> pearson = Divergence(lambda p, q: (p.probs - q.probs) ** 2 / (q.probs * (1 - q.probs)), scale=1.0)
    >>> pearson(Bernoulli(torch.tensor(0.3)), Bernoulli(torch.tensor(0.5)))
    tensor(0.1600)
    """

    function: Function
    scale: float = 2.0
    symmetric: bool = False
    random: bool = False

    def __call__(self, p: Distribution, q: Distribution) -> Tensor:
        return self.function(p, q)

    @classmethod
    def of(cls, divergence: Divergence | Function) -> Divergence:
        """What is known of a divergence; a plain function counts as one like Kullback-Leibler's."""
        return divergence if isinstance(divergence, Divergence) else _KNOWN.get(divergence, cls(divergence))


def symmetrized_kl(p: Distribution, q: Distribution) -> Tensor:
    r"""The mean of the Kullback-Leibler divergences in both directions, half of Jeffreys' divergence.

    Curves measured with it converge with order two in the number of points, with one direction alone with order one.

    >>> from torch.distributions import Poisson
    >>> symmetrized_kl(Poisson(torch.tensor(1.0)), Poisson(torch.tensor(2.0)))  # ½ log 2
    tensor(0.3466)
    """
    return 0.5 * (kl(p, q) + kl(q, p))


def monte_carlo_kl(num_samples: int = 1000, random_state: RandomState = 0) -> Divergence:
    r"""The Kullback-Leibler divergence estimated from samples, for a family that has no closed form of anything.

    Half of the samples come from p and half from q, weighted as samples of :math:`m = (p + q)/2`. With :math:`r = q/p`,

    .. math:: KL(p, q) = E_m\Big[\frac{2 (r - 1 - \log r)}{1 + r}\Big].

    Every term is positive, of second order in the distance of p and q, and bounded by twice ``max(1, -log r)``: unlike
    the mean of :math:`-\log r` under p it is accurate for neighbors, needs no absolute value, and has a finite variance
    for distant pairs. Its Hessian at ``p = q`` is the covariance of the score. The noise is fixed, so the estimate is a
    function of p and q (common random numbers). Veach and Guibas, "Optimally combining sampling techniques" (1995).

    Samples are constants to autodiff; their weights carry the gradient of sampling, so discrete families and families
    whose samplers cannot be differentiated twice work alike.

    Args:
        num_samples: of both distributions together.
        random_state: fixes the noise; with a seed, the caller's random state is untouched.

    >>> from torch.distributions import Poisson
    >>> p, q = Poisson(torch.tensor(1.0)), Poisson(torch.tensor(2.0))
    >>> bool((monte_carlo_kl(10_000)(p, q) - kl(p, q)).abs() < 0.01)
    True
    """
    seed, size = as_seed(random_state), torch.Size([max(1, num_samples // 2)])

    def estimate(p: Distribution, q: Distribution) -> Tensor:
        terms = []
        with fixed_noise(seed, tensors_in(p)[0].device):
            for source in (p, q):
                with torch.no_grad():
                    x = source.sample(size)
                first, second = p.log_prob(x), q.log_prob(x)
                own = first if source is p else second
                # 1, with the gradient of sampling.
                weight = (own - own.detach()).exp()
                terms.append(weight * _balanced_excess((second - first).clamp_max(torch.finfo(own.dtype).max)))
        return torch.stack(terms).mean((0, 1))

    return Divergence(estimate, random=True)


def _balanced_excess(log_ratio: Tensor) -> Tensor:
    """``2 (r - 1 - log r) / (1 + r)`` without overflow for large r and without cancellation near 1."""
    small = log_ratio.abs() < 0.5
    near = torch.where(small, log_ratio, 0)
    far = 2 * (torch.tanh(0.5 * log_ratio) - log_ratio * torch.sigmoid(-log_ratio))
    return torch.where(small, 2 * torch.sigmoid(-near) * excess(near), far)


def renyi(alpha: float = 0.5) -> Divergence:
    r"""Rényi's divergence of order α, :math:`\frac{1}{\alpha - 1} \log \int p^\alpha q^{1-\alpha}`.

    Its scale is :math:`2/\alpha`. Closed form for exponential families; infinite where the integral diverges, which for
    :math:`\alpha > 1` may be nearby. The limit :math:`\alpha \to 1` is the Kullback-Leibler divergence. Rényi, "On
    measures of entropy and information" (1961).

    Args:
        alpha: the order, positive and not 1. Only ½ treats both arguments alike.

    >>> from torch.distributions import Normal
    >>> renyi(0.5)(Normal(torch.tensor(0.0), torch.tensor(1.0)), Normal(torch.tensor(2.0), torch.tensor(1.0)))
    tensor(1.)
    """
    if alpha <= 0 or alpha == 1:
        raise ValueError(
            f"Rényi's order must be positive and not 1, got {alpha}. Its limit at 1 is pullback.divergences.kl; 0.5 is "
            f"symmetric."
        )
    return Divergence(lambda p, q: log_affinity(p, q, alpha) / (alpha - 1), scale=2 / alpha, symmetric=alpha == 0.5)


def hellinger(p: Distribution, q: Distribution) -> Tensor:
    r"""The squared Hellinger distance :math:`1 - \int \sqrt{pq}`, between 0 and 1, with scale 8.

    >>> from torch.distributions import Poisson
    >>> hellinger(Poisson(torch.tensor(1.0)), Poisson(torch.tensor(4.0)))  # 1 - exp(-½)
    tensor(0.3935)
    """
    return -torch.expm1(log_affinity(p, q, 0.5))


_KNOWN: dict[Function, Divergence] = {
    kl: Divergence(kl),
    symmetrized_kl: Divergence(symmetrized_kl, symmetric=True),
    hellinger: Divergence(hellinger, scale=8.0, symmetric=True),
    wasserstein2: Divergence(wasserstein2, scale=1.0, symmetric=True),
}
