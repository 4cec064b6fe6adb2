r"""How well a divergence approximates the metric: the fourth experiment of Arvanitidis et al. 2022.

A metric promises :math:`KL(p_z, p_{z+\delta}) \approx \tfrac12 \delta^\top M(z)\, \delta`. Over a grid of the latent space of the pose autoencoder the
difference is averaged over directions :math:`\delta` of length :math:`\varepsilon = 0.1`. It is of third order in :math:`\varepsilon` for the exact metric too: what it shows is how much
the geometry changes within one step, most at the border of the data, where the uncertainty sets in.

Which route gives M is a question of its own. The paper solves for it from divergences at a few neighbouring codes, which need not give a positive
definite matrix. The routes of this library contract Jacobians with the Fisher information, which does. For the families whose metric is known, the
appendix compares the approximation with it; so does the table here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from torch import Tensor
from torch.distributions import Distribution
from tqdm import tqdm

import pullback as pb
from pullback.experiments import _appendix
from pullback.experiments._pose_measures import SampledKL
from pullback.experiments._poses import Model, Training, trained
from pullback.experiments._report import WIDTH, Finding, Report, Table, save_figure
from pullback.experiments._weights import reproducible

Decoder = Callable[[Tensor], Distribution]
OURS, EXACT, ONE_SIDED, SAMPLED = "extrapolated", "exact", "one-sided", "one-sided-sampled"
TITLES = {
    OURS: "exact,\nExtrapolated",
    EXACT: "exact,\nreweighting",
    ONE_SIDED: "one-sided KL,\nreweighting",
    SAMPLED: "one-sided sampled KL,\nreweighting (paper)",
}


@dataclass(frozen=True)
class Settings:
    """The paper's radius; the sizes it leaves open."""

    seed: int = 0
    training: Training = field(default_factory=Training)
    eps: float = 0.1  # of the steps whose error is measured, and of the paper's differences
    num_directions: int = 16
    resolution: int = 80  # of the grid, along its longer side
    num_codes: int = 500  # at which the error on the data is taken
    num_samples: int = 200  # of the Monte Carlo divergence
    num_points: int = 2000  # of the appendix's table


PAPER = Settings()
PRINTED = "one-sided (the paper's), step 0.001"


def run(out: Path, settings: Settings = PAPER) -> Report:
    """Maps the error over the latent space of the pose autoencoder, and compares routes where the metric is known."""
    with reproducible(settings.seed):
        model = trained(out, settings.training, settings.seed)
        routes = metrics(model, settings)
        grid, codes = _grid(model.codes, settings.resolution), _spread(model.codes, settings.num_codes)
        maps = {name: _measure(*route, grid, settings) for name, route in tqdm(routes.items(), desc="metric errors")}
        on_data = {name: _measure(*route, codes, settings) for name, route in routes.items()}
        table = {s.name: _appendix.errors(s, settings.num_points, settings.seed) for s in _appendix.SPACES}
    numbers = {
        "settings": asdict(settings),
        "routes": {name: _numbers(maps[name], on_data[name], settings) for name in routes},
        "appendix": table,
    }
    figure = save_figure(_draw(model, grid, maps, settings), out, "metric-error", caption=model.motion.source)
    return _report(model, numbers, figure)


def metrics(model: Model, settings: Settings = PAPER) -> dict[str, tuple[pb.Metric, Decoder]]:
    """The routes to the metric, each with the decoder whose divergences it approximates."""
    ours, paper = model.recommended(), model.reweighted()
    difference = pb.divergences.OneSidedDifference(settings.eps)
    sampled = SampledKL(settings.num_samples)
    return {
        OURS: (pb.FisherRaoMetric(ours), ours.observed),
        EXACT: (pb.FisherRaoMetric(paper), paper),
        ONE_SIDED: (pb.DivergenceMetric(paper, divergence=pb.divergences.kl, method=difference), paper),
        SAMPLED: (pb.DivergenceMetric(paper, divergence=sampled, method=difference), paper),
    }


@dataclass(frozen=True, eq=False)
class Errors:
    """At each code: the mean over the directions of the error, of the divergence itself, and the determinant of the metric."""

    error: Tensor
    divergence: Tensor
    determinant: Tensor


def _measure(metric: pb.Metric, decoder: Decoder, z: Tensor, settings: Settings) -> Errors:
    angle = 2 * torch.pi * torch.arange(settings.num_directions, dtype=z.dtype) / settings.num_directions
    steps = settings.eps * torch.stack([angle.cos(), angle.sin()], -1)
    flat, found = z.flatten(0, -2), []
    for chunk in flat.split(256):
        M = metric.tensor(chunk)
        begin = chunk[:, None].expand(-1, len(steps), -1)
        p, q = decoder(begin), decoder(begin + steps)
        divergence = pb.divergences.kl(p, q).reshape(len(chunk), len(steps), -1).sum(-1)
        quadratic = 0.5 * torch.einsum("ki,nij,kj->nk", steps, M, steps)
        found.append(((divergence - quadratic).abs().mean(-1), divergence.mean(-1), torch.linalg.det(M)))
    return Errors(*(torch.cat(parts).reshape(z.shape[:-1]) for parts in zip(*found, strict=True)))


def _numbers(everywhere: Errors, on_data: Errors, settings: Settings) -> dict[str, Any]:
    return {
        "mean_error_on_data": float(on_data.error.mean()),
        "median_error_on_data": float(on_data.error.median()),
        "relative_error_on_data": float((on_data.error / on_data.divergence).median()),
        "below_eps2_on_data": float((on_data.error < settings.eps**2).double().mean()),
        "median_error": float(everywhere.error.median()),
        "negative_on_data": float((on_data.determinant < 0).double().mean()),
        "negative": float((everywhere.determinant < 0).double().mean()),
    }


def _grid(codes: Tensor, resolution: int) -> Tensor:
    """Codes of a regular grid over the data, ``(rows, columns, 2)``."""
    low, high = codes.amin(0), codes.amax(0)
    room = 0.15 * (high - low).max()
    low, high = low - room, high + room
    cell = (high - low).max() / resolution
    x, y = (
        torch.arange(float(a + cell / 2), float(b), float(cell), dtype=codes.dtype)
        for a, b in zip(low, high, strict=True)
    )
    return torch.stack(torch.meshgrid(x, y, indexing="xy"), -1)


def _spread(codes: Tensor, count: int) -> Tensor:
    return codes[:: max(1, len(codes) // count)]


def _draw(model: Model, grid: Tensor, maps: dict[str, Errors], settings: Settings) -> Figure:
    figure, axes = plt.subplots(2, 2, figsize=(WIDTH, 5.2), sharex=True, sharey=True, layout="compressed")
    limit = settings.eps**2
    norm = LogNorm(limit / 100, limit * 1e4)
    x, y = grid[0, :, 0].numpy(), grid[:, 0, 1].numpy()
    half = (x[1] - x[0]) / 2
    corners = (x[0] - half, x[-1] + half, y[0] - half, y[-1] + half)
    for ax, (name, errors) in zip(axes.flat, maps.items(), strict=True):
        image = ax.imshow(
            errors.error.clamp_min(1e-12).numpy(), origin="lower", extent=corners, norm=norm, cmap="magma"
        )
        ax.contour(x, y, errors.error.numpy(), levels=[limit], colors="#4dd2ff", linewidths=0.5)
        ax.scatter(*_spread(model.codes, 1000).numpy().T, s=0.5, color="white", alpha=0.5, linewidths=0)
        bad = (errors.determinant < 0).nonzero()
        if len(bad):
            ax.scatter(*grid[bad[:, 0], bad[:, 1]].numpy().T, s=1.5, marker="x", color="lime", linewidths=0.4)
        ax.set_title(TITLES[name], fontsize="medium")
    bar = figure.colorbar(image, ax=axes, extend="both", location="bottom", shrink=0.9, pad=0.02)
    bar.set_label(r"mean $|KL - \frac{1}{2}\delta^\top M\delta|$, $|\delta| = $" + f"{settings.eps:g}")
    bar.ax.axvline(limit, color="#4dd2ff")
    marks = [
        Line2D([], [], color="#4dd2ff", label=r"$\varepsilon^2$"),
        Line2D([], [], linestyle="", marker="o", markersize=3, color="white", markeredgecolor="0.4", label="code"),
        Line2D([], [], linestyle="", marker="x", color="limegreen", label="negative determinant"),
    ]
    figure.legend(handles=marks, loc="outside lower center", ncols=3, frameon=False)
    return figure


def _findings(numbers: dict[str, Any]) -> list[Finding]:
    routes, exact, eps2 = numbers["routes"], numbers["appendix"], numbers["settings"]["eps"] ** 2
    ours, theirs = routes[OURS], routes[SAMPLED]
    return [
        Finding(
            "Error of the metric on the data",
            "below ε² in the darker colours",
            f"mean {ours['mean_error_on_data']:.2g}, ε² = {eps2:.2g}; below it at {ours['below_eps2_on_data']:.0%} of the codes",
            f"depends on the unit of the codes, here {numbers['settings']['training']['unit']:g} standard deviations of the prior"
            if ours["mean_error_on_data"] < eps2
            else "above ε² in the mean",
        ),
        Finding(
            "Negative determinants",
            "some, at the boundary",
            f"ours none of the grid ({ours['negative']:.1%}); the paper's route {theirs['negative']:.1%}, with exact divergences {routes[ONE_SIDED]['negative']:.1%}",
            "",
        ),
        *(
            Finding(
                f"Relative error for {space.name}, whose metric is known",
                space.paper,
                f"{_spelled(exact[space.name]['closed form'])} (ours); one-sided, step 1e-3: {_spelled(exact[space.name][PRINTED])}",
                "the paper names neither step nor parameters",
            )
            for space in _appendix.SPACES
        ),
    ]


def _report(model: Model, numbers: dict[str, Any], figure: Path) -> Report:
    return Report(
        name="metric-error",
        title="Accuracy of the approximated metric",
        source=model.motion.source,
        findings=_findings(numbers),
        figures=[figure],
        files=[model.file],
        numbers=numbers,
        text=_TEXT,
        tables=[_routes_table(numbers["routes"]), _appendix_table(numbers["appendix"])],
        deviations=_DEVIATIONS,
    )


def _spelled(n: dict[str, float]) -> str:
    return f"{n['mean']:.2e} ± {n['stddev']:.2e}"


def _routes_table(routes: dict[str, dict[str, float]]) -> Table:
    columns = [
        "route",
        "mean error on the data",
        "median",
        "relative",
        "median on the grid",
        "det < 0 on the data",
        "on the grid",
    ]
    keys = ("mean_error_on_data", "median_error_on_data", "relative_error_on_data", "median_error")
    rows = [
        [
            TITLES[name].replace("\n", " "),
            *(f"{n[key]:.2g}" for key in keys),
            f"{n['negative_on_data']:.1%}",
            f"{n['negative']:.1%}",
        ]
        for name, n in routes.items()
    ]
    return Table("The error over the latent space of poses", columns, rows)


def _appendix_table(exact: dict[str, dict[str, dict[str, float]]]) -> Table:
    names = list(exact)
    rows = [[route, *(_spelled(exact[name][route]) for name in names)] for route in exact[names[0]]]
    rows.append(["the paper", *(space.paper for space in _appendix.SPACES)])
    return Table("Relative error where the metric is known", ["route", *names], rows)


_TEXT = (
    "The difference between the Kullback–Leibler divergence to a code at distance 0.1 and what the metric says, averaged over directions. For the exact metric it is of third order in the step; "
    "it grows where the uncertainty sets in. Crosses mark matrices with a negative determinant, which the paper's system of differences yields and contracted Jacobians cannot."
)
_DEVIATIONS = [
    "Divergences of the error itself are in closed form; the paper's route is shown with sampled ones, as it was used, and with exact ones.",
    "The step of the paper's differences is not given; here it is the radius, 0.1.",
    "Parameters of the appendix's table, which are not given: μ in [-2, 2], σ in [0.5, 2]; α and β in [0.5, 10].",
]
