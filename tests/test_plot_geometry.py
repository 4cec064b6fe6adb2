"""Pictures of the geometry show what they say, on surfaces where every point of them is known."""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from matplotlib.collections import PolyCollection
from sklearn.mixture import GaussianMixture
from torch.distributions import Normal

import pullback as pb
from problems import sphere
from pullback import plot

DOUBLE = torch.float64
MATRIX = torch.tensor([[2.0, 0.0], [0.5, 1.0]], dtype=DOUBLE)


@pytest.fixture(autouse=True)
def _closed_figures():
    yield
    plt.close("all")


@pytest.fixture
def linear():
    """Euclidean space in skewed coordinates."""
    return pb.FisherRaoMetric(lambda z: Normal(z @ MATRIX.mT, 1.0))


@pytest.fixture
def center():
    return torch.tensor([0.3, -0.2], dtype=DOUBLE)


def test_a_fan_has_equal_angles_and_lengths(linear, center):
    lines = plot.fan(linear, center, length=2.0, num_directions=8, num_points=5)
    ends = np.array([line.get_xydata()[-1] for line in lines]) - center.numpy()
    seen = ends @ MATRIX.numpy().T
    np.testing.assert_allclose(np.linalg.norm(seen, axis=1), 2.0, rtol=1e-6)
    np.testing.assert_allclose((seen * np.roll(seen, 1, 0)).sum(1), 4 * np.cos(np.pi / 4), rtol=1e-6)


def test_the_ends_of_a_fan_are_at_its_length_on_the_sphere(center):
    problem = sphere(2)
    lines = plot.fan(problem.metric, center, length=1.2, num_directions=6, num_points=3)
    ends = torch.tensor(np.array([line.get_xydata()[-1] for line in lines]))
    distance = problem.distance(center.expand_as(ends), ends)
    torch.testing.assert_close(distance, torch.full_like(distance, 1.2), rtol=1e-5, atol=0)


def test_an_exponential_grid_of_flat_space_is_straight(linear, center):
    lines = plot.exponential_grid(linear, center, length=1.0, num_lines=3, num_points=5)
    assert len(lines) == 6
    for line in lines:
        points = line.get_xydata() @ MATRIX.numpy().T
        np.testing.assert_allclose(np.diff(points, 2, axis=0), 0, atol=1e-6)
        np.testing.assert_allclose(np.linalg.norm(points[-1] - points[0]), 2.0, rtol=1e-6)
    middle = lines[1].get_xydata()[2]
    np.testing.assert_allclose(middle, center.numpy(), atol=1e-9)


def test_indicatrices_are_unit_circles(linear):
    points = torch.rand(5, 2, dtype=DOUBLE)
    drawn = plot.indicatrices(linear, points, radius=0.1)
    assert isinstance(drawn, PolyCollection)
    for z, path in zip(points, drawn.get_paths(), strict=True):
        steps = torch.tensor(path.vertices[:-1]) - z
        length = linear.norm(z.expand_as(steps).clone(), steps)
        torch.testing.assert_close(length, torch.full_like(length, 0.1), rtol=1e-9, atol=0)


def test_indicatrices_cover_the_bounds():
    metric = sphere(2).metric
    drawn = plot.indicatrices(metric, bounds=(-2, 2, -1, 1), resolution=8)
    centers = np.array([path.vertices[:-1].mean(0) for path in drawn.get_paths()])
    assert len(centers) == 32
    assert np.ptp(centers[:, 0]) == pytest.approx(3.5, abs=0.02)


class Standard:
    """A standard normal density with the habits of an estimator."""

    metric = None

    def score_samples(self, z):
        return -0.5 * (z**2).sum(-1) - np.log(2 * np.pi)


def test_density_contours_hold_their_mass():
    """The smallest region with mass m of a standard normal is the disc of radius √(-2 log(1 - m))."""
    drawn = plot.density(Standard(), bounds=(-5, 5, -5, 5), resolution=100, masses=(0.5, 0.9))
    radii = [np.linalg.norm(path.vertices, axis=1).mean() for path in drawn.get_paths()]
    np.testing.assert_allclose(radii, np.sqrt(-2 * np.log([0.1, 0.5])), rtol=0.02)


def test_density_masses_count_the_volume(linear):
    """A constant volume element changes no region; one that is larger on one side moves them."""

    class Weighted(Standard):
        metric = linear

    class Tilted(Standard):
        metric = pb.EuclideanMetric(lambda z: Normal(torch.stack([z[..., 0].exp(), z[..., 1]], -1), 1.0))

    levels = [
        plot.density(m, bounds=(-6, 6, -6, 6), resolution=60, masses=(0.5,), lebesgue=False).levels[0]
        for m in (Standard(), Weighted(), Tilted())
    ]
    assert levels[0] == pytest.approx(levels[1])
    assert levels[2] < levels[0] - 0.1


def test_density_is_drawn_as_samples_would_look(linear):
    """With a metric of volume exp(x), the density with respect to dz of a standard normal one is a normal around
    x = 1."""

    class Tilted(Standard):
        metric = pb.EuclideanMetric(lambda z: Normal(torch.stack([z[..., 0].exp(), z[..., 1]], -1), 1.0))

    drawn = plot.density(Tilted(), bounds=(-6, 6, -6, 6), resolution=80, masses=(0.5,))
    np.testing.assert_allclose(drawn.get_paths()[0].vertices.mean(0), [1, 0], atol=0.1)

    class Codes(Tilted):
        base_measure = "lebesgue"

    drawn = plot.density(Codes(), bounds=(-6, 6, -6, 6), resolution=80, masses=(0.5,))
    np.testing.assert_allclose(drawn.get_paths()[0].vertices.mean(0), [0, 0], atol=0.1)


def test_density_takes_scikit_learn_models():
    codes = torch.randn(50, 2, dtype=DOUBLE)
    drawn = plot.density(GaussianMixture(1).fit(codes.numpy()), codes, resolution=20)
    assert len(drawn.levels) == 5


def test_clusters_have_the_colors_of_their_labels():
    codes, labels = torch.rand(6, 2), torch.tensor([0, 1, 2, 1, 0, -1])
    drawn = plot.clusters(codes, labels, centers=torch.rand(3, 2))
    colors = drawn.codes.get_facecolors()
    np.testing.assert_array_equal(colors[0], colors[4])
    np.testing.assert_array_equal(colors[1], drawn.centers.get_facecolors()[1])
    assert not (colors[0] == colors[1]).all()
    np.testing.assert_allclose(colors[5, :3], 0.6)
    assert plot.clusters(codes, labels.numpy()).centers is None


@pytest.mark.parametrize("draw", ["fan", "exponential_grid", "indicatrices", "density", "clusters"])
def test_draws_on_the_axes_it_is_given(draw, linear, center):
    _, (left, right) = plt.subplots(1, 2)
    codes = torch.rand(5, 2, dtype=DOUBLE)
    {
        "fan": lambda: plot.fan(linear, center, length=1.0, num_directions=3, ax=right),
        "exponential_grid": lambda: plot.exponential_grid(linear, center, length=1.0, num_points=3, ax=right),
        "indicatrices": lambda: plot.indicatrices(linear, codes, ax=right),
        "density": lambda: plot.density(Standard(), codes, resolution=5, ax=right),
        "clusters": lambda: plot.clusters(codes, torch.zeros(5), ax=right),
    }[draw]()
    assert right.has_data()
    assert not left.has_data()
    assert len(plt.get_fignums()) == 1


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda m: plot.fan(m, torch.zeros(3, 2, dtype=DOUBLE), length=1.0), r"shape \(2,\)"),
        (lambda m: plot.density(Standard()), r"codes= or bounds=\(left, right, bottom, top\)"),
        (lambda m: plot.clusters(torch.zeros(4, 2), torch.zeros(3)), "one label a code"),
        (lambda m: plot.clusters(torch.zeros(4, 3), torch.zeros(4)), "choose two dimensions"),
        (
            lambda m: plot.fan(
                pb.FisherRaoMetric(lambda z: Normal(z[..., :1], 1.0)), torch.zeros(2).double(), length=1.0
            ),
            "singular at the center",
        ),
    ],
)
def test_errors_name_the_fix(linear, call, sentence):
    with pytest.raises(ValueError, match=sentence):
        call(linear)
