r"""Block-tridiagonal positive-definite systems, a batch at a time, by cyclic reduction.

The Hessian of a discrete curve energy couples neighboring nodes only. Cyclic reduction eliminates every other node at
once, which halves the chain: :math:`\log_2 n` rounds of small batched Cholesky factorizations instead of ``n``
sequential ones. The matrix is positive definite exactly if every pivot block met on the way is, so the factorization
certifies a strict minimum. A chain of few unknowns is solved at once, as a dense matrix: fewer calls, and no more work.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pullback._typing import Bool, Float

# Unknowns up to which a chain is solved as a dense matrix; on an accelerator a round of the reduction costs a
# millisecond of calls, and 64 unknowns of 4,000 curves half of that (measured on an H200).
_DENSE, _DENSE_ON_DEVICE = 32, 64


def solve_tridiagonal(
    diagonal: Float[Tensor, "B n d d"], upper: Float[Tensor, "B m d d"], rhs: Float[Tensor, "B n d"]
) -> tuple[Float[Tensor, "B n d"], Bool[Tensor, " B"]]:
    """Solves ``H x = rhs`` for H with diagonal blocks `diagonal` and ``H[i, i+1] = upper[i]``, ``m = n - 1``.

    Also returns which systems are positive definite; the others' solutions are meaningless.
    """
    n, d = diagonal.shape[1:3]
    if n == 1 or n * d <= (_DENSE if rhs.device.type == "cpu" else _DENSE_ON_DEVICE):
        return _solve_dense(diagonal, upper, rhs)
    if n % 2 == 0:  # pad to an odd chain, so that both ends are eliminated
        eye = torch.eye(d, dtype=diagonal.dtype, device=diagonal.device).expand(diagonal.shape[0], 1, d, d)
        padded = (torch.cat([diagonal, eye], 1), _append_zero(upper), _append_zero(rhs))
        x, positive = solve_tridiagonal(*padded)
        return x[:, :-1], positive
    return _reduce(diagonal, upper, rhs)


def _solve_dense(diagonal: Tensor, upper: Tensor, rhs: Tensor) -> tuple[Tensor, Tensor]:
    batch, n, d = rhs.shape
    lower = torch.zeros(batch, n, d, n, d, dtype=rhs.dtype, device=rhs.device)
    lower.diagonal(0, 1, 3).copy_(diagonal.movedim(1, -1))
    lower.diagonal(-1, 1, 3).copy_(upper.mT.movedim(1, -1))
    factor, info = torch.linalg.cholesky_ex(lower.reshape(batch, n * d, n * d))
    x = torch.cholesky_solve(rhs.reshape(batch, n * d, 1), factor)
    return x.reshape(batch, n, d), info == 0


def _reduce(diagonal: Tensor, upper: Tensor, rhs: Tensor) -> tuple[Tensor, Tensor]:
    """One round: eliminates the even nodes, solves for the odd ones, substitutes back. ``n`` is odd."""
    d = diagonal.shape[-1]
    to_right, to_left = upper[:, 0::2], upper[:, 1::2].mT  # even node 2i -> 2i+1, and even node 2i+2 -> 2i+1
    zero = torch.zeros_like(to_left[:, :1])
    couplings = torch.cat([torch.cat([zero, to_left], 1), torch.cat([to_right, zero], 1), rhs[:, 0::2, :, None]], -1)
    solved, positive = _solve_blocks(diagonal[:, 0::2], couplings)
    left, right, x0 = solved[..., :d], solved[..., d : 2 * d], solved[..., 2 * d]

    odd = diagonal[:, 1::2] - to_right.mT @ right[:, :-1] - to_left.mT @ left[:, 1:]
    skip = -(to_left.mT[:, :-1] @ right[:, 1:-1])
    load = rhs[:, 1::2] - _mv(to_right.mT, x0[:, :-1]) - _mv(to_left.mT, x0[:, 1:])
    x_odd, rest = solve_tridiagonal(odd, skip, load)

    pad = torch.zeros_like(x_odd[:, :1])
    x_even = x0 - _mv(left, torch.cat([pad, x_odd], 1)) - _mv(right, torch.cat([x_odd, pad], 1))
    x = torch.empty_like(rhs)
    x[:, 0::2], x[:, 1::2] = x_even, x_odd
    return x, rest & positive.all(-1)


def _solve_blocks(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """``a⁻¹ b`` for small positive-definite blocks, and whether each is; unrolled on accelerators."""
    if a.device.type == "cpu":
        factor, info = torch.linalg.cholesky_ex(a)
        return torch.cholesky_solve(b, factor), info == 0
    return _unrolled_solve(a, b)


def _unrolled_solve(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Gauss-Jordan without pivoting, column by column: a few elementwise kernels for millions of small blocks."""
    d = a.shape[-1]
    ab = torch.cat([a, b], -1)
    positive = torch.ones(a.shape[:-2], dtype=torch.bool, device=a.device)
    for k in range(d):
        pivot = ab[..., k, k]
        positive &= pivot > 0
        row = ab[..., k, k + 1 :] / pivot[..., None]
        column = ab[..., k].clone()
        column[..., k] = 0
        ab[..., k + 1 :] -= column[..., None] * row[..., None, :]
        ab[..., k, k + 1 :] = row
    return ab[..., d:], positive


def _mv(a: Tensor, x: Tensor) -> Tensor:
    return (a @ x[..., None])[..., 0]


def _append_zero(x: Tensor) -> Tensor:
    return torch.cat([x, torch.zeros_like(x[:, :1])], 1)
