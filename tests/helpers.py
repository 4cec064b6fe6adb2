"""What several test files use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

import pullback as pb
from pullback._solvers.base import Solution, Solver, Status
from pullback.statistics._normalization import NUM_REPLICATES, Cloud, log_base, quadratic
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
    """The normalization constant of a LAND by Monte Carlo over the exponential map: C = ∫ exp(-½ vᵀΓv) √det M |det DExp| dv."""
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
    return LogNormalizer(
        *Cloud(v, weight).log_normalizer(precision), beyond=float((reached & ~shortest).double().mean())
    )


def _carried(metric: pb.Metric, base: str, mean: Tensor, v: Tensor, shifts: Tensor) -> tuple[Tensor, Tensor]:
    """End points of geodesics, and the logarithm of the base measure there; NaN where the geodesic equation was not solved."""
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
