"""The Wasserstein metric of Gaussian decoders."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from pullback._decoders.contract import Decoder, observe
from pullback._decoders.pullback import pulled_back, total
from pullback._families.gaussian import bures, wasserstein2
from pullback._metrics.base import Metric, per_code
from pullback._typing import Codes, Float


@dataclass(frozen=True)
class WassersteinMetric(Metric):
    r"""The metric of the 2-Wasserstein distance between Gaussians, pulled back to the latent space.

    For independent features it is Euclidean in (μ, σ). For a full covariance it is Bures' metric,

    .. math:: ds^2 = |d\mu|^2 + \tfrac12 \mathrm{tr}(d\Sigma\, L), \qquad \Sigma L + L \Sigma = d\Sigma.

    Takatsu, "Wasserstein geometry of Gaussian measures" (2011). `ds2` is the squared Wasserstein distance itself.

    Args:
        decoder: maps codes ``(N, d)`` to Normal, MultivariateNormal or LowRankMultivariateNormal distributions, or to
            `Independent` or `pullback.Product` ones made of these.

    >>> import torch, pullback as pb
    >>> metric = pb.WassersteinMetric(lambda z: torch.distributions.Normal(z[..., 0], z[..., 1]))
    >>> metric.tensor(torch.tensor([0.0, 0.5]))  # flat in (μ, σ)
    tensor([[1., 0.],
            [0., 1.]])
    """

    decoder: Decoder

    @per_code
    def tensor(self, z: Codes) -> Float[Tensor, "*batch d d"]:
        return pulled_back(bures, self.decoder, z)

    @per_code
    def ds2(self, a: Codes, b: Codes) -> Float[Tensor, "*batch"]:
        return total(wasserstein2(observe(self.decoder, a), observe(self.decoder, b)), 1)

    @per_code
    def embed(self, z: Codes, origin: Float[Tensor, "*origin d"] | None = None) -> tuple[Tensor, Tensor] | None:
        info = bures(observe(self.decoder, z))
        if info.root is None:
            return None
        phi = info.eta.flatten(1)
        return phi, phi
