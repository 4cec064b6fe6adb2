r"""Five likelihoods over one circle of codes: the second experiment of Arvanitidis et al. 2022.

The codes are known, a noisy circle in the plane, and so are the decoders: single linear layers, never trained, with the
heads and seeds of the paper's appendix. Only the likelihood changes, and with it the geometry. Each decoder is made
uncertain away from the codes by the paper's reweighting, with the paper's number of centres and sharpness :math:`\beta`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.distributions import Bernoulli, Beta, Dirichlet, Distribution, Exponential, Normal
from torch.nn.functional import softplus
from tqdm import tqdm

import pullback as pb
from pullback import plot

Heads = tuple[Tensor, ...]


@dataclass(frozen=True)
class Family:
    """One column of the paper's figure: the sizes of the linear heads and the likelihood they parametrise."""

    title: str
    sizes: tuple[int, ...]
    likelihood: Callable[[Heads], Distribution]
    seed: int
    beta: float


FAMILIES = {
    "normal": Family("Normal", (3, 3), lambda f: Normal(10 * f[0], 10 * softplus(f[1])), seed=1, beta=-2.5),
    "bernoulli": Family("Bernoulli", (15,), lambda f: Bernoulli(logits=f[0]), seed=1, beta=-3.5),
    "beta": Family("Beta", (3, 3), lambda f: Beta(10 * softplus(f[0]), 10 * softplus(f[1])), seed=1, beta=-4.0),
    "dirichlet": Family("Dirichlet", (3,), lambda f: Dirichlet(softplus(f[0])), seed=17, beta=-4.0),
    "exponential": Family("Exponential", (3,), lambda f: Exponential(softplus(f[0])), seed=17, beta=-4.0),
}


@dataclass(frozen=True)
class Settings:
    """What the paper fixes for all five families, and how finely the figure is drawn."""

    num_codes: int = 500
    radius: float = 3.0
    noise: float = 0.1
    num_centers: int = 70
    codes_seed: int = 0
    resolution: int = 200
    span: float = 8.0  # nats of log-volume that the colours cover, at most


class LinearDecoder(nn.Module):
    """An untrained decoder: one linear layer for each parameter of the likelihood."""

    def __init__(self, family: Family) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(family.seed)
            # drawn in single precision, as torch users get them, so that a seed means the same network
            self.heads = nn.ModuleList([nn.Linear(2, size, dtype=torch.float32) for size in family.sizes]).double()
        self.likelihood = family.likelihood

    def forward(self, z: Tensor) -> Distribution:
        """Decodes codes of shape ``(*batch, 2)``."""
        return self.likelihood(tuple(head(z) for head in self.heads))


PAPER = Settings()


def circle(settings: Settings = PAPER) -> Tensor:
    """Codes on a noisy circle around the origin, of shape ``(num_codes, 2)``."""
    generator = torch.Generator().manual_seed(settings.codes_seed)
    angle = 2 * torch.pi * torch.rand(settings.num_codes, generator=generator, dtype=torch.float64)
    noise = settings.noise * torch.randn(settings.num_codes, 2, generator=generator, dtype=torch.float64)
    return settings.radius * torch.stack([angle.cos(), angle.sin()], -1) + noise


def problem(family: str, settings: Settings = PAPER) -> tuple[nn.Module, Tensor]:
    """The decoder and the codes of one column of the figure; `family` is a key of `FAMILIES`."""
    if family not in FAMILIES:
        raise ValueError(f"The toy experiment has the families {', '.join(FAMILIES)}; there is no {family!r}.")
    codes = circle(settings)
    support = pb.Support.fit(codes, settings.num_centers)
    decoder = LinearDecoder(FAMILIES[family])
    return pb.Reweighted(decoder, support, beta=FAMILIES[family].beta, smooth=False), codes


def run(out: Path, settings: Settings = PAPER) -> list[Path]:
    """Draws the five latent spaces into ``out/toy.png`` and ``out/toy.pdf``; returns the two paths."""
    out.mkdir(parents=True, exist_ok=True)
    figure = draw(settings)
    files = [out / "toy.png", out / "toy.pdf"]
    for file in files:
        figure.savefig(file, dpi=120, bbox_inches="tight")
    plt.close(figure)
    return files


def draw(settings: Settings = PAPER) -> Figure:
    """The five latent spaces side by side: log-volume of the pulled-back Fisher-Rao metric, and the codes."""
    figure, axes = plt.subplots(1, len(FAMILIES), figsize=(14, 3), sharey=True, layout="compressed")
    for ax, name in zip(axes, tqdm(FAMILIES, desc="toy latent spaces"), strict=True):
        _draw_family(ax, name, settings)
    axes[0].set_ylabel("$z_2$")
    figure.supxlabel(
        "colour: log-volume of the metric; grey: the metric is singular", y=-0.06, fontsize="medium", color="0.3"
    )
    return figure


def _draw_family(ax: Axes, name: str, settings: Settings) -> None:
    decoder, codes = problem(name, settings)
    side = settings.radius + 1.7
    drawn = plot.latent(
        pb.FisherRaoMetric(decoder), codes, bounds=(-side, side, -side, side), resolution=settings.resolution, ax=ax
    )
    low, high = drawn.image.get_clim()
    drawn.image.set_clim(max(low, high - settings.span), high)
    if drawn.colorbar is not None:
        drawn.colorbar.set_label("")
    ax.set(title=FAMILIES[name].title, xlabel="$z_1$", xticks=[-3, 0, 3], yticks=[-3, 0, 3])
