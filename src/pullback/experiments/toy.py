r"""Five likelihoods over one circle of codes: the second experiment of Arvanitidis et al. 2022.

The codes are known, a noisy circle in the plane, and so are the decoders: single linear layers, never trained, with the
heads and seeds of the paper's appendix. Only the likelihood changes, and with it the geometry.

What the decoder does away from the codes decides where shortest paths run. The figure has three columns, with paths
between the same pairs of codes. The paper's recipe: its reweighting of the decoder, with its number of centers and its
sharpness :math:`\beta`, over the entropy of what is decoded, and paths by a graph, a spline and Adam. The shortest
paths of the same decoder, of which there are two candidates for each pair, through the void and along the ring; both
are solved. And the geodesics of `pullback.Extrapolated`, which closes the void.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.distributions import Bernoulli, Beta, Dirichlet, Distribution, Exponential, Normal
from torch.nn.functional import softplus

import pullback as pb
from pullback._progress import each
from pullback.experiments import figures
from pullback.experiments.figures import PATH, WIDTH, save_figure
from pullback.experiments.paths import both_ways, random_pairs
from pullback.experiments.recipe import Recipe
from pullback.experiments.report import Finding, Report, Table
from pullback.experiments.weights import reproducible

Heads = tuple[Tensor, ...]
Extrapolation = Literal["reweight", "recommended"]


@dataclass(frozen=True)
class Family:
    """One column of the paper's figure: the sizes of the linear heads and the likelihood they parametrize."""

    title: str
    sizes: tuple[int, ...]
    likelihood: Callable[[Heads], Distribution]
    seed: int
    beta: float


FAMILIES = {
    "normal": Family("Normal", (3, 3), lambda f: Normal(10 * f[0], 10 * softplus(f[1])), seed=1, beta=-2.5),
    "bernoulli": Family("Bernoulli", (15,), lambda f: Bernoulli(logits=f[0]), seed=1, beta=-3.5),
    "beta": Family("Beta", (3, 3), lambda f: Beta(10 * softplus(f[0]), 10 * softplus(f[1])), seed=1, beta=-4.0),
    "dirichlet": Family("Dirichlet", (3,), lambda f: Dirichlet(softplus(f[0])), seed=17, beta=-4.0),
    "exponential": Family("Exponential", (3,), lambda f: Exponential(softplus(f[0])), seed=17, beta=-4.0),
}


@dataclass(frozen=True)
class Settings:
    """What the paper fixes for all five families, and how finely the figure is drawn."""

    num_codes: int = 500
    radius: float = 3.0
    noise: float = 0.1
    num_centers: int = 70
    # Of the codes and of the pairs; the networks' are the paper's.
    seed: int = 0
    num_paths: int = 10
    # Of the lattice where paths start.
    num_nodes: int = 102_400
    max_segments: int = 1024
    resolution: int = 200
    recipe: Recipe = field(default_factory=Recipe)
    # Nats of log-volume that the colors cover, at most.
    span: float = 8.0


class LinearDecoder(nn.Module):
    """An untrained decoder: one linear layer for each parameter of the likelihood."""

    def __init__(self, family: Family) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(family.seed)
            # Drawn in single precision, as torch users get them, so that a seed means the same network.
            self.heads = nn.ModuleList([nn.Linear(2, size, dtype=torch.float32) for size in family.sizes]).double()
        self.likelihood = family.likelihood

    def forward(self, z: Tensor) -> Distribution:
        """Decodes codes of shape ``(*batch, 2)``."""
        return self.likelihood(tuple(head(z) for head in self.heads))


PAPER = Settings()


def circle(settings: Settings = PAPER) -> Tensor:
    """Codes on a noisy circle around the origin, of shape ``(num_codes, 2)``."""
    generator = torch.Generator().manual_seed(settings.seed)
    angle = 2 * torch.pi * torch.rand(settings.num_codes, generator=generator, dtype=torch.float64)
    noise = settings.noise * torch.randn(settings.num_codes, 2, generator=generator, dtype=torch.float64)
    return settings.radius * torch.stack([angle.cos(), angle.sin()], -1) + noise


def pairs(codes: Tensor, settings: Settings = PAPER) -> tuple[Tensor, Tensor]:
    """End points of the paths: different random codes, the same for every panel."""
    return random_pairs(codes, settings.num_paths, seed=settings.seed)


def problem(
    family: str, settings: Settings = PAPER, *, extrapolation: Extrapolation | None = "reweight"
) -> tuple[nn.Module, Tensor]:
    """The decoder and the codes of one panel of the figure.

    Args:
        family: a key of `FAMILIES`.
        settings: sizes and seeds.
        extrapolation: how the decoder learns where the codes end: ``"reweight"``, as in the paper; ``"recommended"``,
            by `pullback.Extrapolated`; None for the linear decoder as it is.
    """
    if family not in FAMILIES:
        raise ValueError(f"The toy experiment has the families {', '.join(FAMILIES)}; there is no {family!r}.")
    codes, decoder = circle(settings), LinearDecoder(FAMILIES[family])
    if extrapolation is None:
        return decoder, codes
    if extrapolation == "recommended":
        return pb.Extrapolated(decoder, pb.Support.fit(codes)), codes
    support = pb.Support.fit(codes, settings.num_centers)
    return pb.Reweighted(decoder, support, beta=FAMILIES[family].beta, smooth=False), codes


KINDS = {"recipe": "the paper's recipe", "reweight": "shortest paths", "recommended": "Extrapolated"}
VOID = "#d95f02"
# What is asked of the solver in turn: accuracy, what it accepts, and segments over those of the settings. The slider
# has kinks, and four digits on four times the segments find ring paths of Bernoulli that are up to 3 % shorter.
EFFORTS = ((1e-3, 1e-2, 1), (1e-4, 1e-4, 4))
# Relative difference of lengths below which two ways count as equally long.
TIE = 0.02


@dataclass(frozen=True)
class Panel:
    """One family and one of the three kinds of paths, solved."""

    family: str
    kind: str
    metric: pb.FisherRaoMetric
    codes: Tensor
    curve: Any
    leaves: Tensor
    numbers: dict[str, Any]


def run(out: Path, settings: Settings = PAPER) -> Report:
    """Solves and draws all latent spaces into ``out/toy.png``, and compares the three kinds of paths."""
    with reproducible(settings.seed), figures.look():
        panels = list(each(_panels(settings), "toy latent spaces", len(KINDS) * len(FAMILIES)))
        figure = draw(panels, settings)
        caption = "Untrained decoders over generated codes; no data."
        png = save_figure(figure, out, "toy", caption=caption)
        wide = save_figure(draw_wide(panels, settings), out, "toy-wide", dpi=96)
    numbers = {name: {p.kind: p.numbers for p in panels if p.family == name} for name in FAMILIES}
    return Report(
        name="toy",
        title="Five likelihoods over one circle of codes",
        source="Generated codes on a noisy circle; no data.",
        findings=_findings(numbers),
        figures=[png],
        files=[wide],
        numbers={"settings": asdict(settings), "families": numbers},
        measures=_measures(numbers),
        tables=[_ways_table(numbers), _table(numbers)],
    )


def _panels(settings: Settings) -> Iterator[Panel]:
    for name in FAMILIES:
        decoder, codes = problem(name, settings)
        metric, a, b = pb.FisherRaoMetric(decoder), *pairs(codes, settings)
        theirs = settings.recipe(decoder, codes, a, b)
        found = ways(metric, codes, settings)
        with torch.no_grad():
            excess = pb.energy(metric, theirs.curve, num_segments=4096) / found.length.square()
        support: Any = decoder.support
        leaves = (~support.contains(theirs.curve.resample(1025))).any(-1)
        counts = _counts(theirs.converged, leaves) | {"median_energy_ratio": float(excess.median())}
        yield Panel(name, "recipe", metric, codes, theirs.curve, leaves, counts)
        numbers = _counts(found.converged, found.leaves) | found.numbers
        yield Panel(name, "reweight", metric, codes, found.curve, found.leaves, numbers)
        decoder, codes = problem(name, settings, extrapolation="recommended")
        metric = pb.FisherRaoMetric(decoder)
        path = geodesics(metric, codes, settings)
        leaves = torch.as_tensor(path.leaves_support)
        yield Panel(name, "recommended", metric, codes, path.curve, leaves, _counts(path.converged, leaves))


def _counts(converged: Tensor, leaves: Tensor) -> dict[str, Any]:
    return {"paths": len(converged), "converged": int(converged.sum()), "leave": int(leaves.sum())}


def geodesics(metric: pb.FisherRaoMetric, codes: Tensor, settings: Settings = PAPER) -> pb.Geodesic:
    """The paths of one panel, started from shortest paths on a lattice: a straight line would start in the void."""
    a, b = pairs(codes, settings)
    start = pb.Lattice.fit(metric, codes, num_nodes=settings.num_nodes)
    solver = pb.GaussNewton(rtol=1e-3, max_segments=settings.max_segments)
    return pb.geodesic(metric, a, b, init=start, solver=solver, support=metric.decoder.support)


@dataclass(frozen=True, eq=False)
class Ways:
    """The shorter of two ways for each pair: that from the lattice's best path, and that from its best path on the
    support.

    Attributes:
        void: lengths of the shortest path found that leaves the data; infinite where none was found.
        ring: lengths of the shortest path found that keeps to the data.
    """

    curve: Any
    length: Tensor
    converged: Tensor
    leaves: Tensor
    void: Tensor
    ring: Tensor

    @property
    def numbers(self) -> dict[str, Any]:
        """Lengths of both ways for each pair; None where there is no such path."""
        ways = {"void": self.void, "ring": self.ring}
        return {name: [None if x == float("inf") else x for x in w.tolist()] for name, w in ways.items()}


def ways(metric: pb.FisherRaoMetric, codes: Tensor, settings: Settings = PAPER) -> Ways:
    """Solves both ways between all pairs, from three starts with two efforts, and keeps the shortest."""
    support, (a, b) = metric.decoder.support, pairs(codes, settings)
    lattice = pb.Lattice.fit(metric, codes, num_nodes=settings.num_nodes)
    found: list[pb.Geodesic] = []
    for rtol, accept, factor in EFFORTS:
        solver = pb.GaussNewton(rtol=rtol, accept=accept, max_segments=factor * settings.max_segments)
        found.append(pb.geodesic(metric, a, b, solver=solver, support=support))
        found.extend(both_ways(metric, lattice, metric.decoder, a, b, solver))  # pyright: ignore[reportArgumentType]
    length = torch.stack([path.length for path in found])
    leaves = torch.stack([torch.as_tensor(path.leaves_support) for path in found])
    points = torch.stack([path.curve.resample(2049) for path in found])
    # by the usual measure, since the second effort accepts less
    converged = torch.stack([path.error <= pb.GaussNewton.accept for path in found])
    best, index = length.argmin(0), torch.arange(len(a))
    void, ring = (torch.where(mask, length, torch.inf).amin(0) for mask in (leaves, ~leaves))
    return Ways(
        pb.Polyline(points[best, index]),
        length[best, index],
        converged[best, index],
        leaves[best, index],
        void,
        ring,
    )


# The figures.


def draw(panels: Sequence[Panel], settings: Settings) -> Figure:
    """The latent spaces, a row per family and a column per kind of path, each with its own color bar."""
    size = (len(FAMILIES), len(KINDS))
    figure, axes = plt.subplots(*size, figsize=(WIDTH, 9.2), sharex=True, sharey=True, layout="constrained")
    for panel in panels:
        ax = axes[list(FAMILIES).index(panel.family), list(KINDS).index(panel.kind)]
        _draw_panel(ax, panel, settings)
    for ax, (kind, title) in zip(axes[0], KINDS.items(), strict=True):
        ax.set_title(f"{title},\n{'entropy' if kind == 'recipe' else 'log-volume'}")
    for ax, family in zip(axes[:, 0], FAMILIES.values(), strict=True):
        ax.set_ylabel(family.title)
    _legend(figure)
    return figure


def draw_wide(panels: Sequence[Panel], settings: Settings) -> Figure:
    """Two rows for a page: the shortest paths of the paper's decoders, and those of `pullback.Extrapolated`."""
    figure, axes = plt.subplots(
        2, len(FAMILIES), figsize=(2 * WIDTH, 4.6), sharex=True, sharey=True, layout="constrained"
    )
    for panel in panels:
        if panel.kind != "recipe":
            ax = axes[0 if panel.kind == "reweight" else 1, list(FAMILIES).index(panel.family)]
            _draw_panel(ax, panel, settings)
    for ax, family in zip(axes[0], FAMILIES.values(), strict=True):
        ax.set_title(family.title)
    for ax, kind in zip(axes[:, 0], ("the paper's reweighting", "pullback.Extrapolated"), strict=True):
        ax.set_ylabel(kind)
    _legend(figure, ncols=3)
    return figure


def _draw_panel(ax: Axes, panel: Panel, settings: Settings) -> None:
    entropy, side = panel.kind == "recipe", settings.radius + 1.4
    image = figures.latent(
        ax,
        panel.metric,
        panel.codes,
        background="entropy" if entropy else "log_volume",
        cmap="Blues" if entropy else "viridis",
        bounds=(-side, side, -side, side),
        resolution=settings.resolution,
        span=None if entropy else settings.span,
        colorbar=False,
    )
    figures.bar(ax, image, "", aspect=20)
    for leave, color in ((False, PATH), (True, VOID)):
        if (panel.leaves == leave).any():
            figures.curves(ax, panel.curve[panel.leaves == leave], color, linewidth=0.9)
    ax.set(xticks=[-3, 0, 3], yticks=[-3, 0, 3])


def _legend(figure: Figure, ncols: int = 2) -> None:
    entries = [
        ("code", "white", "dot"),
        ("path that keeps to the data", PATH, "line"),
        ("path that leaves", VOID, "line"),
    ]
    figures.legend(figure, entries, ncols=ncols)


# The report.


def _total(numbers: dict[str, Any], kind: str, key: str, families: Sequence[str] = tuple(FAMILIES)) -> int:
    return sum(numbers[name][kind][key] for name in families)


def _measures(numbers: dict[str, Any]) -> dict[str, float]:
    found = {f"leave: {kind}": float(_total(numbers, kind, "leave")) for kind in KINDS}
    for name in FAMILIES:
        ratios = _ratios(numbers[name]["reweight"])
        if ratios:
            found[f"{name}: void / ring, shortest"] = min(ratios)
        found[f"{name}: energy, recipe / shortest"] = numbers[name]["recipe"]["median_energy_ratio"]
    return found


def _ratios(n: dict[str, Any]) -> list[float]:
    """Lengths of the way through the void over those along the ring, for pairs that have both."""
    return [v / r for v, r in zip(n["void"], n["ring"], strict=True) if v is not None and r is not None]


def _share(numbers: dict[str, Any], kind: str, key: str, families: Sequence[str] = tuple(FAMILIES)) -> str:
    return f"{_total(numbers, kind, key, families)} of {_total(numbers, kind, 'paths', families)}"


def _findings(numbers: dict[str, Any]) -> list[Finding]:
    leave, theirs = (_total(numbers, kind, "leave") for kind in ("reweight", "recipe"))
    energies = ", ".join(f"{numbers[name]['recipe']['median_energy_ratio']:.2f}" for name in FAMILIES)
    return [
        Finding(
            "Paths recover the circle, by the paper's recipe",
            "Sec. 4.2, Fig. 5",
            "in all five families",
            f"leave it: {_share(numbers, 'recipe', 'leave')}",
            "does not hold" if theirs else "holds",
            "some of the splines leave the ring" if theirs else "",
        ),
        Finding(
            "The metric's shortest paths recover the circle",
            "Sec. 4.2, Fig. 5",
            "in all five families",
            f"leave it: {_share(numbers, 'reweight', 'leave')} shortest paths, "
            f"{_share(numbers, 'recommended', 'leave')} with pullback.Extrapolated",
            "does not hold" if leave else "holds",
            "where the void is a short cut; see the lengths of both ways" if leave else "",
        ),
        _near_tie(numbers),
        Finding(
            "Energy of the paper's recipe, relative to the shortest path",
            "App. D.2",
            "not given",
            f"median {energies} ({', '.join(FAMILIES)})",
            "not in the paper",
        ),
    ]


def _near_tie(numbers: dict[str, Any]) -> Finding:
    ratios = _ratios(numbers["bernoulli"]["reweight"])
    ties, n = sum(abs(r - 1) < TIE for r in ratios), numbers["bernoulli"]["reweight"]
    explained = ties or n["converged"] < n["paths"]
    return Finding(
        "Some Bernoulli paths fail to converge",
        "Sec. 4.2",
        "uncertainty near p = 1/2 is not strong enough",
        f"{_share(numbers, 'reweight', 'converged', ['bernoulli'])} converge; where both ways exist, the void is "
        f"{min(ratios, default=1):.3f} to {max(ratios, default=1):.3f} times as long as the ring, {ties} of "
        f"{len(ratios)} within {TIE:.0%}",
        "holds" if explained else "does not hold",
        "explained: two valleys of nearly the same length, so a descent from a rough start decides slowly between them"
        if explained
        else "all converge, and the two ways differ",
    )


def _ways_table(numbers: dict[str, Any]) -> Table:
    """Lengths of both ways, pair by pair, for the families whose void can be crossed."""
    rows = []
    for name, n in numbers.items():
        for i, (void, ring) in enumerate(zip(n["reweight"]["void"], n["reweight"]["ring"], strict=True)):
            if void is not None:
                ratio = "" if ring is None else f"{void / ring:.3f}"
                rows.append(
                    [FAMILIES[name].title, str(i + 1), f"{void:.3f}", "" if ring is None else f"{ring:.3f}", ratio]
                )
    columns = ["family", "pair", "through the void", "along the ring", "ratio"]
    return Table("Lengths of both ways, where a path through the void was found", columns, rows, single=True)


def _table(numbers: dict[str, Any]) -> Table:
    def cells(n: dict[str, Any]) -> list[str]:
        kinds = [n[kind] for kind in KINDS]
        converged = [f"{row['converged']} of {row['paths']}" for row in kinds]
        return [*(str(row["leave"]) for row in kinds), *converged, f"{n['recipe']['median_energy_ratio']:.2f}"]

    kinds = ("recipe", "shortest", "Extrapolated")
    columns = [
        "family",
        *(f"leave: {k}" for k in kinds),
        *(f"converged: {k}" for k in kinds),
        "energy, recipe / shortest",
    ]
    rows = [[FAMILIES[name].title, *cells(n)] for name, n in numbers.items()]
    return Table("Paths that leave the data, and paths that converged", columns, rows)
