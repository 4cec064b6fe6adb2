r"""Five likelihoods over one circle of codes: the second experiment of Arvanitidis et al. 2022.

The codes are known, a noisy circle in the plane, and so are the decoders: single linear layers, never trained, with the
heads and seeds of the paper's appendix. Only the likelihood changes, and with it the geometry.

What the decoder does away from the codes decides where shortest paths run. The figure shows two answers, with geodesics between the
same pairs of codes: the paper's reweighting, with its number of centres and its sharpness :math:`\beta`, under which the void can be a
short cut where a likelihood's uncertainty is bounded; and `pullback.Extrapolated`, which closes the void.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.patheffects import Normal as Unchanged
from matplotlib.patheffects import Stroke
from PIL import Image
from torch import Tensor, nn
from torch.distributions import Bernoulli, Beta, Dirichlet, Distribution, Exponential, Normal
from torch.nn.functional import softplus
from tqdm import tqdm

import pullback as pb
from pullback import plot

Heads = tuple[Tensor, ...]
Extrapolation = Literal["reweight", "recommended"]
ROWS: dict[Extrapolation, str] = {"reweight": "reweighting (paper)", "recommended": "Extrapolated (recommended)"}
INSIDE, OUTSIDE = "white", "#ff6a3d"
OUTLINE = [Stroke(linewidth=3, foreground="black", alpha=0.8), Unchanged()]


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
    num_paths: int = 10
    paths_seed: int = 0
    max_segments: int = 1024  # of a path
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


def pairs(codes: Tensor, settings: Settings = PAPER) -> tuple[Tensor, Tensor]:
    """End points of the paths: different random codes, the same for every panel."""
    generator = torch.Generator().manual_seed(settings.paths_seed)
    chosen = codes[torch.randperm(len(codes), generator=generator)[: 2 * settings.num_paths]]
    return chosen[: settings.num_paths], chosen[settings.num_paths :]


def problem(
    family: str, settings: Settings = PAPER, *, extrapolation: Extrapolation | None = "reweight"
) -> tuple[nn.Module, Tensor]:
    """The decoder and the codes of one panel of the figure.

    **Arguments:**

    - `family`: a key of `FAMILIES`.
    - `settings`: sizes and seeds.
    - `extrapolation`: how the decoder learns where the codes end: ``"reweight"``, as in the paper; ``"recommended"``, by
      `pullback.Extrapolated`; None for the linear decoder as it is.
    """
    if family not in FAMILIES:
        raise ValueError(f"The toy experiment has the families {', '.join(FAMILIES)}; there is no {family!r}.")
    codes, decoder = circle(settings), LinearDecoder(FAMILIES[family])
    if extrapolation is None:
        return decoder, codes
    if extrapolation == "recommended":
        return pb.Extrapolated(decoder, pb.Support.fit(codes)), codes
    support = pb.Support.fit(codes, settings.num_centers)
    return pb.Reweighted(decoder, support, beta=FAMILIES[family].beta, smooth=False), codes


def run(out: Path, settings: Settings = PAPER) -> list[Path]:
    """Draws the latent spaces and their geodesics into ``out/toy.png`` and ``out/toy.pdf``; returns the two paths."""
    out.mkdir(parents=True, exist_ok=True)
    figure = draw(settings)
    png, pdf = out / "toy.png", out / "toy.pdf"
    for file in (png, pdf):
        figure.savefig(file, dpi=120, bbox_inches="tight")
    plt.close(figure)
    with Image.open(png) as image:  # 256 colours take a third of the bytes
        image.convert("RGB").quantize(256, kmeans=4, dither=Image.Dither.NONE).save(png, optimize=True)
    return [png, pdf]


def draw(settings: Settings = PAPER) -> Figure:
    """Five latent spaces under two extrapolations: log-volume of the pulled-back Fisher-Rao metric, the codes, and geodesics."""
    figure, axes = plt.subplots(
        len(ROWS), len(FAMILIES), figsize=(14, 6), sharex=True, sharey=True, layout="compressed"
    )
    panels = [(row, column) for row in range(len(ROWS)) for column in range(len(FAMILIES))]
    for row, column in tqdm(panels, desc="toy latent spaces"):
        _draw_panel(axes[row, column], list(FAMILIES)[column], list(ROWS)[row], settings)
    for ax, family in zip(axes[0], FAMILIES.values(), strict=True):
        ax.set_title(family.title)
    for ax, label in zip(axes[:, 0], ROWS.values(), strict=True):
        ax.set_ylabel(label, fontsize="large")
    _explain(figure, axes)
    return figure


def _draw_panel(ax: Axes, name: str, extrapolation: Extrapolation, settings: Settings) -> None:
    decoder, codes = problem(name, settings, extrapolation=extrapolation)
    metric, side = pb.FisherRaoMetric(decoder), settings.radius + 1.7
    drawn = plot.latent(
        metric, codes, bounds=(-side, side, -side, side), resolution=settings.resolution, colorbar=False, ax=ax
    )
    low, high = drawn.image.get_clim()
    drawn.image.set_clim(max(low, high - settings.span), high)
    if drawn.codes is not None:
        drawn.codes.set(sizes=[4], color="white", alpha=0.6, linewidths=0)
    _draw_paths(ax, geodesics(metric, codes, settings))
    ax.set(xticks=[-3, 0, 3], yticks=[-3, 0, 3])


def geodesics(metric: pb.FisherRaoMetric, codes: Tensor, settings: Settings = PAPER) -> pb.Geodesic:
    """The paths of one panel, started from shortest paths on a lattice: a straight line would start in the void."""
    a, b = pairs(codes, settings)
    start = pb.Lattice.fit(metric, codes)
    solver = pb.GaussNewton(rtol=1e-3, max_segments=settings.max_segments)
    return pb.geodesic(metric, a, b, init=start, solver=solver, support=metric.decoder.support)


def _draw_paths(ax: Axes, path: pb.Geodesic) -> None:
    for line in plot.paths(path, ax=ax, linewidth=1.6, path_effects=OUTLINE, zorder=3):
        line.set_color(OUTSIDE if line.get_linestyle() == "--" else INSIDE)
    if not path.converged.all():
        count = f"{int(path.converged.sum())} of {path.converged.numel()}\nconverged"
        ax.text(0.98, 0.02, count, transform=ax.transAxes, ha="right", va="bottom", fontsize="small")


def _explain(figure: Figure, axes: np.ndarray) -> None:
    """A scale of the colours, which each panel stretches to its own range, and a legend of what is drawn on them."""
    bar = figure.colorbar(ScalarMappable(cmap="viridis"), ax=axes, aspect=40, pad=0.01)
    bar.set_ticks([0, 1], labels=["small", "large"])
    bar.set_label("log-volume (each panel to its own scale)", labelpad=-20)
    line = partial(Line2D, [], [], linewidth=1.6, path_effects=OUTLINE)
    handles = [
        Line2D([], [], linestyle="", marker="o", markersize=4, color="white", markeredgecolor="0.4", label="code"),
        line(color=INSIDE, label="shortest path"),
        line(color=OUTSIDE, linestyle="--", label="shortest path that leaves the data"),
        Patch(color="0.8", label="singular metric"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
