"""The conceptual figures are computed: closed forms of the hyperbolic space of isotropic Gaussians, and the order of
lengths."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.distributions import Normal

import pullback as pb
from pullback.experiments import curves

TINY = replace(curves.PAPER, num_codes=200, num_nodes=1600, resolution=15, widths=(0.15,))


def isotropic(mean: list[float], stddev: float) -> Normal:
    loc = torch.tensor([mean], dtype=torch.float64)
    return Normal(loc, torch.full_like(loc, stddev))


@pytest.mark.parametrize("mean", [[0.0, 0.0], [3.0, 1.0]])
@pytest.mark.parametrize("stddev", [0.2, 1.0, 5.0])
def test_shortest_curve_has_the_ends_the_length_and_constant_speed(mean, stddev):
    p, q = isotropic([0.5, -0.25], 0.7), isotropic(mean, stddev)
    curve = curves.hyperbolic(p, q, torch.linspace(0, 1, 401, dtype=torch.float64))
    torch.testing.assert_close(curve.loc[[0, -1]], torch.cat([p.loc, q.loc]), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(curve.scale[[0, -1]], torch.cat([p.scale, q.scale]), rtol=1e-12, atol=1e-12)
    pieces = curves.rao_length(Normal(curve.loc[:-1], curve.scale[:-1]), Normal(curve.loc[1:], curve.scale[1:]))
    torch.testing.assert_close(pieces, pieces.mean().expand_as(pieces), rtol=1e-6, atol=0)
    torch.testing.assert_close(pieces.sum(), curves.rao_length(p, q)[0], rtol=1e-9, atol=0)


def test_rao_length_is_the_metric_of_the_library():
    """The identity decoder of (mean, log stddev): its geodesics are those of the space itself."""

    def decoder(z):
        return Normal(z[..., :2], z[..., 2:].exp().expand_as(z[..., :2]))

    a = torch.tensor([0.0, 0.0, -0.5], dtype=torch.float64)
    b = torch.tensor([1.0, 0.5, 0.3], dtype=torch.float64)
    found = pb.geodesic(pb.FisherRaoMetric(decoder), a, b).length
    torch.testing.assert_close(found, curves.rao_length(decoder(a[None]), decoder(b[None]))[0], rtol=1e-4, atol=0)


@pytest.mark.parametrize("stddev", [0.2, 1.0])
def test_peak_of_the_shortest_curve(stddev):
    p, q = isotropic([0.0, 0.0], stddev), isotropic([1.5, 0.0], stddev)
    curve = curves.hyperbolic(p, q, torch.linspace(0, 1, 401, dtype=torch.float64))
    assert curve.scale.max() == pytest.approx(curves.peak(1.5, stddev), rel=1e-4)


def test_run(tmp_path):
    report = curves.run(tmp_path, TINY)
    hill, space = report.numbers["hill"], report.numbers["space"]
    assert hill["path"] < hill["line"]
    assert space["length_in_space"] < space["length_on_manifold"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in report.figures)
    assert len(report.figures) == 3
