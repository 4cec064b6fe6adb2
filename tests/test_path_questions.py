"""Contributions of features to a path, projection onto it, and the uncertainty of distances."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Bernoulli, Categorical, Independent, Normal, Poisson

import helpers
import pullback as pb
from problems import PROBLEMS

DOUBLE = torch.float64
NORMAL, SPHERE = PROBLEMS[3], PROBLEMS[7]


@pytest.fixture(scope="module")
def network() -> nn.Module:
    return helpers.network(2, 16, 12)


def ends(n: int = 3) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    a, b = torch.randn(2, n, 2, generator=generator, dtype=DOUBLE)
    return a, b


def mixed(network: nn.Module):
    def decoder(z: Tensor) -> pb.Product:
        h = network(z)
        return pb.Product(
            Normal(h[..., :3], 0.3 + h[..., 3:6].sigmoid()),
            Independent(Bernoulli(logits=h[..., 6:8]), 1),
            Poisson(h[..., 8:9].exp()),
            Categorical(logits=h[..., 9:12]),
        )

    return decoder


def test_contributions_sum_to_the_energy(network):
    support = pb.Support.fit(torch.randn(200, 2, dtype=DOUBLE))
    bare = mixed(network)
    decoders = [bare, pb.WithPrior(bare), pb.WithPrior(pb.Extrapolated(bare, support))]
    for decoder, extra in zip(decoders, [(), ("prior",), ("wall", "prior")], strict=True):
        metric = pb.FisherRaoMetric(decoder)
        path = pb.geodesic(metric, *ends(1))
        found = pb.contributions(metric, path)
        assert found.labels[7:] == extra
        torch.testing.assert_close(found.total, path.energy, rtol=1e-12, atol=0)
        curve = pb.contributions(metric, path.curve)
        expected = pb.energy(metric, path.curve, num_segments=256, extrapolate=True)
        torch.testing.assert_close(curve.total, expected, rtol=1e-10, atol=0)


def test_each_row_is_the_energy_of_that_feature_alone(network):
    metric = pb.FisherRaoMetric(mixed(network))
    curve = pb.geodesic(metric, *ends(2)).curve
    found = pb.contributions(metric, curve)
    alone = pb.FisherRaoMetric(lambda z: Poisson(network(z)[..., 8:9].exp()))
    expected = pb.energy(alone, curve, num_segments=256, extrapolate=True)
    torch.testing.assert_close(found.energy[:, 5], expected, rtol=1e-10, atol=0)
    prior = pb.WithPrior(mixed(network))
    by_channel = pb.energy(pb.FisherRaoMetric(prior.channel), curve, num_segments=256, extrapolate=True)
    row = pb.contributions(pb.FisherRaoMetric(prior), curve)
    torch.testing.assert_close(row.energy[:, row.labels.index("prior")], by_channel, rtol=1e-9, atol=0)


def test_labels_and_table(network):
    metric = pb.FisherRaoMetric(lambda z: Normal(z * torch.tensor([1.0, 3.0], dtype=DOUBLE), 1.0))
    line = torch.tensor([[0.0, 0.0], [1.0, 1.0]], dtype=DOUBLE)
    found = pb.contributions(metric, line, labels=["small", "large"])
    assert [row[0] for row in found.table()] == ["large", "small"]
    assert found.table(1)[0][2] == pytest.approx(0.9)
    assert "large" in str(found)
    assert "<td>large</td>" in found._repr_html_()
    with pytest.raises(ValueError, match="one label per feature"):
        pb.contributions(metric, line, labels=["one"])


@pytest.mark.parametrize("problem", [NORMAL, SPHERE], ids=str)
def test_points_on_a_path_return_their_time(problem):
    a, b = problem.points(2)
    path = pb.geodesic(problem.metric, a, b)
    t = torch.tensor([0.0, 0.21, 0.5, 0.83, 1.0], dtype=DOUBLE)
    found = pb.project(problem.metric, path, path.curve(t))
    torch.testing.assert_close(found.time, t, rtol=0, atol=1e-3)
    assert (found.distance < 1e-3 * path.length).all()
    assert found.converged.all()


def test_projection_is_the_foot_of_the_perpendicular():
    """The shortest path from a code to its projection meets the path at a right angle, unless that is an end."""
    a, b = SPHERE.points(2)
    path, codes = pb.geodesic(SPHERE.metric, a, b), SPHERE.points(6)
    found = pb.project(SPHERE.metric, path, codes)
    inside = (found.time > 1e-6) & (found.time < 1 - 1e-6)
    toward = pb.logmap(SPHERE.metric, found.point[inside], codes[inside])
    along = path.curve.velocity(found.time[inside])
    cosine = SPHERE.metric.inner(found.point[inside], toward, along) / (found.distance[inside] * path.length)
    assert inside.any()
    assert (cosine.abs() < 1e-2).all()
    others = pb.distance(SPHERE.metric, codes[:, None], path.curve(torch.linspace(0, 1, 33, dtype=DOUBLE)))
    assert (found.distance <= others.amin(1) + 1e-6).all()


def test_project_refuses_a_batch_of_paths():
    a, b = NORMAL.points(2), NORMAL.points(2)
    with pytest.raises(ValueError, match="Choose one"):
        pb.project(NORMAL.metric, pb.geodesic(NORMAL.metric, a, b), a)


def test_uncertainty_of_a_distance_in_flat_space():
    """d = |A(a - b)| with Gaussian ends far apart: the delta method is exact to first order."""
    A = torch.randn(5, 3, dtype=DOUBLE, generator=torch.Generator().manual_seed(2))
    metric = pb.FisherRaoMetric(lambda z: Normal(z @ A.mT, 1.0))
    a, b = torch.zeros(3, dtype=DOUBLE), torch.tensor([1.0, -2.0, 0.5], dtype=DOUBLE)
    variances = torch.tensor([0.1, 0.2, 0.3], dtype=DOUBLE) ** 2
    found = pb.statistics.distance_uncertainty(metric, a, b, variances, 2 * torch.diag(variances))
    g = (A @ (b - a)) @ A / (A @ (b - a)).norm()
    torch.testing.assert_close(found.distance, (A @ (b - a)).norm(), rtol=1e-6, atol=0)
    torch.testing.assert_close(found.std, (3 * variances * g**2).sum().sqrt(), rtol=1e-4, atol=0)


def test_delta_and_samples_agree_for_narrow_posteriors(network):
    metric = pb.FisherRaoMetric(lambda z: Bernoulli(logits=network(z)))
    a, b = ends(3)
    cov = 0.02**2 * torch.tensor([[1.0, 0.5], [0.5, 2.0]], dtype=DOUBLE)
    delta = pb.statistics.distance_uncertainty(metric, a, b, cov, cov)
    sampled = pb.statistics.distance_uncertainty(metric, a, b, cov, cov, method="samples", num_samples=400)
    torch.testing.assert_close(delta.std, sampled.std, rtol=0.2, atol=0)
    torch.testing.assert_close(delta.distance, sampled.distance, rtol=0.05, atol=0)
    with pytest.raises(ValueError, match="positive definite"):
        pb.statistics.distance_uncertainty(metric, a, b, -torch.eye(2, dtype=DOUBLE))
