r"""What the paper promises latent geometry for, shown: distances that do not depend on the latent coordinates.

The introduction of Arvanitidis et al. 2022 gives identifiability as the reason for pulling back a metric. Here the
autoencoder of poses is trained several times from other seeds, and the distances between the same pairs of poses are
compared over the models: Euclidean distances of the codes, lengths under the pulled-back Euclidean metric of the mean
poses, and Fisher-Rao lengths, as they are, with the prior, and with a wall around the data. The measure is the
coefficient of variation (`pullback.statistics.identifiability`). And one model is compared with itself in other
coordinates, :math:`g(z) = (z_1, z_2 + z_1^2 / 2)`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch
from matplotlib.figure import Figure
from torch import Tensor
from torch.distributions import Normal

import pullback as pb
from pullback.experiments import figures
from pullback.experiments.figures import WIDTH, save_figure
from pullback.experiments.poses import Model, Training, trained
from pullback.experiments.progress import say
from pullback.experiments.report import Finding, Report, Table, Verdict
from pullback.experiments.weights import reproducible
from pullback.results import Identifiability


@dataclass(frozen=True)
class Settings:
    """How many models, and how many pairs of poses."""

    seed: int = 0
    training: Training = field(default_factory=Training)
    num_models: int = 5
    num_pairs: int = 40
    # Of the lattice where paths start.
    num_nodes: int = 3600
    max_segments: int = 128


PAPER = Settings()
# Relative error of a distance that is asked of the solver, and variation under a warp beyond which two searches have
# found different paths.
TOLERANCE, HOP = 1e-3, 1e-2
KINDS = {
    "latent": "Euclidean, codes",
    "euclidean": "pull-back Euclidean, mean poses",
    "fisher-rao": "Fisher–Rao",
    "prior": "Fisher–Rao with prior",
    "wall": "Fisher–Rao with wall",
}


def run(out: Path, settings: Settings = PAPER) -> Report:
    """Trains the models and compares distances over them."""
    with reproducible(settings.seed), figures.look():
        models = []
        # No model is in two runs, whose results would then not be independent.
        first = settings.seed * settings.num_models
        for seed in range(first, first + settings.num_models):
            say("identifiability", f"model of seed {seed}")
            models.append(trained(out, settings.training, seed))
        found = {kind: _compare(kind, models, settings) for kind in KINDS}
        warped = {kind: _warped(kind, models[0], settings) for kind in KINDS}
        figure = save_figure(_draw(found), out, "identifiability", caption=models[0].motion.source)
    numbers = {kind: _numbers(found[kind], warped[kind]) for kind in KINDS}
    return Report(
        name="identifiability",
        title="Distances over retrained models",
        source=models[0].motion.source,
        findings=_findings(numbers, settings),
        figures=[figure],
        files=[model.file for model in models],
        numbers={"settings": asdict(settings), "kinds": numbers},
        measures={KINDS[kind]: n["mean"] for kind, n in numbers.items()},
        tables=[_table(numbers)],
    )


def metric(kind: str, decoder: Callable[[Tensor], Any], codes: Tensor) -> pb.Metric:
    """One of the geometries of `KINDS` but the first."""
    if kind == "euclidean":
        return pb.FisherRaoMetric(partial(_mean_pose, decoder))
    if kind == "prior":
        return pb.FisherRaoMetric(pb.WithPrior(decoder))
    if kind == "wall":
        return pb.FisherRaoMetric(pb.Extrapolated(decoder, pb.Support.fit(codes)))
    return pb.FisherRaoMetric(decoder)


def _mean_pose(decoder: Callable[[Tensor], pb.VonMisesFisher], z: Tensor) -> Normal:
    """Known unit noise around the mean directions: its Fisher-Rao metric is the Euclidean one of the means."""
    loc = decoder(z).loc.flatten(-2)
    return Normal(loc, torch.ones_like(loc))


def _compare(kind: str, models: list[Model], settings: Settings) -> Identifiability:
    codes = [model.codes for model in models]
    metrics = None
    if kind != "latent":
        say("identifiability", f"{settings.num_pairs} pairs under {len(models)} models: {KINDS[kind]}")
        metrics = [metric(kind, model.vae.decoder, model.codes) for model in models]
    return _identifiability(metrics, codes, settings)


def _identifiability(metrics: list[pb.Metric] | None, codes: list[Tensor], settings: Settings) -> Identifiability:
    return pb.statistics.identifiability(
        metrics,
        codes,
        num_pairs=settings.num_pairs,
        init=lambda metric, z: pb.Lattice.fit(metric, z, num_nodes=settings.num_nodes),
        solver=pb.GaussNewton(rtol=TOLERANCE, max_segments=settings.max_segments),
        random_state=settings.seed,
    )


def warp(z: Tensor) -> Tensor:
    """Other coordinates of the latent plane."""
    return torch.stack([z[..., 0], z[..., 1] + z[..., 0] ** 2 / 2], -1)


def unwarp(w: Tensor) -> Tensor:
    """The inverse of `warp`."""
    return torch.stack([w[..., 0], w[..., 1] - w[..., 0] ** 2 / 2], -1)


def _warped(kind: str, model: Model, settings: Settings) -> Identifiability:
    """One model, and the same in other coordinates."""
    codes = [model.codes, warp(model.codes)]
    decoders = [model.vae.decoder, lambda w: model.vae.decoder(unwarp(w))]
    metrics = None
    if kind != "latent":
        metrics = [metric(kind, decoder, z) for decoder, z in zip(decoders, codes, strict=True)]
    return _identifiability(metrics, codes, settings)


def _numbers(found: Identifiability, warped: Identifiability) -> dict[str, Any]:
    scaled = found.distances / found.distances.mean(1, keepdim=True)
    return {
        "mean": float(found.variation.mean()),
        "median": float(found.variation.median()),
        "normalized": float((scaled.std(0) / scaled.mean(0)).mean()),
        "warped": float(warped.variation.median()),
        "hops": int((warped.variation > HOP).sum()),
        "pairs": len(warped.variation),
        "converged": int(found.converged.sum()),
        "paths": found.converged.numel(),
    }


def _draw(found: dict[str, Identifiability]) -> Figure:
    figure, ax = plt.subplots(figsize=(WIDTH, 2.5), layout="constrained")
    values = [found[kind].variation.numpy() for kind in KINDS]
    ax.boxplot(values, orientation="horizontal", widths=0.6, showfliers=False, medianprops={"color": "black"})
    for row, some in enumerate(values, start=1):
        shift = torch.linspace(-0.22, 0.22, len(some)).numpy()
        ax.scatter(some, row + shift, s=5, color=f"C{row - 1}", alpha=0.7, linewidths=0)
    ax.set_yticks(range(1, len(KINDS) + 1), list(KINDS.values()))
    ax.set(xlabel="coefficient of variation over retrained models", xlim=(0, None))
    ax.invert_yaxis()
    ax.grid(axis="x", alpha=0.3)
    return figure


def _same(n: dict[str, Any]) -> Verdict:
    """Holds if all but a tenth of the distances are the same, to the tolerance of the solver in the median."""
    if n["warped"] < TOLERANCE and n["hops"] <= n["pairs"] / 10:
        return "holds"
    return "holds weakly" if n["warped"] < HOP else "does not hold"


def _findings(numbers: dict[str, Any], settings: Settings) -> list[Finding]:
    latent, plain = numbers["latent"], numbers["fisher-rao"]
    verdict: Verdict = (
        "holds"
        if plain["mean"] < 0.67 * latent["mean"]
        else "holds weakly"
        if plain["mean"] < latent["mean"]
        else "does not hold"
    )
    return [
        Finding(
            "Pulled-back distances are identifiable: they repeat over retrained models",
            "Sec. 1, 2 and 6",
            "claimed, not measured",
            f"coefficient of variation over {settings.num_models} models {plain['mean']:.2f} (Fisher–Rao; with wall "
            f"{numbers['wall']['mean']:.2f}) against {latent['mean']:.2f} (Euclidean distances of codes), "
            f"{numbers['euclidean']['mean']:.2f} (pull-back Euclidean)",
            verdict,
            "" if verdict == "holds" else "lower, but retrained models differ by more than coordinates",
        ),
        Finding(
            "Distances do not depend on the coordinates of the latent space",
            "Sec. 2",
            "by construction",
            f"variation under a warp of the plane {plain['warped']:.1e} (Fisher–Rao, median), {latent['warped']:.2f} "
            f"(Euclidean); in {plain['hops']} of {plain['pairs']} pairs it is above 1%",
            _same(plain),
            "" if _same(plain) == "holds" else "in some pairs the search ends in another valley in other coordinates",
        ),
    ]


def _table(numbers: dict[str, Any]) -> Table:
    columns = [
        "distance",
        "variation: mean",
        "median",
        "scale divided out",
        "under a warp: median",
        "pairs above 1%",
        "converged",
    ]
    rows = [
        [
            KINDS[kind],
            *(f"{n[key]:.3f}" for key in ("mean", "median", "normalized")),
            f"{n['warped']:.1e}",
            f"{n['hops']} of {n['pairs']}",
            "" if kind == "latent" else f"{n['converged']} of {n['paths']}",
        ]
        for kind, n in numbers.items()
    ]
    return Table("Coefficient of variation of distances between the same poses", columns, rows)
