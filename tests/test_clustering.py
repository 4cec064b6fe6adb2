"""Laws of geodesic k-means and k-medoids."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.cluster import KMeans
from sklearn.metrics import adjusted_rand_score
from sklearn.utils.estimator_checks import parametrize_with_checks
from torch.distributions import Bernoulli, Normal

import pullback as pb
from problems import half_plane
from pullback.statistics._paths import Paths

NORMAL = half_plane("Normal", Normal, 1.0, 2.0)


@parametrize_with_checks(
    [pb.statistics.GeodesicKMeans(n_clusters=3, random_state=0), pb.statistics.GeodesicKMedoids(n_clusters=3)]
)
def test_scikit_learn_checks(estimator, check):
    check(estimator)


def blobs(n: int = 40) -> np.ndarray:
    random = np.random.RandomState(0)
    return np.concatenate([random.randn(n, 3) + 2 * i for i in range(3)])


def planted() -> tuple[torch.Tensor, np.ndarray]:
    """Three narrow clusters of Normals; the widest distributions are the most spread out in coordinates, by far."""
    noise = 0.3 * torch.randn(45, 2, dtype=torch.float64)
    log_scale = noise[:, 1] + torch.tensor([-4.0, -1.0, 2.0]).double().repeat_interleave(15)
    return torch.stack([noise[:, 0] * log_scale.exp(), log_scale.exp()], -1), np.repeat([0, 1, 2], 15)


def same_partition(a, b) -> bool:
    return adjusted_rand_score(np.asarray(a), np.asarray(b)) == 1.0


def test_in_flat_space_it_is_k_means():
    X = blobs()
    ours = pb.statistics.GeodesicKMeans(n_clusters=3, init_centers=X[:3]).fit(X)
    theirs = KMeans(3, init=X[:3], n_init=1, tol=0).fit(X)
    np.testing.assert_allclose(ours.cluster_centers_, theirs.cluster_centers_, atol=1e-10)
    assert ours.inertia_ == pytest.approx(theirs.inertia_)
    assert (ours.labels_ == theirs.labels_).all()
    assert (ours.predict(X) == ours.labels_).all()


def test_a_linear_decoder_is_flat_space_too():
    X = torch.from_numpy(blobs(15))
    A = torch.randn(5, 3, dtype=torch.float64)
    metric = pb.FisherRaoMetric(lambda z: Normal(z @ A.mT, 1.0))
    ours = pb.statistics.GeodesicKMeans(metric, 3, init_centers=X[:3]).fit(X)
    theirs = KMeans(3, init=(X[:3] @ A.mT).numpy(), n_init=1, tol=0).fit((X @ A.mT).numpy())
    assert isinstance(ours.cluster_centers_, torch.Tensor)
    np.testing.assert_allclose(ours.cluster_centers_ @ A.mT, theirs.cluster_centers_, atol=1e-5)
    assert (ours.labels_.numpy() == theirs.labels_).all()


def test_planted_clusters_of_a_curved_space_are_found():
    codes, truth = planted()
    means = pb.statistics.GeodesicKMeans(NORMAL.metric, 3, random_state=0).fit(codes)
    medoids = pb.statistics.GeodesicKMedoids(NORMAL.metric, 3).fit(codes)
    assert same_partition(means.labels_, truth)
    assert same_partition(medoids.labels_, truth)
    assert not same_partition(KMeans(3, n_init=10, random_state=0).fit_predict(codes.numpy()), truth)


def test_centers_are_the_means_of_their_clusters():
    codes = NORMAL.points(24)
    model = pb.statistics.GeodesicKMeans(NORMAL.metric, 3, random_state=1).fit(codes)
    for j, center in enumerate(model.cluster_centers_):
        mean = pb.statistics.frechet_mean(NORMAL.metric, codes[model.labels_ == j]).mean
        torch.testing.assert_close(center, mean, rtol=0, atol=1e-3)
    D = NORMAL.distance(codes[:, None], model.cluster_centers_)
    assert torch.equal(D.argmin(1), model.labels_)
    assert torch.equal(model.predict(codes), model.labels_)
    assert model.inertia_ == pytest.approx(D.amin(1).square().sum().item(), rel=1e-5)


@pytest.mark.parametrize("likelihood", [lambda x: Normal(x.tanh(), (0.3 * x).exp()), lambda x: Bernoulli(logits=x)])
def test_lower_bounds_are_between_nothing_and_the_distance(likelihood):
    """Also where the family has no Euclidean embedding: k-means solves only for paths that may matter."""
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Linear(2, 16), torch.nn.Tanh(), torch.nn.Linear(16, 9)).double()
    paths = Paths(pb.FisherRaoMetric(pb.WithPrior(lambda z: likelihood(network(z)))))
    a, b = torch.randn(5, 2).double(), torch.randn(4, 2).double()
    bounds, distances = paths.lower_bounds(a, b), paths.matrix(a, b)
    assert (bounds <= distances).all()
    assert (bounds > 0.3 * distances).all()


def test_more_runs_are_no_worse():
    X = blobs()
    totals = [pb.statistics.GeodesicKMeans(n_clusters=4, n_init=n, random_state=3).fit(X).inertia_ for n in (1, 8)]
    assert totals[1] <= totals[0]


def test_an_empty_cluster_is_filled():
    X = blobs(10)
    far = np.full((1, 3), 100.0)
    model = pb.statistics.GeodesicKMeans(n_clusters=3, init_centers=np.concatenate([X[:2], far])).fit(X)
    assert len(np.unique(model.labels_)) == 3


def test_no_swap_of_medoids_helps():
    codes = NORMAL.points(14)
    model = pb.statistics.GeodesicKMedoids(NORMAL.metric, 3).fit(codes)
    D = NORMAL.distance(codes[:, None], codes)
    chosen = model.medoid_indices_.tolist()
    assert torch.equal(model.cluster_centers_, codes[chosen])
    assert model.inertia_ == pytest.approx(D[:, chosen].amin(1).sum().item(), rel=1e-5)
    for k, c in itertools.product(range(3), range(14)):
        swapped = [*chosen[:k], c, *chosen[k + 1 :]]
        assert D[:, swapped].amin(1).sum() >= model.inertia_ * (1 - 1e-6)
    assert torch.equal(model.predict(codes), model.labels_)


def test_distances_known_before_give_the_same_medoids():
    codes = NORMAL.points(12)
    D = NORMAL.distance(codes[:, None], codes).nan_to_num()
    solved, given = (pb.statistics.GeodesicKMedoids(NORMAL.metric, 2).fit(codes, distances=d) for d in (None, D))
    assert torch.equal(solved.medoid_indices_, given.medoid_indices_)
    with pytest.raises(ValueError, match="one row per code"):
        pb.statistics.GeodesicKMedoids(n_clusters=2).fit(codes, distances=D[:3])


@pytest.mark.parametrize(
    "estimator",
    [pb.statistics.GeodesicKMeans(random_state=0), pb.statistics.GeodesicKMedoids()],
    ids=["means", "medoids"],
)
def test_arrays_and_tensors_agree_and_survive_a_file(estimator, tmp_path):
    X = blobs(10)
    model = clone(estimator).set_params(n_clusters=3).fit(X)
    twin = clone(model).fit(torch.from_numpy(X))
    assert isinstance(model.labels_, np.ndarray)
    assert isinstance(twin.labels_, torch.Tensor)
    np.testing.assert_allclose(model.cluster_centers_, twin.cluster_centers_)
    model.save(tmp_path / "model.safetensors")
    loaded = type(model).load(tmp_path / "model.safetensors")
    assert loaded.get_params() == model.get_params()
    assert (loaded.predict(X) == model.labels_).all()
    assert loaded.inertia_ == model.inertia_


def test_errors_name_the_fix():
    X = blobs(4)
    with pytest.raises(ValueError, match="fewer clusters"):
        pb.statistics.GeodesicKMeans(n_clusters=99).fit(X)
    with pytest.raises(ValueError, match="array of centers"):
        pb.statistics.GeodesicKMeans(n_clusters=2, init_centers="random").fit(X)
    with pytest.raises(ValueError, match="2 centers of 3 dimensions"):
        pb.statistics.GeodesicKMeans(n_clusters=2, init_centers=X[:3]).fit(X)
