r"""The 2-Wasserstein geometry of Gaussians: how far mass moves from one to the other."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributions import Distribution, Independent, LowRankMultivariateNormal, MultivariateNormal, Normal

from pullback._families.composite import Product, blocks, total
from pullback._families.information import Information, MissingRuleError
from pullback._numerics.matrix_roots import lyapunov, sqrtm

Full = MultivariateNormal | LowRankMultivariateNormal


def wasserstein2(p: Distribution, q: Distribution) -> Tensor:
    r"""The squared 2-Wasserstein distance of Gaussians, with scale 1.

    .. math:: |\Delta\mu|^2 +
       \mathrm{tr}\big(\Sigma_p + \Sigma_q - 2 (\Sigma_p^{1/2} \Sigma_q \Sigma_p^{1/2})^{1/2}\big),

    which for independent features is :math:`|\Delta\mu|^2 + |\Delta\sigma|^2`. Olkin and Pukelsheim, "The distance
    between two random vectors with given dispersion matrices" (1982). Its metric measures how far mass moves, not how
    well p and q can be told apart: it depends on the units of the data.

    >>> wasserstein2(Normal(torch.tensor(0.0), torch.tensor(1.0)), Normal(torch.tensor(3.0), torch.tensor(5.0)))
    tensor(25.)
    """
    if isinstance(p, Independent | Product):
        return total(wasserstein2, p, q)
    other: Any = q
    if isinstance(p, Normal):
        return (p.loc - other.loc) ** 2 + (p.scale - other.scale) ** 2
    p = _full(p)
    # With Σ_p = LLᵀ, the trace is |L⁻ᵀ((Lᵀ Σ_q L)^½ - LᵀL)|²: nothing cancels.
    L = torch.linalg.cholesky(p.covariance_matrix)
    difference = sqrtm(L.mT @ other.covariance_matrix @ L) - L.mT @ L
    moved = torch.linalg.solve_triangular(L.mT, difference, upper=True)
    return ((p.loc - other.loc) ** 2).sum(-1) + (moved**2).sum((-2, -1))


def bures(p: Distribution) -> Information:
    """Coordinates of a Gaussian and Wasserstein's metric in them; with a root only where it is flat."""
    if isinstance(p, Independent | Product):
        return blocks(bures, p)
    if isinstance(p, Normal):
        return flat(torch.stack([p.loc, p.scale], dim=-1))
    p = _full(p)
    (n,) = p.event_shape

    def product(eta: Tensor, u: Tensor) -> Tensor:
        covariance, step = (x[..., n:].unflatten(-1, (n, n)) for x in (eta, u))
        return torch.cat([u[..., :n], 0.5 * lyapunov(covariance, step).flatten(-2)], dim=-1)

    return Information(torch.cat([p.loc, p.covariance_matrix.flatten(-2)], dim=-1), product=product)


def flat(eta: Tensor) -> Information:
    """Coordinates in which the metric is the identity."""
    return Information(eta, root=lambda eta, u: u)


def _full(p: Distribution) -> Full:
    if not isinstance(p, Full):
        raise MissingRuleError(
            f"The Wasserstein distance has a closed form for Gaussians only, not for {type(p).__name__}. Use a Normal "
            "or MultivariateNormal decoder, pullback.FisherRaoMetric(decoder), or pullback.EuclideanMetric(decoder) "
            "for means and standard deviations."
        )
    return p
