r"""Families of categories: points of a sphere.

Probabilities form the positive orthant of a sphere of radius two, by :math:`2\sqrt p` (Fisher 1922; Rao 1945). A sample of size *n*
multiplies lengths by :math:`\sqrt n`. The Fisher-Rao distance is the arc, and the chord of the embedding falls short of it at third
order. Coordinates are logits, for the reasons given in `pullback._families.counts`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.distributions import Categorical, Distribution, Multinomial, OneHotCategorical

from pullback._families.counts import given_probs
from pullback._families.embedding import Dual, check_equal, embed
from pullback._families.fisher import fisher
from pullback._families.information import Information
from pullback._families.rao import rao_distance


@fisher.register(Categorical)
@fisher.register(OneHotCategorical)
def _(p: Categorical | OneHotCategorical) -> Information:
    r"""Coordinates logits: I = diag(p) - ppᵀ."""
    return Information(_log_probs(p), root=_simplex_root, isometric=True)


@fisher.register
def _(p: Multinomial) -> Information:
    r"""Coordinates logits: I = n (diag(p) - ppᵀ)."""
    scale = math.sqrt(p.total_count)
    return Information(_log_probs(p), root=lambda eta, u: scale * _simplex_root(eta, u), isometric=True)


def _simplex_root(eta: Tensor, u: Tensor) -> Tensor:
    p = torch.softmax(eta, -1)
    return torch.exp(0.5 * torch.log_softmax(eta, -1)) * (u - (p * u).sum(-1, keepdim=True))


def _log_probs(p: Categorical | OneHotCategorical | Multinomial) -> Tensor:
    """Logits with a finite number in the place of -inf, the mask of an impossible category."""
    categorical = p if isinstance(p, Categorical) else p._categorical
    limits = torch.finfo(categorical.probs.dtype)
    if not given_probs(categorical):
        return categorical.logits.clamp_min(limits.min)
    return torch.log(categorical.probs.clamp_min(limits.tiny))


@embed.register(Categorical)
@embed.register(OneHotCategorical)
def _(p: Categorical | OneHotCategorical, origin: Distribution | None = None) -> Dual:
    r"""φ = 2 √p, on a sphere of radius 2."""
    phi = 2 * _root_probs(_log_probs(p))
    return phi, phi


@embed.register
def _(p: Multinomial, origin: Distribution | None = None) -> Dual:
    r"""φ = 2 √(n p), on a sphere of radius 2 √n."""
    phi = 2 * math.sqrt(p.total_count) * _root_probs(_log_probs(p))
    return phi, phi


@rao_distance.register(Categorical)
@rao_distance.register(OneHotCategorical)
def _(p: Categorical | OneHotCategorical, q: Categorical | OneHotCategorical) -> Tensor:
    r"""2 arccos Σ √(p q) = 4 arcsin(|√p - √q| / 2). (The paper prints half of it.)"""
    return _simplex_distance(_log_probs(p), _log_probs(q))


@rao_distance.register(Multinomial)
def _(p: Multinomial, q: Multinomial) -> Tensor:
    r"""2 √n arccos Σ √(p q), for equal sample sizes n."""
    check_equal("Fisher-Rao distance", "total_count", p, q)
    return math.sqrt(p.total_count) * _simplex_distance(_log_probs(p), _log_probs(q))


def _simplex_distance(logits: Tensor, other: Tensor) -> Tensor:
    chord = torch.linalg.vector_norm(_root_probs(logits) - _root_probs(other), dim=-1)
    return 4 * torch.asin(0.5 * chord)


def _root_probs(logits: Tensor) -> Tensor:
    return torch.exp(0.5 * torch.log_softmax(logits, -1))
