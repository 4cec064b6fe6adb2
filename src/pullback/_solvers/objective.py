"""What the minimizer takes: an energy of curves with its second-order expansion."""

from __future__ import annotations

import abc
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pullback._autodiff.rewrites import Rewritten

# Rounding of an energy, in units of the last place times the energy.
NOISE = 64


class NoEmbeddingError(ValueError):
    """An embedding found at some codes is missing at others: a parameter it takes for constant varies with the code."""


@dataclass
class Expansion:
    """Second-order expansion of the energies of B curves in n blocks of k unknowns each.

    A block is an inner node, or the nodes of an element after its first.
    """

    energy: Tensor  # (B,)
    gradient: Tensor  # (B, n, k)
    diagonal: Tensor  # (B, n, k, k): Gauss-Newton blocks
    upper: Tensor  # (B, n - 1, k, k)
    curvature: Tensor  # (B, n, k, k): what the exact Hessian adds to the diagonal; zero where it was not asked for


@dataclass
class Work:
    """Counts of work: batched decoder calls, and decoded points (a point with its d tangents counts 1 + d)."""

    num_calls: int = 0
    num_decoded: int = 0

    def add(self, num_points: int) -> None:
        self.num_calls += 1
        self.num_decoded += num_points


class Objective(abc.ABC):
    """An energy of curves with nodes ``(B, T + 1, d)``; `constants` are numbers of each curve, ``(B, m)``
    (abstract)."""

    @property
    @abc.abstractmethod
    def has_hessian(self) -> bool:
        """Whether expansions can be exact."""

    @property
    def has_slopes(self) -> bool:
        """Whether gradients alone cost much less than expansions."""
        return False

    def slopes(self, nodes: Tensor, constants: Tensor) -> tuple[Tensor, Tensor]:
        """The energies and their gradients, as in an expansion."""
        found = self.expand(nodes, torch.zeros(len(nodes), dtype=torch.bool), constants)
        return found.energy, found.gradient

    @abc.abstractmethod
    def energy(self, nodes: Tensor, constants: Tensor) -> Tensor:
        """The energies, ``(B,)``."""

    @abc.abstractmethod
    def expand(self, nodes: Tensor, exact: Tensor, constants: Tensor) -> Expansion:
        """The Gauss-Newton expansion, with the exact Hessian for the curves where `exact`, on the host, is true."""


def differentiated(energy: Callable[[Tensor], Tensor], nodes: Tensor) -> tuple[Tensor, Tensor]:
    """Energies of curves and their derivatives in all nodes, by one reverse sweep; constants."""
    with torch.inference_mode(False), torch.enable_grad(), Rewritten():
        free = nodes.detach().clone().requires_grad_()
        value = energy(free)
        (gradient,) = torch.autograd.grad(value.sum(), free)
    return value.detach(), gradient
