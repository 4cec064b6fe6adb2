"""Random codes obey the laws of the volume and of the heat kernel: flat space, spheres, and agreement of two
samplers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.distributions import Normal

import pullback as pb
from problems import linear, sphere

DOUBLE = torch.float64
UNIT_BOX = torch.tensor([[-1.0, -1.0], [1.0, 1.0]], dtype=DOUBLE)


def source(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def uniform(x: torch.Tensor, low: float, high: float) -> None:
    """The first three moments are those of the uniform distribution, to five standard errors."""
    u = (x - low) / (high - low)
    for power in (1, 2, 3):
        spread = (1 / (2 * power + 1) - 1 / (power + 1) ** 2) ** 0.5
        assert abs((u**power).mean() - 1 / (power + 1)) < 5 * spread / len(u) ** 0.5


def on_sphere(z: torch.Tensor) -> torch.Tensor:
    square = (z**2).sum(-1, keepdim=True)
    return torch.cat([2 * z, square - 1], -1) / (1 + square)


def spherical_metric() -> pb.Metric:
    return sphere(2).metric


class TestUniform:
    @pytest.mark.parametrize("num_steps", [None, 300])
    def test_heights_on_the_sphere_are_uniform(self, num_steps):
        """Archimedes: the area of a zone of the sphere depends on its height alone. The disc |z| < 1 is the lower
        half."""
        z = pb.statistics.sample_uniform(
            spherical_metric(), 2000, bounds=1.5 * UNIT_BOX, num_steps=num_steps, random_state=source()
        )
        height = on_sphere(z)[..., 2]
        lower = height[z.norm(dim=-1) < 1]
        assert len(lower) > 1000
        uniform(lower, -1, 0)

    def test_is_lebesgue_in_flat_space(self):
        z = pb.statistics.sample_uniform(linear(2, 3).metric, 2000, bounds=UNIT_BOX, random_state=source())
        assert z.shape == (2000, 2)
        for x in z.T:
            uniform(x, -1, 1)

    @pytest.mark.parametrize("num_steps", [None, 200])
    def test_stays_within_support_and_bounds(self, num_steps):
        support = pb.Support.fit(torch.randn(200, 2, dtype=DOUBLE))
        bounds = torch.tensor([[-9.0, -9.0], [0.5, 9.0]], dtype=DOUBLE)
        z = pb.statistics.sample_uniform(
            spherical_metric(), 300, support=support, bounds=bounds, num_steps=num_steps, random_state=source()
        )
        assert support.contains(z).all()
        assert (z[:, 0] <= 0.5).all()

    def test_the_box_of_a_support_holds_all_of_it(self):
        support = pb.Support.fit(torch.randn(100, 2, dtype=DOUBLE))
        far = 20 * torch.rand(20_000, 2, dtype=DOUBLE) - 10
        inside = far[support.contains(far)]
        z = pb.statistics.sample_uniform(linear(2, 3).metric, 20_000, support=support, random_state=source())
        assert (z.amin(0) < inside.amin(0) + 0.3).all()
        assert (z.amax(0) > inside.amax(0) - 0.3).all()

    def test_chains_agree_with_rejection(self):
        metric = pb.FisherRaoMetric(lambda z: Normal(z, z.square().sum(-1, keepdim=True) + 0.3))
        exact = pb.statistics.sample_uniform(metric, 3000, bounds=UNIT_BOX, random_state=source())
        chains = pb.statistics.sample_uniform(metric, 3000, bounds=UNIT_BOX, num_steps=300, random_state=source(1))
        r, s = exact.norm(dim=-1), chains.norm(dim=-1)
        # five standard errors of the difference of two means
        assert abs(r.mean() - s.mean()) < 5 * (r.var() / 3000 + s.var() / 3000) ** 0.5

    def test_a_generator_makes_it_repeatable(self):
        first, second = (
            pb.statistics.sample_uniform(spherical_metric(), 9, bounds=UNIT_BOX, random_state=source()) for _ in "ab"
        )
        assert torch.equal(first, second)

    @pytest.mark.parametrize(
        ("options", "sentence"),
        [
            ({}, r"bounds=torch.stack\(\[low, high\]\)"),
            ({"bounds": UNIT_BOX.flip(0)}, "the lower below the upper"),
        ],
    )
    def test_errors_name_the_fix(self, options, sentence):
        with pytest.raises(ValueError, match=sentence):
            pb.statistics.sample_uniform(spherical_metric(), 3, **options)

    def test_rejection_gives_up_on_needles(self):
        needle = pb.FisherRaoMetric(lambda z: Normal(torch.sigmoid(1e7 * z), 1.0))
        box = torch.tensor([[-1.0, -1.0], [1.0, 1.0]], dtype=DOUBLE)
        with pytest.raises(RuntimeError, match="num_steps=500"):
            pb.statistics.sample_uniform(needle, 50, bounds=box, random_state=source())


class TestBrownianMotion:
    def test_mean_squared_displacement_in_flat_space(self):
        """E |z_t - z_0|² = d t, in the metric of the linear decoder, at all times of the path."""
        metric, z = linear(3, 7).metric, torch.ones(4000, 3, dtype=DOUBLE)
        path = pb.statistics.brownian_motion(metric, z, time=0.7, num_steps=7, random_state=source())
        assert path.shape == (4000, 8, 3)
        squares = metric.ds2(path[:, :1].expand_as(path), path).mean(0)
        expected = 3 * 0.1 * torch.arange(8, dtype=DOUBLE)
        torch.testing.assert_close(squares, expected, rtol=0.06, atol=1e-12)

    @pytest.mark.parametrize("exponential", [False, True])
    def test_heat_kernel_on_the_sphere(self, exponential):
        """Coordinates are eigenfunctions of the Laplacian with eigenvalue -2: E x_t = exp(-t) x_0."""
        start = torch.tensor([0.3, -0.2], dtype=DOUBLE).expand(3000, 2)
        path = pb.statistics.brownian_motion(
            spherical_metric(), start, time=0.5, num_steps=25, exponential=exponential, random_state=source()
        )
        mean = on_sphere(path[:, -1]).mean(0)
        expected = np.exp(-0.5) * on_sphere(start[0])
        assert (mean - expected).abs().max() < 4 * (1 / 3 / 3000) ** 0.5 + 0.01

    def test_forgets_its_start_on_a_compact_manifold(self):
        """The circle as a line: after long, the angle is uniform whatever the start."""
        circle = pb.EuclideanMetric(lambda z: Normal(torch.cat([z.cos(), z.sin()], -1), 1.0))
        end = pb.statistics.brownian_motion(
            circle, torch.zeros(2000, 1, dtype=DOUBLE), time=12.0, num_steps=12, random_state=source()
        )
        angle = end[:, -1, 0].remainder(2 * torch.pi)
        uniform(angle, 0, 2 * np.pi)

    def test_drift_is_half_the_laplacian_of_the_coordinates(self):
        """The mean of one short step, less its own noise, against ½ |M|^(-½) ∂_j(|M|^½ M^ij) by autodiff."""
        metric = pb.FisherRaoMetric(lambda z: Normal(z[..., :1] * z[..., 1:].cos(), 1 + z[..., 1:] ** 2))
        z = torch.tensor([0.4, 0.7], dtype=DOUBLE)

        def flux(x):
            tensor = metric.tensor(x)
            return tensor.det().sqrt() * tensor.inverse()

        jacobian = torch.autograd.functional.jacobian(flux, z)
        drift = 0.5 * torch.einsum("ijj->i", jacobian) / metric.tensor(z).det().sqrt()
        dt, n = 1e-4, 40_000
        noise = pb.statistics.brownian_motion(metric, z.expand(n, 2), time=dt, num_steps=1, random_state=source())
        xi = torch.linalg.solve_triangular(
            torch.linalg.cholesky(metric.tensor(z)).mT,
            torch.randn(n, 2, dtype=DOUBLE, generator=source())[..., None],
            upper=True,
        )[..., 0]
        bend = (noise[:, 1] - z - dt**0.5 * xi) / dt
        error = bend.std(0) / n**0.5
        assert error.norm() < 0.1 * drift.norm()
        assert ((bend.mean(0) - drift).abs() < 4 * error).all()

    def test_shapes_and_dtype_are_kept(self):
        z = torch.zeros(2, 3, 2)
        metric = pb.EuclideanMetric(lambda z: Normal(z, torch.ones_like(z)))
        path = pb.statistics.brownian_motion(metric, z, time=1.0, num_steps=4)
        assert path.shape == (2, 3, 5, 2)
        assert path.dtype == torch.float32
        assert torch.equal(path[..., 0, :], z)

    def test_a_singular_metric_is_refused(self):
        flat = pb.FisherRaoMetric(lambda z: Normal(z[..., :1], 1.0))
        with pytest.raises(RuntimeError, match="drop latent dimensions the decoder ignores"):
            pb.statistics.brownian_motion(flat, torch.zeros(3, 2, dtype=DOUBLE), time=1.0)

    def test_time_runs_forward(self):
        with pytest.raises(ValueError, match="at least 0"):
            pb.statistics.brownian_motion(spherical_metric(), torch.zeros(1, 2, dtype=DOUBLE), time=-1.0)

    def test_starts_are_finite(self):
        with pytest.raises(ValueError, match="1 of 2 rows are NaN or infinite, first number 1"):
            pb.statistics.brownian_motion(spherical_metric(), torch.tensor([[0.5, 0.5], [torch.nan, 0.0]]), time=1.0)
