"""The parts of the default solver: the block-tridiagonal solve, the expansion of the energy, and the descent on one
level."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Bernoulli, Beta, Gamma, NegativeBinomial, Normal, StudentT

import pullback as pb
from helpers import Hidden
from problems import PROBLEMS
from pullback._numerics.tridiagonal import _solve_blocks, _unrolled_solve, solve_tridiagonal
from pullback._solvers.base import Status
from pullback._solvers.chords import ChordEnergy
from pullback._solvers.newton import Minimizer, _solve
from pullback._solvers.pieces import PieceEnergy

DOUBLE = torch.float64
SPHERE = next(p for p in PROBLEMS if p.name == "sphere S^2")
CHUNK = 2**25


def network(d: int, num_features: int, seed: int = 0):
    """A smooth random map with one hidden layer."""
    generator = torch.Generator().manual_seed(seed)
    inner, outer = (
        torch.randn(m, n, generator=generator, dtype=DOUBLE) / m**0.5 for m, n in ((d, 16), (16, num_features))
    )
    return lambda z: torch.tanh(z @ inner.to(z)) @ outer.to(z)


FEATURES = network(2, 4)
FAMILIES = {
    "Euclidean embedding": lambda z: Bernoulli(logits=2 * FEATURES(z)),
    "hyperboloid pair": lambda z: Normal(FEATURES(z), torch.exp(0.5 * FEATURES(z).flip(-1))),
    "natural and mean parameters": lambda z: Gamma(torch.exp(FEATURES(z)), 2 + torch.sin(FEATURES(z).flip(-1))),
}


def systems(B: int, n: int, d: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Positive-definite block-tridiagonal systems: diagonal, upper, right-hand side, and the dense matrices."""
    factor, below = torch.randn(B, n, d, d, dtype=DOUBLE), torch.randn(B, n - 1, d, d, dtype=DOUBLE)
    eye = 0.3 * torch.eye(d, dtype=DOUBLE)
    diagonal = factor @ factor.mT + eye
    diagonal[:, 1:] += below @ below.mT
    upper = factor[:, :-1] @ below.mT
    return diagonal, upper, torch.randn(B, n, d, dtype=DOUBLE), dense(diagonal, upper)


def dense(diagonal: Tensor, upper: Tensor) -> Tensor:
    B, n, d, _ = diagonal.shape
    H = torch.zeros(B, n, d, n, d, dtype=diagonal.dtype)
    for i in range(n):
        H[:, i, :, i] = diagonal[:, i]
    for i in range(n - 1):
        H[:, i, :, i + 1], H[:, i + 1, :, i] = upper[:, i], upper[:, i].mT
    return H.reshape(B, n * d, n * d)


# -- block-tridiagonal systems -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 3, 4, 6, 7, 8, 15, 31, 100])
@pytest.mark.parametrize(("d", "B"), [(1, 3), (2, 3), (5, 3), (16, 3), (16, 9), (5, 90)])
def test_tridiagonal_solves_the_dense_system(n, d, B):
    diagonal, upper, rhs, H = systems(B, n, d)
    x, positive = solve_tridiagonal(diagonal, upper, rhs)
    assert positive.all()
    expected = torch.linalg.solve(H, rhs.flatten(1)).reshape(rhs.shape)
    torch.testing.assert_close(x, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 7, 12])
@pytest.mark.parametrize("w", [1, 2, 12])
def test_blocks_that_share_few_unknowns_are_solved_by_these(n, w):
    diagonal, upper, rhs, _ = systems(3, n, 12)
    upper[..., :-w, :] = 0
    diagonal += 20 * torch.eye(12, dtype=DOUBLE)
    H = dense(diagonal, upper)
    definite = torch.linalg.eigvalsh(H)[:, 0] > 0
    x, positive = solve_tridiagonal(diagonal, upper, rhs, w)
    assert (positive == definite).all()
    expected = torch.linalg.solve(H, rhs.flatten(1)).reshape(rhs.shape)
    torch.testing.assert_close(x[definite], expected[definite], rtol=1e-9, atol=1e-9)
    assert definite.any()


@pytest.mark.parametrize("n", [1, 2, 5, 16])
@pytest.mark.parametrize("B", [6, 300])
def test_tridiagonal_knows_positive_definite_from_indefinite(n, B):
    """Each of the systems is moved to just before or just behind the point where its smallest eigenvalue is zero."""
    diagonal, upper, rhs, H = systems(B, n, 3)
    smallest = torch.linalg.eigvalsh(H)[:, 0]
    definite = torch.tensor([True, False, True, False, False, True]).repeat(B // 6)
    shift = smallest * torch.where(definite, 1 - 1e-6, 1 + 1e-6)
    moved = diagonal - shift[:, None, None, None] * torch.eye(3, dtype=DOUBLE)
    x, positive = solve_tridiagonal(moved, upper, rhs)
    assert (positive == definite).all()
    residual = (dense(moved, upper) @ x.flatten(1)[..., None])[..., 0] - rhs.flatten(1)
    assert residual[definite].abs().max() < 1e-6


@pytest.mark.parametrize("d", [2, 40])
def test_a_broken_system_does_not_touch_its_neighbors(d):
    diagonal, upper, rhs, _ = systems(3, 6, d)
    alone, _ = solve_tridiagonal(diagonal[1:], upper[1:], rhs[1:])
    diagonal[0, 3] = torch.nan
    x, positive = solve_tridiagonal(diagonal, upper, rhs)
    assert positive.tolist() == [False, True, True]
    torch.testing.assert_close(x[1:], alone, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("d", [1, 2, 3, 8, 20])
def test_accelerators_solve_blocks_as_lapack_does(d):
    factor = torch.randn(50, 4, d, d, dtype=DOUBLE)
    a, b = factor @ factor.mT + 0.1 * torch.eye(d, dtype=DOUBLE), torch.randn(50, 4, d, 2 * d + 1, dtype=DOUBLE)
    a[::7] -= 1.001 * torch.linalg.eigvalsh(a[::7])[..., :1, None] * torch.eye(d, dtype=DOUBLE)  # indefinite
    (x, positive), (expected, definite) = _unrolled_solve(a, b), _solve_blocks(a, b)
    assert definite.any()
    assert not definite.all()
    assert (positive == definite).all()
    torch.testing.assert_close(x[definite], expected[definite], rtol=1e-9, atol=1e-9)


# -- the expansion of the energy ---------------------------------------------------------------------------------------


def bent(B: int = 2, T: int = 6, d: int = 2) -> Tensor:
    """Curves far from any minimum."""
    line = torch.linspace(-1, 1, T + 1, dtype=DOUBLE)[:, None] * torch.ones(d, dtype=DOUBLE)
    return line + 0.3 * torch.randn(B, T + 1, d, dtype=DOUBLE)


def derivatives(discrete: ChordEnergy, nodes: Tensor) -> tuple[Tensor, Tensor]:
    """Gradient and Hessian of the discrete energy of one curve in its inner nodes, by automatic differentiation."""

    def energy(inner: Tensor) -> Tensor:
        return discrete.energy(torch.cat([nodes[:1], inner, nodes[-1:]])[None])[0]

    size = nodes[1:-1].numel()
    gradient = torch.autograd.functional.jacobian(energy, nodes[1:-1])
    return gradient, torch.autograd.functional.hessian(energy, nodes[1:-1]).reshape(size, size)


@pytest.mark.parametrize("family", FAMILIES)
def test_exact_expansion_is_the_whole_second_order(family):
    nodes = bent()
    discrete = ChordEnergy.of(pb.FisherRaoMetric(FAMILIES[family]), nodes, CHUNK)
    model = discrete.expand(nodes, torch.tensor([True, True]))
    torch.testing.assert_close(model.energy, discrete.energy(nodes), rtol=1e-12, atol=0)
    hessians = dense(model.diagonal + model.curvature, model.upper)
    for i, curve in enumerate(nodes):
        gradient, hessian = derivatives(discrete, curve)
        torch.testing.assert_close(model.gradient[i], gradient, rtol=1e-8, atol=1e-8)
        torch.testing.assert_close(hessians[i], hessian, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_alone_are_those_of_the_expansion(family):
    nodes = bent(B=3)
    discrete = ChordEnergy.of(pb.FisherRaoMetric(FAMILIES[family]), nodes, CHUNK)
    model = discrete.expand(nodes, torch.zeros(3, dtype=torch.bool))
    energy, gradient = discrete.slopes(nodes)
    torch.testing.assert_close(energy, model.energy, rtol=1e-12, atol=0)
    torch.testing.assert_close(gradient, model.gradient, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("family", FAMILIES)
def test_gauss_newton_lacks_only_what_vanishes_on_straight_images(family):
    """Near-by nodes see a flat family and a linear decoder: the second derivatives have nothing to weigh."""
    discrete = ChordEnergy.of(pb.FisherRaoMetric(FAMILIES[family]), bent(), CHUNK)
    nodes = 1e-4 * bent() + 0.3
    model = discrete.expand(nodes, torch.tensor([True, True]))
    assert model.curvature.abs().max() < 1e-3 * model.diagonal.abs().max()


def test_gauss_newton_matrix_is_positive_semidefinite_for_euclidean_embeddings():
    nodes = bent(B=8)
    discrete = ChordEnergy.of(pb.FisherRaoMetric(FAMILIES["Euclidean embedding"]), nodes, CHUNK)
    model = discrete.expand(nodes, torch.zeros(8, dtype=torch.bool))
    eigenvalues = torch.linalg.eigvalsh(dense(model.diagonal, model.upper))
    assert discrete.num_parts == 1
    assert (model.curvature == 0).all()
    assert (eigenvalues[:, 0] > -1e-10 * eigenvalues[:, -1]).all()


def test_metrics_without_an_embedding_get_the_exact_gradient():
    nodes, metric = bent(), pb.FisherRaoMetric(FAMILIES["hyperboloid pair"])
    embedded, plain = (ChordEnergy.of(m, nodes, CHUNK) for m in (metric, Hidden(metric)))
    exact = torch.tensor([False, False])
    first, second = embedded.expand(nodes, exact), plain.expand(nodes, exact)
    assert plain.num_parts == 0
    torch.testing.assert_close(second.energy, first.energy, rtol=1e-9, atol=0)
    torch.testing.assert_close(second.gradient, first.gradient, rtol=1e-8, atol=1e-8)


def test_metrics_without_an_embedding_get_the_exact_hessian_of_a_constant_tensor():
    nodes = bent(d=3)
    linear = next(p for p in PROBLEMS if p.name == "linear decoder")
    discrete = ChordEnergy.of(Hidden(linear.metric), nodes, CHUNK)
    model = discrete.expand(nodes, torch.tensor([False, False]))
    _, hessian = derivatives(discrete, nodes[0])
    torch.testing.assert_close(dense(model.diagonal, model.upper)[0], hessian, rtol=1e-8, atol=1e-8)


def test_chunks_change_nothing_but_the_number_of_calls():
    nodes, metric = bent(B=7), pb.FisherRaoMetric(FAMILIES["hyperboloid pair"])
    whole, chunked = ChordEnergy.of(metric, nodes, CHUNK), ChordEnergy.of(metric, nodes, 1)
    exact = torch.arange(7) % 2 == 0
    for part in ("energy", "gradient", "diagonal", "upper", "curvature"):
        first, second = (getattr(discrete.expand(nodes, exact), part) for discrete in (whole, chunked))
        torch.testing.assert_close(second, first, rtol=1e-12, atol=1e-12)
    assert chunked.work.num_decoded == whole.work.num_decoded
    assert chunked.work.num_calls > whole.work.num_calls


def test_varying_constants_of_the_model_are_refused():
    """A Student-t whose degrees of freedom depend on the code has no embedding; a probe may not have noticed."""
    metric = pb.FisherRaoMetric(lambda z: torch.distributions.StudentT(torch.where(z[..., :1] > 0.5, 3.0, 4.0), z))
    discrete = ChordEnergy(metric, 2, 3, False, CHUNK)
    with pytest.raises(ValueError, match="an embedding at some codes and none at others"):
        discrete.energy(torch.linspace(0, 1, 9, dtype=DOUBLE).reshape(1, 9, 1))


# -- descent on one level ----------------------------------------------------------------------------------------------


def sphere_curves(B: int, T: int, size: float) -> Tensor:
    """Great circles of about 2 radians, bent by an amount `size`."""
    a = 0.4 * SPHERE.points(B) - 0.45
    b = -a + 0.1 * SPHERE.points(B)
    t = torch.linspace(0, 1, T + 1, dtype=DOUBLE)
    return SPHERE.path(a, b, t) + size * torch.sin(torch.pi * t)[:, None] * torch.tensor([1.0, -1.0], dtype=DOUBLE)


def test_newton_converges_quadratically():
    """The predicted decrease is a squared distance to the minimum: its exponent doubles with every step whose Hessian
    is exact and new, down to rounding."""
    nodes, light, decrements = sphere_curves(1, 32, 0.05), torch.tensor([1e-10], dtype=DOUBLE), []
    discrete = ChordEnergy.of(SPHERE.metric, nodes, CHUNK)
    for _ in range(5):
        run = Minimizer(1, always_exact=True).run(discrete, nodes, light, 0 * light)
        nodes, decrements = run.nodes, [*decrements, (run.predicted / run.energy).log10().item()]
    fast = [(p, q) for p, q in pairwise(decrements) if p < -3 and q > -25]
    assert len(fast) >= 2
    assert all(q < 1.9 * p for p, q in fast)


def test_a_hessian_that_is_kept_converges_fast():
    """Steps that keep second derivatives of an earlier one still gain two digits and more each."""
    nodes = sphere_curves(1, 32, 0.05)
    discrete, light = ChordEnergy.of(SPHERE.metric, nodes, CHUNK), torch.tensor([1e-10], dtype=DOUBLE)
    runs = [Minimizer(k, always_exact=True).run(discrete, nodes, light, 0 * light) for k in range(1, 7)]
    decrements = torch.cat([run.predicted / run.energy for run in runs]).log10().unique_consecutive()
    fast = [(p, q) for p, q in pairwise(decrements) if p < -3 and q > -20]
    assert fast
    assert all(q < p - 2 for p, q in fast)


def test_kept_hessians_find_the_same_minima():
    """With eight dimensions gradients are cheap, and most steps take nothing else."""
    features = network(8, 12)
    metric = pb.FisherRaoMetric(lambda z: Normal(features(z), torch.exp(0.3 * features(z).flip(-1))))
    nodes = bent(B=6, T=8, d=8)
    keeping = ChordEnergy.of(metric, nodes, CHUNK)
    assert keeping.has_slopes
    damping, rtol = torch.tensor([[0.1], [1e-13]], dtype=DOUBLE).expand(2, 6)
    both = [
        Minimizer(200).run(objective, nodes, damping, rtol)
        for objective in (keeping, replace(keeping, cheap_slopes=False))
    ]
    assert both[0].stale.any()
    assert not both[1].stale.any()
    assert all((run.status == Status.CONVERGED).all() for run in both)
    torch.testing.assert_close(both[0].nodes, both[1].nodes, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(both[0].energy, both[1].energy, rtol=1e-10, atol=0)


def test_a_kept_hessian_knows_what_the_last_step_changed():
    """The secant condition: the corrected matrix maps the last step to the change of the gradient along it."""
    diagonal, upper, _, _ = systems(5, 6, 3)
    moves = torch.randn(5, 4, 6, 3, dtype=DOUBLE)
    turns, far = moves + 0.2 * torch.randn_like(moves), torch.full((5,), torch.inf, dtype=DOUBLE)
    step, _ = _solve(diagonal, upper, turns[:, 0], torch.zeros_like(moves[:, 0]), 3, (moves, turns), far)
    torch.testing.assert_close(step, -moves[:, 0], rtol=1e-9, atol=1e-9)
    nothing = torch.zeros_like(moves)
    plain, _ = _solve(diagonal, upper, turns[:, 0], nothing[:, 0], 3, (nothing, nothing), far)
    torch.testing.assert_close(plain, -solve_tridiagonal(diagonal, upper, turns[:, 0])[0], rtol=1e-12, atol=1e-12)


def test_exact_steps_end_the_slow_convergence_of_gauss_newton():
    nodes = sphere_curves(4, 16, 0.3)
    discrete = ChordEnergy.of(SPHERE.metric, nodes, CHUNK)
    damping = torch.full((4,), 0.1, dtype=DOUBLE)
    rtol = torch.full_like(damping, 1e-12)
    slow = Minimizer(50).run(PieceEnergy(discrete, 1), nodes, damping, rtol, constants=torch.zeros(4, 1, dtype=DOUBLE))
    hybrid = Minimizer(50).run(discrete, nodes, damping, rtol)
    assert (hybrid.status == Status.CONVERGED).all()
    assert not slow.exact.any()
    assert hybrid.num_steps.sum() < 0.7 * slow.num_steps.sum()
    torch.testing.assert_close(hybrid.energy, slow.energy, rtol=1e-11, atol=0)


def test_energy_never_rises():
    nodes = bent(B=10, T=16)
    discrete = ChordEnergy.of(pb.FisherRaoMetric(FAMILIES["natural and mean parameters"]), nodes, CHUNK)
    before, energies = discrete.energy(nodes), []
    for k in (1, 3, 9):
        energies.append(
            Minimizer(k).run(discrete, nodes, *torch.tensor([[1e-2], [0.0]], dtype=DOUBLE).expand(2, 10)).energy
        )
    assert (energies[0] <= before).all()
    assert (energies[1] <= energies[0]).all()
    assert (energies[2] <= energies[1]).all()


def test_converged_curves_leave_the_batch():
    """The work of a batch is the sum of the work of its curves, however long one of them takes."""
    nodes = torch.cat([sphere_curves(3, 16, 1e-6), sphere_curves(1, 16, 0.5)])
    damping = torch.full((4,), 0.1, dtype=DOUBLE)
    minimizer, rtol = Minimizer(50), torch.full((4,), 1e-10, dtype=DOUBLE)
    together = ChordEnergy.of(SPHERE.metric, nodes, CHUNK)
    batch, work, loop = minimizer.run(together, nodes, damping, rtol), 0, []
    for curve in nodes.split(1):
        alone = ChordEnergy.of(SPHERE.metric, curve, CHUNK)
        loop.append(minimizer.run(alone, curve, damping[:1], rtol[:1]))
        work += alone.work.num_decoded
    assert together.work.num_decoded == work
    assert batch.num_steps.tolist() == [run.num_steps.item() for run in loop]
    assert batch.num_steps[3] > batch.num_steps[:3].max()
    torch.testing.assert_close(batch.nodes, torch.cat([run.nodes for run in loop]), rtol=1e-9, atol=1e-9)


def test_damping_holds_directions_the_decoder_ignores():
    nodes = torch.cat([sphere_curves(2, 16, 0.3), torch.randn(2, 17, 3, dtype=DOUBLE)], -1)
    metric = pb.EuclideanMetric(lambda z: SPHERE.metric.decoder(z[..., :2]))
    discrete = ChordEnergy.of(metric, nodes, CHUNK)
    run = Minimizer(50).run(discrete, nodes, *torch.tensor([[0.1], [1e-12]], dtype=DOUBLE).expand(2, 2))
    assert (run.status == Status.CONVERGED).all()
    torch.testing.assert_close(run.nodes[..., 2:], nodes[..., 2:], rtol=0, atol=1e-6)


def hill(z: Tensor) -> Normal:
    """A plane with a hill in its middle, over which the straight way is a saddle."""
    height = 4 * torch.exp(-4 * (z**2).sum(-1, keepdim=True))
    return Normal(torch.cat([z, height], -1), 1.0)


def test_saddles_are_left():
    """The straight line over a hill is stationary by symmetry; the path around it is the minimum, from either start."""
    metric = pb.FisherRaoMetric(hill)
    a, b = torch.tensor([[-1.0, 0.0]], dtype=DOUBLE), torch.tensor([[1.0, 0.0]], dtype=DOUBLE)
    t = torch.linspace(0, 1, 17, dtype=DOUBLE)[:, None]
    around = torch.cat([2 * t - 1, torch.sin(torch.pi * t)], -1)
    straight, guided = pb.geodesic(metric, a, b), pb.geodesic(metric, a, b, init=around)
    assert straight.converged.all()
    torch.testing.assert_close(straight.length, guided.length, rtol=1e-5, atol=0)
    assert (straight.length < 0.8 * pb.length(metric, pb.CubicSpline.straight(a, b, 9))).all()


def test_the_rounding_of_pairs_is_known():
    """Far from their origin the products of a pair cancel; the same chords by the formula that does not tell."""
    metric = pb.FisherRaoMetric(lambda z: Normal(z[..., 0], z[..., 1]))
    u = torch.linspace(-14, 14, 33, dtype=DOUBLE)
    nodes = 1e6 * torch.stack([torch.tanh(u), 1 / torch.cosh(u)], -1)[None]
    chords = ChordEnergy.of(metric, nodes)
    (step_mu, step_sigma), sigma = nodes[0].diff(dim=0).T, nodes[0, :, 1]
    exact = ((step_mu**2 + 2 * step_sigma**2) / (sigma[1:] * sigma[:-1])).sqrt().sum()
    off = (chords.chords(nodes)[0].clamp_min(0).sqrt().sum() / exact - 1).abs()
    assert off > 1e-8
    known = chords.cancellation(nodes, torch.tensor([32]))
    assert off < 3 * known
    assert (known < 1e-4).all()


def test_a_straight_path_is_certified_at_once():
    """Its gradient is zero to the last bit, and so is the decrease that is still to come."""
    metric = pb.FisherRaoMetric(lambda z: Normal(z, 0.5))
    path = pb.geodesic(metric, torch.zeros(3, 2), torch.tensor([[2.0, 0.0], [0.0, -1.0], [3.0, 4.0]]))
    assert path.converged.all()
    assert path.num_segments.max() <= 64
    assert (path.error < 1e-5).all()


def globe(z: Tensor) -> Normal:
    """A sphere by longitude and latitude."""
    x, y = z.unbind(-1)
    return Normal(torch.stack([y.cos() * x.cos(), y.cos() * x.sin(), y.sin()], -1), 1.0)


@pytest.mark.parametrize(("angle", "firm"), [(0.5, True), (0.83, True), (0.9, False), (0.98, False)])
def test_a_minimum_is_firm_by_the_share_its_hessian_has_of_gauss_newton(angle, firm):
    r"""Along the equator that share is :math:`1 - (\theta / \pi)^2`, at the wave that lifts the arc to the north: a
    quarter for :math:`\theta = 0.866\,\pi`, and nothing where the arc becomes a saddle."""
    t = torch.linspace(0, 1, 33, dtype=DOUBLE)
    nodes = torch.stack([angle * torch.pi * t, 0.001 * torch.sin(torch.pi * t)], -1)[None]
    start = torch.full((1,), 1e-3, dtype=DOUBLE)
    discrete = ChordEnergy.of(pb.FisherRaoMetric(globe), nodes)
    run = Minimizer(20).run(discrete, nodes, start, 1e-6 * start, certified=torch.tensor([False]))
    assert run.status == Status.CONVERGED
    assert run.certified
    assert run.firm == firm


def test_single_precision_claims_no_more_than_its_rounding():
    """Close codes, whose chords lose digits: the same path in double precision is within the claim."""
    metric = pb.EuclideanMetric(lambda z: Normal(10 + FEATURES(z), 1.0))
    a = torch.randn(50, 2)
    b = a + 0.1 * torch.randn(50, 2)
    single, double = pb.geodesic(metric, a, b), pb.geodesic(metric, a.double(), b.double())
    off = (single.length.double() / double.length - 1).abs()
    assert (off > 1e-6).any()
    assert (off <= 3 * single.error).all()


ROUNDED = {
    "a pair": lambda h: Normal(h[:, :4], h[:, 4:].exp()),
    "a pair with an offset": lambda h: Normal(100 + h[:, :4], 0.03 + 0.03 * h[:, 4:].sigmoid()),
    "natural and mean parameters": lambda h: Beta(h[:, :4].exp(), h[:, 4:].exp()),
    "counts that vary": lambda h: NegativeBinomial(h[:, :4].exp(), logits=h[:, 4:]),
    "degrees of freedom that vary": lambda h: StudentT(h[:, :2].exp(), h[:, 2:4], h[:, 4:6].exp()),
}


@pytest.mark.parametrize("apart", [1e-3, 1e-2, 0.1, 1.0])
@pytest.mark.parametrize("name", ROUNDED)
def test_claims_include_the_rounding_of_parameters(name, apart):
    """The truth is the same network in double precision. Claims of paths that are long do not suffer."""
    torch.manual_seed(0)
    single = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 8)).requires_grad_(False)
    double = deepcopy(single).double()
    a = torch.randn(20, 3) + 3 * (torch.arange(20) % 2)[:, None]
    b = a + apart * torch.randn(20, 3)
    path = pb.geodesic(pb.FisherRaoMetric(lambda z: ROUNDED[name](single(z))), a, b)
    metric = pb.FisherRaoMetric(lambda z: ROUNDED[name](double(z)))
    truth = pb.geodesic(metric, a.double(), b.double(), solver=pb.GaussNewton(rtol=1e-6))
    off = (path.length.double() / truth.length - 1).abs()
    assert path.converged.all()
    assert (off <= 3 * path.error).all()
    assert (off < (1e-6 if apart < 1e-2 else 1e-2)).all()
    assert apart < 1 or "offset" in name or path.error.median() < 1e-5


@pytest.mark.parametrize("apart", [1e-7, 1e-6, 1e-5])
def test_claims_include_the_rounding_of_close_codes(apart):
    """Double precision; between codes as close as that the path is straight, and the metric constant."""
    metric = pb.FisherRaoMetric(lambda z: Normal(FEATURES(z), torch.exp(FEATURES(z).flip(-1))))
    a, step = torch.randn(50, 2, dtype=DOUBLE), apart * torch.randn(50, 2, dtype=DOUBLE)
    path = pb.geodesic(metric, a, a + step)
    off = (path.length / metric.norm(a + 0.5 * step, step) - 1).abs()
    assert path.converged.all()
    assert (off <= 3 * path.error + 10 * apart**2).all()
