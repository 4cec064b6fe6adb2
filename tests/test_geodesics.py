"""Shortest paths: closed-form geometries, invariances, starts, and awkward decoders."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Bernoulli, Normal

import pullback as pb
from helpers import Hidden
from problems import PROBLEMS, half_plane, simplex

DOUBLE = torch.float64
BY_NAME = {problem.name: problem for problem in PROBLEMS}
NORMAL, SPHERE, SIMPLEX = (BY_NAME[n] for n in ("Normal half-plane", "sphere S^2", "categorical simplex, 3 categories"))


def pairs(problem, n: int) -> tuple[Tensor, Tensor]:
    return problem.points(n), problem.points(n)


def trained(d: int, num_used: int, num_features: int = 40) -> pb.FisherRaoMetric:
    """A Bernoulli decoder as training leaves it: smooth, and with latent dimensions it hardly or never uses."""
    generator = torch.Generator().manual_seed(d)
    sizes = [(d, 32), (32, 32), (32, num_features)]
    first, *rest = (torch.randn(m, n, generator=generator, dtype=DOUBLE) / m**0.5 for m, n in sizes)
    first[num_used:] *= 1e-2
    first[(num_used + d) // 2 :] = 0

    def logits(z: Tensor) -> Tensor:
        h = 1.2 * z @ first
        for weights in rest:
            h = 1.2 * torch.tanh(h) @ weights
        return h

    return pb.FisherRaoMetric(lambda z: Bernoulli(logits=logits(z)))


# -- known answers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_closed_form_geometries(problem):
    a, b = pairs(problem, 20)
    path, exact = pb.geodesic(problem.metric, a, b), problem.distance(a, b)
    assert path.converged.all()
    torch.testing.assert_close(path.length, exact, rtol=1e-6, atol=0)
    torch.testing.assert_close(path.energy, path.length**2, rtol=1e-5, atol=0)
    assert ((path.length / exact - 1).abs() <= path.error + 1e-12).all()


def test_claims_hold_where_energies_fall_slowly_from_level_to_level():
    """Codes near the faces of a simplex, where cubic order is far off: the finer of two levels lacks more than 1/15."""
    problem = simplex(8)
    a, b = 3 * torch.randn(2, 77, 7, generator=torch.Generator().manual_seed(1), dtype=DOUBLE)
    path = pb.geodesic(problem.metric, a, b)
    assert path.converged.all()
    assert ((path.length / problem.distance(a, b) - 1).abs() <= 3 * path.error + 1e-9).all()


@pytest.mark.parametrize("chart", ["deviation", "its logarithm"])
def test_hyperbolic_plane_far_apart(chart):
    """Eight to nineteen units; the straight line is up to fifty times longer, and a long step would leave the
    half-plane."""
    problem = half_plane("far", Normal, 1.0, 2.0)
    mu = torch.tensor([[0.0, 5.0], [0.0, 6.0], [-3.0, 4.0], [2.6, -3.5], [0.0, 10.0]], dtype=DOUBLE)
    sigma = torch.tensor([[0.1, 0.1], [0.05, 0.3], [0.2, 0.01], [0.1, 0.04], [0.01, 0.01]], dtype=DOUBLE)
    a, b = torch.stack([mu, sigma], -1).unbind(1)
    exact = problem.distance(a, b)
    assert (exact > 8).all()
    metric = problem.metric
    if chart == "its logarithm":
        a, b = (torch.stack([z[:, 0], z[:, 1].log()], -1) for z in (a, b))
        metric = pb.FisherRaoMetric(lambda z: Normal(z[..., 0], z[..., 1].exp()))
    path = pb.geodesic(metric, a, b)
    assert path.converged.all()
    torch.testing.assert_close(path.length, exact, rtol=1e-6, atol=0)


@pytest.mark.parametrize("problem", [NORMAL, SIMPLEX, SPHERE], ids=str)
def test_curve_is_the_known_geodesic_at_constant_speed(problem):
    a, b = pairs(problem, 6)
    path, t = pb.geodesic(problem.metric, a, b), torch.linspace(0, 1, 41, dtype=DOUBLE)
    torch.testing.assert_close(path.curve(t), problem.path(a, b, t), rtol=0, atol=1e-3)
    speed = problem.metric.norm(path.curve(t), path.curve.velocity(t))
    torch.testing.assert_close(speed, path.length[:, None].expand(6, 41), rtol=5e-3, atol=0)
    origin = torch.zeros(1, dtype=DOUBLE)
    _, exact = torch.func.jvp(lambda t: problem.path(a, b, t), (origin,), (origin + 1,))
    off = (path.curve.velocity(0.0) - exact[:, 0]).norm(dim=-1) / exact[:, 0].norm(dim=-1)
    assert (off < 5e-3).all()
    measured = pb.length(problem.metric, path.curve, extrapolate=True)
    torch.testing.assert_close(measured, path.length, rtol=1e-5, atol=0)


# -- invariances -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("problem", [NORMAL, SIMPLEX, SPHERE], ids=str)
def test_distances_are_a_metric(problem):
    a, b, c = problem.points(5), problem.points(5), problem.points(5)
    ab, ba, bc, ac = (pb.geodesic(problem.metric, *p).length for p in ((a, b), (b, a), (b, c), (a, c)))
    torch.testing.assert_close(ab, ba, rtol=1e-7, atol=0)
    assert (ac <= (ab + bc) * (1 + 1e-9)).all()


def test_batch_equals_loop():
    metric = trained(4, 2)
    a, b = torch.randn(2, 6, 4, dtype=DOUBLE)
    path = pb.geodesic(metric, a, b)
    loop = [pb.geodesic(metric, *pair) for pair in zip(a, b, strict=True)]
    torch.testing.assert_close(path.length, torch.stack([one.length for one in loop]), rtol=1e-10, atol=0)
    assert path.num_steps.tolist() == [one.num_steps.item() for one in loop]
    assert path.num_segments.tolist() == [one.num_segments.item() for one in loop]


def test_lengths_do_not_depend_on_the_coordinates():
    """z = g(w) with a curved g: the same distributions, the same distances."""
    metric = trained(2, 2)
    turn = torch.tensor([[0.8, -0.6], [0.6, 0.8]], dtype=DOUBLE)
    w = torch.randn(2, 8, 2, dtype=DOUBLE)

    def g(w: Tensor) -> Tensor:
        return 0.5 * w @ turn + 0.2 * torch.sin(w) + 0.3

    curved = pb.FisherRaoMetric(lambda w: metric.decoder(g(w)))
    first, second = pb.geodesic(metric, *g(w)), pb.geodesic(curved, *w)
    torch.testing.assert_close(second.length, first.length, rtol=2e-6, atol=0)


def test_shapes_follow_the_pairs():
    a, b = SPHERE.points(3)[:, None], SPHERE.points(4)
    path = pb.geodesic(SPHERE.metric, a, b)
    assert path.length.shape == path.messages.shape == path.converged.shape == (3, 4)
    assert path.curve(torch.linspace(0, 1, 5, dtype=DOUBLE)).shape == (3, 4, 5, 2)
    torch.testing.assert_close(path.length, SPHERE.distance(a, b), rtol=1e-6, atol=0)
    single = pb.geodesic(SPHERE.metric, a[0, 0], b[0])
    assert single.length.shape == ()
    assert single.messages.item() == "converged"
    assert "1 of 1 converged" in repr(single)


def test_memory_bound_changes_nothing():
    metric, (a, b) = trained(8, 4), torch.randn(2, 12, 8, dtype=DOUBLE)
    whole, chunked = (pb.geodesic(metric, a, b, solver=pb.GaussNewton(chunk_bytes=n)) for n in (2**25, 2**16))
    torch.testing.assert_close(chunked.length, whole.length, rtol=1e-10, atol=0)
    assert chunked.num_calls > whole.num_calls


# -- starts ------------------------------------------------------------------------------------------------------------


def detour(a: Tensor, b: Tensor, n: int = 33) -> Tensor:
    t = torch.linspace(0, 1, n, dtype=DOUBLE)[:, None]
    return torch.lerp(a[:, None], b[:, None], t) + 0.3 * torch.sin(torch.pi * t)


@pytest.mark.parametrize("kind", ["tensor", "curve", "one for all", "graph", "list"])
def test_every_kind_of_start_leads_to_the_minimum(kind):
    a, b = pairs(SPHERE, 4)
    graph = pb.CodeGraph.fit(SPHERE.metric, SPHERE.points(60)) if kind == "graph" else None
    init = {
        "tensor": detour(a, b),
        "curve": pb.CubicSpline(detour(a, b)),
        "one for all": detour(a, b)[:1],
        "graph": graph,
        "list": [None, detour(a, b)],
    }[kind]
    path = pb.geodesic(SPHERE.metric, a, b, init=init)
    assert path.converged.all()
    torch.testing.assert_close(path.length, SPHERE.distance(a, b), rtol=1e-6, atol=0)


def test_several_starts_keep_the_lowest_valley():
    """Two ways round a hill: each start ends in its own valley, and the list in the lower one, whatever its order."""
    hill = pb.EuclideanMetric(
        lambda z: Normal(torch.cat([z, 3 * torch.exp(-4 * (z**2).sum(-1, keepdim=True))], -1), 1.0)
    )
    a = torch.tensor([[-1.5, 0.1], [-1.5, -0.1]], dtype=DOUBLE)
    t = torch.linspace(0, 1, 33, dtype=DOUBLE)[:, None]
    bend = torch.sin(torch.pi * t) * torch.tensor([0.0, 1.2], dtype=DOUBLE)
    above, below = (torch.lerp(a[:, None], -a[:, None] * torch.tensor([1.0, -1.0]), t) + s * bend for s in (1, -1))
    b = above[:, -1]
    lengths = torch.stack([pb.geodesic(hill, a, b, init=start).length for start in (above, below)])
    assert (lengths[0] - lengths[1]).abs().min() > 1e-2
    for inits in ([above, below], [below, above]):
        path = pb.geodesic(hill, a, b, init=inits)
        torch.testing.assert_close(path.length, lengths.amin(0), rtol=1e-9, atol=0)


# -- awkward decoders --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weight", [0.0, 1e-6])
def test_dimensions_the_decoder_ignores(weight):
    def decoder(z: Tensor) -> Normal:
        return Normal(torch.cat([SPHERE.metric.decoder(z[..., :2]).loc, weight * z[..., 2:]], -1), 1.0)

    a, b = (torch.cat([SPHERE.points(8), torch.randn(8, 3, dtype=DOUBLE)], -1) for _ in range(2))
    path = pb.geodesic(pb.EuclideanMetric(decoder), a, b)
    assert path.converged.all()
    torch.testing.assert_close(path.length, SPHERE.distance(a[:, :2], b[:, :2]), rtol=1e-6, atol=0)


@pytest.mark.parametrize("problem", [NORMAL, SIMPLEX], ids=str)
@pytest.mark.parametrize("kind", [Hidden, lambda m: pb.DivergenceMetric(m.decoder)], ids=["no embedding", "divergence"])
def test_metrics_that_know_only_tensor_and_ds2(problem, kind):
    a, b = pairs(problem, 3)
    path = pb.geodesic(kind(problem.metric), a, b)
    assert path.converged.all()
    torch.testing.assert_close(path.length, problem.distance(a, b), rtol=1e-6, atol=0)


def test_noisy_estimates_of_the_metric():
    a, b = pairs(NORMAL, 2)
    metric = pb.ScoreMetric(NORMAL.metric.decoder, num_samples=200)
    path = pb.geodesic(metric, a, b, solver=pb.GaussNewton(rtol=1e-3))
    assert path.converged.all()
    torch.testing.assert_close(path.length, NORMAL.distance(a, b), rtol=0.2, atol=0)


@pytest.mark.parametrize(("d", "num_used", "max_steps"), [(2, 2, 10), (8, 5, 20), (16, 8, 20), (32, 10, 20)])
def test_decoders_of_every_dimension_converge_in_few_steps(d, num_used, max_steps):
    metric, (a, b) = trained(d, num_used), torch.randn(2, 20, d, dtype=DOUBLE)
    path = pb.geodesic(metric, a, b, solver=pb.GaussNewton(rtol=1e-5))
    assert path.converged.all()
    assert path.num_steps.median() <= max_steps
    assert path.error.median() < 1e-5
    bounds = pb.certify(metric, path)
    assert (bounds.lower <= path.length).all()


def test_work_does_not_grow_with_the_batch_but_with_its_hardest_curve():
    metric, (a, b) = trained(2, 2), torch.randn(2, 40, 2, dtype=DOUBLE)
    alone = [pb.geodesic(metric, *pair) for pair in zip(a[:8], b[:8], strict=True)]
    few = pb.geodesic(metric, a[:8], b[:8])
    many = pb.geodesic(metric, a[:8].repeat(20, 1), b[:8].repeat(20, 1))
    assert many.num_calls == few.num_calls
    assert few.num_calls < 0.5 * sum(path.num_calls for path in alone)
    assert few.num_decoded == pytest.approx(sum(path.num_decoded for path in alone), rel=1e-2)
    assert many.num_decoded == pytest.approx(20 * few.num_decoded, rel=1e-2)


def wall(width: float) -> pb.EuclideanMetric:
    """A plane with a ridge of height 1 across it, seen only by points within about its width of the line z₀ = 0.3."""
    return pb.EuclideanMetric(
        lambda z: Normal(torch.cat([z, torch.exp(-(((z[..., :1] - 0.3) / width) ** 2))], -1), 1.0)
    )


@pytest.mark.parametrize("width", [0.1, 0.03, 0.01])
def test_no_segment_hops_over_a_wall_unnoticed(width):
    a, b = torch.tensor([[-1.0, 0.2], [-0.7, 0.3]], dtype=DOUBLE), torch.tensor([[1.0, 0.1], [0.9, -0.6]], dtype=DOUBLE)
    path = pb.geodesic(wall(width), a, b, solver=pb.GaussNewton(max_segments=256, max_steps=15))
    measured = pb.length(wall(width), path.curve, num_segments=20_000)
    agrees = (measured / path.length - 1).abs() <= path.error + 1e-5
    assert (agrees | ~path.converged).all()
    assert (path.length > 3).all()  # two units across and the ridge up and down


@pytest.mark.parametrize("size", [1e-6, 1e-4, 1e-3])
def test_near_duplicates_in_single_precision(size):
    """Chords are rounding there; the path is a straight line of the length that the metric gives."""
    net = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 200)).requires_grad_(False)
    metric = pb.FisherRaoMetric(lambda z: Bernoulli(logits=4 * net(z)))
    a = torch.randn(4, 2)
    b = a + size * torch.randn(4, 2)
    path = pb.geodesic(metric, a, b)
    net.double()
    exact = metric.norm(0.5 * (a + b).double(), (b - a).double())
    assert path.converged.all()
    assert ((path.length / exact - 1).abs() <= 3 * path.error).all()


def test_a_tolerance_that_was_missed_is_told():
    """Rectified units leave kinks: five digits are out of reach, and the status says so; asking for less is enough."""
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(2, 24), nn.ReLU(), nn.Linear(24, 60)).double().requires_grad_(False)
    metric = pb.FisherRaoMetric(lambda z: Bernoulli(logits=4 * net(z)))
    a, b = torch.randn(2, 3, 2, dtype=torch.float64)
    fine = pb.geodesic(metric, a, b, solver=pb.GaussNewton(rtol=1e-9, max_segments=64))
    missed = fine.error > 1e-9
    assert missed.any()
    assert (fine.status[missed & fine.converged] == pb.results.Status.ABOVE_RTOL).all()
    rough = pb.geodesic(metric, a, b, solver=pb.GaussNewton(rtol=0.05))
    assert rough.converged.all()
    assert (rough.status == pb.results.Status.CONVERGED).all()


def test_a_geodesic_is_a_curve():
    problem = PROBLEMS[3]
    a, b = problem.points(2), problem.points(2)
    path = pb.geodesic(problem.metric, a, b)
    torch.testing.assert_close(path(0.5), path.curve(0.5))
    torch.testing.assert_close(pb.length(problem.metric, path, extrapolate=True), path.length, rtol=1e-6, atol=0)
