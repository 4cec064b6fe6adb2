"""What a stored result depends on, so that a run never adds to the result of another.

A metric enters as a hash. Pickles will not do: their bytes differ between processes for the same model. So the object
is walked, and what decides its values is hashed: tensors, numbers, names of types, and the code of functions with what
they refer to. Functions of installed packages count by their name, as their version is recorded beside the hash.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
import platform
import sysconfig
import types
from collections.abc import Iterable, Iterator
from enum import Enum
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np
import torch
from scipy import sparse
from torch import Tensor, nn

from pullback._decoders.contract import unvalidated
from pullback._geometry.pairwise.plan import Job

# Of the layout of the store.
_FORMAT = 1
_NUM_PROBES = 8
# Of the probes: processors round differently, and other weights differ by much more.
_PROBE_RTOL = 1e-6
_OTHERS = {
    "codes": "the codes are others",
    "metric": "the metric has other weights or settings",
    "init": "the paths start elsewhere (init)",
    "pairs": "the pairs are others",
}
_PLAIN = (type(None), bool, int, float, complex, str, torch.dtype, torch.device, torch.Size, np.generic, Enum)
# What every module has by itself: hooks and the like, and the dictionaries of its state, which is hashed by name.
_EVERY_MODULE = frozenset(vars(nn.Module()))
_INSTALLED = tuple({sysconfig.get_paths()[name] for name in ("purelib", "platlib", "stdlib")})


def manifest(job: Job) -> dict[str, Any]:
    """The facts that decide the numbers of a job, as JSON can hold them."""
    plan = job.plan
    return {
        "format": _FORMAT,
        "shape": list(plan.shape),
        "block_size": plan.size,
        "symmetric": plan.symmetric,
        "pairs": "all" if plan.listed is None else fingerprint(*plan.listed),
        "dtype": str(job.first.dtype).removeprefix("torch."),
        "codes": fingerprint(job.first, job.second),
        "metric": fingerprint(job.metric),
        "metric_type": type(job.metric).__name__,
        "probe": _probe(job),
        "solver": repr(job.solver),
        "init": "straight line" if job.init is None else fingerprint(job.init),
        "batch_size": job.batch_size,
        "versions": {name: _version(name) for name in ("pullback", "torch", "numpy", "python")},
    }


def difference(stored: dict[str, Any], present: dict[str, Any]) -> str | None:
    """A sentence on the first fact in which two manifests differ; None if they agree."""
    stored, present = (facts | facts.get("versions", {}) for facts in (stored, present))
    for key, here in present.items():
        there = stored.get(key)
        if key == "probe":
            # What is not finite is stored as None, and read as NaN.
            old, new = (np.array(values or [], float) for values in (there, here))
            if not np.allclose(old, new, rtol=_PROBE_RTOL, equal_nan=True):
                return "the metric measures steps between the codes differently, although its weights are the same"
        elif key != "versions" and there != here:
            return _OTHERS.get(key, f"{key} is {here} here and was {there} there")
    return None


def _probe(job: Job) -> list[float | None]:
    """A few squared steps, by which a metric is recognized even if its weights are out of sight."""
    finite = job.first[job.first.isfinite().all(-1)][: _NUM_PROBES + 1]
    if len(finite) < 2:
        return []
    with torch.no_grad(), unvalidated():
        ds2 = job.metric.ds2(finite[:-1], finite[1:])
    return [x if np.isfinite(x) else None for x in ds2.double().cpu().tolist()]


def _version(name: str) -> str:
    if name == "python":
        return ".".join(platform.python_version_tuple()[:2])
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def fingerprint(*things: Any) -> str:
    """A hash of everything that the values of some objects depend on."""
    digest, seen = hashlib.sha256(), {}
    for thing in things:
        for piece in _walk(thing, seen):
            digest.update(piece)
    return digest.hexdigest()


def _walk(thing: Any, seen: dict[int, Any]) -> Iterator[bytes]:
    """An object and all it refers to, each part once."""
    if isinstance(thing, bytes):
        yield thing
    elif isinstance(thing, _PLAIN):
        yield repr(thing).encode() + b"\0"
    elif id(thing) in seen:
        yield b"again\0"
    else:
        # Keeping the object keeps its address from being used again. Equal tuples may be one object or two.
        if not isinstance(thing, tuple):
            seen[id(thing)] = thing
        yield f"{type(thing).__module__}.{type(thing).__qualname__}".encode() + b"\0"
        for part in _parts(thing):
            yield from _walk(part, seen)


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
        own = {k: v for k, v in _attributes(thing).items() if k not in _EVERY_MODULE}
        return repr(thing), dict(thing.state_dict()), dict(thing.named_children()), own
    if isinstance(thing, dict):
        return [part for key in sorted(thing, key=repr) for part in (key, thing[key])]
    if isinstance(thing, set | frozenset):
        return sorted(map(repr, thing))
    if isinstance(thing, list | tuple):
        return thing
    if isinstance(thing, functools.partial):
        return thing.func, thing.args, thing.keywords
    if isinstance(thing, types.MethodType):
        return thing.__func__, thing.__self__
    if isinstance(thing, types.CodeType):
        # Instructions and constants, without the places they were read from.
        return thing.co_code, thing.co_names, [c if isinstance(c, types.CodeType) else repr(c) for c in thing.co_consts]
    if isinstance(thing, types.FunctionType) and not thing.__code__.co_filename.startswith(_INSTALLED):
        found = inspect.getclosurevars(thing)
        return thing.__code__, thing.__defaults__, thing.__kwdefaults__, found.nonlocals, found.globals
    if dataclasses.is_dataclass(thing) and not isinstance(thing, type):
        return [getattr(thing, f.name) for f in dataclasses.fields(thing)]
    if isinstance(thing, types.ModuleType) or callable(thing):
        return [getattr(thing, name, None) for name in ("__name__", "__module__", "__qualname__")]
    return [_attributes(thing)]


def _attributes(thing: Any) -> dict[str, Any]:
    """Of an object itself, without what is computed from the others."""
    own, kind = getattr(thing, "__dict__", {}), type(thing)
    return {k: v for k, v in own.items() if not isinstance(getattr(kind, k, None), functools.cached_property)}
