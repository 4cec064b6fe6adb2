r"""An embedding at codes with its first derivatives, and its second ones along forces.

Where a family's embedding is known as a function of its coordinates, :math:`\phi(\eta)`, with the derivative
:math:`D\phi = R(\eta)`, only the coordinates go through torch's higher derivatives. The Hessian of
:math:`f \cdot \phi(\eta(z))` is

.. math:: \nabla^2 \big(R^\top f \cdot \eta\big) + D\eta^\top\, \partial_\eta\big(R(\eta)^\top f\big)\, D\eta ,

with :math:`R^\top f` held constant in the first term. The last layer of a decoder is linear, and families are not: the
sweeps of the first term pass through the decoder alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pullback._autodiff.derivatives import Map, Tensors, constant_hessian, jet
from pullback._families.information import Information, Maps


@dataclass(frozen=True)
class Coordinates:
    """What codes ``(*batch, d)`` are decoded to, in coordinates of the family, with their derivatives; constants.

    Attributes:
        eta: the coordinates, ``(*batch, *features, k)``.
        tangents: their Jacobian, ``(d, *batch, *features, k)``.
        origin: the coordinates of the origin, or None.
        of: the coordinates as a function of the codes.
        info: what is known of the family, with its maps; its own coordinates are not looked at.
    """

    eta: Tensor
    tangents: Tensor
    origin: Tensor | None
    of: Callable[[Tensor], Tensor]
    info: Information

    @functools.cached_property
    def maps(self) -> Maps:
        """The embedding as a function of the coordinates."""
        maps = self.info.maps
        assert maps is not None
        return maps

    def pushed(self, n: int) -> Tensors:
        """The Jacobians of the maps, ``(d, *batch, F)``, for codes of n batch dimensions."""
        return tuple(x.flatten(1 + n) for x in self.maps.push(self.eta, self.origin, self.tangents))

    def part(self, rows: Tensor, nodes: slice) -> Coordinates:
        """Those at some nodes of some curves."""
        origin = None if self.origin is None else self.origin[rows]
        return replace(self, eta=self.eta[rows, nodes], tangents=self.tangents[:, rows, nodes], origin=origin)

    def hessians(self, z: Tensor, forces: list[Tensor]) -> Tensor:
        """The Hessians ``(*batch, d, d)`` of the sum over the maps of ``force · map``, forces ``(*batch, F)``."""
        n = z.ndim - 1
        pulled, bend = (self._by_entry if self.info.separable else self._by_direction)(n, forces)
        pulled = pulled.flatten(n)
        return bend + constant_hessian(lambda x: _bent((self.of(x).flatten(n) * pulled).sum(-1), x), z)

    def _by_entry(self, n: int, forces: list[Tensor]) -> tuple[Tensor, Tensor]:
        """``Rᵀ f`` and the second term, where both are products entry by entry."""
        with torch.enable_grad():
            eta = self.eta.detach().requires_grad_()
            root = self.maps.push(eta, self.origin, torch.ones_like(eta))[0]
            # a root that is constant in eta has no graph to it
            pulled = forces[0].reshape(eta.shape) * root + 0 * eta
            (turn,) = torch.autograd.grad(pulled.sum(), eta)
        rows = self.tangents.flatten(1 + n).movedim(0, -2)
        return pulled.detach(), (rows * turn.flatten(n)[..., None, :]) @ rows.mT

    def _by_direction(self, n: int, forces: list[Tensor]) -> tuple[Tensor, Tensor]:
        """The same for any embedding, from derivatives of ``f · R(eta) u`` in eta for the tangents u."""
        with torch.enable_grad():
            eta = self.eta.detach().expand_as(self.tangents).requires_grad_()
            work = self._along(1 + n, eta, self.tangents, forces)
            (turned,) = torch.autograd.grad(work, eta)
        rows = self.tangents.flatten(1 + n).movedim(0, -2)
        return self.pulled(n, forces), turned.flatten(1 + n).movedim(0, -2) @ rows.mT

    def pulled(self, n: int, forces: list[Tensor]) -> Tensor:
        """``Rᵀ f``: the derivative of ``f · R(eta) u`` in u."""
        with torch.enable_grad():
            u = torch.zeros_like(self.eta, requires_grad=True)
            return torch.autograd.grad(self._along(n, self.eta, u, forces), u, materialize_grads=True)[0]

    def _along(self, n: int, eta: Tensor, u: Tensor, forces: list[Tensor]) -> Tensor:
        maps = self.maps.push(eta, self.origin, u)
        total = torch.stack([(x.flatten(n) * f).sum() for x, f in zip(maps, forces, strict=True)]).sum()
        return total + 0 * eta.sum()  # as above


@dataclass(frozen=True)
class Frame:
    """An embedding at codes ``z (*batch, d)`` with its derivatives; constants.

    Attributes:
        z: the codes.
        origin: a code near which rounding is best, broadcastable with ``z``, or None.
        values: the distinct maps, ``(*batch, F)``: one if the embedding is Euclidean, else two.
        maps: the maps as a function of codes and origin.
        coordinates: the family's coordinates, where the maps are known as functions of them.
        jacobians: the maps' Jacobians, ``(d, *batch, F)``, where they are not.
    """

    z: Tensor
    origin: Tensor | None
    values: Tensors
    maps: Callable[[Tensor, Tensor | None], Tensors]
    coordinates: Coordinates | None = None
    jacobians: Tensors = ()

    @functools.cached_property
    def tangents(self) -> Tensors:
        """The maps' Jacobians, ``(d, *batch, F)``."""
        return self.jacobians if self.coordinates is None else self.coordinates.pushed(self.z.ndim - 1)

    @functools.cached_property
    def roots(self) -> Tensors:
        """Jacobians whose products are the metric tensor: of one map in an orthonormal basis of the family where it
        has one, which has fewer numbers than a pair and is positive also between nodes that are far apart."""
        known = self.coordinates
        if len(self.values) == 1 or known is None or known.info.root is None:
            return self.tangents
        return (known.info.root(known.eta, known.tangents).flatten(self.z.ndim),)

    def part(self, rows: Tensor, nodes: slice = slice(None)) -> Frame:
        """The frame at some nodes of some curves."""
        known = None if self.coordinates is None else self.coordinates.part(rows, nodes)
        origin = None if self.origin is None else self.origin[rows]
        values = tuple(x[rows, nodes] for x in self.values)
        return Frame(
            self.z[rows, nodes], origin, values, self.maps, known, tuple(J[:, rows, nodes] for J in self.jacobians)
        )

    def slopes(self, forces: list[Tensor]) -> Tensor:
        """Derivatives ``(*batch, d)`` of the mean over the maps of ``2 force · map``."""
        if len(forces) == 1 or self.coordinates is None:
            products = [_products(J, f) for J, f in zip(self.tangents, forces, strict=True)]
            return 2 * torch.stack(products).mean(0)
        n = self.z.ndim - 1
        return _products(self.coordinates.tangents.flatten(1 + n), self.coordinates.pulled(n, forces).flatten(n))

    def hessians(self, forces: list[Tensor]) -> Tensor:
        """Hessians ``(*batch, d, d)`` of the same, symmetric."""
        forces = [2 / len(forces) * f for f in forces]
        if self.coordinates is not None:
            blocks = self.coordinates.hessians(self.z, forces)
        else:
            blocks = constant_hessian(lambda x: self._work(x, forces), self.z)
        return 0.5 * (blocks + blocks.mT)

    def _work(self, z: Tensor, forces: list[Tensor]) -> Tensor:
        products = [(x * f).sum(-1) for x, f in zip(self.maps(z, self.origin), forces, strict=True)]
        return torch.stack(products).sum(0)


def _products(J: Tensor, force: Tensor) -> Tensor:
    """``Jᵀ force`` for Jacobians ``(d, *batch, F)``, without a copy of them."""
    return (J.movedim(0, -2) @ force[..., None])[..., 0]


def _bent(value: Tensor, x: Tensor) -> Tensor:
    """The value as a function that torch believes to have second derivatives, even if it is linear."""
    return value + 0 * x.square().sum(-1)


def plain_jet(maps: Map, z: Tensor, v: Tensor, w: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Jacobians ``(d, *batch, K)`` of maps and their second derivatives along ``v`` and each of ``w``, ``(m, *batch,
    K)``."""
    _, first, second = jet(maps, z, v, w)
    return [j.movedim(-2, 0) for j in first], [c.movedim(-1, 0) for c in second]


def known_jet(
    info_at: Callable[[Tensor], Information], z: Tensor, v: Tensor, w: Tensor, *, centered: bool
) -> tuple[list[Tensor], list[Tensor]]:
    r"""The same for maps known as functions of the family's coordinates; constants.

    :math:`\phi''[v, w] = R(\eta)\,\eta''[v, w] + (\partial_{D\eta\,w} R)(\eta)\, D\eta\,v`. The codes are the origin
    if `centered`.
    """
    n, known = z.ndim - 1, []

    def flat(x: Tensor) -> tuple[Tensor]:
        known[:] = [info_at(x)]
        return (known[0].eta.flatten(n),)

    (values,), (first,), (bend,) = jet(flat, z, v, w)
    shape, push = known[0].eta.shape[n:], known[0].maps.push
    eta = values.detach().unflatten(-1, shape)
    origin = eta if centered else None
    along, *moves = (torch.cat([v[None], w]).movedim(0, -2) @ first).movedim(-2, 0).unflatten(-1, shape)
    tangents = torch.cat([first.movedim(-2, 0), bend.movedim(-1, 0)]).unflatten(-1, shape)
    with torch.no_grad():
        pushed = [x.flatten(n + 1).split([z.shape[-1], len(w)]) for x in push(eta, origin, tangents)]
    turns = [x.flatten(n + 1) for x in _turns(lambda y: push(y, origin, along.detach()), eta, moves)]
    return [x for x, _ in pushed], [y + turn for (_, y), turn in zip(pushed, turns, strict=True)]


def _turns(f: Callable[[Tensor], Tensors], eta: Tensor, moves: list[Tensor]) -> list[Tensor]:
    """The derivatives of maps in ``eta`` along each of the moves, ``(m, ...)``; reverse mode twice."""
    turns = []
    with torch.enable_grad():
        eta = eta.detach().requires_grad_()
        for value in f(eta):
            dual = torch.zeros_like(value, requires_grad=True)
            # a map that is linear in eta has no graph to it
            bent = value + 0 * eta.square().sum()
            (pulled,) = torch.autograd.grad(bent, eta, dual, create_graph=True)
            turns.append(torch.stack([torch.autograd.grad(pulled, dual, x, retain_graph=True)[0] for x in moves]))
    return turns
