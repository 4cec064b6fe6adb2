r"""Dual embeddings: coordinates in which a family's squared chord is a plain product of differences.

A *dual embedding* of a family is a pair of maps :math:`\phi, \psi` from distributions to vectors with

.. math:: \mathrm{chord}^2(p, q) = (\phi(q) - \phi(p)) \cdot (\psi(q) - \psi(p)), \qquad I = D\phi^\top D\psi.

Three classical facts are instances. A family with an isometric Euclidean embedding has :math:`\phi = \psi` (Bernoulli
:math:`2\arcsin\sqrt p`, categorical :math:`2\sqrt p`, Poisson :math:`2\sqrt\lambda`). An exponential family has the natural and
the mean parameters, and the chord is the Jeffreys divergence. A location-scale family is a hyperbolic plane, and the pair is
its hyperboloid in Minkowski space with one factor's sign flipped.

The chord agrees with the Fisher-Rao distance to third order, so curves measured by it converge with order two.
"""

from __future__ import annotations

from functools import singledispatch

import torch
from torch import Tensor
from torch.distributions import Bernoulli, Distribution

Dual = tuple[Tensor, Tensor]


@singledispatch
def embed(p: Distribution, origin: Distribution | None = None) -> Dual | None:
    """The pair (phi, psi) of shapes ``(*batch_shape, m)``; the same tensor twice for a Euclidean embedding; None if unknown.

    `origin` only improves rounding: families whose group of motions is at hand (location-scale) are moved so that `origin`
    lies at the base point, which leaves chords unchanged.
    """
    return None


@embed.register
def _(p: Bernoulli, origin: Distribution | None = None) -> Dual:
    r"""φ = 2 arcsin √p - π/2 = gd(l/2) = 2 atan tanh(l/4), the Gudermannian: exact at saturation."""
    phi = 2 * torch.atan(torch.tanh(p.logits / 4))[..., None]
    return phi, phi


def squared_chord(p: Distribution, q: Distribution, num_batch: int) -> Tensor | None:
    """``chord²(p, q)`` summed over all but the first `num_batch` dimensions, or None if the family has no embedding."""
    first, second = embed(p, origin=p), embed(q, origin=p)
    if first is None or second is None:
        return None
    chord = (second[0] - first[0]) * (second[1] - first[1])
    return chord.flatten(num_batch).sum(-1)
