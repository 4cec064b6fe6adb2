r"""Normalisation constants by Monte Carlo over the exponential map: the second, independent way (see `normalisation.py`).

.. math:: C(\mu, \Gamma) = \int_{D_\mu} e^{-\frac12 v^\top \Gamma v}\, \sqrt{\det M(\mathrm{Exp}_\mu v)}\; |\det D\mathrm{Exp}_\mu(v)|\; dv ,

without :math:`\sqrt{\det M}` for densities with respect to dz, and with :math:`D_\mu` the tangents whose geodesics are shortest paths. Needs 2 d + 1 solutions of the geodesic equation for every tangent, and a
shortest path to know whether it counts.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pullback._geometry.exponential import exponential
from pullback._metrics.base import Metric
from pullback._solvers.base import Solver
from pullback._starts.graph import Graph
from pullback._typing import Float
from pullback.statistics._charts import Atlas
from pullback.statistics._normalization import NUM_REPLICATES, BaseMeasure, Cloud, log_base, quadratic

_WIDTH = 1.2  # standard deviations of the tangents drawn over those of the density: heavier tails than the integrand
_DIFFERENCE = 1e-3  # of the central differences, in standard deviations
_TOLERANCE = 1e-9
_SHORTEST = 0.02  # a geodesic that is longer than the shortest path by more lies beyond the cut locus


class LogNormalizer(NamedTuple):
    """``log C``, its standard error, and the share of the tangents drawn that lie beyond the cut locus."""

    value: Tensor
    standard_error: Tensor
    beyond: float


def log_normalizer(
    metric: Metric,
    mean: Float[Tensor, " d"],
    precision: Float[Tensor, "d d"],
    *,
    base_measure: BaseMeasure = "volume",
    num_samples: int = 512,
    graph: Graph | None = None,
    solver: Solver | None = None,
    generator: torch.Generator | None = None,
) -> LogNormalizer:
    r"""The normalisation constant of a LAND by Monte Carlo over the exponential map, with its standard error.

    :math:`C = \int \exp(-\tfrac12 \mathrm{Log}_\mu(z)^\top \Gamma\, \mathrm{Log}_\mu(z)) \sqrt{\det M(z)}\, dz`, from tangents drawn from a somewhat wider
    normal distribution in pairs of opposite sign (antithetic), weighted by the volume element of the exponential map. `pullback.statistics.LAND`
    itself uses points around the codes instead, which is many times faster; this is the check.

    Args:
        metric: the geometry.
        mean: :math:`\mu`, of shape ``(d,)``.
        precision: :math:`\Gamma`, of shape ``(d, d)``.
        base_measure: as in `pullback.statistics.LAND`; with ``"lebesgue"`` the integral is over dz.
        num_samples: how many tangents.
        graph: where the search for shortest paths starts; None for straight lines.
        solver: of the shortest paths.
        generator: source of the random numbers.
    """
    pairs = -(-num_samples // (2 * NUM_REPLICATES))
    noise = torch.randn(NUM_REPLICATES, pairs, len(mean), dtype=mean.dtype, device=mean.device, generator=generator)
    noise = torch.cat([noise, -noise], 1).flatten(0, 1)
    spread = _WIDTH * torch.linalg.inv(torch.linalg.cholesky(precision)).mT  # spread spreadᵀ = width² Γ⁻¹
    v = noise @ spread.mT
    z, measure = _carried(metric, base_measure, mean, v, _DIFFERENCE * spread)
    reached = torch.isfinite(measure)
    shortest = torch.zeros_like(reached)
    shortest[reached] = _is_shortest(Atlas(metric, graph, solver), mean, v[reached], z[reached])
    log_density = -0.5 * noise.square().sum(-1) - 0.5 * v.shape[1] * np.log(2 * np.pi) - torch.linalg.slogdet(spread)[1]
    weight = torch.where(shortest, measure, -torch.inf) - log_density - np.log(len(v))
    return LogNormalizer(
        *Cloud(v, weight).log_normalizer(precision), beyond=float((reached & ~shortest).double().mean())
    )


def _carried(metric: Metric, base: BaseMeasure, mean: Tensor, v: Tensor, shifts: Tensor) -> tuple[Tensor, Tensor]:
    """End points of geodesics, and the logarithm of the base measure there; NaN where the geodesic equation was not solved."""
    moves = torch.cat([torch.zeros_like(shifts[:1]), shifts.mT, -shifts.mT])
    flow = exponential(metric, mean, v[:, None] + moves, rtol=_TOLERANCE, atol=_TOLERANCE)
    d, ends = len(mean), flow.end.detach()
    columns = 0.5 * (ends[:, 1 : d + 1] - ends[:, d + 1 :])
    stretch = torch.linalg.slogdet(columns)[1] - torch.linalg.slogdet(shifts)[1]
    arrived = flow.converged.all(-1)
    measure = torch.full_like(stretch, torch.nan)
    measure[arrived] = stretch[arrived] + log_base(metric, base, ends[arrived, 0])
    return ends[:, 0], measure


def _is_shortest(atlas: Atlas, mean: Tensor, v: Tensor, z: Tensor) -> Tensor:
    if not len(v):
        return torch.zeros_like(v[:, 0], dtype=torch.bool)
    tensor = atlas.metric.tensor(mean)
    found, _ = atlas.log(mean, z)
    return quadratic(v, tensor).sqrt() <= (1 + _SHORTEST) * quadratic(found, tensor).sqrt()
