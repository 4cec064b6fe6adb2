"""Laws of the interpolated metric."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.distributions import Normal

import pullback as pb
from problems import half_plane
from pullback._metrics.interpolated import GridMean, PointMean


def decoder(z: Tensor) -> Normal:
    wave = torch.cat([z.sin(), z.sum(-1, keepdim=True)], -1)
    return Normal(wave, (0.2 * z.sum(-1, keepdim=True)).exp())


EXACT = pb.FisherRaoMetric(decoder)


def box(d: int, resolution: int | tuple[int, ...], size: float = 2.0) -> pb.Grid:
    corner = torch.full((d,), size, dtype=torch.float64)
    return pb.Grid(-corner, corner, resolution)


def codes(n: int, d: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(n, d, dtype=torch.float64)


@pytest.mark.parametrize("d", [1, 2, 3])
@pytest.mark.parametrize("kind", ["grid", "codes"])
def test_is_a_metric(kind, d):
    points = box(d, {1: 40, 2: (20, 25), 3: 9}[d]) if kind == "grid" else codes(200, d)
    metric = pb.InterpolatedMetric.fit(EXACT, points)
    pb.testing.check_metric(metric, codes(9, d))


@pytest.mark.parametrize("points", [box(3, 6), codes(50, 3)], ids=["grid", "codes"])
def test_a_constant_metric_is_reproduced_everywhere(points):
    A = torch.randn(7, 3, dtype=torch.float64)
    exact = pb.FisherRaoMetric(lambda z: Normal(z @ A.mT, 1.0))
    metric = pb.InterpolatedMetric.fit(exact, points)
    z = torch.cat([codes(10, 3), codes(10, 3, 1e4)])
    torch.testing.assert_close(metric.tensor(z), (A.mT @ A).expand(20, 3, 3), rtol=1e-12, atol=1e-12)
    assert metric.error.max < 1e-12


@pytest.mark.parametrize("bandwidth", [0.15, 0.5, 3.0])
@pytest.mark.parametrize(("d", "counts"), [(1, (30,)), (2, (12, 17)), (3, (7, 9, 8))])
def test_windows_of_a_grid_give_the_sum_over_all_its_points(d, counts, bandwidth):
    grid = box(d, counts)
    fast, plain = (pb.InterpolatedMetric.fit(EXACT, p, bandwidth=bandwidth) for p in (grid, grid.points))
    assert isinstance(fast.mean, GridMean)
    assert isinstance(plain.mean, PointMean)
    z = codes(50, d, 1.5)
    torch.testing.assert_close(fast.tensor(z), plain.tensor(z), rtol=1e-11, atol=1e-11)


def test_far_away_it_is_the_metric_of_the_nearest_point():
    grid = box(2, 10)
    for points in (grid, grid.points):
        metric = pb.InterpolatedMetric.fit(EXACT, points)
        for distance in (1e2, 1e8, 1e100):
            z = distance * torch.tensor([[1.0, -1.0], [1.0, 1.0]], dtype=torch.float64)
            corner = 2.0 * z.sign()
            torch.testing.assert_close(metric.tensor(z), EXACT.tensor(corner), rtol=1e-9, atol=1e-9)
            assert torch.isfinite(metric.log_volume(z)).all()


def test_error_has_order_two_in_the_spacing():
    z = codes(100, 2, 0.5)
    errors = [pb.InterpolatedMetric.fit(EXACT, box(2, n + 1), held_out=z).error.mean for n in (32, 64)]
    assert errors[0] / errors[1] == pytest.approx(4, rel=0.1)
    assert errors[1] < 1e-2


def test_error_is_what_one_measures():
    z = codes(40, 2)
    metric = pb.InterpolatedMetric.fit(EXACT, box(2, 15), held_out=z)
    exact = EXACT.tensor(z)
    ratio = torch.linalg.matrix_norm(metric.tensor(z) - exact) / torch.linalg.matrix_norm(exact)
    assert metric.error.mean == pytest.approx(ratio.mean().item())
    assert metric.error.max == pytest.approx(ratio.max().item())
    assert metric.error.num_points == 40
    assert "40" in str(metric.error)
    default = pb.InterpolatedMetric.fit(EXACT, box(2, 15)).error
    assert 0 < default.median <= default.max


def test_a_step_notices_a_wall():
    wall = pb.FisherRaoMetric(lambda z: Normal(torch.cat([z, 5 * (4 * z[..., :1]).tanh()], -1), 1.0))
    metric = pb.InterpolatedMetric.fit(wall, box(2, 64))
    a, b = torch.tensor([[-1.0, 0.0], [1.0, 0.0]], dtype=torch.float64)
    v = b - a
    ends = 0.5 * (v @ (metric.tensor(a) + metric.tensor(b)) @ v)
    assert metric.ds2(a, b) > 2 * ends
    assert metric.ds2(a, b) == pytest.approx(metric.ds2(b, a).item(), rel=1e-12)


def test_geodesics_tend_to_the_exact_ones():
    problem = half_plane("Normal", Normal, 1.0, 2.0)
    a, b = problem.points(6), problem.points(6)
    low, high = torch.tensor([[-2.0, 0.2], [2.0, 3.0]], dtype=torch.float64)
    errors = []
    for n in (40, 80):
        metric = pb.InterpolatedMetric.fit(problem.metric, pb.Grid(low, high, n))
        path = pb.geodesic(metric, a, b)
        assert path.converged.all()
        errors.append((path.length / problem.distance(a, b) - 1).abs().max())
    assert errors[1] < 5e-3
    assert errors[1] < 0.4 * errors[0]


def test_exponential_inverts_the_logarithm():
    metric = pb.InterpolatedMetric.fit(EXACT, box(2, 30))
    a, b = codes(5, 2, 0.5), codes(5, 2, 0.5)
    v = pb.logmap(metric, a, b, rtol=1e-7)
    # the default is right to three times what it asks for
    assert (metric.norm(a, pb.logmap(metric, a, b) - v) <= 3e-3 * metric.norm(a, v)).all()
    torch.testing.assert_close(metric.norm(a, v), pb.distance(metric, a, b), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(pb.expmap(metric, a, v), b, rtol=1e-6, atol=1e-6)


def test_grid_around_codes():
    z = codes(100, 2) * torch.tensor([1.0, 10.0], dtype=torch.float64)
    grid = pb.Grid.around(z, resolution=(5, 7), margin=0.1)
    extent = z.amax(0) - z.amin(0)
    torch.testing.assert_close(grid.points.amin(0), z.amin(0) - 0.1 * extent)
    torch.testing.assert_close(grid.points.amax(0), z.amax(0) + 0.1 * extent)
    assert grid.points.shape == (35, 2)
    assert len(pb.Grid.around(z).points) == 4096


def test_dtype_follows_the_codes():
    metric = pb.InterpolatedMetric.fit(EXACT, box(2, 20))
    z = codes(5, 2)
    single = metric.tensor(z.float())
    assert single.dtype == torch.float32
    torch.testing.assert_close(single.double(), metric.tensor(z), rtol=1e-4, atol=1e-4)
    assert metric.tensor(z[:0]).shape == (0, 2, 2)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: pb.InterpolatedMetric.fit(EXACT, codes(10, 2), bandwidth=0.0), "bandwidth must be a positive number"),
        (lambda: pb.InterpolatedMetric.fit(EXACT, codes(10, 2)[0]), r"must have shape \(n, d\)"),
        (lambda: pb.InterpolatedMetric.fit(EXACT, codes(1, 2)), "at least 2 codes"),
        (lambda: pb.InterpolatedMetric.fit(EXACT, torch.zeros(10, 2).double()), "one and the same point"),
        (lambda: pb.Grid(torch.ones(2), torch.zeros(2), 5), "low below high"),
        (lambda: pb.Grid(torch.zeros(2), torch.ones(2), (5, 5, 5)), "resolution must be"),
        (lambda: pb.InterpolatedMetric.fit(EXACT, box(2, 5)).tensor(codes(3, 4)), "codes of 4"),
        (
            lambda: pb.InterpolatedMetric.fit(pb.FisherRaoMetric(lambda z: Normal(0 * z, z)), box(2, 5)),
            "not finite at|decoder",
        ),
    ],
)
def test_errors_name_the_fix(make, sentence):
    with pytest.raises(ValueError, match=sentence):
        make()
