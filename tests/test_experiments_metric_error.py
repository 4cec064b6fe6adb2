"""The error of a metric against the divergence it approximates: of third order, and no determinant of ours is negative."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch.distributions import Normal

import pullback as pb
from pullback.data import motion
from pullback.experiments import _appendix, _poses, metric_error
from pullback.experiments._poses import Training

TINY = replace(
    metric_error.PAPER,
    training=Training(num_steps=250, num_fine_steps=50, num_centers=80, every=20),
    resolution=12,
    num_codes=50,
    num_samples=20,
    num_points=100,
)


@pytest.fixture
def _offline(monkeypatch):
    monkeypatch.delenv("PULLBACK_DATA", raising=False)
    monkeypatch.setattr(_poses.data, "motion", partial(motion, download=False))


def linear(z):
    return Normal(z @ torch.tensor([[1.0, 2.0, 0.0], [0.0, 1.0, 3.0]], dtype=z.dtype), 1.0)


def bent(z):
    return Normal(torch.stack([z[..., 0], z[..., 1], (z**2).sum(-1)], -1), 1.0)


def test_linear_gaussian_decoders_have_no_error():
    z = torch.randn(6, 5, 2, dtype=torch.float64)
    errors = metric_error._measure(pb.FisherRaoMetric(linear), linear, z, TINY)
    assert errors.error.shape == (6, 5)
    assert errors.error.max() < 1e-14
    torch.testing.assert_close(errors.determinant, torch.full((6, 5), 5.0 * 10 - 2**2, dtype=torch.float64))


def test_error_of_the_exact_metric_is_of_third_order():
    z = torch.randn(20, 2, dtype=torch.float64)
    errors = [
        metric_error._measure(pb.FisherRaoMetric(bent), bent, z, replace(TINY, eps=eps)).error.mean().item()
        for eps in (0.02, 0.01)
    ]
    assert abs(np.log2(errors[0] / errors[1]) - 3) < 0.1


def test_differences_have_their_orders():
    for space in _appendix.SPACES:
        errors = _appendix.errors(space, 200, seed=0)
        assert errors["closed form"]["mean"] < 1e-12
        assert errors["Hessian of the KL"]["mean"] < 1e-10
        one, two = (errors[f"one-sided (the paper's), step {eps:g}"]["mean"] for eps in (1e-2, 1e-3))
        assert abs(np.log10(one / two) - 1) < 0.1
        one, two = (errors[f"central, step {eps:g}"]["mean"] for eps in (1e-2, 1e-3))
        assert abs(np.log10(one / two) - 2) < 0.1


def test_grid_covers_the_codes():
    codes = torch.randn(100, 2, dtype=torch.float64) * torch.tensor([1.0, 3.0])
    grid = metric_error._grid(codes, 30)
    cell = grid[0, 1, 0] - grid[0, 0, 0]
    assert max(grid.shape[:2]) == 30
    torch.testing.assert_close(grid[1, 0, 1] - grid[0, 0, 1], cell)
    assert (grid.flatten(0, 1).amin(0) < codes.amin(0)).all()
    assert (grid.flatten(0, 1).amax(0) > codes.amax(0)).all()


@pytest.mark.usefixtures("_offline")
def test_run_finds_no_negative_determinant_on_our_routes(tmp_path):
    report = metric_error.run(tmp_path, TINY)
    routes = report.numbers["routes"]
    for route in (metric_error.OURS, metric_error.EXACT):
        assert routes[route]["negative"] == routes[route]["negative_on_data"] == 0
    assert routes[metric_error.SAMPLED]["negative"] > 0
    assert routes[metric_error.OURS]["mean_error_on_data"] < TINY.eps**2
    assert report.figures[0].read_bytes().startswith(b"\x89PNG")
    first = report.write(tmp_path).read_text()
    assert metric_error.run(tmp_path, TINY).write(tmp_path).read_text() == first
