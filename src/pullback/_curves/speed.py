"""Running through a curve at another speed: parameters that cut it into equally long parts."""

from __future__ import annotations

import torch
from torch import Tensor

from pullback._typing import Float


def equal_spacing(steps: Float[Tensor, "*batch m"], n: int) -> Float[Tensor, "*batch n"]:
    """The n parameters in [0, 1] that cut a curve into equally long parts, given the lengths of its m uniform segments;
    uniform for a curve of no length."""
    resolution = torch.finfo(steps.dtype)
    steps = steps + resolution.eps * steps.mean(-1, keepdim=True) + resolution.tiny
    s = torch.nn.functional.pad(steps.cumsum(-1), (1, 0))
    s = s / s[..., -1:]
    u = torch.linspace(0, 1, n, dtype=s.dtype, device=s.device).expand(*s.shape[:-1], n).contiguous()
    i = (torch.searchsorted(s, u, right=True) - 1).clamp(0, steps.shape[-1] - 1)
    before, after = s.gather(-1, i), s.gather(-1, i + 1)
    return (i + (u - before) / (after - before)) / steps.shape[-1]


def mixed_steps(
    lengths: Float[Tensor, "*batch m"], euclidean: Float[Tensor, "*batch m"], share: float
) -> Float[Tensor, "*batch m"]:
    """Steps as parts of the whole, of which the Euclidean lengths make up `share`: none is then passed in no time."""
    first, second = (x / x.sum(-1, keepdim=True).clamp_min(torch.finfo(x.dtype).tiny) for x in (lengths, euclidean))
    return torch.lerp(first, second, share)
