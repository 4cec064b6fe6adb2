r"""How well a divergence approximates the metric: the fourth experiment of Arvanitidis et al. 2022.

A metric promises :math:`KL(p_z, p_{z+\delta}) \approx \tfrac12 \delta^\top M(z)\, \delta`. Over a grid of the latent
space of the pose autoencoder the difference is averaged over directions :math:`\delta` of length :math:`\varepsilon`.
It is of third order in :math:`\varepsilon` for the exact metric too: what it shows is how much the geometry changes
within one step, most at the border of the data, where the uncertainty sets in. So it depends on the unit of
:math:`\varepsilon`, and two are used.

Which route gives M is a question of its own. The paper solves for it from divergences at a few neighboring codes, which
need not give a positive definite matrix: one-sided cross terms at the border, and noise of sampled divergences
anywhere, make determinants negative. The routes of this library contract Jacobians with the Fisher information, and
cannot.

For the families whose metric is known, the appendix compares the approximation with it; so does the last table here,
with Fisher matrices written out with scipy, independent of the library.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.colors import ListedColormap, LogNorm
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from scipy.special import polygamma
from torch import Tensor
from torch.distributions import Beta, Distribution, Normal

import pullback as pb
from pullback.experiments import figures
from pullback.experiments.figures import WIDTH, save_figure
from pullback.experiments.poses import Model, Training, trained
from pullback.experiments.progress import say
from pullback.experiments.recipe import SampledKL
from pullback.experiments.report import Finding, Report, Table, Verdict
from pullback.experiments.weights import reproducible

Decoder = Callable[[Tensor], Distribution]
OURS, EXACT, ONE_SIDED, SIGNED, ABSOLUTE = (
    "extrapolated",
    "exact",
    "one-sided",
    "one-sided-signed",
    "one-sided-absolute",
)
TITLES = {
    OURS: "exact, Extrapolated",
    EXACT: "exact, the paper's decoder",
    ONE_SIDED: "one-sided KL in closed form",
    SIGNED: "one-sided KL by samples",
    ABSOLUTE: "one-sided KL by samples, absolute per bone (authors' code)",
}
# In the figure, two lines each.
PANELS = {
    OURS: "exact,\nExtrapolated",
    EXACT: "exact,\nthe paper's decoder",
    ONE_SIDED: "one-sided KL,\nclosed form",
    ABSOLUTE: "one-sided KL,\nsamples, absolute",
}
REGIONS = ("data", "boundary", "void")
# The slider of the paper's decoder between which a code is at the boundary.
BOUNDARY = (0.01, 0.99)
# Of the grid around the codes, as shares of their extent.
ROOM = 0.15


@dataclass(frozen=True)
class Settings:
    """The paper's radius; the sizes it leaves open."""

    seed: int = 0
    training: Training = field(default_factory=Training)
    # Of the steps whose error is measured, and of the paper's differences.
    eps: float = 0.1
    # In which eps is given, in standard deviations of the prior: the prior's own, and about the spacing of neighboring
    # strides.
    units: tuple[float, ...] = (1.0, 0.2)
    num_directions: int = 8
    # Of the grid, along its longer side.
    resolution: int = 80
    # At which the error on the data is taken.
    num_codes: int = 500
    # Of the Monte Carlo divergence, as in the authors' code.
    num_samples: int = 100
    # Steps of the authors' estimator, and rooms around the codes, for which signs of determinants are counted too, on
    # as many rows as the authors' graph has.
    sign_steps: tuple[float, ...] = (0.1, 0.02, 0.01)
    sign_rooms: tuple[float, ...] = (ROOM, 0.4)
    sign_rows: int = 50
    # Of the appendix's table.
    num_points: int = 2000


PAPER = Settings()


def run(out: Path, settings: Settings = PAPER) -> Report:
    """Maps the error over the latent space of the pose autoencoder, and compares routes where the metric is known."""
    with reproducible(settings.seed), figures.look():
        model = trained(out, settings.training, settings.seed)
        grid, codes = grid_over(model.codes, settings.resolution), _spread(model.codes, settings.num_codes)
        maps, numbers = {}, {}
        for unit in settings.units:
            found = _errors(model, settings.eps * unit, grid, codes, settings)
            maps[unit] = {name: everywhere for name, (everywhere, _) in found.items()}
            numbers[f"{unit:g}"] = {name: _numbers(*pair, model, grid, settings.eps) for name, pair in found.items()}
        signs = sign_counts(model, settings)
        say("metric-error", "families whose metric is known")
        table = {s.name: appendix_errors(s, settings) for s in SPACES}
        eps, first = settings.eps * settings.units[0], maps[settings.units[0]]
        pictures = [
            save_figure(_draw_errors(model, grid, first, eps), out, "metric-error", caption=model.motion.source),
            save_figure(_draw_signs(model, grid, first), out, "metric-signs", caption=model.motion.source),
        ]
    where = regions(model, model.codes)
    shares = {name: float((where == i).double().mean()) for i, name in enumerate(REGIONS)}
    content = {"settings": asdict(settings), "units": numbers, "codes": shares, "signs": signs, "appendix": table}
    return _report(model, content, pictures, settings)


def metrics(model: Model, eps: float, num_samples: int) -> dict[str, tuple[pb.Metric, Decoder]]:
    """The routes to the metric, each with the decoder whose divergences it approximates."""
    ours, paper = model.recommended, model.reweighted
    difference = pb.divergences.OneSidedDifference(eps)

    def route(divergence: Any) -> tuple[pb.Metric, Decoder]:
        return pb.DivergenceMetric(paper, divergence=divergence, method=difference), paper

    return {
        OURS: (pb.FisherRaoMetric(ours), ours.observed),
        EXACT: (pb.FisherRaoMetric(paper), paper),
        ONE_SIDED: route(pb.divergences.kl),
        SIGNED: route(SampledKL(num_samples)),
        ABSOLUTE: route(SampledKL(num_samples, absolute=True)),
    }


@dataclass(frozen=True, eq=False)
class Errors:
    """At each code the mean over the directions of the error and of the divergence itself, and the metric's
    determinant.
    """

    error: Tensor
    divergence: Tensor
    determinant: Tensor


def _errors(
    model: Model, eps: float, grid: Tensor, codes: Tensor, settings: Settings
) -> dict[str, tuple[Errors, Errors]]:
    """For each route the errors on the grid and on the codes."""
    found = {}
    for name, (metric, decoder) in metrics(model, eps, settings.num_samples).items():
        say("metric-error", f"radius {eps:g}: {TITLES[name]}")
        everywhere, on_data = (measure(metric, decoder, z, eps, settings.num_directions) for z in (grid, codes))
        found[name] = everywhere, on_data
    return found


@torch.no_grad()
def measure(metric: pb.Metric, decoder: Decoder, z: Tensor, eps: float, num_directions: int) -> Errors:
    """The errors of a metric at codes ``(*batch, 2)``."""
    angle = 2 * torch.pi * torch.arange(num_directions, dtype=z.dtype) / num_directions
    steps = eps * torch.stack([angle.cos(), angle.sin()], -1)
    flat, found = z.flatten(0, -2), []
    for chunk in flat.split(256):
        M = metric.tensor(chunk)
        begin = chunk[:, None].expand(-1, len(steps), -1)
        p, q = decoder(begin.flatten(0, 1)), decoder((begin + steps).flatten(0, 1))
        divergence = pb.divergences.kl(p, q).reshape(len(chunk), len(steps), -1).sum(-1)
        quadratic = 0.5 * torch.einsum("ki,nij,kj->nk", steps, M, steps)
        found.append(((divergence - quadratic).abs().mean(-1), divergence.mean(-1), torch.linalg.det(M)))
    return Errors(*(torch.cat(parts).reshape(z.shape[:-1]) for parts in zip(*found, strict=True)))


def regions(model: Model, z: Tensor) -> Tensor:
    """Which of `REGIONS` each code ``(*batch, 2)`` lies in, by the paper's slider."""
    slider = model.reweighted.slider(z)
    return (slider > BOUNDARY[0]).long() + (slider > BOUNDARY[1]).long()


def _numbers(everywhere: Errors, on_data: Errors, model: Model, grid: Tensor, eps: float) -> dict[str, Any]:
    negative, where = everywhere.determinant < 0, regions(model, grid)
    return {
        "mean_error_on_data": float(on_data.error.mean()),
        "median_error_on_data": float(on_data.error.median()),
        "relative_error_on_data": float((on_data.error / on_data.divergence).median()),
        "below_eps2_on_data": float((on_data.error < eps**2).double().mean()),
        "median_error": float(everywhere.error.median()),
        "negative_on_codes": float((on_data.determinant < 0).double().mean()),
        "negative": float(negative.double().mean()),
        **{f"negative_{name}": _share(negative[where == i].double()) for i, name in enumerate(REGIONS)},
    }


def _share(values: Tensor) -> float:
    return float(values.mean()) if len(values) else 0.0


@torch.no_grad()
def sign_counts(model: Model, settings: Settings) -> list[dict[str, float]]:
    """Shares of negative determinants by the authors' estimator, for steps and grids of several sizes."""
    found = []
    for room in settings.sign_rooms:
        grid = grid_over(model.codes, settings.sign_rows, room).flatten(0, 1)
        where = regions(model, grid)
        for step in settings.sign_steps:
            say("metric-error", f"signs of determinants: step {step:g}, room {room:g}")
            metric, _ = metrics(model, step, settings.num_samples)[ABSOLUTE]
            negative = torch.cat([torch.linalg.det(metric.tensor(z)) < 0 for z in grid.split(256)]).double()
            parts = {name: _share(negative[where == i]) for i, name in enumerate(REGIONS)}
            found.append({"room": room, "step": step, "all": float(negative.mean()), **parts})
    return found


def grid_over(codes: Tensor, resolution: int, room: float = ROOM) -> Tensor:
    """Codes of a regular grid over the data, ``(rows, columns, 2)``, with room around them as a share of their
    extent.
    """
    low, high = codes.amin(0), codes.amax(0)
    room = room * float((high - low).max())
    low, high = low - room, high + room
    cell = (high - low).max() / resolution
    x, y = (
        torch.arange(float(a + cell / 2), float(b), float(cell), dtype=codes.dtype)
        for a, b in zip(low, high, strict=True)
    )
    return torch.stack(torch.meshgrid(x, y, indexing="xy"), -1)


def _spread(codes: Tensor, count: int) -> Tensor:
    return codes[:: max(1, len(codes) // count)]


# The figures.


def _corners(grid: Tensor) -> tuple[float, float, float, float]:
    x, y = grid[0, :, 0], grid[:, 0, 1]
    half = float(x[1] - x[0]) / 2
    return float(x[0]) - half, float(x[-1]) + half, float(y[0]) - half, float(y[-1]) + half


def _draw_errors(model: Model, grid: Tensor, maps: dict[str, Errors], eps: float) -> Figure:
    shown = {name: maps[name] for name in (OURS, EXACT, ONE_SIDED, ABSOLUTE)}
    figure, axes = plt.subplots(2, 2, figsize=(WIDTH, 5.6), sharex=True, sharey=True, layout="compressed")
    limit = eps**2
    norm = LogNorm(limit / 100, limit * 1e4)
    x, y = grid[0, :, 0].numpy(), grid[:, 0, 1].numpy()
    for ax, (name, errors) in zip(axes.flat, shown.items(), strict=True):
        values = errors.error.clamp_min(1e-12).numpy()
        image = ax.imshow(
            values, origin="lower", extent=_corners(grid), norm=norm, cmap="magma", interpolation="nearest"
        )
        ax.contour(x, y, values, levels=[limit], colors="#4dd2ff", linewidths=0.6)
        figures.dots(ax, model.codes)
        ax.set_title(PANELS[name])
    label = r"mean $|KL - \frac{1}{2}\delta^\top M\delta|$, $|\delta| = $" + f"{eps:g}"
    found = figures.bar(axes, image, label)
    found.ax.axvline(limit, color="#4dd2ff", linewidth=1.5)
    figures.legend(figure, [(r"$\varepsilon^2$", "#4dd2ff", "line"), ("code", "white", "dot")])
    return figure


def _draw_signs(model: Model, grid: Tensor, maps: dict[str, Errors]) -> Figure:
    """Where determinants are negative, over the regions."""
    figure, axes = plt.subplots(1, 3, figsize=(WIDTH, 2.5), sharex=True, sharey=True, layout="compressed")
    colors = {"data": "#9ecae1", "boundary": "#fdd0a2", "void": "#eeeeee", "negative": "#a50f15"}
    where = regions(model, grid)
    for ax, name in zip(axes, (ONE_SIDED, SIGNED, ABSOLUTE), strict=True):
        shown = torch.where(maps[name].determinant < 0, len(REGIONS), where)
        ax.imshow(
            shown.numpy(),
            origin="lower",
            extent=_corners(grid),
            cmap=ListedColormap(list(colors.values())),
            vmin=-0.5,
            vmax=3.5,
            interpolation="nearest",
        )
        titles = {ONE_SIDED: "KL in closed form", SIGNED: "100 samples", ABSOLUTE: "100 samples,\nabsolute per bone"}
        ax.set_title(titles[name])
    names = {"negative": "negative determinant"}
    handles = [Patch(color=color, label=names.get(name, name)) for name, color in colors.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False, columnspacing=1.0)
    return figure


# Where the metric is known.


@dataclass(frozen=True)
class Space:
    """The parameters of a family: decoder, Fisher matrix, the box that parameters are drawn from, and the paper's
    error.
    """

    name: str
    decoder: Decoder
    theory: Callable[[np.ndarray], np.ndarray]
    low: tuple[float, float]
    high: tuple[float, float]
    paper: str


def normal_theory(z: np.ndarray) -> np.ndarray:
    """diag(1, 2) / σ² in the coordinates (μ, σ)."""
    return np.diag([1.0, 2.0]) / z[:, 1, None, None] ** 2


def beta_theory(z: np.ndarray) -> np.ndarray:
    """diag(ψ₁(α), ψ₁(β)) - ψ₁(α + β)."""
    return polygamma(1, z)[:, :, None] * np.eye(2) - polygamma(1, z.sum(1))[:, None, None]


SPACES = (
    Space("Normal", lambda z: Normal(z[..., 0], z[..., 1]), normal_theory, (-2, 0.5), (2, 2), "5.32e-04 ± 9.63e-04"),
    Space("Beta", lambda z: Beta(z[..., 0], z[..., 1]), beta_theory, (0.5, 0.5), (10, 10), "1.73e-05 ± 1.17e-05"),
)
STEPS = (1e-2, 1e-3, 1e-4)
PRINTED = "one-sided (the paper's), step 0.001"


def appendix_routes(decoder: Decoder) -> dict[str, pb.Metric]:
    """The exact routes, and the differences of the paper and of second order with steps from coarse to fine."""
    differences: dict[str, pb.Metric] = {
        f"{name}, step {eps:g}": pb.DivergenceMetric(decoder, divergence=pb.divergences.kl, method=method(eps))
        for name, method in (
            ("one-sided (the paper's)", pb.divergences.OneSidedDifference),
            ("central", pb.divergences.CentralDifference),
        )
        for eps in STEPS
    }
    sampled = pb.DivergenceMetric(decoder, divergence=SampledKL(10_000), method=pb.divergences.OneSidedDifference(0.1))
    exact: dict[str, pb.Metric] = {
        "closed form": pb.FisherRaoMetric(decoder),
        "Hessian of the KL": pb.DivergenceMetric(decoder),
    }
    return exact | differences | {"one-sided, step 0.1, 10,000 samples": sampled}


@torch.no_grad()
def appendix_errors(space: Space, settings: Settings) -> dict[str, dict[str, float]]:
    """Per route the mean and standard deviation of the relative error, and the share of negative determinants."""
    generator = torch.Generator().manual_seed(settings.seed)
    u = torch.rand(settings.num_points, 2, generator=generator, dtype=torch.float64)
    low, high = (torch.tensor(corner, dtype=torch.float64) for corner in (space.low, space.high))
    z = low + u * (high - low)
    theory = space.theory(z.numpy())
    result = {}
    for name, metric in appendix_routes(space.decoder).items():
        M = torch.cat([metric.tensor(chunk) for chunk in z.split(500)]).numpy()
        error = np.linalg.norm(M - theory, axis=(1, 2)) / np.linalg.norm(theory, axis=(1, 2))
        negative = float((np.linalg.det(M) < 0).mean())
        result[name] = {"mean": float(error.mean()), "stddev": float(error.std()), "negative": negative}
    return result


# The report.


def _report(model: Model, numbers: dict[str, Any], pictures: list[Path], settings: Settings) -> Report:
    units = numbers["units"]
    measures = {f"codes below ε², unit {unit}": n[OURS]["below_eps2_on_data"] for unit, n in units.items()}
    for name in (ONE_SIDED, SIGNED, ABSOLUTE):
        first = next(iter(units.values()))
        for part in ("negative", "negative_boundary", "negative_void"):
            measures[f"{part.replace('_', ', ')}: {TITLES[name]}"] = first[name][part]
    return Report(
        name="metric-error",
        title="Accuracy of the approximated metric",
        source=model.motion.source,
        findings=_findings(numbers, settings),
        figures=pictures,
        files=[model.file],
        numbers=numbers,
        measures=measures,
        tables=[
            *(_routes_table(unit, n) for unit, n in units.items()),
            _signs_table(numbers["signs"]),
            _appendix_table(numbers["appendix"]),
        ],
    )


def _findings(numbers: dict[str, Any], settings: Settings) -> list[Finding]:
    units, exact = numbers["units"], numbers["appendix"]
    shares = [n[OURS]["below_eps2_on_data"] for n in units.values()]
    said = ", ".join(f"{share:.0%} (unit {unit})" for unit, share in zip(units, shares, strict=True))
    verdict: Verdict = "holds" if min(shares) > 0.9 else "holds weakly" if max(shares) > 0.9 else "does not hold"
    return [
        Finding(
            "The metric is well estimated on the data",
            "Sec. 4.4, Fig. 7",
            "error below ε² in the darker colors, ε = 0.1",
            f"codes with an error below ε²: {said}, in standard deviations of the prior",
            verdict,
            ""
            if verdict == "holds"
            else "it depends on the unit of ε: the prior's standard deviation, or a fifth of it",
        ),
        *(_signs(n, unit, numbers["signs"]) for unit, n in units.items()),
        *(_known(space, exact[space.name]) for space in SPACES),
    ]


def _signs(n: dict[str, Any], unit: str, counts: list[dict[str, float]]) -> Finding:
    """Holds if the boundary has the largest share, weakly if there are any."""
    theirs, signed, closed = n[ABSOLUTE], n[SIGNED], n[ONE_SIDED]
    most = theirs["negative_boundary"] > max(theirs["negative_data"], theirs["negative_void"])
    verdict: Verdict = "holds" if most else "holds weakly" if theirs["negative"] > 0 else "does not hold"
    return Finding(
        f"Some determinants are negative, at the boundary (unit {unit})",
        "Sec. 4.4",
        "some, at the boundary of the support",
        f"authors' estimator {theirs['negative']:.1%} of the grid, {theirs['negative_boundary']:.0%} of the "
        f"boundary; signed samples "
        f"{signed['negative']:.1%}, {signed['negative_void']:.0%} of the void; closed form {closed['negative']:.1%}, "
        f"{closed['negative_boundary']:.0%} of the boundary; by Jacobians none ({n[OURS]['negative']:.1%})",
        verdict,
        "explained: one-sided cross terms where the slider bends, and sampling noise where the metric is small; the "
        f"share of the grid depends on its range and on the step, from {min(c['all'] for c in counts):.1%} to "
        f"{max(c['all'] for c in counts):.1%} in the table",
    )


def _known(space: Space, errors: dict[str, dict[str, float]]) -> Finding:
    """Holds if the printed error is that of differences with a step between those tried, and ours is rounding alone."""
    steps = [n["mean"] for name, n in errors.items() if name.startswith("one-sided (the paper's)")]
    within = min(steps) / 10 < float(space.paper.split()[0]) < max(steps)
    verdict: Verdict = "holds" if within and errors["closed form"]["mean"] < 1e-12 else "does not hold"
    return Finding(
        f"Relative error for {space.name}, whose metric is known",
        "App. D.4",
        space.paper,
        f"one-sided, step 1e-3: {_spelled(errors[PRINTED])}; exact routes {errors['closed form']['mean']:.1e}",
        verdict,
        "the paper names neither step nor parameters: its number is reached by a suitable step"
        if verdict == "holds"
        else "no step tried reaches the printed number",
    )


def _spelled(n: dict[str, float]) -> str:
    return f"{n['mean']:.2e} ± {n['stddev']:.2e}"


def _routes_table(unit: str, routes: dict[str, dict[str, float]]) -> Table:
    columns = ["route", "mean error on the data", "median", "relative", "below ε²", "det < 0 on the grid"]
    columns += [f"… {region}" for region in REGIONS]
    keys = ("mean_error_on_data", "median_error_on_data", "relative_error_on_data")
    shares = ("below_eps2_on_data", "negative", *(f"negative_{region}" for region in REGIONS))
    rows = [
        [TITLES[name], *(f"{n[key]:.2g}" for key in keys), *(f"{n[key]:.1%}" for key in shares)]
        for name, n in routes.items()
    ]
    return Table(
        f"The error over the latent space of poses, ε = 0.1 in units of {unit} standard deviations of the prior",
        columns,
        rows,
    )


def _signs_table(signs: list[dict[str, float]]) -> Table:
    columns = ["room around the codes, step", "det < 0 on the grid", *(f"… {region}" for region in REGIONS)]
    rows = [[f"{n['room']:g}, {n['step']:g}", *(f"{n[key]:.1%}" for key in ("all", *REGIONS))] for n in signs]
    return Table(
        "Negative determinants by the authors' estimator, by the range of the grid and the step", columns, rows
    )


def _appendix_table(exact: dict[str, dict[str, dict[str, float]]]) -> Table:
    names = list(exact)
    rows = [[route, *(_spelled(exact[name][route]) for name in names)] for route in exact[names[0]]]
    rows.append(["the paper", *(space.paper for space in SPACES)])
    return Table("Relative error where the metric is known", ["route", *names], rows)
