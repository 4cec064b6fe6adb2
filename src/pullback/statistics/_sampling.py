r"""Random codes: spread evenly over the latent manifold, and wandering on it.

Even with respect to the Riemannian volume, under which regions hold as many samples as the decoder gives them distinct
distributions. Wandering by Brownian motion, whose generator is half the Laplace-Beltrami operator. In coordinates

.. math:: dz^i = -\tfrac12 M^{jk} \Gamma^i_{jk}\, dt + \bigl(M^{-1/2} dW\bigr)^i,

and the drift is what a geodesic adds to its straight line: with :math:`a(z, v) = -\Gamma(z)[v, v]` the acceleration of
the geodesic with velocity v, the step :math:`z \to z + \xi + \tfrac12 a(z, \xi)`, :math:`\xi \sim N(0, M^{-1} dt)`,
has the right mean and covariance to first order in dt, and no Christoffel tensor is formed.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pullback._decoders.contract import as_codes, unvalidated
from pullback._decoders.support import Support
from pullback._geometry.exponential import expmap
from pullback._metrics.base import Metric, codes_for
from pullback._metrics.connection import acceleration
from pullback._numerics.random import RandomState, as_generator
from pullback._progress import progress
from pullback._typing import Array, Codes, Float
from pullback.statistics._paths import Paths

# Codes whose acceleration is computed together.
_CHUNK = 4096
# Accepted proposals below which rejection is given up: a Markov chain is then faster.
_MIN_ACCEPTANCE = 1e-4
# Of the steps of a chain, as shares of the region's width: some of them suit any region.
_SCALES = (0.01, 1.0)


@progress("samples")
def sample_uniform(
    metric: Metric,
    n: int,
    *,
    bounds: Float[Tensor, "2 d"] | Array | None = None,
    support: Support | None = None,
    num_steps: int | None = None,
    random_state: RandomState = None,
) -> Float[Tensor, "n d"]:
    r"""Codes uniform with respect to the Riemannian volume: density :math:`\propto \sqrt{\det M}` on a bounded region.

    By rejection, the samples are independent and exact up to one thing: the largest density is that of all proposals
    seen, which keeps rising (earlier samples are thinned accordingly). In more than a few dimensions hardly any is
    accepted; there `num_steps` gives ``n`` independent Metropolis chains, one sample each, that forget their
    start with their length.

    Args:
        metric: its volume is sampled.
        n: how many.
        bounds: lower and upper corner of the region, shape ``(2, d)``.
        support: the region is the support of the data, or its part within `bounds`.
        num_steps: None for rejection; otherwise the number of steps of each chain, a hundred or more.
        random_state: a seed or a generator of the random numbers.

    >>> import torch, pullback as pb
    >>> metric = pb.FisherRaoMetric(lambda z: torch.distributions.Normal(z, 1.0))
    >>> box = torch.tensor([[0.0, 0.0], [1.0, 1.0]])
    >>> pb.statistics.sample_uniform(metric, 3, bounds=box, random_state=0).shape
    torch.Size([3, 2])
    """
    box, paths = _box(metric, bounds, support), Paths(metric)
    generator = as_generator(random_state, box.device)

    def uniform(num: int) -> Tensor:
        return box[0] + (box[1] - box[0]) * _rand(box, generator, num, box.shape[1])

    def inside(z: Tensor) -> Tensor:
        within = ((z >= box[0]) & (z <= box[1])).all(-1)
        return within if support is None else within & support.contains(z)

    def log_density(z: Tensor) -> Tensor:
        return torch.where(inside(z), paths.log_volume(z), -torch.inf)

    def propose() -> tuple[Tensor, Tensor]:
        z = uniform(max(1024, n))
        return z, log_density(z)

    with torch.no_grad():
        if num_steps is None:
            advice = "the volume is concentrated on a small part of the box. Use num_steps=500 for Markov chains, or"
            return rejected(propose, n, generator, f"{advice} narrow the bounds.")
        if support is None:
            start = uniform(n)
        else:
            centers = support.centers[inside(support.centers)]
            if not len(centers):
                raise ValueError("No center of the support lies within the bounds; widen them.")
            start = centers[torch.randint(len(centers), (n,), device=centers.device, generator=generator)]
        return _chains(log_density, start, box, num_steps, generator)


@progress("diffusion")
def brownian_motion(
    metric: Metric,
    z: Codes,
    *,
    time: float,
    num_steps: int = 100,
    exponential: bool = False,
    random_state: RandomState = None,
) -> Float[Tensor, "*batch n d"]:
    r"""Brownian motion from ``z``, the diffusion with generator :math:`\tfrac12 \Delta_M`, at equal times,
    ``(*batch, num_steps + 1, d)``.

    On a flat space the mean squared displacement is :math:`d\,t`; on a compact one the law tends to that of
    `sample_uniform`. Each step is a Gaussian tangent :math:`\xi \sim N(0, M^{-1}\, dt)` followed along its geodesic,
    either to second order or, with ``exponential=True``, all the way: the geodesic random walk (Jørgensen 1975; for
    approximate steps Schwarz et al. 2023, *Efficient random walks on Riemannian manifolds*). Both converge with order
    one in dt in law. Exact steps cost some ten times as much, and stay on the manifold where the others, if too
    long, overshoot: at sharp walls around the data.

    Args:
        metric: the geometry; its tensor must be regular.
        z: where the paths start, ``(*batch, d)``.
        time: how long they run.
        num_steps: in how many steps.
        exponential: whether steps are exact geodesics.
        random_state: a seed or a generator of the random numbers.

    >>> import torch, pullback as pb
    >>> metric = pb.FisherRaoMetric(lambda z: torch.distributions.Normal(z, 1.0))
    >>> pb.statistics.brownian_motion(metric, torch.zeros(4, 2), time=1.0, num_steps=10, random_state=0).shape
    torch.Size([4, 11, 2])
    """
    if time < 0 or num_steps < 1:
        raise ValueError(
            f"time is {time} and num_steps {num_steps}; give a time of at least 0 and a step count of at least 1."
        )
    (z,) = codes_for(metric, z, finite=True)
    dt, path, generator = time / num_steps, [z.detach()], as_generator(random_state, z.device)
    with torch.no_grad(), unvalidated():
        for _ in range(num_steps):
            z = path[-1]
            xi = dt**0.5 * _white(metric, z, generator)
            if exponential:
                path.append(expmap(metric, z, xi, rtol=1e-8, atol=1e-8))
                continue
            flat = zip(*(x.reshape(-1, z.shape[-1]).split(_CHUNK) for x in (z, xi)), strict=True)
            path.append(torch.cat([a + v + 0.5 * acceleration(metric, a, v) for a, v in flat]).reshape(z.shape))
    return torch.stack(path, -2)


def _white(metric: Metric, z: Tensor, generator: torch.Generator) -> Tensor:
    """Tangents at z of covariance M⁻¹."""
    factor, info = torch.linalg.cholesky_ex(metric.tensor(z))
    bad = (info != 0) | ~factor.isfinite().all(-1).all(-1)
    if bad.any():
        raise RuntimeError(
            f"The metric is singular or not finite at {int(bad.sum())} of {bad.numel()} codes, so Brownian motion has "
            "infinite speed there. Start where the decoder is defined, take more steps or exponential=True, and drop "
            "latent dimensions the decoder ignores."
        )
    noise = torch.randn(z.shape, dtype=z.dtype, device=z.device, generator=generator)
    return torch.linalg.solve_triangular(factor.mT, noise[..., None], upper=True)[..., 0]


def _box(metric: Metric, bounds: Tensor | Array | None, support: Support | None) -> Tensor:
    """A box ``(2, d)``, lower and upper corner, that holds the region."""
    bounds = None if bounds is None else codes_for(metric, bounds)[0]
    if bounds is None and support is None:
        raise ValueError(
            "The volume of an unbounded region is infinite: give bounds=torch.stack([low, high]) or "
            "support=pullback.Support.fit(codes)."
        )
    if bounds is not None and (bounds.ndim != 2 or len(bounds) != 2 or not (bounds[0] < bounds[1]).all()):
        raise ValueError(f"bounds are two corners (2, d), the lower below the upper; got {bounds.tolist()}.")
    if support is None:
        return as_codes(bounds)
    # holds the whole support: the smooth minimum of k distances is at most h² log k below the least
    reach = (support.border + support.scale**2 * torch.tensor(len(support.offsets)).log()).clamp_min(0).sqrt()
    box = torch.stack([support.centers.amin(0) - reach, support.centers.amax(0) + reach])
    if bounds is None:
        return box
    return torch.stack([torch.maximum(box[0], bounds[0]), torch.minimum(box[1], bounds[1])])


def _rand(like: Tensor, generator: torch.Generator, *shape: int) -> Tensor:
    return torch.rand(shape, dtype=like.dtype, device=generator.device, generator=generator).to(like.device)


def rejected(draw: Callable[[], tuple[Tensor, Tensor]], n: int, generator: torch.Generator, advice: str) -> Tensor:
    """Of proposals ``(m, c)``, drawn with the logarithms of their density ratios, n that the ratios accept."""
    kept, num, peak, tried = list[tuple[Tensor, Tensor]](), 0, -torch.inf, 0
    while not kept or num < n:
        rows, ratio = draw()
        level = ratio - _rand(ratio, generator, len(ratio)).log()
        peak, tried = max(peak, float(ratio.max())), tried + len(rows)
        # a proposal stays if its ratio beats a uniform share of the peak; when the peak rises, fewer do
        kept = [(rows[level > peak], level[level > peak]) for rows, level in [*kept, (rows, level)]]
        num = sum(len(rows) for rows, _ in kept)
        if tried * _MIN_ACCEPTANCE > 10 + num:
            raise RuntimeError(f"Only {num} of {tried} proposals were accepted: {advice}")
    return torch.cat([rows for rows, _ in kept])[:n]


def _chains(
    log_density: Callable[[Tensor], Tensor], z: Tensor, box: Tensor, num_steps: int, generator: torch.Generator
) -> Tensor:
    """Random-walk Metropolis; scales of steps are drawn anew whatever the state, so proposals are symmetric."""
    low, high = (torch.tensor(s).log().item() for s in _SCALES)
    level = log_density(z)
    for _ in range(num_steps):
        scale = (low + (high - low) * _rand(z, generator, len(z), 1)).exp()
        noise = torch.randn(z.shape, dtype=z.dtype, device=z.device, generator=generator)
        proposal = z + scale * (box[1] - box[0]) / z.shape[1] ** 0.5 * noise
        proposed = log_density(proposal)
        accept = (_rand(z, generator, len(z)).log() < proposed - level) | (level == -torch.inf)
        z, level = torch.where(accept[:, None], proposal, z), torch.where(accept, proposed, level)
    return z
