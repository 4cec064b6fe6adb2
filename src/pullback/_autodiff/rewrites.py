r"""Operations of torch whose derivatives are missing or wrong, written in others whose derivatives are right.

Forward mode is how the library differentiates decoders, and solvers differentiate the result once more. In torch 2.13
some operations spoil one of the two, most of them without notice:

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

Shape = tuple[int, ...]


def _cdist(x1: Tensor, x2: Tensor, p: float = 2.0, compute_mode: str | None = None) -> Tensor:
    return torch.linalg.vector_norm(x1[..., :, None, :] - x2[..., None, :, :], ord=p, dim=-1)


def _glu(input: Tensor, dim: int = -1) -> Tensor:
    a, b = input.chunk(2, dim)
    return a * torch.sigmoid(b)


def _standardized(x: Tensor, dims: Shape, eps: float, weight: Any, bias: Any, shape: Shape) -> Tensor:
    centered = x - x.mean(dims, keepdim=True)
    y = centered * torch.rsqrt((centered**2).mean(dims, keepdim=True) + eps)
    y = y if weight is None else y * weight.reshape(shape)
    return y if bias is None else y + bias.reshape(shape)


def _layer_norm(
    input: Tensor,
    normalized_shape: Shape,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Tensor:
    return _standardized(input, tuple(range(-len(normalized_shape), 0)), eps, weight, bias, normalized_shape)


def _instance_norm(
    input: Tensor,
    running_mean: Any = None,
    running_var: Any = None,
    weight: Any = None,
    bias: Any = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    if not use_input_stats:
        return F.batch_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)
    dims = tuple(range(2, input.ndim))
    return _standardized(input, dims, eps, weight, bias, (-1, *[1] * len(dims)))


def _solve(A: Tensor, B: Tensor, *, left: bool = True) -> Tensor:
    vector = B.ndim == 1 or (B.ndim == A.ndim - 1 and B.shape == A.shape[:-1])
    X = torch.linalg.lu_solve(*torch.linalg.lu_factor(A), B[..., None] if vector else B, left=left)
    return X[..., 0] if vector else X


def _cholesky_inverse(L: Tensor, upper: bool = False) -> Tensor:
    identity = torch.eye(L.shape[-1], dtype=L.dtype, device=L.device)
    inverse = torch.linalg.solve_triangular(L, identity, upper=upper)
    return inverse @ inverse.mT if upper else inverse.mT @ inverse


def _slogdet(A: Tensor) -> Any:
    with torch.no_grad():
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
    """The value and the tangent, None of a constant."""
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
}


class Rewritten(TorchFunctionMode):
    """A context in which the operations above are replaced."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        operation: Any = _REWRITES.get(func, func)
        return operation(*args, **(kwargs or {}))
