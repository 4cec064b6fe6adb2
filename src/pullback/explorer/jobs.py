"""One computation at a time, with a time limit; a newer one of the same kind takes the place of an older one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from torch import nn

Result = TypeVar("Result")


class Superseded(Exception):
    """A newer request of the same kind has arrived; nobody waits for this one."""


class TimeLimit(Exception):
    """The computation took longer than it may."""


class Job:
    """One computation: whether it is still wanted, and until when it may run."""

    def __init__(self) -> None:
        self.superseded = False
        self.deadline = float("inf")

    def check(self) -> None:
        """Raises if the computation should stop."""
        if self.superseded:
            raise Superseded("A newer request has taken the place of this one.")
        if time.monotonic() > self.deadline:
            raise TimeLimit(
                "The computation ran into the time limit and was stopped. Choose points nearer to each other, or fewer."
            )


class Jobs:
    """A queue with one worker thread. In each lane only the newest job is worth finishing.

    Python cannot stop a thread from outside, so a running job stops itself: `checkpoint` is called whenever the
    decoder is.

    Args:
        limit: seconds after which a job stops.
    """

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="explorer")
        self._newest: dict[str, Job] = {}
        self._running: Job | None = None

    async def run(self, lane: str, work: Callable[[], Result]) -> Result:
        """The result of the work. Older jobs of the lane raise `Superseded` for those who wait for them."""
        job = Job()
        older = self._newest.get(lane)
        if older is not None:
            older.superseded = True
        self._newest[lane] = job
        return await asyncio.wrap_future(self._worker.submit(self._do, job, work))

    def checkpoint(self) -> None:
        """Raises if the running job should stop; does nothing when none is running."""
        if self._running is not None:
            self._running.check()

    def close(self) -> None:
        """Stops what is running and takes no more jobs."""
        for job in self._newest.values():
            job.superseded = True
        self._worker.shutdown(wait=False, cancel_futures=True)

    def _do(self, job: Job, work: Callable[[], Result]) -> Result:
        job.deadline = time.monotonic() + self.limit
        job.check()
        self._running = job
        try:
            return work()
        finally:
            self._running = None


class Guarded(nn.Module):
    """A decoder that calls a checkpoint before it decodes, and is otherwise the one it was given."""

    def __init__(self, decoder: Callable[..., Any], checkpoint: Callable[[], None]) -> None:
        super().__init__()
        self.decoder, self.checkpoint = decoder, checkpoint

    def forward(self, z: Any) -> Any:
        """What the decoder returns."""
        self.checkpoint()
        return self.decoder(z)
