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
from pullback.statistics import _normalization

TINY = replace(
    land.PAPER,
    training=Training(num_steps=300, num_fine_steps=30, num_centers=40, every=20),
    num_codes=40,
    num_points=16,
    max_iter=1,
    every_held_out=16,
    mixtures=(2,),
    num_exact=1,
    grid=20,
    num_nodes=400,
    quadrature=40,
    num_computed=6,
    resolution=16,
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
def test_experiment_from_end_to_end(tmp_path, monkeypatch):
    """At small size: every density is judged on held-out codes, integrated and drawn, and its parameters saved."""
    # four fits take most of the time: constants to fewer digits
    monkeypatch.setattr(_normalization, "_MAX_BATCHES", 1)
    report = land.run(tmp_path, TINY)
    file = report.write(tmp_path)
    assert file.stat().st_size > 0
    assert (tmp_path / "land.png").stat().st_size > 10_000
    numbers = report.numbers
    names = {"volume", "paper", "dz 1", "dz 2"}
    assert set(numbers["fits"]) == names
    assert names <= set(numbers["held_out"])
    for name, fit in numbers["fits"].items():
        means, precisions = torch.tensor(fit["means"]), torch.tensor(fit["precisions"])
        assert means.shape == (numbers["held_out"][name]["components"], 2)
        assert (torch.linalg.eigvalsh(precisions) > 0).all()
        assert sum(fit["weights"]) == pytest.approx(1)
    # a Gaussian against itself gains nothing
    assert numbers["held_out"]["gaussian 1"]["gain"] == 0
    # both are mean differences of log-densities of the same codes
    scores, same = numbers["held_out"], numbers["same_base"]["volume"]
    assert same["gain"] == pytest.approx(scores["volume"]["dz"] - scores["gaussian over volume"]["dz"])
