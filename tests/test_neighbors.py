"""Nearest neighbors under a metric: those of the full matrix, with fewer geodesics; certified rows are right."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from scipy import sparse
from scipy.optimize import brentq
from torch import Tensor
from torch.distributions import Bernoulli, Normal
from torch.nn.functional import softplus

import pullback as pb
from helpers import network
from problems import PROBLEMS
from pullback import cli
from pullback._geometry.pairwise import neighbors as neighborhoods
from pullback._geometry.pairwise.neighbors import nearest_in_position, positions
from pullback.results import Status

NORMAL, SIMPLEX, SPHERE = (PROBLEMS[i] for i in (3, 5, 7))


def pixels() -> pb.Metric:
    net = network(2, 16, 100)
    return pb.FisherRaoMetric(lambda z: Bernoulli(logits=2 * net(z)))


def scales() -> pb.Metric:
    """A family without a Euclidean embedding."""
    net = network(2, 16, 6)
    return pb.FisherRaoMetric(lambda z: Normal(net(z)[..., :3], 0.1 + softplus(net(z)[..., 3:])))


def codes(n: int) -> Tensor:
    return torch.randn(n, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def by_matrix(metric: pb.Metric, Z: Tensor, k: int) -> Tensor:
    D = pb.pairwise_distances(metric, Z, n_jobs=1).fill_diagonal_(torch.inf)
    return D.topk(k, largest=False, sorted=True).values


def rows(found: pb.results.Neighbors) -> Tensor:
    return torch.from_numpy(found.distances.data.reshape(len(found.certified), found.n_neighbors))


@pytest.mark.parametrize("problem", [SIMPLEX, SPHERE], ids=str)
def test_neighbors_are_those_known(problem):
    Z, queries = problem.points(40), problem.points(7)
    found = pb.neighbors(problem.metric, Z, 3, queries=queries)
    exact = problem.distance(queries[:, None], Z).topk(3, largest=False, sorted=True)
    assert found.distances.shape == (7, 40)
    torch.testing.assert_close(rows(found), exact.values, rtol=1e-5, atol=0)
    assert (found.distances.indices.reshape(7, 3) == exact.indices.numpy()).all()
    assert found.certified.all()


@pytest.mark.parametrize("metric", [pixels(), scales()], ids=["embedded", "not embedded"])
def test_neighbors_are_those_of_the_matrix_with_fewer_paths(metric):
    Z = codes(40)
    found = pb.neighbors(metric, Z, 4, n_jobs=1)
    torch.testing.assert_close(rows(found), by_matrix(metric, Z, 4), rtol=1e-4, atol=0)
    assert found.num_solved < 0.45 * 40 * 39 / 2
    assert (found.distances.diagonal() == 0).all()


def test_only_bounds_certify():
    Z = codes(40)
    assert pb.neighbors(pixels(), Z, 4, n_jobs=1).certified.all()
    assert not pb.neighbors(scales(), Z[:30], 4, n_jobs=1).certified.any()
    # All pairs solved need no bound.
    assert pb.neighbors(scales(), Z[:12], 2, max_candidates=12, n_jobs=1).certified.all()


def test_where_chords_mislead_rows_are_not_certified_unless_all_are_solved():
    """On a spiral, codes on the next turn are near by chord and far by path."""

    def turns(z: Tensor) -> Normal:
        return Normal(torch.cat([z * torch.cos(9 * z), z * torch.sin(9 * z)], -1), 1.0)

    metric, Z = pb.EuclideanMetric(turns), torch.linspace(1, 3, 40, dtype=torch.float64)[:, None]
    exact = by_matrix(metric, Z, 4)
    few, all_pairs = (pb.neighbors(metric, Z, 4, max_candidates=num, n_jobs=1) for num in (8, 40))
    torch.testing.assert_close(rows(few), exact, rtol=1e-4, atol=0)
    assert not few.certified.all()
    torch.testing.assert_close(rows(all_pairs), exact, rtol=1e-4, atol=0)
    assert all_pairs.certified.all()


@pytest.mark.parametrize("metric", [pixels(), SPHERE.metric, SIMPLEX.metric], ids=["pixels", "sphere", "simplex"])
def test_positions_bound_distances_from_below(metric):
    Z = 0.5 * codes(12)
    points, is_bound = positions(metric, Z)
    assert is_bound
    flat = torch.cdist(points, points)
    assert (flat <= pb.pairwise_distances(metric, Z, n_jobs=1) * (1 + 1e-6) + 1e-12).all()


def test_positions_of_a_family_that_codes_leave_are_no_bounds():
    assert not positions(scales(), codes(12))[1]


def test_nearest_positions():
    x = torch.randn(50, 5, dtype=torch.float64)
    index, lower, beyond = nearest_in_position(x, x, 6, own=True)
    flat = torch.cdist(x, x).fill_diagonal_(torch.inf).topk(7, largest=False, sorted=True)
    assert (index == flat.indices[:, :6]).all()
    torch.testing.assert_close(lower, flat.values[:, :6])
    torch.testing.assert_close(beyond, flat.values[:, 6])


def test_a_bad_code_has_no_neighbors_and_is_none():
    Z = codes(20)
    Z[7] = torch.nan
    found = pb.neighbors(pixels(), Z, 3, n_jobs=1)
    dense = found.distances.toarray()
    assert (dense[7] == 0).all()
    assert (dense[:, 7] == 0).all()
    assert (np.diff(found.distances.indptr)[np.arange(20) != 7] == 3).all()


def test_stored_rounds_are_not_solved_again(tmp_path):
    pytest.importorskip("zarr")
    Z, path = codes(30), tmp_path / "n.zarr"
    first = pb.neighbors(pixels(), Z, 3, out=path, n_jobs=1)
    before = {file: file.stat().st_mtime_ns for file in path.rglob("*")}
    again = pb.neighbors(pixels(), Z, 3, out=path, n_jobs=1)
    assert {file: file.stat().st_mtime_ns for file in path.rglob("*")} == before
    np.testing.assert_array_equal(first.distances.toarray(), again.distances.toarray())
    with pytest.raises(ValueError, match="holds distances of another run"):
        pb.neighbors(pixels(), Z + 1e-9, 3, out=path, n_jobs=1)


@dataclass(frozen=True)
class GivesUp(pb.GaussNewton):
    """Ends no path that starts in the left half-plane."""

    def solve(self, metric: pb.Metric, nodes: Tensor, **options) -> pb.results.Geodesic:
        found = super().solve(metric, nodes, **options)
        return replace(found, status=found.status.masked_fill(nodes[:, 0, 0] < 0, Status.MAX_STEPS))


def test_failures_are_stored_with_the_numbers_of_the_codes(tmp_path, monkeypatch):
    pytest.importorskip("zarr")
    monkeypatch.setattr(neighborhoods, "_BLOCK", 4)
    Z = codes(12)
    with pytest.warns(pb.results.FailedPairsWarning) as seen:
        pb.neighbors(pixels(), Z, 2, out=tmp_path / "n.zarr", n_jobs=1, solver=GivesUp())
    stores = [pb.results.DistanceStore.open(tmp_path / "n.zarr" / name) for name in ("round-0", "round-1")]
    warned = [w.message.failures for w in seen if isinstance(w.message, pb.results.FailedPairsWarning)]
    assert sorted(pair for failures in warned for pair in failures) == sorted(
        pair for store in stores for pair in store.failures()
    )
    assert any(warned)


def test_wrong_arguments_are_refused():
    for arguments, words in (
        ({"k": 10}, "k=10 must be between 1 and 9"),
        ({"k": 0}, "k=0"),
        ({"k": 2, "queries": codes(4)[0]}, r"must have shape \(n, d\)"),
    ):
        with pytest.raises(ValueError, match=words):
            pb.neighbors(pixels(), codes(10), **arguments)
    found = pb.neighbors(pixels(), codes(10), 2, queries=codes(3), n_jobs=1)
    with pytest.raises(ValueError, match="without queries"):
        found.connectivities()


def test_connectivities_are_those_of_umap():
    """From each code the weights sum to the logarithm of their number; both directions are joined as probabilities."""
    flat = torch.cdist(codes(50), codes(50)).fill_diagonal_(torch.inf).topk(5, largest=False, sorted=True)
    graph = sparse.csr_array(
        (flat.values.numpy().ravel(), flat.indices.numpy().ravel(), np.arange(0, 251, 5)), shape=(50, 50)
    )
    weights = pb.results.Neighbors(graph, np.ones(50, bool), 0, 5).connectivities().toarray()
    np.testing.assert_allclose(weights, weights.T, rtol=1e-12)
    lone = np.exp(-(graph.data.reshape(50, 5) - graph.data.reshape(50, 5)[:, :1]) / scale_of(graph)[:, None])
    np.testing.assert_allclose(lone.sum(1), np.log2(6), rtol=1e-9)
    one_way = sparse.csr_array((lone.ravel(), graph.indices, graph.indptr), shape=(50, 50)).toarray()
    np.testing.assert_allclose(weights, 1 - (1 - one_way) * (1 - one_way.T), rtol=1e-9)


def scale_of(graph: sparse.csr_array) -> np.ndarray:
    """The bandwidth of each row, by another root finder."""
    excess = graph.data.reshape(50, 5) - graph.data.reshape(50, 5)[:, :1]
    return np.array([brentq(lambda s, row=row: np.exp(-row / s).sum() - np.log2(6), 1e-6, 1e3) for row in excess])


def test_command_line(tmp_path, monkeypatch, capsys):
    pytest.importorskip("zarr")
    monkeypatch.chdir(tmp_path)
    np.save("codes.npy", codes(15).numpy())
    (tmp_path / "flat.py").write_text(
        "import torch, pullback as pb\ndef decoder(z):\n    return torch.distributions.Poisson(z.exp())\n"
    )
    arguments = ["distances", "flat:decoder", "--codes", "codes.npy", "--workers", "1", "--out"]
    cli.main([*arguments, "n.zarr", "--neighbors", "2"])
    assert "15 certified" in capsys.readouterr().out
    root = 2 * (codes(15) / 2).exp()
    D = torch.cdist(root, root).fill_diagonal_(torch.inf).sort().values
    np.testing.assert_allclose(sparse.load_npz("n.zarr/neighbors.npz").max(1).toarray()[:, 0], D[:, 1], rtol=1e-5)
    for wrong, words in (
        (["distances", "flat", "--codes", "codes.npy", "--out", "x"], "MODULE:NAME"),
        (["distances", "flat:encoder", "--codes", "codes.npy", "--out", "x"], "has no encoder"),
        ([*arguments, "x", "--shard", "one"], "as i/n"),
        ([*arguments, "n.zarr"], "is not a store"),
        (["distances", "flat:decoder", "--codes", "none.npy", "--out", "x"], "none.npy"),
    ):
        with pytest.raises(SystemExit, match=words):
            cli.main(wrong)
