"""What layers and activations make of a value and its derivatives: rules of `DualTensor`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pullback._autodiff.dual import DualTensor, Refused, Rule


def _scaled(x: DualTensor, y: Tensor, slope: Tensor) -> DualTensor:
    """The function with the value ``y`` and the derivative `slope` at ``x``."""
    out = torch.empty_like(x.carried, memory_format=torch.contiguous_format)
    out[0] = y
    torch.mul(x.carried[1:], slope, out=out[1:])
    return DualTensor(out)


def activation(slope: Callable[[Tensor, Tensor], Tensor]) -> Rule:
    """A function of one number, by its derivative in terms of argument and value."""

    def rule(func: Rule, x: Any, *args: Any, **kwargs: Any) -> DualTensor:
        if args or any(kwargs.values()):
            return elementwise(func, x, *args, **kwargs)
        y = func(x.value)
        return _scaled(x, y, slope(x.value, y))

    return rule


def elementwise(func: Rule, x: Any, *args: Any, **kwargs: Any) -> DualTensor:
    """Any function of one number, with its own options: torch knows the derivative."""
    inplace = kwargs.pop("inplace", False)
    if any_dual((args, kwargs)) or not isinstance(x, DualTensor) or (inplace and x.shared):
        raise Refused(func.__name__)
    with torch.inference_mode(False), torch.enable_grad():
        free = x.value.detach().clone().requires_grad_()
        y = func(free, *args, **kwargs)
        (slope,) = torch.autograd.grad(y, free, torch.ones_like(y))
    result = _scaled(x, y.detach(), slope)
    if not inplace:
        return result
    x.carried = result.carried
    return x


def any_dual(x: Any) -> bool:
    if isinstance(x, (tuple, list, dict)):
        return any(map(any_dual, x.values() if isinstance(x, dict) else x))
    return isinstance(x, DualTensor)


def affine(func: Rule, x: Any, weight: Any, bias: Any = None, *args: Any, **kwargs: Any) -> DualTensor:
    """Layers ``x W + b``."""
    unbatched = func is not F.linear and x.ndim != weight.ndim
    if not isinstance(x, DualTensor) or unbatched or any_dual((weight, bias, args, kwargs)):
        raise Refused(func.__name__)
    if func is F.linear:
        out = torch.mm(x.carried.flatten(0, -2), weight.T).unflatten(0, x.carried.shape[:-1])
    else:  # convolutions know one batch dimension
        flat = x.carried.flatten(0, 1)
        out = func(flat, weight, None, *args, **kwargs).unflatten(0, x.carried.shape[:2])
        bias = bias if bias is None else bias.reshape(-1, *[1] * (weight.ndim - 2))
    if bias is not None:
        out[0] += bias
    return DualTensor(out)


def matmul(func: Rule, x: Any, y: Any) -> DualTensor:
    if isinstance(x, DualTensor) and not isinstance(y, DualTensor) and x.ndim > 1 and y.ndim == 2:
        return DualTensor(x.carried @ y)
    raise Refused("matmul")


def softmax(func: Rule, x: Any, dim: int | None = None, **kwargs: Any) -> DualTensor:
    if dim is None or kwargs.get("dtype") is not None:
        raise Refused("softmax")
    axis = _from_the_end(x, dim)
    y, p = func(x.value, dim=axis), torch.softmax(x.value, axis)
    rest = x.carried[1:]
    centred = rest - (p * rest).sum(axis, keepdim=True)
    return DualTensor(torch.cat([y[None], centred if "log" in func.__name__ else p * centred]))


def batch_norm(
    func: Rule, x: Any, mean: Any, var: Any, weight: Any = None, bias: Any = None, training: bool = False, **kwargs: Any
) -> DualTensor:
    """With running statistics, which make it linear."""
    if training or mean is None or any_dual((mean, var, weight, bias)):
        raise Refused("batch_norm")
    flat, shape = x.carried[1:].flatten(0, 1), x.carried[1:].shape[:2]
    rest = func(flat, torch.zeros_like(mean), var, weight, None, **kwargs).unflatten(0, shape)
    return DualTensor(torch.cat([func(x.value, mean, var, weight, bias, **kwargs)[None], rest]))


def dropout(func: Rule, x: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    if training:
        raise Refused("dropout")
    return x


def log_sum_exp(func: Rule, x: Any, dim: int, keepdim: bool = False) -> DualTensor:
    axis = _from_the_end(x, dim)
    y, p = torch.logsumexp(x.value, axis, keepdim), torch.softmax(x.value, axis)
    return DualTensor(torch.cat([y[None], (p * x.carried[1:]).sum(axis, keepdim)]))


def vector_norm(func: Rule, x: Any, ord: float = 2, dim: Any = None, keepdim: bool = False) -> DualTensor:
    """The Euclidean norm along a dimension, where it has a derivative."""
    if ord != 2 or not isinstance(dim, int):
        raise Refused("norm")
    axis = _from_the_end(x, dim)
    norm = torch.linalg.vector_norm(x.value, dim=axis, keepdim=True)
    if bool((norm == 0).any()):
        raise Refused("norm of nought")
    out = torch.cat([norm[None], (x.value * x.carried[1:]).sum(axis, keepdim=True) / norm])
    return DualTensor(out if keepdim else out.squeeze(axis))


def solve_triangular(func: Rule, a: Any, b: Any, **kwargs: Any) -> DualTensor:
    if isinstance(a, DualTensor) or a.ndim > b.ndim:
        raise Refused("solve_triangular")
    return DualTensor(func(a, b.carried, **kwargs))


def _from_the_end(x: DualTensor, dim: int) -> int:
    return dim if dim < 0 else dim - x.ndim
