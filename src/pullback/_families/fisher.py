"""The Fisher information of a distribution, an open function: every family adds one short rule (see `pullback._families`)."""

from __future__ import annotations

from functools import singledispatch

from torch.distributions import Distribution

from pullback._families.information import Information
from pullback._families.missing import MissingRuleError


@singledispatch
def fisher(p: Distribution) -> Information:
    r"""The Fisher information of `p` on its own family.

    In coordinates :math:`\eta` on the family it is the covariance of the score, and the curvature of the Kullback-Leibler
    divergence at zero,

    .. math:: I(\eta) = \mathrm{E}_{x \sim p_\eta}\big[\nabla_\eta \log p_\eta(x)\, \nabla_\eta \log p_\eta(x)^\top\big],
       \qquad \mathrm{KL}(p_\eta, p_{\eta + u}) = \tfrac12\, u^\top I(\eta)\, u + O(|u|^3),

    the only metric, up to scale, that no sufficient statistic changes (Rao 1945; Amari and Nagaoka, *Methods of Information
    Geometry*, 2000). Each family chooses its coordinates, named in the docstring of its rule; the metric pulled back to a
    latent space does not depend on that choice. Batch dimensions are independent features, each with its own matrix:

    >>> import torch
    >>> from torch.distributions import Normal
    >>> fisher(Normal(torch.tensor(0.0), torch.tensor(0.5))).matrix  # I = diag(1, 2) / σ² in (μ, σ)
    tensor([[4.0000, 0.0000],
            [0.0000, 8.0000]])

    To add a family, register a function that returns an `Information`. The coordinates must be differentiable functions of
    the distribution's parameters, and the matrix a function of the coordinates alone. For a logistic distribution of your own:

    .. code-block:: python

        @pullback.fisher.register
        def _(p: Logistic) -> pullback.Information:
            constants = torch.tensor([1 / 3, (3 + math.pi**2) / 9])
            eta = torch.stack([p.loc, p.scale], -1)  # I = diag(1/3, (3 + π²)/9) / s² in (μ, s)
            return pullback.Information.from_matrix(eta, lambda eta: torch.diag_embed(constants / eta[..., 1:] ** 2))

    A distribution without a rule of its own uses that of its nearest base class.
    """
    name = type(p).__name__
    raise MissingRuleError(
        f"No Fisher information is registered for {name}. Add it with @pullback.fisher.register on a function "
        f"`(p: {name}) -> pullback.Information`, or use pullback.ScoreMetric(decoder), which needs only sample and log_prob."
    )
