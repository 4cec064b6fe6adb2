"""Paths that lean on walls and turn at kinks: shown as they were measured, in pieces whose corners stay, at constant
speed."""

import pytest
import torch
from torch.distributions import Normal

import pullback as pb
from pullback._numerics.spline import lerp_nodes
from pullback._solvers.chords import ChordEnergy
from pullback._solvers.paths import cut_pieces
from pullback._solvers.pieces import PieceEnergy
from pullback.experiments import toy

DOUBLE = torch.float64
CURVED = pb.FisherRaoMetric(lambda z: Normal(z[..., 0], z[..., 1].exp()))


@pytest.fixture(scope="module")
def paths():
    """Along a ring whose inner wall is a row of arcs: the decoder has a kink wherever two of them meet."""
    decoder, codes = toy.problem("dirichlet")
    metric = pb.FisherRaoMetric(decoder)
    angle = torch.tensor([[2.9, 1.8], [0.4, -1.7], [0.5, 1.2]], dtype=DOUBLE)
    ends = 2.9 * torch.stack([angle.cos(), angle.sin()], -1)
    lattice = pb.Lattice.fit(metric, codes, num_nodes=40_000)
    return metric, pb.geodesic(metric, ends[:, 0], ends[:, 1], init=lattice)


def measured(metric, curve):
    with torch.no_grad():
        points = curve.resample(16 * curve.num_pieces + 1)
        return pb.energy(metric, points), pb.length(metric, points)


def test_paths_past_sharp_walls_are_shown_as_they_were_measured(paths):
    """Also on chords much finer than those of the solver; the spline through the same nodes swings into the walls."""
    metric, path = paths
    assert path.curve.is_polyline.any()
    energy, length = measured(metric, path.curve)
    torch.testing.assert_close(energy, path.energy, rtol=0.05, atol=0)
    torch.testing.assert_close(length, path.length, rtol=0.01, atol=0)
    swinging, _ = measured(metric, pb.CubicSpline(path.curve.points))
    assert (swinging > 1.2 * path.energy).any()


def test_energies_past_sharp_walls_are_squared_lengths_up_to_the_error(paths):
    _, path = paths
    assert (path.energy >= path.length.square() * (1 - 1e-9)).all()
    assert (path.energy <= path.length.square() * (1.01 + 2 * path.error)).all()


def void(z):
    """A line, decoded in steep steps at both ends of a wide flat void."""
    x = z[..., :1]
    return Normal(torch.sigmoid(20 * (x + 3)) + torch.sigmoid(20 * (x - 3)), 1.0)


def test_a_void_is_crossed_in_little_time():
    """Nothing is gained by lingering where the metric vanishes: the energy is the squared length there too."""
    metric = pb.FisherRaoMetric(void)
    a, b = torch.tensor([[-4.0, 0.0]], dtype=DOUBLE), torch.tensor([[4.0, 0.5]], dtype=DOUBLE)
    path = pb.geodesic(metric, a, b, init=torch.lerp(a, b, torch.linspace(0, 1, 257, dtype=DOUBLE)[:, None])[None])
    torch.testing.assert_close(path.length, (void(b).loc - void(a).loc)[:, 0].abs(), rtol=1e-3, atol=0)
    torch.testing.assert_close(measured(metric, path.curve)[0], path.length.square(), rtol=0.02, atol=0)


def zigzag():
    time = torch.linspace(0, 1, 33, dtype=DOUBLE) ** 2
    return torch.stack([torch.stack([3 * time, (k * time).sin()], -1) for k in (5.0, 17.0)])


def test_cutting_pieces_keeps_every_corner_and_evens_out_the_speed():
    nodes = zigzag()
    discrete = ChordEnergy.of(CURVED, nodes)
    cut = cut_pieces(discrete, nodes, 256)
    missed = (nodes[:, :, None] - cut[:, None]).norm(dim=-1).amin(-1)
    torch.testing.assert_close(missed, torch.zeros_like(missed), rtol=0, atol=1e-12)
    fine = [lerp_nodes(nodes, 512), lerp_nodes(cut, 64)]
    length, same = (pb.length(CURVED, x) for x in fine)
    torch.testing.assert_close(same, length, rtol=1e-4, atol=0)
    before, after = (pb.energy(CURVED, x) / length**2 - 1 for x in fine)
    assert (after < 0.1 * before).all()


def test_straight_pieces_have_the_derivatives_of_their_energy():
    """The restricted expansion against automatic differentiation of the energy it expands."""
    nodes, pull = zigzag()[:, ::4], torch.tensor([0.0, 0.3], dtype=DOUBLE)
    straight, off = PieceEnergy(ChordEnergy.of(CURVED, nodes), 8), torch.zeros(2, dtype=torch.bool)

    def energy(inner):
        return straight.energy(torch.cat([nodes[:, :1], inner, nodes[:, -1:]], 1), pull[:, None]).sum()

    inner = nodes[:, 1:-1].clone().requires_grad_()
    (gradient,) = torch.autograd.grad(energy(inner), inner)
    model = straight.expand(nodes, off, pull[:, None])
    torch.testing.assert_close(model.gradient, gradient, rtol=1e-9, atol=1e-9)


def test_the_blocks_of_straight_pieces_are_those_of_the_fine_curve_between_hat_functions():
    nodes, factor = zigzag()[:, ::4], 8
    discrete = ChordEnergy.of(CURVED, nodes)
    none = torch.zeros(len(nodes), dtype=torch.bool)
    fine, coarse = (
        dense(discrete.expand(lerp_nodes(nodes, factor), none)),
        PieceEnergy(discrete, factor).expand(nodes, none, torch.zeros(len(nodes), 1, dtype=DOUBLE)),
    )
    x = torch.arange(1, factor * (nodes.shape[1] - 1), dtype=DOUBLE) / factor
    hats = (1 - (x[:, None] - torch.arange(1, nodes.shape[1] - 1, dtype=DOUBLE)).abs()).clamp_min(0)
    P = torch.kron(hats, torch.eye(2, dtype=DOUBLE))
    torch.testing.assert_close(dense(coarse), P.mT @ fine @ P, rtol=1e-10, atol=1e-9)


def dense(model):
    """The block-tridiagonal Hessian as one matrix."""
    B, n, d, _ = model.diagonal.shape
    full = torch.zeros(B, n, n, d, d, dtype=DOUBLE)
    i = torch.arange(n)
    full[:, i, i] = model.diagonal
    full[:, i[:-1], i[1:]] = model.upper
    full[:, i[1:], i[:-1]] = model.upper.mT
    return full.transpose(2, 3).reshape(B, n * d, n * d)
