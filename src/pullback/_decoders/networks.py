"""The networks inside a decoder, as far as Python can see them, and what was learned of it, for as long as it lives."""

from __future__ import annotations

import dis
import functools
import inspect
import weakref
from collections.abc import Iterator
from types import CellType, CodeType
from typing import Any

from torch import Tensor, nn

# A lambda that calls a function that calls a partial: deeper than this nobody was seen to hide a network.
_DEPTH = 4
_KNOWN: dict[int, dict[Any, Any]] = {}


def memory(thing: object) -> dict[Any, Any]:
    """What is known of an object, for as long as it lives. A bound method counts as its object and its function."""
    owner, part = (thing.__self__, thing.__func__) if inspect.ismethod(thing) else (thing, None)
    if id(owner) not in _KNOWN:
        known = _KNOWN.setdefault(id(owner), {})
        try:
            weakref.finalize(owner, _KNOWN.pop, id(owner), None).atexit = False
        except TypeError:
            # It cannot be watched, so it is kept: its number must not become another object's.
            known["owner"] = owner
    return _KNOWN[id(owner)].setdefault(part, {})


def networks(decoder: object) -> list[nn.Module]:
    """The modules that a decoder refers to: itself, its object, its closure, its globals, its arguments, its fields."""
    known = memory(decoder)
    found = [network() for network in known.get("networks", [lambda: None])]
    if None in found:
        found = list(dict.fromkeys(_networks(decoder, _DEPTH)))
        known["networks"] = [weakref.ref(network) for network in found]
    return found


def reference(like: object) -> Tensor | None:
    """A tensor of the dtype and device that a decoder, metric or module works in; None if its networks disagree."""
    if isinstance(like, Tensor):
        return like if like.is_floating_point() else None
    inner = None if isinstance(like, nn.Module) else getattr(like, "decoder", None)
    if inner is not None:
        return reference(inner)
    # Buffers (a prior, a support) follow the parameters of what they are wrapped around, not the other way round.
    for kind in ("parameters", "buffers"):
        tensors = [filter(Tensor.is_floating_point, getattr(network, kind)()) for network in networks(like)]
        if known := [x for x in (next(each, None) for each in tensors) if x is not None]:
            return known[0] if len({(x.dtype, x.device) for x in known}) == 1 else None
    return None


def _networks(thing: Any, depth: int) -> Iterator[nn.Module]:
    if isinstance(thing, nn.Module):
        yield thing
    if depth > 0:
        for part in _parts(thing):
            yield from _networks(part, depth - 1)


def _parts(thing: Any) -> list[Any]:
    if isinstance(thing, nn.Module):
        fields = [value for module in thing.modules() for value in vars(module).values()]
        return [x for x in fields if inspect.isroutine(x) or isinstance(x, (tuple, functools.partial))]
    if isinstance(thing, tuple):
        return [x for x in thing if callable(x) and not inspect.isclass(x)]
    if isinstance(thing, functools.partial):
        return [thing.func, *thing.args, *thing.keywords.values()]
    if inspect.ismethod(thing):
        owner = thing.__self__
        return [owner] if isinstance(owner, nn.Module) else [thing.__func__, *_fields(owner)]
    if inspect.isfunction(thing):
        cells = [cell.cell_contents for cell in thing.__closure__ or () if cell != CellType()]  # not the empty ones
        known = [thing.__globals__[name] for name in _globals(thing.__code__) if name in thing.__globals__]
        own = [x for x in known if not inspect.isfunction(x) or x.__globals__ is thing.__globals__]
        return [*cells, *own, *(thing.__defaults__ or ()), *(thing.__kwdefaults__ or {}).values()]
    return _fields(thing) if callable(thing) and not inspect.isclass(thing) else []


def _fields(thing: Any) -> list[Any]:
    return list(getattr(thing, "__dict__", {}).values())


def _globals(code: CodeType) -> list[str]:
    """The names a function looks up in its module, also from the functions inside it."""
    own = [step.argval for step in dis.get_instructions(code) if step.opname == "LOAD_GLOBAL"]
    return own + [name for inner in code.co_consts if isinstance(inner, CodeType) for name in _globals(inner)]
