r"""Distributions made of others: independent features, products of families, fixed changes of variable, mixtures.

Three facts cover them. The information of independent parts is block-diagonal, so roots and embeddings are concatenated and
distances add in squares. A fixed bijection of the data is a sufficient statistic, so it leaves the information as it is. The
information of a mixture is an integral without a closed form and goes through the score.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from torch import Size, Tensor
from torch.distributions import (
    Distribution,
    HalfCauchy,
    HalfNormal,
    Independent,
    MixtureSameFamily,
    TransformedDistribution,
)

from pullback._families.embedding import Dual, embed
from pullback._families.fisher import fisher
from pullback._families.information import Information, Linear
from pullback._families.missing import MissingRuleError
from pullback._families.product import Product
from pullback._families.rao import rao_distance
from pullback._families.score import depends_on_code, score_information, tensors_in

fisher.register(MixtureSameFamily, score_information)


@fisher.register
def _(p: Independent) -> Information:
    r"""Block-diagonal: one block for each feature."""
    return merged(fisher(p.base_dist), _reinterpreted(p))


@fisher.register
def _(p: Product) -> Information:
    r"""Block-diagonal: one block for each part and feature."""
    return joined([merged(fisher(part), p.features(part)) for part in p.components])


@fisher.register
def _(p: TransformedDistribution) -> Information:
    r"""The information of the base: a fixed bijection of x leaves the score as it is."""
    return fisher(fixed_base(p))


@embed.register
def _(p: Independent, origin: Distribution | None = None) -> Dual | None:
    r"""The embeddings of the features, concatenated."""
    base = None if origin is None else _as(Independent, origin).base_dist
    return _merged_dual(embed(p.base_dist, origin=base), len(_reinterpreted(p)))


@embed.register
def _(p: Product, origin: Distribution | None = None) -> Dual | None:
    r"""The embeddings of the parts, concatenated; None if one of them has none."""
    origins = [None] * len(p.components) if origin is None else _as(Product, origin).components
    pairs = zip(p.components, origins, strict=True)
    duals = [_merged_dual(embed(part, origin=base), len(p.features(part))) for part, base in pairs]
    known = [dual for dual in duals if dual is not None]
    if len(known) < len(duals):
        return None
    phi = torch.cat([dual[0] for dual in known], dim=-1)
    return (phi, phi) if all(a is b for a, b in known) else (phi, torch.cat([dual[1] for dual in known], dim=-1))


@embed.register
def _(p: TransformedDistribution, origin: Distribution | None = None) -> Dual | None:
    r"""The embedding of the base."""
    base = fixed_base(p, origin)
    return embed(base, origin=None if origin is None else _as(TransformedDistribution, origin).base_dist)


@rao_distance.register(Independent)
def _(p: Independent, q: Independent) -> Tensor:
    r"""The root of the sum of the features' squared distances."""
    return _norm(rao_distance(p.base_dist, q.base_dist), len(p.batch_shape))


@rao_distance.register(Product)
def _(p: Product, q: Product) -> Tensor:
    r"""The root of the sum of the parts' and features' squared distances."""
    num_batch = len(p.batch_shape)
    pairs = zip(p.components, q.components, strict=True)
    return _norm(torch.stack([_norm(rao_distance(a, b), num_batch) for a, b in pairs], dim=-1), num_batch)


@rao_distance.register(TransformedDistribution)
def _(p: TransformedDistribution, q: TransformedDistribution) -> Tensor:
    r"""The distance of the bases."""
    return rao_distance(fixed_base(p, q), q.base_dist)


def fixed_base(p: TransformedDistribution, q: Distribution | None = None) -> Distribution:
    """The base of a distribution whose transforms are fixed bijections; raises if they depend on the code (or differ from q's)."""
    even = isinstance(p, (HalfNormal, HalfCauchy))  # |x| is sufficient where the density of x is even
    if not even and not all(transform.bijective for transform in p.transforms):
        raise MissingRuleError(
            f"The transforms of this {type(p).__name__} are not one-to-one, so its information is not that of its base. Use "
            "pullback.ScoreMetric(decoder), which needs only sample and log_prob."
        )
    others = p.transforms if q is None else _as(TransformedDistribution, q).transforms
    moving = any(depends_on_code(t) or _varies(t, p) for t in tensors_in([p.transforms, others]))
    if moving or others != p.transforms:
        raise MissingRuleError(
            f"The transforms of this {type(p).__name__} have parameters that depend on the code; only fixed transforms leave "
            "the information as it is. Move the parameters into the base distribution (Normal(loc, scale) instead of an "
            "AffineTransform(loc, scale) of a standard Normal), or use pullback.ScoreMetric(decoder)."
        )
    return p.base_dist


def _varies(t: Tensor, p: Distribution) -> bool:
    """Whether a transform's parameter differs between codes: it spans all dimensions and changes along the first."""
    spans = t.ndim == len(p.batch_shape) + len(p.event_shape) and t.ndim > 1
    return spans and t.shape[0] == p.batch_shape[:1].numel() and not bool((t == t[:1]).all())


def merged(info: Information, features: Size) -> Information:
    """Information of independent features as that of one distribution: ``eta`` from ``(*b, *features, k)`` to ``(*b, F k)``."""
    if not features:
        return info
    shape = (*features, info.eta.shape[-1])

    def lifted(act: Linear | None) -> Linear | None:
        if act is None:
            return None
        return lambda eta, u: act(eta.unflatten(-1, shape), u.unflatten(-1, shape)).flatten(-len(shape))

    eta = info.eta.flatten(-len(shape))
    return replace(info, eta=eta, root=lifted(info.root), product=lifted(info.product))


def joined(parts: Sequence[Information]) -> Information:
    """Information of independent parts side by side: ``eta`` and the roots (or products) are concatenated."""
    sizes = [part.eta.shape[-1] for part in parts]
    roots = [part.root for part in parts if part.root is not None]
    exact = all(part.exact for part in parts)
    eta = torch.cat([part.eta for part in parts], dim=-1)
    if len(roots) == len(parts):
        isometric, separable = (all(getattr(part, name) for part in parts) for name in ("isometric", "separable"))
        root = _side_by_side(roots, sizes)
        return Information(eta, root=root, exact=exact, isometric=isometric, separable=separable)
    return Information(eta, product=_side_by_side([_product(part) for part in parts], sizes), exact=exact)


def _side_by_side(acts: Sequence[Linear], sizes: Sequence[int]) -> Linear:
    slices = [slice(stop - size, stop) for size, stop in zip(sizes, accumulate(sizes), strict=True)]
    return lambda eta, u: torch.cat(
        [act(eta[..., part], u[..., part]) for act, part in zip(acts, slices, strict=True)], dim=-1
    )


def _product(info: Information) -> Linear:
    """``I u``; from a root R, which is linear in u, by its transpose ``Rᵀ (R u)``."""
    root, product = info.root, info.product
    if product is not None:
        return product
    assert root is not None

    def transposed(eta: Tensor, u: Tensor) -> Tensor:
        value, pull = torch.func.vjp(lambda v: root(eta, v), u)[:2]
        return pull(value)[0]

    return transposed


def _merged_dual(dual: Dual | None, num_features: int) -> Dual | None:
    if dual is None or num_features == 0:
        return dual
    phi = dual[0].flatten(-1 - num_features)
    return phi, phi if dual[0] is dual[1] else dual[1].flatten(-1 - num_features)


def _reinterpreted(p: Independent) -> Size:
    return p.base_dist.batch_shape[len(p.batch_shape) :]


def _norm(distances: Tensor, num_batch: int) -> Tensor:
    return torch.linalg.vector_norm(distances.flatten(num_batch), dim=-1) if distances.ndim > num_batch else distances


def _as(family: type[Distribution], p: Distribution) -> Any:
    if not isinstance(p, family):
        raise TypeError(f"Expected another {family.__name__}, not {type(p).__name__}: one decoder, one family.")
    return p
