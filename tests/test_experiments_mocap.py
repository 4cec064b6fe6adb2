"""Poses between poses: the measures are those of the product of spheres, pairs are opposite, paths keep to the
codes."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.nn.functional import normalize

import pullback as pb
from pullback.data import BONES26, motion
from pullback.experiments import mocap, poses
from pullback.experiments.mocap import angles, angular_steps, distance_to_nearest, unevenness
from pullback.experiments.poses import Training, from_opposite, heading, log_likelihood, stride_phase
from pullback.experiments.recipe import Recipe, SampledKL
from pullback.experiments.skeleton import projected

TINY = replace(
    mocap.PAPER,
    training=Training(num_steps=60, num_fine_steps=10, num_centers=60, every=20),
    recipe=Recipe(num_rows=12, weight="length", num_samples=5, max_steps=3),
    num_pairs=4,
    num_compared=1,
    num_candidates=5,
    num_frames=16,
    num_nodes=400,
    max_segments=16,
    every_reference=20,
    num_poses=4,
    num_samples=400,
    resolution=10,
)


@pytest.fixture(autouse=True)
def _offline(monkeypatch):
    """The stand-in: a generated walk."""
    monkeypatch.delenv("PULLBACK_DATA", raising=False)
    monkeypatch.setattr(poses.data, "motion", partial(motion, download=False))


def rotated(x: torch.Tensor, angle: float) -> torch.Tensor:
    c, s = math.cos(angle), math.sin(angle)
    return x @ torch.tensor([[c, -s, 0], [s, c, 0], [0, 0, 1]], dtype=x.dtype).T


def test_angles_of_rotations():
    x = normalize(torch.randn(5, 3, dtype=torch.float64) * torch.tensor([1, 1, 0]), dim=-1)
    for angle in (1e-7, 0.3, 2.0, math.pi):
        torch.testing.assert_close(angles(x, rotated(x, angle)), torch.full((5,), angle).double(), rtol=1e-7, atol=0)


def test_distance_to_nearest_is_the_minimum_of_product_distances():
    poses, recorded = (normalize(torch.randn(n, 4, 3, dtype=torch.float64), dim=-1) for n in (150, 30))
    expected = (poses[:, None] * recorded).sum(-1).acos().square().sum(-1).sqrt().amin(-1)
    torch.testing.assert_close(distance_to_nearest(poses.reshape(10, 15, 4, 3), recorded), expected.reshape(10, 15))
    assert (distance_to_nearest(recorded, recorded) == 0).all()


def test_motion_at_constant_speed_is_even():
    x = torch.tensor([[1.0, 0, 0], [0, 1, 0]], dtype=torch.float64)
    even = torch.stack([rotated(x, 0.1 * i) for i in range(8)])
    steps = angular_steps(even)
    torch.testing.assert_close(steps, torch.full((7,), 0.1, dtype=torch.float64))
    assert unevenness(steps) < 1e-10
    assert unevenness(angular_steps(torch.stack([rotated(x, 0.1 * i**2) for i in range(8)]))) > 0.5


def test_sampled_divergence_agrees_with_the_closed_form():
    loc = normalize(torch.randn(3, 3, dtype=torch.float64), dim=-1)
    p = pb.VonMisesFisher(loc, torch.tensor([1.0, 10.0, 300.0], dtype=torch.float64))
    q = pb.VonMisesFisher(rotated(loc, 0.2), torch.tensor([2.0, 5.0, 200.0], dtype=torch.float64))
    exact = pb.divergences.kl(p, q)
    torch.testing.assert_close(SampledKL(100_000)(p, q), exact, rtol=0.05, atol=0.01)
    torch.testing.assert_close(pb.divergences.monte_carlo_kl(100_000)(p, q), exact, rtol=0.03, atol=0)


def test_phases_of_the_generated_walk():
    """Strides at the pace of the generator, between turns about the vertical."""
    walk = motion(bones=BONES26, download=False)
    phase, amplitude = stride_phase(walk)
    turns = torch.remainder(phase.diff() + math.pi, 2 * math.pi) - math.pi
    strides = float(turns[200:-200].sum()) / (2 * math.pi) / (len(turns[200:-200]) / walk.fps)
    assert abs(abs(strides) - 0.93) < 0.05
    assert (amplitude[200:-200] > 0).all()
    facing = heading(walk)
    # upright walkers face where their shoulders' normal points
    assert from_opposite(facing[0], facing + math.pi).min() < 0.05


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    """One folder, so that the network is trained once."""
    return tmp_path_factory.mktemp("mocap")


def test_pairs_are_codes_in_opposite_phase(out):
    model = poses.trained(out, TINY.training, 0)
    phase = stride_phase(model.motion)[0][:: TINY.training.every]
    for a, b in zip(*mocap.opposite_pairs(model, TINY), strict=True):
        i, j = ((model.codes == z).all(-1).nonzero()[0, 0] for z in (a, b))
        assert from_opposite(phase[i], phase[j]) < 1.2


def test_the_last_fifth_of_the_recording_is_held_out(out):
    model = poses.trained(out, TINY.training, 0)
    frames = model.motion.directions[:: TINY.training.every]
    assert len(model.codes) == int(0.8 * len(frames))
    torch.testing.assert_close(torch.cat([model.codes, model.held_out]), model.vae.encode(frames))
    torch.testing.assert_close(model.poses, frames[: len(model.codes)])


def test_likelihood_on_the_sphere_is_that_of_the_library(out):
    model = poses.trained(out, TINY.training, 0)
    p = model.vae.decoder(model.codes[:20])
    torch.testing.assert_close(log_likelihood(p, model.poses[:20]), p.log_prob(model.poses[:20]).sum(-1))


def test_fading_decoder_keeps_directions_and_loses_concentration(out):
    model = poses.trained(out, TINY.training, 0)
    far = model.codes.mean(0) + 1e4
    faded, plain = model.reweighted(far), model.vae.decoder(far)
    torch.testing.assert_close(faded.loc, plain.loc)
    torch.testing.assert_close(faded.concentration, torch.full_like(plain.concentration, TINY.training.faded))


def test_poses_are_projected_with_their_lengths():
    """No bone looks longer than it is, and vertical ones look as long."""
    walk = motion(bones=BONES26, download=False)
    lines = torch.from_numpy(projected(walk.skeleton, walk.directions[:50]))
    seen = (lines[..., 1, :] - lines[..., 0, :]).norm(dim=-1)
    assert (seen <= walk.skeleton.lengths + 1e-9).all()
    up = torch.zeros(1, len(BONES26), 3, dtype=torch.float64)
    up[..., 1] = 1
    lines = torch.from_numpy(projected(walk.skeleton, up))
    torch.testing.assert_close((lines[..., 1, :] - lines[..., 0, :]).norm(dim=-1)[0], walk.skeleton.lengths)


def test_run_measures_all_routes(out):
    report = mocap.run(out, TINY)
    assert report.source.startswith("A stand-in")
    for group in mocap.GROUPS:
        routes = report.numbers[group]["routes"]
        assert routes["line"]["outside"] == pytest.approx(routes["paced"]["outside"], abs=0.02)
        assert set(mocap.MAIN) <= set(routes)
    assert report.numbers["kl"]["balanced_negative"] == 0
    for figure in report.figures:
        assert figure.read_bytes().startswith(b"\x89PNG")
        assert figure.with_suffix(".pdf").exists()
    assert all(file.exists() for file in report.files)
    page = (out / "mocap.html").read_text()
    assert not re.search(r"(src|href)\s*=|https?://|@import", page)
    scenes = json.loads(re.findall(r"const content = (.*);", page)[0])["scenes"]
    assert {len(scene[key]) for scene in scenes for key in ("poses", "samples", "route", "distances")} == {16}
    assert report.write(out).exists()


@pytest.mark.parametrize(
    ("lower", "pairs", "sampled", "verdict"),
    [
        (0.3, 45, 0.1, "holds"),
        (0.3, 45, -0.1, "holds weakly"),
        (0.1, 45, 0.1, "holds weakly"),
        (0.3, 20, 0.1, "does not hold"),
        (-0.1, 45, 0.1, "does not hold"),
    ],
)
def test_poses_are_plausible_only_if_nearer_in_most_pairs_and_by_samples(lower, pairs, sampled, verdict):
    comparison = {"lower": lower, "nearer_pairs": pairs, "sampled_lower": sampled}
    assert mocap._verdict(comparison, 50) == verdict
