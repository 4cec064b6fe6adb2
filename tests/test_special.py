"""Special functions against scipy, closed forms and the identities they obey, over the whole range of their
arguments."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
import scipy.integrate
import scipy.special as sp
import scipy.stats
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pullback._numerics.special import (
    _dispersion_series,
    _dispersion_steps,
    artanh_root_sigmoid,
    dispersion_information,
    langevin,
    langevin_slope,
    resultant,
)

F64 = torch.float64
DIMENSIONS = [2, 3, 4, 5, 10, 49, 50, 51, 784]
KAPPA = torch.logspace(-6, 6, 37, dtype=F64)

dimensions = pytest.mark.parametrize("p", DIMENSIONS)


def close(actual: Tensor, expected: object, rtol: float, atol: float = 0.0) -> None:
    torch.testing.assert_close(actual, torch.as_tensor(expected, dtype=actual.dtype), rtol=rtol, atol=atol)


def derivative(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return torch.func.jvp(f, (x,), (torch.ones_like(x),))[1]


def representable(p: int) -> Tensor:
    """The concentrations at which scipy's Bessel functions do not underflow."""
    return KAPPA[sp.ive(p / 2, KAPPA.numpy()) > 1e-290]


# -- the resultant -----------------------------------------------------------------------------------------------------


@dimensions
def test_length_is_the_bessel_ratio(p):
    kappa = representable(p)
    r = resultant(p, kappa)
    ratio = sp.ive(p / 2, kappa.numpy()) / sp.ive(p / 2 - 1, kappa.numpy())
    close(r.length, ratio, rtol=1e-12)
    close(r.spread, ratio / kappa.numpy(), rtol=1e-12)


@dimensions
def test_log_partition_is_the_log_bessel_function(p):
    kappa = representable(p)
    order = p / 2 - 1
    log_bessel = np.log(sp.ive(order, kappa.numpy()))
    expected = sp.gammaln(order + 1) + order * np.log(2 / kappa.numpy()) + log_bessel
    close(resultant(p, kappa).log_partition, expected, rtol=1e-11, atol=1e-12 * max(1, order))


def test_sphere_has_elementary_functions():
    r, kappa = resultant(3, KAPPA), KAPPA.numpy()
    close(r.length, langevin(KAPPA), rtol=1e-13)
    large = kappa > 1
    with np.errstate(over="ignore"):
        close(r.deficit[large], (1 / kappa - 2 / np.expm1(2 * kappa))[large], rtol=1e-12)
        close(resultant(3, KAPPA).variance[large], (1 / kappa**2 - 1 / np.sinh(kappa) ** 2)[large], rtol=1e-12)
    close(r.log_partition, np.log(-np.expm1(-2 * kappa) / (2 * kappa)), rtol=1e-12, atol=1e-15)


@dimensions
def test_small_concentrations_follow_the_power_series(p):
    kappa = KAPPA[KAPPA < 1e-3]
    r, square = resultant(p, kappa), kappa**2 / (p * (p + 2))
    close(r.length, kappa / p * (1 - square), rtol=1e-12)
    close(resultant(p, kappa).variance, (1 - 3 * square) / p, rtol=1e-12)
    close(r.log_partition + kappa, kappa**2 / (2 * p) * (1 - square / 2), rtol=1e-12, atol=1e-19)


@pytest.mark.parametrize("p", [2, 3, 4, 5, 10])
def test_large_concentrations_follow_the_asymptotic_series(p):
    kappa = KAPPA[KAPPA > 1e5]
    a, b, c = (p - 1) / 2, (p - 1) * (p - 3) / 8, (p - 1) * (p - 3) / 8
    close(resultant(p, kappa).deficit, a / kappa - b / kappa**2 - c / kappa**3, rtol=1e-12)
    close(resultant(p, kappa).variance, a / kappa**2 - 2 * b / kappa**3 - 3 * c / kappa**4, rtol=1e-11)


@dimensions
def test_derivatives_of_the_resultant_functions_are_each_other(p):
    """To full relative precision, whatever the size of the derivative."""
    r = resultant(p, KAPPA)
    slopes = [derivative(lambda k, i=i: resultant(p, k)[i], KAPPA) for i in range(5)]
    length, variance, spread, deficit, log_partition = slopes
    assert (r.variance > 0).all()
    close(r.length + r.deficit, torch.ones_like(KAPPA), rtol=1e-15)
    close(length, r.variance, rtol=1e-12)
    close(deficit, -r.variance, rtol=1e-12)
    close(log_partition, -r.deficit, rtol=1e-11)
    close(derivative(lambda k: derivative(lambda x: resultant(p, x).log_partition, k), KAPPA), r.variance, rtol=3e-11)
    moderate = (0.01 * p < KAPPA**2) & (KAPPA < 1e3)  # elsewhere Riccati's equation and its derivatives cancel
    for ours, riccati in (
        (r.variance, 1 - r.length**2 - (p - 1) * r.spread),
        (spread, (r.variance - r.spread) / KAPPA),
        (variance, -2 * r.length * r.variance - (p - 1) * spread),
    ):
        close(ours[moderate], riccati[moderate], rtol=1e-7)


@pytest.mark.parametrize("p", [2, 3, 60])
def test_zero_concentration_is_the_uniform_distribution(p):
    zero = torch.zeros(1, dtype=F64)
    r = resultant(p, zero)
    close(torch.cat(r), [0, 1 / p, 1 / p, 1, 0], rtol=1e-14)
    slopes = torch.cat([derivative(lambda k, i=i: resultant(p, k)[i], zero) for i in range(5)])
    close(slopes, [1 / p, 0, 0, -1 / p, -1], rtol=1e-14)


@pytest.mark.parametrize("p", [2, 3, 50, 784])
def test_single_precision_is_double_precision_rounded(p):
    kappa = torch.cat([torch.zeros(1), KAPPA.float()])
    single, double = resultant(p, kappa), resultant(p, kappa.double())
    for a, b in zip(single, double, strict=True):
        assert a.dtype == torch.float32
        close(a, b, rtol=2e-7)


@pytest.mark.parametrize("p", [2, 5, 60])
def test_every_transform_of_autodiff(p):
    kappa = torch.tensor([1e-3, 0.7, 20.0, 500.0], dtype=F64)
    expected = resultant(p, kappa).variance

    def length(k: Tensor) -> Tensor:
        return resultant(p, k).length

    close(torch.vmap(torch.func.grad(length))(kappa), expected, rtol=1e-12)
    close(torch.func.jacrev(length)(kappa).diagonal(), expected, rtol=1e-12)
    close(torch.func.jacfwd(length)(kappa).diagonal(), expected, rtol=1e-12)
    forward_reverse = torch.func.jacfwd(torch.func.jacrev(length))(kappa)
    reverse_forward = torch.func.jacrev(torch.func.jacfwd(length))(kappa)
    torch.testing.assert_close(forward_reverse, reverse_forward, rtol=1e-9, atol=1e-13)
    assert torch.autograd.gradcheck(lambda k: resultant(p, k), kappa[1:3].clone().requires_grad_())
    assert torch.autograd.gradgradcheck(lambda k: resultant(p, k), kappa[1:3].clone().requires_grad_())


# -- Langevin ----------------------------------------------------------------------------------------------------------


def test_langevin_is_odd_and_elementary():
    x = torch.cat([torch.logspace(-8, 3, 60, dtype=F64), torch.tensor([0.999999, 1.000001], dtype=F64)])
    close(-langevin(-x), langevin(x), rtol=0)
    large = x > 0.5
    close(langevin(x)[large], (1 / np.tanh(x.numpy()) - 1 / x.numpy())[large], rtol=1e-14)
    small = x[x < 1e-2]
    close(langevin(small), small / 3 - small**3 / 45 + 2 * small**5 / 945, rtol=1e-14)


def test_slope_of_langevin():
    x = torch.cat(
        [torch.zeros(1, dtype=F64), torch.linspace(0.05, 3, 40, dtype=F64), torch.tensor([10.0, 1e4], dtype=F64)]
    )
    slope = langevin_slope(x)
    close(slope, derivative(langevin, x), rtol=1e-13)
    close(slope, langevin_slope(-x), rtol=0)
    close(slope[1:], (1 - langevin(x) ** 2 - 2 * langevin(x) / x)[1:], rtol=1e-9, atol=1e-15)
    assert slope[0] == pytest.approx(1 / 3, rel=1e-15, abs=0)
    assert torch.isfinite(derivative(langevin_slope, torch.tensor([0.0, 1e3, -1e300], dtype=F64))).all()


# -- negative binomial -------------------------------------------------------------------------------------------------


def enumerated(r: float, mean: float) -> float:
    """ψ₁(r) - E ψ₁(r + X) - π/r, summed over the support."""
    probs = mean / (r + mean)
    x = np.arange(int(mean + 45 * (1 + mean / r) + 60))
    weights = scipy.stats.nbinom.pmf(x, r, 1 - probs)
    return float((weights * (sp.polygamma(1, r) - sp.polygamma(1, r + x))).sum() - probs / r)


def information(r: float, mean: float) -> float:
    r_, mean_ = (torch.tensor([v], dtype=F64) for v in (r, mean))
    return dispersion_information(r_, torch.log(mean_ / r_)).item()


@pytest.mark.parametrize("mean", [1e-2, 0.3, 1.0, 7.0, 40.0])
@pytest.mark.parametrize("r", [0.01, 0.1, 0.7, 2.0, 9.0, 15.0])
def test_dispersion_information_by_enumeration(r, mean):
    lost = 1e-14 * sp.polygamma(1, r) / information(r, mean)  # the enumeration subtracts trigamma functions
    assert information(r, mean) == pytest.approx(enumerated(r, mean), rel=1e-10 + lost, abs=0)


@pytest.mark.parametrize("mean", [1.0, 1e2, 1e5])
@pytest.mark.parametrize("r", [0.01, 0.3, 3.0, 11.0])
def test_dispersion_information_by_adaptive_quadrature(r, mean):
    probs, complement = mean / (r + mean), r / (r + mean)

    def integrand(s: float) -> float:
        y = -math.expm1(-s)
        return math.exp(-r * s) * (-math.log(complement + probs * math.exp(-s)) - probs * y) / y

    breaks = [0, 0.1, 1, 5, 10, 20, 40, 100, 400, 4000]
    parts = [scipy.integrate.quad(integrand, a, b, epsabs=0, epsrel=1e-12)[0] for a, b in itertools.pairwise(breaks)]
    assert information(r, mean) == pytest.approx(sum(parts), rel=1e-10, abs=0)


@pytest.mark.parametrize("mean", [1e-3, 1.0, 1e3, 1e5])
@pytest.mark.parametrize("r", [1e3, 1e5])
def test_dispersion_information_near_the_poisson_limit(r, mean):
    """J → π²/(2r²) (1 + …), a difference of trigamma functions that agree in all digits."""
    pi = mean / (r + mean)
    beta = [math.exp(sp.betaln(j, r)) for j in range(2, 12)]
    expected = sum(pi**j / j * b for j, b in zip(range(2, 12), beta, strict=True))
    assert information(r, mean) == pytest.approx(expected, rel=1e-10, abs=0)


def test_the_two_forms_of_the_dispersion_information_meet():
    """The series alone, whose terms fall by π, and the series after steps: also beside and at the poles of the sums."""
    r = torch.tensor([0.01, 0.5, 1.0, 1 + 1e-9, 2.5, 3.0, 11.9], dtype=F64)[:, None]
    logits = torch.tensor([0.0, 1e-6, 0.02, 0.05], dtype=F64)
    r, logits = torch.broadcast_tensors(r, logits)
    shifted = _dispersion_series(r + 12, torch.sigmoid(logits)) + _dispersion_steps(r, logits)
    close(shifted, _dispersion_series(r, torch.sigmoid(logits)), rtol=2e-11)


def test_dispersion_information_of_a_mean_without_bound_is_a_trigamma_function():
    r = torch.tensor([0.3, 1.0, 2.0, 7.7], dtype=F64)
    for logits in (200.0, 1500.0):
        close(
            dispersion_information(r, torch.full_like(r, logits)),
            sp.polygamma(1, r.numpy()) - 1 / r.numpy(),
            rtol=1e-11,
        )


def test_dispersion_information_is_differentiable():
    r = torch.tensor([0.3, 2.0, 30.0, 2.0, 4.4], dtype=F64, requires_grad=True)
    logits = torch.tensor([2.0, -1.0, 0.5, 3.0, 9.0], dtype=F64, requires_grad=True)
    assert torch.autograd.gradcheck(dispersion_information, (r, logits))
    assert torch.autograd.gradgradcheck(dispersion_information, (r, logits))
    close(dispersion_information(r, logits, sort=True), dispersion_information(r, logits), rtol=1e-15)
    inside = torch.func.jvp(dispersion_information, (r, logits), (torch.ones_like(r), torch.zeros_like(r)))
    close(inside[0], dispersion_information(r, logits), rtol=1e-14)
    close(inside[1], torch.autograd.grad(dispersion_information(r, logits).sum(), r)[0], rtol=1e-12)


def test_dispersion_information_takes_few_operations():
    """Of as many elements as there are; the steps are taken by those alone that need them."""

    class Counter(TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            self.elements += out.numel() if isinstance(out, Tensor) else 0
            return out

    r, counts = torch.full((1000,), 2.0, dtype=F64), []
    for logits in (-1.0, 1.0):
        with Counter() as counter:
            dispersion_information(r, torch.full_like(r, logits), sort=True)
        counts.append(counter.elements / len(r))
    assert counts[0] < 200
    assert counts[1] < 600


def test_artanh_root_sigmoid():
    x = torch.linspace(-30, 12, 43, dtype=F64)
    probs = sp.expit(x.numpy())
    close(artanh_root_sigmoid(x), 2 * np.arctanh(np.sqrt(probs)), rtol=1e-9)
    close(derivative(artanh_root_sigmoid, x), np.sqrt(probs), rtol=1e-13)
    close(
        artanh_root_sigmoid(torch.tensor([-700.0, 700.0], dtype=F64)),
        [2 * math.exp(-350), 700 + 2 * math.log(2)],
        rtol=1e-12,
    )
