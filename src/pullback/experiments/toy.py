r"""Five likelihoods over one circle of codes: the second experiment of Arvanitidis et al. 2022.

The codes are known, a noisy circle in the plane, and so are the decoders: single linear layers, never trained, with the
heads and seeds of the paper's appendix. Only the likelihood changes, and with it the geometry.

What the decoder does away from the codes decides where shortest paths run. The figure has three columns, with paths between the same pairs of codes.
The paper's recipe: its reweighting of the decoder, with its number of centres and its sharpness :math:`\beta`, over the entropy of what is decoded, and paths
by a graph, a spline and Adam. The true geodesics of the same decoder, under which the void can be a short cut where a likelihood's uncertainty is bounded. And the
geodesics of `pullback.Extrapolated`, which closes the void.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributions import Bernoulli, Beta, Dirichlet, Distribution, Exponential, Normal
from torch.nn.functional import softplus
from tqdm import tqdm

import pullback as pb
from pullback.experiments._recipe import Recipe
from pullback.experiments._report import Finding, Report, Table, save_figure
from pullback.experiments._toy_display import KINDS, Panel, draw
from pullback.experiments._weights import reproducible

Heads = tuple[Tensor, ...]
Extrapolation = Literal["reweight", "recommended"]


@dataclass(frozen=True)
class Family:
    """One column of the paper's figure: the sizes of the linear heads and the likelihood they parametrise."""

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
    seed: int = 0  # of the codes and of the pairs; the networks' are the paper's
    num_paths: int = 10
    num_nodes: int = 102_400  # of the lattice where paths start
    max_segments: int = 1024  # of a path
    resolution: int = 200
    recipe: Recipe = field(default_factory=Recipe)  # the paper's solver
    span: float = 8.0  # nats of log-volume that the colours cover, at most


class LinearDecoder(nn.Module):
    """An untrained decoder: one linear layer for each parameter of the likelihood."""

    def __init__(self, family: Family) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(family.seed)
            # drawn in single precision, as torch users get them, so that a seed means the same network
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
    generator = torch.Generator().manual_seed(settings.seed)
    chosen = codes[torch.randperm(len(codes), generator=generator)[: 2 * settings.num_paths]]
    return chosen[: settings.num_paths], chosen[settings.num_paths :]


def problem(
    family: str, settings: Settings = PAPER, *, extrapolation: Extrapolation | None = "reweight"
) -> tuple[nn.Module, Tensor]:
    """The decoder and the codes of one panel of the figure.

    **Arguments:**

    - `family`: a key of `FAMILIES`.
    - `settings`: sizes and seeds.
    - `extrapolation`: how the decoder learns where the codes end: ``"reweight"``, as in the paper; ``"recommended"``, by
      `pullback.Extrapolated`; None for the linear decoder as it is.
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


def run(out: Path, settings: Settings = PAPER) -> Report:
    """Solves and draws all latent spaces into ``out/toy.png``, and compares the three kinds of paths."""
    with reproducible(settings.seed):
        panels = list(tqdm(_panels(settings), desc="toy latent spaces", total=len(KINDS) * len(FAMILIES)))
        titles = {name: family.title for name, family in FAMILIES.items()}
        figure = draw(panels, titles, side=settings.radius + 1.7, resolution=settings.resolution, span=settings.span)
    png = save_figure(figure, out, "toy", caption="Untrained decoders over generated codes; no data.")
    numbers = {name: {p.kind: p.numbers for p in panels if p.family == name} for name in FAMILIES}
    return Report(
        name="toy",
        title="Five likelihoods over one circle of codes",
        source="Generated codes on a noisy circle; no data.",
        findings=_findings(numbers),
        figures=[png],
        files=[],
        numbers={"settings": asdict(settings), "families": numbers},
        text=_TEXT,
        tables=[_table(numbers)],
        deviations=_DEVIATIONS,
    )


def _panels(settings: Settings) -> Iterator[Panel]:
    for name in FAMILIES:
        decoder, codes = problem(name, settings)
        metric = pb.FisherRaoMetric(decoder)
        path = geodesics(metric, codes, settings)
        theirs = settings.recipe(decoder, codes, *pairs(codes, settings))
        with torch.no_grad():
            excess = pb.energy(metric, theirs.curve, num_segments=4096) / path.energy
        yield Panel(
            name, "recipe", metric, codes, theirs, _numbers(theirs) | {"median_energy_ratio": float(excess.median())}
        )
        yield Panel(name, "reweight", metric, codes, path, _numbers(path))
        decoder, codes = problem(name, settings, extrapolation="recommended")
        metric = pb.FisherRaoMetric(decoder)
        path = geodesics(metric, codes, settings)
        yield Panel(name, "recommended", metric, codes, path, _numbers(path))


def _numbers(path: pb.Geodesic) -> dict[str, Any]:
    count = {"paths": path.converged.numel(), "converged": int(path.converged.sum())}
    return count | {"leave": int(torch.as_tensor(path.leaves_support).sum())}


def geodesics(metric: pb.FisherRaoMetric, codes: Tensor, settings: Settings = PAPER) -> pb.Geodesic:
    """The paths of one panel, started from shortest paths on a lattice: a straight line would start in the void."""
    a, b = pairs(codes, settings)
    start = pb.Lattice.fit(metric, codes, num_nodes=settings.num_nodes)
    solver = pb.GaussNewton(rtol=1e-3, max_segments=settings.max_segments)
    return pb.geodesic(metric, a, b, init=start, solver=solver, support=metric.decoder.support)


def _findings(numbers: dict[str, Any]) -> list[Finding]:
    def total(row: str, key: str, families: Sequence[str] = tuple(FAMILIES)) -> int:
        return sum(numbers[name][row][key] for name in families)

    def share(row: str, key: str, families: Sequence[str] = tuple(FAMILIES)) -> str:
        return f"{total(row, key, families)} of {total(row, 'paths', families)}"

    ratios = ", ".join(f"{numbers[name]['recipe']['median_energy_ratio']:.2f}" for name in FAMILIES)
    return [
        Finding(
            "Paths recover the circle",
            "in all five families",
            f"leave it: {share('recipe', 'leave')} by the paper's recipe, {share('reweight', 'leave')} true geodesics, "
            f"{share('recommended', 'leave')} with pullback.Extrapolated",
            "the void is a true short cut where uncertainty is bounded" if total("reweight", "leave") else "",
        ),
        Finding(
            "Bernoulli paths",
            "some fail to converge",
            f"{share('reweight', 'converged', ['bernoulli'])} converge, {share('reweight', 'leave', ['bernoulli'])} through the void; with "
            f"pullback.Extrapolated {share('recommended', 'converged', ['bernoulli'])}, all on the data",
            "some of the shortest paths lead through the void",
        ),
        Finding(
            "Energy of the paper's recipe, relative to the geodesic",
            "not given",
            f"median {ratios} ({', '.join(FAMILIES)})",
            "1 is the shortest path found",
        ),
    ]


def _table(numbers: dict[str, Any]) -> Table:
    def cells(n: dict[str, Any]) -> list[str]:
        recipe, true, ours = n["recipe"], n["reweight"], n["recommended"]
        leave = [str(row["leave"]) for row in (recipe, true, ours)]
        return [
            *leave,
            *(f"{row['converged']} of {row['paths']}" for row in (recipe, true, ours)),
            f"{recipe['median_energy_ratio']:.2f}",
        ]

    kinds = ("recipe", "true", "recommended")
    columns = ["family", *(f"leave: {k}" for k in kinds), *(f"converged: {k}" for k in kinds), "energy, recipe / true"]
    rows = [[FAMILIES[name].title, *cells(n)] for name, n in numbers.items()]
    return Table("Paths that leave the data, and paths that converged", columns, rows)


_TEXT = (
    "Single linear layers, never trained, with the paper's seeds and sharpness. First column: what the paper shows. Second column: the shortest paths of the same "
    "decoders, solved to three digits. Third column: the recommended extrapolation. Dashed paths leave the data."
)
_DEVIATIONS = [
    "Sizes of the circle, of the graph and of the spline are not given in the paper: 500 codes, radius 3, noise 0.1, 70 centres; a grid of 60 × 60, 12 knots, 20 segments, 150 steps of Adam.",
    "The divergence is the mean of both directions, which is of order two in the number of segments.",
]
