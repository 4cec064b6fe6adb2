r"""Families of directions: von Mises on the circle and von Mises-Fisher on spheres.

Both have the density :math:`\propto \exp(\kappa \mu^\top x)` on :math:`S^{p-1}`, with :math:`\mu = (\cos, \sin)` of the
angle for *p* = 2. In the mean direction and the concentration the information is

.. math:: \kappa A_p(\kappa)\, |d\mu|^2 + A_p'(\kappa)\, d\kappa^2, \qquad
   A_p = I_{p/2} / I_{p/2-1}, \quad A_p' = 1 - A_p^2 - \tfrac{p-1}\kappa A_p,

a sphere whose radius grows from 0 with the concentration (Mardia and Jupp, *Directional Statistics*, section 10.3.1).
The natural parameter is :math:`\kappa\mu` and the mean :math:`A_p(\kappa)\mu`, so chords are Jeffreys divergences. (The
paper's appendix prints the score as K + μᵀx; it is -K + μᵀx, K = A₃.)
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributions import VonMises, register_kl

from pullback._families import rules
from pullback._families.fading import DIRECTION, FAINT, SAME, fades
from pullback._families.information import Information
from pullback._families.von_mises_fisher import VonMisesFisher
from pullback._numerics.special import resultant

Directions = VonMises | VonMisesFisher

fades(VonMises, loc=SAME, concentration=FAINT)
fades(VonMisesFisher, loc=DIRECTION, concentration=FAINT)


def _direction(p: Directions) -> Tensor:
    """The mean direction, as a unit vector."""
    return p.loc if isinstance(p, VonMisesFisher) else torch.stack([torch.cos(p.loc), torch.sin(p.loc)], -1)


def _offset(p: Directions, origin: Directions) -> Tensor:
    """The difference of two mean directions, of angles in the frame of the second: exact where they nearly agree."""
    if isinstance(p, VonMisesFisher):
        return p.loc - origin.loc
    angle = p.loc - origin.loc
    return torch.stack([-2 * torch.sin(angle / 2) ** 2, torch.sin(angle)], -1)


@rules.fisher.register
def _(p: VonMises) -> Information:
    r"""Coordinates (angle, κ): I = diag(κ A₂, A₂')."""
    eta = torch.stack([p.loc, p.concentration], -1)
    return Information(eta, root=lambda eta, u: u * torch.stack(_scales(2, eta[..., 1]), -1))


@rules.fisher.register
def _(p: VonMisesFisher) -> Information:
    r"""Coordinates (μ, κ) in :math:`\mathbb R^{p+1}`: I = κ A_p (1 - μμᵀ) ⊕ A_p'. μ along itself carries none."""

    def root(eta: Tensor, u: Tensor) -> Tensor:
        loc, dloc = eta[..., :-1], u[..., :-1]
        across, along = _scales(loc.shape[-1], eta[..., -1])
        tangent = dloc - (loc * dloc).sum(-1, keepdim=True) * loc
        return torch.cat([across[..., None] * tangent, along[..., None] * u[..., -1:]], -1)

    return Information(torch.cat([p.loc, p.concentration[..., None]], -1), root=root)


def _scales(p: int, concentration: Tensor) -> tuple[Tensor, Tensor]:
    r"""√(κ A_p) and √A_p', smooth at κ = 0."""
    r = resultant(p, concentration)
    return concentration * r.spread.sqrt(), r.variance.sqrt()


@rules.natural_and_mean.register
@rules.embed.register
def _(p: Directions, origin: Directions | None = None) -> rules.Dual:
    r"""The natural and the mean parameters, κμ and A_p(κ)μ.

    With an origin, :math:`(\kappa, \kappa a, \kappa d)` and :math:`(-a - B(1 - a), B, A_p d)`: the same chords from the
    offset :math:`d = \mu - \mu_0`, :math:`a = |d|^2/2` and the deficit :math:`B = 1 - A_p`, where nothing cancels.
    """
    offset = _direction(p) if origin is None else _offset(p, origin)
    r = resultant(offset.shape[-1], p.concentration)
    kappa, length, deficit = p.concentration[..., None], r.length[..., None], r.deficit[..., None]
    if origin is None:
        return kappa * offset, length * offset
    a = 0.5 * (offset**2).sum(-1, keepdim=True)
    phi = torch.cat([kappa, kappa * a, kappa * offset], -1)
    return phi, torch.cat([-a - deficit * (1 - a), deficit, length * offset], -1)


@rules.rao_distance.register(VonMises, known="concentration")
@rules.rao_distance.register(VonMisesFisher, known="concentration")
def _(p: Directions, q: Directions) -> Tensor:
    r"""√(κ A_p(κ)) times the angle: the distance within the family of a known concentration.

    The family of all concentrations is a different space: there a shorter path first lowers κ, turns where turning is
    cheap and raises κ again, and its length has no closed form.
    """
    rules.check_equal("Fisher-Rao distance", "concentration", p, q)
    if isinstance(p, VonMisesFisher):
        sine, cosine = (torch.linalg.vector_norm(v, dim=-1) for v in (p.loc - q.loc, p.loc + q.loc))
    else:
        half = 0.5 * (p.loc - q.loc)
        sine, cosine = torch.sin(half).abs(), torch.cos(half).abs()
    return _scales(_dimension(p, q), p.concentration)[0] * 2 * torch.atan2(sine, cosine)


@register_kl(VonMisesFisher, VonMisesFisher)
@rules.positive_kl.register
def _(p: Directions, q: Directions) -> Tensor:
    r"""A Bregman divergence of the log-partition in :math:`\kappa`, and :math:`\kappa' A_p(\kappa)(1-\mu^\top\mu')`."""
    dimension = _dimension(p, q)
    r, other = resultant(dimension, p.concentration), resultant(dimension, q.concentration)
    radial = other.log_partition - r.log_partition + (q.concentration - p.concentration) * r.deficit
    return radial + 0.5 * q.concentration * r.length * (_offset(p, q) ** 2).sum(-1)


@rules.log_affinity.register
def _(p: Directions, q: Directions, alpha: float) -> Tensor:
    r"""The gap of the log-partition :math:`\log \int e^{\kappa \mu^\top x}` at natural parameters :math:`\kappa\mu`."""
    dimension = _dimension(p, q)
    first, second = alpha * p.concentration, (1 - alpha) * q.concentration
    between = first[..., None] * _direction(p) + second[..., None] * _direction(q)
    length = torch.linalg.vector_norm(between, dim=-1)
    gap = resultant(dimension, length).log_partition - alpha * resultant(dimension, p.concentration).log_partition
    return gap - (1 - alpha) * resultant(dimension, q.concentration).log_partition + (length - first - second)


def _dimension(p: Directions, q: Directions) -> int:
    dimensions = [_direction(r).shape[-1] for r in (p, q)]
    if dimensions[0] != dimensions[1]:
        raise ValueError(
            "The divergence needs two distributions on the same sphere, not in "
            f"{dimensions[0]} and {dimensions[1]} dimensions."
        )
    return dimensions[0]
