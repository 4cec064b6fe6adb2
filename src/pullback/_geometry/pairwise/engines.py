"""Solves the blocks of a job in this process, in a pool of processes, or on the workers of dask.

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
import re
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import cloudpickle
import numpy as np
import torch
from joblib import Parallel, cpu_count, delayed
from joblib.externals.loky.process_executor import TerminatedWorkerError

from pullback._geometry.pairwise import store
from pullback._geometry.pairwise.plan import Block, Job
from pullback._options import check_options
from pullback._progress import progress
from pullback._solvers.base import ConvergenceError, Status

# Pools that are started again after the system has killed one of their processes.
_MAX_RESTARTS = 3
# Blocks that dask has at hand for each of its threads: the next one is there when one is finished.
_PER_THREAD = 2
# A process solves one block at a time, even if dask gave it several threads.
_SOLVING = threading.Lock()
# Seconds of work from which on a pool is started by itself: each of its processes imports torch, which takes seconds.
_POOL_PAYS = 15.0
_NUM_NAMED = 3


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


@dataclass(frozen=True, eq=False)
class Engine:
    """Who solves the blocks, with the options of `pullback.pairwise_distances`."""

    n_jobs: int | None = None
    client: Any = None
    devices: Sequence[Any] | None = None

    def __post_init__(self) -> None:
        if self.client is not None and (self.devices is not None or self.n_jobs not in (None, 1)):
            raise ValueError("client= has processes and devices of its own: leave out n_jobs= and devices=.")
        if self.n_jobs != -1:
            check_options(n_jobs=self.n_jobs)
        known = [re.fullmatch(r"(cpu|cuda|mps|xpu)(:\d+)?", str(device)) for device in self.devices or ()]
        if self.devices is not None and not (known and all(known)):
            raise ValueError(f'devices are names such as ["cuda:0", "cuda:1"], at least one; got {self.devices}.')

    def solve(self, job: Job, blocks: Sequence[Block], folder: Path | None) -> Iterator[Solved]:
        """Yields the blocks as they are finished."""
        if self.client is not None:
            return _on_dask(job, blocks, folder, self.client)
        if self.devices:
            return _in_pool(job, blocks, folder, self.n_jobs or len(self.devices), self.devices)
        if self.n_jobs is None:
            return _until_a_pool_pays(job, blocks, folder, cpu_count() if job.first.device.type == "cpu" else 1)
        num_jobs = cpu_count() if self.n_jobs == -1 else self.n_jobs
        return _in_pool(job, blocks, folder, num_jobs) if num_jobs > 1 else (solve(job, b, folder) for b in blocks)


def _until_a_pool_pays(job: Job, blocks: Sequence[Block], folder: Path | None, num_jobs: int) -> Iterator[Solved]:
    """In this process until the rest is known to take long."""
    began = time.perf_counter()
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
        store.open_for(job, folder)
        blocks = store.unfinished(folder, plan, blocks)
    result = None if folder is not None else np.full(plan.shape, np.nan, job.first.cpu().numpy().dtype)
    failures: list[tuple[int, int, str]] = []
    num_new = 0
    with progress("distances", sum(len(plan.pairs(block)[0]) for block in blocks), unit=" pairs") as bar:
        for block, status, values, is_new in engine.solve(job, blocks, folder):
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
