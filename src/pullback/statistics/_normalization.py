r"""The latent space as seen from a point, and the integrals of normal densities over it.

The locally adaptive normal density :math:`\exp(-\tfrac12 \mathrm{Log}_\mu(z)^\top \Gamma\, \mathrm{Log}_\mu(z)) /
C(\mu, \Gamma)` is normalized by

.. math:: C(\mu, \Gamma) = \int e^{-\frac12 \mathrm{Log}_\mu(z)^\top \Gamma\, \mathrm{Log}_\mu(z)} \, dm(z)
          \approx \sum_s \omega_s\, e^{-\frac12 v_s^\top \Gamma v_s},

where the base measure is :math:`dm = \sqrt{\det M(z)}\, dz` or dz (`log_base`). Points :math:`z_s` are drawn once from
a density q around the data; :math:`v_s = \mathrm{Log}_\mu(z_s)` and :math:`\omega_s = \tfrac{dm}{dz}(z_s) / (S
q(z_s))`. No exponential map is solved and nothing has to be known about the cut locus, beyond which the exponential
map covers the manifold again. The points stay the same when :math:`\mu` moves, so C is a smooth function of it.

Given tangents and weights, the best precision is a convex problem: :math:`-\tfrac12 v v^\top` are the sufficient
statistics of an exponential family.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from scipy.special import gammaln, ndtri
from scipy.stats import qmc
from torch import Tensor
from torch.distributions import MultivariateNormal

from pullback.statistics._paths import Paths

BaseMeasure = Literal["volume", "lebesgue"]
# From codes (n, d) to the log-density (n,) of the base measure with respect to dz.
LogBase = Callable[[Tensor], Tensor]
# Independent parts of a sample, whose scatter is the standard error.
NUM_REPLICATES = 8
# In more dimensions than these a few thousand points are too sparse to cover anything.
FEW_DIMENSIONS = 3
# Codes whose covariance a kernel has, and kernels at most. Choices.
_NEIGHBORS, _MAX_KERNELS = 16, 1000
# Shares of narrow kernels, wide ones, and one Gaussian over all; the same where the kernels are known to lie as the
# density does; and in more than three dimensions. Choices.
_SHARES, _ADAPTED_SHARES, _SPARSE_SHARES = (0.35, 0.2, 0.45), (0.6, 0.3, 0.1), (0.05, 0.1, 0.85)
# Share of a Gaussian over all codes where points are drawn around some of them: so no weight is very large.
_DEFENSIVE = 0.1
# Standard deviations of the wide kernels over the narrow, which reach into walls, and of the one Gaussian over the
# codes, in up to two dimensions; in more of them volumes grow by the same factor, else next to no point would lie
# where the density does. Of 1,024 points around 500 codes of a VAE with d = 8, 656 count for the Gaussian of the codes
# (441 with the shares of few dimensions).
_WIDE, _BROAD = 3.0, 2.0
# Nats that hold precisions to the second moment of the data where the likelihood is flat in them.
_BARRIER = 1e-2
# Points that tell whether a density vanishes far away, from this many standard deviations times √d to twice as many:
# the broad Gaussian reaches to half of it.
_SHELL_POINTS, _SHELL = 64, 4.0
_MAX_NEWTON = 60
# Of log-weights by calibration: where it takes more, the Gaussian of the codes is no guide.
_MAX_TILT = 1.0
# Codes whose proposal density is computed together.
_CHUNK = 1024


@dataclass(frozen=True, eq=False)
class Sample:
    """Points ``(S, d)`` and log-weights ``(S,)`` with which sums over them are integrals over the base measure."""

    z: Tensor
    log_weight: Tensor


@dataclass(frozen=True, eq=False)
class Cloud:
    """Tangents ``(S, d)`` and log-weights ``(S,)``: the base measure as seen from a point."""

    v: Tensor
    log_weight: Tensor

    def log_terms(self, precision: Tensor) -> Tensor:
        """Logarithms of the terms whose sum is C."""
        return self.log_weight - 0.5 * quadratic(self.v, precision)

    def log_normalizer(self, precision: Tensor) -> tuple[Tensor, Tensor]:
        """log C, and its standard error from the scatter of the replicates."""
        terms = self.log_terms(precision)
        total = terms.logsumexp(0)
        parts = (terms.unflatten(0, (NUM_REPLICATES, -1)) - total).logsumexp(1).exp() * NUM_REPLICATES
        return total, parts.std() / NUM_REPLICATES**0.5

    def mean(self, precision: Tensor) -> Tensor:
        """The mean tangent under the normalized density."""
        return self.log_terms(precision).softmax(0) @ self.v


def quadratic(v: Tensor, precision: Tensor) -> Tensor:
    """``vᵀ Γ v`` for tangents ``(*batch, d)``."""
    return ((v @ precision) * v).sum(-1)


def importance_sample(
    log_base: LogBase,
    groups: list[Tensor],
    num: int,
    random_state: int,
    *,
    adapted: bool = False,
    everything: Tensor | None = None,
) -> Sample:
    r"""Points from a density around groups of codes, by scrambled Sobol sequences, one for each replicate.

    The density is a mixture: one half Gaussian kernels at the codes, narrow and wide, each with the covariance of its
    neighbors, for densities that follow the data; the other half one broad Gaussian, for those that do not.
    With `adapted` the groups are samples of the densities in question, and nearly all of it is kernels. In more than
    three dimensions nearly all of it is the Gaussian. A tenth are points of a Gaussian over `everything`, if given.

    The weights 1/q are then calibrated: for each group of codes, with :math:`g = N(m, \Sigma)` that has the moments of
    the group, the integrals of :math:`g, g z, g z z^\top` over dz are made exact. That removes the noise a nearly
    Gaussian density would see.
    """
    codes = torch.cat(groups)
    proposal = Proposal.fit(codes, _ADAPTED_SHARES if adapted else _SHARES, everything)
    per_replicate = max(2 * _num_controls(codes.shape[1]), -(-num // NUM_REPLICATES))
    z = torch.cat([proposal.draw(per_replicate, random_state + r) for r in range(NUM_REPLICATES)])
    weight = -proposal.log_density(z) - np.log(len(z))
    controls = [_controls(z, weight, group) for group in groups if len(group) > codes.shape[1]]
    if controls:
        weight = weight + _calibration(torch.cat([c for c, _ in controls], 1), torch.cat([e for _, e in controls]))
    return Sample(z, weight + log_base(z))


def shell(log_base: LogBase, codes: Tensor, seed: int) -> Sample:
    """Points far from the codes, beyond where `importance_sample` draws, in all directions."""
    d, (mean, covariance) = codes.shape[1], _moments(codes)
    source = torch.Generator(device=codes.device).manual_seed(seed)
    noise = torch.randn(_SHELL_POINTS, d, dtype=codes.dtype, device=codes.device, generator=source)
    share = torch.rand(_SHELL_POINTS, 1, dtype=codes.dtype, device=codes.device, generator=source)
    radius = _SHELL * d**0.5 * (1 + share)
    factor = torch.linalg.cholesky(covariance)
    z = mean + radius * torch.nn.functional.normalize(noise, dim=1) @ factor.mT
    sphere = np.log(2) + 0.5 * d * np.log(np.pi) - gammaln(0.5 * d)
    volume = sphere + (d - 1) * radius[:, 0].log() + np.log(_SHELL * d**0.5) + factor.diagonal().log().sum()
    return Sample(z, volume - np.log(_SHELL_POINTS) + log_base(z))


def best_precision(cloud: Cloud, second_moment: Tensor) -> Tensor:
    r"""The precision of greatest likelihood for tangents with the given second moment S.

    Minimizes the convex function :math:`\tfrac12 \mathrm{tr}(\Gamma S) + \log C(\Gamma) + \kappa\,(\mathrm{tr}(\Gamma
    S) - \log\det \Gamma)` by Newton's method in coordinates in which S is the identity. But for its last term, at the
    minimum the second moment of the density is S. That term, with :math:`\kappa` = 0.01 nats, is least at
    :math:`\Gamma = S^{-1}`, the minimum in flat space. Elsewhere it keeps Γ from vanishing: a few far codes would have
    the density reach beyond all points of the cloud, where its integral can no longer be known.
    """
    factor = torch.linalg.cholesky(second_moment)
    v = torch.linalg.solve_triangular(factor, cloud.v.mT, upper=False).mT
    white = Cloud(v, cloud.log_weight)
    rows, columns = torch.tril_indices(len(factor), len(factor), device=v.device)
    features = v[:, rows] * v[:, columns] * torch.where(rows == columns, 0.5, 1.0)
    precision = torch.eye(len(factor), dtype=v.dtype, device=v.device)
    for _ in range(_MAX_NEWTON):
        step, decrement = _newton_step(white, precision, features, rows, columns)
        precision, moved = _backtrack(white, precision, step, decrement)
        if decrement < 1e-12 or not moved:
            break
    inverse = torch.linalg.solve_triangular(factor, torch.eye(len(factor)).to(factor), upper=False)
    return inverse.mT @ precision @ inverse


def _newton_step(
    cloud: Cloud, precision: Tensor, features: Tensor, rows: Tensor, columns: Tensor
) -> tuple[Tensor, float]:
    """The Newton step as a symmetric matrix and its decrement; `features` are the derivatives of ½ vᵀ Γ v."""
    p = cloud.log_terms(precision).softmax(0)
    mean = p @ features
    target = torch.where(rows == columns, 0.5, 0.0).to(features)
    centered = features - mean
    hessian = centered.mT @ (p[:, None] * centered)
    inverse = torch.linalg.inv(precision)
    double = torch.where(rows == columns, 1.0, 2.0).to(features)
    gradient = target - mean + _BARRIER * double * (torch.eye(len(precision)).to(precision) - inverse)[rows, columns]
    basis = torch.zeros(len(rows), *precision.shape).to(precision)
    index = torch.arange(len(rows), device=rows.device)
    basis[index, rows, columns] = basis[index, columns, rows] = 1.0
    curved = inverse @ basis @ inverse
    hessian = hessian + _BARRIER * torch.einsum("aij,bji->ab", basis, curved)
    step = -torch.linalg.solve(hessian, gradient)
    return torch.einsum("a,aij->ij", step, basis), float(-(gradient @ step))


def _objective(cloud: Cloud, precision: Tensor) -> Tensor:
    """The function `best_precision` minimizes, in its coordinates; inf where the matrix is not positive definite."""
    factor, info = torch.linalg.cholesky_ex(precision)
    if info:
        return precision.new_tensor(torch.inf)
    trace, half_logdet = precision.trace(), factor.diagonal().log().sum()
    return 0.5 * trace + cloud.log_terms(precision).logsumexp(0) + _BARRIER * (trace - 2 * half_logdet)


def _backtrack(cloud: Cloud, precision: Tensor, step: Tensor, decrement: float) -> tuple[Tensor, bool]:
    now = _objective(cloud, precision)
    for size in 0.5 ** np.arange(30):
        new = precision + float(size) * step
        if _objective(cloud, new) <= now - 0.1 * float(size) * decrement:
            return new, True
    return precision, False


@dataclass(frozen=True, eq=False)
class Proposal:
    """A mixture of Gaussians: kernels ``(k, d)`` with Cholesky factors ``(k, d, d)`` and log-shares ``(k,)``."""

    centers: Tensor
    factors: Tensor
    log_shares: Tensor

    @classmethod
    def fit(
        cls,
        codes: Tensor,
        shares: tuple[float, float, float] = _ADAPTED_SHARES,
        everything: Tensor | None = None,
    ) -> Proposal:
        """Kernels with the covariances of each code's neighbors, the same three times as wide, and one broad
        Gaussian; another over `everything`.
        """
        shares = _SPARSE_SHARES if codes.shape[1] > FEW_DIMENSIONS else shares
        (mean, covariance), different = _moments(codes), codes.unique(dim=0)
        centers = different[:: -(-len(different) // _MAX_KERNELS)]
        squares = (centers[:, None] - different).square().sum(-1)
        k = min(_NEIGHBORS + codes.shape[1], len(different))
        near = different[squares.topk(k, largest=False).indices] - centers[:, None]
        local = near.mT @ near / k + 1e-3 * covariance
        counts = torch.tensor([len(centers), len(centers), 1, 1])
        rest = 0.0 if everything is None else _DEFENSIVE
        mean_all, covariance_all = (mean, covariance) if everything is None else _moments(everything)
        each = torch.tensor([*((1 - rest) * share for share in shares), rest], dtype=codes.dtype) / counts
        wide, broad = (width ** (2 * min(1.0, 2 / codes.shape[1])) for width in (_WIDE, _BROAD))
        covariances = [local, wide * local, broad * covariance[None], broad * covariance_all[None]]
        return cls(
            torch.cat([centers, centers, mean[None], mean_all[None]]),
            torch.linalg.cholesky(torch.cat(covariances)),
            each.repeat_interleave(counts).to(codes).log(),
        )

    def draw(self, num: int, seed: int) -> Tensor:
        """Points ``(num, d)`` of a scrambled Sobol sequence."""
        d = self.centers.shape[1]
        u = qmc.Sobol(d + 1, rng=seed).random_base2(int(np.ceil(np.log2(num))))[:num]
        which = np.searchsorted(self.log_shares.exp().cumsum(0).cpu().numpy(), u[:, 0]).clip(max=len(self.centers) - 1)
        noise = torch.from_numpy(ndtri(u[:, 1:].clip(1e-12, 1 - 1e-12))).to(self.centers)
        return self.centers[which] + (self.factors[which] @ noise[..., None])[..., 0]

    def log_density(self, z: Tensor) -> Tensor:
        """With respect to dz."""
        return torch.cat([self._log_density(part) for part in z.split(_CHUNK)])

    def _log_density(self, z: Tensor) -> Tensor:
        middle, (k, d) = self.centers.mean(0), self.centers.shape  # digits are lost where both are far from zero
        eye = torch.eye(d, dtype=z.dtype, device=z.device)
        inverse = torch.linalg.solve_triangular(self.factors, eye, upper=False)
        offset = (inverse @ (self.centers - middle)[..., None]).flatten()
        white = torch.addmm(-offset, z - middle, inverse.flatten(0, 1).mT).unflatten(1, (k, d))
        scale = self.factors.diagonal(dim1=-2, dim2=-1).log().sum(-1) + 0.5 * d * np.log(2 * np.pi)
        return (self.log_shares - scale - 0.5 * white.square().sum(-1)).logsumexp(-1)


def _moments(codes: Tensor) -> tuple[Tensor, Tensor]:
    mean = codes.mean(0)
    covariance = (codes - mean).mT @ (codes - mean) / len(codes)
    floor = 1e-6 * covariance.diagonal().mean().clamp_min(1e-12)
    return mean, covariance + floor * torch.eye(len(mean)).to(codes)


def gaussian_of(codes: Tensor) -> MultivariateNormal:
    """The Gaussian of greatest likelihood."""
    mean, covariance = _moments(codes)
    return MultivariateNormal(mean, covariance, validate_args=False)


def _num_controls(d: int) -> int:
    return 1 + d + d * (d + 1) // 2


def _controls(z: Tensor, log_weight: Tensor, codes: Tensor) -> tuple[Tensor, Tensor]:
    """Terms ``(S, c)`` of sums that should be the integrals ``(c,)`` of a Gaussian with the moments of the codes
    times 1, x, xxᵀ - 1.
    """
    d, (mean, covariance) = z.shape[1], _moments(codes)
    factor = torch.linalg.cholesky(covariance)
    x = torch.linalg.solve_triangular(factor, (z - mean).mT, upper=False).mT
    g = (-0.5 * x.square().sum(-1) - 0.5 * d * np.log(2 * np.pi) - factor.diagonal().log().sum() + log_weight).exp()
    rows, columns = torch.tril_indices(d, d, device=z.device)
    squares = x[:, rows] * x[:, columns] - (rows == columns).to(x)
    terms = g[:, None] * torch.cat([torch.ones_like(x[:, :1]), x, squares], -1)
    exact = torch.zeros(terms.shape[1]).to(x)
    exact[0] = 1.0
    return terms, exact


def _calibration(terms: Tensor, exact: Tensor) -> Tensor:
    r"""Logarithms of positive factors for the weights, near 0, that make the sums of the terms exact; 0 if that takes
    large ones.

    Exponential tilting: of all such factors those with the least Kullback-Leibler divergence from 1,
    :math:`e^{\lambda\cdot h}`.
    """
    h, multiplier = len(terms) * terms, torch.zeros_like(exact)
    for _ in range(_MAX_NEWTON):
        p = (h @ multiplier).exp() / len(h)
        slope = p @ h - exact
        if slope.abs().max() < 1e-9:
            tilt = h @ multiplier
            return tilt if tilt.abs().max() < _MAX_TILT else torch.zeros_like(tilt)
        hessian = h.mT @ (p[:, None] * h)
        step = torch.linalg.pinv(hessian, hermitian=True) @ slope  # torch's lstsq is not the same twice
        largest = float((h @ step).abs().max().clamp_min(1e-12))
        size = min(1.0, 1.0 / largest)  # no factor changes more than e-fold at once
        multiplier = multiplier - size * step
    return torch.zeros_like(h[:, 0])


def log_base(paths: Paths, base_measure: BaseMeasure, z: Tensor) -> Tensor:
    """The log-density of the base measure with respect to dz: ½ log det M for the volume, else 0; -inf where there
    is no metric.
    """
    values = paths.log_volume(z)
    return values if base_measure == "volume" else torch.where(values == -torch.inf, values, 0.0)
