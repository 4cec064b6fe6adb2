"""The two base measures of a LAND: where they agree, what each is invariant to, and that each is a density of what it
says."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from sklearn.exceptions import ConvergenceWarning
from sklearn.mixture import GaussianMixture
from torch.distributions import MultivariateNormal, Normal

import pullback as pb
from helpers import log_normalizer
from pullback.experiments import toy

DOUBLE = torch.float64
MEASURES = ("volume", "lebesgue")
LINEAR = torch.tensor([[2.0, 0.3], [0.0, 0.5], [1.0, 1.0]], dtype=DOUBLE)


def source(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def noise(n: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, 2, dtype=DOUBLE, generator=source(seed))


def bowl(scale: float = 1.0) -> pb.Metric:
    """A paraboloid, whose volume element grows away from its apex; `scale` lengthens every distance."""
    return pb.EuclideanMetric(lambda z: Normal(scale * torch.cat([z, z.square().sum(-1, keepdim=True)], -1), 1.0))


def fitted(metric: pb.Metric | None, codes: torch.Tensor, num: int = 1, **settings) -> pb.statistics.LAND:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        return pb.statistics.LAND(metric, num, random_state=0, **settings).fit(codes)


def cells(low: float, high: float, num: int) -> tuple[torch.Tensor, float]:
    """Midpoints ``(num², 2)`` of the cells of a square, and their area."""
    step = (high - low) / num
    x = low + step * (torch.arange(num, dtype=DOUBLE) + 0.5)
    return torch.cartesian_prod(x, x), step**2


def planted(metric: pb.Metric, measure: str) -> pb.statistics.LAND:
    """A mixture with known parameters, normalized by the exponential map."""
    model = pb.statistics.LAND(metric, 2, base_measure=measure, random_state=0)
    model.weights_ = torch.tensor([0.7, 0.3], dtype=DOUBLE)
    model.means_ = torch.tensor([[-1.2, 0.0], [0.9, 0.4]], dtype=DOUBLE)
    model.covariances_ = torch.tensor([[[0.08, 0.03], [0.03, 0.03]], [[0.01, 0.0], [0.0, 0.06]]], dtype=DOUBLE)
    model.precisions_ = torch.linalg.inv(model.covariances_)
    model.factor_means_, model.factor_precisions_ = model.means_, 0 * model.precisions_
    totals = [
        log_normalizer(metric, m, p, base_measure=measure, num_samples=512, generator=source())
        for m, p in zip(model.means_, model.precisions_, strict=True)
    ]
    model.log_normalizers_ = torch.stack([total.value for total in totals])
    model.log_normalizer_se_ = torch.stack([total.standard_error for total in totals])
    spread = torch.linalg.cholesky(model.covariances_)
    model.points_ = (model.means_[:, None] + noise(400).unflatten(0, (2, 200)) @ spread.mT).flatten(0, 1)
    model.n_features_in_ = 2
    model.codes_ = model.points_
    return model


class TestFlatSpace:
    def test_both_measures_agree_where_the_volume_is_constant(self):
        codes = noise(40) @ torch.tensor([[1.0, 0.4], [0.0, 0.6]], dtype=DOUBLE)
        metric = pb.FisherRaoMetric(lambda z: Normal(z @ LINEAR.mT, 1.0))
        settings = {"num_points": 64, "tol": 1e-6, "max_iter": 8}
        volume, lebesgue = (fitted(metric, codes, base_measure=m, **settings) for m in MEASURES)
        torch.testing.assert_close(lebesgue.means_, volume.means_, rtol=0, atol=5e-3)
        torch.testing.assert_close(lebesgue.precisions_, volume.precisions_, rtol=0.01, atol=5e-3)
        for flag in (True, False):
            a, b = (m.score_samples(codes, lebesgue=flag) for m in (volume, lebesgue))
            torch.testing.assert_close(a, b, rtol=0, atol=0.02)
        shift = metric.log_volume(codes[0])
        torch.testing.assert_close(lebesgue.log_normalizers_, volume.log_normalizers_ - shift, rtol=0, atol=0.01)

    def test_without_a_metric_it_is_the_gaussian_of_greatest_likelihood(self):
        codes = noise(300) @ torch.tensor([[1.0, 0.4], [0.0, 0.6]], dtype=DOUBLE) + 1
        model = fitted(None, codes, num_points=2048, base_measure="lebesgue")
        covariance = codes.mT.cov(correction=0)
        assert (model.means_[0] - codes.mean(0)).abs().max() < 1e-3
        torch.testing.assert_close(model.covariances_[0], covariance, rtol=0.02, atol=1e-3)
        expected = MultivariateNormal(codes.mean(0), covariance).log_prob(codes)
        torch.testing.assert_close(model.score_samples(codes), expected, rtol=0, atol=0.02)


class TestCurvedSpace:
    @pytest.mark.parametrize("measure", MEASURES)
    def test_scores_change_their_measure_by_the_volume(self, measure):
        metric, codes = bowl(), 0.5 * noise(40)
        model = fitted(metric, codes, num_points=64, max_iter=2, base_measure=measure)
        dz, volume = (model.score_samples(codes, lebesgue=flag) for flag in (True, False))
        torch.testing.assert_close(dz - volume, metric.log_volume(codes), rtol=0, atol=1e-9)
        own = model.score_samples(codes)
        torch.testing.assert_close(own, volume if measure == "volume" else dz, rtol=0, atol=0)
        assert model.weights_.sum() == pytest.approx(1)
        # the Gaussian of the codes is one component, so the codes are at least as likely
        assert dz.mean() > fitted(None, codes).score(codes) - 1e-3

    @pytest.mark.parametrize("measure", MEASURES)
    def test_the_unit_of_length_does_not_matter(self, measure):
        """Tangents in coordinates, and so the codes' density with respect to dz, are the same where distances are three
        times as long."""
        codes = 0.5 * noise(60) + 0.3
        settings = {"num_points": 128, "base_measure": measure, "tol": 1e-4, "max_iter": 6}
        one, three = (fitted(bowl(scale), codes, **settings) for scale in (1.0, 3.0))
        torch.testing.assert_close(three.means_, one.means_, rtol=0, atol=2e-3)
        torch.testing.assert_close(three.precisions_, one.precisions_, rtol=0.01, atol=0.01)
        a, b = (m.score_samples(codes, lebesgue=True) for m in (one, three))
        torch.testing.assert_close(a, b, rtol=0, atol=0.02)

    def test_only_the_volume_is_a_property_of_the_geometry(self):
        """In other coordinates the constant of the one measure stays, that of the other does not."""

        def bent(u: torch.Tensor) -> torch.Tensor:
            return torch.stack([u[..., 0], u[..., 1] + u[..., 0] + u[..., 1] ** 3], -1)

        flat = bowl()
        chart = pb.EuclideanMetric(lambda u: flat.decoder(bent(u)))
        u = torch.tensor([0.2, 0.5], dtype=DOUBLE)
        slope = torch.func.jacrev(bent)(u)
        precision = 9.0 * flat.tensor(bent(u))
        found = {
            m: [
                log_normalizer(metric, mean, p, base_measure=m, num_samples=512, generator=source())
                for metric, mean, p in ((flat, bent(u), precision), (chart, u, slope.mT @ precision @ slope))
            ]
            for m in MEASURES
        }
        (a, b), (c, d) = found["volume"], found["lebesgue"]
        assert abs(a.value - b.value) < 4 * (a.standard_error**2 + b.standard_error**2) ** 0.5 < 0.2
        assert abs(c.value - d.value) > 10 * (c.standard_error**2 + d.standard_error**2) ** 0.5

    @pytest.mark.parametrize("measure", MEASURES)
    def test_samples_are_distributed_as_the_density_says(self, measure):
        """Counts in the squares of a chessboard against the integrals of the density over them."""
        model = planted(bowl(), measure)
        z, mass = model.sample(800)[0], model.score_samples(cells(-3.0, 3.0, 60)[0], lebesgue=True).exp() * 0.1**2
        assert abs(mass.sum() - 1) < 0.02
        expected = mass.reshape(12, 5, 12, 5).sum((1, 3)).flatten().numpy()
        counts = np.histogram2d(*z.T.numpy(), bins=12, range=[[-3, 3], [-3, 3]])[0].flatten()
        large = 800 * expected > 5
        counts, expected = (np.append(a[large], a[~large].sum()) for a in (counts, expected))
        expected = 800 * expected / expected.sum()
        assert len(counts) > 10
        # chi-squared has mean k and variance 2k; five of its standard deviations
        k = len(counts) - 1
        assert ((counts - expected) ** 2 / expected).sum() < k + 5 * (2 * k) ** 0.5

    @pytest.mark.parametrize("measure", MEASURES)
    def test_two_planted_components_are_recovered(self, measure):
        """Within their sampling errors: the fit is at least as likely as the truth, as far as its constants are
        known."""
        truth = planted(bowl(), measure)
        codes = truth.sample(600)[0]
        model = fitted(truth.metric, codes, 2, base_measure=measure, gaussian_factor=False)
        assert model.score(codes) > truth.score(codes) - 3 * truth.log_normalizer_se_.max()
        order = model.weights_.argsort(descending=True)
        torch.testing.assert_close(model.weights_[order], truth.weights_, rtol=0, atol=0.06)
        for k, j in enumerate(order.tolist()):
            width = truth.covariances_[k].diagonal().sqrt()
            assert ((model.means_[j] - truth.means_[k]).abs() < 0.3 * width).all()
            ratio = torch.linalg.eigvals(truth.precisions_[k] @ model.covariances_[j]).real
            assert ((ratio > 0.7) & (ratio < 1.4)).all()


@pytest.fixture(scope="module")
def ring():
    """The circle of codes of the toy experiment, and a metric that knows the first 150 of them."""
    decoder, codes = toy.problem("bernoulli", extrapolation=None)
    train, held_out = codes[:150], codes[150:]
    return pb.FisherRaoMetric(pb.Extrapolated(decoder, pb.Support.fit(train)).requires_grad_(False)), train, held_out


class TestRing:
    def test_beats_ordinary_gaussians(self, ring):
        """Base measure of both: dz."""
        metric, train, held_out = ring
        model = fitted(metric, train, base_measure="lebesgue", num_points=128, max_iter=4, tol=0.02)
        others = GaussianMixture(1, n_init=5, random_state=0).fit(train.numpy()).score_samples(held_out.numpy())
        gain = model.score_samples(held_out) - torch.from_numpy(others)
        assert gain.mean() > 0.1 + 3 * gain.std() / len(gain) ** 0.5

    @pytest.mark.parametrize("measure", MEASURES)
    def test_integrates_to_one(self, ring, measure):
        """Over a square that holds all of the density, part of which lies beyond the ring."""
        metric, train, _ = ring
        model = fitted(metric, train[:60], base_measure=measure, num_points=256, max_iter=1)
        z, area = cells(-7.5, 7.5, 40)
        total = model.score_samples(z, lebesgue=True).exp().sum() * area
        assert abs(total - 1) < 0.02


def test_a_fit_may_start_from_given_means():
    """From the means of a fit, the next has nothing left to do; their order is kept."""
    codes = torch.cat([noise(60), noise(40) + 8.0])
    means = fitted(None, codes, 2).means_.flip(0)
    again = fitted(None, codes, 2, init_means=means, max_iter=1)
    torch.testing.assert_close(again.means_, means, rtol=0, atol=1e-3)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"base_measure": "dz"}, "'volume' or 'lebesgue'"),
        ({"init_means": torch.zeros(2, 2)}, r"one mean per component, \(1, 2\)"),
    ],
)
def test_errors_name_the_fix(settings, sentence):
    with pytest.raises(ValueError, match=sentence):
        fitted(None, noise(20), **settings)


def test_bounded_distances_have_no_density_over_dz():
    """A decoder that becomes constant away from the data: the kernel does not vanish there, but the volume does."""
    metric, codes = pb.EuclideanMetric(lambda z: Normal(z.tanh(), 1.0)), noise(60)
    settings = {"gaussian_factor": False, "num_points": 128, "tol": 1.0, "random_state": 0}
    with pytest.warns(ConvergenceWarning, match="integral over dz is infinite"):
        pb.statistics.LAND(metric, base_measure="lebesgue", **settings).fit(codes)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert pb.statistics.LAND(metric, base_measure="volume", **settings).fit(codes).log_normalizer_se_ < 0.1


def test_a_gaussian_factor_makes_any_distances_a_density():
    """Over dz, where distances are bounded: it integrates to one, and explains its codes no worse than the Gaussian."""
    metric, codes = pb.EuclideanMetric(lambda z: Normal(z.tanh(), 1.0)), noise(60)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = pb.statistics.LAND(metric, num_points=256, tol=1.0, random_state=0).fit(codes)
    z, area = cells(-6.0, 6.0, 40)
    assert abs(model.score_samples(z).exp().sum() * area - 1) < 0.02
    gaussian = MultivariateNormal(codes.mean(0), codes.mT.cov(correction=0)).log_prob(codes).mean()
    assert model.score(codes) > gaussian - 3 * model.log_normalizer_se_[0]
