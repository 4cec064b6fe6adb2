r"""Square roots of covariance matrices, with derivatives that survive repeated eigenvalues.

Autodiff through the eigenvectors of :math:`X = S^{1/2}`, and of the solution of :math:`X Y + Y X = C`, divides by
differences of eigenvalues and gives NaN for a round covariance. The derivatives of the two maps are those maps again,

.. math:: dX = \mathcal L_X(dS), \qquad dY = \mathcal L_X(dC - dX\,Y - Y\,dX),
   \qquad \mathcal L_X(C) = Y \iff XY + YX = C,

with sums of eigenvalues in the denominators, which are positive. Higher derivatives follow by themselves.
Bhatia, Jain and Lim, "On the Bures-Wasserstein distance between positive definite matrices" (2019).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function


def sqrtm(S: Tensor) -> Tensor:
    """The symmetric root of positive definite matrices ``(*b, n, n)``."""
    return _Root.apply(S)  # pyright: ignore[reportReturnType]


def lyapunov(X: Tensor, C: Tensor) -> Tensor:
    """The solution Y of ``X Y + Y X = C`` for positive definite X; leading dimensions broadcast."""
    shape = torch.broadcast_shapes(X.shape, C.shape)
    return _Lyapunov.apply(X.expand(shape), C.expand(shape))  # pyright: ignore[reportReturnType]


class _Root(Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(S: Tensor) -> Tensor:
        values, Q = torch.linalg.eigh(S)
        return (Q * values.clamp_min(0).sqrt()[..., None, :]) @ Q.mT

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(output)
        ctx.save_for_forward(output)

    @staticmethod
    def jvp(ctx: Any, dS: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return lyapunov(ctx.saved_tensors[0], dS)

    # The derivative is symmetric.
    backward = jvp  # pyright: ignore[reportAssignmentType]


class _Lyapunov(Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(X: Tensor, C: Tensor) -> Tensor:
        values, Q = torch.linalg.eigh(X)
        return Q @ ((Q.mT @ C @ Q) / (values[..., :, None] + values[..., None, :])) @ Q.mT

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0], output)
        ctx.save_for_forward(inputs[0], output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        X, Y = ctx.saved_tensors
        dC = lyapunov(X, grad)
        return -(dC @ Y.mT + Y.mT @ dC), dC

    @staticmethod
    def jvp(ctx: Any, dX: Tensor, dC: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        X, Y = ctx.saved_tensors
        return lyapunov(X, dC - dX @ Y - Y @ dX)
