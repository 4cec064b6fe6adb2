r"""Curves in elements of equal duration: few nodes for smooth decoders.

The energy of chords has order two in the number of segments, that of elements of degree p the order 2p (`pullback._solver.elements`).
Where a decoder is smooth on the scale of an element, 16 or 32 nodes then give five digits for which chords need hundreds. The curve
that was found is measured on elements half as long, at twice as many points: what that changes is the error of the energy, and twice
as much bounds what a minimum of the approximate energy has above the true minimum,

.. math:: E(z_h) - E(z) \le |E - E_h|(z_h) + |E - E_h|(z) .
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import torch
from scipy import interpolate
from torch import Tensor

from pullback._solver.discrete import DiscreteEnergy, Expansion
from pullback._solver.elements import DEGREE, ElementEnergy, assemble, expand_locally, split, stiffness, table
from pullback._solver.levels import Measurement
from pullback._solver.rows import concatenate


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
        size = self.discrete.chunk_size(nodes, 3 * (2 + nodes.shape[-1]))
        chunks = zip(nodes.split(size), exact.split(size), strict=True)
        return concatenate([self._expand(*chunk) for chunk in chunks])

    def _expand(self, nodes: Tensor, exact: Tensor) -> Expansion:
        self.discrete.work.add(nodes.shape[0] * nodes.shape[1] * (1 + nodes.shape[-1]))
        B, K = nodes.shape[0], nodes.shape[1] // DEGREE
        times = torch.full((B, K), 1 / K, dtype=nodes.dtype, device=nodes.device)
        values, tangents = self.discrete.frame(nodes)
        images = [split(x).flatten(0, 1) for x in values]
        pushed = [
            split(J.permute(1, 2, 0, 3).flatten(2)).unflatten(-1, (J.shape[0], -1)).flatten(0, 1) for J in tangents
        ]
        local, forces = expand_locally(images, pushed, stiffness(times).flatten(0, 1))
        parts = {name: x.unflatten(0, (B, K)) for name, x in vars(local).items()}
        if exact.any():
            parts["curvature"][exact] = self._curvature(nodes[exact], [f.unflatten(0, (B, K))[exact] for f in forces])
        model = assemble(**parts)
        gradient = model.gradient[:, 1:].clone()
        gradient[:, -1] = 0
        return Expansion(model.energy, gradient.reshape(B, K, -1), model.diagonal, model.upper, model.curvature)

    def _curvature(self, nodes: Tensor, forces: list[Tensor]) -> Tensor:
        z = split(nodes)
        self.discrete.work.add(3 * z.shape[:3].numel() * (1 + z.shape[-1]))
        blocks = self.elements.curvature(z.flatten(0, 1), [f.flatten(0, 1) for f in forces])
        return blocks.unflatten(0, z.shape[:2])


def measure(energy: SpectralEnergy, nodes: Tensor, solved: Tensor) -> tuple[Measurement, Tensor]:
    """Measures curves on elements half as long; also by how much that differs from the energy they were `solved` with."""
    found, length = energy.measured(_by_element("halves", nodes))
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
    points = table("points", torch.empty((), dtype=torch.float64)).numpy()
    t = np.append((np.arange(num_elements)[:, None] + points[:-1]).ravel() / num_elements, 1.0)
    weights = interpolate.CubicSpline(np.linspace(0, 1, num_segments + 1), np.eye(num_segments + 1))(t)
    with torch.inference_mode(False):
        return torch.as_tensor(weights, dtype=dtype, device=device)
