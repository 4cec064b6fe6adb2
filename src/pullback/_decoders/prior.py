r"""A decoder together with what the latent prior knows; docs/unused.md says why a trained decoder needs it.

With :math:`\Lambda = -\nabla^2 \log p(z)`, the information of the prior,

.. math:: M(z) = J_h^\top I(h(z))\, J_h + \Lambda = -\mathrm{E}_{x \mid z}\, \nabla_z^2 \log p(x, z)

is the expected precision of the posterior of a code, the information of the Bayesian Cramér-Rao bound (van Trees 1968).
It is that of one more reading of the code itself, :math:`y \sim \mathcal N(\Lambda^{1/2} z, 1)`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributions import Distribution, Independent, MultivariateNormal, Normal

from pullback._decoders.contract import Decoder, observed
from pullback._decoders.refusals import no_decoder
from pullback._decoders.support import Support
from pullback._families.location_scale import UnitNormal
from pullback._families.product import Product
from pullback._typing import Float


class WithPrior(nn.Module):
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

    Example:
        >>> import torch, pullback as pb
        >>> from torch.distributions import Bernoulli
        >>> decoder = pb.WithPrior(lambda z: Bernoulli(logits=3 * z[..., :1]))  # the second dimension is unused
        >>> pb.FisherRaoMetric(decoder).tensor(torch.zeros(2))
        tensor([[3.2500, 0.0000],
                [0.0000, 1.0000]])
    """

    root: Tensor | None

    def __init__(self, decoder: Decoder, prior: Distribution | Float[Tensor, "d d"] | None = None):
        super().__init__()
        if not callable(decoder):
            raise TypeError(no_decoder(decoder))
        self.decoder = decoder
        self.register_buffer("root", None if prior is None else _root(_precision(prior)))

    @property
    def support(self) -> Support | None:
        """The support that the wrapped decoder knows, if it knows one."""
        return getattr(self.decoder, "support", None)

    def forward(self, z: Float[Tensor, "*batch d"]) -> Distribution:
        """The distribution p(x|z) of the data, as the wrapped decoder gives it."""
        return self.decoder(z)

    def observed(self, z: Float[Tensor, "*batch d"]) -> Distribution:
        """What the geometry sees: what it saw before and, independent of it, the `channel`."""
        return Product(observed(self.decoder)(z), self.channel(z), validate_args=False)

    def channel(self, z: Float[Tensor, "*batch d"]) -> Distribution:
        r"""The reading :math:`y \sim \mathcal N(\Lambda^{1/2} z, 1)` of the code; its information is
        :math:`\Lambda`."""
        if self.root is not None and self.root.shape[-1] != z.shape[-1]:
            raise ValueError(
                f"The prior has {self.root.shape[-1]} dimensions, but the codes have {z.shape[-1]}. Give the prior "
                "that the model's codes were trained with, or its precision matrix of shape (d, d)."
            )
        mean = z if self.root is None else z @ self.root.to(z)
        return Independent(UnitNormal(mean), 1, validate_args=False)

    def extra_repr(self) -> str:
        """What is inside, for printing."""
        inner = "" if isinstance(self.decoder, nn.Module) else f"{getattr(self.decoder, '__name__', self.decoder)}, "
        return inner + ("prior=N(0, 1)" if self.root is None else f"prior of {self.root.shape[-1]} dimensions")


def _precision(prior: Distribution | Tensor) -> Tensor:
    """The information matrix of a prior whose log-density is quadratic."""
    if isinstance(prior, Independent):
        return _precision(prior.base_dist)
    if isinstance(prior, Normal):
        if prior.scale.ndim != 1:
            raise ValueError(
                f"A Normal prior must have one scale per latent dimension, shape (d,); got {tuple(prior.scale.shape)}. "
                "For N(0, s²) in d dimensions use Normal(torch.zeros(d), s * torch.ones(d))."
            )
        return torch.diag_embed(prior.scale**-2)
    precision = prior.precision_matrix if isinstance(prior, MultivariateNormal) else prior
    if isinstance(precision, Tensor):
        if precision.ndim != 2 or precision.shape[0] != precision.shape[1]:
            raise ValueError(
                f"A precision matrix has the shape (d, d), got {tuple(precision.shape)}. Pass one matrix for all codes."
            )
        return precision
    raise TypeError(
        f"The information of a {type(prior).__name__} prior is not one positive semi-definite matrix: the log-density "
        "of a mixture or a flow is not concave everywhere. Give a Normal or a MultivariateNormal, or a precision "
        "matrix of your choice, such as torch.cov(codes.T).inverse()."
    )


def _root(precision: Tensor) -> Tensor:
    """The symmetric square root."""
    precision = precision.detach()
    values, vectors = torch.linalg.eigh(0.5 * (precision + precision.mT))
    rounding = precision.shape[-1] * torch.finfo(values.dtype).eps * values.abs().amax()
    asymmetry = (precision - precision.mT).abs().amax()
    if not (values.amin() >= -rounding and asymmetry <= 1e-4 * values.abs().amax()):
        raise ValueError(
            "The precision matrix of the prior must be symmetric and positive semi-definite: its smallest eigenvalue "
            f"is {values.amin():.3g}, its asymmetry {asymmetry:.3g}. Pass the inverse of a covariance matrix, such as "
            "torch.cov(codes.T).inverse()."
        )
    return (vectors * values.clamp_min(0).sqrt()) @ vectors.mT
