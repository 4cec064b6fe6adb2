"""Where blocks are solved: in this process, in a pool of processes, or on the workers of dask.

Every engine takes a job and blocks and yields each block when it is finished, in any order. With a writer the process
that solved a block writes it; without one the values come back.
"""

from __future__ import annotations

import contextlib
import itertools
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pullback._geometry.pairwise.job import Job, dumps, load_file, loads
from pullback._geometry.pairwise.plan import Block
from pullback._geometry.pairwise.store import BlockWriter

# Pools that are started again after the system has killed one of their processes.
_MAX_RESTARTS = 3
# Blocks that dask has at hand for each of its threads: the next one is there when one is finished.
_PER_THREAD = 2
# A process solves one block at a time, even if dask gave it several threads.
_SOLVING = threading.Lock()


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


def in_process(job: Job, blocks: Sequence[Block], writer: BlockWriter | None) -> Iterator[Solved]:
    """One after the other."""
    for block in blocks:
        yield solve(job, block, writer)


def in_pool(
    job: Job, blocks: Sequence[Block], writer: BlockWriter | None, num_jobs: int, devices: Sequence[str] | None = None
) -> Iterator[Solved]:
    """In processes of joblib; with `devices`, each block on the next of them. A killed process costs its block only."""
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
            except _terminated() as error:
                if attempt == _MAX_RESTARTS:
                    raise RuntimeError(
                        f"Processes were killed {attempt + 1} times, perhaps for lack of memory. Use fewer (n_jobs), "
                        "or smaller batches (batch_size). With out= finished blocks are kept, and the same call goes "
                        "on."
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


def _terminated() -> type[Exception]:
    from joblib.externals.loky.process_executor import TerminatedWorkerError

    return TerminatedWorkerError


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
