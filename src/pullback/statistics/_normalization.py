r"""The latent space as seen from a point, and the integrals of normal densities over it:

.. math:: C(\mu, \Gamma) = \int e^{-\frac12 \mathrm{Log}_\mu(z)^\top \Gamma\, \mathrm{Log}_\mu(z)} \, dm(z)
          \approx \sum_s \omega_s\, e^{-\frac12 v_s^\top \Gamma v_s},

where the base measure is :math:`dm = \sqrt{\det M(z)}\, dz` or dz (`log_base`). Points :math:`z_s` are drawn once from
a density q around the data; :math:`v_s = \mathrm{Log}_\mu(z_s)` and :math:`\omega_s = \tfrac{dm}{dz}(z_s) / (S
q(z_s))`. No exponential map is solved, and nothing has to be known about the cut locus. The points stay the same when
:math:`\mu` moves, so C is a smooth function of it. Given tangents, the best precision is a convex problem.

For the final constant (`log_normalizer`) only the radius :math:`r^2 = v^\top \Gamma v` is expensive, as it takes a
shortest path. Where many values of it are known it can be guessed between them, :math:`\tilde r`:

.. math:: C = \int e^{-\frac12 \tilde r^2} \, dm + \int \bigl(e^{-\frac12 r^2} - e^{-\frac12 \tilde r^2}\bigr)\, dm .

The first integral takes no path, so it may have many points. The second is small, as is its noise. Both are unbiased
(Giles 2015, *Multilevel Monte Carlo methods*) if guesses come from other points: those of the batches before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import numpy as np
import torch
from scipy.special import gammaln, ndtri
from scipy.stats import qmc
from sklearn.neighbors import KNeighborsRegressor
from torch import Tensor

from pullback.statistics._paths import Paths

BaseMeasure = Literal["volume", "lebesgue"]
# From codes (n, d) to the log-density (n,) of the base measure with respect to dz.
LogBase = Callable[[Tensor], Tensor]
# A mean (d,) and a covariance (d, d).
Gaussian = tuple[Tensor, Tensor]
# Independent parts of a sample, whose scatter is the standard error.
NUM_REPLICATES = 8
# In more dimensions than these a few thousand points are too sparse to cover anything.
FEW_DIMENSIONS = 3
# Codes whose covariance a kernel has, and kernels at most. Choices.
_NEIGHBORS, _MAX_KERNELS = 16, 1000
# Shares of narrow kernels, wide ones, and one Gaussian over all; the same where the kernels are known to lie as the
# density does; and in more than three dimensions. Choices.
_SHARES, _ADAPTED_SHARES, _SPARSE_SHARES = (0.35, 0.2, 0.45), (0.6, 0.3, 0.1), (0.05, 0.1, 0.85)
# Standard deviations of the wide kernels over the narrow, which reach into walls, and of the one Gaussian over the
# codes, in up to two dimensions; in more of them volumes grow by the same factor, else next to no point would lie
# where the density does. Of 1,024 points around 500 codes of a VAE with d = 8, 656 count for the Gaussian of the codes
# (441 with the shares of few dimensions).
_WIDE, _BROAD = 3.0, 2.0
# Nats that hold precisions to the second moment of the data where the likelihood is flat in them; and where a Gaussian
# factor keeps the integral finite: one code of 500.
_BARRIER, _BARRIER_WITH_FACTOR = 1e-2, 1e-3
# Points that tell whether a density vanishes far away, from this many standard deviations times √d to twice as many:
# the broad Gaussian reaches to half of it.
_SHELL_POINTS, _SHELL = 64, 4.0
_MAX_NEWTON = 60
# Rounds for the mean of a Gaussian over the volume, and the distance, in standard deviations, at which it is found.
_MAX_RECENTERINGS, _CENTERED = 20, 1e-3
# Of log-weights by calibration: where it takes more, the Gaussian of the codes is no guide.
_MAX_TILT = 1.0
# Known points between which a radius is guessed, and points, if not more, with guesses. A choice: a second of a fit.
_RADII, _CHEAP = 6, 2**14
# Standard error of log C that is aimed at, a fifth of what held-out likelihoods of 500 codes are known to; and batches.
_ENOUGH, _MAX_BATCHES = 0.01, 4
# Codes whose proposal density is computed together.
_CHUNK = 1024


class Sample(NamedTuple):
    """Points ``(S, d)`` and log-weights ``(S,)`` with which sums over them are integrals over the base measure."""

    z: Tensor
    log_weight: Tensor


def quadratic(v: Tensor, precision: Tensor) -> Tensor:
    """``vᵀ Γ v`` for tangents ``(*batch, d)``."""
    return ((v @ precision) * v).sum(-1)


def importance_sample(log_base: LogBase, codes: Tensor, num: int, seed: int, *, adapted: bool = False) -> Sample:
    r"""Points from a density around codes, by scrambled Sobol sequences, one for each replicate.

    With `adapted` the codes are a sample of the density in question. The weights 1/q are calibrated: with :math:`g =
    N(m, \Sigma)` that has the moments of the codes, the integrals of :math:`g, g z, g z z^\top` over dz are made exact.
    That removes the noise a nearly Gaussian density would see.
    """
    proposal, d = Proposal.fit(codes, _ADAPTED_SHARES if adapted else _SHARES), codes.shape[1]
    # at least twice as many points as integrals that are made exact
    per_replicate = max((d + 1) * (d + 2), -(-num // NUM_REPLICATES))
    z = torch.cat([proposal.draw(per_replicate, seed + r) for r in range(NUM_REPLICATES)])
    weight = -proposal.log_density(z) - np.log(len(z))
    if len(codes) > d:
        weight = weight + _calibration(z, weight, codes)
    return Sample(z, weight + log_base(z))


def shell(log_base: LogBase, codes: Tensor, seed: int) -> Sample:
    """Points far from the codes, beyond where `importance_sample` draws, in all directions."""
    d, (mean, covariance), source = codes.shape[1], moments(codes), torch.Generator(device=codes.device)
    noise = torch.randn(_SHELL_POINTS, d, dtype=codes.dtype, device=codes.device, generator=source.manual_seed(seed))
    least, factor = _SHELL * d**0.5, torch.linalg.cholesky(covariance)
    radius = least * (1 + torch.rand(_SHELL_POINTS, 1, dtype=codes.dtype, device=codes.device, generator=source))
    z = mean + radius * torch.nn.functional.normalize(noise, dim=1) @ factor.mT
    sphere = np.log(2) + 0.5 * d * np.log(np.pi) - gammaln(0.5 * d)
    volume = sphere + (d - 1) * radius[:, 0].log() + np.log(least) + factor.diagonal().log().sum()
    return Sample(z, volume - np.log(_SHELL_POINTS) + log_base(z))


class Factor(NamedTuple):
    """A Gaussian of the coordinates, ``exp(-½ (z - m)ᵀ Λ (z - m))``, by which a normal density is multiplied."""

    mean: Tensor
    precision: Tensor

    def log(self, z: Tensor) -> Tensor:
        return -0.5 * quadratic(z - self.mean, self.precision)

    def times(self, log_base: LogBase) -> LogBase:
        """The base measure with the factor for a density."""
        return lambda z: log_base(z) + self.log(z)


def best_precision(sample: Sample, v: Tensor, second_moment: Tensor) -> Tensor:
    r"""The precision of greatest likelihood for tangents with the given second moment S, given those of a sample.

    Least is the convex function :math:`\tfrac12 \mathrm{tr}(\Gamma S) + \log C(\Gamma) + \kappa\,(\mathrm{tr}(\Gamma
    S) - \log\det \Gamma)`. Its last term is least at :math:`\Gamma = S^{-1}`, the minimum in flat space. Elsewhere it
    keeps Γ from vanishing: a few far codes would have the density reach beyond all points of the sample, where its
    integral can no longer be known.
    """
    v, inverse = _whitened(v, second_moment)
    root = inverse.mT @ _most_likely(sample.log_weight, v, 1, _BARRIER)
    return root @ root.mT


def best_product(
    sample: Sample, v: Tensor, second_moment: Tensor, codes: Gaussian, penalty: float = 0.0
) -> tuple[Tensor, Factor]:
    r"""The same with a Gaussian factor, given the codes' own moments.

    The mean of the factor is that of the most likely Gaussian over the same measure, so the minimum is no worse than
    this Gaussian, for which :math:`\Gamma = 0`. (A mean found with all the rest may run away, where distances balance
    its pull.) A `penalty`, in nats, on the trace of Γ in units of S leaves out what the codes are too few to tell.
    """
    mean, second = _most_likely_mean(sample, codes)
    (v, inverse), (x, inverse_x), d = _whitened(v, second_moment), _whitened(sample.z - mean, second), v.shape[1]
    both = _most_likely(sample.log_weight, torch.cat([v, x], 1), 2, _BARRIER_WITH_FACTOR, penalty)
    own, rest = inverse.mT @ both[:d, :d], inverse_x.mT @ both[d:, d:]
    return own @ own.mT, Factor(mean, rest @ rest.mT)


def _most_likely_mean(sample: Sample, codes: Gaussian) -> Gaussian:
    """The mean of the most likely Gaussian over the measure of a sample, and the codes' second moment there."""
    mean, covariance = codes
    for _ in range(_MAX_RECENTERINGS):
        # at the maximum the mean of the density is that of the codes, which it is at once where the measure is dz
        second = covariance + torch.outer(codes[0] - mean, codes[0] - mean)
        x, _ = _whitened(sample.z - mean, second)
        root = _most_likely(sample.log_weight, x, 1, _BARRIER_WITH_FACTOR)
        gap = codes[0] - (sample.log_weight - 0.5 * (x @ root).square().sum(-1)).softmax(0) @ sample.z
        if quadratic(gap, torch.linalg.inv(covariance)) < _CENTERED**2:
            break
        mean = mean + gap
    return mean, second


def _whitened(x: Tensor, moment: Tensor) -> tuple[Tensor, Tensor]:
    """Coordinates in which the moment is the identity, and the matrix that leads there."""
    factor = torch.linalg.cholesky(moment)
    inverse = torch.linalg.solve_triangular(factor, torch.eye(len(factor)).to(factor), upper=False)
    return x @ inverse.mT, inverse


def _most_likely(log_weight: Tensor, u: Tensor, num_blocks: int, barrier: float, penalty: float = 0.0) -> Tensor:
    r"""A root of the most likely P, in blocks, of :math:`\exp(-\tfrac12 u^\top P u)` on weighted points ``(S, D)``.

    In these coordinates the data have the identity for a second moment. The barrier belongs to (trace - log det) of P,
    the penalty to the trace of its first block. Newton's method, each step in coordinates in which P is the identity.
    """
    one, d = torch.eye(u.shape[1]).to(u), u.shape[1] // num_blocks
    rows, columns = torch.cat([torch.tril_indices(d, d) + k * d for k in range(num_blocks)], 1).to(u.device)
    double = torch.where(rows == columns, 1.0, 2.0).to(u)
    price = torch.full_like(u[0], 0.5 + barrier * num_blocks)
    price[:d] += penalty

    def objective(root: Tensor) -> tuple[Tensor, Tensor]:
        terms = log_weight - 0.5 * (u @ root).square().sum(-1)
        return price @ root.square().sum(1) + terms.logsumexp(0) - 2 * barrier * root.diagonal().log().sum(), terms

    root = one / num_blocks**0.5
    now, terms = objective(root)
    for _ in range(_MAX_NEWTON):
        w, p, step = u @ root, terms.softmax(0), torch.zeros_like(one)
        features = 0.5 * double * w[:, rows] * w[:, columns]
        pull, centered = root.mT @ (price[:, None] * root) - barrier * one, features - p @ features
        gradient = double * pull[rows, columns] - p @ features
        change = -torch.linalg.solve(centered.mT @ (p[:, None] * centered) + barrier * double.diag(), gradient)
        step[rows, columns] = step[columns, rows] = change
        decrement = float(-(gradient @ change))
        # no precision falls below a tenth of what it is
        size = min(1.0, 0.9 / max(-float(torch.linalg.eigvalsh(step)[0]), 0.9))
        for half in range(30):
            new = root @ torch.linalg.cholesky(one + 0.5**half * size * step)
            after, terms = objective(new)
            if after <= now - 0.1 * 0.5**half * size * decrement:
                break
        else:
            break
        root, now = new, after
        if decrement < 1e-12:
            break
    return root


class Proposal(NamedTuple):
    """A mixture of Gaussians: kernels ``(k, d)`` with Cholesky factors ``(k, d, d)`` and log-shares ``(k,)``."""

    centers: Tensor
    factors: Tensor
    log_shares: Tensor

    @classmethod
    def fit(cls, codes: Tensor, shares: tuple[float, float, float] = _ADAPTED_SHARES) -> Proposal:
        """Kernels with the covariances of codes' neighbors, the same three times as wide, and one broad Gaussian."""
        shares = _SPARSE_SHARES if codes.shape[1] > FEW_DIMENSIONS else shares
        (mean, covariance), different = moments(codes), codes.unique(dim=0)
        centers = different[:: -(-len(different) // _MAX_KERNELS)]
        squares = (centers[:, None] - different).square().sum(-1)
        k = min(_NEIGHBORS + codes.shape[1], len(different))
        near = different[squares.topk(k, largest=False).indices] - centers[:, None]
        local = near.mT @ near / k + 1e-3 * covariance
        counts = torch.tensor([len(centers), len(centers), 1])
        each = torch.tensor(shares, dtype=codes.dtype) / counts
        wide, broad = (width ** (2 * min(1.0, 2 / codes.shape[1])) for width in (_WIDE, _BROAD))
        return cls(
            torch.cat([centers, centers, mean[None]]),
            torch.linalg.cholesky(torch.cat([local, wide * local, broad * covariance[None]])),
            each.repeat_interleave(counts).to(codes).log(),
        )

    def draw(self, num: int, seed: int) -> Tensor:
        """Points ``(num, d)`` of a scrambled Sobol sequence."""
        u = qmc.Sobol(self.centers.shape[1] + 1, rng=seed).random_base2(int(np.ceil(np.log2(num))))[:num]
        which = np.searchsorted(self.log_shares.exp().cumsum(0).cpu().numpy(), u[:, 0]).clip(max=len(self.centers) - 1)
        noise = torch.from_numpy(ndtri(u[:, 1:].clip(1e-12, 1 - 1e-12))).to(self.centers)
        return self.centers[which] + (self.factors[which] @ noise[..., None])[..., 0]

    def log_density(self, z: Tensor) -> Tensor:
        """With respect to dz."""
        middle, (k, d) = self.centers.mean(0), self.centers.shape  # digits are lost where both are far from zero
        inverse = torch.linalg.solve_triangular(self.factors, torch.eye(d).to(z), upper=False)
        offset = (inverse @ (self.centers - middle)[..., None]).flatten()
        scale = self.factors.diagonal(dim1=-2, dim2=-1).log().sum(-1) + 0.5 * d * np.log(2 * np.pi)
        parts = []
        for part in z.split(_CHUNK):
            white = torch.addmm(-offset, part - middle, inverse.flatten(0, 1).mT).unflatten(1, (k, d))
            parts.append((self.log_shares - scale - 0.5 * white.square().sum(-1)).logsumexp(-1))
        return torch.cat(parts)


def moments(codes: Tensor, share: Tensor | None = None) -> Gaussian:
    """Mean and covariance of codes, with weights that sum to one if they have any."""
    share = torch.full_like(codes[:, 0], 1 / len(codes)) if share is None else share
    mean = share @ codes
    covariance = (codes - mean).mT @ (share[:, None] * (codes - mean))
    floor = 1e-6 * covariance.diagonal().mean().clamp_min(1e-12)
    return mean, covariance + floor * torch.eye(len(mean)).to(codes)


def _calibration(z: Tensor, log_weight: Tensor, codes: Tensor) -> Tensor:
    """Logarithms of factors for the weights that make the integrals of the codes' Gaussian times 1, x, xxᵀ - 1 exact.

    Exponential tilting: of all such factors those with the least Kullback-Leibler divergence from 1; 1 if they are far.
    """
    d, (mean, covariance) = z.shape[1], moments(codes)
    x, inverse = _whitened(z - mean, covariance)
    g = (inverse.diagonal().log().sum() - 0.5 * (x.square().sum(-1) + d * np.log(2 * np.pi)) + log_weight).exp()
    rows, columns = torch.tril_indices(d, d, device=z.device)
    squares = x[:, rows] * x[:, columns] - (rows == columns).to(x)
    h = len(x) * (g[:, None] * torch.cat([torch.ones_like(x[:, :1]), x, squares], -1))
    multiplier, exact = torch.zeros_like(h[0]), torch.eye(h.shape[1])[0].to(h)
    for _ in range(_MAX_NEWTON):
        tilt = h @ multiplier
        p = tilt.exp() / len(h)
        slope = p @ h - exact
        if slope.abs().max() < 1e-9:
            return tilt if tilt.abs().max() < _MAX_TILT else torch.zeros_like(tilt)
        step = torch.linalg.pinv(h.mT @ (p[:, None] * h), hermitian=True) @ slope  # torch's lstsq is not the same twice
        largest = float((h @ step).abs().max().clamp_min(1e-12))
        multiplier = multiplier - min(1.0, 1.0 / largest) * step  # no factor changes more than e-fold at once
    return torch.zeros_like(h[:, 0])


def log_base(paths: Paths, base_measure: BaseMeasure, z: Tensor) -> Tensor:
    """The log-density of the base measure: ½ log det M for the volume, else 0; -inf where there is no metric."""
    values = paths.log_volume(z)
    return values if base_measure == "volume" else torch.where(values == -torch.inf, values, 0.0)


class KnownRadii(NamedTuple):
    """Points drawn from a normal density, and all points ``(m, d)`` whose radii ``(m,)`` are known."""

    points: Tensor
    z: Tensor
    radius: Tensor

    def guess(self, z: Tensor) -> Tensor:
        """Radii from those of the nearest known points."""
        regressor = KNeighborsRegressor(min(_RADII, len(self.z)), weights="distance")
        regressor.fit(self.z.cpu().numpy(), self.radius.cpu().numpy())
        return torch.from_numpy(regressor.predict(z.cpu().numpy())).to(z)


def log_normalizer(
    log_base: LogBase, radii: Callable[[Tensor], Tensor], known: KnownRadii, num: int, seed: int
) -> tuple[Tensor, Tensor]:
    """log C and its standard error, in batches of `num` points; `radii` are found by shortest paths."""
    batches = []
    for k in range(_MAX_BATCHES):
        first = seed + 2 * k * NUM_REPLICATES
        few = importance_sample(log_base, known.points, num, first, adapted=True)
        many = importance_sample(log_base, known.points, max(_CHEAP, num), first + NUM_REPLICATES, adapted=True)
        radius = radii(few.z)
        batches.append(_batch(few, radius, many, known))
        logs, errors = map(torch.stack, zip(*batches, strict=True))
        total = logs.logsumexp(0) - torch.tensor(len(logs)).log()
        scatter = errors.square().sum().sqrt() / len(errors)
        if scatter < _ENOUGH:
            break
        known = known._replace(z=torch.cat([known.z, few.z]), radius=torch.cat([known.radius, radius]))
    return total, scatter


def _batch(few: Sample, radius: Tensor, many: Sample, known: KnownRadii) -> tuple[Tensor, Tensor]:
    """log C and its standard error from radii at few points and guesses at many; without these, if they add noise."""
    shift = (few.log_weight - 0.5 * radius.square()).max()

    def replicates(sample: Sample, radius: Tensor) -> Tensor:
        """The sum as each of the replicates estimates it."""
        terms = (sample.log_weight - 0.5 * radius.square() - shift).exp()
        return NUM_REPLICATES * terms.unflatten(0, (NUM_REPLICATES, -1)).sum(1)

    plain = replicates(few, radius)
    both = plain - replicates(few, known.guess(few.z)) + replicates(many, known.guess(many.z))
    parts = both if both.std() < plain.std() and both.mean() > 0 else plain
    return parts.mean().log() + shift, parts.std() / (NUM_REPLICATES**0.5 * parts.mean())
