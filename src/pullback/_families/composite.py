r"""Distributions made of others: independent features, products of families, silent features, fixed changes of
variable, mixtures.

The information of independent parts is block-diagonal, so roots and embeddings are concatenated and distances add in
squares. A fixed bijection of the data is a sufficient statistic, so it leaves the information, the statistic and every
divergence as they are. The information of a mixture is an integral without a closed form and goes through the score.

A feature that was not observed says nothing about the code. With weights :math:`w_f \in \{0, 1\}`, the log-density of
what was observed is :math:`\sum_f w_f \log p(x_f | z)`, and its information :math:`\sum_f w_f I_f`: rules of the family
carry over feature by feature.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import takewhile
from typing import Any, ClassVar

import torch
from torch import Size, Tensor
from torch import distributions as td
from torch.distributions import Distribution, Independent, MixtureSameFamily, TransformedDistribution

from pullback._autodiff.torch_internals import depends_on_code
from pullback._families import rules
from pullback._families.information import Information, Linear, MissingRuleError
from pullback._families.score import score_information, tensors_in

Values = tuple[Any, ...]


class Product(Distribution):
    r"""The distribution of independent parts of different families.

    The ``batch_shape`` is the longest common prefix of the parts' batch shapes; further batch dimensions of a part are
    its independent features. Samples, means and variances are tuples with one entry per part; `log_prob` and `entropy`
    are summed over parts and features to ``batch_shape``.

    Args:
        *components: the parts, at least one.
        validate_args: as for every distribution of torch.

    >>> from torch.distributions import Normal, Poisson
    >>> p = Product(Normal(torch.zeros(3, 2), torch.ones(3, 2)), Poisson(torch.ones(3)))
    >>> p.batch_shape, [x.shape for x in p.sample()]
    (torch.Size([3]), [torch.Size([3, 2]), torch.Size([3])])
    """

    arg_constraints: ClassVar[dict[str, Any]] = {}

    def __init__(self, *components: Distribution, validate_args: bool | None = None) -> None:
        if not components or not all(isinstance(part, Distribution) for part in components):
            kinds = ", ".join(type(part).__name__ for part in components) or "nothing"
            raise TypeError(f"Product takes distributions as separate arguments, Product(p, q, ...); got {kinds}.")
        self.components = components
        sizes = zip(*(part.batch_shape for part in components), strict=False)
        common = Size(same[0] for same in takewhile(lambda s: len(set(s)) == 1, sizes))
        super().__init__(common, validate_args=validate_args)

    @property
    def has_rsample(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return all(part.has_rsample for part in self.components)

    @property
    def mean(self) -> Values:  # pyright: ignore[reportIncompatibleMethodOverride]
        return tuple(part.mean for part in self.components)

    @property
    def stddev(self) -> Values:  # pyright: ignore[reportIncompatibleMethodOverride]
        return tuple(part.stddev for part in self.components)

    @property
    def variance(self) -> Values:  # pyright: ignore[reportIncompatibleMethodOverride]
        return tuple(part.variance for part in self.components)

    def sample(self, sample_shape: Any = ()) -> Values:  # pyright: ignore[reportIncompatibleMethodOverride]
        return tuple(part.sample(sample_shape) for part in self.components)

    def rsample(self, sample_shape: Any = ()) -> Values:  # pyright: ignore[reportIncompatibleMethodOverride]
        return tuple(part.rsample(sample_shape) for part in self.components)

    def log_prob(self, value: Values) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The joint log-density of a tuple, summed over parts and features."""
        if not isinstance(value, (tuple, list)) or len(value) != len(self.components):
            raise ValueError(
                f"A value of this Product is a tuple of {len(self.components)} tensors, one for each part."
            )
        return self.summed([part.log_prob(x) for part, x in zip(self.components, value, strict=True)])

    def entropy(self) -> Tensor:
        """The sum of the parts' entropies."""
        entropies = []
        for part in self.components:
            try:
                entropies.append(part.entropy())
            except NotImplementedError as error:
                raise MissingRuleError(
                    f"torch has no closed form of the entropy of {type(part).__name__}, a part of this Product. "
                    "Estimate it from samples: -product.log_prob(product.sample((1000,))).mean(0)."
                ) from error
        return self.summed(entropies)

    def expand(self, batch_shape: Any, _instance: Any = None) -> Product:
        """The same parts with the batch shape expanded; their features stay."""
        parts = (part.expand(Size(batch_shape) + self.features(part)) for part in self.components)
        return Product(*parts, validate_args=False)

    def features(self, part: Distribution) -> Size:
        """The batch dimensions of a part that are its independent features."""
        return part.batch_shape[len(self.batch_shape) :]

    def summed(self, values: Sequence[Tensor]) -> Tensor:
        """Adds values of the parts, each of shape ``(..., *batch_shape, *features)``, over parts and features."""
        pairs = zip(values, map(self.features, self.components), strict=True)
        return torch.stack([_flat(x, features).sum(-1) for x, features in pairs]).sum(0)

    def __repr__(self) -> str:
        return f"Product({', '.join(map(repr, self.components))})"


def masked(p: Distribution, seen: Tensor | Sequence[Tensor]) -> Distribution:
    """The distribution of the features that were seen; the others are silent.

    Their log-density is zero whatever the value, NaN included, and they add nothing to the geometry. The mask may
    differ from code to code where the distribution of all codes is at hand (training, `metric.tensor`); for a path it
    is the same all the way, such as the features that both ends have.

    Args:
        p: a distribution with independent features, or a `Product` of such.
        seen: True where a feature was observed, broadcastable to the batch shape of ``p``. For a `Product` one mask for
            each part, or one of all features in a row.

    Example:
        >>> import torch, pullback as pb
        >>> from torch.distributions import Normal
        >>> p = pb.masked(Normal(torch.zeros(3), 1.0), torch.tensor([True, False, True]))
        >>> p.log_prob(torch.tensor([0.0, float("nan"), 0.0]))
        tensor([-0.9189,  0.0000, -0.9189])
    """
    if isinstance(p, Independent):
        return Independent(masked(p.base_dist, seen), p.reinterpreted_batch_ndims, validate_args=False)
    if isinstance(p, Product):
        parts = zip(p.components, _split(p, seen), strict=True)
        return Product(*(masked(part, mask) for part, mask in parts), validate_args=False)
    mask = torch.as_tensor(seen, dtype=torch.bool, device=p.mean.device)
    try:
        return Masked(p, mask.expand(p.batch_shape))
    except RuntimeError as error:
        raise ValueError(
            f"A mask of shape {tuple(mask.shape)} does not fit features of shape {tuple(p.batch_shape)}. Give True or "
            "False for each feature, broadcastable to the batch shape of the distribution."
        ) from error


def _split(p: Product, seen: Any) -> Sequence[Any]:
    if not isinstance(seen, Tensor) and len(seen) == len(p.components) and not isinstance(seen[0], (bool, int)):
        return seen
    mask = torch.as_tensor(seen, dtype=torch.bool)
    sizes = [p.features(part).numel() for part in p.components]
    if mask.shape[-1:] != (sum(sizes),):
        raise ValueError(
            f"A mask of shape {tuple(mask.shape)} does not fit the {sum(sizes)} features of this Product. Give one "
            "mask for each part, or one with True or False for each feature in a row."
        )
    pairs = zip(mask.split(sizes, -1), map(p.features, p.components), strict=True)
    return [part.unflatten(-1, features) if features else part[..., 0] for part, features in pairs]


class Masked(Distribution):
    """A distribution some of whose features are silent; made by `masked`. Moments and samples are of all features."""

    arg_constraints: ClassVar[dict[str, Any]] = {}

    def __init__(self, base: Distribution, seen: Tensor) -> None:
        self.base, self.seen = base, seen
        super().__init__(base.batch_shape, base.event_shape, validate_args=False)

    @property
    def mean(self) -> Tensor:
        return self.base.mean

    @property
    def variance(self) -> Tensor:
        return self.base.variance

    def sample(self, sample_shape: Any = ()) -> Tensor:
        return self.base.sample(sample_shape)

    def log_prob(self, value: Tensor) -> Tensor:
        inside = self.seen[(..., *[None] * len(self.event_shape))]
        harmless = self.base.sample().to(value.dtype)
        return torch.where(self.seen, self.base.log_prob(torch.where(inside, value, harmless)), 0.0)

    def expand(self, batch_shape: Any, _instance: Any = None) -> Masked:
        return Masked(self.base.expand(batch_shape), self.seen.expand(batch_shape))


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
    return _side_by_side([(rules.embed(a, origin=None if origin is None else b), f) for a, b, f in parts(p, origin)])


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
    Composite, lambda p, q, s: _rebuilt(p, [rules.blend(a, b, rules.unsqueezed(s, len(f))) for a, b, f in parts(p, q)])
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


@rules.fisher.register
def _(p: Masked) -> Information:
    r"""w I, with the weight as one more coordinate, so that it goes where the coordinates go."""
    info, weight = rules.fisher(p.base), p.seen.to(p.base.mean)[..., None]
    eta = torch.cat([info.eta, weight], -1)

    def silenced(act: Any) -> Any:
        if act is None:
            return None
        return lambda eta, u: eta[..., -1:] * act(eta[..., :-1], None if u is None else u[..., :-1])

    root, product, isometry = map(silenced, (info.root, info.product, info.isometry))
    padded = None if product is None else lambda eta, u: torch.nn.functional.pad(product(eta, u), (0, 1))
    return Information(eta, root=root, product=padded, exact=info.exact, isometry=isometry)


@rules.embed.register
def _(p: Masked, origin: Distribution | None = None) -> rules.Dual | None:
    dual = rules.embed(p.base, origin=origin.base if isinstance(origin, Masked) else None)
    if dual is None:
        return None
    weight = p.seen[..., None]
    phi = weight * dual[0]
    return phi, phi if dual[0] is dual[1] else weight * dual[1]


def _of_both(of_base: Any) -> Any:
    """A measure of two distributions, of the features that both have seen."""
    return lambda p, q, *options: (p.seen & q.seen) * of_base(p.base, q.base, *options)


rules.rao_distance.register(Masked, _of_both(rules.rao_distance))
rules.positive_kl.register(Masked, _of_both(rules.kl))
rules.log_affinity.register(Masked, _of_both(rules.log_affinity))
rules.most_uncertain.register(Masked, lambda p: Masked(rules.most_uncertain(p.base), p.seen))
rules.blend.register(Masked, lambda p, q, s: Masked(rules.blend(p.base, q.base, s), p.seen))
