"""The figure of the LAND experiment, and what it found next to what the paper says."""

from __future__ import annotations

from typing import Any

import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from torch import Tensor

import pullback as pb
from pullback import plot
from pullback.experiments._report import WIDTH, Finding, Table

COLOR = "#ff6a3d"
WORDS = {1: "one", 2: "two", 3: "three"}


def draw(metric: pb.Metric, codes: Tensor, pairs: list[tuple[Any, Any]], resolution: int) -> Figure:
    """Contours of LANDs, on the left, and of their rivals: over the volume, over dz, and mixtures over dz."""
    num = pairs[-1][0].n_components
    titles = [
        ("LAND over the volume", "Gaussian over the volume"),
        ("LAND over $dz$", "Gaussian"),
        (f"{num} LANDs over $dz$", f"{num} Gaussians"),
    ]
    figure, axes = plt.subplots(3, 2, figsize=(WIDTH, 7.4), sharex=True, sharey=True, layout="compressed")
    for row, models, names in zip(axes, pairs, titles, strict=True):
        for ax, model, name in zip(row, models, names, strict=True):
            image = _panel(ax, metric, codes, model, resolution)
            ax.set_title(name, fontsize="medium")
    bar = figure.colorbar(image, ax=axes, location="bottom", pad=0.02, shrink=0.6, aspect=40, extend="both")
    bar.set_label(r"$\frac{1}{2}\log\det M$")
    handles = [
        Line2D([], [], linestyle="", marker="o", markersize=3, color="white", markeredgecolor="0.4", label="code"),
        Line2D([], [], color=COLOR, label="contours of the density"),
        Line2D([], [], linestyle="", marker="*", markersize=10, color=COLOR, markeredgecolor="black", label="mean"),
    ]
    figure.legend(handles=handles, loc="outside upper center", ncols=3, frameon=False, fontsize="small")
    return figure


def _panel(ax: Axes, metric: pb.Metric, codes: Tensor, model: Any, resolution: int) -> Any:
    drawn = plot.latent(metric, codes, resolution=100, colorbar=False, ax=ax)
    if drawn.codes is not None:
        drawn.codes.set(sizes=[1.5], color="white", alpha=0.5, linewidths=0)
    plot.density(model, codes, resolution=resolution, colors=COLOR, ax=ax)
    means = torch.as_tensor(model.means_).numpy()
    ax.scatter(*means.T, s=80, marker="*", color=COLOR, edgecolors="black", zorder=4)
    return drawn.image


def findings(numbers: dict[str, Any]) -> list[Finding]:
    """The statements of the report."""
    scores = numbers["held_out"]
    one, exact = scores["dz 1"], scores["dz 1 exact"]
    mixtures = [row for name, row in scores.items() if name.startswith("dz") and row["components"] > 1]
    masses = [fit["mass"] for fit in numbers["fits"].values() if fit["mass"] is not None]
    return [
        Finding(
            "The density follows the codes",
            "adapts to the structure of the codes (a figure)",
            f"held-out log-likelihood of a LAND over dz {_gain(one)} nats a code against the Gaussian's",
            _unless(one["gain"] > 0, "the Gaussian is better"),
        ),
        Finding(
            "Mixtures, against as many Gaussians",
            "",
            "; ".join(f"{WORDS.get(row['components'], row['components'])} {_gain(row)}" for row in mixtures) + " nats",
            _unless(all(row["gain"] > 0 for row in mixtures), "not all are better"),
        ),
        _over_the_volume(scores["volume"], numbers["same_base"]),
        Finding(
            "Interpolated against exact metric",
            "interpolated only; the exact one was too costly",
            f"{one['dz']:.2f} and {exact['dz']:.2f} nats for one LAND over dz; tensors differ by "
            f"{numbers['interpolation_error']:.1%} (median)",
        ),
        Finding(
            "Densities integrate to 1",
            "",
            f"{min(masses):.3f} to {max(masses):.3f}, by quadrature (interpolated metric)",
        ),
    ]


def _over_the_volume(ordinary: dict[str, float], same_base: dict[str, float]) -> Finding:
    return Finding(
        "A LAND over the Riemannian volume",
        "this one is shown",
        f"{_gain(same_base)} nats against the Gaussian over the volume, {_gain(ordinary)} against the ordinary one",
        _unless(
            ordinary["gain"] > 0,
            "the volume grows where there are no codes, and a density over it has much of its mass there",
        ),
    )


def table(numbers: dict[str, Any]) -> Table:
    """One row for each density."""
    names = {
        "volume": "LAND over the volume",
        "same base": "Gaussian over the volume",
        "dz 1 exact": "LAND over dz, exact metric",
    }
    rows = [
        [
            names.get(name) or ("Gaussian" if name.startswith("gaussian") else "LAND over dz"),
            str(s["components"]),
            f"{s['dz']:.3f}",
            f"{s['dz'] - numbers['volume']:.3f}",
            "" if name.startswith("gaussian") else _gain(s),
        ]
        for name, s in numbers["held_out"].items()
    ]
    columns = [
        "density",
        "components",
        "with respect to dz",
        "with respect to the volume",
        "gain on as many Gaussians",
    ]
    return Table("Mean log-likelihood of held-out codes", columns, rows)


def _gain(row: dict[str, float]) -> str:
    return f"{row['gain']:+.2f} ± {row['standard_error']:.2f}"


def _unless(holds: bool, words: str) -> str:
    return "" if holds else words


TEXT = (
    "Locally adaptive normal distributions on the latent space of poses, and Gaussians, judged by the mean log-likelihood of codes that none has seen; ± is the standard error of the mean "
    "difference. A density over the volume has much of its mass in the walls around the codes, where the volume is large; one over dz has not. Contours are those of the density with respect "
    "to dz: the smallest regions that hold given shares of the mass."
)
DEVIATIONS = [
    "The metric is that of pullback.Extrapolated with its default support, in closed form, and interpolated but where it says exact. Fitted to a sample of the codes; the paper gives neither "
    "their number nor the grid. The held-out codes are unknown to the support too; the autoencoder was trained with all poses.",
    "The paper shows the density over the volume, and no likelihood.",
]
