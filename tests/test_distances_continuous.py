"""Closed-form Fisher-Rao distances of continuous families, against lengths of their geodesics."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.distributions import (
    Cauchy,
    Distribution,
    Exponential,
    Gamma,
    Gumbel,
    HalfCauchy,
    HalfNormal,
    Laplace,
    LogNormal,
    MultivariateNormal,
    Normal,
    StudentT,
    Weibull,
)

import pullback as pb
from continuous import (
    EULER,
    F64,
    Z,
    curved,
    full,
    full_normal,
    identity,
    length,
    one,
    parameter,
    student,
    student_of_fixed_df,
    two,
)
from pullback._families.rules import squared_chord

PLANES = {  # information (a (dμ + b dσ)² + c dσ²) / σ²: family, a, b, c
    "Normal": (Normal, 1, 0, 2),
    "LogNormal": (LogNormal, 1, 0, 2),
    "Laplace": (Laplace, 1, 0, 1),
    "Cauchy": (Cauchy, 0.5, 0, 0.5),
    "Gumbel": (Gumbel, 1, EULER - 1, math.pi**2 / 6),
    "Weibull": (lambda m, s: Weibull(torch.exp(-m), 1 / s), 1, EULER - 1, math.pi**2 / 6),
    "StudentT": (lambda m, s: StudentT(torch.full_like(m, 5), m, s), 6 / 8, 0, 10 / 8),
}


def half_plane_geodesic(a: float, b: float, c: float, t: Tensor) -> Tensor:
    """Points (μ, σ) at t of an arc of a half circle, from angle 0.4 to 2.2, traveled at constant speed."""
    start, stop = (math.log(math.tan(angle / 2)) for angle in (0.4, 2.2))
    s = start + (stop - start) * t
    x, scale = 0.7 + 1.3 * torch.tanh(s), 1.3 / torch.cosh(s)
    return torch.stack([(c / a) ** 0.5 * x - b * scale, scale], -1)


@pytest.mark.parametrize("name", PLANES)
def test_distance_is_the_length_of_the_geodesic(name: str) -> None:
    """The sum of chords along the true geodesic converges to the distance with order two; detours are longer."""
    family, *constants = PLANES[name]
    metric = pb.FisherRaoMetric(lambda z: family(z[..., 0], z[..., 1]))

    def chords(num: int) -> Tensor:
        z = half_plane_geodesic(*constants, torch.linspace(0, 1, num + 1, dtype=F64))
        return metric.ds2(z[:-1], z[1:]).sqrt().sum()

    ends = half_plane_geodesic(*constants, torch.tensor([0.0, 1.0], dtype=F64))
    distance = pb.rao_distance(family(*ends[0]), family(*ends[1]))
    speed = math.log(math.tan(1.1) / math.tan(0.2)) * constants[2] ** 0.5
    torch.testing.assert_close(distance, torch.tensor(speed, dtype=F64), rtol=1e-13, atol=0)
    coarse, fine = chords(32), chords(64)
    assert 3.9 < (coarse - distance) / (fine - distance) < 4.1
    torch.testing.assert_close((4 * fine - coarse) / 3, distance, rtol=1e-6, atol=0)
    bump = torch.tensor([0.2, 0.1], dtype=F64)
    detour = length(metric, lambda t: half_plane_geodesic(*constants, t) + torch.sin(math.pi * t)[:, None] * bump)
    straight = length(metric, lambda t: half_plane_geodesic(*constants, t))
    torch.testing.assert_close(straight, distance, rtol=1e-10, atol=0)
    assert detour > distance


def test_normal_distance_formula() -> None:
    m, s = curved(2, num_features=4)(Z)
    s = torch.exp(s)
    p, q = Normal(m[0], s[0]), Normal(m[1], s[1])
    argument = 1 + ((m[1] - m[0]) ** 2 / 2 + (s[1] - s[0]) ** 2) / (2 * s[0] * s[1])
    torch.testing.assert_close(pb.rao_distance(p, q), 2**0.5 * torch.acosh(argument), rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    ("family", "c"), [(Exponential, 1), (HalfNormal, 2), (HalfCauchy, 0.5)], ids=lambda x: getattr(x, "__name__", None)
)
def test_distance_on_a_line(family: type[Distribution], c: float) -> None:
    metric = pb.FisherRaoMetric(lambda z: family(z[..., 0]))
    z = torch.linspace(0.3, 4, 50, dtype=F64)[:, None]
    distance = pb.rao_distance(family(z[0, 0]), family(z[-1, 0]))
    torch.testing.assert_close(distance, torch.tensor(c**0.5 * math.log(4 / 0.3), dtype=F64))
    torch.testing.assert_close(metric.ds2(z[:-1], z[1:]).sqrt().sum(), distance, rtol=1e-12, atol=0)


DISTANCES = {
    "Normal": two(Normal, identity),
    "Laplace": two(Laplace, identity),
    "Gumbel": two(Gumbel, identity),
    "Weibull": two(Weibull, torch.exp),
    "StudentT": student_of_fixed_df,
    "Exponential": one(Exponential),
    "MultivariateNormal, equal means": lambda z: MultivariateNormal(
        0 * full(z)["loc"], scale_tril=full(z)["scale_tril"]
    ),
    "MultivariateNormal, equal covariances": lambda z: MultivariateNormal(
        full(z)["loc"], scale_tril=full(Z[0])["scale_tril"].expand(*z.shape[:-1], 3, 3)
    ),
}


@pytest.mark.parametrize("name", DISTANCES)
def test_distance_is_a_distance(name: str) -> None:
    g = torch.Generator().manual_seed(5)
    x, y, w = torch.randn(3, 50, 2, generator=g, dtype=F64)
    p, q, r = (DISTANCES[name](z) for z in (x, y, w))
    torch.testing.assert_close(pb.rao_distance(p, q), pb.rao_distance(q, p), rtol=1e-10, atol=0)
    assert (pb.rao_distance(p, r) <= pb.rao_distance(p, q) + pb.rao_distance(q, r) + 1e-12).all()
    assert (pb.rao_distance(p, q) > 0).all()
    assert (pb.rao_distance(p, p) == 0).all()


@pytest.mark.parametrize("name", DISTANCES)
def test_distance_of_close_points_is_the_norm(name: str) -> None:
    """No digit is lost at a step of 1e-7: arccosh(1 + x) would lose all of them."""
    v = 1e-7 * torch.tensor([0.6, -0.8], dtype=F64)
    decoder = DISTANCES[name]
    squares = pb.rao_distance(decoder(Z - v), decoder(Z + v)) ** 2
    expected = 2 * pb.FisherRaoMetric(decoder).norm(Z, v.expand_as(Z))
    torch.testing.assert_close(
        squares.flatten(1).sum(-1).sqrt() if squares.ndim > 1 else squares.sqrt(), expected, rtol=1e-7, atol=0
    )


def test_distance_has_a_zero_gradient_at_equal_points() -> None:
    m, s = (torch.ones(2, dtype=F64, requires_grad=True) for _ in range(2))
    for p in (Normal(m, s), MultivariateNormal(m, scale_tril=torch.diag(s))):
        gradients = torch.autograd.grad(pb.rao_distance(p, p).sum(), (m, s))
        assert all((g == 0).all() for g in gradients)


# --- multivariate normals ---------------------------------------------------------------------------------------------


def eriksen_geodesic(x: Tensor, B: Tensor, t: Tensor) -> MultivariateNormal:
    """The geodesic from N(0, 1) with initial Σ⁻¹μ = x t, Σ⁻¹ = 1 - B t + O(t²), by Eriksen's matrix exponential
    (1987)."""
    dim = len(x)
    A = torch.zeros(2 * dim + 1, 2 * dim + 1, dtype=F64)
    A[:dim, :dim], A[:dim, dim], A[dim, :dim] = -B, x, x
    A[dim, dim + 1 :], A[dim + 1 :, dim], A[dim + 1 :, dim + 1 :] = -x, -x, B
    flow = torch.linalg.matrix_exp(t[:, None, None] * A)
    covariance = torch.linalg.inv(flow[:, :dim, :dim])
    return MultivariateNormal((covariance @ flow[:, :dim, dim, None])[..., 0], 0.5 * (covariance + covariance.mT))


def symmetric(dim: int) -> Tensor:
    B = torch.randn(dim, dim, generator=torch.Generator().manual_seed(2), dtype=F64)
    return 0.5 * (B + B.mT)


def geodesic_speed(x: Tensor, B: Tensor) -> Tensor:
    return (x @ x + 0.5 * (B * B).sum()).sqrt()


def test_chords_along_a_geodesic_of_normals_have_its_length() -> None:
    x, B = torch.tensor([0.5, -0.3, 0.8], dtype=F64), symmetric(3)

    def error(num: int) -> Tensor:
        path = eriksen_geodesic(x, B, torch.linspace(0, 1, num + 1, dtype=F64))
        p, q = (MultivariateNormal(path.loc[i], scale_tril=path.scale_tril[i]) for i in (slice(0, -1), slice(1, None)))
        return squared_chord(p, q, 1).sqrt().sum() - geodesic_speed(x, B)

    assert 3.9 < error(32) / error(64) < 4.1
    assert error(64).abs() < 1e-3


@pytest.mark.parametrize("index", [None, 0, 2])
def test_distance_of_normals_along_closed_geodesics(index: int | None) -> None:
    """Where the initial mean is zero or an eigenvector of the initial covariance change, seen from any affine frame."""
    B = symmetric(3)
    x = 0.9 * torch.linalg.eigh(B)[1][:, index] if index is not None else torch.zeros(3, dtype=F64)
    path = eriksen_geodesic(x, B, torch.tensor([0.0, 1.0], dtype=F64))
    frame = torch.linalg.qr(symmetric(3) + torch.eye(3, dtype=F64))[0] * torch.tensor([3.0, 0.5, 1.0], dtype=F64)
    p, q = (MultivariateNormal(frame @ path.loc[i] + 7, frame @ path.covariance_matrix[i] @ frame.mT) for i in (0, 1))
    torch.testing.assert_close(pb.rao_distance(p, q), geodesic_speed(x, B), rtol=1e-10, atol=0)


def test_one_dimensional_multivariate_normal_is_normal() -> None:
    m, s = torch.tensor([[0.2], [1.3]], dtype=F64), torch.tensor([[0.5], [2.0]], dtype=F64)
    p, q = (MultivariateNormal(m[i], scale_tril=s[i][None]) for i in (0, 1))
    torch.testing.assert_close(pb.rao_distance(p, q), pb.rao_distance(Normal(m[0], s[0]), Normal(m[1], s[1]))[0])


def test_distance_without_closed_form_says_so() -> None:
    with pytest.raises(NotImplementedError, match=r"equal means, equal covariances.*pullback\.distance"):
        pb.rao_distance(full_normal(Z[0]), full_normal(Z[1]))
    with pytest.raises(NotImplementedError, match="Keep df the same"):
        pb.rao_distance(student(Z[0]), student(Z[1]))
    with pytest.raises(NotImplementedError, match=r"Gamma.*rao_distance\.register"):
        pb.rao_distance(Gamma(*parameter(1, 2)), Gamma(*parameter(2, 2)))
