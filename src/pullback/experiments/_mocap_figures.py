"""The figures of the motion capture experiment: latent spaces, strips of poses, and what was measured along the paths."""

from __future__ import annotations

from collections.abc import Mapping

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import ListedColormap, Normalize
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.patheffects import Normal as Unchanged
from matplotlib.patheffects import Stroke
from torch import Tensor

import pullback as pb
from pullback import plot
from pullback.data import Skeleton
from pullback.experiments._report import WIDTH
from pullback.experiments._skeleton import strip

PATH, LINE, PATHS = "#1a9850", "#d73027", "#ff6a3d"
OUTLINE = [Stroke(linewidth=3.2, foreground="black", alpha=0.9), Unchanged()]
SPAN = 12.0  # nats of log-volume that the colours cover, at most


def draw_latent(
    panels: Mapping[str, tuple[pb.Metric, Tensor]],
    codes: Tensor,
    example: tuple[Tensor, Tensor],
    resolution: int,
) -> Figure:
    """Latent spaces with their shortest paths ``(n, frames, 2)``, and one pair joined by the path and by the line."""
    layout = ConstrainedLayoutEngine(compress=True, hspace=0.06)
    figure, axes = plt.subplots(2, 2, figsize=(WIDTH, 6.2), sharex=True, sharey=True, layout=layout)
    metric, last = next(iter(panels.values()))[0], axes[-1, -1]
    for ax, (title, (own, paths)) in zip(axes.flat, panels.items(), strict=False):
        _background(ax, figure, own, codes, resolution)
        for curve in paths.numpy():
            ax.plot(*curve.T, color=PATHS, linewidth=0.9)
        ax.set_title(title, fontsize="medium")
    _background(last, figure, metric, codes, resolution)
    for curve, color in zip(example, (PATH, LINE), strict=True):
        last.plot(*curve.numpy().T, color=color, linewidth=1.8, path_effects=OUTLINE, zorder=3)
        last.scatter(*curve[[0, -1]].numpy().T, s=12, color="black", zorder=4)
    last.set_title("one pair, Extrapolated", fontsize="medium")
    handles = [
        Line2D([], [], linestyle="", marker="o", markersize=3, color="white", markeredgecolor="0.4", label="code"),
        Line2D([], [], color=PATHS, linewidth=0.9, label="shortest paths"),
        Line2D([], [], color=PATH, linewidth=1.6, label="that of one pair"),
        Line2D([], [], color=LINE, linewidth=1.6, label="its straight line"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=2, frameon=False)
    return figure


def _background(ax: Axes, figure: Figure, metric: pb.Metric, codes: Tensor, resolution: int) -> None:
    drawn = plot.latent(metric, codes, resolution=resolution, colorbar=False, ax=ax)
    low, high = drawn.image.get_clim()
    drawn.image.set_clim(max(low, high - SPAN), high)
    if drawn.codes is not None:
        drawn.codes.set(sizes=[0.6], color="white", alpha=0.5, linewidths=0)
    bar = figure.colorbar(drawn.image, ax=ax, location="bottom", pad=0.02, shrink=0.9, extend="both")
    bar.set_label(r"$\frac{1}{2}\log\det M$")


def draw_strips(skeleton: Skeleton, motions: Mapping[str, tuple[Tensor, Tensor]]) -> Figure:
    """Motions as rows of stick figures ``(n, bones, 3)``, coloured by their distance ``(n,)`` to the nearest recorded pose."""
    figure, axes = plt.subplots(len(motions), 1, figsize=(WIDTH, 1.5 * len(motions)), layout="compressed")
    scale = Normalize(0, max(float(distance.max()) for _, distance in motions.values()))
    cmap = plt.get_cmap("plasma_r")
    for ax, (name, (poses, distance)) in zip(axes, motions.items(), strict=True):
        # the palest colours would not show on white
        strip(ax, skeleton, poses, cmap(0.15 + 0.85 * scale(distance.numpy())))
        ax.set_xticks(range(len(poses)), [f"{x:.2f}" for x in distance.tolist()], fontsize="small")
        ax.tick_params(length=0)
        ax.set_title(name, fontsize="medium", loc="left")
    shown = cmap(np.linspace(0.15, 1, 256))
    bar = figure.colorbar(
        ScalarMappable(scale, ListedColormap(shown)), ax=axes, location="bottom", shrink=0.7, pad=0.03
    )
    bar.set_label("distance to the nearest recorded pose (rad)")
    return figure


def draw_measures(distances: Mapping[str, Tensor], steps: Mapping[str, Tensor], floor: float) -> Figure:
    """Means and quartiles over the pairs of the distance ``(pairs, frames)`` and the angular step ``(pairs, frames - 1)``."""
    figure, axes = plt.subplots(2, 1, figsize=(WIDTH, 4.4), sharex=True, layout="constrained")
    for ax, curves in zip(axes, (distances, steps), strict=True):
        for (name, values), color in zip(curves.items(), (PATH, LINE), strict=True):
            t = torch.linspace(0, 1, values.shape[1])
            low, high = values.quantile(torch.tensor([0.25, 0.75]).to(values), dim=0)
            ax.plot(t, values.mean(0), color=color, label=name)
            ax.fill_between(t, low, high, color=color, alpha=0.2, linewidth=0)
        ax.set(xlim=(0, 1), ylim=(0, None))
    axes[0].axhline(floor, color="0.4", linestyle=":", label="decoded codes, mean")
    axes[0].set_ylabel("distance to the nearest\nrecorded pose (rad)")
    axes[1].set_ylabel("mean angle of a bone\nto the next frame (rad)")
    axes[1].set_xlabel("place on the path")
    axes[0].legend(frameon=False, fontsize="small", loc="upper left")
    return figure
