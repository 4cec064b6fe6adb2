"""Geodesics a second on one GPU, and how close that is to the limit of the card.

    PYTHONPATH=src python benchmarks/geodesics_gpu.py                  # 4,096 pairs, d = 2 and d = 8, float32
    PYTHONPATH=src python benchmarks/geodesics_gpu.py --profile        # and where the time goes
    PYTHONPATH=src python benchmarks/geodesics_gpu.py --device cpu --pairs 8 --rounds 1

A Bernoulli decoder d-256-256-784, at most 64 segments, a relative tolerance of 1e-5. The limit is the time the
decoder's matrix products alone would take at the card's peak: decoded points (one with d tangents counts 1 + d) times
the operations of a forward pass. Needs torch, numpy and scipy only.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.distributions import Distribution

import models
import pullback as pb

HIDDEN = (256, 256)
PEAK = {False: 67e12, True: 494e12}  # operations a second of an H200: float32, and with TensorFloat-32


def run(model: models.Model, a: Tensor, b: Tensor, options: argparse.Namespace) -> Callable[[], pb.results.Geodesic]:
    """The task that is timed."""
    metric = pb.FisherRaoMetric(model.decoder)
    settings = {} if options.min_segments is None else {"min_segments": options.min_segments}
    solver = pb.GaussNewton(rtol=options.rtol, max_segments=options.max_segments, **settings)

    def solve() -> pb.results.Geodesic:
        path = pb.geodesic(metric, a, b, solver=solver)
        _wait(a)
        return path

    return solve


def measure(d: int, options: argparse.Namespace) -> None:
    """Times one latent dimension, without and with TensorFloat-32, and prints a line for each."""
    dtype = torch.float32
    model = _model(d, dtype, options)
    a, b = models.pairs(model.codes, options.pairs, seed=1)
    exact = _exact(d, a, b, options)
    solve = run(model, a, b, options)
    for tf32 in (False, True) if a.is_cuda else (False,):
        torch.backends.cuda.matmul.allow_tf32 = tf32
        solve()
        _wait(a)
        seconds, path = min((_timed(solve) for _ in range(options.rounds)), key=lambda pair: pair[0])
        print(
            f"d = {d}, {'TensorFloat-32' if tf32 else 'float32':14s} {_line(path, model, seconds, tf32, exact)}",
            flush=True,
        )
    torch.backends.cuda.matmul.allow_tf32 = False
    if options.profile:
        profile(solve, a.is_cuda, options.trace)


def _line(path: pb.results.Geodesic, model: models.Model, seconds: float, tf32: bool, exact: Tensor) -> str:
    count = len(path.length)
    flops = path.num_decoded * model.flops
    error = (path.length[: len(exact)].double() / exact - 1).abs()
    segments, counts = path.num_segments.unique(return_counts=True)
    finest = ", ".join(f"{s}: {c / count:.0%}" for s, c in zip(segments.tolist(), counts.tolist(), strict=True))
    return (
        f"{count / seconds:9.0f} geodesics/s  {1e3 * seconds:8.1f} ms  converged {path.converged.double().mean():6.1%} "
        f" points each {path.num_decoded / count:6.0f}  calls {path.num_calls}  {flops / seconds / 1e12:6.2f} TFLOP/s "
        f"= {flops / seconds / PEAK[tf32]:.1%} of peak (limit {count * PEAK[tf32] / flops:.0f}/s)\n{'':22s}error of "
        f"length: median {error.median():.1e}, 99 % {error.quantile(0.99):.1e}, worst {error.max():.1e}; steps on the "
        f"finest level: median {path.num_steps.median()}, worst {path.num_steps.max()}; segments {finest}"
    )


def _model(d: int, dtype: torch.dtype, options: argparse.Namespace) -> models.Model:
    if options.weights is not None:
        return models.load(d, options.weights, HIDDEN, dtype, device=options.device)
    return models.untrained(d, HIDDEN, gain=options.gain, dtype=dtype, device=options.device)


def _exact(d: int, a: Tensor, b: Tensor, options: argparse.Namespace) -> Tensor:
    """Lengths of the first paths in double precision, to a hundredth of the tolerance."""
    metric = pb.FisherRaoMetric(_model(d, torch.float64, options).decoder)
    solver = pb.GaussNewton(rtol=1e-2 * options.rtol)
    return pb.geodesic(metric, a[:256].double(), b[:256].double(), solver=solver).length


def _timed(solve: Callable[[], pb.results.Geodesic]) -> tuple[float, pb.results.Geodesic]:
    start = time.perf_counter()
    path = solve()
    return time.perf_counter() - start, path


def _wait(z: Tensor) -> None:
    if z.is_cuda:
        torch.cuda.synchronize()


def profile(solve: Callable[[], pb.results.Geodesic], cuda: bool, trace: Path | None) -> None:
    """Prints the 15 kernels that take longest, and the 15 operations that keep the host busy longest."""
    from torch.profiler import ProfilerActivity

    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA] if cuda else [ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as recorded:
        solve()
    averages = recorded.key_averages()
    if cuda:
        print(averages.table(sort_by="self_cuda_time_total", row_limit=15, max_name_column_width=60))
    print(averages.table(sort_by="self_cpu_time_total", row_limit=15, max_name_column_width=60))
    if trace is not None:
        recorded.export_chrome_trace(str(trace))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dims", nargs="+", type=int, default=[2, 8])
    parser.add_argument("--pairs", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rtol", type=float, default=1e-5)
    parser.add_argument("--max-segments", type=int, default=64)
    parser.add_argument("--min-segments", type=int, help="64 solves every pair on 64 segments; adaptive by default")
    parser.add_argument(
        "--gain", type=float, default=1.5, help="size of the random weights; larger ones bend paths more"
    )
    parser.add_argument("--weights", type=Path, help="a file of torch.save(decoder.state_dict()) for one of --dims")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--trace", type=Path, help="where to write the profile for chrome://tracing")
    options = parser.parse_args()
    Distribution.set_default_validate_args(False)
    name = torch.cuda.get_device_name() if options.device.startswith("cuda") else options.device
    print(
        f"{name}, torch {torch.__version__}, {options.pairs} pairs, at most {options.max_segments} segments, rtol "
        f"{options.rtol}"
    )
    for d in options.dims:
        measure(d, options)


if __name__ == "__main__":
    main()
