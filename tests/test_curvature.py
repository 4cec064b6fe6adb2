"""Curvature: closed forms, two independent formulas, invariance, and the theorem of Gauss and Bonnet."""

from __future__ import annotations

import math

import pytest
import torch
from scipy.special import polygamma
from torch import Tensor, nn
from torch.distributions import Bernoulli, Dirichlet, Gamma, MultivariateNormal, Normal, Poisson

import pullback as pb
from helpers import Embedded, Hidden
from problems import PROBLEMS

DOUBLE = torch.float64
KNOWN = dict(zip([p.name for p in PROBLEMS[3:]], [-0.5, -1.0, 0.25, 0.25, 1.0, 1.0, 0.0], strict=True))
CURVED = [p for p in PROBLEMS if p.name in KNOWN]
NORMAL, SPHERE = PROBLEMS[3], PROBLEMS[7]


def planes(problem, n: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    z = problem.points(n)
    return z, *torch.randn(2, *z.shape, dtype=DOUBLE)


@pytest.mark.parametrize("problem", CURVED, ids=str)
@pytest.mark.parametrize("form", [lambda metric: metric, Hidden], ids=["Gauss equation", "derivatives of M"])
def test_spaces_of_constant_curvature(problem, form):
    z, u, v = planes(problem)
    metric, expected = form(problem.metric), torch.full((4,), KNOWN[problem.name], dtype=DOUBLE)
    torch.testing.assert_close(pb.sectional_curvature(metric, z, u, v), expected, rtol=0, atol=1e-10)
    d = z.shape[-1]
    torch.testing.assert_close(pb.scalar_curvature(metric, z), d * (d - 1) * expected, rtol=0, atol=1e-9)
    if d == 2:
        torch.testing.assert_close(pb.gaussian_curvature(metric, z), expected, rtol=0, atol=1e-10)


def test_surface_of_a_graph():
    """K = (f_xx f_yy - f_xy²) / (1 + f_x² + f_y²)² for the graph of a function in Euclidean space."""

    def height(z: Tensor) -> Tensor:
        return torch.sin(z[..., 0]) * torch.cosh(0.5 * z[..., 1])

    metric = pb.EuclideanMetric(lambda z: Normal(torch.cat([z, height(z)[..., None]], -1), 1.0))
    z = torch.randn(5, 2, dtype=DOUBLE)
    slope = torch.stack([torch.func.grad(height)(x) for x in z])
    bend = torch.stack([torch.func.hessian(height)(x) for x in z])
    expected = torch.linalg.det(bend) / (1 + (slope**2).sum(-1)) ** 2
    torch.testing.assert_close(pb.gaussian_curvature(metric, z), expected, rtol=1e-10, atol=1e-10)


def test_product_of_a_sphere_and_a_line():
    """Mixed planes are flat, so that the scalar curvature is that of the sphere alone."""
    metric = pb.EuclideanMetric(
        lambda z: Normal(torch.cat([SPHERE.metric.decoder(z[..., :2]).loc, z[..., 2:]], -1), 1.0)
    )
    z = 0.5 * torch.randn(3, 3, dtype=DOUBLE)
    e = torch.eye(3, dtype=DOUBLE)
    expected = torch.tensor([1.0, 0.0, 2.0], dtype=DOUBLE)[:, None].expand(3, 3)
    found = [pb.sectional_curvature(metric, z, *pair) for pair in ((e[0], e[1]), (e[0], e[2]))]
    torch.testing.assert_close(torch.stack([*found, pb.scalar_curvature(metric, z)]), expected, rtol=0, atol=1e-11)


FAMILIES = {
    "Bernoulli": lambda h: Bernoulli(logits=h),
    "Poisson": lambda h: Poisson(torch.exp(h)),
    "Normal": lambda h: Normal(h, torch.exp(0.3 * h.flip(-1))),
    "Gamma": lambda h: Gamma(torch.exp(h), 2 + torch.sin(h.flip(-1))),
    "Dirichlet": lambda h: Dirichlet(1 + torch.exp(h)),
}


def decoder_metric(family, d: int) -> pb.FisherRaoMetric:
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(d, 8), nn.Tanh(), nn.Linear(8, 5)).double().requires_grad_(False)
    return pb.FisherRaoMetric(lambda z: FAMILIES[family](model(z)))


@pytest.mark.parametrize("family", FAMILIES)
def test_both_formulas_agree(family):
    """The Gauss equation in the (pseudo-)Euclidean space of the family, and second derivatives of M: nothing shared."""
    metric = decoder_metric(family, 3)
    z, u, v = torch.randn(3, 4, 3, dtype=DOUBLE)
    found = pb.sectional_curvature(metric, z, u, v)
    torch.testing.assert_close(pb.sectional_curvature(Hidden(metric), z, u, v), found, rtol=1e-7, atol=1e-7)
    assert (found.abs() > 1e-4).all()


def test_gamma_family():
    """Gamma: (κ g)' / (2 κ g)² with κ g = κ ψ₁(κ) - 1, as in mean and shape its information is diagonal, (κ/μ², g)."""
    gamma = pb.FisherRaoMetric(lambda z: Gamma(z[..., 0], z[..., 1]))
    z = torch.tensor([[0.5, 1.0], [2.0, 3.0], [7.0, 0.1]], dtype=DOUBLE)
    shape = z[:, 0].numpy()
    excess, slope = shape * polygamma(1, shape) - 1, polygamma(1, shape) + shape * polygamma(2, shape)
    torch.testing.assert_close(
        pb.gaussian_curvature(gamma, z), torch.as_tensor(slope / (2 * excess) ** 2), rtol=1e-11, atol=0
    )


@pytest.mark.parametrize("n", [1, 2, 3])
def test_multivariate_normals(n):
    """Affine maps take any normal to any other, so the scalar curvature is the same everywhere: -n(n + 1)²/4."""
    i, j = torch.tril_indices(n, n)
    place = torch.zeros(n, n, dtype=torch.long).index_put((i, j), torch.arange(len(i)))

    def full(z: Tensor) -> MultivariateNormal:
        entries = torch.where(i == j, z[..., n:].exp(), z[..., n:])
        return MultivariateNormal(z[..., :n], scale_tril=entries[..., place].tril())

    found = pb.scalar_curvature(pb.FisherRaoMetric(full), 0.5 * torch.randn(3, n + len(i), dtype=DOUBLE))
    torch.testing.assert_close(found, torch.full_like(found, -n * (n + 1) ** 2 / 4), rtol=1e-9, atol=0)


def test_reparametrization_changes_nothing():
    def bend(z: Tensor) -> Tensor:
        return torch.stack(
            [z[..., 0] + 0.3 * torch.sin(z[..., 1]), z[..., 1] + 0.1 * z[..., 0] ** 2, 2 * z[..., 2]], -1
        )

    metric = decoder_metric("Normal", 3)
    z, u, v = torch.randn(3, 3, 3, dtype=DOUBLE)
    image, pushed = zip(*(torch.func.jvp(bend, (z,), (w,)) for w in (u, v)), strict=True)
    bent = pb.FisherRaoMetric(lambda z: metric.decoder(bend(z)))
    found = pb.sectional_curvature(bent, z, u, v)
    torch.testing.assert_close(found, pb.sectional_curvature(metric, image[0], *pushed), rtol=1e-8, atol=1e-8)
    scalars = pb.scalar_curvature(bent, z), pb.scalar_curvature(metric, image[0])
    torch.testing.assert_close(*scalars, rtol=1e-8, atol=1e-8)


def test_only_the_plane_counts():
    metric = decoder_metric("Bernoulli", 3)
    z, u, v = torch.randn(3, 3, 3, dtype=DOUBLE)
    same = pb.sectional_curvature(metric, z, 1e3 * u + v, 3 * u - 1e-3 * v)
    torch.testing.assert_close(same, pb.sectional_curvature(metric, z, u, v), rtol=1e-6, atol=1e-8)


def test_curvature_turns_what_is_carried_around_a_small_loop():
    """The holonomy of a square of side h is K times its area, to second order in h."""
    metric = decoder_metric("Bernoulli", 2)
    z, h = torch.randn(2, dtype=DOUBLE), 1e-3
    corners = z + h * torch.tensor([[-1, -1], [1, -1], [1, 1], [-1, 1], [-1, -1]], dtype=DOUBLE) / 2
    frame = torch.linalg.inv(torch.linalg.cholesky(metric.tensor(corners[0])).mT).mT  # rows: orthonormal tangents
    moved = pb.parallel_transport(metric, pb.Polyline(corners), frame, rtol=1e-13)
    angle = metric.inner(corners[:1].expand(2, 2), frame.flip(0), moved)[0]
    area = h**2 * metric.log_volume(z).exp()
    torch.testing.assert_close(angle / area, pb.gaussian_curvature(metric, z), rtol=1e-3, atol=0)


def test_total_curvature_of_a_torus_is_zero():
    """Gauss and Bonnet: ∫ K dA = 2π χ, whatever the torus looks like."""

    def torus(z: Tensor) -> Tensor:
        x, y = z.unbind(-1)
        tube = 2 + torch.cos(y) * (1 + 0.2 * torch.sin(x))
        return torch.stack([tube * torch.cos(x), tube * torch.sin(x), torch.sin(y)], -1)

    metric, t = Embedded(torus), torch.arange(48, dtype=DOUBLE) * (2 * math.pi / 48)
    z = torch.stack(torch.meshgrid(t, t, indexing="ij"), -1)
    density = pb.gaussian_curvature(metric, z) * metric.log_volume(z).exp()
    assert density.abs().mean() > 0.1
    assert abs(density.mean().item()) < 1e-9


def test_shapes_broadcast_and_batches_equal_loops():
    metric = decoder_metric("Bernoulli", 2)
    z, u, v = torch.randn(4, 2, dtype=DOUBLE), torch.randn(3, 1, 2, dtype=DOUBLE), torch.randn(2, dtype=DOUBLE)
    found = pb.sectional_curvature(metric, z, u, v)
    assert found.shape == (3, 4)
    torch.testing.assert_close(found[1, 2], pb.sectional_curvature(metric, z[2], u[1, 0], v), rtol=1e-9, atol=1e-9)
    assert pb.scalar_curvature(metric, z[0]).shape == ()
    assert pb.scalar_curvature(PROBLEMS[0].metric, torch.randn(3, 1, dtype=DOUBLE)).tolist() == [0, 0, 0]


def test_where_there_is_no_plane():
    z, u, _ = planes(NORMAL)
    assert pb.sectional_curvature(NORMAL.metric, z, u, -2 * u).isnan().all()
    ignoring = pb.EuclideanMetric(lambda z: SPHERE.metric.decoder(z[..., :2]))
    z = 0.5 * torch.randn(2, 3, dtype=DOUBLE)
    e = torch.eye(3, dtype=DOUBLE)
    assert pb.sectional_curvature(ignoring, z, e[0], e[2]).isnan().all()
    seen = pb.sectional_curvature(ignoring, z, e[0], e[1])
    torch.testing.assert_close(seen, torch.ones_like(seen), rtol=1e-9, atol=0)
    assert pb.scalar_curvature(ignoring, z).isnan().all()


def test_wrong_input_is_refused_with_a_sentence():
    z, u, v = planes(PROBLEMS[6])
    with pytest.raises(ValueError, match=r"not of two dimensions\. Use pullback.sectional_curvature"):
        pb.gaussian_curvature(PROBLEMS[6].metric, z)
    with pytest.raises(ValueError, match="with the same d"):
        pb.sectional_curvature(PROBLEMS[6].metric, z, u[:, :2], v)
