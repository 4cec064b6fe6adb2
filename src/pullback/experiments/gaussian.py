r"""Euclidean against Fisher-Rao geometry of Gaussian decoders: the first experiment of Arvanitidis et al. 2022.

Four variational autoencoders see handwritten ones and have Gaussian decoders :math:`\mathcal N(\mu(z), \sigma(z)^2)`
with linear means. Two things vary: the metric that is pulled back, Euclidean or Fisher-Rao, and what models the noise.
A radial basis network for the precision is *regularized*: its standard deviation rises away from the codes
(`pullback.RBFPrecision`). A linear layer is not.

Do shortest paths follow the codes? Each path is measured by the mean distance of its points to the nearest code, per
unit of latent length, and divided by the same number for the straight lines between the same pairs: for random pairs,
and for pairs of the hundredth whose lines stray farthest, which are drawn. A mean per latent length depends on the
route alone and not on the pace.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from torch import Tensor, nn
from torch.distributions import Normal, kl_divergence
from torch.nn.functional import softplus

import pullback as pb
from pullback import data
from pullback.experiments import figures
from pullback.experiments.figures import PATH, WIDTH, save_figure
from pullback.experiments.paths import distance_to_codes, pairs_across_gaps, random_pairs, straight
from pullback.experiments.progress import say
from pullback.experiments.report import Finding, Report, Table, Verdict
from pullback.experiments.training import minimize
from pullback.experiments.weights import cached, reproducible

NUM_PIXELS = 784


@dataclass(frozen=True)
class Settings:
    """The paper's table of networks, and what it leaves open."""

    seed: int = 0
    batch_size: int = 32
    learning_rate: float = 1e-3
    num_steps: int = 30_000
    # With a tenth of the learning rate.
    num_fine_steps: int = 6000
    # Of the radial basis functions, and their width relative to the default of pullback.Support.
    num_centers: int = 500
    width: float = 1.5
    # Of the regularized standard deviation, relative to that on the codes.
    ceiling: float = 100.0
    noise_learning_rate: float = 1e-2
    num_noise_steps: int = 1500
    min_stddev: float = 0.05
    # Random pairs, of which the hundredth is chosen whose straight lines stray farthest.
    num_candidates: int = 5000
    # Random ones, and as many of that hundredth.
    num_pairs: int = 40
    num_drawn: int = 10
    # Of the lattice where paths start.
    num_nodes: int = 2500
    max_segments: int = 256
    resolution: int = 160


PAPER = Settings()


@dataclass(frozen=True)
class Panel:
    """One of the four autoencoders: the metric pulled back through it, and whether its noise is regularized."""

    key: str
    title: str
    metric: type[pb.EuclideanMetric] | type[pb.FisherRaoMetric]
    regularized: bool


PANELS = (
    Panel("euclidean-regularized", "Euclidean,\nregularized", pb.EuclideanMetric, True),
    Panel("euclidean-plain", "Euclidean,\nnot regularized", pb.EuclideanMetric, False),
    Panel("fisher-rao-regularized", "Fisher–Rao,\nregularized", pb.FisherRaoMetric, True),
    Panel("fisher-rao-plain", "Fisher–Rao,\nnot regularized", pb.FisherRaoMetric, False),
)


# The networks.


class LinearNoise(nn.Module):
    """A standard deviation by one linear layer, which may do anything where there are no codes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, NUM_PIXELS)

    def forward(self, z: Tensor) -> Tensor:
        """The standard deviations of all pixels."""
        return softplus(self.layer(z))


class ConstantNoise(nn.Module):
    """A standard deviation for each pixel, the same for all codes: what the mean is trained with before there are
    codes.
    """

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


# Training.


def run(out: Path, settings: Settings = PAPER) -> Report:
    """Trains the autoencoders, draws their latent spaces and measures their shortest paths."""
    digits = data.mnist_ones()
    images = digits.images.flatten(1).float() / 255
    with reproducible(settings.seed), figures.look():
        panels = {}
        for panel in PANELS:
            say("gaussian", panel.title.replace("\n", " "))
            panels[panel] = _solve(panel, *trained(panel.regularized, images, digits.source, out, settings), settings)
        caption = (
            f"{digits.source} Ratio: mean distance to the nearest code, paths / straight lines, pairs across gaps."
        )
        figure = save_figure(_draw(panels, settings), out, "gaussian", caption=caption)
    return _report(panels, len(images), digits.source, figure, settings)


def trained(
    regularized: bool, images: Tensor, source: str, out: Path, settings: Settings
) -> tuple[GaussianVAE, Tensor]:
    """The network with either kind of noise and the codes of the images, in double precision.

    Radial basis functions need the codes. So encoder and mean are trained first, with constant noise, and the same for
    all panels; then the noise.
    """
    rate = settings.learning_rate
    schedule = (settings.num_steps, rate), (settings.num_fine_steps, 0.1 * rate)
    vae = cached(
        out,
        "gaussian-means",
        (settings, source),
        lambda: GaussianVAE(ConstantNoise(), settings.min_stddev),
        lambda vae: _fit(vae.negative_elbo, vae, images, settings, *schedule),
        seed=settings.seed,
    )
    codes = vae.encode(images).loc
    rows = torch.cat([images, codes], -1)

    def fit(noise: nn.Module) -> None:
        vae.noise = noise
        schedule = (settings.num_noise_steps, settings.noise_learning_rate)
        _fit(
            lambda row: -vae(row[:, NUM_PIXELS:]).log_prob(row[:, :NUM_PIXELS]).sum(-1), noise, rows, settings, schedule
        )

    build = partial(_radial_noise, images, codes, vae, settings) if regularized else LinearNoise
    kind = "radial" if regularized else "linear"
    vae.noise = cached(out, f"gaussian-{kind}", (settings, source), build, fit, seed=settings.seed)
    return vae.double(), codes.double()


def _fit(
    loss: Callable[[Tensor], Tensor], network: nn.Module, rows: Tensor, settings: Settings, *schedule: tuple[int, float]
) -> None:
    """Trains with each pair of a number of steps and a learning rate in turn."""
    for num_steps, learning_rate in schedule:
        minimize(
            loss,
            network.parameters(),
            rows,
            num_steps=num_steps,
            batch_size=settings.batch_size,
            learning_rate=learning_rate,
            description=f"gaussian: {type(network).__name__}",
        )


def _radial_noise(images: Tensor, codes: Tensor, vae: GaussianVAE, settings: Settings) -> pb.RBFPrecision:
    """Radial basis functions on the codes, which start with the noise that the means leave."""
    num_centers = min(settings.num_centers, len(codes) // 4)
    scale = settings.width * float(pb.Support.fit(codes, num_centers, random_state=settings.seed).scale)
    support = pb.Support.fit(codes, num_centers, scale=scale, random_state=settings.seed)
    noise = float((images - vae(codes).mean).std())
    return pb.RBFPrecision(support, NUM_PIXELS, scale=noise, ceiling=settings.ceiling)


# Paths.


@dataclass(frozen=True)
class Solved:
    """A panel with its shortest paths, those across gaps first."""

    metric: pb.Metric
    codes: Tensor
    path: pb.results.Geodesic
    numbers: dict[str, Any]


def _solve(panel: Panel, vae: GaussianVAE, codes: Tensor, settings: Settings) -> Solved:
    """Solves for pairs across gaps and, after them in the same batch, for as many random ones."""
    metric, n = panel.metric(vae), settings.num_pairs
    across = pairs_across_gaps(codes, n, num_candidates=settings.num_candidates, seed=settings.seed)
    random = random_pairs(codes, n, seed=settings.seed)
    a, b = (torch.cat(ends) for ends in zip(across, random, strict=True))
    lattice = pb.Lattice.fit(metric, codes, num_nodes=settings.num_nodes, margin=0.25)
    solver = pb.GaussNewton(rtol=1e-3, max_segments=settings.max_segments)
    path = pb.geodesic(metric, a, b, init=lattice, solver=solver)
    along, line = (distance_to_codes(curve.resample(401), codes) for curve in (path.curve, straight(a, b)))
    numbers: dict[str, Any] = {"converged": int(path.converged.sum()), "pairs": len(a)}
    for name, part in (("random", slice(n, None)), ("gaps", slice(n))):
        numbers[name] = {
            "path": float(along[part].mean()),
            "line": float(line[part].mean()),
            "ratio": float(along[part].mean() / line[part].mean()),
            "nearer_pairs": int((along[part] < line[part]).sum()),
            "each": (along[part] / line[part].mean()).tolist(),
        }
    return Solved(metric, codes, path, numbers)


def _draw(panels: dict[Panel, Solved], settings: Settings) -> Figure:
    layout = ConstrainedLayoutEngine(compress=True, hspace=0.08)
    figure, axes = plt.subplots(2, 2, figsize=(WIDTH, 7.0), sharex=True, sharey=True, layout=layout)
    for ax, (panel, solved) in zip(axes.flat, panels.items(), strict=True):
        bounds = _bounds(solved.codes)
        figures.latent(ax, solved.metric, solved.codes, resolution=settings.resolution, bounds=bounds)
        ax.set(xlim=bounds[:2], ylim=bounds[2:])
        figures.curves(ax, solved.path.curve[: settings.num_drawn], PATH)
        ax.set_title(f"{panel.title}\nratio {solved.numbers['gaps']['ratio']:.2f}")
    figures.legend(figure, [("code", "white", "dot"), ("shortest path", PATH, "line")])
    return figure


def _bounds(codes: Tensor) -> tuple[float, float, float, float]:
    """A rectangle around all codes but the outermost percent, with a margin: a few outliers do not set the axes."""
    share = torch.tensor([0.005, 0.995], dtype=codes.dtype)
    (left, bottom), (right, top) = codes.quantile(share, dim=0).tolist()
    x, y = 0.25 * (right - left), 0.25 * (top - bottom)
    return left - x, right + x, bottom - y, top + y


# The report.


METRICS = {"euclidean": "Euclidean", "fisher-rao": "Fisher–Rao"}
# Random pairs first: the others were chosen for their lines.
KINDS = {"random": "random pairs", "gaps": "pairs across gaps"}


def _report(panels: dict[Panel, Solved], num_images: int, source: str, figure: Path, settings: Settings) -> Report:
    numbers = {panel.key: solved.numbers for panel, solved in panels.items()}
    columns = ["panel", "random: paths", "lines", "ratio", "across gaps: paths", "lines", "ratio", "converged"]
    table = Table("Distance to the nearest code", columns, [_row(panel, numbers[panel.key]) for panel in PANELS])
    measures = {f"{kind}: {key}": n[kind]["ratio"] for kind in KINDS for key, n in numbers.items()}
    return Report(
        name="gaussian",
        title="Euclidean and Fisher–Rao pull-back with Gaussian decoders",
        source=source,
        findings=[*(_follow(numbers, kind, metric) for kind in KINDS for metric in METRICS), _on_par(numbers)],
        figures=[figure],
        files=[],
        numbers={"settings": asdict(settings), "num_images": num_images, "panels": numbers},
        measures=measures,
        tables=[table],
    )


def _follow(numbers: dict[str, Any], kind: str, metric: str) -> Finding:
    """Holds where regularized paths are nearer than those without it, and than straight lines, by two standard errors;
    weakly at one.
    """
    regularized, plain = (numbers[f"{metric}-{noise}"][kind] for noise in ("regularized", "plain"))
    gain = torch.tensor(plain["each"]) - torch.tensor(regularized["each"])
    mean, error = float(gain.mean()), float(gain.std() / len(gain) ** 0.5)
    times = mean / error if regularized["ratio"] < 1 else 0.0
    verdict: Verdict = "holds" if times > 2 else "holds weakly" if times > 1 else "does not hold"
    reason = "regularized paths are not nearer than others and lines by two standard errors over the pairs"
    return Finding(
        f"Regularized uncertainty makes {METRICS[metric]} paths follow the codes ({KINDS[kind]})",
        "Sec. 4.1, Fig. 4",
        "instrumental: " + ("first against second panel" if metric == "euclidean" else "third against fourth"),
        f"distance to the codes, paths / lines: {regularized['ratio']:.2f} with, {plain['ratio']:.2f} without; nearer "
        f"by {mean:.3f} ± {error:.3f}, in {int((gain > 0).sum())} of {len(gain)} pairs",
        verdict,
        "" if verdict == "holds" else reason,
    )


def _on_par(numbers: dict[str, Any]) -> Finding:
    euclidean, fisher_rao = (
        numbers[f"{metric}-regularized"]["random"]["ratio"] for metric in ("euclidean", "fisher-rao")
    )
    apart = fisher_rao - euclidean
    verdict: Verdict = (
        "holds" if apart < 0.05 else "holds weakly" if apart < 0.25 and fisher_rao < 1 else "does not hold"
    )
    return Finding(
        "Fisher–Rao learns as much structure as Euclidean",
        "Sec. 4.1, Fig. 4",
        "on par: first against third panel",
        f"ratio {euclidean:.2f} (Euclidean) and {fisher_rao:.2f} (Fisher–Rao), random pairs",
        verdict,
        ""
        if verdict == "holds"
        else "Fisher–Rao paths keep to the margin of the codes, where noise makes distances shorter",
    )


def _row(panel: Panel, n: dict[str, Any]) -> list[str]:
    cells = [f"{n[kind][key]:.4f}" for kind in KINDS for key in ("path", "line", "ratio")]
    return [panel.title.replace("\n", " "), *cells, f"{n['converged']} of {n['pairs']}"]
