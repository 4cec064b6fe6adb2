"""The distance matrix of a data set, in memory or on disk, with the engine that is at hand."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from pullback._geometry.geodesic import solver_or_default
from pullback._geometry.pairwise.engines import Engine, run
from pullback._geometry.pairwise.plan import Job, Plan, Starts
from pullback._metrics.base import Metric, codes_for
from pullback._options import check_options
from pullback._solvers.base import ConvergenceError, Solver
from pullback._typing import Array, Float

# Pairs solved together. On a core 64 take 23 ms per pair and 256 take 10 (--batch of benchmarks/distances.py). On a GPU
# the few hard pairs of a batch take some hundred steps, however many the others are: as many as a part of its memory
# holds (--all of the same, a trained VAE with d = 2).
_BATCH = {"cpu": 1024, "cuda": 2**19}
_DEVICE_SHARE = 0.25
# Codes on the side of a block: about 64 blocks per side, between these limits. A block is what a killed process loses.
_BLOCKS_PER_SIDE = 64
_BLOCK_LIMITS = {"cpu": (32, 512), "cuda": (1024, 1024)}
# Share of the machine's memory that a matrix may take.
_MEMORY_SHARE = 0.5


def pairwise_distances(
    metric: Metric,
    Z: Float[Tensor, "n d"] | Array,
    Y: Float[Tensor, "m d"] | Array | None = None,
    *,
    solver: Solver | None = None,
    init: Starts = None,
    n_jobs: int | None = None,
    client: Any = None,
    shard: tuple[int, int] | None = None,
    devices: Sequence[str] | None = None,
    out: str | os.PathLike[str] | None = None,
    block_size: int | None = None,
    batch_size: int | None = None,
    errors: Literal["nan", "raise"] = "nan",
) -> Float[Tensor, "n m"] | Any:
    """The distances of all pairs: the matrix ``d(Z[i], Y[j])``, or ``d(Z[i], Z[j])``.

    The cost is that of as many geodesics; for ``Z`` alone each pair is solved once. The matrix is cut into blocks,
    which are solved in the same way by every engine, so all engines agree to the last bit on one kind of processor. A
    pair whose path does not converge is tried again from a graph of the codes. A constant: it carries no gradient.

    With ``out`` the blocks go to a zarr store. A run that was killed goes on from the blocks that are finished when the
    same call is made again; a store of another job is refused (docs/scaling.md).

    Args:
        metric: the geometry.
        Z: codes, ``(n, d)``.
        Y: other codes, ``(m, d)``.
        solver: as in `pullback.geodesic`.
        init: None for straight lines, or a fitted graph, or a list of several starts, as in `pullback.geodesic`. A
            curve would fit one pair only.
        n_jobs: processes on this machine: -1 for one per core, 1 for none but this one. By default one per core once
            the work is known to take longer than starting them.
        client: a dask client, or the address of a scheduler. Give each dask process one thread. With `out` the workers
            write to it, so they must share its file system.
        shard: ``(i, n)`` solves every n-th block from the i-th, counted from 0, for machines that share nothing but the
            folder `out`.
        devices: several devices, such as ``["cuda:0", "cuda:1"]``, each with its own process. The metric and the codes
            are copied to them.
        out: a folder for the matrix. Needs ``pip install 'pullback[scale]'``.
        block_size: codes on the side of a block.
        batch_size: pairs solved together, by default 1,024, and on a GPU as many as fit a quarter of its memory.
        errors: "nan" gives pairs that fail NaN and warns once, "raise" stops at the first.

    Returns:
        The matrix, on the device of ``Z``; with `out` a `DistanceStore`.

    >>> import torch, pullback as pb
    >>> codes = torch.tensor([[0.0, 0.0], [3.0, 4.0], [0.0, 2.0]], dtype=torch.float64)
    >>> metric = pb.EuclideanMetric(lambda z: torch.distributions.Normal(z, 1.0))
    >>> pb.pairwise_distances(metric, codes)
    tensor([[0.0000, 5.0000, 2.0000],
            [5.0000, 0.0000, 3.6056],
            [2.0000, 3.6056, 0.0000]], dtype=torch.float64)
    """
    check_options(block_size=block_size, batch_size=batch_size)
    if shard is not None and out is None:
        raise ValueError("shard= needs out=, the folder where the parts of the matrix meet.")
    if shard is not None and not 0 <= shard[0] < shard[1]:
        raise ValueError(f"shard=(i, n) counts from 0: i must be at least 0 and less than n; got {shard}.")
    first, second = (codes.detach() for codes in codes_for(metric, Z, Z if Y is None else Y, a_set=True))
    shape, num_bytes = (len(first), len(second)), len(first) * len(second) * first.element_size()
    least, most = _BLOCK_LIMITS.get(first.device.type, _BLOCK_LIMITS["cuda"])
    wanted = 1 << (max(shape) // _BLOCKS_PER_SIDE).bit_length()
    plan = Plan(shape, block_size or min(max(wanted, least), most), symmetric=Y is None)
    job = Job(metric, first, second, plan, solver_or_default(solver), init, batch_size or default_batch_size(first))
    engine = Engine(n_jobs, client, devices)
    available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else num_bytes
    if out is None and num_bytes > _MEMORY_SHARE * available:
        raise MemoryError(
            f"A matrix of {shape[0]:,} by {shape[1]:,} distances takes {num_bytes / 1e9:.0f} GB. Pass "
            "out='distances.zarr' to keep it on disk, or use pullback.neighbors."
        )
    part, num_parts = shard or (0, 1)
    found = run(job, engine, plan.blocks()[part::num_parts], out, errors)
    if out is None:
        return torch.as_tensor(found).to(first.device)
    failures = found.failures() if errors == "raise" else []
    if failures:
        i, j, message = failures[0]
        raise ConvergenceError(
            f"{len(failures)} pairs in {out} have no distance, the first ({i}, {j}): {message}.", found
        )
    return found


def default_batch_size(codes: Tensor) -> int:
    """Pairs solved together."""
    most = _BATCH.get(codes.device.type, _BATCH["cuda"])
    if codes.device.type != "cuda":
        return most
    d, available = codes.shape[1], _DEVICE_SHARE * torch.cuda.get_device_properties(codes.device).total_memory
    # The memory of a pair's finest curve and of its Hessian on some 32 segments, four times each.
    per_pair = 4 * codes.element_size() * (1024 * d + 32 * d**2)
    return max(1, min(most, int(available / per_pair)))
