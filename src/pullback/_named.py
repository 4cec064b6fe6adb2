"""Models that are named on the command line as MODULE:NAME."""

from __future__ import annotations

import inspect
import sys
from importlib import import_module
from typing import Any

from torch import nn

from pullback._metrics.base import Metric


def own(name: str) -> tuple[Any, bool]:
    """What a name such as ``my_module:make_decoder`` stands for, and whether a function had to be called to make it.

    A metric, a network or a function of codes is taken as it is; a function without arguments makes one.
    """
    module, _, attribute = name.partition(":")
    if not attribute:
        raise ValueError(f"Give the decoder as MODULE:NAME, such as my_module:make_decoder; got {name!r}.")
    # As `python -m` does: modules of the present folder come first.
    sys.path.insert(0, "")
    found: Any = import_module(module)
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise ValueError(f"Module {module} has no {attribute}. Name a function that makes a decoder, or a decoder.")
        found = getattr(found, part)
    if isinstance(found, Metric | nn.Module):
        return found, False
    parameters = inspect.signature(found).parameters.values()
    needed = [p for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return (found, False) if needed else (found(), True)
