"""Rules of `DualTensor`: what operations make of a value and its derivatives; each takes the function and its arguments.

Those of layers are in `pullback._autodiff.dual_layers`. With all of them come Jacobians of maps whose operations all have a rule.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C._functorch import peek_interpreter_stack

from pullback._autodiff.dual import CONSTANT, METADATA, RULES, WRITTEN_OUT, DualTensor, Refused, Rule
from pullback._autodiff.dual_layers import (
    activation,
    affine,
    any_dual,
    batch_norm,
    dropout,
    elementwise,
    log_sum_exp,
    matmul,
    softmax,
    solve_triangular,
    vector_norm,
)
from pullback._autodiff.rewrites import EXPRESSIONS


def _mapped(func: Rule, x: Any, *args: Any, **kwargs: Any) -> Any:
    """Linear functions of the value, for all that is carried."""
    if not isinstance(x, DualTensor) or any_dual((args, kwargs)):
        raise Refused(func.__name__)
    result = torch.vmap(lambda y: func(y, *args, **kwargs))(x.carried)
    return x.view_of(result) if isinstance(result, Tensor) else type(result)(map(x.view_of, result))


def _reshaped(func: Rule, x: Any, *args: Any, **kwargs: Any) -> DualTensor:
    """Functions that give the numbers another shape, in their order."""
    if any(isinstance(arg, torch.dtype) for arg in (*args, *kwargs.values())):
        raise Refused("a view as other numbers")
    shape = func(x.value, *args, **kwargs).shape
    return x.view_of(x.carried.reshape(len(x.carried), *shape))


def _padded(func: Rule, x: Any, pad: Any, mode: str = "constant", value: float | None = None) -> Any:
    if value:
        raise Refused("pad with numbers other than zero")
    return _mapped(func, x, pad, mode)


def _indexed(func: Rule, x: Any, index: Any) -> DualTensor:
    """Slices, and arrays of places where these stand together and no single places beside them."""
    index = index if isinstance(index, tuple) else (index,)
    arrays = [k for k, i in enumerate(index) if isinstance(i, Tensor)]
    together = not arrays or arrays[-1] - arrays[0] + 1 == len(arrays)
    allowed = (slice, Tensor) if arrays else (slice, int)
    known = all(i is None or i is ... or isinstance(i, allowed) for i in index)
    if not (isinstance(x, DualTensor) and known and together) or any_dual(index):
        raise Refused("an index")
    return x.view_of(x.carried[(slice(None), *index)])


def _joined(func: Rule, parts: Sequence[Any], dim: int = 0) -> DualTensor:
    """Concatenation, also with constants."""
    (num,) = {len(x.carried) for x in parts if isinstance(x, DualTensor)}
    dim = dim + 1 if dim >= 0 else dim
    return DualTensor(func([x.carried if isinstance(x, DualTensor) else _constant(x, num) for x in parts], dim=dim))


def _where(func: Rule, condition: Any, x: Any, y: Any) -> DualTensor:
    dual = x if isinstance(x, DualTensor) else y
    if isinstance(condition, DualTensor) or not isinstance(dual, DualTensor):
        raise Refused("where")
    num, ndim = len(dual.carried), max(v.ndim for v in (condition, x, y) if isinstance(v, Tensor))
    first = torch.arange(num, device=dual.device).reshape(-1, *[1] * ndim) == 0

    def carried(v: Any) -> Tensor:
        if isinstance(v, DualTensor):
            return v.carried.reshape(num, *[1] * (ndim - v.ndim), *v.shape)
        return torch.where(first, torch.as_tensor(v, dtype=dual.dtype, device=dual.device), 0)

    return DualTensor(torch.where(condition, carried(x), carried(y)))


def _constant(x: Tensor, num: int) -> Tensor:
    return torch.cat([x[None], x.new_zeros(num - 1, *x.shape)])


def _aligned(x: Any, y: Any) -> tuple[Any, Any]:
    """What is carried by two factors or terms, with as many dimensions; constants as they are."""
    dims = [v.ndim if isinstance(v, Tensor) else 0 for v in (x, y)]
    parts = []
    for v, ndim in zip((x, y), dims, strict=True):
        if isinstance(v, DualTensor):
            v = v.carried.reshape(len(v.carried), *[1] * (max(dims) - ndim), *v.shape)
        parts.append(v)
    return parts[0], parts[1]


def _sum(func: Rule, x: Any, y: Any, *, alpha: float = 1) -> DualTensor:
    """Sums and differences, by their signs."""
    sign = -alpha if func in _DIFFERENCES else alpha
    u, v = _aligned(x, y)
    if isinstance(x, DualTensor) and isinstance(y, DualTensor):
        return DualTensor(torch.add(u, v, alpha=sign))
    value = (u[0] if isinstance(x, DualTensor) else u) + sign * (v[0] if isinstance(y, DualTensor) else v)
    rest = u[1:] if isinstance(x, DualTensor) else sign * v[1:]
    out = torch.empty(1 + len(rest), *value.shape, dtype=value.dtype, device=value.device)
    out[0], out[1:] = value, rest
    return DualTensor(out)


def _reversed(rule: Rule, func: Rule) -> Rule:
    """The rule of ``y.__rsub__(x)`` and the like."""
    return lambda _, y, x, **kwargs: rule(func, x, y, **kwargs)


def _product(func: Rule, x: Any, y: Any) -> DualTensor:
    u, v = _aligned(x, y)
    if not (isinstance(x, DualTensor) and isinstance(y, DualTensor)):
        return DualTensor(u * v)
    return DualTensor(torch.cat([u[:1] * v[:1], u[1:] * v[:1] + u[:1] * v[1:]]))


def _quotient(func: Rule, x: Any, y: Any, *, rounding_mode: str | None = None) -> DualTensor:
    if rounding_mode is not None:
        raise Refused("div with rounding")
    u, v = _aligned(x, y)
    if not isinstance(y, DualTensor):
        return DualTensor(u / v)
    value = (u[:1] if isinstance(x, DualTensor) else u) / v[:1]
    rest = -value * v[1:] / v[:1]
    return DualTensor(torch.cat([value, rest + u[1:] / v[:1] if isinstance(x, DualTensor) else rest]))


def _converted(func: Rule, x: Any, *args: Any, **kwargs: Any) -> Any:
    """Copies, and other types of numbers."""
    if not isinstance(x, DualTensor) and isinstance(args[0], DualTensor):
        return func(x, args[0].value, *args[1:], **kwargs)
    if not isinstance(x, DualTensor) or any_dual((args, kwargs)):
        raise Refused(func.__name__)
    return x.view_of(func(x.carried, *args, **kwargs))


def _broadcast(func: Rule, *tensors: Any) -> tuple[Any, ...]:
    if len(tensors) == 1:
        return tensors
    shape = torch.broadcast_shapes(*(x.shape for x in tensors))
    return tuple(_expanded(func, x, shape) if isinstance(x, DualTensor) else x.expand(shape) for x in tensors)


def _expanded(func: Rule, x: Any, *shape: Any) -> DualTensor:
    target = x.value.expand(*shape).shape
    carried = x.carried.reshape(len(x.carried), *[1] * (len(target) - x.ndim), *x.shape)
    return x.view_of(carried.expand(len(carried), *target))


def _normalize(x: Tensor, p: float = 2.0, dim: int = 1, eps: float = 1e-12, out: None = None) -> Tensor:
    return x / torch.linalg.vector_norm(x, p, dim, keepdim=True).clamp_min(eps)


# -- which function has which rule -------------------------------------------------------------------------------------------


def _named(names: str) -> list[Any]:
    """The functions of these names, and the methods."""
    homes = (torch, Tensor, F, torch.special)
    return [f for name in names.split() for home in homes if callable(f := getattr(home, name, None))]


def _properties(names: str) -> list[Any]:
    return [getattr(Tensor, name).__get__ for name in names.split()]


def _register(rule: Rule, names: str) -> None:
    RULES.update((func, rule) for func in _named(names))


_DIFFERENCES = set(_named("sub subtract __sub__"))
METADATA.update(
    _named(
        "size dim numel nelement ndimension is_floating_point is_complex element_size stride is_contiguous __len__ __hash__ __repr__ "
        "get_device"
    )
)
METADATA.update(
    _properties(
        "shape ndim dtype device layout requires_grad is_cuda is_mkldnn is_sparse is_quantized is_meta itemsize nbytes"
    )
)
CONSTANT.update(
    _named(
        "eq ne lt le gt ge __eq__ __ne__ __lt__ __le__ __gt__ __ge__ isnan isinf isfinite sign sgn signbit floor ceil round trunc "
        "argmax argmin argsort detach zeros_like ones_like empty_like full_like new_zeros new_ones new_full new_empty new_tensor"
    )
)

_register(activation(lambda x, y: 1 - y * y), "tanh")
_register(activation(lambda x, y: y * (1 - y)), "sigmoid expit")
_register(activation(lambda x, y: y), "exp")
_register(activation(lambda x, y: (x > 0).to(x.dtype)), "relu")
_register(activation(lambda x, y: 1 / x), "log")
_register(activation(lambda x, y: torch.sigmoid(x)), "softplus")
_register(activation(lambda x, y: 2 * x), "square")
_register(activation(lambda x, y: 0.5 / y), "sqrt")
_register(
    elementwise,
    "elu selu celu gelu silu mish softsign hardtanh hardswish hardsigmoid leaky_relu relu6 logsigmoid sin cos tan sinh cosh asin "
    "acos atan asinh acosh atanh log1p expm1 log2 log10 exp2 rsqrt reciprocal abs erf erfc lgamma digamma clamp clamp_min "
    "clamp_max pow __pow__ logit log_ndtr ndtr",
)
_register(affine, "linear conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d")
_register(matmul, "matmul mm __matmul__")
_register(_reshaped, "reshape view flatten unflatten squeeze unsqueeze ravel")
_register(
    _mapped,
    "sum mean neg __neg__ negative transpose permute movedim swapaxes chunk split unbind narrow select flip roll cumsum repeat "
    "interpolate avg_pool1d avg_pool2d avg_pool3d pixel_shuffle pixel_unshuffle diagonal tril triu diag_embed",
)
_register(_padded, "pad")
_register(_indexed, "__getitem__")
_register(_joined, "cat concat stack")
_register(_sum, "add __add__ __radd__ sub subtract __sub__")
_register(_reversed(_sum, torch.sub), "__rsub__ rsub")
_register(_product, "mul multiply __mul__ __rmul__")
_register(_quotient, "div divide true_divide __truediv__")
_register(_reversed(_quotient, torch.div), "__rtruediv__ __rdiv__")
_register(softmax, "softmax log_softmax")
_register(dropout, "dropout dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout")
_register(_converted, "contiguous clone double float to type_as")
_register(_broadcast, "broadcast_tensors")
_register(_expanded, "expand broadcast_to")
_register(_where, "where")
_register(log_sum_exp, "logsumexp")
RULES[torch.linalg.vector_norm] = vector_norm
RULES[F.batch_norm] = batch_norm
WRITTEN_OUT.update(EXPRESSIONS)
WRITTEN_OUT[F.normalize] = _normalize
RULES[torch.linalg.solve_triangular] = solve_triangular
RULES.update((func, _mapped) for func in _properties("mT T"))


_REFUSING: weakref.WeakSet[Any] = weakref.WeakSet()  # owners of maps that were refused: they are not tried again


def dual_jacobian(
    f: Callable[[Tensor], tuple[Tensor, ...]], z: Tensor, owner: object = None
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]] | None:
    """Values and Jacobians ``(d, *batch, *out)`` of ``f`` at codes ``(*batch, d)``, as constants; None where an operation refuses.

    The `owner` of ``f``, a decoder, is remembered then: it is called twice once, and not again and again.
    """
    if peek_interpreter_stack() is not None or _known(owner):
        return None
    d = z.shape[-1]
    carried = z.new_zeros(1 + d, *z.shape)
    carried[0] = z.detach()
    carried[1:].diagonal(0, 0, -1).fill_(1)
    try:
        with torch.no_grad():
            results = [y.carried for y in f(DualTensor(carried)) if isinstance(y, DualTensor) or _refuse()]
    except (Refused, RuntimeError, TypeError, AttributeError, ValueError, IndexError):
        with contextlib.suppress(TypeError):  # not all owners can be remembered
            _REFUSING.add(owner)
        return None  # torch's own way will say what is wrong, if anything is
    return tuple(y[0] for y in results), tuple(y[1:] for y in results)


def _known(owner: object) -> bool:
    try:
        return owner in _REFUSING
    except TypeError:
        return False


def _refuse() -> NoReturn:
    raise Refused("a result that does not depend on the code, or has lost its derivatives")
