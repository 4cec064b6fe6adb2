"""Wide decoders are solved in elements: closed forms, derivatives by another route, and the same paths as with chords."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Bernoulli, Categorical, Distribution, Normal, Poisson

import pullback as pb
from pullback._geometry.distance import discretised
from pullback._solvers import refinement, spectral
from pullback._solvers.elements import DEGREE
from pullback._solvers.newton import Minimizer

DOUBLE = torch.float64
COPIES = 400  # of the same observation: enough for elements to be worth their while
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


def energy_of(metric: pb.Metric, nodes: Tensor) -> spectral.SpectralEnergy:
    return spectral.SpectralEnergy.of(discretised(metric, nodes), nodes)


def curves(num_elements: int) -> Tensor:
    """Two curves that bend, at the nodes of elements."""
    t = torch.linspace(0, 1, 513, dtype=DOUBLE)[:, None]
    fine = torch.stack([torch.cat([torch.sin(k * t), torch.cos(3 * t) / k - t], -1) for k in (1, 2)])
    return spectral.placed(fine, DEGREE * num_elements)


def dense(model, row: int) -> Tensor:
    """The Hessian in the inner nodes of one curve, from its blocks."""
    K, n = model.diagonal.shape[1:3]
    whole = torch.block_diag(*(model.diagonal + model.curvature)[row])
    for k in range(K - 1):
        whole[k * n : (k + 1) * n, (k + 1) * n : (k + 2) * n] = model.upper[row, k]
        whole[(k + 1) * n : (k + 2) * n, k * n : (k + 1) * n] = model.upper[row, k].T
    return whole[:-2, :-2]


@pytest.mark.parametrize("name", FAMILIES)
def test_derivatives_of_the_energy(name):
    """Against torch's own derivatives of the energy that is measured."""
    nodes = curves(2)
    energy = energy_of(decoded(FAMILIES[name], 6), nodes)
    every = torch.ones(2, dtype=torch.bool)
    model = energy.expand(nodes, every, nodes, nodes)
    torch.testing.assert_close(model.energy, energy.measured(nodes)[0], rtol=1e-12, atol=0)

    def free(inner: Tensor) -> Tensor:
        return energy.measured(torch.cat([nodes[0, :1], inner.reshape(-1, 2), nodes[0, -1:]])[None])[0][0]

    inner = nodes[0, 1:-1].flatten().requires_grad_()
    (gradient,) = torch.autograd.grad(free(inner), inner)
    torch.testing.assert_close(model.gradient[0].flatten()[:-2], gradient, rtol=1e-9, atol=1e-9)
    expected = torch.autograd.functional.hessian(free, inner.detach())
    torch.testing.assert_close(dense(model, 0), expected, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("name", FAMILIES)
def test_exact_and_gauss_newton_expansions_in_one_batch(name):
    nodes = curves(2)
    energy = energy_of(decoded(FAMILIES[name], 6), nodes)
    mixed, first, second = (
        energy.expand(nodes, torch.tensor(exact), nodes, nodes) for exact in ([False, True], [False] * 2, [True] * 2)
    )
    assert (mixed.curvature[0] == 0).all()
    assert mixed.curvature[1].abs().sum() > 0
    torch.testing.assert_close(mixed.curvature[1], second.curvature[1])
    for field in ("energy", "gradient", "diagonal", "upper"):
        torch.testing.assert_close(getattr(mixed, field), getattr(first, field), rtol=1e-9, atol=1e-9)


def test_energy_and_length_have_high_order():
    """Both against many elements, for curves that are no geodesics and run at uneven speed."""
    metric = decoded(FAMILIES["Bernoulli"], 6)

    def measured(num_elements: int) -> Tensor:
        nodes = curves(num_elements)
        return torch.stack(energy_of(metric, nodes).measured(nodes))

    exact = measured(64)
    coarse, fine = ((measured(k) / exact - 1).abs() for k in (4, 8))
    assert (fine < 1e-6).all()
    assert (torch.log2(coarse / fine) > DEGREE).all()


def test_curvature_of_one_element_serves_several():
    """From the minimum of one element, a step on four that knows its curvature leaves far less to do than Gauss-Newton's."""
    a, b = torch.randn(2, 16, 2, dtype=DOUBLE, generator=torch.Generator().manual_seed(4))
    nodes = spectral.placed(torch.stack([torch.lerp(a, b, t) for t in torch.linspace(0, 1, 5).tolist()], 1), DEGREE)
    energy = energy_of(decoded(FAMILIES["Bernoulli"], 40), nodes)
    light = torch.full((16,), 1e-6, dtype=DOUBLE)
    coarse = Minimizer(1e-14, 50, *spectral.EXACT).run(energy, nodes, torch.full_like(light, 0.1)).nodes
    start = spectral.placed(spectral.evened(coarse), 4 * DEGREE)
    held = spectral.held(energy.bends(coarse), 4)
    least = Minimizer(1e-15, 50, *spectral.EXACT).run(energy, start, light).energy
    plain, helped = (Minimizer(0.0, 1).run(energy, start, light, held=guess).energy - least for guess in (None, held))
    far = plain > 1e-9 * least
    assert far.sum() >= 4
    assert (helped < 0.25 * plain)[far].all()
    assert (helped / plain)[far].median() < 0.1


def test_softness_is_what_the_guessed_curvature_adds_to_the_fall_of_a_path():
    """½ gᵀH⁻¹g with and without it, by dense matrices; infinite, and no harm done, where the guess makes a saddle."""
    metric = decoded(FAMILIES["Bernoulli"], 60)
    generator = torch.Generator().manual_seed(2)
    a, b = 2 * torch.randn(2, 6, 2, dtype=DOUBLE, generator=generator)
    nodes = spectral.placed(torch.stack([torch.lerp(a, b, t) for t in torch.linspace(0, 1, 5).tolist()], 1), 2 * DEGREE)
    energy, light = energy_of(metric, nodes), torch.full((6,), 1e-9, dtype=DOUBLE)
    start = Minimizer(0.0, 3).run(energy, nodes, torch.full_like(light, 0.1)).nodes
    held = spectral.held(energy.bends(spectral.placed(spectral.evened(start), DEGREE)), 2)
    model = energy.expand(start, torch.zeros(6, dtype=torch.bool), light, light)
    falls = []
    for guess in (torch.zeros_like(held), held):
        model.curvature = guess
        g = model.gradient.flatten(1)[:, :-2]
        falls.append(torch.stack([0.5 * g[i] @ torch.linalg.solve(dense(model, i), g[i]) for i in range(6)]))
    positive = torch.stack([torch.linalg.eigvalsh(dense(model, i))[0] > 0 for i in range(6)])
    found = Minimizer(0.0, 1).run(energy, start, light, held=held)
    assert positive.sum() >= 3
    torch.testing.assert_close(
        found.softness[positive], (falls[1] / falls[0]).clamp_min(1)[positive], rtol=1e-5, atol=0
    )
    assert found.softness[~positive].isinf().all()
    wrong, plain = (Minimizer(0.0, 1).run(energy, start, light, held=x) for x in (-2 * model.diagonal, None))
    assert wrong.softness.isinf().all()
    torch.testing.assert_close(wrong.nodes, plain.nodes)


def copies(family) -> pb.FisherRaoMetric:
    """A latent space that is the family itself, observed `COPIES` times: distances grow by the root of that."""

    def decoder(z: Tensor) -> Distribution:
        return family(z[..., None, :].expand(*z.shape[:-1], COPIES, z.shape[-1]))

    return pb.FisherRaoMetric(decoder)


def great_circle(z: Tensor) -> Tensor:
    x = torch.cat([z, torch.ones_like(z[..., :1])], -1)
    return x / x.norm(dim=-1, keepdim=True)


def test_closed_forms(monkeypatch):
    """Hyperbolic planes, spheres, and a line, in elements; five digits are asked for and more are found."""
    seen = []
    level = refinement.Refinement._spectral_level
    monkeypatch.setattr(refinement.Refinement, "_spectral_level", lambda *x: seen.append(1) or level(*x))
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
    assert len(seen) >= len(cases)


def _root(p: Tensor) -> Tensor:
    return 2 * torch.exp(0.5 * p.sum(-1))


def test_elements_and_chords_agree():
    """The same geodesics by two routes; four segments on the coarsest level are too few for an element."""
    metric = decoded(FAMILIES["Bernoulli"], COPIES)
    a, b = torch.randn(2, 24, 2, dtype=DOUBLE, generator=torch.Generator().manual_seed(2))
    elements = pb.geodesic(metric, a, b, solver=pb.GaussNewton(rtol=1e-6))
    chords = pb.geodesic(metric, a, b, solver=pb.GaussNewton(rtol=1e-6, min_segments=4))
    assert elements.converged.all()
    assert chords.converged.all()
    assert elements.num_decoded < 0.7 * chords.num_decoded
    same = (elements.length / chords.length - 1).abs() < 1e-4  # not in another valley
    assert same.sum() >= 22
    off = (elements.length - chords.length).abs() / chords.length
    assert (off <= elements.error + chords.error)[same].all()
    grid = torch.linspace(0, 1, 1001, dtype=DOUBLE)
    shown = pb.length(metric, elements.curve(grid))
    assert ((shown / elements.length - 1).abs() < 1e-5).all()


def test_kinks_fall_back_on_chords():
    """Rectified units are not smooth on any scale; the error says so, and the path is as good as that of chords."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(2, 24), nn.ReLU(), nn.Linear(24, COPIES)).to(DOUBLE).requires_grad_(False)
    metric = pb.FisherRaoMetric(lambda z: Bernoulli(logits=3 * model(z)))
    a, b = torch.randn(2, 16, 2, dtype=DOUBLE)
    elements = pb.geodesic(metric, a, b)
    chords = pb.geodesic(metric, a, b, solver=pb.GaussNewton(min_segments=4))
    assert elements.converged.all()
    assert (elements.length <= chords.length * (1 + elements.error + chords.error)).sum() >= 15


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
