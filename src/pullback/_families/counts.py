r"""Families of counts: lines.

A family with one parameter is a line, and :math:`\phi = \int \sqrt{I}\, d\eta` is its arc length, known to
statisticians as the variance-stabilizing transform: :math:`2\arcsin\sqrt p` for Bernoulli, :math:`2\sqrt\lambda` for
Poisson. A sample of size *n* multiplies lengths by :math:`\sqrt n`.

Coordinates are logits wherever torch has them. Probabilities saturate: in single precision ``1 - p`` is zero beyond a
logit of 17, where the decoder still moves. Given ``probs=``, the logits are taken from them as far as they tell.
Probabilities of exactly 0 or 1 are finite and do not move.
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

from pullback._autodiff.torch_internals import given_probs, is_wrapped, plain_values
from pullback._families.fading import EVEN, FIXED, TENFOLD_ODDS, WIDE, fades, times
from pullback._families.information import Information, MissingRuleError
from pullback._families.rules import (
    AFFINITY,
    Dual,
    check_equal,
    embed,
    embeds_for_fixed,
    fisher,
    fixed,
    log_affinity,
    natural_and_mean,
    positive_kl,
    rao_distance,
)
from pullback._numerics.special import (
    artanh_root_sigmoid,
    dispersion_information,
    langevin,
    langevin_slope,
    weighted_excess,
)

Trials = Bernoulli | Binomial
Runs = Geometric | NegativeBinomial

fades(Bernoulli, probs=EVEN)
fades(ContinuousBernoulli, probs=EVEN)
fades(Binomial, total_count=FIXED, probs=EVEN)
fades(Geometric, probs=times(0.1))
fades(NegativeBinomial, total_count=FIXED, logits=TENFOLD_ODDS)
fades(Poisson, rate=WIDE)
embeds_for_fixed(Binomial, "total_count")
embeds_for_fixed(NegativeBinomial, "total_count")

# -- a number of trials ------------------------------------------------------------------------------------------------


@fisher.register
def _(p: Bernoulli) -> Information:
    r"""Coordinate logit l: I = p(1 - p)."""
    return Information(
        _log_odds(p)[..., None],
        root=lambda eta, u: _deviation(eta) * u,
        product=lambda eta, u: torch.sigmoid(eta) * torch.sigmoid(-eta) * u,
        isometry=_arc,
        separable=True,
    )


@fisher.register
def _(p: Binomial) -> Information:
    r"""Coordinates (logit l, n): I = n p(1 - p) ⊕ 0. The number of trials is a constant, carried along."""
    eta = torch.stack(torch.broadcast_tensors(_log_odds(p), p.total_count), -1)

    def root(eta: Tensor, u: Tensor) -> Tensor:
        return eta[..., 1:].sqrt() * _deviation(eta[..., :1]) * u[..., :1]

    def isometry(eta: Tensor, eta0: Tensor | None) -> Tensor:
        return eta[..., 1:].sqrt() * _arc(eta[..., :1], None if eta0 is None else eta0[..., :1])

    return Information(eta, root=root, isometry=isometry)


def _log_odds(p: Trials | Runs) -> Tensor:
    if not given_probs(p):
        return p.logits
    limits = torch.finfo(p.probs.dtype)
    probs = p.probs.clamp(limits.tiny, 1 - limits.eps)
    return torch.log(probs) - torch.log1p(-probs)


def _deviation(logits: Tensor) -> Tensor:
    r"""√(p(1 - p)) = exp(-|l|/2) σ(|l|): no overflow, in its derivatives either."""
    if (values := plain_values(logits)) is not None:
        t = (0.5 * values).cosh_()
        return torch.div(t.new_full((), 0.5), t, out=t)
    size = _sign(logits) * logits
    return torch.exp(-0.5 * size) * torch.sigmoid(size)


def _sign(logits: Tensor) -> Tensor:
    """±1, a constant to every derivative; torch's own sign and abs are flat at 0, where a logit often is."""
    return torch.copysign(torch.ones((), dtype=logits.dtype, device=logits.device), logits.detach())


@embed.register
def _(p: Binomial, origin: Binomial | None = None) -> Dual | None:
    r"""For a fixed number of trials n."""
    known = fixed(p.total_count, None if origin is None else origin.total_count)
    return embed.dispatch(Distribution)(p, origin) if known else None


def _arc(logits: Tensor, origin: Tensor | None) -> Tensor:
    r"""φ of one trial, counted from an origin (p = ½ if there is none).

    2 arcsin √σ(l) - 2 arcsin √σ(l₀) to full relative precision, also where both are saturated.

    Counted from p = ½ it is :math:`\pm(\pi/2 - 2 \arctan t)` with :math:`t = e^{-|l|/2}`; the arctangent is taken as an
    arcsine, which costs less than half. Counted from an origin, half of it has the tangent :math:`\tanh\frac{l -
    l_0}{4} \cdot \frac{c}{2 - c}` with :math:`c = 1 - \tanh\frac l4 \tanh\frac{l_0}4`, and *c* is a sum of the
    complements of the two factors.
    """
    if origin is None and (values := plain_values(logits)) is not None:
        # The same in place, where no derivative is wanted; torch's arctangent of two numbers costs half as much as that
        # of one.
        t = (0.5 * values).exp_()
        return torch.add(t.new_full((), -0.5 * math.pi), torch.atan2(t, t.new_ones(()), out=t), alpha=2, out=t)
    if origin is None:
        sign = _sign(logits)
        t = torch.exp(-0.5 * sign * logits)
        return sign * (0.5 * math.pi - 2 * torch.asin(t * torch.rsqrt(1 + t * t)))
    sign = _sign(origin)
    first, second = 2 * torch.sigmoid(-0.5 * sign * logits), 2 * torch.sigmoid(-0.5 * sign * origin)
    c = first + second * (1 - first)
    return 2 * torch.atan2(torch.tanh(0.25 * (logits - origin)) * c, 2 - c)


@rao_distance.register(Bernoulli)
@rao_distance.register(Binomial, known="total_count")
def _(p: Trials, q: Trials) -> Tensor:
    r"""2 √n |arcsin √p - arcsin √q|, for equal numbers of trials."""
    check_equal("Fisher-Rao distance", "total_count", p, q)
    arc = _arc(_log_odds(p), _log_odds(q)).abs()
    return p.total_count.sqrt() * arc if isinstance(p, Binomial) else arc


@natural_and_mean.register
def _(p: Trials) -> Dual:
    """T = x, for a fixed number of trials."""
    _check_constant(p)
    return p.logits[..., None], p.mean[..., None]


def _check_constant(p: Distribution) -> None:
    if not fixed(torch.as_tensor(getattr(p, "total_count", 0))):
        raise MissingRuleError(
            f"{type(p).__name__} is an exponential family only for a fixed total_count, which here varies with the "
            "code. Keep it constant, or leave alpha at 0."
        )


@positive_kl.register
def _(p: Trials | Runs, q: Trials | Runs) -> Tensor:
    r"""One trial's times the expected number of trials: n, :math:`1/p` to a success, :math:`r/(1-p)` to r failures."""
    check_equal("Kullback-Leibler divergence", "total_count", p, q)
    one = _trial_kl(p.logits, q.logits) + _trial_kl(-p.logits, -q.logits)
    if isinstance(p, Geometric):
        return one / torch.sigmoid(p.logits)
    if isinstance(p, NegativeBinomial):
        return p.total_count * one / torch.sigmoid(-p.logits)
    return p.total_count * one if isinstance(p, Binomial) else one


def _trial_kl(logits: Tensor, others: Tensor) -> Tensor:
    return weighted_excess(torch.sigmoid(logits), torch.sigmoid(others), logsigmoid(others) - logsigmoid(logits))


@log_affinity.register
def _(p: Trials | Runs, q: Trials | Runs, alpha: float) -> Tensor:
    r"""With a, b the mixed log-probabilities of success and failure: :math:`n \log(e^a + e^b)` for trials.

    The others are sums of series: :math:`a - \log(1 - e^b)` until a success, :math:`r (b - \log(1 - e^a))` until r
    failures.
    """
    check_equal(AFFINITY, "total_count", p, q)
    a, b = (alpha * logsigmoid(s * p.logits) + (1 - alpha) * logsigmoid(s * q.logits) for s in (1, -1))
    if isinstance(p, Geometric):
        return a - torch.log(-torch.expm1(b))
    if isinstance(p, NegativeBinomial):
        return p.total_count * (b - torch.log(-torch.expm1(a)))
    return getattr(p, "total_count", 1) * torch.logaddexp(a, b)


@fisher.register
def _(p: ContinuousBernoulli) -> Information:
    r"""Coordinate logit η, the natural parameter: I = 1/η² - 1/(4 sinh²(η/2)) = L'(η/2)/4, L Langevin's function."""
    return Information(p.logits[..., None], root=lambda eta, u: 0.5 * langevin_slope(0.5 * eta).sqrt() * u)


@natural_and_mean.register
@embed.register
def _(p: ContinuousBernoulli, origin: Distribution | None = None) -> Dual:
    r"""The natural parameter η and the mean (1 + L(η/2))/2, up to its constant."""
    return p.logits[..., None], 0.5 * langevin(0.5 * p.logits)[..., None]


# -- unbounded counts --------------------------------------------------------------------------------------------------


@fisher.register
def _(p: Poisson) -> Information:
    r"""Coordinate rate λ: I = 1/λ. A rate of exactly zero that does not move contributes nothing."""
    return Information(
        p.rate[..., None],
        root=lambda eta, u: u / _positive(eta).sqrt(),
        isometry=lambda eta, _: 2 * _positive(eta).sqrt(),
        separable=True,
    )


@rao_distance.register
def _(p: Poisson, q: Poisson) -> Tensor:
    r"""2 |√λ - √λ'|."""
    return 2 * (_positive(p.rate).sqrt() - _positive(q.rate).sqrt()).abs()


def _positive(rate: Tensor) -> Tensor:
    return rate.clamp_min(torch.finfo(rate.dtype).tiny)


@natural_and_mean.register
def _(p: Poisson) -> Dual:
    """T = x."""
    return torch.log(p.rate)[..., None], p.rate[..., None]


@positive_kl.register
def _(p: Poisson, q: Poisson) -> Tensor:
    r""":math:`\lambda_p\, g(\log \lambda_q/\lambda_p)`."""
    return weighted_excess(p.rate, q.rate, q.rate.log() - p.rate.log())


@log_affinity.register
def _(p: Poisson, q: Poisson, alpha: float) -> Tensor:
    r""":math:`\lambda_p^\alpha \lambda_q^{1-\alpha} - \alpha\lambda_p - (1-\alpha)\lambda_q`."""
    return p.rate**alpha * q.rate ** (1 - alpha) - alpha * p.rate - (1 - alpha) * q.rate


def _going_on(p: Runs) -> tuple[Tensor, Tensor]:
    """The number of ends r, and the log-odds of going on: a geometric count is one that ends once."""
    log_odds = _log_odds(p)
    return (p.total_count, log_odds) if isinstance(p, NegativeBinomial) else (torch.ones_like(log_odds), -log_odds)


@fisher.register
def _(p: Geometric) -> Information:
    r"""Coordinate logit l of the probability 1 - p to go on: I = 1 - p."""
    return Information(
        _going_on(p)[1][..., None],
        root=lambda eta, u: torch.exp(0.5 * logsigmoid(eta)) * u,
        isometry=lambda eta, _: artanh_root_sigmoid(eta),
        separable=True,
    )


@fisher.register
def _(p: NegativeBinomial) -> Information:
    r"""Coordinates (r, logit l), r the total count: :math:`r\sigma(l)(dl + dr/r)^2 + J\,dr^2`.

    :math:`dl + dr/r` is the change of the logarithm of the mean :math:`\mu = r e^l`, orthogonal to that of *r*, and *J*
    is `dispersion_information`. Where no total count moves, J is not computed.
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
    r"""φ = 2 √r arsinh √(μ/r) = 2 √r artanh √σ(l), l the log-odds of going on, for a fixed total count r."""
    if not fixed(p.total_count, None if origin is None else origin.total_count):
        return None
    phi = (p.total_count.sqrt() * artanh_root_sigmoid(_log_odds(p)))[..., None]
    return phi, phi


@rao_distance.register(Geometric)
@rao_distance.register(NegativeBinomial, known="total_count")
def _(p: Runs, q: Runs) -> Tensor:
    r"""2 √r |arsinh √(μ/r) - arsinh √(μ'/r)|, for equal total counts, within the family of that count."""
    check_equal("Fisher-Rao distance", "total_count", p, q)
    (r, logits), (_, others) = _going_on(p), _going_on(q)
    return r.sqrt() * (artanh_root_sigmoid(logits) - artanh_root_sigmoid(others)).abs()


@natural_and_mean.register
def _(p: Runs) -> Dual:
    """T = x, for a fixed total count."""
    _check_constant(p)
    r, logits = _going_on(p)
    return logsigmoid(logits)[..., None], (r * torch.exp(logits))[..., None]
