r"""Curves in elements of equal duration: few nodes for smooth decoders.

The energy of chords has order two in the number of segments, that of elements of degree p the order 2p (`pullback._solvers.elements`).
Where a decoder is smooth on the scale of an element, 16 or 32 nodes then give five digits for which chords need hundreds. The curve
that was found is measured on elements half as long, or a quarter where they are few, at points it was not solved on: what that changes is the error of the energy, and twice
as much bounds what a minimum of the approximate energy has above the true minimum,

.. math:: E(z_h) - E(z) \le |E - E_h|(z_h) + |E - E_h|(z) .

That is far too much in practice: what a path has above the minimum is mostly a tenth of the change, and the error that is claimed
(`pullback._solvers.choice`) is half of it, more for paths that are soft.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import torch
from numpy.polynomial import legendre
from scipy import interpolate
from torch import Tensor

from pullback._numerics.rows import concatenate, take
from pullback._solvers.discrete import DiscreteEnergy, Expansion
from pullback._solvers.elements import DEGREE, ElementEnergy, assemble, expand_locally, join, split, stiffness, table
from pullback._solvers.levels import Measurement

INNER = DEGREE - 1  # inner nodes of an element
_LOOKS = 32  # segments on which a curve is measured at least
EXACT = (1e-2, 0.4)  # predicted decrease and rate between which Newton's own steps are taken
_DOUBLE = torch.empty((), dtype=torch.float64)


@dataclass(frozen=True)
class SpectralEnergy:
    """Energies of curves with the nodes ``(B, K p + 1, d)`` of K elements of equal duration, as an objective of `Minimizer`."""

    discrete: DiscreteEnergy
    elements: ElementEnergy

    @classmethod
    def of(cls, discrete: DiscreteEnergy, nodes: Tensor) -> SpectralEnergy:
        return cls(discrete, ElementEnergy.of(discrete, nodes))

    @property
    def curved(self) -> bool:
        return True

    def energy(self, nodes: Tensor, times: Tensor, pull: Tensor) -> Tensor:
        return self.measured(nodes)[0]

    def measured(self, nodes: Tensor) -> tuple[Tensor, Tensor]:
        """Energies and lengths, each ``(B,)``."""
        chunks = nodes.split(self.discrete.chunk_size(nodes, 4))
        energies, lengths = zip(*(self._measured(chunk) for chunk in chunks), strict=True)
        return torch.cat(energies), torch.cat(lengths)

    def _measured(self, nodes: Tensor) -> tuple[Tensor, Tensor]:
        self.discrete.work.add(nodes.shape[0] * nodes.shape[1])
        parts = [split(x) for x in self.elements.parts(nodes, nodes[:, :1])]
        slopes = [table("slopes", nodes) @ (x - x[:, :, :1]) for x in parts]
        squares = (slopes[0] * slopes[-1]).sum(-1)
        weights = table("weights", nodes)
        return squares.shape[1] * (squares @ weights).sum(-1), (squares.clamp_min(0).sqrt() @ weights).sum(-1)

    def expand(self, nodes: Tensor, exact: Tensor, times: Tensor, pull: Tensor) -> Expansion:
        if not exact.any():
            return self._expand_all(nodes, False)
        parts = [
            self._expand_all(nodes[rows], curved) for rows, curved in ((~exact, False), (exact, True)) if rows.any()
        ]
        order = torch.argsort(exact.int(), stable=True)
        return take(concatenate(parts), torch.argsort(order))

    def _expand_all(self, nodes: Tensor, exact: bool) -> Expansion:
        size = self.discrete.chunk_size(nodes, 3 * (2 + nodes.shape[-1]))
        return concatenate([self._expand(chunk, exact) for chunk in nodes.split(size)])

    def _expand(self, nodes: Tensor, exact: bool) -> Expansion:
        B, K = nodes.shape[0], nodes.shape[1] // DEGREE
        num_points = nodes.shape[:2].numel() * (1 + nodes.shape[-1])
        self.discrete.work.add(4 * num_points if exact else num_points)
        times = torch.full((B, K), 1 / K, dtype=nodes.dtype, device=nodes.device)
        values, tangents, hessians = self.elements.frame(nodes) if exact else (*self.discrete.frame(nodes), None)
        images = [split(x).flatten(0, 1) for x in values]
        pushed = [split(J.permute(1, 2, 0, 3).flatten(2)).unflatten(-1, (len(J), -1)).flatten(0, 1) for J in tangents]
        local, forces = expand_locally(images, pushed, stiffness(times).flatten(0, 1))
        if hessians is not None:
            whole = hessians([join(f.unflatten(0, (B, K))) for f in forces])
            local.curvature = _once(self.elements.symmetric(whole)).flatten(0, 1)
        model = assemble(**{name: x.unflatten(0, (B, K)) for name, x in vars(local).items()})
        gradient = model.gradient[:, 1:].clone()
        gradient[:, -1] = 0
        return Expansion(model.energy, gradient.reshape(B, K, -1), model.diagonal, model.upper, model.curvature)

    def bends(self, nodes: Tensor) -> Tensor:
        """What the Gauss-Newton matrix lacks, along curves of one element: a density at its inner nodes, ``(B, p - 1, d, d)``."""
        size = self.discrete.chunk_size(nodes, 3 * (2 + nodes.shape[-1]))
        return torch.cat([self._bends(chunk) for chunk in nodes.split(size)])

    def _bends(self, nodes: Tensor) -> Tensor:
        inner, origin = nodes[:, 1:-1], nodes[:, :1]
        self.discrete.work.add(nodes.shape[:2].numel() + inner.shape[:2].numel() * 3 * (1 + nodes.shape[-1]))
        values = self.elements.parts(nodes, origin)
        forces = [2 * table("stiffness", nodes)[1:-1] @ (x - x[:, :1]) for x in reversed(values)]
        hessians = self.elements.symmetric(self.elements.hessians(inner, forces, origin))
        return hessians / table("weights", nodes)[1:-1, None, None]


def _once(values: Tensor) -> Tensor:
    """Values at the nodes of curves, at the nodes of their elements: nought at the first of each."""
    parts = values[:, 1:].unflatten(1, (-1, DEGREE))
    return torch.cat([torch.zeros_like(parts[:, :, :1]), parts], 2)


def held(bends: Tensor, num_elements: int) -> Tensor:
    """The blocks that the curvature, known at the inner nodes of one element, adds to the Hessian of several."""
    B, _, d, _ = bends.shape
    values = torch.einsum("nm,bmij->bnij", _extension(num_elements, bends.dtype, bends.device), bends)
    blocks = bends.new_zeros(B, num_elements, DEGREE, d, DEGREE, d)
    blocks.diagonal(0, 2, 4).copy_(values.unflatten(1, (num_elements, DEGREE)).movedim(2, -1))
    return blocks.reshape(B, num_elements, DEGREE * d, DEGREE * d)


@functools.lru_cache(maxsize=64)
def _extension(num_elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """From inner nodes of one element to all nodes of several but the first, times their weights; 0 at the last."""
    weights = np.tile(table("weights", _DOUBLE).numpy()[1:] / num_elements, num_elements)
    weights[DEGREE - 1 :: DEGREE] *= 2
    weights[-1] = 0
    inner = legendre.legvander(2 * _times(1)[1:-1] - 1, DEGREE - 2)
    matrix = legendre.legvander(2 * _times(num_elements)[1:] - 1, DEGREE - 2) @ np.linalg.inv(inner)
    with torch.inference_mode(False):
        return torch.as_tensor(weights[:, None] * matrix, dtype=dtype, device=device)


def measure(energy: SpectralEnergy, nodes: Tensor, solved: Tensor) -> tuple[Measurement, Tensor]:
    """Measures curves on shorter elements; also by how much that differs from the energy they were `solved` with."""
    fine = _by_element("halves", nodes)
    while fine.shape[1] <= _LOOKS:
        fine = _by_element("halves", fine)
    found, length = energy.measured(fine)
    change = (found - solved).abs() / found.clamp_min(torch.finfo(found.dtype).tiny)
    return Measurement(found, length, torch.zeros_like(found), length, torch.isfinite(change)), change


def evened(nodes: Tensor) -> Tensor:
    """The same curves by nodes at equal times, `EVEN` times as many."""
    return _by_element("even", nodes)


def _by_element(name: str, nodes: Tensor) -> Tensor:
    new = table(name, nodes) @ split(nodes)
    return torch.cat([new.flatten(1, 2), nodes[:, -1:]], 1)


def placed(nodes: Tensor, num_segments: int) -> Tensor:
    """Nodes of elements, `num_segments` and one, on the splines through ``nodes`` at equal times."""
    new = _placement(nodes.shape[1] - 1, num_segments // DEGREE, nodes.dtype, nodes.device) @ nodes
    new[:, 0], new[:, -1] = nodes[:, 0], nodes[:, -1]
    return new


@functools.lru_cache(maxsize=64)
def _placement(num_segments: int, num_elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    splines = interpolate.CubicSpline(np.linspace(0, 1, num_segments + 1), np.eye(num_segments + 1))
    weights = splines(_times(num_elements))
    with torch.inference_mode(False):
        return torch.as_tensor(weights, dtype=dtype, device=device)


def _times(num_elements: int) -> np.ndarray:
    """The times of the nodes of elements that last equally long."""
    points = table("points", _DOUBLE).numpy()
    return np.append((np.arange(num_elements)[:, None] + points[:-1]).ravel() / num_elements, 1.0)
