"""Pictures of what a metric does: its unit circles, its geodesics from a point, densities, clusters and paths on it."""

from __future__ import annotations

from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.cbook import normalize_kwargs
from matplotlib.collections import PathCollection, PolyCollection
from matplotlib.container import BarContainer
from matplotlib.contour import QuadContourSet
from matplotlib.lines import Line2D
from torch import Tensor

from pullback._decoders.contract import as_codes, real_numbers
from pullback._geometry.exponential import Trajectory, exponential
from pullback._geometry.path_questions import Contributions
from pullback._metrics.base import Metric, codes_for
from pullback._options import check_options
from pullback._typing import Codes, CodeSet
from pullback.plot._plane import Bounds, evaluate, extent, grid

_TOLERANCE = 1e-6  # of the geodesics that are drawn
_MASSES = (0.9, 0.7, 0.5, 0.3, 0.1)


class ClusterPlot(NamedTuple):
    """What `clusters` drew: the codes, and the centers (None without)."""

    codes: PathCollection
    centers: PathCollection | None


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
    return _lines(flow(torch.linspace(0, 1, num_points)), ax, style)


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

    Where lines cross that do not in the grid, the exponential map folds: beyond its cut locus.

    Args:
        metric: as for `fan`.
        z: the point, of shape ``(2,)``.
        length: half the side of the square, in the units of the metric.
        num_lines: grid lines each way.
        num_points: points of a line, one geodesic each.
        ax: matplotlib axes; new ones by default.
        **style: as for `fan`.
    """
    check_options(length=length, num_lines=num_lines, num_points=num_points)
    across, along = (torch.linspace(-length, length, n, dtype=torch.float64) for n in (num_lines, num_points))
    square = torch.stack(torch.meshgrid(across, along, indexing="ij"), -1)
    flow = _flow(metric, z, torch.cat([square, square.flip(-1)]))
    arrived = torch.where(flow.converged[..., None], flow.end, torch.nan)
    return _lines(arrived, ax, {"linewidth": 0.8, **normalize_kwargs(style, Line2D)})


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
    left, right, bottom, top = bounds or extent(points)
    at: Tensor = grid((left, right, bottom, top), resolution, like).reshape(-1, 2) if points is None else points
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
    bounds = bounds or extent(codes)
    ax = ax or plt.subplots(layout="compressed")[1]
    z = grid(bounds, resolution, torch.zeros(0, dtype=torch.float64) if codes is None else codes)
    logp = evaluate(lambda z: torch.as_tensor(model.score_samples(z)), z).clamp_min(-700)
    metric = getattr(model, "metric", None)
    volume = torch.zeros_like(logp) if metric is None else evaluate(metric.log_volume, z).clamp_min(-700)
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
    extent(codes)  # complains about codes that are not (n, 2)
    numbers = real_numbers(labels, "Labels").cpu().numpy()
    if numbers.shape != (len(codes),):
        raise ValueError(f"{len(codes)} codes have labels of shape {numbers.shape}; give one label a code.")
    ax = ax or plt.subplots(layout="compressed")[1]
    x, y = codes.detach().cpu().T.numpy()
    points = ax.scatter(x, y, color=_colors(numbers, cmap), **{"s": 8, "linewidths": 0, "zorder": 2, **style})
    ax.set_aspect("equal")
    if centers is None:
        return ClusterPlot(points, None)
    x, y = as_codes(centers).detach().cpu().T.numpy()
    color = _colors(np.arange(len(x)), cmap)
    return ClusterPlot(points, ax.scatter(x, y, s=160, marker="*", color=color, edgecolors="black", zorder=3))


def contributions(found: Contributions, *, num: int = 15, ax: Axes | None = None, **style: Any) -> BarContainer:
    """Draws the `num` features that add most to the energy of a path, as shares in per cent.

    Args:
        found: the result of `pullback.contributions`.
        num: bars to draw.
        ax: matplotlib axes; new ones by default.
        **style: passed to `matplotlib.axes.Axes.barh`.
    """
    ax = ax or plt.subplots(layout="compressed")[1]
    rows = found.table(num)[::-1]
    bars = ax.barh([label for label, _, _ in rows], [100 * share for _, _, share in rows], **style)
    ax.set_xlabel("share of the energy in per cent")
    return bars


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


def _lines(points: Tensor, ax: Axes | None, style: dict[str, Any]) -> list[Line2D]:
    ax = ax or plt.subplots(layout="compressed")[1]
    look = {"color": "black", "linewidth": 1.0, **normalize_kwargs(style, Line2D)}
    drawn = [line for xy in points.detach().cpu().numpy() for line in ax.plot(xy[:, 0], xy[:, 1], **look)]
    ax.set_aspect("equal")
    return drawn
