r"""Special functions that torch lacks, as compositions of elementary operations.

Every function here is an ordinary expression in torch: forward mode, reverse mode, `torch.vmap` and any nesting of them
work without further rules (nested forward modes silently lose the derivatives of a `torch.autograd.Function`). Each is
arranged so that neither its value nor the derivatives which autodiff forms from it cancel, over its whole range.

The von Mises-Fisher functions rest on two facts about the ratio :math:`R_\nu(x) = I_{\nu+1}(x) / I_\nu(x)` of modified
Bessel functions. The recurrence

.. math:: R_\nu(x) = \frac{1}{2(\nu + 1)/x + R_{\nu+1}(x)}

is a contraction toward smaller orders, and Debye's expansion in powers of :math:`1/\sqrt{\nu^2 + x^2}` is uniform in
*x*. So the ratio is taken from the expansion at an order of at least 24, where eight terms reach double precision, and
carried down.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.polynomial import Polynomial
from torch import Tensor
from torch.nn.functional import logsigmoid


class Resultant(NamedTuple):
    """What the von Mises-Fisher family on the sphere in p dimensions needs to know of its concentration κ."""

    # A_p(κ) = I_{p/2}(κ) / I_{p/2-1}(κ), the mean of μᵀx
    length: Tensor
    # A_p' = 1 - A_p² - (p - 1) A_p / κ, the variance of μᵀx
    variance: Tensor
    # A_p / κ, the variance of a coordinate orthogonal to μ
    spread: Tensor
    # 1 - A_p
    deficit: Tensor
    # log E exp(κ(μᵀx - 1)) with x uniform on the sphere: what the log-density κ(μᵀx - 1) is normalized by
    log_partition: Tensor


# The first neglected term of the expansion is below 0.4 / 24⁹ = 1.4e-13, before it contracts.
_START, _TERMS = 24, 8


def resultant(p: int, concentration: Tensor) -> Resultant:
    r"""The functions of the concentration, from 0 upwards. With :math:`\nu = p/2 - 1`, :math:`a = 2(\nu + 1)` and
    :math:`f_\nu = {}_0F_1(; \nu + 1; \kappa^2/4) = E\, e^{\kappa \mu^\top x}`, the recurrences are

    .. math:: R_\nu' = R_\nu^2 \big(\tfrac{a}{\kappa^2} - R_{\nu+1}'\big), \quad
       1 - R_\nu = R_\nu \big(\tfrac a\kappa - (1 - R_{\nu+1})\big), \quad
       \log f_\nu = \log f_{\nu+1} + \log\big(1 + \tfrac{\kappa}{a} R_{\nu+1}\big).

    NIST DLMF 10.29 and 10.41. The computation runs in double precision whatever the dtype, because the steps multiply
    rounding errors of the deficit and the variance by about fifty.
    """
    x = concentration.double()
    order = p / 2 - 1
    steps = max(1, math.ceil(_START - order))
    length, variance, deficit, log_partition = _debye(order + steps, x)
    spread = length
    u, v = _over_maximum(x, 1.0)
    for n in range(steps, 0, -1):
        a = 2 * (order + n)
        log_partition = log_partition + torch.log1p(_affine(x * length, 1 / a))
        av = _affine(v, a)
        denominator = av + u * length
        variance = (av * v - u * u * variance) / (denominator * denominator)
        deficit = (av - u * deficit) / denominator
        length, spread = u / denominator, v / denominator
    return Resultant(*(value.to(concentration.dtype) for value in (length, variance, spread, deficit, log_partition)))


def _debye(order: float, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    r"""Length, variance, deficit and log-partition at a large order :math:`\nu`.

    With :math:`s = \sqrt{\nu^2 + x^2}`, :math:`t = \nu / s`, a polynomial P(t) and :math:`S = \tfrac12 + t P'(t)`:

    .. math::
        \log f = (s - \nu) - \nu \log\tfrac{s + \nu}{2\nu} - \tfrac12 \log\tfrac{s}{\nu} + P(t) - P(1), \qquad
        R = \tfrac{x}{s + \nu} - \tfrac{x}{s^2} S, \qquad
        R' = \tfrac{\nu}{s(s + \nu)} - \tfrac{1}{s^2} \big((2t^2 - 1) S - (1 - t^2)\, t S'\big).
    """
    u, v = _over_maximum(x, order)
    root = torch.sqrt(u * u + v * v)
    # x / s, ν / s, x / (s + ν), one minus that, and 1 / s.
    h, t = u / root, v / root
    e = u / (v + root)
    rest = torch.where(x < order, 1 - e, v * e * _affine(t / _affine(h, 1, 1), 1, 1))
    S, slope, partial = (horner(c, t) for c in _debye_polynomials(order))
    inverse = _affine(t, 1 / order)
    correction = h * inverse * S
    variance = inverse * v / (v + root) - inverse * inverse * (_affine(t * t, 2, -1) * S - h * h * slope)
    # (s - ν) / ν
    relative = _affine(x * e, 1 / order)
    logs = _affine(torch.log1p(_affine(relative, 0.5)), order) + _affine(torch.log1p(relative), 0.5)
    return e - correction, variance, rest + correction, -x * rest - logs - h * e * partial


def _over_maximum(x: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """(x, scale) / max(x, scale). Functions of this pair have derivatives that cancel neither at 0 nor at infinity."""
    small, ones = x < scale, _affine(x, 0, 1)
    below = _affine(x, 1 / scale)
    return torch.where(small, below, ones), torch.where(small, ones, torch.where(small, ones, below).reciprocal())


def _affine(x: Tensor, slope: float, intercept: float = 0.0) -> Tensor:
    """slope x + intercept, by the one operation that forward mode differentiates without a detour."""
    # For `x * 2` torch builds a symbolic zero as the tangent of the number, fifty times slower on small tensors.
    return torch.rsub(x, intercept, alpha=-slope)


@lru_cache(maxsize=256)
def _debye_polynomials(order: float) -> tuple[list[float], list[float], list[float]]:
    r"""Coefficients of :math:`S = \tfrac12 + t P'(t)`, of :math:`t S'(t)` and of :math:`(P(1) - P(t)) / (1 - t)`."""
    # Riccati's equation turns the ansatz S = Σ g_k(t²) / sᵏ into a recurrence for the polynomials g_k.
    T = Polynomial([0.0, 1.0])
    g = [Polynomial([0.5])]
    for k in range(_TERMS):
        square = sum((g[i] * g[k - i] for i in range(k + 1)), Polynomial([0.0]))
        g.append(0.5 * ((1 - T) * ((k + 2) * g[k] + 2 * T * g[k].deriv() + square) - 2 * g[k]))
    S = np.zeros(3 * _TERMS + 1)
    for k, polynomial in enumerate(g):
        powers = k + 2 * np.arange(polynomial.coef.size)
        S[powers] += np.asarray(polynomial.coef, dtype=np.float64) / order**k
    n = np.arange(S.size)
    partial = np.cumsum((S[1:] / n[1:])[::-1])[::-1]
    return S.tolist(), (n * S).tolist(), partial.tolist()


def horner(coefficients: Sequence[float], x: Tensor) -> Tensor:
    """The polynomial with these coefficients, the constant first."""
    value = _affine(x, coefficients[-1], coefficients[-2])
    for c in reversed(coefficients[:-2]):
        value = _affine(value * x, 1, c)
    return value


# Coefficients of x, x³, x⁵, … of Langevin's function, from Riccati's equation L' = 1 - L² - 2 L / x.
_LANGEVIN = [1 / 3]
for _n in range(1, 16):
    _LANGEVIN.append(-sum(_LANGEVIN[i] * _LANGEVIN[_n - 1 - i] for i in range(_n)) / (2 * _n + 3))


def langevin(x: Tensor) -> Tensor:
    r"""Langevin's function :math:`L(x) = \coth x - 1/x`: A₃, and twice the mean less 1 of the continuous Bernoulli."""
    small, inner, outer = _split(x)
    return torch.where(small, inner * horner(_LANGEVIN, inner**2), 1 / torch.tanh(outer) - 1 / outer)


def langevin_slope(x: Tensor) -> Tensor:
    r""":math:`L'(x) = 1/x^2 - 1/\sinh^2 x`, positive and even; four times the variance of a continuous Bernoulli."""
    small, inner, outer = _split(x)
    series = [(2 * n + 1) * r for n, r in enumerate(_LANGEVIN)]
    decay = torch.exp(-2 * outer.abs())
    return torch.where(small, horner(series, inner**2), outer**-2 - 4 * decay / (1 - decay) ** 2)


def _split(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Where the power series of radius π is used, its argument there, and the argument of the closed form elsewhere."""
    small = x.abs() < 1
    return small, torch.where(small, x, 0), torch.where(small, 1, x)


def artanh_root_sigmoid(x: Tensor) -> Tensor:
    r""":math:`2 \operatorname{artanh} \sqrt{\sigma(x)}`, the integral of :math:`\sqrt{\sigma}`; exact in both tails."""
    return 2 * torch.log1p(torch.exp(0.5 * logsigmoid(x))) - logsigmoid(-x)


# From 0 upwards a logit needs shifts of r to here; the series is then exact to 1e-11, and below 0 without them:
# test_the_two_forms_of_the_dispersion_information_meet.
_LARGE, _SERIES_TERMS = 12, 36
# 1 / (1 + t) for t from 0 to 1 as a polynomial, to 2e-13; no coefficient is above 1.
_LOGISTIC = np.polynomial.Chebyshev.interpolate(lambda t: 1 / (1 + t), 16, domain=[0, 1]).convert(kind=Polynomial).coef


def dispersion_information(r: Tensor, logits: Tensor, *, sort: bool = False) -> Tensor:
    r"""Information of the negative binomial law about its total count *r*, the mean :math:`\mu` held fixed.

    With :math:`\pi = \sigma(\mathrm{logits}) = \mu / (r + \mu)` it is Fisher's positive series (*The negative binomial
    distribution*, 1941), and an integral:

    .. math::
        J(r) = \psi_1(r) - E\,\psi_1(r + X) - \frac{\pi}{r} = \sum_{j \ge 2} \frac{\pi^j}{j} B(j, r)
        = \int_0^\infty e^{-rs}\, \frac{-\log(1 - \pi y) - \pi y}{y}\, ds, \qquad y = 1 - e^{-s}.

    Neither subtracts: the left-hand side cancels to all digits near the Poisson limit. The series converges fast for
    :math:`\pi < \tfrac12` or :math:`r > 12`. Elsewhere *r* is shifted there, by

    .. math::
        J(r) = \frac{H(r)}{r} + J(r + 1), \qquad H(r + 1) = \frac{\pi}{(r + 1)(r + 2)} - e^{-\mathrm{logits}} H(r),
        \qquad H(r) = \int_0^\infty e^{-rs} \sigma(\mathrm{logits} - s)\, ds - \frac{\pi}{r + 1}.

    In double precision whatever the dtype, because H is a difference. With `sort` elements that need no shift are left
    out of it, which `torch.vmap` cannot do.
    """
    dtype, r, logits = r.dtype, r.double(), logits.double()
    probs, shifted = torch.sigmoid(logits), (logits > 0) & (r > 0) & (r < _LARGE)
    series = _dispersion_series(torch.where(shifted, r + _LARGE, r), probs)
    if sort:
        r, logits = torch.broadcast_tensors(r, logits)
        steps = torch.zeros_like(series).masked_scatter(shifted, _dispersion_steps(r[shifted], logits[shifted]))
    else:
        steps = _dispersion_steps(torch.where(shifted, r, 1.0), torch.where(shifted, logits, 0.0))
        steps = torch.where(shifted, steps, 0.0)
    return (series + steps).to(dtype)


def _dispersion_series(r: Tensor, probs: Tensor) -> Tensor:
    total = _affine(probs, 0, 1 / _SERIES_TERMS)
    for j in range(_SERIES_TERMS - 1, 1, -1):
        total = _affine(probs / _affine(r, 1 / j, 1) * total, 1, 1 / j)
    return probs * (probs / r) * total / (r + 1)


def _dispersion_steps(r: Tensor, logits: Tensor) -> Tensor:
    """J(r) - J(r + 12) for r < 12 and logits >= 0, on either side of which the integral is an exponential sum."""
    logits = logits.clamp_max(1e3)
    probs, ratio, decay = torch.sigmoid(logits), torch.exp(-logits), torch.exp(-r * logits)
    inverse = [_affine(r, 1, j).reciprocal() for j in range(len(_LOGISTIC) + 1)]
    # the term of a pole near r is a difference quotient
    nearest = r.detach().round()
    z = (r - nearest) * logits
    small = z.abs() < 0.5
    series = horner([(-1) ** n / math.factorial(n + 1) for n in range(14)], torch.where(small, z, 0.0))
    away = torch.where(small, 1.0, z)
    quotient = logits * torch.where(small, series, -torch.expm1(-away) / away)
    weight = torch.as_tensor(_LOGISTIC, device=r.device)[nearest.long()]
    step, power = weight * torch.exp(-nearest * logits) * quotient - probs * inverse[1], torch.ones_like(r)
    for m, a in enumerate(_LOGISTIC.tolist()):
        gap = _affine(r, 1, -m).masked_fill(nearest == m, math.inf)
        step = step + _affine((power - decay) / gap + decay * inverse[m + 1], a)
        power = power * ratio
    total = torch.zeros_like(r)
    for k in range(_LARGE):
        total = total + step * inverse[k]
        step = probs * (inverse[k + 1] * inverse[k + 2]) - ratio * step
    return total


# Beyond here the series below are exact to rounding.
_SHIFT = 12
_BERNOULLI = (1 / 6, -1 / 30, 1 / 42, -1 / 30, 5 / 66, -691 / 2730, 7 / 6)


def trigamma_excess(x: Tensor) -> Tensor:
    r"""e(x) = x² ψ₁(x) - x, from ψ₁(x) - 1/x = Σ_{j<n} 1/((x+j)²(x+j+1)) + (ψ₁(x+n) - 1/(x+n)): all terms positive."""
    steps = 1 / (x + 1) + sum((x / (x + j)) ** 2 / (x + j + 1) for j in range(1, _SHIFT))
    far = x + _SHIFT
    series = 0.5 + horner(_BERNOULLI, far**-2) / far
    return steps + (x / far) ** 2 * series


def digamma_excess(x: Tensor) -> Tensor:
    r"""f(x) = ψ(x) - log x = Σ_{j<n} (log(1 + 1/(x+j)) - 1/(x+j)) + f(x+n) for small x, the series alone for large."""
    near, far, small = _shifted(x)
    steps = sum(torch.log1p(1 / (near + j)) - 1 / (near + j) for j in range(_SHIFT))
    coefficients = [b / (2 * k) for k, b in enumerate(_BERNOULLI, start=1)]
    return torch.where(small, steps, 0) - (0.5 + horner(coefficients, far**-2) / far) / far


def digamma(x: Tensor) -> Tensor:
    """ψ(x), whose derivatives are exact to rounding."""
    return x.log() + digamma_excess(x)


def log_gamma(x: Tensor) -> Tensor:
    """log Γ(x), whose derivatives are exact to rounding: Stirling's formula and Binet's function, by steps as above."""
    near, far, small = _shifted(x)
    steps = sum((near + j + 0.5) * torch.log1p(1 / (near + j)) - 1 for j in range(_SHIFT))
    coefficients = [b / (2 * k * (2 * k - 1)) for k, b in enumerate(_BERNOULLI, start=1)]
    value = (x - 0.5) * x.log() - x + torch.where(small, steps, 0) + horner(coefficients, far**-2) / far
    # torch rounds better, and its derivatives are worse
    return value + (torch.lgamma(x) - value).detach()


def _shifted(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The argument of the steps, that of the series after them, and where steps are taken."""
    small = x < _SHIFT
    return torch.where(small, x, 1), torch.where(small, x + _SHIFT, x), small


def inverse_softplus(x: Tensor) -> Tensor:
    r""":math:`\log(e^x - 1)` for x > 0."""
    return x + torch.log(-torch.expm1(-x))


def excess(x: Tensor, *, even: bool = False) -> Tensor:
    r""":math:`g(x) = e^x - 1 - x`, to full relative accuracy: by its series near 0; or :math:`g(-|x|)`."""
    y = -x.abs() if even else x
    small = x.abs() < 0.25
    near = torch.where(small, x, 0)
    coefficients = [1 / math.factorial(n) for n in range(2, 14 if x.dtype == torch.float64 else 9)]
    # The square is that of x: g(-|x|) is then twice differentiable at 0 also to autodiff.
    series = near**2 * horner(coefficients, -near.abs() if even else near)
    return torch.where(small, series, torch.expm1(y) - y)


def weighted_excess(weight: Tensor, other: Tensor, log_ratio: Tensor) -> Tensor:
    r""":math:`p\, g(\log q - \log p) = q - p - p \log(q/p)`, also where q ≫ p, or one of them is 0."""
    impossible = (weight == 0) & (other == 0)
    x = torch.where(impossible, 0, log_ratio).clamp_max(torch.finfo(log_ratio.dtype).max)
    return torch.where(x > 1, other - weight - weight * x, weight * excess(x.clamp_max(1)))


def log_ratio(x: Tensor, origin: Tensor) -> Tensor:
    """log(x / origin) to full relative precision, also where the two nearly agree."""
    relative = (x - origin) / origin
    near = relative.abs() < 0.5
    return torch.where(near, torch.log1p(torch.where(near, relative, 0)), torch.log(x / origin))
