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
    return _refinement(nodes.shape[1] - 1, factor, nodes.dtype, nodes.device) @ nodes


@functools.lru_cache(maxsize=64)
def _refinement(num_segments: int, factor: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    t = np.linspace(0, 1, num_segments + 1)
    weights = interpolate.CubicSpline(t, np.eye(num_segments + 1))(np.linspace(0, 1, factor * num_segments + 1))
    weights[::factor] = np.eye(num_segments + 1)  # the nodes themselves, to the last digit
    with torch.inference_mode(False):
        return torch.as_tensor(weights, dtype=dtype, device=device)
