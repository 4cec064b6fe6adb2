"""Solves the blocks of a job in this process, in a pool of processes, or on the workers of dask.

Every engine yields each block when it is finished, in any order. With a writer the process that solved a block writes
it; without one the values come back.
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
from typing import Any, Literal

import numpy as np
import torch

from pullback._geometry.pairwise.plan import Block, Job
from pullback._geometry.pairwise.store import BlockWriter
from pullback._options import check_options
from pullback._progress import progress
from pullback._solvers.base import ConvergenceError, Status

# Pools that are started again after the system has killed one of their processes.
_MAX_RESTARTS = 3
# Blocks that dask has at hand for each of its threads: the next one is there when one is finished.
_PER_THREAD = 2
# A process solves one block at a time, even if dask gave it several threads.
_SOLVING = threading.Lock()
# Seconds of work from which on a pool of processes is started by itself: each of them imports torch, which takes
# seconds.
_POOL_PAYS = 15.0
_NUM_NAMED = 3


@dataclass(frozen=True, eq=False)
class Solved:
    """A finished block: the `Status` of its pairs and, unless they were written, their values."""

    block: Block
    status: np.ndarray
    values: np.ndarray | None
    is_new: bool = True


def solve(job: Job, block: Block, writer: BlockWriter | None) -> Solved:
    """Solves a block in this process and writes it, unless another process has."""
    with _SOLVING:
        if writer is None:
            values, status = job.solve(block)
            return Solved(block, status, values)
        if writer.has(block):
            return Solved(block, np.zeros(len(job.plan.pairs(block)[0]), np.int8), None, is_new=False)
        values, status = job.solve(block)
        writer.write(block, values, status)
        return Solved(block, status, None)


def dumps(job: Job) -> bytes:
    """A job as bytes that other processes can load, also one with lambdas."""
    import cloudpickle

    stream = io.BytesIO()
    try:
        torch.save(replace(job), stream, pickle_module=cloudpickle)
    except (TypeError, AttributeError, RuntimeError, pickle.PicklingError) as error:
        raise TypeError(
            f"The metric, solver or init cannot be sent to other processes ({error}). Solve in this one with n_jobs=1, "
            "or have each process make its own: pullback distances my_module:make_decoder ... --shard i/n."
        ) from error
    return stream.getvalue()


@functools.lru_cache(maxsize=2)
def _load(sent: bytes | Path, device: str | None) -> Job:
    """The job that was sent, or the file it is in; a process reads it once and solves many blocks."""
    payload = sent if isinstance(sent, bytes) else sent.read_bytes()
    return torch.load(io.BytesIO(payload), map_location=device, weights_only=False)


def _solve_sent(sent: bytes | Path, block: Block, writer: BlockWriter | None, device: str | None = None) -> Solved:
    with _SOLVING:
        job = _load(sent, device)
    return solve(job, block, writer)


def in_pool(
    job: Job, blocks: Sequence[Block], writer: BlockWriter | None, num_jobs: int, devices: Sequence[str] | None = None
) -> Iterator[Solved]:
    """In processes of joblib; with `devices`, each block on the next of them. A killed process costs its block only."""
    from joblib import Parallel, delayed
    from joblib.externals.loky.process_executor import TerminatedWorkerError

    remaining = dict.fromkeys(blocks)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "job"
        file.write_bytes(dumps(job))
        for attempt in range(_MAX_RESTARTS + 1):
            parallel: Any = Parallel(n_jobs=num_jobs, return_as="generator_unordered", max_nbytes=None)
            tasks = zip(list(remaining), itertools.cycle(devices or [None]), strict=False)
            try:
                for solved in parallel(delayed(_solve_sent)(file, block, writer, device) for block, device in tasks):
                    del remaining[solved.block]
                    yield solved
                return
            except TerminatedWorkerError as error:
                if attempt == _MAX_RESTARTS:
                    raise RuntimeError(
                        f"Processes were killed {attempt + 1} times, perhaps for lack of memory. Use fewer (n_jobs), "
                        "or smaller batches (batch_size). With out= finished blocks are kept: the same call goes on."
                    ) from error


def on_dask(job: Job, blocks: Sequence[Block], writer: BlockWriter | None, client: Any) -> Iterator[Solved]:
    """On the workers of a dask client, or of the scheduler at an address. Blocks of lost workers go to others."""
    from distributed import Client, as_completed

    waiting = iter(blocks)
    connected: Any = Client(client) if isinstance(client, str) else contextlib.nullcontext(client)
    with connected as connection:
        # A task, not scattered data: were the worker that holds it killed, dask makes it anew.
        payload = connection.submit(bytes, dumps(job), pure=False)

        def submit(block: Block) -> Any:
            return connection.submit(_solve_sent, payload, block, writer, pure=False)

        room = _PER_THREAD * max(1, sum(connection.nthreads().values()))
        running = as_completed([submit(block) for block in itertools.islice(waiting, room)])
        for future in running:
            solved = future.result()
            future.release()
            for block in itertools.islice(waiting, 1):
                running.add(submit(block))
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


@dataclass(frozen=True, eq=False)
class Engine:
    """Who solves the blocks, with the options of `pullback.pairwise_distances`."""

    n_jobs: int | None = None
    client: Any = None
    devices: Sequence[str] | None = None

    def __post_init__(self) -> None:
        if self.client is not None and (self.devices is not None or self.n_jobs not in (None, 1)):
            raise ValueError("client= has processes and devices of its own: leave out n_jobs= and devices=.")
        if self.n_jobs != -1:
            check_options(n_jobs=self.n_jobs)
        known = [device for device in self.devices or () if re.fullmatch(r"(cpu|cuda|mps|xpu)(:\d+)?", device)]
        if self.devices is not None and (not known or len(known) < len(self.devices)):
            raise ValueError(f'devices are names such as ["cuda:0", "cuda:1"], at least one; got {self.devices}.')

    def solve(self, job: Job, blocks: Sequence[Block], writer: BlockWriter | None) -> Iterator[Solved]:
        """Yields the blocks as they are finished."""
        if self.client is not None:
            return on_dask(job, blocks, writer, self.client)
        if self.devices:
            return in_pool(job, blocks, writer, self.n_jobs or len(self.devices), self.devices)
        if self.n_jobs is None and job.first.device.type == "cpu" and num_cores() > 1:
            return _pool_if_it_pays(job, blocks, writer)
        num_jobs = num_cores() if self.n_jobs == -1 else self.n_jobs or 1
        if num_jobs > 1:
            return in_pool(job, blocks, writer, num_jobs)
        return (solve(job, block, writer) for block in blocks)


def num_cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _pool_if_it_pays(job: Job, blocks: Sequence[Block], writer: BlockWriter | None) -> Iterator[Solved]:
    """In this process until the rest is known to take long."""
    began = time.perf_counter()
    for done, block in enumerate(blocks, 1):
        yield solve(job, block, writer)
        expected = (time.perf_counter() - began) / done * (len(blocks) - done)
        if expected > _POOL_PAYS:
            yield from in_pool(job, blocks[done:], writer, num_cores())
            return


def run(
    job: Job, engine: Engine, blocks: Sequence[Block], writer: BlockWriter | None, *, errors: Literal["nan", "raise"]
) -> tuple[np.ndarray | None, int]:
    """Solves blocks; returns the result as an array, or None if a writer has it, and the number of blocks solved."""
    if errors not in ("nan", "raise"):
        raise ValueError(f'errors must be "nan" or "raise"; got {errors!r}.')
    dtype = job.first.new_zeros(0).cpu().numpy().dtype
    result = None if writer is not None else np.full(job.plan.shape, np.nan, dtype)
    failures: list[tuple[int, int, str]] = []
    num_failed = num_new = 0
    total = sum(len(job.plan.pairs(block)[0]) for block in blocks)
    with progress("distances", total, unit=" pairs") as bar:
        for solved in engine.solve(job, blocks, writer):
            failed = solved.status.nonzero()[0]
            num_failed, num_new = num_failed + len(failed), num_new + solved.is_new
            bar.update(len(solved.status))
            if num_failed:
                bar.set_postfix(failed=num_failed)
            if result is not None and solved.values is not None:
                for where, part in job.plan.writes(solved.block, solved.values):
                    result[where] = part
                i, j = job.plan.pairs(solved.block)
                failures += [(int(i[k]), int(j[k]), str(Status(int(solved.status[k])))) for k in failed]
            if num_failed and errors == "raise":
                raise ConvergenceError(_sentence(num_failed, failures), result)
    if num_failed:
        warnings.warn(FailedPairsWarning(_sentence(num_failed, failures), failures), stacklevel=3)
    return result, num_new


def _sentence(num_failed: int, failures: Sequence[tuple[int, int, str]]) -> str:
    named = "; ".join(f"({i}, {j}): {message}" for i, j, message in failures[:_NUM_NAMED])
    more = f" The first: {named}." if named else " DistanceStore.failures() lists them."
    return f"{num_failed} pairs have no distance, also not from a graph, and are NaN.{more}"
