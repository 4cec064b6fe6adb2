r"""Decoders that emit one more reading: what the latent prior knows, or preferences, costs and obstacles.

Let a decoder report, next to x, any function g of the code with known noise, :math:`y \sim \mathcal N(g(z), 1)`. Its
Fisher information :math:`Dg^\top Dg` is added to the metric, so a path pays for every change of g: going over a wall
and down again costs at least twice its height.

The information of a prior, :math:`\Lambda = -\nabla^2 \log p(z)`, is that of a reading :math:`g = \Lambda^{1/2} z` of
the code itself. With it, M is the expected precision of the posterior of a code, :math:`-\mathrm{E}_{x \mid z}\,
\nabla_z^2 \log p(x, z)`, the information of the Bayesian Cramér-Rao bound (van Trees 1968); see docs/unused.md.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Distribution, Independent, MultivariateNormal, Normal

from pullback._decoders.contract import Decoder, DecoderError, observed, real_numbers
from pullback._decoders.probe import check_callable, check_output, decoded
from pullback._decoders.support import Support
from pullback._families.composite import Product
from pullback._families.location_scale import UnitNormal
from pullback._typing import Array, Float


class WithChannel(nn.Module, abc.ABC):
    """A decoder that emits one more observation next to what it decodes (abstract)."""

    support: Support | None

    def __init__(self, decoder: Decoder):
        super().__init__()
        check_callable(decoder)
        self.decoder = decoder
        vars(self)["support"] = getattr(decoder, "support", None)  # not registered: it is a part of the decoder

    def forward(self, z: Float[Tensor, "*batch d"]) -> Distribution:
        """The distribution p(x|z) of the data, as the wrapped decoder gives it."""
        return decoded(self.decoder, z)

    def observed(self, z: Float[Tensor, "*batch d"]) -> Distribution:
        """What the geometry sees: what it saw before and, independent of it, the `channel`."""
        seen = observed(self.decoder)(z)
        check_output(seen, z)
        mean = self._mean(z, None if hasattr(self.decoder, "observed") else seen)
        return Product(seen, Independent(UnitNormal(mean), 1, validate_args=False), validate_args=False)

    def channel(self, z: Float[Tensor, "*batch d"]) -> Distribution:
        r"""The observation :math:`y \sim \mathcal N(g(z), 1)` alone; a path's energy under it is what it adds."""
        return Independent(UnitNormal(self._mean(z, None)), 1, validate_args=False)

    @abc.abstractmethod
    def _mean(self, z: Tensor, decoded: Distribution | None) -> Tensor:
        """g(z), ``(*batch, k)``; `decoded` is what the decoder makes of z, if that is known."""


class WithPrior(WithChannel):
    r"""A decoder whose geometry also sees the information of the latent prior, :math:`M = J^\top I J + \Lambda`.

    This is the geometry to use for a trained VAE with more than two latent dimensions. Called, it is the decoder you
    gave: nothing is added to what is decoded. Metrics look at `observed` instead. Squared lengths add up, so the part
    of a path's energy that is due to the prior is its energy under ``FisherRaoMetric(with_prior.channel)``;
    `pullback.contributions` lists it.

    It composes: ``WithPrior(Extrapolated(decoder, support))`` has both a prior and a wall.

    Args:
        decoder: any decoder.
        prior: the prior of the codes: None for the standard normal, a `Normal` of shape ``(d,)``, a
            `MultivariateNormal`, or its precision matrix :math:`\Lambda` of shape ``(d, d)``, positive semi-definite.

    >>> import torch, pullback as pb
    >>> from torch.distributions import Bernoulli
    >>> decoder = pb.WithPrior(lambda z: Bernoulli(logits=3 * z[..., :1]))  # the second dimension is unused
    >>> pb.FisherRaoMetric(decoder).tensor(torch.zeros(2))
    tensor([[3.2500, 0.0000],
            [0.0000, 1.0000]])
    """

    root: Tensor | None

    def __init__(self, decoder: Decoder, prior: Distribution | Float[Tensor, "d d"] | Array | None = None):
        super().__init__(decoder)
        self.register_buffer("root", None if prior is None else _root(prior))

    def _mean(self, z: Tensor, decoded: Distribution | None) -> Tensor:
        if self.root is not None and self.root.shape[-1] != z.shape[-1]:
            raise ValueError(
                f"The prior has {self.root.shape[-1]} dimensions, but the codes have {z.shape[-1]}. Give the prior "
                "that the model's codes were trained with, or its precision matrix of shape (d, d)."
            )
        return z if self.root is None else z @ self.root.to(z)

    def extra_repr(self) -> str:
        """What is inside, for printing."""
        inner = "" if isinstance(self.decoder, nn.Module) else f"{getattr(self.decoder, '__name__', self.decoder)}, "
        return inner + ("prior=N(0, 1)" if self.root is None else f"prior of {self.root.shape[-1]} dimensions")


def _root(prior: Any) -> Tensor:
    """The symmetric square root of the information matrix of a prior whose log-density is quadratic."""
    if isinstance(prior, Independent):
        return _root(prior.base_dist)
    if isinstance(prior, Normal) and prior.scale.ndim != 1:
        raise ValueError(
            f"A Normal prior must have one scale per latent dimension, shape (d,); got {tuple(prior.scale.shape)}. "
            "For N(0, s²) in d dimensions use Normal(torch.zeros(d), s * torch.ones(d))."
        )
    if isinstance(prior, Normal):
        precision = torch.diag_embed(prior.scale**-2)
    else:
        precision = prior.precision_matrix if isinstance(prior, MultivariateNormal) else prior
    if isinstance(precision, Distribution):
        raise TypeError(
            f"The information of a {type(prior).__name__} prior is not one positive semi-definite matrix: the "
            "log-density of a mixture or a flow is not concave everywhere. Give a Normal or a MultivariateNormal, or a "
            "precision matrix of your choice, such as torch.cov(codes.T).inverse()."
        )
    # numbers of any type as floating-point ones
    precision = 1.0 * (precision if isinstance(precision, Tensor) else real_numbers(precision, "A precision matrix"))
    if precision.ndim != 2 or precision.shape[0] != precision.shape[1]:
        raise ValueError(
            f"A precision matrix has the shape (d, d), got {tuple(precision.shape)}. Pass one matrix for all codes."
        )
    precision = precision.detach()
    values, vectors = torch.linalg.eigh(0.5 * (precision + precision.mT))
    size, asymmetry = values.abs().amax(), (precision - precision.mT).abs().amax()
    rounding = len(precision) * torch.finfo(values.dtype).eps * size
    if not (values.amin() >= -rounding and asymmetry <= 1e-4 * size):
        raise ValueError(
            "The precision matrix of the prior must be symmetric and positive semi-definite: its smallest eigenvalue "
            f"is {values.amin():.3g}, its asymmetry {asymmetry:.3g}. Pass the inverse of a covariance matrix, such as "
            "torch.cov(codes.T).inverse()."
        )
    return (vectors * values.clamp_min(0).sqrt()) @ vectors.mT


class WithReading(WithChannel):
    r"""A decoder whose geometry also sees a function g of the code or of what it decodes to: :math:`M + Dg^\top Dg`.

    Called, it is the decoder you gave. Metrics look at `observed`, which adds the reading.

    Args:
        decoder: any decoder.
        reading: ``g(z, p)`` for codes ``(n, d)`` and what they decode to, of shape ``(n,)`` or ``(n, k)``, in units of
            length of the metric: a change of g by 1 costs a length of at least 1.

    An obstacle of radius 1 around the origin, 10 high:

    >>> import torch, pullback as pb
    >>> def obstacle(z, p):
    ...     return 10 * torch.sigmoid(8 * (1 - z.norm(dim=-1)))
    >>> metric = pb.FisherRaoMetric(pb.WithReading(lambda z: torch.distributions.Normal(z, 1.0), obstacle))
    >>> a, b = torch.tensor([-2.0, 0.1]), torch.tensor([2.0, 0.1])
    >>> path = pb.geodesic(metric, a, b)
    >>> bool(path.curve(torch.tensor([0.5]))[0].norm() > 1)
    True
    """

    def __init__(self, decoder: Decoder, reading: Callable[[Tensor, Distribution], Tensor]):
        super().__init__(decoder)
        self.reading = reading

    def _mean(self, z: Tensor, decoded: Distribution | None) -> Tensor:
        p, batch = self.decoder(z) if decoded is None else decoded, z.shape[:-1]
        check_output(p, z)
        value = self.reading(z, p)
        if not isinstance(value, Tensor) or value.shape[: len(batch)] != batch or value.ndim > len(batch) + 1:
            shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise DecoderError(
                f"A reading must return a tensor with one number or one vector per code, shape {tuple(batch)} or "
                f"{(*batch, 'k')}; got {shape}. Reduce over the last dimensions, such as cost.sum(-1)."
            )
        return value[..., None] if value.ndim == len(batch) else value
