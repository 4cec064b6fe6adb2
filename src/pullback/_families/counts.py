r"""Families of counts: lines; and of categories: points of a sphere.

A family with one parameter is a line, and :math:`\phi = \int \sqrt{I}\, d\eta` is its arc length, known to
statisticians as the variance-stabilizing transform: :math:`2\arcsin\sqrt p` for Bernoulli, :math:`2\sqrt\lambda` for
Poisson. The probabilities of categories form the positive orthant of a sphere of radius two, by :math:`2\sqrt p`
(Fisher 1922; Rao 1945): the Fisher-Rao distance is the arc, and the chord of the embedding falls short of it at third
order. A sample of size *n* multiplies lengths by :math:`\sqrt n`.

Coordinates are logits wherever torch has them. Probabilities saturate: in single precision ``1 - p`` is zero beyond a
logit of 17, where the decoder still moves. Given ``probs=``, the logits are taken from them as far as they tell.
Probabilities of exactly 0 or 1 are finite and do not move.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import Size, Tensor
from torch import distributions as td
from torch.distributions import Bernoulli, Binomial, Distribution, Geometric, NegativeBinomial, Poisson, constraints
from torch.nn.functional import logsigmoid

from pullback._autodiff.torch_internals import given_probs, is_wrapped, plain_values
from pullback._families import rules
from pullback._families.composite import as_product
from pullback._families.information import Information, Maps, MissingRuleError
from pullback._families.rules import EVEN, KEPT, TENFOLD_ODDS, UNIFORM, WIDE, fades, times
from pullback._numerics import special

Trials = Bernoulli | Binomial
Runs = Geometric | NegativeBinomial
Categories = td.Categorical | td.OneHotCategorical | td.Multinomial

fades(Bernoulli, probs=EVEN)
fades(td.ContinuousBernoulli, probs=EVEN)
fades(Binomial, total_count=KEPT, probs=EVEN)
fades(Geometric, probs=times(0.1))
fades(NegativeBinomial, total_count=KEPT, logits=TENFOLD_ODDS)
fades(Poisson, rate=WIDE)
fades(td.Categorical, probs=UNIFORM)
fades(td.OneHotCategorical, probs=UNIFORM)
fades(td.Multinomial, total_count=KEPT, probs=UNIFORM)
rules.FIXED.update({Binomial: "total_count", NegativeBinomial: "total_count"})


@rules.fisher.register
def _(p: Binomial) -> Information:
    r"""Coordinates (logit l, n): I = n p(1 - p) ⊕ 0. The number of trials is a constant, carried along."""
    eta = torch.stack(torch.broadcast_tensors(_log_odds(p), p.total_count), -1)

    def root(eta: Tensor, u: Tensor) -> Tensor:
        return eta[..., 1:].sqrt() * _deviation(eta[..., :1]) * u[..., :1]

    def isometry(eta: Tensor, eta0: Tensor | None) -> Tensor:
        return eta[..., 1:].sqrt() * _arc(eta[..., :1], None if eta0 is None else eta0[..., :1])

    return Information(eta, root=root, isometry=isometry)


def _trials(p: Trials | Runs | Categories) -> Any:
    return getattr(p, "total_count", 1)


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
        return torch.div(torch.full((), 0.5, dtype=t.dtype), t, out=t)  # a number, and no copy of it to an accelerator
    size = _sign(logits) * logits
    return torch.exp(-0.5 * size) * torch.sigmoid(size)


def _sign(logits: Tensor) -> Tensor:
    """±1, a constant to every derivative; torch's own sign and abs are flat at 0, where a logit often is."""
    return torch.copysign(torch.ones((), dtype=logits.dtype, device=logits.device), logits.detach())


def _arc(logits: Tensor, origin: Tensor | None) -> Tensor:
    """2 arcsin √σ(l) - 2 arcsin √σ(l₀), with p = ½ for no origin; full relative precision also at saturation."""
    if origin is None and (values := plain_values(logits)) is not None:
        # The same as arctan sinh(l/2), in place, where no derivative is wanted; on a CPU torch's arctangent of two
        # numbers costs half as much as that of one.
        t = (0.5 * values).sinh_()
        return torch.atan2(t, t.new_ones(()), out=t) if t.device.type == "cpu" else t.atan_()
    if origin is None:
        # ±(π/2 - 2 arctan t), t = exp(-|l|/2); the arctangent as an arcsine, which costs less than half
        sign = _sign(logits)
        t = torch.exp(-0.5 * sign * logits)
        return sign * (0.5 * math.pi - 2 * torch.asin(t * torch.rsqrt(1 + t * t)))
    # Half of it has the tangent tanh((l - l₀)/4) c/(2 - c), c = 1 - tanh(l/4) tanh(l₀/4), a sum of complements.
    sign = _sign(origin)
    first, second = 2 * torch.sigmoid(-0.5 * sign * logits), 2 * torch.sigmoid(-0.5 * sign * origin)
    c = first + second * (1 - first)
    return 2 * torch.atan2(torch.tanh(0.25 * (logits - origin)) * c, 2 - c)


# The logit l: I = p(1 - p), φ = 2 arcsin √p.
rules.line(Bernoulli, chart=_log_odds, root=lambda eta, u: _deviation(eta) * u, arc=_arc)


@rules.rao_distance.register(Binomial, known="total_count")
@rules.rao_distance.register(NegativeBinomial, known="total_count")
def _(p: Binomial | NegativeBinomial, q: Binomial | NegativeBinomial) -> Tensor:
    r"""Within the family of a total count n: 2 √n |arcsin √p - arcsin √q| and 2 √n |arsinh √(μ/n) - arsinh √(μ'/n)|."""
    rules.check_equal("Fisher-Rao distance", "total_count", p, q)
    first, second = _log_odds(p), _log_odds(q)
    if isinstance(p, Binomial):
        return p.total_count.sqrt() * _arc(first, second).abs()
    return p.total_count.sqrt() * (special.artanh_root_sigmoid(first) - special.artanh_root_sigmoid(second)).abs()


@rules.natural_and_mean.register
def _(p: Trials | Runs) -> rules.Dual:
    """T = x, for a fixed total count."""
    if rules.varies(p):
        raise MissingRuleError(
            f"{type(p).__name__} is an exponential family only for a fixed total_count, which here varies with the "
            "code. Keep it constant, or leave alpha at 0."
        )
    if isinstance(p, Trials):
        return p.logits[..., None], p.mean[..., None]
    # a geometric count is one that ends once, and its logit is that of the end
    r, logits = (p.total_count, _log_odds(p)) if isinstance(p, NegativeBinomial) else (1, -_log_odds(p))
    return logsigmoid(logits)[..., None], (r * torch.exp(logits))[..., None]


@rules.positive_kl.register
def _(p: Trials | Runs, q: Trials | Runs) -> Tensor:
    r"""One trial's times the expected number of trials: n, :math:`1/p` to a success, :math:`r/(1-p)` to r failures."""
    rules.check_equal("Kullback-Leibler divergence", "total_count", p, q)
    trial = [(sign * p.logits, sign * q.logits) for sign in (1, -1)]
    terms = [special.weighted_excess(a.sigmoid(), b.sigmoid(), logsigmoid(b) - logsigmoid(a)) for a, b in trial]
    one = terms[0] + terms[1]
    if isinstance(p, Runs):
        one = one / torch.sigmoid(-p.logits if isinstance(p, NegativeBinomial) else p.logits)
    return _trials(p) * one


@rules.log_affinity.register
def _(p: Trials | Runs, q: Trials | Runs, alpha: float) -> Tensor:
    r"""With a, b the mixed log-probabilities of success and failure: :math:`n \log(e^a + e^b)` for trials,
    :math:`a - \log(1 - e^b)` until a success, :math:`r (b - \log(1 - e^a))` until r failures."""
    if type(p) is not type(q):
        return rules.no_affinity(p, q, alpha)
    rules.check_equal(rules.AFFINITY, "total_count", p, q)
    a, b = (alpha * logsigmoid(s * p.logits) + (1 - alpha) * logsigmoid(s * q.logits) for s in (1, -1))
    on, end = (a, b) if isinstance(p, NegativeBinomial) else (b, a)
    return _trials(p) * (end - torch.log(-torch.expm1(on)) if isinstance(p, Runs) else torch.logaddexp(a, b))


@rules.fisher.register
def _(p: td.ContinuousBernoulli) -> Information:
    r"""Coordinate logit η, the natural parameter: I = 1/η² - 1/(4 sinh²(η/2)) = L'(η/2)/4, L Langevin's function."""
    return Information(p.logits[..., None], root=lambda eta, u: 0.5 * special.langevin_slope(0.5 * eta).sqrt() * u)


@rules.natural_and_mean.register
@rules.embed.register
def _(p: td.ContinuousBernoulli, origin: td.ContinuousBernoulli | None = None) -> rules.Dual:
    r"""The natural parameter η and the mean (1 + L(η/2))/2, up to its constant."""
    return p.logits[..., None], 0.5 * special.langevin(0.5 * p.logits)[..., None]


def _root(rate: Tensor) -> Tensor:
    return rate.clamp_min(torch.finfo(rate.dtype).tiny).sqrt()


# The rate λ: I = 1/λ, φ = 2 √λ, T = x. A rate of exactly zero that does not move contributes nothing.
rules.line(Poisson, chart=lambda p: p.rate, root=lambda eta, u: u / _root(eta), arc=lambda eta, _: 2 * _root(eta))
rules.natural_and_mean.register(Poisson, lambda p: (torch.log(p.rate)[..., None], p.rate[..., None]))
rules.positive_kl.register(Poisson, lambda p, q: special.weighted_excess(p.rate, q.rate, q.rate.log() - p.rate.log()))
rules.log_affinity.register(
    Poisson, lambda p, q, alpha: p.rate**alpha * q.rate ** (1 - alpha) - alpha * p.rate - (1 - alpha) * q.rate
)

# The logit l of the probability 1 - p to go on: I = 1 - p, φ = 2 arsinh √μ.
rules.line(
    Geometric,
    chart=lambda p: -_log_odds(p),
    root=lambda eta, u: torch.exp(0.5 * logsigmoid(eta)) * u,
    arc=lambda eta, _: special.artanh_root_sigmoid(eta),
)


@rules.fisher.register
def _(p: NegativeBinomial) -> Information:
    r"""Coordinates (r, logit l), r the total count: :math:`r\sigma(l)(dl + dr/r)^2 + J\,dr^2`.

    :math:`dl + dr/r` is the change of the logarithm of the mean :math:`\mu = r e^l`, orthogonal to that of *r*, and *J*
    is `dispersion_information`. Where no total count moves, J is not computed.
    """
    return Information(torch.stack([p.total_count, _log_odds(p)], -1), root=_negative_binomial_root)


def _negative_binomial_root(eta: Tensor, u: Tensor) -> Tensor:
    (r, logits), (dr, dlogits) = eta.unbind(-1), u.unbind(-1)
    mean = r.sqrt() * torch.exp(0.5 * logsigmoid(logits)) * (dlogits + dr / r)
    # Known to vanish with all its derivatives: not while a transform or autograd is looking.
    if not (is_wrapped(dr) or (dr.requires_grad and torch.is_grad_enabled()) or dr.any()):
        return mean[..., None]
    weight = special.dispersion_information(r, logits, sort=not (is_wrapped(r) or is_wrapped(logits)))
    return torch.stack([mean, weight.sqrt() * dr], -1)


@rules.embed.register
def _(p: NegativeBinomial, origin: NegativeBinomial | None = None) -> rules.Dual | None:
    r"""φ = 2 √r arsinh √(μ/r) = 2 √r artanh √σ(l), l the log-odds of going on, for a fixed total count r."""
    if rules.varies(p, origin):
        return None
    phi = (p.total_count.sqrt() * special.artanh_root_sigmoid(_log_odds(p)))[..., None]
    return phi, phi


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
    return _trials(p) * special.weighted_excess(logits.exp(), others.exp(), others - logits).sum(-1)


@rules.log_affinity.register
def _(p: Categories, q: Categories, alpha: float) -> Tensor:
    r""":math:`n \log \sum_i p_i^\alpha q_i^{1-\alpha}` from logits."""
    rules.check_equal(rules.AFFINITY, "total_count", p, q)
    return _trials(p) * torch.logsumexp(alpha * p.logits + (1 - alpha) * q.logits, dim=-1)


class ZeroInflated(Distribution):
    r"""Counts of a base distribution, of which some are replaced by zeros: the likelihood of single-cell models.

    With probability π (the *gate*) a count is zero for another reason: :math:`p(x) = \pi\, [x = 0] + (1 - \pi)\, b(x)`.

    Args:
        base: a `Poisson`, `NegativeBinomial` or `Geometric` distribution.
        gate_logits: log-odds of the probability that a count is replaced, broadcastable to the base's batch shape.
        validate_args: as for every distribution of torch.

    >>> p = ZeroInflated(Poisson(torch.tensor(2.0)), gate_logits=torch.tensor(0.0))
    >>> p.mean, p.log_prob(torch.tensor(0.0)).exp()  # half of the counts, and ½ + ½ e⁻²
    (tensor(1.), tensor(0.5677))
    """

    arg_constraints: ClassVar[dict[str, Any]] = {"gate_logits": constraints.real}
    support = constraints.nonnegative_integer  # pyright: ignore[reportAssignmentType]

    def __init__(self, base: Distribution, gate_logits: Tensor, validate_args: bool | None = None) -> None:
        shape = torch.broadcast_shapes(base.batch_shape, gate_logits.shape)
        self.base = base.expand(shape)
        self.gate_logits = gate_logits.expand(shape)
        super().__init__(shape, validate_args=validate_args)

    @property
    def mean(self) -> Tensor:
        return torch.sigmoid(-self.gate_logits) * self.base.mean

    @property
    def variance(self) -> Tensor:
        r""":math:`(1 - \pi)(v + \pi m^2)` with the mean m and the variance v of the base."""
        gate = torch.sigmoid(self.gate_logits)
        return torch.sigmoid(-self.gate_logits) * (self.base.variance + gate * self.base.mean**2)

    def sample(self, sample_shape: Any = ()) -> Tensor:
        x = self.base.sample(sample_shape)
        return torch.where(torch.rand_like(x) < torch.sigmoid(self.gate_logits), 0, x)

    def log_prob(self, value: Tensor) -> Tensor:
        kept = logsigmoid(-self.gate_logits) + self.base.log_prob(value)
        return torch.where(value == 0, torch.logaddexp(logsigmoid(self.gate_logits), kept), kept)

    def expand(self, batch_shape: Any, _instance: Any = None) -> ZeroInflated:
        base, gate = self.base.expand(Size(batch_shape)), self.gate_logits.expand(batch_shape)
        return ZeroInflated(base, gate, validate_args=False)


def _log_zero(base: Distribution, eta: Tensor) -> tuple[Tensor, Tensor]:
    """The log-probability of a zero as a function of the coordinates of the base's information, and its gradient."""
    if isinstance(base, Poisson):
        return -eta[..., 0], -torch.ones_like(eta)
    if isinstance(base, Geometric):
        return logsigmoid(-eta[..., 0]), -torch.sigmoid(eta)
    if isinstance(base, NegativeBinomial):
        r, logits = eta.unbind(-1)
        stop = logsigmoid(-logits)
        return r * stop, torch.stack([stop, -r * torch.sigmoid(logits)], -1)
    name = type(base).__name__
    raise MissingRuleError(
        f"ZeroInflated knows the probability of a zero for Poisson, NegativeBinomial and Geometric, not for {name}. "
        "Use pullback.ScoreMetric(decoder), which needs only sample and log_prob."
    )


@rules.fisher.register
def _(p: ZeroInflated) -> Information:
    r"""Coordinates: the logit of the gate, then those of the base. The information is that of a Bernoulli variable with
    the probability :math:`f = \pi + (1 - \pi)\, b(0)` of a zero, plus that of the base b without its zeros,

    .. math:: I = f (1 - f)\, \nabla\ell\, \nabla\ell^\top + (1 - \pi)\Big(I_b - \frac{b(0)}{1 - b(0)}\, s_0
       s_0^\top\Big), \qquad \ell = \operatorname{logit} f, \quad s_0 = \nabla \log b(0).
    """
    base, info = p.base, rules.fisher(p.base)
    of_base = as_product(info)

    def product(eta: Tensor, u: Tensor) -> Tensor:
        gate, rest, du = eta[..., 0], eta[..., 1:], u[..., 1:]
        log_b0, s0 = _log_zero(base, rest)
        # logit f = log(π + (1 - π) b₀) - log((1 - π)(1 - b₀)) = log(odds + b₀) - log(1 - b₀), odds = π / (1 - π).
        log_rest = torch.log(-torch.expm1(log_b0))
        logit = torch.logaddexp(gate, log_b0) - log_rest
        # The gradient of logit f: by the gate, and by log b₀ with the derivative 1 - by_gate + b₀ / (1 - b₀).
        by_gate, odds = torch.sigmoid(gate - log_b0), torch.exp(log_b0 - log_rest)[..., None]
        slope = torch.sigmoid(log_b0 - gate)[..., None] + odds
        gradient = torch.cat([by_gate[..., None], slope * s0], -1)
        variance = (torch.sigmoid(logit) * torch.sigmoid(-logit))[..., None]
        size = torch.sigmoid(-gate)[..., None] * (of_base(rest, du) - odds * s0 * (s0 * du).sum(-1, keepdim=True))
        return variance * gradient * (gradient * u).sum(-1, keepdim=True) + torch.nn.functional.pad(size, (1, 0))

    return Information(torch.cat([p.gate_logits[..., None], info.eta], -1), product=product)


# The base becomes uncertain, and the gate a fair coin.
rules.most_uncertain.register(
    ZeroInflated,
    lambda p: ZeroInflated(rules.most_uncertain(p.base), torch.zeros_like(p.gate_logits), validate_args=False),
)


@rules.blend.register
def _(p: ZeroInflated, q: ZeroInflated, s: Tensor) -> Distribution:
    gate = torch.lerp(torch.sigmoid(p.gate_logits), torch.sigmoid(q.gate_logits), s)
    return ZeroInflated(rules.blend(p.base, q.base, s), torch.logit(gate), validate_args=False)
