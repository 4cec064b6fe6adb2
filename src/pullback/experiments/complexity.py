r"""What one metric tensor costs: the appendix on computational complexity of Arvanitidis et al. 2022, measured.

The paper counts forward passes of the decoder: one divergence and so two passes per diagonal entry, three divergences
and so six passes for each entry above it, :math:`3d^2 - d` in all. The same system with the decoded code kept needs
:math:`1 + d(d+1)/2`. Forward-mode differentiation needs one pass that carries d tangents.

Work is counted in floating-point operations of matrix products, and given in units of one forward pass at one code: a
number that does not depend on the machine. Times do; they are drawn, and written to a file of their own, but are no
part of the report's numbers.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.distributions import Bernoulli
from torch.nn.functional import linear
from torch.utils.flop_counter import FlopCounterMode

import pullback as pb
from pullback.experiments import figures
from pullback.experiments.figures import WIDTH, save_figure
from pullback.experiments.report import Finding, Report, Table
from pullback.experiments.training import each
from pullback.experiments.weights import reproducible

Route = Callable[["Decoder"], pb.Metric]


@dataclass(frozen=True)
class Settings:
    """The sizes of the decoder; the paper gives formulas only."""

    seed: int = 0
    hidden: int = 128
    num_codes: int = 16
    # Dimensions d, with num_features.
    latent: tuple[int, ...] = (2, 4, 8, 16)
    # Dimensions D, with the smallest d.
    features: tuple[int, ...] = (50, 200, 784, 3136)
    num_features: int = 784
    # Of the score.
    num_samples: int = 50
    # Of which the fastest counts.
    num_repeats: int = 3


PAPER = Settings()


class Decoder:
    """A Bernoulli decoder with one hidden layer that counts how often it is called.

    It is no module, because torch's counter of operations follows modules with hooks, which second derivatives do not
    pass.
    """

    def __init__(self, d: int, hidden: int, num_features: int) -> None:
        layers = [nn.Linear(d, hidden), nn.Linear(hidden, num_features)]
        self.layers = [(layer.weight.detach().double(), layer.bias.detach().double()) for layer in layers]
        self.num_calls = 0

    def __call__(self, z: Tensor) -> Bernoulli:
        """Decodes codes of shape ``(*batch, d)``."""
        self.num_calls += 1
        first, last = self.layers
        return Bernoulli(logits=linear(torch.tanh(linear(z, *first)), *last), validate_args=False)


def routes(settings: Settings) -> dict[str, Route]:
    """The ways to the metric tensor, by name; the paper's first."""

    def differences(method: pb.divergences.OneSidedDifference | pb.divergences.CentralDifference) -> Route:
        return lambda decoder: pb.DivergenceMetric(decoder, divergence=pb.divergences.kl, method=method)

    return {
        "differences of the KL, one-sided": differences(pb.divergences.OneSidedDifference()),
        "differences of the KL, central": differences(pb.divergences.CentralDifference()),
        "Hessian of the KL": lambda decoder: pb.DivergenceMetric(decoder, divergence=pb.divergences.kl),
        "covariance of the score": lambda decoder: pb.ScoreMetric(decoder, num_samples=settings.num_samples),
        "closed form, forward mode": pb.FisherRaoMetric,
    }


def paper_passes(d: int) -> int:
    """The paper's count of forward passes: two per diagonal entry, six for each above it."""
    return 2 * d + 6 * (d * (d - 1) // 2)


def run(out: Path, settings: Settings = PAPER) -> Report:
    """Counts and times all routes, and draws ``out/complexity.png``."""
    with reproducible(settings.seed), figures.look():
        rows = list(_measurements(settings))
        figure = save_figure(_draw(rows, settings), out, "complexity", caption=_caption(settings))
    counts = [{key: value for key, value in row.items() if key != "seconds"} for row in rows]
    file = out / "complexity-times.csv"
    lines = [f"{row['route']},{row['d']},{row['D']},{row['seconds']:.6f}" for row in rows]
    file.write_text("\n".join(["route,d,D,seconds", *lines]) + "\n")
    return Report(
        name="complexity",
        title="Forward passes and time of a metric tensor",
        source="Untrained decoders; no data.",
        findings=_findings(counts, settings),
        figures=[figure],
        files=[file],
        numbers={"settings": asdict(settings), "counts": counts},
        tables=[_table(counts, settings)],
    )


def _measurements(settings: Settings) -> Iterator[dict[str, Any]]:
    sizes = [(d, settings.num_features) for d in settings.latent]
    sizes += [(min(settings.latent), D) for D in settings.features if settings.num_features != D]
    ways = routes(settings)
    for (d, D), (name, route) in each(list(itertools.product(sizes, ways.items())), "complexity"):
        decoder = Decoder(d, settings.hidden, D)
        z = torch.randn(settings.num_codes, d, dtype=torch.float64)
        yield {"route": name, "d": d, "D": D, **measure(decoder, route(decoder), z, settings.num_repeats)}


def measure(decoder: Decoder, metric: pb.Metric, z: Tensor, num_repeats: int) -> dict[str, Any]:
    """Calls of the decoder, work in forward passes per code, and seconds for all codes ``(n, d)``."""
    one_pass = _flops(lambda: decoder(z))
    # A metric looks at a new decoder once; that is no part of the cost of a tensor.
    metric.tensor(z)
    decoder.num_calls = 0
    work = _flops(lambda: metric.tensor(z))
    calls = decoder.num_calls
    seconds = math.inf
    for _ in range(num_repeats):
        start = time.process_time()
        metric.tensor(z)
        seconds = min(seconds, time.process_time() - start)
    return {"calls": calls, "passes": round(work / one_pass, 2), "seconds": seconds}


def _flops(function: Callable[[], object]) -> int:
    """Floating-point operations of the matrix products in a call."""
    with FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops()


def _draw(rows: list[dict[str, Any]], settings: Settings) -> Figure:
    figure, axes = plt.subplots(2, 2, figsize=(WIDTH, 4.6), layout="constrained")
    passes, by_d, by_D, words = axes.flat
    d = list(settings.latent)
    passes.plot(d, [paper_passes(n) for n in d], "k--", label="paper's count, $3d^2 - d$")
    smallest = min(settings.latent)
    at_D = [row for row in rows if row["D"] == settings.num_features]
    at_d = sorted((row for row in rows if row["d"] == smallest), key=lambda row: row["D"])
    _lines(passes, at_D, "d", lambda row: row["passes"])
    _lines(by_d, at_D, "d", lambda row: 1e6 * row["seconds"] / settings.num_codes)
    _lines(by_D, at_d, "D", lambda row: 1e6 * row["seconds"] / settings.num_codes)
    passes.set(
        xlabel="latent dimensions d", ylabel="work, in forward passes", title=f"work ($D$ = {settings.num_features})"
    )
    by_d.set(xlabel="latent dimensions d", ylabel="µs for a tensor", title=f"time ($D$ = {settings.num_features})")
    by_D.set(xlabel="features D", ylabel="µs for a tensor", title=f"time ($d$ = {smallest})")
    words.axis("off")
    words.legend(*passes.get_legend_handles_labels(), loc="center", frameon=False, fontsize="small")
    return figure


def _lines(ax: Axes, rows: list[dict[str, Any]], key: str, value: Callable[[dict[str, Any]], float]) -> None:
    for name in dict.fromkeys(row["route"] for row in rows):
        mine = [row for row in rows if row["route"] == name]
        ax.plot([row[key] for row in mine], [value(row) for row in mine], marker="o", markersize=4, label=name)
    ax.set(xscale="log", yscale="log")
    ticks = [row[key] for row in mine]
    ax.set_xticks(ticks, labels=[str(tick) for tick in ticks])
    ax.minorticks_off()
    ax.grid(alpha=0.3)


def _table(counts: list[dict[str, Any]], settings: Settings) -> Table:
    rows = [["paper's count", *(str(paper_passes(d)) for d in settings.latent)]]
    for name in routes(settings):
        mine = [row for row in counts if row["route"] == name and row["D"] == settings.num_features]
        rows.append([name, *(f"{row['passes']:g} ({row['calls']})" for row in mine)])
    columns = ["route", *(f"d = {d}" for d in settings.latent)]
    return Table("Work in forward passes, and calls of the decoder in brackets", columns, rows)


def _findings(counts: list[dict[str, Any]], settings: Settings) -> list[Finding]:
    d = max(settings.latent)
    mine = {row["route"]: row["passes"] for row in counts if row["d"] == d and row["D"] == settings.num_features}
    ways = list(routes(settings))
    return [
        Finding(
            "Forward passes for the finite-difference system",
            "App. D.5",
            f"3d² - d: {paper_passes(d)} at d = {d}",
            f"{mine[ways[0]]:g} at d = {d}",
            "holds" if mine[ways[0]] <= paper_passes(d) else "does not hold",
            "each code is decoded once for all divergences, so that fewer passes suffice",
        ),
        Finding(
            "The metric through Jacobians is impractical",
            "Sec. 3.4",
            "access to the Jacobian is not always straightforward; second derivatives fare poorly",
            f"{mine[ways[-1]]:g} passes at d = {d}, in one call",
            "does not hold" if mine[ways[-1]] < mine[ways[0]] else "holds",
            "one pass carries d tangents: forward-mode derivatives are cheap and batched today",
        ),
    ]


def _caption(settings: Settings) -> str:
    sizes = f"{settings.hidden} hidden units, {settings.num_codes} codes at once"
    return f"Bernoulli decoder with {sizes}, float64, one thread."
