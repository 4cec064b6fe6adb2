"""The autoencoders of the Gaussian experiment: linear, with noise of several kinds."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributions import Normal, kl_divergence
from torch.nn.functional import softplus

NUM_PIXELS = 784


class LinearNoise(nn.Module):
    """A standard deviation by one linear layer, which may do anything where there are no codes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, NUM_PIXELS)

    def forward(self, z: Tensor) -> Tensor:
        """The standard deviations of all pixels."""
        return softplus(self.layer(z))


class ConstantNoise(nn.Module):
    """A standard deviation for each pixel, the same for all codes: what the mean is trained with before there are codes."""

    def __init__(self) -> None:
        super().__init__()
        self.raw = nn.Parameter(torch.full((NUM_PIXELS,), -1.0))

    def forward(self, z: Tensor) -> Tensor:
        """The standard deviations of all pixels."""
        return softplus(self.raw)


class GaussianVAE(nn.Module):
    """A linear encoder and a linear mean, with noise of any kind above a floor."""

    def __init__(self, noise: nn.Module, min_stddev: float) -> None:
        super().__init__()
        self.encoder_mean, self.encoder_stddev = nn.Linear(NUM_PIXELS, 2), nn.Linear(NUM_PIXELS, 2)
        self.mean = nn.Linear(2, NUM_PIXELS)
        self.noise = noise
        self.min_stddev = min_stddev

    def encode(self, x: Tensor) -> Normal:
        """The approximate posterior of the codes."""
        return Normal(self.encoder_mean(x), softplus(self.encoder_stddev(x)))

    def forward(self, z: Tensor) -> Normal:
        """Decodes codes of shape ``(*batch, 2)``."""
        return Normal(self.mean(z), self.min_stddev + self.noise(z))

    def negative_elbo(self, x: Tensor) -> Tensor:
        """The negative evidence lower bound of each image, by one sample."""
        q = self.encode(x)
        prior = Normal(torch.zeros_like(q.loc), torch.ones_like(q.scale))
        return kl_divergence(q, prior).sum(-1) - self(q.rsample()).log_prob(x).sum(-1)
