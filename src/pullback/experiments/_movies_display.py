"""The figures and tables of the movie experiment."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from torch import Tensor

import pullback as pb
from pullback import plot
from pullback.experiments._report import WIDTH, Table

COLORS = ("#2ca02c", "#d62728")  # as in the paper: our path green, the straight line red


def draw_example(
    metric: pb.Metric, codes: Tensor, curves: Sequence[pb.Curve], matrices: dict[str, Tensor], resolution: int
) -> Figure:
    """The latent space with both ways between two users, and the similarities of the users along each."""
    figure, places = plt.subplot_mosaic("aa;bc", figsize=(WIDTH, 5.6), layout="constrained", height_ratios=[1.3, 1])
    axes = [places[key] for key in "abc"]
    drawn = plot.latent(metric, codes, resolution=resolution, cmap="Greys", ax=axes[0])
    low, high = drawn.image.get_clim()
    drawn.image.set_clim(low, low + 2 * (high - low))  # pale, so that codes and curves stand out
    if drawn.codes is not None:
        drawn.codes.set(sizes=[1.5], color="#4477aa", alpha=0.5, linewidths=0)
    for curve, color in zip(curves, COLORS, strict=True):
        plot.paths(curve, ax=axes[0], color=color, linewidth=1.6)
    handles = [Line2D([], [], color=c, linewidth=1.6, label=name) for c, name in zip(COLORS, matrices, strict=True)]
    axes[0].legend(handles=handles, fontsize="small", loc="best")
    lowest = min(float(matrix.min()) for matrix in matrices.values())
    for ax, (name, matrix), color in zip(axes[1:], matrices.items(), COLORS, strict=True):
        image = ax.imshow(matrix.numpy(), vmin=lowest, vmax=1, cmap="viridis")
        ax.set_title(f"users along\n{name}", color=color, fontsize="medium")
        ticks = range(0, len(matrix), 5)
        ax.set(xlabel="user", xticks=ticks, yticks=ticks)
    axes[1].set_ylabel("user")
    figure.colorbar(image, ax=axes[1:], shrink=0.85, label="cosine similarity")
    return figure


def draw_views(seen: Tensor) -> Figure:
    """How often each movie was seen, and how many movies each viewer has seen."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(WIDTH, 2.2), layout="constrained")
    views = seen.sum(0).sort(descending=True).values
    left.bar(range(1, len(views) + 1), views.tolist(), width=1.0, color="#4477aa", edgecolor="white", linewidth=0.4)
    left.set(xlabel="movie, most seen first", ylabel="views", title="views of a movie")
    counts = seen.sum(1)
    bins = [k - 0.5 for k in range(int(counts.min()), int(counts.max()) + 2)]
    right.hist(counts.tolist(), bins=bins, color="#4477aa", edgecolor="white", linewidth=0.4)
    right.set(xlabel="movies seen", ylabel="viewers", title="movies of a viewer")
    return figure


def gained_and_lost(users: Tensor, titles: tuple[str, ...], num_titles: int, name: str) -> Table:
    """The movies whose probability rises and falls most from each user ``(n, movies)`` to the next."""
    rows = []
    for step, (before, after) in enumerate(itertools.pairwise(users), start=1):
        order = (after - before).argsort(descending=True).tolist()
        gained, lost = order[:num_titles], order[::-1][:num_titles]
        rows.append(
            [f"{step} of {len(users) - 1}", *(_movies(chosen, titles, before, after) for chosen in (gained, lost))]
        )
    return Table(f"Movies gained and lost along {name}", ["part of the way", "gained", "lost"], rows)


def _movies(chosen: list[int], titles: tuple[str, ...], before: Tensor, after: Tensor) -> str:
    changed = [i for i in chosen if abs(float(after[i] - before[i])) >= 0.01]
    return "; ".join(f"{titles[i]} {100 * before[i]:.0f} → {100 * after[i]:.0f} %" for i in changed) or "nothing"


def compare(numbers: dict[str, Any]) -> Table:
    """The dissimilarities under each extrapolation of the decoder."""
    keys = ("geodesic_mean", "line_mean", "geodesic_worst", "line_worst")
    rows = [
        [name, *(f"{n[key]:.4f}" for key in keys), _better(n), f"{n['leave_support']}"] for name, n in numbers.items()
    ]
    columns = [
        "decoder",
        "geodesic",
        "line",
        "geodesic, worst step",
        "line, worst step",
        "pairs better",
        "off the data",
    ]
    return Table("Dissimilarity of neighbouring users, mean over pairs", columns, rows)


def _better(n: dict[str, Any]) -> str:
    return f"{n['pairs_better_mean']} / {n['pairs_better_worst']} of {n['pairs']}"
