r"""What can be known about a family of distributions: open functions, to which every family adds one short rule each.

The rules of a kind of families stand side by side in one file of this folder. `fisher` alone makes a metric; the others
make it faster, or answer further questions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import singledispatch
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Distribution

from pullback._autodiff.torch_internals import has_registered_kl, torch_kl_rule
from pullback._families.information import Information, Linear, MissingRuleError

Dual = tuple[Tensor, Tensor]


@singledispatch
def fisher(p: Distribution) -> Information:
    r"""The Fisher information of `p` on its own family.

    In coordinates :math:`\eta` on the family it is the covariance of the score, and the curvature of the
    Kullback-Leibler divergence at zero,

    .. math:: I(\eta) = \mathrm{E}_{x \sim p_\eta}[s s^\top], \quad s = \nabla_\eta \log p_\eta(x),
       \qquad \mathrm{KL}(p_\eta, p_{\eta + u}) = \tfrac12\, u^\top I(\eta)\, u + O(|u|^3),

    the only metric, up to scale, that no sufficient statistic changes (Rao 1945; Amari and Nagaoka, *Methods of
    Information Geometry*, 2000). Each family chooses its coordinates, named beside its rule; the metric
    pulled back to a latent space does not depend on that choice.

    To add a family, register a function that returns an `Information`, as docs/extending.md shows. The coordinates must
    be differentiable functions of the distribution's parameters, and the matrix a function of the coordinates alone.

    Args:
        p: the distribution. Batch dimensions are independent features, each with its own matrix. A distribution without
            a rule of its own uses that of its nearest base class.

    >>> from torch.distributions import Normal
    >>> fisher(Normal(torch.tensor(0.0), torch.tensor(0.5))).matrix  # I = diag(1, 2) / σ² in (μ, σ)
    tensor([[4.0000, 0.0000],
            [0.0000, 8.0000]])
    """
    name = type(p).__name__
    raise MissingRuleError(
        f"No Fisher information is registered for {name}. Add it with @pullback.fisher.register on a function "
        f"`(p: {name}) -> pullback.Information`, or use pullback.ScoreMetric(decoder), which needs only sample and "
        "log_prob."
    )


@singledispatch
def embed(p: Distribution, origin: Distribution | None = None) -> Dual | None:
    r"""Coordinates of `p` in which the squared chord of its family is a plain product of differences.

    A *dual embedding* of a family is a pair of maps :math:`\phi, \psi` from distributions to vectors with

    .. math:: \mathrm{chord}^2(p, q) = (\phi(q) - \phi(p)) \cdot (\psi(q) - \psi(p)), \qquad I = D\phi^\top D\psi.

    Three classical facts are instances. A family with an isometric Euclidean embedding has :math:`\phi = \psi`
    (Bernoulli :math:`2\arcsin\sqrt p`, categorical :math:`2\sqrt p`, Poisson :math:`2\sqrt\lambda`). An exponential
    family has the natural and the mean parameters, and the chord is the Jeffreys divergence. A location-scale family is
    a hyperbolic plane, and the pair is its hyperboloid in Minkowski space with one factor's sign flipped. The chord
    agrees with the Fisher-Rao distance to third order, so curves measured by it converge with order two. The default
    geodesic solver is built on it.

    To add a family, register a function of ``(p, origin)``. For an exponential family that is its natural and mean
    parameters (docs/extending.md). A family whose `Information` has an ``isometry`` or a ``pair`` needs no rule.

    Args:
        p: the distribution.
        origin: a distribution of the same family, of a shape that broadcasts. It changes no chord, only their rounding:
            the pair is moved so that differences of distributions near the origin do not cancel. Rules may ignore it.

    Returns:
        The pair, each of shape ``(*batch_shape, m)``, the same tensor twice for a Euclidean embedding; None where there
        is none: `StudentT` has one for fixed degrees of freedom, `Binomial` and `NegativeBinomial` for a fixed count.

    >>> from torch.distributions import Poisson
    >>> embed(Poisson(torch.tensor(9.0)))[0]  # 2 √λ
    tensor([6.])
    """
    try:
        info = fisher(p)
    except MissingRuleError:
        return None
    if info.maps is None or varies(p, origin):
        return None
    values = info.maps.values(info.eta, None if origin is None else fisher(origin).eta)
    return values[0], values[-1]


# What an embedding, and a closed-form distance, take for a constant of the model.
FIXED: dict[type, str] = {}
KNOWN: dict[type, str] = {}


def fixed_parameter(p: Distribution, table: dict[type, str] = FIXED) -> Any:
    """The value of the parameter that a rule of this family takes for a constant of the model, if there is one."""
    name = next((table[cls] for cls in type(p).__mro__ if cls in table), None)
    return None if name is None else getattr(p, name)


def varies(p: Distribution, origin: Distribution | None = None) -> bool:
    """Whether that is no constant after all, as far as its values tell: then the family has no embedding."""
    if (parameter := fixed_parameter(p)) is None:
        return False
    # The leading dimension runs over codes. Along further ones it may vary, because those can be features.
    along_codes = parameter.ndim > 0 and bool((parameter != parameter[:1]).any())
    return along_codes or (origin is not None and bool((parameter != fixed_parameter(origin)).any()))


def squared_chord(p: Distribution, q: Distribution, num_batch: int) -> Tensor | None:
    """``chord²(p, q)`` summed over all but the first `num_batch` dimensions, or None if the family has no embedding."""
    first, second = embed(p, origin=p), embed(q, origin=p)
    if first is None or second is None:
        return None
    chord = (second[0] - first[0]) * (second[1] - first[1])
    return chord.flatten(num_batch).sum(-1)


def rao_distance(p: Distribution, q: Distribution) -> Tensor:
    r"""The Fisher-Rao distance of two members of the same family, in closed form.

    This is the geodesic distance :math:`\min_c \int \sqrt{\dot c^\top I(c)\, \dot c}\, dt` over all curves c in the
    family. Some closed forms hold only where one parameter is *known*: equal at both ends, and kept on the way. They
    are the distance within the subfamily of that parameter, and an upper bound of the distance in the whole family,
    where a path may change it: `Binomial`, `Multinomial` and `NegativeBinomial` for a known ``total_count``, `StudentT`
    for a known ``df``, `VonMises` and `VonMisesFisher` for a known ``concentration``. All others are distances in the
    whole family; that of `MultivariateNormal` is known for some pairs only.

    The distance between *products* of independent features is the root of the sum of squares of the features'
    distances: wrap the features in `torch.distributions.Independent` to get it.

    Open for registration: ``@pullback.rao_distance.register(MyFamily)`` on a function of ``(p, q)``, with
    ``known="df"`` if the formula holds for a known parameter ``df`` only.

    >>> from torch.distributions import Poisson
    >>> rao_distance(Poisson(torch.tensor(4.0)), Poisson(torch.tensor(9.0)))  # 2 |√4 - √9|
    tensor(2.)
    """
    if type(p) is not type(q):
        raise TypeError(
            f"rao_distance needs two distributions of the same family, not {type(p).__name__} and {type(q).__name__}."
        )
    return _rao_distance(p, q)


@singledispatch
def _rao_distance(p: Distribution, q: Distribution) -> Tensor:
    raise MissingRuleError(
        f"No closed-form Fisher-Rao distance is known to the library for {type(p).__name__}. Integrate instead: "
        "pullback.distance with an identity decoder, or add a formula with @pullback.rao_distance.register."
    )


def _register(family: Any, rule: Any = None, *, known: str | None = None) -> Any:
    if known is not None:
        KNOWN[family] = known
    return _rao_distance.register(family, rule)


rao_distance.register = _register
rao_distance.dispatch = _rao_distance.dispatch
rao_distance.registry = _rao_distance.registry


def line(family: type[Distribution], *, chart: Any, root: Linear, arc: Any) -> None:
    """Registers a family of one coordinate, `chart(p)`, with its arc length `arc(eta, eta0)`."""

    def information(p: Distribution) -> Information:
        return Information(chart(p)[..., None], root=root, isometry=arc, separable=True)

    def distance(p: Distribution, q: Distribution) -> Tensor:
        eta, eta0 = chart(p)[..., None], chart(q)[..., None]
        return (arc(eta, eta0) - arc(eta0, eta0)).abs()[..., 0]

    fisher.register(family, information)
    embed.register(family, embed.dispatch(Distribution))
    _rao_distance.register(family, distance)


def check_equal(what: str, parameter: str, p: Distribution, q: Distribution) -> None:
    """Raises where a parameter that a closed form takes for known differs between two members of a family."""
    first, second = (torch.as_tensor(getattr(r, parameter, 0)) for r in (p, q))
    if not torch.eq(first, second).all():
        raise MissingRuleError(
            f"The {what} of two {type(p).__name__} with different {parameter} has no closed form. Keep {parameter} the "
            "same for all codes; or measure with pullback.FisherRaoMetric, which lets it vary, or estimate with "
            "pullback.divergences.monte_carlo_kl(1000)."
        )


@singledispatch
def natural_and_mean(p: Distribution) -> Dual | None:
    r"""The natural parameters and the mean parameters :math:`(\eta, \mu)` of a member of an exponential family.

    They belong to one sufficient statistic T: the density is :math:`h(x) \exp(\eta \cdot T(x) - A(\eta))`, and
    :math:`\mu = E\,T(x) = \nabla A(\eta)`. Straight lines in :math:`\eta` are geodesics of the *exponential* connection
    (geometric mixtures), straight lines in :math:`\mu` of the *mixture* connection. Neither keeps lengths, but together
    they do: :math:`ds^2 = d\eta \cdot d\mu`, :math:`\Delta\eta \cdot \Delta\mu` is the Jeffreys divergence, and
    Levi-Civita's connection is half-way between the two (Amari and Nagaoka 2000, *Methods of Information Geometry*,
    chapters 2 and 3). The α-geodesics of `pullback.expmap` and `pullback.exponential` are built on this pair, each of
    shape ``(*batch_shape, m)``. To add a family, register a function.

    >>> from torch.distributions import Exponential
    >>> natural_and_mean(Exponential(torch.tensor(4.0)))  # -λ and 1/λ
    (tensor([-4.]), tensor([0.2500]))
    """
    raise MissingRuleError(
        f"{type(p).__name__} has no rule for its natural and mean parameters, so it has no α-connection. If it is an "
        "exponential family, register a function that returns the pair, each of shape (*batch_shape, m): "
        "@pullback.natural_and_mean.register. Otherwise leave alpha at 0, which needs none."
    )


@singledispatch
def most_uncertain(p: Distribution) -> Distribution:
    """The distribution that `p` fades to away from the data: of its family and shape, as uncertain as can be.

    Uniform where the family has such a member (Bernoulli, categorical, Beta, Dirichlet), nearly so on the circle and
    the sphere (concentration 0.1), and for families of unbounded uncertainty the same place ten times as wide, or a
    thousandth of the rate. Open for registration: ``@pullback.most_uncertain.register`` on a function ``(p: MyFamily)
    -> MyFamily``.

    >>> from torch.distributions import Bernoulli
    >>> most_uncertain(Bernoulli(torch.tensor(0.9))).probs
    tensor(0.5000)
    """
    raise MissingRuleError(_no_fading("most_uncertain", p))


@singledispatch
def blend(p: Distribution, q: Distribution, s: Tensor) -> Distribution:
    """The distribution with parameters (1 - s) of `p` + s of `q`, of one family; `s` broadcasts to ``p.batch_shape``.

    Probabilities blend as probabilities, whichever way they were given. Open for registration:
    ``@pullback.blend.register`` on a function ``(p: MyFamily, q, s) -> MyFamily``.

    >>> from torch.distributions import Poisson
    >>> blend(Poisson(torch.tensor(2.0)), Poisson(torch.tensor(4.0)), torch.tensor(0.25)).rate
    tensor(2.5000)
    """
    raise MissingRuleError(_no_fading("blend", p))


def _no_fading(function: str, p: object) -> str:
    name = type(p).__name__
    return (
        f"There is no rule that says how {name} becomes uncertain away from the data ({function} is missing). Register "
        f"@pullback.most_uncertain.register on a function (p: {name}) -> {name} and @pullback.blend.register on (p: "
        f"{name}, q, s) -> {name}; or use pullback.Extrapolated(decoder, support), which needs neither."
    )


@dataclass(frozen=True)
class Parameter:
    """Where a parameter goes as its family becomes uncertain away from the data, and how two of its values mix."""

    target: Callable[[Any], Any]
    mix: Callable[[Tensor, Tensor, Tensor], Tensor] = torch.lerp


def times(factor: float) -> Parameter:
    return Parameter(lambda x: factor * x)


def _constant(value: float) -> Parameter:
    return Parameter(lambda x: x.new_tensor(value).expand_as(x))


SAME = Parameter(lambda x: x)
# A constant of the model, such as a number of trials.
KEPT = Parameter(lambda x: x, lambda a, b, s: a)
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


@singledispatch
def positive_kl(p: Distribution, q: Distribution) -> Tensor:
    """KL(p, q) of two members of one family, of shape ``batch_shape``, written so that nothing cancels."""
    # Autodiff differentiates the rules twice and gets the Fisher information: Laplace is without a bare absolute value,
    # Gamma, Beta, Dirichlet and Gumbel without torch's trigamma, which is exact to nine digits only.
    if (rule := torch_kl_rule(type(p), type(q))) is None:
        raise MissingRuleError(
            f"No Kullback-Leibler divergence is known for {type(p).__name__} and {type(q).__name__}. Add it with "
            "torch.distributions.register_kl, or estimate it with "
            "pullback.divergences.monte_carlo_kl(num_samples=1000)."
        )
    return rule(p, q)


def kl(p: Distribution, q: Distribution) -> Tensor:
    r"""The Kullback-Leibler divergence :math:`\int p \log(p/q)`, right at saturation.

    torch's own divergences of discrete families subtract nearly equal numbers: in float32 at logits of 20 they come out
    negative, and infinite with zero gradient for saturated probabilities. Here they are sums of terms that are each
    positive, computed from logits: :math:`\sum_i p_i\, g(\log q_i - \log p_i)`, :math:`g(x) = e^x - 1 - x`. Others
    (Laplace, Weibull, Wishart) have a Hessian that autodiff of torch's rule gets wrong without notice; here it is the
    Fisher information. Multinomial, negative binomial and von Mises divergences are missing in torch. Everything else
    is torch's, to which `torch.distributions.register_kl` adds families. The most specific rule is used, so one
    registered for a subclass of a family wins over the family's.

    >>> from torch.distributions import Normal
    >>> kl(Normal(torch.tensor(0.0), torch.tensor(1.0)), Normal(torch.tensor(1.0), torch.tensor(1.0)))
    tensor(0.5000)
    """
    # For the same class the library's rule wins over torch's, and over no other.
    family = type(p)
    ours = positive_kl.dispatch(family if family is type(q) else Distribution)
    base = next(cls for cls in family.__mro__ if positive_kl.registry.get(cls) is ours)
    return positive_kl.dispatch(Distribution)(p, q) if has_registered_kl(family, base) else ours(p, q)


AFFINITY = "Rényi and Hellinger divergence"


def log_affinity(p: Distribution, q: Distribution, alpha: float) -> Tensor:
    r""":math:`\log \int p^\alpha q^{1-\alpha}`, of which Rényi and Hellinger divergences are made.

    It is 0 where ``p = q``, and below 0 otherwise if 0 < α < 1. In an exponential family it is a gap of the
    log-normalizer,

    .. math:: A(\alpha \theta_p + (1 - \alpha) \theta_q) - \alpha A(\theta_p) - (1 - \alpha) A(\theta_q),

    (Nielsen and Nock, "On Rényi and Tsallis entropies and divergences for exponential families", 2011).
    """
    rule, other = (_log_affinity.dispatch(type(r)) for r in (p, q))
    return (rule if rule is other else no_affinity)(p, q, alpha)


def no_affinity(p: Distribution, q: Distribution, alpha: float) -> Tensor:
    names = " and ".join(dict.fromkeys(type(r).__name__ for r in (p, q)))
    raise MissingRuleError(
        f"No closed form of Rényi and Hellinger divergences is known to the library for {names}. Use "
        "pullback.divergences.symmetrized_kl or pullback.divergences.monte_carlo_kl(num_samples=1000), or pass a "
        "function (p, q) -> Tensor of your own."
    )


_log_affinity = singledispatch(no_affinity)
log_affinity.register, log_affinity.dispatch = _log_affinity.register, _log_affinity.dispatch
