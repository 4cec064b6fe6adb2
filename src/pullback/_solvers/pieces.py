r"""Curves of straight pieces, each measured in many chords, for paths along sharp walls.

No chord is longer than a piece over the number of its chords, so nodes cannot move to both sides of a wall and cross it
unseen. The expansion in the nodes is that of the chords' energy, restricted by the hat functions P: ``Pᵀ H P``. A
little of the Euclidean energy is added, which spaces the nodes where the metric vanishes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pullback._numerics.spline import lerp_nodes
from pullback._solvers.chords import ChordEnergy
from pullback._solvers.objective import Expansion, Objective


@dataclass(frozen=True)
class PieceEnergy(Objective):
    """Energies of straight pieces between nodes; the constant of a curve is the weight of its Euclidean energy."""

    chords: ChordEnergy
    substeps: int  # chords per piece

    @property
    def has_hessian(self) -> bool:
        return False

    def energy(self, nodes: Tensor, constants: Tensor) -> Tensor:
        euclidean = (nodes.shape[1] - 1) * nodes.diff(dim=1).square().sum((1, 2))
        return self.chords.energy(lerp_nodes(nodes, self.substeps)) + constants[:, 0] * euclidean

    def expand(self, nodes: Tensor, exact: Tensor, constants: Tensor) -> Expansion:
        fine = self.chords.expand(lerp_nodes(nodes, self.substeps), torch.zeros_like(exact))
        return _with_euclidean(_restrict(fine, self.substeps), nodes, constants[:, 0])


def _with_euclidean(model: Expansion, nodes: Tensor, weight: Tensor) -> Expansion:
    """Adds `weight` times the Euclidean energy of each curve, in place."""
    steps, weight = nodes.diff(dim=1), weight * (nodes.shape[1] - 1)
    eye = torch.eye(nodes.shape[-1], dtype=nodes.dtype, device=nodes.device) * weight[:, None, None, None]
    model.energy += weight * steps.square().sum((1, 2))
    model.gradient += 2 * weight[:, None, None] * (steps[:, :-1] - steps[:, 1:])
    model.diagonal += 4 * eye
    model.upper -= 2 * eye
    return model


def _restrict(fine: Expansion, factor: int) -> Expansion:
    """The expansion in every `factor`-th node, the others being linear in those: ``Pᵀ H P`` for the hat functions P."""
    ahead = torch.arange(factor + 1, dtype=fine.energy.dtype, device=fine.energy.device) / factor
    behind = 1 - ahead

    def pieces(inner: Tensor, last: int) -> Tensor:
        """What belongs to the fine nodes of each piece but its last, or to the steps behind them; nothing at the
        ends."""
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
