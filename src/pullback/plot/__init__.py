"""Pictures of latent spaces, of two dimensions or of a plane in more, and of what a metric does there. Nothing else in
the core imports matplotlib.

Every function takes the axes to draw on (``ax=None`` makes new ones) and returns what it drew, so that colors, labels
and limits stay the caller's to change.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.cbook import normalize_kwargs
from matplotlib.collections import PathCollection, PolyCollection
from matplotlib.colorbar import Colorbar
from matplotlib.container import BarContainer
from matplotlib.contour import QuadContourSet
from matplotlib.image import AxesImage
from matplotlib.lines import Line2D
from torch import Tensor

from pullback._curves.curve import Curve
from pullback._decoders.contract import as_codes, decode, real_numbers
from pullback._geometry.exponential import Trajectory, exponential
from pullback._geometry.path_questions import Contributions
from pullback._metrics.base import Metric, check_metric, codes_for
from pullback._metrics.interpolated import Grid
from pullback._options import check_options
from pullback._progress import progress
from pullback._typing import Codes, CodeSet

__all__ = ["ClusterPlot", "LatentPlot", "Plane"]
__all__ += ["clusters", "contributions", "density", "exponential_grid", "fan", "indicatrices", "latent", "paths"]

Background = str | Callable[[Tensor], Tensor]
Bounds = tuple[float, float, float, float]
Directions = str | Sequence[int] | Tensor | np.ndarray

_LABELS = {
    "log_volume": r"$\frac{1}{2}\log\det M$",
    "entropy": "entropy of $p(x|z)$",
    "support": "squared distance to the data",
}
_TOLERANCE = 1e-6  # of the geodesics that are drawn
_MASSES = (0.9, 0.7, 0.5, 0.3, 0.1)
_NUM_CODES = 500  # over which the metric is averaged to find the directions that are used most
# The planes that axes show, for what is drawn on the same axes later.
_SHOWN: weakref.WeakKeyDictionary[Axes, Plane] = weakref.WeakKeyDictionary()


class LatentPlot(NamedTuple):
    """What `latent` drew: the background, the codes (None without codes) and the color bar (None if switched off)."""

    image: AxesImage
    codes: PathCollection | None
    colorbar: Colorbar | None


class ClusterPlot(NamedTuple):
    """What `clusters` drew: the codes, and the centers (None without)."""

    codes: PathCollection
    centers: PathCollection | None


@dataclass(frozen=True, eq=False)
class Plane:
    """A plane in the latent space: codes ``center + x @ directions`` with orthonormal ``directions (2, d)``."""

    center: Tensor
    directions: Tensor

    @classmethod
    def of(cls, metric: Metric, codes: Codes, directions: Directions = "used") -> Plane:
        """The plane through the mean of the codes along two directions; see `pullback.plot.latent`."""
        (codes,) = codes_for(metric, codes, a_set=True, finite=True)
        center, d = codes.mean(0), codes.shape[-1]
        if d < 2:
            raise ValueError(f"A plane needs codes of at least two dimensions; got shape {tuple(codes.shape)}.")
        if isinstance(directions, (Tensor, np.ndarray)) and directions.ndim == 2:
            return cls(center, torch.linalg.qr(as_codes(directions, codes).mT)[0].mT)
        if not isinstance(directions, str):
            return cls(center, torch.eye(d).to(codes)[list(directions)])
        if directions not in ("used", "pca"):
            raise ValueError(f'axes must be "used", "pca", two dimensions, or two directions; not {directions!r}.')
        with torch.no_grad():
            some = codes[:: -(-len(codes) // _NUM_CODES)]
            spread = torch.cov(codes.mT) if directions == "pca" else metric.tensor(some).mean(0)
        return cls(center, torch.linalg.eigh(spread)[1].mT.flip(0)[:2])

    def project(self, z: Tensor) -> Tensor:
        """Coordinates ``(*batch, 2)`` of codes ``(*batch, d)`` in the plane."""
        return (z - self.center.to(z)) @ self.directions.to(z).mT

    def lift(self, x: Tensor) -> Tensor:
        """The codes ``(*batch, d)`` of points ``(*batch, 2)`` of the plane."""
        return self.center + x.to(self.center) @ self.directions


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
        _SHOWN[ax] = plane
    bounds = bounds or _extent(flat)
    like = flat if flat is not None else as_codes(torch.zeros(1, 2, dtype=torch.float64), metric)
    f, pixels = _background(metric, background), _grid(bounds, resolution, like)
    values = _evaluate(f if plane is None else lambda x: f(plane.lift(x)), pixels)
    low, high, extend = _limits(values, bounds, flat, clip)
    colors = plt.get_cmap(cmap).with_extremes(bad="0.8")
    image = ax.imshow(values.numpy(), extent=bounds, origin="lower", cmap=colors, vmin=low, vmax=high, aspect="equal")
    label = "" if callable(background) else _LABELS[background]
    bar = ax.figure.colorbar(image, ax=ax, extend=extend, pad=0.02, label=label) if colorbar else None
    look = {"s": 6, "color": "white", "edgecolors": "black", "linewidths": 0.3, "zorder": 2}
    return LatentPlot(image, None if flat is None else ax.scatter(*flat.detach().cpu().T.numpy(), **look), bar)


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
    points, plane = points.detach().cpu(), _SHOWN.get(ax)
    points = points if plane is None or points.shape[-1] == 2 else plane.project(points)
    if points.ndim < 2 or points.shape[-1] != 2 or not points.numel():
        raise ValueError(
            f"paths draws curves of shape (*batch, n, 2), not {tuple(points.shape)}; in more dimensions draw "
            "pullback.plot.latent(metric, codes, ax=ax) first."
        )
    drawn, leaves = points.reshape(-1, *points.shape[-2:]).numpy(), getattr(curves, "leaves_support", None)
    dashes = ["-"] * len(drawn) if leaves is None else ["--" if away else "-" for away in leaves.flatten()]
    style = normalize_kwargs(style, Line2D)  # full names: a short one must replace the default, not join it
    looks = ({"color": "white", "linewidth": 1.5, "linestyle": dash, **style} for dash in dashes)
    return [line for xy, look in zip(drawn, looks, strict=True) for line in ax.plot(*xy.T, **look)]


def fan(
    metric: Metric,
    z: Codes,
    *,
    length: float,
    num_directions: int = 32,
    num_points: int = 100,
    ax: Axes | None = None,
    **style: Any,
) -> list[Line2D]:
    r"""Draws the geodesics of a given length that leave a point in all directions, a line each.

    Directions are evenly spread in the angles of the metric at that point. Geodesics end where they cannot go on.

    Args:
        metric: any `pullback.Metric` on a two-dimensional latent space.
        z: the point, of shape ``(2,)``.
        length: of the geodesics, in the units of the metric.
        num_directions: how many geodesics.
        num_points: of each line.
        ax: matplotlib axes; new ones by default.
        **style: passed to `matplotlib.axes.Axes.plot`.
    """
    check_options(length=length, num_directions=num_directions, num_points=num_points)
    angle = 2 * torch.pi * torch.arange(num_directions, dtype=torch.float64) / num_directions
    flow = _flow(metric, z, length * torch.stack([angle.cos(), angle.sin()], -1))
    return _lines(flow(torch.linspace(0, 1, num_points)), ax, 1.0, style)


def exponential_grid(
    metric: Metric,
    z: Codes,
    *,
    length: float,
    num_lines: int = 11,
    num_points: int = 61,
    ax: Axes | None = None,
    **style: Any,
) -> list[Line2D]:
    r"""Draws the image of a square grid of tangents under :math:`\mathrm{Exp}_z`: normal coordinates around a point.

    Where lines cross that do not in the grid, the exponential map folds: beyond its cut locus. Arguments as for `fan`;
    `length` is half the side of the square, with `num_lines` grid lines each way of `num_points` points, one geodesic
    each.
    """
    check_options(length=length, num_lines=num_lines, num_points=num_points)
    across, along = (torch.linspace(-length, length, n, dtype=torch.float64) for n in (num_lines, num_points))
    square = torch.stack(torch.meshgrid(across, along, indexing="ij"), -1)
    flow = _flow(metric, z, torch.cat([square, square.flip(-1)]))
    return _lines(torch.where(flow.converged[..., None], flow.end, torch.nan), ax, 0.8, style)


def indicatrices(
    metric: Metric,
    points: Codes | None = None,
    *,
    bounds: Bounds | None = None,
    resolution: int = 12,
    radius: float | None = None,
    ax: Axes | None = None,
    **style: Any,
) -> PolyCollection:
    r"""Draws the circles :math:`\{z + v : v^\top M(z)\, v = r^2\}` of the metric: short where a step changes much.

    Args:
        metric: any `pullback.Metric` on a two-dimensional latent space.
        points: where, ``(n, 2)``; by default on a regular grid.
        bounds: of the grid, ``(left, right, bottom, top)``.
        resolution: points of the grid along its longer side.
        radius: r; by default so that half of the ellipses would fit into their cells of the grid.
        ax: matplotlib axes; new ones by default.
        **style: passed to `matplotlib.collections.PolyCollection`.
    """
    check_options(resolution=resolution, radius=radius)
    (like,) = codes_for(metric, torch.zeros(1, 2, dtype=torch.float64))
    points = None if points is None else as_codes(points, like)
    left, right, bottom, top = bounds or _extent(points)
    at: Tensor = _grid((left, right, bottom, top), resolution, like).reshape(-1, 2) if points is None else points
    ax = ax or plt.subplots(layout="compressed")[1]
    with torch.no_grad():
        values, vectors = torch.linalg.eigh(metric.tensor(at))
    axes = vectors / values.clamp_min(0).sqrt()[:, None]
    if radius is None:
        cell = max(right - left, top - bottom) / resolution
        radius = 0.5 * cell / float(axes.norm(dim=1).amax(-1).median())
    angle = torch.linspace(0, 2 * torch.pi, 49, dtype=torch.float64)
    circle = torch.stack([angle.cos(), angle.sin()]).to(axes)
    outlines = (at[..., None] + radius * axes @ circle).mT.cpu().numpy()
    look = {"facecolors": "none", "edgecolors": "black", "linewidths": 0.8, **normalize_kwargs(style, PolyCollection)}
    drawn = PolyCollection(list(outlines[np.isfinite(outlines).all((1, 2))]), **look)
    ax.add_collection(drawn)
    ax.set_aspect("equal")
    ax.autoscale_view()
    return drawn


def density(
    model: Any,
    codes: Codes | None = None,
    *,
    bounds: Bounds | None = None,
    resolution: int = 60,
    masses: tuple[float, ...] = _MASSES,
    lebesgue: bool = True,
    ax: Axes | None = None,
    **style: Any,
) -> QuadContourSet:
    r"""Draws contours of a density: the smallest regions that hold given shares of its mass.

    Args:
        model: a fitted estimator with `score_samples` on two-dimensional codes, such as `pullback.statistics.LAND`. If
            it has a `metric`, its density is with respect to the Riemannian volume, unless its `base_measure` says dz.
        codes: whose extent to draw; by default the codes that the model was fitted to. They are not drawn.
        bounds: what to draw, as in `latent`.
        resolution: evaluations along the longer side; at each a `LAND` solves for a path from each of its means.
        masses: shares of the mass within the picture, one contour each.
        lebesgue: whether to draw the density with respect to dz, which is what a cloud of samples looks like, rather
            than that with respect to the volume. Where there is no metric they are the same.
        ax: matplotlib axes; new ones by default.
        **style: passed to `matplotlib.axes.Axes.contour`.
    """
    if not hasattr(model, "score_samples"):
        raise TypeError(
            f"A density has score_samples, like a fitted pullback.statistics.LAND; {type(model).__name__} has not."
        )
    # An estimator may keep the codes that it was fitted to.
    codes = getattr(model, "codes_", None) if codes is None and bounds is None else codes
    codes = None if codes is None else as_codes(codes)
    bounds = bounds or _extent(codes)
    ax = ax or plt.subplots(layout="compressed")[1]
    z = _grid(bounds, resolution, torch.zeros(0, dtype=torch.float64) if codes is None else codes)
    logp = _evaluate(lambda z: torch.as_tensor(model.score_samples(z)), z).clamp_min(-700)
    metric = getattr(model, "metric", None)
    volume = torch.zeros_like(logp) if metric is None else _evaluate(metric.log_volume, z).clamp_min(-700)
    logp = logp + volume if getattr(model, "base_measure", "volume") == "volume" else logp
    height = logp if lebesgue else logp - volume
    # Heights above which the given shares of the mass lie.
    heights, order = height.flatten().sort(descending=True)
    share = logp.flatten()[order].softmax(0).cumsum(0)
    index = torch.searchsorted(share, torch.tensor(masses).to(share)).clamp_max(len(order) - 1)
    style = {"colors": "white", "linewidths": 1.2, "linestyles": "solid", **style}
    x, y = z[0, :, 0].cpu().numpy(), z[:, 0, 1].cpu().numpy()
    return ax.contour(x, y, height.numpy(), levels=sorted(set(heights[index].tolist())), **style)


def clusters(
    codes: CodeSet,
    labels: Any,
    centers: Codes | None = None,
    *,
    cmap: str = "tab10",
    ax: Axes | None = None,
    **style: Any,
) -> ClusterPlot:
    """Draws codes ``(n, 2)`` in the colors of their clusters, and the centers ``(k, 2)`` as stars.

    Cluster k has the k-th color of the map, whatever other clusters occur. A negative label is noise, and gray. Further
    `style` goes to `matplotlib.axes.Axes.scatter` for the codes.
    """
    codes = as_codes(codes)
    _extent(codes)  # complains about codes that are not (n, 2)
    numbers = real_numbers(labels, "Labels").cpu().numpy()
    if numbers.shape != (len(codes),):
        raise ValueError(f"{len(codes)} codes have labels of shape {numbers.shape}; give one label a code.")
    ax = ax or plt.subplots(layout="compressed")[1]
    ax.set_aspect("equal")
    look = {"s": 8, "linewidths": 0, "zorder": 2, **style}
    points = ax.scatter(*codes.detach().cpu().T.numpy(), color=_colors(numbers, cmap), **look)
    if centers is None:
        return ClusterPlot(points, None)
    xy = as_codes(centers).detach().cpu().numpy()
    look = {"s": 160, "marker": "*", "color": _colors(np.arange(len(xy)), cmap), "edgecolors": "black", "zorder": 3}
    return ClusterPlot(points, ax.scatter(*xy.T, **look))


def contributions(found: Contributions, *, num: int = 15, ax: Axes | None = None, **style: Any) -> BarContainer:
    """Draws the `num` features that add most to the energy of a path, as shares in per cent: one bar each of what
    `pullback.contributions` found. Further `style` goes to `matplotlib.axes.Axes.barh`."""
    ax = ax or plt.subplots(layout="compressed")[1]
    rows = found.table(num)[::-1]
    ax.set_xlabel("share of the energy in per cent")
    return ax.barh([label for label, _, _ in rows], [100 * share for _, _, share in rows], **style)


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
        low, high = torch.tensor(bounds, dtype=torch.float64).reshape(2, 2).T
        shape = torch.tensor(values.shape[::-1])
        pixel = ((codes.detach().cpu().double() - low) / (high - low) * shape).long()
        column, row = pixel[((pixel >= 0) & (pixel < shape)).all(-1)].T
        found = values[row, column]
        shown = found if found.isfinite().any() and found.max() > found.min() else values
    shown, values = shown[shown.isfinite()], values[values.isfinite()]
    if not len(shown):
        return None, None, "neither"
    low, high = shown.quantile(torch.tensor([clip, 1 - clip], dtype=shown.dtype)).tolist()
    beyond = int((values < low).any()) + 2 * int((values > high).any())
    return low, high, ("neither", "min", "max", "both")[beyond]


def _colors(labels: np.ndarray, cmap: str) -> np.ndarray:
    table = plt.get_cmap(cmap)
    colors = np.asarray(table(labels.clip(0).astype(int) % table.N))
    colors[labels < 0] = (0.6, 0.6, 0.6, 1.0)
    return colors


def _flow(metric: Metric, z: Codes, v: Tensor) -> Trajectory:
    """Geodesics from z along tangents with the given components ``(*batch, 2)`` in an orthonormal frame."""
    (z,) = codes_for(metric, z)
    if z.shape != (2,):
        raise ValueError(f"The center is one code of two dimensions, shape (2,); got {tuple(z.shape)}.")
    with torch.no_grad():
        values, vectors = torch.linalg.eigh(metric.tensor(z))
    if not values[0] > 0:
        raise ValueError("The metric is singular at the center, so there is no direction of unit length; move it.")
    v = v.to(z) @ (vectors / values.sqrt() @ vectors.mT)
    return exponential(metric, z, v, rtol=_TOLERANCE, atol=_TOLERANCE)


def _lines(points: Tensor, ax: Axes | None, width: float, style: dict[str, Any]) -> list[Line2D]:
    ax = ax or plt.subplots(layout="compressed")[1]
    ax.set_aspect("equal")
    look = {"color": "black", "linewidth": width, **normalize_kwargs(style, Line2D)}
    return [line for xy in points.detach().cpu().numpy() for line in ax.plot(*xy.T, **look)]


def _extent(codes: Tensor | None) -> Bounds:
    """The rectangle (left, right, bottom, top) of the codes, widened by a quarter of its sides."""
    if codes is None:
        raise ValueError("A plot needs codes= or bounds=(left, right, bottom, top) to know what to draw.")
    if codes.ndim != 2 or codes.shape[-1] != 2:
        raise ValueError(f"Plots draw codes of shape (n, 2), not {tuple(codes.shape)}; choose two dimensions first.")
    box = Grid.around(as_codes(codes, a_set=True, finite=True), resolution=2)
    (left, bottom), (right, top) = box.low.tolist(), box.high.tolist()
    return left, right, bottom, top


def _grid(bounds: Bounds, resolution: int, like: Tensor) -> Tensor:
    """Centers of square pixels, of shape ``(rows, columns, 2)``; `resolution` of them along the longer side."""
    left, right, bottom, top = bounds
    pixel = max(right - left, top - bottom) / resolution
    columns, rows = (max(1, round(side / pixel)) for side in (right - left, top - bottom))
    x = left + (torch.arange(columns) + 0.5) * (right - left) / columns
    y = bottom + (torch.arange(rows) + 0.5) * (top - bottom) / rows
    return torch.stack(torch.meshgrid(x, y, indexing="xy"), -1).to(like)


@progress("pixels")
def _evaluate(f: Callable[[Tensor], Tensor], grid: Tensor, chunk: int = 4096) -> Tensor:
    """Values ``(rows, columns)`` of a function of codes ``(n, 2)``."""
    with torch.no_grad():
        values = torch.cat([f(z) for z in grid.reshape(-1, 2).split(chunk)])
    return values.reshape(grid.shape[:-1]).double().cpu()
