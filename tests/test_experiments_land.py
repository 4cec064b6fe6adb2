"""Densities of codes: the Gaussian that LAND is compared with is the best one, and all are judged on the same codes."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.distributions import MultivariateNormal, Normal

import pullback as pb
from pullback.data import motion
from pullback.experiments import land, poses
from pullback.experiments.poses import Training

TINY = replace(
    land.PAPER,
    training=Training(num_steps=250, num_fine_steps=50, num_centers=80, every=20),
    num_codes=40,
    every_held_out=3,
    mixtures=(2,),
    num_points=64,
    max_iter=1,
    max_iter_exact=1,
    num_points_exact=48,
    grid=40,
    num_nodes=900,
    quadrature=60,
    check=40,
    resolution=6,
)


@pytest.fixture
def _offline(monkeypatch):
    monkeypatch.delenv("PULLBACK_DATA", raising=False)
    monkeypatch.setattr(poses.data, "motion", partial(motion, download=False))


@pytest.fixture
def codes():
    return torch.randn(300, 2, dtype=torch.float64) @ torch.tensor([[1.0, 0.5], [0.0, 0.3]], dtype=torch.float64)


def linear(z):
    return Normal(z @ torch.tensor([[2.0, 0.0, 1.0], [0.0, 3.0, 1.0]], dtype=z.dtype), 1.0)


def curved(z):
    return Normal(torch.stack([z[..., 0], z[..., 1], (z**2).sum(-1)], -1), 1.0)


def test_gaussian_of_a_flat_metric_is_the_ordinary_one(codes):
    """The best Gaussian has the mean and the covariance of the codes; its density differs by the constant volume."""
    metric = pb.FisherRaoMetric(linear)
    found = land.VolumeGaussian(metric, codes, 200)
    expected = MultivariateNormal(codes.mean(0), codes.T.cov(correction=0))
    torch.testing.assert_close(
        found.score_samples(codes) + metric.log_volume(codes), expected.log_prob(codes), rtol=0, atol=1e-4
    )


def test_gaussian_integrates_to_one_over_the_volume(codes):
    """By an independent sum, over points drawn at random."""
    metric = pb.FisherRaoMetric(curved)
    found = land.VolumeGaussian(metric, codes, 200)
    low, high = codes.amin(0) - 2, codes.amax(0) + 2
    z = low + (high - low) * torch.rand(100_000, 2, dtype=torch.float64)
    mass = (found.score_samples(z) + metric.log_volume(z)).exp().mean() * (high - low).prod()
    assert abs(mass - 1) < 0.02


def test_gaussian_is_a_maximum_of_the_likelihood(codes):
    found = land.VolumeGaussian(pb.FisherRaoMetric(curved), codes, 100)
    best = found.score_samples(codes).mean()
    for parameter in (found.mean, found.factor):
        for _ in range(4):
            step = 0.05 * torch.randn_like(parameter)
            with torch.no_grad():
                parameter += step
                assert found.score_samples(codes).mean() < best
                parameter -= step


def test_errors_allow_for_values_that_are_alike():
    """Ten copies of each value are no better than one of each."""
    values = torch.randn(40, dtype=torch.float64)
    copies, block = values.repeat_interleave(10), torch.arange(40).repeat_interleave(10)
    assert land.block_error(copies, block) == pytest.approx(float(values.std()) / 40**0.5)
    assert land.block_error(copies, block) > 2.5 * float(copies.std()) / 400**0.5


def test_shares_are_masses_of_the_smallest_regions():
    logp = torch.tensor([[0.1, 0.4], [0.3, 0.2]], dtype=torch.float64).log()
    torch.testing.assert_close(torch.from_numpy(land._shares(logp)), torch.tensor([[1.0, 0.4], [0.7, 0.9]]).double())


@pytest.mark.usefixtures("_offline")
def test_run_compares_densities_on_held_out_codes(tmp_path):
    report = land.run(tmp_path, TINY)
    scores = report.numbers["held_out"]
    lands = {"volume", "dz 1", "dz 2", "dz 1 exact"} | ({"paper"} & set(scores))
    assert set(scores) == {*lands, "gaussian over paper", "gaussian over volume", "gaussian 1", "gaussian 2"}
    for name in lands:
        rival = scores[f"gaussian {scores[name]['components']}"]
        assert scores[name]["gain"] == pytest.approx(scores[name]["dz"] - rival["dz"], abs=1e-9)
        assert scores[name]["standard_error"] > 0
    for name, row in report.numbers["same_base"].items():
        assert row["gain"] == pytest.approx(scores[name]["dz"] - scores[f"gaussian over {name}"]["dz"], abs=1e-9)
    assert report.figures[0].read_bytes().startswith(b"\x89PNG")
    assert report.write(tmp_path).exists()
