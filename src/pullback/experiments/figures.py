"""One look for all figures: readable at the width of a column, codes as faint dots, numbers at every color bar."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.lines import Line2D
from matplotlib.patheffects import Normal as Unchanged
from matplotlib.patheffects import Stroke
from torch import Tensor

import pullback as pb
from pullback import plot

# Inches. A page shows a figure 460 pixels wide: a point is 1.4 pixels, and the smallest letters are 10 pixels high.
WIDTH = 4.6
# Inches between a figure and its caption.
CAPTION_GAP = 0.1
# Characters per inch of figure.
CAPTION_WIDTH = 15.0
LOOK = {
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.labelsize": 8.5,
    "xtick.labelsize": 7.5,
    "ytick.labelsize": 7.5,
    "legend.fontsize": 8,
    "axes.linewidth": 0.6,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "lines.linewidth": 1.3,
}
PATH, LINE, THEIRS = "#1b9e77", "#d7301f", "#e6ab02"
"""Colors of shortest paths, of straight lines, and of the paper's recipe."""
POINTS = 1025  # through which a path is drawn
CODES_SHOWN = 1500


def look() -> AbstractContextManager[None]:
    """Inside, matplotlib draws as all figures of the report are drawn."""
    return rc_context(LOOK)  # pyright: ignore[reportArgumentType]


def latent(
    ax: Axes,
    metric: pb.Metric,
    codes: Tensor,
    *,
    resolution: int,
    span: float | None = None,
    colorbar: bool = True,
    **options: Any,
) -> AxesImage:
    """A latent space: background, codes as faint dots, and a color bar with numbers.

    Args:
        ax: where to draw.
        metric: what lights the background.
        codes: to scatter, ``(n, 2)``.
        resolution: pixels along the longer side.
        span: how far the colors reach below their upper end, at most.
        colorbar: whether to draw one.
        options: passed to `pullback.plot.latent`.
    """
    drawn = plot.latent(metric, codes, resolution=resolution, colorbar=False, ax=ax, **options)
    low, high = drawn.image.get_clim()
    if span is not None:
        drawn.image.set_clim(max(low, high - span), high)
    drawn.image.set_interpolation("nearest")
    if drawn.codes is not None:
        drawn.codes.remove()
    dots(ax, codes)
    if colorbar:
        bar(ax, drawn.image, r"$\frac{1}{2}\log\det M$")
    return drawn.image


def bar(ax: Any, image: Any, label: str, **options: Any) -> Any:
    """A horizontal color bar below the axes."""
    place = {"location": "bottom", "pad": 0.02, "shrink": 0.9, "aspect": 30, "extend": "both"} | options
    figure = ax.figure if isinstance(ax, Axes) else ax.flat[0].figure
    found = figure.colorbar(image, ax=ax, **place)
    found.set_label(label)
    found.outline.set_linewidth(0.5)
    return found


def dots(ax: Axes, codes: Tensor, color: str = "white", alpha: float = 0.4) -> None:
    """Codes ``(n, 2)`` as faint dots, some of them if there are many."""
    some = codes[:: max(1, len(codes) // CODES_SHOWN)].detach().numpy()
    ax.scatter(*some.T, s=1.2, color=color, alpha=alpha, linewidths=0, zorder=2)


def curves(ax: Axes, curve: pb.Curve, color: str, linewidth: float = 1.0, **style: Any) -> None:
    """Curves as they are, with a dark outline that lets them stand out on any background."""
    outline = [Stroke(linewidth=linewidth + 1.2, foreground="black", alpha=0.75), Unchanged()]
    points = curve.resample(POINTS).detach().reshape(-1, POINTS, 2)
    for line in points.numpy():
        ax.plot(*line.T, color=color, linewidth=linewidth, path_effects=outline, zorder=3, **style)


def legend(figure: Figure, entries: Sequence[tuple[str, str, str]], ncols: int = 2) -> None:
    """A legend below the figure; each entry has a name, a color, and "line", "dashed" or "dot"."""
    looks = {
        "line": {"linewidth": 1.6},
        "dashed": {"linewidth": 1.6, "linestyle": "--"},
        "dot": {"linestyle": "", "marker": "o", "markersize": 3.5, "markeredgecolor": "0.4"},
    }
    handles = [Line2D([], [], color=color, label=name, **looks[kind]) for name, color, kind in entries]
    figure.legend(handles=handles, loc="outside lower center", ncols=ncols, frameon=False)


def save_figure(figure: Figure, out: Path, name: str, *, caption: str = "", dpi: int = 220) -> Path:
    """Writes ``out/name.png`` and ``out/name.pdf``, closes the figure, and returns the path of the PNG.

    Args:
        figure: what to save.
        out: the folder; made if missing.
        name: of both files, without suffix.
        caption: printed below the figure: where the data come from, and what else a reader of the picture alone should
            know.
        dpi: pixels per inch.
    """
    out.mkdir(parents=True, exist_ok=True)
    png, pdf = out / f"{name}.png", out / f"{name}.pdf"
    figure.draw_without_rendering()
    # What follows must not move anything.
    figure.set_layout_engine("none")
    for found in figure.legends:
        # Else it would follow the lower border down, onto the caption.
        found.set_bbox_to_anchor((0, 0, 1, 1), transform=figure.transFigure)
    if caption:
        lines = textwrap.fill(caption, int(CAPTION_WIDTH * figure.get_figwidth()))
        bottom = (figure.get_tightbbox().y0 - CAPTION_GAP) / figure.get_figheight()
        figure.text(0.5, bottom, lines, ha="center", va="top", fontsize=7.5, color="0.3")
    figure.savefig(png, dpi=dpi, bbox_inches="tight")
    figure.savefig(pdf, dpi=dpi, bbox_inches="tight", metadata={"CreationDate": None})
    plt.close(figure)
    return png
