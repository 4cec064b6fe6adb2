"""Pairs without an answer, and wrong input: a status for each bad pair, a sentence for a bad call, never a silent wrong
length."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Bernoulli, NegativeBinomial, Normal

import pullback as pb
from problems import PROBLEMS

DOUBLE = torch.float64
NORMAL, SPHERE = (next(p for p in PROBLEMS if p.name == name) for name in ("Normal half-plane", "sphere S^2"))


def test_equal_codes():
    a, b = NORMAL.points(3), NORMAL.points(3)
    b[1] = a[1]
    path = pb.geodesic(NORMAL.metric, a, b)
    assert path.converged.all()
    assert path.length[1] == 0
    assert path.energy[1] == 0
    torch.testing.assert_close(path.length[::2], NORMAL.distance(a, b)[::2], rtol=1e-6, atol=0)


WEIGHTS = nn.Linear(2, 3, dtype=DOUBLE)
PLAIN = {
    "the codes themselves": lambda z: Normal(z, 1.0),
    "linear": lambda z: Normal(WEIGHTS(z), 1.0),
    "one coordinate": lambda z: Normal(z[..., :1], 1.0),
    "constant": lambda z: Normal(torch.zeros_like(z), 1.0),
    "a bias": lambda z: Normal(WEIGHTS.bias.expand(*z.shape[:-1], 3), 1.0),
    "a constant factor": lambda z: pb.Product(Normal(z, 1.0), Bernoulli(logits=torch.zeros_like(z))),
}


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("kind", [pb.EuclideanMetric, pb.FisherRaoMetric])
def test_decoders_without_curvature_and_without_effect(name, kind):
    """Paths are as long as the images of their ends are far apart, which is not at all if the decoder ignores the
    codes."""
    a, b = NORMAL.points(2)
    image = [PLAIN[name](z) for z in (a, b)]
    far = [p.components[0] if isinstance(p, pb.Product) else p for p in image]
    path = pb.geodesic(kind(PLAIN[name]), a, b)
    assert path.converged
    torch.testing.assert_close(path.length, (far[1].loc - far[0].loc).norm(), rtol=1e-6, atol=1e-9)


def cracked(z: Tensor) -> Normal:
    """The sphere's decoder, NaN in the slab 0.1 < z₀ < 0.2."""
    p = SPHERE.metric.decoder(z)
    slab = (z[..., :1] > 0.1) & (z[..., :1] < 0.2)
    return Normal(torch.where(slab, torch.nan, p.loc), p.scale)


def test_bad_pairs_get_a_status_and_leave_the_others_alone():
    """End points that are NaN, infinite, or decode to NaN, and a straight line that crosses a slab of NaN."""
    a = torch.tensor([[0.0, 0.4], [-0.4, 0.1], [0.3, 0.2], [-0.3, 0.2], [0.3, 0.3], [0.15, 0.0]], dtype=DOUBLE)
    b = torch.tensor([[-0.4, -0.3], [0.5, -0.1], [0.5, -0.4], [0.0, torch.nan], [torch.inf, 0.0], [0.4, 0.1]]).double()
    path = pb.geodesic(pb.EuclideanMetric(cracked), a, b)
    assert path.converged.tolist() == [True, False, True, False, False, False]
    assert "NaN or infinite values on the start path" in path.messages[1]
    assert all("an end point is NaN or infinite, or decodes to NaN" in sentence for sentence in path.messages[3:])
    alone = pb.geodesic(SPHERE.metric, a[[0, 2]], b[[0, 2]])
    torch.testing.assert_close(path.length[[0, 2]], alone.length, rtol=1e-12, atol=0)
    torch.testing.assert_close(path.curve.points[[0, 2]], alone.curve.points, rtol=1e-9, atol=1e-12)
    assert not torch.isfinite(path.length[~path.converged]).any()


def rooted(z: Tensor) -> Tensor:
    """Roots of the codes, with an infinite slope at 0; NaN beyond 2."""
    return torch.where(z > 2, torch.nan, z.sqrt())


REFUSING = {
    "no embedding": pb.FisherRaoMetric(lambda z: NegativeBinomial(1 + rooted(z), logits=z)),
    "a divergence": pb.DivergenceMetric(lambda z: Normal(rooted(z), 1.0)),
    "scores": pb.ScoreMetric(lambda z: Normal(rooted(z), 1.0), num_samples=20),
    "an embedding": pb.FisherRaoMetric(lambda z: Normal(rooted(z), 1.0)),
}


@pytest.mark.parametrize("name", REFUSING)
def test_metrics_that_refuse_a_code_leave_the_other_pairs_alone(name):
    """Codes on the edge of the domain, where derivatives are infinite, beyond it, and NaN."""
    a = torch.tensor([[0.5, 1.0], [0.5, 1.9], [0.0, 1.0], [torch.nan, 1.0]], dtype=DOUBLE)
    b = torch.tensor([[1.0, 0.3], [0.5, 2.2], [0.0, 1.0], [1.0, 1.0]], dtype=DOUBLE)
    path = pb.geodesic(REFUSING[name], a, b)
    assert path.converged.tolist() == [True, False, False, False]
    assert not torch.isfinite(path.length[1:]).any()
    torch.testing.assert_close(path.length[0], pb.geodesic(REFUSING[name], a[0], b[0]).length, rtol=1e-12, atol=0)
    with pytest.raises(ValueError, match=r"NaN|invalid"):
        REFUSING[name].tensor(b[1])


def test_a_step_to_where_the_decoder_overflows_is_rejected():
    """In a metric without an embedding, whose counts are exponentials; from a start that is far from any path."""
    decoder = pb.WithPrior(lambda z: NegativeBinomial(z[..., 1].exp(), logits=z[..., 0]), 1e-6 * torch.eye(3).double())
    a, b = torch.tensor([[-5.557, -2.7212, -2.7639], [-2.2068, 2.6251, 1.1125]], dtype=DOUBLE)
    bends = [[0.6, -4.9, -2.3], [0.5, -4.2, -1.8], [0.2, -3.5, -1.3], [-0.1, -2.8, -0.8], [-0.4, -1.9, -0.3]]
    start = torch.cat([a[None], torch.tensor([*bends, [-0.8, -0.8, 0.1], [-1.3, 0.7, 0.6]], dtype=DOUBLE), b[None]])
    path = pb.geodesic(pb.FisherRaoMetric(decoder), a, b, init=start)
    assert torch.isfinite(path.length)


def test_a_decoder_that_fails_next_to_the_path():
    """Great circles that bulge away from the slab are found as if it were not there; one that bulges into it is not
    undercut."""
    a = torch.tensor([[0.09, -0.6], [-0.3, -1.0], [0.21, -0.6]], dtype=DOUBLE)
    b = a * torch.tensor([1.0, -1.0], dtype=DOUBLE)
    path = pb.geodesic(pb.EuclideanMetric(cracked), a, b)
    assert path.converged[1:].all()
    torch.testing.assert_close(path.length[1:], SPHERE.distance(a, b)[1:], rtol=1e-6, atol=0)
    assert path.length[0] > SPHERE.distance(a, b)[0]
    assert not path.converged[0]
    assert "at the side of the path" in path.messages[0]
    assert path.error[0].isnan()


def holed(z: Tensor) -> Normal:
    """The plane without the unit disc, where it is NaN."""
    return Normal(torch.where(z.norm(dim=-1, keepdim=True) < 1, torch.nan, z), 1.0)


@pytest.mark.parametrize("start", ["arc", "lattice"])
def test_a_path_that_leans_on_a_hole_is_not_called_converged(start):
    """Its length depends on where the nodes stopped; the lines beside the hole are found, though one start leads around
    it."""
    metric = pb.EuclideanMetric(holed)
    a = torch.tensor([[-2.0, 0.1], [-3.0, 0.0], [-2.0, 1.5]], dtype=DOUBLE)
    b = torch.tensor([[2.0, 0.3], [3.0, 0.2], [2.0, 1.3]], dtype=DOUBLE)
    angle = torch.linspace(torch.pi, 0, 65, dtype=DOUBLE)
    arc = 1.5 * torch.stack([angle.cos(), angle.sin()], -1).repeat(3, 1, 1)
    arc[:, 0], arc[:, -1] = a, b
    box = torch.tensor([[-4.0, -2.0], [4.0, 2.0]], dtype=DOUBLE)
    init = arc if start == "arc" else pb.Lattice.fit(metric, box, num_nodes=2500)
    path = pb.geodesic(metric, a, b, init=init)
    assert path.converged.tolist() == [False, False, True]
    assert all("at the side of the path" in sentence for sentence in path.messages[:2])
    torch.testing.assert_close(path.length[2], (b - a)[2].norm(), rtol=1e-6, atol=0)


@pytest.mark.parametrize(("name", "options"), [("max_steps", {"max_steps": 1}), ("max_segments", {"max_segments": 8})])
def test_limits_that_are_reached_are_named(name, options):
    a, b = torch.tensor([[-2.0, -2.0]], dtype=DOUBLE), torch.tensor([[1.5, 2.0]], dtype=DOUBLE)
    path = pb.geodesic(SPHERE.metric, a, b, solver=pb.GaussNewton(**options))
    assert not path.converged.any()
    assert f"raise the solver's {name}" in path.messages[0]
    assert (path.length - SPHERE.distance(a, b)).abs() <= path.error * path.length * 2
    assert pb.geodesic(SPHERE.metric, a, b).converged.all()


def refuse(match: str, a: Tensor, b: Tensor, metric: pb.Metric = SPHERE.metric, **options):
    with pytest.raises((ValueError, TypeError), match=match):
        pb.geodesic(metric, a, b, **options)


def test_wrong_input_gives_a_sentence_that_names_the_fix():
    z = torch.zeros(2, 2, dtype=DOUBLE)
    linear = nn.Linear(2, 3).double()
    metric = pb.EuclideanMetric(lambda z: Normal(linear(z), 1.0))
    refuse("same model", z, torch.zeros(2, 3, dtype=DOUBLE))
    refuse(
        "does not take codes of 3 dimensions", torch.zeros(2, 3, dtype=DOUBLE), torch.ones(2, 3, dtype=DOUBLE), metric
    )
    assert pb.geodesic(metric, z.float(), z.float()).length.dtype == DOUBLE  # codes follow the decoder
    refuse(r"Move one: a\.to\(b\)", z, z.float())
    refuse(r"float64 on meta.*Move one", z, z.to("meta"))
    refuse("batch is empty", z[:0], z[:0])
    refuse("do not pair up", z, torch.zeros(3, 2, dtype=DOUBLE))
    refuse("must be .*n, d", z, z + 1, init=torch.zeros(5, 9, 2, dtype=DOUBLE))
    noisy = nn.Sequential(linear, nn.Dropout(0.5))
    refuse(r"model\.eval\(\)", z, z + 1, pb.EuclideanMetric(lambda z: Normal(noisy(z), 1.0)))
