"""Gaussian process decoders: the posterior from the joint Gaussian, metrics from autodiff and from sampled
functions."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.distributions import MultivariateNormal

import pullback as pb
from pullback.testing import check_metric

F64 = torch.float64
ELL, S, TAU, D = 0.9, 1.3, 0.2, 4


def data(n: int = 40, d: int = 2) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    codes = torch.randn(n, d, dtype=F64)
    return codes, torch.sin(codes @ torch.randn(d, D, dtype=F64)) + 0.1 * torch.randn(n, D, dtype=F64)


def posterior(d: int = 2) -> pb.GPDecoder:
    return pb.GPDecoder(*data(d=d), lengthscale=ELL, signal=S, noise=TAU)


def kernel(a: Tensor, b: Tensor) -> Tensor:
    return S**2 * torch.exp(-0.5 * (a[:, None] - b).square().sum(-1) / ELL**2)


def conditioned(z: Tensor) -> tuple[Tensor, Tensor]:
    """Mean (m, D) and covariance (m, m) of the functions at z by conditioning the joint Gaussian, with explicit
    inverses."""
    codes, x = data(d=z.shape[-1])
    gain = kernel(z, codes) @ torch.linalg.inv(kernel(codes, codes) + TAU**2 * torch.eye(len(codes), dtype=F64))
    return x.mean(0) + gain @ (x - x.mean(0)), kernel(z, z) - gain @ kernel(codes, z)


def test_posterior_is_the_conditional_gaussian():
    z = 2 * torch.randn(20, 2, dtype=F64)
    mean, covariance = conditioned(z)
    p = posterior()(z)
    torch.testing.assert_close(p.mean, mean, rtol=1e-10, atol=1e-10)
    variance = covariance.diagonal() + TAU**2
    torch.testing.assert_close(p.variance, variance[:, None].expand(20, D), rtol=1e-9, atol=1e-10)


def test_posterior_forgets_the_data_far_away():
    p = posterior()(torch.full((1, 2), 50.0, dtype=F64))
    torch.testing.assert_close(p.mean[0], data()[1].mean(0))
    torch.testing.assert_close(p.stddev[0], torch.full((D,), math.hypot(S, TAU), dtype=F64))


def test_metric_of_the_posterior_against_autodiff():
    """Σ (∂μ ∂μᵀ + 2 ∂σ ∂σᵀ)/σ² with Jacobians by reverse mode through the conditional Gaussian."""
    z = 2 * torch.randn(8, 2, dtype=F64)
    M = pb.FisherRaoMetric(posterior()).tensor(z)
    for point, found in zip(z, M, strict=True):

        def moments(w: Tensor) -> Tensor:
            mean, covariance = conditioned(w[None])
            scale = (covariance[0, 0] + TAU**2).sqrt()
            return torch.cat([mean[0], scale[None]])

        J = torch.autograd.functional.jacobian(moments, point)
        scale = moments(point)[-1]
        expected = (J[:-1].T @ J[:-1] + 2 * D * torch.outer(J[-1], J[-1])) / scale**2
        torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("d", [1, 2, 3])
def test_expected_metric_against_sampled_functions(d: int):
    """E[JᵀJ] over functions drawn from the posterior around a point, Jacobians by central differences: within 5
    standard errors."""
    step, num = 1e-3, 20_000
    metric = pb.GPExpectedMetric(posterior(d=d))
    for point in torch.randn(3, d, dtype=F64):
        stencil = point + step * torch.cat([torch.eye(d, dtype=F64), -torch.eye(d, dtype=F64)])
        mean, covariance = conditioned(stencil)
        jitter = 1e-13 * torch.eye(2 * d, dtype=F64)
        functions = MultivariateNormal(mean.T, covariance + jitter).sample(torch.Size([num]))
        J = (functions[..., :d] - functions[..., d:]) / (2 * step)
        metrics = torch.einsum("nki,nkj->nij", J, J)
        error = metrics.std(0) / num**0.5
        # the jitter adds to every squared slope 2 · 1e-13 / (2 step)² a feature, far below the standard error
        assert ((metrics.mean(0) - metric.tensor(point)).abs() <= 5 * error).all()


def test_expected_metric_obeys_the_laws_of_metrics():
    check_metric(pb.GPExpectedMetric(posterior()), torch.randn(4, 2, dtype=F64))


def test_expected_metric_knows_where_the_data_end():
    """At the data the function is known and only the mean counts; far away only the prior does."""
    codes, x = data()
    known = pb.GPDecoder(codes, x, lengthscale=ELL, signal=S, noise=1e-3)
    far = pb.GPExpectedMetric(known).tensor(torch.full((2,), 60.0, dtype=F64))
    torch.testing.assert_close(far, D * (S / ELL) ** 2 * torch.eye(2, dtype=F64))
    metric = pb.GPExpectedMetric(known)
    middle = codes[codes.norm(dim=-1).argmin()]
    (mean,) = torch.autograd.functional.jacobian(lambda z: known(z).mean, (middle,))
    assert (metric.tensor(middle) - mean.T @ mean).norm() < 0.1 * far.norm()


def test_steps_bound_the_expected_squared_distance():
    """ds2 is at least E|f(b) - f(a)|², computed from the joint posterior, and equal to it to third order."""
    metric = pb.GPExpectedMetric(posterior())
    a, v = torch.randn(2, 10, 2, dtype=F64)

    def expected(b: Tensor) -> Tensor:
        values = []
        for pair in zip(a, b, strict=True):
            mean, covariance = conditioned(torch.stack(pair))
            spread = covariance[0, 0] + covariance[1, 1] - 2 * covariance[0, 1]
            values.append((mean[1] - mean[0]).square().sum() + D * spread)
        return torch.stack(values)

    assert (metric.ds2(a, a + v) >= expected(a + v) - 1e-12).all()
    gaps = [(metric.ds2(a, a + h * v) / expected(a + h * v) - 1).max() for h in (0.1, 0.05)]
    assert gaps[1] < 0.3 * gaps[0]


def test_fit_maximizes_the_marginal_likelihood():
    """No hyperparameter can be moved to a better value, and a sample's own hyperparameters are found again."""
    torch.manual_seed(3)
    codes = 2 * torch.randn(120, 2, dtype=F64)
    covariance = kernel(codes, codes) + TAU**2 * torch.eye(120, dtype=F64)
    x = MultivariateNormal(torch.zeros(120, dtype=F64), covariance).sample(torch.Size([30])).T
    fitted = pb.GPDecoder.fit(codes, x)
    found = {"lengthscale": fitted.lengthscale, "signal": fitted.signal, "noise": fitted.noise}
    for value, truth in zip(found.values(), (ELL, S, TAU), strict=True):
        assert value.item() == pytest.approx(truth, rel=0.1)

    def log_likelihood(lengthscale: float, signal: float, noise: float) -> float:
        squares = (codes[:, None] - codes).square().sum(-1)
        K = signal**2 * torch.exp(-0.5 * squares / lengthscale**2) + noise**2 * torch.eye(120, dtype=F64)
        return MultivariateNormal(torch.zeros(120, dtype=F64), K).log_prob((x - x.mean(0)).T).sum().item()

    best = {name: value.item() for name, value in found.items()}
    for name in best:
        for factor in (0.98, 1.02):
            assert log_likelihood(**{**best, name: factor * best[name]}) < log_likelihood(**best)


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("n", [5, 60])
def test_data_without_noise_are_interpolated(dtype: torch.dtype, n: int):
    """To the root of the precision, although the likelihood has no maximum at a positive noise."""
    codes = torch.randn(n, 2, dtype=dtype, generator=torch.Generator().manual_seed(0))
    x = torch.cat([codes.sin(), codes[:, :1] - codes[:, 1:]], -1)
    error = (pb.GPDecoder.fit(codes, x)(codes).mean - x).abs().max()
    assert error < 100 * torch.finfo(dtype).eps ** 0.5 * x.std()


def test_follows_dtype_and_state():
    decoder = posterior()
    z = torch.randn(5, 2, dtype=F64)
    other = pb.GPDecoder(*[torch.zeros_like(t) for t in data()], lengthscale=1.0, signal=1.0, noise=1.0)
    other.load_state_dict(decoder.state_dict())
    assert torch.equal(other(z).mean, decoder(z).mean)
    single = other.float()(z.float())
    assert single.mean.dtype == torch.float32
    torch.testing.assert_close(single.mean.double(), decoder(z).mean, rtol=1e-3, atol=1e-3)


def test_refuses_data_it_cannot_use():
    codes, x = data()
    with pytest.raises(
        ValueError, match=r"codes \(n, d\) and data \(n, D\) of the same n; got \(40, 2\) and \(39, 4\)"
    ):
        pb.GPDecoder.fit(codes, x[1:])
    with pytest.raises(ValueError, match=r"noise must be a positive number; got 0\.0"):
        pb.GPDecoder(codes, x, lengthscale=1.0, signal=1.0, noise=0.0)
    with pytest.raises(ValueError, match=r"singular to working precision.* Raise noise"):
        pb.GPDecoder(codes.float(), x.float(), lengthscale=100.0, signal=1.0, noise=1e-9)
    with pytest.raises(ValueError, match="40 of 40 rows are NaN"):
        pb.GPDecoder.fit(codes, x / 0)
