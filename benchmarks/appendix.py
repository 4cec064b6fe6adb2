"""The paper's appendix check: routes to the metric against theory, on the parameter spaces of Normal and Beta.

The decoder is the identity, so the latent space is the family itself and the theory is its Fisher matrix, written out
here with scipy, independent of the library. The error is the relative one in the Frobenius norm, over parameters drawn
at random. The paper prints 5.32e-4 ± 9.63e-4 for Normal and 1.73e-5 ± 1.17e-5 for Beta, with a step and parameters it
does not name.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from scipy.special import polygamma
from torch import Tensor
from torch.distributions import Beta, Distribution, Normal

import pullback as pb

NUM_POINTS = 2000


def normal_theory(z: np.ndarray) -> np.ndarray:
    """diag(1, 2) / σ² in the coordinates (μ, σ)."""
    return np.diag([1.0, 2.0]) / z[:, 1, None, None] ** 2


def beta_theory(z: np.ndarray) -> np.ndarray:
    """diag(ψ₁(α), ψ₁(β)) - ψ₁(α + β)."""
    return polygamma(1, z)[:, :, None] * np.eye(2) - polygamma(1, z.sum(1))[:, None, None]


def normal(z: Tensor) -> Distribution:
    return Normal(z[..., 0], z[..., 1])


def beta(z: Tensor) -> Distribution:
    return Beta(z[..., 0], z[..., 1])


SPACES = {
    "Normal, μ in [-2, 2], σ in [0.5, 2]": (normal, normal_theory, (-2.0, 0.5), (2.0, 2.0)),
    "Beta, α and β in [0.5, 10]": (beta, beta_theory, (0.5, 0.5), (10.0, 10.0)),
}


def routes(decoder: Callable[[Tensor], Distribution]) -> dict[str, pb.Metric]:
    """The exact routes, and finite differences of the KL with steps from coarse to fine."""
    exact: dict[str, pb.Metric] = {
        "exact, closed form": pb.FisherRaoMetric(decoder),
        "exact, Hessian of the KL": pb.DivergenceMetric(decoder),
    }
    differences = {
        f"{name}, step {eps:g}": pb.DivergenceMetric(decoder, divergence=divergence, method=method(eps))
        for name, divergence, method in (
            ("one-sided (the paper's)", pb.divergences.kl, pb.divergences.OneSidedDifference),
            ("central", pb.divergences.kl, pb.divergences.CentralDifference),
        )
        for eps in (1e-2, 1e-3, 1e-4)
    }
    return exact | differences


def report(metric: pb.Metric, z: Tensor, theory: np.ndarray) -> str:
    M = metric.tensor(z).double().numpy()
    error = np.linalg.norm(M - theory, axis=(1, 2)) / np.linalg.norm(theory, axis=(1, 2))
    negative = (np.linalg.det(M) < 0).mean()
    return f"{error.mean():.2e} ± {error.std():.2e}   negative determinants {negative:6.1%}"


def main() -> None:
    generator = torch.Generator().manual_seed(0)
    for name, (decoder, theory, low, high) in SPACES.items():
        u = torch.rand(NUM_POINTS, 2, generator=generator, dtype=torch.float64)
        z = torch.tensor(low) + u * (torch.tensor(high) - torch.tensor(low))
        print(f"\n{name}")
        for route, metric in routes(decoder).items():
            for codes in (z.double(), z.float()):
                figures = report(metric, codes, theory(codes.double().numpy()))
                print(f"  {route:36s} {str(codes.dtype)[6:]}   {figures}", flush=True)


if __name__ == "__main__":
    main()
