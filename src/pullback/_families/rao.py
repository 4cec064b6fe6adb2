"""Closed-form Fisher-Rao distances between two members of a family, where they are known."""

from __future__ import annotations

from functools import singledispatch

from torch import Tensor
from torch.distributions import Distribution


def rao_distance(p: Distribution, q: Distribution) -> Tensor:
    r"""The Fisher-Rao distance of two members of the same family, of shape ``batch_shape``.

    This is the geodesic distance on the whole family, :math:`\min_c \int \sqrt{\dot c^\top I(c)\, \dot c}\, dt`. The distance between
    *products* of independent features is the root of the sum of squares of the features' distances, because a product of
    Riemannian manifolds has that distance: wrap the features in `torch.distributions.Independent` to get it. It bounds the
    distance of two codes in a latent space from below, because latent curves are curves on the family.

    Open for registration: ``@pullback.rao_distance.register(MyFamily)`` on a function of ``(p, q)``.
    """
    if type(p) is not type(q):
        raise TypeError(
            f"rao_distance needs two distributions of the same family, not {type(p).__name__} and {type(q).__name__}."
        )
    return _rao_distance(p, q)


@singledispatch
def _rao_distance(p: Distribution, q: Distribution) -> Tensor:
    raise NotImplementedError(
        f"No closed-form Fisher-Rao distance is known to the library for {type(p).__name__}. Integrate instead: "
        "pullback.distance with an identity decoder, or add a formula with @pullback.rao_distance.register."
    )


rao_distance.register = _rao_distance.register
rao_distance.dispatch = _rao_distance.dispatch
