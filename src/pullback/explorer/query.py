"""The body of a request, checked: what is used later is a known word, a finite number or the index of a code."""

from __future__ import annotations

import json
import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, NoReturn

from torch import Tensor

from pullback.explorer.plane import Plane
from pullback.explorer.scene import Scene
from pullback.explorer.security import Refused

# Coordinates beyond this many times the picture are not a click.
MAX_REACH = 100.0


def _constant(word: str) -> NoReturn:
    raise Refused(422, f"{word} is not a number. Send finite numbers.")


def parse(body: bytes) -> dict[str, Any]:
    """The JSON object of a body."""
    try:
        value = json.loads(body, parse_constant=_constant)
    except (ValueError, RecursionError) as error:
        raise Refused(400, "The body is not JSON.") from error
    if not isinstance(value, dict):
        raise Refused(422, "The body must be a JSON object.")
    return value


@dataclass(frozen=True, eq=False)
class Query:
    """What a request asks of a scene.

    Attributes:
        scene: what is asked.
        body: the fields of the request.
    """

    scene: Scene
    body: dict[str, Any]

    def word(self, name: str, known: Collection[str]) -> str:
        """One of the known words."""
        value = self.body.get(name)
        if not isinstance(value, str) or value not in known:
            raise Refused(422, f"{name} must be one of {', '.join(known)}.")
        return value

    def number(self, name: str, low: float, high: float) -> float:
        """A finite number between two others."""
        return _number(self.body.get(name), name, low, high)

    @property
    def metric(self) -> str:
        """The key of a metric."""
        return self.word("metric", self.scene.metrics)

    def plane(self) -> Plane:
        """The plane: ``axes``, two coordinates or null for the most used directions, through the code ``at``."""
        axes, d = self.body.get("axes"), self.scene.codes.shape[1]
        if axes is not None:
            if (
                not isinstance(axes, list)
                or len(axes) != 2
                or not all(_is_index(i, d) for i in axes)
                or axes[0] == axes[1]
            ):
                raise Refused(422, f"axes must be two different whole numbers from 0 to {d - 1}, or null.")
            axes = (axes[0], axes[1])
        aspect = _number(self.body.get("aspect", 1.0), "aspect", 0.2, 5.0)
        return self.scene.plane(axes, self._index(self.body.get("at", 0), "at"), round(aspect, 1))

    def code(self, name: str, plane: Plane) -> Tensor:
        """A code: the index of one, or the two coordinates of a point in the plane."""
        value = self.body.get(name)
        if not isinstance(value, list):
            return self.scene.codes[self._index(value, name)]
        if len(value) != 2:
            raise Refused(422, f"{name} must be two coordinates, or the index of a code.")
        left, right, bottom, top = self.scene.bounds(plane)
        reach = MAX_REACH * max(right - left, top - bottom)
        middle = (left + right) / 2, (bottom + top) / 2
        xy = [_number(x, name, m - reach, m + reach) for x, m in zip(value, middle, strict=True)]
        return plane.lift(self.scene.codes.new_tensor(xy))

    def indices(self, name: str) -> list[int]:
        """Some different codes."""
        value = self.body.get(name)
        if not isinstance(value, list) or len(value) < 2:
            raise Refused(422, f"{name} must be a list of at least two indices of codes.")
        return sorted({self._index(i, name) for i in value})

    def _index(self, value: Any, name: str) -> int:
        if not _is_index(value, len(self.scene.codes)):
            raise Refused(422, f"{name} must be the index of a code, from 0 to {len(self.scene.codes) - 1}.")
        return value


def _is_index(value: Any, count: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < count


def _number(value: Any, name: str, low: float, high: float) -> float:
    # A whole number may be too large for a float: compared, it is refused without being converted.
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not low <= value <= high
        or not math.isfinite(value)
    ):
        raise Refused(422, f"{name} must be a finite number from {low:.4g} to {high:.4g}.")
    return float(value)
