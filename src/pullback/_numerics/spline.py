"""Cubic splines through the nodes of curves, as matrices."""

from __future__ import annotations

import functools

import numpy as np
import torch
from scipy import interpolate
from torch import Tensor


def refine(nodes: Tensor, factor: int) -> Tensor:
    """Nodes of the cubic spline through ``nodes`` on `factor` times as many segments.

    Not-a-knot ends keep order four up to the end points; natural ones, free of curvature, would lose it there.
    """
    slopes = _slopes(nodes.shape[1] - 1, nodes.dtype, nodes.device) @ nodes
    ends = torch.stack([nodes[:, :-1], nodes[:, 1:], slopes[:, :-1], slopes[:, 1:]], 2)
    inner = _hermite(factor, nodes.dtype, nodes.device) @ ends
    return torch.cat([inner.flatten(1, 2), nodes[:, -1:]], 1)


@functools.lru_cache(maxsize=64)
def _slopes(num_segments: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """From nodes to the derivatives of the spline by their index."""
    index = np.arange(num_segments + 1.0)
    with torch.inference_mode(False):
        return torch.as_tensor(
            interpolate.CubicSpline(index, np.eye(num_segments + 1))(index, 1), dtype=dtype, device=device
        )


@functools.lru_cache(maxsize=64)
def _hermite(factor: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """From both ends of a segment and the slopes there to `factor` points of the cubic, the first end among them."""
    x = np.arange(factor) / factor
    right = x * x * (3 - 2 * x)
    basis = np.stack([1 - right, right, x * (1 - x) ** 2, x * x * (x - 1)], 1)
    with torch.inference_mode(False):
        return torch.as_tensor(basis, dtype=dtype, device=device)
