"""The locally adaptive normal distribution: Gaussian in flat space, normalized in curved ones, by two independent
routes."""

from __future__ import annotations

import warnings
from functools import partial

import numpy as np
import pytest
import torch
from scipy.integrate import quad
from sklearn.base import clone
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils.estimator_checks import parametrize_with_checks
from torch.distributions import MultivariateNormal, Normal

import pullback as pb
from helpers import log_normalizer, log_sum
from problems import PROBLEMS, sphere
from pullback.statistics import _land as lands
from pullback.statistics import _normalization as normalization
from pullback.statistics._land import Problem, View
from pullback.statistics._normalization import (
    Sample,
    best_precision,
    best_product,
    importance_sample,
    log_base,
    quadratic,
)
from pullback.statistics._paths import Flat, Paths

DOUBLE = torch.float64
HALF_PLANE = next(p for p in PROBLEMS if p.name == "hyperbolic plane (Laplace)")


def source(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def gaussian_codes(n: int = 300, d: int = 2, seed: int = 0) -> torch.Tensor:
    mix = torch.randn(d, d, dtype=DOUBLE, generator=source(seed + 1)) + torch.eye(d, dtype=DOUBLE)
    return torch.randn(n, d, dtype=DOUBLE, generator=source(seed)) @ mix + 1


def volume(metric: pb.Metric):
    return partial(log_base, Paths(metric), "volume")


def moments(codes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return codes.mean(0), torch.cov(codes.mT, correction=0).reshape(codes.shape[1], codes.shape[1])


def polar_constant(gamma: float, area, limit: float) -> float:
    """C of an isotropic density on a surface with rotational symmetry: ∫ exp(-γ r²/2) area(r) dr."""
    return quad(lambda r: np.exp(-0.5 * gamma * r**2) * area(r), 0, limit)[0]


class TestFlatSpace:
    @pytest.mark.parametrize("d", [1, 2, 5])
    def test_is_the_gaussian_of_greatest_likelihood(self, d):
        codes = gaussian_codes(d=d)
        mean, covariance = moments(codes)
        model = pb.statistics.LAND(random_state=0, num_points=1024 * d).fit(codes)
        assert model.converged_
        assert (model.means_[0] - mean).abs().max() < 1e-3
        torch.testing.assert_close(model.covariances_[0], covariance, rtol=0.02, atol=1e-3)
        expected = MultivariateNormal(mean, covariance).log_prob(codes)
        torch.testing.assert_close(model.score_samples(codes), expected, rtol=0, atol=0.02)

    def test_two_planted_components_are_recovered(self):
        codes = torch.cat([0.3 * gaussian_codes(200), gaussian_codes(100, seed=5) + 8.0])
        model = pb.statistics.LAND(n_components=2, random_state=0).fit(codes)
        order = model.weights_.argsort(descending=True)
        torch.testing.assert_close(model.weights_[order], torch.tensor([2 / 3, 1 / 3], dtype=DOUBLE), atol=0.02, rtol=0)
        for k, part in zip(order.tolist(), (codes[:200], codes[200:]), strict=True):
            mean, covariance = moments(part)
            torch.testing.assert_close(model.means_[k], mean, atol=0.05, rtol=0)
            torch.testing.assert_close(model.covariances_[k], covariance, rtol=0.1, atol=0.02)
        labels = model.predict(codes)
        assert (labels[:200] == order[0]).all()
        assert (labels[200:] == order[1]).all()

    def test_a_linear_decoder_changes_nothing_but_the_units(self):
        """The density with respect to dz does not depend on a constant metric, found through paths and graph as it
        is."""
        codes = gaussian_codes(80)
        matrix = torch.tensor([[2.0, 0.3], [0.0, 0.5], [1.0, 1.0]], dtype=DOUBLE)
        metric = pb.FisherRaoMetric(lambda z: Normal(z @ matrix.mT, 1.0))
        settings = {"random_state": 0, "num_points": 256, "tol": 1e-7, "gaussian_factor": False}
        flat, linear = (pb.statistics.LAND(m, **settings).fit(codes) for m in (None, metric))
        torch.testing.assert_close(linear.means_, flat.means_, atol=1e-3, rtol=0)
        torch.testing.assert_close(linear.precisions_, flat.precisions_, rtol=0.02, atol=1e-3)
        torch.testing.assert_close(
            linear.score_samples(codes, lebesgue=True), flat.score_samples(codes), atol=0.02, rtol=0
        )

    def test_samples_have_the_moments_of_the_density(self):
        model = pb.statistics.LAND(random_state=0).fit(gaussian_codes())
        z, label = model.sample(4000)
        white = (z - model.means_[0]) @ torch.linalg.cholesky(model.precisions_[0])
        assert (label == 0).all()
        # five standard errors of a mean and of a variance
        assert (white.mean(0).abs() < 5 / 4000**0.5).all()
        assert ((white.var(0) - 1).abs() < 5 * (2 / 4000) ** 0.5).all()

    def test_samples_come_from_all_components(self):
        codes = torch.cat([gaussian_codes(100), gaussian_codes(300) + 20.0])
        model = pb.statistics.LAND(n_components=2, random_state=1).fit(codes)
        z, label = model.sample(1000)
        assert (model.predict(z) == label).double().mean() > 0.99
        share = torch.bincount(label, minlength=2) / 1000
        torch.testing.assert_close(share.to(DOUBLE), model.weights_, atol=0.06, rtol=0)


class TestNormalization:
    """On surfaces of constant curvature, C of an isotropic density is an integral over the radius."""

    def test_hyperbolic_plane(self):
        mean, gamma = torch.tensor([0.0, 1.0], dtype=DOUBLE), 4.0
        exact = np.log(2 * np.pi * polar_constant(gamma, np.sinh, 10))
        precision = gamma * HALF_PLANE.metric.tensor(mean)
        by_exponential = log_normalizer(HALF_PLANE.metric, mean, precision, num_samples=256, generator=source())
        assert by_exponential.beyond == 0
        assert by_exponential.standard_error < 0.05
        assert abs(by_exponential.value - exact) < 4 * by_exponential.standard_error

    def test_importance_sampling_on_the_hyperbolic_plane(self):
        mean, gamma = torch.tensor([0.0, 1.0], dtype=DOUBLE), 4.0
        exact = np.log(2 * np.pi * polar_constant(gamma, np.sinh, 10))
        noise = 0.5 * torch.randn(200, 2, dtype=DOUBLE, generator=source())
        codes = torch.stack([noise[:, 0], noise[:, 1].exp()], -1)
        sample = importance_sample(volume(HALF_PLANE.metric), codes, 1024, 0)
        known = (sample.log_weight > -torch.inf) & (sample.z[:, 1] > 0)
        r = torch.full_like(sample.log_weight, 100.0)
        r[known] = HALF_PLANE.distance(mean.expand(int(known.sum()), 2), sample.z[known])
        value, error = log_sum(sample.log_weight - 0.5 * gamma * r**2)
        assert error < 0.05
        assert abs(value - exact) < 4 * error

    @pytest.mark.parametrize("scale", [1.0, 1.2])
    def test_a_guess_lessens_the_noise_and_adds_no_bias(self, scale):
        """Radii are guessed from known ones, also if those are too long by a fifth."""
        mean, gamma = torch.tensor([0.0, 1.0], dtype=DOUBLE), 4.0
        exact = np.log(2 * np.pi * polar_constant(gamma, np.sinh, 10))

        def radii(z: torch.Tensor) -> torch.Tensor:
            r = torch.full_like(z[:, 0], 100.0)
            r[z[:, 1] > 0] = gamma**0.5 * HALF_PLANE.distance(mean.expand_as(z)[z[:, 1] > 0], z[z[:, 1] > 0])
            return r

        noise = 0.5 * torch.randn(800, 2, dtype=DOUBLE, generator=source())
        codes = torch.stack([noise[:, 0], noise[:, 1].exp()], -1)
        known = normalization.KnownRadii(codes[:200], codes, scale * radii(codes))
        value, error = normalization.log_normalizer(volume(HALF_PLANE.metric), radii, known, 1024, 0)
        assert error < 0.01
        assert abs(value - exact) < 4 * error

    def test_the_sphere_is_not_counted_twice(self):
        """A wide density on the sphere: tangents longer than π lie beyond the cut locus, where Exp covers the sphere
        again."""
        mean, gamma = torch.tensor([0.1, 0.2], dtype=DOUBLE), 0.4
        exact = np.log(2 * np.pi * polar_constant(gamma, np.sin, np.pi))
        metric = sphere(2).metric
        found = log_normalizer(metric, mean, gamma * metric.tensor(mean), num_samples=128, generator=source())
        assert found.beyond > 0.02
        assert abs(found.value - exact) < 4 * found.standard_error

    def test_paths_agree_with_closed_form_distances(self):
        problem = sphere(2)
        z, mean = problem.points(100), torch.tensor([0.2, -0.1], dtype=DOUBLE)
        view = View.of(Paths(problem.metric), mean, z)
        v = view.v
        assert view.converged.all()
        length = (v @ problem.metric.tensor(mean) * v).sum(-1).sqrt()
        torch.testing.assert_close(length, problem.distance(mean.expand_as(z), z), rtol=3e-3, atol=0)

    def test_the_best_precision_is_stationary(self):
        """½ (S - E[vvᵀ]) + κ (S - Γ⁻¹) = 0: the second moment of the density is that of the data, but for the prior."""
        v = 4 * torch.rand(4000, 2, dtype=DOUBLE, generator=source()) - 2
        moment = torch.tensor([[0.6, 0.2], [0.2, 0.4]], dtype=DOUBLE)
        precision = best_precision(Sample(v, torch.zeros(4000, dtype=DOUBLE)), v, moment)
        p = (-0.5 * quadratic(v, precision)).softmax(0)
        fitted = v.mT @ (p[:, None] * v)
        prior = 1e-2 * (moment - torch.linalg.inv(precision))
        torch.testing.assert_close(0.5 * (moment - fitted) + prior, torch.zeros_like(moment), rtol=0, atol=1e-6)
        torch.testing.assert_close(fitted, moment, rtol=0.05, atol=0)

    @pytest.mark.parametrize("d", [2, 5])
    def test_both_factors_have_half_the_precision_where_space_is_flat(self, d):
        """Their product is the Gaussian of the codes; neither is told from the other."""
        codes = gaussian_codes(d=d)
        (mean, covariance), sample = moments(codes), importance_sample(volume(Flat()), codes, 2048, 3)
        precision, factor = best_product(sample, sample.z - mean, covariance, (mean, covariance))
        torch.testing.assert_close(factor.mean, mean, rtol=0, atol=1e-3)
        root = torch.linalg.cholesky(covariance)
        for half in (precision, factor.precision):
            torch.testing.assert_close(root.mT @ half @ root, 0.5 * torch.eye(d, dtype=DOUBLE), rtol=0, atol=1e-3)

    def test_precisions_stay_positive_when_the_data_fill_the_box(self):
        v = 2 * torch.rand(4000, 2, dtype=DOUBLE, generator=source()) - 1
        sample = Sample(v, torch.zeros(4000, dtype=DOUBLE))
        precision = best_precision(sample, v, 0.5 * torch.eye(2, dtype=DOUBLE))
        assert (torch.linalg.eigvalsh(precision) > 0).all()

    def test_calibrated_weights_integrate_the_gaussian_of_the_codes(self):
        codes = gaussian_codes()
        sample = importance_sample(volume(Flat()), codes, 256, 3)
        mean, covariance = moments(codes)
        p = (MultivariateNormal(mean, covariance).log_prob(sample.z) + sample.log_weight).exp()
        torch.testing.assert_close(p.sum(), torch.tensor(1.0, dtype=DOUBLE), rtol=1e-5, atol=0)
        torch.testing.assert_close(p @ sample.z, mean, rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def curved():
    """A LAND on a metric that is a paraboloid, whose geodesics bend but are unique."""
    metric = pb.EuclideanMetric(lambda z: Normal(torch.cat([z, z.square().sum(-1, keepdim=True)], -1), 1.0))
    angle = torch.rand(120, dtype=DOUBLE, generator=source()) * 2 - 1
    codes = torch.stack([1.2 * angle, 0.8 * angle**2], -1)
    codes = codes + 0.15 * torch.randn(120, 2, dtype=DOUBLE, generator=source(1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        settings = {"num_points": 512, "max_iter": 12, "base_measure": "volume", "gaussian_factor": False}
        return metric, codes, pb.statistics.LAND(metric, random_state=0, **settings).fit(codes)


class TestCurvedSpace:
    def test_integrates_to_one_on_a_grid(self, curved):
        _, codes, model = curved
        low, high = codes.amin(0) - 0.8, codes.amax(0) + 0.8
        x, y = (torch.linspace(a, b, 28, dtype=DOUBLE) for a, b in zip(low.tolist(), high.tolist(), strict=True))
        grid = torch.cartesian_prod(x, y)
        total = model.score_samples(grid, lebesgue=True).exp().sum() * (x[1] - x[0]) * (y[1] - y[0])
        assert abs(total - 1) < 0.02
        assert model.log_normalizer_se_.max() < 0.02

    def test_two_routes_to_the_constant(self, curved):
        metric, _, model = curved
        found = log_normalizer(metric, model.means_[0], model.precisions_[0], num_samples=512, generator=source())
        error = (found.standard_error**2 + model.log_normalizer_se_[0] ** 2) ** 0.5
        assert error < 0.05
        assert abs(found.value - model.log_normalizers_[0]) < 4 * error

    def test_no_neighboring_mean_is_better(self, curved):
        """The likelihood of the codes falls when the mean is moved by a fifth of a standard deviation, whatever the
        way."""
        metric, codes, _ = curved
        problem, sample = Problem(Paths(metric), codes), importance_sample(volume(metric), codes, 512, 7)
        found = lands.fit(problem, codes[:1], [sample], torch.ones_like(codes[:, :1]), tol=1e-4, max_iter=30)
        assert found.converged
        assert found.bounds == sorted(found.bounds)
        (best,), r = found.components, torch.full((len(codes),), 1 / len(codes), dtype=DOUBLE)
        axes = 0.2 * torch.linalg.inv(torch.linalg.cholesky(best.precision))
        for step in torch.cat([axes, -axes]):
            assert lands.component_at(problem, best.mean + step, r, sample).cost(codes, r) > best.cost(codes, r) - 1e-3

    def test_saving_keeps_the_density(self, curved, tmp_path):
        metric, codes, model = curved
        model.save(tmp_path / "land.safetensors")
        again = pb.statistics.LAND.load(tmp_path / "land.safetensors", metric=metric)
        torch.testing.assert_close(again.score_samples(codes), model.score_samples(codes), atol=1e-12, rtol=0)

    def test_derivatives_of_tangents_by_two_routes(self, curved):
        """From the Hessians of squared distances, and by differences of logarithms."""
        metric, codes, _ = curved
        paths, mean, step = Paths(metric, rtol=1e-8), codes.mean(0), 1e-4
        codes = mean + 0.3 * (codes - mean)
        exact = View.of(paths, mean, codes).derivative(paths, mean)
        shifts = step * torch.eye(2, dtype=DOUBLE)
        columns = [
            (
                paths.logarithms((mean + s).expand_as(codes), codes).velocity
                - paths.logarithms((mean - s).expand_as(codes), codes).velocity
            )
            / (2 * step)
            for s in shifts
        ]
        torch.testing.assert_close(exact, torch.stack(columns, -1), rtol=0, atol=2e-3)

    def test_clone_and_parameters(self, curved):
        metric, _, model = curved
        copy = clone(model)
        assert copy.metric == metric
        assert copy.get_params()["max_iter"] == 12
        assert not hasattr(copy, "means_")


@pytest.mark.parametrize("kind", [torch.as_tensor, np.asarray], ids=["torch", "NumPy"])
def test_single_precision(kind):
    """Codes and decoders of single precision, as most are, give the density of double precision."""
    codes = gaussian_codes(60)
    matrix = torch.tensor([[2.0, 0.3], [0.0, 0.5], [1.0, 1.0]], dtype=DOUBLE)
    models = {}
    for dtype in (torch.float32, torch.float64):
        metric = pb.FisherRaoMetric(lambda z: Normal((z @ matrix.to(z).mT).tanh() + z @ matrix.to(z).mT, 1.0))
        X = kind(codes.to(dtype))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            model = pb.statistics.LAND(metric, random_state=0, num_points=128, max_iter=3, init_means=X[:1]).fit(X)
        models[dtype] = torch.as_tensor(model.score_samples(X))
        assert models[dtype].dtype == dtype
    torch.testing.assert_close(models[torch.float32].double(), models[torch.float64], rtol=0, atol=0.02)


@parametrize_with_checks([pb.statistics.LAND(random_state=0, num_points=64)])
def test_follows_scikit_learn(estimator, check):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        check(estimator)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: pb.statistics.LAND(n_components=9).fit(gaussian_codes(5)), "from 1 to that many"),
        (lambda: pb.statistics.LAND().fit(gaussian_codes(50)).sample(0), "at least one"),
    ],
)
def test_errors_name_the_fix(call, sentence):
    with pytest.raises(ValueError, match=sentence):
        call()
