"""The figure of the toy experiment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.patheffects import Normal as Unchanged
from matplotlib.patheffects import Stroke
from torch import Tensor

import pullback as pb
from pullback import plot
from pullback.experiments._report import WIDTH

KINDS = {
    "recipe": "paper's recipe,\nentropy",
    "reweight": "true geodesics,\nlog-volume",
    "recommended": "Extrapolated,\nlog-volume",
}
INSIDE, OUTSIDE = "white", "#ff6a3d"
LABEL = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1}
OUTLINE = [Stroke(linewidth=2, foreground="black", alpha=0.8), Unchanged()]


@dataclass(frozen=True)
class Panel:
    """One family and one of the three kinds of paths, solved."""

    family: str
    kind: str
    metric: pb.FisherRaoMetric
    codes: Tensor
    path: pb.Geodesic
    numbers: dict[str, Any]


def draw(panels: Sequence[Panel], titles: dict[str, str], *, side: float, resolution: int, span: float) -> Figure:
    """The latent spaces of the families with those titles, a row each, in three columns, with their backgrounds, the codes, and paths.

    Args:
        panels: one for each family and kind.
        titles: of the families, in order.
        side: half the side of the square that is drawn.
        resolution: pixels of a side.
        span: nats of log-volume that the colours cover, at most.
    """
    size = (len(titles), len(KINDS))
    figure, axes = plt.subplots(*size, figsize=(WIDTH, 8.2), sharex=True, sharey=True, layout="compressed")
    for panel in panels:
        ax = axes[list(titles).index(panel.family), list(KINDS).index(panel.kind)]
        _draw_panel(ax, panel, side, resolution, span)
    for ax, label in zip(axes[0], KINDS.values(), strict=True):
        ax.set_title(label, fontsize="medium")
    for ax, family in zip(axes[:, 0], titles.values(), strict=True):
        ax.set_ylabel(family)
    _explain(figure, axes)
    return figure


def _draw_panel(ax: Axes, panel: Panel, side: float, resolution: int, span: float) -> None:
    entropy = panel.kind == "recipe"
    drawn = plot.latent(
        panel.metric,
        panel.codes,
        background="entropy" if entropy else "log_volume",
        cmap="Blues" if entropy else "viridis",
        bounds=(-side, side, -side, side),
        resolution=resolution,
        colorbar=False,
        ax=ax,
    )
    low, high = drawn.image.get_clim()
    drawn.image.set_clim(low if entropy else max(low, high - span), high)
    if drawn.codes is not None:
        drawn.codes.set(sizes=[1.5], color="0.5" if entropy else "white", alpha=0.6, linewidths=0)
    _draw_paths(ax, panel.path)
    ax.set(xticks=[-3, 0, 3], yticks=[-3, 0, 3])


def _draw_paths(ax: Axes, path: pb.Geodesic) -> None:
    for line in plot.paths(path, ax=ax, linewidth=1, path_effects=OUTLINE, zorder=3):
        line.set_color(OUTSIDE if line.get_linestyle() == "--" else INSIDE)
    if not path.converged.all():
        count = f"{int(path.converged.sum())} of {path.converged.numel()} converged"
        ax.text(0.98, 0.02, count, transform=ax.transAxes, ha="right", va="bottom", fontsize="small", bbox=LABEL)


def _explain(figure: Figure, axes: np.ndarray) -> None:
    """Scales of the colours, which each panel stretches to its own range, and a legend of what is drawn on them."""
    scales = ((axes[:, :1], "Blues", "entropy"), (axes[:, 1:], "viridis", "log-volume, each panel to its own scale"))
    for part, cmap, name in scales:
        bar = figure.colorbar(
            ScalarMappable(cmap=cmap), ax=part, location="bottom", aspect=10 * part.shape[1], pad=0.02
        )
        bar.set_ticks([0.1, 0.9], labels=["small", "large"])
        bar.ax.tick_params(length=0)
        bar.set_label(name, fontsize="small")
    line = partial(Line2D, [], [], linewidth=1, path_effects=OUTLINE)
    handles = [
        Line2D([], [], linestyle="", marker="o", markersize=4, color="white", markeredgecolor="0.4", label="code"),
        line(color=INSIDE, label="shortest path"),
        line(color=OUTSIDE, linestyle="--", label="one that leaves the data"),
        Patch(color="0.8", label="singular metric"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=2, frameon=False)
