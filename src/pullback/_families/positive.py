r"""Families on the positive numbers and on the simplex: Exponential, Gamma and its inverse, Beta, Dirichlet.

Their information is written with the trigamma function ψ₁. For large parameters it comes down to ψ₁(x) - 1/x ≈ 1/(2x²),
a small difference of large numbers, and torch's trigamma is itself exact to nine digits only. So everything here is
built on two functions without cancellation: `trigamma_excess`, e(x) = x² (ψ₁(x) - 1/x), between 1 (at 0) and ½ (at
infinity), and `digamma_excess`, f(x) = ψ(x) - log x, with f'(x) = e(x)/x² (Abramowitz and Stegun, 6.3.18 and 6.4.12).

The embeddings are the natural and the mean parameters (the chord is the Jeffreys divergence), up to a linear change of
both that leaves their product alone and makes every entry small near the origin.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch import distributions as td
from torch.distributions import Beta, Dirichlet, Exponential, ExponentialFamily, Gamma, InverseGamma

from pullback._autodiff.rewrites import Rewritten
from pullback._autodiff.torch_internals import exponential_family, forward_mode
from pullback._families import rules
from pullback._families.information import Information, Maps, planar
from pullback._families.location_scale import half_line
from pullback._families.rules import FLAT, SAME, SLOW, WIDE, fades, times
from pullback._numerics.special import digamma, digamma_excess, excess, log_gamma, log_ratio, trigamma_excess

fades(Exponential, rate=SLOW)
fades(Gamma, concentration=SAME, rate=SLOW)
fades(InverseGamma, concentration=SAME, rate=WIDE)
fades(td.Chi2, df=WIDE)
fades(td.FisherSnedecor, df1=SAME, df2=times(0.1))
fades(Dirichlet, concentration=FLAT)
fades(Beta, concentration1=FLAT, concentration0=FLAT)
fades(td.Kumaraswamy, concentration1=FLAT, concentration0=FLAT)


# λ, the rate: I = 1 / λ², T = x.
half_line(Exponential, c=1, chart=lambda p: p.rate)
rules.natural_and_mean.register(Exponential, lambda p: (-p.rate[..., None], p.rate[..., None].reciprocal()))


@rules.fisher.register
def _(p: Gamma | InverseGamma) -> Information:
    r"""Coordinates (α, β), shape and rate: I = [[ψ₁(α), -1/β], [-1/β, α/β²]].

    The inverse of a Gamma variable has the same information. Chi2 is the curve β = ½ in it. (The paper's appendix
    prints the matrix for the order (β, α).) The root splits shape from mean: I = α (d log(α/β))² + e(α) (d log α)².
    """

    def root(eta: Tensor, u: Tensor) -> Tensor:
        shape, (dlog_shape, dlog_rate) = eta[..., 0], (u / eta).unbind(-1)
        mean = shape.sqrt() * (dlog_shape - dlog_rate)
        return torch.stack([mean, trigamma_excess(shape).sqrt() * dlog_shape], -1)

    return Information(planar([p.concentration, p.rate]), root=root, pair=Maps(_gamma_pair, _gamma_push))


def _relative_mean(eta: Tensor, eta0: Tensor | None) -> tuple[Tensor, Tensor]:
    """log m and m - 1, with m = α/β relative to the origin's."""
    ratio = log_ratio(eta, torch.ones_like(eta) if eta0 is None else eta0)
    log_mean = ratio[..., 0] - ratio[..., 1]
    return log_mean, torch.expm1(log_mean)


def _gamma_pair(eta: Tensor, eta0: Tensor | None) -> rules.Dual:
    r"""φ = (α, α(1 - 1/m)), ψ = (f(α) + log m - (m - 1), m - 1), m = α/β relative to the origin's.

    A linear image of the natural parameters (α, -β) and the inverse one of the mean parameters (ψ(α) - log β, α/β).
    """
    shape, (log_mean, mean) = eta[..., 0], _relative_mean(eta, eta0)
    psi = [digamma_excess(shape) + (log_mean - mean), mean]
    return planar([shape, -shape * torch.expm1(-log_mean)]), planar(psi)


def _gamma_push(eta: Tensor, eta0: Tensor | None, u: Tensor) -> rules.Dual:
    """With α/m = β α₀/β₀ the second of φ is linear, too."""
    shape, (dshape, drate) = eta[..., 0], u.unbind(-1)
    scale0 = 1.0 if eta0 is None else eta0[..., 0] / eta0[..., 1]
    dlog_shape, mean = dshape / shape, _relative_mean(eta, eta0)[1]
    dlog_mean = dlog_shape - drate / eta[..., 1]
    psi = [trigamma_excess(shape) / shape * dlog_shape - mean * dlog_mean, (1 + mean) * dlog_mean]
    return planar([dshape, dshape - scale0 * drate]), planar(psi)


@rules.natural_and_mean.register
def _(p: Gamma) -> rules.Dual:
    """T = (log x, x)."""
    shape, rate = torch.broadcast_tensors(p.concentration, p.rate)
    return torch.stack([shape, -rate], -1), torch.stack([torch.digamma(shape) - torch.log(rate), shape / rate], -1)


def _shape(p: Gamma | Exponential) -> Tensor:
    return torch.ones_like(p.rate) if isinstance(p, Exponential) else p.concentration


@rules.positive_kl.register
def _(p: Gamma | Exponential, q: Gamma | Exponential) -> Tensor:
    r"""With :math:`x = \log\beta_q/\beta_p`:

    .. math:: \log\frac{\Gamma(\alpha_q)}{\Gamma(\alpha_p)} + (\alpha_p - \alpha_q)(\psi(\alpha_p) + x) + \alpha_p g(x).
    """
    shape, other, x = _shape(p), _shape(q), (q.rate / p.rate).log()
    return log_gamma(other) - log_gamma(shape) + (shape - other) * (digamma(shape) + x) + shape * excess(x)


@rules.log_affinity.register
def _(p: Gamma | Exponential, q: Gamma | Exponential, alpha: float) -> Tensor:
    r"""The gap of :math:`\log\Gamma(a) - a \log b`."""
    theta, other = (torch.stack([_shape(r), r.rate], dim=-1) for r in (p, q))
    return _gap(theta, other, alpha, lambda t: log_gamma(t[..., 0]) - t[..., 0] * t[..., 1].log())


def _gap(theta: Tensor, other: Tensor, alpha: float, log_normalizer: Callable[[Tensor], Tensor]) -> Tensor:
    """The gap of a log-normalizer on positive parameters; infinite where the point between is not positive (α > 1)."""
    between = alpha * theta + (1 - alpha) * other
    inside = (between > 0).all(-1)
    safe = torch.where(inside[..., None], between, 1)
    gap = log_normalizer(safe) - alpha * log_normalizer(theta) - (1 - alpha) * log_normalizer(other)
    return torch.where(inside, gap, torch.inf)


def _alpha(p: Dirichlet | Beta) -> Tensor:
    """A Beta variable is the first of a Dirichlet of two categories."""
    return p.concentration if isinstance(p, Dirichlet) else planar([p.concentration1, p.concentration0])


@rules.fisher.register
def _(p: Dirichlet | Beta) -> Information:
    r"""Coordinates α (Beta: ``concentration1``, ``concentration0``): I = diag(ψ₁(α_i)) - ψ₁(α₀) 11ᵀ, α₀ = Σ α_i."""
    return Information(_alpha(p), root=_dirichlet_root, pair=Maps(_dirichlet_pair, _dirichlet_push))


def _dirichlet_root(alpha: Tensor, u: Tensor) -> Tensor:
    # A diagonal minus a rank-one matrix, D - ψ₁(α₀) 11ᵀ, takes a factor ϱ in the direction D⁻¹1:
    # ϱ = 1 - ψ₁(α₀) Σ 1/ψ₁(α_i) ≈ (K - 1)/(2α₀) for large α. Written with e its terms are positive: e(x)/x falls.
    surplus = trigamma_excess(alpha)
    total = alpha.sum(-1, keepdim=True)
    share = alpha / total
    gain = share * ((surplus - share * trigamma_excess(total)) / (alpha + surplus)).clamp_min(0)
    shrunk = gain.sum(-1, keepdim=True).clamp_min(torch.finfo(alpha.dtype).tiny).sqrt()
    # α √ψ₁(α)
    scale = (alpha + surplus).sqrt()
    direction = torch.nn.functional.normalize(alpha / scale, dim=-1)
    y = scale * (u / alpha)
    along = (direction * y).sum(-1, keepdim=True)
    return torch.cat([y - direction * along, shrunk * along], -1)


def _relative_shares(alpha: Tensor, alpha0: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """π⁰, log π/π⁰ and π/π⁰ - 1."""
    alpha0 = torch.ones_like(alpha) if alpha0 is None else alpha0
    total, total0 = alpha.sum(-1, keepdim=True), alpha0.sum(-1, keepdim=True)
    log_share = log_ratio(alpha, alpha0) - log_ratio(total, total0)
    return alpha0 / total0, log_share, torch.expm1(log_share)


def _dirichlet_pair(alpha: Tensor, alpha0: Tensor | None) -> rules.Dual:
    r"""φ = (α_i, α₀(π_i - π⁰_i), α₀), ψ = (f(α_i), log π_i/π⁰_i, -f(α₀) - KL(π⁰, π)), π = α/α₀.

    The natural parameters α and the mean ones ψ(α_i) - ψ(α₀) = f(α_i) - f(α₀) + log π_i; the part of Δα_i that leaves
    π⁰ fixed is collected in α₀, where it meets a term of second order. Without that, steps along α would drown in the
    rounding of log π for large α.
    """
    total, (share0, log_share, change) = alpha.sum(-1, keepdim=True), _relative_shares(alpha, alpha0)
    divergence = (share0 * (change - log_share)).sum(-1, keepdim=True)
    psi = torch.cat([digamma_excess(alpha), log_share, -digamma_excess(total) - divergence], -1)
    return torch.cat([alpha, total * share0 * change, total], -1), psi


def _dirichlet_push(alpha: Tensor, alpha0: Tensor | None, u: Tensor) -> rules.Dual:
    total, along = alpha.sum(-1, keepdim=True), u.sum(-1, keepdim=True)
    share0, _, change = _relative_shares(alpha, alpha0)
    slopes = [trigamma_excess(x) / x**2 for x in (alpha, total)]
    dlog_share = u / alpha - along / total
    last = -slopes[1] * along - (share0 * change * dlog_share).sum(-1, keepdim=True)
    return torch.cat([u, u - share0 * along, along], -1), torch.cat([slopes[0] * u, dlog_share, last], -1)


@rules.natural_and_mean.register
def _(p: Dirichlet | Beta) -> rules.Dual:
    """T = log x, of Beta also log(1 - x)."""
    alpha = _alpha(p)
    return alpha, torch.digamma(alpha) - torch.digamma(alpha.sum(-1, keepdim=True))


@rules.positive_kl.register
def _(p: Dirichlet | Beta, q: Dirichlet | Beta) -> Tensor:
    r""":math:`\sum_i h(\alpha_i, \beta_i) - h(\sum\alpha, \sum\beta)`, where

    .. math:: h(a, b) = \log\frac{\Gamma(b)}{\Gamma(a)} - (b - a) \psi(a).
    """

    def gap(a: Tensor, b: Tensor) -> Tensor:
        return log_gamma(b) - log_gamma(a) - (b - a) * digamma(a)

    alpha, other = _alpha(p), _alpha(q)
    return gap(alpha, other).sum(-1) - gap(alpha.sum(-1), other.sum(-1))


@rules.log_affinity.register
def _(p: Dirichlet | Beta, q: Dirichlet | Beta, alpha: float) -> Tensor:
    r"""The gap of :math:`\sum_i \log\Gamma(\alpha_i) - \log\Gamma(\sum_i \alpha_i)`."""
    return _gap(_alpha(p), _alpha(q), alpha, lambda a: log_gamma(a).sum(-1) - log_gamma(a.sum(-1)))


@rules.positive_kl.register
def _(p: ExponentialFamily, q: ExponentialFamily) -> Tensor:
    r""":math:`A(\theta_q) - A(\theta_p) - \nabla A(\theta_p) \cdot (\theta_q - \theta_p)`.

    torch's rule is a constant to autodiff in its first argument.
    """
    (theta, log_normalizer), (other, _) = exponential_family(p), exponential_family(q)
    steps = tuple(b - a for a, b in zip(theta, other, strict=True))
    with forward_mode(), Rewritten():
        value, slope = torch.func.jvp(log_normalizer, theta, steps)[:2]
    return log_normalizer(*other) - value - slope


@rules.log_affinity.register
def _(p: ExponentialFamily, q: ExponentialFamily, alpha: float) -> Tensor:
    r"""The gap of the log-normalizer."""
    if type(p) is not type(q):
        return rules.no_affinity(p, q, alpha)
    (theta, log_normalizer), (other, _) = exponential_family(p), exponential_family(q)
    between = tuple(alpha * a + (1 - alpha) * b for a, b in zip(theta, other, strict=True))
    gap = log_normalizer(*between) - alpha * log_normalizer(*theta) - (1 - alpha) * log_normalizer(*other)
    return gap.nan_to_num(nan=torch.inf) if alpha > 1 else gap
