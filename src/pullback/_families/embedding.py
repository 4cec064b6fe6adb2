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
from torch.distributions import Distribution

from pullback._families.missing import MissingRuleError

Dual = tuple[Tensor, Tensor]


@singledispatch
def embed(p: Distribution, origin: Distribution | None = None) -> Dual | None:
    r"""The pair :math:`(\phi, \psi)` of `p`, each of shape ``(*batch_shape, m)``, or None where the family has none.

    A Euclidean embedding is the same tensor twice. The metric of a decoder is then :math:`D\phi^\top D\psi`, and short steps are
    measured by differences, which is what the default geodesic solver is built on.

    A few families have a pair only within a subfamily: `StudentT` for fixed degrees of freedom, `Binomial` and
    `NegativeBinomial` for a fixed total count. Their rules return None where that parameter varies (see `fixed`).

    To add a family, register a function of ``(p, origin)``. For an exponential family that is its natural and mean parameters:

    .. code-block:: python

        @pullback.embed.register
        def _(p: Maxwell, origin=None):
            return (-1 / p.scale**2)[..., None], 1.5 * (p.scale**2)[..., None]  # of the statistic x²/2

    **Arguments:**

    - `p`: the distribution.
    - `origin`: a distribution of the same family, of a shape that broadcasts. It changes no chord, only their rounding: the pair
      is moved so that differences of distributions near the origin do not cancel. Rules to which it brings nothing ignore it.
    """
    return None


def fixed(parameter: Tensor, origin: Tensor | None = None) -> bool:
    """Whether a parameter without a place in the pair is a constant of the model, as far as its values tell.

    It must not vary along the leading dimension, which runs over codes, and must equal that of the origin. Along further
    dimensions it may vary, because those can be features.
    """
    along_codes = parameter.ndim == 0 or bool((parameter == parameter[:1]).all())
    return along_codes and (origin is None or bool((parameter == origin).all()))


def check_equal(what: str, parameter: str, p: Distribution, q: Distribution) -> None:
    """Raises where a parameter that a closed form takes for known differs between two members of a family."""
    if not torch.eq(*(torch.as_tensor(getattr(r, parameter)) for r in (p, q))).all():
        raise MissingRuleError(
            f"The {what} of two {type(p).__name__} with different {parameter} has no closed form. Keep {parameter} the same for "
            "all codes; or measure with pullback.FisherRaoMetric, which lets it vary, or pullback.divergences.MonteCarloKL(1000)."
        )


def squared_chord(p: Distribution, q: Distribution, num_batch: int) -> Tensor | None:
    """``chord²(p, q)`` summed over all but the first `num_batch` dimensions, or None if the family has no embedding."""
    first, second = embed(p, origin=p), embed(q, origin=p)
    if first is None or second is None:
        return None
    chord = (second[0] - first[0]) * (second[1] - first[1])
    return chord.flatten(num_batch).sum(-1)
