r"""Distributions made of others: independent features, products of families, fixed changes of variable, mixtures.

The information of independent parts is block-diagonal, so roots and embeddings are concatenated and distances add in
squares. A fixed bijection of the data is a sufficient statistic, so it leaves the information, the statistic and every
divergence as they are. The information of a mixture is an integral without a closed form and goes through the score.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Size, Tensor
from torch import distributions as td
from torch.distributions import Distribution, Independent, MixtureSameFamily, TransformedDistribution

from pullback._autodiff.torch_internals import depends_on_code
from pullback._families import rules
from pullback._families.fading import unsqueezed
from pullback._families.information import Information, Linear, MissingRuleError
from pullback._families.masked import Masked
from pullback._families.product import Product
from pullback._families.score import score_information, tensors_in

Composite = Independent | Product | TransformedDistribution


def parts(p: Distribution, q: Distribution | None = None) -> list[tuple[Distribution, Distribution, Size]]:
    """The independent parts of a distribution, each with that of q and with its batch dimensions that are features."""
    # The base of a transformed one is its only part, if the transforms are fixed, and those of q.
    transformed = isinstance(p, TransformedDistribution)
    others = _inside(p if q is None else _as(TransformedDistribution if transformed else type(p), q))
    inner = (fixed_base(p, q),) if transformed else _inside(p)
    return [(a, b, a.batch_shape[len(p.batch_shape) :]) for a, b in zip(inner, others, strict=True)]


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


def total(of_parts: Callable[..., Tensor], p: Distribution, q: Distribution, *options: Any) -> Tensor:
    """A measure of two distributions that adds up over features and parts."""
    return torch.stack([_flat(of_parts(a, b, *options), f).sum(-1) for a, b, f in parts(p, q)]).sum(0)


def blocks(of_part: Callable[[Any], Information], p: Distribution) -> Information:
    """An information that is block-diagonal, with one block for each part and feature: coordinates in a row."""
    pieces = [(of_part(part), features) for part, _, features in parts(p)]
    infos = [info for info, _ in pieces]
    if len(pieces) == 1 and not pieces[0][1]:
        return infos[0]
    shapes = [(*features, info.eta.shape[-1]) for info, features in pieces]
    sizes = [math.prod(shape) for shape in shapes]
    roots = [info.root for info in infos if info.root is not None]
    acts = roots if len(roots) == len(infos) else [as_product(info) for info in infos]

    def act(eta: Tensor, u: Tensor) -> Tensor:
        own = zip(acts, shapes, eta.split(sizes, -1), u.split(sizes, -1), strict=True)
        return torch.cat([f(*(x.unflatten(-1, n) for x in at)).flatten(-len(n)) for f, n, *at in own], -1)

    eta = torch.cat([info.eta.flatten(-len(shape)) for info, shape in zip(infos, shapes, strict=True)], -1)
    exact = all(info.exact for info in infos)
    return Information(eta, root=act, exact=exact) if acts is roots else Information(eta, product=act, exact=exact)


rules.fisher.register(Composite, partial(blocks, rules.fisher))
rules.fisher.register(MixtureSameFamily, score_information)
rules.positive_kl.register(Composite, partial(total, rules.kl))
rules.positive_kl.register(td.HalfNormal, rules.positive_kl.dispatch(TransformedDistribution))
td.register_kl(Product, Product)(rules.positive_kl)
rules.log_affinity.register(Composite, partial(total, rules.log_affinity))
# Their parameters sit in the transforms, so the rule of the base does not apply.
for _family in (td.Gumbel, td.Weibull, td.Kumaraswamy):
    rules.log_affinity.register(_family, rules.log_affinity.dispatch(Distribution))


@rules.embed.register
def _(p: Composite, origin: Distribution | None = None) -> rules.Dual | None:
    """The embeddings of the features and parts, side by side; None if one of them has none."""
    pairs = parts(p, origin)
    return _side_by_side([(rules.embed(a, origin=None if origin is None else b), f) for a, b, f in pairs])


@rules.natural_and_mean.register
def _(p: Composite) -> rules.Dual | None:
    return _side_by_side([(rules.natural_and_mean(part), features) for part, _, features in parts(p)])


def _side_by_side(duals: Sequence[tuple[rules.Dual | None, Size]]) -> rules.Dual | None:
    """The pairs of parts as one; a Euclidean pair stays the same tensor twice."""
    known = [(dual, -1 - len(features)) for dual, features in duals if dual is not None]
    if len(known) < len(duals):
        return None
    phi = torch.cat([dual[0].flatten(first) for dual, first in known], -1)
    if all(dual[0] is dual[1] for dual, _ in known):
        return phi, phi
    return phi, torch.cat([dual[1].flatten(first) for dual, first in known], -1)


@rules.rao_distance.register
def _(p: Composite, q: Composite) -> Tensor:
    """The root of the sum of the parts' and features' squared distances."""
    distances = [_flat(rules.rao_distance(a, b), features) for a, b, features in parts(p, q)]
    return torch.linalg.vector_norm(torch.cat(distances, -1), dim=-1)


rules.most_uncertain.register(Composite, lambda p: _rebuilt(p, [rules.most_uncertain(part) for part, _, _ in parts(p)]))
rules.blend.register(
    Composite, lambda p, q, s: _rebuilt(p, [rules.blend(a, b, unsqueezed(s, len(f))) for a, b, f in parts(p, q)])
)


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
    even = isinstance(p, (td.HalfNormal, td.HalfCauchy))
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
        return [info for part, _, _ in parts(p) for info in independent(part)]
    return [rules.fisher(p)]


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
