"""The Wasserstein metric of Gaussian decoders."""

from __future__ import annotations

from dataclasses import dataclass
from functools import singledispatch

import torch
from torch import Tensor
from torch.distributions import Distribution, Independent, LowRankMultivariateNormal, MultivariateNormal, Normal

from pullback._decoders.contract import Decoder, observe
from pullback._decoders.pullback import pulled_back, total
from pullback._families.composite import joined, merged
from pullback._families.divergences import wasserstein2
from pullback._families.information import Information
from pullback._families.product import Product
from pullback._metrics.base import Metric, per_code
from pullback._metrics.euclidean import flat
from pullback._numerics.matrix_roots import lyapunov
from pullback._typing import Codes, Float


@dataclass(frozen=True)
class WassersteinMetric(Metric):
    r"""The metric of the 2-Wasserstein distance between Gaussians, pulled back to the latent space.

    For independent features it is Euclidean in (μ, σ). For a full covariance it is Bures' metric,

    .. math:: ds^2 = |d\mu|^2 + \tfrac12 \mathrm{tr}(d\Sigma\, L), \qquad \Sigma L + L \Sigma = d\Sigma.

    Takatsu, "Wasserstein geometry of Gaussian measures" (2011). `ds2` is the squared Wasserstein distance itself.

    **Arguments:**

    - `decoder`: maps codes ``(*batch, d)`` to Normal, MultivariateNormal or LowRankMultivariateNormal distributions, or to
      `Independent` or `pullback.Product` ones made of these.
    """

    decoder: Decoder

    @per_code
    def tensor(self, z: Codes) -> Float[Tensor, "*batch d d"]:
        return pulled_back(_bures, self.decoder, z)

    @per_code
    def ds2(self, a: Codes, b: Codes) -> Float[Tensor, "*batch"]:
        return total(wasserstein2(observe(self.decoder, a), observe(self.decoder, b)), 1)

    @per_code
    def embed(self, z: Codes, origin: Float[Tensor, "*origin d"] | None = None) -> tuple[Tensor, Tensor] | None:
        info = _bures(observe(self.decoder, z))
        if info.root is None:
            return None
        phi = info.eta.flatten(1)
        return phi, phi


@singledispatch
def _bures(p: Distribution) -> Information:
    """Coordinates of a Gaussian and Wasserstein's metric in them; with a root only where it is flat."""
    raise NotImplementedError(
        f"WassersteinMetric takes Gaussian decoders, not {type(p).__name__}. Use pullback.FisherRaoMetric(decoder), or "
        "pullback.EuclideanMetric(decoder) for means and standard deviations."
    )


@_bures.register
def _(p: Normal) -> Information:
    return flat(torch.stack([p.loc, p.scale], dim=-1))


@_bures.register(MultivariateNormal)
@_bures.register(LowRankMultivariateNormal)
def _(p: MultivariateNormal) -> Information:
    (n,) = p.event_shape

    def product(eta: Tensor, u: Tensor) -> Tensor:
        covariance, step = (x[..., n:].unflatten(-1, (n, n)) for x in (eta, u))
        return torch.cat([u[..., :n], 0.5 * lyapunov(covariance, step).flatten(-2)], dim=-1)

    return Information(torch.cat([p.loc, p.covariance_matrix.flatten(-2)], dim=-1), product=product)


@_bures.register
def _(p: Independent) -> Information:
    return merged(_bures(p.base_dist), p.base_dist.batch_shape[len(p.batch_shape) :])


@_bures.register
def _(p: Product) -> Information:
    return joined([merged(_bures(part), p.features(part)) for part in p.components])
