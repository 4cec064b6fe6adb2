"""Laws of principal geodesics, geodesic regression, neighbors, kernel densities, and of what all estimators share."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from safetensors import safe_open
from sklearn.base import clone
from sklearn.decomposition import PCA
from sklearn.exceptions import NotFittedError
from sklearn.linear_model import LinearRegression
from sklearn.neighbors import KernelDensity, NearestNeighbors
from sklearn.utils.estimator_checks import parametrize_with_checks
from torch import Tensor
from torch.distributions import Laplace, Normal

import pullback as pb
from problems import half_plane, linear, simplex, sphere

NORMAL = half_plane("Normal", Normal, 1.0, 2.0)
HYPERBOLIC = half_plane("hyperbolic plane", Laplace, 1.0, 1.0)
SPHERE = sphere(2)

ESTIMATORS = [
    pb.statistics.PrincipalGeodesicAnalysis(),
    pb.statistics.GeodesicRegression(),
    pb.statistics.GeodesicNeighbors(),
    pb.statistics.GeodesicKernelDensity(),
]


@parametrize_with_checks(ESTIMATORS)
def test_scikit_learn_checks(estimator, check):
    check(estimator)


def table(n: int = 40) -> np.ndarray:
    return np.random.RandomState(0).randn(n, 3) * [1.0, 2.0, 3.0] + 5


def times(n: int) -> Tensor:
    return torch.linspace(-1, 1, n, dtype=torch.float64)[:, None]


# principal geodesics


def test_in_flat_space_it_is_principal_component_analysis():
    X = table()
    ours, theirs = pb.statistics.PrincipalGeodesicAnalysis(n_components=2).fit(X), PCA(2).fit(X)
    for name in ("mean_", "components_", "explained_variance_", "explained_variance_ratio_", "singular_values_"):
        np.testing.assert_allclose(getattr(ours, name), getattr(theirs, name), atol=1e-10)
    np.testing.assert_allclose(ours.transform(X), theirs.transform(X), atol=1e-10)
    scores = theirs.transform(X)
    np.testing.assert_allclose(ours.inverse_transform(scores), theirs.inverse_transform(scores), atol=1e-10)


@pytest.mark.parametrize("problem", [SPHERE, NORMAL], ids=str)
def test_principal_coordinates_keep_distances_from_the_mean(problem):
    codes = problem.points(10)
    model = pb.statistics.PrincipalGeodesicAnalysis(problem.metric).fit(codes)
    M = problem.metric.tensor(model.mean_)
    eye = torch.eye(2, dtype=torch.float64)
    torch.testing.assert_close(model.components_ @ M @ model.components_.mT, eye, rtol=0, atol=1e-10)
    scores = model.transform(codes)
    torch.testing.assert_close(scores.norm(dim=-1), problem.distance(codes, model.mean_[None]), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(model.inverse_transform(scores), codes, rtol=0, atol=1e-5)
    torch.testing.assert_close(scores.var(0), model.explained_variance_, rtol=1e-4, atol=0)
    assert model.explained_variance_ratio_.sum() == pytest.approx(1)


def test_principal_variances_do_not_depend_on_coordinates():
    codes = NORMAL.points(10)
    matrix = torch.tensor([[2.0, 0.3], [0.1, 0.5]], dtype=torch.float64)
    metric = pb.FisherRaoMetric(lambda w: NORMAL.metric.decoder(w @ matrix.mT))
    here = pb.statistics.PrincipalGeodesicAnalysis(NORMAL.metric).fit(codes)
    there = pb.statistics.PrincipalGeodesicAnalysis(metric).fit(torch.linalg.solve(matrix, codes.mT).mT)
    torch.testing.assert_close(there.explained_variance_, here.explained_variance_, rtol=1e-5, atol=0)


def test_points_of_one_geodesic_have_one_component():
    start, v = torch.tensor([0.1, -0.2]).double(), torch.tensor([0.5, 0.3]).double()
    codes = pb.expmap(SPHERE.metric, start.expand(9, 2), times(9) * v, rtol=1e-10)
    model = pb.statistics.PrincipalGeodesicAnalysis(SPHERE.metric, 1).fit(codes)
    assert model.explained_variance_ratio_.item() == pytest.approx(1, abs=1e-8)
    torch.testing.assert_close(model.inverse_transform(model.transform(codes)), codes, rtol=0, atol=1e-5)


# regression


def test_in_flat_space_it_is_linear_regression():
    X, y = np.random.RandomState(1).randn(40, 2), table()
    ours, theirs = pb.statistics.GeodesicRegression().fit(X, y), LinearRegression().fit(X, y)
    np.testing.assert_allclose(ours.coef_, theirs.coef_, atol=1e-9)
    np.testing.assert_allclose(ours.predict(X), theirs.predict(X), atol=1e-9)
    np.testing.assert_allclose(ours.intercept_, theirs.predict(X.mean(0)[None])[0], atol=1e-9)
    single, reference = pb.statistics.GeodesicRegression().fit(X, y[:, 0]), LinearRegression().fit(X, y[:, 0])
    assert single.predict(X).shape == (40,)
    assert single.score(X, y[:, 0]) == pytest.approx(reference.score(X, y[:, 0]))


@pytest.mark.parametrize("problem", [simplex(3), NORMAL], ids=str)
def test_a_planted_geodesic_is_recovered(problem):
    start, v = torch.tensor([0.1, 0.9]).double(), torch.tensor([0.4, 0.3]).double()
    t = times(9)
    codes = pb.expmap(problem.metric, start.expand(9, 2), t * v, rtol=1e-10)
    model = pb.statistics.GeodesicRegression(problem.metric).fit(t + 7, codes)
    assert model.converged_
    torch.testing.assert_close(model.intercept_, start, rtol=0, atol=1e-6)
    torch.testing.assert_close(model.coef_[:, 0], v, rtol=0, atol=1e-6)
    assert model.score(t + 7, codes) == pytest.approx(1, abs=1e-9)
    further = torch.tensor([[8.5]]).double()
    torch.testing.assert_close(
        model.predict(further)[0], pb.expmap(problem.metric, start, 1.5 * v, rtol=1e-10), rtol=0, atol=1e-6
    )


def test_no_other_geodesic_is_closer():
    t = times(8)
    codes = 0.3 * torch.cat([t, t.square()], -1) + 0.1 * torch.randn(8, 2, dtype=torch.float64)
    model = pb.statistics.GeodesicRegression(SPHERE.metric).fit(t, codes)

    def total(start: Tensor, v: Tensor) -> float:
        predicted = pb.expmap(SPHERE.metric, start.expand(8, 2), t * v, rtol=1e-10)
        return SPHERE.distance(predicted, codes).square().sum().item()

    least = total(model.intercept_, model.coef_[:, 0])
    assert model.sum_of_squares_ == pytest.approx(least, rel=1e-5)
    for change in 1e-3 * torch.cat([torch.eye(4), -torch.eye(4)]).double():
        assert total(model.intercept_ + change[:2], model.coef_[:, 0] + change[2:]) > least
    variance = pb.statistics.frechet_mean(SPHERE.metric, codes).variance
    assert model.score(t, codes) == pytest.approx(1 - least / (8 * variance.item()), rel=1e-5)


# neighbors


def test_in_flat_space_they_are_the_usual_neighbors():
    X = table()
    ours, theirs = pb.statistics.GeodesicNeighbors(n_neighbors=4).fit(X), NearestNeighbors(n_neighbors=4).fit(X)
    for query in (X[:7] + 0.3, None):
        distance, index = ours.kneighbors(query)
        np.testing.assert_allclose(distance, theirs.kneighbors(query)[0], atol=1e-10)
        assert (index == theirs.kneighbors(query)[1]).all()


@pytest.mark.parametrize("problem", [SPHERE, NORMAL], ids=str)
def test_neighbors_are_those_of_all_pairs(problem):
    codes, queries = problem.points(20), problem.points(4)
    model = pb.statistics.GeodesicNeighbors(problem.metric, 3).fit(codes)
    distance, index = model.kneighbors(queries)
    D = problem.distance(queries[:, None], codes)
    torch.testing.assert_close(distance, D.sort().values[:, :3], rtol=1e-6, atol=1e-8)
    assert torch.equal(index, D.argsort()[:, :3])
    assert torch.equal(model.kneighbors(queries, 2, return_distance=False), index[:, :2])


@dataclass(frozen=True)
class Recording(pb.Solver):
    """Solves, and keeps the ends of the paths it was asked for."""

    ends: list[Tensor] = field(default_factory=list)

    def solve(self, metric: pb.Metric, nodes: Tensor) -> pb.results.Solution:
        self.ends.append(nodes[:, [0, -1]])
        return pb.GaussNewton().solve(metric, nodes)


def test_a_certain_bound_spares_paths():
    """Where lower bounds are the distances, only the neighbors themselves need a path, each one."""
    problem, solver = linear(3, 7), Recording()
    codes, queries, metric = problem.points(30), problem.points(4), pb.EuclideanMetric(problem.metric.source)
    model = pb.statistics.GeodesicNeighbors(metric, 3, solver=solver).fit(codes)
    index = model.kneighbors(queries, return_distance=False)
    solved = torch.cat(solver.ends)
    expected = torch.stack([queries[:, None].expand(-1, 3, -1), codes[index]], 2).flatten(0, 1)
    assert model.n_solved_ == len(solved) == 12
    assert {tuple(pair.flatten().tolist()) for pair in solved} == {tuple(p.flatten().tolist()) for p in expected}


def test_only_codes_whose_bound_is_below_an_upper_bound_need_a_path():
    """On a sphere chords bound distances from below; a few distances found bound the k-th neighbor's from above."""
    codes, queries, solver = SPHERE.points(30), SPHERE.points(4), Recording()
    model = pb.statistics.GeodesicNeighbors(SPHERE.metric, 3, solver=solver).fit(codes)
    model.kneighbors(queries)
    first, later = solver.ends[0], torch.cat(solver.ends[1:])
    assert len(first) == 12
    for query in queries:
        known, asked = (pairs[(pairs[:, 0] == query).all(-1)] for pairs in (first, later))
        chord = 2 * torch.sin(SPHERE.distance(asked[:, 0], asked[:, 1]) / 2)
        assert (chord <= SPHERE.distance(known[:, 0], known[:, 1]).max()).all()


def test_neighbors_must_exist():
    model = pb.statistics.GeodesicNeighbors().fit(table(5))
    with pytest.raises(ValueError, match="between 1 and 4"):
        model.kneighbors()
    with pytest.raises(ValueError, match="between 1 and 5"):
        model.kneighbors(table(5), 6)


# kernel density


def test_in_flat_space_it_is_the_usual_density():
    X = table()
    ours, theirs = pb.statistics.GeodesicKernelDensity(bandwidth=0.7).fit(X), KernelDensity(bandwidth=0.7).fit(X)
    np.testing.assert_allclose(ours.score_samples(X + 0.3), theirs.score_samples(X + 0.3), atol=1e-10)
    assert ours.score(X) == pytest.approx(theirs.score(X))


@pytest.mark.parametrize(
    ("problem", "sine"), [(SPHERE, torch.sin), (HYPERBOLIC, torch.sinh)], ids=["sphere", "hyperbolic"]
)
def test_a_kernel_of_constant_curvature(problem, sine):
    """The exponential map of a surface of curvature ±1 stretches areas at radius r by sin(r)/r or sinh(r)/r."""
    codes, z, h = problem.points(1), problem.points(8), 0.5
    r = problem.distance(codes, z)
    expected = -0.5 * (r / h) ** 2 - np.log(2 * np.pi * h**2) - (sine(r) / r).log()
    found = pb.statistics.GeodesicKernelDensity(problem.metric, h, rtol=1e-5).fit(codes).score_samples(z)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    plain = pb.statistics.GeodesicKernelDensity(problem.metric, h, stretch=False, rtol=1e-5).fit(codes).score_samples(z)
    torch.testing.assert_close(plain, expected + (sine(r) / r).log(), rtol=0, atol=1e-6)


def test_density_integrates_to_one_over_the_volume():
    x, y = torch.linspace(-4, 4, 24).double(), torch.linspace(-1.6, 1.6, 18).double()
    grid = torch.cartesian_prod(x, y)
    z = torch.stack([grid[:, 0], grid[:, 1].exp()], -1)
    model = pb.statistics.GeodesicKernelDensity(NORMAL.metric, 0.6).fit(torch.tensor([[0.0, 1.0], [0.2, 1.2]]).double())
    log_density = model.score_samples(z) + NORMAL.metric.log_volume(z) + grid[:, 1]
    total = log_density.exp().sum() * (x[1] - x[0]) * (y[1] - y[0])
    assert total.item() == pytest.approx(1, abs=2e-3)


def test_far_away_the_density_is_zero():
    model = pb.statistics.GeodesicKernelDensity(SPHERE.metric, 0.01).fit(torch.zeros(1, 2).double())
    assert model.score_samples(torch.full((1, 2), 0.5).double()).item() == -torch.inf


# what all estimators share


def fitted(estimator):
    X = table(12)
    return (
        clone(estimator).fit(X, X)
        if isinstance(estimator, pb.statistics.GeodesicRegression)
        else clone(estimator).fit(X)
    )


def answer(model) -> np.ndarray:
    calls = ("transform", "predict", "score_samples", "kneighbors")
    name = next(name for name in calls if hasattr(model, name))
    return np.asarray(getattr(model, name)(table(5)))


@pytest.mark.parametrize("estimator", ESTIMATORS, ids=lambda e: type(e).__name__)
def test_a_file_holds_the_fitted_state(estimator, tmp_path):
    model = fitted(estimator)
    model.save(tmp_path / "model.safetensors")
    loaded = type(model).load(tmp_path / "model.safetensors")
    assert loaded.get_params() == model.get_params()
    np.testing.assert_array_equal(answer(loaded), answer(model))
    with safe_open(tmp_path / "model.safetensors", framework="np") as file:
        assert json.loads(file.metadata()["pullback"])["estimator"] == type(model).__name__


def test_objects_are_given_again(tmp_path):
    path, codes = tmp_path / "model.safetensors", SPHERE.points(6)
    model = pb.statistics.GeodesicNeighbors(SPHERE.metric, 2).fit(codes)
    model.save(path)
    with pytest.raises(ValueError, match=r"load\(path, metric=…\)"):
        pb.statistics.GeodesicNeighbors.load(path)
    with pytest.raises(ValueError, match="GeodesicNeighbors, not GeodesicKernelDensity"):
        pb.statistics.GeodesicKernelDensity.load(path)
    loaded = pb.statistics.GeodesicNeighbors.load(path, metric=SPHERE.metric)
    torch.testing.assert_close(loaded.kneighbors(codes[:2])[0], model.kneighbors(codes[:2])[0])


def test_an_unfitted_estimator_is_not_saved(tmp_path):
    with pytest.raises(NotFittedError):
        pb.statistics.GeodesicNeighbors().save(tmp_path / "model.safetensors")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dtype_and_kind_follow_the_data(dtype):
    X = torch.from_numpy(table()).to(dtype)
    model = pb.statistics.PrincipalGeodesicAnalysis().fit(X)
    assert model.transform(X).dtype == model.components_.dtype == dtype
    array = pb.statistics.PrincipalGeodesicAnalysis().fit(X.numpy()).transform(X.numpy())
    assert isinstance(array, np.ndarray)
    assert array.dtype == X.numpy().dtype
