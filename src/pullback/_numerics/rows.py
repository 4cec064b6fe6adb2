"""Dataclasses whose fields are tensors with one entry a curve: taking, putting and joining curves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any, TypeVar

import torch
from torch import Tensor

Rows = TypeVar("Rows", bound=Any)


def take(rows: Rows, index: Tensor) -> Rows:
    """The curves at an index or mask."""
    index = index.nonzero()[:, 0] if index.dtype == torch.bool else index
    return type(rows)(*(getattr(rows, f.name)[index] for f in fields(rows)))


def put(rows: Any, index: Tensor, other: Any) -> None:
    """Overwrites the curves at an index or mask."""
    for f in fields(rows):
        getattr(rows, f.name)[index] = getattr(other, f.name)


def merge(mask: Tensor, first: Rows, second: Rows) -> Rows:
    """Curve by curve the first where the mask is true, else the second, without waiting for the device."""

    def pick(a: Tensor, b: Tensor) -> Tensor:
        return torch.where(mask.reshape(-1, *[1] * (a.ndim - 1)), a, b)

    return type(first)(*(pick(getattr(first, f.name), getattr(second, f.name)) for f in fields(first)))


def concatenate(parts: Sequence[Rows]) -> Rows:
    """All curves of several parts, in order."""
    first = parts[0]
    if len(parts) == 1:
        return first
    return type(first)(*(torch.cat([getattr(part, f.name) for part in parts]) for f in fields(first)))
