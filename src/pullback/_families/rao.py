"""Closed-form Fisher-Rao distances between two members of a family."""

from __future__ import annotations

from functools import singledispatch
from typing import Any

from torch import Tensor
from torch.distributions import Distribution

from pullback._families.missing import MissingRuleError

_KNOWN: dict[type, str] = {}


def rao_distance(p: Distribution, q: Distribution) -> Tensor:
    r"""The Fisher-Rao distance of two members of the same family, in closed form.

    This is the geodesic distance :math:`\min_c \int \sqrt{\dot c^\top I(c)\, \dot c}\, dt` over all curves c in the family. Some
    closed forms hold only where one parameter is *known*: equal at both ends, and kept on the way. They are the distance within
    the subfamily of that parameter, and an upper bound of the distance in the whole family, where a path may change it:
    `Binomial`, `Multinomial` and `NegativeBinomial` for a known ``total_count``, `StudentT` for a known ``df``, `VonMises` and
    `VonMisesFisher` for a known ``concentration``. All others are distances in the whole family; that of `MultivariateNormal` is
    known for some pairs only.

    The distance between *products* of independent features is the root of the sum of squares of the features' distances: wrap
    the features in `torch.distributions.Independent` to get it.

    Open for registration: ``@pullback.rao_distance.register(MyFamily)`` on a function of ``(p, q)``, with ``known="df"`` if the
    formula holds for a known parameter ``df`` only.

    Args:
        p: a distribution.
        q: another of the same family.

    Returns:
        The distances, of shape ``batch_shape``.

    >>> import torch
    >>> from torch.distributions import Poisson
    >>> rao_distance(Poisson(torch.tensor(4.0)), Poisson(torch.tensor(9.0)))  # 2 |√4 - √9|
    tensor(2.)
    """
    if type(p) is not type(q):
        raise TypeError(
            f"rao_distance needs two distributions of the same family, not {type(p).__name__} and {type(q).__name__}."
        )
    return _rao_distance(p, q)


@singledispatch
def _rao_distance(p: Distribution, q: Distribution) -> Tensor:
    raise MissingRuleError(
        f"No closed-form Fisher-Rao distance is known to the library for {type(p).__name__}. Integrate instead: "
        "pullback.distance with an identity decoder, or add a formula with @pullback.rao_distance.register."
    )


def _register(family: Any, rule: Any = None, *, known: str | None = None) -> Any:
    if known is not None:
        _KNOWN[family] = known
    return _rao_distance.register(family, rule) if rule is not None else _rao_distance.register(family)


rao_distance.register = _register
rao_distance.dispatch = _rao_distance.dispatch
rao_distance.registry = _rao_distance.registry


def known_parameter(p: Distribution) -> str | None:
    """The parameter that the closed-form distance of this family takes for known, if there is one."""
    return next((_KNOWN[cls] for cls in type(p).__mro__ if cls in _KNOWN), None)
