"""A standard deviation that grows away from the data by construction: the precision is a sum of bumps on the codes
(Arvanitidis, Hansen, Hauberg 2018; the Gaussian experiment of Arvanitidis et al. 2022)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, softplus

from pullback._decoders.support import Support
from pullback._numerics.special import inverse_softplus
from pullback._options import check_options
from pullback._typing import Codes, Float


class RBFPrecision(nn.Module):
    r"""The standard deviation :math:`\sigma_i(z) = a_i / (\sum_j w_j \exp(-|z - c_j|^2 / 2h^2) + \epsilon)`, trainable.

    The weights a and w are positive and trained. It starts with :math:`\sigma \approx` `scale` on the data and
    `ceiling` times that far away. Train it with the mean held fixed, once the codes are known.

    Args:
        support: gives the centers and the width h (its `scale`).
        num_features: D.
        scale: the initial standard deviation on the data.
        ceiling: the ratio of the standard deviation far from the data to that on them, at the start;
            :math:`1/\epsilon`, which is not trained: the data cannot tell it.

    >>> import torch, pullback as pb
    >>> sigma = pb.RBFPrecision(pb.Support.fit(torch.randn(200, 2), 20), num_features=3)
    >>> decoder = lambda z: torch.distributions.Normal(torch.zeros(3), sigma(z))  # here with a mean of zero
    >>> bool(decoder(torch.full((2,), 99.0)).stddev.min() > 10 * decoder(torch.zeros(2)).stddev.max())
    True
    """

    def __init__(self, support: Support, num_features: int, *, scale: float = 1.0, ceiling: float = 100.0):
        super().__init__()
        check_options(num_features=num_features, scale=scale)
        if not ceiling > 1:
            raise ValueError(f"ceiling is {ceiling}; it must be above 1, or noise would not grow away from the data.")
        self.support = support
        self.floor = 1 / ceiling
        overlap = self.bumps(support.centers).sum(-1).median()
        self._bump_weights = nn.Parameter(inverse_softplus((1 / overlap).repeat(len(support.offsets))))
        self._feature_weights = nn.Parameter(inverse_softplus(overlap.new_tensor(scale).repeat(num_features)))

    def bumps(self, z: Codes) -> Float[Tensor, "*batch k"]:
        """The radial basis functions, one for each center of the support."""
        return torch.exp(-0.5 * self.support.squared_distances(z) / self.support.scale.square())

    def forward(self, z: Codes) -> Float[Tensor, "*batch D"]:
        """The standard deviations of the D features at ``z``."""
        precision = linear(self.bumps(z), softplus(self._bump_weights)[None]) + self.floor
        return softplus(self._feature_weights) / precision
