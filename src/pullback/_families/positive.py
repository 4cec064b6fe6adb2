r"""Families on the positive numbers and on the simplex: Exponential, Gamma and its inverse, Beta, Dirichlet.

Their information is written with the trigamma function ψ₁. For large parameters it comes down to ψ₁(x) - 1/x ≈ 1/(2x²), a
small difference of large numbers, and torch's trigamma is itself exact to nine digits only. So everything here is built on
two functions without cancellation, which end in an asymptotic series (Abramowitz and Stegun, 6.3.18 and 6.4.12):

- `trigamma_excess`: e(x) = x² (ψ₁(x) - 1/x), between 1 (at 0) and ½ (at infinity);
- `digamma_excess`: f(x) = ψ(x) - log x, with f'(x) = e(x)/x².

The embeddings are the natural and the mean parameters (the chord is the Jeffreys divergence), up to a linear change of both
that leaves their product alone and makes every entry small near the origin.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributions import Beta, Dirichlet, Exponential, Gamma, InverseGamma

from pullback._families.embedding import Dual, embed
from pullback._families.fisher import fisher
from pullback._families.information import Information
from pullback._families.location_scale import half_line, log_ratio
from pullback._numerics.special import digamma_excess, trigamma_excess


@half_line(Exponential, c=1)
def _(p: Exponential) -> Tensor:
    r"""Coordinate λ, the rate: I = 1 / λ²."""
    return p.rate


@fisher.register(Gamma)
@fisher.register(InverseGamma)
def _(p: Gamma | InverseGamma) -> Information:
    r"""Coordinates (α, β), shape and rate: I = [[ψ₁(α), -1/β], [-1/β, α/β²]].

    The inverse of a Gamma variable has the same information. Chi2 is the curve β = ½ in it. (The paper's appendix prints
    the matrix for the order (β, α).) The root splits shape from mean: I = α (d log(α/β))² + e(α) (d log α)².
    """
    return Information(torch.stack([p.concentration, p.rate], -1), root=_gamma_root)


def _gamma_root(eta: Tensor, u: Tensor) -> Tensor:
    shape, _ = eta.unbind(-1)
    dlog_shape, dlog_rate = (u / eta).unbind(-1)
    mean = shape.sqrt() * (dlog_shape - dlog_rate)
    return torch.stack([mean, trigamma_excess(shape).sqrt() * dlog_shape], -1)


@embed.register(Gamma)
@embed.register(InverseGamma)
def _(p: Gamma | InverseGamma, origin: Gamma | InverseGamma | None = None) -> Dual:
    r"""φ = (α, α(1 - 1/m)), ψ = (f(α) + log m - (m - 1), m - 1), m = α/β relative to the origin's.

    A linear image of the natural parameters (α, -β) and the inverse one of the mean parameters (ψ(α) - log β, α/β).
    """
    shape, rate = p.concentration, p.rate
    shape0, rate0 = (torch.ones_like(shape),) * 2 if origin is None else (origin.concentration, origin.rate)
    log_mean = log_ratio(shape, shape0) - log_ratio(rate, rate0)
    mean = torch.expm1(log_mean)
    phi = [shape, -shape * torch.expm1(-log_mean)]
    psi = [digamma_excess(shape) + (log_mean - mean), mean]
    return torch.stack(torch.broadcast_tensors(*phi), -1), torch.stack(torch.broadcast_tensors(*psi), -1)


@fisher.register
def _(p: Dirichlet) -> Information:
    r"""Coordinates α: I = diag(ψ₁(α_i)) - ψ₁(α₀) 11ᵀ, α₀ = Σ α_i."""
    return Information(p.concentration, root=_dirichlet_root)


@fisher.register
def _(p: Beta) -> Information:
    r"""Coordinates (α, β), torch's ``concentration1`` and ``concentration0``: a Dirichlet of two categories."""
    return Information(torch.stack([p.concentration1, p.concentration0], -1), root=_dirichlet_root)


def _dirichlet_root(alpha: Tensor, u: Tensor) -> Tensor:
    r"""A diagonal minus a rank-one matrix, D - ψ₁(α₀) 11ᵀ, takes the factor ϱ = 1 - ψ₁(α₀) Σ 1/ψ₁(α_i) in the direction D⁻¹1.

    ϱ ≈ (K - 1)/(2α₀) for large α. Written with e it is a sum of positive terms, because e(x)/x falls.
    """
    excess = trigamma_excess(alpha)
    total = alpha.sum(-1, keepdim=True)
    share = alpha / total
    gain = share * ((excess - share * trigamma_excess(total)) / (alpha + excess)).clamp_min(0)
    shrunk = gain.sum(-1, keepdim=True).clamp_min(torch.finfo(alpha.dtype).tiny).sqrt()
    scale = (alpha + excess).sqrt()  # α √ψ₁(α)
    direction = torch.nn.functional.normalize(alpha / scale, dim=-1)
    y = scale * (u / alpha)
    along = (direction * y).sum(-1, keepdim=True)
    return torch.cat([y - direction * along, shrunk * along], -1)


@embed.register
def _(p: Dirichlet, origin: Dirichlet | None = None) -> Dual:
    """The natural parameters α and the mean parameters ψ(α_i) - ψ(α₀), rearranged by `_dirichlet_dual`."""
    alpha = p.concentration
    return _dirichlet_dual(alpha, torch.ones_like(alpha) if origin is None else origin.concentration)


@embed.register
def _(p: Beta, origin: Beta | None = None) -> Dual:
    """As for a Dirichlet of two categories."""
    alpha = torch.stack([p.concentration1, p.concentration0], -1)
    if origin is None:
        return _dirichlet_dual(alpha, torch.ones_like(alpha))
    return _dirichlet_dual(alpha, torch.stack([origin.concentration1, origin.concentration0], -1))


def _dirichlet_dual(alpha: Tensor, origin: Tensor) -> Dual:
    r"""φ = (α_i, α₀(π_i - π⁰_i), α₀), ψ = (f(α_i), log π_i/π⁰_i, -f(α₀) - KL(π⁰, π)), π = α/α₀.

    ψ(α_i) - ψ(α₀) = f(α_i) - f(α₀) + log π_i; then the part of Δα_i that leaves π⁰ fixed is collected in α₀, where it meets
    a term of second order. Without that, steps along α would drown in the rounding of log π for large α.
    """
    total, total0 = alpha.sum(-1, keepdim=True), origin.sum(-1, keepdim=True)
    log_share = log_ratio(alpha, origin) - log_ratio(total, total0)
    share0, change = origin / total0, torch.expm1(log_share)
    divergence = (share0 * (change - log_share)).sum(-1, keepdim=True)
    phi = [alpha, total * share0 * change, total]
    psi = [digamma_excess(alpha), log_share, -digamma_excess(total) - divergence]
    return torch.cat(_broadcast(phi), -1), torch.cat(_broadcast(psi), -1)


def _broadcast(parts: list[Tensor]) -> list[Tensor]:
    """Expands all but the last dimension."""
    batch = torch.broadcast_shapes(*(part.shape[:-1] for part in parts))
    return [part.expand(*batch, part.shape[-1]) for part in parts]
