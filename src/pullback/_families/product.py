r"""One distribution of independent parts of different families: a row of a table with mixed columns.

A value is a *tuple*, one entry per part, because the parts have different types and shapes.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import Any, ClassVar

import torch
from torch import Size, Tensor
from torch.distributions import Distribution

from pullback._families.information import MissingRuleError

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
        sums = [x[..., None].flatten(x.ndim - len(features)).sum(-1) for x, features in pairs]
        return torch.stack(sums).sum(0)

    def __repr__(self) -> str:
        return f"Product({', '.join(map(repr, self.components))})"
