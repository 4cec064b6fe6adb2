r"""Distributions made of others: independent features, products of families, fixed changes of variable, mixtures.

The information of independent parts is block-diagonal, so roots and embeddings are concatenated and distances add in
squares. A fixed bijection of the data is a sufficient statistic, so it leaves the information, the statistic and every
divergence as they are. The information of a mixture is an integral without a closed form and goes through the score.
"""

from __future__ import annotations

from collections.abc import Sequence
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
from pullback._families import rules
from pullback._families.fading import unsqueezed
from pullback._families.information import Information, Linear, MissingRuleError
from pullback._families.masked import Masked
from pullback._families.product import Product
from pullback._families.score import score_information, tensors_in

Composite = Independent | Product | TransformedDistribution


def parts(p: Distribution, q: Distribution | None = None) -> list[tuple[Distribution, Size]]:
    """The independent parts of a distribution, each with its batch dimensions that are features."""
    # The base of a transformed one is its only part, if the transforms are fixed, and those of q.
    inner = [fixed_base(p, q)] if isinstance(p, TransformedDistribution) else _inside(p)
    return [(part, part.batch_shape[len(p.batch_shape) :]) for part in inner]


def _pairs(p: Distribution, q: Distribution) -> list[tuple[Distribution, Distribution, Size]]:
    """The parts of p, each with that of q and with its features."""
    family = TransformedDistribution if isinstance(p, TransformedDistribution) else type(p)
    others = _inside(_as(family, q))
    return [(a, b, features) for (a, features), b in zip(parts(p, q), others, strict=True)]


def _inside(p: Distribution) -> tuple[Distribution, ...]:
    if isinstance(p, Product):
        return p.components
    if isinstance(p, (Independent, TransformedDistribution)):
        return (p.base_dist,)
    return (p.base,) if isinstance(p, Masked) else ()


def leaves(p: Distribution) -> list[Distribution]:
    """The distributions that `p` is made of: those of its features, parts and base."""
    return [leaf for part in _inside(p) for leaf in leaves(part)] or [p]


def _flat(values: Tensor, features: Size) -> Tensor:
    """``(*b, *features)`` to ``(*b, F)``."""
    return values[..., None].flatten(values.ndim - len(features))


def additive(rule: Any, of_parts: Any, families: Any = Independent | Product) -> None:
    """Registers that a measure of two distributions adds up over features and parts, as `of_parts` has it."""

    def total(p: Distribution, q: Distribution, *options: Any) -> Tensor:
        values = [_flat(of_parts(a, b, *options), features) for a, b, features in _pairs(p, q)]
        return torch.stack([value.sum(-1) for value in values]).sum(0)

    rule.register(families, total)


def blockwise(rule: Any, families: Any = Independent | Product) -> None:
    """Registers that an information is block-diagonal: one block for each part and feature."""

    def blocks(p: Distribution) -> Information:
        return joined([merged(rule(part), features) for part, features in parts(p)])

    rule.register(families, blocks)


blockwise(rules.fisher, Composite)
additive(rules.positive_kl, rules.best_kl, Composite)
additive(rules.log_affinity, rules.log_affinity, Composite)
rules.positive_kl.register(HalfNormal, rules.positive_kl.dispatch(TransformedDistribution))
register_kl(Product, Product)(rules.positive_kl)

rules.fisher.register(MixtureSameFamily, score_information)

# Their parameters sit in the transforms, so the rule of the base does not apply.
for _family in (Gumbel, Weibull, Kumaraswamy):
    rules.log_affinity.register(_family, rules.log_affinity.dispatch(Distribution))


@rules.embed.register
def _(p: Composite, origin: Distribution | None = None) -> rules.Dual | None:
    """The embeddings of the features and parts, side by side; None if one of them has none."""
    if origin is None:
        return _dual_of_parts([(rules.embed(part), features) for part, features in parts(p)])
    return _dual_of_parts([(rules.embed(a, origin=b), features) for a, b, features in _pairs(p, origin)])


@rules.natural_and_mean.register
def _(p: Composite) -> rules.Dual | None:
    """The pairs of the features and parts, side by side."""
    return _dual_of_parts([(rules.natural_and_mean(part), features) for part, features in parts(p)])


def _dual_of_parts(duals: Sequence[tuple[rules.Dual | None, Size]]) -> rules.Dual | None:
    """The pairs of parts as one; a Euclidean pair stays the same tensor twice, and one alone is not copied."""
    known = [(dual, -1 - len(features)) for dual, features in duals if dual is not None]
    if len(known) < len(duals):
        return None
    phi, psi = ([dual[k].flatten(first) for dual, first in known] for k in (0, 1))
    first = phi[0] if len(phi) == 1 else torch.cat(phi, -1)
    if all(dual[0] is dual[1] for dual, _ in known):
        return first, first
    return first, psi[0] if len(psi) == 1 else torch.cat(psi, -1)


@rules.rao_distance.register
def _(p: Composite, q: Composite) -> Tensor:
    """The root of the sum of the parts' and features' squared distances."""
    distances = [_flat(rules.rao_distance(a, b), features) for a, b, features in _pairs(p, q)]
    return torch.linalg.vector_norm(torch.cat(distances, -1), dim=-1)


@rules.most_uncertain.register
def _(p: Composite) -> Distribution:
    return _rebuilt(p, [rules.most_uncertain(part) for part, _ in parts(p)])


@rules.blend.register
def _(p: Composite, q: Distribution, s: Tensor) -> Distribution:
    return _rebuilt(p, [rules.blend(a, b, unsqueezed(s, len(features))) for a, b, features in _pairs(p, q)])


def _rebuilt(p: Composite, inner: Sequence[Distribution]) -> Distribution:
    if isinstance(p, Product):
        return Product(*inner)
    if isinstance(p, Independent):
        return Independent(inner[0], p.reinterpreted_batch_ndims)
    return TransformedDistribution(inner[0], p.transforms)


@rules.most_uncertain.register
def _(p: MixtureSameFamily) -> Distribution:
    weights: Any = rules.most_uncertain(p.mixture_distribution)
    return MixtureSameFamily(weights, rules.most_uncertain(p.component_distribution))


@rules.blend.register
def _(p: MixtureSameFamily, q: MixtureSameFamily, s: Tensor) -> Distribution:
    weights: Any = rules.blend(p.mixture_distribution, q.mixture_distribution, s)
    return MixtureSameFamily(weights, rules.blend(p.component_distribution, q.component_distribution, s[..., None]))


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
    # torch also takes equal values for equal transforms
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
    if rules.fisher.dispatch(type(p)) is rules.fisher.dispatch(Independent):
        return [info for part, _ in parts(p) for info in independent(part)]
    return [rules.fisher(p)]


def merged(info: Information, features: Size) -> Information:
    """Information of independent features as that of one distribution: ``eta (*b, *features, k)`` to ``(*b, F k)``."""
    if not features:
        return info
    shape = (*features, info.eta.shape[-1])

    def lifted(act: Linear | None) -> Any:
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
    acts = roots if len(roots) == len(parts) else [as_product(part) for part in parts]

    def act(eta: Tensor, u: Tensor) -> Tensor:
        own = zip(acts, eta.split(sizes, -1), u.split(sizes, -1), strict=True)
        return torch.cat([act(*coordinates) for act, *coordinates in own], -1)

    eta, exact = torch.cat([part.eta for part in parts], dim=-1), all(part.exact for part in parts)
    return Information(eta, root=act, exact=exact) if acts is roots else Information(eta, product=act, exact=exact)


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
