"""The Fisher-Rao metric from samples and log-probabilities alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Size, Tensor
from torch.distributions import Distribution, Independent

from pullback._autodiff.derivatives import pushforward
from pullback._decoders.contract import Decoder, DecoderError, check_finite, observe, observed, unvalidated
from pullback._decoders.probe import facts
from pullback._families.composite import Product
from pullback._families.score import fixed_noise, unbiased_weight
from pullback._metrics.base import Metric, per_code
from pullback._numerics.random import RandomState, as_seed
from pullback._options import check_options
from pullback._typing import Codes, Float

_AT_ONCE = 2**22  # numbers sampled at once: what bounds the memory


@dataclass(frozen=True)
class ScoreMetric(Metric):
    r"""The Fisher-Rao metric estimated by the covariance of the score in the latent space, for any likelihood whatever.

    .. math:: M(z) = E_{x \sim p_z}[s s^\top] \approx \frac1S \sum_{x} s s^\top, \qquad s = \nabla_z \log p_z(x).

    Needs nothing but ``sample`` and ``log_prob``; accurate as `pullback.score_information` is. Scores of independent
    features are squared before they are summed (their products have mean zero), which leaves less noise. Every code
    gets the same noise, so M is a function of z alone. Arvanitidis et al. 2022, Proposition 3.3.

    `ds2` is :math:`\frac12 \Delta^\top (M(a) + M(b)) \Delta` with :math:`\Delta = b - a`: it sees only the two ends.

    Args:
        decoder: maps codes ``(N, d)`` to a distribution whose batch shape starts with ``N``.
        num_samples: samples of every code.
        random_state: fixes the noise; with a seed, the caller's random state is untouched.

    >>> import torch, pullback as pb
    >>> metric = pb.ScoreMetric(lambda z: torch.distributions.Normal(z, 0.5), num_samples=100_000)
    >>> metric.tensor(torch.zeros(1)).round(decimals=1)  # 1 / σ²
    tensor([[4.]])
    """

    decoder: Decoder
    num_samples: int = 1000
    random_state: RandomState = 0

    def __post_init__(self) -> None:
        check_options(num_samples=self.num_samples)
        object.__setattr__(self, "random_state", as_seed(self.random_state))

    @per_code
    def tensor(self, z: Codes) -> Float[Tensor, "*batch d d"]:
        if not z.isfinite().all():
            raise DecoderError(
                "Some codes are NaN or infinite, where nothing can be sampled. Drop them: "
                "codes[torch.isfinite(codes).all(-1)]."
            )
        known = facts(observed(self.decoder), z)
        size = _AT_ONCE // (self.num_samples * max(1, known.num_features)) if known else len(z)
        M = torch.cat([self._covariance(some) for some in z.split(max(1, size))])
        check_finite(M, z, what="parameters or derivatives")
        return M

    @per_code
    def ds2(self, a: Codes, b: Codes) -> Float[Tensor, "*batch"]:
        return torch.einsum("...i,...ij,...j->...", b - a, 0.5 * (self.tensor(a) + self.tensor(b)), b - a)

    def _covariance(self, codes: Tensor) -> Tensor:
        x, forward = self._sampled(codes), self.has_forward_mode(codes)
        (values,), (scores,) = pushforward(lambda z: (_log_probs(self._decoded(z), x),), codes, forward=forward)
        flat = (scores * unbiased_weight(values)).permute(2, 0, 1, 3).flatten(-2)
        return flat @ flat.mT / self.num_samples

    def _sampled(self, codes: Tensor) -> Any:
        """Samples ``(num_samples, n, ...)`` of n codes, each drawn alone and from the same noise."""
        parts = []
        for code in codes.split(1):
            with torch.no_grad(), fixed_noise(as_seed(self.random_state), codes.device):
                parts.append(self._decoded(code).sample(Size([self.num_samples])))
        return _joined(parts)

    def _decoded(self, z: Tensor) -> Distribution:
        with unvalidated():  # a sample on the border of the support is a sample
            return observe(self.decoder, z)


def _log_probs(p: Distribution, x: Any) -> Tensor:
    """Log-probabilities ``(num_samples, n, F)`` of the independent features."""
    if isinstance(p, Independent):
        return _log_probs(p.base_dist, x)
    if isinstance(p, Product):
        return torch.cat([_log_probs(*each) for each in zip(p.components, x, strict=True)], dim=-1)
    return p.log_prob(x).unsqueeze(-1).flatten(2)


def _joined(parts: list[Any]) -> Any:
    if isinstance(parts[0], tuple):
        return tuple(_joined(list(some)) for some in zip(*parts, strict=True))
    return torch.cat(parts, dim=1)
