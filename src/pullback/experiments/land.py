r"""A density that follows the codes: the fifth experiment of Arvanitidis et al. 2022.

The locally adaptive normal distribution (`pullback.statistics.LAND`) is a Gaussian in the distances of the metric. It
is fitted to codes of the pose autoencoder, and judged by the log-likelihood of codes of the last fifth of the
recording, which neither it nor the autoencoder nor the support of its metric has seen. What it is compared with depends
on the base measure:

- *The Riemannian volume*, as in the paper, under the paper's metric and under that of `pullback.Extrapolated`. The
  rival that differs in nothing but what a distance is has the density :math:`\exp(-\tfrac12 (z - \mu)^\top \Gamma (z -
  \mu))` over its integral with respect to the volume, fitted by maximum likelihood.
- *dz*. There the rival is the ordinary Gaussian, and for mixtures of LANDs the Gaussian mixture with as many
  components.

All log-likelihoods are reported with respect to dz: a density over the volume is turned into one by the factor
:math:`\sqrt{\det M(z)}`. The metric is the interpolation of a grid of its tensors, which the paper needed to make the
fit affordable; one density is computed under the exact one too. Neighboring frames are alike, so that errors are
those of means over blocks of one second.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import BoundaryNorm
from matplotlib.figure import Figure
from sklearn.exceptions import ConvergenceWarning
from sklearn.mixture import GaussianMixture
from torch import Tensor

import pullback as pb
from pullback.experiments import figures
from pullback.experiments.figures import WIDTH, save_figure
from pullback.experiments.poses import Model, Training, trained
from pullback.experiments.progress import say
from pullback.experiments.report import Finding, Report, Table, Verdict
from pullback.experiments.weights import reproducible
from pullback.statistics import LAND

# Shares of the mass that the smallest regions of the figure hold.
MASSES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
# Of the extent of the codes: farther from all of them there are walls alone, and no mass.
FAR = 0.25
# Nats below the highest density that the figure can tell from nothing.
DEEPEST = 20.0
WORDS = {1: "one", 2: "two", 3: "three"}


@dataclass(frozen=True)
class Settings:
    """Sizes, none of which the paper gives."""

    seed: int = 0
    training: Training = field(default_factory=Training)
    # To fit to.
    num_codes: int = 200
    # Of the last fifth of the recording, every so many frames: thirty in a second.
    every_held_out: int = 4
    # Seconds of a block, within which frames count as alike.
    block: float = 1.0
    # Numbers of components, besides one.
    mixtures: tuple[int, ...] = (3,)
    # Of the normalization constants while fitting.
    num_points: int = 256
    tol: float = 1e-2
    max_iter: int = 20
    # Held-out codes whose densities are computed under the exact metric too: a path takes ten times as long.
    num_exact: int = 60
    # Tensors along each axis of the interpolated metric.
    grid: int = 80
    # Of the lattice where paths start.
    num_nodes: int = 5000
    # Points along each axis for the normalization of the Gaussian over the volume.
    quadrature: int = 300
    # Points along each axis where densities are computed for their integrals and for the figure, and to which their
    # logarithms are interpolated there.
    num_computed: int = 50
    resolution: int = 300


PAPER = Settings()


@dataclass(frozen=True, eq=False)
class Codes:
    """Codes to fit densities to, all codes that are known, and those held out with the number of the block of each."""

    fitted: Tensor
    known: Tensor
    held_out: Tensor
    block: Tensor

    @classmethod
    def split(cls, model: Model, settings: Settings) -> Codes:
        """A random sample of the known codes, and the rest of the recording in blocks of time."""
        order = torch.randperm(len(model.codes), generator=torch.Generator().manual_seed(settings.seed))
        frames = torch.arange(0, len(model.held_out), settings.every_held_out)
        seconds = frames * model.training.every / model.motion.fps
        block = (seconds / settings.block).floor().long()
        return cls(model.codes[order[: settings.num_codes]], model.codes, model.held_out[frames], block)


class VolumeGaussian:
    r"""A Gaussian over the Riemannian volume, :math:`\exp(-\tfrac12 |L^\top(z - \mu)|^2) / C`, fitted by maximum
    likelihood.

    C is summed over a grid that reaches far beyond the codes.
    """

    n_components = 1
    base_measure = "volume"

    def __init__(self, metric: pb.Metric, codes: Tensor, quadrature: int) -> None:
        self.metric = metric
        grid = pb.Grid.around(codes, resolution=quadrature, margin=0.6)
        self.points = grid.points
        with torch.no_grad():
            volume = torch.cat([metric.log_volume(z) for z in self.points.split(4096)])
        self.log_mass = volume + grid.spacing.log().sum()
        self.mean = codes.mean(0).clone().requires_grad_()
        factor = torch.linalg.cholesky(torch.linalg.inv(codes.T.cov()))
        # L-BFGS needs it contiguous.
        self.factor = factor.clone(memory_format=torch.contiguous_format).requires_grad_()
        self._fit(codes)

    def _exponent(self, z: Tensor) -> Tensor:
        return -0.5 * ((z - self.mean) @ self.factor).square().sum(-1)

    def _log_prob(self, z: Tensor) -> Tensor:
        return self._exponent(z) - (self._exponent(self.points) + self.log_mass).logsumexp(0)

    def _fit(self, codes: Tensor) -> None:
        optimizer = torch.optim.LBFGS([self.mean, self.factor], max_iter=200, line_search_fn="strong_wolfe")

        def loss() -> Tensor:
            optimizer.zero_grad()
            value = -self._log_prob(codes).mean()
            value.backward()
            return value

        optimizer.step(loss)  # pyright: ignore[reportArgumentType]

    @property
    def means_(self) -> Tensor:
        """The mean, as one component."""
        return self.mean.detach()[None]

    @torch.no_grad()
    def score_samples(self, z: Tensor, *, lebesgue: bool = False) -> Tensor:
        """Log-densities with respect to the Riemannian volume, or to dz."""
        return self._log_prob(z) + (self.metric.log_volume(z) if lebesgue else 0)


def run(out: Path, settings: Settings = PAPER) -> Report:
    """Fits the densities and draws them into ``out/land.png``."""
    with reproducible(settings.seed), figures.look():
        model = trained(out, settings.training, settings.seed)
        codes = Codes.split(model, settings)
        exact = pb.FisherRaoMetric(pb.Extrapolated(model.vae.decoder, pb.Support.fit(codes.known)))
        grid = pb.Grid.around(codes.known, resolution=settings.grid)
        metric = pb.InterpolatedMetric.fit(exact, grid)
        paper = pb.InterpolatedMetric.fit(pb.FisherRaoMetric(model.reweighted), grid)
        lands, gaussians = fits(metric, paper, codes, settings), _gaussians(codes, settings)
        rivals = {
            "volume": VolumeGaussian(metric, codes.fitted, settings.quadrature),
            "paper": VolumeGaussian(paper, codes.fitted, settings.quadrature),
        }
        scores = {name: _scored(name, model, codes) for name, model in lands.items()}
        scores |= {f"gaussian over {name}": _dz(rival, codes.held_out) for name, rival in rivals.items()}
        maps = Maps.of(lands, gaussians, codes, settings)
        numbers = {
            "settings": asdict(settings),
            "interpolation_error": {"volume": metric.error.median, "paper": paper.error.median},
            "exact": _exact(lands["dz 1"], exact, codes, settings),
            "held_out": _held_out(scores, gaussians, lands, codes),
            "same_base": {
                name: _against(scores[name], scores[f"gaussian over {name}"], codes) for name in rivals if name in lands
            },
            "fits": {name: _fit_numbers(land, maps.mass(name)) for name, land in lands.items()},
        }
        figure = save_figure(_draw(maps, lands, gaussians, codes, settings), out, "land", caption=model.motion.source)
    return _report(model, numbers, figure)


def fits(metric: pb.Metric, paper: pb.Metric, codes: Codes, settings: Settings) -> dict[str, LAND]:
    """The LANDs by name: over the volume under either metric, over dz with one component and as mixtures."""
    init = pb.Lattice.fit(metric, codes.known, num_nodes=settings.num_nodes)
    found = {"volume": _land(metric, codes, settings, 1, init=init, base_measure="volume")}
    theirs = pb.Lattice.fit(paper, codes.known, num_nodes=settings.num_nodes)
    try:
        found["paper"] = _land(paper, codes, settings, 1, init=theirs, base_measure="volume")
    except pb.ConvergenceError as error:
        # Where a decoder is constant its metric vanishes, and logarithms there are not defined.
        say("land", f"no fit under the paper's metric: {error}")
    found |= {f"dz {num}": _land(metric, codes, settings, num, init=init) for num in (1, *settings.mixtures)}
    return found


def _exact(land: LAND, metric: pb.Metric, codes: Codes, settings: Settings) -> dict[str, float]:
    """How far log-densities of held-out codes move when paths are those of another metric.

    What moves all alike is left to the normalization constant.
    """
    say("land", f"{settings.num_exact} held-out codes under the exact metric")
    z = codes.held_out[:: max(1, len(codes.held_out) // settings.num_exact)][: settings.num_exact]
    other = LAND(metric, init=pb.Lattice.fit(metric, codes.known, num_nodes=settings.num_nodes))
    for name, value in vars(land).items():
        # what a fit has found ends so
        if name.endswith("_"):
            setattr(other, name, value)
    change = _dz(land, z) - _dz(other, z)
    change = change[change.isfinite()]
    return {"codes": len(change), "change": float((change - change.median()).abs().median())}


def _land(metric: pb.Metric, codes: Codes, settings: Settings, num: int, **options: Any) -> LAND:
    defaults = {
        "base_measure": "lebesgue",
        "gaussian_factor": False,
        "tol": settings.tol,
        "max_iter": settings.max_iter,
        "num_points": settings.num_points,
        "random_state": settings.seed,
    }
    say("land", f"fitting {WORDS.get(num, num)} over {options.get('base_measure', 'dz')}")
    with warnings.catch_warnings():
        # What did not converge is in the report.
        warnings.simplefilter("ignore", ConvergenceWarning)
        return LAND(metric, num, **(defaults | options)).fit(codes.fitted)


def _gaussians(codes: Codes, settings: Settings) -> dict[int, GaussianMixture]:
    """Ordinary Gaussian mixtures by their number of components, each the best of five fits."""
    nums, data = (1, *settings.mixtures), codes.fitted.numpy()
    return {num: GaussianMixture(num, n_init=5, random_state=settings.seed).fit(data) for num in nums}


def _scored(name: str, land: LAND, codes: Codes) -> Tensor:
    say("land", f"scoring {len(codes.held_out)} held-out codes: {NAMES.get(name, f'LAND over {name}')}")
    return _dz(land, codes.held_out)


def _dz(model: Any, z: Tensor) -> Tensor:
    """Log-densities with respect to dz."""
    if isinstance(model, GaussianMixture):
        return torch.from_numpy(model.score_samples(z.numpy()))
    return torch.as_tensor(model.score_samples(z, lebesgue=True))


# How good they are.


def _held_out(
    scores: dict[str, Tensor], gaussians: dict[int, GaussianMixture], lands: dict[str, LAND], codes: Codes
) -> dict[str, dict[str, float]]:
    """Mean log-likelihoods with respect to dz, and gains on the Gaussian mixture with as many components."""
    rivals = {num: _dz(mixture, codes.held_out) for num, mixture in gaussians.items()}
    rows = {}
    for name, value in scores.items():
        num = lands[name].n_components if name in lands else 1
        rows[name] = {"components": num, "dz": float(value.mean()), **_against(value, rivals[num], codes)}
    for num, value in rivals.items():
        rows[f"gaussian {num}"] = {"components": num, "dz": float(value.mean()), **_against(value, value, codes)}
    return rows


def _against(value: Tensor, rival: Tensor, codes: Codes) -> dict[str, float]:
    """The mean difference of two log-densities of the same codes, and its standard error, from means over blocks of
    time.
    """
    return {"gain": float((value - rival).mean()), "standard_error": block_error(value - rival, codes.block)}


def block_error(values: Tensor, block: Tensor) -> float:
    """The standard error of a mean of values that are alike within a block."""
    means = torch.stack([values[block == i].mean() for i in block.unique()])
    return float(means.std() / len(means) ** 0.5)


def _fit_numbers(land: LAND, mass: float) -> dict[str, Any]:
    return {
        "means": torch.as_tensor(land.means_).tolist(),
        "precisions": torch.as_tensor(land.precisions_).tolist(),
        "weights": torch.as_tensor(land.weights_).tolist(),
        "log_normalizer": torch.as_tensor(land.log_normalizers_).tolist(),
        "log_normalizer_se": torch.as_tensor(land.log_normalizer_se_).tolist(),
        "num_steps": int(land.n_iter_),
        "converged": bool(land.converged_),
        "mass": mass,
    }


@dataclass(frozen=True, eq=False)
class Maps:
    """Log-densities with respect to dz at the points of a grid, -inf where no code is near: there are walls alone."""

    grid: pb.Grid
    values: dict[str, Tensor]

    @classmethod
    def of(
        cls, lands: dict[str, LAND], gaussians: dict[int, GaussianMixture], codes: Codes, settings: Settings
    ) -> Maps:
        """Those of the LANDs and of the Gaussian mixtures, by their names."""
        grid = pb.Grid.around(codes.known, resolution=settings.num_computed, margin=FAR)
        far = FAR * (codes.known.amax(0) - codes.known.amin(0)).max()
        near = torch.cdist(grid.points, codes.known).amin(1) <= far
        some = {}
        for name, land in lands.items():
            say("land", f"density at {int(near.sum())} points: {NAMES.get(name, f'LAND over {name}')}")
            some[name] = _dz(land, grid.points[near]).nan_to_num(nan=-torch.inf)
        some |= {f"gaussian {num}": _dz(mixture, grid.points[near]) for num, mixture in gaussians.items()}
        none = torch.full_like(grid.points[:, 0], -torch.inf)
        return cls(grid, {name: none.masked_scatter(near, values) for name, values in some.items()})

    def mass(self, name: str) -> float:
        """The integral of a density, by summation."""
        return float(self.values[name].exp().sum() * self.grid.spacing.prod())


# The figure.


def _draw(
    maps: Maps, lands: dict[str, LAND], gaussians: dict[int, GaussianMixture], codes: Codes, settings: Settings
) -> Figure:
    """Filled densities with respect to dz: the smallest regions that hold given shares of the mass."""
    most = max(settings.mixtures)
    panels = [
        ("LAND over the volume,\nthe paper's metric", "paper"),
        ("LAND over the volume,\nExtrapolated", "volume"),
        ("LAND over $dz$", "dz 1"),
        ("Gaussian", "gaussian 1"),
        (f"{most} LANDs over $dz$", f"dz {most}"),
        (f"{most} Gaussians", f"gaussian {most}"),
    ]
    means = {name: land.means_ for name, land in lands.items()}
    means |= {f"gaussian {num}": mixture.means_ for num, mixture in gaussians.items()}
    figure, axes = plt.subplots(3, 2, figsize=(WIDTH, 7.6), sharex=True, sharey=True, layout="compressed")
    for ax, (title, name) in zip(axes.flat, panels, strict=True):
        if name in means:
            _panel(ax, maps, name, codes, settings)
            ax.scatter(*torch.as_tensor(means[name]).numpy().T, s=22, color="#d7301f", edgecolors="white", zorder=4)
        else:
            ax.text(0.5, 0.5, "no fit", transform=ax.transAxes, ha="center")
        ax.set_title(title)
    shares = [0.0, *MASSES]
    mappable = ScalarMappable(BoundaryNorm(shares, 256), plt.get_cmap("viridis_r"))
    bar = figures.bar(axes, mappable, "share of the mass in the smallest region", extend="neither", shrink=0.8)
    bar.set_ticks(shares[::2])
    figures.legend(figure, [("code", "0.3", "dot"), ("mean", "#d7301f", "dot")])
    return figure


def _panel(ax: Axes, maps: Maps, name: str, codes: Codes, settings: Settings) -> None:
    grid, logp = maps.grid, maps.values[name]
    (left, bottom), (right, top) = grid.low.tolist(), grid.high.tolist()
    logp = logp.clamp_min(logp.max() - DEEPEST).reshape(1, 1, *grid.counts).mT
    size = (settings.resolution, settings.resolution)
    low, high = codes.known.amin(0), codes.known.amax(0)
    room = 0.12 * (high - low)
    ax.imshow(
        _shares(torch.nn.functional.interpolate(logp, size, mode="bilinear", align_corners=True)[0, 0]),
        origin="lower",
        extent=(left, right, bottom, top),
        cmap=plt.get_cmap("viridis_r").with_extremes(over="white"),
        norm=BoundaryNorm([0.0, *MASSES], 256),
        interpolation="nearest",
        aspect="equal",
    )
    figures.dots(ax, codes.known, color="0.25", alpha=0.25)
    (left, bottom), (right, top) = (low - room).tolist(), (high + room).tolist()
    ax.set(xlim=(left, right), ylim=(bottom, top))


def _shares(logp: Tensor) -> np.ndarray:
    """For each point the mass of all points of higher density."""
    flat = logp.flatten()
    order = flat.argsort(descending=True)
    share = torch.empty_like(flat)
    share[order] = flat[order].softmax(0).cumsum(0)
    return share.reshape(logp.shape).numpy()


# The report.


def _report(model: Model, numbers: dict[str, Any], figure: Path) -> Report:
    scores = numbers["held_out"]
    measures = {
        f"gain (nats): {NAMES.get(name, name)}": n["gain"] for name, n in scores.items() if "gaussian" not in name
    }
    measures |= {f"gain on the same base (nats): {NAMES[name]}": n["gain"] for name, n in numbers["same_base"].items()}
    return Report(
        name="land",
        title="Locally adaptive normal distributions of poses",
        source=model.motion.source,
        findings=_findings(numbers),
        figures=[figure],
        files=[model.file],
        numbers=numbers,
        measures=measures,
        tables=[_table(numbers)],
    )


NAMES = {
    "paper": "LAND over the volume, the paper's metric",
    "volume": "LAND over the volume",
    "gaussian over volume": "Gaussian over the volume",
    "gaussian over paper": "Gaussian over the volume, the paper's metric",
}


def _verdict(row: dict[str, float]) -> Verdict:
    """Holds at two standard errors, weakly at one."""
    if row["gain"] > 2 * row["standard_error"]:
        return "holds"
    return "holds weakly" if row["gain"] > row["standard_error"] else "does not hold"


def _gain(row: dict[str, float]) -> str:
    return f"{row['gain']:+.2f} ± {row['standard_error']:.2f}"


def _findings(numbers: dict[str, Any]) -> list[Finding]:
    scores, same = numbers["held_out"], numbers["same_base"]
    one = scores["dz 1"]
    mixtures = [row for name, row in scores.items() if name.startswith("dz") and row["components"] > 1]
    masses = [fit["mass"] for fit in numbers["fits"].values()]
    failed = [NAMES.get(name, f"LAND over {name}") for name, fit in numbers["fits"].items() if not fit["converged"]]
    return [
        _adapts(same["paper"], scores["paper"], "the paper's metric") if "paper" in same else _no_fit(),
        _adapts(same["volume"], scores["volume"], "Extrapolated"),
        Finding(
            "The density follows the codes, over dz",
            "Sec. 4.5, Fig. 7",
            "adapts to the structure of the codes (a figure)",
            f"held-out log-likelihood {_gain(one)} nats per code against the Gaussian; mixtures against as many "
            f"Gaussians: "
            + ", ".join(f"{WORDS.get(row['components'], row['components'])} {_gain(row)}" for row in mixtures),
            _verdict(one),
            ""
            if _verdict(one) == "holds"
            else "no gain beyond two standard errors, which allow for frames of one second being alike",
        ),
        _interpolated(numbers),
        Finding(
            "Densities integrate to 1, and fits converge",
            "App. D.7",
            "not given",
            f"{min(masses):.3f} to {max(masses):.3f}, by quadrature; not converged: "
            f"{', '.join(map(str, failed)) or 'none'}",
            "not in the paper",
        ),
    ]


def _interpolated(numbers: dict[str, Any]) -> Finding:
    exact = numbers["exact"]
    close = exact["change"] < 0.2
    return Finding(
        "The interpolated metric is good enough",
        "App. D.7",
        "interpolated only; the exact one was too costly",
        f"log-densities of {exact['codes']} held-out codes change by {exact['change']:.2f} nats (median, constants "
        f"apart) when their logarithms are exact; tensors differ by "
        f"{numbers['interpolation_error']['volume']:.1%} (median), under the paper's metric by "
        f"{numbers['interpolation_error']['paper']:.0%}",
        "holds" if close else "does not hold",
        "" if close else "the two differ by more than 0.2 nats",
    )


def _no_fit() -> Finding:
    return Finding(
        "The LAND over the Riemannian volume adapts to the codes (the paper's metric)",
        "Sec. 4.5, Fig. 7",
        "well adapts to the structure of the codes (a figure)",
        "could not be fitted",
        "does not hold",
        "where the paper's decoder is constant its metric vanishes, and logarithms through there are not defined",
    )


def _adapts(same: dict[str, float], ordinary: dict[str, float], metric: str) -> Finding:
    worse = ordinary["gain"] < 0
    verdict = _verdict(same)
    return Finding(
        f"The LAND over the Riemannian volume adapts to the codes ({metric})",
        "Sec. 4.5, Fig. 7",
        "well adapts to the structure of the codes (a figure)",
        f"{_gain(same)} nats against the Gaussian over the same volume, {_gain(ordinary)} against the ordinary one",
        "holds weakly" if verdict == "holds" and worse else verdict,
        "an ordinary Gaussian is better: the volume is large where there are no codes, and the density has mass there"
        if worse
        else ""
        if verdict == "holds"
        else "no gain beyond two standard errors",
    )


def _table(numbers: dict[str, Any]) -> Table:
    fits: dict[str, Any] = numbers["fits"]
    rows = [
        [
            NAMES.get(name) or ("Gaussian" if name.startswith("gaussian") else "LAND over dz"),
            str(s["components"]),
            f"{s['dz']:.3f}",
            "" if name.startswith("gaussian ") and name[9:].isdigit() else _gain(s),
            *_how(fits.get(name)),
        ]
        for name, s in numbers["held_out"].items()
    ]
    columns = [
        "density",
        "components",
        "log-likelihood (dz)",
        "gain on as many Gaussians",
        "steps",
        "converged",
        "mass",
    ]
    return Table("Mean log-likelihood of held-out codes", columns, rows)


def _how(fit: dict[str, Any] | None) -> Sequence[str]:
    if fit is None:
        return ("", "", "")
    return (str(fit["num_steps"]), "yes" if fit["converged"] else "no", f"{fit['mass']:.3f}")
