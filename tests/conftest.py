"""Settings of every test: one thread, fixed seeds, and the shapes in public signatures checked at every call.

The annotations ``Float[Tensor, "*batch d"]`` are documentation for users and are never evaluated in their programs.
Here jaxtyping and beartype check them on the way in and on the way out. A call that breaks an annotation must be
refused by the library itself, with its own sentence; only if it lets the call through does the checker's complaint fail
the test.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import pkgutil
import re
import sys
from collections.abc import Callable
from types import ModuleType

os.environ.setdefault("MPLBACKEND", "Agg")

import pytest
import torch
from beartype import BeartypeConf, beartype
from jaxtyping import TypeCheckError, jaxtyped

import pullback

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def _modules(package: ModuleType) -> list[ModuleType]:
    names = [m.name for m in pkgutil.walk_packages(package.__path__, package.__name__ + ".")]
    return [package, *(importlib.import_module(name) for name in names if not name.endswith("__main__"))]


def _has_shapes(function: Callable[..., object]) -> bool:
    return any(re.search(r"\[Tensor,|Code|Points", str(annotation)) for annotation in function.__annotations__.values())


@functools.cache
def _checked(function: Callable[..., object]) -> Callable[..., object]:
    # a whole number is as good as a float (PEP 484)
    strict = jaxtyped(function, typechecker=beartype(conf=BeartypeConf(is_pep484_tower=True)))

    @functools.wraps(function)
    def call(*args: object, **kwargs: object) -> object:
        try:
            return strict(*args, **kwargs)
        except TypeCheckError as violation:
            function(*args, **kwargs)  # raises the library's own error, if it has one
            raise violation

    return call


def _check_shapes(package: ModuleType) -> None:
    """Puts the checked version in the place of every annotated function, wherever the package refers to it."""
    for module in _modules(package):
        for name, member in list(vars(module).items()):
            if inspect.isfunction(member) and member.__module__.startswith(package.__name__) and _has_shapes(member):
                setattr(module, name, _checked(member))
            elif inspect.isclass(member) and member.__module__ == module.__name__:
                for attribute, method in list(vars(member).items()):
                    if inspect.isfunction(method) and _has_shapes(method):
                        setattr(member, attribute, _checked(method))


_check_shapes(sys.modules[pullback.__name__])
