r"""Features that are silent: missing entries.

A feature that was not observed says nothing about the code. With weights :math:`w_f \in \{0, 1\}`, the log-density of
what was observed is :math:`\sum_f w_f \log p(x_f | z)`, and its information :math:`\sum_f w_f I_f`: rules of the family
carry over feature by feature.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributions import Distribution, Independent

from pullback._families import rules
from pullback._families.information import Information
from pullback._families.product import Product


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


def _split(p: Product, seen: Any) -> Sequence[Any]:
    """The masks of the parts of a product."""
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
