r"""Elements where a curve needs them.

On an element the image of a curve is a polynomial, and how fast its Legendre coefficients fall tells how well it is
resolved. An element on which the last ones are a share :math:`\tau` of the linear one would, cut in n, leave about
:math:`\tau / n^p`. So it deserves :math:`(\tau / \tau^*)^{1/p}` elements for a goal :math:`\tau^*`, and a new mesh
spends its elements in that proportion.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pullback._numerics.lobatto import DEGREE, split, table
from pullback._numerics.spline import evaluate, piece_slopes
from pullback._typing import Float

# Numbers of elements curves may have: few different ones, so that curves of a batch share them.
SIZES = tuple(size * 2**k for k in range(7) for size in (2, 3))
# Elements that one element may become: the fewest, however smooth it is, and the most
# (test_elements_go_where_a_curve_bends).
_FEWEST, _MOST = 0.3, 8.0


def parameters(edges: Float[Tensor, "B e"]) -> Float[Tensor, "B n"]:
    """The times of the nodes of elements between ``edges``, shape ``(B, K + 1)``."""
    inner = edges[:, :-1, None] + edges.diff(dim=1)[..., None] * table("points", edges)[:-1]
    return torch.cat([inner.flatten(1), edges[:, -1:]], 1)


def uniform(count: int, like: Tensor, num_elements: int) -> Tensor:
    """Edges of elements that last equally long."""
    return torch.linspace(0, 1, num_elements + 1, dtype=like.dtype, device=like.device).expand(count, -1)


def placed(path: Tensor, edges: Tensor) -> Tensor:
    """The nodes of elements on the splines through ``path``, whose nodes are at equal times."""
    nodes = evaluate(path, piece_slopes(path), parameters(edges) * (path.shape[1] - 1))
    nodes[:, 0], nodes[:, -1] = path[:, 0], path[:, -1]
    return nodes


def moved(nodes: Tensor, edges: Tensor, new: Tensor) -> Tensor:
    """The nodes of other elements on the same curves, codes being polynomials on the elements they have."""
    t, K = parameters(new), edges.shape[1] - 1
    element = (torch.searchsorted(edges.contiguous(), t.contiguous(), right=True) - 1).clamp(0, K - 1)
    left, right = edges.gather(1, element), edges.gather(1, element + 1)
    x = (2 * (t - left) / (right - left) - 1).clamp(-1, 1)
    coefficients = table("spectrum", nodes) @ split(nodes)  # (B, K, p + 1, d)
    index = element[..., None, None].expand(-1, -1, *coefficients.shape[2:])
    found = (_legendre(x)[..., None, :] @ coefficients.gather(1, index))[..., 0, :]
    found[:, 0], found[:, -1] = nodes[:, 0], nodes[:, -1]
    return found


def _legendre(x: Tensor) -> Tensor:
    """The Legendre polynomials up to the degree of an element, ``(*x, p + 1)``, by Bonnet's recurrence."""
    values = [torch.ones_like(x), x]
    for k in range(1, DEGREE):
        values.append(((2 * k + 1) * x * values[k] - k * values[k - 1]) / (k + 1))
    return torch.stack(values, -1)


def halved(edges: Tensor) -> Tensor:
    """Edges of elements half as long."""
    middle = 0.5 * (edges[:, :-1] + edges[:, 1:])
    return torch.cat([torch.stack([edges[:, :-1], middle], -1).flatten(1), edges[:, -1:]], 1)


def adapted(edges: Tensor, tails: Tensor, goal: float | Tensor, at_least: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Meshes for elements with such tails: rows of curves with their new edges, one entry for each number of
    elements."""
    need = (tails / goal).clamp_min(torch.finfo(tails.dtype).tiny) ** (1 / DEGREE)
    need = need.nan_to_num(_MOST, _MOST).clamp(_FEWEST, _MOST)
    sizes = torch.tensor(SIZES, device=edges.device)
    wanted = torch.maximum(need.sum(1).ceil().long(), at_least.to(sizes))
    chosen = sizes[torch.searchsorted(sizes, wanted).clamp_max(len(sizes) - 1)]
    return [
        ((chosen == K).nonzero()[:, 0], _equidistributed(edges[chosen == K], need[chosen == K], K))
        for K in chosen.unique().tolist()
    ]


def _equidistributed(edges: Tensor, need: Tensor, num_elements: int) -> Tensor:
    """Edges between which the need is the same."""
    total = torch.nn.functional.pad(need.cumsum(1), (1, 0))
    level = torch.linspace(0, 1, num_elements + 1, dtype=edges.dtype, device=edges.device) * total[:, -1:]
    cell = (torch.searchsorted(total, level, right=True) - 1).clamp(0, need.shape[1] - 1)
    share = (level - total.gather(1, cell)) / need.gather(1, cell)
    new = edges.gather(1, cell) + share * edges.diff(dim=1).gather(1, cell)
    new[:, 0], new[:, -1] = 0, 1
    return new
