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

Composite = Independent | Product


def parts(p: Distribution, q: Distribution | None = None) -> list[tuple[Distribution, Size]]:
    """The independent parts of a distribution, each with its batch dimensions that are features; those of a transformed
    one only if the transforms are fixed, and those of q."""
    inner = [fixed_base(p, q)] if isinstance(p, TransformedDistribution) else _inside(p)
    return [(part, part.batch_shape[len(p.batch_shape) :]) for part in inner]


def _inside(p: Distribution) -> tuple[Distribution, ...]:
    if isinstance(p, Product):
        return p.components
    if isinstance(p, (Independent, TransformedDistribution)):
        return (p.base_dist,)
    return (p.base,) if isinstance(p, Masked) else ()


def leaves(p: Distribution) -> Iterator[Distribution]:
    """The distributions that `p` is made of: those of its features, parts and base."""
    inner = _inside(p)
    for part in inner:
        yield from leaves(part)
    if not inner:
        yield p


def additive(rule: Any, of_parts: Any) -> None:
    """Registers that a measure of two distributions adds up over features and parts, as `of_parts` has it."""

    def total(p: Distribution, q: Distribution, *options: Any) -> Tensor:
        values = [of_parts(a, b, *options) for (a, _), (b, _) in zip(parts(p), parts(_as(type(p), q)), strict=True)]
        return torch.stack([x[..., None].flatten(len(p.batch_shape)).sum(-1) for x in values]).sum(0)

    rule.register(Independent, total)
    rule.register(Product, total)


def blockwise(rule: Any) -> None:
    """Registers that an information is block-diagonal: one block for each part and feature."""

    def blocks(p: Distribution) -> Information:
        return joined([merged(rule(part), features) for part, features in parts(p)])

    rule.register(Independent, blocks)
    rule.register(Product, blocks)


blockwise(fisher)
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


@embed.register
def _(p: Composite, origin: Distribution | None = None) -> Dual | None:
    r"""The embeddings of the features and parts, side by side; None if one of them has none."""
    inner = parts(p)
    origins = [(None, None)] * len(inner) if origin is None else parts(_as(type(p), origin))
    return _side_by_side_dual(p, [embed(part, origin=o) for (part, _), (o, _) in zip(inner, origins, strict=True)])


@embed.register
def _(p: TransformedDistribution, origin: Distribution | None = None) -> Dual | None:
    r"""The embedding of the base."""
    base = fixed_base(p, origin)
    return embed(base, origin=None if origin is None else _as(TransformedDistribution, origin).base_dist)


@natural_and_mean.register
def _(p: Composite) -> Dual | None:
    """The pairs of the features and parts, side by side."""
    return _side_by_side_dual(p, [natural_and_mean(part) for part, _ in parts(p)])


def _side_by_side_dual(p: Composite, duals: Sequence[Dual | None]) -> Dual | None:
    """The pairs of the parts of `p` as one; a Euclidean pair stays the same tensor twice."""
    known = [dual for dual in duals if dual is not None]
    if len(known) < len(duals):
        return None
    sizes = [len(features) for _, features in parts(p)]
    phi, psi = ([pair[k].flatten(-1 - n) for pair, n in zip(known, sizes, strict=True)] for k in (0, 1))
    first = _cat(phi)
    return first, first if all(a is b for a, b in known) else _cat(psi)


def _cat(tensors: list[Tensor]) -> Tensor:
    """Side by side; one alone is not copied."""
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors, -1)


@rao_distance.register
def _(p: Composite, q: Composite) -> Tensor:
    r"""The root of the sum of the parts' and features' squared distances."""
    pairs = zip(parts(p), parts(_as(type(p), q)), strict=True)
    distances = [rao_distance(a, b)[..., None].flatten(len(p.batch_shape)) for (a, _), (b, _) in pairs]
    return torch.linalg.vector_norm(torch.cat(distances, -1), dim=-1)


@most_uncertain.register
def _(p: Composite | TransformedDistribution) -> Distribution:
    return _rebuilt(p, [most_uncertain(part) for part, _ in parts(p)])


@blend.register
def _(p: Composite | TransformedDistribution, q: Any, s: Tensor) -> Distribution:
    pairs = zip(parts(p, q), _inside(q), strict=True)
    return _rebuilt(p, [blend(a, b, unsqueezed(s, len(features))) for (a, features), b in pairs])


def _rebuilt(p: Composite | TransformedDistribution, inner: Sequence[Distribution]) -> Distribution:
    """The same with other parts."""
    if isinstance(p, Product):
        return Product(*inner)
    if isinstance(p, Independent):
        return Independent(inner[0], p.reinterpreted_batch_ndims)
    return TransformedDistribution(inner[0], p.transforms)


@most_uncertain.register
def _(p: MixtureSameFamily) -> Distribution:
    weights: Any = most_uncertain(p.mixture_distribution)
    return MixtureSameFamily(weights, most_uncertain(p.component_distribution))


@blend.register
def _(p: MixtureSameFamily, q: MixtureSameFamily, s: Tensor) -> Distribution:
    weights: Any = blend(p.mixture_distribution, q.mixture_distribution, s)
    return MixtureSameFamily(weights, blend(p.component_distribution, q.component_distribution, s[..., None]))


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
    """The information of the parts that `fisher` puts side by side, with features: ``eta (*b, *features, k)``."""
    if fisher.dispatch(type(p)) in map(fisher.dispatch, (Independent, Product, TransformedDistribution)):
        return [info for part, _ in parts(p) for info in independent(part)]
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
    if len(parts) == 1:
        return parts[0]
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


def _as(family: type[Distribution], p: Distribution) -> Any:
    if not isinstance(p, family):
        raise TypeError(f"Expected another {family.__name__}, not {type(p).__name__}: one decoder, one family.")
    return p
