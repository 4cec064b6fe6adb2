"""``pullback distances`` fills a store with the distance matrix, or the nearest neighbors, of a file of codes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro
from scipy import sparse

import pullback as pb
from pullback._named import own


@dataclass(frozen=True)
class Options:
    """Geodesic distances of all pairs of codes, in a zarr store. A run that was stopped goes on when called again.

    With --neighbors the k nearest neighbors of every code instead: OUT/neighbors.npz is a sparse matrix of their
    distances, for scipy.sparse.load_npz.
    """

    decoder: tyro.conf.Positional[str]
    """MODULE:NAME of a function without arguments that makes a decoder or a metric, or of either itself. The module is
    looked for in this folder first."""
    codes: Path
    """File of the codes (n, d), written by numpy.save."""
    out: Path
    """Folder of the store, such as d.zarr."""
    workers: int = -1
    """Processes on this machine; -1 for one per core."""
    dask: str | None = None
    """Address of a dask scheduler, such as tcp://10.0.0.1:8786."""
    shard: str | None = None
    """i/n solves the i-th of n parts, counted from 0."""
    neighbors: int | None = None
    """How many nearest neighbors to find instead of all distances."""
    prior: bool = False
    """Adds the information of a standard normal prior (pullback.WithPrior)."""
    device: str = "cpu"
    """Where to solve, such as cuda."""
    block_size: int | None = None
    """Codes on the side of a block."""
    batch_size: int | None = None
    """Pairs solved together."""


def main(arguments: Sequence[str]) -> None:
    options = tyro.cli(Options, args=arguments, prog="pullback distances")
    try:
        print(_run(options))
    except (OSError, ValueError, ImportError) as error:
        raise SystemExit(f"pullback distances: {error}") from error


def _run(options: Options) -> str:
    made, _ = own(options.decoder)
    made = made.to(options.device) if isinstance(made, torch.nn.Module) else made
    metric = made if isinstance(made, pb.Metric) else pb.FisherRaoMetric(pb.WithPrior(made) if options.prior else made)
    array = np.load(options.codes, allow_pickle=False)
    if array.ndim != 2 or not np.issubdtype(array.dtype, np.floating):
        raise ValueError(f"{options.codes} must hold floating-point codes (n, d); it has {array.dtype} {array.shape}.")
    codes = torch.from_numpy(array).to(options.device)
    alone = options.dask is not None or options.device != "cpu"
    engine: dict[str, Any] = {"n_jobs": 1 if alone else options.workers, "client": options.dask}
    engine |= {"batch_size": options.batch_size, "out": options.out}
    if options.neighbors is not None:
        if options.shard is not None:
            raise ValueError(
                "Neighbors are found in two rounds, which shards cannot wait for: use --workers or --dask."
            )
        found = pb.neighbors(metric, codes, options.neighbors, **engine)
        sparse.save_npz(options.out / "neighbors.npz", sparse.csr_matrix(found.distances))
        return f"{found!r}; {options.out / 'neighbors.npz'} is complete"
    shard = (options.shard or "0/1").partition("/")[::2]
    if not all(number.isdigit() for number in shard):
        raise ValueError(f"Give the shard as i/n, such as 0/8; got {options.shard!r}.")
    engine |= {"shard": tuple(map(int, shard)), "block_size": options.block_size}
    store: Any = pb.pairwise_distances(metric, codes, **engine)
    failed = store.failures()
    rest = "complete" if store.complete else f"{store.num_missing} of {store.num_blocks} blocks to go"
    lines = [f"{store.num_solved} blocks solved; {store.path} is {rest}; {len(failed)} pairs have no distance"]
    return "\n".join([*lines, *(f"- ({i}, {j}): {message}" for i, j, message in failed[:10])])
