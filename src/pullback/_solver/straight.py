r"""Curves of straight pieces, each measured in many chords.

No chord is longer than a piece over the number of its chords, so nodes cannot draw together and leave one long chord across a wall.
The expansion in the nodes is that of the chords' energy, restricted by the hat functions P: ``Pᵀ H P``.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from pullback._solver.discrete import DiscreteEnergy, Expansion, lerp_nodes, pull_energy, pulled


@dataclass(frozen=True)
class StraightEnergy:
    """Energies of straight pieces between nodes, as an objective of `Minimizer`; `pull` spaces nodes where the metric vanishes."""

    discrete: DiscreteEnergy
    substeps: int  # chords a piece

    @property
    def curved(self) -> bool:
        return False

    def energy(self, nodes: Tensor, times: Tensor, pull: Tensor) -> Tensor:
        return self.discrete.energy(lerp_nodes(nodes, self.substeps)) + pull_energy(nodes, pull)

    def expand(self, nodes: Tensor, exact: Tensor, times: Tensor, pull: Tensor) -> Expansion:
        fine = self.discrete.expand(lerp_nodes(nodes, self.substeps), torch.zeros_like(exact))
        return pulled(_restrict(fine, self.substeps), nodes, pull)


def _restrict(fine: Expansion, factor: int) -> Expansion:
    """The expansion in every `factor`-th node, the others being linear in those: ``Pᵀ H P`` for the hat functions P."""
    hats = _hat_products((fine.gradient.shape[1] + 1) // factor, factor, fine.energy.dtype, fine.energy.device)
    once, square, next_, right, cross, back = hats

    def contract(weights: Tensor, blocks: Tensor) -> Tensor:
        return (weights.mT @ blocks.flatten(2)).unflatten(2, blocks.shape[2:])

    diagonal = contract(square, fine.diagonal) + contract(next_, fine.upper + fine.upper.mT)
    upper = contract(right, fine.diagonal) + contract(cross, fine.upper) + contract(back, fine.upper.mT)
    return Expansion(fine.energy, once.mT @ fine.gradient, diagonal, upper, torch.zeros_like(diagonal))


@functools.lru_cache(maxsize=64)
def _hat_products(num_segments: int, factor: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    """The hat functions of inner coarse nodes at inner fine nodes, and the products of neighbours that `_restrict` needs."""
    with torch.inference_mode(False):
        x = torch.arange(1, num_segments * factor, dtype=dtype, device=device) / factor
        hats = (1 - (x[:, None] - torch.arange(1, num_segments, dtype=dtype, device=device)).abs()).clamp_min(0)
        left, right = hats[:, :-1], hats[:, 1:]
        return (
            hats,
            hats * hats,
            hats[:-1] * hats[1:],
            left * right,
            left[:-1] * right[1:],
            left[1:] * right[:-1],
        )
