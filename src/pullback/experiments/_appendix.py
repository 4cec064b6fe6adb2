"""The appendix's check of approximated metrics: the latent space is the family itself, so the answer is its Fisher matrix.

The matrices are written out here with scipy, independent of the library. Errors are relative, in the Frobenius norm, over parameters drawn at
random. The paper names neither its step nor its parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from scipy.special import polygamma
from torch import Tensor
from torch.distributions import Beta, Distribution, Normal

import pullback as pb

STEPS = (1e-2, 1e-3, 1e-4)


@dataclass(frozen=True)
class Space:
    """The parameters of a family: its decoder, its Fisher matrix, the box that parameters are drawn from, and the paper's error."""

    name: str
    decoder: Callable[[Tensor], Distribution]
    theory: Callable[[np.ndarray], np.ndarray]
    low: tuple[float, float]
    high: tuple[float, float]
    paper: str


def normal_theory(z: np.ndarray) -> np.ndarray:
    """diag(1, 2) / σ² in the coordinates (μ, σ)."""
    return np.diag([1.0, 2.0]) / z[:, 1, None, None] ** 2


def beta_theory(z: np.ndarray) -> np.ndarray:
    """diag(ψ₁(α), ψ₁(β)) - ψ₁(α + β)."""
    return polygamma(1, z)[:, :, None] * np.eye(2) - polygamma(1, z.sum(1))[:, None, None]


SPACES = (
    Space("Normal", lambda z: Normal(z[..., 0], z[..., 1]), normal_theory, (-2, 0.5), (2, 2), "5.32e-04 ± 9.63e-04"),
    Space("Beta", lambda z: Beta(z[..., 0], z[..., 1]), beta_theory, (0.5, 0.5), (10, 10), "1.73e-05 ± 1.17e-05"),
)


def routes(decoder: Callable[[Tensor], Distribution]) -> dict[str, pb.Metric]:
    """The exact routes, and the differences of the paper and of second order with steps from coarse to fine."""
    differences: dict[str, pb.Metric] = {
        f"{name}, step {eps:g}": pb.DivergenceMetric(decoder, divergence=pb.divergences.kl, method=method(eps))
        for name, method in (
            ("one-sided (the paper's)", pb.divergences.OneSidedDifference),
            ("central", pb.divergences.CentralDifference),
        )
        for eps in STEPS
    }
    exact: dict[str, pb.Metric] = {
        "closed form": pb.FisherRaoMetric(decoder),
        "Hessian of the KL": pb.DivergenceMetric(decoder),
    }
    return exact | differences


def errors(space: Space, num_points: int, seed: int) -> dict[str, dict[str, float]]:
    """For each route the mean and the standard deviation of the relative error, and the share of negative determinants."""
    u = torch.rand(num_points, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    low, high = (torch.tensor(corner, dtype=torch.float64) for corner in (space.low, space.high))
    z = low + u * (high - low)
    theory = space.theory(z.numpy())
    result = {}
    for name, metric in routes(space.decoder).items():
        M = metric.tensor(z).numpy()
        error = np.linalg.norm(M - theory, axis=(1, 2)) / np.linalg.norm(theory, axis=(1, 2))
        negative = float((np.linalg.det(M) < 0).mean())
        result[name] = {"mean": float(error.mean()), "stddev": float(error.std()), "negative": negative}
    return result
