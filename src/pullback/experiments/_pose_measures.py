r"""What is asked of a motion: is each pose one that people take, and do the limbs move evenly from one to the next?

Poses are compared on the product of spheres, :math:`d(x, y)^2 = \sum_b \theta_b^2` with :math:`\theta_b` the angle between the directions of bone b.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Distribution

import pullback as pb
from pullback.experiments._report import Table

_AT_ONCE = 64  # poses that are compared with all recorded ones, or sampled


def angles(x: Tensor, y: Tensor) -> Tensor:
    """Angles between unit vectors ``(*batch, 3)``, right also where they are small: 2 asin(|x - y| / 2)."""
    return 2 * torch.asin(((x - y).norm(dim=-1) / 2).clamp_max(1))


def distance_to_nearest(poses: Tensor, recorded: Tensor) -> Tensor:
    """The distance of each pose ``(*batch, bones, 3)`` to the nearest recorded one, in radians."""
    flat = poses.flatten(0, -3)
    nearest = []
    for chunk in flat.split(_AT_ONCE):
        cosines = torch.einsum("abi,cbi->acb", chunk, recorded).clamp(-1, 1)
        closest = cosines.acos_().square_().sum(-1).argmin(-1)
        nearest.append(angles(chunk, recorded[closest]).square().sum(-1).sqrt())
    return torch.cat(nearest).reshape(poses.shape[:-2])


def angular_steps(poses: Tensor) -> Tensor:
    """The mean over the bones of the angles between neighbouring frames ``(*batch, frames, bones, 3)``."""
    return angles(poses[..., 1:, :, :], poses[..., :-1, :, :]).mean(-1)


def unevenness(steps: Tensor) -> Tensor:
    """The standard deviation of the steps of each motion, relative to their mean: 0 for even motion."""
    return steps.std(-1) / steps.mean(-1)


@dataclass(frozen=True)
class SampledKL:
    r"""The plain Monte Carlo divergence that the paper resorts to, the mean of :math:`\log p(x) - \log q(x)` over samples of p.

    It may be negative. `pullback.divergences.monte_carlo_kl` cannot, and is far more accurate between neighbours.
    """

    num_samples: int = 1000
    scale = 2.0

    def __call__(self, p: Distribution, q: Distribution) -> Tensor:
        x = p.sample(torch.Size([self.num_samples]))
        return (p.log_prob(x) - q.log_prob(x)).mean(0)


def divergence_numbers(decoder: Callable[[Tensor], Distribution], codes: Tensor, num_samples: int) -> dict[str, float]:
    """How the sampled divergences of neighbouring codes along curves ``(n, frames, 2)`` compare with the closed form."""
    ends = (z.flatten(0, -2).split(_AT_ONCE) for z in (codes[:, :-1], codes[:, 1:]))
    neighbours = [(decoder(a), decoder(b)) for a, b in zip(*ends, strict=True)]
    estimates = pb.divergences.kl, SampledKL(num_samples), pb.divergences.monte_carlo_kl(num_samples)
    exact, plain, balanced = (torch.cat([kl(p, q).sum(-1) for p, q in neighbours]) for kl in estimates)
    return {
        "mean": float(exact.mean()),
        "num_samples": num_samples,
        "plain_relative_error": float(((plain - exact).abs() / exact).median()),
        "plain_negative": float((plain < 0).double().mean()),
        "balanced_relative_error": float(((balanced - exact).abs() / exact).median()),
        "balanced_negative": float((balanced < 0).double().mean()),
        "plain_energy_ratio": float(plain.sum() / exact.sum()),
        "balanced_energy_ratio": float(balanced.sum() / exact.sum()),
    }


def measures_table(title: str, numbers: dict[str, Any], names: dict[str, str]) -> Table:
    """The measures of every route, one a row."""
    columns = ["route", "distance (rad)", "of samples", "mean step (rad)", "unevenness", "off the data", "converged"]
    rows = [
        [
            names[route],
            *(f"{n[key]:.3f}" for key in ("distance", "sampled_distance")),
            f"{n['step']:.4f}",
            f"{n['unevenness']:.2f}",
            f"{n['outside']:.0%}",
            f"{n['converged']} of {n['pairs']}",
        ]
        for route, n in numbers["routes"].items()
    ]
    return Table(title, columns, rows)
