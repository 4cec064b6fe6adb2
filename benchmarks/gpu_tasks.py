"""What is built on paths, on a GPU in single precision: exponentials, logarithms, transport, means, distance matrices,
convolutions.

    PYTHONPATH=src python benchmarks/gpu_tasks.py
    PYTHONPATH=src python benchmarks/gpu_tasks.py --device cpu --size 16 --tasks exp log

Every task runs once to warm up, then is timed. Results are compared with double precision on the same device. Needs
torch, numpy and scipy; the matrix and the means need scikit-learn too.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributions import Bernoulli, Distribution, Normal

import models
import pullback as pb

HIDDEN = (256, 256)


class Images(nn.Module):
    """A convolutional decoder from 32 dimensions to 3 × 64 × 64, with batch normalization, a residual block and group
    normalization."""

    def __init__(self, d: int = 32, width: int = 64) -> None:
        super().__init__()
        self.project = nn.Sequential(nn.Linear(d, 4 * width * 16), nn.Unflatten(1, (4 * width, 4, 4)))
        self.block = nn.Sequential(nn.GroupNorm(8, 4 * width), nn.SiLU(), nn.Conv2d(4 * width, 4 * width, 3, 1, 1))
        sizes = (4 * width, 2 * width, width, width)
        layers = [
            layer
            for i, o in itertools.pairwise(sizes)
            for layer in (nn.ConvTranspose2d(i, o, 4, 2, 1), nn.BatchNorm2d(o), nn.SiLU())
        ]
        self.grow = nn.Sequential(*layers, nn.ConvTranspose2d(width, 3, 4, 2, 1))

    def forward(self, z: Tensor) -> Tensor:
        h = self.project(z)
        return self.grow(h + self.block(h))


def wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def timed(task: Callable[[], object], device: str) -> tuple[object, float]:
    wait(device)
    start = time.perf_counter()
    result = task()
    wait(device)
    return result, time.perf_counter() - start


def twice(task: Callable[[], object], device: str) -> tuple[object, float]:
    """The result and the time of the second run."""
    timed(task, device)
    return timed(task, device)


def metrics(d: int, device: str) -> tuple[pb.Metric, pb.Metric, models.Model]:
    single = models.untrained(d, HIDDEN, dtype=torch.float32, device=device)
    double = models.untrained(d, HIDDEN, dtype=torch.float64, device=device)
    return *(pb.FisherRaoMetric(pb.WithPrior(m.decoder)) for m in (single, double)), single


def exponentials(d: int, size: int, device: str) -> None:
    metric, exact, model = metrics(d, device)
    a, b = models.pairs(model.codes, size)
    found, seconds = twice(lambda: pb.exponential(metric, a, 0.5 * (b - a)), device)
    reference = pb.exponential(exact, a.double(), 0.5 * (b - a).double())
    gap = (found.end.double() - reference.end).norm(dim=-1) / (b - a).norm(dim=-1)
    print(
        f"exp, d = {d}: {size} in {seconds:.2f} s, {int(found.converged.sum())} converged, off by {gap.max():.1e}",
        flush=True,
    )


def logarithms(d: int, size: int, device: str) -> None:
    metric, exact, model = metrics(d, device)
    a, b = models.pairs(model.codes, size)
    path, alone = twice(lambda: pb.geodesic(metric, a, b), device)
    found, seconds = twice(lambda: pb.logarithm(metric, a, b), device)
    reference = pb.logarithm(exact, a.double(), b.double())
    both = found.converged & reference.converged
    gap = (found.velocity.double() - reference.velocity).norm(dim=-1) / reference.velocity.norm(dim=-1)
    print(
        f"log, d = {d}: {size} in {seconds:.2f} s (geodesics {alone:.2f} s), {int(found.converged.sum())} converged, "
        f"off by {gap[both].quantile(0.95):.1e} (95 %), {gap[both].max():.1e} (worst)",
        flush=True,
    )
    v = torch.randn_like(a)
    moved, seconds = twice(lambda: pb.parallel_transport(metric, path.curve, v), device)
    norms = metric.norm(b, moved) / metric.norm(a, v) - 1
    print(f"transport, d = {d}: {size} in {seconds:.2f} s, norms kept to {norms.abs().max():.1e}", flush=True)


def means(d: int, size: int, device: str) -> None:
    metric, _, model = metrics(d, device)
    found, seconds = twice(lambda: pb.statistics.frechet_mean(metric, model.codes[:size]), device)
    print(f"Fréchet mean of {size} codes, d = {d}: {seconds:.2f} s, {found}", flush=True)


def matrix(d: int, size: int, device: str) -> None:
    metric, _, model = metrics(d, device)
    pb.pairwise_distances(metric, model.codes[:50])
    D, seconds = timed(lambda: pb.pairwise_distances(metric, model.codes[:size]), device)
    pairs = size * (size - 1) // 2
    print(
        f"matrix of {size} codes, d = {d}: {seconds:.1f} s, {pairs / seconds:.0f} geodesics a second, "
        f"{int(torch.isnan(torch.as_tensor(D)).sum())} NaN",
        flush=True,
    )


def convolutions(_d: int, size: int, device: str) -> None:
    torch.manual_seed(0)
    network = Images().to(device).eval().requires_grad_(False)
    a, b = torch.randn(2, min(64, size), 32, device=device)
    for name, decoder in (
        ("Bernoulli", lambda z: Bernoulli(logits=3 * network(z))),
        ("Normal", lambda z: Normal(network(z), 0.1)),
    ):
        metric = pb.FisherRaoMetric(pb.WithPrior(decoder))
        if device.startswith("cuda"):
            torch.cuda.reset_peak_memory_stats()
        path, seconds = twice(lambda metric=metric, a=a, b=b: pb.geodesic(metric, a, b), device)
        memory = torch.cuda.max_memory_allocated() / 2**30 if device.startswith("cuda") else float("nan")
        print(
            f"convolutions to 3 × 64 × 64, d = 32, {name}: {len(a)} geodesics in {seconds:.2f} s, "
            f"{int(path.converged.sum())} converged, length {path.length.mean():.1f}, {memory:.1f} GiB",
            flush=True,
        )


TASKS = {"exp": exponentials, "log": logarithms, "means": means, "matrix": matrix, "conv": convolutions}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dims", nargs="+", type=int, default=[2, 8])
    parser.add_argument("--size", type=int, default=256)
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=TASKS)
    options = parser.parse_args()
    Distribution.set_default_validate_args(False)
    for task in options.tasks:
        for d in options.dims[:1] if task == "conv" else options.dims:
            size = 1000 if task == "matrix" and options.size >= 256 else options.size
            try:
                TASKS[task](d, size, options.device)
            except Exception as error:
                print(f"{task}, d = {d}: {type(error).__name__}: {error}", flush=True)


if __name__ == "__main__":
    main()
