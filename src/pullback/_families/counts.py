r"""Families of counts: lines.

A family with one parameter is a line, and :math:`\phi = \int \sqrt{I}\, d\eta` is its arc length, known to statisticians as the
variance-stabilising transform: :math:`2\arcsin\sqrt p` for Bernoulli, :math:`2\sqrt\lambda` for Poisson. A sample of size *n*
multiplies lengths by :math:`\sqrt n`.

Coordinates are logits wherever torch has them. Probabilities saturate: in single precision ``1 - p`` is zero beyond a logit of
17, where the decoder still moves. Given ``probs=``, the logits are taken from them as far as they tell: torch's own stop at the
machine precision, these at the smallest number. Probabilities of exactly 0 or 1 are finite and do not move.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.distributions import (
    Bernoulli,
    Binomial,
    ContinuousBernoulli,
    Distribution,
    Geometric,
    NegativeBinomial,
    Poisson,
)
from torch.nn.functional import logsigmoid

from pullback._autodiff.torch_internals import is_wrapped
from pullback._families.embedding import Dual, check_equal, embed, fixed
from pullback._families.fisher import fisher
from pullback._families.information import Information
from pullback._families.rao import rao_distance
from pullback._numerics.special import artanh_root_sigmoid, dispersion_information, langevin, langevin_slope

# -- two categories --------------------------------------------------------------------------------------------------------


@fisher.register
def _(p: Bernoulli) -> Information:
    r"""Coordinate logit l: I = p(1 - p)."""
    return Information(
        _log_odds(p)[..., None],
        root=lambda eta, u: _deviation(eta) * u,
        product=lambda eta, u: torch.sigmoid(eta) * torch.sigmoid(-eta) * u,
        isometric=True,
        separable=True,
    )


@fisher.register
def _(p: Binomial) -> Information:
    r"""Coordinates (logit l, n): I = n p(1 - p) ⊕ 0. The number of trials is a constant, carried along."""
    eta = torch.stack(torch.broadcast_tensors(_log_odds(p), p.total_count), -1)
    return Information(eta, root=_binomial_root, isometric=True)


def _binomial_root(eta: Tensor, u: Tensor) -> Tensor:
    return eta[..., 1:].sqrt() * _deviation(eta[..., :1]) * u[..., :1]


def _log_odds(p: Bernoulli | Binomial | Geometric | NegativeBinomial) -> Tensor:
    if not given_probs(p):
        return p.logits
    limits = torch.finfo(p.probs.dtype)
    probs = p.probs.clamp(limits.tiny, 1 - limits.eps)
    return torch.log(probs) - torch.log1p(-probs)


def given_probs(p: Distribution) -> bool:
    """Whether `p` was built from ``probs=``; the logits torch then offers are clamped."""
    attributes = vars(p)
    return attributes["_param"] is attributes.get("probs") if "_param" in attributes else "logits" not in attributes


def _arc_of_root_odds(t: Tensor) -> Tensor:
    """In place; torch's arctangent of two numbers costs half as much as that of one."""
    return torch.atan2(t, torch.ones((), dtype=t.dtype, device=t.device), out=t).mul_(2).sub_(0.5 * math.pi)


def _deviation(logits: Tensor) -> Tensor:
    r"""√(p(1 - p)) = t / (1 + t²) with t = exp(-|l|/2): no overflow, in its derivatives either."""
    t = torch.exp(-0.5 * _sign(logits) * logits)
    return t / (1 + t * t)


def _sign(logits: Tensor) -> Tensor:
    """±1, a constant to every derivative; torch's own sign and abs are flat at 0, where a logit often is."""
    return torch.copysign(torch.ones((), dtype=logits.dtype, device=logits.device), logits.detach())


@embed.register
def _(p: Bernoulli, origin: Bernoulli | None = None) -> Dual:
    r"""φ = 2 arcsin √p, counted from the origin (p = ½ if there is none)."""
    phi = _arc(_log_odds(p), None if origin is None else _log_odds(origin))[..., None]
    return phi, phi


@embed.register
def _(p: Binomial, origin: Binomial | None = None) -> Dual | None:
    r"""φ = 2 √n arcsin √p, for a fixed number of trials n."""
    if not fixed(p.total_count, None if origin is None else origin.total_count):
        return None
    arc = _arc(_log_odds(p), None if origin is None else _log_odds(origin))
    phi = (p.total_count.sqrt() * arc)[..., None]
    return phi, phi


def _arc(logits: Tensor, origin: Tensor | None) -> Tensor:
    r"""2 arcsin √σ(l) - 2 arcsin √σ(l₀) to full relative precision, also where both are saturated.

    Counted from p = ½ it is :math:`\pm(\pi/2 - 2 \arctan t)` with :math:`t = e^{-|l|/2}`; the arctangent is taken as an arcsine, which
    costs less than half. Counted from an origin, half of it has the tangent :math:`\tanh\frac{l - l_0}{4} \cdot \frac{c}{2 - c}` with
    :math:`c = 1 - \tanh\frac l4 \tanh\frac{l_0}4`, and *c* is a sum of the complements of the two factors.
    """
    if origin is None and type(logits) is Tensor and not (torch.is_grad_enabled() or is_wrapped(logits)):
        return _arc_of_root_odds((0.5 * logits).exp_())  # the same, fast, where no derivative is wanted
    if origin is None:
        sign = _sign(logits)
        t = torch.exp(-0.5 * sign * logits)
        return sign * (0.5 * math.pi - 2 * torch.asin(t * torch.rsqrt(1 + t * t)))
    sign = _sign(origin)
    first, second = 2 * torch.sigmoid(-0.5 * sign * logits), 2 * torch.sigmoid(-0.5 * sign * origin)
    c = first + second * (1 - first)
    return 2 * torch.atan2(torch.tanh(0.25 * (logits - origin)) * c, 2 - c)


@rao_distance.register(Bernoulli)
def _(p: Bernoulli, q: Bernoulli) -> Tensor:
    r"""2 |arcsin √p - arcsin √q|."""
    return _arc(_log_odds(p), _log_odds(q)).abs()


@rao_distance.register(Binomial, known="total_count")
def _(p: Binomial, q: Binomial) -> Tensor:
    r"""2 √n |arcsin √p - arcsin √q|, for equal numbers of trials."""
    check_equal("Fisher-Rao distance", "total_count", p, q)
    return p.total_count.sqrt() * _arc(_log_odds(p), _log_odds(q)).abs()


@fisher.register
def _(p: ContinuousBernoulli) -> Information:
    r"""Coordinate logit η, the natural parameter: I = 1/η² - 1/(4 sinh²(η/2)) = L'(η/2)/4, L Langevin's function."""
    return Information(p.logits[..., None], root=lambda eta, u: 0.5 * langevin_slope(0.5 * eta).sqrt() * u)


@embed.register
def _(p: ContinuousBernoulli, origin: Distribution | None = None) -> Dual:
    r"""The natural parameter η and the mean (1 + L(η/2))/2."""
    return p.logits[..., None], 0.5 * langevin(0.5 * p.logits)[..., None]


# -- unbounded counts ------------------------------------------------------------------------------------------------------


@fisher.register
def _(p: Poisson) -> Information:
    r"""Coordinate rate λ: I = 1/λ. A rate of exactly zero that does not move contributes nothing."""
    return Information(p.rate[..., None], root=lambda eta, u: u / _positive(eta).sqrt(), isometric=True, separable=True)


@embed.register
def _(p: Poisson, origin: Distribution | None = None) -> Dual:
    r"""φ = 2 √λ."""
    phi = 2 * _positive(p.rate).sqrt()[..., None]
    return phi, phi


@rao_distance.register(Poisson)
def _(p: Poisson, q: Poisson) -> Tensor:
    r"""2 |√λ - √λ'|."""
    return 2 * (_positive(p.rate).sqrt() - _positive(q.rate).sqrt()).abs()


def _positive(rate: Tensor) -> Tensor:
    return rate.clamp_min(torch.finfo(rate.dtype).tiny)


@fisher.register
def _(p: Geometric) -> Information:
    r"""Coordinate logit l of the probability to stop: I = 1 - p."""
    return Information(
        _log_odds(p)[..., None],
        root=lambda eta, u: -torch.exp(0.5 * logsigmoid(-eta)) * u,
        isometric=True,
        separable=True,
    )


@embed.register
def _(p: Geometric, origin: Distribution | None = None) -> Dual:
    r"""φ = 2 artanh √(1 - p)."""
    phi = artanh_root_sigmoid(-_log_odds(p))[..., None]
    return phi, phi


@rao_distance.register(Geometric)
def _(p: Geometric, q: Geometric) -> Tensor:
    r"""2 |artanh √(1 - p) - artanh √(1 - q)|."""
    return (artanh_root_sigmoid(-_log_odds(p)) - artanh_root_sigmoid(-_log_odds(q))).abs()


@fisher.register
def _(p: NegativeBinomial) -> Information:
    r"""Coordinates (r, logit l), r the total count: :math:`r\sigma(l)(dl + dr/r)^2 + J\,dr^2`.

    :math:`dl + dr/r` is the change of the logarithm of the mean :math:`\mu = r e^l`, orthogonal to that of *r*, and *J* is
    `dispersion_information`. Where no total count moves, J is not computed.
    """
    return Information(torch.stack([p.total_count, _log_odds(p)], -1), root=_negative_binomial_root)


def _negative_binomial_root(eta: Tensor, u: Tensor) -> Tensor:
    r, logits = eta.unbind(-1)
    dr, dlogits = u.unbind(-1)
    mean = r.sqrt() * torch.exp(0.5 * logsigmoid(logits)) * (dlogits + dr / r)
    if _is_zero(dr):
        return mean[..., None]
    return torch.stack([mean, dispersion_information(r, logits).sqrt() * dr], -1)


def _is_zero(u: Tensor) -> bool:
    """Known to vanish with all its derivatives: not while a transform or autograd is looking."""
    watched = is_wrapped(u) or (u.requires_grad and torch.is_grad_enabled())
    return not watched and not u.any()


@embed.register
def _(p: NegativeBinomial, origin: NegativeBinomial | None = None) -> Dual | None:
    r"""φ = 2 √r arsinh √(μ/r), for a fixed total count r."""
    if not fixed(p.total_count, None if origin is None else origin.total_count):
        return None
    phi = _negative_binomial_arc(p)[..., None]
    return phi, phi


def _negative_binomial_arc(p: NegativeBinomial) -> Tensor:
    return p.total_count.sqrt() * artanh_root_sigmoid(_log_odds(p))


@rao_distance.register(NegativeBinomial, known="total_count")
def _(p: NegativeBinomial, q: NegativeBinomial) -> Tensor:
    r"""2 √r |arsinh √(μ/r) - arsinh √(μ'/r)|, for equal total counts: the distance within the family of that known count."""
    check_equal("Fisher-Rao distance", "total_count", p, q)
    return (_negative_binomial_arc(p) - _negative_binomial_arc(q)).abs()
