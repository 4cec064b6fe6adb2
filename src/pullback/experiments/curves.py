r"""The conceptual figures of Arvanitidis et al. 2022, computed: figures 1 to 3.

First, the same one-dimensional model seen twice: as a random curve in the space of observations, and as a fixed curve
in the space of distributions. Second, a shortest path on a manifold and its code in the latent space. Third, two curves
between the same two Gaussians: :math:`\gamma`, the shortest on the learned manifold :math:`h(Z)`, and c, the shortest
in the space of all isotropic Gaussians, which is hyperbolic and has it in closed form.

Does :math:`\gamma` have less variance than c? Variance makes Fisher-Rao distances short, so that both climb. Beside
data of length L and noise :math:`\sigma` a steep wall of noise is a sheet over them on which heights are free to
choose, a hyperbolic half-plane like that of c: :math:`\gamma` climbs to :math:`\sqrt{L^2/4 + 2D\sigma^2} / \sqrt{2D}`,
and c to the same with the distance of the means in the place of L. L is never shorter, so that :math:`\gamma` climbs
higher. Where the noise rises gently :math:`\gamma` climbs less, but leaves the data. A table has walls from steep to
gentle.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from mpl_toolkits.mplot3d.axes3d import Axes3D
from torch import Tensor, nn
from torch.distributions import Normal

import pullback as pb
from pullback import plot
from pullback.experiments import figures
from pullback.experiments.figures import LINE, PATH, WIDTH, save_figure
from pullback.experiments.paths import nearest, straight
from pullback.experiments.progress import say
from pullback.experiments.report import Finding, Report, Table, Verdict
from pullback.experiments.weights import reproducible

# As in the paper: green where the variance is low, red where it is high.
VARIANCE = "RdYlGn_r"
# Of the Gaussian decoder, so that H has the three dimensions of a picture.
NUM_FEATURES = 2
# Share of the arc beyond each end point.
END = 0.1


@dataclass(frozen=True)
class Settings:
    """Sizes of examples that the paper draws without giving any."""

    seed: int = 0
    hill_height: float = 1.3
    hill_width: float = 0.6
    num_codes: int = 400
    # Radians of the unit circle that the codes cover.
    arc: float = 2.75
    noise: float = 0.02
    # On the data.
    stddev: float = 0.45
    # Of its radial basis functions, and their width: where the wall begins.
    num_centers: int = 60
    width: float = 0.1
    # Of the table, from steep walls to gentle ones.
    widths: tuple[float, ...] = (0.1, 0.15, 0.2, 0.3, 0.4)
    # Of the standard deviation, relative to that.
    ceiling: float = 1e4
    # Of the lattice where paths start.
    num_nodes: int = 10_000
    resolution: int = 161


PAPER = Settings()


class Hill(nn.Module):
    """A Gaussian decoder whose means are a hill on a plane in space, with constant noise."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.height, self.width = settings.hill_height, settings.hill_width

    def mean(self, z: Tensor) -> Tensor:
        """The surface, shape ``(*batch, 3)``."""
        up = self.height * torch.exp(-0.5 * z.square().sum(-1, keepdim=True) / self.width**2)
        return torch.cat([z, up], -1)

    def forward(self, z: Tensor) -> Normal:
        """Decodes codes of shape ``(*batch, 2)``."""
        mean = self.mean(z)
        return Normal(mean, torch.full_like(mean, 0.1))


class Isotropic(nn.Module):
    """A Gaussian decoder of the plane with one standard deviation, which rises away from the codes."""

    def __init__(self, codes: Tensor, settings: Settings) -> None:
        super().__init__()
        support = pb.Support.fit(codes, settings.num_centers, scale=settings.width, random_state=settings.seed)
        self.stddev = pb.RBFPrecision(support, 1, scale=settings.stddev, ceiling=settings.ceiling).requires_grad_(False)

    def mean(self, z: Tensor) -> Tensor:
        """The latent plane itself."""
        return z

    def forward(self, z: Tensor) -> Normal:
        """Decodes codes of shape ``(*batch, 2)``."""
        mean = self.mean(z)
        return Normal(mean, self.stddev(z).expand_as(mean))


def arc_codes(settings: Settings) -> Tensor:
    """Codes spread evenly along an arc of the unit circle, in order."""
    generator = torch.Generator().manual_seed(settings.seed)
    angle = settings.arc * torch.linspace(-0.5, 0.5, settings.num_codes, dtype=torch.float64)
    noise = settings.noise * torch.randn(settings.num_codes, 2, generator=generator, dtype=torch.float64)
    return torch.stack([angle.cos(), angle.sin()], -1) + noise


def hyperbolic(p: Normal, q: Normal, t: Tensor) -> Normal:
    r"""The shortest curve in the space of isotropic Gaussians: from p to q, each ``(1, D)``, at parameters ``t`` of
    constant speed.

    With the height :math:`y = \sqrt{2D}\,\sigma` the metric is :math:`2D\,(|d\mu|^2 + dy^2)/y^2`, the half-space model.
    Along the line of the means, measured from the center of the half circle of radius r, the geodesic is :math:`x = r
    \tanh s,\ y = r / \cosh s`.
    """
    D = p.loc.shape[-1]
    way = q.loc - p.loc
    length = way.norm(dim=-1, keepdim=True)
    y0, y1 = ((2 * D) ** 0.5 * n.scale[..., :1] for n in (p, q))
    # Of p, seen from the center.
    x0 = -(length.square() + y1.square() - y0.square()) / (2 * length)
    s0, s1 = torch.asinh(x0 / y0), torch.asinh((x0 + length) / y1)
    s, r = torch.lerp(s0, s1, t[:, None]), torch.sqrt(x0.square() + y0.square())
    mean = p.loc + (r * torch.tanh(s) - x0) * way / length
    return Normal(mean, (r / torch.cosh(s) / (2 * D) ** 0.5).expand_as(mean))


def rao_length(p: Normal, q: Normal) -> Tensor:
    r"""The distance of isotropic Gaussians: :math:`\sqrt{2D}\,\mathrm{acosh}(1 + (|\Delta\mu|^2 +
    2D\,\Delta\sigma^2)/(4D\,\sigma\sigma'))`.
    """
    D = p.loc.shape[-1]
    s, t = p.scale[..., 0], q.scale[..., 0]
    ratio = ((q.loc - p.loc).square().sum(-1) + 2 * D * (t - s).square()) / (4 * D * s * t)
    return (2 * D) ** 0.5 * torch.acosh(1 + ratio)


def peak(length: float, stddev: float) -> float:
    """The largest standard deviation of the shortest curve between isotropic Gaussians of that noise and distance of
    means.
    """
    return (length**2 / 4 + 2 * NUM_FEATURES * stddev**2) ** 0.5 / (2 * NUM_FEATURES) ** 0.5


def run(out: Path, settings: Settings = PAPER) -> Report:
    """Computes the three figures and draws them into ``out/curves-*.png``."""
    with reproducible(settings.seed), figures.look():
        teaser = save_figure(draw_teaser(settings), out, "curves-teaser")
        hill, hill_numbers = _hill(out, settings)
        drawn = Curves.between_ends(settings)
        space = save_figure(draw_space(drawn, settings.resolution), out, "curves-space")
        rows = []
        for width in settings.widths:
            say("curves", f"walls of width {width:g}")
            rows.append(Curves.between_ends(replace(settings, width=width)).numbers)
    numbers = {"settings": asdict(settings), "hill": hill_numbers, "space": drawn.numbers, "widths": rows}
    return Report(
        name="curves",
        title="The conceptual figures, computed",
        source="Computed from closed forms; no data.",
        findings=_findings(hill_numbers, drawn.numbers),
        figures=[teaser, hill, space],
        files=[],
        numbers=numbers,
        measures={"γ / c, largest standard deviation": _ratio(drawn.numbers)},
        tables=[_table(rows)],
    )


# Figure 1: one model, seen in the space of observations and in that of distributions.


def draw_teaser(settings: Settings) -> Figure:
    """Draws of a random curve in the plane, and the fixed curve of its distributions."""
    figure = plt.figure(figsize=(WIDTH, 2.7), layout="constrained")
    left = figure.add_subplot(1, 2, 1)
    right = _space_axes(figure, (1, 2, 2))
    t = torch.linspace(-1, 1, 201, dtype=torch.float64)
    mean = torch.stack([t, 0.6 * torch.sin(2.5 * t)], -1)
    stddev = 0.03 + 0.22 * t.square()
    generator = torch.Generator().manual_seed(settings.seed)
    for _ in range(12):
        draw = mean + stddev[:, None] * torch.randn(2, generator=generator, dtype=torch.float64)
        left.plot(*draw.T.numpy(), color="#4477aa", alpha=0.45, linewidth=0.8)
    left.plot(*mean.T.numpy(), color="black", linewidth=1.6)
    left.set(xlabel="$x_1$", ylabel="$x_2$", title="random curve in $\\mathcal{X}$", aspect="equal")
    right.plot(*mean.T.numpy(), stddev.numpy(), color=PATH, linewidth=2.2)
    right.plot(*mean.T.numpy(), 0 * stddev.numpy(), color="black", linewidth=1.2, alpha=0.6)
    right.set(xlabel=r"$\mu_1$", ylabel=r"$\mu_2$", zlabel=r"$\sigma$", title="fixed curve in $\\mathcal{H}$")
    right.set(xticks=(-1, 0, 1), yticks=(-0.5, 0, 0.5), zticks=(0, 0.1, 0.2))
    right.view_init(elev=22, azim=-60)
    return figure


# Figure 2: a shortest path on a surface.


def _hill(out: Path, settings: Settings) -> tuple[Path, dict[str, float]]:
    decoder = Hill(settings)
    metric = pb.EuclideanMetric(decoder)
    a, b = torch.tensor([[-1.5, -0.25], [1.5, 0.15]], dtype=torch.float64)
    box = torch.tensor([[-1.8, -1.8], [1.8, 1.8]], dtype=torch.float64)
    path = pb.geodesic(metric, a, b, init=pb.Lattice.fit(metric, box, num_nodes=settings.num_nodes))
    line = straight(a, b)
    figure = draw_manifold(metric, decoder, path.curve, line, box, settings.resolution)
    lengths = {"path": float(path.length), "line": float(pb.length(metric, line)), "converged": int(path.converged)}
    return save_figure(figure, out, "curves-manifold"), lengths


def draw_manifold(
    metric: pb.Metric, decoder: Hill, path: pb.Curve, line: pb.Curve, box: Tensor, resolution: int
) -> Figure:
    """A surface with a shortest path on it, and the latent plane with the code of that path."""
    figure = plt.figure(figsize=(WIDTH, 6.0), layout="constrained")
    top = _space_axes(figure, (2, 1, 1))
    x, y, z = decoder.mean(_grid(box, 121)).unbind(-1)
    top.plot_surface(
        x.numpy(),
        y.numpy(),
        z.numpy(),
        cmap="Blues",
        rcount=120,
        ccount=120,
        alpha=0.75,
        linewidth=0,
        vmin=-0.3,
        vmax=1.5,
    )
    for curve, color, style in ((path, PATH, "-"), (line, LINE, "--")):
        u, v, w = decoder.mean(curve.resample(401)).T.numpy()
        top.plot(u, v, w + 0.02, color=color, linestyle=style, linewidth=2, zorder=10)
    top.set(xlabel="$x_1$", ylabel="$x_2$", zlabel="$x_3$", title="manifold in space")
    top.view_init(elev=40, azim=-65)
    bottom = figure.add_subplot(2, 1, 2)
    bounds = (*box[:, 0].tolist(), *box[:, 1].tolist())
    plot.latent(metric, bounds=bounds, resolution=resolution, cmap="Greys", ax=bottom)
    for curve, color, style in ((path, PATH, "-"), (line, LINE, "--")):
        plot.paths(curve, num_points=401, ax=bottom, color=color, linestyle=style, linewidth=2)
    bottom.set(xlabel="$z_1$", ylabel="$z_2$", title="latent space")
    figures.legend(figure, [("shortest path", PATH, "line"), ("straight line", LINE, "dashed")])
    return figure


# Figure 3: two curves between the same distributions.


@dataclass(frozen=True, eq=False)
class Curves:
    """γ on the manifold of a decoder, and c in the space of all isotropic Gaussians."""

    decoder: Isotropic
    codes: Tensor
    along: Normal
    shortest: Normal
    numbers: dict[str, float]

    @classmethod
    def between_ends(cls, settings: Settings) -> Curves:
        """Joins two codes at a tenth of the arc from its ends."""
        codes = arc_codes(settings)
        decoder = Isotropic(codes, settings)
        metric = pb.FisherRaoMetric(decoder)
        # The noise rises at the very ends of the arc.
        skipped = round(END * len(codes))
        a, b = codes[skipped], codes[-1 - skipped]
        start = pb.Lattice.fit(metric, codes, num_nodes=settings.num_nodes, margin=0.3)
        path = pb.geodesic(metric, a, b, init=start)
        t = torch.linspace(0, 1, 401, dtype=torch.float64)
        along, ends = decoder(path.curve(t)), (decoder(a[None]), decoder(b[None]))
        shortest, data = hyperbolic(*ends, t), decoder(codes)
        numbers = {
            "width": settings.width,
            "steep_wall": peak((1 - 2 * END) * settings.arc, settings.stddev),
            "length_on_manifold": float(path.length),
            "error": float(path.error),
            "length_in_space": float(rao_length(*ends)[0]),
            "distance_to_data_on_manifold": float(nearest(along.mean, data.mean).max()),
            "distance_to_data_in_space": float(nearest(shortest.mean, data.mean).max()),
            "stddev_on_data": float(data.scale[:, 0].median()),
            "largest_stddev_on_manifold": float(along.scale.max()),
            "largest_stddev_in_space": float(shortest.scale.max()),
            "converged": int(path.converged),
        }
        return cls(decoder, codes, along, shortest, numbers)


def draw_space(curves: Curves, resolution: int) -> Figure:
    """The means of both curves among the data, and both curves in the space of the parameters."""
    figure = plt.figure(figsize=(WIDTH, 6.6), layout="constrained")
    top = figure.add_subplot(2, 1, 1)
    top.scatter(*curves.decoder(curves.codes).mean.flip(-1).T.numpy(), s=3, color="0.75", zorder=1)
    pair = (curves.along, curves.shortest)
    scale = Normalize(min(float(p.scale.min()) for p in pair), max(float(p.scale.max()) for p in pair))
    for curve, name in zip(pair, (r"$\gamma$", "$c$"), strict=True):
        means = curve.mean.flip(-1)
        top.scatter(*means.T.numpy(), c=curve.scale[:, 0].numpy(), cmap=VARIANCE, norm=scale, s=9, linewidths=0)
        place = tuple(means[len(means) // 2].tolist())
        top.annotate(name, place, xytext=(0, -12), textcoords="offset points", fontsize="x-large", ha="center")
    bar = figure.colorbar(plt.cm.ScalarMappable(scale, VARIANCE), ax=top, shrink=0.6)
    bar.set_label("standard deviation")
    top.locator_params(nbins=5)
    top.set(xlabel=r"$\mu_2$", ylabel=r"$\mu_1$", title=r"means along $\gamma$ and $c$, data in gray", aspect="equal")
    _draw_parameters(figure, curves, resolution)
    return figure


def _draw_parameters(figure: Figure, curves: Curves, resolution: int) -> None:
    """The surface h(Z) up to twice the highest curve, with both curves on and above it."""
    ax = _space_axes(figure, (2, 1, 2))
    low, high = curves.codes.amin(0), curves.codes.amax(0)
    grid = _grid(torch.stack([low - 0.1, high + 0.1]), resolution)
    p = curves.decoder(grid)
    volume = pb.FisherRaoMetric(curves.decoder).log_volume(grid).exp()
    pair = (curves.along, curves.shortest)
    top = 1.6 * max(float(curve.scale.max()) for curve in pair)
    height = p.scale[..., 0].clamp_max(top)
    norm = LogNorm(float(volume.quantile(0.02)), float(volume.quantile(0.98)))
    x, y = p.mean.unbind(-1)
    ax.plot_surface(
        x.numpy(),
        y.numpy(),
        height.numpy(),
        facecolors=plt.get_cmap("viridis")(norm(volume.numpy())),
        rcount=resolution,
        ccount=resolution,
        alpha=0.35,
        linewidth=0,
        shade=False,
    )
    for curve, color, name in zip(pair, (PATH, LINE), (r"$\gamma$", "$c$"), strict=True):
        ax.plot(*curve.mean.T.numpy(), curve.scale[:, 0].numpy(), color=color, linewidth=2.5, label=name, zorder=10)
    mappable = plt.cm.ScalarMappable(norm, "viridis")
    figure.colorbar(mappable, ax=ax, shrink=0.7, pad=0.12, label=r"volume $\sqrt{\det M(z)}$")
    ax.set(
        xlabel=r"$\mu_1$",
        ylabel=r"$\mu_2$",
        zlabel=r"$\sigma$",
        title="$h(Z)$ in the space of parameters",
        zlim=(0, top),
    )
    ax.view_init(elev=38, azim=165)
    ax.legend(loc="upper left")


def _space_axes(figure: Figure, place: tuple[int, int, int]) -> Axes3D:
    ax = figure.add_subplot(*place, projection="3d")
    if not isinstance(ax, Axes3D):
        raise TypeError("matplotlib has no three-dimensional axes: install it whole, with mpl_toolkits.")
    return ax


def _grid(box: Tensor, resolution: int) -> Tensor:
    """Codes on a grid over the box, shape ``(resolution, resolution, 2)``."""
    low, high = box
    t = torch.linspace(0, 1, resolution, dtype=box.dtype)
    x, y = torch.meshgrid(t, t, indexing="xy")
    return low + torch.stack([x, y], -1) * (high - low)


# The report.


def _ratio(n: dict[str, float]) -> float:
    return n["largest_stddev_on_manifold"] / n["largest_stddev_in_space"]


def _findings(hill: dict[str, float], space: dict[str, float]) -> list[Finding]:
    near = space["distance_to_data_on_manifold"] < 0.5 * space["distance_to_data_in_space"]
    low: Verdict = "holds" if _ratio(space) < 0.95 else "holds weakly" if _ratio(space) < 1 else "does not hold"
    return [
        Finding(
            "The shortest path on the manifold is bent in the latent space",
            "Sec. 2.1, Fig. 2",
            "drawn",
            f"length {hill['path']:.3f}; straight line in the latent space {hill['line']:.3f}",
            "holds" if hill["path"] < hill["line"] else "does not hold",
            "" if hill["path"] < hill["line"] else "the straight line is as short here",
        ),
        Finding(
            "γ respects the data, the shorter curve c in H leaves the manifold",
            "Sec. 3.1, Fig. 3",
            "drawn",
            f"length {space['length_on_manifold']:.2f} (γ) and {space['length_in_space']:.2f} (c); means at most "
            f"{space['distance_to_data_on_manifold']:.2f} and {space['distance_to_data_in_space']:.2f} from the "
            f"nearest mean of the data",
            "holds" if near else "does not hold",
            "" if near else "γ leaves them as well",
        ),
        Finding(
            "c has higher variance than γ",
            "Sec. 3.1, Fig. 3",
            "drawn: red against green",
            f"standard deviation at most {space['largest_stddev_on_manifold']:.2f} (γ) and "
            f"{space['largest_stddev_in_space']:.2f} (c), "
            f"{space['stddev_on_data']:.2f} on the data",
            low,
            "beside steep walls γ climbs like c, over the longer way along the data; where the noise rises gently γ "
            "climbs less "
            "but leaves the data: see the table",
        ),
    ]


def _table(rows: list[dict[str, Any]]) -> Table:
    columns = [
        "width of the wall",
        "largest σ: γ",
        "expected, steep",
        "c",
        "γ / c",
        "γ from the data",
        "c from the data",
        "error of γ",
    ]
    keys = ("largest_stddev_on_manifold", "steep_wall", "largest_stddev_in_space")
    cells = [
        [
            f"{n['width']:g}",
            *(f"{n[key]:.3f}" for key in keys),
            f"{_ratio(n):.2f}",
            *(f"{n[key]:.2f}" for key in ("distance_to_data_on_manifold", "distance_to_data_in_space")),
            f"{n['error']:.0e}" + ("" if n["converged"] else ", not converged"),
        ]
        for n in rows
    ]
    return Table("Variance along both curves, by how steeply the noise rises beside the data", columns, cells)
