"""Laws of Fréchet means."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.distributions import Categorical, Normal, Poisson

import pullback as pb
from problems import PROBLEMS, half_plane, simplex, sphere
from pullback._solvers.elements import ElementEnergy, Local
from pullback.statistics._frechet import _message
from pullback.statistics._paths import Paths
from pullback.statistics._stars import ElementStar

NORMAL = half_plane("Normal", Normal, 1.0, 2.0)


def moved(problem, matrix: Tensor, shift: Tensor) -> pb.FisherRaoMetric:
    """The problem's metric in the coordinates ``w`` with ``z = A w + b``."""
    decoder = problem.metric.decoder
    return pb.FisherRaoMetric(lambda w: decoder(w @ matrix.mT + shift))


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_points_symmetric_about_a_center_have_it_for_a_mean(problem):
    center = problem.points(1)
    points = 0.8 * center + 0.2 * problem.points(4)
    begin = center.expand_as(points)
    v = pb.logmap(problem.metric, begin, points, rtol=1e-10)
    # the default is right to three times what it asks for
    default = pb.logmap(problem.metric, begin, points)
    assert (problem.metric.norm(begin, default - v) <= 3e-3 * problem.metric.norm(begin, v)).all()
    points = torch.cat([points, pb.expmap(problem.metric, begin, -v, rtol=1e-10)])
    found = pb.statistics.frechet_mean(problem.metric, points)
    assert found.converged, found.message
    torch.testing.assert_close(found.mean, center[0], rtol=0, atol=1e-6)
    torch.testing.assert_close(found.distances, problem.distance(points, center), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found.variance, found.distances.square().mean())


def test_poisson_mean_is_that_of_roots():
    """Independent Poisson features are flat in 2√λ."""
    metric = pb.FisherRaoMetric(lambda z: Poisson(z.exp()))
    z, weights = torch.randn(7, 3).double(), torch.rand(7).double()
    found = pb.statistics.frechet_mean(metric, z, weights)
    expected = 2 * (weights @ (0.5 * z).exp() / weights.sum()).log()
    assert found.converged
    torch.testing.assert_close(found.mean, expected, rtol=0, atol=1e-6)


def test_categorical_mean_is_that_of_the_sphere():
    """Karcher's iteration on the sphere of √p, which knows no latent space."""
    problem = simplex(4)
    z, weights = problem.points(6), torch.rand(6).double()
    x = Categorical(logits=torch.nn.functional.pad(z, (0, 1))).probs.sqrt()
    mean = x[0]
    for _ in range(200):
        cosine = (x @ mean).clamp(-1, 1)
        tangents = (x - cosine[:, None] * mean) * (cosine.acos() / cosine.acos().sin().clamp_min(1e-300))[:, None]
        step = weights @ tangents / weights.sum()
        size = step.norm()
        mean = mean if size == 0 else size.cos() * mean + size.sin() * step / size
    found = pb.statistics.frechet_mean(problem.metric, z, weights)
    assert found.converged
    expected = 2 * (mean[:-1] / mean[-1]).log()
    torch.testing.assert_close(found.mean, expected, rtol=0, atol=1e-6)


def test_categorical_mean_of_two_is_the_middle_of_the_arc():
    problem = simplex(3)
    z = problem.points(2)
    x = Categorical(logits=torch.nn.functional.pad(z, (0, 1))).probs.sqrt()
    middle = x.sum(0)
    found = pb.statistics.frechet_mean(problem.metric, z)
    torch.testing.assert_close(found.mean, 2 * (middle[:-1] / middle[-1]).log(), rtol=0, atol=1e-6)
    torch.testing.assert_close(found.variance.sqrt(), 0.5 * problem.distance(z[:1], z[1:])[0], rtol=1e-6, atol=0)


@pytest.mark.parametrize("problem", [NORMAL, sphere(2), simplex(3)], ids=str)
def test_the_gradient_of_squared_distances_vanishes_at_the_mean(problem):
    z, weights = problem.points(8), torch.rand(8).double()
    found = pb.statistics.frechet_mean(problem.metric, z, weights)
    at = found.mean.clone().requires_grad_()
    total = weights @ pb.squared_distance(problem.metric, at.expand_as(z), z) / weights.sum()
    (gradient,) = torch.autograd.grad(total, at)
    torch.testing.assert_close(total.detach(), found.variance, rtol=1e-6, atol=0)
    assert gradient.abs().max() < 1e-5 * total.detach()


def test_integer_weights_are_repetitions_and_zero_is_absence():
    z = NORMAL.points(4)
    weights = torch.tensor([1.0, 2.0, 0.0, 3.0], dtype=torch.float64)
    weighted = pb.statistics.frechet_mean(NORMAL.metric, z, weights)
    repeated = pb.statistics.frechet_mean(NORMAL.metric, z.repeat_interleave(weights.long(), 0))
    torch.testing.assert_close(weighted.mean, repeated.mean, rtol=0, atol=1e-6)
    torch.testing.assert_close(weighted.variance, repeated.variance, rtol=1e-6, atol=0)
    assert weighted.distances[2].isnan()


def test_coordinates_do_not_matter():
    z = NORMAL.points(6)
    matrix = torch.tensor([[2.0, 0.3], [0.1, 0.5]], dtype=torch.float64)
    shift = torch.tensor([1.0, 0.2], dtype=torch.float64)
    here = pb.statistics.frechet_mean(NORMAL.metric, z)
    there = pb.statistics.frechet_mean(moved(NORMAL, matrix, shift), torch.linalg.solve(matrix, (z - shift).mT).mT)
    torch.testing.assert_close(matrix @ there.mean + shift, here.mean, rtol=0, atol=1e-6)
    torch.testing.assert_close(there.variance, here.variance, rtol=1e-6, atol=0)


def test_negative_curvature_and_a_wide_spread_do_not_overshoot():
    """Karcher's plain iteration has a step size of more than twice the right one here."""
    angle = 2 * torch.pi * torch.arange(5).double() / 5
    center = torch.tensor([0.0, 1.0], dtype=torch.float64)
    v = 5.0 * torch.stack([angle.cos(), angle.sin() / 2**0.5], -1)
    points = pb.expmap(NORMAL.metric, center.expand_as(v), v, rtol=1e-10)
    found = pb.statistics.frechet_mean(NORMAL.metric, points)
    assert found.converged, found.message
    torch.testing.assert_close(found.mean, center, rtol=0, atol=1e-6)
    assert found.num_steps < 30


def test_start_and_a_single_point():
    z = NORMAL.points(5)
    first, second = (pb.statistics.frechet_mean(NORMAL.metric, z, init_mean=start) for start in (z[0], z[3]))
    torch.testing.assert_close(first.mean, second.mean, rtol=0, atol=1e-6)
    alone = pb.statistics.frechet_mean(NORMAL.metric, z[:1])
    assert alone.converged
    assert alone.variance == 0
    assert torch.equal(alone.mean, z[0])


def test_points_that_no_path_reaches_are_named():
    """A point that decodes to NaN."""
    z = torch.linspace(0, 1, 5, dtype=torch.float64)[:, None].expand(-1, 2).clone()
    z[2] = 3.0
    metric = pb.FisherRaoMetric(lambda z: Normal(torch.where(z > 2, torch.nan, z**2 + z), 1.0, validate_args=False))
    found, rest = (pb.statistics.frechet_mean(metric, points) for points in (z, z[[0, 1, 3, 4]]))
    assert not found.converged
    assert "1 of 5 paths" in found.message
    torch.testing.assert_close(found.mean, rest.mean, rtol=0, atol=1e-6)


def test_too_few_steps_are_named():
    found = pb.statistics.frechet_mean(NORMAL.metric, NORMAL.points(5), max_steps=2)
    assert not found.converged
    assert "raise max_steps" in found.message
    assert found.num_steps == 2


@pytest.mark.parametrize(
    ("points", "weights", "sentence"),
    [
        (torch.zeros(0, 2), None, "at least one"),
        (torch.zeros(2), None, "shape"),
        (torch.rand(3, 2), torch.ones(2), "3 numbers"),
        (torch.rand(3, 2), torch.zeros(3), "not all zero"),
        (torch.rand(3, 2), -torch.ones(3), "not negative"),
        (torch.tensor([[0.0, 1.0], [0.0, torch.nan]]), None, "1 of 2 rows are NaN or infinite, first number 1"),
        (torch.full((4, 2), torch.inf), None, r"4 of 4 rows .* Drop them: codes\[torch.isfinite"),
    ],
)
def test_errors_name_the_fix(points, weights, sentence):
    with pytest.raises(ValueError, match=sentence):
        pb.statistics.frechet_mean(NORMAL.metric, points, weights)


@pytest.mark.parametrize(("unit", "kinks"), [(torch.nn.Tanh, False), (torch.nn.ReLU, True)])
def test_the_message_tells_kinks_from_what_is_not_resolved_yet(unit, kinks):
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Linear(3, 16), unit(), torch.nn.Linear(16, 20)).double()
    metric = pb.FisherRaoMetric(lambda z: Normal(4 * network(z), 1.0))
    found = pb.statistics.frechet_mean(metric, 2 * torch.randn(12, 3).double())
    assert found.converged, found.message
    assert ("kinks" in found.message) == kinks
    if not kinks:
        assert found.residual < 1e-6


@pytest.mark.parametrize(
    ("residual", "kinks", "converged"),
    [(1e-3, False, True), (8e-3, False, False), (8e-3, True, True), (2e-2, True, False)],
)
def test_a_mean_balances_as_well_as_its_logarithms_are_known(residual, kinks, converged):
    """Only at kinks, where logarithms jump, it may balance worse, and then that is what the message names."""
    known = {"residual": torch.tensor([residual]), "mostly_kinked": kinks, "centers": torch.zeros(1, 2)}
    star = {"star": SimpleNamespace(converged=torch.tensor([True])), "share": torch.ones(1), "labels": torch.zeros(1)}
    noise = {"noise": lambda: torch.tensor([3e-3])}
    message = _message(SimpleNamespace(**known, **star, **noise, num_steps=9), 1e-6, 50)
    assert message.startswith("converged") == converged
    assert f"{max(residual, 3e-3):.1g} standard deviations" in message
    assert converged or ("jumps at the decoder's kinks" in message) == kinks


def test_hessians_that_are_kept_change_the_way_and_not_the_mean(monkeypatch):
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Tanh(), torch.nn.Linear(16, 20)).double()
    metric = pb.FisherRaoMetric(pb.WithPrior(lambda z: Normal(4 * network(z), 1.0)))
    points = torch.randn(12, 4).double()
    each, expand, exact = ElementEnergy.expand_each, ElementStar.expand, []

    def counted(self, nodes: Tensor, times: Tensor, is_exact: bool) -> Local:
        exact[-1] += is_exact * times.numel()
        return each(self, nodes, times, is_exact)

    monkeypatch.setattr(ElementEnergy, "expand_each", counted)
    means = []
    for way in (expand, lambda self, exact=True, *, keep=False: expand(self, exact)):
        monkeypatch.setattr(ElementStar, "expand", way)
        exact.append(0)
        means.append(pb.statistics.frechet_mean(metric, points))
        assert means[-1].residual < 1e-6
    kept, renewed = means
    assert metric.norm(kept.mean[None], (renewed.mean - kept.mean)[None]) < 1e-5 * kept.variance.sqrt()
    assert exact[0] < exact[1]


def test_what_was_solved_too_coarsely_is_solved_as_well_as_was_asked_for():
    """For paths of two digits nobody waits for three."""
    metric = pb.FisherRaoMetric(lambda z: Normal(torch.cat([z, torch.sin(3 * z)], -1), 0.1))
    a, b = 2 * torch.randn(2, 6, 2, generator=torch.Generator().manual_seed(0)).double()
    two, three = (Paths(metric, rtol=rtol).geodesics(a, b, rough=0.0)[1][1] for rtol in (1e-2, 1e-3))
    assert two.num_segments.sum() < three.num_segments.sum()
    assert (two.error[two.converged] <= 1e-2).all()
