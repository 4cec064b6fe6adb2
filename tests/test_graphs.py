"""Graph starts: flat space, the half-plane, walls, separate clouds; paths end where they should and survive a file."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from scipy.spatial import ConvexHull
from torch import Tensor
from torch.distributions import Bernoulli, Normal

import pullback as pb
from pullback._starts import graph as graphs
from pullback._starts.graph import edge_lengths
from pullback._starts.lattice import default_nodes, stencil


@dataclass(frozen=True)
class Flat(pb.Metric):
    """The Euclidean metric, with or without its embedding; counts the codes it decodes."""

    embedded: bool = True
    decoded: list[int] = field(default_factory=list, compare=False)

    def tensor(self, z: Tensor) -> Tensor:
        return torch.eye(z.shape[-1], dtype=z.dtype).expand(*z.shape, -1)

    def ds2(self, a: Tensor, b: Tensor) -> Tensor:
        self.decoded.append(2 * a[..., 0].numel())
        return (b - a).square().sum(-1)

    def embed(self, z: Tensor, origin: Tensor | None = None) -> tuple[Tensor, Tensor] | None:
        self.decoded.append(z[..., 0].numel())
        return (z, z) if self.embedded else None


HALF_PLANE = pb.FisherRaoMetric(lambda z: Normal(z[..., 0], z[..., 1]))
FLAT = {"lattice 2-D": (pb.Lattice, 2), "lattice 3-D": (pb.Lattice, 3), "code graph 5-D": (pb.CodeGraph, 5)}


def cloud(n: int, d: int, seed: int = 0) -> Tensor:
    return torch.rand(n, d, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) * 4 - 2


def graph(name: str) -> tuple[pb.Graph, Tensor, Tensor]:
    kind, d = FLAT[name]
    options = {} if kind is pb.CodeGraph else {"num_nodes": 2500}
    codes = cloud(300, d)
    return kind.fit(Flat(), codes, **options), codes[:20], cloud(20, d, seed=1)


def brute_force(metric: pb.Metric, points: Tensor) -> Tensor:
    """Length of polylines, measured densely."""
    return pb.length(metric, pb.Polyline(points), num_segments=20 * (points.shape[-2] - 1))


# The stencil


@pytest.mark.parametrize("d", [2, 3])
def test_stencil_error_is_below_two_per_cent(d):
    """The unit ball of the graph's norm is the convex hull of the stencil's unit vectors: its inner radius is the worst
    case."""
    half = np.array(stencil(d), dtype=float)
    units = np.concatenate([half, -half]) / np.linalg.norm(np.concatenate([half, half]), axis=1)[:, None]
    inner = -ConvexHull(units).equations[:, -1].max()
    assert 1 / inner - 1 < 0.02
    assert len(units) == {2: 32, 3: 218}[d]


@pytest.mark.parametrize("d", [2, 3])
def test_stencil_has_one_of_each_opposite_pair_and_no_multiples(d):
    offsets = stencil(d)
    assert all(np.gcd.reduce(offset) == 1 for offset in offsets)
    assert not set(offsets) & {tuple(-x for x in offset) for offset in offsets}


def test_the_grid_is_finer_where_decoding_is_cheap():
    def metric(num_outputs: int) -> pb.Metric:
        return pb.FisherRaoMetric(lambda z: Bernoulli(logits=z[..., :1].expand(*z.shape[:-1], num_outputs)))

    counts = [default_nodes(metric(num_outputs), cloud(200, 2)) for num_outputs in (2, 784)]
    assert counts[0] > counts[1]


@pytest.mark.parametrize("num_nodes", [25, 400, 10_000])
def test_the_grid_surrounds_the_codes(num_nodes):
    codes = cloud(200, 2)
    nodes = pb.Lattice.fit(Flat(), codes, num_nodes=num_nodes).nodes
    assert (nodes.amin(0) < codes.amin(0)).all()
    assert (nodes.amax(0) > codes.amax(0)).all()


@pytest.mark.parametrize(("d", "num_nodes"), [(2, 10_000), (3, 5000)])
@pytest.mark.parametrize("embedded", [True, False])
def test_lattice_distances_in_flat_space(d, num_nodes, embedded):
    """Between any two points of the box, also off the nodes: never too short, and at most 2 % too long."""
    lattice = pb.Lattice.fit(Flat(embedded), cloud(200, d), num_nodes=num_nodes)
    a, b = cloud(40, d, seed=1), cloud(40, d, seed=2)
    ratio = lattice.distances(a, b) / (b - a).norm(dim=-1)
    assert ratio.min() > 1 - 1e-12
    assert ratio.max() < 1.02


@pytest.mark.parametrize(("d", "num_nodes"), [(2, 10_000), (3, 5000)])
def test_lattice_routes_in_flat_space(d, num_nodes, monkeypatch):
    """The same along edges alone, without the straight ones between near end points, over more than a few cells."""
    monkeypatch.setattr("pullback._starts.graph._DIRECT_STEPS", 0)
    lattice = pb.Lattice.fit(Flat(), cloud(200, d), num_nodes=num_nodes)
    a, b = lattice.nodes[torch.randint(len(lattice.nodes), (2, 60))]
    far = (b - a).norm(dim=-1) > 8 * lattice.spacing
    ratio = lattice.distances(a, b)[far] / (b - a)[far].norm(dim=-1)
    assert far.sum() > 20
    assert ratio.min() > 1 - 1e-12
    assert 1.005 < ratio.max() < 1.02


@pytest.mark.parametrize("d", [2, 3])
def test_lattice_decodes_few_shifted_grids(d):
    """Where 16 and 109 edges a node would have 2 to 4 sub-steps each."""
    metric = Flat()
    lattice = pb.Lattice.fit(metric, cloud(100, d), num_nodes=4000)
    assert sum(metric.decoded) == {2: 9, 3: 43}[d] * len(lattice.nodes)


def test_lattice_weights_are_edge_lengths(monkeypatch):
    """The shared sub-points of the grid and a walk along every edge give the same lengths, whatever the window."""
    codes = torch.stack([cloud(50, 2)[:, 0], cloud(50, 2)[:, 1].exp()], -1)
    lattice = pb.Lattice.fit(HALF_PLANE, codes, num_nodes=600, margin=0.01)
    edges = lattice.weights.tocoo()
    a, b = lattice.nodes[edges.row], lattice.nodes[edges.col]
    cells = ((b - a) / (lattice.spacing / 1.25)).abs().amax(1).round().clamp_min(2)
    for count in (2, 3):
        chosen = cells == count
        walk = torch.lerp(a[chosen][:, None], b[chosen][:, None], torch.linspace(0, 1, count + 1).double()[:, None])
        np.testing.assert_allclose(edges.data[chosen.numpy()], pb.length(HALF_PLANE, walk), rtol=1e-4)
    monkeypatch.setattr("pullback._starts.lattice.MAX_DECODED", 1)
    narrow = pb.Lattice.fit(HALF_PLANE, codes, num_nodes=600, margin=0.01)
    np.testing.assert_allclose(narrow.weights.toarray(), lattice.weights.toarray(), rtol=1e-9)


# Known geometry


@pytest.mark.parametrize("kind", [pb.Lattice, pb.CodeGraph])
def test_half_plane(kind):
    """Distances of normal distributions: never shorter than the closed form, and a few per cent longer."""
    codes = torch.stack([cloud(1500, 2)[:, 0], (cloud(1500, 2)[:, 1] / 2).exp()], -1)
    a, b = codes[:40], codes[40:80]
    exact = pb.rao_distance(Normal(*a.T), Normal(*b.T))
    fitted = kind.fit(HALF_PLANE, codes, **({"margin": 0.02, "num_nodes": 40_000} if kind is pb.Lattice else {}))
    ratio = fitted.distances(a, b) / exact
    assert ratio.min() > 1 - 1e-9
    assert ratio.mean() < {pb.Lattice: 1.015, pb.CodeGraph: 1.06}[kind]
    assert ratio.max() < {pb.Lattice: 1.025, pb.CodeGraph: 1.3}[kind]


@pytest.mark.parametrize("name", FLAT)
def test_distance_is_the_length_of_the_path(name):
    fitted, a, b = graph(name)
    length = pb.length(Flat(), fitted.paths(a, b, 3000))
    torch.testing.assert_close(length, fitted.distances(a, b), rtol=2e-3, atol=0)


@pytest.mark.parametrize("name", FLAT)
def test_distances_are_symmetric_and_at_least_euclidean(name):
    fitted, a, b = graph(name)
    torch.testing.assert_close(fitted.distances(a, b), fitted.distances(b, a))
    assert (fitted.distances(a, b) >= (b - a).norm(dim=-1) * (1 - 1e-12)).all()


def test_triangle_inequality_between_nodes():
    fitted, _, _ = graph("lattice 2-D")
    x, y, z = fitted.nodes[torch.randint(len(fitted.nodes), (3, 30))]
    detour = fitted.distances(x, y) + fitted.distances(y, z)
    assert (fitted.distances(x, z) <= detour * (1 + 1e-12)).all()


def wall(thickness: float) -> pb.FisherRaoMetric:
    """A decoder that is the identity but for a bump along x = 0, ten high, with a gate at y > 1.5."""

    def decoder(z: Tensor) -> Normal:
        x, y = z.unbind(-1)
        bump = 10 * torch.exp(-((x / thickness) ** 2)) * torch.sigmoid(40 * (1.5 - y))
        return Normal(torch.stack([x, y, bump], -1), 1.0)

    return pb.FisherRaoMetric(decoder)


def test_edges_do_not_hop_over_a_wall():
    """The wall is thinner than the longest edges: measured by their ends alone they would cross it for nothing."""
    codes = cloud(200, 2)
    lattice = pb.Lattice.fit(wall(1.0), codes, num_nodes=1600)
    cell = lattice.spacing / 1.25
    metric = wall(0.6 * cell)
    lattice = pb.Lattice.fit(metric, codes, num_nodes=1600)
    a = torch.tensor([[-1.0, 0.3], [-0.5, -1.2]], dtype=torch.float64)
    b = torch.tensor([[1.0, 0.1], [0.5, -0.8]], dtype=torch.float64)
    assert edge_lengths(metric, a * cell * 1.5, b * cell * 1.5, 100.0).max() < 5 * cell  # the hop that must not happen
    paths = lattice.paths(a, b, 200)
    crossing = paths[:, :, 0].abs().argmin(1)
    assert (paths[torch.arange(2), crossing, 1] > 1.5).all(), "the paths go round, through the gate"
    gate = torch.tensor([0.0, 1.6], dtype=torch.float64)
    detour = (a - gate).norm(dim=-1) + (b - gate).norm(dim=-1)
    assert (lattice.distances(a, b) < 1.1 * detour).all()
    assert (brute_force(metric, paths) < 1.5 * detour).all()


# Paths


@pytest.mark.parametrize("name", FLAT)
def test_paths_end_exactly_and_have_no_two_points_in_one_place(name):
    fitted, a, b = graph(name)
    paths = fitted.paths(a, b, 65)
    assert torch.equal(paths[:, 0], a)
    assert torch.equal(paths[:, -1], b)
    steps = (paths[:, 1:] - paths[:, :-1]).norm(dim=-1)
    assert (steps > 0.2 * steps.mean(-1, keepdim=True)).all()


def test_paths_through_a_void_are_straight_and_have_no_two_points_in_one_place():
    """Where the metric vanishes all routes cost nothing; the shortest is taken, and some points stay in it."""
    metric = pb.FisherRaoMetric(lambda z: Normal(torch.relu(z[..., :1] - 1), 1.0))
    lattice = pb.Lattice.fit(metric, cloud(100, 2), num_nodes=1600)
    a, b = torch.tensor([[-1.9, 1.0]], dtype=torch.float64), torch.tensor([[1.9, 1.0]], dtype=torch.float64)
    path = lattice.paths(a, b, 50)[0]
    assert ((path[1:] - path[:-1]).norm(dim=-1) > 1e-3).all()
    assert (path[:, 1] - 1).abs().max() < 0.1
    assert (path[:, 0] < 1).sum() > 3


@pytest.mark.parametrize("name", FLAT)
def test_batch_is_loop(name):
    fitted, a, b = graph(name)
    looped = torch.cat([fitted.paths(x[None], y[None], 33) for x, y in zip(a, b, strict=True)])
    torch.testing.assert_close(fitted.paths(a, b, 33), looped, rtol=0, atol=1e-12)
    torch.testing.assert_close(fitted.paths(a.reshape(4, 5, -1), b.reshape(4, 5, -1), 33), looped.reshape(4, 5, 33, -1))
    looped = torch.cat([fitted.distances(x[None], y[None]) for x, y in zip(a, b, strict=True)])
    torch.testing.assert_close(fitted.distances(a, b), looped)


def test_many_sources_and_many_pairs_go_in_batches(monkeypatch):
    fitted, a, b = graph("lattice 2-D")
    pairs = torch.tensor(list(itertools.product(range(20), range(5))))
    expected = fitted.paths(a[pairs[:, 0]], b[pairs[:, 1]], 17)
    monkeypatch.setattr(graphs, "_MAX_SOURCES", 3)
    monkeypatch.setattr(graphs, "_MAX_PAIRS", 4)
    torch.testing.assert_close(fitted.paths(a[pairs[:, 0]], b[pairs[:, 1]], 17), expected)


def test_one_search_for_each_distinct_source(monkeypatch):
    fitted, a, b = graph("lattice 2-D")
    searched = []
    dijkstra = graphs.csgraph.dijkstra
    monkeypatch.setattr(
        graphs.csgraph,
        "dijkstra",
        lambda g, indices, **kw: searched.extend(indices) or dijkstra(g, indices=indices, **kw),
    )
    fitted.distances(a[:2].repeat(10, 1), b)
    assert len(searched) == 2


def test_end_points_on_nodes_beside_each_other_equal_and_outside():
    fitted, _, _ = graph("lattice 2-D")
    node = fitted.nodes[[40]]
    near = node + 1e-3
    outside = torch.tensor([[9.0, 0.0]], dtype=torch.float64)
    assert fitted.distances(node, node).item() == 0
    assert torch.equal(fitted.paths(node, node, 5), node.expand(1, 5, 2))
    torch.testing.assert_close(fitted.distances(node, near), (near - node).norm(dim=-1))
    torch.testing.assert_close(fitted.distances(node, outside), (outside - node).norm(dim=-1), rtol=0.05, atol=0)
    assert torch.equal(fitted.paths(node, outside, 5)[:, -1], outside)


def test_bad_end_points_do_not_spoil_the_batch():
    fitted, a, b = graph("lattice 2-D")
    spoiled = a.clone()
    spoiled[3, 0] = torch.nan
    distances, paths = fitted.distances(spoiled, b), fitted.paths(spoiled, b, 9)
    assert distances.isnan().nonzero().tolist() == [[3]]
    keep = torch.arange(20) != 3
    torch.testing.assert_close(paths[keep], fitted.paths(a, b, 9)[keep])
    assert fitted.paths(a[:0], b[:0], 9).shape == (0, 9, 2)


def test_codes_that_decode_to_nan_are_walked_around():
    """A disc without a decoding: no edge enters it, paths go round, and its inside cannot be reached."""

    def decoder(z: Tensor) -> Normal:
        return Normal(torch.where(z.norm(dim=-1, keepdim=True) < 1, torch.nan, z), 1.0)

    lattice = pb.Lattice.fit(pb.FisherRaoMetric(decoder), cloud(300, 2), num_nodes=2500)
    a, b = torch.tensor([[-1.8, 0.0]], dtype=torch.float64), torch.tensor([[1.8, 0.0]], dtype=torch.float64)
    assert lattice.paths(a, b, 50).norm(dim=-1).min() > 0.98
    tangents = 2 * (1.8**2 - 1) ** 0.5 + np.pi - 2 * np.arccos(1 / 1.8)
    assert lattice.distances(a, b).item() == pytest.approx(tangents, rel=0.05)
    inside = torch.zeros(1, 2, dtype=torch.float64)
    assert lattice.distances(a, inside).isinf().all()
    torch.testing.assert_close(lattice.paths(a, inside, 3)[0, 1], (a + inside)[0] / 2)


# Codes


def test_separate_clouds_are_connected():
    """By the tree of the shortest links: 0 - 1 - 2 - 3, with lengths 100, 150 and 200."""
    centers = torch.tensor([[0.0, 0.0], [100.0, 0.0], [100.0, 150.0], [300.0, 150.0]]).double()
    fitted = pb.CodeGraph.fit(Flat(), (centers[:, None] + cloud(40, 2) / 4).flatten(0, 1), num_neighbors=5)
    i, j = torch.cartesian_prod(torch.arange(4), torch.arange(4)).T
    along = torch.tensor([0.0, 100.0, 250.0, 450.0]).double()
    torch.testing.assert_close(fitted.distances(centers[i], centers[j]), (along[i] - along[j]).abs(), rtol=0.01, atol=0)


def test_code_graph_takes_a_sample_and_forgets_duplicates():
    codes = cloud(500, 3).repeat(2, 1)
    assert len(pb.CodeGraph.fit(Flat(), codes).nodes) == 500
    small = pb.CodeGraph.fit(Flat(), codes, max_nodes=50)
    assert len(small.nodes) == 50
    assert (small.nodes[:, None] == codes).all(-1).any(1).all()
    assert torch.equal(small.nodes, pb.CodeGraph.fit(Flat(), codes, max_nodes=50).nodes)


def test_more_neighbors_shorten_paths():
    codes, (a, b) = cloud(400, 4), (cloud(30, 4, seed=1), cloud(30, 4, seed=2))
    lengths = [pb.CodeGraph.fit(Flat(), codes, num_neighbors=k).distances(a, b) for k in (4, 12, 399)]
    assert (lengths[1] <= lengths[0] + 1e-12).all()
    torch.testing.assert_close(lengths[2], (b - a).norm(dim=-1), rtol=0.05, atol=0)


# Precision and errors


def test_single_precision_is_kept_and_good_enough():
    """The normal family's dual embedding cancels between far nodes; in float32 the lattice measures steps one by
    one."""
    codes = torch.stack([cloud(200, 2)[:, 0] + 1000, (cloud(200, 2)[:, 1] / 2).exp()], -1)
    double = pb.Lattice.fit(HALF_PLANE, codes, num_nodes=900, margin=0.01)
    single = pb.Lattice.fit(HALF_PLANE, codes.float(), num_nodes=900, margin=0.01)
    a, b = codes[:20], codes[20:40]
    found = single.distances(a.float(), b.float())
    assert found.dtype == single.paths(a.float(), b.float(), 5).dtype == torch.float32
    torch.testing.assert_close(found.double(), double.distances(a, b), rtol=1e-2, atol=0)


def test_wrong_input_gets_a_sentence():
    with pytest.raises(ValueError, match=r"pullback\.CodeGraph\.fit"):
        pb.Lattice.fit(Flat(), cloud(10, 4))
    for kind in (pb.Lattice, pb.CodeGraph):
        with pytest.raises(ValueError, match="10 of 10 rows are NaN"):
            kind.fit(Flat(), torch.full((10, 2), torch.nan))
        with pytest.raises(ValueError, match="at least 2 codes"):
            kind.fit(Flat(), torch.zeros(2))
    fitted, a, _ = graph("lattice 2-D")
    with pytest.raises(ValueError, match="Codes and tangents of 2 dimensions are expected"):
        fitted.paths(a, cloud(20, 3), 5)
    with pytest.raises(ValueError, match="on meta"):
        replace(fitted, nodes=fitted.nodes.to("meta")).paths(a, a, 5)
    broken = pb.FisherRaoMetric(lambda z: Normal(z * torch.nan, 1.0))
    with pytest.raises(ValueError, match="NaN at all of its nodes"):
        pb.Lattice.fit(broken, cloud(10, 2), num_nodes=100).distances(a, a)
