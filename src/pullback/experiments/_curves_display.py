"""The conceptual figures, drawn."""

from __future__ import annotations

from collections.abc import Callable

import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from mpl_toolkits.mplot3d.axes3d import Axes3D
from torch import Tensor
from torch.distributions import Normal

import pullback as pb
from pullback import plot
from pullback.experiments._report import WIDTH

PATH, LINE = "#d62728", "black"
VARIANCE = "RdYlGn_r"  # as in the paper: green where the variance is low, red where it is high


def draw_manifold(
    metric: pb.Metric,
    surface: Callable[[Tensor], Tensor],
    path: pb.Curve,
    line: pb.Curve,
    box: Tensor,
    resolution: int,
) -> Figure:
    """A surface with a shortest path on it, and the latent plane with the code of that path."""
    figure = plt.figure(figsize=(WIDTH, 6.0), layout="constrained")
    top = _space_axes(figure, "manifold in space")
    grid = _grid(box, 61)
    x, y, z = surface(grid).unbind(-1)
    top.plot_surface(x.numpy(), y.numpy(), z.numpy(), cmap="Blues", alpha=0.7, linewidth=0, vmin=-0.3, vmax=1.5)
    for curve, color, style in ((path, PATH, "-"), (line, LINE, "--")):
        u, v, w = surface(curve.resample(200)).T.numpy()
        top.plot(u, v, w + 0.02, color=color, linestyle=style, linewidth=2, zorder=10)
    top.set(xlabel="$x_1$", ylabel="$x_2$", zlabel="$x_3$")
    top.view_init(elev=40, azim=-65)
    bottom = figure.add_subplot(2, 1, 2)
    bounds = (*box[:, 0].tolist(), *box[:, 1].tolist())
    plot.latent(metric, bounds=bounds, resolution=resolution, cmap="Greys", ax=bottom)
    for curve, color, style, name in ((path, PATH, "-", "shortest path"), (line, LINE, "--", "straight line")):
        plot.paths(curve, ax=bottom, color=color, linestyle=style, linewidth=2, label=name)
    bottom.set(xlabel="$z_1$", ylabel="$z_2$", title="latent space")
    bottom.legend(loc="lower right", fontsize="small")
    return figure


def draw_space(
    metric: pb.Metric,
    decoder: Callable[[Tensor], Normal],
    codes: Tensor,
    along: Normal,
    shortest: Normal,
    resolution: int,
) -> Figure:
    """The means of both curves among the data, and both curves in the space of the parameters."""
    figure = plt.figure(figsize=(WIDTH, 6.6), layout="constrained")
    top = figure.add_subplot(2, 1, 1)
    means = decoder(codes).mean
    top.scatter(*means.T.numpy(), s=5, color="0.6", label="data (means)", zorder=1)
    scale = Normalize(float(along.scale.min()), float(shortest.scale.max()))
    for curve, name in ((along, r"$\gamma$"), (shortest, "$c$")):
        _draw_means(top, curve, scale)
        x, y = curve.mean[len(curve.mean) // 2].tolist()
        top.annotate(name, (x, y), xytext=(10, 0), textcoords="offset points", fontsize="x-large")
    bar = figure.colorbar(plt.cm.ScalarMappable(scale, VARIANCE), ax=top, shrink=0.8)
    bar.set_label("standard deviation")
    top.set(xlabel=r"$\mu_1$", ylabel=r"$\mu_2$", title=r"$p(x|\gamma(t))$ and $p(x|c(t))$", aspect="equal")
    top.legend(loc="lower right", fontsize="small")
    _draw_parameters(figure, metric, decoder, codes, (along, shortest), resolution)
    return figure


def _draw_means(ax: Axes, curve: Normal, scale: Normalize) -> None:
    stddev = curve.scale[:, 0].numpy()
    ax.scatter(
        *curve.mean.T.numpy(), c=stddev, cmap=VARIANCE, norm=scale, s=22, edgecolors="black", linewidths=0.4, zorder=3
    )


def _draw_parameters(
    figure: Figure,
    metric: pb.Metric,
    decoder: Callable[[Tensor], Normal],
    codes: Tensor,
    curves: tuple[Normal, Normal],
    resolution: int,
) -> None:
    ax = _space_axes(figure, "$h(Z)$ in the space of parameters")

    low, high = codes.amin(0), codes.amax(0)
    grid = _grid(torch.stack([low - 0.25, high + 0.25]), resolution)
    p = decoder(grid)
    volume = metric.log_volume(grid).exp()
    stddev = p.scale[..., 0]
    shown = stddev < 2 * max(float(curve.scale.max()) for curve in curves)
    height = torch.where(shown, stddev, torch.nan)
    norm = LogNorm(float(volume[shown].quantile(0.02)), float(volume[shown].quantile(0.98)))
    colors = plt.get_cmap("viridis")(norm(volume.numpy()))
    x, y = p.mean.unbind(-1)
    ax.plot_surface(
        x.numpy(),
        y.numpy(),
        height.numpy(),
        facecolors=colors,
        rcount=resolution,
        ccount=resolution,
        alpha=0.45,
        linewidth=0,
        shade=False,
    )
    for curve, color, name in zip(curves, ("#2ca02c", "#d62728"), (r"$\gamma$", "$c$"), strict=True):
        u, v = curve.mean.T.numpy()
        ax.plot(u, v, curve.scale[:, 0].numpy(), color=color, linewidth=2.5, label=name, zorder=10)
    figure.colorbar(
        plt.cm.ScalarMappable(norm, "viridis"), ax=ax, shrink=0.7, pad=0.12, label=r"volume $\sqrt{|M(z)|}$"
    )
    ax.set(xlabel=r"$\mu_1$", ylabel=r"$\mu_2$", zlabel=r"$\sigma$")
    ax.view_init(elev=35, azim=165)
    ax.legend(loc="upper left")


def _space_axes(figure: Figure, title: str) -> Axes3D:
    ax = figure.add_subplot(2, 1, 1 if not figure.axes else 2, projection="3d")
    if not isinstance(ax, Axes3D):
        raise TypeError("matplotlib has no three-dimensional axes: install it whole, with mpl_toolkits.")
    ax.set_title(title)
    return ax


def _grid(box: Tensor, resolution: int) -> Tensor:
    """Codes on a grid over the box, shape ``(resolution, resolution, 2)``."""
    low, high = box
    t = torch.linspace(0, 1, resolution, dtype=box.dtype)
    x, y = torch.meshgrid(t, t, indexing="xy")
    return low + torch.stack([x, y], -1) * (high - low)
