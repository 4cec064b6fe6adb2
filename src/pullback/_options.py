"""Options that make no sense are refused by their names, in one place."""

from __future__ import annotations

import re
from numbers import Integral, Real
from typing import Any

_COUNTS = re.compile(r"(num|n|max|min)_|.*_size$|resolution$")


def check_options(*, least: int = 1, **options: Any) -> None:
    """Refuses options that are no positive numbers, and counts that are not whole or below `least`.

    None stands for a default and passes. Counts are told by their names: ``num_…``, ``max_…``, ``…_size`` and such.

    >>> check_options(rtol=1e-3, max_steps=0)
    Traceback (most recent call last):
    ValueError: max_steps must be a whole number, at least 1; got 0.
    """
    for name, value in options.items():
        if value is None:
            continue
        if _COUNTS.match(name):
            if not isinstance(value, Integral) or value < least:
                raise ValueError(f"{name} must be a whole number, at least {least}; got {value!r}.")
        elif not isinstance(value, Real) or not float(value) > 0:
            raise ValueError(f"{name} must be a positive number; got {value!r}.")
