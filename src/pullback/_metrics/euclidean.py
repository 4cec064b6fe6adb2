"""The Euclidean metric of means and standard deviations."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributions import Bernoulli, Distribution, Independent
from torch.nn.functional import logsigmoid

from pullback._decoders.contract import Decoder, observe
from pullback._decoders.pullback import pulled_back
from pullback._families.composite import Product
from pullback._families.gaussian import flat
from pullback._metrics.base import Metric, per_code
from pullback._typing import Codes, Float


@dataclass(frozen=True)
class EuclideanMetric(Metric):
    r"""The expected Euclidean metric :math:`M(z) = J_\mu^\top J_\mu + J_\sigma^\top J_\sigma` of a decoder's samples.

    μ and σ are the mean and the standard deviation of every feature: for Gaussians the mean over noise ε of the metric
    that the random map :math:`z \mapsto \mu(z) + \sigma(z) \odot \epsilon` pulls back (Tosi et al. 2014; Arvanitidis et
    al. 2018). It is a distance of pixel values, not of distributions: what the Fisher-Rao metric is compared with. Flat
    in (μ, σ), so `ds2` is the squared Euclidean distance of these.

    Args:
        decoder: maps codes ``(N, d)`` to a distribution that has a mean and a standard deviation.

    >>> import torch, pullback as pb
    >>> from torch.distributions import Normal
    >>> pb.EuclideanMetric(lambda z: Normal(torch.cat([z, z**2], -1), 0.1)).tensor(torch.ones(1))  # 1 + (2 z)²
    tensor([[5.]])
    """

    decoder: Decoder

    @per_code
    def tensor(self, z: Codes) -> Float[Tensor, "*batch d d"]:
        return pulled_back(lambda p: flat(moments(p)), self.decoder, z)

    @per_code
    def ds2(self, a: Codes, b: Codes) -> Float[Tensor, "*batch"]:
        return (moments(observe(self.decoder, b)) - moments(observe(self.decoder, a))).square().sum(-1)

    @per_code
    def embed(self, z: Codes, origin: Float[Tensor, "*origin d"] | None = None) -> tuple[Tensor, Tensor] | None:
        phi = moments(observe(self.decoder, z))
        return phi, phi


def moments(p: Distribution) -> Tensor:
    """Means and standard deviations of all features side by side, ``(N, 2 F)``."""
    if isinstance(p, Independent):
        return moments(p.base_dist)
    if isinstance(p, Product):
        return torch.cat([moments(part) for part in p.components], dim=-1)
    # From the logit, whose derivative stays finite at saturation, the standard deviation is √(p (1 - p)).
    saturates = isinstance(p, Bernoulli)
    stddev = (0.5 * (logsigmoid(p.logits) + logsigmoid(-p.logits))).exp() if saturates else p.stddev
    mean = p.mean
    if mean.numel() and bool(torch.isnan(mean).all()):
        raise NotImplementedError(
            f"{type(p).__name__} has no mean, so there is no Euclidean metric. For categories use OneHotCategorical; "
            "otherwise use pullback.FisherRaoMetric(decoder)."
        )
    return torch.cat([value.unsqueeze(-1).flatten(1) for value in (mean, stddev)], dim=-1)
