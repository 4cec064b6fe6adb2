r"""Users between users: the movie experiment of Arvanitidis et al. 2022.

A variational autoencoder with a Bernoulli decoder learns who has seen which of the most rated movies. A code is then a
user, and a curve of codes a way from one taste to another. A good way passes through users that differ little from one
to the next: similarity should be high along it, and only locally.

Measured on random pairs of users that the network was not trained on: how dissimilar (one minus the cosine of the
decoded probabilities) are neighboring users among `num_users` along the geodesic and along the straight line, on
average and in the worst step. The line is run at constant latent speed, as in the paper, and at constant Fisher-Rao
speed, which has the pace of a geodesic: what is left of a difference is due to the route.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.distributions import Bernoulli, Normal, kl_divergence
from torch.nn.functional import normalize, softplus

import pullback as pb
from pullback import data
from pullback.data import Viewings
from pullback.experiments import figures
from pullback.experiments.figures import LINE, PATH, WIDTH, save_figure
from pullback.experiments.paths import distance_to_codes, random_pairs, share_outside, straight
from pullback.experiments.progress import say
from pullback.experiments.report import Finding, Report, Table, Verdict
from pullback.experiments.training import minimize
from pullback.experiments.weights import cached, reproducible

# Of the encoder.
MIN_STDDEV = 1e-4
# A change of a probability that is worth a line in the table.
WORTH = 0.01


@dataclass(frozen=True)
class Settings:
    """The paper's table of networks and of the data, and what it leaves open."""

    seed: int = 0
    num_viewers: int = 10_000
    num_movies: int = 60
    min_seen: int = 2
    max_seen: int = 30
    hidden: int = 16
    batch_size: int = 256
    learning_rate: float = 1e-3
    weight_decay: float = 1e-7
    kl_weight: float = 0.01
    num_steps: int = 5000
    # Share of the viewers.
    held_out: float = 0.2
    # Sharpness of the paper's reweighting.
    beta: float = -3.0
    num_pairs: int = 50
    # Decoded along a path.
    num_users: int = 20
    # Parts of the path in the table of movies gained and lost, and titles gained and lost in each.
    num_parts: int = 4
    num_titles: int = 3
    # Of the lattice where paths start.
    num_nodes: int = 6400
    max_segments: int = 256
    resolution: int = 200


PAPER = Settings()


class BernoulliVAE(nn.Module):
    """The paper's network: two hidden layers with tanh in the encoder's mean, its deviation, and the decoder."""

    def __init__(self, num_movies: int, hidden: int) -> None:
        super().__init__()
        self.encoder_mean = _perceptron(num_movies, hidden, 2)
        self.encoder_stddev = _perceptron(num_movies, hidden, 2)
        self.decoder = _perceptron(2, hidden, num_movies)

    def encode(self, x: Tensor) -> Normal:
        """The approximate posterior of the codes."""
        return Normal(self.encoder_mean(x), MIN_STDDEV + softplus(self.encoder_stddev(x)))

    def forward(self, z: Tensor) -> Bernoulli:
        """Decodes codes of shape ``(*batch, 2)``."""
        return Bernoulli(logits=self.decoder(z))

    def loss(self, x: Tensor, kl_weight: float) -> Tensor:
        """The negative evidence lower bound with a weighted divergence, of each viewer, by one sample."""
        q = self.encode(x)
        prior = Normal(torch.zeros_like(q.loc), torch.ones_like(q.scale))
        return kl_weight * kl_divergence(q, prior).sum(-1) - self(q.rsample()).log_prob(x).sum(-1)


def _perceptron(first: int, hidden: int, last: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(first, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh(), nn.Linear(hidden, last)
    )


def run(out: Path, settings: Settings = PAPER) -> Report:
    """Trains the autoencoder, compares geodesics with straight lines, and draws two figures."""
    viewings = data.movielens(
        num_movies=settings.num_movies,
        min_seen=settings.min_seen,
        max_seen=settings.max_seen,
        num_users=settings.num_viewers,
        seed=settings.seed,
    )
    with reproducible(settings.seed), figures.look():
        train, test = split(viewings.seen.float(), settings)
        vae = trained(train, viewings.source, out, settings)
        codes, held_out = (vae.encode(x.double()).loc for x in (train, test))
        say("movies", f"{settings.num_pairs} paths")
        routes = Routes.between(vae, codes, *random_pairs(held_out, settings.num_pairs, seed=settings.seed), settings)
        return _report(viewings, routes, codes, out, settings)


def split(seen: Tensor, settings: Settings) -> tuple[Tensor, Tensor]:
    """The viewers to train on, and those held out."""
    order = torch.randperm(len(seen), generator=torch.Generator().manual_seed(settings.seed))
    count = round(settings.held_out * len(seen))
    return seen[order[count:]], seen[order[:count]]


def trained(train: Tensor, source: str, out: Path, settings: Settings) -> BernoulliVAE:
    """The autoencoder, from ``out/weights`` if it has been trained before."""

    def fit(vae: BernoulliVAE) -> None:
        say("movies", "training the autoencoder")
        minimize(
            lambda x: vae.loss(x, settings.kl_weight),
            vae.parameters(),
            train,
            num_steps=settings.num_steps,
            batch_size=settings.batch_size,
            learning_rate=settings.learning_rate,
            weight_decay=settings.weight_decay,
            description="movies: autoencoder",
        )

    def build() -> BernoulliVAE:
        return BernoulliVAE(train.shape[1], settings.hidden)

    return cached(out, "movies", (settings, source), build, fit, seed=settings.seed).double()


# Routes, and what is asked of them.


@dataclass(frozen=True, eq=False)
class Routes:
    """Ways between the same pairs: geodesics under two extrapolations, and straight lines at two paces."""

    recommended: pb.results.Geodesic
    reweighted: pb.results.Geodesic
    line: pb.CubicSpline
    paced: pb.CubicSpline
    decoder: pb.Extrapolated
    fading: pb.Reweighted

    @classmethod
    def between(cls, vae: BernoulliVAE, codes: Tensor, a: Tensor, b: Tensor, settings: Settings) -> Routes:
        """Solves for all pairs at once."""
        support = pb.Support.fit(codes, random_state=settings.seed)
        decoder, fading = pb.Extrapolated(vae, support), pb.Reweighted(vae, support, beta=settings.beta, smooth=False)
        solver = pb.GaussNewton(rtol=1e-3, max_segments=settings.max_segments)

        def solve(metric: pb.Metric) -> pb.results.Geodesic:
            start = pb.Lattice.fit(metric, codes, num_nodes=settings.num_nodes)
            return pb.geodesic(metric, a, b, init=start, solver=solver, support=support)

        recommended, reweighted = (solve(pb.FisherRaoMetric(network)) for network in (decoder, fading))
        paced = straight(a, b, pb.FisherRaoMetric(vae))
        return cls(recommended, reweighted, straight(a, b), paced, decoder, fading)


def similarity(users: Tensor) -> Tensor:
    """The cosines between all users ``(*batch, n, movies)`` along a path, shape ``(*batch, n, n)``."""
    directions = normalize(users, dim=-1)
    return directions @ directions.mT


def dissimilarity(users: Tensor) -> Tensor:
    """One minus the cosine of each two neighbors along a path, shape ``(*batch, n - 1)``."""
    return 1 - similarity(users).diagonal(1, -2, -1)


def _measured(routes: Routes, codes: Tensor, settings: Settings) -> dict[str, Any]:
    """Each way, decoded by the network itself, against the straight line at either pace."""
    plain = pb.FisherRaoMetric(routes.decoder.decoder)
    ways = {
        "line": routes.line,
        "paced": routes.paced,
        "recommended": routes.recommended.curve,
        "reweighted": routes.reweighted.curve,
    }
    steps = {
        name: dissimilarity(routes.decoder(curve.resample(settings.num_users)).mean) for name, curve in ways.items()
    }
    numbers: dict[str, Any] = {}
    for name, curve in ways.items():
        points = curve.resample(1025)
        numbers[name] = {
            "mean": float(steps[name].mean()),
            "worst": float(steps[name].amax(-1).mean()),
            "length": float(pb.length(plain, curve).mean()),
            "distance_to_codes": float(distance_to_codes(points, codes).mean()),
            "outside": float(share_outside(points, routes.decoder.support).mean()),
            **{
                f"better_than_{rival}": int((steps[name].mean(-1) < steps[rival].mean(-1)).sum())
                for rival in ("line", "paced")
            },
        }
    for name, path in (("recommended", routes.recommended), ("reweighted", routes.reweighted)):
        numbers[name]["converged"] = int(path.converged.sum())
    return numbers | {"pairs": len(steps["line"])}


# The figures.


def draw_example(
    metric: pb.Metric, codes: Tensor, curves: Sequence[pb.Curve], matrices: dict[str, Tensor], resolution: int
) -> Figure:
    """The latent space with both ways between two users, and the similarities of the users along each."""
    figure, places = plt.subplot_mosaic("aaa;bcd", figsize=(WIDTH, 5.8), layout="constrained", height_ratios=[1.7, 1])
    top = places["a"]
    figures.latent(top, metric, codes, resolution=resolution)
    for curve, color in zip(curves, (LINE, PATH), strict=True):
        figures.curves(top, curve, color, linewidth=1.6)
    low = min(float(matrix.min()) for matrix in matrices.values())
    axes = [places[key] for key in "bcd"]
    for ax, (name, matrix) in zip(axes, matrices.items(), strict=True):
        image = ax.imshow(matrix.numpy(), vmin=low, vmax=1, cmap="viridis", interpolation="nearest")
        ax.set_title(name)
        ticks = range(0, len(matrix), 5)
        ax.set(xlabel="user", xticks=ticks, yticks=ticks)
    axes[0].set_ylabel("user")
    figure.colorbar(image, ax=axes, shrink=0.75, label="cosine similarity")
    entries = [("code", "white", "dot"), ("geodesic", PATH, "line"), ("straight line", LINE, "line")]
    figures.legend(figure, entries, ncols=3)
    return figure


def draw_views(seen: Tensor) -> Figure:
    """How often each movie was seen, and how many movies each viewer has seen."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(WIDTH, 2.2), layout="constrained")
    views = seen.sum(0).sort(descending=True).values
    left.bar(range(1, len(views) + 1), views.tolist(), width=1.0, color="#4477aa", edgecolor="white", linewidth=0.4)
    left.set(xlabel="movie, most seen first", ylabel="views", title="views per movie")
    counts = seen.sum(1)
    bins = [k - 0.5 for k in range(int(counts.min()), int(counts.max()) + 2)]
    right.hist(counts.tolist(), bins=bins, color="#4477aa", edgecolor="white", linewidth=0.4)
    right.set(xlabel="movies seen", ylabel="viewers", title="movies per viewer")
    return figure


# The report.


def _example(routes: Routes, settings: Settings) -> int:
    """The pair whose straight line has the steepest step: where the two ways differ most."""
    users = routes.decoder(routes.line.resample(settings.num_users)).mean
    return int(dissimilarity(users).amax(-1).argmax())


def _report(viewings: Viewings, routes: Routes, codes: Tensor, out: Path, settings: Settings) -> Report:
    i, numbers = _example(routes, settings), _measured(routes, codes, settings)
    curves = {
        "geodesic": routes.recommended.curve[i],
        "line": routes.line[i],
        "line, Fisher–Rao\nspeed": routes.paced[i],
    }
    users = {name: routes.decoder(curve.resample(settings.num_users)).mean for name, curve in curves.items()}
    tables = [
        gained_and_lost(
            routes.decoder(curve.resample(settings.num_parts + 1)).mean, viewings.titles, settings.num_titles, name
        )
        for name, curve in (("the geodesic", curves["geodesic"]), ("the straight line", curves["line"]))
    ]
    metric = pb.FisherRaoMetric(routes.decoder)
    matrices = {name: similarity(decoded) for name, decoded in users.items()}
    example = draw_example(metric, codes, [curves["line"], curves["geodesic"]], matrices, settings.resolution)
    pictures = [
        save_figure(example, out, "movies", caption=viewings.source),
        save_figure(draw_views(viewings.seen), out, "movies-views", caption=viewings.source),
    ]
    file = out / "movies-gained-lost.txt"
    file.write_text("\n\n".join(map(str, tables)) + "\n")
    views = {"least_views": int(viewings.seen.sum(0).min()), "viewers": len(viewings.seen)}
    return Report(
        name="movies",
        title="Movie preferences between two users",
        source=viewings.source,
        findings=_findings(numbers, views),
        figures=pictures,
        files=[file],
        numbers={"settings": asdict(settings), **numbers, **views},
        measures=_measures(numbers),
        tables=[_table(numbers), *tables],
        notes=_notes(viewings, settings),
    )


def _measures(n: dict[str, Any]) -> dict[str, float]:
    found = {f"dissimilarity: {name}": n[name]["mean"] for name in NAMES}
    found |= {f"worst step: {name}": n[name]["worst"] for name in NAMES}
    return found | {"length, geodesic / line": n["recommended"]["length"] / n["line"]["length"]}


def _verdict(path: float, line: float, better: int, pairs: int) -> Verdict:
    if path < 0.95 * line and better >= 2 / 3 * pairs:
        return "holds"
    return "holds weakly" if path < line and better > pairs / 2 else "does not hold"


def _findings(n: dict[str, Any], views: dict[str, int]) -> list[Finding]:
    path, line, paced, pairs = n["recommended"], n["line"], n["paced"], n["pairs"]
    route = _verdict(path["mean"], paced["mean"], path["better_than_paced"], pairs)
    both = _verdict(path["mean"], line["mean"], path["better_than_line"], pairs)
    return [
        Finding(
            "Neighboring users along the geodesic are more similar than along the line",
            "Sec. 4.6, Fig. 8",
            "one example, by eye",
            f"dissimilarity {path['mean']:.4f} against {line['mean']:.4f}, worst step {path['worst']:.4f} against "
            f"{line['worst']:.4f}; better in {path['better_than_line']} of {pairs} held-out pairs",
            both,
            "" if both == "holds" else "the two ways differ by less than a twentieth, or in too few pairs",
        ),
        Finding(
            "The route does it, not the pace",
            "Sec. 4.6, Fig. 8",
            "not distinguished: the line does not respect the learned structure",
            f"against the line at constant Fisher–Rao speed {path['mean']:.4f} and {paced['mean']:.4f}, worst step "
            f"{path['worst']:.4f} and {paced['worst']:.4f}; better in {path['better_than_paced']} of {pairs}; "
            f"geodesics are "
            f"{1 - path['length'] / line['length']:.1%} shorter",
            route,
            ""
            if route == "holds"
            else "the gain is the pace: equal Fisher–Rao steps, which a straight line can take too",
        ),
        Finding(
            "Every movie has been seen by many",
            "App. D.6, Fig. 9",
            "at least 600 of 10000 users (6 %)",
            f"at least {views['least_views']} of {views['viewers']} ({views['least_views'] / views['viewers']:.0%})",
            "holds" if views["least_views"] >= 0.06 * views["viewers"] else "does not hold",
            "" if views["least_views"] >= 600 else "fewer viewers in this edition; the share is compared",
        ),
    ]


NAMES = {
    "line": "straight line",
    "paced": "straight line at constant Fisher–Rao speed",
    "recommended": "geodesic, Extrapolated",
    "reweighted": "geodesic, the paper's reweighting",
}


def _table(numbers: dict[str, Any]) -> Table:
    columns = [
        "way",
        "dissimilarity",
        "worst step",
        "Fisher–Rao length",
        "distance to codes",
        "off the data",
        "pairs better than the line",
        "… at constant speed",
    ]
    rows = [
        [
            title,
            *(f"{n[key]:.4f}" for key in ("mean", "worst", "length", "distance_to_codes")),
            f"{n['outside']:.1%}",
            *(
                f"{n[f'better_than_{rival}']} of {numbers['pairs']}" if name != rival else ""
                for rival in ("line", "paced")
            ),
        ]
        for name, title in NAMES.items()
        for n in (numbers[name],)
    ]
    return Table("Neighboring users along each way, mean over held-out pairs", columns, rows)


def gained_and_lost(users: Tensor, titles: tuple[str, ...], num_titles: int, name: str) -> Table:
    """The movies whose probability rises and falls most from each user ``(n, movies)`` to the next."""
    rows = []
    for step, (before, after) in enumerate(itertools.pairwise(users), start=1):
        change = after - before
        order = change.argsort(descending=True).tolist()
        gained = [i for i in order[:num_titles] if change[i] >= WORTH]
        lost = [i for i in order[::-1][:num_titles] if change[i] <= -WORTH]
        cells = (_movies(chosen, titles, before, after) for chosen in (gained, lost))
        rows.append([f"{step} of {len(users) - 1}", *cells])
    return Table(f"Movies gained and lost along {name}", ["part of the way", "gained", "lost"], rows, single=True)


def _movies(chosen: list[int], titles: tuple[str, ...], before: Tensor, after: Tensor) -> str:
    return "; ".join(f"{titles[i]} {100 * before[i]:.0f} → {100 * after[i]:.0f} %" for i in chosen) or "nothing"


def _notes(viewings: Viewings, settings: Settings) -> list[str]:
    if len(viewings.seen) >= settings.num_viewers:
        return []
    return [
        f"{len(viewings.seen)} viewers instead of {settings.num_viewers}: this edition has no more that saw "
        f"{settings.min_seen} to {settings.max_seen} movies."
    ]
