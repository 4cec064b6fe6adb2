r"""What one metric tensor costs: the appendix on computational complexity of Arvanitidis et al. 2022, measured.

The paper counts forward passes of the decoder: one divergence and so two passes for each diagonal entry, three divergences and so six passes for
each entry above it, :math:`3d^2 - d` in all. The same system with the decoded code kept needs :math:`1 + d(d+1)/2`. Forward-mode differentiation needs
one pass that carries d tangents.

Work is counted in floating-point operations of matrix products, and given in units of one forward pass at one code: a number that does not
depend on the machine. Times do; they are drawn, and written to a file of their own, but are no part of the report's numbers.
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
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry
from tqdm import tqdm

import pullback as pb
from pullback.experiments._report import WIDTH, Finding, Report, Table, save_figure
from pullback.experiments._weights import reproducible

Route = Callable[["Decoder"], pb.Metric]


@dataclass(frozen=True)
class Settings:
    """The sizes of the decoder; the paper gives formulas only."""

    seed: int = 0
    hidden: int = 128
    num_codes: int = 16
    latent: tuple[int, ...] = (2, 4, 8, 16)  # dimensions d, with num_features
    features: tuple[int, ...] = (50, 200, 784, 3136)  # dimensions D, with the smallest d
    num_features: int = 784  # D while d varies
    num_samples: int = 50  # of the score
    num_repeats: int = 3  # of which the fastest counts


PAPER = Settings()


class Decoder(nn.Module):
    """A Bernoulli decoder with one hidden layer that counts how often it is called."""

    def __init__(self, d: int, hidden: int, num_features: int) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(d, hidden), nn.Tanh(), nn.Linear(hidden, num_features)).double()
        self.requires_grad_(False)
        self.num_calls = 0

    def forward(self, z: Tensor) -> Bernoulli:
        """Decodes codes of shape ``(*batch, d)``."""
        self.num_calls += 1
        return Bernoulli(logits=self.network(z), validate_args=False)


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
    """The paper's count of forward passes: two for each diagonal entry, six for each above it."""
    return 2 * d + 6 * (d * (d - 1) // 2)


def run(out: Path, settings: Settings = PAPER) -> Report:
    """Counts and times all routes, and draws ``out/complexity.png``."""
    with reproducible(settings.seed):
        rows = list(_measurements(settings))
    counts = [{key: value for key, value in row.items() if key != "seconds"} for row in rows]
    file = out / "complexity-times.csv"
    figure = save_figure(_draw(rows, settings), out, "complexity", caption=_caption(settings))
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
        text=_TEXT,
        tables=[_table(counts, settings)],
        deviations=["The paper bounds the cost by formulas and measures nothing; the decoders here are ours."],
    )


def _measurements(settings: Settings) -> Iterator[dict[str, Any]]:
    sizes = [(d, settings.num_features) for d in settings.latent]
    sizes += [(min(settings.latent), D) for D in settings.features if settings.num_features != D]
    ways = routes(settings)
    for (d, D), (name, route) in tqdm(list(itertools.product(sizes, ways.items())), desc="complexity", leave=False):
        decoder = Decoder(d, settings.hidden, D)
        z = torch.randn(settings.num_codes, d, dtype=torch.float64)
        yield {"route": name, "d": d, "D": D, **measure(decoder, route(decoder), z, settings.num_repeats)}


def measure(decoder: Decoder, metric: pb.Metric, z: Tensor, num_repeats: int) -> dict[str, Any]:
    """Calls of the decoder, work in forward passes per code, and seconds for all codes ``(n, d)``."""
    one_pass = _flops(lambda: decoder(z))
    decoder.num_calls = 0
    work = _flops(lambda: metric.tensor(z))
    calls = decoder.num_calls
    seconds = math.inf
    for _ in range(num_repeats):
        start = time.perf_counter()
        metric.tensor(z)
        seconds = min(seconds, time.perf_counter() - start)
    return {"calls": calls, "passes": round(work / one_pass, 2), "seconds": seconds}


class _Work(TorchDispatchMode):
    """Counts the floating-point operations of matrix products. (torch's FlopCounterMode does not know nested derivatives.)"""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        count = flop_registry.get(func._overloadpacket)
        self.flops += 0 if count is None else count(*args, **(kwargs or {}), out_val=result)
        return result


def _flops(function: Callable[[], object]) -> int:
    with _Work() as work:
        function()
    return work.flops


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
            f"3d² - d: {paper_passes(d)} at d = {d}",
            f"{mine[ways[0]]:g} at d = {d}",
            "each code is decoded once for all divergences",
        ),
        Finding(
            "The exact metric tensor",
            "not offered: only the approximation by divergences",
            f"{mine[ways[-1]]:g} passes at d = {d}",
            "one pass that carries d tangents",
        ),
    ]


def _caption(settings: Settings) -> str:
    return f"Bernoulli decoder with {settings.hidden} hidden units, {settings.num_codes} codes at once, float64, one thread."


_TEXT = (
    "Work is that of matrix products, in units of one forward pass at one code. The closed form and the Hessian grow linearly in d, differences "
    "quadratically. Times are those of the machine that drew the figure; they are in complexity-times.csv and not in the numbers of this report."
)
