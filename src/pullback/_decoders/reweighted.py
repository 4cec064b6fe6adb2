"""The paper's extrapolation: p(x|z) fades to the most uncertain member of its family away from the data (Arvanitidis
et al. 2022, appendix on uncertainty; Detlefsen et al. 2019). docs/uncertainty.md shows the limit of this geometry."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.distributions import Distribution

from pullback._decoders.contract import Decoder, decode
from pullback._decoders.probe import decoded
from pullback._decoders.support import Support, check_support
from pullback._families.rules import blend, most_uncertain, unsqueezed
from pullback._numerics.special import inverse_softplus
from pullback._typing import Float

# Of the slider, as the paper has it (Arvanitidis et al. 2022; Detlefsen et al. 2019).
_SHIFT = 7.0


class Reweighted(nn.Module):
    r"""A decoder that fades to a target away from the data: :math:`(1 - s(z))\, h(z) + s(z)\, \mathrm{target}(z)`.

    The slider is :math:`s = \mathrm{sigmoid}(D(z)/\mathrm{softplus}(\beta) - 7)`.

    Args:
        decoder: any decoder whose family has rules for `pullback.blend` and, without a `target`,
            `pullback.most_uncertain`.
        support: where the data are.
        beta: the paper's sharpness :math:`\beta`; lower is sharper. By default s is ½ at the support's `border`.
        target: a distribution of the decoder's family, broadcastable to what it decodes, or a decoder that returns one
            (an ``nn.Module`` there follows ``.to``). By default ``most_uncertain(p(x|z))``.
        smooth: whether D is the smooth distance or the paper's, which has kinks.

    >>> import torch, pullback as pb
    >>> codes = torch.randn(200, 2, generator=torch.Generator().manual_seed(0))
    >>> decoder = pb.Reweighted(lambda z: torch.distributions.Bernoulli(logits=0 * z + 2.0), pb.Support.fit(codes))
    >>> decoder(torch.tensor([[0.0, 0.0], [90.0, 0.0]])).probs[:, 0].round(decimals=2)  # on the data and far off
    tensor([0.8800, 0.5000])
    """

    beta: Tensor

    def __init__(
        self,
        decoder: Decoder,
        support: Support,
        *,
        beta: float | None = None,
        target: Distribution | Decoder | None = None,
        smooth: bool = True,
    ):
        super().__init__()
        if hasattr(decoder, "observed"):
            raise TypeError(
                f"Reweighted blends what is decoded, and would lose what {type(decoder).__name__} adds to it. Reweight "
                f"first: {type(decoder).__name__}(Reweighted(decoder, support), ...)."
            )
        if beta is not None and not math.isfinite(beta):
            raise ValueError(f"beta must be a finite number, or None to take it from the support; got {beta}.")
        self.decoder = decoder
        self.support = support = check_support(support).matching(decoder)
        self.target = target
        self.smooth = smooth
        width = torch.maximum(support.border, support.scale.square()) / _SHIFT
        self.register_buffer("beta", inverse_softplus(width) if beta is None else support.scale.new_tensor(beta))
        z = support.centers[:1]
        self._faded(decode(decoder, z), z)  # a family without rules is refused here, not in the middle of a path

    def forward(self, z: Float[Tensor, "*batch d"]) -> Distribution:
        """The blended distribution of the data."""
        return self._faded(decoded(self.decoder, z), z)

    def slider(self, z: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch"]:
        r"""s(z): :math:`\mathrm{sigmoid}(-7) \approx 10^{-3}` at the centers of the support, 1 far from them."""
        distance2 = self.support.distance2(z, smooth=self.smooth)
        return torch.sigmoid(distance2 / nn.functional.softplus(self.beta) - _SHIFT)

    def _faded(self, p: Distribution, z: Tensor) -> Distribution:
        q = self.target(z) if callable(self.target) else self.target or most_uncertain(p)
        if not isinstance(q, type(p)):
            raise TypeError(
                f"The target is a {type(q).__name__}, but the decoder returns a {type(p).__name__}: only distributions "
                "of one family can be blended. Give a target of that family, wrapped like it (Independent, Product)."
            )
        s = self.slider(z)
        return blend(p, q, unsqueezed(s, len(p.batch_shape) - s.ndim))
