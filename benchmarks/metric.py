"""Time and memory of the metric tensor of a 2-128-256-784 Bernoulli decoder, against the other ways to get it.

- stochman 0.3.0: Jacobian of the logits by `stochman.nnj`, contracted with p(1 - p); its network is built from its own
  layers
- finite differences of the KL divergence, the paper's proposition
- `torch.vmap(torch.func.jacrev)`, mapped over the points

All in one process and on the same weights, the best of several runs in turn. Ratios are to ours: above 1, ours is
faster.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor, nn
from torch.distributions import Bernoulli, kl_divergence

import pullback as pb

SIZES = (2, 128, 256, 784)
Method = Callable[[Tensor], Tensor]


def mlp(layers: ModuleType, dtype: torch.dtype) -> nn.Module:
    """The network, from the layers of torch.nn or of stochman.nnj; the same weights from either."""
    torch.manual_seed(0)
    pairs = itertools.pairwise(SIZES)
    return layers.Sequential(*[f for i, o in pairs for f in (layers.Linear(i, o), layers.Tanh())][:-1]).to(dtype)


def methods(dtype: torch.dtype) -> dict[str, Method]:
    """Each a function from codes (n, 2) to metric tensors (n, 2, 2)."""
    from stochman import nnj  # not at the top: the measurement of memory leaves it out

    ours, theirs = mlp(nn, dtype), mlp(nnj, dtype)

    def decoder(z: Tensor) -> Bernoulli:
        return Bernoulli(logits=ours(z))

    def contract(logits: Tensor, jacobian: Tensor) -> Tensor:
        p = torch.sigmoid(logits)
        return (jacobian * (p * (1 - p))[..., None]).mT @ jacobian

    def mapped(z: Tensor) -> Tensor:
        return contract(ours(z), torch.vmap(torch.func.jacrev(ours))(z))

    return {
        "pullback": pb.FisherRaoMetric(decoder).tensor,
        "stochman nnj": lambda z: contract(*theirs(z, jacobian=True)),
        "KL finite differences": lambda z: kl_differences(decoder, z),
        "vmap(jacrev)": mapped,
    }


def kl_differences(decoder: Callable[[Tensor], Bernoulli], z: Tensor, step: float = 1e-2) -> Tensor:
    """M_ii = 2 KL(e_i) / ε² and M_ij = (KL(e_i + e_j) - KL(e_i) - KL(e_j)) / ε², the shifts of all points in one
    batch."""
    e1, e2 = torch.eye(2, dtype=z.dtype)
    shifts = step * torch.stack([e1, e2, e1 + e2])
    shifted = decoder(z + shifts[:, None])
    kl = kl_divergence(decoder(z).expand(shifted.batch_shape), shifted).sum(-1) / step**2
    off = kl[2] - kl[0] - kl[1]
    return torch.stack([2 * kl[0], off, off, 2 * kl[1]], -1).unflatten(-1, (2, 2))


def best_times(candidates: dict[str, Method], z: Tensor, rounds: int) -> dict[str, float]:
    """Best time of each in seconds. They take turns, so that a busy machine disturbs all alike."""
    best = dict.fromkeys(candidates, float("inf"))
    for _ in range(rounds):
        for name, method in candidates.items():
            start = time.perf_counter()
            method(z)
            best[name] = min(best[name], time.perf_counter() - start)
    return best


def compare(num_points: int, dtype: torch.dtype, threads: int, grad: bool, rounds: int) -> None:
    torch.set_num_threads(threads)
    torch.manual_seed(1)
    z = torch.randn(num_points, 2, dtype=dtype)
    candidates = methods(dtype)
    if num_points > 100:
        candidates.pop("vmap(jacrev)")  # a thousand times slower at 1,000 points
    with torch.set_grad_enabled(grad):
        for method in candidates.values():
            method(z)  # the first call pays for torch's lazy imports
        best = best_times(candidates, z, rounds)
    plural, mode = "s" * (threads > 1), "on" if grad else "off"
    setting = f"{num_points:5d} points  {str(dtype)[6:]}  {threads} thread{plural}  grad {mode}"
    row = "   ".join(f"{name} {1e3 * t:.2f} ms ({t / best['pullback']:.2f})" for name, t in best.items())
    print(f"{setting:42s} {row}", flush=True)


def check_agreement() -> None:
    """The methods compute the same thing."""
    z = torch.randn(5, 2, dtype=torch.float64)
    expected, *others = (method(z) for method in methods(torch.float64).values())
    for other, rtol in zip(others, (1e-10, 5e-2, 1e-10), strict=True):
        assert torch.linalg.norm(other - expected) <= rtol * torch.linalg.norm(expected)


def peak_memory(num_points: int) -> None:
    """Prints the high-water mark while `num_points` tensors are computed, in MB: beyond the process before, and in
    all."""
    network = mlp(nn, torch.float64)
    tensor = pb.FisherRaoMetric(lambda z: Bernoulli(logits=network(z))).tensor
    tensor(torch.zeros(1, 2, dtype=torch.float64))
    before = _memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # forget earlier peaks
    tensor(torch.zeros(num_points, 2, dtype=torch.float64))
    peak = _memory("VmHWM")
    print(
        f"memory for {num_points} points, float64: {peak - before:.0f} MB beyond the idle process, {peak:.0f} MB in all"
    )


def _memory(field: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(field))


def main() -> None:
    check_agreement()
    print("metric tensor of a 2-128-256-784 Bernoulli decoder: best time (ratio to pullback)")
    for grad in (False, True):
        for threads in (1, 2):
            for dtype in (torch.float32, torch.float64):
                compare(1000, dtype, threads, grad, rounds=10)
                compare(1, dtype, threads, grad, rounds=200)
    if sys.platform == "linux":
        subprocess.run([sys.executable, __file__, "--memory"], check=True)


if __name__ == "__main__":
    if sys.argv[1:] == ["--memory"]:
        peak_memory(1000)
    else:
        main()
