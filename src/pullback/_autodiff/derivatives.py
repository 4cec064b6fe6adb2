"""Derivatives of maps from the latent space, batched by leading dimensions.

A decoder treats the codes of a batch independently, so the Jacobians of the whole batch come from ``d`` directional
derivatives of the whole batch, vectorized with `torch.vmap` over the ``d`` tangent directions. Mapping over the points
instead fails for decoders (torch's distributions branch on values) and is hundreds of times slower.

First derivatives are taken in forward mode, with a few operations rewritten (`pullback._autodiff.rewrites`), which
takes 0.5 to 0.9 times as long as two reverse sweeps. These are for maps with an operation that has no forward-mode rule
(``forward=False``). Second derivatives are taken in reverse mode.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pullback._autodiff.rewrites import Rewritten
from pullback._autodiff.torch_internals import forward_mode

Tensors = tuple[Tensor, ...]
Map = Callable[[Tensor], Tensors]


def pushforward(f: Map, z: Tensor, *, forward: bool = True) -> tuple[Tensors, Tensors]:
    """Values ``(*batch, *out)`` and Jacobians ``(d, *batch, *out)`` of ``f`` at every code ``(*batch, d)``."""
    # forward: whether all operations of f have a forward-mode rule; `pullback._decoders.probe` knows it of a decoder
    return directional(f, z, basis(z), forward=forward)


def directional(f: Map, z: Tensor, v: Tensor, *, forward: bool = True) -> tuple[Tensors, Tensors]:
    """Values of ``f`` at ``z`` and its derivatives along ``k`` tangents at every code, ``v (k, *z.shape)``."""
    if forward:
        z = z.clone()  # of a view torch makes tangents as large as all of its memory
        out_dims: Any = (None, 0)
        with forward_mode(), Rewritten():
            return torch.vmap(lambda u: torch.func.jvp(f, (z,), (u,)), out_dims=out_dims)(v)[:2]
    # J v as the derivative in u of uᵀ J v, which is linear in u: one tangent at a time.
    keep = differentiable(z)
    with torch.inference_mode(False), torch.enable_grad(), Rewritten():
        x = variable(z)
        values = f(x)
        u = [torch.zeros_like(y, requires_grad=True) for y in values]
        (g,) = gradients(values, x, u)
        if g.requires_grad and not any(depends_on(g, y) for y in u):
            raise NotImplementedError("An operation has no second derivative in reverse mode.")
        rows = [gradients(g, u, e, create_graph=keep) for e in v]
    jacobians = tuple(map(torch.stack, zip(*rows, strict=True)))
    return (values if keep else tuple(y.detach() for y in values)), jacobians


def hessian(f: Callable[[Tensor], Any], z: Tensor, *, functional: bool = True, weights: Any = None) -> Tensor:
    """Hessians ``(*batch, d, d)`` of a scalar function of each code, ``f(z)`` of shape ``(*batch,)``; not
    functional also of maps times constant `weights`."""
    # One direction at a time and without `torch.vmap`: divergences branch on the values of parameters. By `torch.func`,
    # inside which rules can tell what depends on the code, unless an operation of f is unknown to it.
    if functional:
        with Rewritten():
            pull = torch.func.vjp(torch.func.grad(lambda w: f(w).sum()), z)[1]
            return torch.stack([pull(e)[0] for e in basis(z)], dim=-2)
    keep = differentiable(z)
    with torch.inference_mode(False), torch.enable_grad(), Rewritten():
        # Not z itself: f may hold constants that depend on z, such as the other end of a divergence.
        x = z.view_as(z) if keep else z.detach().clone().requires_grad_()
        (g,) = gradients(f(x), x, weights)
        rows = [gradients(g, x, e, create_graph=keep)[0] for e in basis(z)]
    return torch.stack(rows, dim=-2)


def jet(f: Map, z: Tensor, v: Tensor, w: Tensor) -> tuple[Tensors, list[Tensor], list[Tensor]]:
    """Values of ``f``, Jacobians ``(*batch, d, K)``, second derivatives along ``v`` and ``w``, ``(*batch, K, m)``."""
    # Derivatives in y of derivatives in z of ⟨y, f(z)⟩: several times faster than nested forward mode.
    keep = differentiable(z, v)
    with torch.inference_mode(False), torch.enable_grad(), Rewritten():
        x = variable(z)
        values = f(x)
        y = [torch.zeros_like(value, requires_grad=True) for value in values]
        (g,) = gradients(values, x, y)
        (h,) = gradients(g, x, v)
        rows = [gradients(g, y, e, create_graph=keep) for e in basis(z)]
        bent = [gradients(h, y, u, create_graph=keep) for u in w]
    first = [torch.stack(columns, -2) for columns in zip(*rows, strict=True)]
    second = [torch.stack(columns, -1) for columns in zip(*bent, strict=True)]
    # A decoder that masks its invalid values with NaN has derivatives there that look harmless.
    unknown = [torch.isnan(value)[..., None] for value in values]
    return values, first, [c.masked_fill(no, torch.nan) for no, c in zip(unknown, second, strict=True)]


def variable(z: Tensor) -> Tensor:
    """``z`` as something to differentiate in."""
    return z if z.requires_grad else z.detach().clone().requires_grad_()


def differentiable(*inputs: Tensor) -> bool:
    """Whether the steps are recorded: only if the inputs ask for it; a decoder's own parameters always do."""
    return torch.is_grad_enabled() and any(x.requires_grad for x in inputs)


def depends_on(y: Tensor, x: Tensor) -> bool:
    """Whether torch sees y computed from x."""
    return y.requires_grad and torch.autograd.grad(y.sum(), x, retain_graph=True, allow_unused=True)[0] is not None


def gradients(outputs: Any, inputs: Any, weights: Any = None, *, create_graph: bool = True) -> Tensors:
    """`torch.autograd.grad` of the sum of outputs times weights; zeros where an output does not depend on an input."""
    ys = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    ws = [torch.ones_like(y) for y in ys] if weights is None else [weights] if isinstance(weights, Tensor) else weights
    xs = [inputs] if isinstance(inputs, Tensor) else list(inputs)
    live = [(y, w) for y, w in zip(ys, ws, strict=True) if y.requires_grad]
    if not live:
        return tuple(torch.zeros_like(x) for x in xs)
    options = {"create_graph": create_graph, "retain_graph": True, "materialize_grads": True}
    # in this thread: to hand a sweep to that of a GPU and back takes 0.3 ms
    with torch.autograd.set_multithreading_enabled(False):
        return torch.autograd.grad([y for y, _ in live], xs, [w for _, w in live], **options)


def basis(z: Tensor) -> Tensor:
    """The ``d`` unit tangents at every code or point, ``(d, *batch, d)``."""
    d = z.shape[-1]
    return _identity(d, z.dtype, z.device).reshape(d, *[1] * (z.ndim - 1), d).expand(d, *z.shape)


# on a GPU a new one takes 0.7 ms of the host's time (benchmarks/geodesics_gpu.py)
@functools.lru_cache
def _identity(d: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.eye(d, dtype=dtype, device=device)
