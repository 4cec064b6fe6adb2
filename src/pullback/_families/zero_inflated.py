r"""Counts with more zeros than their family explains: the likelihood of single-cell models.

With probability π (the *gate*) a count is zero for another reason; otherwise it is a draw of the base,

.. math:: p(x) = \pi\, [x = 0] + (1 - \pi)\, b(x).

The Fisher information is that of a Bernoulli variable with the probability :math:`f = \pi + (1 - \pi)\, b(0)` of a
zero, plus that of the base without its zeros,

.. math:: I = f (1 - f)\, \nabla\ell\, \nabla\ell^\top + (1 - \pi)\Big(I_b - \frac{b(0)}{1 - b(0)}\, s_0 s_0^\top\Big),
   \qquad \ell = \operatorname{logit} f, \quad s_0 = \nabla \log b(0).
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Size, Tensor
from torch.distributions import Distribution, Geometric, NegativeBinomial, Poisson, constraints
from torch.nn.functional import logsigmoid

from pullback._families.composite import as_product
from pullback._families.information import Information, MissingRuleError
from pullback._families.rules import blend, fisher, most_uncertain


class ZeroInflated(Distribution):
    r"""Counts of a base distribution, of which some are replaced by zeros.

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


@fisher.register
def _(p: ZeroInflated) -> Information:
    """Coordinates: the logit of the gate, then those of the base."""
    base, info = p.base, fisher(p.base)
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
most_uncertain.register(
    ZeroInflated, lambda p: ZeroInflated(most_uncertain(p.base), torch.zeros_like(p.gate_logits), validate_args=False)
)


@blend.register
def _(p: ZeroInflated, q: ZeroInflated, s: Tensor) -> Distribution:
    gate = torch.lerp(torch.sigmoid(p.gate_logits), torch.sigmoid(q.gate_logits), s)
    return ZeroInflated(blend(p.base, q.base, s), torch.logit(gate), validate_args=False)
