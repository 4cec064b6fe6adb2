"""The Fisher information of every family, one short rule each.

`fisher` is an open function: ``@pullback.fisher.register`` adds a family. Formulas are in the coordinates named in each
docstring; the choice of coordinates is free (the pulled-back metric does not depend on it), so each rule takes the one that
stays finite and accurate where the family saturates.
"""

from __future__ import annotations

from functools import singledispatch

import torch
from torch import Tensor
from torch.distributions import Bernoulli, Distribution, Normal

from pullback._information import Information


@singledispatch
def fisher(p: Distribution) -> Information:
    """TODO(docs)"""
    raise NotImplementedError(
        f"No Fisher information is registered for {type(p).__name__}. Register it with @pullback.fisher.register, or use "
        "pullback.ScoreMetric(decoder), which needs only sample and log_prob."
    )


@fisher.register
def _(p: Normal) -> Information:
    r"""Coordinates (μ, σ): I = diag(1, 2) / σ²."""
    return Information(torch.stack([p.loc, p.scale], -1), root=_normal_root)


def _normal_root(eta: Tensor, u: Tensor) -> Tensor:
    return u * torch.tensor([1.0, 2.0**0.5], dtype=eta.dtype, device=eta.device) / eta[..., 1:]


@fisher.register
def _(p: Bernoulli) -> Information:
    r"""Coordinate logit l: I = p(1 - p) = sech²(l/2) / 4."""
    return Information(p.logits[..., None], root=lambda eta, u: 0.5 * u / torch.cosh(0.5 * eta))
