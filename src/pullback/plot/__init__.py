"""Pictures of latent spaces, of two dimensions or of a plane in more. Nothing else in the core imports matplotlib.

Every function takes the axes to draw on (``ax=None`` makes new ones) and returns what it drew, so that colors, labels
and limits stay the caller's to change.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from matplotlib.cbook import normalize_kwargs
from matplotlib.collections import PathCollection
from matplotlib.colorbar import Colorbar
from matplotlib.image import AxesImage
from matplotlib.lines import Line2D
from torch import Tensor

from pullback._curves.curve import Curve
from pullback._decoders.contract import as_codes, decode
from pullback._metrics.base import Metric, check_metric
from pullback._options import check_options
from pullback._typing import Codes
from pullback.plot._geometry import ClusterPlot, clusters, contributions, density, exponential_grid, fan, indicatrices
from pullback.plot._plane import SHOWN, Bounds, Directions, Plane, evaluate, extent, grid

Background = str | Callable[[Tensor], Tensor]
_LABELS = {
    "log_volume": r"$\frac{1}{2}\log\det M$",
    "entropy": "entropy of $p(x|z)$",
    "support": "squared distance to the data",
}

__all__ = [
    "ClusterPlot",
    "LatentPlot",
    "Plane",
    "clusters",
    "contributions",
    "density",
    "exponential_grid",
    "fan",
    "indicatrices",
    "latent",
    "paths",
]


class LatentPlot(NamedTuple):
    """What `latent` drew: the background, the codes (None without codes) and the color bar (None if switched off)."""

    image: AxesImage
    codes: PathCollection | None
    colorbar: Colorbar | None


def latent(
    metric: Metric,
    codes: Codes | None = None,
    *,
    background: Background = "log_volume",
    bounds: Bounds | None = None,
    resolution: int = 200,
    clip: float = 0.01,
    cmap: str = "viridis",
    colorbar: bool = True,
    axes: Directions = "used",
    ax: Axes | None = None,
) -> LatentPlot:
    r"""Draws a latent space: a background computed from the metric, and the codes on top of it.

    More than two dimensions are shown by the plane through the mean of the codes along two directions, `axes`, onto
    which codes are projected; `paths` drawn on the same matplotlib axes are projected alike.

    Args:
        metric: any `pullback.Metric`.
        codes: latent codes of shape ``(n, d)`` to scatter; needed for d > 2.
        background: ``"log_volume"`` (:math:`\\tfrac12 \\log\\det M`: bright where a small step changes the decoded
            distribution much), ``"entropy"`` of what is decoded (summed over features), ``"support"`` (the squared
            distance to the data of a `pullback.Extrapolated` decoder), or a function from codes ``(n, d)`` to ``(n,)``.
        bounds: ``(left, right, bottom, top)``; by default the codes' extent with a margin of a quarter of it.
        resolution: pixels along the longer side. Each pixel is one decoded code.
        clip: the share at each end of the color scale that saturates: of the pixels near codes, so that what lies far
            from the data does not take the whole scale, or of all without codes. Pixels that are not finite stay gray.
        cmap: colors of the background.
        colorbar: whether to draw a color bar.
        axes: for d > 2 the two directions to show: ``"used"`` (those with most information, eigenvectors of the metric
            averaged over the codes), ``"pca"`` (of the codes), dimensions such as ``(0, 3)``, or a tensor ``(2, d)``.
        ax: matplotlib axes; new ones by default.
    """
    check_metric(metric)
    check_options(resolution=resolution)
    if not 0 <= clip < 0.5:
        raise ValueError(f"clip is a share at each end, at least 0 and below ½; got {clip}.")
    codes = None if codes is None else as_codes(codes, metric, a_set=True, finite=True)
    ax = ax or plt.subplots(layout="compressed")[1]
    plane = None if codes is None or codes.shape[-1] == 2 else Plane.of(metric, codes, axes)
    flat = codes if plane is None or codes is None else plane.project(codes)
    if plane is not None:
        SHOWN[ax] = plane
    bounds = bounds or extent(flat)
    like = flat if flat is not None else as_codes(torch.zeros(1, 2, dtype=torch.float64), metric)
    f, pixels = _background(metric, background), grid(bounds, resolution, like)
    values = evaluate(f if plane is None else lambda x: f(plane.lift(x)), pixels)
    low, high, extend = _limits(values, bounds, flat, clip)
    colors = plt.get_cmap(cmap).with_extremes(bad="0.8")
    image = ax.imshow(values.numpy(), extent=bounds, origin="lower", cmap=colors, vmin=low, vmax=high, aspect="equal")
    bar = None
    if colorbar:
        bar = ax.figure.colorbar(image, ax=ax, extend=extend, pad=0.02)
        bar.set_label("" if callable(background) else _LABELS[background])
    if flat is None:
        return LatentPlot(image, None, bar)
    x, y = flat.detach().cpu().T.numpy()
    dots = ax.scatter(x, y, s=6, color="white", edgecolors="black", linewidths=0.3, zorder=2)
    return LatentPlot(image, dots, bar)


def paths(curves: Any, *, num_points: int = 200, ax: Axes | None = None, **style: Any) -> list[Line2D]:
    """Draws curves in a latent space, one line each. Geodesics that leave the support of the data are dashed.

    In more than two dimensions curves are projected onto the plane that `latent` has drawn on the same axes.

    Args:
        curves: points of shape ``(*batch, n, d)``; or a `pullback.results.Geodesic` or a `pullback.Curve`, which is
            drawn through `num_points` of its points.
        num_points: of each line.
        ax: matplotlib axes; new ones by default.
        **style: passed to `matplotlib.axes.Axes.plot`.
    """
    ax = ax or plt.subplots(layout="compressed")[1]
    check_options(least=2, num_points=num_points)
    points = curves.resample(num_points) if isinstance(curves, Curve) else as_codes(curves)
    points, plane = points.detach().cpu(), SHOWN.get(ax)
    points = points if plane is None or points.shape[-1] == 2 else plane.project(points)
    if points.ndim < 2 or points.shape[-1] != 2 or not points.numel():
        raise ValueError(
            f"paths draws curves of shape (*batch, n, 2), not {tuple(points.shape)}; in more dimensions draw "
            "pullback.plot.latent(metric, codes, ax=ax) first."
        )
    drawn = points.reshape(-1, *points.shape[-2:]).numpy()
    leaves = getattr(curves, "leaves_support", None)
    dashes = ["-"] * len(drawn) if leaves is None else ["--" if away else "-" for away in leaves.flatten()]
    style = normalize_kwargs(style, Line2D)  # full names: a short one must replace the default, not join it
    looks = ({"color": "white", "linewidth": 1.5, "linestyle": dash, **style} for dash in dashes)
    return [line for xy, look in zip(drawn, looks, strict=True) for line in ax.plot(xy[:, 0], xy[:, 1], **look)]


def _background(metric: Metric, background: Background) -> Callable[[Tensor], Tensor]:
    if callable(background):
        return background
    if background not in _LABELS:
        raise ValueError(f"background must be a function or one of {sorted(_LABELS)}, not {background!r}.")
    if background == "log_volume":
        return metric.log_volume
    decoder, support = metric.source, metric.support
    if decoder is None:
        raise ValueError(
            f'background="{background}" needs a metric with a decoder; pass a function of the codes instead.'
        )
    if background == "entropy":
        return lambda z: decode(decoder, z).entropy().reshape(len(z), -1).sum(-1)
    if support is None:
        raise ValueError(
            'background="support" needs a decoder that knows its data: wrap it, '
            "pullback.Extrapolated(decoder, pullback.Support.fit(codes))."
        )
    return support.distance2


def _limits(
    values: Tensor, bounds: Bounds, codes: Tensor | None, clip: float
) -> tuple[float | None, float | None, str]:
    """The ends of the color bar, from the pixels in which codes lie or all, and at which of them values lie beyond."""
    shown = values
    if codes is not None:
        left, right, bottom, top = bounds
        rows, columns = values.shape
        x, y = codes.detach().cpu().double().T
        column, row = ((x - left) / (right - left) * columns).long(), ((y - bottom) / (top - bottom) * rows).long()
        inside = (column >= 0) & (column < columns) & (row >= 0) & (row < rows)
        found = values[row[inside], column[inside]]
        shown = found if found.isfinite().any() and found.max() > found.min() else values
    shown, values = shown[shown.isfinite()], values[values.isfinite()]
    if not len(shown):
        return None, None, "neither"
    low, high = shown.quantile(torch.tensor([clip, 1 - clip], dtype=shown.dtype)).tolist()
    below, above = bool((values < low).any()), bool((values > high).any())
    return low, high, {(True, True): "both", (True, False): "min", (False, True): "max"}.get((below, above), "neither")
