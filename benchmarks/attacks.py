"""Attacks on the claims of `pullback.geodesic`: lengths that are called converged against closed forms, over a thousand
pairs.

    python benchmarks/attacks.py --cases 1000

Each chart is the latent space of a family itself, whose distance is known: normal and log-normal distributions in (μ,
σ) and (μ, log σ), from near to very far; categorical distributions; spheres; and full families in which both ends share
a parameter, where the path within the subfamily is only a saddle. For each it prints how many paths converged, how many
of those are further from the truth than three times their claimed error, and the worst.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributions import Categorical, LogNormal, NegativeBinomial, Normal, VonMises

import pullback as pb

DOUBLE = torch.float64


@dataclass(frozen=True)
class Attack:
    """Pairs of codes of a metric, and their distances; upper bounds of them if `bound` is true."""

    name: str
    metric: pb.Metric
    pairs: Callable[[int, torch.Generator], tuple[Tensor, Tensor]]
    distance: Callable[[Tensor, Tensor], Tensor]
    bound: bool = False


def half_plane(mu: Tensor, log_sigma: Tensor) -> Tensor:
    """The Fisher-Rao distance of normal distributions; both arguments ``(2, n)``."""
    # cosh(d / √2) - 1 = (Δμ² / 2 + Δσ²) / (2 σ σ'), and cosh x - 1 = 2 sinh²(x / 2)
    gap = 0.5 * (mu[1] - mu[0]) ** 2 * (-log_sigma.sum(0)).exp()
    square = 0.25 * gap + torch.sinh(0.5 * (log_sigma[1] - log_sigma[0])) ** 2
    return 2**1.5 * torch.asinh(square.sqrt())


def _log_chart(family: Callable, spread: float, name: str) -> Attack:
    def pairs(n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        mu = spread * (2 * torch.rand(2, n, dtype=DOUBLE, generator=generator) - 1)
        return tuple(torch.stack([mu, 2 * torch.randn(2, n, dtype=DOUBLE, generator=generator)], -1))  # pyright: ignore

    def distance(a: Tensor, b: Tensor) -> Tensor:
        return half_plane(torch.stack([a[:, 0], b[:, 0]]), torch.stack([a[:, 1], b[:, 1]]))

    metric = pb.FisherRaoMetric(lambda z: family(z[..., 0], z[..., 1].exp()))
    return Attack(f"{name} (μ, log σ), |μ| < {spread:g}", metric, pairs, distance)


def _plain_chart(family: Callable, size: float, name: str) -> Attack:
    def pairs(n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        mu = size * torch.randn(2, n, dtype=DOUBLE, generator=generator)
        return tuple(torch.stack([mu, 0.5 + 1.5 * torch.rand(2, n, dtype=DOUBLE, generator=generator)], -1))  # pyright: ignore

    def distance(a: Tensor, b: Tensor) -> Tensor:
        return half_plane(torch.stack([a[:, 0], b[:, 0]]), torch.stack([a[:, 1], b[:, 1]]).log())

    metric = pb.FisherRaoMetric(lambda z: family(z[..., 0], z[..., 1]))
    return Attack(f"{name} (μ, σ), μ ~ {size:g}", metric, pairs, distance)


def _simplex(k: int, size: float) -> Attack:
    def logits(z: Tensor) -> Tensor:
        return torch.cat([z, torch.zeros_like(z[..., :1])], -1)

    def distance(a: Tensor, b: Tensor) -> Tensor:
        x, y = (0.5 * logits(a).log_softmax(-1)).exp(), (0.5 * logits(b).log_softmax(-1)).exp()
        return 4 * torch.asin(0.5 * (x - y).norm(dim=-1))

    def pairs(n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        return tuple(size * torch.randn(2, n, k - 1, dtype=DOUBLE, generator=generator))  # pyright: ignore

    return Attack(f"simplex of {k}", pb.FisherRaoMetric(lambda z: Categorical(logits=logits(z))), pairs, distance)


def _sphere(n_dim: int, size: float) -> Attack:
    def embed(z: Tensor) -> Tensor:
        square = (z**2).sum(-1, keepdim=True)
        return torch.cat([2 * z, square - 1], -1) / (1 + square)

    def pairs(n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        return tuple(size * torch.randn(2, n, n_dim, dtype=DOUBLE, generator=generator))  # pyright: ignore

    metric = pb.FisherRaoMetric(lambda z: Normal(embed(z), 1.0))
    return Attack(
        f"sphere S^{n_dim}", metric, pairs, lambda a, b: 2 * torch.asin(0.5 * (embed(a) - embed(b)).norm(dim=-1))
    )


def _same(name: str, family: Callable, low: list[float], high: list[float], detour: float) -> Attack:
    """Ends that share the second parameter; the bound is the best of paths that change it on the way."""
    metric = pb.FisherRaoMetric(family)

    def pairs(n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        a, b = torch.tensor(low, dtype=DOUBLE), torch.tensor(high, dtype=DOUBLE)
        ends = a + (b - a) * torch.rand(2, n, 2, dtype=DOUBLE, generator=generator)
        ends[1, :, 1] = ends[0, :, 1]
        return ends[0], ends[1]

    def distance(a: Tensor, b: Tensor) -> Tensor:
        t = torch.linspace(0, 1, 17, dtype=DOUBLE)[:, None]
        best = torch.full_like(a[:, 0], torch.inf)
        for size in (-detour, 0.5 * -detour, 0.5 * detour, detour):
            bump = torch.cat([torch.zeros_like(t), size * torch.sin(torch.pi * t)], -1)
            found = pb.geodesic(metric, a, b, init=torch.lerp(a[:, None], b[:, None], t) + bump)
            best = torch.minimum(best, found.length.nan_to_num(torch.inf))
        return best

    return Attack(f"{name}, ends that share a parameter", metric, pairs, distance, bound=True)


ATTACKS = [
    _log_chart(Normal, 1, "normal"),
    _log_chart(Normal, 30, "normal"),
    _log_chart(Normal, 1000, "normal"),
    _log_chart(LogNormal, 30, "log-normal"),
    _plain_chart(Normal, 1, "normal"),
    _plain_chart(Normal, 1e3, "normal"),
    _plain_chart(Normal, 1e6, "normal"),
    _simplex(3, 2.0),
    _simplex(8, 3.0),
    _sphere(2, 1.0),
    _sphere(5, 0.5),
    _same("von Mises", lambda z: VonMises(z[..., 0], z[..., 1].exp()), [-1.5, 0.0], [1.5, 2.5], 2.0),
    _same(
        "negative binomial",
        lambda z: NegativeBinomial(z[..., 1].exp(), logits=z[..., 0]),
        [-3.0, 0.0],
        [3.0, 3.0],
        1.0,
    ),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=1000, help="pairs in all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="part of the name of the attacks to run")
    options = parser.parse_args()
    torch.set_num_threads(1)
    chosen = [attack for attack in ATTACKS if options.only in attack.name]
    print(f"{'':44s} pairs converged  wrong  worst: off     claimed   CPU ms")
    for attack in chosen:
        n = -(-options.cases // len(chosen))
        a, b = attack.pairs(n, torch.Generator().manual_seed(options.seed))
        exact = attack.distance(a, b)
        began = time.process_time()
        path = pb.geodesic(attack.metric, a, b)
        spent = time.process_time() - began
        off = (path.length / exact - 1) if attack.bound else (path.length / exact - 1).abs()
        claim = 3 * path.error + 1e-9 + (1e-4 if attack.bound else 0)
        excess = torch.where(path.converged, off / claim, 0.0).nan_to_num(torch.inf)
        worst = int(excess.argmax())
        print(
            f"{attack.name:44s} {n:5d} {int(path.converged.sum()):9d}  {int((excess > 1).sum()):5d}  {off[worst]:10.1e}"
            f"  {path.error[worst]:10.1e}  {1e3 * spent / n:7.1f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
