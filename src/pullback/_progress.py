"""Progress bars, on a terminal or in a notebook alone: a task is a block ``with progress(…)`` or a function
``@progress(…)``. Inside a task further ones show nothing. Tasks without a known end count the points they decode."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any

from tqdm import tqdm

# Seconds before a bar shows: what ends sooner needs none.
_DELAY = 2.0
_SHOWN: list[tqdm[Any]] = []


def is_watched() -> bool:
    """Whether somebody is looking: never in a log file, nor with the variable ``TQDM_DISABLE=1``."""
    if os.environ.get("TQDM_DISABLE", "0") not in ("", "0"):
        return False
    return "ipykernel" in sys.modules or (sys.stderr is not None and sys.stderr.isatty())


@contextlib.contextmanager
def progress(what: str, total: int | None = None, unit: str = " points") -> Iterator[tqdm[Any]]:
    """Shows a bar while the block or function runs, unless one is shown already or nobody is looking.

    With a `total` the block calls ``bar.update(n)``; without one, decoded points are counted.
    """
    shows = is_watched() and not _SHOWN
    look: dict[str, Any] = {"unit": unit, "unit_scale": bool(unit), "delay": _DELAY, "leave": False}
    with tqdm(total=total, desc=what, disable=not shows, file=sys.stderr, **look) as bar:
        if shows:
            _SHOWN.append(bar)
        try:
            yield bar
        finally:
            if shows:
                _SHOWN.clear()


def decoded(num_points: int) -> None:
    """Tells the task that runs, if it has no known end, that points were decoded."""
    if _SHOWN and _SHOWN[0].total is None:
        _SHOWN[0].update(num_points)
