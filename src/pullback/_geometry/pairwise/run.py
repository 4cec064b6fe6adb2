"""Solves the blocks of a job with the engine that was asked for, shows how far it is, and says what failed."""

from __future__ import annotations

import os
import re
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from pullback._geometry.pairwise.engines import Solved, in_pool, in_process, on_dask
from pullback._geometry.pairwise.job import Job
from pullback._geometry.pairwise.plan import Block
from pullback._geometry.pairwise.store import BlockWriter
from pullback._options import check_options
from pullback._progress import progress
from pullback._solvers.base import ConvergenceError, Status

# Seconds of work from which on a pool of processes is started by itself: each of them imports torch, which takes
# seconds.
_POOL_PAYS = 15.0
_NUM_NAMED = 3


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
        return in_process(job, blocks, writer) if num_jobs == 1 else in_pool(job, blocks, writer, num_jobs)


def num_cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _pool_if_it_pays(job: Job, blocks: Sequence[Block], writer: BlockWriter | None) -> Iterator[Solved]:
    """In this process until the rest is known to take long."""
    began = time.perf_counter()
    for done, solved in enumerate(in_process(job, blocks, writer), 1):
        yield solved
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
    for solved in _with_progress(job, engine.solve(job, blocks, writer), blocks):
        num_failed, num_new = num_failed + solved.num_failed, num_new + solved.is_new
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


def _with_progress(job: Job, solved: Iterator[Solved], blocks: Sequence[Block]) -> Iterator[Solved]:
    """Shows pairs, rate and time left."""
    total, failed = sum(len(job.plan.pairs(block)[0]) for block in blocks), 0
    with progress("distances", total, unit=" pairs") as bar:
        for one in solved:
            failed += one.num_failed
            bar.update(one.num_pairs)
            if failed:
                bar.set_postfix(failed=failed)
            yield one
