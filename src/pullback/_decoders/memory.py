"""What was learned about an object, kept for as long as the object lives."""

from __future__ import annotations

import inspect
import threading
import weakref
from typing import Any


class Memory:
    """What is known per object, for as long as it lives. A bound method counts as its object and its function."""

    def __init__(self) -> None:
        self._known: dict[int, dict[object, Any]] = {}
        self._lock = threading.Lock()

    def get(self, thing: object, detail: object) -> Any:
        """What was remembered, or None."""
        owner, part = _owner(thing)
        return self._known.get(id(owner), {}).get((part, detail))

    def put(self, thing: object, detail: object, value: object) -> None:
        """Remembers a value until the object is gone."""
        owner, part = _owner(thing)
        with self._lock:
            if id(owner) not in self._known:
                self._known[id(owner)] = {}
                try:
                    weakref.finalize(owner, self._known.pop, id(owner), None).atexit = False
                except TypeError:
                    # It cannot be watched, so it is kept: its number must not become another object's.
                    self._known[id(owner)][None] = owner
            self._known[id(owner)][part, detail] = value


def _owner(thing: object) -> tuple[object, object]:
    return (thing.__self__, thing.__func__) if inspect.ismethod(thing) else (thing, None)
