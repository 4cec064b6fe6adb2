"""Pictures show what they say: pixels are where they belong, artists are returned, nothing else is touched."""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from torch.distributions import Normal

import pullback as pb
from pullback import plot


@pytest.fixture(autouse=True)
def _closed_figures():
    yield
    plt.close("all")


@pytest.fixture
def metric():
    return pb.FisherRaoMetric(lambda z: Normal(torch.sin(z), 1 + z.square()))


@pytest.fixture
def codes():
    return torch.rand(30, 2, dtype=torch.float64) * torch.tensor([4.0, 2.0])


def test_pixels_show_the_value_at_their_center(metric):
    drawn = plot.latent(metric, bounds=(0, 4, 0, 2), background=lambda z: z[:, 0] + 10 * z[:, 1], resolution=8)
    assert tuple(drawn.image.get_extent()) == (0, 4, 0, 2)
    assert drawn.image.origin == "lower"
    x, y = np.arange(8) / 2 + 0.25, np.arange(4) / 2 + 0.25
    np.testing.assert_allclose(drawn.image.get_array(), x[None, :] + 10 * y[:, None])


def test_log_volume_is_the_default_background(metric, codes):
    drawn = plot.latent(metric, codes, bounds=(1, 2, 1, 2), resolution=3)
    center = metric.log_volume(torch.tensor([1.5, 1.5], dtype=torch.float64))
    np.testing.assert_allclose(drawn.image.get_array()[1, 1], center.item())


def test_entropy_is_summed_over_features(metric):
    drawn = plot.latent(metric, bounds=(0, 1, 0, 1), background="entropy", resolution=1)
    expected = metric.decoder(torch.tensor([0.5, 0.5], dtype=torch.float64)).entropy().sum()
    np.testing.assert_allclose(drawn.image.get_array(), [[expected.item()]])


def test_support_shows_the_distance_to_the_data(metric, codes):
    support = pb.Support.fit(codes)
    known = pb.FisherRaoMetric(pb.Extrapolated(metric.decoder, support))
    drawn = plot.latent(known, bounds=(8, 9, 8, 9), background="support", resolution=1)
    expected = support.distance2(torch.tensor([8.5, 8.5], dtype=torch.float64))
    np.testing.assert_allclose(drawn.image.get_array(), [[expected.item()]])


def test_codes_are_scattered_and_framed(metric, codes):
    drawn = plot.latent(metric, codes, resolution=4)
    np.testing.assert_array_equal(drawn.codes.get_offsets(), codes.numpy())
    left, right, bottom, top = drawn.image.get_extent()
    assert left < codes[:, 0].min() < codes[:, 0].max() < right
    assert bottom < codes[:, 1].min() < codes[:, 1].max() < top


def test_a_singular_metric_is_left_out_of_the_scale(codes):
    flat = pb.FisherRaoMetric(lambda z: Normal(z[..., 0].clamp_min(1.0)[..., None] * torch.ones(2).double(), 1.0))
    drawn = plot.latent(flat, codes, resolution=6)
    assert np.isneginf(drawn.image.get_array().filled(-np.inf)).all()
    figure = drawn.image.figure
    figure.canvas.draw()


def test_draws_on_the_axes_it_is_given(metric, codes):
    figure, (left, right) = plt.subplots(1, 2)
    drawn = plot.latent(metric, codes, ax=right, resolution=4, colorbar=False)
    lines = plot.paths(torch.rand(3, 10, 2), ax=right, color="red")
    assert drawn.colorbar is None
    assert drawn.image.axes is right
    assert not left.has_data()
    assert plt.get_fignums() == [figure.number]
    assert [line.get_color() for line in lines] == ["red"] * 3
    assert right.get_aspect() == 1


def test_paths_are_drawn_one_line_each():
    points = torch.rand(2, 3, 10, 2)
    lines = plot.paths(points)
    assert len(lines) == 6
    np.testing.assert_array_equal(lines[4].get_xydata(), points[1, 1].numpy())


def test_curves_are_evaluated():
    curve = pb.CubicSpline(torch.rand(2, 5, 2, dtype=torch.float64))
    lines = plot.paths(curve, num_points=9)
    np.testing.assert_allclose(lines[1].get_xydata()[::2], curve.points[1].numpy(), atol=1e-14)


def test_geodesics_that_leave_the_support_are_dashed(metric):
    a, b = torch.tensor([[0.1, 0.1], [3.9, 0.1]], dtype=torch.float64)[:, None].expand(2, 2, 2)
    near = pb.Support.fit(torch.stack([a[0], a[0] + 0.01, a[0] - 0.01]), 2)
    path = pb.geodesic(metric, a, torch.stack([a[0] + 0.001, b[1]]), support=near)
    assert path.leaves_support.tolist() == [False, True]
    assert [line.get_linestyle() for line in plot.paths(path)] == ["-", "--"]
    assert [line.get_linestyle() for line in plot.paths(path, ls=":")] == [":", ":"]


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda m, c: plot.latent(m), r"codes= or bounds=\(left, right, bottom, top\)"),
        (lambda m, c: plot.latent(m, torch.zeros(5, 3, 2)), r"must have shape \(n, d\).*Use codes\.flatten"),
        (lambda m, c: plot.latent(m, c, background="speed"), "one of .'entropy', 'log_volume', 'support'."),
        (lambda m, c: plot.latent(m, c, background="support"), r"pullback.Extrapolated\(decoder, pullback.Support.fit"),
        (lambda m, c: plot.paths(torch.zeros(5, 3)), r"shape \(\*batch, n, 2\), not \(5, 3\)"),
        (lambda m, c: plot.paths("a line"), "real numbers; str could not be read as one"),
    ],
)
def test_errors_name_the_fix(metric, codes, call, sentence):
    with pytest.raises((TypeError, ValueError), match=sentence):
        call(metric, codes)


def test_more_dimensions_are_shown_by_a_plane():
    """Codes and paths are projected alike, onto directions that can be chosen; the used ones are those the decoder
    sees."""
    codes = torch.randn(50, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    scales = torch.tensor([0.1, 5.0, 0.1, 3.0], dtype=torch.float64)
    metric = pb.FisherRaoMetric(lambda z: Normal(z * scales, 1.0))
    for axes, expected in (("used", [1, 3]), ((2, 0), [2, 0])):
        figure, ax = plt.subplots()
        drawn = pb.plot.latent(metric, codes, axes=axes, resolution=8, background=lambda z: z[:, 1], ax=ax)
        assert drawn.codes is not None
        shown = torch.as_tensor(drawn.codes.get_offsets().data)
        flat = (codes - codes.mean(0))[:, expected]
        torch.testing.assert_close(shown.abs(), flat.abs(), rtol=1e-9, atol=1e-9)
        (line,) = pb.plot.paths(codes[:2], ax=ax)
        torch.testing.assert_close(torch.as_tensor(line.get_xydata()), shown[:2], rtol=1e-9, atol=1e-9)
        plt.close(figure)


def test_colors_are_those_of_the_codes():
    """A wall far from the codes saturates instead of taking the whole scale."""
    codes = torch.rand(100, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    metric = pb.FisherRaoMetric(lambda z: Normal(z, 1.0))
    image = pb.plot.latent(metric, codes, background=lambda z: torch.exp(8 * z[:, 0]), clip=0.0, resolution=40).image
    assert image.norm.vmax is not None
    assert image.norm.vmax < 1.5 * torch.exp(8 * codes[:, 0].max())
