"""The distance matrix of a data set, in memory or on disk, solved in this process, in a pool, or on workers of dask.

Every engine yields each block when it is finished, in any order. With a folder the process that solved a block writes
it there; without one the values come back.
"""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import os
import pickle
import platform
import re
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal, NamedTuple

import cloudpickle
import numpy as np
import torch
from joblib import Parallel, cpu_count, delayed
from joblib.externals.loky.process_executor import TerminatedWorkerError
from torch import Tensor

from pullback._decoders.contract import unvalidated
from pullback._geometry.geodesic import geodesic, solver_or_default
from pullback._geometry.pairwise import store
from pullback._geometry.pairwise.store import Block, Plan
from pullback._metrics.base import Metric, codes_for
from pullback._options import check_options
from pullback._progress import progress
from pullback._solvers.base import ConvergenceError, Solver, Status, converged
from pullback._starts.graph import CodeGraph, Graph
from pullback._typing import Array, Float

Starts = Graph | Sequence[Graph | None] | None
# Yields the blocks of a job as they are finished, written to a folder if there is one.
Engine = Callable[["Job", Sequence[Block], Path | None], Iterator["Solved"]]

# Of the layout of the store.
_FORMAT = 1
_NUM_PROBES = 8
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
# Pools that are started again after the system has killed one of their processes.
_MAX_RESTARTS = 3
# Blocks that dask has at hand for each of its threads: the next one is there when one is finished.
_PER_THREAD = 2
# A process solves one block at a time, even if dask gave it several threads.
_SOLVING = threading.Lock()
# Seconds of work from which on a pool is started by itself: each of its processes imports torch, which takes seconds.
_POOL_PAYS = 15.0
_NUM_NAMED = 3


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
    engine = engine_for(n_jobs, client, devices)
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
    most = _BATCH.get(codes.device.type, _BATCH["cuda"])
    if codes.device.type != "cuda":
        return most
    d, available = codes.shape[1], _DEVICE_SHARE * torch.cuda.get_device_properties(codes.device).total_memory
    # The memory of a pair's finest curve and of its Hessian on some 32 segments, four times each.
    per_pair = 4 * codes.element_size() * (1024 * d + 32 * d**2)
    return max(1, min(most, int(available / per_pair)))


@dataclass(frozen=True, eq=False)
class Job:
    """Everything a process needs to solve a block of the pairs that `plan` makes of the codes `first` and `second`."""

    metric: Metric
    first: Tensor
    second: Tensor
    plan: Plan
    solver: Solver
    init: Starts
    batch_size: int

    def __post_init__(self) -> None:
        starts = self.init if isinstance(self.init, (list, tuple)) else [self.init]
        if not all(isinstance(start, Graph | None) for start in starts):
            raise TypeError("init must be None, a fitted graph, or a list of them: a curve would fit one pair only.")

    def solve(self, block: Block) -> tuple[np.ndarray, np.ndarray]:
        """Distances of the block's pairs, NaN where no path was found, and the `Status` of each."""
        i, j = (torch.from_numpy(numbers).to(self.first.device) for numbers in self.plan.pairs(block))
        a, b = self.first[i], self.second[j]
        threads = torch.get_num_threads()
        try:
            if a.device.type == "cpu":
                # Sums depend on how many threads share them, and processes, not threads, are what fills the cores.
                torch.set_num_threads(1)
            length, status = self._paths(a, b, self.init)
            again = (~converged(status) & (status != Status.BAD_END_POINT)).nonzero()[:, 0]
            if len(again) and self._graph is not None:
                length[again], status[again] = self._paths(a[again], b[again], self._graph)
        finally:
            torch.set_num_threads(threads)
        status[converged(status)] = Status.CONVERGED
        length[status != Status.CONVERGED] = torch.nan
        return length.cpu().numpy(), status.to(torch.int8).cpu().numpy()

    @functools.cached_property
    def _graph(self) -> CodeGraph | None:
        """Where pairs that failed start again; None if no two codes can be joined."""
        codes = torch.cat([self.first, self.second])
        codes = codes[codes.isfinite().all(-1)]
        if len(codes.unique(dim=0)) < 2:
            return None
        graph = CodeGraph.fit(self.metric, codes)
        return graph if graph.weights.nnz else None

    def _paths(self, a: Tensor, b: Tensor, init: Starts) -> tuple[Tensor, Tensor]:
        """Lengths and statuses, a batch at a time; batches are halved where a device's memory does not hold them."""
        length, status = a.new_zeros(len(a)), torch.zeros(len(a), dtype=torch.long, device=a.device)
        begin, size = 0, self.batch_size
        while begin < len(a):
            here = slice(begin, begin + size)
            try:
                path = geodesic(self.metric, a[here], b[here], solver=self.solver, init=init)
            except torch.OutOfMemoryError:
                if size == 1:
                    raise
                torch.cuda.empty_cache()
                size //= 2
            else:
                length[here], status[here] = path.length.detach(), path.status
                begin += size
        return length, status


class Solved(NamedTuple):
    """A finished block: the `Status` of its pairs and, unless they were written, their values."""

    block: Block
    status: np.ndarray
    values: np.ndarray | None = None
    is_new: bool = True


def solve(job: Job | bytes | Path, block: Block, folder: Path | None, device: str | None = None) -> Solved:
    """Solves a block of a job, also one that was sent, and writes it, unless another process has."""
    with _SOLVING:
        job = job if isinstance(job, Job) else _load(job, device)
        if folder is not None and store.has(folder, job.plan, block):
            return Solved(block, np.zeros(len(job.plan.pairs(block)[0]), np.int8), is_new=False)
        values, status = job.solve(block)
        if folder is None:
            return Solved(block, status, values)
        store.write(folder, job.plan, block, values, status)
        return Solved(block, status)


@functools.lru_cache(maxsize=2)
def _load(sent: bytes | Path, device: str | None) -> Job:
    """The job that was sent, or the file it is in; a process reads it once and solves many blocks."""
    payload = sent if isinstance(sent, bytes) else sent.read_bytes()
    return torch.load(io.BytesIO(payload), map_location=device, weights_only=False)


def _dumps(job: Job) -> bytes:
    """A job as bytes that other processes can load, also one with lambdas."""
    stream = io.BytesIO()
    try:
        torch.save(replace(job), stream, pickle_module=cloudpickle)
    except (TypeError, AttributeError, RuntimeError, pickle.PicklingError) as error:
        raise TypeError(
            f"The metric, solver or init cannot be sent to other processes ({error}). Solve in this one with n_jobs=1, "
            "or have each process make its own: pullback distances my_module:make_decoder ... --shard i/n."
        ) from error
    return stream.getvalue()


def engine_for(n_jobs: int | None, client: Any, devices: Sequence[Any] | None) -> Engine:
    """Who solves the blocks, by the options of `pairwise_distances`."""
    if client is not None and (devices is not None or n_jobs not in (None, 1)):
        raise ValueError("client= has processes and devices of its own: leave out n_jobs= and devices=.")
    if n_jobs != -1:
        check_options(n_jobs=n_jobs)
    known = [re.fullmatch(r"(cpu|cuda|mps|xpu)(:\d+)?", str(device)) for device in devices or ()]
    if devices is not None and not (known and all(known)):
        raise ValueError(f'devices are names such as ["cuda:0", "cuda:1"], at least one; got {devices}.')
    if client is not None:
        return functools.partial(_on_dask, client=client)
    if devices:
        return functools.partial(_in_pool, num_jobs=n_jobs or len(devices), devices=devices)
    if n_jobs is None:
        return _until_a_pool_pays
    num_jobs = cpu_count() if n_jobs == -1 else n_jobs
    if num_jobs > 1:
        return functools.partial(_in_pool, num_jobs=num_jobs)
    return lambda job, blocks, folder: (solve(job, block, folder) for block in blocks)


def _until_a_pool_pays(job: Job, blocks: Sequence[Block], folder: Path | None) -> Iterator[Solved]:
    """In this process until the rest is known to take long."""
    began, num_jobs = time.perf_counter(), cpu_count() if job.first.device.type == "cpu" else 1
    for done, block in enumerate(blocks, 1):
        yield solve(job, block, folder)
        expected = (time.perf_counter() - began) / done * (len(blocks) - done)
        if num_jobs > 1 and expected > _POOL_PAYS:
            yield from _in_pool(job, blocks[done:], folder, num_jobs)
            return


def _in_pool(
    job: Job, blocks: Sequence[Block], folder: Path | None, num_jobs: int, devices: Sequence[Any] = (None,)
) -> Iterator[Solved]:
    """In processes of joblib, each block on the next of the devices. A killed process costs its block only."""
    remaining = dict.fromkeys(blocks)
    with tempfile.TemporaryDirectory() as place:
        file = Path(place) / "job"
        file.write_bytes(_dumps(job))
        for attempt in range(_MAX_RESTARTS + 1):
            parallel: Any = Parallel(n_jobs=num_jobs, return_as="generator_unordered", max_nbytes=None)
            tasks = zip(list(remaining), itertools.cycle(devices), strict=False)
            try:
                for solved in parallel(delayed(solve)(file, block, folder, device) for block, device in tasks):
                    del remaining[solved.block]
                    yield solved
                return
            except TerminatedWorkerError as error:
                if attempt == _MAX_RESTARTS:
                    raise RuntimeError(
                        f"Processes were killed {attempt + 1} times, perhaps for lack of memory. Use fewer (n_jobs), "
                        "or smaller batches (batch_size). With out= finished blocks are kept: the same call goes on."
                    ) from error


def _on_dask(job: Job, blocks: Sequence[Block], folder: Path | None, client: Any) -> Iterator[Solved]:
    """On the workers of a dask client, or of the scheduler at an address. Blocks of lost workers go to others."""
    from distributed import Client, as_completed

    connected: Any = Client(client) if isinstance(client, str) else contextlib.nullcontext(client)
    with connected as connection:
        # A task, not scattered data: were the worker that holds it killed, dask makes it anew.
        payload = connection.submit(bytes, _dumps(job), pure=False)
        tasks = (connection.submit(solve, payload, block, folder, pure=False) for block in blocks)
        room = _PER_THREAD * max(1, sum(connection.nthreads().values()))
        running = as_completed(list(itertools.islice(tasks, room)))
        for future in running:
            solved = future.result()
            future.release()
            running.update(itertools.islice(tasks, 1))
            yield solved


class FailedPairsWarning(UserWarning):
    """Some pairs have no distance.

    Attributes:
        failures: ``(i, j, message)`` for each of them.

    >>> import pullback as pb
    >>> pb.results.FailedPairsWarning("1 pair has no distance.", [(0, 2, "an end point is NaN")]).failures
    [(0, 2, 'an end point is NaN')]
    """

    def __init__(self, message: str, failures: Sequence[tuple[int, int, str]] = ()) -> None:
        super().__init__(message)
        self.failures = list(failures)


def run(
    job: Job, engine: Engine, blocks: list[Block], out: str | os.PathLike[str] | None, errors: Literal["nan", "raise"]
) -> Any:
    """Solves blocks; the result is an array, or with a folder `out` the store there, which keeps the blocks it has."""
    if errors not in ("nan", "raise"):
        raise ValueError(f'errors must be "nan" or "raise"; got {errors!r}.')
    folder, plan = None if out is None else Path(out), job.plan
    if folder is not None:
        store.open_for(plan, manifest(job), folder)
        blocks = store.unfinished(folder, plan, blocks)
    result = None if folder is not None else np.full(plan.shape, np.nan, job.first.cpu().numpy().dtype)
    failures: list[tuple[int, int, str]] = []
    num_new = 0
    with progress("distances", sum(len(plan.pairs(block)[0]) for block in blocks), unit=" pairs") as bar:
        for block, status, values, is_new in engine(job, blocks, folder):
            i, j = plan.pairs(block)
            failures += [(int(i[k]), int(j[k]), str(Status(int(status[k])))) for k in status.nonzero()[0]]
            num_new += is_new
            bar.update(len(status))
            if failures:
                bar.set_postfix(failed=len(failures))
            if result is not None and values is not None:
                for where, part in plan.writes(block, values):
                    result[where] = part
            if failures and errors == "raise":
                raise ConvergenceError(_sentence(failures), result)
    if failures:
        warnings.warn(FailedPairsWarning(_sentence(failures), failures), stacklevel=3)
    return result if folder is None else store.finished(folder, num_new)


def _sentence(failures: Sequence[tuple[int, int, str]]) -> str:
    named = "; ".join(f"({i}, {j}): {message}" for i, j, message in failures[:_NUM_NAMED])
    return f"{len(failures)} pairs have no distance, also not from a graph, and are NaN. The first: {named}."


def manifest(job: Job) -> dict[str, Any]:
    """The facts that decide the numbers of a job, as JSON can hold them."""
    plan = job.plan
    return {
        "format": _FORMAT,
        "shape": list(plan.shape),
        "block_size": plan.size,
        "symmetric": plan.symmetric,
        "pairs": "all" if plan.listed is None else store.fingerprint(*plan.listed),
        "dtype": str(job.first.dtype).removeprefix("torch."),
        "codes": store.fingerprint(job.first, job.second),
        "metric": store.fingerprint(job.metric),
        "metric_type": type(job.metric).__name__,
        "probe": _probe(job),
        "solver": repr(job.solver),
        "init": "straight line" if job.init is None else store.fingerprint(job.init),
        "batch_size": job.batch_size,
        "versions": {name: _version(name) for name in ("pullback", "torch", "numpy", "python")},
    }


def _probe(job: Job) -> list[float | None]:
    """A few squared steps, by which a metric is recognized even if its weights are out of sight."""
    finite = job.first[job.first.isfinite().all(-1)][: _NUM_PROBES + 1]
    if len(finite) < 2:
        return []
    with torch.no_grad(), unvalidated():
        ds2 = job.metric.ds2(finite[:-1], finite[1:])
    return [x if np.isfinite(x) else None for x in ds2.double().cpu().tolist()]


def _version(name: str) -> str:
    if name == "python":
        return ".".join(platform.python_version_tuple()[:2])
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
