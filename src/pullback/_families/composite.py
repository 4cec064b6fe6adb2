r"""Distributions made of others: independent features, products of families, fixed changes of variable, mixtures.

Three facts cover them. The information of independent parts is block-diagonal, so roots and embeddings are concatenated
and distances add in squares. A fixed bijection of the data is a sufficient statistic, so it leaves the information as
it is. The information of a mixture is an integral without a closed form and goes through the score.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Size, Tensor
from torch.distributions import (
    Distribution,
    Gumbel,
    HalfCauchy,
    HalfNormal,
    Independent,
    Kumaraswamy,
    MixtureSameFamily,
    TransformedDistribution,
    Weibull,
    register_kl,
)

from pullback._autodiff.torch_internals import depends_on_code
from pullback._families.fading import unsqueezed
from pullback._families.information import Information, Linear, MissingRuleError
from pullback._families.masked import Masked
from pullback._families.product import Product
from pullback._families.rules import (
    Dual,
    best_kl,
    blend,
    embed,
    fisher,
    log_affinity,
    most_uncertain,
    natural_and_mean,
    positive_kl,
    rao_distance,
)
from pullback._families.score import score_information, tensors_in


def additive(rule: Any, of_parts: Any) -> None:
    """Registers that a measure of two distributions adds up over features and parts, as `of_parts` has it."""

    def of_features(p: Independent, q: Independent, *options: Any) -> Tensor:
        value = of_parts(p.base_dist, q.base_dist, *options)
        return value.flatten(len(p.batch_shape)).sum(-1) if value.ndim > len(p.batch_shape) else value

    def of_product(p: Product, q: Product, *options: Any) -> Tensor:
        return p.summed([of_parts(a, b, *options) for a, b in zip(p.components, q.components, strict=True)])

    rule.register(Independent, of_features)
    rule.register(Product, of_product)


additive(positive_kl, best_kl)
additive(log_affinity, log_affinity)
register_kl(Product, Product)(positive_kl)

# The information of a mixture has no closed form.
fisher.register(MixtureSameFamily, score_information)

# A fixed bijection of x leaves the score, the statistic and every divergence as they are. (torch also takes equal
# values for fixed ones.)
fisher.register(TransformedDistribution, lambda p: fisher(fixed_base(p)))
natural_and_mean.register(TransformedDistribution, lambda p: natural_and_mean(fixed_base(p)))
rao_distance.register(TransformedDistribution, lambda p, q: rao_distance(fixed_base(p, q), q.base_dist))
positive_kl.register(TransformedDistribution, lambda p, q: best_kl(fixed_base(p, q), q.base_dist))
positive_kl.register(HalfNormal, positive_kl.dispatch(TransformedDistribution))
log_affinity.register(TransformedDistribution, lambda p, q, alpha: log_affinity(fixed_base(p, q), q.base_dist, alpha))

# Their parameters sit in the transforms, so the rule of the base does not apply.
for _family in (Gumbel, Weibull, Kumaraswamy):
    log_affinity.register(_family, log_affinity.dispatch(Distribution))


@fisher.register
def _(p: Independent) -> Information:
    r"""Block-diagonal: one block for each feature."""
    return merged(fisher(p.base_dist), p.base_dist.batch_shape[len(p.batch_shape) :])


@fisher.register
def _(p: Product) -> Information:
    r"""Block-diagonal: one block for each part and feature."""
    return joined([merged(fisher(part), p.features(part)) for part in p.components])


@embed.register
def _(p: Independent, origin: Distribution | None = None) -> Dual | None:
    r"""The embeddings of the features, concatenated."""
    base = None if origin is None else _as(Independent, origin).base_dist
    return _merged_dual(embed(p.base_dist, origin=base), len(p.base_dist.batch_shape) - len(p.batch_shape))


@embed.register
def _(p: Product, origin: Distribution | None = None) -> Dual | None:
    r"""The embeddings of the parts, concatenated; None if one of them has none."""
    origins = [None] * len(p.components) if origin is None else _as(Product, origin).components
    pairs = zip(p.components, origins, strict=True)
    return _joined_dual([_merged_dual(embed(part, origin=base), len(p.features(part))) for part, base in pairs])


@embed.register
def _(p: TransformedDistribution, origin: Distribution | None = None) -> Dual | None:
    r"""The embedding of the base."""
    base = fixed_base(p, origin)
    return embed(base, origin=None if origin is None else _as(TransformedDistribution, origin).base_dist)


@natural_and_mean.register
def _(p: Independent) -> Dual | None:
    """The pairs of the features, side by side."""
    return _merged_dual(natural_and_mean(p.base_dist), len(p.base_dist.batch_shape) - len(p.batch_shape))


@natural_and_mean.register
def _(p: Product) -> Dual | None:
    """The pairs of the parts, side by side."""
    return _joined_dual([_merged_dual(natural_and_mean(part), len(p.features(part))) for part in p.components])


@rao_distance.register
def _(p: Independent, q: Independent) -> Tensor:
    r"""The root of the sum of the features' squared distances."""
    return _norm(rao_distance(p.base_dist, q.base_dist), len(p.batch_shape))


@rao_distance.register
def _(p: Product, q: Product) -> Tensor:
    r"""The root of the sum of the parts' and features' squared distances."""
    num_batch = len(p.batch_shape)
    pairs = zip(p.components, q.components, strict=True)
    return _norm(torch.stack([_norm(rao_distance(a, b), num_batch) for a, b in pairs], dim=-1), num_batch)


@most_uncertain.register
def _(p: Independent) -> Distribution:
    return Independent(most_uncertain(p.base_dist), p.reinterpreted_batch_ndims)


@blend.register
def _(p: Independent, q: Independent, s: Tensor) -> Distribution:
    n = p.reinterpreted_batch_ndims
    return Independent(blend(p.base_dist, q.base_dist, unsqueezed(s, n)), n)


@most_uncertain.register
def _(p: Product) -> Distribution:
    return Product(*map(most_uncertain, p.components))


@blend.register
def _(p: Product, q: Product, s: Tensor) -> Distribution:
    pairs = zip(p.components, q.components, strict=True)
    return Product(*[blend(a, b, unsqueezed(s, len(p.features(a)))) for a, b in pairs])


@most_uncertain.register
def _(p: TransformedDistribution) -> Distribution:
    return TransformedDistribution(most_uncertain(fixed_base(p)), p.transforms)


@blend.register
def _(p: TransformedDistribution, q: TransformedDistribution, s: Tensor) -> Distribution:
    base = fixed_base(p, q)
    s = unsqueezed(s, len(base.batch_shape) - len(p.batch_shape))
    return TransformedDistribution(blend(base, q.base_dist, s), p.transforms)


@most_uncertain.register
def _(p: MixtureSameFamily) -> Distribution:
    weights: Any = most_uncertain(p.mixture_distribution)
    return MixtureSameFamily(weights, most_uncertain(p.component_distribution))


@blend.register
def _(p: MixtureSameFamily, q: MixtureSameFamily, s: Tensor) -> Distribution:
    weights: Any = blend(p.mixture_distribution, q.mixture_distribution, s)
    return MixtureSameFamily(weights, blend(p.component_distribution, q.component_distribution, s[..., None]))


def leaves(p: Distribution) -> Iterator[Distribution]:
    """The distributions that `p` is made of: those of its features, parts and base."""
    if isinstance(p, (Independent, TransformedDistribution)):
        yield from leaves(p.base_dist)
    elif isinstance(p, Masked):
        yield from leaves(p.base)
    elif isinstance(p, Product):
        for part in p.components:
            yield from leaves(part)
    else:
        yield p


def fixed_base(p: TransformedDistribution, q: Distribution | None = None) -> Distribution:
    """The base of a distribution whose transforms are fixed bijections, those of q; raises if they are not."""
    # |x| is sufficient where the density of x is even.
    even = isinstance(p, (HalfNormal, HalfCauchy))
    if not even and not all(transform.bijective for transform in p.transforms):
        raise MissingRuleError(
            f"The transforms of this {type(p).__name__} are not one-to-one, so its information is not that of its "
            "base. Use pullback.ScoreMetric(decoder), which needs only sample and log_prob."
        )
    others = p.transforms if q is None else _as(TransformedDistribution, q).transforms
    moving = any(depends_on_code(t) or _varies(t, p) for t in tensors_in([p.transforms, others]))
    if moving or others != p.transforms:
        raise MissingRuleError(
            f"The transforms of this {type(p).__name__} have parameters that depend on the code; only fixed transforms "
            "leave the information as it is. Move the parameters into the base distribution (Normal(loc, scale) "
            "instead of an AffineTransform(loc, scale) of a standard Normal), or use pullback.ScoreMetric(decoder)."
        )
    return p.base_dist


def _varies(t: Tensor, p: Distribution) -> bool:
    """Whether a transform's parameter differs between codes: it spans all dimensions and changes along the first."""
    spans = t.ndim == len(p.batch_shape) + len(p.event_shape) and t.ndim > 1
    return spans and t.shape[0] == p.batch_shape[:1].numel() and not bool((t == t[:1]).all())


def independent(p: Distribution) -> list[Information]:
    """The information of the parts of a distribution, each of its own family with its features, ``eta (*b, *features,
    k)``: what `fisher` puts side by side."""
    if type(p) is Independent:
        return independent(p.base_dist)
    if type(p) is Product:
        return [info for part in p.components for info in independent(part)]
    fixed = fisher.dispatch(type(p)) is fisher.dispatch(TransformedDistribution)
    if fixed and isinstance(p, TransformedDistribution):
        return independent(fixed_base(p))
    return [fisher(p)]


def merged(info: Information, features: Size) -> Information:
    """Information of independent features as that of one distribution: ``eta (*b, *features, k)`` to ``(*b, F k)``."""
    if not features:
        return info
    shape = (*features, info.eta.shape[-1])

    def lifted(act: Linear | None) -> Any:
        """The same on coordinates of all features side by side."""
        if act is None:
            return None
        return lambda *coordinates: act(*(x.unflatten(-1, shape) for x in coordinates)).flatten(-len(shape))

    eta = info.eta.flatten(-len(shape))
    return Information(eta, root=lifted(info.root), product=lifted(info.product), exact=info.exact)


def joined(parts: Sequence[Information]) -> Information:
    """Information of independent parts side by side: ``eta`` and the roots (or products) are concatenated."""
    sizes = [part.eta.shape[-1] for part in parts]
    roots = [part.root for part in parts if part.root is not None]
    exact = all(part.exact for part in parts)
    eta = torch.cat([part.eta for part in parts], dim=-1)
    if len(roots) == len(parts):
        return Information(eta, root=_side_by_side(roots, sizes), exact=exact)
    return Information(eta, product=_side_by_side([as_product(part) for part in parts], sizes), exact=exact)


def _side_by_side(acts: Sequence[Linear], sizes: list[int]) -> Linear:
    """What the parts do, each to its own coordinates."""

    def joined(eta: Tensor, u: Tensor) -> Tensor:
        parts = zip(acts, eta.split(sizes, -1), u.split(sizes, -1), strict=True)
        return torch.cat([act(*part) for act, *part in parts], -1)

    return joined


def as_product(info: Information) -> Linear:
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
    """The pairs of features side by side; a Euclidean pair stays the same tensor twice."""
    if dual is None:
        return None
    phi = dual[0].flatten(-1 - num_features)
    return phi, phi if dual[0] is dual[1] else dual[1].flatten(-1 - num_features)


def _joined_dual(duals: Sequence[Dual | None]) -> Dual | None:
    known = [dual for dual in duals if dual is not None]
    if len(known) < len(duals):
        return None
    phi = torch.cat([dual[0] for dual in known], dim=-1)
    return phi, phi if all(a is b for a, b in known) else torch.cat([dual[1] for dual in known], dim=-1)


def _norm(distances: Tensor, num_batch: int) -> Tensor:
    return torch.linalg.vector_norm(distances.flatten(num_batch), dim=-1) if distances.ndim > num_batch else distances


def _as(family: type[Distribution], p: Distribution) -> Any:
    if not isinstance(p, family):
        raise TypeError(f"Expected another {family.__name__}, not {type(p).__name__}: one decoder, one family.")
    return p
