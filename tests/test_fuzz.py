"""Every public function with codes: what it takes, and what it says to what it does not take.

Arrays, lists and tensors of any precision give what a tensor of the decoder's dtype gives. Anything else gets a
sentence of the library (or of scikit-learn's own validation), never an error from somewhere within.

``PULLBACK_TEST_DEVICE=cuda`` runs all of it with a decoder on a GPU.
"""

from __future__ import annotations

import functools
import inspect
import linecache
import os
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from sklearn.exceptions import ConvergenceWarning
from torch import Tensor, nn
from torch.distributions import Bernoulli, Normal

import pullback as pb
from pullback import divergences, plot, statistics, testing

Call = Callable[[Any, Any], object]
COARSE = pb.GaussNewton(rtol=1e-2)
DEVICE = os.environ.get("PULLBACK_TEST_DEVICE", "cpu")

torch.manual_seed(0)
NET = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 5)).eval().requires_grad_(False).to(DEVICE)


def decoder(z: Tensor) -> Bernoulli:
    return Bernoulli(logits=NET(z))


def normal(z: Tensor) -> Normal:
    return Normal(NET(z), 1.0)


METRIC = pb.FisherRaoMetric(decoder)
CODES = np.random.default_rng(0).normal(size=(8, 2))
TENSOR = torch.as_tensor(CODES, dtype=torch.float32, device=DEVICE)
SUPPORT = pb.Support.fit(TENSOR, 3)
PATH = pb.geodesic(METRIC, CODES[0], CODES[1], solver=COARSE)
GRAPH = pb.CodeGraph.fit(METRIC, TENSOR, num_neighbors=3)
PROCESS = pb.GPDecoder(TENSOR, TENSOR, lengthscale=1.0, signal=1.0, noise=0.1)


def decoder_of(metric: Any) -> Any:
    """What a call that takes a decoder gets in the place of its metric."""
    return decoder if metric is METRIC else metric


def first(z: Any) -> Any:
    """One code, where there are codes."""
    return z[0] if isinstance(z, (np.ndarray, Tensor)) and z.ndim > 1 and len(z) else z


def corners(z: Any) -> Any:
    """The box of the codes, where there is one."""
    return [z.min(0), z.max(0)] if z is CODES else [z.amin(0), z.amax(0)] if z is TENSOR else z


# Each takes a metric and codes (n, d), and gives them to one public function or method.
FUNCTIONS: dict[str, Call] = {
    "CodeGraph.fit": lambda m, z: pb.CodeGraph.fit(m, z, num_neighbors=3).nodes,
    "Lattice.fit": lambda m, z: pb.Lattice.fit(m, z, num_nodes=25).nodes,
    "certify": lambda m, _: pb.certify(m, PATH).upper,
    "contributions": lambda m, z: pb.contributions(m, z).energy,
    "distance": lambda m, z: pb.distance(m, z, CODES, solver=COARSE),
    "statistics.distance_uncertainty": lambda m, z: (
        pb.statistics.distance_uncertainty(m, z, CODES, solver=COARSE).distance
    ),
    "statistics.distance_uncertainty.cov": lambda m, z: (
        pb.statistics.distance_uncertainty(m, z, z, np.eye(2), np.eye(2), solver=COARSE).std
    ),
    "energy": lambda m, z: pb.energy(m, z),
    "expmap": lambda m, z: pb.expmap(m, z, 0.1 * CODES),
    "expmap.velocity": lambda m, z: pb.expmap(m, 0.1 * CODES, z),
    "exponential": lambda m, z: pb.exponential(m, z, 0.1 * CODES).end,
    "gaussian_curvature": lambda m, z: pb.gaussian_curvature(m, z),
    "geodesic": lambda m, z: pb.geodesic(m, z, CODES, solver=COARSE).length,
    "geodesic.end": lambda m, z: pb.geodesic(m, CODES, z, solver=COARSE).length,
    "geodesic.init": lambda m, z: pb.geodesic(m, CODES[0], CODES[-1], init=z, solver=COARSE).length,
    "statistics.identifiability": lambda m, z: (
        pb.statistics.identifiability([m, m], [z, z], num_pairs=2, init=lambda *_: GRAPH, solver=COARSE).distances
    ),
    "length": lambda m, z: pb.length(m, z),
    "logarithm": lambda m, z: pb.logarithm(m, z, CODES, solver=COARSE).velocity,
    "logmap": lambda m, z: pb.logmap(m, z, CODES, solver=COARSE),
    "neighbors": lambda m, z: torch.as_tensor(pb.neighbors(m, z, 1, solver=COARSE).distances.toarray()),
    "neighbors.queries": lambda m, z: torch.as_tensor(
        pb.neighbors(m, CODES, 1, queries=z, solver=COARSE).distances.toarray()
    ),
    "pairwise_distances": lambda m, z: pb.pairwise_distances(m, z, solver=COARSE, n_jobs=1),
    "pairwise_distances.other": lambda m, z: pb.pairwise_distances(m, CODES, z, solver=COARSE, n_jobs=1),
    "parallel_transport": lambda m, z: pb.parallel_transport(m, z, CODES[0]),
    "parallel_transport.tangents": lambda m, z: pb.parallel_transport(m, PATH, z),
    "project": lambda m, z: pb.project(m, PATH, z).time,
    "project.path": lambda m, z: pb.project(m, z, CODES).time,
    "scalar_curvature": lambda m, z: pb.scalar_curvature(m, z),
    "sectional_curvature": lambda m, z: pb.sectional_curvature(m, z, CODES, CODES[::-1].copy()),
    "squared_distance": lambda m, z: pb.squared_distance(m, z, CODES, solver=COARSE),
    "uncertainty_report": lambda m, z: torch.tensor(
        pb.uncertainty_report(decoder_of(m), z, num_points=5, num_pairs=1).entropy_on
    ),
    "InterpolatedMetric.fit": lambda m, z: pb.InterpolatedMetric.fit(m, z).tensor(CODES),
    "FisherRaoMetric.tensor": lambda m, z: pb.FisherRaoMetric(decoder_of(m)).tensor(z),
    "FisherRaoMetric.ds2": lambda m, z: pb.FisherRaoMetric(decoder_of(m)).ds2(z, CODES),
    "FisherRaoMetric.embed": lambda m, z: pb.FisherRaoMetric(decoder_of(m)).embed(z)[0],
    "FisherRaoMetric.inner": lambda m, z: pb.FisherRaoMetric(decoder_of(m)).inner(CODES, z, z),
    "FisherRaoMetric.norm": lambda m, z: pb.FisherRaoMetric(decoder_of(m)).norm(z, CODES),
    "FisherRaoMetric.log_volume": lambda m, z: pb.FisherRaoMetric(decoder_of(m)).log_volume(z),
    "FisherRaoMetric.frame_at": lambda m, z: pb.FisherRaoMetric(decoder_of(m)).frame_at(z).values[0],
    "DivergenceMetric": lambda m, z: pb.DivergenceMetric(decoder_of(m)).tensor(z),
    "EuclideanMetric": lambda m, z: pb.EuclideanMetric(decoder_of(m)).tensor(z),
    "ScoreMetric": lambda m, z: pb.ScoreMetric(decoder_of(m), 10).tensor(z),
    "WassersteinMetric": lambda m, z: pb.WassersteinMetric(normal if m is METRIC else m).tensor(z),
    "EnsembleMetric": lambda m, z: pb.EnsembleMetric(pb.EnsembleDecoder([decoder_of(m)] * 2), 1.0).tensor(z),
    "Extrapolated": lambda m, z: pb.FisherRaoMetric(pb.Extrapolated(decoder_of(m), SUPPORT)).tensor(z),
    "Reweighted": lambda m, z: pb.FisherRaoMetric(pb.Reweighted(decoder_of(m), SUPPORT)).tensor(z),
    "WithPrior": lambda m, z: pb.FisherRaoMetric(pb.WithPrior(decoder_of(m))).tensor(z),
    "WithReading": lambda m, z: pb.FisherRaoMetric(pb.WithReading(decoder_of(m), lambda z, p: p.mean)).tensor(z),
    "as_decoder": lambda m, z: pb.FisherRaoMetric(pb.as_decoder(decoder_of(m))).tensor(z),
    "testing.check_metric": lambda m, z: testing.check_metric(m, z),
    "statistics.frechet_mean": lambda m, z: statistics.frechet_mean(m, z, rtol=1e-2).mean,
    "statistics.frechet_mean.init_mean": lambda m, z: (
        statistics.frechet_mean(m, CODES[:2], init_mean=first(z), rtol=1e-2).mean
    ),
    "statistics.sample_uniform": lambda m, z: statistics.sample_uniform(m, 2, bounds=corners(z), random_state=0),
    "statistics.brownian_motion": lambda m, z: statistics.brownian_motion(m, z, time=0.01, num_steps=2, random_state=0),
    "plot.latent": lambda m, z: plot.latent(m, z, resolution=4) and None,
    "plot.fan": lambda m, z: plot.fan(m, first(z), length=0.1, num_directions=2, num_points=3) and None,
    "plot.exponential_grid": lambda m, z: (
        plot.exponential_grid(m, first(z), length=0.1, num_lines=2, num_points=2) and None
    ),
    "plot.indicatrices": lambda m, z: plot.indicatrices(m, z) and None,
    "plot.Plane.of": lambda m, z: plot.Plane.of(m, z, "pca").center,
}

# Estimators with the arguments that make them quick.
ESTIMATORS: dict[str, Callable[[Any], Any]] = {
    "statistics.GeodesicKMeans": lambda m: statistics.GeodesicKMeans(m, 2, random_state=0),
    "statistics.GeodesicKMedoids": lambda m: statistics.GeodesicKMedoids(m, 2),
    "statistics.GeodesicKernelDensity": lambda m: statistics.GeodesicKernelDensity(m),
    "statistics.GeodesicNeighbors": lambda m: statistics.GeodesicNeighbors(m, 1),
    "statistics.GeodesicRegression": lambda m: statistics.GeodesicRegression(m, max_iter=1),
    "statistics.LAND": lambda m: statistics.LAND(m, num_points=8, max_iter=1, init=GRAPH, random_state=0),
    "statistics.PrincipalGeodesicAnalysis": lambda m: statistics.PrincipalGeodesicAnalysis(m),
}


@functools.cache
def fitted(name: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        return ESTIMATORS[name](METRIC).fit(*((CODES, CODES) if "Regression" in name else (CODES,)))


METHODS = {
    "statistics.GeodesicKMeans": ["predict", "transform"],
    "statistics.GeodesicKMedoids": ["predict"],
    "statistics.GeodesicKernelDensity": ["score_samples", "score"],
    "statistics.GeodesicNeighbors": ["kneighbors"],
    "statistics.GeodesicRegression": ["predict"],
    "statistics.PrincipalGeodesicAnalysis": ["transform"],
}
FUNCTIONS |= {
    f"{name}.fit": lambda m, z, make=make: make(m).fit(z) and None
    for name, make in ESTIMATORS.items()
    if "Regression" not in name
}
FUNCTIONS |= {
    "statistics.GeodesicRegression.fit": lambda m, z: (
        statistics.GeodesicRegression(m, max_iter=1).fit(CODES[:, :1], z) and None
    ),
    "statistics.GeodesicRegression.fit covariates": lambda m, z: (
        statistics.GeodesicRegression(m, max_iter=1).fit(z, CODES) and None
    ),
}
METRICLESS: dict[str, Callable[[Any], object]] = {
    f"{name}.{method}": lambda z, name=name, method=method: getattr(fitted(name), method)(z)
    for name, methods in METHODS.items()
    for method in methods
}
FLAT_LAND = statistics.LAND(random_state=0).fit(CODES)
FLAT_ANALYSIS = statistics.PrincipalGeodesicAnalysis().fit(CODES)
METRICLESS |= {
    # in flat space: codes are read in the same way, and the rest takes seconds under a metric
    **{
        f"statistics.LAND.{name}": lambda z, name=name: getattr(FLAT_LAND, name)(z)
        for name in ("score_samples", "score", "predict_proba", "predict")
    },
    "statistics.PrincipalGeodesicAnalysis.inverse_transform": lambda z: FLAT_ANALYSIS.inverse_transform(z),
    "statistics.GeodesicRegression.score": lambda z: fitted("statistics.GeodesicRegression").score(CODES, z),
    "Graph.distances": lambda z: GRAPH.distances(z, CODES),
    "Graph.paths": lambda z: GRAPH.paths(z, CODES, 3),
    "Support.fit": lambda z: pb.Support.fit(z, 2).centers,
    "Support.distance2": lambda z: SUPPORT.distance2(z),
    "Support.squared_distances": lambda z: SUPPORT.squared_distances(z),
    "Support.contains": lambda z: SUPPORT.contains(z),
    "Grid.around": lambda z: pb.Grid.around(z, resolution=3).low,
    "Grid": lambda z: pb.Grid(first(z), first(z) + 1 if z is CODES or z is TENSOR else first(z), 3).low,
    "GPDecoder.fit": lambda z: pb.GPDecoder.fit(z, CODES, max_iterations=1).codes,
    "GPDecoder": lambda z: pb.GPDecoder(z, CODES, lengthscale=1.0, signal=1.0, noise=0.1).codes,
    "GPExpectedMetric.tensor": lambda z: pb.GPExpectedMetric(PROCESS).tensor(z),
    "RBFPrecision.forward": lambda z: pb.RBFPrecision(SUPPORT, 2)(z),
    "CubicSpline": lambda z: pb.CubicSpline(z)(0.5),
    "CubicSpline.straight": lambda z: pb.CubicSpline.straight(z, z, 3)(0.5),
    "Polyline": lambda z: pb.Polyline(z)(0.5),
    "results.Geodesic": lambda z: PATH(first(z)),
    "results.Geodesic.curve": lambda z: PATH.curve(first(z)),
    "results.Trajectory": lambda z: pb.exponential(METRIC, CODES[0], 0.1 * CODES[1])(first(z)),
    "plot.paths": lambda z: plot.paths(z) and None,
    "plot.clusters": lambda z: plot.clusters(z, [0] * 8) and None,
    "plot.density": lambda z: plot.density(fitted("statistics.GeodesicKernelDensity"), z, resolution=3) and None,
}

# Public names that take no codes of users, by the reason.
EXEMPT = {
    "results of functions": """Information statistics.FrechetMean
        plot.ClusterPlot plot.LatentPlot""",
    "errors": "ConvergenceError DecoderError",
    "abstract": "Curve Metric Solver",
    "options": """GaussNewton divergences.CentralDifference divergences.Hessian divergences.OneSidedDifference
        divergences.monte_carlo_kl divergences.renyi per_code""",
    "of distributions": """Product VonMisesFisher ZeroInflated blend embed fisher masked most_uncertain
    natural_and_mean rao_distance
        score_information divergences.Divergence divergences.hellinger divergences.kl divergences.symmetrized_kl
        divergences.wasserstein2""",
    "of results": "plot.contributions",
    "a decoder, which the library calls with tensors (EnsembleMetric does)": "EnsembleDecoder",
    "starts a server; takes codes by `as_codes` (test_explorer_api)": "explore",
}


def public_names() -> set[str]:
    """Callables of the public modules, those of other than the first with the module's name."""
    modules = {"": pb, "statistics.": statistics, "plot.": plot, "divergences.": divergences, "testing.": testing}
    return {
        prefix + name
        for prefix, module in modules.items()
        for name in getattr(module, "__all__", None) or [n for n in dir(module) if not n.startswith("_")]
        if callable(member := getattr(module, name))
        and not inspect.ismodule(member)
        and getattr(member, "__module__", "").startswith("pullback")
        and (prefix != "divergences." or member.__module__ != "pullback._metrics.base")
    }


def test_every_public_function_with_codes_is_tried():
    tried = {name for call in (*FUNCTIONS, *METRICLESS) for name in (call, call.rsplit(".", 1)[0])}
    exempt = {name for names in EXEMPT.values() for name in names.split()}
    missing = public_names() - tried - exempt
    assert not missing, f"put these into FUNCTIONS or METRICLESS, or into EXEMPT with the reason: {sorted(missing)}"
    assert not exempt - public_names(), "these are no longer public"


BAD = {
    "three dimensions": np.ones((8, 3)) + np.eye(8, 3),
    "one dimension": np.arange(8.0)[:, None],
    "a number": 0.5,
    "one code": CODES[0],
    "a batch of batches": CODES[None, None],
    "nothing in it": CODES[:0],
    "NaN": np.where(np.arange(8)[:, None] == 2, np.nan, CODES),
    "all NaN": np.full((8, 2), np.nan),
    "infinity": np.where(np.arange(8)[:, None] == 2, np.inf, CODES),
    "text": [["a", "b"]] * 8,
    "one text": "codes",
    "objects": np.array([[object(), None]] * 8),
    "ragged": [[1.0], [2.0, 3.0]],
    "complex": 1j * CODES,
    "None": None,
    "a dictionary": {"codes": CODES},
    "a module": NET,
}
BAD_METRICS = {
    "a decoder": decoder,
    "a network": NET,
    "None": None,
    "text": "fisher-rao",
    "codes": CODES,
    "a class": pb.FisherRaoMetric,
}


def complaint(call: Callable[[], object]) -> str | None:
    """What is wrong with the error of a call, if it raises one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            call()
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            raised = linecache.getline(last.filename, last.lineno or 0).lstrip().startswith("raise ")
            known = isinstance(error, (ValueError, TypeError, NotImplementedError, pb.ConvergenceError))
            ours = "/pullback/" in last.filename and raised and len(str(error)) > 30
            if not (known and (ours or "sklearn/utils" in last.filename)):
                return f"{type(error).__name__} in {last.filename.split('/')[-1]}: {str(error)[:200]}"
        finally:
            plt.close("all")
    return None


@pytest.mark.parametrize("kind", BAD)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_is_no_codes_gets_a_sentence(name, kind):
    wrong = complaint(lambda: FUNCTIONS[name](METRIC, BAD[kind]))
    assert wrong is None, f"{name} of {kind}: {wrong}"


@pytest.mark.parametrize("kind", BAD)
@pytest.mark.parametrize("name", METRICLESS)
def test_what_is_no_codes_gets_a_sentence_also_without_a_metric(name, kind):
    wrong = complaint(lambda: METRICLESS[name](BAD[kind]))
    assert wrong is None, f"{name} of {kind}: {wrong}"


@pytest.mark.parametrize("kind", BAD_METRICS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_is_no_metric_or_decoder_gets_a_sentence(name, kind):
    wrong = complaint(lambda: FUNCTIONS[name](BAD_METRICS[kind], CODES))
    assert wrong is None, f"{name} of {kind}: {wrong}"


def assert_same(result: object, expected: object) -> None:
    if isinstance(expected, (tuple, list)):
        for one, other in zip(result, expected, strict=True):
            assert_same(one, other)
    elif isinstance(expected, np.ndarray) and expected.dtype == object:
        assert_same(list(result), list(expected))
    elif isinstance(expected, (Tensor, np.ndarray)):
        x, y = torch.as_tensor(result).cpu(), torch.as_tensor(expected).cpu()
        torch.testing.assert_close(x.to(y.dtype), y, rtol=1e-3, atol=1e-5, equal_nan=True)


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name != "statistics.LAND.fit"])  # test_land.py: 20 s
def test_arrays_give_what_tensors_give(name):
    assert_same(FUNCTIONS[name](METRIC, CODES), FUNCTIONS[name](METRIC, TENSOR))
    plt.close("all")


@pytest.mark.parametrize("name", METRICLESS)
def test_arrays_give_what_tensors_give_also_without_a_metric(name):
    assert_same(METRICLESS[name](CODES), METRICLESS[name](TENSOR))
    plt.close("all")
