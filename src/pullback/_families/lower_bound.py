r"""A length that no path through a family can undercut.

A curve of codes is a curve of distributions, so it is at least as long as the shortest curve through the whole family.
Where the family's distance has no closed form, the space of all densities still gives a bound: :math:`p \mapsto 2\sqrt
p` maps every family isometrically into a sphere of radius 2, on which the two ends are an angle apart,

.. math:: d(p, q) \ge 2 \arccos \int \sqrt{p q}.

A path through a product of families is as long as the root of the sum of its squared lengths in the factors, or longer.
(Amari and Nagaoka, *Methods of Information Geometry*, section 2.5.)
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributions import Distribution, Independent, MultivariateNormal, TransformedDistribution, VonMises

from pullback._families.composite import Masked, Product, fixed_base
from pullback._families.directional import VonMisesFisher
from pullback._families.gaussian import closed_distance, embedded_distance
from pullback._families.rules import KNOWN, embed, fixed_parameter, log_affinity, rao_distance
from pullback._families.score import tensors_in

IsConstant = Callable[[Tensor], bool]


def lower_bound(p: Distribution, q: Distribution, num_batch: int, is_constant: IsConstant) -> Tensor:
    """The bound for every pair, over features: all but the first `num_batch` dimensions; 0 where nothing is known."""
    # A closed form for a known parameter bounds nothing if that parameter can change on the way: `is_constant` tells
    # whether one of `p` is a constant of the model.
    if isinstance(p, Independent) and isinstance(q, Independent):
        return lower_bound(p.base_dist, q.base_dist, num_batch, is_constant)
    if isinstance(p, Product) and isinstance(q, Product):
        parts = [lower_bound(a, b, num_batch, is_constant) for a, b in zip(p.components, q.components, strict=True)]
        return torch.linalg.vector_norm(torch.stack(parts), dim=0)
    distances = _bound(p, q, is_constant)
    return torch.linalg.vector_norm(distances.reshape(*distances.shape[:num_batch], -1), dim=-1)


_OF_BASE = rao_distance.dispatch(TransformedDistribution)


def _bound(p: Distribution, q: Distribution, is_constant: IsConstant) -> Tensor:
    """The distance where its closed form holds in all of the family that can be reached; other bounds elsewhere."""
    if isinstance(p, TransformedDistribution) and rao_distance.dispatch(type(p)) is _OF_BASE:
        return _bound(fixed_base(p, q), getattr(q, "base_dist", q), is_constant)
    if isinstance(p, Masked) and isinstance(q, Masked):
        return (p.seen & q.seen) * _bound(p.base, q.base, is_constant)
    if isinstance(p, MultivariateNormal) and isinstance(q, MultivariateNormal):
        distance, holds = closed_distance(p, q)
        return torch.where(holds, distance, embedded_distance(p, q))
    if (known := fixed_parameter(p, KNOWN)) is not None and not is_constant(known):
        return _hellinger_angle(p, q) if isinstance(p, (VonMises, VonMisesFisher)) else _nothing(p)
    if rao_distance.dispatch(type(p)) is not rao_distance.dispatch(Distribution):
        return rao_distance(p, q)
    angle, first, second = _hellinger_angle(p, q), embed(p), embed(q)
    if first is None or second is None or first[0] is not first[1]:
        return angle
    # The embedding is Euclidean: nor is there a way shorter than the straight line.
    return torch.maximum(torch.linalg.vector_norm(second[0] - first[0], dim=-1), angle)


def _hellinger_angle(p: Distribution, q: Distribution) -> Tensor:
    """2 arccos ∫ √(pq) as an arcsine, if the integral has a closed form; rounded down."""
    if log_affinity.dispatch(type(p)) is log_affinity.dispatch(Distribution):
        return _nothing(p)
    gap = -log_affinity(p, q, 0.5)
    # The gap is a difference of log-normalizers. With this margin it is still a bound if these are as large as 1/√eps.
    gap = (gap - torch.finfo(gap.dtype).eps ** 0.5).clamp_min(0)
    return 4 * torch.asin((-0.5 * torch.expm1(-gap)).sqrt())


def _nothing(p: Distribution) -> Tensor:
    return tensors_in(p)[0].new_zeros(p.batch_shape)
