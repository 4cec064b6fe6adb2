"""Lines that say what an experiment is doing; they go to the error stream and are no part of its results."""

from __future__ import annotations

import sys


def say(experiment: str, what: str) -> None:
    """Prints one line."""
    print(f"{experiment}: {what}", file=sys.stderr, flush=True)
