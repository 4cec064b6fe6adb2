r"""Curves in elements: the energy of polynomial pieces, with the derivatives Newton's method needs.

The chord energy of a discrete curve takes its image in the embedding for a polygon. Here the image is a polynomial of degree p on
each of K elements: it interpolates the decoded nodes, which lie at the element's Gauss-Lobatto points. With
:math:`S_{ij} = \int \ell_i' \ell_j'` for the Lagrange polynomials :math:`\ell_i` on [-1, 1] and :math:`h_e` the time an element takes,

.. math:: E = \sum_e \frac{2}{h_e} \sum_{ij} S_{ij}\, \phi(z_i) \cdot \psi(z_j) .

The nodes are the unknowns and polynomials only come after the decoder, so nothing is asked of the codes between nodes. Because
Gauss-Lobatto points leave an interpolation error that is orthogonal to polynomials of degree p - 2, the energy has order 2p in the
size of the elements, and with it its derivatives in the end points. For p = 1 it is the chord energy.

The Hessian has the blocks :math:`\frac{2}{h_e} S_{ij} (D\phi_i^\top D\psi_j + D\psi_i^\top D\phi_j)` within an element, and the
second derivatives of :math:`\phi, \psi` along the force at a node on its diagonal; elements are coupled by the node they share.
See Canuto, Hussaini, Quarteroni and Zang 2006, *Spectral Methods: Fundamentals in Single Domains*.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.polynomial import legendre
from torch import Tensor

from pullback._autodiff.derivatives import constant_hessian
from pullback._metrics.base import Metric
from pullback._metrics.isometry import Frame, isometric_information, separable
from pullback._numerics.rows import concatenate
from pullback._solvers.discrete import DiscreteEnergy, NoEmbeddingError
from pullback._typing import Float

DEGREE = 8
NODES = DEGREE + 1  # of an element
EVEN = 4  # equally spaced nodes for each node of an element
_CHUNK_BYTES = 2**24


@dataclass
class Expansion:
    """Second-order expansion of the energies of B curves of K elements; the last node of a block belongs to the next element too."""

    energy: Tensor  # (B,)
    gradient: Tensor  # (B, K p + 1, d), also in the end points
    diagonal: Tensor  # (B, K, p d, p d): Gauss-Newton blocks of nodes 1 to p of each element
    upper: Tensor  # (B, K - 1, p d, p d)
    curvature: Tensor  # (B, K, p d, p d): what the exact Hessian adds to the diagonal


@dataclass(frozen=True)
class ElementEnergy:
    """Energies of curves given by the nodes ``(B, K p + 1, d)`` of their elements and the times ``(B, K)`` these take."""

    metric: Metric
    num_parts: int  # distinct maps of the metric's embedding
    num_features: int
    isometric: bool  # whether each entry of the embedding is a function of one coordinate of what is decoded

    @classmethod
    def of(cls, discrete: DiscreteEnergy, nodes: Tensor) -> ElementEnergy:
        """The same metric on elements; it must have an embedding."""
        info = isometric_information(discrete.metric, nodes[:1, 0]) if discrete.num_parts == 1 else None
        isometric = info is not None and separable(info)
        return cls(discrete.metric, discrete.num_parts, discrete.num_features, isometric)

    def images(self, nodes: Tensor) -> tuple[Tensor, ...]:
        """The distinct maps of the embedding at the nodes of each element, ``(B, K, p + 1, F)``, measured from its first node."""
        z = split(nodes)
        parts = self.parts(z, z[..., :1, :])
        return tuple(x - x[..., :1, :] for x in parts)

    def energy(self, nodes: Tensor, times: Tensor) -> Tensor:
        """The energies, shape ``(B,)``."""
        size = self._chunk_size(nodes, nodes.shape[1], 4)
        chunks = zip(nodes.split(size), times.split(size), strict=True)
        return torch.cat([self._energy(*chunk) for chunk in chunks])

    def _energy(self, nodes: Tensor, times: Tensor) -> Tensor:
        images = self.images(nodes)
        return (images[0] * (stiffness(times) @ images[-1])).sum((1, 2, 3))

    def expand(self, nodes: Tensor, times: Tensor) -> Expansion:
        """The expansion with exact second derivatives."""
        z, K = split(nodes), times.shape[1]
        size = self._chunk_size(nodes, NODES, 3 * (2 + nodes.shape[-1]))
        chunks = zip(z.flatten(0, 1).split(size), stiffness(times).flatten(0, 1).split(size), strict=True)
        parts = concatenate([self._expand(*chunk) for chunk in chunks])
        return assemble(*(x.unflatten(0, (-1, K)) for x in vars(parts).values()))

    def _expand(self, z: Tensor, stiffness: Tensor) -> Local:
        """The expansions of single elements with nodes ``(m, p + 1, d)``."""
        values, tangents, hessians = self.frame(z)
        local, forces = expand_locally(values, [J.movedim(0, -2) for J in tangents], stiffness)
        local.curvature = self.symmetric(hessians(forces))
        return local

    def frame(self, z: Tensor) -> tuple[Sequence[Tensor], Sequence[Tensor], Callable[[list[Tensor]], Tensor]]:
        """The distinct maps of the embedding, their Jacobians, and a function for the Hessians of their products with forces."""
        if self.isometric:
            frame = Frame.of(self.metric, z)
            return self.parts(z, z), [frame.pushed()], lambda forces: frame.hessians(forces[0])
        values, tangents = self.metric.frame(z, origin=z[:, :1] if self.num_parts == 2 else None)
        return values, tangents, lambda forces: self._hessians(z, forces, z[:, :1])

    def hessians(self, z: Tensor, forces: list[Tensor], origin: Tensor) -> Tensor:
        """The Hessians of the products of the embedding with forces, without the rest of the frame."""
        if self.isometric:
            return Frame.of(self.metric, z).hessians(forces[0])
        return self._hessians(z, forces, origin)

    def _hessians(self, z: Tensor, forces: list[Tensor], origin: Tensor) -> Tensor:
        def pairing(x: Tensor) -> Tensor:
            products = [(part * f).sum(-1) for part, f in zip(self.parts(x, origin), forces, strict=True)]
            return torch.stack(products).sum(0)

        return constant_hessian(pairing, z)

    def symmetric(self, hessians: Tensor) -> Tensor:
        """What second derivatives along the forces add to the Hessian of the energy."""
        return (hessians + hessians.mT) / self.num_parts

    def parts(self, z: Tensor, origin: Tensor) -> tuple[Tensor, ...]:
        """The distinct maps of the embedding at ``z``; `origin` only matters to pairs."""
        dual = self.metric.embed(z, origin=origin if self.num_parts == 2 else None)
        if dual is None:
            raise NoEmbeddingError("The metric has an embedding at some codes and none at others.")
        return dual[: self.num_parts]

    def _chunk_size(self, nodes: Tensor, num_nodes: int, copies: int) -> int:
        return max(1, _CHUNK_BYTES // (num_nodes * self.num_features * nodes.element_size() * copies * self.num_parts))


@dataclass
class Local:
    """Expansions of single elements."""

    energy: Tensor  # (m,)
    gradient: Tensor  # (m, p + 1, d)
    gauss: Tensor  # (m, p + 1, d, p + 1, d)
    curvature: Tensor  # (m, p + 1, d, d)


def expand_locally(
    values: Sequence[Tensor], tangents: Sequence[Tensor], stiffness: Tensor
) -> tuple[Local, list[Tensor]]:
    """Gauss-Newton expansions of elements with images ``(m, p + 1, F)`` and Jacobians ``(m, p + 1, d, F)``, and the forces."""
    values = [x - x[:, :1] for x in values]
    forces = [stiffness @ x for x in reversed(values)]
    energy = (values[0] * forces[0]).sum((1, 2))
    pulled = [torch.linalg.vecdot(J, f[..., None, :]) for J, f in zip(tangents, forces, strict=True)]
    shape = tangents[0].shape[1:3]
    gram = tangents[0].flatten(1, 2) @ tangents[-1].flatten(1, 2).mT
    gauss = stiffness[:, :, None, :, None] * (gram + gram.mT).unflatten(1, shape).unflatten(3, shape)
    gradient = 2 * torch.stack(pulled).mean(0)
    return Local(energy, gradient, gauss, gradient.new_zeros(*gradient.shape, shape[1])), forces


def assemble(energy: Tensor, gradient: Tensor, gauss: Tensor, curvature: Tensor) -> Expansion:
    """Adds up what elements ``(B, K, ...)`` share. The last node is held: it has an equation of its own."""
    B, K, _, d = gradient.shape
    whole = join(gradient)
    diagonal = gauss[:, :, 1:, :, 1:].clone()
    diagonal[:, :-1, -1, :, -1] += gauss[:, 1:, 0, :, 0]
    upper = torch.zeros_like(diagonal[:, 1:])
    upper[:, :, -1] = gauss[:, 1:, 0, :, 1:]
    upper[:, -1:, ..., -1, :] = 0
    curved = curvature[:, :, 1:].clone()
    curved[:, :-1, -1] += curvature[:, 1:, 0]
    curved[:, -1, -1] = 0
    bends = torch.zeros_like(diagonal)
    bends.diagonal(0, 2, 4).copy_(curved.movedim(2, -1))
    size = diagonal.diagonal(0, 2, 4).diagonal(0, 2, 3).mean((1, 2, 3))
    diagonal[:, -1, -1] = 0
    diagonal[:, -1, ..., -1, :] = 0
    eye = torch.eye(d, dtype=size.dtype, device=size.device)
    diagonal[:, -1, -1, :, -1] = size[:, None, None] * eye
    n = DEGREE * d
    return Expansion(
        energy.sum(1),
        whole,
        diagonal.reshape(B, K, n, n),
        upper.reshape(B, K - 1, n, n),
        bends.reshape(B, K, n, n),
    )


def split(nodes: Float[Tensor, "B n d"]) -> Float[Tensor, "B K p d"]:
    """The nodes of each element, first and last included."""
    return nodes.unfold(1, NODES, DEGREE).mT


def join(values: Float[Tensor, "B K p x"]) -> Float[Tensor, "B n x"]:
    """The sums, at every node of a curve, over the elements it belongs to."""
    whole = torch.cat([values[:, :, :-1].flatten(1, 2), values[:, -1:, -1]], 1)
    whole[:, DEGREE:-1:DEGREE] += values[:, :-1, -1]
    return whole


def stiffness(times: Tensor) -> Tensor:
    """The matrices ``2 S / h`` of elements that take so long, ``(B, K, p + 1, p + 1)``."""
    return 2 / times[..., None, None] * table("stiffness", times)


def table(name: str, like: Tensor) -> Tensor:
    """A matrix or vector of the reference element [-1, 1].

    - ``"points"``: its Gauss-Lobatto points, as shares of its time
    - ``"weights"``: their weights in an integral over the share
    - ``"spectrum"``: from values at the nodes to the coefficients of Legendre polynomials
    - ``"slopes"``: from values at the nodes to derivatives by the share
    - ``"stiffness"``: S
    - ``"halves"``, ``"even"``: from values at the nodes to those at the nodes of its halves, and at equally spaced times; without the last
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
        "even": legendre.legvander(np.linspace(-1, 1, EVEN * DEGREE + 1)[:-1], DEGREE) @ coefficients,
    }
    with torch.inference_mode(False):
        return torch.as_tensor(tables[name], dtype=dtype, device=device)
