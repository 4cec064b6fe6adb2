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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pullback._autodiff.derivatives import Map, Tensors, basis, gradients, hessian, jet
from pullback._families.information import Information, Maps


def embedding(info: Information) -> Maps:
    """The maps of a family that is known to have them."""
    assert info.maps is not None
    return info.maps


@dataclass(frozen=True)
class Part:
    """What codes ``z (*batch, d)`` are decoded to in one family, in its coordinates ``eta (*batch, *features, k)``,
    with their Jacobian, ``(d, *batch, *features, k)``; constants.

    Forces are given for each map, ``(*batch, F)``, and are summed where the part has fewer maps. `origin` are the
    coordinates of the origin; those of `info` are not looked at.
    """

    z: Tensor
    eta: Tensor
    tangents: Tensor
    origin: Tensor | None
    info: Information

    @property
    def maps(self) -> Maps:
        return embedding(self.info)

    @property
    def is_euclidean(self) -> bool:
        return self.info.isometry is not None or self.info.separable

    @functools.cached_property
    def values(self) -> Tensors:
        return embedded(replace(self.info, eta=self.eta), self.origin, self.z.ndim - 1)

    @functools.cached_property
    def pushed(self) -> Tensors:
        """Their Jacobians, ``(d, *batch, F)``."""
        return tuple(self._flat(x, self.z.ndim) for x in self.maps.push(self.eta, self.origin, self.tangents))

    @functools.cached_property
    def factors(self) -> Tensors:
        """The same, or smaller ones whose products add up the same once they are made symmetric."""
        if self.maps.factors is None:
            return self.pushed
        blocks = self.maps.factors(self.eta, self.origin)
        return tuple(self._flat(_mixed(rows, self.tangents), self.z.ndim) for rows in blocks)

    @functools.cached_property
    def roots(self) -> Tensors:
        """Jacobians whose products are the metric tensor: of one map in an orthonormal basis of the family where it
        has one, which has fewer numbers than a pair and is positive also between nodes that are far apart."""
        if self.is_euclidean or self.info.root is None:
            return self.pushed
        return (self._flat(self.info.root(self.eta, self.tangents), self.z.ndim),)

    def at(self, rows: Tensor) -> Part:
        origin = None if self.origin is None else self.origin[rows]
        return Part(self.z[rows], _rows(self.eta, rows, 0), _rows(self.tangents, rows, 1), origin, self.info)

    def inner(self) -> Part:
        return replace(self, z=self.z[:, 1:-1], eta=self.eta[:, 1:-1], tangents=self.tangents[:, :, 1:-1])

    def slopes(self, forces: list[Tensor]) -> Tensor:
        """Derivatives ``(*batch, d)`` of the sum over the maps of ``force · map``."""
        if self.is_euclidean:
            return _products(self.pushed[0], _total(forces))
        pulled = self._flat(self.pulled(forces), self.z.ndim - 1)
        return _products(self._flat(self.tangents, self.z.ndim), pulled)

    def between(self) -> Tensor:
        r"""``Dφᵢᵀ Dψᵢ₊₁ + Dψᵢᵀ Dφᵢ₊₁`` between each node and the next, ``(B, n - 1, d, d)``."""
        k, d = self.eta.shape[-1], self.z.shape[-1]
        if self.is_euclidean or k * k > d:
            return _crossed(self.factors)
        # by the maps' derivatives in the coordinates, which are fewer than the codes
        phi, psi = self.maps.push(self.eta, self.origin, basis(self.eta))
        here, there = ([x[:, :, nodes] for x in (phi, psi)] for nodes in (slice(-1), slice(1, None)))
        blocks = [torch.linalg.vecdot(x, y[:, None]) for x, y in zip(here, reversed(there), strict=True)]
        mixed = _mixed([row.unbind() for row in blocks[0] + blocks[1]], self.tangents[:, :, :-1])
        return self._gram(mixed, self.tangents[:, :, 1:])

    def pulled(self, forces: list[Tensor], eta: Tensor | None = None) -> Tensor:
        """``Rᵀ f``, the derivative of ``f · R(eta) u`` in u; as a function of `eta` if that is given."""
        at = self.eta if eta is None else eta
        shaped = self._shaped(forces)
        if self.info.separable:
            return self.maps.push(at, self.origin, shaped[0])[0]
        if self.maps.pull is not None:
            return self.maps.pull(at, self.origin, shaped)
        with torch.enable_grad():
            u = torch.zeros_like(self.eta, requires_grad=True)
            maps = self.maps.push(at, self.origin, u)
            work = torch.stack([(x * f).sum() for x, f in zip(maps, shaped, strict=True)]).sum()
            return torch.autograd.grad(work, u, create_graph=eta is not None, materialize_grads=True)[0]

    def bend(self, forces: list[Tensor]) -> tuple[Tensor, Tensor]:
        """``Rᵀ f`` and ``Dηᵀ ∂(Rᵀ f) Dη``, ``(*batch, d, d)``."""
        k = 1 if self.info.separable else self.eta.shape[-1]
        if k > self.z.shape[-1]:
            # codes are fewer than coordinates: from derivatives of ``f · R(eta) u`` for the tangents u
            with torch.enable_grad():
                eta = self.eta.detach().expand_as(self.tangents).requires_grad_()
                maps = self.maps.push(eta, self.origin, self.tangents)
                work = [(x * f).sum() for x, f in zip(maps, self._shaped(forces), strict=True)]
                (turned,) = torch.autograd.grad(torch.stack(work).sum() + 0 * eta.sum(), eta)
            return self.pulled(forces), self._gram(turned, self.tangents)
        with torch.enable_grad():
            eta = self.eta.detach().requires_grad_()
            pulled = self.pulled(forces, eta)
            places = [pulled] if self.info.separable else pulled.unbind(-1)
            turns = [gradients(x, eta, create_graph=False)[0] for x in places]
        if self.info.separable:
            turned = turns[0] * self.tangents
        else:
            turned = _mixed([turn.unbind(-1) for turn in turns], self.tangents)
        return pulled.detach(), self._gram(turned, self.tangents)

    def _gram(self, left: Tensor, right: Tensor) -> Tensor:
        rows, others = (self._flat(u, self.z.ndim).movedim(0, -2) for u in (left, right))
        return rows @ others.mT

    def _shaped(self, forces: list[Tensor]) -> list[Tensor]:
        """The forces on each of the part's maps, with the features of its coordinates."""
        known = [_total(forces)] if self.is_euclidean else forces
        features = self.eta.shape[:-1]
        if is_planar(self.eta, self.z.ndim - 1):
            return [f.reshape(*features[:-1], -1, features[-1]).mT for f in known]
        return [f.reshape(*features, -1) for f in known]

    def _flat(self, x: Tensor, n: int) -> Tensor:
        return in_a_row(x, n, is_planar(self.eta, self.z.ndim - 1))


def embedded(info: Information, origin: Tensor | None, n: int) -> Tensors:
    """The maps of a family, ``(*batch, F)``, for n batch dimensions."""
    planar = is_planar(info.eta, n)
    return tuple(in_a_row(x, n, planar) for x in embedding(info).values(info.eta, origin))


def is_planar(eta: Tensor, n: int) -> bool:
    """Whether each coordinate of all features lies in one piece of memory, for n batch dimensions."""
    return eta.ndim > n + 1 and eta.shape[-1] > 1 and eta.stride(-1) != 1


def in_a_row(x: Tensor, n: int, planar: bool) -> Tensor:
    """The features after the first n dimensions in a row, in the order in which they lie in memory."""
    return (x.mT if planar else x).flatten(n)


def _crossed(maps: Tensors) -> Tensor:
    phi, psi = (J.movedim(0, -2) for J in (maps[0], maps[-1]))
    return phi[:, :-1] @ psi[:, 1:].mT + psi[:, :-1] @ phi[:, 1:].mT


def _rows(x: Tensor, rows: Tensor, dim: int) -> Tensor:
    """Some rows, as they lie in memory."""
    return x.mT.index_select(dim, rows).mT if x.ndim > 2 and x.stride(-1) != 1 else x.index_select(dim, rows)


def _mixed(blocks: Sequence[Sequence[Tensor]], tangents: Tensor) -> Tensor:
    """Small matrices of every feature times tangents ``(d, *batch, *features, k)``, in as few passes as can be."""
    columns, mixed = tangents.unbind(-1), torch.empty_like(tangents.mT, memory_format=torch.contiguous_format).mT
    for row, column in zip(blocks, mixed.unbind(-1), strict=True):
        torch.mul(row[0], columns[0], out=column)
        for block, u in zip(row[1:], columns[1:], strict=True):
            column.addcmul_(block, u)
    return mixed


@dataclass(frozen=True)
class Frame:
    """An embedding at codes ``z (*batch, d)`` with its derivatives; constants.

    Attributes:
        origin: a code near which rounding is best, broadcastable with ``z``.
        values: the distinct maps, ``(*batch, F)``: one if the embedding is Euclidean, else two.
        maps: the maps as a function of codes and origin.
        parts: the independent parts of what is decoded, where the maps are known as functions of coordinates.
        sizes: entries of the maps of each part.
        coordinates: those of the parts as functions of the codes.
        jacobians: of the maps, ``(d, *batch, F)``, where there are no parts.
    """

    z: Tensor
    origin: Tensor | None
    values: Tensors
    maps: Callable[[Tensor, Tensor | None], Tensors]
    parts: tuple[Part, ...] = ()
    sizes: tuple[int, ...] = ()
    coordinates: Callable[[Tensor], Tensors] | None = None
    jacobians: Tensors = ()

    @functools.cached_property
    def tangents(self) -> Tensors:
        """The maps' Jacobians, ``(d, *batch, F)``."""
        return side_by_side([part.pushed for part in self.parts] or [self.jacobians])

    @property
    def factors(self) -> list[Tensors]:
        """The maps' Jacobians of each part, or smaller ones; see `Part.factors`."""
        return [part.factors for part in self.parts] or [self.jacobians]

    @property
    def roots(self) -> list[Tensors]:
        """Jacobians of one or two maps whose products add up to the metric tensor; see `Part.roots`."""
        return [part.roots for part in self.parts] or [self.jacobians]

    @property
    def between(self) -> Tensor:
        """``Dφᵢᵀ Dψᵢ₊₁ + Dψᵢᵀ Dφᵢ₊₁`` between each node and the next, ``(B, n - 1, d, d)``."""
        return _total([part.between() for part in self.parts] or [_crossed(self.jacobians)])

    def at(self, rows: Tensor) -> Frame:
        """That of some curves."""
        return replace(
            self,
            z=self.z[rows],
            origin=None if self.origin is None else self.origin[rows],
            parts=tuple(part.at(rows) for part in self.parts),
            jacobians=tuple(J[:, rows] for J in self.jacobians),
        )

    def inner(self) -> Frame:
        """That at all nodes but the ends."""
        return replace(
            self,
            z=self.z[:, 1:-1],
            parts=tuple(part.inner() for part in self.parts),
            jacobians=tuple(J[:, :, 1:-1] for J in self.jacobians),
        )

    def slopes(self, forces: list[Tensor]) -> Tensor:
        """Derivatives ``(*batch, d)`` of the mean over the maps of ``2 force · map``."""
        pairs = zip(self.jacobians, forces, strict=True)
        known = [part.slopes(f) for part, f in self._split(forces)] if self.parts else [_products(*p) for p in pairs]
        return 2 / len(forces) * _total(known)

    def hessians(self, forces: list[Tensor]) -> Tensor:
        """Hessians ``(*batch, d, d)`` of the same, symmetric."""
        bends: Sequence[Tensor] = ()
        held: Sequence[Tensor] = forces
        if self.parts:
            held, bends = zip(*(part.bend(f) for part, f in self._split(forces)), strict=True)
        eta_at = self.coordinates if self.parts else None

        def values_at(x: Tensor) -> Tensors:
            return self.maps(x, self.origin) if eta_at is None else eta_at(x)

        blocks = _total([*bends, hessian(values_at, self.z.detach(), functional=False, weights=held)])
        return 1 / len(forces) * (blocks + blocks.mT)

    def _split(self, forces: list[Tensor]) -> Iterator[tuple[Part, list[Tensor]]]:
        pieces = zip(*(f.split(self.sizes, -1) for f in forces), strict=True)
        return zip(self.parts, map(list, pieces), strict=True)


def side_by_side(parts: Sequence[Tensors]) -> Tensors:
    """The maps of independent parts in a row; where some have two, those with one have it twice."""
    if len(parts) == 1:
        return parts[0]
    ends = (0, -1) if any(len(maps) > 1 for maps in parts) else (0,)
    return tuple(torch.cat([maps[i] for maps in parts], -1) for i in ends)


def _total(terms: Sequence[Tensor]) -> Tensor:
    return functools.reduce(torch.add, terms)


def _products(J: Tensor, force: Tensor) -> Tensor:
    """``Jᵀ force`` for Jacobians ``(d, *batch, F)``, without a copy of them."""
    return (J.movedim(0, -2) @ force[..., None])[..., 0]


def plain_jet(maps: Map, z: Tensor, v: Tensor, w: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Jacobians ``(d, *batch, K)`` of maps, and second derivatives ``(m, *batch, K)`` along ``v`` and each of ``w``."""
    _, first, second = jet(maps, z, v, w)
    return [j.movedim(-2, 0) for j in first], [c.movedim(-1, 0) for c in second]


def known_jet(
    parts_at: Callable[[Tensor], list[Information]], z: Tensor, v: Tensor, w: Tensor, *, centered: bool
) -> tuple[list[Tensor], list[Tensor]]:
    r"""The same, as constants, for maps known as functions of the family's coordinates, with the codes for an origin if
    `centered`: :math:`\phi''[v, w] = R(\eta)\,\eta''[v, w] + (\partial_{D\eta\,w} R)(\eta)\, D\eta\,v`."""
    n, known = z.ndim - 1, []

    def flat(x: Tensor) -> Tensors:
        known[:] = parts_at(x)
        return tuple(part.eta.flatten(n) for part in known)

    found = jet(flat, z, v, w)
    jets = [_pushed_jet(*each, v, w, centered) for each in zip(known, *found, strict=True)]
    first, second = (list(side_by_side(each)) for each in zip(*jets, strict=True))
    return first, second


def _pushed_jet(
    part: Information, values: Tensor, first: Tensor, bend: Tensor, v: Tensor, w: Tensor, centered: bool
) -> tuple[Tensors, Tensors]:
    """Those of one part, from the jet of its coordinates."""
    n, push = v.ndim - 1, embedding(part).push
    shape, planar = part.eta.shape[n:], is_planar(part.eta, n)
    eta = values.detach().unflatten(-1, shape)
    origin = eta if centered else None
    along, *moves = (torch.cat([v[None], w]).movedim(0, -2) @ first).movedim(-2, 0).unflatten(-1, shape)
    tangents = torch.cat([first.movedim(-2, 0), bend.movedim(-1, 0)]).unflatten(-1, shape)
    with torch.no_grad():
        rows = [in_a_row(x, n + 1, planar) for x in push(eta, origin, tangents)]
    pushed = [x.split([v.shape[-1], len(w)]) for x in rows]
    turns = [in_a_row(x, n + 1, planar) for x in _turns(lambda y: push(y, origin, along.detach()), eta, moves)]
    return tuple(x for x, _ in pushed), tuple(y + turn for (_, y), turn in zip(pushed, turns, strict=True))


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
