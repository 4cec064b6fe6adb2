r"""A density that follows the codes: the fifth experiment of Arvanitidis et al. 2022.

The locally adaptive normal distribution (`pullback.LAND`) is a Gaussian in the distances of the metric, a density with respect to the Riemannian volume. It
is fitted to the codes of the pose autoencoder twice: under the exact pulled-back metric, and under the interpolation of a grid of its tensors, which the paper
needed to make the fit affordable. Each is compared on held-out codes with two Gaussians:

- with the same base measure: :math:`\exp(-\tfrac12 (z - \mu)^\top \Gamma (z - \mu))` over its integral with respect to the Riemannian volume, fitted by
  maximum likelihood. It differs from the LAND in nothing but what a distance is.
- the ordinary one. Its density with respect to dz is turned into one with respect to the volume, :math:`p(z) / \sqrt{\det M(z)}`.
"""

from __future__ import annotations

import warnings
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from sklearn.exceptions import ConvergenceWarning
from torch import Tensor
from torch.distributions import MultivariateNormal

import pullback as pb
from pullback import plot
from pullback._metric.interpolated import Grid, InterpolatedMetric
from pullback._statistics.land import LAND
from pullback.experiments._poses import Model, Training, trained
from pullback.experiments._report import WIDTH, Finding, Report, Table, save_figure
from pullback.experiments._weights import reproducible

TITLES = {
    "interpolated": "LAND,\ninterpolated metric",
    "exact": "LAND,\nexact metric",
    "same_base": "Gaussian,\nsame base measure",
}


@dataclass(frozen=True)
class Settings:
    """Sizes, none of which the paper gives."""

    seed: int = 0
    training: Training = field(default_factory=Training)
    num_codes: int = 150  # to fit to
    num_held_out: int = 200
    num_components: int = 1
    num_points: int = 512  # of the normalisation constants while fitting
    max_iter: int = 6
    grid: int = 80  # tensors along each axis of the interpolated metric
    num_nodes: int = 5000  # of the lattice where paths start
    quadrature: int = 300  # points along each axis, for the Gaussian's normalisation
    resolution: int = 40  # of the contours


PAPER = Settings()


class VolumeGaussian:
    r"""A Gaussian with respect to the Riemannian volume, :math:`\exp(-\tfrac12 |L^\top(z - \mu)|^2) / C`, fitted by maximum likelihood.

    C is summed over a grid that reaches far beyond the codes.
    """

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

    @torch.no_grad()
    def score_samples(self, z: Tensor) -> Tensor:
        """Log-densities with respect to the Riemannian volume."""
        return self._log_prob(z)


def run(out: Path, settings: Settings = PAPER) -> Report:
    """Fits the densities and draws them into ``out/land.png``."""
    with reproducible(settings.seed):
        model = trained(out, settings.training, settings.seed)
        order = torch.randperm(len(model.codes), generator=torch.Generator().manual_seed(settings.seed))
        fitted, held_out = model.codes[order].split([settings.num_codes, len(order) - settings.num_codes])
        held_out = held_out[: settings.num_held_out]
        exact = pb.FisherRaoMetric(pb.Extrapolated(model.vae.decoder, pb.Support.fit(model.codes)))
        table = InterpolatedMetric.fit(exact, Grid.around(model.codes, resolution=settings.grid))
        models = {
            "interpolated": _land(table, fitted, model.codes, settings),
            "exact": _land(exact, fitted, model.codes, settings),
        }
        gaussian = VolumeGaussian(exact, fitted, settings.quadrature)
        numbers = {
            "settings": asdict(settings),
            "interpolation_error": table.error.median,
            "held_out": _scores(models, gaussian, exact, fitted, held_out),
            "fits": {name: _fit_numbers(land) for name, land in models.items()},
        }
        drawn = {TITLES[name]: m for name, m in (models | {"same_base": gaussian}).items()}
        figure = _draw(exact, model.codes, drawn, settings)
    return _report(model, numbers, save_figure(figure, out, "land", caption=model.motion.source))


def _land(metric: pb.Metric, fitted: Tensor, codes: Tensor, settings: Settings) -> LAND:
    graph = pb.Lattice.fit(metric, codes, num_nodes=settings.num_nodes)
    land = LAND(
        metric,
        settings.num_components,
        tol=1e-2,
        max_iter=settings.max_iter,
        num_points=settings.num_points,
        graph=graph,
        random_state=settings.seed,
        verbose=True,
    )
    with warnings.catch_warnings():  # what did not converge is in the report
        warnings.simplefilter("ignore", ConvergenceWarning)
        return land.fit(fitted)


def _scores(
    models: dict[str, LAND], gaussian: VolumeGaussian, exact: pb.Metric, fitted: Tensor, held_out: Tensor
) -> dict[str, dict[str, float]]:
    """Mean log-likelihoods of held-out codes, with respect to the exact Riemannian volume and to dz."""
    volume = exact.log_volume(held_out)
    ordinary = MultivariateNormal(fitted.mean(0), fitted.T.cov())
    lebesgue = {name: torch.as_tensor(land.score_samples(held_out, lebesgue=True)) for name, land in models.items()}
    lebesgue |= {"same_base": gaussian.score_samples(held_out) + volume, "gaussian": ordinary.log_prob(held_out)}
    return {
        name: {
            "volume": float((value - volume).mean()),
            "dz": float(value.mean()),
            "standard_error": float((value - lebesgue["exact"]).std() / len(value) ** 0.5),
        }
        for name, value in lebesgue.items()
    }


def _fit_numbers(land: LAND) -> dict[str, Any]:
    return {
        "mean": torch.as_tensor(land.means_).tolist(),
        "log_normalizer": torch.as_tensor(land.log_normalizers_).tolist(),
        "log_normalizer_se": torch.as_tensor(land.log_normalizer_se_).tolist(),
        "num_steps": int(land.n_iter_),
        "converged": bool(land.converged_),
    }


def _draw(exact: pb.Metric, codes: Tensor, models: dict[str, Any], settings: Settings) -> Figure:
    figure, axes = plt.subplots(2, 2, figsize=(WIDTH, 5.8), sharex=True, sharey=True, layout="compressed")
    *panels, rest = axes.flat
    for ax, (title, density) in zip(panels, models.items(), strict=True):
        drawn = plot.latent(exact, codes, resolution=100, colorbar=False, ax=ax)
        if drawn.codes is not None:
            drawn.codes.set(sizes=[1.5], color="white", alpha=0.5, linewidths=0)
        plot.density(density, codes, resolution=settings.resolution, lebesgue=False, colors="#ff6a3d", ax=ax)
        mean = density.means_ if isinstance(density, LAND) else density.mean.detach()[None]
        ax.scatter(*torch.as_tensor(mean).numpy().T, s=80, marker="*", color="#ff6a3d", edgecolors="black", zorder=4)
        bar = figure.colorbar(drawn.image, ax=ax, location="bottom", pad=0.02, shrink=0.85, extend="both")
        bar.set_label(r"$\frac{1}{2}\log\det M$")
        ax.set_title(title, fontsize="medium")
    handles = [
        Line2D([], [], linestyle="", marker="o", markersize=3, color="white", markeredgecolor="0.4", label="code"),
        Line2D([], [], color="#ff6a3d", label="contours of\nthe density"),
        Line2D([], [], linestyle="", marker="*", markersize=10, color="#ff6a3d", markeredgecolor="black", label="mean"),
    ]
    rest.set_axis_off()
    rest.legend(handles=handles, loc="center", frameon=False)
    return figure


def _findings(numbers: dict[str, Any]) -> list[Finding]:
    scores = numbers["held_out"]
    gain = scores["exact"]["volume"] - scores["same_base"]["volume"]
    ordinary = scores["exact"]["volume"] - scores["gaussian"]["volume"]
    return [
        Finding(
            "The density follows the codes",
            "adapts to the structure of the codes (a figure)",
            f"held-out log-likelihood a code {gain:+.2f} nats against the Gaussian with the same base measure "
            f"(± {scores['same_base']['standard_error']:.2f})",
            "" if gain > 0 else "the Gaussian is better",
        ),
        Finding(
            "Against the ordinary Gaussian",
            "",
            f"{ordinary:+.2f} nats (± {scores['gaussian']['standard_error']:.2f})",
            ""
            if ordinary > 0
            else "the volume of the metric grows where there are no codes, and a density over it has much of its mass there; an ordinary Gaussian does not pay for that",
        ),
        Finding(
            "Interpolated against exact metric",
            "interpolated only; the exact one was too costly",
            f"{scores['interpolated']['dz']:.2f} and {scores['exact']['dz']:.2f} nats with respect to dz; tensors differ by "
            f"{numbers['interpolation_error']:.1%} (median)",
        ),
    ]


def _table(scores: dict[str, dict[str, float]]) -> Table:
    names = {name: title.replace("\n", " ") for name, title in TITLES.items()} | {"gaussian": "Gaussian, ordinary"}
    rows = [
        [names[name], f"{s['volume']:.3f}", f"{s['dz']:.3f}", f"{s['standard_error']:.3f}"]
        for name, s in scores.items()
    ]
    columns = [
        "density",
        "with respect to the volume",
        "with respect to dz",
        "standard error of the difference to LAND",
    ]
    return Table("Mean log-likelihood of held-out codes", columns, rows)


def _report(model: Model, numbers: dict[str, Any], figure: Path) -> Report:
    return Report(
        name="land",
        title="Locally adaptive normal distributions of poses",
        source=model.motion.source,
        findings=_findings(numbers),
        figures=[figure],
        files=[model.file],
        numbers=numbers,
        text=_TEXT,
        tables=[_table(numbers["held_out"])],
        deviations=_DEVIATIONS,
    )


_TEXT = (
    "A locally adaptive normal distribution on the latent space of poses, fitted under the exact metric and under its interpolation from a grid, and judged by the mean log-likelihood of codes that "
    "it has not seen. Contours are those of the density with respect to the Riemannian volume."
)
_DEVIATIONS = [
    "The metric is that of pullback.Extrapolated with its default support, in closed form. Fitted to a sample of the codes; the paper gives neither their number nor the grid.",
    "The paper shows the density and no likelihood.",
]
