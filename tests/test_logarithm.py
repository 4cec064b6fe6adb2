"""The logarithm against closed forms and against the exponential map; matrices of distances."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.distributions import Bernoulli, Gamma, Normal

import pullback as pb
from helpers import Given, network
from problems import PROBLEMS
from pullback._geometry import logarithm as logarithms
from pullback._solvers.base import Status

DOUBLE = torch.float64
NORMAL, SIMPLEX, SPHERE, LINEAR = (PROBLEMS[i] for i in (3, 5, 7, 9))


def exact_logarithm(problem, a: Tensor, b: Tensor) -> Tensor:
    """The derivative at 0 of the known path."""
    origin = torch.zeros(1, dtype=DOUBLE)
    return torch.func.jvp(lambda t: problem.path(a, b, t), (origin,), (origin + 1,))[1][:, 0]


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_closed_forms(problem):
    a, b = problem.points(6), problem.points(6)
    log = pb.logarithm(problem.metric, a, b, rtol=1e-10)
    assert log.converged.all()
    torch.testing.assert_close(log.velocity, exact_logarithm(problem, a, b), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(log.distance, problem.distance(a, b), rtol=1e-10, atol=0)
    torch.testing.assert_close(problem.metric.norm(a, log.velocity), log.distance, rtol=1e-12, atol=0)
    assert (log.error <= 1e-9).all()


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_exponential_and_logarithm_are_inverse(problem):
    """Up to distance 2, both ways."""
    a, b = problem.points(4), problem.points(4)
    v = pb.logmap(problem.metric, a, b, rtol=1e-10)
    v = v * (2 / problem.metric.norm(a, v)).clamp_max(1)[:, None]
    end = pb.expmap(problem.metric, a, v, rtol=1e-10)
    torch.testing.assert_close(pb.logmap(problem.metric, a, end, rtol=1e-10), v, rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(
        pb.expmap(problem.metric, a, pb.logmap(problem.metric, a, end, rtol=1e-10), rtol=1e-10),
        end,
        rtol=1e-7,
        atol=1e-7,
    )


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_three_digits_by_default(problem):
    a, b = problem.points(6), problem.points(6)
    log = pb.logarithm(problem.metric, a, b)
    assert log.converged.all()
    exact = exact_logarithm(problem, a, b)
    off = (log.velocity - exact).norm(dim=-1) / exact.norm(dim=-1)
    assert (off <= 1e-3).all()
    assert (off <= 3 * log.error + 1e-9).all()


@pytest.mark.parametrize(
    "family",
    [
        lambda h: Bernoulli(logits=h),
        lambda h: Normal(h, torch.exp(0.5 * h.flip(-1))),
        lambda h: Gamma(torch.exp(h), 2.0),
    ],
    ids=["Euclidean", "hyperboloid", "natural and mean"],
)
def test_decoders(family):
    model = network(2, 12, 10, seed=3)
    metric = pb.FisherRaoMetric(lambda z: family(model(z)))
    a, b = torch.randn(2, 6, 2, dtype=DOUBLE)
    log = pb.logarithm(metric, a, b, rtol=1e-8)
    assert log.converged.all()
    torch.testing.assert_close(pb.expmap(metric, a, log.velocity, rtol=1e-10), b, rtol=1e-6, atol=1e-6)
    with torch.no_grad():
        torch.testing.assert_close(log.distance, pb.distance(metric, a, b), rtol=1e-5, atol=0)
    assert (log.error <= 1e-7).all()


def test_it_is_minus_half_the_gradient_of_the_squared_distance():
    a, b = NORMAL.points(3).requires_grad_(), NORMAL.points(3)
    (gradient,) = torch.autograd.grad(pb.squared_distance(NORMAL.metric, a, b).sum(), a)
    lowered = (NORMAL.metric.tensor(a.detach()) @ pb.logmap(NORMAL.metric, a.detach(), b, rtol=1e-8)[..., None])[..., 0]
    torch.testing.assert_close(-0.5 * gradient, lowered, rtol=1e-6, atol=1e-6)


def test_metric_without_an_embedding():
    a, b = NORMAL.points(2), NORMAL.points(2)
    log = pb.logarithm(pb.DivergenceMetric(NORMAL.metric.decoder), a, b)
    assert log.converged.all()
    torch.testing.assert_close(log.velocity, exact_logarithm(NORMAL, a, b), rtol=1e-6, atol=1e-6)


def test_ignored_dimensions_are_reached_too():
    """M is singular; the velocity is that of the seen coordinates, and straight in the direction nobody sees."""
    turn = torch.linalg.qr(torch.randn(3, 3, dtype=DOUBLE))[0]
    metric = pb.EuclideanMetric(lambda z: SPHERE.metric.decoder((z @ turn)[..., :2]))
    seen = SPHERE.points(4), SPHERE.points(4)
    a, b = (torch.cat([x, torch.randn(4, 1, dtype=DOUBLE)], -1) for x in seen)
    log = pb.logarithm(metric, a @ turn.T, b @ turn.T, rtol=1e-8)
    found = log.velocity @ turn
    torch.testing.assert_close(found[:, :2], exact_logarithm(SPHERE, *seen), rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(found[:, 2], (b - a)[:, 2], rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(log.distance, SPHERE.distance(*seen), rtol=1e-9, atol=0)


def test_codes_at_no_distance():
    a = SPHERE.points(3)
    log = pb.logarithm(SPHERE.metric, a, a)
    torch.testing.assert_close(log.velocity, torch.zeros_like(a), rtol=0, atol=0)
    assert (log.distance == 0).all()
    assert log.converged.all()


def test_near_codes_are_a_short_step():
    a = NORMAL.points(3)
    v = 1e-5 * torch.randn(3, 2, dtype=DOUBLE)
    log = pb.logarithm(NORMAL.metric, a, pb.expmap(NORMAL.metric, a, v, rtol=1e-10), rtol=1e-8)
    assert log.converged.all()
    torch.testing.assert_close(log.velocity, v, rtol=1e-6, atol=0)


def test_batches_broadcast_and_equal_loops():
    a, b = SPHERE.points(3)[:, None], SPHERE.points(2)
    together = pb.logmap(SPHERE.metric, a, b, rtol=1e-10)
    assert together.shape == (3, 2, 2)
    loop = torch.stack([pb.logmap(SPHERE.metric, x, y, rtol=1e-10) for x in a[:, 0] for y in b]).reshape(3, 2, 2)
    torch.testing.assert_close(together, loop, rtol=1e-9, atol=1e-9)


def test_paths_solved_one_at_a_time_for_lack_of_memory_are_the_same(monkeypatch):
    a, b = NORMAL.points(6), NORMAL.points(6)
    together = pb.logmap(NORMAL.metric, a, b, rtol=1e-10)
    monkeypatch.setattr(logarithms, "_MATRICES", 10**9)
    torch.testing.assert_close(pb.logmap(NORMAL.metric, a, b, rtol=1e-10), together, rtol=1e-9, atol=1e-9)


def test_single_precision():
    a, b = SIMPLEX.points(3).float(), SIMPLEX.points(3).float()
    log = pb.logmap(SIMPLEX.metric, a, b)
    assert log.dtype == torch.float32
    torch.testing.assert_close(log.double(), exact_logarithm(SIMPLEX, a.double(), b.double()), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("factor", [10.0, 50.0])
def test_single_precision_where_the_metric_sees_little_of_a_direction(factor: float):
    """Coordinates stretched until the metric is a hundredth or less there; the straight line takes nothing of it."""
    stretch = torch.tensor([1.0, factor], dtype=DOUBLE)
    metric = pb.EuclideanMetric(lambda w: SPHERE.metric.decoder(w / stretch.to(w)))
    a, b = SPHERE.points(6), SPHERE.points(6)
    log = pb.logarithm(metric, (a * stretch).float(), (b * stretch).float())
    assert log.converged.all()
    exact = exact_logarithm(SPHERE, a, b)
    off = SPHERE.metric.norm(a, log.velocity / stretch - exact) / SPHERE.metric.norm(a, exact)
    assert (off <= 1e-4).all()
    end = pb.expmap(metric, (a * stretch).float(), (exact * stretch).float()) / stretch
    assert ((end - b).norm(dim=-1) <= 1e-3 * (b - a).norm(dim=-1)).all()


def around_a_hill() -> tuple[pb.FisherRaoMetric, Tensor, Tensor]:
    """Ends on opposite sides of a steep hill: errors of velocities are some hundred times as large at the end."""

    def hill(z: Tensor) -> Normal:
        height = 0.5 * torch.nn.functional.softplus(20 * (1 - z.norm(dim=-1, keepdim=True)))
        return Normal(torch.cat([z, height], -1), 0.1)

    ends, noise = torch.randn(2, 24, 4, dtype=DOUBLE, generator=torch.Generator().manual_seed(0))
    a = 2 * ends / ends.norm(dim=-1, keepdim=True)
    return pb.FisherRaoMetric(hill), a, 0.3 * noise - a


def test_what_rounding_makes_velocities_miss_by_is_claimed():
    """In single precision, of geodesics that are followed in double precision."""
    metric, *ends = around_a_hill()
    a, b = (x.float() for x in ends)
    log = pb.logarithm(metric, a, b)
    gap = pb.expmap(metric, a.double(), log.velocity.double(), rtol=1e-9) - b
    miss = torch.maximum(gap.norm(dim=-1) / (b - a).norm(dim=-1), metric.norm(b.double(), gap) / log.distance)
    assert (miss <= log.miss).all()
    assert log.converged.all()
    off = replace(log, miss=torch.full_like(log.miss, 2e-3))
    assert not off.converged.any()
    assert "use double precision" in off.messages[0]


def test_velocities_along_walls_arrive():
    """Geodesics part fast there, and errors of the velocity are made so much smaller."""
    metric, a, b = around_a_hill()
    log, fine = pb.logarithm(metric, a, b), pb.logarithm(metric, a, b, rtol=1e-7)
    assert (metric.norm(a, log.velocity - fine.velocity) <= 3 * log.error * log.distance)[fine.converged].all()
    gap = pb.expmap(metric, a, log.velocity) - b
    miss = torch.maximum(gap.norm(dim=-1) / (b - a).norm(dim=-1), metric.norm(b, gap) / log.distance)
    assert (miss <= 1e-3).all()
    assert log.converged.all()


def test_velocities_are_tried_out():
    """What is reported is where the exponential map arrives; a velocity that leads elsewhere is no logarithm."""
    a, b = NORMAL.points(4), NORMAL.points(4)
    log = pb.logarithm(NORMAL.metric, a, b, rtol=1e-4, check=True)
    assert (log.miss < 1e-4).all()
    assert log.converged.all()
    off = replace(log, miss=torch.tensor([0.0, 2e-4, torch.inf, torch.nan], dtype=DOUBLE))
    assert off.converged.tolist() == [True, False, False, True]
    assert "misses b by 0.0002" in off.messages[1]
    estimated = pb.logarithm(NORMAL.metric, a, b)
    there = pb.exponential(NORMAL.metric, a, estimated.velocity, rtol=1e-12, atol=1e-12).end
    assert ((there - b).norm(dim=-1) / (b - a).norm(dim=-1) <= 3 * estimated.miss + 1e-10).all()


def test_a_miss_is_that_of_the_velocity_returned(monkeypatch):
    """Also after the last refinement: here all pairs are refined as often as can be."""
    net = network(2, 8, 12)
    metric = pb.FisherRaoMetric(lambda z: Bernoulli(logits=3 * net(z)))
    a, b = 2 * torch.randn(2, 4, 2, dtype=DOUBLE, generator=torch.Generator().manual_seed(0))
    try_out = logarithms._try_out
    monkeypatch.setattr(logarithms, "_try_out", lambda *of: (try_out(*of), of[2])[1])
    log = pb.logarithm(metric, a, b, check=True)
    gap = pb.expmap(metric, a, log.velocity, rtol=1e-4) - b
    miss = torch.maximum(gap.norm(dim=-1) / (b - a).norm(dim=-1), metric.norm(b, gap) / log.distance)
    torch.testing.assert_close(log.miss, miss, rtol=1e-6, atol=0)


def test_failed_pairs_have_a_status_and_spare_the_others():
    a, b = NORMAL.points(3), NORMAL.points(3)
    a[1] = torch.nan
    log = pb.logarithm(NORMAL.metric, a, b)
    assert log.converged.tolist() == [True, False, True]
    assert "an end point is NaN" in log.messages[1]
    assert log.messages[0] == "converged"
    with pytest.raises(
        RuntimeError, match=r"1 of 3 logarithms failed: pairs 1\. The first: an end point is NaN.*pullback.logarithm"
    ):
        pb.logmap(NORMAL.metric, a, b)


def test_unfinished_paths_are_solved_to_the_end():
    """A solver may leave a path far from the minimum; its velocity would be wrong, and so would its length."""
    a, b = SPHERE.points(2), SPHERE.points(2)
    t = torch.linspace(0, 1, 33, dtype=DOUBLE)
    bent = SPHERE.path(a, b, t) + 0.2 * torch.sin(torch.pi * t)[:, None]
    for status in (Status.CONVERGED, Status.MAX_STEPS):
        log = pb.logarithm(SPHERE.metric, a, b, solver=Given(bent, status), rtol=1e-9)
        assert list(log.messages) == ["converged"] * 2
        torch.testing.assert_close(log.velocity, exact_logarithm(SPHERE, a, b), rtol=1e-8, atol=1e-8)
        assert (log.distance < log.geodesic.length).all()


def test_refinement_reaches_the_tolerance():
    """One latitude on an ellipsoid so long that eight segments see little of it."""
    stretch = torch.tensor([1.0, 1.0, 6.0], dtype=DOUBLE)
    metric = pb.EuclideanMetric(lambda z: Normal(SPHERE.metric.decoder(z).loc * stretch, 1.0))
    a, b = SPHERE.points(4), SPHERE.points(4)
    start = torch.lerp(a[:, None], b[:, None], torch.linspace(0, 1, 9, dtype=DOUBLE)[:, None])
    coarse, fine = (pb.logarithm(metric, a, b, solver=Given(start), rtol=rtol) for rtol in (torch.inf, 1e-10))
    assert (coarse.error > 1e-8).any()
    assert (fine.error <= 1e-10).all()
    torch.testing.assert_close(pb.expmap(metric, a, fine.velocity, rtol=1e-10), b, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("place", [0.0, 0.1, 0.23, 0.37, 0.52, 0.7])
def test_a_velocity_that_is_not_known_says_so(place: float):
    """A wall so thin that no element sees it, though segments of the path do: where solving anew hops over it, the path
    around it keeps its own velocity."""

    def wall(z: Tensor) -> Tensor:
        return torch.cat([z, 1e3 * torch.exp(-1e5 * (z[..., :1] - place) ** 2 - z[..., 1:] ** 2)], -1)

    metric = pb.EuclideanMetric(lambda z: Normal(wall(z), 1.0))
    a, b = torch.tensor([[-1.0, 0.0]], dtype=DOUBLE), torch.tensor([[1.0, 0.0]], dtype=DOUBLE)
    angle = torch.linspace(0, torch.pi, 1025, dtype=DOUBLE)
    around = torch.stack([-torch.cos(angle), 8 * torch.sin(angle)], -1)[None]
    log = pb.logarithm(metric, a, b, solver=Given(around))
    assert not log.converged.any()
    assert "smooth the decoder's kinks" in log.messages[0]
    torch.testing.assert_close(log.distance, log.geodesic.length, rtol=0, atol=0)
    torch.testing.assert_close(metric.norm(a, log.velocity), log.distance, rtol=1e-12, atol=0)
    assert log.velocity[0, 1] > 100 * log.velocity[0, 0].abs()
