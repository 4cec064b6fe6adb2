r"""Five likelihoods over one circle of codes: the second experiment of Arvanitidis et al. 2022.

The codes are known, a noisy circle in the plane, and so are the decoders: single linear layers, never trained, with the
heads and seeds of the paper's appendix. Only the likelihood changes, and with it the geometry.

What the decoder does away from the codes decides where shortest paths run. The figure has three columns, with paths
between the same pairs of codes. The paper's recipe: its reweighting of the decoder, with its number of centers and its
sharpness :math:`\beta`, over the entropy of what is decoded, and paths by a graph, a spline and Adam. The shortest
paths of the same decoder, of which there are two candidates for each pair, through the void and along the ring; both
are solved, for random pairs and, in the families whose uncertainty is bounded, for pairs opposite on the ring. And the
geodesics of `pullback.Extrapolated`, which closes the void.
"""

from __future__ import annotations

import statistics
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
from pullback.experiments import figures
from pullback.experiments.figures import PATH, WIDTH, save_figure
from pullback.experiments.paths import CERTAIN, START_POINTS, keeping_to, random_pairs
from pullback.experiments.progress import say
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
    max_segments: int = 4096
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


def opposite(codes: Tensor, settings: Settings = PAPER) -> tuple[Tensor, Tensor]:
    """Codes spread over the circle, and for each the code that is farthest on the other side."""
    a = codes[:: max(1, len(codes) // settings.num_paths)][: settings.num_paths]
    return a, codes[(codes @ -a.T).argmax(0)]


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
# Families that fade to one distribution, where the metric vanishes.
BOUNDED = ("bernoulli", "beta", "dirichlet")
# Of the paper's slider: above, the decoder is all but constant. The support is wider, and would count paths through the
# void as paths on the data where they keep beside the ring.
FADED = 0.99
# The slider has kinks: solved to three digits, ways along the ring are up to 16 % longer (Dirichlet) than to four.
RTOL = 1e-4
# Chords of a curve whose length is stated: paths along the ring cross kinks at every center, and a quarter as many
# chords make them up to 0.5 % too short.
NUM_CHORDS = 65_536
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
        panels = list(_panels(settings))
        across = {name: _across(name, settings) for name in BOUNDED}
        say("toy", "drawing")
        figure = draw(panels, settings)
        caption = "Untrained decoders over generated codes; no data."
        png = save_figure(figure, out, "toy", caption=caption)
        wide = save_figure(draw_wide(panels, settings), out, "toy-wide", dpi=96)
    numbers = {name: {p.kind: p.numbers for p in panels if p.family == name} for name in FAMILIES}
    return Report(
        name="toy",
        title="Five likelihoods over one circle of codes",
        source="Generated codes on a noisy circle; no data.",
        findings=_findings(numbers, across),
        figures=[png],
        files=[wide],
        numbers={"settings": asdict(settings), "families": numbers, "opposite": across},
        measures=_measures(numbers, across),
        tables=[
            _ways_table("random pairs", {name: n["reweight"] for name, n in numbers.items()}),
            _ways_table("opposite pairs", across),
            _table(numbers, across),
        ],
    )


def _panels(settings: Settings) -> Iterator[Panel]:
    for name in FAMILIES:
        decoder, codes = problem(name, settings)
        metric, a, b = pb.FisherRaoMetric(decoder), *pairs(codes, settings)
        say("toy", f"{FAMILIES[name].title}: the paper's recipe")
        theirs = settings.recipe(decoder, codes, a, b)
        say("toy", f"{FAMILIES[name].title}: both ways between random codes")
        found = ways(metric, codes, a, b, settings)
        with torch.no_grad():
            excess = pb.energy(metric, theirs.curve, num_segments=4096) / found.length.square()
        leaves = _leaves(decoder, theirs.curve)
        counts = _counts(theirs.converged, leaves) | {"median_energy_ratio": float(excess.median())}
        yield Panel(name, "recipe", metric, codes, theirs.curve, leaves, counts)
        numbers = _counts(found.converged, found.leaves) | found.numbers
        yield Panel(name, "reweight", metric, codes, found.curve, found.leaves, numbers)
        say("toy", f"{FAMILIES[name].title}: Extrapolated")
        decoder, codes = problem(name, settings, extrapolation="recommended")
        metric = pb.FisherRaoMetric(decoder)
        path = geodesics(metric, codes, settings)
        leaves = torch.as_tensor(path.leaves_support)
        yield Panel(name, "recommended", metric, codes, path.curve, leaves, _counts(path.converged, leaves))


def _across(name: str, settings: Settings) -> dict[str, Any]:
    """Numbers of the shortest paths of the paper's decoder between opposite codes."""
    decoder, codes = problem(name, settings)
    say("toy", f"{FAMILIES[name].title}: both ways between opposite codes")
    found = ways(pb.FisherRaoMetric(decoder), codes, *opposite(codes, settings), settings)
    return _counts(found.converged, found.leaves) | found.numbers


def _leaves(decoder: Any, curve: Any) -> Tensor:
    return (decoder.slider(curve.resample(2049)) > FADED).any(-1)


def _counts(converged: Tensor, leaves: Tensor) -> dict[str, Any]:
    return {"paths": len(converged), "converged": int(converged.sum()), "leave": int(leaves.sum())}


def geodesics(metric: pb.FisherRaoMetric, codes: Tensor, settings: Settings = PAPER) -> pb.results.Geodesic:
    """The paths of one panel, started from shortest paths on a lattice: a straight line would start in the void."""
    a, b = pairs(codes, settings)
    start = pb.Lattice.fit(metric, codes, num_nodes=settings.num_nodes)
    solver = pb.GaussNewton(rtol=1e-3, max_segments=settings.max_segments)
    return pb.geodesic(metric, a, b, init=start, solver=solver, support=metric.decoder.support)


@dataclass(frozen=True, eq=False)
class Ways:
    """The shorter of two ways for each pair.

    Attributes:
        void: lengths of the shortest path found that leaves the data; infinite where none was found.
        ring: lengths of the shortest path found that keeps to the data.
    """

    curve: Any
    converged: Tensor
    leaves: Tensor
    void: Tensor
    ring: Tensor

    @property
    def length(self) -> Tensor:
        """Of the shorter one."""
        return torch.minimum(self.void, self.ring)

    @property
    def numbers(self) -> dict[str, Any]:
        """Lengths of both ways for each pair; None where there is no such path."""
        ways = {"void": self.void, "ring": self.ring}
        return {name: [None if x == float("inf") else x for x in w.tolist()] for name, w in ways.items()}


def ways(metric: Any, codes: Tensor, a: Tensor, b: Tensor, settings: Settings = PAPER) -> Ways:
    """Solves both ways between pairs of codes ``(n, 2)``, from up to three starts, and keeps the shortest of each kind.

    The starts: the lattice's best path where the decoder is certain, its best path of all where that is another one,
    and two straight lines that meet in the middle of the codes. The metric is one of the paper's decoders.
    """
    pair, starts = _starts(metric, codes, a, b, settings)
    solver = pb.GaussNewton(rtol=RTOL, accept=RTOL, max_segments=settings.max_segments)
    path = pb.geodesic(metric, a[pair], b[pair], init=starts, solver=solver)
    with torch.no_grad():
        length = torch.stack([pb.length(metric, path.curve[i], num_segments=NUM_CHORDS) for i in range(len(pair))])
    leaves, mine = _leaves(metric.decoder, path.curve), pair == torch.arange(len(a))[:, None]
    best = torch.where(mine, length, torch.inf).argmin(-1)
    void, ring = (torch.where(mine & mask, length, torch.inf).amin(-1) for mask in (leaves, ~leaves))
    # by the usual measure, since this solver accepts less
    converged = path.error <= pb.GaussNewton.accept
    return Ways(path.curve[best], converged[best], leaves[best], void, ring)


def _starts(metric: Any, codes: Tensor, a: Tensor, b: Tensor, settings: Settings) -> tuple[Tensor, Tensor]:
    """Curves to start from, shape ``(m, START_POINTS, 2)``, and the pair that each belongs to, shape ``(m,)``."""
    lattice = pb.Lattice.fit(metric, codes, num_nodes=settings.num_nodes)
    free = lattice.paths(a, b, START_POINTS)
    kept = keeping_to(lambda z: metric.decoder.slider(z) < CERTAIN, lattice).paths(a, b, START_POINTS)
    middle = pb.Polyline(torch.stack([a, codes.mean(0).expand_as(a), b], 1)).resample(START_POINTS)
    pair, other = torch.arange(len(a)), (free != kept).flatten(1).any(-1)
    return torch.cat([pair, pair[other], pair]), torch.cat([kept, free[other], middle])


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


def _measures(numbers: dict[str, Any], across: dict[str, Any]) -> dict[str, float]:
    found = {f"leave: {kind}": float(_total(numbers, kind, "leave")) for kind in KINDS}
    for name in BOUNDED:
        for kind, n in (("random", numbers[name]["reweight"]), ("opposite", across[name])):
            ratios = _ratios(n)
            found[f"{name}, {kind}: pairs shorter through the void"] = float(sum(r < 1 for r in ratios))
            if ratios:
                found[f"{name}, {kind}: void / ring, smallest"] = min(ratios)
                found[f"{name}, {kind}: void / ring, median"] = statistics.median(ratios)
    return found | {
        f"{name}: energy, recipe / shortest": n["recipe"]["median_energy_ratio"] for name, n in numbers.items()
    }


def _ratios(n: dict[str, Any]) -> list[float]:
    """Lengths of the way through the void over those along the ring, for pairs that have both."""
    return [v / r for v, r in zip(n["void"], n["ring"], strict=True) if v is not None and r is not None]


def _share(numbers: dict[str, Any], kind: str, key: str, families: Sequence[str] = tuple(FAMILIES)) -> str:
    return f"{_total(numbers, kind, key, families)} of {_total(numbers, kind, 'paths', families)}"


def _findings(numbers: dict[str, Any], across: dict[str, Any]) -> list[Finding]:
    theirs = _total(numbers, "recipe", "leave")
    opposite = {name: {"reweight": n} for name, n in across.items()}
    leave = _total(numbers, "reweight", "leave") + _total(opposite, "reweight", "leave", BOUNDED)
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
            f"leave it: {_share(numbers, 'reweight', 'leave')} between random codes, "
            f"{_share(opposite, 'reweight', 'leave', BOUNDED)} between opposite ones ({', '.join(BOUNDED)}), "
            f"{_share(numbers, 'recommended', 'leave')} with pullback.Extrapolated",
            "does not hold" if leave else "holds",
            "where the void is a short cut; see the lengths of both ways" if leave else "",
        ),
        _near_tie(numbers, across),
        Finding(
            "The void is a short cut for Beta and Dirichlet",
            "Sec. 4.2",
            "not noticed",
            "; ".join(_short_cuts(name, numbers, across) for name in ("beta", "dirichlet")),
            "not in the paper",
        ),
        Finding(
            "Energy of the paper's recipe, relative to the shortest path",
            "App. D.2",
            "not given",
            f"median {energies} ({', '.join(FAMILIES)})",
            "not in the paper",
        ),
    ]


def _short_cuts(name: str, numbers: dict[str, Any], across: dict[str, Any]) -> str:
    """How often the void is shorter, and by how much at most."""
    parts = []
    for kind, n in (("random", numbers[name]["reweight"]), ("opposite", across[name])):
        ratios = _ratios(n)
        gain = max(1 / min(ratios, default=1.0) - 1, 0.0)
        parts.append(f"{sum(r < 1 for r in ratios)} of {len(ratios)} {kind} pairs, the ring up to {gain:.0%} longer")
    return f"{FAMILIES[name].title}: {', '.join(parts)}"


def _near_tie(numbers: dict[str, Any], across: dict[str, Any]) -> Finding:
    random, opposite = numbers["bernoulli"]["reweight"], across["bernoulli"]
    ratios = [*_ratios(random), *_ratios(opposite)]
    ties, converged = sum(abs(r - 1) < TIE for r in ratios), random["converged"] + opposite["converged"]
    paths = random["paths"] + opposite["paths"]
    fail = numbers["bernoulli"]["recipe"]["converged"] < numbers["bernoulli"]["recipe"]["paths"]
    return Finding(
        "Some Bernoulli paths fail to converge",
        "Sec. 4.2",
        "uncertainty near p = 1/2 is not strong enough",
        f"{_share(numbers, 'recipe', 'converged', ['bernoulli'])} converge by the paper's recipe, {converged} of "
        f"{paths} of ours; the void is {min(ratios, default=1):.3f} to {max(ratios, default=1):.3f} "
        f"times as long as the ring, {ties} of {len(ratios)} pairs within {TIE:.0%}",
        "does not hold" if not fail else "holds" if ties else "holds weakly",
        "all converge"
        if not fail
        else "explained: two valleys of nearly one length, so a descent from a rough start decides slowly between them"
        if ties
        else "not for two ways of the same length: these differ",
    )


def _ways_table(title: str, numbers: dict[str, Any]) -> Table:
    """Lengths of both ways, a row for each pair and a column for each family."""

    def cell(n: dict[str, Any], i: int) -> str:
        return " / ".join("none" if n[way][i] is None else f"{n[way][i]:.3f}" for way in ("void", "ring"))

    count = min(len(n["void"]) for n in numbers.values())
    rows = [[str(i + 1), *(cell(n, i) for n in numbers.values())] for i in range(count)]
    columns = ["pair", *(FAMILIES[name].title for name in numbers)]
    return Table(f"Lengths through the void / along the ring, {title}", columns, rows, single=True)


def _table(numbers: dict[str, Any], across: dict[str, Any]) -> Table:
    def cells(name: str) -> list[str]:
        kinds = [*(numbers[name][kind] for kind in KINDS), across.get(name)]
        leave = ["" if n is None else f"{n['leave']} of {n['paths']}" for n in kinds]
        converged = ["" if n is None else f"{n['converged']} of {n['paths']}" for n in kinds]
        return [*leave, *converged, f"{numbers[name]['recipe']['median_energy_ratio']:.2f}"]

    kinds = ("recipe", "shortest", "Extrapolated", "shortest, opposite pairs")
    columns = [
        "family",
        *(f"leave: {k}" for k in kinds),
        *(f"converged: {k}" for k in kinds),
        "energy, recipe / shortest",
    ]
    rows = [[FAMILIES[name].title, *cells(name)] for name in numbers]
    return Table("Paths that leave the data, and paths that converged", columns, rows)
