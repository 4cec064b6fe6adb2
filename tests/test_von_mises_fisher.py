"""Von Mises-Fisher: the distribution against scipy, its samples and gradients against exact moments, its geometry by
the laws."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.integrate
import scipy.stats
import torch
from torch import Tensor
from torch.distributions import Distribution, Independent, VonMises, kl_divergence
from torch.nn.functional import normalize, softplus

import pullback as pb
from laws import Case, check_embedding, check_frame, check_kl_hessian, check_promises, check_score_covariance
from pullback._families.directional import _angle_slope
from pullback._numerics.special import resultant

F32, F64 = torch.float32, torch.float64
dimensions = pytest.mark.parametrize("p", [2, 3, 4, 30])
concentrations = pytest.mark.parametrize("kappa", [1e-6, 0.5, 30.0, 1e6])


def direction(p: int, seed: int = 0) -> Tensor:
    return normalize(torch.randn(p, dtype=F64, generator=torch.Generator().manual_seed(seed)), dim=-1)


def five_errors(values: Tensor, expected: Tensor | float) -> None:
    """The mean over the first dimension is within five standard errors."""
    error = values.std(0) / values.shape[0] ** 0.5
    assert ((values.mean(0) - expected).abs() <= 5 * error + 1e-13).all()


# -- the density -------------------------------------------------------------------------------------------------------


@dimensions
@concentrations
def test_density_and_entropy_are_those_of_scipy(p, kappa):
    theirs = scipy.stats.vonmises_fisher(direction(p).numpy(), kappa)
    x = theirs.rvs(20, random_state=0)
    ours = pb.VonMisesFisher(direction(p), kappa)
    atol = 1e-12 + 1e-15 * kappa  # scipy subtracts numbers of the size of the concentration
    np.testing.assert_allclose(ours.log_prob(torch.tensor(x)), theirs.logpdf(x), rtol=1e-12, atol=atol)
    np.testing.assert_allclose(ours.entropy(), theirs.entropy(), rtol=1e-12, atol=atol)


@dimensions
@concentrations
def test_density_integrates_to_one(p, kappa):
    """Over the angle from the mean direction: area(S^(p-2)) ∫ sin^(p-2) p(θ) dθ."""
    t, w = np.polynomial.legendre.leggauss(200)
    reach = min(math.pi, (14 + math.sqrt(p)) / math.sqrt(1 + kappa))
    theta = 0.5 * reach * (1 + t)
    x = torch.zeros(200, p, dtype=F64)
    x[:, 0], x[:, 1] = torch.tensor(np.cos(theta)), torch.tensor(np.sin(theta))
    loc = torch.eye(p, dtype=F64)[0]
    density = pb.VonMisesFisher(loc, kappa).log_prob(x).exp().numpy()
    area = 2 * math.pi ** ((p - 1) / 2) / math.gamma((p - 1) / 2)
    assert (0.5 * reach * w * area * np.sin(theta) ** (p - 2) * density).sum() == pytest.approx(1, rel=1e-10, abs=0)


def test_uniform_at_zero_concentration():
    p = pb.VonMisesFisher(direction(3), 0.0)
    log_density = torch.tensor(-math.log(4 * math.pi), dtype=F64)
    torch.testing.assert_close(p.log_prob(direction(3, seed=1)), log_density)
    torch.testing.assert_close(p.entropy(), -log_density)
    torch.testing.assert_close(p.variance, torch.full((3,), 1 / 3, dtype=F64))
    five_errors(p.sample((20_000,)), 0.0)


@dimensions
@concentrations
def test_gradients_of_the_density(p, kappa):
    """∂/∂κ log p = μᵀx - A(κ), and ∂/∂μ log p = κ times the tangential part of x."""
    loc = direction(p).requires_grad_()
    concentration = torch.tensor(kappa, dtype=F64, requires_grad=True)
    q = pb.VonMisesFisher(loc, concentration)
    x = q.sample()
    dloc, dkappa = torch.autograd.grad(q.log_prob(x), (loc, concentration))
    deficit = resultant(p, concentration.detach()).deficit
    drop = 0.5 * ((x - loc.detach()) ** 2).sum()
    torch.testing.assert_close(dkappa, deficit - drop, rtol=1e-9, atol=1e-14)
    tangential = x - (x @ loc.detach()) * loc.detach()
    torch.testing.assert_close(dloc, kappa * tangential, rtol=1e-9, atol=1e-15 * kappa)


# -- the divergence ----------------------------------------------------------------------------------------------------


@dimensions
@pytest.mark.parametrize(("kappa", "other"), [(0.3, 2.0), (2.0, 0.3), (1e-6, 3e-6), (50.0, 80.0), (1e6, 1.01e6)])
def test_divergence_in_the_concentration_is_an_integral_of_the_variance(p, kappa, other):
    """KL = ∫ (κ' - k) A'(k) dk from κ to κ': Taylor's formula, without cancellation."""
    t, w = (torch.tensor(x) for x in np.polynomial.legendre.leggauss(80))
    k = kappa + 0.5 * (1 + t) * (other - kappa)
    expected = 0.5 * (other - kappa) * (w * (other - k) * resultant(p, k).variance).sum()
    first, second = (pb.VonMisesFisher(direction(p), c) for c in (kappa, other))
    torch.testing.assert_close(kl_divergence(first, second), expected, rtol=2e-10, atol=4e-15 * min(kappa, 1))


@pytest.mark.parametrize("p", [2, 3, 7])
def test_divergence_is_the_mean_log_ratio(p):
    first, second = pb.VonMisesFisher(direction(p), 4.0), pb.VonMisesFisher(direction(p, seed=1), 2.5)
    x = first.sample((50_000,))
    five_errors(first.log_prob(x) - second.log_prob(x), kl_divergence(first, second))
    assert kl_divergence(first, first) == 0


def test_divergence_on_the_sphere_in_elementary_functions():
    """log C(κ) - log C(κ') + A(κ)(κ - κ' μᵀμ') with A = coth κ - 1/κ."""
    kappa, other = 3.0, 1.2
    mu, nu = direction(3), direction(3, seed=1)
    log_c = [math.log(k / (4 * math.pi * math.sinh(k))) for k in (kappa, other)]
    expected = log_c[0] - log_c[1] + (1 / math.tanh(kappa) - 1 / kappa) * (kappa - other * (mu @ nu).item())
    actual = kl_divergence(pb.VonMisesFisher(mu, kappa), pb.VonMisesFisher(nu, other))
    assert actual.item() == pytest.approx(expected, rel=1e-13, abs=0)


# -- samples -----------------------------------------------------------------------------------------------------------


@dimensions
@concentrations
def test_samples_have_the_exact_moments(p, kappa):
    q = pb.VonMisesFisher(direction(p), kappa)
    x = q.sample((20_000,))
    torch.testing.assert_close(x.norm(dim=-1), torch.ones(20_000, dtype=F64))
    five_errors(x, q.mean)
    five_errors((x - q.mean) ** 2, q.variance)
    drop = 0.5 * ((x - q.loc) ** 2).sum(-1)  # 1 - μᵀx, where all of the concentration is
    r = resultant(p, q.concentration)
    five_errors(drop, r.deficit)
    five_errors((drop - r.deficit) ** 2, resultant(p, q.concentration).variance)


@pytest.mark.parametrize("p", [2, 3, 5])
def test_samples_follow_the_distribution_of_the_height(p):
    kappa = 2.0
    x = pb.VonMisesFisher(torch.eye(p, dtype=F64)[0], kappa).sample((5_000,))

    def density(theta: float) -> float:
        return math.sin(theta) ** (p - 2) * math.exp(kappa * math.cos(theta))

    grid = np.linspace(0, math.pi, 400)
    cdf = scipy.integrate.cumulative_simpson([density(t) for t in grid], x=grid, initial=0)
    angles = torch.acos(x[:, 0].clamp(-1, 1)).numpy()
    assert scipy.stats.kstest(angles, lambda t: np.interp(t, grid, cdf / cdf[-1])).pvalue > 1e-4


@dimensions
@concentrations
def test_gradient_of_samples_in_the_concentration_is_unbiased(p, kappa):
    """d/dκ E[1 - μᵀx] = -A'(κ) and d/dκ E[(1 - μᵀx)²], from the gradients of single draws."""
    loc = direction(p)
    concentration = torch.full((4_000,), kappa, dtype=F64, requires_grad=True)
    drop = 0.5 * ((pb.VonMisesFisher(loc, concentration).rsample() - loc) ** 2).sum(-1)
    first, second = (torch.autograd.grad((drop**k).sum(), concentration, retain_graph=True)[0] for k in (1, 2))
    k = torch.tensor(kappa, dtype=F64)
    variance, deficit = resultant(p, k).variance, resultant(p, k).deficit
    (third,) = torch.func.jvp(lambda k: resultant(p, k).variance, (k,), (torch.ones_like(k),))[1:]
    five_errors(first, -variance)
    five_errors(second, third - 2 * deficit * variance)


@pytest.mark.parametrize("p", [2, 3, 6])
def test_gradient_of_samples_in_the_direction_is_unbiased(p):
    """E[x] = A μ and E[(aᵀx)²] = ρ + (A' - ρ)(aᵀμ)², differentiated along a tangent."""
    loc = direction(p).expand(20_000, p).clone().requires_grad_()
    a, kappa = direction(p, seed=1), torch.tensor(3.0, dtype=F64)
    x = pb.VonMisesFisher(loc, kappa).rsample()
    mu = direction(p)
    tangent = a - (a @ mu) * mu
    r = resultant(p, kappa)
    (first,) = torch.autograd.grad((x @ a).sum(), loc, retain_graph=True)
    five_errors(first @ tangent, r.length * (tangent @ tangent))
    (second,) = torch.autograd.grad(((x @ a) ** 2).sum(), loc)
    second_moment = resultant(p, kappa).variance + r.length**2 - r.spread
    five_errors(second @ tangent, 2 * second_moment * (a @ mu) * (tangent @ tangent))


@pytest.mark.parametrize("kappa", [1e-4, 0.5, 8.0, 1e4])
def test_on_the_sphere_a_draw_is_a_smooth_function_of_the_concentration(kappa):
    """The inverse distribution function of the height, differentiated once and twice by differences."""

    def height(k: Tensor) -> Tensor:
        torch.manual_seed(0)
        loc = torch.eye(3, dtype=F64)[0].expand(50, 3)
        return pb.VonMisesFisher(loc, k).rsample()[:, 1:].square().sum(-1)  # sin² θ

    def slope(k: Tensor) -> Tensor:
        return torch.func.grad(lambda k: height(k).sum())(k)

    k, h = torch.full((50,), kappa, dtype=F64), 1e-4 * max(kappa, 1.0)
    torch.testing.assert_close(
        slope(k), (height(k + h) - height((k - h).abs())) / (k + h - (k - h).abs()), rtol=1e-4, atol=1e-3 * h
    )
    curvature = torch.func.grad(lambda k: slope(k).sum())(k)
    if kappa > h:
        torch.testing.assert_close(curvature, (slope(k + h) - slope(k - h)) / (2 * h), rtol=1e-3, atol=1e-3 * h)


@pytest.mark.parametrize("p", [2, 3, 4, 25])
@pytest.mark.parametrize("kappa", [0.01, 4.0, 200.0])
def test_implicit_derivative_of_the_angle_by_adaptive_quadrature(p, kappa):
    loc = torch.eye(p, dtype=F64)[0]
    theta = torch.acos(pb.VonMisesFisher(loc, kappa).sample((6,))[:, 0])
    length = resultant(p, torch.tensor(kappa, dtype=F64)).length.item()

    def expected(t: float) -> float:
        def integrand(s: float) -> float:
            return (
                (math.cos(s) - length)
                * (math.sin(s) / math.sin(t)) ** (p - 2)
                * math.exp(kappa * (math.cos(s) - math.cos(t)))
            )

        return -scipy.integrate.quad(integrand, 0, t, epsabs=1e-14, epsrel=1e-12, limit=200)[0]

    slope = _angle_slope(p, theta, torch.full((6,), kappa, dtype=F64))
    np.testing.assert_allclose(slope, [expected(t) for t in theta.tolist()], rtol=1e-8)


def test_reverse_mode_of_samples_under_vmap():
    loc, kappa = direction(5).expand(4, 5), torch.tensor([0.1, 1.0, 10.0, 100.0], dtype=F64)

    def draw(k: Tensor) -> Tensor:
        torch.manual_seed(3)
        return pb.VonMisesFisher(loc, k).rsample()

    k = kappa.clone().requires_grad_()
    (expected,) = torch.autograd.grad(draw(k).sum(), k)
    torch.testing.assert_close(torch.func.jacrev(draw)(kappa).sum((0, 1)), expected)


# -- the contract of a torch distribution ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [F32, F64])
def test_shapes_and_dtypes(dtype):
    loc, kappa = normalize(torch.ones(3, 1, 4, dtype=dtype), dim=-1), torch.ones(2, dtype=dtype)
    q = pb.VonMisesFisher(loc, kappa)
    assert (q.batch_shape, q.event_shape) == ((3, 2), (4,))
    assert q.sample((5,)).shape == (5, 3, 2, 4)
    for value in (q.mean, q.variance, q.mode, q.rsample()):
        assert value.shape == (3, 2, 4)
        assert value.dtype == dtype
    assert q.log_prob(q.sample((5,))).shape == (5, 3, 2)
    assert q.entropy().shape == (3, 2)
    assert Independent(q, 1).log_prob(q.sample()).shape == (3,)
    wide = q.expand((6, 3, 2))
    assert wide.sample().shape == (6, 3, 2, 4)
    torch.testing.assert_close(wide.entropy(), q.entropy().expand(6, 3, 2))


@pytest.mark.parametrize("kappa", [0.0, 1e-6, 1e-2, 1.0, 100.0, 1e6])
@pytest.mark.parametrize("p", [2, 3, 20])
def test_single_precision_is_sane(p, kappa):
    mu, k = direction(p), torch.tensor(kappa, dtype=F64)
    double, single = pb.VonMisesFisher(mu, k), pb.VonMisesFisher(mu.float(), k.float())
    torch.testing.assert_close(single.entropy().double(), double.entropy(), rtol=1e-6, atol=1e-6)
    x = double.sample((10,))
    atol = 1e-5 + 4e-7 * kappa**0.5  # x itself is rounded, and log p moves by κ |x - μ| |dx|
    torch.testing.assert_close(single.log_prob(x.float()).double(), double.log_prob(x), rtol=1e-5, atol=atol)
    loc, concentration = mu.float().requires_grad_(), k.float().expand(1000).clone().requires_grad_()
    draws = pb.VonMisesFisher(loc, concentration).rsample()
    gradients = torch.autograd.grad(draws.pow(2)[..., 0].sum(), (loc, concentration))
    assert torch.isfinite(draws).all()
    assert all(torch.isfinite(g).all() for g in gradients)


def test_wrong_parameters_are_refused_with_a_remedy():
    with pytest.raises(ValueError, match=r"differs from 1 by 1\. Use torch\.nn\.functional\.normalize\(loc, dim=-1\)"):
        pb.VonMisesFisher(torch.tensor([2.0, 0.0]), 1.0)
    with pytest.raises(ValueError, match=r"smallest is -1\. Use torch\.nn\.functional\.softplus"):
        pb.VonMisesFisher(torch.tensor([1.0, 0.0]), -1.0)
    with pytest.raises(ValueError, match=r"to be unit vectors"):
        pb.VonMisesFisher(torch.full((3,), torch.nan), 1.0)
    with pytest.raises(ValueError, match=r"loc of shape \(\*batch, p\) with p >= 2"):
        pb.VonMisesFisher(torch.ones(1), 1.0)
    with pytest.raises(ValueError, match="same sphere"):
        kl_divergence(pb.VonMisesFisher(direction(2), 1.0), pb.VonMisesFisher(direction(3), 1.0))
    with pytest.raises(ValueError, match="support"):
        pb.VonMisesFisher(direction(3), 1.0).log_prob(torch.ones(3, dtype=F64))
    with pytest.raises(pb.DecoderError, match="normalize"):
        pb.FisherRaoMetric(lambda z: pb.VonMisesFisher(2 * normalize(z, dim=-1), 1.0)).tensor(torch.ones(1, 3))


def test_rounding_of_the_direction_is_removed():
    rough = direction(3) * (1 + 1e-9)
    assert (pb.VonMisesFisher(rough, 1.0).loc.norm() - 1).abs() < 1e-15
    unchecked = pb.VonMisesFisher(3 * direction(3), 1.0, validate_args=False)
    torch.testing.assert_close(unchecked.loc, direction(3))


# -- the geometry ------------------------------------------------------------------------------------------------------

Z = torch.tensor([[0.3, -0.8], [1.1, 0.4], [-0.6, 0.9]], dtype=F64)


def curved(z: Tensor, num_outputs: int) -> Tensor:
    k = torch.arange(1, num_outputs + 1, dtype=z.dtype)
    x, y = z[..., :1], z[..., 1:]
    return torch.sin(k * x) + 0.4 * k * torch.tanh(y - 0.3 * k * x) + 0.5 * y + 0.2


def von_mises_fisher(p: int, scale: float = 1.0):
    def decoder(z: Tensor) -> Distribution:
        values = curved(z, 2 * (p + 1)).unflatten(-1, (2, p + 1))
        loc = 2 * torch.eye(p, dtype=z.dtype)[:2] + 0.5 * torch.tanh(values[..., :p])
        return pb.VonMisesFisher(normalize(loc, dim=-1), scale * softplus(values[..., p] + 1))

    return decoder


def von_mises(z: Tensor) -> Distribution:
    return VonMises(curved(z, 3), softplus(2 * curved(z, 3) + 1))


def circle_kl(p: Distribution, q: Distribution) -> Tensor:
    """The trapezoidal rule on the circle, which is spectrally accurate, with torch's Bessel function."""
    x = torch.linspace(0, 2 * math.pi, 129, dtype=F64)[:-1].reshape(-1, *[1] * len(p.batch_shape))

    def log_density(d: Distribution) -> Tensor:
        return d.concentration * (torch.cos(x - d.loc) - 1) - torch.log(
            2 * math.pi * torch.special.i0e(d.concentration)
        )

    return 2 * math.pi * (log_density(p).exp() * (log_density(p) - log_density(q))).mean(0)


CASES = [
    Case("VonMises", von_mises, Z, kl=circle_kl),
    *(Case(f"VonMisesFisher-{p}", von_mises_fisher(p), Z) for p in (2, 3, 4, 11)),
    Case("VonMisesFisher-3-flat", von_mises_fisher(3, scale=1e-4), Z),
    Case("VonMisesFisher-3-sharp", von_mises_fisher(3, scale=1e3), Z),
]
cases = pytest.mark.parametrize("case", CASES, ids=str)


@cases
def test_information_is_the_hessian_of_kl(case):
    check_kl_hessian(case)


@cases
def test_information_is_the_covariance_of_the_score(case):
    check_score_covariance(case)


@cases
def test_embedding_reproduces_the_information(case):
    check_embedding(case)


@cases
def test_frame_is_the_derivative_of_the_embedding(case):
    check_frame(case)
    check_promises(case)


@cases
def test_chord_does_not_depend_on_the_origin_and_is_the_jeffreys_divergence(case):
    p, q, far = (case.decoder(z) for z in (Z, Z + 0.3, Z - 1))
    kl = case.kl or kl_divergence
    expected = kl(p, q) + kl(q, p)
    for origin in (None, p, far):
        (phi, psi), (phi1, psi1) = pb.embed(p, origin=origin), pb.embed(q, origin=origin)
        torch.testing.assert_close(((phi1 - phi) * (psi1 - psi)).sum(-1), expected, rtol=1e-9, atol=1e-12)


def test_information_matrix_on_the_sphere():
    """In (μ, κ): κ A (1 - μμᵀ) and A', from the errata of the paper: κκ term 1 - 2K/κ - K²."""
    mu, kappa = direction(3), torch.tensor(2.5, dtype=F64)
    K = 1 / math.tanh(2.5) - 1 / 2.5
    expected = torch.zeros(4, 4, dtype=F64)
    expected[:3, :3] = 2.5 * K * (torch.eye(3, dtype=F64) - torch.outer(mu, mu))
    expected[3, 3] = 1 - 2 * K / 2.5 - K**2
    torch.testing.assert_close(pb.fisher(pb.VonMisesFisher(mu, kappa)).matrix, expected)


def test_on_the_circle_both_families_are_one():
    x = torch.tensor([[0.3, 0.7], [2.0, 40.0], [-2.5, 1e5]], dtype=F64)
    angle, kappa = x.unbind(-1)
    one = pb.FisherRaoMetric(lambda z: VonMises(z[..., 0], z[..., 1]))
    two = pb.FisherRaoMetric(
        lambda z: pb.VonMisesFisher(torch.stack([z[..., 0].cos(), z[..., 0].sin()], -1), z[..., 1])
    )
    torch.testing.assert_close(one.tensor(x), two.tensor(x))
    torch.testing.assert_close(one.ds2(x, x + 0.1), two.ds2(x, x + 0.1))
    p, q = VonMises(angle, kappa), VonMises(angle + 3, kappa)
    r, s = (pb.VonMisesFisher(torch.stack([d.loc.cos(), d.loc.sin()], -1), kappa) for d in (p, q))
    torch.testing.assert_close(pb.rao_distance(p, q), pb.rao_distance(r, s))


@pytest.mark.parametrize("kappa", [1e-6, 1e-3, 1.0, 1e3, 1e6])
@pytest.mark.parametrize("p", [2, 3, 12])
def test_small_steps_keep_their_precision(p, kappa):
    """A relative step h in κ and an angle h, over ten orders of magnitude of h²: ds2 = vᵀ M v (1 + O(h²)) from
    midpoint."""

    def decoder(z: Tensor) -> Distribution:
        loc = torch.cat(
            [torch.cos(z[..., :1]), torch.sin(z[..., :1]), torch.zeros(*z.shape[:-1], p - 2, dtype=F64)], -1
        )
        return pb.VonMisesFisher(loc, kappa * torch.exp(z[..., 1]))

    metric = pb.FisherRaoMetric(decoder)
    z = torch.zeros(1, 2, dtype=F64)
    for v in (torch.tensor([[1.0, 0.0]], dtype=F64), torch.tensor([[0.0, 1.0]], dtype=F64)):
        for h in (1e-2, 1e-4):
            ratio = metric.ds2(z - h * v / 2, z + h * v / 2) / (h**2 * metric.inner(z, v, v))
            torch.testing.assert_close(ratio, torch.ones(1, dtype=F64), rtol=h**2 + 1e-6, atol=0)


def test_metric_is_finite_with_finite_derivatives_at_zero_concentration():
    metric = pb.FisherRaoMetric(
        lambda z: pb.VonMisesFisher(normalize(torch.cat([z, z + 1], -1), dim=-1), z[..., 0] ** 2)
    )
    z = torch.zeros(1, 2, dtype=F64, requires_grad=True)
    M = metric.tensor(z)
    (gradient,) = torch.autograd.grad(M.sum(), z)
    assert torch.isfinite(M).all()
    assert torch.isfinite(gradient).all()


def test_distance_of_known_concentration_is_an_arc():
    """√(κA) times the angle: chords along the great circle reach it with order two."""
    kappa, angle = torch.tensor(4.0, dtype=F64), 2.0
    metric = pb.FisherRaoMetric(lambda z: pb.VonMisesFisher(torch.cat([torch.cos(z), torch.sin(z), 0 * z], -1), kappa))
    ends = torch.tensor([[0.0], [angle]], dtype=F64)
    p, q = (metric.decoder(end) for end in ends)
    distance = pb.rao_distance(p, q)
    K = 1 / math.tanh(4) - 1 / 4
    assert distance.item() == pytest.approx(math.sqrt(4 * K) * angle, rel=1e-13, abs=0)

    def length(num_segments: int) -> Tensor:
        z = torch.linspace(0, angle, num_segments + 1, dtype=F64)[:, None]
        return metric.ds2(z[:-1], z[1:]).sqrt().sum()

    coarse, fine = length(50), length(100)
    assert ((distance - coarse) / (distance - fine)).item() == pytest.approx(4, rel=1e-3, abs=0)
    torch.testing.assert_close((4 * fine - coarse) / 3, distance, rtol=1e-8, atol=0)


def test_with_free_concentration_there_are_shorter_paths():
    """Why the distance of known concentration is no lower bound: through the uniform distribution, opposite poles are
    nearer."""
    kappa = 50.0
    north, south = torch.tensor([0.0, 0.0, 1.0], dtype=F64), torch.tensor([0.0, 0.0, -1.0], dtype=F64)
    around = pb.rao_distance(pb.VonMisesFisher(north, kappa), pb.VonMisesFisher(south, kappa))
    t, w = (torch.tensor(x) for x in np.polynomial.legendre.leggauss(100))
    radial = 0.5 * kappa * (w * resultant(3, 0.5 * kappa * (1 + t)).variance.sqrt()).sum()
    assert 2 * radial < 0.5 * around


@pytest.mark.parametrize(
    "family", [lambda k: VonMises(torch.zeros(1), torch.tensor(k)), lambda k: pb.VonMisesFisher(torch.eye(3)[0], k)]
)
def test_distance_needs_equal_concentrations(family):
    with pytest.raises(NotImplementedError, match="Keep concentration the same"):
        pb.rao_distance(family(1.0), family(2.0))


def test_distance_is_accurate_for_close_and_opposite_directions():
    kappa = 2.0
    scale = pb.rao_distance(VonMises(torch.zeros(1, dtype=F64), kappa), VonMises(torch.ones(1, dtype=F64), kappa))
    for angle in (1e-9, 1e-3, math.pi - 1e-6, math.pi):
        loc = torch.tensor([[1.0, 0.0], [math.cos(angle), math.sin(angle)]], dtype=F64)
        distance = pb.rao_distance(pb.VonMisesFisher(loc[:1], kappa), pb.VonMisesFisher(loc[1:], kappa))
        torch.testing.assert_close(distance, scale * angle, rtol=1e-7, atol=0)
