r"""Curves in elements: the energy of polynomial pieces, with the derivatives Newton's method needs.

The chord energy of a discrete curve takes its image in the embedding for a polygon. Here the image is a polynomial of
degree p on each of K elements: it interpolates the decoded nodes, which lie at the element's Gauss-Lobatto points. With
:math:`S_{ij} = \int \ell_i' \ell_j'` for the Lagrange polynomials :math:`\ell_i` on [-1, 1] and :math:`h_e` the time an
element takes,

.. math:: E = \sum_e \frac{2}{h_e} \sum_{ij} S_{ij}\, \phi(z_i) \cdot \psi(z_j) .

The nodes are the unknowns and polynomials only come after the decoder, so nothing is asked of the codes between nodes.
Because Gauss-Lobatto points leave an interpolation error that is orthogonal to polynomials of degree p - 2, the energy
has order 2p in the size of the elements, and with it its derivatives in the end points. For p = 1 it is the chord
energy.

The Hessian has the blocks :math:`\frac{2}{h_e} S_{ij} (D\phi_i^\top D\psi_j + D\psi_i^\top D\phi_j)` within an element,
and the second derivatives of :math:`\phi, \psi` along the force at a node on its diagonal; elements are coupled by the
node they share. The polynomials are those of `pullback._numerics.lobatto`.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from pullback._metrics.frame import Frame
from pullback._numerics.lobatto import DEGREE, NODES, halved, integral, split, stiffness, tails
from pullback._numerics.rows import beside, concatenate, take
from pullback._solvers.chords import REVERSE, ChordEnergy
from pullback._solvers.objective import Expansion, Objective, differentiated
from pullback._typing import Float


@dataclass(frozen=True)
class ElementEnergy(Objective):
    """Energies of curves with the nodes ``(B, K p + 1, d)`` of K elements; the constants of a curve are their times
    ``(B, K)``."""

    chords: ChordEnergy  # of a metric with an embedding

    @property
    def has_hessian(self) -> bool:
        return True

    @property
    def has_slopes(self) -> bool:
        return self.chords.has_slopes

    def slopes(self, nodes: Tensor, constants: Tensor) -> tuple[Tensor, Tensor]:
        energy, gradient = self.derivatives(nodes, constants)
        gradient[:, -1] = 0  # the last node does not move
        return energy, gradient[:, 1:].reshape(*constants.shape, -1)

    def derivatives(self, nodes: Tensor, times: Tensor, *, in_halves: bool = False) -> tuple[Tensor, Tensor]:
        """The energies, and their derivatives in all nodes, ``(B, K p + 1, d)``: a twentieth of an expansion. Those of
        the same curves in halves of the elements, if asked for."""
        times = 0.5 * times.repeat_interleave(2, 1) if in_halves else times
        size = self.chords.chunk_size(nodes, (2 if in_halves else 1) * REVERSE)
        self.chords.work.add(2 * times.numel() * NODES)

        def energy(z: Tensor, times: Tensor) -> Tensor:
            return integral(self.images(halved(z) if in_halves else z), times)

        chunks = zip(nodes.split(size), times.split(size), strict=True)
        found = [differentiated(functools.partial(energy, times=t), z) for z, t in chunks]
        energies, gradients = zip(*found, strict=True)
        return torch.cat(energies), torch.cat(gradients)

    def energy(self, nodes: Tensor, constants: Tensor) -> Tensor:
        size = self.chords.chunk_size(nodes, 4)
        chunks = zip(nodes.split(size), constants.split(size), strict=True)
        return torch.cat([integral(self.images(z), times) for z, times in chunks])

    def images(self, nodes: Tensor) -> tuple[Tensor, ...]:
        """The maps of the embedding at the nodes of each element, ``(B, K, p + 1, F)``, measured from its first
        node."""
        z = split(nodes)
        self.chords.work.add(z.shape[:3].numel())
        return tuple(x - x[..., :1, :] for x in self.chords.parts(z, z[..., :1, :].detach()))

    def expand(self, nodes: Tensor, exact: Tensor, constants: Tensor) -> Expansion:
        if exact.all() or not exact.any():
            return self._expand(nodes, constants, bool(exact.any()))
        kinds = [beside(rows.nonzero()[:, 0], nodes) for rows in (~exact, exact)]
        parts = [
            self._expand(nodes[rows], constants[rows], kind) for rows, kind in zip(kinds, (False, True), strict=True)
        ]
        return take(concatenate(parts), torch.argsort(torch.cat(kinds)))

    def _expand(self, nodes: Tensor, times: Tensor, exact: bool) -> Expansion:
        return assemble(*vars(self.expand_each(nodes, times, exact)).values())

    def expand_each(self, nodes: Tensor, times: Tensor, exact: bool) -> Local:
        """The expansions of all elements by themselves, ``(B, K, ...)``."""
        z, K = split(nodes).flatten(0, 1), times.shape[1]
        size = self.chords.chunk_size(z, 3 * (2 + nodes.shape[-1]))
        chunks = zip(z.split(size), stiffness(times).flatten(0, 1).split(size), strict=True)
        local = concatenate([self._expand_locally(*chunk, exact) for chunk in chunks])
        return Local(*(x.unflatten(0, (-1, K)) for x in vars(local).values()))

    def _expand_locally(self, z: Tensor, stiffness: Tensor, exact: bool) -> Local:
        """The expansions of single elements with nodes ``(m, p + 1, d)``."""
        num_points = z.shape[:2].numel() * (1 + z.shape[-1])
        self.chords.work.add(4 * num_points if exact else num_points)
        frame = self.chords.frame(z, z[:, :1])
        local, forces = gauss_newton(frame, stiffness)
        if exact:
            local.curvature = frame.hessians(forces)
        return local

    def momentum(self, nodes: Tensor, times: Tensor) -> Tensor:
        """Minus half the derivative of the energy in the first node, ``(B, d)``."""
        first, row = nodes[:, :1], stiffness(times[:, 0])[:, :1]
        forces = [row @ x[:, 0] for x in reversed(self.images(nodes[:, :NODES]))]
        return -0.5 * self.chords.frame(first, first).slopes(forces)[:, 0]

    def tails(self, nodes: Tensor) -> Float[Tensor, "B K"]:
        """The last two Legendre coefficients of the image on each element over the linear one: how well it is
        resolved."""
        return torch.cat([tails(self.images(chunk)) for chunk in nodes.split(self.chords.chunk_size(nodes, 4))])


@dataclass
class Local:
    """Expansions of single elements."""

    energy: Tensor  # (m,)
    gradient: Tensor  # (m, p + 1, d)
    gauss: Tensor  # (m, p + 1, d, p + 1, d)
    curvature: Tensor  # (m, p + 1, d, d)


def gauss_newton(frame: Frame, stiffness: Tensor) -> tuple[Local, list[Tensor]]:
    """Expansions of elements with frames at their nodes ``(m, p + 1)``, and the forces on these."""
    values = tuple(x - x[:, :1] for x in frame.values)
    forces = [stiffness @ x for x in reversed(values)]
    energy, gradient = (values[0] * forces[0]).sum((1, 2)), frame.slopes(forces)
    grams = []
    for maps in frame.factors:
        rows = [J.movedim(0, -2).flatten(1, 2) for J in maps]
        grams.append(rows[0] @ rows[-1].mT)
    gram, shape = torch.stack(grams).sum(0) if len(grams) > 1 else grams[0], gradient.shape[1:]
    gauss = stiffness[:, :, None, :, None] * (gram + gram.mT).unflatten(1, shape).unflatten(3, shape)
    return Local(energy, gradient, gauss, gradient.new_zeros(*gradient.shape, shape[1])), forces


def assemble(energy: Tensor, gradient: Tensor, gauss: Tensor, curvature: Tensor) -> Expansion:
    """Adds up what elements ``(B, K, ...)`` share. The last node does not move: it has an equation of its own."""
    B, K, _, d = gradient.shape
    slope = gradient[:, :, 1:].clone()
    slope[:, :-1, -1] += gradient[:, 1:, 0]
    slope[:, -1, -1] = 0
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
    blocks = [x.reshape(B, -1, n, n) for x in (diagonal, upper, bends)]
    return Expansion(energy.sum(1), slope.reshape(B, K, n), *blocks)
