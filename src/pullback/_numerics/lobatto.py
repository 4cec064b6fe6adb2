r"""Polynomials on elements: one of degree p on each, by its values at the element's Gauss-Lobatto points.

Values at the nodes of an element and coefficients of Legendre polynomials are one matrix apart. Neighboring elements
share a node, so K of them have K p + 1. See Canuto, Hussaini, Quarteroni and Zang 2006, *Spectral Methods: Fundamentals
in Single Domains*.
"""

from __future__ import annotations

import functools

import numpy as np
import torch
from numpy.polynomial import legendre
from torch import Tensor

from pullback._typing import Float

# Degree of the polynomials. Eight nodes per element are the coarsest level of chords too; 6 and 10 take more points on
# the VAE of benchmarks/geodesics.py.
DEGREE = 8
NODES = DEGREE + 1


def split(nodes: Float[Tensor, "B n d"]) -> Float[Tensor, "B K p d"]:
    """The nodes of each element, first and last included."""
    return nodes.unfold(1, NODES, DEGREE).mT


def stiffness(times: Tensor) -> Tensor:
    """The matrices ``2 S / h`` of elements that take so long, ``(*times, p + 1, p + 1)``."""
    return 2 / times[..., None, None] * table("stiffness", times)


def integral(images: tuple[Tensor, ...], times: Tensor) -> Tensor:
    """The energies of polynomials with such values at the nodes of elements, ``(B,)``."""
    slopes = [table("slopes", times) @ x for x in images]
    return ((slopes[0] * slopes[-1]).sum(-1) @ table("weights", times) / times).sum(-1)


def tails(images: tuple[Tensor, ...]) -> Tensor:
    shares = []
    for image in images:
        size = (table("spectrum", image) @ image).norm(dim=-1)
        shares.append(size[..., -2:].amax(-1) / size[..., 1].clamp_min(torch.finfo(size.dtype).tiny))
    return torch.stack(shares).amax(0)


def equal_times(nodes: Tensor) -> Tensor:
    """The times of elements that last equally long, ``(B, K)``."""
    K = nodes.shape[1] // DEGREE
    return torch.full((len(nodes), K), 1 / K, dtype=nodes.dtype, device=nodes.device)


def halved(nodes: Tensor) -> Tensor:
    """The nodes of elements half as long on the same curves."""
    return torch.cat([(table("halves", nodes) @ split(nodes)).flatten(1, 2), nodes[:, -1:]], 1)


def table(name: str, like: Tensor) -> Tensor:
    """A matrix or vector of the reference element [-1, 1].

    - ``"points"``: its Gauss-Lobatto points, as shares of its time
    - ``"weights"``: their weights in an integral over the share
    - ``"spectrum"``: from values at the nodes to the coefficients of Legendre polynomials
    - ``"slopes"``: from values at the nodes to derivatives by the share
    - ``"stiffness"``: S
    - ``"halves"``: from values at the nodes to those at the nodes of its halves, without the last
    """
    return _table(name, like.dtype, like.device)


@functools.lru_cache
def _table(name: str, dtype: torch.dtype, device: torch.device) -> Tensor:
    basis = legendre.Legendre.basis(DEGREE)
    x = np.concatenate([[-1.0], np.sort(basis.deriv().roots().real), [1.0]])
    weights = 2 / (DEGREE * (DEGREE + 1) * basis(x) ** 2)
    coefficients = np.linalg.inv(legendre.legvander(x, DEGREE))
    slopes = np.stack([legendre.Legendre.basis(k).deriv()(x) for k in range(NODES)], 1) @ coefficients
    tables = {
        "points": 0.5 * (1 + x),
        "weights": 0.5 * weights,
        "spectrum": coefficients,
        "slopes": 2 * slopes,
        "stiffness": slopes.T @ (weights[:, None] * slopes),
        "halves": legendre.legvander(np.concatenate([x[:-1] - 1, x[:-1] + 1]) / 2, DEGREE) @ coefficients,
    }
    with torch.inference_mode(False):
        return torch.as_tensor(tables[name], dtype=dtype, device=device)
