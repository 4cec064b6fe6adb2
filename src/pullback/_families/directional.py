r"""Families of directions: von Mises on the circle and von Mises-Fisher on spheres.

Both have the density :math:`\propto \exp(\kappa \mu^\top x)` on :math:`S^{p-1}`, with :math:`\mu = (\cos, \sin)` of the angle for *p* = 2. In
the mean direction and the concentration the information is

.. math:: \kappa A_p(\kappa)\, |d\mu|^2 + A_p'(\kappa)\, d\kappa^2, \qquad A_p = I_{p/2} / I_{p/2-1}, \quad A_p' = 1 - A_p^2 - \tfrac{p-1}\kappa A_p,

a sphere whose radius grows from 0 with the concentration (Mardia and Jupp, *Directional Statistics*, section 10.3.1). The natural
parameter is :math:`\kappa\mu` and the mean :math:`A_p(\kappa)\mu`, so chords are Jeffreys divergences. (The paper's appendix prints the
score as K + μᵀx; it is -K + μᵀx, K = A₃.)
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributions import VonMises

from pullback._families.embedding import Dual, check_equal, embed
from pullback._families.fisher import fisher
from pullback._families.information import Information
from pullback._families.rao import rao_distance
from pullback._families.von_mises_fisher import VonMisesFisher
from pullback._numerics.special import resultant


@fisher.register
def _(p: VonMises) -> Information:
    r"""Coordinates (angle, κ): I = diag(κ A₂, A₂')."""
    return Information(torch.stack([p.loc, p.concentration], -1), root=_circle_root)


def _circle_root(eta: Tensor, u: Tensor) -> Tensor:
    return u * torch.stack(_scales(2, eta[..., 1]), -1)


@fisher.register
def _(p: VonMisesFisher) -> Information:
    r"""Coordinates (μ, κ) in :math:`\mathbb R^{p+1}`: I = κ A_p (1 - μμᵀ) ⊕ A_p'. Changes of μ along itself carry no information."""
    return Information(torch.cat([p.loc, p.concentration[..., None]], -1), root=_sphere_root)


def _sphere_root(eta: Tensor, u: Tensor) -> Tensor:
    loc, dloc = eta[..., :-1], u[..., :-1]
    across, along = _scales(loc.shape[-1], eta[..., -1])
    tangent = dloc - (loc * dloc).sum(-1, keepdim=True) * loc
    return torch.cat([across[..., None] * tangent, along[..., None] * u[..., -1:]], -1)


def _scales(p: int, concentration: Tensor) -> tuple[Tensor, Tensor]:
    r"""√(κ A_p) and √A_p', smooth at κ = 0."""
    r = resultant(p, concentration)
    return concentration * r.spread.sqrt(), r.variance.sqrt()


@embed.register
def _(p: VonMises, origin: VonMises | None = None) -> Dual:
    """The pair of von Mises-Fisher on the circle; with an origin, of the angle from it."""
    if origin is None:
        return _dual(torch.stack([torch.cos(p.loc), torch.sin(p.loc)], -1), p.concentration)
    angle = p.loc - origin.loc
    return _dual_at(torch.stack([-2 * torch.sin(angle / 2) ** 2, torch.sin(angle)], -1), p.concentration)


@embed.register
def _(p: VonMisesFisher, origin: VonMisesFisher | None = None) -> Dual:
    r"""The natural and the mean parameters, κμ and A_p(κ)μ; with an origin, the pair of `_dual_at`."""
    return _dual(p.loc, p.concentration) if origin is None else _dual_at(p.loc - origin.loc, p.concentration)


def _dual(loc: Tensor, concentration: Tensor) -> Dual:
    length = resultant(loc.shape[-1], concentration).length
    return concentration[..., None] * loc, length[..., None] * loc


def _dual_at(offset: Tensor, concentration: Tensor) -> Dual:
    r"""The same chords from the offset :math:`d = \mu - \mu_0` and the deficit :math:`B = 1 - A_p`, which small steps do not cancel.

    With :math:`a = |d|^2/2 = 1 - \mu^\top\mu_0` the pair is :math:`(\kappa, \kappa a, \kappa d)` and :math:`(-a - B(1 - a), B, A_p d)`.
    """
    r = resultant(offset.shape[-1], concentration)
    kappa, length, deficit = concentration[..., None], r.length[..., None], r.deficit[..., None]
    a = 0.5 * (offset**2).sum(-1, keepdim=True)
    phi = torch.cat([kappa, kappa * a, kappa * offset], -1)
    return phi, torch.cat([-a - deficit * (1 - a), deficit, length * offset], -1)


@rao_distance.register(VonMises, known="concentration")
def _(p: VonMises, q: VonMises) -> Tensor:
    r"""√(κ A₂(κ)) times the angle: see the rule for `VonMisesFisher`."""
    half = 0.5 * (p.loc - q.loc)
    angle = 2 * torch.atan2(torch.sin(half).abs(), torch.cos(half).abs())
    return _radius(2, p, q) * angle


@rao_distance.register(VonMisesFisher, known="concentration")
def _(p: VonMisesFisher, q: VonMisesFisher) -> Tensor:
    r"""√(κ A_p(κ)) times the angle, for equal concentrations: the distance within the family of that known concentration.

    The family of all concentrations is a different space: there a shorter path first lowers κ, turns where turning is cheap and
    raises κ again, and its length has no closed form.
    """
    angle = 2 * torch.atan2(
        torch.linalg.vector_norm(p.loc - q.loc, dim=-1), torch.linalg.vector_norm(p.loc + q.loc, dim=-1)
    )
    return _radius(p.event_shape[0], p, q) * angle


def _radius(dimension: int, p: VonMises | VonMisesFisher, q: VonMises | VonMisesFisher) -> Tensor:
    check_equal("Fisher-Rao distance", "concentration", p, q)
    return _scales(dimension, p.concentration)[0]
