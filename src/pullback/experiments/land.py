r"""A density that follows the codes: the fifth experiment of Arvanitidis et al. 2022.

The locally adaptive normal distribution (`pullback.statistics.LAND`) is a Gaussian in the distances of the metric. It is fitted to codes of the pose autoencoder, and
judged by the log-likelihood of codes that neither it nor the support of its metric has seen. What it is compared with depends on the base measure:

- *The Riemannian volume*, as in the paper. The rival that differs in nothing but what a distance is has the density
  :math:`\exp(-\tfrac12 (z - \mu)^\top \Gamma (z - \mu))` over its integral with respect to the volume, fitted by maximum likelihood.
- *dz*. There the rival is the ordinary Gaussian, and for mixtures of LANDs the Gaussian mixture with as many components.

All log-likelihoods are reported with respect to dz: a density over the volume is turned into one by the factor :math:`\sqrt{\det M(z)}`. The metric is the
interpolation of a grid of its tensors, which the paper needed to make the fit affordable; one fit is repeated under the exact one.
"""

from __future__ import annotations

import warnings
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from sklearn.exceptions import ConvergenceWarning
from sklearn.mixture import GaussianMixture
from torch import Tensor

import pullback as pb
from pullback._metrics.interpolated import Grid, InterpolatedMetric
from pullback.experiments._land_display import DEVIATIONS, TEXT, draw, findings, table
from pullback.experiments._poses import Model, Training, trained
from pullback.experiments._report import Report, save_figure
from pullback.experiments._weights import reproducible
from pullback.statistics._land import LAND


@dataclass(frozen=True)
class Settings:
    """Sizes, none of which the paper gives."""

    seed: int = 0
    training: Training = field(default_factory=Training)
    num_codes: int = 300  # to fit to
    num_held_out: int = 500
    mixtures: tuple[int, ...] = (2, 3)  # numbers of components, besides one
    num_points: int = 512  # of the normalisation constants while fitting
    tol: float = 1e-2
    max_iter: int = 8
    max_iter_exact: int = (
        1  # under the exact metric, from the mean under the interpolated one; a path takes ten times as long
    )
    num_points_exact: int = 256
    grid: int = 80  # tensors along each axis of the interpolated metric
    num_nodes: int = 5000  # of the lattice where paths start
    quadrature: int = 300  # points along each axis, for the Gaussian's normalisation
    check: int = 50  # points along each axis, for the integrals of the LANDs
    resolution: int = 36  # of the contours


PAPER = Settings()


@dataclass(frozen=True)
class Codes:
    """Codes to fit densities to, all codes that are known, the fitted ones among them, and those held out."""

    fitted: Tensor
    known: Tensor
    held_out: Tensor

    @classmethod
    def split(cls, codes: Tensor, settings: Settings) -> Codes:
        order = torch.randperm(len(codes), generator=torch.Generator().manual_seed(settings.seed))
        held_out, known = codes[order].split([settings.num_held_out, len(codes) - settings.num_held_out])
        return cls(known[: settings.num_codes], known, held_out)


class VolumeGaussian:
    r"""A Gaussian with respect to the Riemannian volume, :math:`\exp(-\tfrac12 |L^\top(z - \mu)|^2) / C`, fitted by maximum likelihood.

    C is summed over a grid that reaches far beyond the codes.
    """

    n_components = 1

    def __init__(self, metric: pb.Metric, codes: Tensor, quadrature: int) -> None:
        self.metric = metric
        grid = Grid.around(codes, resolution=quadrature, margin=0.6)
        self.points = grid.points
        with torch.no_grad():
            volume = torch.cat([metric.log_volume(z) for z in self.points.split(4096)])
        self.log_mass = volume + grid.spacing.log().sum()
        self.mean = codes.mean(0).clone().requires_grad_()
        factor = torch.linalg.cholesky(torch.linalg.inv(codes.T.cov()))
        self.factor = factor.clone(memory_format=torch.contiguous_format).requires_grad_()  # L-BFGS needs it so
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
        return self.mean.detach()[None]

    @torch.no_grad()
    def score_samples(self, z: Tensor) -> Tensor:
        """Log-densities with respect to the Riemannian volume."""
        return self._log_prob(z)


def run(out: Path, settings: Settings = PAPER) -> Report:
    """Fits the densities and draws them into ``out/land.png``."""
    with reproducible(settings.seed):
        model = trained(out, settings.training, settings.seed)
        codes = Codes.split(model.codes, settings)
        exact = pb.FisherRaoMetric(pb.Extrapolated(model.vae.decoder, pb.Support.fit(codes.known)))
        metric = InterpolatedMetric.fit(exact, Grid.around(codes.known, resolution=settings.grid))
        lands, gaussians = _lands(metric, exact, codes, settings), _gaussians(codes, settings)
        same_base = VolumeGaussian(metric, codes.fitted, settings.quadrature)
        scores = {name: _dz(land, codes.held_out) for name, land in lands.items()}
        scores |= {"same base": same_base.score_samples(codes.held_out) + metric.log_volume(codes.held_out)}
        numbers = {
            "settings": asdict(settings),
            "interpolation_error": metric.error.median,
            "volume": float(metric.log_volume(codes.held_out).mean()),
            "held_out": _held_out(scores, gaussians, lands, codes.held_out),
            "same_base": _against(scores["volume"], scores["same base"]),
            "fits": {name: _fit_numbers(land, codes.known, settings) for name, land in lands.items()},
        }
        most = max(settings.mixtures)
        pairs = [(lands["volume"], same_base), (lands["dz 1"], gaussians[1]), (lands[f"dz {most}"], gaussians[most])]
        figure = draw(metric, codes.known, pairs, settings.resolution)
    return _report(model, numbers, save_figure(figure, out, "land", caption=model.motion.source))


def _lands(metric: pb.Metric, exact: pb.Metric, codes: Codes, settings: Settings) -> dict[str, LAND]:
    """The fits by name: over the volume, over dz with one component under either metric, and mixtures."""
    graph = pb.Lattice.fit(metric, codes.known, num_nodes=settings.num_nodes)
    fits = {"volume": _land(metric, codes, settings, 1, graph=graph, base_measure="volume")}
    fits |= {f"dz {num}": _land(metric, codes, settings, num, graph=graph) for num in (1, *settings.mixtures)}
    near = {
        "max_iter": settings.max_iter_exact,
        "num_points": settings.num_points_exact,
        "means_init": fits["dz 1"].means_,
    }
    graph = pb.Lattice.fit(exact, codes.known, num_nodes=settings.num_nodes)
    return fits | {"dz 1 exact": _land(exact, codes, settings, 1, graph=graph, **near)}


def _land(metric: pb.Metric, codes: Codes, settings: Settings, num: int, **options: Any) -> LAND:
    defaults = {
        "base_measure": "lebesgue",
        "tol": settings.tol,
        "max_iter": settings.max_iter,
        "num_points": settings.num_points,
        "random_state": settings.seed,
        "verbose": True,
    }
    with warnings.catch_warnings():  # what did not converge is in the report
        warnings.simplefilter("ignore", ConvergenceWarning)
        return LAND(metric, num, **(defaults | options)).fit(codes.fitted)


def _gaussians(codes: Codes, settings: Settings) -> dict[int, GaussianMixture]:
    """Ordinary Gaussian mixtures by their number of components, each the best of five fits."""
    nums, data = (1, *settings.mixtures), codes.fitted.numpy()
    return {num: GaussianMixture(num, n_init=5, random_state=settings.seed).fit(data) for num in nums}


def _dz(model: Any, z: Tensor) -> Tensor:
    """Log-densities with respect to dz."""
    return torch.as_tensor(model.score_samples(z, lebesgue=True))


def _held_out(
    scores: dict[str, Tensor], gaussians: dict[int, GaussianMixture], lands: dict[str, LAND], held_out: Tensor
) -> dict[str, dict[str, float]]:
    """Mean log-likelihoods with respect to dz, and gains on the Gaussian mixture with as many components."""
    rivals = {num: torch.from_numpy(mixture.score_samples(held_out.numpy())) for num, mixture in gaussians.items()}
    rows = {}
    for name, value in scores.items():
        num = lands[name].n_components if name in lands else 1
        rows[name] = {"components": num, "dz": float(value.mean()), **_against(value, rivals[num])}
    for num, value in rivals.items():
        rows[f"gaussian {num}"] = {"components": num, "dz": float(value.mean()), **_against(value, value)}
    return rows


def _against(value: Tensor, rival: Tensor) -> dict[str, float]:
    """The mean difference of two log-densities of the same codes, and its standard error."""
    return {
        "gain": float((value - rival).mean()),
        "standard_error": float((value - rival).std() / len(value) ** 0.5),
    }


def _fit_numbers(land: LAND, codes: Tensor, settings: Settings) -> dict[str, Any]:
    return {
        "mean": torch.as_tensor(land.means_).tolist(),
        "weights": torch.as_tensor(land.weights_).tolist(),
        "log_normalizer": torch.as_tensor(land.log_normalizers_).tolist(),
        "log_normalizer_se": torch.as_tensor(land.log_normalizer_se_).tolist(),
        "num_steps": int(land.n_iter_),
        "converged": bool(land.converged_),
        "mass": _mass(land, codes, settings) if isinstance(land.metric, InterpolatedMetric) else None,
    }


def _mass(land: LAND, codes: Tensor, settings: Settings) -> float:
    """The integral of the density around the codes by summation over a grid; nothing of it is where there are walls alone."""
    rough = land.base_measure == "volume"  # in the walls, where distances change fast
    grid = Grid.around(codes, resolution=settings.check * 3 // 2 if rough else settings.check, margin=0.15)
    far = torch.cdist(grid.points, codes).amin(1) > 0.15 * (codes.amax(0) - codes.amin(0)).max()
    return float(_dz(land, grid.points[~far]).exp().sum() * grid.spacing.prod())


def _report(model: Model, numbers: dict[str, Any], figure: Path) -> Report:
    return Report(
        name="land",
        title="Locally adaptive normal distributions of poses",
        source=model.motion.source,
        findings=findings(numbers),
        figures=[figure],
        files=[model.file],
        numbers=numbers,
        text=TEXT,
        tables=[table(numbers)],
        deviations=DEVIATIONS,
    )
