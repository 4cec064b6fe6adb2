r"""Curves of straight pieces, each measured in many chords.

No chord is longer than a piece over the number of its chords, so nodes cannot draw together and leave one long chord across a wall.
The expansion in the nodes is that of the chords' energy, restricted by the hat functions P: ``Pᵀ H P``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pullback._solvers.discrete import DiscreteEnergy, Expansion, lerp_nodes, pull_energy, pulled


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
    ahead = torch.arange(factor + 1, dtype=fine.energy.dtype, device=fine.energy.device) / factor
    behind = 1 - ahead

    def pieces(inner: Tensor, last: int) -> Tensor:
        """What belongs to the fine nodes of each piece but its last, or to the steps behind them; nothing at the ends."""
        return torch.nn.functional.pad(inner.flatten(2), (0, 0, 1, last)).unflatten(1, (-1, factor))

    def contract(weights: Tensor, blocks: Tensor) -> Tensor:
        return torch.einsum("j,bnjx->bnx", weights, blocks)

    def meet(first: Tensor, second: Tensor) -> Tensor:
        """At each inner node, what the piece before it brings and what the one behind it brings."""
        return first[:, :-1] + second[:, 1:]

    shape = fine.diagonal.shape[2:]
    gradient, diagonal = pieces(fine.gradient[..., None], 0), pieces(fine.diagonal, 0)
    upper, lower = pieces(fine.upper, 1), pieces(fine.upper.mT, 1)
    squares = [contract(w[:-1] ** 2, diagonal) + contract(w[:-1] * w[1:], upper + lower) for w in (ahead, behind)]
    cross = contract(behind[:-1] * ahead[:-1], diagonal)
    cross += contract(behind[:-1] * ahead[1:], upper) + contract(behind[1:] * ahead[:-1], lower)
    square = meet(*squares).unflatten(2, shape)
    slope = meet(*(contract(w[:-1], gradient) for w in (ahead, behind)))
    return Expansion(fine.energy, slope, square, cross[:, 1:-1].unflatten(2, shape), torch.zeros_like(square))
