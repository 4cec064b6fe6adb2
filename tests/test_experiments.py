"""The experiments are the paper's: their settings, their decoders, and the files they write."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import pullback as pb
from pullback.experiments import toy


def test_codes_lie_on_the_noisy_circle():
    codes = toy.circle()
    radius = codes.norm(dim=-1)
    assert codes.shape == (500, 2)
    assert codes.dtype == torch.float64
    assert abs(radius.mean() - 3) < 0.02
    assert abs(radius.std() - 0.1) < 0.02
    assert codes.mean(0).norm() < 0.5


@pytest.mark.parametrize("name", toy.FAMILIES)
def test_decoders_are_the_papers(name):
    """One linear head for each parameter, drawn with the family's seed as torch draws it."""
    family = toy.FAMILIES[name]
    decoder, codes = toy.problem(name)
    torch.manual_seed(family.seed)
    layers = [torch.nn.Linear(2, size) for size in family.sizes]
    expected = family.likelihood(tuple(layer.double()(codes) for layer in layers))
    untouched = decoder.decoder(codes)
    torch.testing.assert_close(untouched.mean, expected.mean, rtol=0, atol=0)
    assert untouched.batch_shape == expected.batch_shape


@pytest.mark.parametrize("name", toy.FAMILIES)
def test_problem_leaves_the_random_state_alone(name):
    before = torch.get_rng_state()
    toy.problem(name)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("name", toy.FAMILIES)
def test_decoders_are_most_uncertain_away_from_the_codes(name):
    decoder, codes = toy.problem(name)
    away = torch.tensor([[0.0, 0.0], [6.0, 0.0], [0.0, -6.0]], dtype=torch.float64)
    slider = decoder.slider(torch.cat([codes, away]))
    assert slider[:-3].median() < 0.01
    assert (slider[-3:] > 0.99).all()
    uncertain = pb.most_uncertain(decoder.decoder(away))
    torch.testing.assert_close(decoder(away).mean, uncertain.mean, rtol=1e-6, atol=1e-6)


def test_metric_of_the_bernoulli_head_in_closed_form():
    """Without the reweighting M = Wᵀ diag(p (1 - p)) W."""
    decoder, codes = toy.problem("bernoulli")
    linear = decoder.decoder
    p = linear(codes).probs
    W = linear.heads[0].weight
    expected = torch.einsum("ki,nk,kj->nij", W, p * (1 - p), W)
    torch.testing.assert_close(pb.FisherRaoMetric(linear).tensor(codes), expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("extrapolation", ["recommended", None])
def test_all_extrapolations_wrap_the_same_decoder(extrapolation):
    decoder, codes = toy.problem("beta", extrapolation=extrapolation)
    plain = decoder if extrapolation is None else decoder.decoder
    reweighted, same = toy.problem("beta")
    torch.testing.assert_close(codes, same, rtol=0, atol=0)
    torch.testing.assert_close(plain(codes).mean, reweighted.decoder(codes).mean, rtol=0, atol=0)


def test_end_points_are_different_codes():
    codes = toy.circle()
    a, b = toy.pairs(codes)
    ends = torch.cat([a, b])
    assert a.shape == b.shape == (10, 2)
    assert (ends[:, None] == codes).all(-1).any(-1).all()
    assert len(ends.unique(dim=0)) == 20


def test_only_the_recommended_extrapolation_closes_the_void():
    """A Bernoulli decoder that fades to p = 1/2 is constant in the void, which some shortest paths then cross."""
    paths = {}
    for extrapolation in ("reweight", "recommended"):
        decoder, codes = toy.problem("bernoulli", extrapolation=extrapolation)
        paths[extrapolation] = toy.geodesics(pb.FisherRaoMetric(decoder), codes)
    assert paths["reweight"].leaves_support.any()
    assert not paths["recommended"].leaves_support.any()
    assert paths["recommended"].converged.all()


def test_unknown_family_is_refused():
    with pytest.raises(ValueError, match="normal, bernoulli, beta, dirichlet, exponential; there is no 'poisson'"):
        toy.problem("poisson")


def test_run_writes_the_figure(tmp_path):
    png, pdf = toy.run(tmp_path / "new", toy.Settings(resolution=10, num_paths=1, max_segments=16))
    assert png.read_bytes().startswith(b"\x89PNG")
    assert pdf.read_bytes().startswith(b"%PDF")


def test_command_line_lists_the_experiments():
    command = [sys.executable, "-m", "pullback", "reproduce", "--help"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "toy" in text
    assert "--out" in text
