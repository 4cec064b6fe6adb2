"""Lines that say what an experiment is doing; they go to the error stream and are no part of its results."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from tqdm import tqdm

# Seconds without a line after which one says what is still being done: on a terminal, and in a file.
PATIENCE, PATIENCE_IN_FILES = 5.0, 30.0


class _Last:
    """What was said last, and when."""

    text = ""
    begun = spoken = 0.0


def say(experiment: str, what: str) -> None:
    """Prints one line."""
    _Last.text = f"{experiment}: {what}"
    _Last.begun = time.monotonic()
    _print(_Last.text)


@contextmanager
def never_silent() -> Iterator[None]:
    """Inside, the last line is repeated with the time it has taken whenever nothing was said for some seconds."""
    _Last.text, _Last.spoken = "", time.monotonic()
    done = threading.Event()
    patience = PATIENCE if sys.stderr.isatty() else PATIENCE_IN_FILES
    thread = threading.Thread(target=_repeat, args=(done, patience), daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _repeat(done: threading.Event, patience: float) -> None:
    while not done.wait(min(1.0, patience / 2)):
        now = time.monotonic()
        if _Last.text and now - _Last.spoken >= patience:
            _print(f"{_Last.text}, {now - _Last.begun:.0f} s")


def _print(line: str) -> None:
    _Last.spoken = time.monotonic()
    # Not through a progress bar.
    tqdm.write(line, file=sys.stderr)
    sys.stderr.flush()
