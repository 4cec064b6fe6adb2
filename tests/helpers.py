"""What several test files use."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributions import Bernoulli, Beta, Dirichlet, Distribution, Exponential, Normal
from torch.nn.functional import softplus

import pullback as pb
from pullback._autodiff.derivatives import pushforward
from pullback._solvers.base import Solution, Solver, Status
from pullback.statistics._normalization import NUM_REPLICATES, log_base, quadratic
from pullback.statistics._paths import Paths


@dataclass(frozen=True)
class Given(Solver):
    """Returns prepared paths with a prepared status."""

    nodes: Tensor
    status: int = Status.CONVERGED

    def solve(self, metric: pb.Metric, nodes: Tensor) -> Solution:
        energy, length = pb.energy(metric, self.nodes), pb.length(metric, self.nodes)
        count = torch.ones_like(energy, dtype=torch.long)
        return Solution(
            nodes=self.nodes,
            energy=energy,
            length=length,
            error=0 * energy,
            status=self.status * count,
            strict=count > 0,
            num_steps=count,
            num_segments=(self.nodes.shape[1] - 1) * count,
            num_calls=1,
            num_decoded=1,
        )


@dataclass(frozen=True)
class Embedded(pb.Metric):
    """The metric sym(Dφᵀ Dψ) of a pair of maps; it may hide the pair, so that both forms of the acceleration are
    seen."""

    phi: Callable[[Tensor], Tensor]
    psi: Callable[[Tensor], Tensor] | None = None
    shown: bool = True

    def _pair(self, z: Tensor) -> tuple[Tensor, Tensor]:
        phi = self.phi(z)
        return phi, phi if self.psi is None else self.psi(z)

    def tensor(self, z: Tensor) -> Tensor:
        _, (first, second) = pushforward(self._pair, z)
        gram = first.movedim(0, -2) @ second.movedim(0, -2).mT
        return 0.5 * (gram + gram.mT)

    def ds2(self, a: Tensor, b: Tensor) -> Tensor:
        (p, q), (r, s) = self._pair(a), self._pair(b)
        return ((r - p) * (s - q)).sum(-1)

    def embed(self, z: Tensor, origin: Tensor | None = None) -> tuple[Tensor, Tensor] | None:
        return self._pair(z) if self.shown else None


@dataclass(frozen=True)
class Hidden(pb.Metric):
    """Another metric without its embedding."""

    metric: pb.Metric

    def tensor(self, z: Tensor) -> Tensor:
        return self.metric.tensor(z)

    def ds2(self, a: Tensor, b: Tensor) -> Tensor:
        return self.metric.ds2(a, b)


def christoffel_acceleration(metric: pb.Metric, z: Tensor, v: Tensor) -> Tensor:
    """-Γ[v, v] at one point, from the textbook formula and all derivatives of M."""
    slope = torch.autograd.functional.jacobian(metric.tensor, z)  # ∂M_ij / ∂z_k
    bend = torch.einsum("ijk,j,k->i", slope, v, v) - 0.5 * torch.einsum("jki,j,k->i", slope, v, v)
    return -torch.linalg.solve(metric.tensor(z), bend)


def wiggle(a: Tensor, b: Tensor) -> pb.CubicSpline:
    """A curve from a to b that is no geodesic."""
    t = torch.linspace(0, 1, 5, dtype=torch.float64)[:, None]
    bump = 0.1 * torch.sin(2 * torch.pi * t) * torch.linspace(-1, 1, a.shape[-1], dtype=torch.float64)
    return pb.CubicSpline(torch.lerp(a[:, None], b[:, None], t) + bump)


def ring(n: int = 500, seed: int = 0) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    angle = 2 * math.pi * torch.rand(n, generator=g, dtype=torch.float64)
    return 3 * torch.stack([angle.cos(), angle.sin()], -1) + 0.1 * torch.randn(n, 2, generator=g, dtype=torch.float64)


def support_at(centers: Tensor, scale: float = 0.7) -> pb.Support:
    number = centers.new_tensor
    return pb.Support(centers, scale=number(scale), edge=number(0.1), spread=number(3.0))


class Linear(nn.Module):
    """A random linear decoder of one of five families, as in the paper's toy experiment."""

    def __init__(self, family: str):
        super().__init__()
        torch.manual_seed(1)
        self.family = family
        self.net = nn.Linear(2, 15 if family == "bernoulli" else 6, dtype=torch.float64)

    def forward(self, z: Tensor) -> Distribution:
        f = self.net(z)
        first, second = f[..., :3], f[..., 3:6]
        return {
            "normal": lambda: Normal(10 * first, 10 * softplus(second)),
            "bernoulli": lambda: Bernoulli(logits=f),
            "beta": lambda: Beta(10 * softplus(first), 10 * softplus(second)),
            "dirichlet": lambda: Dirichlet(softplus(first)),
            "exponential": lambda: Exponential(softplus(first)),
        }[self.family]()


def network(*widths: int, seed: int = 0) -> nn.Module:
    """A smooth map with random weights: linear layers of the given widths with tanh between them, in float64."""
    torch.manual_seed(seed)
    layers = [layer for m, n in itertools.pairwise(widths) for layer in (nn.Linear(m, n), nn.Tanh())]
    return nn.Sequential(*layers[:-1]).double().requires_grad_(False)


class LogNormalizer(NamedTuple):
    """``log C``, its standard error, and the share of the tangents drawn that lie beyond the cut locus."""

    value: Tensor
    standard_error: Tensor
    beyond: float


def log_normalizer(
    metric: pb.Metric,
    mean: Tensor,
    precision: Tensor,
    *,
    base_measure: str = "volume",
    num_samples: int = 512,
    generator: torch.Generator | None = None,
) -> LogNormalizer:
    """The normalization constant of a LAND by Monte Carlo over the exponential map: C = ∫ exp(-½ vᵀΓv) √det M |det
    DExp| dv."""
    pairs = -(-num_samples // (2 * NUM_REPLICATES))
    noise = torch.randn(NUM_REPLICATES, pairs, len(mean), dtype=mean.dtype, device=mean.device, generator=generator)
    noise = torch.cat([noise, -noise], 1).flatten(0, 1)
    spread = 1.2 * torch.linalg.inv(torch.linalg.cholesky(precision)).mT  # spread spreadᵀ = width² Γ⁻¹
    v = noise @ spread.mT
    z, measure = _carried(metric, base_measure, mean, v, 1e-3 * spread)
    reached = torch.isfinite(measure)
    shortest = torch.zeros_like(reached)
    shortest[reached] = _is_shortest(Paths(metric), mean, v[reached], z[reached])
    log_density = -0.5 * noise.square().sum(-1) - 0.5 * v.shape[1] * np.log(2 * np.pi) - torch.linalg.slogdet(spread)[1]
    weight = torch.where(shortest, measure, -torch.inf) - log_density - np.log(len(v))
    total = log_sum(weight - 0.5 * quadratic(v, precision))
    return LogNormalizer(*total, beyond=float((reached & ~shortest).double().mean()))


def log_sum(terms: Tensor) -> tuple[Tensor, Tensor]:
    """The logarithm of the sum of exponentials, and its standard error from the scatter of the replicates."""
    total = terms.logsumexp(0)
    parts = (terms.unflatten(0, (NUM_REPLICATES, -1)) - total).logsumexp(1).exp() * NUM_REPLICATES
    return total, parts.std() / NUM_REPLICATES**0.5


def _carried(metric: pb.Metric, base: str, mean: Tensor, v: Tensor, shifts: Tensor) -> tuple[Tensor, Tensor]:
    """End points of geodesics, and the logarithm of the base measure there; NaN where the geodesic equation was not
    solved."""
    moves = torch.cat([torch.zeros_like(shifts[:1]), shifts.mT, -shifts.mT])
    flow = pb.exponential(metric, mean, v[:, None] + moves, rtol=1e-8, atol=1e-8)
    d, ends = len(mean), flow.end.detach()
    columns = 0.5 * (ends[:, 1 : d + 1] - ends[:, d + 1 :])
    stretch = torch.linalg.slogdet(columns)[1] - torch.linalg.slogdet(shifts)[1]
    arrived = flow.converged.all(-1)
    measure = torch.full_like(stretch, torch.nan)
    measure[arrived] = stretch[arrived] + log_base(Paths(metric), base, ends[arrived, 0])
    return ends[:, 0], measure


def _is_shortest(paths: Paths, mean: Tensor, v: Tensor, z: Tensor) -> Tensor:
    if not len(v):
        return torch.zeros_like(v[:, 0], dtype=torch.bool)
    return quadratic(v, paths.metric.tensor(mean)).sqrt() <= (1 + 0.02) * paths.distances(mean.expand_as(z), z)
