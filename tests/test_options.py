"""Options that make no sense, or contradict each other, get a sentence that names them."""

from __future__ import annotations

import matplotlib.pyplot as plt
import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Bernoulli

import pullback as pb
from pullback import plot

torch.manual_seed(0)
NET = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 5)).eval().requires_grad_(False)


def decoder(z: Tensor) -> Bernoulli:
    return Bernoulli(logits=NET(z))


METRIC, CODES, COARSE = pb.FisherRaoMetric(decoder), torch.randn(8, 2), pb.GaussNewton(rtol=1e-2)
A, B = CODES[:2]
PATH, SUPPORT = pb.geodesic(METRIC, A, B, solver=COARSE), pb.Support.fit(CODES, 3)

# The option that the sentence has to name, and the call.
REFUSED = [
    ("rtol", lambda: pb.GaussNewton(rtol=-1)),
    ("rtol", lambda: pb.GaussNewton(rtol=float("nan"))),
    ("accept", lambda: pb.GaussNewton(accept=-1.0)),
    ("budget", lambda: pb.GaussNewton(budget=0)),
    ("max_steps", lambda: pb.GaussNewton(max_steps=0)),
    ("chunk_bytes", lambda: pb.GaussNewton(chunk_bytes=-1)),
    ("min_segments", lambda: pb.GaussNewton(min_segments=16, max_segments=8)),
    ("solver", lambda: pb.geodesic(METRIC, A, B, solver="newton")),
    ("solver", lambda: pb.geodesic(METRIC, A, B, solver=pb.GaussNewton)),
    ("init", lambda: pb.geodesic(METRIC, A, B, init="lattice")),
    ("init", lambda: pb.geodesic(METRIC, A, B, init=pb.Lattice)),
    ("init", lambda: pb.geodesic(METRIC, A, B, init=[])),
    ("support", lambda: pb.geodesic(METRIC, A, B, support=CODES)),
    ("rtol", lambda: pb.expmap(METRIC, A, 0.1 * B, rtol=-1.0)),
    ("atol", lambda: pb.expmap(METRIC, A, 0.1 * B, atol=-1.0)),
    ("rtol", lambda: pb.expmap(METRIC, A, 0.1 * B, rtol=float("nan"))),
    ("max_steps", lambda: pb.expmap(METRIC, A, 0.1 * B, max_steps=0)),
    ("t", lambda: pb.expmap(METRIC, A, 0.1 * B, float("nan"))),
    ("rtol", lambda: pb.logmap(METRIC, A, B, rtol=-1.0)),
    ("rtol", lambda: pb.logmap(METRIC, A, B, rtol=0)),
    ("rtol", lambda: pb.logarithm(METRIC, A, B, rtol=float("nan"))),
    ("rtol", lambda: pb.parallel_transport(METRIC, PATH, B, rtol=-1.0)),
    ("max_segments", lambda: pb.parallel_transport(METRIC, PATH, B, max_segments=0)),
    ("max_segments", lambda: pb.parallel_transport(METRIC, PATH, B, max_segments=-4)),
    ("num_segments", lambda: pb.energy(METRIC, PATH, num_segments=0)),
    ("num_segments", lambda: pb.energy(METRIC, PATH, num_segments=2.5)),
    ("num_points", lambda: PATH.curve.constant_speed(METRIC, num_points=-3)),
    ("n_jobs", lambda: pb.pairwise_distances(METRIC, CODES, n_jobs=0, solver=COARSE)),
    ("n_jobs", lambda: pb.pairwise_distances(METRIC, CODES, n_jobs=-5, solver=COARSE)),
    ("block_size", lambda: pb.pairwise_distances(METRIC, CODES, block_size=0, solver=COARSE)),
    ("block_size", lambda: pb.pairwise_distances(METRIC, CODES, block_size=-1, solver=COARSE)),
    ("block_size", lambda: pb.pairwise_distances(METRIC, CODES, block_size=1.5, solver=COARSE)),
    ("batch_size", lambda: pb.pairwise_distances(METRIC, CODES, batch_size=0, solver=COARSE)),
    ("batch_size", lambda: pb.pairwise_distances(METRIC, CODES, batch_size=-1, solver=COARSE)),
    ("errors", lambda: pb.pairwise_distances(METRIC, CODES, errors="ignore", solver=COARSE)),
    ("shard", lambda: pb.pairwise_distances(METRIC, CODES, shard=(0, 2), solver=COARSE)),
    ("n_jobs", lambda: pb.pairwise_distances(METRIC, CODES, client="tcp://localhost:1", n_jobs=2, solver=COARSE)),
    (
        "devices",
        lambda: pb.pairwise_distances(METRIC, CODES, client="tcp://localhost:1", devices=["cpu"], solver=COARSE),
    ),
    ("devices", lambda: pb.pairwise_distances(METRIC, CODES, devices=["gpu"], solver=COARSE)),
    ("devices", lambda: pb.pairwise_distances(METRIC, CODES, devices=[], solver=COARSE)),
    ("solver", lambda: pb.pairwise_distances(METRIC, CODES, solver="newton", n_jobs=1)),
    ("init", lambda: pb.pairwise_distances(METRIC, CODES, init=PATH, n_jobs=1, solver=COARSE)),
    ("k", lambda: pb.neighbors(METRIC, CODES, 0, solver=COARSE)),
    ("k", lambda: pb.neighbors(METRIC, CODES, 2.5, solver=COARSE)),
    ("max_candidates", lambda: pb.neighbors(METRIC, CODES, 2, max_candidates=-1, solver=COARSE)),
    ("errors", lambda: pb.neighbors(METRIC, CODES, 3, errors="x", solver=COARSE)),
    ("batch_size", lambda: pb.neighbors(METRIC, CODES, 2, batch_size=-1, solver=COARSE)),
    ("n_jobs", lambda: pb.neighbors(METRIC, CODES, 2, n_jobs=0, solver=COARSE)),
    ("num_nodes", lambda: pb.Lattice.fit(METRIC, CODES, num_nodes=0)),
    ("num_nodes", lambda: pb.Lattice.fit(METRIC, CODES, num_nodes=-4)),
    ("num_nodes", lambda: pb.Lattice.fit(METRIC, CODES, num_nodes=1)),
    ("margin", lambda: pb.Lattice.fit(METRIC, CODES, margin=-1.0, num_nodes=25)),
    ("num_neighbors", lambda: pb.CodeGraph.fit(METRIC, CODES, num_neighbors=0)),
    ("num_neighbors", lambda: pb.CodeGraph.fit(METRIC, CODES, num_neighbors=-1)),
    ("max_nodes", lambda: pb.CodeGraph.fit(METRIC, CODES, max_nodes=0)),
    ("max_nodes", lambda: pb.CodeGraph.fit(METRIC, CODES, max_nodes=1)),
    ("num_centers", lambda: pb.Support.fit(CODES, 0)),
    ("num_centers", lambda: pb.Support.fit(CODES, -1)),
    ("scale", lambda: pb.Support.fit(CODES, 3, scale=0.0)),
    ("scale", lambda: pb.Support.fit(CODES, 3, scale=-1.0)),
    ("quantile", lambda: pb.Support.fit(CODES, 3, quantile=2.0)),
    ("quantile", lambda: pb.Support.fit(CODES, 3, quantile=-1.0)),
    ("strength", lambda: pb.Extrapolated(decoder, SUPPORT, strength=-1.0)),
    ("strength", lambda: pb.Extrapolated(decoder, SUPPORT, strength=0.0)),
    ("beta", lambda: pb.Reweighted(decoder, SUPPORT, beta=float("nan"))),
    ("num_features", lambda: pb.RBFPrecision(SUPPORT, num_features=0)),
    ("scale", lambda: pb.RBFPrecision(SUPPORT, num_features=2, scale=-1.0)),
    ("ceiling", lambda: pb.RBFPrecision(SUPPORT, num_features=2, ceiling=0.0)),
    ("lengthscale", lambda: pb.GPDecoder(CODES, CODES, lengthscale=0.0, signal=1.0, noise=0.1)),
    ("noise", lambda: pb.GPDecoder(CODES, CODES, lengthscale=1.0, signal=1.0, noise=-0.1)),
    ("max_iterations", lambda: pb.GPDecoder.fit(CODES, CODES, max_iterations=0)),
    ("bandwidth", lambda: pb.InterpolatedMetric.fit(METRIC, CODES, bandwidth=0.0)),
    ("bandwidth", lambda: pb.InterpolatedMetric.fit(METRIC, CODES, bandwidth=-1.0)),
    ("resolution", lambda: pb.Grid(CODES[0] * 0, CODES[0] * 0 + 1, resolution=1)),
    ("num_samples", lambda: pb.ScoreMetric(decoder, 0).tensor(CODES)),
    ("num_samples", lambda: pb.score_information(decoder(CODES), num_samples=0)),
    ("correlation_length", lambda: pb.EnsembleMetric(pb.EnsembleDecoder([decoder, decoder]), 0.0)),
    ("method", lambda: pb.DivergenceMetric(decoder, method="hessian").tensor(CODES)),
    ("eps", lambda: pb.DivergenceMetric(decoder, method=pb.divergences.CentralDifference(eps=0.0)).tensor(CODES)),
    ("eps", lambda: pb.DivergenceMetric(decoder, method=pb.divergences.CentralDifference(eps=-1.0)).tensor(CODES)),
    ("method", lambda: pb.statistics.distance_uncertainty(METRIC, A, B, A.abs(), method="mc", solver=COARSE)),
    (
        "num_samples",
        lambda: pb.statistics.distance_uncertainty(
            METRIC, A, B, 0.01 * A.abs(), method="samples", num_samples=0, solver=COARSE
        ),
    ),
    (
        "num_samples",
        lambda: pb.statistics.distance_uncertainty(
            METRIC, A, B, 0.01 * A.abs(), method="samples", num_samples=1, solver=COARSE
        ),
    ),
    ("num_points", lambda: pb.uncertainty_report(decoder, CODES, num_points=0, num_pairs=1)),
    ("num_pairs", lambda: pb.uncertainty_report(decoder, CODES, num_points=5, num_pairs=0)),
    ("num_pairs", lambda: pb.statistics.identifiability([METRIC, METRIC], [CODES, CODES], num_pairs=0, solver=COARSE)),
    ("num_pairs", lambda: pb.statistics.identifiability([METRIC, METRIC], [CODES, CODES], num_pairs=-1, solver=COARSE)),
    (
        "pairs",
        lambda: pb.statistics.identifiability(
            [METRIC, METRIC], [CODES, CODES], pairs=torch.tensor([[0, 99]]), solver=COARSE
        ),
    ),
    (
        "pairs",
        lambda: pb.statistics.identifiability(
            [METRIC, METRIC], [CODES, CODES], pairs=torch.tensor([0, 1]), solver=COARSE
        ),
    ),
    ("num_segments", lambda: pb.contributions(METRIC, PATH, num_segments=3)),
    ("rtol", lambda: pb.statistics.frechet_mean(METRIC, CODES, rtol=-1.0)),
    ("max_steps", lambda: pb.statistics.frechet_mean(METRIC, CODES, max_steps=0)),
    ("max_iter", lambda: pb.statistics.GeodesicKMeans(n_clusters=2, metric=METRIC, max_iter=0).fit(CODES)),
    ("n_init", lambda: pb.statistics.GeodesicKMeans(n_clusters=2, metric=METRIC, n_init=0).fit(CODES)),
    ("rtol", lambda: pb.statistics.GeodesicKMeans(n_clusters=2, metric=METRIC, rtol=-1.0).fit(CODES)),
    ("num_points", lambda: pb.statistics.LAND(n_components=1, metric=METRIC, num_points=0).fit(CODES)),
    ("max_iter", lambda: pb.statistics.LAND(n_components=1, metric=METRIC, max_iter=0).fit(CODES)),
    ("resolution", lambda: plot.latent(METRIC, CODES, resolution=0)),
    ("clip", lambda: plot.latent(METRIC, CODES, resolution=4, clip=2.0)),
    ("num_points", lambda: plot.paths(PATH, num_points=0)),
    ("length", lambda: plot.fan(METRIC, A, length=0.0)),
    ("length", lambda: plot.fan(METRIC, A, length=-1.0, num_directions=2, num_points=3)),
    ("num_directions", lambda: plot.fan(METRIC, A, length=0.1, num_directions=0)),
    ("num_points", lambda: plot.fan(METRIC, A, length=0.1, num_directions=2, num_points=0)),
    ("resolution", lambda: plot.indicatrices(METRIC, CODES, resolution=0)),
    ("radius", lambda: plot.indicatrices(METRIC, CODES, radius=-1.0)),
    ("num_lines", lambda: plot.exponential_grid(METRIC, A, length=0.1, num_lines=0)),
]


@pytest.mark.parametrize(("option", "call"), REFUSED, ids=[f"{k}-{option}" for k, (option, _) in enumerate(REFUSED)])
def test_a_sentence_names_the_option(option, call):
    with pytest.raises((ValueError, TypeError), match=rf"\b{option}\b"):
        call()
    plt.close("all")


def test_an_rtol_above_accept_is_what_is_accepted():
    """Asking for less than `accept` is no contradiction: the larger of the two decides."""
    found = pb.geodesic(METRIC, A, B, solver=pb.GaussNewton(rtol=0.1, accept=1e-3))
    assert found.converged
    assert found.error <= 0.1


@pytest.mark.filterwarnings("ignore::pullback.results.FailedPairsWarning")
def test_distances_of_rectified_decoders_are_given_where_paths_converge():
    """A path that converged to less than was asked for has a distance, in a matrix as by itself."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 20)).double().requires_grad_(False)
    metric, codes = pb.FisherRaoMetric(lambda z: Bernoulli(logits=3 * net(z))), 2 * torch.randn(4, 2).double()
    solver = pb.GaussNewton(rtol=1e-8)
    alone = pb.geodesic(metric, codes[:, None], codes, solver=solver)
    assert (alone.status == pb.results.Status.ABOVE_RTOL).any(), "the case of this test"
    together = pb.pairwise_distances(metric, codes, solver=solver, n_jobs=1)
    assert together[alone.converged].isfinite().all()
