r"""Families of categories: points of a sphere.

Probabilities form the positive orthant of a sphere of radius two, by :math:`2\sqrt p` (Fisher 1922; Rao 1945). A sample
of size *n* multiplies lengths by :math:`\sqrt n`. The Fisher-Rao distance is the arc, and the chord of the embedding
falls short of it at third order. Coordinates are logits, for the reasons given in `pullback._families.counts`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.distributions import Categorical, Multinomial, OneHotCategorical

from pullback._autodiff.torch_internals import given_probs
from pullback._families import rules
from pullback._families.fading import FIXED, UNIFORM, fades
from pullback._families.information import Information, Maps
from pullback._numerics.special import weighted_excess

Categories = Categorical | OneHotCategorical | Multinomial

fades(Categorical, probs=UNIFORM)
fades(OneHotCategorical, probs=UNIFORM)
fades(Multinomial, total_count=FIXED, probs=UNIFORM)


def _trials(p: Categories) -> int:
    return p.total_count if isinstance(p, Multinomial) else 1


def _log_probs(p: Categories) -> Tensor:
    """Logits, -inf for an impossible category."""
    return torch.log(p.probs.clamp_min(torch.finfo(p.probs.dtype).tiny)) if given_probs(p) else p.logits


def _root_probs(logits: Tensor) -> Tensor:
    return torch.exp(0.5 * torch.log_softmax(logits, -1))


@rules.fisher.register
def _(p: Categories) -> Information:
    r"""Coordinates logits: I = n (diag(p) - ppᵀ); φ = 2 √(n p), on a sphere of radius 2 √n."""
    scale = math.sqrt(_trials(p))
    # torch's logits are logarithms of probabilities, also when they move: the sphere is then entry by entry
    maps = Maps(
        lambda eta, _: (2 * scale * torch.exp(0.5 * eta),), lambda eta, _, u: (scale * torch.exp(0.5 * eta) * u,)
    )

    def root(eta: Tensor, u: Tensor) -> Tensor:
        return scale * (_root_probs(eta) * (u - (torch.softmax(eta, -1) * u).sum(-1, keepdim=True)))

    return Information(_log_probs(p), root=root, pair=maps, separable=True)


@rules.rao_distance.register
def _(p: Categories, q: Categories) -> Tensor:
    r"""2 √n arccos Σ √(p q) = 4 √n arcsin(|√p - √q| / 2), for equal sample sizes n. (The paper prints half of it.)"""
    rules.check_equal("Fisher-Rao distance", "total_count", p, q)
    chord = torch.linalg.vector_norm(_root_probs(_log_probs(p)) - _root_probs(_log_probs(q)), dim=-1)
    return 4 * math.sqrt(_trials(p)) * torch.asin(0.5 * chord)


@rules.natural_and_mean.register
def _(p: Categories) -> rules.Dual:
    """T = x, the counts. They add up to n, so logits count up to a constant, which no chord sees."""
    return p.logits, _trials(p) * p.probs


@rules.positive_kl.register
def _(p: Categories, q: Categories) -> Tensor:
    r""":math:`n \sum_i p_i\, g(\log q_i - \log p_i)`."""
    rules.check_equal("Kullback-Leibler divergence", "total_count", p, q)
    logits, others = p.logits.log_softmax(-1), q.logits.log_softmax(-1)
    return _trials(p) * weighted_excess(logits.exp(), others.exp(), others - logits).sum(-1)


@rules.log_affinity.register
def _(p: Categories, q: Categories, alpha: float) -> Tensor:
    r""":math:`n \log \sum_i p_i^\alpha q_i^{1-\alpha}` from logits."""
    rules.check_equal(rules.AFFINITY, "total_count", p, q)
    return _trials(p) * torch.logsumexp(alpha * p.logits + (1 - alpha) * q.logits, dim=-1)
