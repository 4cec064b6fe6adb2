r"""Operations of torch whose derivatives are missing or wrong, written in others whose derivatives are right.

Forward mode is how the library differentiates decoders, and solvers differentiate the result once more. In torch 2.13:

- `torch.cdist` has no forward-mode derivative, `glu` has one that cannot be differentiated;
- `torch.cholesky_inverse` has a wrong forward-mode derivative;
- `layer_norm`, `instance_norm`, `torch.linalg.solve`, ``det``, ``logdet`` and ``slogdet`` have a right one whose own
  derivative is wrong: it takes the statistics or factors that the formula reuses for constants.

Inside `Rewritten` they are replaced by equal expressions. A test compares each with finite differences. So are linear
layers, convolutions, sums and products with a constant, for speed: torch also asks what the constant's tangent adds,
which is zero. For sums and products that takes 0.4 ms, and at the first time the import of its compiler.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode

from pullback._autodiff.torch_internals import is_wrapped


def _cdist(x1: Tensor, x2: Tensor, p: float = 2.0, compute_mode: str | None = None) -> Tensor:
    return torch.linalg.vector_norm(x1[..., :, None, :] - x2[..., None, :, :], ord=p, dim=-1)


def _glu(input: Tensor, dim: int = -1) -> Tensor:
    a, b = input.chunk(2, dim)
    return a * torch.sigmoid(b)


def _layer_norm(
    input: Tensor, normalized_shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5, cudnn_enable=True
) -> Tensor:
    dims = tuple(range(-len(normalized_shape), 0))
    centered = input - input.mean(dims, keepdim=True)
    y = centered * torch.rsqrt((centered**2).mean(dims, keepdim=True) + eps)
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


def _instance_norm(
    input: Tensor, *, weight: Any, bias: Any, use_input_stats: bool, eps: float, **running: Any
) -> Tensor:
    if not use_input_stats:
        return F.batch_norm(input, weight=weight, bias=bias, eps=eps, **running)
    shape = (-1, *[1] * (input.ndim - 2))
    weight, bias = (None if x is None else x.reshape(shape) for x in (weight, bias))
    return _layer_norm(input, input.shape[2:], weight, bias, eps)


def _solve(A: Tensor, B: Tensor, *, left: bool = True) -> Tensor:
    vector = B.ndim == 1 or (B.ndim == A.ndim - 1 and B.shape == A.shape[:-1])
    X = torch.linalg.lu_solve(*torch.linalg.lu_factor(A), B[..., None] if vector else B, left=left)
    return X[..., 0] if vector else X


def _cholesky_inverse(L: Tensor, upper: bool = False) -> Tensor:
    inverse = torch.linalg.solve_triangular(L, torch.eye(L.shape[-1], dtype=L.dtype, device=L.device), upper=upper)
    return inverse @ inverse.mT if upper else inverse.mT @ inverse


def _slogdet(A: Tensor) -> Any:
    exact = torch.linalg.slogdet(A.detach())
    diagonal = torch.linalg.lu_factor(A).LU.diagonal(dim1=-2, dim2=-1)
    return type(exact)((exact.sign, diagonal.abs().log().sum(-1)))


def _logdet(A: Tensor) -> Tensor:
    sign, value = _slogdet(A)
    return torch.where(sign < 0, math.nan, value)


def _det(A: Tensor) -> Tensor:
    sign, value = _slogdet(A)
    return sign * value.exp()


def _unpacked(x: Any) -> tuple[Any, Tensor | None]:
    return forward_ad.unpack_dual(x) if isinstance(x, Tensor) and is_wrapped(x) else (x, None)


def _affine(operation: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The operation, affine in its input, with half the work in forward mode where weight and bias are constants."""

    def rewritten(input: Tensor, weight: Tensor, bias: Tensor | None = None, *args: Any, **kwargs: Any) -> Tensor:
        value, tangent = _unpacked(input)
        if tangent is None or any(_unpacked(x)[1] is not None for x in (weight, bias)):
            return operation(input, weight, bias, *args, **kwargs)
        step = operation(tangent, weight, None, *args, **kwargs)
        return forward_ad.make_dual(operation(value, weight, bias, *args, **kwargs), step)

    return rewritten


def _binary(operation: Callable[..., Tensor], first: Callable[..., Tensor], second: Callable[..., Tensor]) -> Any:
    """The operation, with its derivatives in forward mode by one of two numbers where the other is a constant."""

    def rewritten(a: Any, b: Any, **kwargs: Any) -> Tensor:
        (x, u), (y, v) = _unpacked(a), _unpacked(b)
        if kwargs or (u is None) == (v is None):
            return operation(a, b, **kwargs)
        value, step = operation(x, y), first(u, y) if v is None else second(x, y, v)
        return forward_ad.make_dual(value, step.to(value.dtype).expand(value.shape))

    return rewritten


_AFFINE = (F.linear, F.conv1d, F.conv2d, F.conv3d, F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)
_REWRITES: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.cdist: _cdist,
    F.glu: _glu,
    **dict.fromkeys((F.layer_norm, torch.layer_norm), _layer_norm),
    F.instance_norm: _instance_norm,
    torch.linalg.solve: _solve,
    **dict.fromkeys((torch.cholesky_inverse, Tensor.cholesky_inverse), _cholesky_inverse),
    **dict.fromkeys((torch.linalg.slogdet, torch.slogdet, Tensor.slogdet), _slogdet),
    **dict.fromkeys((torch.logdet, Tensor.logdet), _logdet),
    **dict.fromkeys((torch.linalg.det, torch.det, Tensor.det), _det),
    **{operation: _affine(operation) for operation in _AFFINE},
    **{f: _binary(f, lambda u, _: u, lambda _x, _y, v: v) for f in (torch.add, Tensor.add)},
    **{f: _binary(f, lambda u, _: u, lambda _x, _y, v: -v) for f in (torch.sub, Tensor.sub)},
    **{f: _binary(f, torch.mul, lambda x, _, v: x * v) for f in (torch.mul, Tensor.mul)},
    **{f: _binary(f, torch.div, lambda x, y, v: -x / y**2 * v) for f in (torch.div, Tensor.div)},
    # 1 / x, which torch takes for the product of a number and a reciprocal
    **dict.fromkeys((Tensor.__rdiv__,), lambda x, a: _REWRITES[torch.mul](x.reciprocal(), a)),
}


class Rewritten(TorchFunctionMode):
    """A context in which the operations above are replaced."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        operation: Any = _REWRITES.get(func, func)
        return operation(*args, **(kwargs or {}))
