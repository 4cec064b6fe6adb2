"""The report on a model's uncertainty: it must tell a geometry that follows the data from one that does not, and say
why."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.distributions import Bernoulli, NegativeBinomial, Normal

import pullback as pb
from helpers import Linear, ring

F64 = torch.float64
CODES = ring()


@pytest.fixture(scope="module")
def support() -> pb.Support:
    return pb.Support.fit(CODES)


def decoder() -> Linear:
    return Linear("bernoulli").requires_grad_(False)


def test_recommended_geometry_is_calibrated(support: pb.Support):
    report = pb.uncertainty_report(pb.Extrapolated(decoder(), support), CODES, num_pairs=6)
    assert report.calibrated
    assert (report.num_paths, report.num_converged, report.num_leaving) == (6, 6, 0)
    assert report.log_volume_off > report.log_volume_on
    assert "good enough for geometry: 0 of 6" in str(report)
    assert not any("wrap the decoder" in sentence for sentence in report.advice)


def test_bare_decoder_is_not(support: pb.Support):
    report = pb.uncertainty_report(decoder(), CODES, support=support, num_pairs=10)
    assert not report.calibrated
    assert report.entropy_off < report.entropy_on
    assert report.entropy_rises < 0.5
    assert "not good enough for geometry" in str(report)
    assert "pullback.Extrapolated(decoder" in report.advice[0]
    assert "as certain off the data" in report.advice[1]


def test_entropy_that_rises_is_seen(support: pb.Support):
    """A decoder whose noise grows with the distance to the data knows where they end."""

    def knowing(z: Tensor) -> Normal:
        scale = 1 + support.distance2(z).clamp_min(0)[..., None]
        return Normal(10 * z, scale.expand_as(z))

    report = pb.uncertainty_report(knowing, CODES, support=support, num_pairs=1)
    assert report.entropy_rises > 0.99
    assert report.entropy_off > report.entropy_on
    assert not any("as certain" in sentence for sentence in report.advice)


def test_families_without_an_entropy_formula_are_sampled(support: pb.Support):
    """The estimate is that of a sum over the values of the family."""
    counts = lambda z: NegativeBinomial(4.0, logits=0.3 * z)  # noqa: E731
    report = pb.uncertainty_report(counts, CODES, support=support, num_pairs=1)
    p = counts(CODES[:, None])
    log_prob = p.log_prob(torch.arange(400, dtype=F64)[:, None])
    expected = -(log_prob.exp() * log_prob).sum(1).sum(-1).median()
    assert report.entropy_on == pytest.approx(expected.item(), rel=0.02)


def test_works_in_any_dimension():
    codes = torch.randn(300, 4, dtype=F64)
    weight = torch.randn(4, 12, dtype=F64)
    report = pb.uncertainty_report(lambda z: Bernoulli(logits=z @ weight), codes, num_pairs=4)
    assert report.num_converged == 4
    assert report.calibrated


def test_unused_dimensions_are_counted_and_advised():
    """Two of four dimensions do not reach the decoder; completing the metric does not hide that."""
    codes = torch.randn(200, 4, dtype=F64, generator=torch.Generator().manual_seed(0))
    bare = lambda z: Normal(4 * z[..., :2], 1.0)  # noqa: E731
    for decoder in (bare, pb.WithPrior(bare)):
        report = pb.uncertainty_report(decoder, codes, num_pairs=2, num_points=50)
        assert (report.num_dimensions, report.num_unused) == (4, 2)
        assert any("2 of 4 latent dimensions are unused" in s and "WithPrior" in s for s in report.advice)
        assert "2 are unused" in repr(report)
        assert "<b>" in report._repr_html_()


def test_collapsed_model_is_unfit(support: pb.Support):
    report = pb.uncertainty_report(lambda z: Normal(1e-3 * z, 1.0), CODES, support=support, num_pairs=3)
    assert report.collapsed
    assert "unfit for geometry" in str(report)
    assert "ignores its codes" in report.advice[0]
