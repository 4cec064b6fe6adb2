"""A rectangle of the latent plane in pixels, and functions of codes evaluated on it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pullback._decoders.contract import as_codes
from pullback._progress import progress

Bounds = tuple[float, float, float, float]


def extent(codes: Tensor | None, margin: float = 0.25) -> Bounds:
    """The rectangle (left, right, bottom, top) of the codes, widened by a share of its sides."""
    if codes is None:
        raise ValueError("A plot needs codes= or bounds=(left, right, bottom, top) to know what to draw.")
    if codes.ndim != 2 or codes.shape[-1] != 2:
        raise ValueError(f"Plots draw codes of shape (n, 2), not {tuple(codes.shape)}; choose two dimensions first.")
    codes = as_codes(codes, a_set=True, finite=True)
    low, high = codes.detach().amin(0).cpu(), codes.detach().amax(0).cpu()
    margins = margin * (high - low).clamp_min(1e-3)
    (left, bottom), (right, top) = (low - margins).tolist(), (high + margins).tolist()
    return left, right, bottom, top


def grid(bounds: Bounds, resolution: int, like: Tensor) -> Tensor:
    """Centers of square pixels, of shape ``(rows, columns, 2)``; `resolution` of them along the longer side."""
    left, right, bottom, top = bounds
    pixel = max(right - left, top - bottom) / resolution
    columns, rows = (max(1, round(side / pixel)) for side in (right - left, top - bottom))
    x = left + (torch.arange(columns) + 0.5) * (right - left) / columns
    y = bottom + (torch.arange(rows) + 0.5) * (top - bottom) / rows
    return torch.stack(torch.meshgrid(x, y, indexing="xy"), -1).to(like)


@progress("pixels")
def evaluate(f: Callable[[Tensor], Tensor], grid: Tensor, chunk: int = 4096) -> Tensor:
    """Values ``(rows, columns)`` of a function of codes ``(n, 2)``."""
    with torch.no_grad():
        values = torch.cat([f(z) for z in grid.reshape(-1, 2).split(chunk)])
    return values.reshape(grid.shape[:-1]).double().cpu()
