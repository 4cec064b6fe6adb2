r"""Families with a location and a scale: hyperbolic planes.

If x = μ + σ ε with ε of a fixed density, the information in (μ, σ) is a constant matrix over σ². Where the density of ε
is even that matrix is diag(a, c), and otherwise a shear μ + b σ makes it so. The family is then a hyperbolic half-plane
of curvature -1/c: its chords and distances have closed forms, and they differ between families only in a, c and b.
Families with a scale alone (HalfNormal, HalfCauchy) are lines, with coordinate √c log σ.

Chords are those of the hyperboloid in Minkowski space: with x = μ/σ, y = 1/σ, w = (aμ² + cσ²)/σ,

.. math:: a\,\Delta x^2 - \Delta y\,\Delta w = \frac{a\,\Delta\mu^2 + c\,\Delta\sigma^2}{\sigma\sigma'}.

References: Rao (1945) for the Normal; Mitchell, "The information matrix, skewness tensor and α-connections for the
general multivariate elliptic distribution" (1989) for even densities; Oller, "Information metric for extreme value and
logistic probability distributions" (1987) for Gumbel and Weibull.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch import distributions as td
from torch.distributions import Distribution, Gumbel, Laplace, Normal, StudentT, Weibull
from torch.distributions.utils import euler_constant
from torch.types import _size

from pullback._autodiff.torch_internals import depends_on_code
from pullback._families import rules
from pullback._families.information import Information, Maps, MissingRuleError, planar
from pullback._families.rules import SAME, WIDE, fades, times
from pullback._numerics.special import excess, horner, log_gamma, log_ratio

for _family in (Normal, Laplace, td.Cauchy, Gumbel, td.LogNormal):
    fades(_family, loc=SAME, scale=WIDE)
fades(td.HalfNormal, scale=WIDE)
fades(td.HalfCauchy, scale=WIDE)
fades(StudentT, df=SAME, loc=SAME, scale=WIDE)
fades(Weibull, scale=WIDE, concentration=SAME)
fades(td.Pareto, scale=SAME, alpha=times(0.1))
rules.FIXED[StudentT] = "df"

Constant = float | Tensor


def half_plane(
    family: type[Distribution], *, a: float, c: float, shear: float = 0.0, chart: Any = lambda p: (p.loc, p.scale)
) -> None:
    """Registers a family with I = (a (dμ + b dσ)² + c dσ²) / σ², b the shear; the `chart` gives (μ, σ) of a member."""

    def root(eta: Tensor, u: Tensor) -> Tensor:
        scales = planar([a**0.5 / eta[..., 1], c**0.5 / eta[..., 1]])
        # without a shear one product, and no copies of the tangents
        return scales * (u if shear == 0 else planar([u[..., 0] + shear * u[..., 1], u[..., 1]]))

    def seen(eta: Tensor, eta0: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """The sheared step from the origin, (0, 1) if there is none, and both scales."""
        eta0 = torch.tensor([0.0, 1.0], dtype=eta.dtype, device=eta.device) if eta0 is None else eta0
        step = eta - eta0
        return step[..., 0] + shear * step[..., 1], eta[..., 1], eta0[..., 1]

    def values(eta: Tensor, eta0: Tensor | None) -> rules.Dual:
        return _dual(*seen(eta, eta0), a, c)

    def push(eta: Tensor, eta0: Tensor | None, u: Tensor) -> rules.Dual:
        return _pushed(*seen(eta, eta0), u[..., 0] + shear * u[..., 1], u[..., 1] / eta[..., 1], a, c)

    def pull(eta: Tensor, eta0: Tensor | None, forces: list[Tensor]) -> Tensor:
        along, ds = _pulled(*seen(eta, eta0), forces, a, c)
        return planar([along, shear * along + ds / eta[..., 1]])

    def factors(eta: Tensor, eta0: Tensor | None) -> list[list[list[Tensor]]]:
        return _factors(*seen(eta, eta0), shear, a, c)

    def information(p: Distribution) -> Information:
        pair = Maps(values, push, pull, factors)
        return Information(planar(torch.broadcast_tensors(*chart(p))), root=root, pair=pair)

    def distance(p: Distribution, q: Distribution) -> Tensor:
        (loc, scale), (loc1, scale1) = chart(p), chart(q)
        return _distance(loc1 - loc + shear * (scale1 - scale), scale, scale1, a, c)

    rules.fisher.register(family, information)
    rules.embed.register(family, rules.embed.dispatch(Distribution))
    rules.rao_distance.register(family, distance)


def half_line(family: type[Distribution], *, c: float, chart: Callable[[Any], Tensor]) -> None:
    r"""Registers a family with :math:`I = c / \sigma^2`; the `chart` gives σ, a scale or a rate."""
    length = math.sqrt(c)

    def arc(eta: Tensor, eta0: Tensor | None) -> Tensor:
        return length * log_ratio(eta, torch.ones_like(eta) if eta0 is None else eta0)

    rules.line(family, chart=chart, root=lambda eta, u: length * u / eta, arc=arc)


def _dual(step: Tensor, scale: Tensor, scale0: Constant, a: Constant, c: Constant) -> rules.Dual:
    """The hyperboloid pair at a `step` from the origin, moved so that this is zero: small chords do not cancel."""
    x = a**0.5 * (step / scale)
    y = (scale0 - scale) / scale
    w = x * (x * (scale / scale0)) + c * ((scale - scale0) / scale0)
    return planar([x, y, w]), planar([x, -w / 2, -y / 2])


def _pushed(step: Tensor, scale: Tensor, scale0: Tensor, dstep: Tensor, ds: Tensor, a: float, c: float) -> rules.Dual:
    """The derivatives of `_dual` along steps of the location and of the logarithm of the scale."""
    x = a**0.5 * (step / scale)
    dx = (a**0.5 / scale) * dstep - x * ds
    dy = -(scale0 / scale) * ds
    dw = (scale / scale0) * (2 * x * dx + (x * x + c) * ds)
    return planar([dx, dy, dw]), planar([dx, -dw / 2, -dy / 2])


def _pulled(step: Tensor, scale: Tensor, scale0: Tensor, forces: list[Tensor], a: float, c: float) -> rules.Dual:
    """The transpose of `_pushed`: what forces on both maps do along steps of the location and of the log-scale."""
    x = a**0.5 * (step / scale)
    (fx, fy, fw), (gx, gy, gw) = (force.unbind(-1) for force in forces)
    on_x, on_y, on_w = fx + gx, fy - gw / 2, fw - gy / 2
    ratio = scale / scale0
    lift = ratio * on_w
    along_x = on_x + 2 * lift * x
    return (a**0.5 / scale) * along_x, lift * (x * x + c) - along_x * x - on_y / ratio


def _factors(step: Tensor, scale: Tensor, scale0: Tensor, shear: float, a: float, c: float) -> list[list[list[Tensor]]]:
    """Derivatives of (x, y) and (x, -w) in location and scale: y and w only meet each other in products."""
    x, by_loc, lift = a**0.5 * (step / scale), a**0.5 / scale, -scale / scale0
    by_scale = shear * by_loc - x / scale
    dx, dy = [by_loc, by_scale], [torch.zeros_like(scale), -scale0 / scale**2]
    return [[dx, dy], [dx, [2 * lift * x * by_loc, lift * (2 * x * by_scale + (x * x + c) / scale)]]]


def _distance(step: Tensor, scale: Tensor, scale1: Tensor, a: Constant, c: Constant) -> Tensor:
    r"""√c arccosh(1 + 2s²) = 2 √c arsinh(s): no cancellation for close points, zero gradient at equal ones."""
    mean_scale = scale.sqrt() * scale1.sqrt()
    horizontal, vertical = (a / c) ** 0.5 * (step / mean_scale), (scale1 - scale) / mean_scale
    equal = (horizontal == 0) & (vertical == 0)
    chord = torch.where(equal, 0, torch.hypot(torch.where(equal, 1, horizontal), vertical))
    return 2 * c**0.5 * torch.asinh(chord / 2)


# (μ, σ): I = diag(1, 2) / σ². (The paper's appendix prints 1/(2σ²) for σ²: it is 1/(2σ⁴).)
half_plane(Normal, a=1, c=2)
# (μ, σ) of log x: as for the Normal, because the logarithm is a fixed bijection.
half_plane(td.LogNormal, a=1, c=2)
# (μ, b): I = diag(1, 1) / b². The density has a kink at μ, so this is the covariance of the score only.
half_plane(Laplace, a=1, c=1)
# (μ, γ): I = diag(1, 1) / (2γ²).
half_plane(td.Cauchy, a=0.5, c=0.5)
# (μ, β): I = [[1, γ - 1], [γ - 1, (γ - 1)² + π²/6]] / β², γ Euler's constant.
_GUMBEL = {"a": 1, "c": math.pi**2 / 6, "shear": euler_constant - 1}
half_plane(Gumbel, **_GUMBEL)
# (-log λ, 1/k): -log x is a Gumbel variable with that location and scale.
half_plane(Weibull, **_GUMBEL, chart=lambda p: (-p.scale.log(), p.concentration.reciprocal()))
# σ: I = 2 / σ²; the sign that is lost carries no information on σ.
half_line(td.HalfNormal, c=2, chart=lambda p: p.scale)
# γ: I = 1 / (2γ²).
half_line(td.HalfCauchy, c=0.5, chart=lambda p: p.scale)


class UnitNormal(Normal):
    r"""A normal distribution of *known* noise, N(μ, 1): its only coordinate is μ, and its geometry is Euclidean."""

    def __init__(self, loc: Tensor):
        super().__init__(loc, torch.ones_like(loc), validate_args=False)

    def expand(self, batch_shape: _size, _instance: object = None) -> UnitNormal:
        return UnitNormal(self.loc.expand(batch_shape))


# μ: I = 1, φ = μ.
rules.line(UnitNormal, chart=lambda p: p.loc, root=lambda eta, u: u, arc=lambda eta, _: eta)


@rules.fisher.register
def _(p: StudentT) -> Information:
    r"""Coordinates (ν, μ, σ), with all three free:

    .. math:: I_{\mu\mu} = \frac{\nu+1}{(\nu+3)\sigma^2},\quad I_{\sigma\sigma} = \frac{2\nu}{(\nu+3)\sigma^2},\quad
       I_{\sigma\nu} = \frac{-2}{\sigma(\nu+1)(\nu+3)},\quad
       I_{\nu\nu} = \tfrac14\big(\psi_1(\tfrac\nu2) - \psi_1(\tfrac{\nu+1}2)\big) - \frac{\nu+5}{2\nu(\nu+1)(\nu+3)}.

    Lange, Little and Taylor, "Robust statistical modeling using the t distribution" (1989). The root is triangular in
    dω = dν / (ν(ν+1)), which removes the correlation of σ and ν.
    """

    def root(eta: Tensor, u: Tensor) -> Tensor:
        df, _, scale = eta.unbind(-1)
        ddf, dloc, dscale = u.unbind(-1)
        omega, (a, c) = ddf / df / (df + 1), _student_constants(df)
        plane = [a**0.5 * dloc / scale, c**0.5 * (dscale - omega * scale) / scale]
        return torch.stack([*plane, _tail_weight(df).sqrt() * omega], -1)

    return Information(torch.stack([p.df, p.loc, p.scale], -1), root=root)


@rules.embed.register
def _(p: StudentT, origin: StudentT | None = None) -> rules.Dual | None:
    """The half-plane of the given ν."""
    if rules.varies(p, origin):
        return None
    loc0, scale0 = (0.0, 1.0) if origin is None else (origin.loc, origin.scale)
    return _dual(p.loc - loc0, p.scale, scale0, *_student_constants(p.df))


@rules.rao_distance.register(StudentT, known="df")
def _(p: StudentT, q: StudentT) -> Tensor:
    """The half-plane distance for equal ν, within the family of that ν."""
    rules.check_equal("Fisher-Rao distance", "df", p, q)
    return _distance(q.loc - p.loc, p.scale, q.scale, *_student_constants(p.df))


def _student_constants(df: Tensor) -> tuple[Tensor, Tensor]:
    return (df + 1) / (df + 3), 2 / (1 + 3 / df)


# ψ₁(ν/2) - ψ₁((ν+1)/2) far out, in powers of 1/ν².
_TAIL_SERIES = (-0.5, 1.5, -8.5, 77.5, -1036.5, 19113.5, -464784.5)


def _tail_weight(df: Tensor) -> Tensor:
    """ν²(ν+1)² (I_νν - I_σν² / I_σσ), which rises from 1 at ν = 0 to 3/2 at infinity; without cancellation."""
    # The Schur complement G obeys G(ν) = G(ν+2) + 6(2ν+3) / (ν²(ν+1)(ν+2)(ν+3)²), all positive, and far out
    # G(ν) = (3ν+1) / (2ν³(ν+1)²) + the asymptotic series of the difference of the two trigamma functions.
    total = 6 * ((df + 1) / (df + 2)) * ((2 * df + 3) / (df + 3)) / (df + 3)
    for k in range(1, 16):
        n = df + 2 * k
        step = 6 * ((2 * n + 3) / (n + 3)) / (n + 3)
        total = total + (df / n) ** 2 * ((df + 1) / (n + 1)) * ((df + 1) / (n + 2)) * step
    n = df + 32
    s = 1 / n
    far = (3 + s) / (2 * (1 + s) ** 2) + s * horner(_TAIL_SERIES, s**2)
    return total + (df / n) ** 2 * ((df + 1) / n) ** 2 * far


@rules.natural_and_mean.register
def _(p: Normal) -> rules.Dual:
    """T = (x, x²)."""
    precision = p.scale**-2
    return torch.stack([p.loc * precision, -0.5 * precision], -1), torch.stack([p.loc, p.loc**2 + p.scale**2], -1)


@rules.positive_kl.register
def _(p: Normal, q: Normal) -> Tensor:
    r""":math:`\frac12 (g(2 \log \sigma_p/\sigma_q) + (\Delta\mu/\sigma_q)^2)`."""
    return 0.5 * (excess(2 * (p.scale / q.scale).log()) + ((p.loc - q.loc) / q.scale) ** 2)


@rules.log_affinity.register
def _(p: Normal, q: Normal, alpha: float) -> Tensor:
    r"""With :math:`v = \alpha\sigma_q^2 + (1-\alpha)\sigma_p^2`,

    .. math:: -\tfrac{\alpha(1-\alpha)}{2}\tfrac{\Delta\mu^2}{v} - \tfrac12 \log v
       + (1-\alpha)\log\sigma_p + \alpha\log\sigma_q.
    """
    v = alpha * q.scale**2 + (1 - alpha) * p.scale**2
    scales = (1 - alpha) * p.scale.log() + alpha * q.scale.log() - 0.5 * v.log()
    return torch.where(v > 0, scales - 0.5 * alpha * (1 - alpha) * (p.loc - q.loc) ** 2 / v, torch.inf)


@rules.positive_kl.register
def _(p: Laplace, q: Laplace) -> Tensor:
    r""":math:`g(\log b_p/b_q) + \frac{b_p}{b_q} g(-|\Delta\mu|/b_p)`."""
    ratio = p.scale / q.scale
    return excess(ratio.log()) + ratio * excess((p.loc - q.loc) / p.scale, even=True)


@rules.positive_kl.register
def _(p: Gumbel | Weibull, q: Any) -> Tensor:
    """With r = β_p/β_q and δ = Δμ/β_q: Γ(1 + r) exp(-δ) - 1 + δ - log r + γ (r - 1)."""
    if isinstance(p, Weibull):
        # that of -log x, a Gumbel variable with location -log λ and scale 1/k
        ratio, shift = q.concentration / p.concentration, q.concentration * (q.scale / p.scale).log()
    else:
        ratio, shift = p.scale / q.scale, (p.loc - q.loc) / q.scale
    lift = log_gamma(1 + ratio)
    return excess(lift - shift) + lift - ratio.log() + euler_constant * (ratio - 1)


@rules.positive_kl.register
def _(p: td.Uniform | td.Pareto, q: td.Uniform | td.Pareto) -> Tensor:
    """torch's, unless it is differentiated: twice would be silently wrong."""
    if any(map(depends_on_code, [q.low, q.high] if isinstance(q, td.Uniform) else [q.scale])):
        raise MissingRuleError(
            f"The support of this {type(q).__name__} moves with the code, so it has no Fisher information and its "
            "divergence is infinite on one side. Use pullback.EuclideanMetric(decoder), or a likelihood with fixed "
            "support."
        )
    return rules.positive_kl.dispatch(Distribution)(p, q)
