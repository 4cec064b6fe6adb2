"""Energies in elements, and wide decoders: closed forms, derivatives by another route, and the same paths by chords and
by elements."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Bernoulli, Categorical, Distribution, Normal, Poisson

import pullback as pb
from pullback._numerics.lobatto import DEGREE, equal_times
from pullback._solvers.chords import ChordEnergy
from pullback._solvers.elements import ElementEnergy
from pullback._solvers.mesh import placed, uniform

DOUBLE = torch.float64
COPIES = 400  # of the same observation: a decoder that is expensive
FAMILIES = {
    "Bernoulli": lambda h: Bernoulli(logits=h),
    "categorical": lambda h: Categorical(logits=h),
    "Normal": lambda h: Normal(h, torch.exp(0.5 * h.flip(-1))),
}


def network(width: int, gain: float = 1.5) -> nn.Module:
    torch.manual_seed(7)
    layers = [nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, width)]
    for layer in layers[::2]:
        nn.init.normal_(layer.weight, std=gain / layer.in_features**0.5)  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType]
    return nn.Sequential(*layers).to(DOUBLE).requires_grad_(False)


def decoded(family, width: int) -> pb.FisherRaoMetric:
    model = network(width)
    return pb.FisherRaoMetric(lambda z: family(model(z)))


def energy_of(metric: pb.Metric, nodes: Tensor) -> ElementEnergy:
    return ElementEnergy(ChordEnergy.checked(metric, nodes))


def curves(num_elements: int) -> Tensor:
    """Two curves that bend, at the nodes of elements."""
    t = torch.linspace(0, 1, 513, dtype=DOUBLE)[:, None]
    fine = torch.stack([torch.cat([torch.sin(k * t), torch.cos(3 * t) / k - t], -1) for k in (1, 2)])
    return placed(fine, uniform(len(fine), fine, num_elements))


@pytest.mark.parametrize("name", FAMILIES)
def test_exact_and_gauss_newton_expansions_in_one_batch(name):
    nodes = curves(2)
    energy = energy_of(decoded(FAMILIES[name], 6), nodes)
    times = equal_times(nodes)
    mixed, first, second = (
        energy.expand(nodes, torch.tensor(exact), times) for exact in ([False, True], [False] * 2, [True] * 2)
    )
    assert (mixed.curvature[0] == 0).all()
    assert mixed.curvature[1].abs().sum() > 0
    torch.testing.assert_close(mixed.curvature[1], second.curvature[1])
    for field in ("energy", "gradient", "diagonal", "upper"):
        torch.testing.assert_close(getattr(mixed, field), getattr(first, field), rtol=1e-9, atol=1e-9)


def test_energy_has_high_order():
    """Against many elements, for curves that are no geodesics and run at uneven speed."""
    metric = decoded(FAMILIES["Bernoulli"], 6)

    def measured(num_elements: int) -> Tensor:
        nodes = curves(num_elements)
        return energy_of(metric, nodes).energy(nodes, equal_times(nodes))

    exact = measured(64)
    coarse, fine = ((measured(k) / exact - 1).abs() for k in (4, 8))
    assert (fine < 1e-6).all()
    assert (torch.log2(coarse / fine) > DEGREE).all()


def copies(family) -> pb.FisherRaoMetric:
    """A latent space that is the family itself, observed `COPIES` times: distances grow by the root of that."""

    def decoder(z: Tensor) -> Distribution:
        return family(z[..., None, :].expand(*z.shape[:-1], COPIES, z.shape[-1]))

    return pb.FisherRaoMetric(decoder)


def great_circle(z: Tensor) -> Tensor:
    x = torch.cat([z, torch.ones_like(z[..., :1])], -1)
    return x / x.norm(dim=-1, keepdim=True)


def test_closed_forms():
    """Hyperbolic planes, spheres, and a line; five digits are asked for and more are found."""
    a, b = torch.randn(2, 20, 2, dtype=DOUBLE, generator=torch.Generator().manual_seed(1))

    def hyperbolic(p: Tensor, q: Tensor) -> Tensor:
        s, t = torch.exp(p[:, 1]), torch.exp(q[:, 1])
        return 2**0.5 * torch.acosh(1 + ((p[:, 0] - q[:, 0]) ** 2 / 2 + (s - t) ** 2) / (2 * s * t))

    def spherical(p: Tensor, q: Tensor) -> Tensor:
        return torch.acos((great_circle(p) * great_circle(q)).sum(-1))

    cases = [
        (copies(lambda z: Normal(z[..., 0], torch.exp(z[..., 1]))), hyperbolic),
        (copies(lambda z: Normal(great_circle(z), torch.ones(()))), spherical),
        (copies(lambda z: Poisson(torch.exp(z.sum(-1)))), lambda p, q: _root(p).sub(_root(q)).abs()),
    ]
    for metric, distance in cases:
        found = pb.geodesic(metric, a, b, solver=pb.GaussNewton(rtol=1e-5))
        exact = COPIES**0.5 * distance(a, b)
        assert found.converged.all()
        off = (found.length / exact - 1).abs()
        assert (off <= 1e-5).all()
        assert (off <= found.error + 1e-12).all()


def _root(p: Tensor) -> Tensor:
    return 2 * torch.exp(0.5 * p.sum(-1))


def test_elements_and_chords_agree():
    """The same geodesics by two routes: paths are solved in chords, their logarithms in elements."""
    metric = decoded(FAMILIES["Bernoulli"], COPIES)
    a, b = torch.randn(2, 24, 2, dtype=DOUBLE, generator=torch.Generator().manual_seed(2))
    solved = pb.geodesic(metric, a, b, solver=pb.GaussNewton(rtol=1e-6))
    assert solved.converged.all()
    length = metric.norm(a, pb.logmap(metric, a, b, rtol=1e-9))
    off = (solved.length / length - 1).abs()
    same = off < 1e-4  # not in another valley
    assert same.sum() >= 22
    assert (off <= solved.error)[same].all()
    grid = torch.linspace(0, 1, 1001, dtype=DOUBLE)
    shown = pb.length(metric, solved.curve(grid))
    assert ((shown / solved.length - 1).abs() < 1e-5).all()


def test_kinks():
    """Rectified units are not smooth on any scale; the error says so, and paths are as good as from a coarser start."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(2, 24), nn.ReLU(), nn.Linear(24, COPIES)).to(DOUBLE).requires_grad_(False)
    metric = pb.FisherRaoMetric(lambda z: Bernoulli(logits=3 * model(z)))
    a, b = torch.randn(2, 16, 2, dtype=DOUBLE)
    solved = pb.geodesic(metric, a, b)
    chords = pb.geodesic(metric, a, b, solver=pb.GaussNewton(min_segments=4))
    assert solved.converged.all()
    assert (solved.length <= chords.length * (1 + solved.error + chords.error)).sum() >= 15


def test_a_hole_in_a_wide_decoder():
    """Where a decoder returns NaN in a region: no exception, and paths that are called converged go around it."""
    model = network(COPIES)

    def hole(z: Tensor) -> Tensor:
        return (z[..., 0] > 0.3) & (z[..., 0] < 0.5) & (z[..., 1] < 0.4)

    metric = pb.FisherRaoMetric(lambda z: Bernoulli(logits=torch.where(hole(z)[..., None], torch.nan, model(z))))
    a, b = torch.randn(2, 24, 2, dtype=DOUBLE, generator=torch.Generator().manual_seed(0))
    found = pb.geodesic(metric, a, b)
    inside = hole(found.curve(torch.linspace(0, 1, 2001, dtype=DOUBLE))).any(-1)
    assert 0 < found.converged.sum() < 24
    assert not (inside & found.converged).any()
    assert found.error[~found.converged].isnan().all()
