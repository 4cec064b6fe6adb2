r"""Second derivatives of decoders whose family has an isometric root.

Where the root of the information is the derivative of the family's embedding, :math:`D\phi = R(\eta)\,D\eta`, the
embedding itself need not be differentiated. Its second derivative along v and w is

.. math:: \phi''[v, w] = R(\eta)\,\eta''[v, w] + \big(\partial_{D\eta\,w} R\big)(\eta)\; D\eta\,v ,

so that only the coordinates :math:`\eta` go through torch's higher derivatives, and what the family makes of them is
one step. That is several times faster: the last layer of a decoder is linear, and families are not.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pullback._autodiff.derivatives import jet
from pullback._families.information import Information, Linear
from pullback._metrics.base import Metric


def isometric_information(metric: Metric, z: Tensor) -> Information | None:
    """The information of what ``z`` is decoded to, if its root is the derivative of the metric's embedding."""
    known = metric.isometric(z)
    return None if known is None else known.info


def isometric_jet(metric: Metric, z: Tensor, v: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """The Jacobian ``(d, *batch, K)`` of the embedding and its second derivatives along ``v`` and ``w``,
    ``(m, *batch, K)``; constants."""
    n, known = z.ndim - 1, []

    def flat(x: Tensor) -> tuple[Tensor]:
        known[:] = [_information(metric, x)]
        return (known[0].eta.flatten(n),)

    (values,), (first,), (bend,) = jet(flat, z, v, w)
    shape, root = known[0].eta.shape[n:], known[0].root
    eta = values.detach().unflatten(-1, shape)
    along, *moves = (torch.cat([v[None], w]).movedim(0, -2) @ first).movedim(-2, 0).unflatten(-1, shape)
    tangents = torch.cat([first.movedim(-2, 0), bend.movedim(-1, 0)]).unflatten(-1, shape)
    with torch.no_grad():
        pushed = root(eta, tangents).flatten(n + 1)
    first, second = pushed.split([z.shape[-1], len(w)])
    return first, second + _turn(root, eta, along, moves).flatten(n + 1)


def _turn(root: Linear, eta: Tensor, along: Tensor, moves: list[Tensor]) -> Tensor:
    """The derivatives of ``root(eta, along)`` in ``eta`` along each of the moves; reverse mode twice."""
    with torch.enable_grad():
        eta = eta.detach().requires_grad_()
        value = root(eta, along.detach())
        dual = torch.zeros_like(value, requires_grad=True)
        if not value.requires_grad:
            return value.new_zeros(len(moves), *value.shape)
        (pulled,) = torch.autograd.grad(value, eta, dual, create_graph=True, materialize_grads=True)
        if not pulled.requires_grad:
            return value.new_zeros(len(moves), *value.shape)
        options = {"retain_graph": True, "materialize_grads": True}
        return torch.stack([torch.autograd.grad(pulled, dual, move, **options)[0] for move in moves])


def _information(metric: Metric, z: Tensor) -> Information:
    info = isometric_information(metric, z)
    if info is None:
        raise ValueError("The metric has isometric coordinates at some codes and none at others.")
    return info
