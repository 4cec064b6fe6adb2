r"""The expected metric of a Gaussian process: the average of :math:`J^\top J` over everything the process may be."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pullback._autodiff.derivatives import pushforward
from pullback._decoders.gaussian_process import GPDecoder
from pullback._metrics.base import Metric, per_code
from pullback._typing import Codes, Float


@dataclass(frozen=True)
class GPExpectedMetric(Metric):
    r"""The expected Euclidean metric of the random map that a Gaussian process is (Tosi et al. 2014).

    The Jacobian of the process is Gaussian. With D independent features, mean Jacobian :math:`J_\mu` and the covariance
    :math:`\Sigma_J = \partial_z \partial_{z'} \operatorname{cov}(f(z), f(z'))` of one row,

    .. math:: M(z) = \mathrm{E}[J^\top J] = J_\mu^\top J_\mu + D\, \Sigma_J, \qquad
              \Sigma_J = \tfrac{s^2}{\ell^2} 1 - J_w^\top J_w .

    The second term is what the process does not know: nothing at the data, :math:`D s^2/\ell^2` far from them. `ds2` is
    the expected squared distance :math:`\mathrm{E}|f(b) - f(a)|^2` with the prior's part, :math:`2 D (s^2 - k(a, b))`,
    replaced by its tangent :math:`D s^2 |b - a|^2/\ell^2`, which it never exceeds: without that, steps longer than
    :math:`\ell` would all cost the same.

    Args:
        process: the posterior.

    >>> import torch, pullback as pb
    >>> codes = torch.linspace(-1, 1, 9, dtype=torch.float64)[:, None]
    >>> decoder = pb.GPDecoder(codes, codes**2, lengthscale=1.0, signal=1.0, noise=0.01)
    >>> pb.GPExpectedMetric(decoder).tensor(torch.tensor([0.5]).double()).round(decimals=2)  # (2 z)²
    tensor([[1.0300]], dtype=torch.float64)
    """

    process: GPDecoder

    @property
    def decoder(self) -> GPDecoder:
        """The process as a decoder."""
        return self.process

    @per_code
    def tensor(self, z: Codes) -> Float[Tensor, "*batch d d"]:
        (_,), (tangents,) = pushforward(lambda z: (self.process.features(z),), z)
        whitened = tangents.movedim(0, -2)
        mean = whitened @ self.process.weights
        eye = torch.eye(z.shape[-1], dtype=z.dtype, device=z.device)
        covariance = self._prior_slope2() * eye - whitened @ whitened.mT
        return mean @ mean.mT + self.process.weights.shape[1] * covariance

    @per_code
    def ds2(self, a: Codes, b: Codes) -> Float[Tensor, "*batch"]:
        step = self.process.features(b) - self.process.features(a)
        covariance = self._prior_slope2() * (b - a).square().sum(-1) - step.square().sum(-1)
        return (step @ self.process.weights).square().sum(-1) + self.process.weights.shape[1] * covariance

    @per_code
    def embed(self, z: Codes, origin: Float[Tensor, "*origin d"] | None = None) -> tuple[Tensor, Tensor] | None:
        root = self.process.weights.shape[1] ** 0.5
        w = self.process.features(z)
        line = root * self._prior_slope2().sqrt() * (z - self.process.origin)
        shared = torch.cat([w @ self.process.weights, line], -1)
        return torch.cat([shared, root * w], -1), torch.cat([shared, -root * w], -1)

    def _prior_slope2(self) -> Tensor:
        return (self.process.signal / self.process.lengthscale).square()
