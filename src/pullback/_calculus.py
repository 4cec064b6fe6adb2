"""Derivatives of maps from the latent space, batched by leading dimensions.

A decoder treats the codes of a batch independently, so the Jacobians of the whole batch come from ``d`` directional
derivatives of the whole batch. Those are vectorised with `torch.vmap` over the ``d`` tangent directions only: mapping over
the points instead fails for decoders (torch's distributions branch on values) and is hundreds of times slower.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

Tensors = tuple[Tensor, ...]
Map = Callable[[Tensor], Tensors]


def pushforward(f: Map, z: Tensor) -> tuple[Tensors, Tensors]:
    r"""Values and Jacobians of ``f`` at every code.

    For ``z`` of shape ``(*batch, d)`` and each output of shape ``(*batch, *out)``, the Jacobian has shape
    ``(d, *batch, *out)``: entry ``i`` is :math:`\partial f / \partial z_i`. Forward mode, ``1 + d`` passes in one sweep;
    where an operation of ``f`` has no forward-mode rule, two reverse sweeps take its place.
    """
    d = z.shape[-1]
    basis = torch.eye(d, dtype=z.dtype, device=z.device).reshape(d, *[1] * (z.ndim - 1), d).expand(d, *z.shape)
    return directional(f, z, basis)


def directional(f: Map, z: Tensor, v: Tensor) -> tuple[Tensors, Tensors]:
    r"""Values of ``f`` at ``z`` and its derivatives along ``v`` of shape ``(k, *z.shape)``: ``k`` tangents at every code."""
    for kernels in (contextlib.nullcontext, _plain_kernels):
        try:
            with kernels():
                return torch.vmap(lambda u: torch.func.jvp(f, (z,), (u,)), out_dims=(None, 0))(v)
        except (NotImplementedError, RuntimeError) as error:
            if not _lacks_forward_rule(error):
                raise
            cause = error
    return _by_two_reverse_sweeps(f, z, v, cause)


@contextlib.contextmanager
def _plain_kernels() -> Iterator[None]:
    """Variants of torch's kernels that have forward-mode rules: unfused attention, recurrences without oneDNN or cuDNN."""
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH), torch.backends.cudnn.flags(enabled=False):
            yield
    finally:
        torch._C._set_mkldnn_enabled(before)


def _lacks_forward_rule(error: Exception) -> bool:
    text = str(error)
    return any(hint in text for hint in ("forward AD", "forward-mode", "forward mode", "jvp", "vmap", "batching rule"))


def _by_two_reverse_sweeps(f: Map, z: Tensor, v: Tensor, cause: Exception) -> tuple[Tensors, Tensors]:
    r"""J v as the derivative in u of uᵀ J v, which is linear in u: reverse mode twice, one tangent at a time."""
    with torch.enable_grad():
        x = z if z.requires_grad else z.detach().requires_grad_()
        values = f(x)
        duals = [torch.zeros_like(y, requires_grad=True) for y in values]
        (g,) = torch.autograd.grad(values, x, duals, create_graph=True)
        try:
            rows = [torch.autograd.grad(g, duals, u, create_graph=z.requires_grad, retain_graph=True) for u in v]
        except RuntimeError as error:
            raise NotImplementedError(
                f"The decoder uses an operation without a forward-mode derivative ({cause}) and without a second reverse "
                f"one ({error}). Write that operation out in elementary ones; for torch.cdist use "
                "((x[..., :, None, :] - y[..., None, :, :]) ** 2).sum(-1)."
            ) from error
    return tuple(y.detach() if not z.requires_grad else y for y in values), tuple(
        map(torch.stack, zip(*rows, strict=True))
    )
