r"""What changes with another geometry of distributions: the question that Arvanitidis et al. 2022 leave open.

The paper pulls back the Fisher-Rao metric through the Kullback-Leibler divergence, and names other divergences and the
Wasserstein geometry as untried. Here they are tried on its toy problem, with the same decoders, codes and pairs. First,
what metric a divergence has: all smooth divergences that do not see how observations are written down have that of
Fisher and Rao, up to a factor (Chentsov 1972). Then, where shortest paths run: under Fisher-Rao, under Wasserstein
where the decoder is Gaussian, and under the Euclidean metric of means and standard deviations, which for independent
Gaussian features is the same.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

import pullback as pb
from pullback.experiments import toy
from pullback.experiments.paths import by_latent_length
from pullback.experiments.progress import say
from pullback.experiments.report import Finding, Report, Table
from pullback.experiments.weights import reproducible

# Relative difference of two metric tensors that counts as none.
SAME = 1e-6


@dataclass(frozen=True)
class Settings:
    """The toy problem, with fewer paths."""

    seed: int = 0
    toy: toy.Settings = field(default_factory=lambda: toy.Settings(num_paths=5, num_nodes=10_000, max_segments=1024))
    # At which metric tensors are compared.
    num_codes: int = 50


PAPER = Settings()
DIVERGENCES = {
    "KL, symmetrized": pb.divergences.symmetrized_kl,
    "Rényi, α = 1/2": pb.divergences.renyi(0.5),
    "Rényi, α = 2": pb.divergences.renyi(2.0),
    "Hellinger": pb.divergences.hellinger,
}
METRICS = {"Fisher–Rao": pb.FisherRaoMetric, "Euclidean": pb.EuclideanMetric, "Wasserstein": pb.WassersteinMetric}


def run(out: Path, settings: Settings = PAPER) -> Report:
    """Compares metric tensors and shortest paths; writes no figure."""
    with reproducible(settings.seed):
        tensors = {name: _tensors(name, settings) for name in toy.FAMILIES}
        paths = {name: _paths(name, settings) for name in toy.FAMILIES}
    return Report(
        name="divergences",
        title="Other divergences and the Wasserstein geometry",
        source="Generated codes on a noisy circle; no data.",
        findings=_findings(tensors, paths),
        figures=[],
        files=[],
        numbers={"settings": asdict(settings), "tensors": tensors, "paths": paths},
        measures={"largest difference of a metric": max(max(row.values()) for row in tensors.values())},
        tables=[_tensor_table(tensors), _path_table(paths)],
    )


def _tensors(name: str, settings: Settings) -> dict[str, float]:
    """The largest relative difference of each divergence's metric from Fisher-Rao over some codes."""
    decoder, codes = toy.problem(name, settings.toy, extrapolation=None)
    some = codes[:: max(1, len(codes) // settings.num_codes)]
    exact = pb.FisherRaoMetric(decoder).tensor(some)
    return {
        title: _apart(pb.DivergenceMetric(decoder, divergence=divergence).tensor(some), exact)
        for title, divergence in DIVERGENCES.items()
    }


def _apart(M: Tensor, exact: Tensor) -> float:
    return float(((M - exact).norm(dim=(-2, -1)) / exact.norm(dim=(-2, -1))).max().detach())


def _paths(name: str, settings: Settings) -> dict[str, dict[str, Any]]:
    """How much of the shortest paths leaves the ring under each geometry of the paper's decoder."""
    decoder, codes = toy.problem(name, settings.toy)
    slider: Any = decoder.slider
    metrics = METRICS if name == "normal" else {key: METRICS[key] for key in ("Fisher–Rao", "Euclidean")}
    found = {}
    for title, metric in metrics.items():
        say("divergences", f"{name}: {title}")
        path = toy.ways(metric(decoder), codes, *toy.pairs(codes, settings.toy), settings.toy)
        faded = by_latent_length(path.curve.resample(1025), lambda z: (slider(z) > toy.FADED).double())
        found[title] = {
            "leave": int(path.leaves.sum()),
            "outside": float(faded.mean()),
            "converged": int(path.converged.sum()),
            "paths": len(faded),
        }
    return found


def _findings(tensors: dict[str, Any], paths: dict[str, Any]) -> list[Finding]:
    worst = max(max(row.values()) for row in tensors.values())
    normal = paths["normal"]
    return [
        Finding(
            "Other divergences may give other geometries",
            "Sec. 5",
            "not investigated",
            f"Rényi and Hellinger divergences have the metric of Fisher and Rao, to {worst:.0e} in all five families",
            "holds" if worst > SAME else "does not hold",
            "a divergence that does not depend on how observations are written down has no other metric (Chentsov)",
        ),
        Finding(
            "The Wasserstein geometry may be interesting",
            "Sec. 6",
            "not investigated",
            f"of {normal['Fisher–Rao']['paths']} paths of the Normal decoder {normal['Wasserstein']['leave']} leave "
            f"the ring under "
            f"Wasserstein, {normal['Fisher–Rao']['leave']} under Fisher–Rao; it is the Euclidean geometry of (μ, σ), "
            "which the paper compares with in its first experiment",
            "not in the paper",
            "noise only costs there, so that a wall of noise closes the void; but it is defined for Gaussians, and "
            "for discrete data "
            "it has no metric tensor",
        ),
    ]


def _tensor_table(tensors: dict[str, Any]) -> Table:
    rows = [[title, *(f"{tensors[name][title]:.0e}" for name in toy.FAMILIES)] for title in DIVERGENCES]
    columns = ["divergence", *(family.title for family in toy.FAMILIES.values())]
    return Table("Largest relative difference of a divergence's metric from Fisher–Rao", columns, rows)


def _path_table(paths: dict[str, Any]) -> Table:
    rows = [
        [
            toy.FAMILIES[name].title,
            title,
            f"{n['leave']} of {n['paths']}",
            f"{n['outside']:.0%}",
            f"{n['converged']} of {n['paths']}",
        ]
        for name, found in paths.items()
        for title, n in found.items()
    ]
    columns = ["family", "geometry", "paths that leave", "share of the length in the void", "converged"]
    return Table("Shortest paths of the paper's toy decoders under other geometries", columns, rows)
