"""Functions that divergences are made of, accurate where a naive formula cancels, and right to autodiff taken twice."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from pullback._numerics.special import digamma_excess


def excess(x: Tensor) -> Tensor:
    r""":math:`g(x) = e^x - 1 - x`, to full relative accuracy: by its series near 0."""
    small = x.abs() < 0.25
    near = torch.where(small, x, 0)
    return torch.where(small, near**2 * _excess_series(near), torch.expm1(x) - x)


def even_excess(x: Tensor) -> Tensor:
    r""":math:`g(-|x|)`, twice differentiable at 0 also to autodiff: the square is that of x."""
    small = x.abs() < 0.25
    near = torch.where(small, x, 0)
    return torch.where(small, near**2 * _excess_series(-near.abs()), torch.expm1(-x.abs()) + x.abs())


def _excess_series(x: Tensor) -> Tensor:
    r""":math:`g(x) / x^2`."""
    series = torch.zeros_like(x)
    for n in range(13 if x.dtype == torch.float64 else 8, 1, -1):
        series = x * series + 1 / math.factorial(n)
    return series


def log_gamma(x: Tensor) -> Tensor:
    """log Γ(x), whose first two derivatives are exact to rounding."""
    return _LogGamma.apply(x)  # pyright: ignore[reportReturnType]


def digamma(x: Tensor) -> Tensor:
    """ψ(x), whose derivative is exact to rounding."""
    return x.log() + digamma_excess(x)


class _LogGamma(Function):
    """The logarithm of the gamma function with the library's digamma for derivative."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return torch.lgamma(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0])
        ctx.save_for_forward(inputs[0])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad * digamma(ctx.saved_tensors[0])

    @staticmethod
    def jvp(ctx: Any, dx: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return dx * digamma(ctx.saved_tensors[0])
