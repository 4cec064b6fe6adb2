"""The error of a metric against the divergence it approximates: of third order, and no determinant of ours is
negative."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch.distributions import Normal

import pullback as pb
from pullback.data import motion
from pullback.experiments import metric_error, poses
from pullback.experiments.poses import Training
from pullback.experiments.recipe import SampledKL

TINY = replace(
    metric_error.PAPER,
    training=Training(num_steps=60, num_fine_steps=10, num_centers=60, every=40),
    resolution=12,
    num_codes=50,
    num_samples=10,
    num_directions=8,
    num_points=100,
    sign_rows=8,
)


@pytest.fixture
def _offline(monkeypatch):
    monkeypatch.delenv("PULLBACK_DATA", raising=False)
    monkeypatch.setattr(poses.data, "motion", partial(motion, download=False))


def linear(z):
    return Normal(z @ torch.tensor([[1.0, 2.0, 0.0], [0.0, 1.0, 3.0]], dtype=z.dtype), 1.0)


def bent(z):
    return Normal(torch.stack([z[..., 0], z[..., 1], (z**2).sum(-1)], -1), 1.0)


def test_linear_gaussian_decoders_have_no_error():
    z = torch.randn(6, 5, 2, dtype=torch.float64)
    errors = metric_error.measure(pb.FisherRaoMetric(linear), linear, z, 0.1, 8)
    assert errors.error.shape == (6, 5)
    assert errors.error.max() < 1e-14
    torch.testing.assert_close(errors.determinant, torch.full((6, 5), 5.0 * 10 - 2**2, dtype=torch.float64))


def test_error_of_the_exact_metric_is_of_third_order():
    z = torch.randn(20, 2, dtype=torch.float64)
    errors = [
        metric_error.measure(pb.FisherRaoMetric(bent), bent, z, eps, 8).error.mean().item() for eps in (0.02, 0.01)
    ]
    assert abs(np.log2(errors[0] / errors[1]) - 3) < 0.1


def test_differences_have_their_orders():
    for space in metric_error.SPACES:
        errors = metric_error.appendix_errors(space, replace(TINY, num_points=200))
        assert errors["closed form"]["mean"] < 1e-12
        assert errors["Hessian of the KL"]["mean"] < 1e-10
        one, two = (errors[f"one-sided (the paper's), step {eps:g}"]["mean"] for eps in (1e-2, 1e-3))
        assert abs(np.log10(one / two) - 1) < 0.1
        one, two = (errors[f"central, step {eps:g}"]["mean"] for eps in (1e-2, 1e-3))
        assert abs(np.log10(one / two) - 2) < 0.1


def test_grid_covers_the_codes():
    codes = torch.randn(100, 2, dtype=torch.float64) * torch.tensor([1.0, 3.0])
    grid = metric_error.grid_over(codes, 30)
    cell = grid[0, 1, 0] - grid[0, 0, 0]
    assert max(grid.shape[:2]) == 30
    torch.testing.assert_close(grid[1, 0, 1] - grid[0, 0, 1], cell)
    assert (grid.flatten(0, 1).amin(0) < codes.amin(0)).all()
    assert (grid.flatten(0, 1).amax(0) > codes.amax(0)).all()


@pytest.mark.parametrize("absolute", [False, True])
def test_sampled_divergences_agree_with_the_closed_form(absolute):
    """Between distributions far apart, where the noise is small; the absolute value keeps what is positive."""
    z = torch.tensor([[0.0, 0.0], [1.0, 2.0]], dtype=torch.float64)
    p, q = bent(z[:1]), bent(z[1:])
    sampled = SampledKL(40_000, absolute=absolute)(p, q)
    torch.testing.assert_close(sampled, pb.divergences.kl(p, q), rtol=0.05, atol=0.02)
    assert not absolute or (SampledKL(2, absolute=True)(p, p) >= 0).all()


@pytest.mark.usefixtures("_offline")
def test_run_finds_no_negative_determinant_on_our_routes(tmp_path):
    report = metric_error.run(tmp_path, TINY)
    for routes in report.numbers["units"].values():
        for route in (metric_error.OURS, metric_error.EXACT):
            assert routes[route]["negative"] == routes[route]["negative_on_codes"] == 0
        assert set(routes) == set(metric_error.TITLES)
    assert all(figure.read_bytes().startswith(b"\x89PNG") for figure in report.figures)
    first = report.write(tmp_path).read_text()
    assert metric_error.run(tmp_path, TINY).write(tmp_path).read_text() == first
