"""How families become uncertain away from the data, for `pullback.Reweighted`: parameter by parameter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Distribution

from pullback._families.rules import blend, most_uncertain


@dataclass(frozen=True)
class Parameter:
    """Where a parameter goes as the family becomes uncertain, and how two of its values mix."""

    target: Callable[[Any], Any]
    mix: Callable[[Tensor, Tensor, Tensor], Tensor] = torch.lerp


def times(factor: float) -> Parameter:
    return Parameter(lambda x: factor * x)


def _constant(value: float) -> Parameter:
    return Parameter(lambda x: x.new_tensor(value).expand_as(x))


SAME = Parameter(lambda x: x)
# A constant of the model, such as a number of trials.
FIXED = Parameter(lambda x: x, lambda a, b, s: a)
# The paper fixes neither factor. Ten times the width, or a thousandth of a rate, is far out for every decoder of its
# experiments.
WIDE, SLOW = times(10.0), times(1e-3)
FLAT, FAINT, EVEN = _constant(1.0), _constant(0.1), _constant(0.5)
UNIFORM = Parameter(lambda x: x.new_tensor(1 / x.shape[-1]).expand_as(x))
DIRECTION = Parameter(lambda x: x, lambda a, b, s: torch.nn.functional.normalize(torch.lerp(a, b, s), dim=-1))
# The odds mix, and logits are their logarithms.
TENFOLD_ODDS = Parameter(
    lambda x: x + torch.log(x.new_tensor(10.0)), lambda a, b, s: a + torch.log1p(s * torch.expm1(b - a))
)


def fades(family: Callable[..., Distribution], **parameters: Parameter) -> None:
    """Registers `most_uncertain` and `blend` of a family whose parameters fade one by one; valid ones stay valid."""

    def uncertain(p: Distribution) -> Distribution:
        targets = {name: parameter.target(getattr(p, name)) for name, parameter in parameters.items()}
        return family(**targets, validate_args=False)

    def blended(p: Distribution, q: Distribution, s: Tensor) -> Distribution:
        mixed = {}
        for name, parameter in parameters.items():
            a, b = getattr(p, name), getattr(q, name)
            mixed[name] = parameter.mix(a, b, unsqueezed(s, torch.as_tensor(a).ndim - len(p.batch_shape)))
        return family(**mixed, validate_args=False)

    most_uncertain.register(family)(uncertain)
    blend.register(family)(blended)


def unsqueezed(s: Tensor, n: int) -> Tensor:
    """With n more dimensions at the end."""
    return s[(...,) + (None,) * n]
