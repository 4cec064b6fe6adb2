"""Distances, and their derivatives by the envelope theorem."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Bernoulli, Gamma, Normal, Poisson

import pullback as pb
from helpers import Given
from problems import PROBLEMS
from pullback._geometry import distance as _distance
from pullback._solvers.base import Status

DOUBLE = torch.float64
NORMAL, SIMPLEX, SPHERE, LINEAR = (PROBLEMS[i] for i in (3, 5, 7, 9))
WEIGHTS = torch.tensor([[0.9, -0.4, 0.3], [0.2, 0.8, -1.1]], dtype=DOUBLE)
FAMILIES = {
    "Euclidean embedding": lambda h: Bernoulli(logits=h),
    "hyperboloid pair": lambda h: Normal(h, torch.exp(0.5 * h.flip(-1))),
    "natural and mean parameters": lambda h: Gamma(torch.exp(h), 2 + torch.sin(h.flip(-1))),
}


def live(problem, n: int) -> tuple[Tensor, Tensor]:
    return problem.points(n).requires_grad_(), problem.points(n).requires_grad_()


def gradients(value: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(value.sum(), inputs)


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_closed_form_distances_and_their_gradients(problem):
    a, b = live(problem, 5)
    found, exact = pb.distance(problem.metric, a, b), problem.distance(a, b)
    torch.testing.assert_close(found, exact, rtol=1e-9, atol=1e-12)
    for gradient, expected in zip(gradients(found, a, b), gradients(exact, a, b), strict=True):
        torch.testing.assert_close(gradient, expected, rtol=1e-7, atol=1e-7)
    with torch.no_grad():
        plain = pb.distance(problem.metric, a, b)
    torch.testing.assert_close(plain, exact, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("problem", [NORMAL, SIMPLEX], ids=str)
@pytest.mark.parametrize("function", [pb.distance, pb.squared_distance])
def test_gradcheck_in_the_end_points(problem, function):
    assert torch.autograd.gradcheck(lambda a, b: function(problem.metric, a, b), live(problem, 1))


@pytest.mark.parametrize("family", FAMILIES)
def test_gradcheck_in_the_decoder(family):
    a, b = torch.tensor([[-0.6, 0.3]], dtype=DOUBLE), torch.tensor([[0.7, 0.5]], dtype=DOUBLE)

    def distance(weights: Tensor, shift: Tensor) -> Tensor:
        return pb.distance(pb.FisherRaoMetric(lambda z: FAMILIES[family](torch.tanh(z @ weights) + shift)), a, b)

    parameters = WEIGHTS.clone().requires_grad_(), torch.zeros(3, dtype=DOUBLE, requires_grad=True)
    assert torch.autograd.gradcheck(distance, parameters, fast_mode=True)


def test_gradient_of_the_squared_distance_is_the_logarithm():
    """Exp_a(Log_a(b)) = b for the logarithm -½ M(a)⁻¹ ∂d²/∂a."""
    a, b = live(NORMAL, 3)
    (gradient,) = gradients(pb.squared_distance(NORMAL.metric, a, b), a)
    log = -0.5 * torch.linalg.solve(NORMAL.metric.tensor(a.detach()), gradient)
    torch.testing.assert_close(pb.expmap(NORMAL.metric, a.detach(), log), b.detach(), rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("family", FAMILIES)
def test_gradient_has_unit_length(family):
    """The eikonal equation, ∇dᵀ M⁻¹ ∇d = 1: away from a, the distance to it grows by one per unit of length."""
    metric = pb.FisherRaoMetric(lambda z: FAMILIES[family](2 * torch.tanh(z @ WEIGHTS)))
    a, b = torch.randn(2, 4, 2, dtype=DOUBLE)
    (gradient,) = gradients(pb.distance(metric, a.requires_grad_(), b), a)
    squares = (gradient * torch.linalg.solve(metric.tensor(a.detach()), gradient)).sum(-1)
    torch.testing.assert_close(squares, torch.ones_like(squares), rtol=1e-5, atol=0)


def test_parameters_of_a_module_get_gradients():
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 6)).double()
    metric = pb.FisherRaoMetric(lambda z: Bernoulli(logits=model(z)))
    a, b = torch.randn(2, 4, 2, dtype=DOUBLE)
    pb.distance(metric, a, b).sum().backward()
    first = next(model.parameters())
    origin, direction, values = first.detach().clone(), torch.randn_like(first), []
    for sign in (1, -1):
        first.data = origin + sign * 1e-5 * direction
        values.append(pb.distance(metric, a, b).sum().item())
    assert first.grad is not None
    assert (first.grad * direction).sum().item() == pytest.approx((values[0] - values[1]) / 2e-5, rel=1e-6)


def test_nothing_is_recorded_where_nobody_asks():
    a, b = NORMAL.points(2), NORMAL.points(2)
    assert not pb.distance(NORMAL.metric, a, b).requires_grad
    with torch.no_grad():
        assert not pb.distance(NORMAL.metric, a.requires_grad_(), b).requires_grad
    assert not pb.geodesic(NORMAL.metric, a, b).energy.requires_grad


def test_equal_codes_have_no_distance_and_no_gradient():
    a, b = live(SPHERE, 3)
    with torch.no_grad():
        b[1] = a[1]
    distance = pb.distance(SPHERE.metric, a, b)
    first, second = gradients(distance, a, b)
    assert distance[1] == 0
    assert (torch.stack([first, second])[:, 1] == 0).all()
    assert (first[[0, 2]].norm(dim=-1) > 0.1).all()


def test_near_codes_have_the_gradient_of_a_short_step():
    a = SPHERE.points(3).requires_grad_()
    v = 1e-6 * torch.randn(3, 2, dtype=DOUBLE)
    (gradient,) = gradients(pb.squared_distance(SPHERE.metric, a, a.detach() + v), a)
    expected = -2 * (SPHERE.metric.tensor(a.detach()) @ v[..., None])[..., 0]
    torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=0)


def test_batches_broadcast_and_equal_loops():
    a, b = live(NORMAL, 3)[0][:, None], live(NORMAL, 2)[1]
    together = pb.distance(NORMAL.metric, a, b)
    assert together.shape == (3, 2)
    loop = torch.stack([pb.distance(NORMAL.metric, x, y) for x in a[:, 0] for y in b]).reshape(3, 2)
    torch.testing.assert_close(together, loop, rtol=1e-11, atol=0)
    for first, second in zip(gradients(together, a, b), gradients(loop, a, b), strict=True):
        torch.testing.assert_close(first, second, rtol=1e-7, atol=1e-9)


def test_recomputing_in_chunks_gives_the_same_gradient(monkeypatch):
    weights = WEIGHTS.clone().requires_grad_()
    metric = pb.FisherRaoMetric(lambda z: Poisson(torch.exp(torch.tanh(z @ weights))))
    a, b = torch.randn(2, 4, 2, dtype=DOUBLE)
    whole = gradients(pb.distance(metric, a.requires_grad_(), b), a, weights)
    monkeypatch.setattr(_distance, "MAX_DECODED", 1)
    for gradient, expected in zip(gradients(pb.distance(metric, a, b), a, weights), whole, strict=True):
        torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-12)


def test_metrics_without_an_embedding_are_differentiable():
    a, b = live(NORMAL, 2)
    distance = pb.distance(pb.DivergenceMetric(NORMAL.metric.decoder), a, b)
    for gradient, expected in zip(gradients(distance, a, b), gradients(NORMAL.distance(a, b), a, b), strict=True):
        torch.testing.assert_close(gradient, expected, rtol=1e-6, atol=1e-6)


def test_ignored_dimensions_have_no_gradient():
    metric = pb.EuclideanMetric(lambda z: SPHERE.metric.decoder(z[..., :2]))
    a, b = (torch.cat([x.detach(), torch.randn(3, 2, dtype=DOUBLE)], -1).requires_grad_() for x in live(SPHERE, 3))
    (gradient,) = gradients(pb.distance(metric, a, b), a)
    (expected,) = gradients(SPHERE.distance(a[:, :2], b[:, :2]), a)
    torch.testing.assert_close(gradient, expected, rtol=1e-6, atol=1e-8)


def test_single_precision():
    a, b = live(SIMPLEX, 3)
    a, b = a.detach().float().requires_grad_(), b.detach().float()
    distance = pb.distance(SIMPLEX.metric, a, b)
    assert distance.dtype == torch.float32
    torch.testing.assert_close(distance, SIMPLEX.distance(a, b), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(*(gradients(d, a)[0] for d in (distance, SIMPLEX.distance(a, b))), rtol=1e-2, atol=1e-3)


def test_second_derivatives_are_refused():
    weights = WEIGHTS.clone().requires_grad_()
    metric = pb.FisherRaoMetric(lambda z: Poisson(torch.exp(z @ weights)))
    a, b = torch.randn(2, 2, 2, dtype=DOUBLE)
    distance = pb.distance(metric, a.requires_grad_(), b)
    (gradient,) = torch.autograd.grad(distance.sum(), a, create_graph=True)
    for variable in (a, weights):
        with pytest.raises(RuntimeError, match="first derivatives only"):
            torch.autograd.grad(gradient.sum(), variable, retain_graph=True)


def test_a_path_that_minimizing_would_leave_keeps_its_length():
    """A detour, as around a wall that coarse nodes would step over: its length is known, its gradient is not, and that
    is said."""
    a, b = live(LINEAR, 2)
    t = torch.linspace(0, 1, 65, dtype=DOUBLE)[:, None]
    detour = torch.lerp(a[:, None], b[:, None], t) + torch.sin(torch.pi * t) * torch.ones(3, dtype=DOUBLE)
    solver = Given(detour.detach())
    distance = pb.distance(LINEAR.metric, a.detach(), b.detach(), solver=solver)
    torch.testing.assert_close(distance, pb.length(LINEAR.metric, detour.detach()), rtol=1e-12, atol=0)
    with pytest.raises(pb.ConvergenceError, match="no gradient that can be trusted"):
        gradients(pb.distance(LINEAR.metric, a, b, solver=solver), a)


def test_failed_pairs_are_named():
    a, b = NORMAL.points(6).reshape(2, 3, 2), NORMAL.points(1)
    a[1, 2] = torch.nan
    with pytest.raises(RuntimeError, match=r"1 of 6 paths failed: pairs \(1, 2\).*an end point is NaN"):
        pb.distance(NORMAL.metric, a, b)
    line = torch.lerp(a[0, :, None], b[:, None], torch.linspace(0, 1, 9, dtype=DOUBLE)[:, None])
    with pytest.raises(RuntimeError, match=r"3 of 3 paths failed: pairs 0, 1, 2.*raise the solver's max_steps"):
        pb.distance(NORMAL.metric, a[0], b, solver=Given(line, Status.MAX_STEPS))


def test_gradients_of_rectified_decoders_are_right_or_refused():
    """The gradient of a distance is minus the covector of the unit velocity with which a path leaves, solved anew and
    finer. It is right to what is allowed, and to three times its own doubt, or there is a sentence; and not always
    refused."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 60)).double().requires_grad_(False)
    metric = pb.FisherRaoMetric(lambda z: Bernoulli(logits=4 * model(z)))
    a, b = torch.randn(2, 8, 2, dtype=DOUBLE)
    a.requires_grad_()
    known, found = {}, pb.distance(metric, a, b)
    for i in range(len(a)):
        with contextlib.suppress(pb.ConvergenceError):
            known[i] = torch.autograd.grad(found[i], a, retain_graph=True)[0][i]
    assert 2 <= len(known) < len(a)
    rows, covectors = list(known), torch.stack(list(known.values()))
    path = pb.geodesic(metric, a[rows], b[rows], solver=pb.GaussNewton(rtol=1e-6))
    M, v = metric.tensor(path.begin), path(1e-3) - path(0.0)
    off = covectors + (M @ v[..., None])[..., 0] / metric.norm(path.begin, v)[:, None]
    error = (off[:, None] @ torch.linalg.solve(M, off)[..., None])[:, 0, 0].sqrt()
    doubt = _distance.energies_and_doubts(metric, pb.geodesic(metric, a, b), a, b)[1][rows]
    assert (error < _distance._GRADIENT_RTOL).all()
    assert (error < 3 * doubt).all()


def test_gradients_that_do_not_settle_are_refused():
    """Where the way leads along a kink, the gradient jumps with the number of segments."""
    energy = torch.ones(2, dtype=DOUBLE, requires_grad=True)
    doubt = torch.tensor([0.0, 0.5], dtype=DOUBLE)
    known = _distance.differentiable_once(energy, doubt)
    assert torch.autograd.grad(known[0], energy, retain_graph=True)[0].tolist() == [1.0, 0.0]
    with pytest.raises(pb.ConvergenceError, match="kinks"):
        torch.autograd.grad(known.sum(), energy)
