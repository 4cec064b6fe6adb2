"""A hash of what a result depends on: weights, settings and code of a metric, a solver or a start.

Pickles will not do: their bytes differ between processes for the same model. So the object is walked, and what decides
its values is hashed: tensors, numbers, names of types, and the code of functions with what they refer to. Functions of
installed packages count by their name, as their version is recorded beside the hash.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
import sysconfig
import types
from collections.abc import Iterable
from enum import Enum
from typing import Any

import numpy as np
import torch
from scipy import sparse
from torch import Tensor, nn

_PLAIN = (type(None), bool, int, float, complex, str, torch.dtype, torch.device, torch.Size, np.generic, Enum)
# What every module has by itself: hooks and the like, and the dictionaries of its state, which is hashed by name.
_EVERY_MODULE = frozenset(vars(nn.Module()))
_INSTALLED = tuple({sysconfig.get_paths()[name] for name in ("purelib", "platlib", "stdlib")})


def fingerprint(*things: Any) -> str:
    """A hash of everything that the values of some objects depend on.

    >>> network = nn.Linear(2, 3)
    >>> before = fingerprint(lambda z: network(z))
    >>> before == fingerprint(lambda z: network(z))
    True
    >>> _ = nn.init.zeros_(network.weight)
    >>> before == fingerprint(lambda z: network(z))
    False
    """
    walk = _Walk()
    for thing in things:
        walk.visit(thing)
    return walk.digest.hexdigest()


class _Walk:
    """Feeds a hash with an object and all it refers to, each part once."""

    def __init__(self) -> None:
        self.digest = hashlib.sha256()
        self.seen: dict[int, Any] = {}

    def visit(self, thing: Any) -> None:
        if isinstance(thing, bytes):
            return self.digest.update(thing)
        if isinstance(thing, _PLAIN):
            return self._name(repr(thing))
        if id(thing) in self.seen:
            return self._name("again")
        # Keeping the object keeps its address from being used again. Equal tuples may be one object or two.
        if not isinstance(thing, tuple):
            self.seen[id(thing)] = thing
        self._name(f"{type(thing).__module__}.{type(thing).__qualname__}")
        for part in _parts(thing):
            self.visit(part)
        return None

    def _name(self, text: str) -> None:
        self.digest.update(text.encode() + b"\0")


def _parts(thing: Any) -> Iterable[Any]:
    """What an object's values depend on."""
    if isinstance(thing, Tensor):
        flat = thing.detach().cpu().contiguous().reshape(-1)
        return thing.dtype, tuple(thing.shape), flat.view(torch.uint8).numpy().tobytes()
    if isinstance(thing, np.ndarray):
        return str(thing.dtype), thing.shape, np.ascontiguousarray(thing).tobytes()
    if sparse.issparse(thing):
        matrix = sparse.csr_array(thing)
        return matrix.shape, matrix.indptr, matrix.indices, matrix.data
    if isinstance(thing, nn.Module):
        own = {k: v for k, v in vars(thing).items() if k not in _EVERY_MODULE and not _is_cache(thing, k)}
        return repr(thing), dict(thing.state_dict()), dict(thing.named_children()), own
    if isinstance(thing, dict):
        return [part for key in sorted(thing, key=repr) for part in (key, thing[key])]
    if isinstance(thing, set | frozenset):
        return sorted(map(repr, thing))
    if isinstance(thing, list | tuple):
        return thing
    return _callable_parts(thing) if callable(thing) and not _has_fields(thing) else _field_parts(thing)


def _callable_parts(function: Any) -> Iterable[Any]:
    if isinstance(function, functools.partial):
        return function.func, function.args, function.keywords
    if isinstance(function, types.MethodType):
        return function.__func__, function.__self__
    if not isinstance(function, types.FunctionType) or function.__code__.co_filename.startswith(_INSTALLED):
        return [getattr(function, "__module__", None), getattr(function, "__qualname__", None)]
    found = inspect.getclosurevars(function)
    return _code(function.__code__), function.__defaults__, function.__kwdefaults__, found.nonlocals, found.globals


def _code(code: types.CodeType) -> list[Any]:
    """The instructions of a function and its constants, without the places they were read from."""
    constants = [_code(c) if isinstance(c, types.CodeType) else repr(c) for c in code.co_consts]
    return [code.co_code, code.co_names, constants]


def _has_fields(thing: Any) -> bool:
    return dataclasses.is_dataclass(thing) and not isinstance(thing, type)


def _field_parts(thing: Any) -> Iterable[Any]:
    if isinstance(thing, types.ModuleType | type):
        return [thing.__name__]
    if _has_fields(thing):
        return [getattr(thing, f.name) for f in dataclasses.fields(thing)]
    return [{k: v for k, v in getattr(thing, "__dict__", {}).items() if not _is_cache(thing, k)}]


def _is_cache(thing: Any, name: str) -> bool:
    return isinstance(getattr(type(thing), name, None), functools.cached_property)
