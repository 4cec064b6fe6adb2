r"""Block-tridiagonal positive-definite systems, a batch at a time, by cyclic reduction.

The Hessian of a discrete curve energy couples neighboring nodes only. Cyclic reduction eliminates every other node at
once, which halves the chain: :math:`\log_2 n` rounds of small batched Cholesky factorizations instead of ``n``
sequential ones. The matrix is positive definite exactly if every pivot block met on the way is, so the factorization
certifies a strict minimum. A chain of few unknowns is solved at once, as a dense matrix: fewer calls, and no more work.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from pullback._typing import Bool, Float

# Unknowns up to which a chain is solved as a dense matrix; on an accelerator a round of the reduction costs a
# millisecond of calls, and 64 unknowns of 4,000 curves half of that (measured on an H200).
_DENSE, _DENSE_ON_DEVICE = 32, 64
# Numbers of a block, of all curves together, from which on a CPU takes nodes one by one: less work, in more calls (half
# to a third of the time for 32 curves with d = 16 and 32).
_SEQUENTIAL = 2**11


def solve_tridiagonal(
    diagonal: Float[Tensor, "B n d d"],
    upper: Float[Tensor, "B m d d"],
    rhs: Float[Tensor, "B n d"],
    shared: int | None = None,
) -> tuple[Float[Tensor, "B n d"], Bool[Tensor, " B"]]:
    """Solves ``H x = rhs`` for H with diagonal blocks `diagonal` and ``H[i, i+1] = upper[i]``, ``m = n - 1``.

    Also returns which systems are positive definite; the others' solutions are meaningless. If `shared` is given, only
    so many unknowns at the end of a block are coupled to the next: all other rows of `upper` are zero.
    """
    n, d = diagonal.shape[1:3]
    if n == 1 or n * d <= (_DENSE if rhs.device.type == "cpu" else _DENSE_ON_DEVICE):
        batch = len(rhs)
        lower = torch.zeros(batch, n, d, n, d, dtype=rhs.dtype, device=rhs.device)
        lower.diagonal(0, 1, 3).copy_(diagonal.movedim(1, -1))
        lower.diagonal(-1, 1, 3).copy_(upper.mT.movedim(1, -1))
        x, positive = _solve_blocks(lower.reshape(batch, n * d, n * d), rhs.reshape(batch, n * d, 1))
        return x.reshape(batch, n, d), positive
    if rhs.device.type == "cpu" and shared in (None, d) and len(rhs) * d * d >= _SEQUENTIAL:
        return _eliminate(diagonal, upper, rhs)
    if n % 2 == 0:  # pad to an odd chain, so that both ends are eliminated
        eye = torch.eye(d, dtype=diagonal.dtype, device=diagonal.device).expand(diagonal.shape[0], 1, d, d)
        padded = pad(upper, (0, 0, 0, 0, 0, 1)), pad(rhs, (0, 0, 0, 1))
        x, positive = solve_tridiagonal(torch.cat([diagonal, eye], 1), *padded, shared)
        return x[:, :-1], positive
    return _reduce(diagonal, upper[..., -(shared or d) :, :], rhs)


def _eliminate(diagonal: Tensor, upper: Tensor, rhs: Tensor) -> tuple[Tensor, Tensor]:
    block, load, solved, info = diagonal[:, 0], rhs[:, 0, :, None], [], []
    for i in range(diagonal.shape[1]):
        coupled = upper[:, i] if i < upper.shape[1] else load[..., :0]
        factor, failed = torch.linalg.cholesky_ex(block)
        solved.append(torch.cholesky_solve(torch.cat([coupled, load], -1), factor))
        info.append(failed)
        if i < upper.shape[1]:
            added = coupled.mT @ solved[-1]
            block, load = diagonal[:, i + 1] - added[..., :-1], rhs[:, i + 1, :, None] - added[..., -1:]
    x = [solved.pop()]
    for step in reversed(solved):
        x.append(step[..., -1:] - step[..., :-1] @ x[-1])
    return torch.stack(x[::-1], 1)[..., 0], (torch.stack(info) == 0).all(0)


def _reduce(diagonal: Tensor, upper: Tensor, rhs: Tensor) -> tuple[Tensor, Tensor]:
    """One round: eliminates the even nodes, solves for the odd ones, substitutes back. ``n`` is odd, and of a block the
    last ``w`` unknowns are coupled to the next, by ``upper (B, m, w, d)``."""
    # Systems are solved for 2 w + 1 columns, and what is left has the same form.
    w, d = upper.shape[-2:]
    left, right = pad(upper[:, 1::2].mT, (0, 0, 0, 0, 1, 0)), pad(upper[:, 0::2], (0, 0, 0, 0, 0, 1))
    ends = pad(torch.eye(w, dtype=rhs.dtype, device=rhs.device), (0, 0, d - w, 0)).expand_as(left)
    solve = _solve_blocks if rhs.device.type == "cpu" or w < d else _unrolled_solve
    solved, positive = solve(diagonal[:, 0::2], torch.cat([left, ends, rhs[:, 0::2, :, None]], -1))
    # of the shared unknowns of odd blocks to the left; of those of even blocks, which the next odd one sees by `right`
    before, after = (left.mT @ solved)[:, 1:], solved[:, :-1, -w:]
    seen = right[:, :-1].mT

    odd = diagonal[:, 1::2] - seen @ after[..., w : 2 * w] @ seen.mT
    odd[..., -w:, -w:] -= before[..., :w]
    load = rhs[:, 1::2] - (seen @ after[..., -1:])[..., 0]
    load[..., -w:] -= before[..., -1]
    coupled = pad(-before[:, :-1, :, w : 2 * w] @ right[:, 1:-1], (0, 0, d - w, 0))
    x_odd, rest = solve_tridiagonal(odd, coupled, load, w)

    x = pad(x_odd, (0, 0, 1, 1))
    moves = torch.cat([x[:, :-1, -w:], (right @ x[:, 1:, :, None])[..., 0]], -1)
    x_even = solved[..., -1] - (solved[..., :-1] @ moves[..., None])[..., 0]
    x = torch.cat([torch.stack([x_even[:, :-1], x_odd], 2).flatten(1, 2), x_even[:, -1:]], 1)
    return x, rest & positive.all(-1)


def _solve_blocks(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """``a⁻¹ b`` for positive-definite blocks, and whether each is."""
    # `torch.cholesky_solve` takes longer on accelerators (pytorch/pytorch#175898) and no less on a CPU
    factor, info = torch.linalg.cholesky_ex(a)
    half = torch.linalg.solve_triangular(factor, b, upper=False)
    return torch.linalg.solve_triangular(factor.mT, half, upper=True), info == 0


def _unrolled_solve(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """The same by Gauss-Jordan without pivoting: a few elementwise kernels per column for millions of small blocks."""
    ab, pivots = torch.cat([a, b], -1), []
    for k in range(a.shape[-1]):
        pivots.append(ab[..., k, 0])
        row = ab[..., k, 1:] / ab[..., k, :1]
        ab = torch.addcmul(ab[..., 1:], ab[..., :1], row[..., None, :], value=-1)
        ab[..., k, :] = row
    return ab, torch.stack(pivots).amin(0) > 0
