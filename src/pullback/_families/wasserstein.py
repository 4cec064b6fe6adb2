r"""The 2-Wasserstein geometry of Gaussians: how far mass moves from one to the other."""

from __future__ import annotations

from functools import singledispatch

import torch
from torch import Tensor
from torch.distributions import Distribution, LowRankMultivariateNormal, MultivariateNormal, Normal

from pullback._families.composite import additive, blockwise
from pullback._families.information import Information, MissingRuleError
from pullback._numerics.matrix_roots import lyapunov, sqrtm

Full = MultivariateNormal | LowRankMultivariateNormal

_NOT_GAUSSIAN = (
    "The Wasserstein distance has a closed form for Gaussians only, not for {}. Use a Normal or MultivariateNormal "
    "decoder, pullback.FisherRaoMetric(decoder), or pullback.EuclideanMetric(decoder) for means and standard "
    "deviations."
)


@singledispatch
def squared_distance(p: Distribution, q: Distribution) -> Tensor:
    """The squared distance of two Gaussians, of shape ``batch_shape``."""
    raise MissingRuleError(_NOT_GAUSSIAN.format(type(p).__name__))


@singledispatch
def bures(p: Distribution) -> Information:
    """Coordinates of a Gaussian and Wasserstein's metric in them; with a root only where it is flat."""
    raise MissingRuleError(_NOT_GAUSSIAN.format(type(p).__name__))


def flat(eta: Tensor) -> Information:
    """Coordinates in which the metric is the identity."""
    return Information(eta, root=lambda eta, u: u)


@squared_distance.register
def _(p: Normal, q: Normal) -> Tensor:
    return (p.loc - q.loc) ** 2 + (p.scale - q.scale) ** 2


@bures.register
def _(p: Normal) -> Information:
    return flat(torch.stack([p.loc, p.scale], dim=-1))


@squared_distance.register
def _(p: Full, q: Full) -> Tensor:
    r"""With :math:`\Sigma_p = LL^\top`, the trace is :math:`|L^{-\top}((L^\top \Sigma_q L)^{1/2} - L^\top L)|^2`:
    nothing cancels."""
    L = torch.linalg.cholesky(p.covariance_matrix)
    difference = sqrtm(L.mT @ q.covariance_matrix @ L) - L.mT @ L
    moved = torch.linalg.solve_triangular(L.mT, difference, upper=True)
    return ((p.loc - q.loc) ** 2).sum(-1) + (moved**2).sum((-2, -1))


@bures.register
def _(p: Full) -> Information:
    (n,) = p.event_shape

    def product(eta: Tensor, u: Tensor) -> Tensor:
        covariance, step = (x[..., n:].unflatten(-1, (n, n)) for x in (eta, u))
        return torch.cat([u[..., :n], 0.5 * lyapunov(covariance, step).flatten(-2)], dim=-1)

    return Information(torch.cat([p.loc, p.covariance_matrix.flatten(-2)], dim=-1), product=product)


additive(squared_distance, squared_distance)
blockwise(bures)
