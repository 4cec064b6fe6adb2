r"""An embedding at codes with its first derivatives, and its second ones along forces.

Where a family's embedding is known as a function of its coordinates, :math:`\phi(\eta)`, with the derivative
:math:`D\phi = R(\eta)`, only the coordinates go through torch's higher derivatives. The Hessian of
:math:`f \cdot \phi(\eta(z))` is

.. math:: \nabla^2 \big(R^\top f \cdot \eta\big) + D\eta^\top\, \partial_\eta\big(R(\eta)^\top f\big)\, D\eta ,

with :math:`R^\top f` held constant in the first term. The last layer of a decoder is linear, and families are not: the
sweeps of the first term pass through the decoder alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pullback._autodiff.derivatives import Tensors, constant_hessian


@dataclass(frozen=True)
class Coordinates:
    """What codes ``(*batch, d)`` are decoded to, in coordinates of the family, with their derivatives; constants.

    Attributes:
        eta: the coordinates, ``(*batch, *features, k)``.
        tangents: their Jacobian, ``(d, *batch, *features, k)``.
        origin: the coordinates of the origin, or None.
        of: the coordinates as a function of the codes.
        push: ``push(eta, origin, u)``, the derivatives of the embedding's maps along tangents ``u``; linear in these.
        separable: whether each number of the only map depends on the coordinate in its own place alone.
    """

    eta: Tensor
    tangents: Tensor
    origin: Tensor | None
    of: Callable[[Tensor], Tensor]
    push: Callable[[Tensor, Tensor | None, Tensor], Tensors]
    separable: bool

    def pushed(self, n: int) -> Tensors:
        """The Jacobians of the maps, ``(d, *batch, F)``, for codes of n batch dimensions."""
        return tuple(x.flatten(1 + n) for x in self.push(self.eta, self.origin, self.tangents))

    def inner(self, rows: Tensor) -> Coordinates:
        """Those at the inner nodes of some curves."""
        origin = None if self.origin is None else self.origin[rows]
        return replace(self, eta=self.eta[rows, 1:-1], tangents=self.tangents[:, rows, 1:-1], origin=origin)

    def hessians(self, z: Tensor, forces: list[Tensor]) -> Tensor:
        """The Hessians ``(*batch, d, d)`` of the sum over the maps of ``force · map``, forces ``(*batch, F)``."""
        n = z.ndim - 1
        pulled, bend = (self._by_entry if self.separable else self._by_direction)(n, forces)
        pulled = pulled.flatten(n)
        return bend + constant_hessian(lambda x: _bent((self.of(x).flatten(n) * pulled).sum(-1), x), z)

    def _by_entry(self, n: int, forces: list[Tensor]) -> tuple[Tensor, Tensor]:
        """``Rᵀ f`` and the second term, where both are products entry by entry."""
        with torch.enable_grad():
            eta = self.eta.detach().requires_grad_()
            pulled = forces[0].reshape(eta.shape) * self.push(eta, self.origin, torch.ones_like(eta))[0]
            (turn,) = torch.autograd.grad(pulled.sum(), eta, allow_unused=True, materialize_grads=True)
        rows = self.tangents.flatten(1 + n).movedim(0, -2)
        return pulled.detach(), (rows * turn.flatten(n)[..., None, :]) @ rows.mT

    def _by_direction(self, n: int, forces: list[Tensor]) -> tuple[Tensor, Tensor]:
        """The same for any embedding, from derivatives of ``f · R(eta) u`` in u, and in eta for the tangents u."""
        with torch.enable_grad():
            u = torch.zeros_like(self.eta, requires_grad=True)
            (pulled,) = torch.autograd.grad(self._along(n, self.eta, u, forces), u, materialize_grads=True)
            eta = self.eta.detach().expand_as(self.tangents).requires_grad_()
            work = self._along(1 + n, eta, self.tangents, forces)
            (turned,) = torch.autograd.grad(work, eta, allow_unused=True, materialize_grads=True)
        rows = self.tangents.flatten(1 + n).movedim(0, -2)
        return pulled, turned.flatten(1 + n).movedim(0, -2) @ rows.mT

    def _along(self, n: int, eta: Tensor, u: Tensor, forces: list[Tensor]) -> Tensor:
        maps = self.push(eta, self.origin, u)
        total = torch.stack([(x.flatten(n) * f).sum() for x, f in zip(maps, forces, strict=True)]).sum()
        # a root that is constant in eta has no graph to it
        return total + 0 * eta.sum()


@dataclass(frozen=True)
class Frame:
    """An embedding at codes ``z (*batch, d)`` with its derivatives; constants.

    Attributes:
        z: the codes.
        origin: a code near which rounding is best, broadcastable with ``z``, or None.
        values: the distinct maps, ``(*batch, F)``: one if the embedding is Euclidean, else two.
        tangents: their Jacobians, ``(d, *batch, F)``.
        maps: the maps as a function of codes and origin.
        coordinates: the family's coordinates, where the maps are known as functions of them.
    """

    z: Tensor
    origin: Tensor | None
    values: Tensors
    tangents: Tensors
    maps: Callable[[Tensor, Tensor | None], Tensors]
    coordinates: Coordinates | None = None

    def inner(self, rows: Tensor) -> Frame:
        """The frame at the inner nodes of some curves, for its `hessians`."""
        known = None if self.coordinates is None else self.coordinates.inner(rows)
        origin = None if self.origin is None else self.origin[rows]
        return Frame(self.z[rows, 1:-1], origin, (), (), self.maps, known)

    def hessians(self, forces: list[Tensor]) -> Tensor:
        """Hessians ``(*batch, d, d)`` of the mean over the maps of ``2 force · map``, symmetric."""
        forces = [2 / len(forces) * f for f in forces]
        if self.coordinates is not None:
            blocks = self.coordinates.hessians(self.z, forces)
        else:
            blocks = constant_hessian(lambda x: self._work(x, forces), self.z)
        return 0.5 * (blocks + blocks.mT)

    def _work(self, z: Tensor, forces: list[Tensor]) -> Tensor:
        products = [(x * f).sum(-1) for x, f in zip(self.maps(z, self.origin), forces, strict=True)]
        return torch.stack(products).sum(0)


def _bent(value: Tensor, x: Tensor) -> Tensor:
    """The value as a function that torch believes to have second derivatives, even if it is linear."""
    return value + 0 * x.square().sum(-1)
