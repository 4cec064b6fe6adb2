"""Real latent spaces: trained VAEs of four families with 8 to 32 dimensions, what paths and what is built on them cost.

    python benchmarks/latent.py --dims 8 16 32 --families bernoulli normal negative-binomial categorical
    python benchmarks/latent.py --dims 8 --tasks paths peers

Times are CPU seconds on one thread. Tasks:

- ``paths``: 64 pairs of codes in one batch, bare, with the prior, with a wall, and with both; the energy against the
  best of several starts
- ``peers``: stochman and GEORCE on the same pairs and metric
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

import models
import pullback as pb

NUM_RESTARTS = 8


def decoders(model: models.Model) -> dict[str, pb.FisherRaoMetric]:
    """The metrics that are compared."""
    wall = pb.Extrapolated(model.decoder, pb.Support.fit(model.codes))
    wrapped = {
        "bare": model.decoder,
        "prior": pb.WithPrior(model.decoder),
        "wall": wall,
        "prior, wall": pb.WithPrior(wall),
    }
    return {name: pb.FisherRaoMetric(decoder) for name, decoder in wrapped.items()}


def timed(task: Callable[[], object]) -> tuple[object, float]:
    start = time.process_time()
    return task(), time.process_time() - start


def paths(model: models.Model, names: list[str], num_pairs: int, restarts: int) -> None:
    """Time, convergence, support and energy of paths under each metric."""
    support = pb.Support.fit(model.codes)
    a, b = models.pairs(model.codes, num_pairs)
    for name, metric in decoders(model).items():
        if name not in names:
            continue
        pb.geodesic(metric, a[:2], b[:2])  # what is learned of the decoder once
        path, seconds = timed(lambda metric=metric: pb.geodesic(metric, a, b, support=support))
        best = torch.minimum(path.energy, searched(metric, a, b, restarts)) if restarts else path.energy
        excess = path.energy / best - 1
        print(
            f"  {name:12s} {1e3 * seconds / num_pairs:8.1f} ms  {path.num_decoded / num_pairs:8.0f} points  "
            f"{int(path.converged.sum()):3d} of {num_pairs} converged  {int(path.leaves_support.sum()):3d} leave the "
            f"data  length {path.length.mean():6.2f}  energy above the best: median {excess.median():.1e}, worst "
            f"{excess.max():.1e}",
            flush=True,
        )


def searched(metric: pb.Metric, a: Tensor, b: Tensor, restarts: int) -> Tensor:
    """The lowest energies found from bent starts."""
    generator = torch.Generator().manual_seed(1)
    t = torch.linspace(0, 1, 33, dtype=a.dtype)[:, None]
    best = torch.full_like(a[:, 0], torch.inf)
    for k in range(restarts):
        waves = torch.randn(len(a), 1 + k % 2, a.shape[-1], dtype=a.dtype, generator=generator)
        bump = sum(torch.sin((j + 1) * torch.pi * t) * waves[:, j, None] for j in range(waves.shape[1]))
        start = torch.lerp(a[:, None], b[:, None], t) + (b - a).norm(dim=-1)[:, None, None] / 4 * bump
        best = torch.fmin(best, pb.geodesic(metric, a, b, init=start).energy)
    return best


def peers_on(model: models.Model, names: list[str], num_pairs: int) -> None:
    """stochman and GEORCE on the same metric, against ours."""
    import peers

    a, b = models.pairs(model.codes, num_pairs)
    for name, metric in decoders(model).items():
        if name not in names:
            continue
        problem = peers.Problem(name, metric, a, b, None)
        ours, seconds = timed(lambda metric=metric: pb.geodesic(metric, a, b))
        for peer in (peers.stochman, peers.georce):
            other, slow = timed(lambda peer=peer, problem=problem: peer(problem))
            energy = pb.energy(metric, pb.CubicSpline(other.points), num_segments=1000)
            print(
                f"  {name:12s} {peer.__name__:9s} {slow / seconds:6.1f} times our time, energy "
                f"{(energy / ours.energy).median():.3f} of ours in the median",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dims", type=int, nargs="+", default=[8])
    parser.add_argument("--families", nargs="+", default=["bernoulli"], choices=models.FAMILIES)
    parser.add_argument("--metrics", nargs="+", default=["prior", "prior, wall"])
    parser.add_argument("--tasks", nargs="+", default=["paths"], choices=["paths", "peers"])
    parser.add_argument("--pairs", type=int, default=64)
    parser.add_argument("--restarts", type=int, default=0)
    parser.add_argument("--float32", action="store_true")
    parser.add_argument("--cache", type=Path, default=Path("out/models"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    for family in options.families:
        for d in options.dims:
            dtype = torch.float32 if options.float32 else torch.float64
            model = models.trained(d, options.cache, dtype, family)
            print(f"{family}, d = {d}", flush=True)
            if "paths" in options.tasks:
                paths(model, options.metrics, options.pairs, options.restarts)
            if "peers" in options.tasks:
                peers_on(model, options.metrics, min(4, options.pairs))


if __name__ == "__main__":
    main()
