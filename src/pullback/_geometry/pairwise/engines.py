"""Solves the blocks of a job where it was asked for, shows how far it is, and says what failed.

Blocks are solved in this process, in a pool of processes, or on the workers of dask. Every engine takes a job and
blocks and yields each block when it is finished, in any order. With a writer the process that solved a block writes it;
without one the values come back.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from pullback._geometry.pairwise.job import Job, dumps, load_file, loads
from pullback._geometry.pairwise.plan import Block
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
    """A finished block: the values of its pairs unless they were written, and how many pairs have none."""

    block: Block
    num_pairs: int
    num_failed: int
    is_new: bool
    values: np.ndarray | None
    status: np.ndarray | None


def solve(job: Job, block: Block, writer: BlockWriter | None) -> Solved:
    """Solves a block in this process and writes it, unless another process has."""
    with _SOLVING:
        if writer is not None and writer.has(block):
            return Solved(block, len(job.plan.pairs(block)[0]), 0, False, None, None)
        values, status = job.solve(block)
        if writer is not None:
            writer.write(block, values, status)
    kept = (values, status) if writer is None else (None, None)
    return Solved(block, len(values), int((status != 0).sum()), True, *kept)


def in_pool(
    job: Job, blocks: Sequence[Block], writer: BlockWriter | None, num_jobs: int, devices: Sequence[str] | None = None
) -> Iterator[Solved]:
    """In processes of joblib; with `devices`, each block on the next of them. A killed process costs its block only."""
    from joblib.externals.loky.process_executor import TerminatedWorkerError

    remaining = dict.fromkeys(blocks)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "job"
        file.write_bytes(dumps(job))
        for attempt in range(_MAX_RESTARTS + 1):
            try:
                for solved in _pool(str(file), list(remaining), writer, num_jobs, devices):
                    del remaining[solved.block]
                    yield solved
                return
            except TerminatedWorkerError as error:
                if attempt == _MAX_RESTARTS:
                    raise RuntimeError(
                        f"Processes were killed {attempt + 1} times, perhaps for lack of memory. Use fewer (n_jobs), "
                        "or smaller batches (batch_size). With out= finished blocks are kept: the same call goes on."
                    ) from error


def _pool(
    file: str, blocks: list[Block], writer: BlockWriter | None, num_jobs: int, devices: Sequence[str] | None
) -> Iterator[Solved]:
    from joblib import Parallel, delayed

    parallel: Any = Parallel(n_jobs=num_jobs, return_as="generator_unordered", max_nbytes=None)
    places = itertools.cycle(devices or [None])
    return parallel(delayed(_solve_file)(file, block, writer, next(places)) for block in blocks)


def _solve_file(file: str, block: Block, writer: BlockWriter | None, device: str | None) -> Solved:
    return solve(load_file(file, device), block, writer)


def on_dask(job: Job, blocks: Sequence[Block], writer: BlockWriter | None, client: Any) -> Iterator[Solved]:
    """On the workers of a dask client, or of the scheduler at an address. Blocks of lost workers go to others."""
    from distributed import as_completed

    waiting = iter(blocks)
    with _connected(client) as connection:
        # A task, not scattered data: were the worker that holds it killed, dask makes it anew.
        payload = connection.submit(bytes, dumps(job), pure=False)

        def submit(block: Block) -> Any:
            return connection.submit(_solve_payload, payload, payload.key, block, writer, pure=False)

        room = _PER_THREAD * max(1, sum(connection.nthreads().values()))
        running = as_completed([submit(block) for block in itertools.islice(waiting, room)])
        for future in running:
            solved = future.result()
            future.release()
            for block in itertools.islice(waiting, 1):
                running.add(submit(block))
            yield solved


_loaded: dict[str, Job] = {}


def _solve_payload(payload: bytes, key: str, block: Block, writer: BlockWriter | None) -> Solved:
    with _SOLVING:
        if key not in _loaded:
            _loaded.clear()
            _loaded[key] = loads(payload)
        job = _loaded[key]
    return solve(job, block, writer)


@contextlib.contextmanager
def _connected(client: Any) -> Iterator[Any]:
    if not isinstance(client, str):
        yield client
        return
    from distributed import Client

    with Client(client) as connection:
        yield connection


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
    """Who solves the blocks.

    Attributes:
        n_jobs: processes; -1 for one per core, None for that if it pays.
        client: of dask, or the address of its scheduler.
        devices: on which blocks are solved in turn, each by its own process.
    """

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
    """Solves blocks; returns the result as an array, or None if a writer has it, and the number of blocks solved here.

    Raises:
        ConvergenceError: with ``errors="raise"``, at the first block with a failed pair.
    """
    if errors not in ("nan", "raise"):
        raise ValueError(f'errors must be "nan" or "raise"; got {errors!r}.')
    dtype = job.first.new_zeros(0).cpu().numpy().dtype
    result = None if writer is not None else np.full(job.plan.shape, np.nan, dtype)
    failures: list[tuple[int, int, str]] = []
    num_failed = num_new = 0
    total = sum(len(job.plan.pairs(block)[0]) for block in blocks)
    with progress("distances", total, unit=" pairs") as bar:
        for solved in engine.solve(job, blocks, writer):
            num_failed, num_new = num_failed + solved.num_failed, num_new + solved.is_new
            bar.update(solved.num_pairs)
            if num_failed:
                bar.set_postfix(failed=num_failed)
            if result is not None and solved.values is not None and solved.status is not None:
                for where, part in job.plan.writes(solved.block, solved.values, 0.0):
                    result[where] = part
                failures += _failures(job, solved)
            if num_failed and errors == "raise":
                raise ConvergenceError(_sentence(num_failed, failures), result)
    if num_failed:
        warnings.warn(FailedPairsWarning(_sentence(num_failed, failures), failures), stacklevel=3)
    return result, num_new


def _failures(job: Job, solved: Solved) -> list[tuple[int, int, str]]:
    if not solved.num_failed or solved.status is None:
        return []
    i, j = job.plan.pairs(solved.block)
    return [(int(i[k]), int(j[k]), str(Status(int(solved.status[k])))) for k in solved.status.nonzero()[0]]


def _sentence(num_failed: int, failures: Sequence[tuple[int, int, str]]) -> str:
    named = "; ".join(f"({i}, {j}): {message}" for i, j, message in failures[:_NUM_NAMED])
    more = f" The first: {named}." if named else " DistanceStore.failures() lists them."
    return f"{num_failed} pairs have no distance, also not from a graph, and are NaN.{more}"
