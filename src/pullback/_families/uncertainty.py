r"""How a distribution becomes uncertain: two open functions, `most_uncertain` and `blend`, with a rule each for every family.

Away from the data a decoder should fade to the distribution that claims the least. Which one that is, and what "half-way
there" means, are facts about the family; `Reweighted` needs no others. Most families blend parameter by parameter and
differ only in where each parameter goes and how it mixes, so they share one table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import singledispatch
from typing import Any

import torch
from torch import Tensor, distributions
from torch.distributions import Distribution

from pullback._families.composite import fixed_base
from pullback._families.missing import MissingRuleError
from pullback._families.product import Product
from pullback._families.von_mises_fisher import VonMisesFisher


@singledispatch
def most_uncertain(p: Distribution) -> Distribution:
    """The distribution that `p` fades to away from the data: of its family and shape, and as uncertain as the family allows.

    Uniform where the family has such a member (Bernoulli, categorical, Beta, Dirichlet), nearly so on the circle and the sphere
    (concentration 0.1), and for families of unbounded uncertainty the same place ten times as wide, or a thousandth of the rate.
    Open for registration: ``@pullback.most_uncertain.register`` on a function ``(p: MyFamily) -> MyFamily``.
    """
    raise MissingRuleError(_no_rule("most_uncertain", p))


@singledispatch
def blend(p: Distribution, q: Distribution, s: Tensor) -> Distribution:
    """The distribution with parameters (1 - s) of `p` + s of `q`, two members of one family; ``s`` broadcasts to ``p.batch_shape``.

    Probabilities blend as probabilities, whichever way they were given. Open for registration: ``@pullback.blend.register`` on a
    function ``(p: MyFamily, q, s) -> MyFamily``.
    """
    raise MissingRuleError(_no_rule("blend", p))


def _no_rule(function: str, p: object) -> str:
    name = type(p).__name__
    return (
        f"There is no rule that says how {name} becomes uncertain away from the data ({function} is missing). Register "
        f"@pullback.most_uncertain.register on a function (p: {name}) -> {name} and @pullback.blend.register on (p: {name}, q, s) -> "
        f"{name}; or use pullback.Extrapolated(decoder, support), which needs neither."
    )


def _log_mixed_exp(a: Tensor, b: Tensor, s: Tensor) -> Tensor:
    return a + torch.log1p(s * torch.expm1(b - a))


def _mixed_direction(a: Tensor, b: Tensor, s: Tensor) -> Tensor:
    return torch.nn.functional.normalize(torch.lerp(a, b, s), dim=-1)


@dataclass(frozen=True)
class _Parameter:
    """Where a parameter goes as the family becomes uncertain, and how two of its values mix."""

    target: Callable[[Any], Any]
    mix: Callable[[Tensor, Tensor, Tensor], Tensor] = torch.lerp


def _keep(x: Tensor) -> Tensor:
    return x


def _times(factor: float) -> _Parameter:
    return _Parameter(lambda x: factor * x)


def _constant(value: float) -> _Parameter:
    return _Parameter(lambda x: x.new_tensor(value).expand_as(x))


_SAME = _Parameter(_keep)
_FIXED = _Parameter(_keep, lambda a, b, s: a)  # a constant of the model, such as a number of trials
_WIDE, _SLOW, _FLAT, _FAINT, _EVEN = _times(10.0), _times(1e-3), _constant(1.0), _constant(0.1), _constant(0.5)
_UNIFORM = _Parameter(lambda x: x.new_tensor(1 / x.shape[-1]).expand_as(x))
_DIRECTION = _Parameter(_keep, _mixed_direction)
_TENFOLD_ODDS = _Parameter(lambda x: x + torch.log(x.new_tensor(10.0)), _log_mixed_exp)

_FAMILIES: dict[Callable[..., Distribution], Mapping[str, _Parameter]] = {
    distributions.Normal: {"loc": _SAME, "scale": _WIDE},
    distributions.Laplace: {"loc": _SAME, "scale": _WIDE},
    distributions.Cauchy: {"loc": _SAME, "scale": _WIDE},
    distributions.Gumbel: {"loc": _SAME, "scale": _WIDE},
    distributions.LogNormal: {"loc": _SAME, "scale": _WIDE},
    distributions.StudentT: {"df": _SAME, "loc": _SAME, "scale": _WIDE},
    distributions.HalfNormal: {"scale": _WIDE},
    distributions.HalfCauchy: {"scale": _WIDE},
    distributions.Weibull: {"scale": _WIDE, "concentration": _SAME},
    distributions.Pareto: {"scale": _SAME, "alpha": _times(0.1)},
    distributions.Exponential: {"rate": _SLOW},
    distributions.Gamma: {"concentration": _SAME, "rate": _SLOW},
    distributions.InverseGamma: {"concentration": _SAME, "rate": _WIDE},
    distributions.Chi2: {"df": _WIDE},
    distributions.FisherSnedecor: {"df1": _SAME, "df2": _times(0.1)},
    distributions.Poisson: {"rate": _WIDE},
    distributions.Geometric: {"probs": _times(0.1)},
    distributions.NegativeBinomial: {"total_count": _FIXED, "logits": _TENFOLD_ODDS},
    distributions.Beta: {"concentration1": _FLAT, "concentration0": _FLAT},
    distributions.Kumaraswamy: {"concentration1": _FLAT, "concentration0": _FLAT},
    distributions.Dirichlet: {"concentration": _FLAT},
    distributions.Bernoulli: {"probs": _EVEN},
    distributions.ContinuousBernoulli: {"probs": _EVEN},
    distributions.Binomial: {"total_count": _FIXED, "probs": _EVEN},
    distributions.Categorical: {"probs": _UNIFORM},
    distributions.OneHotCategorical: {"probs": _UNIFORM},
    distributions.Multinomial: {"total_count": _FIXED, "probs": _UNIFORM},
    distributions.VonMises: {"loc": _SAME, "concentration": _FAINT},
    VonMisesFisher: {"loc": _DIRECTION, "concentration": _FAINT},
    distributions.MultivariateNormal: {"loc": _SAME, "scale_tril": _WIDE},
    distributions.LowRankMultivariateNormal: {"loc": _SAME, "cov_factor": _WIDE, "cov_diag": _times(100.0)},
}


def _register(family: Callable[..., Distribution], parameters: Mapping[str, _Parameter]) -> None:
    """Both rules of a family whose parameters go their ways one by one: valid ones stay valid, so nothing is checked again."""

    def uncertain(p: Distribution) -> Distribution:
        targets = {name: parameter.target(getattr(p, name)) for name, parameter in parameters.items()}
        return family(**targets, validate_args=False)

    def blended(p: Distribution, q: Distribution, s: Tensor) -> Distribution:
        mixed = {name: _mix(name, parameter, p, q, s) for name, parameter in parameters.items()}
        return family(**mixed, validate_args=False)

    most_uncertain.register(family)(uncertain)
    blend.register(family)(blended)


def _mix(name: str, parameter: _Parameter, p: Distribution, q: Distribution, s: Tensor) -> Tensor:
    a = getattr(p, name)
    event = torch.as_tensor(a).ndim - len(p.batch_shape)
    return parameter.mix(a, getattr(q, name), _unsqueezed(s, event))


def _unsqueezed(s: Tensor, n: int) -> Tensor:
    return s[(...,) + (None,) * n]


for _family, _parameters in _FAMILIES.items():
    _register(_family, _parameters)


@most_uncertain.register
def _(p: distributions.Independent) -> Distribution:
    return distributions.Independent(most_uncertain(p.base_dist), p.reinterpreted_batch_ndims)


@blend.register
def _(p: distributions.Independent, q: distributions.Independent, s: Tensor) -> Distribution:
    n = p.reinterpreted_batch_ndims
    return distributions.Independent(blend(p.base_dist, q.base_dist, _unsqueezed(s, n)), n)


@most_uncertain.register
def _(p: Product) -> Distribution:
    return Product(*map(most_uncertain, p.components))


@blend.register
def _(p: Product, q: Product, s: Tensor) -> Distribution:
    pairs = zip(p.components, q.components, strict=True)
    return Product(*[blend(a, b, _unsqueezed(s, len(p.features(a)))) for a, b in pairs])


@most_uncertain.register
def _(p: distributions.TransformedDistribution) -> Distribution:
    return distributions.TransformedDistribution(most_uncertain(fixed_base(p)), p.transforms)


@blend.register
def _(p: distributions.TransformedDistribution, q: distributions.TransformedDistribution, s: Tensor) -> Distribution:
    base = fixed_base(p, q)
    s = _unsqueezed(s, len(base.batch_shape) - len(p.batch_shape))
    return distributions.TransformedDistribution(blend(base, q.base_dist, s), p.transforms)


@most_uncertain.register
def _(p: distributions.MixtureSameFamily) -> Distribution:
    weights: Any = most_uncertain(p.mixture_distribution)
    return distributions.MixtureSameFamily(weights, most_uncertain(p.component_distribution))


@blend.register
def _(p: distributions.MixtureSameFamily, q: distributions.MixtureSameFamily, s: Tensor) -> Distribution:
    weights: Any = blend(p.mixture_distribution, q.mixture_distribution, s)
    components = blend(p.component_distribution, q.component_distribution, s[..., None])
    return distributions.MixtureSameFamily(weights, components)
