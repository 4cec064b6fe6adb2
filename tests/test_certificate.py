"""Certificates: brackets that hold the true distance, and the nature of the minimum."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Gamma, NegativeBinomial, StudentT

import pullback as pb
from problems import PROBLEMS

DOUBLE = torch.float64
NORMAL, SPHERE = (next(p for p in PROBLEMS if p.name == name) for name in ("Normal half-plane", "sphere S^2"))


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_bracket_holds_the_closed_form(problem):
    a, b = problem.points(8), problem.points(8)
    certificate = pb.certify(problem.metric, pb.geodesic(problem.metric, a, b))
    exact, rounding = problem.distance(a, b), 1e-14
    assert (certificate.lower <= exact + rounding).all()
    assert (exact <= certificate.upper + rounding).all()
    torch.testing.assert_close(certificate.upper, exact, rtol=1e-5, atol=0)
    assert (certificate.lower >= 0.5 * exact).all()
    assert certificate.strict.all()


@pytest.mark.parametrize("problem", PROBLEMS[:7], ids=str)
def test_bracket_closes_where_the_codes_are_the_family(problem):
    a, b = problem.points(4), problem.points(4)
    certificate = pb.certify(problem.metric, pb.geodesic(problem.metric, a, b))
    torch.testing.assert_close(certificate.lower, certificate.upper, rtol=1e-5, atol=0)


def test_a_geodesic_past_its_conjugate_point_is_no_minimum():
    """A great circle the long way round, which symmetry holds on its straight line: a saddle, as the Hessian shows."""
    metric, b = SPHERE.metric, torch.tensor([[3.0, 0.0], [0.8, 0.0]], dtype=DOUBLE)
    path = pb.geodesic(metric, -b, b)
    assert (path.length > torch.pi).tolist() == [True, False]
    assert pb.certify(metric, path).strict.tolist() == [False, True]


def test_no_strict_minimum_where_a_dimension_is_ignored():
    metric = pb.EuclideanMetric(lambda z: SPHERE.metric.decoder(z[..., :2]))
    a, b = (torch.cat([SPHERE.points(2), torch.zeros(2, 1, dtype=DOUBLE)], -1) for _ in range(2))
    assert not pb.certify(metric, pb.geodesic(metric, a, b)).strict.any()


def dip(z: Tensor) -> Tensor:
    """A parameter that is 3 at both end points of the next test, and less on the way."""
    return 3 - (z[..., :1] + 0.5) * (0.9 - z[..., :1])


def direction(z: Tensor) -> Tensor:
    return nn.functional.normalize(torch.cat([z, torch.ones_like(z)], -1), dim=-1)


@pytest.mark.parametrize(
    ("decoder", "known"),
    {
        "fixed κ": (lambda z: pb.VonMisesFisher(direction(z), 3 + 0 * z[..., 0]), True),
        "varying κ": (lambda z: pb.VonMisesFisher(direction(z), dip(z)[..., 0]), False),
        "fixed df": (lambda z: StudentT(3.0, z, 1.0), True),
        "varying df": (lambda z: StudentT(dip(z), z, 1.0), False),
        "fixed count": (lambda z: NegativeBinomial(3.0, logits=z), True),
        "varying count": (lambda z: NegativeBinomial(dip(z), logits=z), False),
        "no closed form": (lambda z: Gamma(torch.exp(z), torch.exp(z.flip(-1))), False),
    }.values(),
)
def test_lower_bound_only_where_the_closed_form_is_that_of_the_whole_family(decoder, known):
    a, b = torch.tensor([[-0.5, 0.3]], dtype=DOUBLE), torch.tensor([[0.9, -0.1]], dtype=DOUBLE)
    path = pb.geodesic(pb.FisherRaoMetric(decoder), a, b)
    certificate = pb.certify(pb.FisherRaoMetric(decoder), path)
    assert path.converged.all()
    assert certificate.upper > 0.1
    assert (certificate.lower > 0.1 * certificate.upper if known else certificate.lower == 0).all()


def test_nothing_is_known_of_a_pair_without_a_path():
    a, b = NORMAL.points(3), NORMAL.points(3)
    a[1] = torch.nan
    certificate = pb.certify(NORMAL.metric, pb.geodesic(NORMAL.metric, a, b))
    good = pb.certify(NORMAL.metric, pb.geodesic(NORMAL.metric, a[::2], b[::2]))
    assert (certificate.lower[1], certificate.upper[1]) == (0, torch.inf)
    assert certificate.strict.tolist() == [True, False, True]
    torch.testing.assert_close(certificate.upper[::2], good.upper, rtol=1e-9, atol=0)
    assert pb.certify(NORMAL.metric, pb.geodesic(NORMAL.metric, a[1], b[1])).upper == torch.inf


def test_certificates_are_sentences():
    a, b = NORMAL.points(4), NORMAL.points(4)
    one = pb.certify(NORMAL.metric, pb.geodesic(NORMAL.metric, a[0], b[0]))
    many = pb.certify(NORMAL.metric, pb.geodesic(NORMAL.metric, a, b))
    assert f"{one.lower.item():.6g} <= distance <= {one.upper.item():.6g}" in str(one)
    assert "a strict local minimum" in str(one)
    assert str(many).startswith("4 distances")
    assert "4 of the paths are strict local minima" in str(many)
