"""Derivatives of maps from the latent space, batched by leading dimensions.

A decoder treats the codes of a batch independently, so the Jacobians of the whole batch come from ``d`` directional
derivatives of the whole batch. Those are vectorised with `torch.vmap` over the ``d`` tangent directions only: mapping over
the points instead fails for decoders (torch's distributions branch on values) and is hundreds of times slower.

Some of torch's kernels have no forward-mode derivative. Three routes are tried in turn: forward mode as it is; forward mode
with plain variants of those kernels (unfused attention, recurrences without oneDNN or cuDNN); and reverse mode twice, which
gives the same derivative for any operation that is twice differentiable. A few operations are rewritten throughout, because
torch differentiates them wrongly (see `pullback._autodiff.rewrites`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from pullback._autodiff.dual_rules import dual_jacobian
from pullback._autodiff.rewrites import Rewritten

Tensors = tuple[Tensor, ...]
Map = Callable[[Tensor], Tensors]


def pushforward(f: Map, z: Tensor, owner: object = None) -> tuple[Tensors, Tensors]:
    r"""Values and Jacobians of ``f`` at every code.

    For ``z`` of shape ``(*batch, d)`` and each output of shape ``(*batch, *out)``, the Jacobian has shape
    ``(d, *batch, *out)``: entry ``i`` is :math:`\partial f / \partial z_i`. Forward mode, ``1 + d`` passes in one sweep;
    where an operation of ``f`` has no forward-mode rule, two reverse sweeps take its place. By dual tensors where nothing is
    differentiated once more; `owner` is the decoder behind ``f``, if there is one.
    """
    known = None if torch.is_grad_enabled() else dual_jacobian(f, z, owner)
    return known or directional(f, z, _basis(z))


def directional(f: Map, z: Tensor, v: Tensor) -> tuple[Tensors, Tensors]:
    r"""Values of ``f`` at ``z`` and its derivatives along ``v`` of shape ``(k, *z.shape)``: ``k`` tangents at every code."""
    for kernels in (contextlib.nullcontext, _plain_kernels):
        try:
            with kernels():
                return _forward(f, z, v)
        except (NotImplementedError, RuntimeError) as error:
            if not _lacks_derivative(error):
                raise
            cause = error
    return _by_two_reverse_sweeps(f, z, v, cause)


def _forward(f: Map, z: Tensor, v: Tensor) -> tuple[Tensors, Tensors]:
    values_and_tangents: Any = torch.vmap(lambda u: torch.func.jvp(f, (z,), (u,)), out_dims=(None, 0))  # pyright: ignore[reportArgumentType]
    with Rewritten():
        return values_and_tangents(v)


def jacobian(f: Map, z: Tensor, owner: object = None) -> tuple[Tensors, Tensors]:
    """`pushforward` for when its results are constants.

    By dual tensors where all operations have a rule, else by two reverse sweeps, which cost torch less than forward mode does.
    """
    known = dual_jacobian(f, z, owner)
    if known is not None:
        return known
    try:
        with torch.inference_mode(False), torch.enable_grad():
            x = z.detach().clone().requires_grad_()
            values = f(x)
            columns = _columns(values, x)
    except RuntimeError as error:
        if not _lacks_derivative(error):
            raise
        return pushforward(f, z.detach())
    return tuple(y.detach() for y in values), tuple(map(torch.stack, zip(*columns, strict=True)))


def _columns(values: Tensors, x: Tensor) -> list[Tensors]:
    """Derivatives along each coordinate of ``x``; zeros where a value does not depend on it."""
    duals = [torch.zeros_like(y, requires_grad=True) for y in values]
    live = [(y, dual) for y, dual in zip(values, duals, strict=True) if y.requires_grad]
    ys, us = [y for y, _ in live], [dual for _, dual in live]
    g = torch.autograd.grad(ys, x, us, create_graph=True, allow_unused=True)[0] if live else None
    if g is None:
        return [tuple(torch.zeros_like(y) for y in values) for _ in range(x.shape[-1])]
    return [torch.autograd.grad(g, duals, e, retain_graph=True, materialize_grads=True) for e in _basis(x)]


def constant_hessian(f: Callable[[Tensor], Tensor], z: Tensor) -> Tensor:
    """`hessian` for when its result is a constant, by torch's own reverse mode."""
    try:
        with torch.inference_mode(False), torch.enable_grad():
            x = z.detach().clone().requires_grad_()
            value = f(x)
            g = torch.autograd.grad(value.sum(), x, create_graph=True)[0] if value.requires_grad else x.detach()
            if not g.requires_grad:  # nothing but a linear function of the codes
                return x.new_zeros(*x.shape, x.shape[-1])
            rows = [torch.autograd.grad(g, x, e, retain_graph=True, materialize_grads=True)[0] for e in _basis(z)]
    except RuntimeError as error:
        if not _lacks_derivative(error):
            raise
        return hessian(f, z.detach())
    return torch.stack(rows, dim=-2)


def hessian(f: Callable[[Tensor], Tensor], z: Tensor) -> Tensor:
    r"""Hessians ``(*batch, d, d)`` of a scalar function of each code, ``f(z)`` of shape ``(*batch,)``.

    Reverse mode twice, one direction at a time and without `torch.vmap`: divergences branch on the values of parameters.
    """
    try:
        with Rewritten():
            _, pull = torch.func.vjp(torch.func.grad(lambda w: f(w).sum()), z)[:2]
            return torch.stack([pull(e)[0] for e in _basis(z)], dim=-2)
    except (NotImplementedError, RuntimeError) as error:
        if not _lacks_derivative(error):
            raise
    with torch.inference_mode(False), torch.enable_grad(), _plain_kernels(), Rewritten():
        x = z if z.requires_grad else z.detach().clone().requires_grad_()
        (g,) = torch.autograd.grad(f(x).sum(), x, create_graph=True)
        rows = [torch.autograd.grad(g, x, e, create_graph=z.requires_grad, retain_graph=True)[0] for e in _basis(z)]
    return torch.stack(rows, dim=-2)


def _basis(z: Tensor) -> Tensor:
    """The ``d`` unit tangents at every code, ``(d, *batch, d)``."""
    d = z.shape[-1]
    return torch.eye(d, dtype=z.dtype, device=z.device).reshape(d, *[1] * (z.ndim - 1), d).expand(d, *z.shape)


@contextlib.contextmanager
def _plain_kernels() -> Iterator[None]:
    """Variants of torch's kernels that have all derivatives; torch's settings are put back afterwards."""
    onednn, fast = torch._C._get_mkldnn_enabled(), torch.backends.mha.get_fastpath_enabled()
    torch._C._set_mkldnn_enabled(False)
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH), torch.backends.cudnn.flags(enabled=False):
            yield
    finally:
        torch._C._set_mkldnn_enabled(onednn)
        torch.backends.mha.set_fastpath_enabled(fast)


def _lacks_derivative(error: Exception) -> bool:
    hints = (
        "forward AD",
        "forward-mode",
        "forward mode",
        "jvp",
        "vmap",
        "batching rule",
        "not implemented",
        "double backward",
    )
    return any(hint in str(error) for hint in hints)


def _by_two_reverse_sweeps(f: Map, z: Tensor, v: Tensor, cause: Exception) -> tuple[Tensors, Tensors]:
    r"""J v as the derivative in u of uᵀ J v, which is linear in u: reverse mode twice, one tangent at a time."""
    with torch.inference_mode(False), torch.enable_grad(), _plain_kernels(), Rewritten():
        x = z if z.requires_grad else z.detach().clone().requires_grad_()
        values = f(x)
        duals = [torch.zeros_like(y, requires_grad=True) for y in values]
        try:
            (g,) = torch.autograd.grad(values, x, duals, create_graph=True)
            rows = [torch.autograd.grad(g, duals, u, create_graph=z.requires_grad, retain_graph=True) for u in v]
        except RuntimeError as error:
            raise NotImplementedError(
                f"The decoder uses an operation without a forward-mode derivative ({_first_line(cause)}) and without a second "
                f"reverse one ({_first_line(error)}). Write that operation out in elementary ones, or use a metric that needs "
                "no derivative: pullback.DivergenceMetric(decoder, method=pullback.divergences.CentralDifference())."
            ) from error
    jacobians = tuple(map(torch.stack, zip(*rows, strict=True)))
    return (values if z.requires_grad else tuple(y.detach() for y in values)), jacobians


def _first_line(error: Exception) -> str:
    return str(error).split("\n")[0][:200]
