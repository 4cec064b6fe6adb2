"""Curves in polynomial elements: their energy, its derivatives by another route, meshes, and decoders that hardly use a
dimension."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Bernoulli, Categorical, Independent, Normal, Poisson

import pullback as pb
from problems import PROBLEMS
from pullback._families.composite import independent
from pullback._families.location_scale import UnitNormal
from pullback._metrics.frame import plain_jet
from pullback._numerics.lobatto import DEGREE
from pullback._solvers.chords import ChordEnergy
from pullback._solvers.elements import ElementEnergy
from pullback._solvers.mesh import adapted, halved, moved, parameters, placed, uniform
from pullback._solvers.newton import Minimizer

DOUBLE = torch.float64
SPHERE = next(p for p in PROBLEMS if p.name == "sphere S^2")
FAMILIES = {
    "Bernoulli": lambda h: Bernoulli(logits=h),
    "independent Bernoulli": lambda h: Independent(Bernoulli(logits=h), 1),
    "Poisson": lambda h: Poisson(torch.exp(h)),
    "categorical": lambda h: Categorical(logits=h),
    "Normal": lambda h: Normal(h, torch.exp(0.5 * h.flip(-1))),
}


def network(d: int = 2, scale: Tensor | float = 1.0) -> nn.Module:
    torch.manual_seed(5)
    first = nn.Linear(d, 12, dtype=DOUBLE).requires_grad_(False)
    first.weight *= scale
    return nn.Sequential(first, nn.Tanh(), nn.Linear(12, 6, dtype=DOUBLE)).requires_grad_(False)


def decoded(family, d: int = 2) -> pb.FisherRaoMetric:
    model = network(d)
    return pb.FisherRaoMetric(lambda z: family(model(z)))


def elements_of(metric: pb.Metric, nodes: Tensor) -> ElementEnergy:
    return ElementEnergy(ChordEnergy.checked(metric, nodes))


def wave(edges: Tensor) -> Tensor:
    """Two curves that bend, at the nodes of elements."""
    t = parameters(edges)[..., None]
    turn = torch.tensor([[1.0, 2.0], [2.0, -1.0]], dtype=DOUBLE)[:, None]
    return torch.cat([torch.sin(turn[..., :1] * t), 0.5 * torch.cos(3 * t) + turn[..., 1:] * t], -1)


def test_energy_has_order_twice_the_degree():
    """Nothing but the image is a polynomial: the energy of a curve on a sphere, not a geodesic and at uneven speed."""

    def energy(num_elements: int) -> Tensor:
        edges = uniform(2, torch.ones(1, dtype=DOUBLE), num_elements)
        nodes = wave(edges)
        return elements_of(SPHERE.metric, nodes).energy(nodes, edges.diff(dim=1))

    exact = energy(32)
    coarse, fine = ((energy(k) - exact).abs() for k in (2, 4))
    assert (fine < 1e-12 * exact).all()
    assert (torch.log2(coarse / fine) > 2 * DEGREE - 4).all()  # on its way to 2 p


@pytest.mark.parametrize("name", FAMILIES)
def test_derivatives_of_the_energy(name):
    """Against torch's own derivatives of the energy: one coordinate a feature, many, and dual pairs."""
    edges = torch.tensor([[0.0, 0.3, 1.0], [0.0, 0.6, 1.0]], dtype=DOUBLE)
    nodes, times = wave(edges), edges.diff(dim=1)
    elements = elements_of(decoded(FAMILIES[name]), nodes)
    model = elements.expand(nodes, torch.tensor([True, True]), times)
    flexible = nodes[:1].clone().requires_grad_()
    (gradient,) = torch.autograd.grad(elements.energy(flexible, times[:1]).sum(), flexible)
    torch.testing.assert_close(model.energy, elements.energy(nodes, times), rtol=1e-12, atol=0)
    torch.testing.assert_close(model.gradient[0].reshape(-1, 2)[:-1], gradient[0, 1:-1], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(elements.momentum(nodes, times)[:1], -0.5 * gradient[:, 0], rtol=1e-9, atol=1e-9)

    def free(inner: Tensor) -> Tensor:
        whole = torch.cat([nodes[0, :1], inner.reshape(-1, 2), nodes[0, -1:]])
        return elements.energy(whole[None], times[:1])[0]

    expected = torch.autograd.functional.hessian(free, nodes[0, 1:-1].flatten())
    n = 2 * DEGREE
    blocks = model.diagonal[0] + model.curvature[0]
    top = torch.cat([blocks[0], model.upper[0, 0]], 1)
    hessian = torch.cat([top, torch.cat([model.upper[0, 0].T, blocks[1]], 1)])[: 2 * n - 2, : 2 * n - 2]
    torch.testing.assert_close(hessian, expected, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("name", FAMILIES)
def test_coordinates_replace_the_embedding(name):
    metric = decoded(FAMILIES[name])
    z, v = torch.randn(2, 5, 2, dtype=DOUBLE)
    w = torch.randn(3, 5, 2, dtype=DOUBLE)

    for origin in (None, z):
        expected = plain_jet(lambda x, o=origin: metric._maps(x, o), z, v, w)
        found = metric.jet_at(z, v, w, centered=origin is not None)
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def test_which_roots_are_separable():
    h = torch.randn(3, 4, dtype=DOUBLE)
    channel = Independent(UnitNormal(h), 1)
    both = pb.Product(Independent(Bernoulli(logits=h), 1), channel)
    for family, expected in (
        (Bernoulli(logits=h), True),
        (both, True),
        (Categorical(logits=h), True),
        (Normal(h, h.exp()), False),
    ):
        assert all(part.separable for part in independent(family)) is expected


def test_curves_move_between_meshes():
    """Codes are polynomials of the degree of an element, which other elements then hold exactly."""
    edges = torch.tensor([[0.0, 0.2, 0.7, 1.0]], dtype=DOUBLE)
    new = torch.tensor([[0.0, 0.5, 1.0]], dtype=DOUBLE)

    def polynomial(t: Tensor) -> Tensor:
        return torch.stack([t**DEGREE - t**3, 2 * t**5 + t], -1)

    there = moved(polynomial(parameters(new)), new, edges)
    torch.testing.assert_close(there, polynomial(parameters(edges)), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(halved(new), torch.tensor([[0.0, 0.25, 0.5, 0.75, 1.0]], dtype=DOUBLE))


def test_elements_go_where_a_curve_bends():
    """A bend a hundredth wide gets most of the elements, and these are then equally well resolved."""
    metric = pb.EuclideanMetric(lambda z: Normal(torch.cat([z, 0.1 * torch.tanh(100 * (z - 0.3))], -1), 1.0))
    path = torch.linspace(0, 1, 9, dtype=DOUBLE)[None, :, None]
    edges = uniform(1, path, 8)
    elements = elements_of(metric, path)
    for _ in range(6):
        shares = elements.tails(placed(path, edges))
        ((_, edges),) = adapted(edges, shares, 1e-4, torch.tensor(8))
    assert (elements.tails(placed(path, edges)) < 1e-3).all()
    middles = 0.5 * (edges[0, :-1] + edges[0, 1:])
    assert ((middles - 0.3).abs() < 0.05).sum() > 0.5 * len(middles)


def test_newton_in_elements_ends_at_the_geodesic():
    a, b = SPHERE.points(4), SPHERE.points(4)
    edges = uniform(4, a, 4)
    t = parameters(edges)[:1]
    nodes = SPHERE.path(a, b, t[0]) + 0.2 * torch.sin(torch.pi * t[..., None])
    elements = elements_of(SPHERE.metric, nodes)
    damping, rtol = torch.tensor([[1e-3], [1e-24]], dtype=DOUBLE).expand(2, 4)
    relaxed = Minimizer(60, always_exact=True).run(elements, nodes, damping, rtol, constants=edges.diff(dim=1))
    assert ((relaxed.remaining / relaxed.energy).sqrt() < 1e-9).all()
    torch.testing.assert_close(relaxed.energy.sqrt(), SPHERE.distance(a, b), rtol=1e-11, atol=0)
    torch.testing.assert_close(relaxed.nodes, SPHERE.path(a, b, t[0]), rtol=1e-7, atol=1e-7)


def test_dimensions_that_are_hardly_used():
    """M is near singular in one of three directions. How fast the path runs there the energy hardly knows, yet b lies
    there too."""
    model = network(3, torch.tensor([1.0, 1.0, 3e-3], dtype=DOUBLE))
    metric = pb.FisherRaoMetric(lambda z: Bernoulli(logits=3 * model(z)))
    a, b = torch.randn(2, 6, 3, dtype=DOUBLE)
    values = torch.linalg.eigvalsh(metric.tensor(a))
    assert (values[:, 0] < 1e-4 * values[:, -1]).all()
    log = pb.logarithm(metric, a, b, rtol=1e-9)
    assert log.converged.all()
    torch.testing.assert_close(pb.expmap(metric, a, log.velocity, rtol=1e-10), b, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(metric.norm(a, log.velocity), log.distance, rtol=1e-10, atol=0)


def test_kinks_are_not_passed_over_in_silence():
    """Where the decoder has kinks geodesics break, and elements do not resolve them; what is called converged leads to
    b."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 20)).double().requires_grad_(False)
    metric = pb.FisherRaoMetric(lambda z: Bernoulli(logits=2 * model(z)))
    a, b = 1.5 * torch.randn(2, 6, 2, dtype=DOUBLE)
    log = pb.logarithm(metric, a, b, rtol=1e-4, check=True)
    good = log.converged
    end = pb.exponential(metric, a[good], log.velocity[good], rtol=1e-10).end
    assert ((end - b[good]).norm(dim=-1) < 1e-4 * (b - a)[good].norm(dim=-1)).all()
    assert all(status != "converged" for status in log.messages[~good.numpy()])
