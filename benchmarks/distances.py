"""Distances of whole data sets: how many geodesics per second, and how well do neighbors do without the matrix?

    python benchmarks/distances.py --latent 2  # a sample of pairs, extrapolated to all; stochman beside it
    python benchmarks/distances.py --latent 10 --prior
    python benchmarks/distances.py --latent 2 --neighbors 15
    python benchmarks/distances.py --latent 2 --save out/ones-2.pt
    PYTHONPATH=src python benchmarks/distances.py --weights out/ones-2.pt --device cuda --all

The model is a VAE of handwritten ones (or, much harder, of all digits: ``--family digits``) with a decoder of 64, 64
and 784 units. Times are processor time of one thread, except on a GPU. With ``--weights``, nothing but torch, numpy and
scipy is needed.
"""

from __future__ import annotations

import argparse
import resource
import time
from pathlib import Path

import torch
from torch import Tensor
from torch.distributions import Bernoulli

import models
import pullback as pb

CACHE = Path("out") / "models"


def model(options: argparse.Namespace) -> tuple[pb.Metric, Tensor]:
    """The metric and the codes, in a random order."""
    dtype = torch.float32 if options.single else torch.float64
    if options.weights:
        stored = torch.load(options.weights, weights_only=True)
        network = models.mlp(tuple(stored["sizes"])).to(device=options.device, dtype=dtype).requires_grad_(False)
        network.load_state_dict(stored["state"])
        decoder, codes = lambda z: Bernoulli(logits=network(z)), stored["codes"].to(device=options.device, dtype=dtype)
    else:
        found = models.trained(options.latent, CACHE, dtype, options.family)
        decoder, codes = found.decoder, found.codes
    order = torch.randperm(len(codes), generator=torch.Generator().manual_seed(0))
    decoder = pb.WithPrior(decoder) if options.prior else decoder
    return pb.FisherRaoMetric(decoder), codes[order.to(codes.device)]


def save(options: argparse.Namespace) -> None:
    """Writes the weights of the decoder and the codes for a machine that has no data."""
    found = models.trained(options.latent, CACHE, torch.float64, options.family)
    state = found.network.state_dict()
    sizes = [options.latent, *models.HIDDEN, models.NUM_PIXELS]
    torch.save({"state": state, "codes": found.codes, "sizes": sizes}, options.save)
    print(f"wrote {options.save}")


def clock(device: str) -> float:
    if device.startswith("cuda"):
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.process_time()


def memory(device: str) -> float:
    """Gigabytes at the peak, of this process or of the GPU."""
    if device.startswith("cuda"):
        return torch.cuda.max_memory_allocated() / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6


def matrix(options: argparse.Namespace) -> float:
    """Time per pair of the distance matrix, from a sample of its rows or from all of it."""
    metric, codes = model(options)
    few = codes[: options.codes]
    # Compiled kernels and caches are not what is measured.
    pb.pairwise_distances(metric, few[:8], n_jobs=1, batch_size=options.batch)
    began = clock(options.device)
    if options.all:
        D = pb.pairwise_distances(metric, few, n_jobs=1, batch_size=options.batch, block_size=options.block)
        num_pairs = len(few) * (len(few) - 1) // 2
    else:
        # As many rows as a block has, so that batches are as large as those of the whole matrix.
        others = few[: max(1, options.pairs // 32)]
        D = pb.pairwise_distances(
            metric, codes[-32:], others, n_jobs=1, batch_size=options.batch, block_size=options.block
        )
        num_pairs = D.numel()
    spent = clock(options.device) - began
    total = len(few) * (len(few) - 1) // 2
    print(
        f"d = {codes.shape[1]}{' with prior' if options.prior else ''}, {options.device}, {codes.dtype}: {num_pairs} "
        f"pairs, {int(D.isnan().sum())} failed, {1e3 * spent / num_pairs:.3f} ms per pair, {num_pairs / spent:.0f} "
        f"pairs per second, peak {memory(options.device):.2f} GB; {total} pairs take "
        f"{total * spent / num_pairs / 60:.1f} minutes on one core"
    )
    return spent / num_pairs


def stochman(options: argparse.Namespace, ours: float) -> None:
    """stochman's time for a few of the same pairs, one by one with its own settings."""
    import peers

    metric, codes = model(options)
    a, b = models.pairs(codes, options.stochman)
    problem = peers.Problem("digits", metric, a, b)
    began = time.process_time()
    found = peers.stochman(problem)
    spent = (time.process_time() - began) / len(a)
    share = found.converged.double().mean()
    print(
        f"stochman: {1e3 * spent:.0f} ms per pair ({share:.0%} converged by its own account), {spent / ours:.0f} times "
        "ours"
    )


def neighbors(options: argparse.Namespace) -> None:
    """Recall of k neighbors against full rows, and geodesics solved for them."""
    metric, codes = model(options)
    Z = codes[: options.codes]
    began = clock(options.device)
    found = pb.neighbors(metric, Z, options.neighbors, n_jobs=1, batch_size=options.batch)
    spent = clock(options.device) - began
    full = len(Z) * (len(Z) - 1) // 2
    print(
        f"{found!r}: {full / found.num_solved:.0f} times fewer than all, {spent:.0f} s, peak "
        f"{memory(options.device):.2f} GB"
    )
    if not options.queries:
        return
    rows = pb.pairwise_distances(metric, Z[: options.queries], Z, n_jobs=1, batch_size=options.batch)
    rows[torch.arange(options.queries), torch.arange(options.queries)] = torch.inf
    best = rows.nan_to_num(torch.inf).topk(options.neighbors, largest=False).indices.cpu()
    hits = sum(
        len(set(best[i].tolist()) & set(found.distances.indices[slice(*found.distances.indptr[i : i + 2])].tolist()))
        for i in range(options.queries)
    )
    certified = found.certified[: options.queries].mean()
    print(f"recall {hits / best.numel():.4f} on {options.queries} full rows, {certified:.0%} of them certified")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--latent", type=int, default=2)
    parser.add_argument("--family", default="bernoulli", choices=("bernoulli", "digits"), help="ones, or all digits")
    parser.add_argument("--prior", action="store_true")
    parser.add_argument("--codes", type=int, default=1000)
    parser.add_argument("--pairs", type=int, default=4000, help="how many to measure")
    parser.add_argument("--all", action="store_true", help="solve the whole matrix")
    parser.add_argument("--batch", type=int)
    parser.add_argument("--block", type=int)
    parser.add_argument("--single", action="store_true", help="in single precision")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--save", type=Path)
    parser.add_argument("--stochman", type=int, default=0, help="pairs to solve with stochman too")
    parser.add_argument("--neighbors", type=int, help="how many to find, instead of the matrix")
    parser.add_argument("--queries", type=int, default=0, help="full rows to compare neighbors with")
    options = parser.parse_args()
    if options.device == "cpu":
        torch.set_num_threads(1)
    if options.save:
        save(options)
    elif options.neighbors:
        neighbors(options)
    else:
        ours = matrix(options)
        if options.stochman:
            stochman(options, ours)


if __name__ == "__main__":
    main()
